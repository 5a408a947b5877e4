//! The aggregated API server of this project as a process, its Service and APIService, and requests
//! directly to it, without the API server.

use crate::driver::binary;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::rbac::v1::PolicyRule;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::Cluster;
use super::access::{Account, rule};
use super::programs::{Process, Served, free_port};
use super::sidecar::roots;
use crate::driver::PATIENCE;
use crate::{owned, path};

/// The APIService, which exists once per cluster.
pub const API_SERVICE: &str = "v1alpha1.cbt.storage.k8s.io";
/// The path to create its objects in a namespace.
pub fn path_in(namespace: &str) -> String {
    format!("/apis/cbt.storage.k8s.io/v1alpha1/namespaces/{namespace}/volumesnapshotdeltas")
}

/// The rights that the server needs, in its namespace and in the cluster.
pub fn aggregated_rules() -> Vec<PolicyRule> {
    let ours = "cbt.storage.k8s.io";
    vec![
        rule("", &["configmaps"], &["get", "list", "watch"]),
        rule("", &["secrets"], &["get", "create", "update"]),
        rule("", &["serviceaccounts/token"], &["create"]),
        rule("coordination.k8s.io", &["leases"], &["get", "create", "update"]),
        rule("apiregistration.k8s.io", &["apiservices"], &["get", "list", "watch", "patch"]),
        rule("authorization.k8s.io", &["subjectaccessreviews"], &["create"]),
        rule(
            "snapshot.storage.k8s.io",
            &["volumesnapshots", "volumesnapshotcontents"],
            &["get", "list", "watch"],
        ),
        rule(ours, &["driverdiscoveries"], &["get", "list", "watch"]),
        rule(ours, &["driverdiscoveries/status"], &["patch"]),
        rule(ours, &["driverdiscoveries/deltas"], &["create"]),
    ]
}

/// A server with its objects. Dropping it deletes the APIService.
pub struct Aggregated<'a> {
    pub cluster: &'a Cluster,
    pub served: Served,
    /// The server's namespace.
    pub namespace: String,
    pub account: Account,
    kubeconfig: PathBuf,
    program: Vec<String>,
    flags: Vec<String>,
    /// Name of kubectl's cache directory.
    cache: String,
}

impl<'a> Aggregated<'a> {
    /// Starts a server and waits until its APIService is available.
    pub fn start(cluster: &'a Cluster, flags: &[&str]) -> Self {
        Self::start_at(cluster, &cluster.server(), flags)
    }

    /// Starts a server that connects to the API server at another address:
    /// `https://127.0.0.1:PORT`.
    pub fn start_at(cluster: &'a Cluster, server: &str, flags: &[&str]) -> Self {
        Self::start_by(cluster, &[binary()], server, flags)
    }

    /// Starts a server in a mount namespace with additional lines in /etc/hosts, which replace the
    /// cluster's DNS.
    pub fn start_with_hosts(cluster: &'a Cluster, lines: &str, flags: &[&str]) -> Self {
        let hosts = fs::read_to_string("/etc/hosts").unwrap() + lines;
        let hosts = cluster.write("hosts", &hosts);
        let script = format!("mount --bind {} /etc/hosts && exec \"$@\"", path(&hosts));
        let program = ["unshare", "--mount", "sh", "-c", &script, "sh", binary()];
        Self::start_by(cluster, &program, &cluster.server(), flags)
    }

    fn start_by(cluster: &'a Cluster, program: &[&str], server: &str, flags: &[&str]) -> Self {
        let namespace = cluster.namespace("aggregated");
        let account = cluster.account(&namespace, "aggregated");
        cluster.grant(&account, &aggregated_rules());
        let kubeconfig = cluster.kubeconfig_at(server, &account);
        let (program, flags) = (owned(program), owned(flags));
        let ports = (free_port(), free_port());
        let served = spawn(cluster, &account, &kubeconfig, (&program, &flags), ports);
        let cache = cluster.unique("kubectl-cache");
        let all = Self { cluster, served, namespace, account, kubeconfig, program, flags, cache };
        let service = json!({
            "metadata": { "name": "aggregated" },
            "spec": { "type": "ExternalName", "externalName": "localhost" },
        });
        cluster.create(&cluster.api_in::<Service>(&all.namespace), service);
        all.register();
        all.wait_until_available();
        all
    }

    /// Makes the APIService.
    pub fn register(&self) {
        let service =
            json!({ "name": "aggregated", "namespace": self.namespace, "port": self.served.port });
        self.cluster.create(
            &self.cluster.api::<APIService>(),
            json!({
                "metadata": { "name": API_SERVICE },
                "spec": {
                    "group": "cbt.storage.k8s.io", "version": "v1alpha1",
                    "groupPriorityMinimum": 1000, "versionPriority": 15, "service": service,
                },
            }),
        );
    }

    /// Takes the APIService away.
    pub fn unregister(&self) {
        let services = self.cluster.api::<APIService>();
        if self.cluster.get(&services, API_SERVICE).is_some() {
            self.cluster.delete(&services, API_SERVICE);
            self.cluster.wait_until_gone(&services, API_SERVICE);
        }
    }

    /// Starts a second replica.
    pub fn another(&self) -> Served {
        self.spawn_at((free_port(), free_port()))
    }

    fn spawn_at(&self, ports: (u16, u16)) -> Served {
        let Self { cluster, account, kubeconfig, program, flags, .. } = self;
        spawn(cluster, account, kubeconfig, (program, flags), ports)
    }

    /// Has the API server find it at this port.
    pub fn found_at(&self, port: u16) {
        let spec = json!({ "spec": { "service": { "port": port } } });
        self.cluster.merge(&self.cluster.api::<APIService>(), API_SERVICE, &spec);
        self.wait_until_available();
    }

    /// Starts another process on the same ports.
    pub fn start_again(&mut self) {
        self.served = self.spawn_at((self.served.port, self.served.http_port));
    }

    pub fn wait_until_available(&self) {
        self.wait_for_available("True");
        // The API server updates discovery a moment later.
        self.cluster.wait_for("discovery", || {
            let found = self.kubectl(&["get", "--raw", "/apis/cbt.storage.k8s.io/v1alpha1"]);
            found.status.success().then_some(())
        });
    }

    /// Waits until the condition Available has this status.
    pub fn wait_for_available(&self, status: &str) {
        self.cluster.wait_for(&format!("condition Available={status}"), || {
            let found = self.api_service()?.status?.conditions?.into_iter();
            let mut conditions = found.filter(|condition| condition.type_ == "Available");
            conditions.next().filter(|condition| condition.status == status).map(drop)
        });
    }

    pub fn api_service(&self) -> Option<APIService> {
        self.cluster.get(&self.cluster.api::<APIService>(), API_SERVICE)
    }

    pub fn ca_bundle(&self) -> Option<String> {
        let bundle = self.api_service()?.spec?.ca_bundle?;
        Some(String::from_utf8(bundle.0).unwrap())
    }

    /// Runs kubectl as administrator.
    pub fn kubectl(&self, arguments: &[&str]) -> Output {
        self.cluster.kubectl_with_cache(&self.cache, arguments)
    }

    /// The error of a kubectl command that must fail.
    #[track_caller]
    pub fn kubectl_rejected(&self, arguments: &[&str]) -> String {
        let output = self.kubectl(arguments);
        assert!(!output.status.success(), "{arguments:?} succeeded");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    /// Writes a file with a VolumeSnapshotDelta of this spec.
    pub fn delta(&self, spec: &serde_json::Value) -> PathBuf {
        let object = json!({
            "apiVersion": "cbt.storage.k8s.io/v1alpha1", "kind": "VolumeSnapshotDelta",
            "metadata": { "name": "delta" }, "spec": spec,
        });
        self.cluster.write("delta.json", &object.to_string())
    }

    /// A direct connection to the server, HTTP/1.1 over TLS, with this client certificate.
    pub async fn connect(&self, certificate: Option<&ClientCertificate>) -> TlsStream<TcpStream> {
        let pem = self.current_bundle().await;
        let config = rustls::ClientConfig::builder().with_root_certificates(roots(&pem));
        let mut config = match certificate {
            Some(ClientCertificate { chain, key }) => {
                config.with_client_auth_cert(chain.clone(), key.clone_key()).unwrap()
            }
            None => config.with_no_client_auth(),
        };
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let stream = TcpStream::connect(("localhost", self.served.port)).await.unwrap();
        let name = ServerName::try_from(format!("aggregated.{}.svc", self.namespace)).unwrap();
        TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap()
    }

    async fn current_bundle(&self) -> String {
        let found = self.cluster.api::<APIService>().get(API_SERVICE).await.unwrap();
        String::from_utf8(found.spec.unwrap().ca_bundle.unwrap().0).unwrap()
    }

    /// Sends these bytes directly to the server and returns the response.
    pub fn send_directly(&self, certificate: Option<&ClientCertificate>, sent: &str) -> String {
        self.cluster.block_on(async {
            let mut stream = self.connect(certificate).await;
            // The server can reject the request before it is complete.
            let _ = stream.write_all(sent.as_bytes()).await;
            let mut response = Vec::new();
            timeout(PATIENCE, stream.read_to_end(&mut response)).await.expect("an end").ok();
            String::from_utf8_lossy(&response).into_owned()
        })
    }

    /// The status code of a GET directly to the server.
    pub fn status(
        &self,
        certificate: Option<&ClientCertificate>,
        path: &str,
        headers: &str,
    ) -> u16 {
        let response = self.send_directly(certificate, &get(path, headers));
        let code = response.split(' ').nth(1).and_then(|code| code.parse().ok());
        code.unwrap_or_else(|| panic!("{path}: {response:?}"))
    }

    /// The front proxy's certificate.
    pub fn front_proxy(&self) -> ClientCertificate {
        let pki = self.cluster.directory().join("pki");
        ClientCertificate::read(&pki.join("front-proxy.crt"), &pki.join("front-proxy.key"))
    }

    /// Another certificate of the front proxy's authority.
    pub fn issued_by_front_proxy_ca(
        &self,
        name: &str,
        use_: ExtendedKeyUsagePurpose,
    ) -> ClientCertificate {
        let pki = self.cluster.directory().join("pki");
        let pem = fs::read_to_string(pki.join("front-proxy-ca.crt")).unwrap();
        let key = fs::read_to_string(pki.join("front-proxy-ca.key")).unwrap();
        let key = KeyPair::from_pem(&key).unwrap();
        ClientCertificate::issue(&Issuer::from_ca_cert_pem(&pem, key).unwrap(), name, use_)
    }
}

impl Drop for Aggregated<'_> {
    fn drop(&mut self) {
        self.unregister();
    }
}

/// A GET request that closes the connection.
pub fn get(path: &str, headers: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n")
}

/// A client's certificate and its key.
pub struct ClientCertificate {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

impl ClientCertificate {
    fn read(file: &Path, key: &Path) -> Self {
        let chain = CertificateDer::pem_file_iter(file).unwrap().map(Result::unwrap).collect();
        Self { chain, key: PrivateKeyDer::from_pem_file(key).unwrap() }
    }

    /// Issues a certificate with this name and extended key usage.
    pub fn issue(issuer: &Issuer<'_, KeyPair>, name: &str, use_: ExtendedKeyUsagePurpose) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = vec![use_];
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, issuer).unwrap();
        let key = PrivateKeyDer::from_pem_slice(key.serialize_pem().as_bytes()).unwrap();
        Self { chain: vec![certificate.der().clone()], key }
    }
}

fn spawn(
    cluster: &Cluster,
    account: &Account,
    kubeconfig: &Path,
    (program, flags): (&[String], &[String]),
    (port, http_port): (u16, u16),
) -> Served {
    let namespace = &account.namespace;
    let mut command = Command::new(&program[0]);
    command
        .args(&program[1..])
        .args(["--mode", "aggregated-api", "--kubeconfig", path(kubeconfig)])
        .args(["--namespace", namespace, "--service-account", &account.name])
        .args(["--port", &port.to_string()])
        .args(["--http-endpoint", &format!("127.0.0.1:{http_port}")])
        .args(["--self-signed", "--service-address"])
        .arg(format!("aggregated.{namespace}.svc:{port}"))
        .args(["--kube-api-qps", "1000", "--kube-api-burst", "1000"])
        .args(flags);
    let process = Process::spawn(&cluster.unique("aggregated-api"), command, cluster.scratch());
    Served { process, port, http_port }
}
