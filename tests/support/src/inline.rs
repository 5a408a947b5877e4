//! Inline ephemeral volumes as kubelet publishes them (pkg/volume/csi): the handle is a hash of the
//! pod's uid and the volume's name in the pod, the target is in the pod's directory, and the volume
//! is not staged.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use csi_loopback::proto::csi::v1 as csi;
use sha2::{Digest, Sha256};

use super::driver::{Driver, map, mounted};
use super::kernel::{guards_at, mounts_at};

/// An inline volume of a pod, with kubelet's handle and target path.
#[derive(Debug, Clone)]
pub struct PodVolume {
    pub handle: String,
    pub target: PathBuf,
}

/// Kubelet's handle of an inline volume (makeVolumeHandle).
pub fn handle(pod_uid: &str, name: &str) -> String {
    format!("csi-{}", digits(&format!("{pod_uid}{name}")))
}

/// The SHA-256 of a text, as in kubelet's handles and paths.
pub fn digits(text: &str) -> String {
    Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The handle and target of a volume, below the driver's scratch directory.
pub fn pod_volume(driver: &Driver, pod_uid: &str, name: &str) -> PodVolume {
    let pod = driver.scratch().join("pods").join(pod_uid);
    PodVolume {
        handle: handle(pod_uid, name),
        target: pod.join("volumes/kubernetes.io~csi").join(name).join("mount"),
    }
}

impl PodVolume {
    /// A request to publish it writable with these attributes.
    pub fn publishing(&self, attributes: &[(&str, &str)]) -> csi::NodePublishVolumeRequest {
        csi::NodePublishVolumeRequest {
            volume_id: self.handle.clone(),
            target_path: self.target.display().to_string(),
            volume_capability: Some(mounted("")),
            volume_context: context(attributes),
            ..Default::default()
        }
    }

    /// A request to publish it as a read-only content volume with this secret.
    pub fn publishing_content(
        &self,
        attributes: &[(&str, &str)],
        secret: &[(&str, &str)],
    ) -> csi::NodePublishVolumeRequest {
        csi::NodePublishVolumeRequest {
            readonly: true,
            secrets: map(secret),
            ..self.publishing(attributes)
        }
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.target.join(name)
    }
}

/// Attributes together with those that kubelet adds for podInfoOnMount.
pub fn context(attributes: &[(&str, &str)]) -> HashMap<String, String> {
    let of_kubelet = [
        ("csi.storage.k8s.io/ephemeral", "true"),
        ("csi.storage.k8s.io/pod.name", "pod"),
        ("csi.storage.k8s.io/pod.namespace", "apps"),
        ("csi.storage.k8s.io/pod.uid", "b9e3f0c6-0d5d-4c8e-9c4c-1f5f3a9d2f10"),
        ("csi.storage.k8s.io/serviceAccount.name", "default"),
    ];
    map(&[&of_kubelet[..], attributes].concat())
}

/// Whether a volume is mounted at `path`: anything but the guard of a deferred volume.
pub fn is_mounted(path: &Path) -> bool {
    mounts_at(path).len() > guards_at(path)
}
