//! The annotation by which a pod requests deferred mounts for some of its volumes. It replaces the
//! field `deferFSMount` that KEP-2857 adds to a pod's volumes, with the same rules ("DeferFSMount
//! field in Pod Spec").

use std::collections::{BTreeMap, BTreeSet};

use super::pod::{Pod, Volume};

/// Its value: names of volumes, separated by commas.
pub const ANNOTATION: &str = "cbt.storage.k8s.io/defer-fs-mount";

/// The annotation's value, if the pod has it.
pub fn value(pod: &Pod) -> Option<&str> {
    pod.metadata.annotations.as_ref()?.get(ANNOTATION).map(String::as_str)
}

/// The volumes that the annotation names.
pub fn names(pod: &Pod) -> BTreeSet<&str> {
    let names = value(pod).into_iter().flat_map(|value| value.split(','));
    names.map(str::trim).filter(|name| !name.is_empty()).collect()
}

/// Whether a container runtime can mount a volume of this kind: a claim, a generic ephemeral or an
/// inline volume.
pub fn can_be_deferred(volume: &Volume) -> bool {
    volume.persistent_volume_claim.is_some() || volume.ephemeral.is_some() || volume.csi.is_some()
}

/// The volumes that containers use only as raw block devices.
pub fn only_devices(pod: &Pod) -> BTreeSet<&str> {
    let Some(spec) = &pod.spec else { return BTreeSet::new() };
    let all = spec.containers.iter().chain(&spec.init_containers);
    let (mut devices, mut mounted) = (BTreeSet::new(), BTreeSet::new());
    for container in all.chain(&spec.ephemeral_containers) {
        devices.extend(container.volume_devices.iter().map(|device| device.name.as_str()));
        mounted.extend(container.volume_mounts.iter().map(|mount| mount.name.as_str()));
    }
    &devices - &mounted
}

/// Returns what is wrong with the annotation, or with its change; `before` is the previous pod.
pub fn problem(pod: &Pod, before: Option<&Pod>) -> Option<String> {
    let named = names(pod);
    // Indexed once: a pod may name very many volumes.
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter());
    let volumes: BTreeMap<&str, &Volume> =
        volumes.map(|volume| (volume.name.as_str(), volume)).collect();
    let devices = only_devices(pod);
    let error = |what: String| Some(format!("metadata.annotations[{ANNOTATION}]: {what}"));
    let known = before.map(names).unwrap_or_default();
    for name in named.difference(&known) {
        match volumes.get(name) {
            None => {
                return error(format!(
                    "{name:?} is not a volume of the pod; use names from spec.volumes"
                ));
            }
            Some(volume) if !can_be_deferred(volume) => {
                return error(format!(
                    "{name:?} cannot be deferred: it is neither a claim nor a generic ephemeral or inline volume; remove it"
                ));
            }
            Some(_) if devices.contains(name) => {
                return error(format!(
                    "{name:?} cannot be deferred: the pod's containers use it as a raw block device; remove it"
                ));
            }
            Some(_) => {}
        }
        if before.is_some_and(is_initialised) {
            return error(format!(
                "{name:?} cannot be added after the pod is initialized; create a new pod"
            ));
        }
    }
    let gone = known.difference(&named).next()?;
    error(format!("{gone:?} cannot be removed while the pod exists; create a new pod"))
}

/// KEP-2857: "marked by the presence of Kubelet managed pod conditions like Initialized, Ready,
/// etc".
fn is_initialised(pod: &Pod) -> bool {
    let mut conditions = pod.status.iter().flat_map(|status| &status.conditions);
    conditions.any(|condition| {
        matches!(condition.type_.as_str(), "Initialized" | "Ready" | "ContainersReady")
            && condition.status == "True"
    })
}
