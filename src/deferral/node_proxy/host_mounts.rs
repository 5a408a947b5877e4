//! Remembers volumes that were published on the host for pods that had not opted in or were
//! unknown. If such a pod turns out to have opted in, the proxy reports it, because the host has
//! mounted the volume. The records are in memory and limited to the latest.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::deferral_request::{DeferralRequest, VolumeKind, deferral_request};
use super::events::Events;
use super::pods::Pods;
use super::publish_target::PublishTarget;
use super::reports::Reports;
use super::store::PodRef;
use kubernetes::defer_annotation;
use kubernetes::pod::Pod;

/// Maximum number of records; a node has fewer volumes.
const MAX_RECORDS: usize = 4096;

/// A publish that was forwarded unchanged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPublish {
    pub volume: String,
    pub target: String,
    pub publish_target: PublishTarget,
    pub kind: VolumeKind,
    /// The pod's annotation when it was last checked.
    pub checked_annotation: Option<String>,
}

/// The records; clones share them.
#[derive(Debug, Clone, Default)]
pub struct HostMounts {
    records: Arc<Mutex<VecDeque<HostPublish>>>,
}

impl HostMounts {
    /// Adds a volume that the driver has published.
    pub fn published(&self, publish: HostPublish) {
        let mut all = self.records();
        all.retain(|other| other.target != publish.target);
        if all.len() == MAX_RECORDS {
            all.pop_front();
        }
        all.push_back(publish);
    }

    /// Removes an unpublished volume.
    pub fn unpublished(&self, target: &str) {
        self.records().retain(|other| other.target != target);
    }

    /// Reports pods that have opted in after their volume was mounted on the host.
    pub async fn check_opt_ins(&self, pods: &Pods, events: &Events, reports: &Reports) {
        let all: Vec<HostPublish> = self.records().iter().cloned().collect();
        for publish in all {
            let Some(pod) = pods.known(publish.publish_target.pod_uid()) else { continue };
            let annotation = defer_annotation::value(&pod);
            if annotation.is_none() || annotation == publish.checked_annotation.as_deref() {
                continue;
            }
            match is_deferred(pods, &pod, &publish).await {
                Some(true) => {
                    self.unpublished(&publish.target);
                    report(&pod, &publish, events, reports);
                }
                Some(false) => self.set_checked(&publish, annotation),
                None => {}
            }
        }
    }

    fn set_checked(&self, publish: &HostPublish, annotation: Option<&str>) {
        let mut all = self.records();
        if let Some(record) = all.iter_mut().find(|record| *record == publish) {
            record.checked_annotation = annotation.map(str::to_owned);
        }
    }

    fn records(&self) -> MutexGuard<'_, VecDeque<HostPublish>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn report(pod: &Pod, publish: &HostPublish, events: &Events, reports: &Reports) {
    let (volume, target) = (&publish.volume, &publish.target);
    let message = format!(
        "volume {volume:?} was mounted on the host at {target} before the proxy observed that the pod defers it to its container \
         runtime, and remains mounted there; delete the pod, and annotate its replacement before it starts"
    );
    let pod = PodRef::of(pod);
    tracing::warn!(namespace = pod.namespace, pod = pod.name, "{message}");
    reports.mounted_before_opt_in();
    events.failed_mount(&pod, &message);
}

/// Whether the pod now defers the volume. `None`: unknown.
async fn is_deferred(pods: &Pods, pod: &Pod, publish: &HostPublish) -> Option<bool> {
    match deferral_request(pod, &publish.publish_target, publish.kind) {
        DeferralRequest::Runtime => Some(true),
        DeferralRequest::ByClaim(claims) => {
            let name = publish.publish_target.name().unwrap_or_default();
            let found = pods.find_claim(pod, &claims, name).await;
            found.ok().map(|(_, is_deferred)| is_deferred)
        }
        DeferralRequest::Host | DeferralRequest::Ambiguous => Some(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn publish(target: &str) -> HostPublish {
        HostPublish {
            volume: "v".into(),
            target: target.into(),
            publish_target: PublishTarget::Other { pod_uid: "u".into() },
            kind: VolumeKind { block: false, inline: None },
            checked_annotation: None,
        }
    }

    #[test]
    fn each_host_mount_is_recorded_once_until_unpublish() {
        let mounts = HostMounts::default();
        for target in ["/a", "/b", "/a"] {
            mounts.published(publish(target));
        }
        mounts.unpublished("/b");
        assert_eq!(*mounts.records(), [publish("/a")]);
    }

    #[test]
    fn host_mount_records_are_bounded_to_the_latest() {
        let mounts = HostMounts::default();
        (0..=MAX_RECORDS).for_each(|n| mounts.published(publish(&format!("/{n}"))));
        let all = mounts.records();
        assert_eq!((all.len(), all[0].target.as_str()), (MAX_RECORDS, "/1"));
    }
}
