//! Which of a pod's volumes it wants to leave to its runtime, and what it says of them: the annotation and the pod's security
//! context.

use k8s_openapi::api::core::v1::{Pod, Volume};
use serde::{Deserialize, Serialize};

use crate::kubernetes::defer_annotation;

/// PodSecurityContext.fsGroup and fsGroupChangePolicy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    pub id: String,
    pub policy: Option<String>,
}

/// Which of a pod's volumes a call is about, as far as its target path says: the name of the volume for an inline one, and that of
/// the PersistentVolume for any other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    pub pod_uid: String,
    pub name: String,
}

impl Place {
    /// `…/pods/UID/volumes/kubernetes.io~csi/NAME/mount`, as kubelet makes them.
    pub fn of(target: &str) -> Option<Self> {
        let mut parts = target.rsplit('/');
        let fixed = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let ("mount", name, "kubernetes.io~csi", "volumes") = fixed else { return None };
        let (pod_uid, pods) = (parts.next()?, parts.next()?);
        let is_name = !name.is_empty() && !pod_uid.is_empty() && pods == "pods";
        is_name.then(|| Self { pod_uid: pod_uid.to_owned(), name: name.to_owned() })
    }
}

/// What a pod says of one of its volumes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wish {
    Host,
    Runtime,
    /// It leaves some of its claims to the runtime and some not: which one this is, only the claims can tell. Their names, with whether
    /// they are left.
    Depends(Vec<(String, bool)>),
}

/// What the pod wants for the volume that kubelet calls `name`.
pub fn wish(pod: &Pod, name: &str) -> Wish {
    let opted = defer_annotation::names(pod);
    if opted.is_empty() {
        return Wish::Host;
    }
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let is_opted = |volume: &Volume| opted.contains(volume.name.as_str());
    if let Some(inline) = volumes.clone().find(|volume| volume.csi.is_some() && volume.name == name)
    {
        return if is_opted(inline) { Wish::Runtime } else { Wish::Host };
    }
    let claims: Vec<(String, bool)> = volumes
        .filter_map(|volume| claim(pod, volume).map(|claim| (claim, is_opted(volume))))
        .collect();
    match (claims.iter().any(|(_, opted)| *opted), claims.iter().all(|(_, opted)| *opted)) {
        (false, _) => Wish::Host,
        (true, true) => Wish::Runtime,
        (true, false) => Wish::Depends(claims),
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
                "containers": [],
                "securityContext": { "fsGroup": 4059, "fsGroupChangePolicy": "OnRootMismatch" },
                "volumes": [
                    { "name": "own", "csi": { "driver": "d" } },
                    { "name": "a", "persistentVolumeClaim": { "claimName": "claim-a" } },
                    { "name": "b", "ephemeral": { "volumeClaimTemplate": { "spec": {} } } },
                    { "name": "c", "emptyDir": {} },
                ],
            },
        }))
        .unwrap()
    }

    #[test]
    fn a_target_says_whose_volume_it_is() {
        let place = Place::of("/var/lib/kubelet/pods/u-1/volumes/kubernetes.io~csi/pvc-2/mount");
        assert_eq!(place, Some(Place { pod_uid: "u-1".into(), name: "pvc-2".into() }));
        for other in [
            "",
            "/mnt",
            "/pods/u/volumes/kubernetes.io~nfs/v/mount",
            "/pods/u/volumes/kubernetes.io~csi/v",
            "/pods//volumes/kubernetes.io~csi/v/mount",
            "/nods/u/volumes/kubernetes.io~csi/v/mount",
        ] {
            assert_eq!(Place::of(other), None, "{other}");
        }
    }

    #[test]
    fn the_annotation_names_volumes_of_each_kind() {
        assert_eq!(wish(&pod(None), "own"), Wish::Host);
        assert_eq!(wish(&pod(Some("")), "pv-1"), Wish::Host);
        assert_eq!(wish(&pod(Some("own")), "own"), Wish::Runtime);
        assert_eq!(wish(&pod(Some("own")), "pv-1"), Wish::Host);
        assert_eq!(wish(&pod(Some("a, b")), "pv-1"), Wish::Runtime);
        assert_eq!(wish(&pod(Some("a,b")), "own"), Wish::Host);
        let claims = vec![("claim-a".to_owned(), true), ("app-b".to_owned(), false)];
        assert_eq!(wish(&pod(Some("a")), "pv-1"), Wish::Depends(claims));
        let group = group(&pod(None)).unwrap();
        assert_eq!((group.id.as_str(), group.policy.as_deref()), ("4059", Some("OnRootMismatch")));
    }
}
