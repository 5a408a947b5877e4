//! Metrics of cbt-http. Labels come from a fixed set.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

/// Upper bounds of the buckets, in seconds.
const BUCKETS: [f64; 11] = [0.002, 0.005, 0.01, 0.025, 0.1, 0.25, 1.0, 2.5, 10.0, 30.0, 60.0];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    outcome: &'static str,
}

/// Clones share the metrics.
#[derive(Clone)]
pub struct Metrics {
    requests: Family<Outcome, Counter>,
    seconds: Histogram,
    blocks: Counter,
    leading: Gauge,
}

impl Metrics {
    pub fn new() -> Self {
        Self {
            requests: Family::default(),
            seconds: Histogram::new(BUCKETS),
            blocks: Counter::default(),
            leading: Gauge::default(),
        }
    }

    pub fn register(&self, registry: &mut Registry) {
        let own = registry.sub_registry_with_prefix("cbt_http");
        own.register("requests", "Requests, by outcome", self.requests.clone());
        own.register("request_seconds", "Duration of requests", self.seconds.clone());
        own.register("blocks", "Changed blocks returned", self.blocks.clone());
        own.register("leading", "1 in the replica that serves pages", self.leading.clone());
    }

    pub fn ended(&self, outcome: &'static str, duration: Duration) {
        self.requests.get_or_create(&Outcome { outcome }).inc();
        self.seconds.observe(duration.as_secs_f64());
    }

    pub fn returned(&self, blocks: usize) {
        self.blocks.inc_by(blocks as u64);
    }

    pub fn leading(&self, leads: bool) {
        self.leading.set(leads.into());
    }
}
