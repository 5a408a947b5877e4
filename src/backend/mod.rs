//! The loopback-file block backend: volumes, snapshots and the change records that say what differs
//! between them. No gRPC, no Kubernetes, no async: every call blocks until its result is durable.
//!
//! | module | owns |
//! |---|---|
//! | [`pool`] | where backing files live, and how they are cloned and compared |
//! | `volume`, `attachment` | a volume's life, and its use on this node |
//! | `cut`, `point_in_time`, `snapshot`, `group` | from running volumes to snapshots with records |
//! | `base` | how long a snapshot stays good as the base of a delta |
//! | [`tracker`], [`extents`] | change records, and the rule that fills them |
//! | `catalog`, `store`, `locks` | rows, files and who may change them |
//! | `deferral`, `runtime` | volumes that a container runtime mounts in the place of this host |
//! | `inline` | volumes that live and die with a pod's mount |
//! | `health` | what is wrong with volumes |
//! | `writeback`, `lost_pool` | writes that the kernel lost; a pool whose filesystem has shut down |
//! | [`freeze_guard`] | the process that thaws what a killed driver froze |
//! | `reconcile`, `upkeep`, [`check`] | after a crash, in the background, offline |
//! | `loop_device`, `filesystem`, `command`, `sys` | the kernel and its tools |
//! | [`fail_point`] | places where tests end or fail an operation; nothing in what ships |

mod attachment;
mod base;
pub(crate) mod catalog;
pub mod check;
mod command;
mod cut;
mod deferral;
mod details;
mod direct;
pub mod error;
pub mod extents;
pub mod fail_point;
pub(crate) mod filesystem;
mod format;
pub mod freeze_guard;
mod group;
mod health;
pub mod ids;
mod inline;
pub(crate) mod list;
mod locks;
mod loop_device;
mod lost_pool;
mod model;
mod point_in_time;
pub mod pool;
mod reconcile;
mod runtime;
mod snapshot;
mod store;
pub(crate) mod sys;
mod target;
pub mod tracker;
pub mod units;
mod upkeep;
mod volume;
mod writeback;

use std::fs::{self, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};
use tracing::{info, warn};

use catalog::{Catalog, Relief};
use error::Context;
use freeze_guard::Guard;
use locks::Locks;
use pool::{Directory, ImageChoice, Pool};
use store::Store;

pub use base::{Base, BasesOf};
pub use details::VolumeDetails;
pub use error::{Error, Kind, Result};
pub use freeze_guard::FreezeGuard;
pub use inline::{Content, InlineLimits, PublishInline};
pub use list::Page;
pub use model::*;
pub use pool::{
    ImageStatus, MAX_BLOCK_SIZE as MAX_POOL_BLOCK_SIZE, PoolChoice, PoolKind, PoolStatus,
};
pub use runtime::{DeferredMount, Runtime, RuntimeStats};
pub use snapshot::SnapshotFilter;
pub use store::now;
pub use sys::bound_arenas;
pub use tracker::{BlockMap, Extents, Style};
pub use units::{BLOCK_SIZE, Block, BlockRange, Extent, MAX_VOLUME_BYTES, MIN_VOLUME_BYTES};
pub use volume::{CreateVolume, ModifyVolume};

/// What a backend is opened with.
#[derive(Debug, Clone)]
pub struct Config {
    pub data_dir: PathBuf,
    pub pool: PoolChoice,
    /// Size of an image pool's image in bytes. An image that is smaller grows, one that is larger is refused.
    pub pool_size: Option<u64>,
    /// Whether the image of a new image pool is sparse.
    pub pool_sparse: bool,
    /// Bytes in a block of the filesystem of a new image pool.
    pub pool_block_size: Option<u64>,
    /// How long the record of a deleted snapshot stays usable as a base.
    pub retention: Duration,
    /// How much larger than the pool the volumes may be in all.
    pub overcommit: f64,
    pub inline: InlineLimits,
    /// The way to container runtimes that mount in the place of this host. With one, volumes are mounted when they are
    /// published and not when they are staged, and can be left to a runtime.
    pub runtime: Option<Arc<dyn Runtime>>,
    /// The process that thaws what this one froze if it is killed.
    pub freeze_guard: FreezeGuard,
}

/// The backend of one data directory. Cheap to clone. Operations that change the same volume
/// exclude each other with [`Error::Busy`]; lists, usage and queries never do.
#[derive(Debug, Clone)]
pub struct Backend {
    store: Arc<Store>,
}

/// The catalog's file in a pool.
fn catalog_path(root: &Path) -> PathBuf {
    root.join("catalog.redb")
}

/// The file in a data directory that one instance has locked.
fn lock_path(data_dir: &Path) -> PathBuf {
    data_dir.join("lock")
}

/// Keeps other instances away from a data directory as long as the file is open.
fn lock_instance(data_dir: &Path) -> Result<Flock<File>> {
    let path = lock_path(data_dir);
    let file = pool::new_file(&path)?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| match errno {
        nix::Error::EWOULDBLOCK => Error::Precondition(format!(
            "{} is in use by another csi-loopback; stop that first",
            data_dir.display()
        )),
        errno => Error::io(format!("locking {}", path.display()), errno.into()),
    })
}

impl Backend {
    /// Opens the data directory, or makes it, and brings what a former process left half-way to an
    /// end. A second instance on the same directory is refused.
    pub fn open(config: Config) -> Result<Self> {
        let data_dir = config.data_dir.clone();
        Self::open_pool(config).map_err(|error| lost_pool::explain_start(&data_dir, error))
    }

    fn open_pool(config: Config) -> Result<Self> {
        let data_dir = &config.data_dir;
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(data_dir);
        made.context(|| format!("making {}", data_dir.display()))?;
        let instance_lock = lock_instance(data_dir)?;
        let image = ImageChoice {
            size: config.pool_size,
            sparse: config.pool_sparse,
            block_size: config.pool_block_size,
        };
        let opened = pool::open(data_dir, config.pool, &image)?;
        let pool: Arc<dyn Pool> = opened.pool.into();
        check_catalog(pool.root())?;
        let store = Store {
            catalog: Catalog::open(&catalog_path(pool.root()), relief(&pool))?,
            max_volume_bytes: largest_file(pool.as_ref()),
            pool,
            pool_reason: opened.reason,
            locks: Locks::default(),
            freeze_guard: Guard::new(config.freeze_guard.clone()),
            config,
            crash_consistent: AtomicU64::new(0),
            unrecorded: Default::default(),
            _instance_lock: instance_lock,
        };
        info!(pool = %store.pool.kind(), reason = store.pool_reason, "opened the pool");
        reconcile::reconcile(&store)?;
        Ok(Self { store: Arc::new(store) })
    }

    /// The kind of the pool, and why it was chosen.
    pub fn pool_description(&self) -> String {
        format!("{} pool: {}", self.store.pool.kind(), self.store.pool_reason)
    }

    pub fn pool_kind(&self) -> PoolKind {
        self.store.pool.kind()
    }

    /// Room in the pool, in bytes.
    pub fn pool_room(&self) -> Result<pool::Room> {
        self.store.pool.room()
    }

    /// The pool, its room, and what it stands on.
    pub fn pool_status(&self) -> Result<PoolStatus> {
        let pool = &self.store.pool;
        let image = pool.image().map(pool::Image::status).transpose()?;
        Ok(PoolStatus {
            kind: pool.kind(),
            reason: self.store.pool_reason.clone(),
            room: pool.room()?,
            block_size: pool::filesystem_block_size(pool.root())?,
            image,
            capacity: volume::room(&self.store)?,
            overcommit: self.store.config.overcommit,
            condition: health::of_pool(&self.store)?,
        })
    }

    /// A volume and its use on this node.
    pub fn volume_details(&self, id: &str) -> Result<VolumeDetails> {
        self.on_pool(|store| details::of_volume(store, id))
    }

    /// Up to `max` inline volumes after the handle `after`, each with its condition.
    pub fn inline_volumes(
        &self,
        after: Option<&str>,
        max: usize,
    ) -> Result<Page<(Inline, Condition)>> {
        self.on_pool(|store| details::inline_volumes(store, after, max))
    }

    /// Grows the image of an image pool to `size` bytes, while volumes are attached. Idempotent; to the
    /// size that it has is OK, to less is `OutOfRange`. `Precondition` for another kind of pool.
    pub fn grow_pool(&self, size: u64) -> Result<PoolStatus> {
        let Config { data_dir, pool_size, .. } = &self.store.config;
        pool::grow(data_dir, self.store.pool.as_ref(), *pool_size, size)?;
        self.pool_status()
    }

    /// Drops hidden baselines when the pool is nearly full, and releases the reserve below a sparse pool
    /// image. Cheap when there is room: to be called about once a second, before a pod meets ENOSPC.
    pub fn relieve_pressure(&self) -> Result<()> {
        upkeep::relieve_pressure(&self.store)
    }

    /// Drops the change records of deleted snapshots that are past their retention, and their ids after another retention
    /// period. Cheap when there are none: to be called about once a minute.
    pub fn forget_expired(&self) -> Result<()> {
        upkeep::forget_expired(&self.store)
    }

    /// An operation on the pool. Where it fails since the pool's filesystem has shut down, the error says so.
    fn on_pool<T>(&self, operate: impl FnOnce(&Store) -> Result<T>) -> Result<T> {
        operate(&self.store).map_err(|error| lost_pool::explain(&self.store, error))
    }

    /// Whether the catalog can be written and the pool answers.
    pub fn healthy(&self) -> Result<()> {
        lost_pool::check(&self.store)?;
        self.store.catalog.check_writable()?;
        self.store.pool.room().map(drop)
    }

    /// Creates a volume (CSI CreateVolume). Idempotent by name; the same name with other parameters
    /// is `AlreadyExists`. `required_bytes` 0 means the source's size, else 1 GiB.
    pub fn create_volume(&self, request: &CreateVolume) -> Result<Volume> {
        self.on_pool(|store| volume::create(store, request))
    }

    /// Deletes a volume; its snapshots stay. OK when unknown, `Precondition` while in use.
    pub fn delete_volume(&self, id: &str) -> Result<()> {
        self.on_pool(|store| volume::delete(store, id))
    }

    pub fn volume(&self, id: &str) -> Result<Volume> {
        self.on_pool(|store| volume::get(store, id))
    }

    /// A page of up to `max` volumes (0: all) after a token; `Busy` for a bad token.
    pub fn volumes(&self, after: Option<&str>, max: usize) -> Result<Page<Volume>> {
        self.on_pool(|store| volume::list(store, after, max))
    }

    /// Like [`Self::volumes`], each volume with its condition.
    pub fn volumes_with_conditions(
        &self,
        after: Option<&str>,
        max: usize,
    ) -> Result<Page<(Volume, Condition)>> {
        self.on_pool(|store| health::list(store, after, max))
    }

    /// Grows a volume to `required_bytes`, rounded up to blocks; `limit_bytes` 0 means none. To less
    /// than it has is OK. Returns the volume as it then is.
    pub fn expand_volume(&self, id: &str, required_bytes: u64, limit_bytes: u64) -> Result<Volume> {
        self.on_pool(|store| volume::expand(store, id, required_bytes, limit_bytes))
    }

    /// Changes how a volume is tracked.
    pub fn modify_volume(&self, id: &str, modify: ModifyVolume) -> Result<()> {
        self.on_pool(|store| volume::modify(store, id, modify))
    }

    pub fn volume_condition(&self, id: &str) -> Result<Condition> {
        self.on_pool(|store| match inline::find(store, id)? {
            Some(row) => inline::condition(store, &row),
            None => health::condition(store, id),
        })
    }

    /// What is wrong with all volumes of the pool, if anything (CSI NodeGetStorageHealth).
    pub fn pool_condition(&self) -> Result<Condition> {
        self.on_pool(health::of_pool)
    }

    /// Room for volumes (CSI GetCapacity).
    pub fn capacity(&self) -> Result<Capacity> {
        self.on_pool(volume::room)
    }

    /// Cuts a snapshot (CSI CreateSnapshot): consistent, durable and with its change record when
    /// this returns. Idempotent by name.
    pub fn create_snapshot(&self, name: &str, volume_id: &str) -> Result<Snapshot> {
        self.on_pool(|store| snapshot::create(store, name, volume_id))
    }

    /// Snapshots since this was opened whose filesystem could not be frozen, since a virtual machine may have it.
    pub fn crash_consistent_snapshots(&self) -> u64 {
        self.store.crash_consistent.load(Ordering::Relaxed)
    }

    /// Deletes a snapshot; it stays usable as the base of a delta. OK when unknown, `Invalid` for a
    /// member of a group.
    pub fn delete_snapshot(&self, id: &str) -> Result<()> {
        self.on_pool(|store| snapshot::delete(store, id))
    }

    pub fn snapshot(&self, id: &str) -> Result<Snapshot> {
        self.on_pool(|store| store.catalog.read()?.live_snapshot(id))
    }

    /// A page of snapshots, like [`Backend::volumes`].
    pub fn snapshots(
        &self,
        filter: &SnapshotFilter,
        after: Option<&str>,
        max: usize,
    ) -> Result<Page<Snapshot>> {
        self.on_pool(|store| snapshot::list(store, filter, after, max))
    }

    /// Cuts several volumes at one moment, all or none (CSI CreateVolumeGroupSnapshot).
    pub fn create_group(&self, name: &str, volume_ids: &[String]) -> Result<GroupSnapshot> {
        self.on_pool(|store| group::create(store, name, volume_ids))
    }

    /// Deletes a group with its members. OK when unknown; `Invalid` when `snapshot_ids`, unless
    /// empty, are not its members.
    pub fn delete_group(&self, id: &str, snapshot_ids: &[String]) -> Result<()> {
        self.on_pool(|store| group::delete(store, id, snapshot_ids))
    }

    pub fn group(&self, id: &str, snapshot_ids: &[String]) -> Result<GroupSnapshot> {
        self.on_pool(|store| group::get(store, id, snapshot_ids))
    }

    /// A page of the snapshots that can be bases, newest first, like [`Backend::volumes`].
    pub fn bases(&self, of: &BasesOf, after: Option<&str>, max: usize) -> Result<Page<Base>> {
        self.on_pool(|store| base::list(store, of, after, max))
    }

    /// Changes how long a snapshot stays good as a base after its deletion; `None`: as [`Config::retention`] says. One whose
    /// retention is over is dropped by the next [`Backend::forget_expired`].
    pub fn retain_base(&self, snapshot_id: &str, retention: Option<Retention>) -> Result<Base> {
        self.on_pool(|store| base::retain(store, snapshot_id, retention))
    }

    /// Deleted snapshots of which the record or the id is kept, and when the first of them ceases to be a base (seconds since the
    /// epoch).
    pub fn retained_bases(&self) -> Result<(u64, Option<u64>)> {
        self.on_pool(base::retained)
    }

    /// The blocks that hold data in a snapshot (CSI GetMetadataAllocated).
    pub fn allocated(&self, snapshot_id: &str) -> Result<BlockMap> {
        self.on_pool(|store| snapshot::allocated(store, snapshot_id))
    }

    /// The blocks that changed between two snapshots of a volume (CSI GetMetadataDelta). The base may
    /// be a deleted snapshot. `Precondition` when the changes are not known.
    pub fn delta(&self, base_id: &str, target_id: &str) -> Result<BlockMap> {
        self.on_pool(|store| snapshot::delta(store, base_id, target_id))
    }

    /// Attaches a volume (CSI NodeStageVolume), and mounts it unless [`Config::runtime`] is given: then that is done
    /// where it is published.
    pub fn stage(&self, volume_id: &str, path: &Path, capability: &Capability) -> Result<()> {
        self.on_pool(|store| attachment::stage(store, volume_id, path, capability))
    }

    /// OK when unknown, or not staged there.
    pub fn unstage(&self, volume_id: &str, path: &Path) -> Result<()> {
        if lost_pool::is_lost(&self.store) {
            return lost_pool::unstage(&self.store, volume_id, path);
        }
        self.on_pool(|store| attachment::unstage(store, volume_id, path))
    }

    /// Shows a staged volume at `target`, or leaves it to a container runtime (CSI NodePublishVolume).
    pub fn publish(
        &self,
        volume_id: &str,
        staging: &Path,
        target: &Path,
        wanted: &Publication,
    ) -> Result<()> {
        self.on_pool(|store| attachment::publish(store, volume_id, staging, target, wanted))
    }

    /// Removes the target, and an inline volume altogether. OK when unknown, or not published there.
    pub fn unpublish(&self, volume_id: &str, target: &Path) -> Result<()> {
        if lost_pool::is_lost(&self.store) {
            return lost_pool::unpublish(&self.store, volume_id, target);
        }
        self.on_pool(|store| match inline::find(store, volume_id)? {
            Some(_) => inline::unpublish(store, volume_id, target),
            None => attachment::unpublish(store, volume_id, target),
        })
    }

    /// Makes a pod's own volume and shows it at its target, or refreshes the content of one that is there
    /// (KEP-596).
    pub fn publish_inline(&self, publish: &PublishInline<'_>) -> Result<()> {
        self.on_pool(|store| inline::publish(store, publish))
    }

    /// The inline volume of this handle that a pod has, if one is there.
    pub fn inline(&self, handle: &str) -> Result<Option<Inline>> {
        let found = self.on_pool(|store| inline::find(store, handle))?;
        Ok(found.filter(|row| row.phase == Phase::Ready))
    }

    /// How many inline volumes there are, and their bytes in the pool and in memory.
    pub fn inline_usage(&self) -> Result<(u64, u64, u64)> {
        self.on_pool(inline::in_all)
    }

    /// Removes inline volumes whose pod is gone, and what a failure has left of others. Looks at every inline volume: to be
    /// called every few seconds.
    pub fn collect_inline(&self) -> Result<()> {
        self.on_pool(inline::collect)
    }

    /// How full a volume is that is mounted on this host; `path` is its staging path or a target.
    pub fn usage(&self, volume_id: &str, path: &Path) -> Result<Usage> {
        self.on_pool(|store| match inline::find(store, volume_id)? {
            Some(row) => inline::usage(store, &row, path),
            None => attachment::usage(store, volume_id, path),
        })
    }

    /// How a volume is (CSI NodeGetVolumeStats); `path` is its staging path or a target. Of a volume that is left to a
    /// container runtime the runtime is asked.
    pub fn stats(&self, volume_id: &str, path: &Path) -> Result<Stats> {
        self.on_pool(|store| match inline::find(store, volume_id)? {
            Some(row) => inline::stats(store, &row, path),
            None => attachment::stats(store, volume_id, path),
        })
    }

    /// Whether the volume that is in use at `path` is left to a container runtime. False when it is not in use there.
    pub fn is_deferred(&self, volume_id: &str, path: &Path) -> Result<bool> {
        self.on_pool(|store| match inline::find(store, volume_id)? {
            Some(row) => Ok(row.request.deferred.is_some() && row.target == path),
            None => attachment::is_deferred(store, volume_id, path),
        })
    }

    /// Grows device and filesystem to the volume's capacity, which is returned in bytes.
    pub fn expand_on_node(&self, volume_id: &str, path: &Path) -> Result<u64> {
        self.on_pool(|store| attachment::expand(store, volume_id, path))
    }
}

/// A pool that has lost its catalog is not a new one, and one with a damaged catalog is not served.
fn check_catalog(root: &Path) -> Result<()> {
    let catalog = catalog_path(root);
    if catalog.metadata().is_ok_and(|metadata| metadata.len() > 0) {
        return catalog::verify_or_rescue(&catalog);
    }
    for directory in [Directory::Volumes, Directory::Snapshots] {
        let path = directory.path(root);
        let mut files = fs::read_dir(&path).context(|| format!("listing {}", path.display()))?;
        if files.next().is_some() {
            return Err(Error::Damaged(
                "the catalog is missing though the pool holds volumes or snapshots; restore \
                 catalog.redb from a backup"
                    .to_owned(),
            ));
        }
    }
    Ok(())
}

/// What a catalog without room falls back on: the reserve of a sparse image.
fn relief(pool: &Arc<dyn Pool>) -> Relief {
    let pool = Arc::clone(pool);
    Relief::new(move || {
        if let Some(Err(error)) = pool.image().map(pool::Image::release_reserve) {
            warn!(%error, "could not release the reserve of the pool image");
        }
    })
}

/// The largest volume whose backing file the pool can hold, in bytes. Where that is not known it is the largest that
/// the driver supports: a file that grows too far then fails with `OutOfRange`.
fn largest_file(pool: &dyn Pool) -> u64 {
    // XFS holds more than that. To open a pool without room must not need any.
    if pool.kind() != PoolKind::Copy {
        return MAX_VOLUME_BYTES;
    }
    let path = pool.root().join(".probe-size");
    let Ok(file) = pool::new_file(&path) else { return MAX_VOLUME_BYTES };
    let mut bytes = MAX_VOLUME_BYTES;
    while file.set_len(bytes).is_err() && bytes > MIN_VOLUME_BYTES {
        // ext4 ends one block below 16 TiB.
        bytes = if bytes.is_power_of_two() { bytes - BLOCK_SIZE } else { (bytes + BLOCK_SIZE) / 2 };
    }
    // Left over at worst, and overwritten at the next start.
    let _ = fs::remove_file(&path);
    bytes
}
