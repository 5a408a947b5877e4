//! From names of Kubernetes to handles of the driver, with every check that belongs in between (KEP-3314, "The
//! External Snapshot Metadata Sidecar"). Whose data a handle stands for is decided here: a base that belongs to
//! another namespace is refused.

use std::sync::Arc;

use clap::ValueEnum;
use kube::ResourceExt;

use super::refusal::{Reason, Refusal};
use crate::kubernetes::bound_snapshot::{self, Misfit, Part, Problem, Snapshot};
use crate::kubernetes::cache::Key;
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

/// Cheap to clone.
#[derive(Clone)]
pub struct Resolver {
    /// Its contents are indexed by handle.
    pub bound: bound_snapshot::Resolver,
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
        Ok(self.bound.resolve(Some(driver), &key, Part::Target).await?)
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
                false => self.bound.object(&key).await?,
            };
            if let Some(object) = object {
                let base = self.bound.bound(Some(driver), &key, object, Part::Base).await?;
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
        let object = match self.bound.object(&key).await? {
            // The watch may not have told of this one yet.
            Some(other) if !same(&other) => self.bound.newest(&key).await?,
            found => found,
        };
        let object = object.ok_or_else(|| missing(&key))?;
        if !same(&object) {
            return Err(replaced(&key));
        }
        let snapshot = self.bound.bound(Some(driver), &key, object, part).await?;
        if snapshot.handle != member.handle {
            return Err(replaced(&key));
        }
        Ok(snapshot)
    }

    /// Whether a content of the driver has such a handle and, as far as working watches tell, no VolumeSnapshot such a
    /// name. Without this every request with a handle would ask the API server for a name that is newer.
    async fn is_known_handle(&self, driver: &str, key: &Key) -> bool {
        self.base_reference == BaseReference::Either
            && matches!(self.bound.snapshots.told(key), Some(None))
            && self.bound.contents.is_live()
            && self
                .bound
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
        let contents = self.bound.contents.with(handle).await;
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
}

/// Whether one can be the base of the other, as far as Kubernetes knows; the driver knows the rest. `field` is what the
/// request calls the base.
pub fn fits(
    field: &str,
    base: &VolumeSnapshotContent,
    target: &VolumeSnapshotContent,
) -> Result<(), Refusal> {
    bound_snapshot::fits(base, target).map_err(|misfit| {
        let reason = match misfit {
            Misfit::OtherVolume => Reason::OtherVolume,
            Misfit::BaseNewer => Reason::BaseNewer,
        };
        Refusal::new(reason, format!("{field}: {misfit}"))
    })
}

impl From<Problem> for Refusal {
    fn from(problem: Problem) -> Self {
        let reason = match &problem {
            Problem::Missing(_) => Reason::SnapshotMissing,
            Problem::Deleting { .. } => Reason::SnapshotDeleting,
            Problem::NotReady(_) => Reason::SnapshotNotReady,
            Problem::ContentMissing { .. } => Reason::ContentMissing,
            Problem::OtherDriver { .. } => Reason::OtherDriver,
            Problem::Api { doing, error } => return Self::api(doing, error),
        };
        Self::new(reason, problem.to_string())
    }
}

fn missing(key: &Key) -> Refusal {
    Problem::Missing(key.clone()).into()
}

fn replaced(key: &Key) -> Refusal {
    let message = format!(
        "VolumeSnapshot {}/{} is not the one that it was when the session began; make another session",
        key.namespace, key.name
    );
    Refusal::new(Reason::SnapshotReplaced, message)
}
