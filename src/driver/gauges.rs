//! What is in the pool, as gauges that are read at each scrape.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use super::response;
use crate::backend::{Backend, Result};

/// Name, help and value. No labels: what a client sends makes no new ones.
type Gauge = (&'static str, &'static str, u64);

/// The gauges of one backend.
pub struct Gauges(Backend);

impl Gauges {
    pub fn new(backend: Backend) -> Self {
        Self(backend)
    }

    fn room(&self) -> Result<[Gauge; 2]> {
        let room = self.0.capacity()?;
        Ok([
            (
                "pool_available_bytes",
                "Bytes that can be written before the pool is full",
                room.available,
            ),
            (
                "pool_maximum_volume_bytes",
                "Largest volume that can be made now",
                room.maximum_volume,
            ),
        ])
    }

    /// The second one is missing where nothing is to expire.
    fn bases(&self) -> Result<impl Iterator<Item = Gauge>> {
        let (count, first) = self.0.retained_bases()?;
        let first = first.map(|time| {
            (
                "base_expiry_timestamp_seconds",
                "When the first of the deleted snapshots ceases to be a base of deltas",
                time,
            )
        });
        let count = (
            "retained_snapshots",
            "Deleted snapshots of which the change record, or then only the id, is kept",
            count,
        );
        Ok([count].into_iter().chain(first))
    }

    fn inline(&self) -> Result<[Gauge; 3]> {
        let (count, pool, memory) = self.0.inline_usage()?;
        Ok([
            ("inline_volumes", "Inline ephemeral volumes on this node", count),
            ("inline_pool_bytes", "Sizes of the inline volumes in the pool, together", pool),
            ("inline_memory_bytes", "Sizes of the inline volumes in memory, together", memory),
        ])
    }
}

/// Whose name ends with `_total`.
const CRASH_CONSISTENT: (&str, &str) = (
    "snapshots_crash_consistent",
    "Snapshots whose filesystem could not be frozen, since a virtual machine may have it",
);

impl fmt::Debug for Gauges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Gauges")
    }
}

impl Collector for Gauges {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        // A pool that does not answer has no numbers; /healthz says why.
        let room = self.room().into_iter().flatten();
        let inline = self.inline().into_iter().flatten();
        let bases = self.bases().into_iter().flatten();
        for (name, help, value) in room.chain(inline).chain(bases) {
            let gauge = ConstGauge::new(response::bytes(value));
            gauge.encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
        }
        let (name, help) = CRASH_CONSISTENT;
        let counter = ConstCounter::new(self.0.crash_consistent_snapshots());
        counter.encode(encoder.encode_descriptor(name, help, None, MetricType::Counter)?)
    }
}
