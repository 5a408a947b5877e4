//! Deferral in CSI's Node service (KEP-2857): whether a request defers the mount to a container
//! runtime, with which group, and whether the request is allowed to. The backend carries the
//! deferral out.
//!
//! A deferred mount is never replaced by a mount on this host: a request that cannot be deferred is
//! refused.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use super::request;
use csi::volume_capability::AccessType;
use grpc::proto::csi::v1 as csi;
use storage::{Access, AccessMode, Backend, Capability, Deferral, Error, Result as Checked};
use telemetry::metrics::Metrics;

/// The flag that enables deferral.
const FLAG: &str = "--enable-defer-fs-ops";

/// The kind of volume that is published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Volume {
    Persistent,
    /// An inline volume (KEP-596).
    Inline,
}

/// The deferral that a publish requests; `None` if this host mounts the volume. `capability` is the
/// validated capability of the request.
pub fn from_publish(
    req: &csi::NodePublishVolumeRequest,
    capability: &Capability,
    volume: Volume,
) -> Checked<Option<Deferral>> {
    let group = match &capability.access {
        Access::Mount { group, .. } => *group,
        Access::Block if req.defer_fs_ops => {
            return Err(Error::invalid(
                "defer_fs_ops",
                "a raw block volume has no filesystem to mount; omit the field, or use a mount capability",
            ));
        }
        Access::Block => return Ok(None),
    };
    let requested = supplemental(req.volume_capability.as_ref())?;
    if !req.defer_fs_ops {
        return match requested {
            None => Ok(None),
            // CSI MountVolume: "A CO MUST NOT populate this field if defer_fs_ops is empty".
            Some(_) => Err(Error::invalid(
                "volume_capability",
                "volume_supplemental_group requires a deferred mount; set defer_fs_ops",
            )),
        };
    }
    check_secrets(req)?;
    if volume == Volume::Persistent {
        check_writers(req.readonly, capability)?;
    }
    // Current kubelets know no other field for the pod's group.
    Ok(Some(requested.unwrap_or(Deferral { group, policy: None })))
}

/// Refuses secrets: a secret would be written to disk for the runtime (the proposal, "Handling of
/// NodePublish secrets").
fn check_secrets(req: &csi::NodePublishVolumeRequest) -> Checked<()> {
    match req.secrets.is_empty() {
        true => Ok(()),
        false => Err(Error::invalid(
            "secrets",
            "cannot be passed to a container runtime; remove nodePublishSecretRef, or do not defer the mount",
        )),
    }
}

/// Refuses several writers: two runtimes that mount one filesystem corrupt it, and the driver
/// cannot detect it (the proposal, "Potential data corruption").
fn check_writers(readonly: bool, capability: &Capability) -> Checked<()> {
    let one = capability.mode == AccessMode::SingleNodeSingleWriter;
    if one || readonly || capability.is_read_only() {
        return Ok(());
    }
    Err(Error::invalid(
        "volume_capability",
        "access_mode: a writable deferred mount needs SINGLE_NODE_SINGLE_WRITER (ReadWriteOncePod); use it, or publish read-only",
    ))
}

fn supplemental(capability: Option<&csi::VolumeCapability>) -> Checked<Option<Deferral>> {
    match capability.and_then(|capability| capability.access_type.as_ref()) {
        Some(AccessType::Mount(mount)) => {
            Ok(request::supplemental_group("volume_capability", mount)?)
        }
        _ => Ok(None),
    }
}

/// Whether deferral is enabled on this node, and the count of deferred publications.
#[derive(Clone)]
pub struct Deferrals {
    enabled: bool,
    metrics: Metrics,
    /// Publications with a row that have not succeeded yet, and so are not counted: id and target.
    uncounted: Arc<Mutex<BTreeSet<(String, PathBuf)>>>,
}

impl Deferrals {
    pub fn new(enabled: bool, metrics: Metrics) -> Self {
        Self { enabled, metrics, uncounted: Arc::default() }
    }

    pub fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// Refuses the field if deferral is disabled on this node.
    pub fn check_field(&self, defer_fs_ops: bool) -> Checked<()> {
        match defer_fs_ops && !self.enabled {
            false => Ok(()),
            true => Err(Error::Precondition(format!(
                "defer_fs_ops: is disabled on this node; start the driver with {FLAG}"
            ))),
        }
    }

    /// Publishes a volume, and counts a deferred one at its first success.
    pub fn publish(
        &self,
        backend: &Backend,
        req: &csi::NodePublishVolumeRequest,
        deferral: Option<Deferral>,
        publish: impl FnOnce() -> Checked<()>,
    ) -> Checked<()> {
        if deferral.is_none() {
            return publish();
        }
        self.check_field(req.defer_fs_ops)?;
        let (id, target) = (req.volume_id.as_str(), Path::new(&req.target_path));
        let existed = backend.is_deferred(id, target)?;
        let published = publish();
        match &published {
            Ok(()) => {
                let uncounted = self.discard_uncounted(id, target);
                if uncounted || !existed {
                    self.metrics.record_deferred_publish();
                }
            }
            // The row may exist, so that the call can be repeated.
            Err(_) if !existed && backend.is_deferred(id, target)? => {
                self.uncounted().insert((id.to_owned(), target.to_owned()));
            }
            Err(_) => {}
        }
        published
    }

    /// Removes a publication from the uncounted ones, and returns whether it was one of them.
    pub fn discard_uncounted(&self, id: &str, target: &Path) -> bool {
        self.uncounted().remove(&(id.to_owned(), target.to_owned()))
    }

    fn uncounted(&self) -> std::sync::MutexGuard<'_, BTreeSet<(String, PathBuf)>> {
        self.uncounted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[path = "deferral_tests.rs"]
mod tests;
