//! Resolves Kubernetes names to the driver's handles, with all checks of KEP-3314 ("The External
//! Snapshot Metadata Sidecar"). This module decides whose data a handle refers to: a base of
//! another namespace is refused unless the caller may get its VolumeSnapshot there.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use clap::ValueEnum;
use kube::ResourceExt;

use super::access::{Caller, User};
use super::refusal::{Reason, Refusal};
use kubernetes::bound_snapshot::{self, Part, Problem, Snapshot};
use kubernetes::cache::Key;
use kubernetes::name;
use kubernetes::session::SessionSnapshot;
use kubernetes::snapshot::{VolumeSnapshot, VolumeSnapshotContent};

/// The field of the released API that holds the base.
pub const BASE_ID: &str = "base_snapshot_id";

/// `--base-reference`: what base_snapshot_id refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BaseReference {
    /// A CSI handle, as in the released API
    Id,
    /// The name of a VolumeSnapshot, as in KEP-3314
    Name,
    /// Both; refuse a value that is the name of one snapshot and the handle of another
    Either,
}

/// Resolves and checks snapshots. Clones share the watches.
#[derive(Clone)]
pub struct Resolver {
    /// Its contents are indexed by handle.
    pub bound: bound_snapshot::Resolver,
    pub base_reference: BaseReference,
}

impl Resolver {
    /// The snapshot to report on.
    pub async fn target(
        &self,
        driver: &str,
        namespace: &str,
        name: &str,
    ) -> Result<Snapshot, Refusal> {
        let key = Key::new(namespace, name);
        Ok(self.bound.resolve(Some(driver), &key, Part::Target).await?)
    }

    /// The handle of the base that `reference` names, after checks that it fits `target`.
    pub async fn base(
        &self,
        driver: &str,
        reference: &str,
        target: &Snapshot,
        caller: &Caller,
    ) -> Result<String, Refusal> {
        let namespace = target.object.namespace().unwrap_or_default();
        let key = Key::new(&namespace, reference);
        if self.base_reference == BaseReference::Name {
            let named = self.named(driver, &key).await?.ok_or_else(|| missing(&key))?;
            return self.id_of(driver, named, target, caller).await;
        }
        let contents = self.contents(driver, reference).await?;
        if self.base_reference == BaseReference::Either
            && let Some(named) = self.named_only(driver, &key, &contents).await?
        {
            return self.id_of(driver, named, target, caller).await;
        }
        readable(&contents, &namespace, target, caller).await?;
        Ok(reference.to_owned())
    }

    /// What the driver takes as a base that was named, after checks that it fits the target.
    async fn id_of(
        &self,
        driver: &str,
        base: Snapshot,
        target: &Snapshot,
        caller: &Caller,
    ) -> Result<String, Refusal> {
        fits(BASE_ID, &base.content, &target.content)?;
        let Some(id) = base.object.change_id() else { return Ok(base.handle) };
        // Users write annotations, so it is checked as an id in a request is.
        let contents = self.contents(driver, id).await?;
        let namespace = target.object.namespace().unwrap_or_default();
        readable(&contents, &namespace, target, caller).await?;
        Ok(id.to_owned())
    }

    /// The VolumeSnapshot with this name, if it exists.
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

    /// Like [`Resolver::named`], but refuses a name that is also the handle of these contents.
    /// Users who may create VolumeSnapshots choose their names: a name that took precedence over a
    /// handle would make the delta of another user's backup too small.
    async fn named_only(
        &self,
        driver: &str,
        key: &Key,
        contents: &[Arc<VolumeSnapshotContent>],
    ) -> Result<Option<Snapshot>, Refusal> {
        // If a running watch reports no VolumeSnapshot with this name, an existing handle is
        // enough: a query for a newer VolumeSnapshot would cost one call per request.
        let is_known_missing = matches!(self.bound.snapshots.cached(key), Some(None));
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
        Ok(of_driver(driver, found.map_err(|error| unread(&error))?))
    }

    /// The same, from the API server if the watch has none: one may be newer than its last report.
    pub async fn newest_contents(
        &self,
        driver: &str,
        handle: &str,
    ) -> Result<Vec<Arc<VolumeSnapshotContent>>, Refusal> {
        let known = self.contents(driver, handle).await?;
        if !known.is_empty() {
            return Ok(known);
        }
        let found = self.bound.contents.fetch_with(handle).await;
        Ok(of_driver(driver, found.map_err(|error| unread(&error))?))
    }

    /// A snapshot of a session. The VolumeSnapshot must be the same object as when the session
    /// began, and have the same handle.
    pub async fn member(
        &self,
        driver: &str,
        member: &SessionSnapshot,
        part: Part,
    ) -> Result<Snapshot, Refusal> {
        let key = Key::new(&member.namespace, &member.name);
        let same = |object: &VolumeSnapshot| object.metadata.uid.as_deref() == Some(&member.uid);
        let object = match self.bound.object(&key).await? {
            // The watch may not have reported the new object yet.
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

fn unread(error: &kube::Error) -> Refusal {
    Refusal::api("read VolumeSnapshotContents", error)
}

fn of_driver(
    driver: &str,
    mut contents: Vec<Arc<VolumeSnapshotContent>>,
) -> Vec<Arc<VolumeSnapshotContent>> {
    contents.retain(|content| content.spec.driver == driver);
    contents
}

/// Whether the caller may use a handle with these contents in `namespace`. Allowed are: a handle
/// without content (its VolumeSnapshot was deleted, and the driver checks that the volume is the
/// target's), a handle of a VolumeSnapshot in `namespace`, and a handle of a VolumeSnapshot
/// elsewhere that the caller may get. The error does not name the other namespace.
async fn readable(
    contents: &[Arc<VolumeSnapshotContent>],
    namespace: &str,
    target: &Snapshot,
    caller: &Caller,
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
    Err(foreign_base(namespace, caller.username()))
}

/// The refusal of a base of another namespace whose VolumeSnapshot the user may not get.
pub fn foreign_base(namespace: &str, user: Option<&str>) -> Refusal {
    Refusal::new(
        Reason::ForeignBase,
        format!(
            "{BASE_ID}: belongs to another namespace than {namespace}, and {} may not get its VolumeSnapshot; use a \
             snapshot of this namespace, or grant the permission with a Role in the other namespace",
            user.unwrap_or("the user")
        ),
    )
}

/// Whether one snapshot can be the base of the other, as far as Kubernetes knows; the driver checks
/// the rest. `field` is the request's field for the base.
pub fn fits(
    field: &str,
    base: &VolumeSnapshotContent,
    target: &VolumeSnapshotContent,
) -> Result<(), Refusal> {
    let fits = bound_snapshot::fits(base, target);
    fits.map_err(|other| Refusal::new(Reason::OtherVolume, format!("{field}: {other}")))
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
         snapshot; for the VolumeSnapshot, send its handle (status.snapshotHandle of its content); for the other \
         snapshot, start the sidecar with --base-reference id, or delete the VolumeSnapshot"
    );
    Refusal::new(Reason::AmbiguousBase, message)
}

fn replaced(key: &Key) -> Refusal {
    let message = format!(
        "VolumeSnapshot {}/{} was replaced since the session began; create another SnapshotSessionRequest",
        key.namespace, key.name
    );
    Refusal::new(Reason::SnapshotReplaced, message)
}
