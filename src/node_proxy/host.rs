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
use crate::kubernetes::defer_annotation;

/// More than a node has volumes.
const MAX_PASSED: usize = 4096;

/// A publish that was passed on as it was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Passed {
    pub volume: String,
    pub target: String,
    pub place: Place,
    pub form: Form,
    /// The pod's annotation as it was when the volume was found to be the host's.
    pub judged: Option<String>,
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
            let annotation = defer_annotation::value(&pod);
            if annotation.is_none() || annotation == passed.judged.as_deref() {
                continue;
            }
            match is_wanted(pods, &pod, &passed).await {
                Some(true) => {
                    self.unpublished(&passed.target);
                    tell(&pod, &passed, events, reports);
                }
                Some(false) => self.judged(&passed, annotation),
                None => {}
            }
        }
    }

    fn judged(&self, passed: &Passed, annotation: Option<&str>) {
        let mut all = self.passed();
        if let Some(known) = all.iter_mut().find(|known| *known == passed) {
            known.judged = annotation.map(str::to_owned);
        }
    }

    fn passed(&self) -> MutexGuard<'_, VecDeque<Passed>> {
        self.passed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn tell(pod: &Pod, passed: &Passed, events: &Events, reports: &Reports) {
    let (volume, target) = (&passed.volume, &passed.target);
    let message = format!(
        "volume {volume:?} was mounted on the host at {target} before the pod was known to leave it to its container runtime, and \
         stays so; delete the pod, and annotate the new one before it is started"
    );
    let pod = PodRef::of(pod);
    tracing::warn!(namespace = pod.namespace, pod = pod.name, "{message}");
    reports.mounted_before_opt_in();
    events.failed_mount(&pod, &message);
}

/// Whether the pod wants by now that its runtime has it. None: that cannot be told.
async fn is_wanted(pods: &Pods, pod: &Pod, passed: &Passed) -> Option<bool> {
    match wish(pod, &passed.place, passed.form) {
        Wish::Runtime => Some(true),
        Wish::Depends(claims) => {
            let asked = pods.ask(pod, &claims, passed.place.name().unwrap_or_default()).await;
            asked.ok().map(|(_, opted)| opted)
        }
        Wish::Host | Wish::Unclear => Some(false),
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
            judged: None,
        }
    }

    #[test]
    fn each_target_is_known_once_until_it_is_taken_back() {
        let host = Host::default();
        for target in ["/a", "/b", "/a"] {
            host.published(passed(target));
        }
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
