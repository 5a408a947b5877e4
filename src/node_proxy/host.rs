//! What was passed on for the host, of pods that had not opted in, or that nobody told of: if one of them turns out to have opted in,
//! that is told, for the volume is mounted on the host then and not by the pod's runtime. In memory, the latest of them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use k8s_openapi::api::core::v1::Pod;

use super::events::Events;
use super::memory::PodRef;
use super::place::Place;
use super::pods::Pods;
use super::reports::Reports;
use super::wish::{Form, Wish, wish};

/// More than a node has volumes.
const MAX_PASSED: usize = 4096;

/// A publish that was passed on as it was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Passed {
    pub volume: String,
    pub target: String,
    pub place: Place,
    pub form: Form,
}

/// Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Host {
    passed: Arc<Mutex<VecDeque<Passed>>>,
}

impl Host {
    /// The driver has published it.
    pub fn published(&self, passed: Passed) {
        let mut all = self.passed();
        all.retain(|other| other.target != passed.target);
        if all.len() == MAX_PASSED {
            all.pop_front();
        }
        all.push_back(passed);
    }

    /// It is taken back.
    pub fn unpublished(&self, target: &str) {
        self.passed().retain(|other| other.target != target);
    }

    /// Looks whether pods have opted in since.
    pub async fn look(&self, pods: &Pods, events: &Events, reports: &Reports) {
        let all: Vec<Passed> = self.passed().iter().cloned().collect();
        for passed in all {
            let Some(pod) = pods.known(passed.place.pod_uid()) else { continue };
            if is_wanted(pods, &pod, &passed).await {
                self.unpublished(&passed.target);
                let (volume, target) = (&passed.volume, &passed.target);
                let message = format!(
                    "volume {volume:?} was mounted on the host at {target} before the pod was known to leave it to its container runtime, and \
                     stays so; delete the pod, and annotate the new one before it is started"
                );
                let pod = PodRef::of(&pod);
                tracing::warn!(namespace = pod.namespace, pod = pod.name, "{message}");
                reports.mounted_before_opt_in();
                events.failed_mount(&pod, &message);
            }
        }
    }

    fn passed(&self) -> MutexGuard<'_, VecDeque<Passed>> {
        self.passed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the pod wants by now that its runtime has it. Where that cannot be told it is looked at again.
async fn is_wanted(pods: &Pods, pod: &Pod, passed: &Passed) -> bool {
    // A raw block volume is on the host whoever has opted in; its next publish says that it cannot be left.
    match wish(pod, &passed.place, passed.form) {
        Wish::Runtime => true,
        Wish::Depends(claims) => {
            let name = passed.place.name().unwrap_or_default();
            pods.ask(pod, &claims, name).await.unwrap_or(false)
        }
        Wish::Host | Wish::Unclear => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passed(target: &str) -> Passed {
        Passed {
            volume: "v".into(),
            target: target.into(),
            place: Place::Elsewhere { pod_uid: "u".into() },
            form: Form { block: false, inline: None },
        }
    }

    #[test]
    fn each_target_is_known_once_until_it_is_taken_back() {
        let host = Host::default();
        ["/a", "/b", "/a"].map(|target| host.published(passed(target)));
        host.unpublished("/b");
        assert_eq!(*host.passed(), [passed("/a")]);
    }

    #[test]
    fn the_latest_are_known_and_not_more_than_a_node_has() {
        let host = Host::default();
        (0..=MAX_PASSED).for_each(|n| host.published(passed(&format!("/{n}"))));
        let all = host.passed();
        assert_eq!((all.len(), all[0].target.as_str()), (MAX_PASSED, "/1"));
    }
}
