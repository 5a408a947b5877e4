//! What the proposal has kubelet report, as numbers. Every label but those of a volume's condition comes from a fixed set; that is
//! there for as long as the volume is remembered.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use super::call::Call;
use super::memory::{Left, Memory};
use super::place::Place;
use crate::grpc::cut;

/// Bytes of a label, at most: names of Kubernetes are shorter.
const MAX_LABEL: usize = 253;

/// Cheap to clone.
#[derive(Debug, Clone)]
pub struct Reports {
    memory: Memory,
    counts: Arc<Mutex<Counts>>,
}

#[derive(Debug, Default)]
struct Counts {
    failures: BTreeMap<(Call, &'static str), u64>,
    mounted_before: u64,
}

impl Reports {
    pub fn new(memory: Memory) -> Self {
        Self { memory, counts: Arc::default() }
    }

    /// A call for a volume that is, or is to be, left to a runtime came to nothing.
    pub fn failed(&self, call: Call, reason: &'static str) {
        *self.counts().failures.entry((call, reason)).or_default() += 1;
    }

    /// A pod has opted in a volume that the host had mounted by then.
    pub fn mounted_before_opt_in(&self) {
        self.counts().mounted_before += 1;
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// They get the prefix `csi_loopback_` where they are registered.
impl Collector for Reports {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let volumes = ConstGauge::new(i64::try_from(self.memory.len()).unwrap_or(i64::MAX));
        let help = "Volumes that are left to a container runtime";
        volumes.encode(encoder.encode_descriptor(
            "deferred_volumes",
            help,
            None,
            MetricType::Gauge,
        )?)?;
        let counts = self.counts();
        let help = "Volumes that the host had mounted when their pod opted in";
        ConstCounter::new(counts.mounted_before).encode(encoder.encode_descriptor(
            "mounted_before_opt_in",
            help,
            None,
            MetricType::Counter,
        )?)?;
        let help = "Calls for volumes that are, or were to be, left to a container runtime and came to nothing";
        let mut failures =
            encoder.encode_descriptor("deferred_failures", help, None, MetricType::Counter)?;
        for ((call, reason), count) in &counts.failures {
            let labels = [("call", call.label()), ("reason", reason)];
            ConstCounter::new(*count).encode(failures.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

/// The proposal's own name, which has no prefix.
#[derive(Debug)]
pub struct Conditions(pub Memory);

impl Collector for Conditions {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let help = "Whether a volume that is left to a container runtime was abnormal when it was measured last (1), or not (0)";
        let name = "volume_stats_health_status_abnormal";
        let mut gauges = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (target, left, abnormal) in self.0.conditions() {
            let labels = [
                ("namespace", cut(&left.pod.namespace, MAX_LABEL)),
                (
                    "persistentvolumeclaim",
                    cut(left.claim.as_deref().unwrap_or_default(), MAX_LABEL),
                ),
                ("pod", cut(&left.pod.name, MAX_LABEL)),
                ("volume", volume(target.to_str().unwrap_or_default(), &left)),
            ];
            ConstGauge::new(i64::from(abnormal)).encode(gauges.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

/// As kubelet calls it, or else the driver.
fn volume(target: &str, left: &Left) -> String {
    match Place::of_path(target) {
        Some(Place::Mount { name, .. }) => cut(&name, MAX_LABEL),
        _ => cut(&left.volume_handle, MAX_LABEL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crust::Directory;
    use crate::node_proxy::disk::Disk;
    use crate::node_proxy::memory::PodRef;
    use crate::telemetry::metrics::Metrics;

    #[tokio::test]
    async fn the_numbers_have_the_names_that_operators_look_for() {
        let scratch = tempfile::tempdir().unwrap();
        let disk = Disk::open(Directory::new(scratch.path().join("state"))).unwrap();
        let memory = Memory::open(disk);
        let pod = PodRef { namespace: "n".into(), name: "p".into(), uid: "u".into() };
        let target = "/pods/u/volumes/kubernetes.io~csi/pvc-1/mount";
        drop(
            memory
                .publishing(target, &Left::new("v", "", None, pod).with_claim(Some("data".into())))
                .await
                .unwrap(),
        );
        memory.measured(target, true);
        let reports = Reports::new(memory.clone());
        reports.failed(Call::Stats, "missing_capability");
        reports.mounted_before_opt_in();
        let named = Conditions(memory.clone());
        let metrics = Metrics::with_names(vec![Box::new(reports)], vec![Box::new(named)]);
        metrics.published_deferred();
        let text = metrics.scrape().unwrap();
        let condition = r#"volume_stats_health_status_abnormal{namespace="n",persistentvolumeclaim="data",pod="p",volume="pvc-1"}"#;
        for line in [
            "volumes_published_with_deferred_ops_total 1",
            &format!("{condition} 1"),
            "csi_loopback_deferred_volumes 1",
            r#"csi_loopback_deferred_failures_total{call="stats",reason="missing_capability"} 1"#,
            "csi_loopback_mounted_before_opt_in_total 1",
        ] {
            assert!(text.lines().any(|there| there == line), "{line} not in\n{text}");
        }
        memory.measured(target, false);
        assert!(metrics.scrape().unwrap().contains(&format!("{condition} 0\n")));
        memory.forget(target).await.unwrap();
        assert!(!metrics.scrape().unwrap().contains(condition));
    }
}
