//! The connection to a driver's socket: clients of the CSI services that carry the command's
//! deadline, and errors told as a person needs them: `CODE: message`, and what to do when no driver
//! answers.

use std::error::Error as _;
use std::io;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, anyhow};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::time::Instant;
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Request, Status};

use crate::grpc::{SocketPath, code_name};
use crate::proto::admin::v1::base_admin_client::BaseAdminClient;
use crate::proto::admin::v1::pool_admin_client::PoolAdminClient;
use crate::proto::csi::v1::controller_client::ControllerClient;
use crate::proto::csi::v1::node_client::NodeClient;
use crate::proto::csi::v1::snapshot_metadata_client::SnapshotMetadataClient;

type Wire = InterceptedService<Channel, Deadline>;

/// A connected socket and the moment at which the command gives up.
#[derive(Debug, Clone)]
pub struct Connection {
    channel: Channel,
    deadline: Instant,
}

impl Connection {
    /// Connects to a socket given as `unix:///path`, `unix:/path` or a path.
    ///
    /// # Errors
    /// An endpoint that is no unix socket; a socket that cannot be connected to, with what to do.
    pub async fn open(endpoint: &SocketPath, deadline: Instant) -> Result<Self> {
        let path = endpoint.as_ref().to_owned();
        let socket = path.clone();
        // The host is never looked up; it becomes :authority, where h2 refuses a socket path.
        let channel = Endpoint::from_static("http://localhost")
            .connect_with_connector(tower::service_fn(move |_: Uri| {
                let socket = socket.clone();
                async move { UnixStream::connect(socket).await.map(TokioIo::new) }
            }))
            .await
            .map_err(|error| unreachable_socket(&path, &error))?;
        Ok(Self { channel, deadline })
    }

    /// The same connection with another deadline.
    pub fn until(&self, deadline: Instant) -> Self {
        Self { channel: self.channel.clone(), deadline }
    }

    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    pub fn controller(&self) -> ControllerClient<Wire> {
        ControllerClient::with_interceptor(self.channel.clone(), Deadline(self.deadline))
    }

    pub fn node(&self) -> NodeClient<Wire> {
        NodeClient::with_interceptor(self.channel.clone(), Deadline(self.deadline))
    }

    pub fn pool_admin(&self) -> PoolAdminClient<Wire> {
        PoolAdminClient::with_interceptor(self.channel.clone(), Deadline(self.deadline))
    }

    pub fn base_admin(&self) -> BaseAdminClient<Wire> {
        BaseAdminClient::with_interceptor(self.channel.clone(), Deadline(self.deadline))
    }

    pub fn snapshot_metadata(&self) -> SnapshotMetadataClient<Wire> {
        SnapshotMetadataClient::with_interceptor(self.channel.clone(), Deadline(self.deadline))
    }
}

/// Tells the driver when the command gives up, so that it does not work on for nobody.
#[derive(Debug, Clone, Copy)]
pub struct Deadline(pub Instant);

impl Interceptor for Deadline {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        // A second later than the command itself, whose message says more.
        let left = self.0.saturating_duration_since(Instant::now()) + Duration::from_secs(1);
        request.set_timeout(left);
        Ok(request)
    }
}

fn unreachable_socket(path: &Path, error: &tonic::transport::Error) -> anyhow::Error {
    let mut cause: &dyn std::error::Error = error;
    let io = loop {
        if let Some(io) = cause.downcast_ref::<io::Error>() {
            break Some(io);
        }
        match cause.source() {
            Some(next) => cause = next,
            None => break None,
        }
    };
    let path = path.display();
    match io.map(io::Error::kind) {
        Some(io::ErrorKind::NotFound) => anyhow!(
            "no socket at {path}: start the driver (csi-loopback --mode driver), or name its socket \
             with --endpoint or CSI_ENDPOINT"
        ),
        Some(io::ErrorKind::ConnectionRefused) => anyhow!(
            "nobody listens on {path}: the driver that made this socket has ended; start it again"
        ),
        Some(io::ErrorKind::PermissionDenied) => anyhow!(
            "no permission for {path}: run as root, or start the driver with --socket-mode and \
             --socket-group"
        ),
        _ => anyhow!("cannot connect to {path}: {cause}"),
    }
}

/// A status as an error that prints as `CODE: message`.
pub fn refused(status: Status) -> anyhow::Error {
    let code = code_name(status.code());
    let cause = status.source().map(|cause| format!(": {cause}")).unwrap_or_default();
    match status.message() {
        "" => anyhow!("{code}: the driver gave no reason{cause}"),
        message => anyhow!("{code}: {message}{cause}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_prints_its_code_and_message() {
        let error = refused(Status::not_found("volume \"v\" does not exist"));
        assert_eq!(error.to_string(), "NOT_FOUND: volume \"v\" does not exist");
        let error = refused(Status::new(tonic::Code::Internal, ""));
        assert_eq!(error.to_string(), "INTERNAL: the driver gave no reason");
    }

    #[tokio::test]
    async fn a_missing_or_dead_socket_is_told_with_the_next_step() {
        let dir = tempfile::tempdir().unwrap();
        let soon = Instant::now() + Duration::from_secs(10);
        let path = dir.path().join("csi.sock");
        let endpoint: SocketPath = path.to_str().unwrap().parse().unwrap();

        let error = Connection::open(&endpoint, soon).await.unwrap_err().to_string();
        assert!(error.starts_with("no socket at") && error.contains("--mode driver"), "{error}");

        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let error = Connection::open(&endpoint, soon).await.unwrap_err().to_string();
        assert!(error.starts_with("nobody listens on"), "{error}");
    }
}
