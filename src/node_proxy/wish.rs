//! Which of a pod's volumes it wants to leave to its runtime, and what it says of them: the annotation and the pod's security
//! context.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Pod, Volume};
use serde::{Deserialize, Serialize};

use super::place::Place;
use crate::kubernetes::defer_annotation;

/// PodSecurityContext.fsGroup and fsGroupChangePolicy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    pub id: String,
    pub policy: Option<String>,
}

/// What a publish says of its volume besides who has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Form {
    /// A raw block volume.
    pub block: bool,
    /// Whether it is an inline volume, where kubelet says so.
    pub inline: Option<bool>,
}

/// What a pod says of one of its volumes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wish {
    Host,
    Runtime,
    /// It leaves some of its claims to the runtime and some not: which one this is, only the claims can tell. Their names, with whether
    /// they are left.
    Depends(BTreeMap<String, bool>),
    /// It leaves some of the volumes that may be meant and some not, and nothing tells which one is.
    Unclear,
}

/// What the pod wants for a volume.
pub fn wish(pod: &Pod, place: &Place, form: Form) -> Wish {
    let opted = defer_annotation::names(pod);
    if opted.is_empty() {
        return Wish::Host;
    }
    let volumes = || pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let is_opted = |volume: &Volume| opted.contains(volume.name.as_str());
    let inline = || volumes().filter(|volume| volume.csi.is_some() && !form.block);
    let claims = claims(pod, form);
    let Some(name) = place.name() else {
        let inline = inline().map(is_opted).filter(|_| form.inline != Some(false));
        let claims = claims.into_values().filter(|_| form.inline != Some(true));
        let all: Vec<bool> = inline.chain(claims).collect();
        return of_all(all.into_iter(), || Wish::Unclear);
    };
    if form.inline != Some(false)
        && let Some(volume) = inline().find(|volume| volume.name == name)
    {
        return if is_opted(volume) { Wish::Runtime } else { Wish::Host };
    }
    if form.inline == Some(true) {
        return Wish::Host;
    }
    of_all(claims.clone().into_values(), || Wish::Depends(claims))
}

/// The pod's claims that a publish may be of, with whether each is left. None: it is of an inline volume.
pub fn claims_at(pod: &Pod, place: &Place, form: Form) -> Option<BTreeMap<String, bool>> {
    let mut volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let is_inline = |volume: &Volume| volume.csi.is_some() && place.name() == Some(&volume.name);
    let of_inline = form.inline.unwrap_or_else(|| !form.block && volumes.any(is_inline));
    (!of_inline).then(|| claims(pod, form))
}

fn claims(pod: &Pod, form: Form) -> BTreeMap<String, bool> {
    let opted = defer_annotation::names(pod);
    // A claim that containers have as a device is never meant by the publish of a filesystem, and the other way round.
    let devices = defer_annotation::only_devices(pod);
    let mut claims: BTreeMap<String, bool> = BTreeMap::new();
    for volume in pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()) {
        let is_device = devices.contains(volume.name.as_str());
        if let Some(claim) = claim(pod, volume).filter(|_| is_device == form.block) {
            // Two volumes may be of one claim, which is published once.
            *claims.entry(claim).or_default() |= opted.contains(volume.name.as_str());
        }
    }
    claims
}

/// None of them left: the host's. All: the runtime's.
fn of_all(mut opted: impl Iterator<Item = bool>, mixed: impl FnOnce() -> Wish) -> Wish {
    let Some(first) = opted.next() else { return Wish::Host };
    match (opted.all(|other| other == first), first) {
        (false, _) => mixed(),
        (true, true) => Wish::Runtime,
        (true, false) => Wish::Host,
    }
}

/// The claim that a volume is, if it is one.
fn claim(pod: &Pod, volume: &Volume) -> Option<String> {
    if let Some(claim) = &volume.persistent_volume_claim {
        return Some(claim.claim_name.clone());
    }
    // Kubernetes names the claim of a generic ephemeral volume after both.
    let pod = pod.metadata.name.as_deref()?;
    volume.ephemeral.as_ref().map(|_| format!("{pod}-{}", volume.name))
}

/// The group that is to own the pod's volumes.
pub fn group(pod: &Pod) -> Option<Group> {
    let context = pod.spec.as_ref()?.security_context.as_ref()?;
    let id = context.fs_group?.to_string();
    Some(Group { id, policy: context.fs_group_change_policy.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubernetes::defer_annotation::ANNOTATION;

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

    const FILES: Form = Form { block: false, inline: None };
    const BLOCK: Form = Form { block: true, inline: None };

    fn at(name: &str) -> Place {
        Place::Mount { pod_uid: "u".into(), name: name.into() }
    }

    fn of(annotation: &str, name: &str) -> Wish {
        wish(&pod(Some(annotation)), &at(name), FILES)
    }

    fn depends(claims: &[(&str, bool)]) -> Wish {
        Wish::Depends(claims.iter().map(|(name, opted)| ((*name).to_owned(), *opted)).collect())
    }

    #[test]
    fn the_annotation_names_volumes_of_each_kind() {
        assert_eq!(wish(&pod(None), &at("own"), FILES), Wish::Host);
        assert_eq!(of("", "pv-1"), Wish::Host);
        assert_eq!(of("own", "own"), Wish::Runtime);
        assert_eq!(of("own", "pv-1"), Wish::Host);
        assert_eq!(of("a, b", "pv-1"), Wish::Runtime);
        assert_eq!(of("a,b", "own"), Wish::Host);
        assert_eq!(of("a", "pv-1"), depends(&[("app-b", false), ("claim-a", true)]));
        let group = group(&pod(None)).unwrap();
        assert_eq!((group.id.as_str(), group.policy.as_deref()), ("4059", Some("OnRootMismatch")));
    }

    #[test]
    fn a_claim_that_two_volumes_are_of_is_left_if_one_of_them_is_named() {
        assert_eq!(of("a-again,b", "pv-1"), Wish::Runtime);
    }

    #[test]
    fn a_publish_is_of_one_of_the_pods_claims_or_of_an_inline_volume() {
        let of = |name, form| {
            let found = claims_at(&pod(Some("a")), &at(name), form);
            found.map(|claims| claims.into_keys().collect::<Vec<_>>())
        };
        assert_eq!(of("own", FILES), None);
        assert_eq!(of("pv-1", FILES), Some(vec!["app-b".to_owned(), "claim-a".to_owned()]));
        let persistent = Form { block: false, inline: Some(false) };
        assert!(of("own", persistent).is_some() && of("pv-1", BLOCK).is_some());
    }

    #[test]
    fn devices_are_never_meant_by_the_publish_of_a_filesystem_nor_the_other_way_round() {
        assert_eq!(of("raw,raw2", "pv-1"), Wish::Host);
        let device = Place::Device { pod_uid: "u".into(), name: "pv-1".into() };
        let of = |annotation| wish(&pod(Some(annotation)), &device, BLOCK);
        assert_eq!(of("a,b,own"), Wish::Host);
        assert_eq!(of("raw,raw2"), Wish::Runtime);
        assert_eq!(of("raw"), depends(&[("claim-raw", true), ("claim-raw2", false)]));
    }

    #[test]
    fn an_inline_volume_is_told_from_a_persistent_volume_of_its_name() {
        let of = |inline| wish(&pod(Some("own")), &at("own"), Form { block: false, inline });
        assert_eq!(
            (of(Some(true)), of(None), of(Some(false))),
            (Wish::Runtime, Wish::Runtime, Wish::Host)
        );
        let other = Form { block: false, inline: Some(true) };
        assert_eq!(wish(&pod(Some("a,b")), &at("pv-1"), other), Wish::Host);
    }

    #[test]
    fn where_the_path_is_none_of_kubelets_all_that_may_be_meant_are_named_or_none_or_nobody_knows()
    {
        let elsewhere = Place::Elsewhere { pod_uid: "u".into() };
        let of = |annotation, inline| {
            wish(&pod(Some(annotation)), &elsewhere, Form { block: false, inline })
        };
        assert_eq!(of("own,a,b", None), Wish::Runtime);
        assert_eq!(of("raw", None), Wish::Host);
        assert_eq!(of("own", None), Wish::Unclear);
        assert_eq!((of("own", Some(true)), of("own", Some(false))), (Wish::Runtime, Wish::Host));
        assert_eq!((of("a,b", Some(false)), of("a", Some(false))), (Wish::Runtime, Wish::Unclear));
        assert_eq!(wish(&pod(Some("raw")), &elsewhere, BLOCK), Wish::Unclear);
    }
}
