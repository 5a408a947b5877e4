//! The metrics of a process, in the OpenMetrics text format. Every label comes from a fixed set
//! (method names, gRPC codes), never from a request, so clients cannot create new series.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

/// Upper bounds of the histogram's buckets in seconds: from a lookup to a mkfs on a slow disk.
const BUCKETS: [f64; 12] =
    [0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0, 120.0];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Call {
    method: &'static str,
    code: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Failure {
    code: &'static str,
}

/// The metrics of a process. All clones update the same values.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    calls: Family<Call, Histogram, fn() -> Histogram>,
    failures: Family<Failure, Counter>,
    extents: Counter,
    deferred: Counter,
}

impl Metrics {
    /// `collectors` provide further values at each scrape.
    pub fn new(collectors: Vec<Box<dyn Collector>>) -> Self {
        Self::with_names(collectors, Vec::new())
    }

    /// The same, with collectors in `named` whose metrics get no prefix.
    pub fn with_names(collectors: Vec<Box<dyn Collector>>, named: Vec<Box<dyn Collector>>) -> Self {
        let mut all = Registry::default();
        named.into_iter().for_each(|collector| all.register_collector(collector));
        let deferred = Counter::default();
        // No prefix: the proposal defines the name for operators (KEP-2857, "Monitoring
        // Requirements").
        all.register(
            "volumes_published_with_deferred_ops",
            "Volumes published with the mount deferred to a container runtime",
            deferred.clone(),
        );
        let registry = all.sub_registry_with_prefix("csi_loopback");
        let calls: Family<Call, Histogram, fn() -> Histogram> =
            Family::new_with_constructor(|| Histogram::new(BUCKETS));
        registry.register(
            "rpc_duration_seconds",
            "Duration of gRPC calls, including whole streams",
            calls.clone(),
        );
        let failures = Family::<Failure, Counter>::default();
        registry.register(
            "rpc_failures",
            "Failed gRPC calls; each code has a series from the start",
            failures.clone(),
        );
        let extents = Counter::default();
        registry.register("streamed_extents", "Extents sent by metadata streams", extents.clone());
        for collector in collectors {
            registry.register_collector(collector);
        }
        Self { registry: Arc::new(all), calls, failures, extents, deferred }
    }

    /// Starts the series of a code at 0: Prometheus sees no increase in a series that begins at 1.
    pub fn expect_failures(&self, code: &'static str) {
        drop(self.failures.get_or_create(&Failure { code }));
    }

    /// Records a call. `method` is the name of an RPC, `code` the name of a gRPC code.
    pub fn observe_call(&self, method: &'static str, code: &'static str, duration: Duration) {
        self.calls.get_or_create(&Call { method, code }).observe(duration.as_secs_f64());
        if code != "OK" {
            self.failures.get_or_create(&Failure { code }).inc();
        }
    }

    /// Counts extents sent to a client.
    pub fn add_extents(&self, extents: u64) {
        self.extents.inc_by(extents);
    }

    /// Counts a published deferred volume.
    pub fn record_deferred_publish(&self) {
        self.deferred.inc();
    }

    /// Returns the text of a scrape. Blocks if a collector does.
    pub fn scrape(&self) -> Result<String, fmt::Error> {
        let mut body = String::new();
        text::encode(&mut body, &self.registry)?;
        Ok(body)
    }
}
