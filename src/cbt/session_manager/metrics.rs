//! The manager's metrics. Labels come from fixed sets, never from a request.

use std::fmt;
use std::sync::Arc;

use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    reason: &'static str,
}

/// Clones share the metrics.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    finished: Family<Outcome, Counter>,
    expired: Counter,
    ended: Counter,
    swept: Counter,
    attempts_failed: Counter,
    leading: Gauge,
}

impl Metrics {
    /// `more` registers metrics of other parts.
    pub fn new(more: impl FnOnce(&mut Registry)) -> Self {
        let mut registry = Registry::with_prefix("csi_loopback_session_manager");
        let metrics = (Family::default(), Counter::default(), Counter::default());
        let (finished, expired, ended) = metrics;
        let (swept, attempts_failed, leading) =
            (Counter::default(), Counter::default(), Gauge::default());
        registry.register(
            "requests_finished",
            "Requests that became Ready or Failed, by the reason of their condition",
            Family::clone(&finished),
        );
        registry.register("requests_expired", "Requests deleted at their expiry", expired.clone());
        registry.register(
            "requests_ended",
            "Requests whose data and finalizer were deleted",
            ended.clone(),
        );
        registry.register(
            "data_swept",
            "Orphaned SnapshotSessionData that were deleted",
            swept.clone(),
        );
        registry.register(
            "attempts_failed",
            "Failed reconciliations of a request, except conflicts",
            attempts_failed.clone(),
        );
        registry.register("leading", "1 in the leader", leading.clone());
        more(&mut registry);
        Self {
            registry: Arc::new(registry),
            finished,
            expired,
            ended,
            swept,
            attempts_failed,
            leading,
        }
    }

    /// Counts a request that became Ready or Failed; `reason` is from a fixed set.
    pub fn finished(&self, reason: &'static str) {
        self.finished.get_or_create(&Outcome { reason }).inc();
    }

    pub fn expired(&self) {
        self.expired.inc();
    }

    pub fn ended(&self) {
        self.ended.inc();
    }

    pub fn swept(&self) {
        self.swept.inc();
    }

    pub fn attempt_failed(&self) {
        self.attempts_failed.inc();
    }

    pub fn leading(&self, leads: bool) {
        self.leading.set(leads.into());
    }

    pub fn scrape(&self) -> Result<String, fmt::Error> {
        let mut body = String::new();
        text::encode(&mut body, &self.registry)?;
        Ok(body)
    }
}
