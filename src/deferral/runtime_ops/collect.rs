//! Removes abandoned entries: those whose target is gone, as after a driver that lost its records,
//! and incomplete ones of a stage or unstage that was not repeated.

use std::fmt;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use super::layout::Layout;
use super::locks::TargetLocks;
use crate::crust::{Entry, Problem};

/// Removes abandoned entries.
#[derive(Debug, Clone)]
pub struct EntryCollector {
    pub layout: Arc<dyn Layout>,
    pub locks: TargetLocks,
    /// Entries that changed more recently are skipped, because a call may be using them.
    pub age: Duration,
    pub collected: Arc<AtomicU64>,
}

/// What happens to an entry, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Decision {
    Keep,
    Remove(&'static str),
}

impl EntryCollector {
    /// Runs one round. Entries that cannot be decided remain.
    pub fn round(&self) -> Result<(), Problem> {
        let layout = &self.layout;
        for entry in layout.entries()? {
            if !entry.is_unchanged_for(self.age) {
                continue;
            }
            // A call for the entry is in progress.
            let Ok(_lock) = self.locks.lock(&entry.path().to_string_lossy(), Duration::ZERO) else {
                continue;
            };
            match self.decide(&entry) {
                Ok(Decision::Keep) => {}
                Ok(Decision::Remove(why)) => self.remove(&entry, why),
                Err(problem) => {
                    tracing::warn!(entry = %entry.path().display(), %problem, "invalid entry; keeping it");
                }
            }
        }
        layout.directory().remove_partial(self.age)
    }

    fn remove(&self, entry: &Entry, why: &str) {
        let shown = entry.path().display();
        match entry.unstage() {
            Ok(()) => {
                self.collected.fetch_add(1, Ordering::Relaxed);
                tracing::info!(entry = %shown, why, "removed an abandoned entry");
            }
            Err(problem) => {
                tracing::error!(entry = %shown, %problem, "failed to remove an abandoned entry")
            }
        }
    }

    fn decide(&self, entry: &Entry) -> Result<Decision, Problem> {
        let layout = &self.layout;
        let target = layout.target_of(entry)?;
        if let Some(target) = &target
            && layout.entry(target).ok().as_ref() != Some(entry)
        {
            return Err(Problem::Unsafe(format!(
                "its target {target} belongs to an entry of another name"
            )));
        }
        // An unreadable file is not a missing one.
        let is_complete = !matches!(entry.mount_info(), Ok(None));
        let why = match &target {
            _ if !is_complete => "the entry is incomplete",
            None => return Ok(Decision::Keep),
            Some(target) if is_gone(target.as_path()) => "its target is gone",
            Some(_) => return Ok(Decision::Keep),
        };
        let in_use = layout.is_in_use(entry, target.as_ref());
        Ok(if in_use { Decision::Keep } else { Decision::Remove(why) })
    }
}

/// Whether the path certainly does not exist.
fn is_gone(path: &Path) -> bool {
    let metadata = std::fs::symlink_metadata(path);
    metadata.is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

/// Metrics of the entries, read at each scrape.
pub struct Gauges(pub EntryCollector);

impl fmt::Debug for Gauges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Gauges")
    }
}

impl Collector for Gauges {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let Self(collector) = self;
        // An unreadable directory has no count; /healthz reports the reason.
        if let Ok(entries) = collector.layout.entries() {
            let gauge = ConstGauge::new(i64::try_from(entries.len()).unwrap_or(i64::MAX));
            let help = "Entries of volumes for container runtimes";
            gauge.encode(encoder.encode_descriptor(
                "crust_entries",
                help,
                None,
                MetricType::Gauge,
            )?)?;
        }
        let counter = ConstCounter::new(collector.collected.load(Ordering::Relaxed));
        let help = "Entries removed because their target was gone or they were incomplete";
        counter.encode(encoder.encode_descriptor(
            "crust_collected",
            help,
            None,
            MetricType::Counter,
        )?)
    }
}
