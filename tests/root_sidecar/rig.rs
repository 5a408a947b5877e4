//! A driver, csi-snapshotter, our sidecar and a backup application's account, all for one test, around the API
//! server that the tests share. Each rig has a driver with a name of its own.

use std::net::TcpStream;
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use csi_loopback::backend::PoolKind;
use csi_loopback::proto::snapshotmetadata as api;
use hyper_util::rt::TokioIo;
use k8s_openapi::api::rbac::v1::PolicyRule;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, ServerName};
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Status};

use crate::cluster::Cluster;
use crate::cluster::access::{Account, sidecar_rules};
use crate::cluster::programs::{Process, Served, free_port};
use crate::cluster::rig;
use crate::cluster::tls::{Authority, Certificate};
use crate::support::driver::PATIENCE;
use crate::support::path;
use api::snapshot_metadata_client::SnapshotMetadataClient;

pub const AUDIENCE: &str = "backup";
pub const CAPACITY: u64 = rig::SIZE;

/// Offset and size in bytes.
pub type Extents = Vec<(u64, u64)>;

pub struct Rig<'a> {
    pub authority: Authority,
    pub certificate: Certificate,
    /// The sidecar's account.
    pub own: Account,
    pub backup: Account,
    // Dropped in this order.
    pub sidecar: Served,
    base: rig::Rig<'a>,
}

/// A rig with a sidecar is a rig.
impl<'a> Deref for Rig<'a> {
    type Target = rig::Rig<'a>;

    fn deref(&self) -> &Self::Target {
        &self.base
    }
}

impl DerefMut for Rig<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.base
    }
}

/// What a rig can have otherwise.
pub struct Options<'o> {
    pub pool: PoolKind,
    pub driver: &'o [&'o str],
    pub sidecar: &'o [&'o str],
    pub rules: Vec<PolicyRule>,
    /// Whether there is a SnapshotMetadataService.
    pub service: bool,
    /// Where the sidecar finds the API server, if not at its own place.
    pub server: Option<String>,
}

impl Default for Options<'_> {
    fn default() -> Self {
        Self {
            pool: PoolKind::Image,
            driver: &[],
            sidecar: &[],
            rules: sidecar_rules(),
            service: true,
            server: None,
        }
    }
}

impl<'a> Rig<'a> {
    pub fn new(cluster: &'a Cluster) -> Self {
        Self::with(cluster, Options::default())
    }

    pub fn with(cluster: &'a Cluster, options: Options<'_>) -> Self {
        let base = rig::Rig::with(cluster, options.pool, options.driver);
        let authority = Authority::new("backup authority");
        let certificate = authority.certify(base.driver.scratch(), "sidecar");
        let own = cluster.account(&base.namespace, "sidecar");
        cluster.grant(&own, &options.rules);
        let server = options.server.clone().unwrap_or_else(|| cluster.server());
        let kubeconfig = cluster.kubeconfig_at(&server, &own);
        let sidecar =
            start(cluster, &base.driver.socket(), &kubeconfig, &certificate, options.sidecar);
        if options.service {
            cluster.metadata_service(
                &base.driver_name,
                &sidecar.address(),
                AUDIENCE,
                &authority.pem(),
            );
        }
        let backup = cluster.account(&base.namespace, "backup");
        let readable =
            crate::cluster::access::rule("snapshot.storage.k8s.io", &["volumesnapshots"], &["get"]);
        cluster.grant_in(&base.namespace, &backup, &[readable]);
        Self { authority, certificate, own, backup, sidecar, base }
    }

    /// A second one beside the first.
    pub fn another_sidecar(&self, flags: &[&str]) -> Served {
        let kubeconfig = self.cluster.kubeconfig_of(&self.own);
        start(self.cluster, &self.driver.socket(), &kubeconfig, &self.certificate, flags)
    }

    /// Ends the sidecar and starts it with other flags, at another port.
    pub fn restart_sidecar(&mut self, flags: &[&str]) {
        self.sidecar.process.stop();
        self.sidecar = self.another_sidecar(flags);
    }

    /// A token of the backup application, for the sidecar.
    pub fn token(&self) -> String {
        self.cluster.token(&self.backup, Some(AUDIENCE))
    }

    pub fn allocated(&self, name: &str) -> api::GetMetadataAllocatedRequest {
        api::GetMetadataAllocatedRequest {
            security_token: self.token(),
            namespace: self.namespace.clone(),
            snapshot_name: name.to_owned(),
            ..Default::default()
        }
    }

    pub fn delta(&self, base: &str, target: &str) -> api::GetMetadataDeltaRequest {
        api::GetMetadataDeltaRequest {
            security_token: self.token(),
            namespace: self.namespace.clone(),
            base_snapshot_id: base.to_owned(),
            target_snapshot_name: target.to_owned(),
            ..Default::default()
        }
    }

    pub fn client(&self) -> SnapshotMetadataClient<Channel> {
        client_at(self.cluster, &self.sidecar, &self.authority.pem())
    }

    pub fn ask(&self, asked: impl Into<Asked>) -> Result<Answer, Status> {
        let client = self.client();
        self.cluster.block_on(collect(client, asked.into()))
    }

    /// The extents of an answer that has to come.
    #[track_caller]
    pub fn extents(&self, asked: impl Into<Asked>) -> Extents {
        match self.ask(asked) {
            Ok(answer) => answer.extents(),
            Err(status) => panic!("{status:?}\n{}", self.sidecar.process.log()),
        }
    }

    /// Asks for what has to be refused, with this code and with `words` in the message.
    #[track_caller]
    pub fn refused(&self, asked: impl Into<Asked>, code: Code, words: &str) {
        crate::support::driver::assert_refused(self.ask(asked), code, words, "the sidecar");
    }

    /// What the HTTP endpoint says: status line and all.
    pub fn http(&self, page: &str) -> String {
        http(&self.sidecar, page)
    }

    /// The value of a metric's line that begins so.
    pub fn metric(&self, line: &str) -> f64 {
        let page = self.http("/metrics");
        let found = page.lines().find_map(|one| one.strip_prefix(line));
        found.and_then(|value| value.trim().parse().ok()).unwrap_or_default()
    }
}

fn start(
    cluster: &Cluster,
    socket: &Path,
    kubeconfig: &Path,
    certificate: &Certificate,
    flags: &[&str],
) -> Served {
    let mut served = spawn(cluster, socket, kubeconfig, certificate, flags);
    let http_port = served.http_port;
    served.process.wait_for("the sidecar is ready", |_| {
        http_at(http_port, "/health").filter(|answer| answer.starts_with("HTTP/1.1 200"))
    });
    served
}

/// Starts a sidecar and does not wait for it.
pub fn spawn(
    cluster: &Cluster,
    socket: &Path,
    kubeconfig: &Path,
    certificate: &Certificate,
    flags: &[&str],
) -> Served {
    let (port, http_port) = (free_port(), free_port());
    let mut command = Command::new(env!("CARGO_BIN_EXE_csi-loopback"));
    command
        .args(["--mode", "sidecar", "--csi-address", path(socket)])
        .args(["--kubeconfig", path(kubeconfig)])
        .args(["--port", &port.to_string()])
        .args(["--http-endpoint", &format!("127.0.0.1:{http_port}")]);
    if !flags.contains(&"--self-signed") {
        command.args(["--tls-cert", path(&certificate.file), "--tls-key", path(&certificate.key)]);
    }
    if !flags.contains(&"--kube-api-qps") {
        command.args(["--kube-api-qps", "-1"]);
    }
    command.args(flags);
    let process = Process::spawn(&cluster.unique("sidecar"), command, cluster.scratch());
    Served { process, port, http_port }
}

pub fn http(sidecar: &Served, page: &str) -> String {
    http_at(sidecar.http_port, page).expect("the HTTP endpoint answers")
}

fn http_at(port: u16, page: &str) -> Option<String> {
    use std::io::{Read, Write};
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    write!(stream, "GET {page} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    Some(answer)
}

/// A client that trusts this authority alone.
pub fn client_at(
    cluster: &Cluster,
    sidecar: &Served,
    authority: &str,
) -> SnapshotMetadataClient<Channel> {
    let channel = cluster.block_on(async { channel(sidecar.port, authority) });
    SnapshotMetadataClient::new(channel)
}

/// To `localhost`, over TLS.
pub fn channel(port: u16, authority: &str) -> Channel {
    let mut roots = rustls::RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(authority.as_bytes()) {
        roots.add(certificate.unwrap()).unwrap();
    }
    let ring = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ClientConfig::builder_with_provider(ring)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let connector = TlsConnector::from(Arc::new(config));
    Endpoint::from_static("http://localhost")
        .initial_stream_window_size(65_535)
        .connect_with_connector_lazy(tower::service_fn(move |_: Uri| {
            let connector = connector.clone();
            async move {
                let stream = tokio::net::TcpStream::connect(("localhost", port)).await?;
                let name = ServerName::try_from("localhost").map_err(std::io::Error::other)?;
                Ok::<_, std::io::Error>(TokioIo::new(connector.connect(name, stream).await?))
            }
        }))
}

/// A request of either kind.
#[derive(Debug, Clone)]
pub enum Asked {
    Allocated(api::GetMetadataAllocatedRequest),
    Delta(api::GetMetadataDeltaRequest),
}

impl From<api::GetMetadataAllocatedRequest> for Asked {
    fn from(request: api::GetMetadataAllocatedRequest) -> Self {
        Self::Allocated(request)
    }
}

impl From<api::GetMetadataDeltaRequest> for Asked {
    fn from(request: api::GetMetadataDeltaRequest) -> Self {
        Self::Delta(request)
    }
}

/// An answer that came to its end.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Answer {
    pub messages: Vec<Message>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    pub kind: i32,
    pub capacity: i64,
    pub extents: Extents,
}

impl Answer {
    pub fn extents(&self) -> Extents {
        self.messages.iter().flat_map(|message| message.extents.clone()).collect()
    }
}

pub async fn collect(
    mut client: SnapshotMetadataClient<Channel>,
    asked: Asked,
) -> Result<Answer, Status> {
    let extent = |block: &api::BlockMetadata| (block.byte_offset as u64, block.size_bytes as u64);
    let mut answer = Answer::default();
    let all = async {
        match asked {
            Asked::Allocated(request) => {
                let mut stream = client.get_metadata_allocated(request).await?.into_inner();
                while let Some(message) = stream.message().await? {
                    answer.messages.push(Message {
                        kind: message.block_metadata_type,
                        capacity: message.volume_capacity_bytes,
                        extents: message.block_metadata.iter().map(extent).collect(),
                    });
                }
            }
            Asked::Delta(request) => {
                let mut stream = client.get_metadata_delta(request).await?.into_inner();
                while let Some(message) = stream.message().await? {
                    answer.messages.push(Message {
                        kind: message.block_metadata_type,
                        capacity: message.volume_capacity_bytes,
                        extents: message.block_metadata.iter().map(extent).collect(),
                    });
                }
            }
        }
        Ok::<_, Status>(())
    };
    tokio::time::timeout(PATIENCE, all)
        .await
        .map_err(|_| Status::unknown("the test ran out of patience"))??;
    Ok(answer)
}
