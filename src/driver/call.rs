//! What every call goes through: it runs on a thread where it may block, to its end even if the
//! client goes away, is timed, counted and logged in one line, and a panic in it becomes INTERNAL.
//!
//! Only names, ids and paths reach the log, field by field: never a message as a whole, for those
//! hold secrets, mount flags and parameters.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tonic::{Code, Request, Response, Status};
use tracing::Level;

use super::status;
use crate::grpc::{code_name, cut, fingerprint, is_fingerprint};
use crate::inline::DEFER_FS_MOUNT;
use crate::proto::csi::v1 as csi;
use crate::proto::snapshotsession as session;
use crate::telemetry::metrics::Metrics;

/// Bytes of a name, id or path that go into the log; valid ones of names and ids are shorter.
const MAX_LOGGED: usize = 256;

/// Begins calls. Cheap to clone.
#[derive(Clone)]
pub struct Calls {
    metrics: Metrics,
    running: watch::Sender<usize>,
}

impl Calls {
    pub fn new(metrics: Metrics) -> Self {
        Self { metrics, running: watch::Sender::new(0) }
    }

    /// Waits until no call runs, those included whose client has gone.
    pub async fn idle(&self) {
        // `self` holds a sender, so that the channel cannot close.
        let _ = self.running.subscribe().wait_for(|running| *running == 0).await;
    }

    /// Runs a call with one answer.
    pub async fn unary<Q, R>(
        &self,
        method: &'static str,
        request: Request<Q>,
        run: impl FnOnce(Q) -> Result<R, Status> + Send + 'static,
    ) -> Result<Response<R>, Status>
    where
        Q: Describe + Send + 'static,
        R: Describe + Send + 'static,
    {
        let request = request.into_inner();
        let mut call = self.begin(method, &request);
        let work = spawn_blocking(move || {
            let result = catch_unwind(AssertUnwindSafe(|| run(request)))
                .unwrap_or_else(|_| Err(status::panicked(method)));
            if let Ok(response) = &result {
                response.describe(&mut call.subject);
            }
            call.end(result.as_ref().err());
            result
        });
        work.await.unwrap_or_else(|_| Err(status::exiting())).map(Response::new)
    }

    /// Begins a call that the caller ends.
    pub fn begin(&self, method: &'static str, request: &impl Describe) -> Call {
        self.running.send_modify(|running| *running += 1);
        let calls = self.clone();
        Call {
            method,
            subject: Subject::of(request),
            begun: Instant::now(),
            calls,
            messages: 0,
            extents: 0,
            ended: false,
        }
    }
}

/// A call that runs. One that is dropped before its end counts as CANCELLED.
pub struct Call {
    method: &'static str,
    subject: Subject,
    begun: Instant,
    calls: Calls,
    messages: u64,
    extents: u64,
    ended: bool,
}

impl Call {
    pub fn method(&self) -> &'static str {
        self.method
    }

    /// Books messages of a stream.
    pub fn streamed(&mut self, messages: usize, extents: usize) {
        self.messages += messages as u64;
        self.extents += extents as u64;
        self.calls.metrics.streamed(extents as u64);
    }

    /// Logs and counts the call.
    pub fn end(mut self, error: Option<&Status>) {
        self.report(error.map_or(Code::Ok, Status::code), error.map(Status::message));
    }

    fn report(&mut self, code: Code, error: Option<&str>) {
        self.ended = true;
        let duration = self.begun.elapsed();
        self.calls.metrics.called(self.method, code_name(code), duration);
        self.log(code, error, duration);
    }

    fn log(&self, code: Code, error: Option<&str>, duration: Duration) {
        macro_rules! line {
            ($level:expr) => {
                tracing::event!(
                    $level,
                    rpc = self.method,
                    name = self.subject.name.as_deref(),
                    volume_id = self.subject.volume_id.as_deref(),
                    snapshot_id = self.subject.snapshot_id.as_deref(),
                    base_snapshot_id = self.subject.base_snapshot_id.as_deref(),
                    group_snapshot_id = self.subject.group_snapshot_id.as_deref(),
                    path = self.subject.path.as_deref(),
                    session = self.subject.session.as_deref(),
                    deferred = self.subject.deferred.then_some(true),
                    messages = (self.messages > 0).then_some(self.messages),
                    extents = (self.messages > 0).then_some(self.extents),
                    duration_ms = milliseconds(duration),
                    code = code_name(code),
                    error,
                    "call"
                )
            };
        }
        match code {
            Code::Ok => line!(Level::INFO),
            Code::Internal | Code::DataLoss | Code::Unknown => line!(Level::ERROR),
            _ => line!(Level::WARN),
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if !self.ended {
            self.report(Code::Cancelled, Some("the client went away"));
        }
        self.calls.running.send_modify(|running| *running -= 1);
    }
}

/// To the microsecond.
fn milliseconds(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1000.0
}

/// What a call is about, as far as a log may know.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Subject {
    name: Option<String>,
    volume_id: Option<String>,
    snapshot_id: Option<String>,
    base_snapshot_id: Option<String>,
    group_snapshot_id: Option<String>,
    path: Option<String>,
    /// A fingerprint: the token itself is a secret.
    session: Option<String>,
    /// Whether the request leaves the mount to a container runtime.
    deferred: bool,
}

impl Subject {
    pub fn of(message: &impl Describe) -> Self {
        let mut subject = Self::default();
        message.describe(&mut subject);
        subject
    }

    /// Whether one of its names, ids or paths contains `text`.
    pub fn mentions(&self, text: &str) -> bool {
        let Self {
            name,
            volume_id,
            snapshot_id,
            base_snapshot_id,
            group_snapshot_id,
            path,
            session: _,
            deferred: _,
        } = self;
        [name, volume_id, snapshot_id, base_snapshot_id, group_snapshot_id, path]
            .iter()
            .any(|noted| noted.as_deref().is_some_and(|noted| noted.contains(text)))
    }

    /// Whether it is about two snapshots.
    pub fn has_base(&self) -> bool {
        self.base_snapshot_id.is_some()
    }

    /// The snapshots that a metadata call reads.
    pub fn snapshot_ids(&self) -> impl Iterator<Item = &str> {
        [&self.base_snapshot_id, &self.snapshot_id].into_iter().filter_map(|id| id.as_deref())
    }
}

/// A message that can say which of its fields the log may know.
pub trait Describe {
    fn describe(&self, subject: &mut Subject);
}

/// The value for the log: nothing for an absent field, and cut, for it is not checked yet.
fn note(value: &str) -> Option<String> {
    (!value.is_empty()).then(|| cut(value, MAX_LOGGED))
}

/// What the log may know of a session. The sidecar of this project sends a fingerprint, and its log has the same.
fn note_session(token: &str) -> Option<String> {
    match token {
        "" => None,
        token if is_fingerprint(token) => Some(token.to_owned()),
        token => Some(fingerprint(token)),
    }
}

macro_rules! describe {
    ($($message:ident { $($noted:ident: $($field:ident).+),* })*) => {$(
        impl Describe for csi::$message {
            #[allow(unused_variables)]
            fn describe(&self, subject: &mut Subject) {
                $(subject.$noted = note(&self.$($field).+);)*
            }
        }
    )*};
}

describe! {
    GetPluginInfoRequest {}
    GetPluginInfoResponse {}
    GetPluginCapabilitiesRequest {}
    GetPluginCapabilitiesResponse {}
    ProbeRequest {}
    ProbeResponse {}
    CreateVolumeRequest { name: name }
    DeleteVolumeRequest { volume_id: volume_id }
    DeleteVolumeResponse {}
    ControllerPublishVolumeRequest { volume_id: volume_id }
    ControllerPublishVolumeResponse {}
    ControllerUnpublishVolumeRequest { volume_id: volume_id }
    ControllerUnpublishVolumeResponse {}
    ValidateVolumeCapabilitiesRequest { volume_id: volume_id }
    ValidateVolumeCapabilitiesResponse {}
    ListVolumesRequest {}
    ListVolumesResponse {}
    GetCapacityRequest {}
    GetCapacityResponse {}
    ControllerGetCapabilitiesRequest {}
    ControllerGetCapabilitiesResponse {}
    CreateSnapshotRequest { name: name, volume_id: source_volume_id }
    DeleteSnapshotRequest { snapshot_id: snapshot_id }
    DeleteSnapshotResponse {}
    ListSnapshotsRequest { volume_id: source_volume_id, snapshot_id: snapshot_id }
    ListSnapshotsResponse {}
    GetSnapshotRequest { snapshot_id: snapshot_id }
    GetSnapshotResponse {}
    ControllerExpandVolumeRequest { volume_id: volume_id }
    ControllerExpandVolumeResponse {}
    ControllerGetVolumeRequest { volume_id: volume_id }
    ControllerGetVolumeResponse {}
    ControllerModifyVolumeRequest { volume_id: volume_id }
    ControllerModifyVolumeResponse {}
    ListSnapshotDeltasRequest { base_snapshot_id: from_snapshot_id, snapshot_id: to_snapshot_id }
    ListSnapshotDeltasResponse {}
    GroupControllerGetCapabilitiesRequest {}
    GroupControllerGetCapabilitiesResponse {}
    DeleteVolumeGroupSnapshotRequest { group_snapshot_id: group_snapshot_id }
    DeleteVolumeGroupSnapshotResponse {}
    GetVolumeGroupSnapshotRequest { group_snapshot_id: group_snapshot_id }
    GetVolumeGroupSnapshotResponse {}
    NodeStageVolumeRequest { volume_id: volume_id, path: staging_target_path }
    NodeStageVolumeResponse {}
    NodeUnstageVolumeRequest { volume_id: volume_id, path: staging_target_path }
    NodeUnstageVolumeResponse {}
    NodePublishVolumeResponse {}
    NodeUnpublishVolumeResponse {}
    NodeGetVolumeStatsResponse {}
    NodeExpandVolumeResponse {}
    NodeGetCapabilitiesRequest {}
    NodeGetCapabilitiesResponse {}
    NodeGetInfoRequest {}
    NodeGetInfoResponse {}
    GetMetadataAllocatedRequest { snapshot_id: snapshot_id }
    GetMetadataDeltaRequest { base_snapshot_id: base_snapshot_id, snapshot_id: target_snapshot_id }
}

macro_rules! describe_deferrable {
    ($($message:ident: $path:ident,)*) => {$(
        impl Describe for csi::$message {
            fn describe(&self, subject: &mut Subject) {
                subject.volume_id = note(&self.volume_id);
                subject.path = note(&self.$path);
                subject.deferred = self.defer_fs_ops;
            }
        }
    )*};
}

describe_deferrable! {
    NodeUnpublishVolumeRequest: target_path,
    NodeGetVolumeStatsRequest: volume_path,
    NodeExpandVolumeRequest: volume_path,
}

impl Describe for csi::NodePublishVolumeRequest {
    fn describe(&self, subject: &mut Subject) {
        subject.volume_id = note(&self.volume_id);
        subject.path = note(&self.target_path);
        let opted_in = self.volume_context.get(DEFER_FS_MOUNT).is_some_and(|value| value == "true");
        subject.deferred = self.defer_fs_ops || opted_in;
    }
}

impl Describe for session::GetAllocatedRequest {
    fn describe(&self, subject: &mut Subject) {
        subject.session = note_session(&self.session_token);
        subject.volume_id = note(&self.volume_id);
        subject.snapshot_id = note(&self.snapshot);
    }
}

impl Describe for session::GetDeltaRequest {
    fn describe(&self, subject: &mut Subject) {
        subject.session = note_session(&self.session_token);
        subject.volume_id = note(&self.volume_id);
        subject.snapshot_id = note(&self.target_snapshot);
        subject.base_snapshot_id = note(&self.base_snapshot);
    }
}

impl Describe for csi::CreateVolumeResponse {
    fn describe(&self, subject: &mut Subject) {
        subject.volume_id = self.volume.as_ref().and_then(|volume| note(&volume.volume_id));
    }
}

impl Describe for csi::CreateSnapshotResponse {
    fn describe(&self, subject: &mut Subject) {
        subject.snapshot_id = self.snapshot.as_ref().and_then(|made| note(&made.snapshot_id));
    }
}

impl Describe for csi::CreateVolumeGroupSnapshotRequest {
    fn describe(&self, subject: &mut Subject) {
        subject.name = note(&self.name);
        subject.volume_id = note(&self.source_volume_ids.join(","));
    }
}

impl Describe for csi::CreateVolumeGroupSnapshotResponse {
    fn describe(&self, subject: &mut Subject) {
        let group = self.group_snapshot.as_ref();
        subject.group_snapshot_id = group.and_then(|group| note(&group.group_snapshot_id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls() -> Calls {
        Calls::new(Metrics::new(Vec::new()))
    }

    #[tokio::test]
    async fn a_panic_becomes_internal_and_is_counted() {
        let calls = calls();
        let request = Request::new(csi::ProbeRequest {});
        let answer = calls
            .unary("Probe", request, |_| -> Result<csi::ProbeResponse, Status> {
                panic!("on purpose")
            })
            .await;
        assert_eq!(answer.unwrap_err().code(), Code::Internal);
        let metrics = calls.metrics.scrape().unwrap();
        assert!(metrics.contains(r#"count{method="Probe",code="INTERNAL"} 1"#), "{metrics}");
    }

    #[tokio::test]
    async fn a_call_runs_to_its_end_when_the_client_goes_away() {
        let calls = calls();
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let request = Request::new(csi::ProbeRequest {});
        let running = calls.unary("Probe", request, move |_| {
            wait.recv().unwrap();
            Ok(csi::ProbeResponse { ready: Some(true) })
        });
        let gone = tokio::time::timeout(Duration::from_millis(20), running).await;
        assert!(gone.is_err());
        assert_eq!(*calls.running.borrow(), 1);
        go.send(()).unwrap();
        calls.idle().await;
        let metrics = calls.metrics.scrape().unwrap();
        assert!(metrics.contains(r#"count{method="Probe",code="OK"} 1"#), "{metrics}");
    }

    #[test]
    fn of_a_sessions_token_the_log_knows_a_fingerprint() {
        let of = |token: &str| {
            let asked =
                session::GetDeltaRequest { session_token: token.into(), ..Default::default() };
            Subject::of(&asked).session
        };
        assert_eq!(of(""), None);
        assert_eq!(of("abc").as_deref(), Some("ba7816bf8f01cfea"));
        assert_eq!(of("ba7816bf8f01cfea").as_deref(), Some("ba7816bf8f01cfea"));
    }

    #[test]
    fn the_log_knows_that_a_mount_was_left_to_a_runtime() {
        let context = |value: &str| [("deferFSMount".to_owned(), value.to_owned())].into();
        let publish =
            csi::NodePublishVolumeRequest { volume_id: "v-1".into(), ..Default::default() };
        let by_field = csi::NodePublishVolumeRequest { defer_fs_ops: true, ..publish.clone() };
        let opted_in =
            csi::NodePublishVolumeRequest { volume_context: context("true"), ..publish.clone() };
        let not =
            csi::NodePublishVolumeRequest { volume_context: context("hunter2"), ..publish.clone() };
        let known = [&publish, &by_field, &opted_in, &not].map(|asked| Subject::of(asked).deferred);
        assert_eq!(known, [false, true, true, false]);
        let stats = csi::NodeGetVolumeStatsRequest { defer_fs_ops: true, ..Default::default() };
        assert!(Subject::of(&stats).deferred);
    }

    #[test]
    fn the_log_knows_ids_and_no_secrets() {
        let request = csi::NodeStageVolumeRequest {
            volume_id: "v-1".into(),
            staging_target_path: "/stage".into(),
            secrets: [("key".to_owned(), "hunter2".to_owned())].into(),
            ..Default::default()
        };
        let subject = Subject::of(&request);
        assert_eq!(subject.volume_id.as_deref(), Some("v-1"));
        assert_eq!(subject.path.as_deref(), Some("/stage"));
        assert!(!format!("{subject:?}").contains("hunter2"));
    }
}
