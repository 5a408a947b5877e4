//! The door through a cluster: claims, VolumeSnapshots, and the driver's sidecar, as a backup
//! application uses them. A pod with the claim as a raw block device writes and reads the data, so
//! the driver's sockets may be anywhere.

mod manifest;
mod metadata;
mod objects;
mod pods;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::args::{BaseFrom, ClusterArgs};
use super::calls::Calls;
use super::content::{Image, Patterns, Ranges};
use super::door::{
    About, Done, Door, Edit, Query, Refusal, Sidecar, Snapshot, Source, Stream, Volume, Window,
};
use super::in_pod::{self, Work};
use super::world::lock;
use crate::client::cluster::{Finder, Place, Service, call, capacity, connect};
use kubernetes::snapshot::{VolumeSnapshot, VolumeSnapshotClass, VolumeSnapshotContent};
use metadata::Caller;
use objects::{Kind, Made, Object, Objects};

/// How long a driver may take to make or remove an object.
const PATIENCE: Duration = Duration::from_secs(120);
/// Time limit of the clean-up.
const CLEAN_UP: Duration = Duration::from_secs(120);
const LATE_BINDING: &str = "WaitForFirstConsumer";

/// A driver in a cluster.
pub struct ClusterDoor {
    calls: Calls,
    objects: Objects,
    about: About,
    storage_class: String,
    snapshot_class: String,
    /// Claims are bound when a pod uses them.
    binds_late: bool,
    expands: bool,
    image: String,
    base_from: BaseFrom,
    patterns: Patterns,
    caller: tokio::sync::Mutex<Caller>,
    place: Place,
    audience: String,
    /// Why no connection to the sidecar is possible.
    tls_problem: Option<String>,
    /// Numbers the pods.
    pods: AtomicU32,
    made: Mutex<Vec<Made>>,
}

impl ClusterDoor {
    /// Finds the driver and connects to its sidecar. `run` begins the names of all objects.
    ///
    /// # Errors
    /// An object is missing or not usable, or the sidecar cannot be reached.
    pub fn open(args: &ClusterArgs, run: &str, patterns: Patterns, calls: Calls) -> Result<Self> {
        let storage_class = args.storage_class.clone().context("--storage-class is missing")?;
        let snapshot_class = args.snapshot_class.clone().context("--snapshot-class is missing")?;
        let namespace = args.namespace.clone().map_or_else(|| args.user().namespace(), Ok)?;
        let client = calls.runtime.block_on(connect(args.user()))?;
        let found = calls.runtime.block_on(find(&client, &storage_class, &snapshot_class))?;
        let finder = Finder::new(client.clone(), &namespace, args.address.clone());
        let service = calls.runtime.block_on(finder.service(&found.driver));
        let Service { place, audience } = service.map_err(|failure| failure.error)?;
        let tls_problem = calls.runtime.block_on(metadata::tls_problem(&place))?;
        let account = args.service_account.clone().map(|name| (namespace.clone(), name));
        let caller = tokio::sync::Mutex::new(Caller::new(client.clone(), account));
        let own = || format!("csi-loopback:{}", env!("CARGO_PKG_VERSION"));
        Ok(Self {
            calls,
            objects: Objects { client, namespace, run: run.to_owned() },
            about: About { name: found.driver, version: String::new() },
            storage_class,
            snapshot_class,
            binds_late: found.binds_late,
            expands: found.expands,
            image: args.image.clone().unwrap_or_else(own),
            base_from: args.base_from.clone(),
            patterns,
            caller,
            place,
            audience,
            tls_problem,
            pods: AtomicU32::new(0),
            made: Mutex::default(),
        })
    }

    /// Waits for `work`, unless the run is stopped.
    fn wait<T>(&self, work: impl Future<Output = Done<T>>) -> Done<T> {
        if self.calls.stop.is_now() {
            return Err(Refusal::Stopped);
        }
        self.calls.runtime.block_on(async {
            tokio::select! {
                done = work => done,
                () = self.calls.stop.wait() => Err(Refusal::Stopped),
            }
        })
    }

    fn note(&self, kind: Kind, name: &str) -> Made {
        let made = Made::new(kind, name);
        self.forget(&made);
        lock(&self.made).push(made.clone());
        made
    }

    fn forget(&self, made: &Made) {
        lock(&self.made).retain(|one| (one.kind, &one.name) != (made.kind, &made.name));
    }

    /// Creates an object, and forgets it if the API server refused that.
    fn create<K: Object>(&self, kind: Kind, name: &str, object: Value) -> Done<()> {
        let made = self.note(kind, name);
        let created = self.wait(self.objects.create::<K>(object));
        if matches!(created, Err(Refusal::Final(_))) {
            self.forget(&made);
        }
        created.map(drop)
    }

    /// Deletes an object and waits until it is gone, also in the driver.
    fn remove(&self, kind: Kind, name: &str) -> Done<()> {
        let mut made = Made::new(kind, name);
        self.wait(async {
            made.bound = self.objects.bound(&made).await;
            // The clean-up waits for it, too.
            for one in lock(&self.made).iter_mut().filter(|one| one.name == name) {
                one.bound.clone_from(&made.bound);
            }
            let what = made.describe(&self.objects.namespace);
            match timeout(PATIENCE, self.objects.remove(&made)).await {
                Ok(Ok(())) => Ok(()),
                Ok(Err(reason)) => Err(Refusal::Refused(format!("delete {what}: {reason:#}"))),
                Err(_) => {
                    let seconds = PATIENCE.as_secs();
                    Err(Refusal::Refused(format!("{what} is not deleted after {seconds} s")))
                }
            }
        })?;
        self.forget(&made);
        Ok(())
    }
}

/// What the classes say of a driver.
struct Found {
    driver: String,
    binds_late: bool,
    expands: bool,
}

/// Reads the classes.
async fn find(client: &Client, storage_class: &str, snapshot_class: &str) -> Result<Found> {
    let classes: Api<StorageClass> = Api::all(client.clone());
    let what = format!("StorageClass {storage_class}");
    let class = call(&what, classes.get(storage_class)).await.map_err(|failure| failure.error)?;
    let policy = class.reclaim_policy.as_deref().unwrap_or("Delete");
    ensure!(
        policy == "Delete",
        "{what}: its reclaimPolicy is {policy}, so volumes would remain; name a class with Delete"
    );
    let classes: Api<VolumeSnapshotClass> = Api::all(client.clone());
    let other = format!("VolumeSnapshotClass {snapshot_class}");
    let snapshots = call(&other, classes.get(snapshot_class)).await;
    let snapshots = snapshots.map_err(|failure| failure.error)?;
    ensure!(
        snapshots.deletion_policy == "Delete",
        "{other}: its deletionPolicy is {}, so snapshots would remain; name a class with Delete",
        snapshots.deletion_policy
    );
    ensure!(
        snapshots.driver == class.provisioner,
        "{other} is of driver {}, and {what} of {}; name classes of one driver",
        snapshots.driver,
        class.provisioner
    );
    Ok(Found {
        driver: class.provisioner,
        binds_late: class.volume_binding_mode.as_deref() == Some(LATE_BINDING),
        expands: class.allow_volume_expansion.unwrap_or_default(),
    })
}

impl Door for ClusterDoor {
    fn about(&self) -> &About {
        &self.about
    }

    /// It has a SnapshotMetadataService.
    fn has_metadata(&self) -> bool {
        true
    }

    fn make_volume(&self, name: &str, bytes: u64, source: Option<Source<'_>>) -> Done<Volume> {
        let claim = manifest::claim(name, bytes, &self.storage_class, source);
        self.create::<PersistentVolumeClaim>(Kind::Claim, name, claim)?;
        let size = match self.binds_late {
            true => bytes,
            false => self.wait(self.objects.until(name, "bound", PATIENCE, bound_size))?,
        };
        Ok(Volume { name: name.to_owned(), id: name.to_owned(), size })
    }

    fn change(&self, volume: &Volume, edits: &[Edit]) -> Done<u64> {
        Ok(self.in_pod(volume, Work::Change, 0, edits)?.size)
    }

    fn compare(&self, volume: &Volume, image: &Image) -> Done<Ranges> {
        let edits = in_pod::edits(image);
        let found = self.in_pod(volume, Work::Compare, image.size(), &edits)?;
        let ranges = found.different.into_iter().map(|(offset, length)| offset..offset + length);
        Ok(Ranges::of(ranges.collect()))
    }

    fn while_used(&self, volume: &Volume, work: &mut dyn FnMut()) -> Done<()> {
        self.while_held(volume, work)
    }

    fn grow(&self, volume: &Volume, bytes: u64) -> Done<u64> {
        if !self.expands {
            let reason = "the StorageClass does not allow volume expansion";
            return Err(Refusal::Refused(reason.to_owned()));
        }
        let request = json!({ "requests": { "storage": bytes.to_string() } });
        let patch = json!({ "spec": { "resources": request } });
        let claims = self.objects.api::<PersistentVolumeClaim>();
        self.wait(async {
            let what = format!("grow PersistentVolumeClaim {}", volume.name);
            let patch = Patch::Merge(patch);
            let params = PatchParams::default();
            call(&what, claims.patch(&volume.name, &params, &patch)).await?;
            self.objects
                .until(&volume.name, "grown", PATIENCE, |claim| grown_size(claim, bytes))
                .await
        })
    }

    fn snapshot(&self, volume: &Volume, name: &str) -> Done<Snapshot> {
        let object = manifest::snapshot(name, &volume.name, &self.snapshot_class);
        self.create::<VolumeSnapshot>(Kind::Snapshot, name, object)?;
        self.wait(self.ready(name))
    }

    fn delete_snapshot(&self, snapshot: &Snapshot) -> Done<()> {
        self.remove(Kind::Snapshot, &snapshot.id)
    }

    fn delete_volume(&self, volume: &Volume) -> Done<()> {
        self.remove(Kind::Claim, &volume.name)
    }

    fn stream(&self, query: &Query, window: Window, patience: Duration) -> Stream {
        self.metadata_stream(query, window, patience)
    }

    fn stream_past_deadline(&self, _: &Query, _: Window, _: Duration) -> Option<Stream> {
        None
    }

    fn sidecar(&self) -> Option<&dyn Sidecar> {
        Some(self)
    }

    fn clean_up(&self) -> Vec<String> {
        self.calls.stop.is_cleaning.store(true, Ordering::Relaxed);
        self.calls.runtime.block_on(self.remove_all())
    }
}

impl ClusterDoor {
    /// A VolumeSnapshot when it is ready to use, with what names it as a base.
    async fn ready(&self, name: &str) -> Done<Snapshot> {
        let is_ready = |snapshot: &VolumeSnapshot| {
            let annotation = match &self.base_from {
                BaseFrom::Handle => None,
                BaseFrom::Annotation(key) => Some(
                    snapshot.metadata.annotations.as_ref()?.get(key).filter(|it| !it.is_empty())?,
                ),
            };
            Some(Ok((snapshot.ready_content()?.to_owned(), annotation.cloned())))
        };
        let what = match &self.base_from {
            BaseFrom::Handle => "ready to use".to_owned(),
            BaseFrom::Annotation(key) => format!("ready to use with annotation {key}"),
        };
        let ready = self.objects.until::<VolumeSnapshot, _>(name, &what, PATIENCE, is_ready);
        let (content, annotation) = ready.await?;
        let contents: Api<VolumeSnapshotContent> = Api::all(self.objects.client.clone());
        let what = format!("VolumeSnapshotContent {content}");
        let content = call(&what, contents.get(&content)).await?;
        let status = content.status.clone().unwrap_or_default();
        let size = status.restore_size.and_then(|size| u64::try_from(size).ok());
        let no_handle = || Refusal::Refused(format!("{what} has no handle"));
        let base = annotation.or_else(|| content.ready_handle().map(str::to_owned));
        Ok(Snapshot {
            id: name.to_owned(),
            base: base.ok_or_else(no_handle)?,
            size: size.unwrap_or_default(),
        })
    }

    /// Removes all objects at the same time: those that keep others are gone first.
    async fn remove_all(&self) -> Vec<String> {
        let all = lock(&self.made).clone();
        let mut tasks = JoinSet::new();
        for mut made in all {
            let objects = self.objects.clone();
            tasks.spawn(async move {
                made.bound = objects.bound(&made).await;
                let removal = timeout(CLEAN_UP, objects.remove(&made)).await;
                let late = || Err(anyhow!("not gone after {} s", CLEAN_UP.as_secs()));
                (made, removal.unwrap_or_else(|_| late()))
            });
        }
        let mut remaining = Vec::new();
        for (made, removal) in tasks.join_all().await {
            match removal {
                Ok(()) => self.forget(&made),
                Err(reason) => {
                    let what = made.describe(&self.objects.namespace);
                    remaining.push(format!("{what}: {reason:#}"));
                }
            }
        }
        remaining
    }
}

/// The size of a bound claim in bytes.
fn bound_size(claim: &PersistentVolumeClaim) -> Option<Done<u64>> {
    let phase = claim.status.as_ref()?.phase.as_deref()?;
    (phase == "Bound").then(|| Ok(capacity(claim).unwrap_or_default()))
}

/// The size of a claim that has grown, or that will have grown when a node uses it.
fn grown_size(claim: &PersistentVolumeClaim, bytes: u64) -> Option<Done<u64>> {
    let conditions = claim.status.as_ref()?.conditions.iter().flatten();
    let mut conditions = conditions.filter(|condition| condition.status == "True");
    let is_pending = conditions.any(|condition| condition.type_ == "FileSystemResizePending");
    let size = capacity(claim).unwrap_or_default();
    (size >= bytes || is_pending).then_some(Ok(size.max(bytes)))
}
