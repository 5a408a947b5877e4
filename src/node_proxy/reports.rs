//! What the proposal has kubelet report: numbers, and lines in the log.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use tonic::{Code, Status};

use super::memory::Memory;
use crate::grpc::code_name;

/// Cheap to clone.
#[derive(Debug, Clone)]
pub struct Reports {
    memory: Memory,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    /// Targets of which a publish has been counted.
    published: BTreeSet<String>,
    published_total: u64,
    abnormal: BTreeSet<String>,
    failures: BTreeMap<&'static str, u64>,
    unknown_pods: u64,
}

impl Reports {
    pub fn new(memory: Memory) -> Self {
        Self { memory, state: Arc::default() }
    }

    /// Each once, however often kubelet repeats the call.
    pub fn published(&self, target: &str) {
        let mut state = self.state();
        if state.published.insert(target.to_owned()) {
            state.published_total += 1;
        }
    }

    pub fn forget(&self, target: &str) {
        self.state().published.remove(target);
    }

    pub fn measured(&self, volume: &str, abnormal: bool) {
        let mut state = self.state();
        match abnormal {
            true => state.abnormal.insert(volume.to_owned()),
            false => state.abnormal.remove(volume),
        };
    }

    /// A call that never reached the driver.
    pub fn failed(&self, status: &Status) {
        tracing::warn!(
            code = code_name(status.code()),
            error = status.message(),
            "a call for a volume that is left to a runtime"
        );
        self.refused(status.code());
    }

    pub fn refused(&self, code: Code) {
        *self.state().failures.entry(code_name(code)).or_default() += 1;
    }

    pub fn unknown_pod(&self, uid: &str) {
        tracing::warn!(
            pod = uid,
            "the API server does not tell of a pod whose volume is published; it is passed on as it is"
        );
        self.state().unknown_pods += 1;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Collector for Reports {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let state = self.state();
        let counters = [
            (
                "volumes_published_with_deferred_ops",
                "Volumes published for a container runtime to mount, each once",
                state.published_total,
            ),
            (
                "csi_loopback_unknown_pods",
                "Publishes that were passed on since the API server did not tell of their pod",
                state.unknown_pods,
            ),
        ];
        for (name, help, value) in counters {
            let counter = ConstCounter::new(value);
            counter.encode(encoder.encode_descriptor(name, help, None, MetricType::Counter)?)?;
        }
        let gauges = [
            (
                "volume_stats_health_status_abnormal",
                "Volumes that are left to a container runtime and were abnormal when they were measured last",
                state.abnormal.len(),
            ),
            (
                "csi_loopback_deferred_volumes",
                "Volumes that are left to a container runtime",
                self.memory.len(),
            ),
        ];
        for (name, help, value) in gauges {
            let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            gauge.encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
        }
        let mut failures = encoder.encode_descriptor(
            "csi_loopback_deferred_failures",
            "Calls for volumes that are left to a container runtime that failed, by code",
            None,
            MetricType::Counter,
        )?;
        for (code, count) in &state.failures {
            let counter = ConstCounter::new(*count);
            counter.encode(failures.encode_family(&[("code", *code)])?)?;
        }
        Ok(())
    }
}
