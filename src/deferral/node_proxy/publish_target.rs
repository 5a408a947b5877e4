//! Identifies the pod and volume of a publish: by kubelet's target paths, or by the pod info that
//! kubelet adds to the volume context (`podInfoOnMount`).

use std::collections::HashMap;

/// Keys of pod info in the volume context.
const POD_UID: &str = "csi.storage.k8s.io/pod.uid";
const POD_NAME: &str = "csi.storage.k8s.io/pod.name";
const POD_NAMESPACE: &str = "csi.storage.k8s.io/pod.namespace";
const EPHEMERAL: &str = "csi.storage.k8s.io/ephemeral";

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PublishTarget {
    /// `…/pods/UID/volumes/kubernetes.io~csi/NAME/mount`. NAME is the volume's name for an inline
    /// volume, and the PersistentVolume's name otherwise.
    Mount { pod_uid: String, name: String },
    /// `…/volumeDevices/publish/NAME/UID` for a raw block volume. NAME is the PersistentVolume's.
    Device { pod_uid: String, name: String },
    /// Another path, with pod info.
    Other { pod_uid: String },
}

/// Pod info other than the pod's uid.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodInfo {
    /// The pod's namespace and name.
    pub named: Option<(String, String)>,
    /// Whether the volume is inline.
    pub inline: Option<bool>,
}

impl PodInfo {
    pub fn of(context: &HashMap<String, String>) -> Self {
        let get = |key: &str| context.get(key).filter(|value| !value.is_empty()).cloned();
        let inline = get(EPHEMERAL).and_then(|text| text.parse().ok());
        Self { named: get(POD_NAMESPACE).zip(get(POD_NAME)), inline }
    }
}

impl PublishTarget {
    /// The target of a publish. `None`: neither path nor context identifies the pod.
    pub fn of(target: &str, context: &HashMap<String, String>) -> Option<Self> {
        Self::of_path(target).or_else(|| {
            let pod_uid = context.get(POD_UID).filter(|uid| !uid.is_empty())?.clone();
            Some(Self::Other { pod_uid })
        })
    }

    /// Parses one of kubelet's paths.
    pub fn of_path(target: &str) -> Option<Self> {
        let mut parts = target.rsplit('/');
        let (last, second) = (parts.next()?, parts.next()?);
        let (publish, is_kubelets) = match (last, parts.next()?, parts.next()?) {
            ("mount", "kubernetes.io~csi", "volumes") => {
                let (pod_uid, parent) = (parts.next()?.to_owned(), parts.next()?);
                (Self::Mount { pod_uid, name: second.to_owned() }, parent == "pods")
            }
            (pod_uid, "publish", "volumeDevices") => {
                (Self::Device { pod_uid: pod_uid.to_owned(), name: second.to_owned() }, true)
            }
            _ => return None,
        };
        let is_complete = !publish.pod_uid().is_empty() && !second.is_empty();
        (is_kubelets && is_complete).then_some(publish)
    }

    pub fn pod_uid(&self) -> &str {
        match self {
            Self::Mount { pod_uid, .. }
            | Self::Device { pod_uid, .. }
            | Self::Other { pod_uid } => pod_uid,
        }
    }

    /// kubelet's name of the volume, if the path contains it.
    pub fn name(&self) -> Option<&str> {
        match self {
            Self::Mount { name, .. } | Self::Device { name, .. } => Some(name),
            Self::Other { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kubelets_target_paths_identify_pod_and_volume() {
        let (pod_uid, name) = ("u-1".to_owned(), "pvc-2".to_owned());
        let mount = "/var/lib/kubelet/pods/u-1/volumes/kubernetes.io~csi/pvc-2/mount";
        let device = "/var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices/publish/pvc-2/u-1";
        let is_mount = PublishTarget::Mount { pod_uid: pod_uid.clone(), name: name.clone() };
        assert_eq!(PublishTarget::of_path(mount), Some(is_mount));
        assert_eq!(PublishTarget::of_path(device), Some(PublishTarget::Device { pod_uid, name }));
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
            assert_eq!(PublishTarget::of_path(other), None, "{other}");
        }
    }

    #[test]
    fn pod_info_identifies_the_pod_at_other_paths() {
        let context = |pairs: &[(&str, &str)]| -> HashMap<String, String> {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        let info =
            context(&[(POD_UID, "u"), (POD_NAME, "p"), (POD_NAMESPACE, "n"), (EPHEMERAL, "true")]);
        let other = PublishTarget::Other { pod_uid: "u".into() };
        assert_eq!(PublishTarget::of("/mnt/x", &info), Some(other));
        let kubelets =
            PublishTarget::of("/pods/w/volumes/kubernetes.io~csi/v/mount", &info).unwrap();
        assert_eq!((kubelets.pod_uid(), kubelets.name()), ("w", Some("v")));
        assert_eq!(PublishTarget::of("/mnt/x", &context(&[(POD_NAME, "p")])), None);
        let read = PodInfo::of(&info);
        assert_eq!(read.named, Some(("n".into(), "p".into())));
        assert_eq!(read.inline, Some(true));
        assert_eq!(PodInfo::of(&context(&[(POD_NAME, "p"), (EPHEMERAL, "x")])), PodInfo::default());
    }
}
