//! Forwards calls as bytes: HTTP/2 headers, frames and trailers are unchanged.

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
use csi::node_client::NodeClient;
use csi::node_service_capability::{Type, rpc};
use grpc::proto::csi::v1 as csi;
use grpc::{SocketPath, code_name, parse_timeout};
use telemetry::task;

/// Timeout of the proxy's own calls, and of connecting.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval of connection attempts while the driver's queue is full.
const CONNECT_INTERVAL: Duration = Duration::from_millis(10);

/// A client of the driver's socket. Each call has its own connection, as kubelet's calls have. So
/// the first call after a restart of the driver reaches the new process, and no call waits for
/// another. Clones share the path.
#[derive(Debug, Clone)]
pub struct Driver {
    socket: Arc<Path>,
}

impl Driver {
    pub fn new(socket: &SocketPath) -> Self {
        Self { socket: socket.as_ref().into() }
    }

    /// Forwards a call.
    ///
    /// # Errors
    /// The driver is unavailable.
    pub async fn forward(&self, request: Request<Body>) -> Result<Response<Body>> {
        self.send(request).await.map_err(|error| {
            tracing::warn!(socket = %self.socket.display(), %error, "the CSI driver is unavailable");
            Refusal::DriverUnavailable(self.socket.display().to_string())
        })
    }

    async fn send(&self, mut request: Request<Body>) -> io::Result<Response<Body>> {
        let stream = self.connect().await?;
        let handshake = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(io::Error::other)?;
        // The connection ends with the call, which reports its errors.
        task::spawn(connection);
        *request.uri_mut() = absolute_uri(request.uri());
        let response = sender.send_request(request).await.map_err(io::Error::other)?;
        Ok(response.map(Body::new))
    }

    /// A driver with a full queue exists and is slow: connect(2) returns EAGAIN.
    async fn connect(&self) -> io::Result<UnixStream> {
        let until = Instant::now() + CALL_TIMEOUT;
        loop {
            match UnixStream::connect(&self.socket).await {
                Err(error) if is_queue_full(&error) && Instant::now() < until => {
                    sleep(CONNECT_INTERVAL).await;
                }
                connected => return connected,
            }
        }
    }

    /// Forwards a call that the proxy does not decode. If the driver is unavailable, the response
    /// is UNAVAILABLE.
    pub async fn forward_unchanged(&self, request: Request<Body>) -> Response<Body> {
        let unavailable = |refusal: Refusal| Status::unavailable(refusal.to_string()).into_http();
        self.forward(request).await.unwrap_or_else(unavailable)
    }

    /// Returns the capabilities of the driver's Node service. They are not cached: the driver may
    /// be replaced at any time.
    ///
    /// # Errors
    /// The driver is unavailable or failed.
    pub async fn capabilities(&self) -> Result<Vec<rpc::Type>> {
        let mut node = NodeClient::new(self.clone());
        let call = node.node_get_capabilities(csi::NodeGetCapabilitiesRequest {});
        // A driver without the call has no capabilities.
        let capabilities = response("NodeGetCapabilities", call).await?.unwrap_or_default();
        let capabilities = capabilities.capabilities.into_iter();
        Ok(capabilities
            .filter_map(|capability| match capability.r#type {
                Some(Type::Rpc(rpc)) => Some(rpc.r#type()),
                _ => None,
            })
            .collect())
    }

    /// Unpublishes a volume that the driver should have deferred.
    ///
    /// # Errors
    /// The driver is unavailable or failed.
    pub async fn unpublish(&self, volume: &str, target: &str) -> Result<()> {
        let mut node = NodeClient::new(self.clone());
        let call = node.node_unpublish_volume(csi::NodeUnpublishVolumeRequest {
            volume_id: volume.to_owned(),
            target_path: target.to_owned(),
            defer_fs_ops: true,
        });
        response("NodeUnpublishVolume", call).await?;
        Ok(())
    }

    /// Whether the driver reports a problem of a volume (CSI v1.13).
    ///
    /// # Errors
    /// The driver is unavailable or failed.
    pub async fn reports_problem(&self, volume: &str, target: &str) -> Result<bool> {
        let mut node = NodeClient::new(self.clone());
        let call = node.node_get_volume_health(csi::NodeGetVolumeHealthRequest {
            volume_id: volume.to_owned(),
            volume_publish_path: target.to_owned(),
            ..Default::default()
        });
        let health = response("NodeGetVolumeHealth", call).await?.and_then(|one| one.volume_health);
        Ok(health.is_some_and(|health| !health.health_statuses.is_empty()))
    }
}

/// Awaits the response to one of the proxy's own calls. `None`: the driver does not implement the
/// call.
async fn response<T>(
    method: &str,
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<Option<T>> {
    match tokio::time::timeout(CALL_TIMEOUT, call).await {
        Ok(Ok(response)) => Ok(Some(response.into_inner())),
        Ok(Err(status)) if status.code() == Code::Unimplemented => Ok(None),
        Ok(Err(status)) => {
            let code = code_name(status.code());
            Err(Refusal::DriverUnavailable(format!("{method}: {code}")))
        }
        Err(_) => Err(Refusal::DriverUnavailable(format!(
            "{method} exceeded its timeout of {CALL_TIMEOUT:?}"
        ))),
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

fn is_queue_full(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
}

/// HTTP/2 requires a scheme and a host; neither is used.
fn absolute_uri(uri: &Uri) -> Uri {
    let mut parts = uri.clone().into_parts();
    parts.scheme.get_or_insert(Scheme::HTTP);
    parts.authority.get_or_insert(Authority::from_static("localhost"));
    Uri::from_parts(parts).unwrap_or_else(|_| uri.clone())
}

/// The timeout that the client set for a call.
pub fn deadline(headers: &HeaderMap) -> Option<Duration> {
    parse_timeout(headers.get("grpc-timeout")?.to_str().ok()?)
}
