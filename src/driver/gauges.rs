//! Metrics of the pool and its content, collected at each scrape.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use super::response;
use storage::{Backend, Result};

/// Name, help and value. There are no labels, so clients cannot create new series.
type Gauge = (&'static str, &'static str, u64);

/// The gauges of one backend.
pub struct Gauges(Backend);

impl Gauges {
    pub fn new(backend: Backend) -> Self {
        Self(backend)
    }

    fn capacity(&self) -> Result<[Gauge; 4]> {
        let capacity = self.0.capacity()?;
        Ok([
            ("pool_total_bytes", "Size of the pool's filesystem", self.0.pool_room()?.total),
            (
                "pool_available_bytes",
                "Bytes that can be written before the pool is full",
                capacity.available,
            ),
            (
                "pool_maximum_volume_bytes",
                "Size of the largest volume that can be created now",
                capacity.maximum_volume,
            ),
            (
                "pool_image_shared_bytes",
                "Bytes of an allocated pool image that another file shares: writing to them needs space below",
                self.0.shared_image_bytes(),
            ),
        ])
    }

    /// The second gauge is missing while no base expires.
    fn bases(&self) -> Result<impl Iterator<Item = Gauge>> {
        let (count, first) = self.0.retained_bases()?;
        let first = first.map(|time| {
            (
                "base_expiry_timestamp_seconds",
                "Time at which the next deleted snapshot expires as a base of deltas",
                time,
            )
        });
        let count = (
            "retained_snapshots",
            "Deleted snapshots whose change record or id is retained",
            count,
        );
        Ok([count].into_iter().chain(first))
    }

    /// The times are missing while no volume has had a snapshot.
    fn snapshots(&self) -> Result<impl Iterator<Item = Gauge>> {
        let times = self.0.snapshot_times()?;
        let newest = times.newest.map(|time| {
            (
                "newest_snapshot_timestamp_seconds",
                "Time at which the newest snapshot was taken",
                time,
            )
        });
        let stalest = times.stalest.map(|time| {
            (
                "stalest_volume_snapshot_timestamp_seconds",
                "Time of the newest snapshot of the volume that has waited longest for another",
                time,
            )
        });
        let without = (
            "volumes_without_snapshot",
            "Volumes that have had no snapshot",
            times.volumes_without,
        );
        Ok([without].into_iter().chain(newest).chain(stalest))
    }

    fn growth(&self) -> Result<[Gauge; 1]> {
        let count = self.0.volumes_not_grown()?;
        Ok([(
            "volumes_not_grown",
            "Volumes whose filesystem could not grow to their capacity",
            count,
        )])
    }

    fn inline(&self) -> Result<[Gauge; 3]> {
        let (count, pool, memory) = self.0.inline_usage()?;
        Ok([
            ("inline_volumes", "Inline ephemeral volumes on this node", count),
            ("inline_pool_bytes", "Total size of the inline volumes in the pool", pool),
            ("inline_memory_bytes", "Total size of the inline volumes in memory", memory),
        ])
    }
}

/// The exposed name ends with `_total`.
const CRASH_CONSISTENT: (&str, &str) = (
    "snapshots_crash_consistent",
    "Snapshots taken without freezing the filesystem because a virtual machine may have mounted it",
);

impl fmt::Debug for Gauges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Gauges")
    }
}

impl Collector for Gauges {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        // A pool that does not respond has no values; /healthz reports the reason.
        let capacity = self.capacity().into_iter().flatten();
        let inline = self.inline().into_iter().flatten();
        let bases = self.bases().into_iter().flatten();
        let snapshots = self.snapshots().into_iter().flatten();
        let growth = self.growth().into_iter().flatten();
        let volumes = bases.chain(snapshots).chain(growth);
        for (name, help, value) in capacity.chain(inline).chain(volumes) {
            let gauge = ConstGauge::new(response::bytes(value));
            gauge.encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
        }
        let (name, help) = CRASH_CONSISTENT;
        let counter = ConstCounter::new(self.0.crash_consistent_snapshots());
        counter.encode(encoder.encode_descriptor(name, help, None, MetricType::Counter)?)
    }
}
