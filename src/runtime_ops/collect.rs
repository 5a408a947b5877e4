//! Entries that nobody takes back: those whose target is gone, as a driver leaves them that does not know of them any more,
//! and halves of a stage or an unstage that was not repeated.

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
use super::turns::Turns;
use crate::crust::{Entry, Problem};

/// Goes through the entries.
#[derive(Debug, Clone)]
pub struct Collection {
    pub layout: Arc<dyn Layout>,
    pub turns: Turns,
    /// What was written in more recently is not looked at: somebody is at it.
    pub age: Duration,
    pub collected: Arc<AtomicU64>,
}

/// What becomes of an entry, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Stays,
    Goes(&'static str),
}

impl Collection {
    /// One round. What cannot be decided stays.
    pub fn round(&self) -> Result<(), Problem> {
        let layout = &self.layout;
        for entry in layout.entries()? {
            if !entry.is_untouched_for(self.age) {
                continue;
            }
            // While there is a call for it somebody is at it as well.
            let Ok(_turn) = self.turns.take(&entry.path().to_string_lossy(), Duration::ZERO) else {
                continue;
            };
            match self.fate(&entry) {
                Ok(Fate::Stays) => {}
                Ok(Fate::Goes(why)) => self.remove(&entry, why),
                Err(problem) => {
                    tracing::warn!(entry = %entry.path().display(), %problem, "this is no entry of ours; it is left alone");
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
                tracing::info!(entry = %shown, why, "collected an entry");
            }
            Err(problem) => {
                tracing::error!(entry = %shown, %problem, "an entry could not be collected")
            }
        }
    }

    fn fate(&self, entry: &Entry) -> Result<Fate, Problem> {
        let layout = &self.layout;
        let target = layout.target_of(entry)?;
        if let Some(target) = &target
            && layout.entry(target).ok().as_ref() != Some(entry)
        {
            return Err(Problem::Unsafe(format!("{target} is not the target of this name")));
        }
        // One that cannot be read is there all the same.
        let is_whole = !matches!(entry.mount_info(), Ok(None));
        let why = match &target {
            _ if !is_whole => "half of an entry",
            None => return Ok(Fate::Stays),
            Some(target) if is_gone(target.as_path()) => "its target is gone",
            Some(_) => return Ok(Fate::Stays),
        };
        let in_use = layout.is_in_use(entry, target.as_ref());
        Ok(if in_use { Fate::Stays } else { Fate::Goes(why) })
    }
}

/// Whether there is certainly nothing.
fn is_gone(path: &Path) -> bool {
    let looked = std::fs::symlink_metadata(path);
    looked.is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

/// What is counted of the entries, at each scrape.
pub struct Gauges(pub Collection);

impl fmt::Debug for Gauges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Gauges")
    }
}

impl Collector for Gauges {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let Self(collection) = self;
        // A directory that cannot be read has no numbers; /healthz says why.
        if let Ok(entries) = collection.layout.entries() {
            let gauge = ConstGauge::new(i64::try_from(entries.len()).unwrap_or(i64::MAX));
            let help = "Volumes that are handed over to a container runtime";
            gauge.encode(encoder.encode_descriptor(
                "crust_entries",
                help,
                None,
                MetricType::Gauge,
            )?)?;
        }
        let counter = ConstCounter::new(collection.collected.load(Ordering::Relaxed));
        let help = "Entries removed because their target was gone, or that were half made";
        counter.encode(encoder.encode_descriptor(
            "crust_collected",
            help,
            None,
            MetricType::Counter,
        )?)
    }
}
