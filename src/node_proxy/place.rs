//! Which pod a publish is for, and which of its volumes, as far as the call says: by kubelet's paths, or else by what kubelet
//! adds to the volume context (pod info on mount).

use std::collections::HashMap;

/// Keys of pod info in the volume context.
const POD_UID: &str = "csi.storage.k8s.io/pod.uid";
const POD_NAME: &str = "csi.storage.k8s.io/pod.name";
const POD_NAMESPACE: &str = "csi.storage.k8s.io/pod.namespace";
const EPHEMERAL: &str = "csi.storage.k8s.io/ephemeral";

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// `…/pods/UID/volumes/kubernetes.io~csi/NAME/mount`. The name is the volume's for an inline one, and that of the PersistentVolume for
    /// any other.
    Mount { pod_uid: String, name: String },
    /// `…/volumeDevices/publish/NAME/UID`, of a raw block volume. The name is that of the PersistentVolume.
    Device { pod_uid: String, name: String },
    /// A path that is none of kubelet's, with pod info.
    Elsewhere { pod_uid: String },
}

/// What pod info says besides the pod's uid.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodInfo {
    /// Namespace and name.
    pub named: Option<(String, String)>,
    /// Whether the volume is an inline one.
    pub inline: Option<bool>,
}

impl PodInfo {
    pub fn of(context: &HashMap<String, String>) -> Self {
        let get = |key: &str| context.get(key).filter(|value| !value.is_empty()).cloned();
        let inline = get(EPHEMERAL).and_then(|text| text.parse().ok());
        Self { named: get(POD_NAMESPACE).zip(get(POD_NAME)), inline }
    }
}

impl Place {
    /// The place of a publish. None: nothing says which pod it is for.
    pub fn of(target: &str, context: &HashMap<String, String>) -> Option<Self> {
        Self::of_path(target).or_else(|| {
            let pod_uid = context.get(POD_UID).filter(|uid| !uid.is_empty())?.clone();
            Some(Self::Elsewhere { pod_uid })
        })
    }

    /// What one of kubelet's paths says.
    pub fn of_path(target: &str) -> Option<Self> {
        let mut parts = target.rsplit('/');
        let (last, before) = (parts.next()?, parts.next()?);
        let (place, above) = match (last, parts.next()?, parts.next()?) {
            ("mount", "kubernetes.io~csi", "volumes") => {
                let (pod_uid, above) = (parts.next()?.to_owned(), parts.next()?);
                (Self::Mount { pod_uid, name: before.to_owned() }, above == "pods")
            }
            (pod_uid, "publish", "volumeDevices") => {
                (Self::Device { pod_uid: pod_uid.to_owned(), name: before.to_owned() }, true)
            }
            _ => return None,
        };
        let is_whole = !place.pod_uid().is_empty() && !before.is_empty();
        (above && is_whole).then_some(place)
    }

    pub fn pod_uid(&self) -> &str {
        match self {
            Self::Mount { pod_uid, .. }
            | Self::Device { pod_uid, .. }
            | Self::Elsewhere { pod_uid } => pod_uid,
        }
    }

    /// How kubelet calls the volume, where the path says.
    pub fn name(&self) -> Option<&str> {
        match self {
            Self::Mount { name, .. } | Self::Device { name, .. } => Some(name),
            Self::Elsewhere { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_says_whose_volume_it_is() {
        let (pod_uid, name) = ("u-1".to_owned(), "pvc-2".to_owned());
        let mount = "/var/lib/kubelet/pods/u-1/volumes/kubernetes.io~csi/pvc-2/mount";
        let device = "/var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices/publish/pvc-2/u-1";
        let is_mount = Place::Mount { pod_uid: pod_uid.clone(), name: name.clone() };
        assert_eq!(Place::of_path(mount), Some(is_mount));
        assert_eq!(Place::of_path(device), Some(Place::Device { pod_uid, name }));
        for other in [
            "",
            "/",
            "/mnt",
            "/pods/u/volumes/kubernetes.io~nfs/v/mount",
            "/pods/u/volumes/kubernetes.io~csi/v",
            "/pods//volumes/kubernetes.io~csi/v/mount",
            "/pods/u/volumes/kubernetes.io~csi//mount",
            "/nods/u/volumes/kubernetes.io~csi/v/mount",
            "/volumeDevices/staging/v/u",
            "/volumeDevices/publish/v/",
        ] {
            assert_eq!(Place::of_path(other), None, "{other}");
        }
    }

    #[test]
    fn pod_info_counts_where_the_path_is_none_of_kubelets() {
        let context = |pairs: &[(&str, &str)]| -> HashMap<String, String> {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        let info =
            context(&[(POD_UID, "u"), (POD_NAME, "p"), (POD_NAMESPACE, "n"), (EPHEMERAL, "true")]);
        let elsewhere = Place::Elsewhere { pod_uid: "u".into() };
        assert_eq!(Place::of("/mnt/x", &info), Some(elsewhere));
        let kubelets = Place::of("/pods/w/volumes/kubernetes.io~csi/v/mount", &info).unwrap();
        assert_eq!((kubelets.pod_uid(), kubelets.name()), ("w", Some("v")));
        assert_eq!(Place::of("/mnt/x", &context(&[(POD_NAME, "p")])), None);
        let read = PodInfo::of(&info);
        assert_eq!(read.named, Some(("n".into(), "p".into())));
        assert_eq!(read.inline, Some(true));
        assert_eq!(PodInfo::of(&context(&[(POD_NAME, "p"), (EPHEMERAL, "x")])), PodInfo::default());
    }
}
