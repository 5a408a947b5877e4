//! Passing calls on as the bytes that they are: headers, frames and trailers of HTTP/2 go through.

use std::future::Future;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep};
use tonic::body::Body;
use tonic::codegen::http::uri::{Authority, Scheme};
use tonic::codegen::http::{HeaderMap, Request, Response, Uri};
use tonic::{Code, Status};
use tower::Service;

use super::refusal::{Refusal, Result};
use crate::grpc::{SocketPath, code_name, parse_timeout};
use crate::proto::csi::v1 as csi;
use csi::node_client::NodeClient;
use csi::node_service_capability::{Type, rpc};

/// How long the driver may take to answer a call of the proxy's own, or to take a connection.
const ASK_TIMEOUT: Duration = Duration::from_secs(10);
/// Time between two tries to connect to a driver whose queue is full.
const CONNECT_AGAIN: Duration = Duration::from_millis(10);

/// The driver on its socket. Each call has a connection of its own, as kubelet makes one for each of its calls: so a driver that
/// was replaced is met by the first call behind that, and no call waits for another. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Driver {
    socket: Arc<Path>,
}

impl Driver {
    pub fn new(socket: &SocketPath) -> Self {
        Self { socket: socket.as_ref().into() }
    }

    /// Passes a call on.
    ///
    /// # Errors
    /// The driver is away.
    pub async fn forward(&self, request: Request<Body>) -> Result<Response<Body>> {
        self.send(request).await.map_err(|error| {
            tracing::warn!(socket = %self.socket.display(), %error, "the driver does not answer");
            Refusal::DriverAway(self.socket.display().to_string())
        })
    }

    async fn send(&self, mut request: Request<Body>) -> io::Result<Response<Body>> {
        let stream = self.connect().await?;
        let handshake = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(io::Error::other)?;
        // It ends with the call, and what goes wrong on it the call learns.
        tokio::spawn(connection);
        *request.uri_mut() = absolute(request.uri());
        let answer = sender.send_request(request).await.map_err(io::Error::other)?;
        Ok(answer.map(Body::new))
    }

    /// A driver that more call than its queue holds is there, and only slow: connect(2) says EAGAIN then.
    async fn connect(&self) -> io::Result<UnixStream> {
        let until = Instant::now() + ASK_TIMEOUT;
        loop {
            match UnixStream::connect(&self.socket).await {
                Err(error) if is_full(&error) && Instant::now() < until => {
                    sleep(CONNECT_AGAIN).await;
                }
                connected => return connected,
            }
        }
    }

    /// Passes on a call that nobody looks at. Where the driver is away the answer is UNAVAILABLE.
    pub async fn pass_on(&self, request: Request<Body>) -> Response<Body> {
        let away = |refusal: Refusal| Status::unavailable(refusal.to_string()).into_http();
        self.forward(request).await.unwrap_or_else(away)
    }

    /// The capabilities of its Node service. Asked each time: a driver may be replaced by another version at any moment.
    ///
    /// # Errors
    /// The driver does not say.
    pub async fn capabilities(&self) -> Result<Vec<rpc::Type>> {
        let mut node = NodeClient::new(self.clone());
        let asked = node.node_get_capabilities(csi::NodeGetCapabilitiesRequest {});
        // One that does not know the call has none.
        let answer = answered("NodeGetCapabilities", asked).await?.unwrap_or_default();
        let said = answer.capabilities.into_iter();
        Ok(said
            .filter_map(|capability| match capability.r#type {
                Some(Type::Rpc(rpc)) => Some(rpc.r#type()),
                _ => None,
            })
            .collect())
    }

    /// Has it take back a volume that was to be left to a runtime.
    ///
    /// # Errors
    /// The driver does not.
    pub async fn unpublish(&self, volume: &str, target: &str) -> Result<()> {
        let mut node = NodeClient::new(self.clone());
        let asked = node.node_unpublish_volume(csi::NodeUnpublishVolumeRequest {
            volume_id: volume.to_owned(),
            target_path: target.to_owned(),
            defer_fs_ops: true,
        });
        answered("NodeUnpublishVolume", asked).await?;
        Ok(())
    }

    /// Whether it reports any problem with a volume (CSI v1.13).
    ///
    /// # Errors
    /// The driver does not say.
    pub async fn reports_problem(&self, volume: &str, target: &str) -> Result<bool> {
        let mut node = NodeClient::new(self.clone());
        let asked = node.node_get_volume_health(csi::NodeGetVolumeHealthRequest {
            volume_id: volume.to_owned(),
            volume_publish_path: target.to_owned(),
            ..Default::default()
        });
        let health =
            answered("NodeGetVolumeHealth", asked).await?.and_then(|one| one.volume_health);
        Ok(health.is_some_and(|health| !health.health_statuses.is_empty()))
    }
}

/// The answer to a call of the proxy's own; None where the driver does not have it.
async fn answered<T>(
    method: &str,
    asked: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<Option<T>> {
    match tokio::time::timeout(ASK_TIMEOUT, asked).await {
        Ok(Ok(answer)) => Ok(Some(answer.into_inner())),
        Ok(Err(status)) if status.code() == Code::Unimplemented => Ok(None),
        Ok(Err(status)) => {
            let code = code_name(status.code());
            Err(Refusal::DriverAway(format!("{method}: {code}")))
        }
        Err(_) => Err(Refusal::DriverAway(format!("{method} takes longer than {ASK_TIMEOUT:?}"))),
    }
}

/// For generated clients.
impl Service<Request<Body>> for Driver {
    type Response = Response<Body>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Response<Body>>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let driver = self.clone();
        Box::pin(async move { driver.send(request).await })
    }
}

fn is_full(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
}

/// HTTP/2 wants a scheme and a host, which nobody looks up.
fn absolute(uri: &Uri) -> Uri {
    let mut parts = uri.clone().into_parts();
    parts.scheme.get_or_insert(Scheme::HTTP);
    parts.authority.get_or_insert(Authority::from_static("localhost"));
    Uri::from_parts(parts).unwrap_or_else(|_| uri.clone())
}

/// How long a call's client waits, where it says so.
pub fn deadline(headers: &HeaderMap) -> Option<Duration> {
    parse_timeout(headers.get("grpc-timeout")?.to_str().ok()?)
}
