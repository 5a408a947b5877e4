//! From names of Kubernetes to handles of the driver, with every check that belongs in between (KEP-3314, "The
//! External Snapshot Metadata Sidecar"). Whose data a handle stands for is decided here: a base that belongs to
//! another namespace is refused to callers that may not get its VolumeSnapshot there.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use clap::ValueEnum;
use kube::ResourceExt;

use super::access::Caller;
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
    /// Both. What is the name of one snapshot and the handle of another is refused.
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

    /// The handle of the base, to which `reference` refers, once it is known to fit `target`.
    pub async fn base(
        &self,
        driver: &str,
        reference: &str,
        target: &Snapshot,
        caller: &Caller<'_>,
    ) -> Result<String, Refusal> {
        let namespace = target.object.namespace().unwrap_or_default();
        let key = Key::new(&namespace, reference);
        if self.base_reference == BaseReference::Name {
            let named = self.named(driver, &key).await?.ok_or_else(|| missing(&key))?;
            return handle_of(named, target);
        }
        let contents = self.contents(driver, reference).await?;
        if self.base_reference == BaseReference::Either
            && let Some(named) = self.named_only(driver, &key, &contents).await?
        {
            return handle_of(named, target);
        }
        readable(&contents, &namespace, target, caller).await?;
        Ok(reference.to_owned())
    }

    /// The snapshot of the VolumeSnapshot of that name, if there is one.
    async fn named(&self, driver: &str, key: &Key) -> Result<Option<Snapshot>, Refusal> {
        if !name::is_object(&key.name) {
            return Ok(None);
        }
        match self.bound.object(key).await? {
            Some(object) => {
                Ok(Some(self.bound.bound(Some(driver), key, object, Part::Base).await?))
            }
            None => Ok(None),
        }
    }

    /// The same, unless the name is the handle of these contents, too. Users who may create VolumeSnapshots choose their names: one
    /// that won over a handle would make the delta of another's backup smaller than it is.
    async fn named_only(
        &self,
        driver: &str,
        key: &Key,
        contents: &[Arc<VolumeSnapshotContent>],
    ) -> Result<Option<Snapshot>, Refusal> {
        // Where a working watch reports no VolumeSnapshot of that name, a handle that exists is enough: asking for a newer
        // VolumeSnapshot would cost each request a call.
        let is_known_missing = matches!(self.bound.snapshots.told(key), Some(None));
        if is_known_missing && !contents.is_empty() {
            return Ok(None);
        }
        match self.named(driver, key).await? {
            Some(named) if named.handle != key.name && !contents.is_empty() => Err(ambiguous(key)),
            named => Ok(named),
        }
    }

    /// The driver's contents with this handle.
    async fn contents(
        &self,
        driver: &str,
        handle: &str,
    ) -> Result<Vec<Arc<VolumeSnapshotContent>>, Refusal> {
        let found = self.bound.contents.with_recent(handle).await;
        let mut found =
            found.map_err(|error| Refusal::api("read VolumeSnapshotContents", &error))?;
        found.retain(|content| content.spec.driver == driver);
        Ok(found)
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
}

/// The handle of a base that fits.
fn handle_of(base: Snapshot, target: &Snapshot) -> Result<String, Refusal> {
    fits(BASE_ID, &base.content, &target.content)?;
    Ok(base.handle)
}

/// Whether the caller may use a handle with these contents in `namespace`: no content has it (its VolumeSnapshot was deleted,
/// and the driver holds it to the target's volume), or one of a VolumeSnapshot there, or one of a VolumeSnapshot that the caller
/// may get elsewhere. Which namespace that is, is not for everybody to know.
async fn readable(
    contents: &[Arc<VolumeSnapshotContent>],
    namespace: &str,
    target: &Snapshot,
    caller: &Caller<'_>,
) -> Result<(), Refusal> {
    let owner = |content: &VolumeSnapshotContent| {
        let object = &content.spec.volume_snapshot_ref;
        object.namespace.clone().zip(object.name.clone())
    };
    let is_own = |content: &&Arc<VolumeSnapshotContent>| {
        owner(content).is_some_and(|(home, _)| home == namespace)
    };
    if let Some(own) = contents.iter().find(is_own) {
        return fits(BASE_ID, own, &target.content);
    }
    for content in contents {
        if let Some((home, name)) = owner(content)
            && caller.may_get(&home, Some(&name)).await?
        {
            return fits(BASE_ID, content, &target.content);
        }
    }
    if contents.is_empty() {
        return Ok(());
    }
    Err(Refusal::new(
        Reason::ForeignBase,
        format!(
            "{BASE_ID}: is a snapshot of another namespace than {namespace}, whose VolumeSnapshot {} may not get; use one of \
             this namespace, or have a Role there allow it",
            caller.username().unwrap_or("the user")
        ),
    ))
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

fn ambiguous(key: &Key) -> Refusal {
    let Key { namespace, name } = key;
    let message = format!(
        "{BASE_ID}: {name} is the name of a VolumeSnapshot in the namespace {namespace} and the CSI handle of another \
         snapshot; for the VolumeSnapshot send its handle (status.snapshotHandle of its content); for the other one start \
         the sidecar with --base-reference id, or delete the VolumeSnapshot"
    );
    Refusal::new(Reason::AmbiguousBase, message)
}

fn replaced(key: &Key) -> Refusal {
    let message = format!(
        "VolumeSnapshot {}/{} is not the one that it was when the session began; make another session",
        key.namespace, key.name
    );
    Refusal::new(Reason::SnapshotReplaced, message)
}
