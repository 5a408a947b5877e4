//! From names of Kubernetes to handles of the driver, with every check that belongs in between (KEP-3314, "The
//! External Snapshot Metadata Sidecar"). Whose data a handle stands for is decided here: a base that belongs to
//! another namespace is refused.

use std::borrow::Cow;
use std::sync::Arc;

use clap::ValueEnum;
use kube::ResourceExt;

use super::refusal::{Reason, Refusal};
use crate::kubernetes::cache::{Cache, Key};
use crate::kubernetes::name;
use crate::kubernetes::session::SessionSnapshot;
use crate::kubernetes::snapshot::{VolumeSnapshot, VolumeSnapshotContent};

/// What the released API calls the base.
const BASE_ID: &str = "base_snapshot_id";

/// `--base-reference`: what base_snapshot_id may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BaseReference {
    /// A CSI handle, as in the released API.
    Id,
    /// The name of a VolumeSnapshot, as in the proposal.
    Name,
    /// A name that exists, else a handle.
    Either,
}

/// A VolumeSnapshot that is bound to a content of this driver.
#[derive(Debug, Clone)]
pub struct Snapshot {
    pub object: Arc<VolumeSnapshot>,
    pub content: Arc<VolumeSnapshotContent>,
    /// The snapshot's id in CSI.
    pub handle: String,
}

impl Snapshot {
    /// Namespace and name, for people.
    pub fn shown(&self) -> String {
        shown(&Key::new(&self.object.namespace().unwrap_or_default(), &self.object.name_any()))
    }
}

/// Which of a delta's snapshots is looked for: a base may be on its way out, a target may not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    Base,
    Target,
}

/// Cheap to clone.
#[derive(Clone)]
pub struct Resolver {
    pub snapshots: Cache<VolumeSnapshot>,
    /// Indexed by handle.
    pub contents: Cache<VolumeSnapshotContent>,
    pub base_reference: BaseReference,
}

impl Resolver {
    /// The snapshot that a request is about.
    pub async fn target(
        &self,
        driver: &str,
        namespace: &str,
        name: &str,
    ) -> Result<Snapshot, Refusal> {
        let key = Key::new(namespace, name);
        match self.object(&key).await? {
            Some(object) => self.bound(driver, &key, object, Part::Target).await,
            None => Err(missing(&key)),
        }
    }

    /// The handle of the base, which `reference` names, once it is known to fit `target`.
    pub async fn base(
        &self,
        driver: &str,
        reference: &str,
        target: &Snapshot,
    ) -> Result<String, Refusal> {
        let namespace = target.object.namespace().unwrap_or_default();
        if self.base_reference != BaseReference::Id && name::is_object(reference) {
            let key = Key::new(&namespace, reference);
            let object = match self.is_known_handle(driver, &key).await {
                true => None,
                false => self.object(&key).await?,
            };
            if let Some(object) = object {
                let base = self.bound(driver, &key, object, Part::Base).await?;
                fits(BASE_ID, &base.content, &target.content)?;
                return Ok(base.handle);
            }
        }
        if self.base_reference == BaseReference::Name {
            return Err(missing(&Key::new(&namespace, reference)));
        }
        self.owned(driver, reference, &namespace, target).await?;
        Ok(reference.to_owned())
    }

    /// A snapshot of a session: the VolumeSnapshot has to be the one that it was when the session began, and to lead to
    /// the same handle.
    pub async fn member(
        &self,
        driver: &str,
        member: &SessionSnapshot,
        part: Part,
    ) -> Result<Snapshot, Refusal> {
        let key = Key::new(&member.namespace, &member.name);
        let same = |object: &VolumeSnapshot| object.metadata.uid.as_deref() == Some(&member.uid);
        let object = match self.object(&key).await? {
            // The watch may not have told of this one yet.
            Some(other) if !same(&other) => {
                let fetched = self.snapshots.fetch(&key).await;
                fetched.map_err(|error| Refusal::api("read VolumeSnapshots", &error))?
            }
            found => found,
        };
        let object = object.ok_or_else(|| missing(&key))?;
        if !same(&object) {
            return Err(replaced(&key));
        }
        let snapshot = self.bound(driver, &key, object, part).await?;
        if snapshot.handle != member.handle {
            return Err(replaced(&key));
        }
        Ok(snapshot)
    }

    /// Whether a content of the driver has such a handle and, as far as working watches tell, no VolumeSnapshot such a
    /// name. Without this every request with a handle would ask the API server for a name that is newer.
    async fn is_known_handle(&self, driver: &str, key: &Key) -> bool {
        self.base_reference == BaseReference::Either
            && matches!(self.snapshots.told(key), Some(None))
            && self.contents.is_live()
            && self
                .contents
                .with(&key.name)
                .await
                .is_ok_and(|contents| contents.iter().any(|content| content.spec.driver == driver))
    }

    /// Whether a handle may be used in `namespace`: no content has it (its VolumeSnapshot was deleted, and the
    /// driver holds it to the target's volume), or one of a VolumeSnapshot there.
    async fn owned(
        &self,
        driver: &str,
        handle: &str,
        namespace: &str,
        target: &Snapshot,
    ) -> Result<(), Refusal> {
        let contents = self.contents.with(handle).await;
        let contents =
            contents.map_err(|error| Refusal::api("read VolumeSnapshotContents", &error))?;
        let of_driver = contents.iter().filter(|content| content.spec.driver == driver);
        let own = |content: &&Arc<VolumeSnapshotContent>| {
            content.spec.volume_snapshot_ref.namespace.as_deref() == Some(namespace)
        };
        let (own, foreign): (Vec<_>, Vec<_>) = of_driver.partition(own);
        match (own.first(), foreign.first()) {
            (Some(content), _) => fits(BASE_ID, content, &target.content),
            (None, None) => Ok(()),
            (None, Some(_)) => Err(Refusal::new(
                Reason::ForeignBase,
                format!(
                    "{BASE_ID}: is a snapshot that belongs to another namespace than {namespace}; \
                     use one of a VolumeSnapshot of this namespace"
                ),
            )),
        }
    }

    async fn object(&self, key: &Key) -> Result<Option<Arc<VolumeSnapshot>>, Refusal> {
        let failed = |error| Refusal::api("read VolumeSnapshots", &error);
        let known = self.snapshots.get(key).await.map_err(failed)?;
        match known {
            // It may be ready by now.
            Some(object) if object.ready_content().is_none() => {
                self.snapshots.fetch(key).await.map_err(failed)
            }
            known => Ok(known),
        }
    }

    async fn content(&self, name: &str) -> Result<Option<Arc<VolumeSnapshotContent>>, Refusal> {
        let failed = |error| Refusal::api("read VolumeSnapshotContents", &error);
        let key = Key::cluster(name);
        let known = self.contents.get(&key).await.map_err(failed)?;
        match known {
            Some(content) if content.ready_handle().is_none() => {
                self.contents.fetch(&key).await.map_err(failed)
            }
            known => Ok(known),
        }
    }

    /// Follows a VolumeSnapshot to its content and handle.
    async fn bound(
        &self,
        driver: &str,
        key: &Key,
        object: Arc<VolumeSnapshot>,
        part: Part,
    ) -> Result<Snapshot, Refusal> {
        if part == Part::Target && object.metadata.deletion_timestamp.is_some() {
            return Err(deleting("VolumeSnapshot", &shown(key)));
        }
        let Some(content_name) = object.ready_content() else {
            let message =
                format!("VolumeSnapshot {} is not ready to use yet; try again", shown(key));
            return Err(Refusal::new(Reason::SnapshotNotReady, message));
        };
        let Some(content) = self.content(content_name).await? else {
            let message = format!(
                "VolumeSnapshotContent {content_name}, to which VolumeSnapshot {} is bound, does not exist",
                shown(key)
            );
            return Err(Refusal::new(Reason::ContentMissing, message));
        };
        if !content.belongs_to(&object) {
            let message = format!(
                "VolumeSnapshotContent {content_name} is not bound to VolumeSnapshot {}; try again",
                shown(key)
            );
            return Err(Refusal::new(Reason::SnapshotNotReady, message));
        }
        if content.spec.driver != driver {
            let message =
                format!("VolumeSnapshot {} is not one of the driver {driver}", shown(key));
            return Err(Refusal::new(Reason::OtherDriver, message));
        }
        if part == Part::Target && content.metadata.deletion_timestamp.is_some() {
            return Err(deleting("VolumeSnapshotContent", content_name));
        }
        let Some(handle) = content.ready_handle().map(str::to_owned) else {
            let message =
                format!("VolumeSnapshotContent {content_name} is not ready to use yet; try again");
            return Err(Refusal::new(Reason::SnapshotNotReady, message));
        };
        Ok(Snapshot { object, content, handle })
    }
}

/// The index of contents.
pub fn handle(content: &VolumeSnapshotContent) -> Option<Cow<'_, str>> {
    let made = content.status.as_ref().and_then(|status| status.snapshot_handle.as_deref());
    made.or(content.spec.source.snapshot_handle.as_deref()).map(Cow::from)
}

/// Whether one can be the base of the other, as far as Kubernetes knows; the driver knows the rest. `field` is what the
/// request calls the base.
pub fn fits(
    field: &str,
    base: &VolumeSnapshotContent,
    target: &VolumeSnapshotContent,
) -> Result<(), Refusal> {
    let volumes =
        base.spec.source.volume_handle.as_ref().zip(target.spec.source.volume_handle.as_ref());
    if volumes.is_some_and(|(base, target)| base != target) {
        let message = format!("{field}: is a snapshot of another volume than the target");
        return Err(Refusal::new(Reason::OtherVolume, message));
    }
    let cut_at =
        |content: &VolumeSnapshotContent| content.status.as_ref().and_then(|it| it.creation_time);
    if cut_at(base).zip(cut_at(target)).is_some_and(|(base, target)| base > target) {
        let message =
            format!("{field}: is newer than the target; the earlier snapshot is the base");
        return Err(Refusal::new(Reason::BaseNewer, message));
    }
    Ok(())
}

fn missing(key: &Key) -> Refusal {
    let message = format!("VolumeSnapshot {} does not exist", shown(key));
    Refusal::new(Reason::SnapshotMissing, message)
}

fn replaced(key: &Key) -> Refusal {
    let message = format!(
        "VolumeSnapshot {} is not the one that it was when the session began; make another session",
        shown(key)
    );
    Refusal::new(Reason::SnapshotReplaced, message)
}

fn deleting(kind: &str, name: &str) -> Refusal {
    Refusal::new(Reason::SnapshotDeleting, format!("{kind} {name} is being deleted"))
}

fn shown(key: &Key) -> String {
    format!("{}/{}", key.namespace, key.name)
}
