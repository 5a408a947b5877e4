//! What the calls of CSI's Node service ask of a container runtime (KEP-2857): whether it is to mount a volume in the place of
//! this host, to which group it gives the files, and that the request may ask for that. That it is done is the backend's
//! part.
//!
//! Nobody gets a mount on this host who has asked for another one: what cannot be left to a runtime is refused.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use super::request;
use crate::backend::{
    Access, AccessMode, Backend, Capability, Deferral, Error, GroupPolicy, Result as Checked,
};
use crate::inline::REMOVED_DEFER_FS_MOUNT;
use crate::proto::csi::v1 as csi;
use crate::telemetry::metrics::Metrics;
use csi::volume_capability::{AccessType, MountVolume};
use request::Refusal;

/// The flag that switches all of it on.
const FLAG: &str = "--enable-defer-fs-ops";

/// The kind of volume that is published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Volume {
    Persistent,
    /// Of one pod (KEP-596).
    Inline,
}

/// What a publish asks of a container runtime; `None` where this host mounts. `capability` is that of the request, checked.
pub fn of_publish(
    asked: &csi::NodePublishVolumeRequest,
    capability: &Capability,
    volume: Volume,
) -> Checked<Option<Deferral>> {
    let group = match &capability.access {
        Access::Mount { group, .. } => *group,
        Access::Block if asked.defer_fs_ops => {
            return Err(Error::invalid(
                "defer_fs_ops",
                "a raw block device has no filesystem to mount; leave the field out, or mount the volume",
            ));
        }
        Access::Block => return Ok(None),
    };
    let asked_for = supplemental(asked.volume_capability.as_ref())?;
    if !asked.defer_fs_ops {
        return match asked_for {
            None => Ok(None),
            // CSI MountVolume: "A CO MUST NOT populate this field if defer_fs_ops is empty".
            Some(_) => Err(Error::invalid(
                "volume_capability",
                "volume_supplemental_group goes with a deferred mount only; set defer_fs_ops",
            )),
        };
    }
    check_secrets(asked)?;
    if volume == Volume::Persistent {
        check_writers(asked.readonly, capability)?;
    }
    // Kubelets of today know no other field for the group of the pod.
    Ok(Some(asked_for.unwrap_or(Deferral { group, policy: None })))
}

/// That the caller numbers `defer_fs_ops` as this driver does. Its group would not be seen either, so it is not served.
pub fn check_number(is_former: bool) -> Checked<()> {
    match is_former {
        false => Ok(()),
        true => Err(Error::Precondition(
            "defer_fs_ops: has the number that it had before CSI v1.13, and this host does not mount what is to be left to a \
             container runtime; upgrade the node proxy, or the command that sent it"
                .to_owned(),
        )),
    }
}

/// A secret would lie on the disk, for the runtime to read (the proposal, "Handling of NodePublish secrets").
fn check_secrets(asked: &csi::NodePublishVolumeRequest) -> Checked<()> {
    match asked.secrets.is_empty() {
        true => Ok(()),
        false => Err(Error::invalid(
            "secrets",
            "are not handed to a container runtime; leave out nodePublishSecretRef, or the deferral",
        )),
    }
}

/// Two runtimes that mount one filesystem destroy it, and this driver does not see when they do (the proposal,
/// "Potential data corruption").
fn check_writers(readonly: bool, capability: &Capability) -> Checked<()> {
    let one = capability.mode == AccessMode::SingleNodeSingleWriter;
    if one || readonly || capability.is_read_only() {
        return Ok(());
    }
    Err(Error::invalid(
        "volume_capability",
        "access_mode: a deferred mount that can be written to needs SINGLE_NODE_SINGLE_WRITER (ReadWriteOncePod); any other has to be read-only",
    ))
}

fn supplemental(capability: Option<&csi::VolumeCapability>) -> Checked<Option<Deferral>> {
    match capability.and_then(|capability| capability.access_type.as_ref()) {
        Some(AccessType::Mount(mount)) => Ok(supplemental_group("volume_capability", mount)?),
        _ => Ok(None),
    }
}

/// The supplemental group of a capability and how files are given to it; `field` is where the message has the capability.
pub fn supplemental_group(
    field: &'static str,
    mount: &MountVolume,
) -> Result<Option<Deferral>, Refusal> {
    let malformed = |reason: &str| Err(Refusal::Malformed { field, reason: reason.into() });
    let policy = match mount.volume_supplemental_group_change_policy.as_str() {
        "" => None,
        "Always" => Some(GroupPolicy::Always),
        "OnRootMismatch" => Some(GroupPolicy::OnRootMismatch),
        _ => {
            return malformed(
                "volume_supplemental_group_change_policy is neither Always nor OnRootMismatch",
            );
        }
    };
    let text = &mount.volume_supplemental_group;
    let Some(group) = request::group(field, "volume_supplemental_group", text)? else {
        return match policy {
            None => Ok(None),
            Some(_) => malformed(
                "volume_supplemental_group_change_policy goes with volume_supplemental_group only",
            ),
        };
    };
    match request::group(field, "volume_mount_group", &mount.volume_mount_group)? {
        Some(other) if other != group => malformed(
            "volume_supplemental_group and volume_mount_group differ; both are the group of the pod",
        ),
        _ => Ok(Some(Deferral { group: Some(group), policy })),
    }
}

/// Why a volume that an earlier version created for container runtimes only is not mounted on this host.
pub fn not_on_this_host() -> Error {
    Error::Precondition(format!(
        "volume_context: {REMOVED_DEFER_FS_MOUNT}: the volume was created to be mounted by container runtimes only, and this key no \
         longer asks for that; name the volume in the pod's annotation cbt.storage.k8s.io/defer-fs-mount, or copy it to a claim of \
         another StorageClass"
    ))
}

/// Whether volumes are left to runtimes on this node, and the count of those that were. Cheap to clone.
#[derive(Clone)]
pub struct Deferrals {
    enabled: bool,
    metrics: Metrics,
    /// What has a row, but was not published with success yet and so was not counted: id and target.
    owed: Arc<Mutex<BTreeSet<(String, PathBuf)>>>,
}

impl Deferrals {
    pub fn new(enabled: bool, metrics: Metrics) -> Self {
        Self { enabled, metrics, owed: Arc::default() }
    }

    pub fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// That this node does what the field asks for.
    pub fn check_field(&self, defer_fs_ops: bool) -> Checked<()> {
        match defer_fs_ops && !self.enabled {
            false => Ok(()),
            true => Err(Error::Precondition(format!(
                "defer_fs_ops: is switched off on this node; start the driver with {FLAG}"
            ))),
        }
    }

    /// Publishes a volume, and counts it the first time where it is left to a runtime.
    pub fn publish(
        &self,
        backend: &Backend,
        asked: &csi::NodePublishVolumeRequest,
        deferral: Option<Deferral>,
        publish: impl FnOnce() -> Checked<()>,
    ) -> Checked<()> {
        if deferral.is_none() {
            return publish();
        }
        self.check_field(asked.defer_fs_ops)?;
        let (id, target) = (asked.volume_id.as_str(), Path::new(&asked.target_path));
        let was_there = backend.is_deferred(id, target)?;
        let published = publish();
        match &published {
            Ok(()) => {
                let owed = self.settle(id, target);
                if owed || !was_there {
                    self.metrics.published_deferred();
                }
            }
            // Its row may be there, for the call to be repeated.
            Err(_) if !was_there && backend.is_deferred(id, target)? => {
                self.owed().insert((id.to_owned(), target.to_owned()));
            }
            Err(_) => {}
        }
        published
    }

    /// Forgets whether a publication is still to be counted, and returns whether it was.
    pub fn settle(&self, id: &str, target: &Path) -> bool {
        self.owed().remove(&(id.to_owned(), target.to_owned()))
    }

    fn owed(&self) -> std::sync::MutexGuard<'_, BTreeSet<(String, PathBuf)>> {
        self.owed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[path = "deferral_tests.rs"]
mod tests;
