//! One call from its first byte to its last: counted, and logged in one line. The line holds names, the user or a
//! fingerprint of the session, and numbers, never a token, a secret or a message as a whole.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tonic::{Code, Status};

use super::metrics::{Metrics, Operation};
use super::refusal::{Reason, Refusal};
use crate::grpc::{code_name, cut};

/// Bytes of a name that go into the log.
const MAX_LOGGED: usize = 253;

/// A call that runs. One that is dropped before its end counts as CANCELLED.
pub struct Call {
    operation: Operation,
    metrics: Metrics,
    denied_as: Code,
    begun: Instant,
    namespace: String,
    target: String,
    base: Option<String>,
    user: Option<String>,
    session: Option<String>,
    messages: u64,
    extents: u64,
    bytes: u64,
    relaying: bool,
    ended: bool,
    // Dropped with the call, which is then no longer one that runs.
    _running: Running,
}

impl Call {
    pub fn begin(
        operation: Operation,
        metrics: Metrics,
        denied_as: Code,
        running: Running,
    ) -> Self {
        Self {
            operation,
            metrics,
            denied_as,
            begun: Instant::now(),
            namespace: String::new(),
            target: String::new(),
            base: None,
            user: None,
            session: None,
            messages: 0,
            extents: 0,
            bytes: 0,
            relaying: false,
            ended: false,
            _running: running,
        }
    }

    /// Notes what it is about, once that was checked.
    pub fn about(&mut self, target: &str, base: Option<&str>) {
        self.target = target.to_owned();
        self.base = base.map(|base| cut(base, MAX_LOGGED));
    }

    pub fn within(&mut self, namespace: &str) {
        self.namespace = namespace.to_owned();
    }

    /// Notes the session, by its fingerprint.
    pub fn of(&mut self, session: String) {
        self.session = Some(session);
    }

    pub fn by(&mut self, user: Option<&str>) {
        self.user = user.map(|user| cut(user, MAX_LOGGED));
    }

    /// The answer begins.
    pub fn relaying(&mut self) {
        self.relaying = true;
        self.metrics.opened();
    }

    /// Books one message.
    pub fn relayed(&mut self, extents: u64, bytes: u64) {
        self.messages += 1;
        self.extents += extents;
        self.bytes += bytes;
        self.metrics.relayed(1, extents, bytes);
    }

    pub fn succeeded(&mut self) {
        self.end(Code::Ok, None, None);
    }

    /// Ends it with a refusal; returns what the client is told.
    pub fn refused(&mut self, refusal: &Refusal) -> Status {
        let status = match refusal.reason {
            Reason::NotAllowed => refusal.status_with(self.denied_as),
            _ => refusal.status(),
        };
        self.metrics.refused(refusal.reason.label());
        self.end(status.code(), Some(refusal.reason.label()), Some(status.message()));
        status
    }

    fn end(&mut self, code: Code, reason: Option<&'static str>, error: Option<&str>) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        if self.relaying {
            self.metrics.closed();
        }
        let duration = self.begun.elapsed();
        self.metrics.called(self.operation, code, duration);
        self.log(code, reason, error, duration);
    }

    fn log(&self, code: Code, reason: Option<&str>, error: Option<&str>, duration: Duration) {
        macro_rules! line {
            ($level:expr) => {
                tracing::event!(
                    $level,
                    rpc = self.operation.method(),
                    namespace = self.namespace,
                    snapshot = self.target,
                    base = self.base,
                    user = self.user,
                    session = self.session,
                    messages = self.messages,
                    extents = self.extents,
                    bytes = self.bytes,
                    duration_ms = duration.as_micros() as f64 / 1000.0,
                    code = code_name(code),
                    reason,
                    error,
                    "call"
                )
            };
        }
        match code {
            Code::Ok => line!(tracing::Level::INFO),
            Code::Internal | Code::DataLoss | Code::Unknown => line!(tracing::Level::ERROR),
            _ => line!(tracing::Level::WARN),
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.end(Code::Cancelled, None, Some("the client went away"));
    }
}

/// Counts calls that run, up to a limit. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Calls {
    running: Arc<AtomicUsize>,
    limit: usize,
}

impl Calls {
    pub fn new(limit: usize) -> Self {
        Self { running: Arc::default(), limit }
    }

    /// One more, unless there are too many.
    pub fn begin(&self) -> Option<Running> {
        let before = self.running.fetch_add(1, Ordering::Relaxed);
        let running = Running(self.running.clone());
        (before < self.limit).then_some(running)
    }
}

/// One that is counted, until it is dropped.
#[derive(Debug)]
pub struct Running(Arc<AtomicUsize>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_beyond_the_limit_are_turned_away_until_one_ends() {
        let calls = Calls::new(2);
        let first = calls.begin().unwrap();
        let _second = calls.begin().unwrap();
        assert!(calls.begin().is_none() && calls.begin().is_none());
        drop(first);
        assert!(calls.begin().is_some());
    }
}
