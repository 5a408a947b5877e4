//! The connection to the CSI driver: polls its readiness, name and capabilities, and makes calls
//! whose responses stay encoded. Reconnects to a driver that restarts.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_rustls::client::TlsStream;
use tonic::client::Grpc;
use tonic::codec::Streaming;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{self, Channel, Uri};
use tonic::{Code, Request, Response, Status};
use tonic_prost::ProstCodec;

use super::refusal::{Reason, Refusal};
use csi::controller_client::ControllerClient;
use csi::controller_service_capability::rpc::Type as Rpc;
use csi::identity_client::IdentityClient;
use csi::plugin_capability::service::Type;
use grpc::proto::csi::v1 as csi;
use grpc::proto::snapshotsession as session;
use grpc::{Endpoint, RawMessage, code_name};
use telemetry::shutdown::Shutdown;
use telemetry::task;

/// Maximum bytes in transit to a client that does not read.
const STREAM_WINDOW: u32 = 256 << 10;
/// Maximum bytes of a frame from the driver. HTTP/2's default, 16 KiB, costs 10 % more processor
/// time.
const FRAME: u32 = 64 << 10;
/// Maximum window of HTTP/2.
const LARGEST_WINDOW: u32 = (1 << 31) - 1;
/// Maximum bytes of a driver's message. The default of gRPC clients is 4 MiB.
const MAX_MESSAGE: usize = 32 << 20;
/// The driver's deadline exceeds the caller's by this time, so that it is known which one expired.
/// Some drivers end a stream with OK when its time is over, which must not be taken for its end.
const GRACE: Duration = Duration::from_secs(1);
/// Interval of pings during a call to another node, and time to wait for their answer.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// Poll intervals of a ready driver and of a driver that is not ready.
const POLL_READY: Duration = Duration::from_secs(5);
const POLL_NOT_READY: Duration = Duration::from_millis(500);
/// Timeout of one page of a list.
const LIST_TIMEOUT: Duration = Duration::from_secs(30);

const ALLOCATED: &str = "/csi.v1.SnapshotMetadata/GetMetadataAllocated";
const DELTA: &str = "/csi.v1.SnapshotMetadata/GetMetadataDelta";
const LIST_DELTAS: &str = "/csi.v1.Controller/ListSnapshotDeltas";
const SESSION_ALLOCATED: &str = "/snapshotsession.SnapshotMetadata/GetAllocated";
const SESSION_DELTA: &str = "/snapshotsession.SnapshotMetadata/GetDelta";

/// A driver's response stream: encoded messages.
pub type MetadataStream = Streaming<RawMessage>;

/// Parameters of a request to the driver, with handles.
#[derive(Debug, Clone)]
pub struct DriverRequest {
    pub target: String,
    pub base: Option<String>,
    /// Bytes.
    pub starting_offset: i64,
    pub max_results: i32,
}

/// State of the driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Driver {
    /// It does not respond, or not correctly; with the reason.
    NotReady(String),
    Ready {
        name: String,
        /// Whether it has the SnapshotMetadata service.
        capable: bool,
        /// Whether it has ListSnapshotDeltas (KEP-3314, VolumeSnapshotDelta). False if not probed.
        lists_deltas: bool,
    },
}

/// A handle to the driver's connection. Clones share it.
#[derive(Debug, Clone)]
pub struct DriverLink {
    channel: Channel,
    state: watch::Receiver<Driver>,
    /// Whether the connected driver lacks the session API.
    lacks_sessions: Arc<AtomicBool>,
    /// Whether to probe for ListSnapshotDeltas.
    probe_deltas: bool,
    /// The header of calls to a sidecar that requires one.
    authorization: Option<MetadataValue<Ascii>>,
}

impl DriverLink {
    /// Starts to poll the driver. `streams` is the maximum number of concurrent response streams;
    /// each has its own window, so that a stalled client does not block others. `timeout` bounds
    /// unary calls. `probe_deltas`: whether to probe for ListSnapshotDeltas.
    pub fn start(
        endpoint: &Endpoint,
        streams: usize,
        timeout: Duration,
        probe_deltas: bool,
        shutdown: Shutdown,
    ) -> Self {
        let place = endpoint.clone();
        let lacks_sessions = Arc::<AtomicBool>::default();
        let lacked = lacks_sessions.clone();
        let channel =
            connection(streams).connect_with_connector_lazy(tower::service_fn(move |_: Uri| {
                let place = place.clone();
                // The new peer may be another version.
                lacked.store(false, Ordering::Relaxed);
                async move { place.connect().await }
            }));
        let (sender, state) = watch::channel(Driver::NotReady("it has not been polled yet".into()));
        let link = Self { channel, state, lacks_sessions, probe_deltas, authorization: None };
        task::spawn(poll(link.clone(), sender, timeout, shutdown));
        link
    }

    /// A driver that is reached by `connect`, through another sidecar, which polls it.
    pub fn remote<C>(name: &str, streams: usize, connect: impl Fn() -> C + Send + 'static) -> Self
    where
        C: Future<Output = io::Result<TokioIo<TlsStream<TcpStream>>>> + Send + 'static,
    {
        let channel = connection(streams)
            .http2_keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE)
            .connect_with_connector_lazy(tower::service_fn(move |_: Uri| connect()));
        let ready = Driver::Ready { name: name.to_owned(), capable: true, lists_deltas: false };
        let (_, state) = watch::channel(ready);
        let lacks_sessions = Arc::new(AtomicBool::new(true));
        Self { channel, state, lacks_sessions, probe_deltas: false, authorization: None }
    }

    /// The same driver, called with this token.
    pub fn with_token(&self, token: &str) -> Self {
        let mut authorization = MetadataValue::try_from(format!("Bearer {token}")).ok();
        authorization.iter_mut().for_each(|header| header.set_sensitive(true));
        Self { authorization, ..self.clone() }
    }

    pub fn state(&self) -> watch::Receiver<Driver> {
        self.state.clone()
    }

    /// The driver's name, if it is ready.
    pub fn name(&self) -> Result<String, Refusal> {
        match &*self.state.borrow() {
            Driver::Ready { name, .. } => Ok(name.clone()),
            Driver::NotReady(why) => {
                let message = format!("the CSI driver is not ready: {why}; retry later");
                Err(Refusal::new(Reason::DriverNotReady, message))
            }
        }
    }

    /// The driver's name, if it is ready and has the SnapshotMetadata service.
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

    /// Calls CSI's SnapshotMetadata service.
    pub async fn get_metadata(
        &self,
        driver_request: DriverRequest,
        secrets: HashMap<String, String>,
        timeout: Duration,
    ) -> Result<MetadataStream, Status> {
        let DriverRequest { target, base, starting_offset, max_results } = driver_request;
        let timeout = timeout + GRACE;
        let Some(base_snapshot_id) = base else {
            let snapshot_id = target;
            let request = csi::GetMetadataAllocatedRequest {
                snapshot_id,
                starting_offset,
                max_results,
                secrets,
            };
            return self.stream(bounded(request, timeout), ALLOCATED).await;
        };
        let request = csi::GetMetadataDeltaRequest {
            base_snapshot_id,
            target_snapshot_id: target,
            starting_offset,
            max_results,
            secrets,
        };
        self.stream(bounded(request, timeout), DELTA).await
    }

    /// Calls the driver's own session API; returns `None` if the driver lacks it. The driver
    /// receives `session_token` and `volume_id` as given here.
    pub async fn get_session_metadata(
        &self,
        driver_request: DriverRequest,
        session_token: String,
        volume_id: String,
        timeout: Duration,
    ) -> Result<Option<MetadataStream>, Status> {
        if self.lacks_sessions.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let DriverRequest { target, base, starting_offset, max_results } = driver_request;
        let (starting_offset, max_results) =
            (starting_offset.unsigned_abs(), max_results.unsigned_abs());
        let timeout = timeout + GRACE;
        let answer = match base {
            None => {
                let request = session::GetAllocatedRequest {
                    session_token,
                    volume_id,
                    snapshot: target,
                    starting_offset,
                    max_results,
                };
                self.stream(bounded(request, timeout), SESSION_ALLOCATED).await
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
                self.stream(bounded(request, timeout), SESSION_DELTA).await
            }
        };
        match answer {
            Err(status) if status.code() == Code::Unimplemented => {
                if !self.lacks_sessions.swap(true, Ordering::Relaxed) {
                    tracing::info!(
                        "the driver lacks the session API; using CSI's SnapshotMetadata service instead"
                    );
                }
                Ok(None)
            }
            answer => answer.map(Some),
        }
    }

    /// Returns a page of the driver's ListSnapshotDeltas, encoded.
    pub async fn list_deltas(
        &self,
        request: csi::ListSnapshotDeltasRequest,
        timeout: Duration,
    ) -> Result<RawMessage, Status> {
        let mut grpc = Grpc::new(self.channel.clone()).max_decoding_message_size(MAX_MESSAGE);
        grpc.ready().await.map_err(|error| Status::from_error(Box::new(error)))?;
        let codec = ProstCodec::<csi::ListSnapshotDeltasRequest, RawMessage>::default();
        let (request, path) =
            (bounded(request, timeout + GRACE), PathAndQuery::from_static(LIST_DELTAS));
        grpc.unary(request, path, codec).await.map(Response::into_inner)
    }

    async fn stream<Q: prost::Message + Send + Sync + 'static>(
        &self,
        mut request: Request<Q>,
        path: &'static str,
    ) -> Result<MetadataStream, Status> {
        let mut grpc = Grpc::new(self.channel.clone()).max_decoding_message_size(MAX_MESSAGE);
        grpc.ready().await.map_err(|error| Status::from_error(Box::new(error)))?;
        let codec = ProstCodec::<Q, RawMessage>::default();
        if let Some(authorization) = &self.authorization {
            request.metadata_mut().insert("authorization", authorization.clone());
        }
        let answer = grpc.server_streaming(request, PathAndQuery::from_static(path), codec).await;
        answer.map(Response::into_inner)
    }

    /// All snapshots of the driver (CSI ListSnapshots).
    pub async fn snapshots(&self) -> Result<Vec<csi::Snapshot>, Status> {
        let mut controller = ControllerClient::new(self.channel.clone());
        let (mut snapshots, mut starting_token) = (Vec::new(), String::new());
        loop {
            let request = csi::ListSnapshotsRequest { starting_token, ..Default::default() };
            let page =
                controller.list_snapshots(bounded(request, LIST_TIMEOUT)).await?.into_inner();
            snapshots.extend(page.entries.into_iter().filter_map(|entry| entry.snapshot));
            if page.next_token.is_empty() {
                return Ok(snapshots);
            }
            starting_token = page.next_token;
        }
    }

    async fn identify(&self, timeout: Duration) -> Result<Driver, Status> {
        let mut identity = IdentityClient::new(self.channel.clone());
        let probe = identity.probe(bounded(csi::ProbeRequest {}, timeout)).await?.into_inner();
        // CSI Probe: a driver that does not set the field is ready.
        if probe.ready == Some(false) {
            return Ok(Driver::NotReady("it reports \"not ready\" in Probe".into()));
        }
        let about =
            identity.get_plugin_info(bounded(csi::GetPluginInfoRequest {}, timeout)).await?;
        let request = bounded(csi::GetPluginCapabilitiesRequest {}, timeout);
        let capabilities =
            identity.get_plugin_capabilities(request).await?.into_inner().capabilities;
        let capable = capabilities.iter().any(|capability| {
            matches!(&capability.r#type, Some(csi::plugin_capability::Type::Service(service))
                if service.r#type() == Type::SnapshotMetadataService)
        });
        let name = about.into_inner().name;
        if name.is_empty() {
            return Ok(Driver::NotReady("it reports an empty name".into()));
        }
        let lists_deltas = self.probe_deltas && self.has_deltas(timeout).await?;
        Ok(Driver::Ready { name, capable, lists_deltas })
    }

    async fn has_deltas(&self, timeout: Duration) -> Result<bool, Status> {
        let mut controller = ControllerClient::new(self.channel.clone());
        let request = bounded(csi::ControllerGetCapabilitiesRequest {}, timeout);
        let capabilities = match controller.controller_get_capabilities(request).await {
            Ok(answer) => answer.into_inner().capabilities,
            // The driver has no Controller service.
            Err(status) if status.code() == Code::Unimplemented => return Ok(false),
            Err(status) => return Err(status),
        };
        Ok(capabilities.iter().any(|capability| {
            matches!(&capability.r#type, Some(csi::controller_service_capability::Type::Rpc(rpc))
                if rpc.r#type() == Rpc::ListBlockSnapshotDeltas)
        }))
    }
}

/// A connection with a window for each of `streams`.
fn connection(streams: usize) -> transport::Endpoint {
    let all = u32::try_from(streams + 1).unwrap_or(u32::MAX).saturating_mul(STREAM_WINDOW);
    // The host is never looked up; it becomes :authority, where h2 refuses a socket path.
    transport::Endpoint::from_static("http://localhost")
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(all.min(LARGEST_WINDOW))
        .max_frame_size(FRAME)
}

fn bounded<T>(message: T, timeout: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(timeout);
    request
}

/// Polls the driver, and publishes and logs changes.
async fn poll(
    link: DriverLink,
    state: watch::Sender<Driver>,
    timeout: Duration,
    shutdown: Shutdown,
) {
    let mut first_name: Option<String> = None;
    loop {
        let polled = tokio::time::timeout(timeout, link.identify(timeout)).await;
        let found = match polled {
            Ok(Ok(driver)) => driver,
            Ok(Err(status)) if status.code() == Code::Unavailable => {
                Driver::NotReady("no process listens on its socket".into())
            }
            Ok(Err(status)) => {
                Driver::NotReady(format!("it returned {}", code_name(status.code())))
            }
            Err(_) => Driver::NotReady("it did not respond in time".into()),
        };
        let found = match (found, &first_name) {
            // Audience, service object and snapshots were looked up for the first name.
            (Driver::Ready { name, .. }, Some(first)) if name != *first => Driver::NotReady(
                format!("its name changed from {first} to {name}; restart the sidecar"),
            ),
            (found, _) => found,
        };
        if let (Driver::Ready { name, .. }, None) = (&found, &first_name) {
            first_name = Some(name.clone());
        }
        update(&state, found);
        let pause = if matches!(*state.borrow(), Driver::Ready { .. }) {
            POLL_READY
        } else {
            POLL_NOT_READY
        };
        tokio::select! {
            () = sleep(pause) => {}
            () = shutdown.ending() => return,
        }
    }
}

fn update(state: &watch::Sender<Driver>, found: Driver) {
    let changed = state.send_if_modified(|known| {
        let changed = *known != found;
        *known = found.clone();
        changed
    });
    match &found {
        Driver::Ready { name, capable: true, .. } if changed => {
            tracing::info!(driver = %name, "the driver is ready")
        }
        Driver::Ready { name, lists_deltas: true, .. } if changed => {
            tracing::info!(driver = %name, "the driver has ListSnapshotDeltas, but no SnapshotMetadata service");
        }
        Driver::Ready { name, .. } if changed => {
            tracing::error!(driver = %name, "the driver has no SnapshotMetadata service; every call fails with UNIMPLEMENTED");
        }
        Driver::NotReady(why) if changed => tracing::warn!(%why, "the driver is not ready"),
        _ => {}
    }
}
