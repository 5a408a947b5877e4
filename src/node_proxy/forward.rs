//! Passing calls on, unary and streaming, as the bytes that they are: headers, frames and trailers of HTTP/2 go through, and
//! no message is held longer than it takes to pass it on.

use std::path::PathBuf;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Status};
use tower::{Service as _, ServiceExt as _};

use super::refusal::{Refusal, Result};
use crate::grpc::{SocketPath, code_name};
use crate::proto::csi::v1 as csi;
use csi::node_client::NodeClient;
use csi::node_service_capability::{Type, rpc};

/// How long the driver may take to say what it can do.
const ASK_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes under way of one stream, and of all of them: what a client does not take holds up nobody else.
const STREAM_WINDOW: u32 = 256 << 10;
const CONNECTION_WINDOW: u32 = 64 << 20;
/// Bytes of a frame. HTTP/2's default, 16 KiB, costs a tenth more processor time.
const FRAME: u32 = 64 << 10;

/// The driver on its socket. A driver that ends and comes back is found again. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Driver {
    channel: Channel,
    socket: PathBuf,
}

impl Driver {
    pub fn new(socket: &SocketPath) -> Self {
        let path = socket.as_ref().to_owned();
        let socket = path.clone();
        // The host is never looked up; it becomes :authority, where h2 refuses a socket path.
        let channel = Endpoint::from_static("http://localhost")
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_frame_size(FRAME)
            .connect_with_connector_lazy(tower::service_fn(move |_: Uri| {
                let path = path.clone();
                async move { UnixStream::connect(path).await.map(TokioIo::new) }
            }));
        Self { channel, socket }
    }

    /// Passes a call on.
    ///
    /// # Errors
    /// The driver is away.
    pub async fn forward(&self, request: Request<Body>) -> Result<Response<Body>> {
        let mut channel = self.channel.clone();
        let answered = match channel.ready().await {
            Ok(ready) => ready.call(request).await,
            Err(error) => Err(error),
        };
        answered.map_err(|error| {
            tracing::warn!(socket = %self.socket.display(), %error, "the driver does not answer");
            Refusal::DriverAway(self.socket.display().to_string())
        })
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
        let mut node = NodeClient::new(self.channel.clone());
        let asked = node.node_get_capabilities(csi::NodeGetCapabilitiesRequest {});
        let answer = match tokio::time::timeout(ASK_TIMEOUT, asked).await {
            Ok(Ok(answer)) => answer.into_inner(),
            // One that does not know the call has none.
            Ok(Err(status)) if status.code() == Code::Unimplemented => return Ok(Vec::new()),
            Ok(Err(status)) => {
                let code = code_name(status.code());
                return Err(Refusal::DriverAway(format!("NodeGetCapabilities: {code}")));
            }
            Err(_) => {
                let why = format!("NodeGetCapabilities takes longer than {ASK_TIMEOUT:?}");
                return Err(Refusal::DriverAway(why));
            }
        };
        let said = answer.capabilities.into_iter();
        Ok(said
            .filter_map(|capability| match capability.r#type {
                Some(Type::Rpc(rpc)) => Some(rpc.r#type()),
                _ => None,
            })
            .collect())
    }
}
