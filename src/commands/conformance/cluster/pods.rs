//! Pods that work on the device of a claim.

use std::sync::atomic::Ordering;

use k8s_openapi::api::core::v1::{ContainerState, Pod};

use super::super::door::{Done, Edit, Refusal, Volume};
use super::super::in_pod::{Found, Work};
use super::objects::Kind;
use super::{ClusterDoor, PATIENCE, manifest};
use crate::client::cluster::pods::container_state;

/// Reasons of a container that will not start.
const HOPELESS: [&str; 6] = [
    "ErrImageNeverPull",
    "ImagePullBackOff",
    "InvalidImageName",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
];

impl ClusterDoor {
    /// Runs a pod to its end, and removes it.
    pub(super) fn in_pod(
        &self,
        volume: &Volume,
        work: Work,
        size: u64,
        edits: &[Edit],
    ) -> Done<Found> {
        let name = self.start_pod(volume, work, size, edits)?;
        let found = self.wait(self.objects.until(&name, "complete", PATIENCE, ended));
        self.remove(Kind::Pod, &name)?;
        found
    }

    /// Does `work` while a pod has the volume.
    pub(super) fn while_held(&self, volume: &Volume, work: &mut dyn FnMut()) -> Done<()> {
        let name = self.start_pod(volume, Work::Hold, 0, &[])?;
        let started = self.wait(self.objects.until(&name, "running", PATIENCE, running));
        if started.is_ok() {
            work();
        }
        self.remove(Kind::Pod, &name)?;
        started
    }

    fn start_pod(&self, volume: &Volume, work: Work, size: u64, edits: &[Edit]) -> Done<String> {
        let name = format!("{}-{}", volume.name, self.pods.fetch_add(1, Ordering::Relaxed));
        let mut rest = vec![format!("--seed={}", self.patterns.seed), format!("--size={size}")];
        rest.extend(edits.iter().map(Edit::to_string));
        let pod = manifest::pod(&name, &volume.name, &self.image, work, rest);
        self.create::<Pod>(Kind::Pod, &name, pod)?;
        Ok(name)
    }
}

fn container(pod: &Pod) -> Option<&ContainerState> {
    container_state(pod, manifest::CONTAINER)
}

/// Why a pod will never run.
fn hopeless(pod: &Pod) -> Option<Refusal> {
    let waiting = container(pod)?.waiting.as_ref()?;
    let reason = waiting.reason.as_deref().filter(|reason| HOPELESS.contains(reason))?;
    let message = waiting.message.as_deref().unwrap_or_default();
    Some(Refusal::Refused(format!("a pod with --image does not start: {reason}: {message}")))
}

fn running(pod: &Pod) -> Option<Done<()>> {
    match container(pod).is_some_and(|state| state.running.is_some()) {
        true => Some(Ok(())),
        false => ended(pod).map(|found| found.map(drop)),
    }
}

/// What a pod found that has ended. A pod can fail without its container, as when it is evicted.
fn ended(pod: &Pod) -> Option<Done<Found>> {
    let terminated = container(pod).and_then(|state| state.terminated.as_ref());
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    if terminated.is_none() && !matches!(phase, Some("Failed" | "Succeeded")) {
        return hopeless(pod).map(Err);
    }
    let message = terminated.and_then(|end| end.message.as_deref()).unwrap_or_default();
    let found = manifest::found(message).map_err(|reason| {
        let code = terminated.map_or(-1, |end| end.exit_code);
        Refusal::Refused(format!("the pod failed (exit code {code}): {reason}"))
    });
    Some(found)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(phase: &str, state: serde_json::Value) -> Pod {
        let status = |name: &str, state| {
            json!({
                "name": name, "image": "", "imageID": "", "ready": false, "restartCount": 0,
                "state": state,
            })
        };
        // Of a webhook.
        let added = status("added", json!({ "running": {} }));
        let status =
            json!({ "phase": phase, "containerStatuses": [added, status("device", state)] });
        serde_json::from_value(json!({ "metadata": {}, "status": status })).unwrap()
    }

    #[test]
    fn the_end_of_a_pod_is_its_result_or_the_reason() {
        let terminated =
            |message: &str| json!({ "terminated": { "exitCode": 1, "message": message } });
        let found = ended(&pod("Succeeded", terminated("{\"size\":512}"))).unwrap().unwrap();
        assert_eq!(found.size, 512);
        for message in ["exec format error", "{\"error\":\"exec format error\"}"] {
            let reason = ended(&pod("Failed", terminated(message))).unwrap().unwrap_err();
            assert!(reason.to_string().ends_with("exec format error"), "{reason}");
        }
        let found = ended(&pod("Running", terminated("{\"size\":512}"))).unwrap().unwrap();
        assert_eq!(found.size, 512, "the other container does not end");
        let waiting = |reason: &str| json!({ "waiting": { "reason": reason, "message": "x" } });
        assert!(ended(&pod("Pending", waiting("ContainerCreating"))).is_none());
        let reason = running(&pod("Pending", waiting("ErrImageNeverPull"))).unwrap().unwrap_err();
        assert!(reason.to_string().contains("--image"), "{reason}");
        assert!(running(&pod("Running", json!({ "running": {} }))).unwrap().is_ok());
    }
}
