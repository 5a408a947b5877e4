//! Resolves the name of a VolumeSnapshot to its content and to the driver's handle, with all
//! checks. The message of a [`Problem`] is the same in all roles; each role maps it to its own
//! code.

use std::sync::Arc;

use kube::ResourceExt;

use super::cache::{Cache, Key};
use super::snapshot::{VolumeSnapshot, VolumeSnapshotContent};

/// A VolumeSnapshot that is bound to a ready content.
#[derive(Debug, Clone)]
pub struct Snapshot {
    pub object: Arc<VolumeSnapshot>,
    pub content: Arc<VolumeSnapshotContent>,
    /// The snapshot's id in CSI.
    pub handle: String,
}

impl Snapshot {
    /// Namespace and name, for messages.
    pub fn shown(&self) -> String {
        shown(&Key::new(&self.object.namespace().unwrap_or_default(), &self.object.name_any()))
    }
}

/// The role of a snapshot in a delta. A base may be in deletion, a target may not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    Base,
    Target,
}

/// Why a name cannot be resolved to a handle. Displays as a message for the caller.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    #[error("VolumeSnapshot {} does not exist", shown(.0))]
    Missing(Key),
    #[error("{kind} {name} is being deleted")]
    Deleting { kind: &'static str, name: String },
    /// Not ready yet; a retry may help.
    #[error(transparent)]
    NotReady(#[from] NotReady),
    #[error(
        "VolumeSnapshotContent {content}, to which VolumeSnapshot {} is bound, does not exist",
        shown(.snapshot)
    )]
    ContentMissing { content: String, snapshot: Key },
    #[error("VolumeSnapshot {} does not belong to the driver {driver}", shown(.snapshot))]
    OtherDriver { snapshot: Key, driver: String },
    /// A call to the API server failed; `doing` is its purpose.
    #[error("failed to {doing}: {error}")]
    Api { doing: &'static str, error: kube::Error },
}

/// Which object is not ready to use.
#[derive(Debug, thiserror::Error)]
pub enum NotReady {
    #[error("VolumeSnapshot {} is not ready to use yet; retry later", shown(.0))]
    Snapshot(Key),
    #[error(
        "VolumeSnapshotContent {content} is not bound to VolumeSnapshot {}; retry later",
        shown(.snapshot)
    )]
    Unbound { content: String, snapshot: Key },
    #[error("VolumeSnapshotContent {0} is not ready to use yet; retry later")]
    Content(String),
}

/// A base and a target that Kubernetes knows to be of different volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("belongs to another volume than the target")]
pub struct OtherVolume;

/// Resolves VolumeSnapshots with two watches. Clones share them.
#[derive(Clone)]
pub struct Resolver {
    pub snapshots: Cache<VolumeSnapshot>,
    pub contents: Cache<VolumeSnapshotContent>,
}

impl Resolver {
    /// The VolumeSnapshot with this name, its content and its handle. If `driver` is given, it must
    /// be the content's.
    pub async fn resolve(
        &self,
        driver: Option<&str>,
        key: &Key,
        part: Part,
    ) -> Result<Snapshot, Problem> {
        match self.object(key).await? {
            Some(object) => self.bound(driver, key, object, part).await,
            None => Err(Problem::Missing(key.clone())),
        }
    }

    pub async fn object(&self, key: &Key) -> Result<Option<Arc<VolumeSnapshot>>, Problem> {
        // A cached object that is not ready may be outdated.
        let known = self.snapshots.get(key).await.map_err(unread_snapshots)?;
        match known {
            Some(object) if object.ready_content().is_none() => self.newest(key).await,
            known => Ok(known),
        }
    }

    /// The object as the API server returns it now.
    pub async fn newest(&self, key: &Key) -> Result<Option<Arc<VolumeSnapshot>>, Problem> {
        self.snapshots.fetch(key).await.map_err(unread_snapshots)
    }

    async fn content(&self, name: &str) -> Result<Option<Arc<VolumeSnapshotContent>>, Problem> {
        let failed = |error| Problem::Api { doing: "read VolumeSnapshotContents", error };
        let key = Key::cluster(name);
        let known = self.contents.get(&key).await.map_err(failed)?;
        match known {
            Some(content) if content.ready_handle().is_none() => {
                self.contents.fetch(&key).await.map_err(failed)
            }
            known => Ok(known),
        }
    }

    /// Resolves a VolumeSnapshot to its content and handle.
    pub async fn bound(
        &self,
        driver: Option<&str>,
        key: &Key,
        object: Arc<VolumeSnapshot>,
        part: Part,
    ) -> Result<Snapshot, Problem> {
        if part == Part::Target && object.metadata.deletion_timestamp.is_some() {
            return Err(Problem::Deleting { kind: "VolumeSnapshot", name: shown(key) });
        }
        let Some(name) = object.ready_content().map(str::to_owned) else {
            return Err(NotReady::Snapshot(key.clone()).into());
        };
        let Some(content) = self.content(&name).await? else {
            return Err(Problem::ContentMissing { content: name, snapshot: key.clone() });
        };
        if !content.belongs_to(&object) {
            return Err(NotReady::Unbound { content: name, snapshot: key.clone() }.into());
        }
        if let Some(driver) = driver.filter(|driver| *driver != content.spec.driver) {
            let (snapshot, driver) = (key.clone(), driver.to_owned());
            return Err(Problem::OtherDriver { snapshot, driver });
        }
        if part == Part::Target && content.metadata.deletion_timestamp.is_some() {
            return Err(Problem::Deleting { kind: "VolumeSnapshotContent", name });
        }
        let Some(handle) = content.ready_handle().map(str::to_owned) else {
            return Err(NotReady::Content(name).into());
        };
        Ok(Snapshot { object, content, handle })
    }
}

/// Whether one snapshot can be the base of the other, as far as Kubernetes knows: it does not know
/// the volume of an imported snapshot. The driver checks the rest. Creation times are not compared:
/// only the driver knows the order of snapshots after its clock was set back.
pub fn fits(
    base: &VolumeSnapshotContent,
    target: &VolumeSnapshotContent,
) -> Result<(), OtherVolume> {
    let volumes = (&base.spec.source.volume_handle, &target.spec.source.volume_handle);
    let (Some(base), Some(target)) = volumes else { return Ok(()) };
    if base == target { Ok(()) } else { Err(OtherVolume) }
}

fn unread_snapshots(error: kube::Error) -> Problem {
    Problem::Api { doing: "read VolumeSnapshots", error }
}

fn shown(key: &Key) -> String {
    format!("{}/{}", key.namespace, key.name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::{
        VolumeSnapshotContentSource, VolumeSnapshotContentSpec, VolumeSnapshotContentStatus,
    };

    /// A content of this volume, or an imported one, with this creation time.
    fn content(volume: Option<&str>, time: i64) -> VolumeSnapshotContent {
        let source = VolumeSnapshotContentSource {
            volume_handle: volume.map(str::to_owned),
            snapshot_handle: volume.is_none().then(|| "handle".to_owned()),
        };
        let spec = VolumeSnapshotContentSpec { source, ..Default::default() };
        let status =
            VolumeSnapshotContentStatus { creation_time: Some(time), ..Default::default() };
        VolumeSnapshotContent { spec, status: Some(status), ..Default::default() }
    }

    #[test]
    fn the_driver_decides_about_the_order_of_snapshots() {
        for (base, target, expected) in [
            ((Some("v"), 1), (Some("v"), 2), Ok(())),
            ((Some("v"), 1), (Some("v"), 1), Ok(())),
            ((Some("v"), 2), (Some("v"), 1), Ok(())),
            ((Some("v"), 1), (Some("w"), 2), Err(OtherVolume)),
            ((None, 2), (Some("v"), 1), Ok(())),
            ((Some("v"), 2), (None, 1), Ok(())),
            ((None, 2), (None, 1), Ok(())),
        ] {
            let fits = fits(&content(base.0, base.1), &content(target.0, target.1));
            assert_eq!(fits, expected, "{base:?} {target:?}");
        }
    }
}
