//! One call of a client, from start to end: metrics, and one log line. The line holds names, the
//! user or a fingerprint of the session, and numbers; never a token, a secret or a message.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tonic::{Code, Status};

use super::metrics::{Metrics, Operation};
use super::refusal::{Reason, Refusal};
use common::text::truncate;
use grpc::code_name;
use telemetry::log_budget::LogBudget;

/// Maximum bytes of a name in the log.
const MAX_LOGGED: usize = 253;

/// A call in progress. If it is dropped before its end, it is recorded as CANCELLED.
pub struct Call {
    operation: Operation,
    metrics: Metrics,
    denied_as: Code,
    /// Limits the lines of calls with invalid tokens, which any client can make.
    invalid_tokens: Arc<LogBudget>,
    started: Instant,
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
    // Released with the call.
    _permit: Permit,
}

impl Call {
    pub fn begin(
        operation: Operation,
        metrics: Metrics,
        denied_as: Code,
        invalid_tokens: Arc<LogBudget>,
        running: Permit,
    ) -> Self {
        Self {
            operation,
            metrics,
            denied_as,
            invalid_tokens,
            started: Instant::now(),
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
            _permit: running,
        }
    }

    /// Sets the snapshots for the log line, after they were validated.
    pub fn set_snapshots(&mut self, target: &str, base: Option<&str>) {
        self.target = target.to_owned();
        self.base = base.map(|base| truncate(base, MAX_LOGGED));
    }

    pub fn set_namespace(&mut self, namespace: &str) {
        self.namespace = namespace.to_owned();
    }

    /// Sets the fingerprint of the session.
    pub fn set_session(&mut self, session: String) {
        self.session = Some(session);
    }

    pub fn set_user(&mut self, user: Option<&str>) {
        self.user = user.map(|user| truncate(user, MAX_LOGGED));
    }

    /// Records that the response stream starts.
    pub fn relaying(&mut self) {
        self.relaying = true;
        self.metrics.opened();
    }

    /// Records one message.
    pub fn relayed(&mut self, extents: u64, bytes: u64) {
        self.messages += 1;
        self.extents += extents;
        self.bytes += bytes;
        self.metrics.relayed(1, extents, bytes);
    }

    pub fn succeeded(&mut self) {
        self.end(Code::Ok, None, None);
    }

    /// Ends the call with a refusal and returns the client's status.
    pub fn refused(&mut self, refusal: &Refusal) -> Status {
        let status = match refusal.reason {
            Reason::NotAllowed => refusal.status_with(self.denied_as),
            _ => refusal.status(),
        };
        self.metrics.refused(refusal.reason.label());
        self.end(status.code(), Some(refusal.reason), Some(status.message()));
        status
    }

    fn end(&mut self, code: Code, reason: Option<Reason>, error: Option<&str>) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        if self.relaying {
            self.metrics.closed();
        }
        let duration = self.started.elapsed();
        self.metrics.called(self.operation, code, duration);
        self.log(code, reason, error, duration);
    }

    fn log(&self, code: Code, reason: Option<Reason>, error: Option<&str>, duration: Duration) {
        let omitted = match reason {
            Some(Reason::Unauthenticated | Reason::SessionInvalid) => {
                match self.invalid_tokens.line() {
                    Some(omitted) => omitted,
                    None => return,
                }
            }
            _ => 0,
        };
        let reason = reason.map(Reason::label);
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
                    omitted = (omitted > 0).then_some(omitted),
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
        self.end(Code::Cancelled, None, Some("the client disconnected"));
    }
}

/// Limits the number of concurrent calls. Clones share the count.
#[derive(Debug, Clone)]
pub struct ConcurrencyLimit {
    running: Arc<AtomicUsize>,
    limit: usize,
}

impl ConcurrencyLimit {
    pub fn new(limit: usize) -> Self {
        Self { running: Arc::default(), limit }
    }

    /// Returns a permit, unless the limit is reached.
    pub fn try_acquire(&self) -> Option<Permit> {
        let before = self.running.fetch_add(1, Ordering::Relaxed);
        let running = Permit(self.running.clone());
        (before < self.limit).then_some(running)
    }
}

/// One counted call, until it is dropped.
#[derive(Debug)]
pub struct Permit(Arc<AtomicUsize>);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
