//! The metrics of the proxy, including those of the proposal's kubelet. All labels come from fixed
//! sets, except those of a volume's condition, which exists for as long as the volume is stored.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use super::call::Call;
use super::publish_target::PublishTarget;
use super::store::{DeferredVolume, StateStore};
use common::text::truncate;

/// Maximum bytes of a label; names in Kubernetes are shorter.
const MAX_LABEL: usize = 253;

/// Counters of the proxy; clones share them.
#[derive(Debug, Clone)]
pub struct Reports {
    store: StateStore,
    counts: Arc<Mutex<Counts>>,
}

#[derive(Debug, Default)]
struct Counts {
    failures: BTreeMap<(Call, &'static str), u64>,
    mounted_before: u64,
}

impl Reports {
    pub fn new(store: StateStore) -> Self {
        Self { store, counts: Arc::default() }
    }

    /// Counts a failed call for a volume that is, or was to be, deferred.
    pub fn failed(&self, call: Call, reason: &'static str) {
        *self.counts().failures.entry((call, reason)).or_default() += 1;
    }

    /// Counts a pod that opted in after the host had mounted the volume.
    pub fn mounted_before_opt_in(&self) {
        self.counts().mounted_before += 1;
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The registry adds the prefix `csi_loopback_`.
impl Collector for Reports {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let volumes = ConstGauge::new(i64::try_from(self.store.len()).unwrap_or(i64::MAX));
        let help = "Deferred volumes";
        volumes.encode(encoder.encode_descriptor(
            "deferred_volumes",
            help,
            None,
            MetricType::Gauge,
        )?)?;
        let counts = self.counts();
        let help = "Volumes that the host had mounted before their pod opted in";
        ConstCounter::new(counts.mounted_before).encode(encoder.encode_descriptor(
            "mounted_before_opt_in",
            help,
            None,
            MetricType::Counter,
        )?)?;
        let help = "Failed calls for volumes that are, or were to be, deferred";
        let mut failures =
            encoder.encode_descriptor("deferred_failures", help, None, MetricType::Counter)?;
        for ((call, reason), count) in &counts.failures {
            let labels = [("call", call.label()), ("reason", reason)];
            ConstCounter::new(*count).encode(failures.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

/// The proposal's metric, whose name has no prefix.
#[derive(Debug)]
pub struct Conditions(pub StateStore);

impl Collector for Conditions {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let help = "1 if the last reported condition of a deferred volume is abnormal, 0 otherwise";
        let name = "volume_stats_health_status_abnormal";
        let mut gauges = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (target, deferred, abnormal) in self.0.conditions() {
            let labels = [
                ("namespace", truncate(&deferred.pod.namespace, MAX_LABEL)),
                (
                    "persistentvolumeclaim",
                    truncate(deferred.claim.as_deref().unwrap_or_default(), MAX_LABEL),
                ),
                ("pod", truncate(&deferred.pod.name, MAX_LABEL)),
                ("volume", volume(target.to_str().unwrap_or_default(), &deferred)),
            ];
            ConstGauge::new(i64::from(abnormal)).encode(gauges.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

/// kubelet's name of the volume, or else the driver's handle.
fn volume(target: &str, deferred: &DeferredVolume) -> String {
    match PublishTarget::of_path(target) {
        Some(PublishTarget::Mount { name, .. }) => truncate(&name, MAX_LABEL),
        _ => truncate(&deferred.volume_handle, MAX_LABEL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crust::Directory;
    use crate::node_proxy::state_dir::StateDir;
    use crate::node_proxy::store::PodRef;
    use telemetry::metrics::Metrics;

    #[tokio::test]
    async fn metrics_have_their_documented_names() {
        let scratch = tempfile::tempdir().unwrap();
        let state_dir = StateDir::open(Directory::new(scratch.path().join("state"))).unwrap();
        let store = StateStore::open(state_dir);
        let pod = PodRef { namespace: "n".into(), name: "p".into(), uid: "u".into() };
        let target = "/pods/u/volumes/kubernetes.io~csi/pvc-1/mount";
        drop(
            store
                .begin_publish(
                    target,
                    &DeferredVolume::new("v", "", None, pod).with_claim(Some("data".into())),
                )
                .await
                .unwrap(),
        );
        store.set_condition(target, true);
        let reports = Reports::new(store.clone());
        reports.failed(Call::Stats, "missing_capability");
        reports.mounted_before_opt_in();
        let named = Conditions(store.clone());
        let metrics = Metrics::with_names(vec![Box::new(reports)], vec![Box::new(named)]);
        metrics.record_deferred_publish();
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
        store.set_condition(target, false);
        assert!(metrics.scrape().unwrap().contains(&format!("{condition} 0\n")));
        store.remove(target).await.unwrap();
        assert!(!metrics.scrape().unwrap().contains(condition));
    }
}
