//! Reads from a pod which of its volumes it defers to its runtime: the annotation, and the group of
//! the security context.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::publish_target::PublishTarget;
use kubernetes::defer_annotation;
use kubernetes::pod::{Pod, Volume};

/// PodSecurityContext.fsGroup and fsGroupChangePolicy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    pub id: String,
    pub policy: Option<String>,
}

/// The kind of a published volume, as far as the request contains it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VolumeKind {
    /// A raw block volume.
    pub block: bool,
    /// Whether the volume is inline, if kubelet reports it.
    pub inline: Option<bool>,
}

/// Who mounts a volume according to its pod: the host or the container runtime.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeferralRequest {
    Host,
    Runtime,
    /// The pod defers only some of its claims, and the volume's claim must be looked up. The map
    /// has the claims' names, and whether each is deferred.
    ByClaim(BTreeMap<String, bool>),
    /// The pod defers only some of the candidate volumes, and nothing identifies the volume.
    Ambiguous,
}

/// Returns who mounts a volume according to its pod.
pub fn deferral_request(pod: &Pod, target: &PublishTarget, kind: VolumeKind) -> DeferralRequest {
    let opted = defer_annotation::names(pod);
    if opted.is_empty() {
        return DeferralRequest::Host;
    }
    let volumes = || pod.spec.iter().flat_map(|spec| spec.volumes.iter());
    let is_opted = |volume: &Volume| opted.contains(volume.name.as_str());
    let inline = || volumes().filter(|volume| volume.csi.is_some() && !kind.block);
    let claims = claims(pod, kind);
    let Some(name) = target.name() else {
        let inline = inline().map(is_opted).filter(|_| kind.inline != Some(false));
        let claims = claims.into_values().filter(|_| kind.inline != Some(true));
        let all: Vec<bool> = inline.chain(claims).collect();
        return combine(all.into_iter(), || DeferralRequest::Ambiguous);
    };
    if kind.inline != Some(false)
        && let Some(volume) = inline().find(|volume| volume.name == name)
    {
        return if is_opted(volume) { DeferralRequest::Runtime } else { DeferralRequest::Host };
    }
    if kind.inline == Some(true) {
        return DeferralRequest::Host;
    }
    combine(claims.clone().into_values(), || DeferralRequest::ByClaim(claims))
}

/// The pod's claims that a publish may be for, and whether each is deferred. `None`: the publish is
/// for an inline volume.
pub fn candidate_claims(
    pod: &Pod,
    target: &PublishTarget,
    kind: VolumeKind,
) -> Option<BTreeMap<String, bool>> {
    let mut volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter());
    let is_inline = |volume: &Volume| volume.csi.is_some() && target.name() == Some(&volume.name);
    let of_inline = kind.inline.unwrap_or_else(|| !kind.block && volumes.any(is_inline));
    (!of_inline).then(|| claims(pod, kind))
}

fn claims(pod: &Pod, kind: VolumeKind) -> BTreeMap<String, bool> {
    let opted = defer_annotation::names(pod);
    // A claim used as a block device is never published as a filesystem, and vice versa.
    let devices = defer_annotation::only_devices(pod);
    let mut claims: BTreeMap<String, bool> = BTreeMap::new();
    for volume in pod.spec.iter().flat_map(|spec| spec.volumes.iter()) {
        let is_device = devices.contains(volume.name.as_str());
        if let Some(claim) = claim(pod, volume).filter(|_| is_device == kind.block) {
            // Two volumes may use the same claim, which is published once.
            *claims.entry(claim).or_default() |= opted.contains(volume.name.as_str());
        }
    }
    claims
}

/// Combines candidates that all are deferred, or all are not; `mixed` decides otherwise.
fn combine(
    mut opted: impl Iterator<Item = bool>,
    mixed: impl FnOnce() -> DeferralRequest,
) -> DeferralRequest {
    let Some(first) = opted.next() else { return DeferralRequest::Host };
    match (opted.all(|other| other == first), first) {
        (false, _) => mixed(),
        (true, true) => DeferralRequest::Runtime,
        (true, false) => DeferralRequest::Host,
    }
}

/// The claim of a volume, if any.
fn claim(pod: &Pod, volume: &Volume) -> Option<String> {
    if let Some(claim) = &volume.persistent_volume_claim {
        return Some(claim.claim_name.clone());
    }
    // Kubernetes names the claim of a generic ephemeral volume POD-VOLUME.
    let pod = pod.metadata.name.as_deref()?;
    volume.ephemeral.as_ref().map(|_| format!("{pod}-{}", volume.name))
}

/// The group that owns the pod's volumes.
pub fn group(pod: &Pod) -> Option<Group> {
    let context = pod.spec.as_ref()?.security_context.as_ref()?;
    let id = context.fs_group?.to_string();
    Some(Group { id, policy: context.fs_group_change_policy.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kubernetes::defer_annotation::ANNOTATION;

    fn pod(annotation: Option<&str>) -> Pod {
        let annotations = annotation.map(|names| serde_json::json!({ ANNOTATION: names }));
        serde_json::from_value(serde_json::json!({
            "metadata": { "name": "app", "annotations": annotations },
            "spec": {
                "containers": [{ "name": "c", "volumeDevices": [
                    { "name": "raw", "devicePath": "/dev/x" },
                    { "name": "raw2", "devicePath": "/dev/y" },
                ] }],
                "securityContext": { "fsGroup": 4059, "fsGroupChangePolicy": "OnRootMismatch" },
                "volumes": [
                    { "name": "own", "csi": { "driver": "d" } },
                    { "name": "a", "persistentVolumeClaim": { "claimName": "claim-a" } },
                    { "name": "b", "ephemeral": { "volumeClaimTemplate": { "spec": {} } } },
                    { "name": "c", "emptyDir": {} },
                    { "name": "raw", "persistentVolumeClaim": { "claimName": "claim-raw" } },
                    { "name": "raw2", "persistentVolumeClaim": { "claimName": "claim-raw2" } },
                    { "name": "a-again", "persistentVolumeClaim": { "claimName": "claim-a" } },
                ],
            },
        }))
        .unwrap()
    }

    const FILESYSTEM: VolumeKind = VolumeKind { block: false, inline: None };
    const BLOCK: VolumeKind = VolumeKind { block: true, inline: None };

    fn at(name: &str) -> PublishTarget {
        PublishTarget::Mount { pod_uid: "u".into(), name: name.into() }
    }

    fn of(annotation: &str, name: &str) -> DeferralRequest {
        deferral_request(&pod(Some(annotation)), &at(name), FILESYSTEM)
    }

    fn by_claim(claims: &[(&str, bool)]) -> DeferralRequest {
        DeferralRequest::ByClaim(
            claims.iter().map(|(name, opted)| ((*name).to_owned(), *opted)).collect(),
        )
    }

    #[test]
    fn the_annotation_names_volumes_of_each_kind() {
        assert_eq!(deferral_request(&pod(None), &at("own"), FILESYSTEM), DeferralRequest::Host);
        assert_eq!(of("", "pv-1"), DeferralRequest::Host);
        assert_eq!(of("own", "own"), DeferralRequest::Runtime);
        assert_eq!(of("own", "pv-1"), DeferralRequest::Host);
        assert_eq!(of("a, b", "pv-1"), DeferralRequest::Runtime);
        assert_eq!(of("a,b", "own"), DeferralRequest::Host);
        assert_eq!(of("a", "pv-1"), by_claim(&[("app-b", false), ("claim-a", true)]));
        let group = group(&pod(None)).unwrap();
        assert_eq!((group.id.as_str(), group.policy.as_deref()), ("4059", Some("OnRootMismatch")));
    }

    #[test]
    fn a_claim_is_deferred_if_any_of_its_volumes_is_named() {
        assert_eq!(of("a-again,b", "pv-1"), DeferralRequest::Runtime);
    }

    #[test]
    fn a_publish_is_for_a_claim_or_an_inline_volume() {
        let of = |name, form| {
            let found = candidate_claims(&pod(Some("a")), &at(name), form);
            found.map(|claims| claims.into_keys().collect::<Vec<_>>())
        };
        assert_eq!(of("own", FILESYSTEM), None);
        assert_eq!(of("pv-1", FILESYSTEM), Some(vec!["app-b".to_owned(), "claim-a".to_owned()]));
        let persistent = VolumeKind { block: false, inline: Some(false) };
        assert!(of("own", persistent).is_some() && of("pv-1", BLOCK).is_some());
    }

    #[test]
    fn block_devices_and_filesystems_are_never_confused() {
        assert_eq!(of("raw,raw2", "pv-1"), DeferralRequest::Host);
        let device = PublishTarget::Device { pod_uid: "u".into(), name: "pv-1".into() };
        let of = |annotation| deferral_request(&pod(Some(annotation)), &device, BLOCK);
        assert_eq!(of("a,b,own"), DeferralRequest::Host);
        assert_eq!(of("raw,raw2"), DeferralRequest::Runtime);
        assert_eq!(of("raw"), by_claim(&[("claim-raw", true), ("claim-raw2", false)]));
    }

    #[test]
    fn inline_and_persistent_volumes_of_one_name_differ() {
        let of = |inline| {
            deferral_request(&pod(Some("own")), &at("own"), VolumeKind { block: false, inline })
        };
        assert_eq!(
            (of(Some(true)), of(None), of(Some(false))),
            (DeferralRequest::Runtime, DeferralRequest::Runtime, DeferralRequest::Host)
        );
        let other = VolumeKind { block: false, inline: Some(true) };
        assert_eq!(deferral_request(&pod(Some("a,b")), &at("pv-1"), other), DeferralRequest::Host);
    }

    #[test]
    fn at_other_paths_all_or_no_candidates_must_be_named() {
        let other_path = PublishTarget::Other { pod_uid: "u".into() };
        let of = |annotation, inline| {
            deferral_request(
                &pod(Some(annotation)),
                &other_path,
                VolumeKind { block: false, inline },
            )
        };
        assert_eq!(of("own,a,b", None), DeferralRequest::Runtime);
        assert_eq!(of("raw", None), DeferralRequest::Host);
        assert_eq!(of("own", None), DeferralRequest::Ambiguous);
        assert_eq!(
            (of("own", Some(true)), of("own", Some(false))),
            (DeferralRequest::Runtime, DeferralRequest::Host)
        );
        assert_eq!(
            (of("a,b", Some(false)), of("a", Some(false))),
            (DeferralRequest::Runtime, DeferralRequest::Ambiguous)
        );
        assert_eq!(
            deferral_request(&pod(Some("raw")), &other_path, BLOCK),
            DeferralRequest::Ambiguous
        );
    }
}
