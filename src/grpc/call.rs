//! The common path of every call. A call runs on a thread where it may block, completes even if the
//! client disconnects, is timed, counted and logged in one line, and turns a panic into INTERNAL.
//!
//! Only names, ids and paths are logged, field by field. A whole message is never logged, because
//! messages contain secrets, mount flags and parameters.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tonic::{Code, Request, Response, Status};
use tracing::Level;

use super::{code_name, fingerprint, is_fingerprint};
use common::text::truncate;
use telemetry::metrics::Metrics;
use telemetry::task;

/// Maximum logged bytes of a name, id or path; valid names and ids are shorter.
const MAX_LOGGED: usize = 256;

/// Starts calls and tracks the running ones. Clones share the state.
#[derive(Clone)]
pub struct Calls {
    metrics: Metrics,
    running: watch::Sender<usize>,
}

impl Calls {
    pub fn new(metrics: Metrics) -> Self {
        // Of the 17 codes, OK is 0.
        (1..=16).map(Code::from).for_each(|code| metrics.expect_failures(code_name(code)));
        Self { metrics, running: watch::Sender::new(0) }
    }

    /// Waits until no call runs, including calls whose client has disconnected.
    pub async fn idle(&self) {
        // `self` holds a sender, so that the channel cannot close.
        let _ = self.running.subscribe().wait_for(|running| *running == 0).await;
    }

    /// Runs a unary call.
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
        let work = task::blocking(move || {
            let result = catch_unwind(AssertUnwindSafe(|| run(request)))
                .unwrap_or_else(|_| Err(panicked(method)));
            if let Ok(response) = &result {
                call.note(response);
            }
            call.end(result.as_ref().err());
            result
        });
        work.await.unwrap_or_else(|_| Err(exiting())).map(Response::new)
    }

    /// Starts a call. The caller must end it.
    pub fn begin(&self, method: &'static str, request: &impl Describe) -> Call {
        self.running.send_modify(|running| *running += 1);
        let calls = self.clone();
        Call {
            method,
            subject: Subject::of(request),
            start: Instant::now(),
            calls,
            messages: 0,
            extents: 0,
            ended: false,
        }
    }
}

/// A running call. A call that is dropped before its end is reported as CANCELLED.
pub struct Call {
    method: &'static str,
    subject: Subject,
    start: Instant,
    calls: Calls,
    messages: u64,
    extents: u64,
    ended: bool,
}

impl Call {
    pub fn method(&self) -> &'static str {
        self.method
    }

    /// Counts sent messages of a stream.
    pub fn add_messages(&mut self, messages: usize, extents: usize) {
        self.messages += messages as u64;
        self.extents += extents as u64;
        self.calls.metrics.add_extents(extents as u64);
    }

    /// Adds what a message, such as the response, contains about the call.
    pub fn note(&mut self, message: &impl Describe) {
        message.describe(&mut self.subject);
    }

    /// Logs and counts the call.
    pub fn end(mut self, error: Option<&Status>) {
        self.report(error.map_or(Code::Ok, Status::code), error.map(Status::message));
    }

    fn report(&mut self, code: Code, error: Option<&str>) {
        self.ended = true;
        let duration = self.start.elapsed();
        self.calls.metrics.observe_call(self.method, code_name(code), duration);
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
            self.report(Code::Cancelled, Some("the client disconnected"));
        }
        self.calls.running.send_modify(|running| *running -= 1);
    }
}

/// With a resolution of one microsecond.
fn milliseconds(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1000.0
}

/// The objects of a call, limited to what may be logged.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Subject {
    pub name: Option<String>,
    pub volume_id: Option<String>,
    pub snapshot_id: Option<String>,
    pub base_snapshot_id: Option<String>,
    pub group_snapshot_id: Option<String>,
    pub path: Option<String>,
    /// A fingerprint: the token itself is a secret.
    pub session: Option<String>,
    /// Whether the request defers the mount to a container runtime.
    pub deferred: bool,
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
            .any(|logged| logged.as_deref().is_some_and(|logged| logged.contains(text)))
    }

    /// Whether the call compares two snapshots.
    pub fn has_base(&self) -> bool {
        self.base_snapshot_id.is_some()
    }

    /// The snapshots that a metadata call reads.
    pub fn snapshot_ids(&self) -> impl Iterator<Item = &str> {
        [&self.base_snapshot_id, &self.snapshot_id].into_iter().filter_map(|id| id.as_deref())
    }
}

/// A message that reports which of its fields may be logged.
pub trait Describe {
    fn describe(&self, subject: &mut Subject);
}

/// The value for the log: `None` for an empty field, otherwise truncated, because it is not
/// validated yet.
pub fn note(value: &str) -> Option<String> {
    (!value.is_empty()).then(|| truncate(value, MAX_LOGGED))
}

/// The fingerprint of a session token, for the log. This project's sidecar sends a fingerprint
/// instead of the token and logs the same value.
pub fn note_session(token: &str) -> Option<String> {
    match token {
        "" => None,
        token if is_fingerprint(token) => Some(token.to_owned()),
        token => Some(fingerprint(token)),
    }
}

pub fn panicked(method: &str) -> Status {
    Status::internal(format!(
        "{method} panicked, which is a bug; the log of the server has the location"
    ))
}

pub fn exiting() -> Status {
    Status::unavailable("the server is shutting down; try again")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Probe;

    impl Describe for Probe {
        fn describe(&self, _: &mut Subject) {}
    }

    fn calls() -> Calls {
        Calls::new(Metrics::new(Vec::new()))
    }

    #[tokio::test]
    async fn a_panic_becomes_internal_and_is_counted() {
        let calls = calls();
        let request = Request::new(Probe);
        let response = calls
            .unary("Probe", request, |_| -> Result<Probe, Status> { panic!("on purpose") })
            .await;
        assert_eq!(response.unwrap_err().code(), Code::Internal);
        let metrics = calls.metrics.scrape().unwrap();
        assert!(metrics.contains(r#"count{method="Probe",code="INTERNAL"} 1"#), "{metrics}");
    }

    #[tokio::test]
    async fn a_call_completes_after_the_client_disconnects() {
        let calls = calls();
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let request = Request::new(Probe);
        let running = calls.unary("Probe", request, move |_| {
            wait.recv().unwrap();
            Ok(Probe)
        });
        let gone = tokio::time::timeout(Duration::from_millis(20), running).await;
        assert!(gone.is_err());
        assert_eq!(*calls.running.borrow(), 1);
        go.send(()).unwrap();
        calls.idle().await;
        let metrics = calls.metrics.scrape().unwrap();
        assert!(metrics.contains(r#"count{method="Probe",code="OK"} 1"#), "{metrics}");
    }
}
