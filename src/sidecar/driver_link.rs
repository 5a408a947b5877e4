//! The driver on its socket: whether it is there, what it is called and whether it has CSI's SnapshotMetadata service and
//! that of sessions; and the calls, whose answers stay encoded. A driver that ends and comes back is found again.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::sleep;
use tonic::client::Grpc;
use tonic::codec::Streaming;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Request, Response, Status};
use tonic_prost::ProstCodec;

use super::refusal::{Reason, Refusal};
use crate::grpc::{RawMessage, SocketPath, code_name};
use crate::proto::admin::v1 as admin;
use crate::proto::csi::v1 as csi;
use crate::proto::snapshotsession as session;
use crate::telemetry::shutdown::Shutdown;
use admin::base_admin_client::BaseAdminClient;
use csi::controller_client::ControllerClient;
use csi::controller_service_capability::rpc::Type as Rpc;
use csi::identity_client::IdentityClient;
use csi::plugin_capability::service::Type;

/// Bytes of one answer that may be under way to a client that does not read.
const STREAM_WINDOW: u32 = 256 << 10;
/// Bytes of a frame from the driver, at most. HTTP/2's default, 16 KiB, costs a tenth more processor time.
const FRAME: u32 = 64 << 10;
/// HTTP/2's largest window.
const LARGEST_WINDOW: u32 = (1 << 31) - 1;
/// A driver's message may be so large, in bytes. What gRPC clients take by default is 4 MiB.
const MAX_MESSAGE: usize = 32 << 20;
/// Time between two looks at a driver that is there, and at one that is not.
const LOOK_EVERY: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(500);

const ALLOCATED: &str = "/csi.v1.SnapshotMetadata/GetMetadataAllocated";
const DELTA: &str = "/csi.v1.SnapshotMetadata/GetMetadataDelta";
const SESSION_ALLOCATED: &str = "/snapshotsession.SnapshotMetadata/GetAllocated";
const SESSION_DELTA: &str = "/snapshotsession.SnapshotMetadata/GetDelta";

/// A driver's answer: messages as bytes.
pub type Answer = Streaming<RawMessage>;

/// What the driver is asked about: handles, and from where on.
#[derive(Debug, Clone)]
pub struct Question {
    pub target: String,
    pub base: Option<String>,
    /// Bytes.
    pub starting_offset: i64,
    pub max_results: i32,
}

/// What is known of the driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Driver {
    /// It does not answer, or not as it should. Why.
    Away(String),
    Ready {
        name: String,
        /// Whether it has the SnapshotMetadata service.
        capable: bool,
        /// Whether it has ListSnapshotDeltas (KEP-3314, VolumeSnapshotDelta). False where nobody needs to know.
        lists: bool,
    },
}

/// Cheap to clone.
#[derive(Debug, Clone)]
pub struct DriverLink {
    channel: Channel,
    state: watch::Receiver<Driver>,
    /// Whether the driver at the other end of the connection has said that it lacks the session API.
    lacks_sessions: Arc<AtomicBool>,
    /// Whether anybody wants to know of ListSnapshotDeltas.
    asks_deltas: bool,
}

impl DriverLink {
    /// Starts to look for the driver. `streams`: answers at once, at most; each has room of its own, so that one
    /// that nobody reads holds up no other. `timeout` is for calls with one answer. `asks_deltas`: whether to find out
    /// about ListSnapshotDeltas.
    pub fn start(
        socket: &SocketPath,
        streams: usize,
        timeout: Duration,
        asks_deltas: bool,
        shutdown: Shutdown,
    ) -> Self {
        let path = socket.as_ref().to_owned();
        let all = u32::try_from(streams + 1).unwrap_or(u32::MAX).saturating_mul(STREAM_WINDOW);
        let lacks_sessions = Arc::<AtomicBool>::default();
        let lacked = lacks_sessions.clone();
        // The host is never looked up; it becomes :authority, where h2 refuses a socket path.
        let channel = Endpoint::from_static("http://localhost")
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(all.min(LARGEST_WINDOW))
            .max_frame_size(FRAME)
            .connect_with_connector_lazy(tower::service_fn(move |_: Uri| {
                let path = path.clone();
                // Who answers now may be another version.
                lacked.store(false, Ordering::Relaxed);
                async move { UnixStream::connect(path).await.map(TokioIo::new) }
            }));
        let (sender, state) = watch::channel(Driver::Away("it was not asked yet".into()));
        let link = Self { channel, state, lacks_sessions, asks_deltas };
        tokio::spawn(look(link.clone(), sender, timeout, shutdown));
        link
    }

    pub fn state(&self) -> watch::Receiver<Driver> {
        self.state.clone()
    }

    /// The driver's name, once it answers.
    pub fn name(&self) -> Result<String, Refusal> {
        match &*self.state.borrow() {
            Driver::Ready { name, .. } => Ok(name.clone()),
            Driver::Away(why) => {
                let message = format!("the CSI driver is not ready: {why}; try again");
                Err(Refusal::new(Reason::DriverNotReady, message))
            }
        }
    }

    /// The driver's name, once it answers and can do what the sidecar is for.
    pub fn capable(&self) -> Result<String, Refusal> {
        let name = self.name()?;
        match &*self.state.borrow() {
            Driver::Ready { capable: false, .. } => Err(Refusal::new(
                Reason::NoMetadataService,
                format!(
                    "the CSI driver {name} does not have the SnapshotMetadata service (CSI v1.10 or later)"
                ),
            )),
            _ => Ok(name),
        }
    }

    /// The answer of CSI's SnapshotMetadata, for which the driver has `left`.
    pub async fn ask(
        &self,
        question: Question,
        secrets: HashMap<String, String>,
        left: Duration,
    ) -> Result<Answer, Status> {
        let Question { target, base, starting_offset, max_results } = question;
        let Some(base_snapshot_id) = base else {
            let snapshot_id = target;
            let request = csi::GetMetadataAllocatedRequest {
                snapshot_id,
                starting_offset,
                max_results,
                secrets,
            };
            return self.stream(bounded(request, left), ALLOCATED).await;
        };
        let request = csi::GetMetadataDeltaRequest {
            base_snapshot_id,
            target_snapshot_id: target,
            starting_offset,
            max_results,
            secrets,
        };
        self.stream(bounded(request, left), DELTA).await
    }

    /// The answer of the driver's own session API, if it has that. `session_token` and `volume_id` are what the
    /// driver is told of them.
    pub async fn ask_session(
        &self,
        question: Question,
        session_token: String,
        volume_id: String,
        left: Duration,
    ) -> Result<Option<Answer>, Status> {
        if self.lacks_sessions.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let Question { target, base, starting_offset, max_results } = question;
        let (starting_offset, max_results) =
            (starting_offset.unsigned_abs(), max_results.unsigned_abs());
        let answer = match base {
            None => {
                let request = session::GetAllocatedRequest {
                    session_token,
                    volume_id,
                    snapshot: target,
                    starting_offset,
                    max_results,
                };
                self.stream(bounded(request, left), SESSION_ALLOCATED).await
            }
            Some(base_snapshot) => {
                let request = session::GetDeltaRequest {
                    session_token,
                    volume_id,
                    base_snapshot,
                    target_snapshot: target,
                    starting_byte_offset: starting_offset,
                    max_results,
                };
                self.stream(bounded(request, left), SESSION_DELTA).await
            }
        };
        match answer {
            Err(status) if status.code() == Code::Unimplemented => {
                if !self.lacks_sessions.swap(true, Ordering::Relaxed) {
                    tracing::info!(
                        "the driver lacks the session API; it is asked through CSI's instead"
                    );
                }
                Ok(None)
            }
            answer => answer.map(Some),
        }
    }

    /// A page of the driver's ListSnapshotDeltas, for which it has `left`.
    pub async fn list_deltas(
        &self,
        request: csi::ListSnapshotDeltasRequest,
        left: Duration,
    ) -> Result<csi::ListSnapshotDeltasResponse, Status> {
        let controller = ControllerClient::new(self.channel.clone());
        let mut controller = controller.max_decoding_message_size(MAX_MESSAGE);
        controller.list_snapshot_deltas(bounded(request, left)).await.map(Response::into_inner)
    }

    /// A page of the bases that the driver's BaseAdmin service knows, for which it has `left`.
    pub async fn list_bases(
        &self,
        request: admin::ListBasesRequest,
        left: Duration,
    ) -> Result<admin::ListBasesResponse, Status> {
        let mut bases = BaseAdminClient::new(self.channel.clone());
        bases.list_bases(bounded(request, left)).await.map(Response::into_inner)
    }

    /// Changes how long a snapshot stays a base, for which the driver has `left`.
    pub async fn set_base_retention(
        &self,
        request: admin::SetBaseRetentionRequest,
        left: Duration,
    ) -> Result<(), Status> {
        let mut bases = BaseAdminClient::new(self.channel.clone());
        bases.set_base_retention(bounded(request, left)).await.map(drop)
    }

    async fn stream<Q: prost::Message + Send + Sync + 'static>(
        &self,
        request: Request<Q>,
        path: &'static str,
    ) -> Result<Answer, Status> {
        let mut grpc = Grpc::new(self.channel.clone()).max_decoding_message_size(MAX_MESSAGE);
        grpc.ready().await.map_err(|error| Status::from_error(Box::new(error)))?;
        let codec = ProstCodec::<Q, RawMessage>::default();
        let answer = grpc.server_streaming(request, PathAndQuery::from_static(path), codec).await;
        answer.map(Response::into_inner)
    }

    async fn identify(&self, timeout: Duration) -> Result<Driver, Status> {
        let mut identity = IdentityClient::new(self.channel.clone());
        let probe = identity.probe(bounded(csi::ProbeRequest {}, timeout)).await?.into_inner();
        // CSI Probe: a driver that does not say is ready.
        if probe.ready == Some(false) {
            return Ok(Driver::Away("it answers Probe with \"not ready\"".into()));
        }
        let about =
            identity.get_plugin_info(bounded(csi::GetPluginInfoRequest {}, timeout)).await?;
        let asked = bounded(csi::GetPluginCapabilitiesRequest {}, timeout);
        let capabilities = identity.get_plugin_capabilities(asked).await?.into_inner().capabilities;
        let capable = capabilities.iter().any(|capability| {
            matches!(&capability.r#type, Some(csi::plugin_capability::Type::Service(service))
                if service.r#type() == Type::SnapshotMetadataService)
        });
        let name = about.into_inner().name;
        if name.is_empty() {
            return Ok(Driver::Away("it has no name".into()));
        }
        let lists = self.asks_deltas && self.has_deltas(timeout).await?;
        Ok(Driver::Ready { name, capable, lists })
    }

    async fn has_deltas(&self, timeout: Duration) -> Result<bool, Status> {
        let mut controller = ControllerClient::new(self.channel.clone());
        let asked = bounded(csi::ControllerGetCapabilitiesRequest {}, timeout);
        let capabilities = match controller.controller_get_capabilities(asked).await {
            Ok(answer) => answer.into_inner().capabilities,
            // It has no Controller service.
            Err(status) if status.code() == Code::Unimplemented => return Ok(false),
            Err(status) => return Err(status),
        };
        Ok(capabilities.iter().any(|capability| {
            matches!(&capability.r#type, Some(csi::controller_service_capability::Type::Rpc(rpc))
                if rpc.r#type() == Rpc::ListBlockSnapshotDeltas)
        }))
    }
}

fn bounded<T>(message: T, timeout: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(timeout);
    request
}

/// Looks at the driver again and again, and tells what has changed.
async fn look(
    link: DriverLink,
    state: watch::Sender<Driver>,
    timeout: Duration,
    shutdown: Shutdown,
) {
    let mut first_name: Option<String> = None;
    loop {
        let asked = tokio::time::timeout(timeout, link.identify(timeout)).await;
        let found = match asked {
            Ok(Ok(driver)) => driver,
            Ok(Err(status)) if status.code() == Code::Unavailable => {
                Driver::Away("nobody answers on its socket".into())
            }
            Ok(Err(status)) => Driver::Away(format!("it answers {}", code_name(status.code()))),
            Err(_) => Driver::Away("it does not answer in time".into()),
        };
        let found = match (found, &first_name) {
            // Audience, service object and snapshots were all looked up for the other one.
            (Driver::Ready { name, .. }, Some(first)) if name != *first => Driver::Away(format!(
                "its name has changed from {first} to {name}, and the sidecar has to be started again"
            )),
            (found, _) => found,
        };
        if let (Driver::Ready { name, .. }, None) = (&found, &first_name) {
            first_name = Some(name.clone());
        }
        tell(&state, found);
        let pause =
            if matches!(*state.borrow(), Driver::Ready { .. }) { LOOK_EVERY } else { LOOK_AGAIN };
        tokio::select! {
            () = sleep(pause) => {}
            () = shutdown.ending() => return,
        }
    }
}

fn tell(state: &watch::Sender<Driver>, found: Driver) {
    let changed = state.send_if_modified(|known| {
        let changed = *known != found;
        *known = found.clone();
        changed
    });
    match &found {
        Driver::Ready { name, capable: true, .. } if changed => {
            tracing::info!(driver = %name, "the driver is ready")
        }
        Driver::Ready { name, lists: true, .. } if changed => {
            tracing::info!(driver = %name, "the driver has ListSnapshotDeltas and no SnapshotMetadata service");
        }
        Driver::Ready { name, .. } if changed => {
            tracing::error!(driver = %name, "the driver has no SnapshotMetadata service; every call is UNIMPLEMENTED");
        }
        Driver::Away(why) if changed => tracing::warn!(%why, "the driver is not ready"),
        _ => {}
    }
}
