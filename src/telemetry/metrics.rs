//! The metrics of one process, in the OpenMetrics text format. Every label comes from a fixed set
//! (method names, gRPC codes), never from a request: a client cannot make them grow.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

/// Upper ends of the histogram's buckets, in seconds: from a look-up to a mkfs on a slow disk.
const BUCKETS: [f64; 12] =
    [0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0, 120.0];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Call {
    method: &'static str,
    code: &'static str,
}

/// Cheap to clone; all clones count into the same numbers.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    calls: Family<Call, Histogram, fn() -> Histogram>,
    extents: Counter,
    deferred: Counter,
}

impl Metrics {
    /// `collectors` are asked at each scrape, for numbers that live elsewhere.
    pub fn new(collectors: Vec<Box<dyn Collector>>) -> Self {
        Self::with_names(collectors, Vec::new())
    }

    /// The same, with collectors besides whose names are whole.
    pub fn with_names(collectors: Vec<Box<dyn Collector>>, named: Vec<Box<dyn Collector>>) -> Self {
        let mut all = Registry::default();
        named.into_iter().for_each(|collector| all.register_collector(collector));
        let deferred = Counter::default();
        // With no prefix: the proposal's name, by which operators look for it (KEP-2857, "Monitoring Requirements").
        all.register(
            "volumes_published_with_deferred_ops",
            "Volumes published for a container runtime to mount",
            deferred.clone(),
        );
        let registry = all.sub_registry_with_prefix("csi_loopback");
        let calls: Family<Call, Histogram, fn() -> Histogram> =
            Family::new_with_constructor(|| Histogram::new(BUCKETS));
        registry.register(
            "rpc_duration_seconds",
            "Duration of gRPC calls, whole streams included",
            calls.clone(),
        );
        let extents = Counter::default();
        registry.register("streamed_extents", "Extents sent by metadata streams", extents.clone());
        for collector in collectors {
            registry.register_collector(collector);
        }
        Self { registry: Arc::new(all), calls, extents, deferred }
    }

    /// Books one call. `method` is the name of an RPC, `code` of a gRPC code.
    pub fn called(&self, method: &'static str, code: &'static str, duration: Duration) {
        self.calls.get_or_create(&Call { method, code }).observe(duration.as_secs_f64());
    }

    /// Books extents sent to a client.
    pub fn streamed(&self, extents: u64) {
        self.extents.inc_by(extents);
    }

    /// Books a volume whose mount was left to a container runtime.
    pub fn published_deferred(&self) {
        self.deferred.inc();
    }

    /// The text of a scrape. Collectors may block.
    pub fn scrape(&self) -> Result<String, fmt::Error> {
        let mut body = String::new();
        text::encode(&mut body, &self.registry)?;
        Ok(body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_by_method_and_code() {
        let metrics = Metrics::new(Vec::new());
        metrics.called("CreateVolume", "OK", Duration::from_millis(3));
        metrics.called("CreateVolume", "OK", Duration::from_millis(4));
        metrics.called("CreateVolume", "ABORTED", Duration::from_millis(1));
        metrics.streamed(7);
        metrics.published_deferred();
        let text = metrics.scrape().unwrap();
        for line in [
            r#"csi_loopback_rpc_duration_seconds_count{method="CreateVolume",code="OK"} 2"#,
            r#"csi_loopback_rpc_duration_seconds_count{method="CreateVolume",code="ABORTED"} 1"#,
            "csi_loopback_streamed_extents_total 7",
            "\nvolumes_published_with_deferred_ops_total 1",
        ] {
            assert!(text.contains(line), "{line} not in\n{text}");
        }
    }
}
