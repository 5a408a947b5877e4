//! Two drivers with one name, each with a sidecar as on a node of its own, and the sidecar that
//! clients call in front of both. Nodes and EndpointSlices are written by the test: no kubelet and no
//! controller runs. The nodes' address is an additional one of the loopback interface, because the API
//! server accepts no 127.0.0.0/8 in an EndpointSlice.

use std::path::Path;
use std::process::Command;

use csi_loopback::backend::PoolKind;
use csi_loopback::kubernetes::cbt_http::{PATH, PageRequest, audience};
use csi_loopback::kubernetes::snapshot::{MANAGED_BY, VolumeSnapshotContent};
use csi_loopback::proto::snapshotmetadata as api;
use http::Request;
use k8s_openapi::api::core::v1::Node as NodeObject;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::rbac::v1::PolicyRule;
use serde_json::json;
use tonic::Status;

use super::Cluster;
use super::access::{Account, rule, sidecar_rules};
use super::cbt_http::{Reply, send};
use super::programs::{Served, free_port};
use super::sidecar::{self, AUDIENCE, Answer, MetadataRequest, client_at, collect, start};
use super::storage::Ready;
use super::tls::{Authority, Certificate};
use crate::driver::{Driver, block};
use crate::{BLOCK, MIB, path, pattern, write_direct};

/// Of TEST-NET-1 (RFC 5737).
const ADDRESS: &str = "192.0.2.45";
/// Name of the Service of the nodes' sidecars.
const SERVICE: &str = "nodes";
const SIZE: u64 = 16 * MIB;

/// The nodes' address, while it exists.
pub struct LocalAddress;

impl LocalAddress {
    fn new() -> Self {
        Self::ip("add");
        Self
    }

    fn ip(action: &str) {
        let place = format!("{ADDRESS}/32");
        let output = Command::new("ip").args(["address", action, &place, "dev", "lo"]).output();
        let errors = String::from_utf8_lossy(&output.unwrap().stderr).into_owned();
        assert!(errors.is_empty() || errors.contains("exists"), "{errors}");
    }
}

impl Drop for LocalAddress {
    fn drop(&mut self) {
        Self::ip("del");
    }
}

/// A node of the cluster.
pub struct Node {
    pub name: String,
    pub certificate: Certificate,
    // Dropped in this order.
    pub sidecar: Served,
    pub driver: Driver,
}

/// What the sidecar that clients call needs more than another.
fn front_rules() -> Vec<PolicyRule> {
    let own = [
        rule("discovery.k8s.io", &["endpointslices"], &["get", "list", "watch"]),
        rule("", &["nodes"], &["get"]),
        rule("", &["serviceaccounts/token"], &["create"]),
        // With --node-signer.
        rule("", &["secrets"], &["create", "update"]),
        rule("certificates.k8s.io", &["podcertificaterequests"], &["get", "list", "watch"]),
        rule("certificates.k8s.io", &["podcertificaterequests/status"], &["patch"]),
        rule("certificates.k8s.io", &["signers"], &["sign"]),
    ];
    sidecar_rules().into_iter().chain(own).collect()
}

/// What the sidecars of all nodes of a driver have in common.
pub struct Nodes<'a> {
    cluster: &'a Cluster,
    namespace: String,
    pub driver_name: String,
    node_account: Account,
    /// Signs the certificates of the nodes.
    pub authority: Authority,
    /// The account of the sidecar that clients call.
    pub front_account: Account,
    pub address: LocalAddress,
}

impl<'a> Nodes<'a> {
    pub fn new(cluster: &'a Cluster, namespace: &str, driver_name: &str) -> Self {
        let address = LocalAddress::new();
        let front_account = cluster.account(namespace, "front");
        cluster.grant(&front_account, &front_rules());
        let node_account = cluster.account(namespace, "node");
        let reviews = rule("authentication.k8s.io", &["tokenreviews"], &["create"]);
        cluster.grant(&node_account, &[reviews]);
        Self {
            cluster,
            namespace: namespace.to_owned(),
            driver_name: driver_name.to_owned(),
            node_account,
            authority: Authority::new("nodes"),
            front_account,
            address,
        }
    }

    /// Creates a Node, and starts and publishes the sidecar of the driver at this socket.
    pub fn join(&self, node: &str, socket: &Path, certificate: &Certificate) -> Served {
        let object = json!({ "metadata": { "name": node } });
        self.cluster.create(&self.cluster.api::<NodeObject>(), object);
        let sidecar = self.serve(node, socket, certificate);
        self.publish(node, sidecar.port);
        sidecar
    }

    /// Starts the sidecar of a node.
    fn serve(&self, node: &str, socket: &Path, certificate: &Certificate) -> Served {
        let front = full_name(&self.front_account);
        let flags = ["--serve-node", node, "--front-account", &front];
        let kubeconfig = self.cluster.kubeconfig_of(&self.node_account);
        start(self.cluster, socket, &kubeconfig, certificate, &flags)
    }

    /// Starts the sidecar for clients, with `flags`. As `signer` it signs the nodes' certificates;
    /// otherwise [`Self::authority`] does.
    pub fn front(&self, certificate: &Certificate, signer: Option<&str>, flags: &[&str]) -> Served {
        let directory = certificate.file.parent().unwrap();
        let ca = directory.join("nodes.crt");
        std::fs::write(&ca, self.authority.pem()).unwrap();
        let service = format!("{}/{SERVICE}", self.namespace);
        let front_name = full_name(&self.front_account);
        let own = [
            "--node-service",
            &service,
            "--driver-name",
            &self.driver_name,
            "--front-account",
            &front_name,
            "--audience",
            AUDIENCE,
            "--namespace",
            &self.namespace,
        ];
        let node_name = full_name(&self.node_account);
        let trust = match signer {
            Some(signer) => vec!["--node-signer", signer, "--node-account", &node_name],
            None => vec!["--node-ca", path(&ca)],
        };
        let flags = [&own[..], &trust, flags].concat();
        let kubeconfig = self.cluster.kubeconfig_of(&self.front_account);
        let nowhere = directory.join("no.sock");
        start(self.cluster, &nowhere, &kubeconfig, certificate, &flags)
    }

    /// Sets the label by which a snapshot's node is known.
    pub fn label(&self, snapshot: &Ready, node: Option<&str>) {
        let labels = json!({ "metadata": { "labels": { MANAGED_BY: node } } });
        let contents = self.cluster.api::<VolumeSnapshotContent>();
        self.cluster.merge(&contents, &snapshot.content, &labels);
    }

    fn publish(&self, node: &str, port: u16) {
        let slice = json!({
            "metadata": { "name": node, "labels": { "kubernetes.io/service-name": SERVICE } },
            "addressType": "IPv4",
            "ports": [{ "name": "node", "port": port, "protocol": "TCP" }],
            "endpoints": [
                { "addresses": [ADDRESS], "nodeName": node, "conditions": { "ready": true } },
            ],
        });
        self.cluster.create(&self.cluster.api_in::<EndpointSlice>(&self.namespace), slice);
    }
}

/// Two nodes, and the sidecar that clients call.
pub struct Rig<'a> {
    pub cluster: &'a Cluster,
    pub namespace: String,
    class: String,
    pub shared: Nodes<'a>,
    authority: Authority,
    pub backup: Account,
    pub front: Served,
    /// The port of its cbt-http.
    pages: u16,
    pub nodes: Vec<Node>,
}

impl<'a> Rig<'a> {
    /// `driver_flags` are for both drivers.
    pub fn new(cluster: &'a Cluster, driver_flags: &[&str]) -> Self {
        Self::with(cluster, driver_flags, None)
    }

    /// The front signs the nodes' certificates, as this signer. At first they have others.
    pub fn signing(cluster: &'a Cluster, signer: &str) -> Self {
        Self::with(cluster, &[], Some(signer))
    }

    fn with(cluster: &'a Cluster, driver_flags: &[&str], signer: Option<&str>) -> Self {
        let driver_name = format!("{}.csi.local", cluster.unique("many"));
        let namespace = cluster.namespace("apps");
        let class = cluster.snapshot_class(&driver_name, &[]);
        let shared = Nodes::new(cluster, &namespace, &driver_name);
        let authority = Authority::new("front");
        let nodes: Vec<_> = ["node-a", "node-b"]
            .map(|name| {
                let name = cluster.unique(name);
                let flags = [&["--driver-name", &driver_name], driver_flags].concat();
                let driver = Driver::with(PoolKind::Reflink, &flags);
                let certificate = certify(&shared.authority, driver.scratch(), &name);
                let sidecar = shared.join(&name, &driver.socket(), &certificate);
                Node { name, certificate, sidecar, driver }
            })
            .into_iter()
            .collect();
        let certificate = authority.certify(nodes[0].driver.scratch(), "front");
        let pages = free_port();
        let port = pages.to_string();
        let front = shared.front(&certificate, signer, &["--cbt-http", "--cbt-http-port", &port]);
        let backup = cluster.account(&namespace, "backup");
        let readable = rule("snapshot.storage.k8s.io", &["volumesnapshots"], &["get"]);
        cluster.grant_in(&namespace, &backup, &[readable]);
        Self { cluster, namespace, class, shared, authority, backup, front, pages, nodes }
    }

    /// A volume on a node, and a snapshot before and after a change of these blocks: `NAME-0` and
    /// `NAME-1`.
    pub fn history(&self, node: usize, name: &str, blocks: &[u64]) -> [Ready; 2] {
        let driver = &self.nodes[node].driver;
        let volume = driver.volume(name, SIZE, block());
        [0, 1].map(|number| {
            if number == 1 {
                driver.with_device(&volume, |device| {
                    for at in blocks {
                        write_direct(device, at * BLOCK, &pattern(at + 1, BLOCK as usize));
                    }
                });
            }
            let name = format!("{name}-{number}");
            let handle = driver.snapshot(&name, &volume);
            let made = self.cluster.snapshot_with_status(
                &self.namespace,
                &name,
                &self.shared.driver_name,
                &self.class,
                &handle,
            );
            self.shared.label(&made, Some(&self.nodes[node].name));
            made
        })
    }

    /// Starts the sidecar of a node again, with its current certificate. Returns its port.
    pub fn restart_sidecar(&mut self, node: usize) -> u16 {
        let node = &mut self.nodes[node];
        node.sidecar.process.stop();
        node.sidecar = self.shared.serve(&node.name, &node.driver.socket(), &node.certificate);
        node.sidecar.port
    }

    /// Publishes the endpoint of a node at another port, or removes it.
    pub fn move_endpoint(&self, node: usize, port: Option<u16>) {
        let name = &self.nodes[node].name;
        let slices = self.cluster.api_in::<EndpointSlice>(&self.namespace);
        if self.cluster.get(&slices, name).is_some() {
            self.cluster.delete(&slices, name);
        }
        if let Some(port) = port {
            self.shared.publish(name, port);
        }
    }

    pub fn allocated(&self, snapshot: &Ready) -> api::GetMetadataAllocatedRequest {
        let token = self.cluster.token(&self.backup, Some(AUDIENCE));
        sidecar::allocated(token, &self.namespace, &snapshot.name)
    }

    pub fn delta(&self, [base, target]: &[Ready; 2]) -> api::GetMetadataDeltaRequest {
        let token = self.cluster.token(&self.backup, Some(AUDIENCE));
        sidecar::delta(token, &self.namespace, &base.handle, &target.name)
    }

    /// Asks the sidecar for clients for a page of changed blocks.
    pub fn page(&self, caller: &Account, request: &PageRequest) -> Reply {
        let driver = &self.shared.driver_name;
        let token = self.cluster.token(caller, Some(&audience(driver)));
        let request = Request::post(format!("https://localhost{PATH}"))
            .header("authorization", format!("Bearer {token}"))
            .body(serde_json::to_vec(request).unwrap().into())
            .unwrap();
        let authority = self.authority.pem();
        let reply = send(self.pages, &authority, "localhost", request);
        self.cluster.block_on(reply).unwrap()
    }

    /// Calls the sidecar for clients and reads the whole stream.
    pub fn ask(&self, request: impl Into<MetadataRequest>) -> Result<Answer, Status> {
        let client = client_at(self.cluster, &self.front, &self.authority.pem());
        self.cluster.block_on(collect(client, request.into()))
    }
}

fn full_name(account: &Account) -> String {
    format!("{}/{}", account.namespace, account.name)
}

/// A certificate for the node's name.
pub fn certify(authority: &Authority, directory: &Path, name: &str) -> Certificate {
    let now = std::time::SystemTime::now();
    let hour = std::time::Duration::from_secs(3600);
    authority.certify_span(directory, name, name, now - hour..now + hour)
}
