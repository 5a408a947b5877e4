//! The sidecar of this project as a process, and a TLS client for this and the released sidecar.

use crate::driver::binary;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use csi_loopback::proto::snapshotmetadata as api;
use hyper_util::rt::TokioIo;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, ServerName};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::Status;
use tonic::transport::{Channel, Endpoint, Uri};

use super::Cluster;
use super::programs::{Process, Served, free_port};
use super::tls::Certificate;
use crate::driver::PATIENCE;
use crate::path;
use api::snapshot_metadata_client::SnapshotMetadataClient;

/// The audience of the clients' tokens.
pub const AUDIENCE: &str = "backup";

/// Offset and size in bytes.
pub type Extents = Vec<(u64, u64)>;

/// Starts a sidecar and waits until it is ready.
pub fn start(
    cluster: &Cluster,
    socket: &Path,
    kubeconfig: &Path,
    certificate: &Certificate,
    flags: &[&str],
) -> Served {
    start_at(free_port(), cluster, socket, kubeconfig, certificate, flags)
}

/// Starts a sidecar on this port and waits until it is ready.
pub fn start_at(
    port: u16,
    cluster: &Cluster,
    socket: &Path,
    kubeconfig: &Path,
    certificate: &Certificate,
    flags: &[&str],
) -> Served {
    let ports = (port, free_port());
    let mut served = spawn_at(ports, cluster, socket, kubeconfig, certificate, flags);
    let http_port = served.http_port;
    served.process.wait_for("the sidecar is ready", |_| {
        http_at(http_port, "/health").filter(|response| response.starts_with("HTTP/1.1 200"))
    });
    served
}

/// Starts a sidecar without waiting.
pub fn spawn(
    cluster: &Cluster,
    socket: &Path,
    kubeconfig: &Path,
    certificate: &Certificate,
    flags: &[&str],
) -> Served {
    let ports = (free_port(), free_port());
    spawn_at(ports, cluster, socket, kubeconfig, certificate, flags)
}

/// Starts a sidecar without waiting, on these ports of the service and of health and metrics.
pub fn spawn_at(
    (port, http_port): (u16, u16),
    cluster: &Cluster,
    socket: &Path,
    kubeconfig: &Path,
    certificate: &Certificate,
    flags: &[&str],
) -> Served {
    let mut command = Command::new(binary());
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
    http_at(sidecar.http_port, page).expect("a response of the HTTP endpoint")
}

/// The response to GET at this port of 127.0.0.1, with status line and headers.
pub fn http_at(port: u16, page: &str) -> Option<String> {
    crate::http::response(([127, 0, 0, 1], port).into(), page).ok()
}

/// A client that trusts only this authority.
pub fn client_at(
    cluster: &Cluster,
    sidecar: &Served,
    authority: &str,
) -> SnapshotMetadataClient<Channel> {
    let channel = cluster.block_on(async { channel(sidecar.port, authority) });
    SnapshotMetadataClient::new(channel)
}

/// A channel to `localhost` over TLS, with the default window of HTTP/2.
pub fn channel(port: u16, authority: &str) -> Channel {
    let endpoint = Endpoint::from_static("http://localhost").initial_stream_window_size(65_535);
    channel_with(endpoint, port, authority)
}

/// A channel to `localhost` over TLS.
pub fn channel_with(endpoint: Endpoint, port: u16, authority: &str) -> Channel {
    channel_to(endpoint, "localhost", port, authority)
}

/// A channel over TLS to a port of this machine whose server has a certificate for `host`.
pub fn channel_to(endpoint: Endpoint, host: &str, port: u16, authority: &str) -> Channel {
    let trusting = connector(authority);
    let host = ServerName::try_from(host.to_owned()).unwrap();
    endpoint.connect_with_connector_lazy(tower::service_fn(move |_: Uri| {
        let (trusting, host) = (trusting.clone(), host.clone());
        async move { connect_as(&trusting, host, port).await.map(TokioIo::new) }
    }))
}

/// The certificates of an authority (PEM).
pub fn roots(authority: &str) -> rustls::RootCertStore {
    let mut roots = rustls::RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(authority.as_bytes()) {
        roots.add(certificate.unwrap()).unwrap();
    }
    roots
}

/// A connector for HTTP/2 over TLS that trusts only this authority.
pub fn connector(authority: &str) -> TlsConnector {
    let ring = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ClientConfig::builder_with_provider(ring)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots(authority))
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    TlsConnector::from(Arc::new(config))
}

/// One connection to `localhost`.
pub async fn connect(
    trusting: &TlsConnector,
    port: u16,
) -> std::io::Result<TlsStream<tokio::net::TcpStream>> {
    let name = ServerName::try_from("localhost").map_err(std::io::Error::other)?;
    connect_as(trusting, name, port).await
}

async fn connect_as(
    trusting: &TlsConnector,
    host: ServerName<'static>,
    port: u16,
) -> std::io::Result<TlsStream<tokio::net::TcpStream>> {
    let stream = tokio::net::TcpStream::connect(("localhost", port)).await?;
    stream.set_nodelay(true)?;
    trusting.connect(host, stream).await
}

/// A metadata request.
#[derive(Debug, Clone)]
pub enum MetadataRequest {
    Allocated(api::GetMetadataAllocatedRequest),
    Delta(api::GetMetadataDeltaRequest),
}

impl From<api::GetMetadataAllocatedRequest> for MetadataRequest {
    fn from(request: api::GetMetadataAllocatedRequest) -> Self {
        Self::Allocated(request)
    }
}

impl From<api::GetMetadataDeltaRequest> for MetadataRequest {
    fn from(request: api::GetMetadataDeltaRequest) -> Self {
        Self::Delta(request)
    }
}

/// A request for the blocks of a snapshot.
pub fn allocated(
    token: String,
    namespace: &str,
    snapshot: &str,
) -> api::GetMetadataAllocatedRequest {
    api::GetMetadataAllocatedRequest {
        security_token: token,
        namespace: namespace.to_owned(),
        snapshot_name: snapshot.to_owned(),
        ..Default::default()
    }
}

/// A request for a delta from the snapshot with the handle `base`.
pub fn delta(
    token: String,
    namespace: &str,
    base: &str,
    target: &str,
) -> api::GetMetadataDeltaRequest {
    api::GetMetadataDeltaRequest {
        security_token: token,
        namespace: namespace.to_owned(),
        base_snapshot_id: base.to_owned(),
        target_snapshot_name: target.to_owned(),
        ..Default::default()
    }
}

/// A complete stream.
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
    request: MetadataRequest,
) -> Result<Answer, Status> {
    let extent = |block: &api::BlockMetadata| (block.byte_offset as u64, block.size_bytes as u64);
    let mut answer = Answer::default();
    macro_rules! read {
        ($stream:expr) => {{
            let mut stream = $stream.await?.into_inner();
            while let Some(message) = stream.message().await? {
                answer.messages.push(Message {
                    kind: message.block_metadata_type,
                    capacity: message.volume_capacity_bytes,
                    extents: message.block_metadata.iter().map(extent).collect(),
                });
            }
        }};
    }
    let all = async {
        match request {
            MetadataRequest::Allocated(request) => read!(client.get_metadata_allocated(request)),
            MetadataRequest::Delta(request) => read!(client.get_metadata_delta(request)),
        }
        Ok::<_, Status>(())
    };
    tokio::time::timeout(PATIENCE, all)
        .await
        .map_err(|_| Status::unknown("the call exceeded the time limit of the test"))??;
    Ok(answer)
}
