//! The manager's numbers. Labels come from fixed sets: nothing that a request says becomes one.

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

/// Cheap to clone; all clones count into the same numbers.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    finished: Family<Outcome, Counter>,
    expired: Counter,
    ended: Counter,
    swept: Counter,
    troubled: Counter,
    leading: Gauge,
}

impl Metrics {
    /// `more` registers numbers that live elsewhere.
    pub fn new(more: impl FnOnce(&mut Registry)) -> Self {
        let mut registry = Registry::with_prefix("csi_loopback_session_manager");
        let metrics = (Family::default(), Counter::default(), Counter::default());
        let (finished, expired, ended) = metrics;
        let (swept, troubled, leading) = (Counter::default(), Counter::default(), Gauge::default());
        registry.register(
            "requests_finished",
            "Requests that became Ready or Failed, by the reason of their condition",
            Family::clone(&finished),
        );
        registry.register("requests_expired", "Requests deleted at their end", expired.clone());
        registry.register(
            "requests_ended",
            "Requests that were let go, their data deleted",
            ended.clone(),
        );
        registry.register(
            "data_swept",
            "SnapshotSessionData deleted that no request accounted for",
            swept.clone(),
        );
        registry.register(
            "attempts_failed",
            "Looks at a request that have to be repeated, conflicts aside",
            troubled.clone(),
        );
        registry.register("leading", "1 in the replica that looks after requests", leading.clone());
        more(&mut registry);
        Self { registry: Arc::new(registry), finished, expired, ended, swept, troubled, leading }
    }

    /// A request has become Ready or Failed; `reason` is one of a fixed set.
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

    pub fn troubled(&self) {
        self.troubled.inc();
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
