//! The connection to a driver: clients of the CSI services that carry the command's deadline, the
//! secrets of its calls, and errors for a user: `CODE: message`, and the next step when no driver
//! accepts connections.

use std::collections::HashMap;
use std::error::Error as _;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, anyhow};
use tokio::time::Instant;
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{self, Channel, Uri};
use tonic::{Request, Status};

use grpc::proto::admin::v1::base_admin_client::BaseAdminClient;
use grpc::proto::admin::v1::pool_admin_client::PoolAdminClient;
use grpc::proto::admin::v1::volume_admin_client::VolumeAdminClient;
use grpc::proto::csi::v1::controller_client::ControllerClient;
use grpc::proto::csi::v1::group_controller_client::GroupControllerClient;
use grpc::proto::csi::v1::node_client::NodeClient;
use grpc::proto::csi::v1::snapshot_metadata_client::SnapshotMetadataClient;
use grpc::{Endpoint, code_name};
use kubernetes::secret::Secrets;

type Wire = InterceptedService<Channel, Deadline>;

/// A connected driver, and the deadline and the secrets of all calls. Clones share the connection.
#[derive(Debug, Clone)]
pub struct Connection {
    channel: Channel,
    /// To the SnapshotMetadata service, if it is elsewhere.
    metadata: Option<Channel>,
    secrets: Arc<Secrets>,
    deadline: Instant,
}

impl Connection {
    /// Connects to an endpoint.
    ///
    /// # Errors
    /// It cannot be connected to, with what to do.
    pub async fn open(endpoint: &Endpoint, deadline: Instant) -> Result<Self> {
        let channel = channel(endpoint).await?;
        Ok(Self { channel, metadata: None, secrets: Arc::default(), deadline })
    }

    /// The same with the SnapshotMetadata service of another endpoint.
    ///
    /// # Errors
    /// It cannot be connected to, with what to do.
    pub async fn with_metadata_at(self, endpoint: &Endpoint) -> Result<Self> {
        Ok(Self { metadata: Some(channel(endpoint).await?), ..self })
    }

    /// The same with secrets for all calls.
    pub fn with_secrets(self, secrets: Secrets) -> Self {
        Self { secrets: Arc::new(secrets), ..self }
    }

    /// The secrets, only for a request to the driver.
    pub fn secrets(&self) -> HashMap<String, String> {
        self.secrets.reveal()
    }

    /// The same connection with another deadline.
    pub fn until(&self, deadline: Instant) -> Self {
        Self { deadline, ..self.clone() }
    }

    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    pub fn controller(&self) -> ControllerClient<Wire> {
        ControllerClient::with_interceptor(self.channel.clone(), Deadline(self.deadline))
    }

    pub fn group_controller(&self) -> GroupControllerClient<Wire> {
        GroupControllerClient::with_interceptor(self.channel.clone(), Deadline(self.deadline))
    }

    pub fn volume_admin(&self) -> VolumeAdminClient<Wire> {
        VolumeAdminClient::with_interceptor(self.channel.clone(), Deadline(self.deadline))
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
        let channel = self.metadata.as_ref().unwrap_or(&self.channel).clone();
        SnapshotMetadataClient::with_interceptor(channel, Deadline(self.deadline))
    }
}

/// Connects to an endpoint.
///
/// # Errors
/// It cannot be connected to, with what to do.
pub async fn channel(endpoint: &Endpoint) -> Result<Channel> {
    let place = endpoint.clone();
    // The host is never looked up; it becomes :authority, where h2 refuses a socket path.
    let connected = transport::Endpoint::from_static("http://localhost")
        .connect_with_connector(tower::service_fn(move |_: Uri| {
            let place = place.clone();
            async move { place.connect().await }
        }))
        .await;
    connected.map_err(|error| unreachable(endpoint, &error))
}

/// Sends the deadline with each call, so that the driver stops when the command does.
#[derive(Debug, Clone, Copy)]
pub struct Deadline(pub Instant);

impl Interceptor for Deadline {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        // One second after the command's own time limit, whose message is more specific.
        let remaining = self.0.saturating_duration_since(Instant::now()) + Duration::from_secs(1);
        request.set_timeout(remaining);
        Ok(request)
    }
}

fn unreachable(endpoint: &Endpoint, error: &transport::Error) -> anyhow::Error {
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
    let path = match endpoint {
        Endpoint::Unix(path) => path.as_ref().display(),
        Endpoint::Tcp(address) => {
            return anyhow!("cannot connect to {address}: {cause}; no driver may listen there");
        }
    };
    match io.map(io::Error::kind) {
        Some(io::ErrorKind::NotFound) => anyhow!(
            "no socket at {path}: start the driver (csi-loopback --mode driver), or set its socket \
             with --endpoint or CSI_ENDPOINT"
        ),
        Some(io::ErrorKind::ConnectionRefused) => anyhow!(
            "no process listens on {path}: the driver that created this socket has ended; start it again"
        ),
        Some(io::ErrorKind::PermissionDenied) => anyhow!(
            "no permission for {path}: run as root, or start the driver with --socket-mode and \
             --socket-group"
        ),
        _ => anyhow!("cannot connect to {path}: {cause}"),
    }
}

/// A status as an error that prints as `CODE: message`. A cause that the message does not contain
/// follows it.
pub fn refused(status: Status) -> anyhow::Error {
    let code = code_name(status.code());
    let message = match status.message() {
        "" => "the driver gave no reason",
        message => message,
    };
    let mut text = format!("{code}: {message}");
    let mut cause = status.source();
    while let Some(error) = cause {
        append_cause(&mut text, &error.to_string());
        cause = error.source();
    }
    anyhow!(text)
}

/// An error with its causes, each once: a cause that the text already contains is left out.
pub fn describe(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        append_cause(&mut text, &cause.to_string());
    }
    // A server, a repository or a name may have chosen parts of it.
    super::format::printable(&text)
}

fn append_cause(text: &mut String, cause: &str) {
    if text.contains(cause) {
        return;
    }
    if !text.is_empty() {
        text.push_str(": ");
    }
    text.push_str(cause);
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

    #[test]
    fn an_error_names_each_cause_once() {
        let cause = io::Error::other("disk full");
        let error = anyhow::Error::from(cause).context("write x: disk full").context("save x");
        assert_eq!(describe(&error), "save x: write x: disk full");
        let error = anyhow!("inner").context("outer");
        assert_eq!(describe(&error), "outer: inner");
        let status = Status::from_error(Box::new(io::Error::other("transport error")));
        assert_eq!(refused(status).to_string().matches("transport error").count(), 1);
    }

    #[tokio::test]
    async fn a_missing_or_unused_socket_error_names_the_next_step() {
        let dir = tempfile::tempdir().unwrap();
        let soon = Instant::now() + Duration::from_secs(10);
        let path = dir.path().join("csi.sock");
        let endpoint: Endpoint = path.to_str().unwrap().parse().unwrap();

        let error = Connection::open(&endpoint, soon).await.unwrap_err().to_string();
        assert!(error.starts_with("no socket at") && error.contains("--mode driver"), "{error}");

        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let error = Connection::open(&endpoint, soon).await.unwrap_err().to_string();
        assert!(error.starts_with("no process listens on"), "{error}");
    }
}
