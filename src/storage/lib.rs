//! The block storage backend: volumes, snapshots, and the change records that list the blocks that
//! differ between snapshots. It uses no gRPC, Kubernetes or async. A call that changes state
//! returns when the change is durable.
//!
//! | module | owns |
//! |---|---|
//! | [`pool`] | the backing files: storing, cloning and comparing them |
//! | `volume`, `attachment` | the life cycle of a volume; its use on this node |
//! | `take_snapshot`, `point_in_time`, `snapshot`, `group` | taking snapshots with change records |
//! | `clone_ahead` | cloning a snapshot in the background for the next one |
//! | `base` | how long a snapshot can be the base of a delta |
//! | [`tracker`], [`extents`] | change records; the comparison rule that fills them |
//! | `catalog`, `store`, `locks` | rows, files, and the locks on objects |
//! | `deferral`, `runtime` | deferred volumes, which a container runtime mounts |
//! | `inline` | inline volumes, which exist from publish to unpublish |
//! | `health` | the condition of volumes and of the pool |
//! | `writeback`, `lost_pool` | lost writes; a pool whose filesystem has shut down |
//! | [`freeze_guard`] | the process that thaws filesystems if the driver is killed |
//! | `reconcile`, `maintenance`, [`check`] | recovery at start, background work, offline check |
//! | `loop_device`, `filesystem`, `command`, `sys` | the kernel and filesystem tools |
//! | [`fail_point`] | places where tests interrupt an operation; absent from release builds |

// Input may be hostile, so no code may panic on it. Tests may panic.
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

mod attachment;
mod base;
pub mod catalog;
pub mod check;
mod clone_ahead;
mod command;
mod deferral;
mod details;
mod direct;
pub mod error;
pub mod extents;
pub mod fail_point;
pub mod filesystem;
mod format;
pub mod freeze_guard;
mod group;
mod growth;
mod health;
pub mod ids;
mod inline;
pub mod list;
mod locks;
mod loop_device;
mod lost_pool;
mod maintenance;
mod model;
mod point_in_time;
pub mod pool;
mod reconcile;
mod runtime;
mod sector;
mod snapshot;
mod snapshot_time;
mod steady_clock;
mod store;
pub mod sys;
mod take_snapshot;
mod target;
#[cfg(test)]
mod testing;
pub mod tracker;
pub mod units;
mod volume;
mod writeback;

use std::fs::{self, File};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};
use tracing::{info, warn};

use catalog::{Catalog, ReleaseReserve};
use clone_ahead::ClonesAhead;
use error::Context;
use freeze_guard::Guard;
use locks::Locks;
use pool::{Directory, ImageChoice, Pool};
use steady_clock::SteadyClock;
use store::Store;

pub use base::{Base, BaseFilter, RecordSizes};
pub use details::VolumeDetails;
pub use error::{Error, Kind, Result};
pub use freeze_guard::FreezeGuard;
pub use inline::{Content, InlineLimits, PublishInline};
pub use list::Page;
pub use loop_device::{attached_loop_devices, twins_of_loop_device};
pub use model::*;
pub use pool::{
    ImageStatus, MAX_BLOCK_SIZE as MAX_POOL_BLOCK_SIZE, PoolChoice, PoolKind, PoolStatus,
};
pub use runtime::{DeferredMount, Runtime, RuntimeStats};
pub use sector::SectorSize;
pub use snapshot::{SnapshotFilter, SnapshotTimes};
pub use store::now;
pub use sys::limit_malloc_arenas;
pub use tracker::{BlockMap, Extents, Style};
pub use units::{BLOCK_SIZE, Block, BlockRange, Extent, MAX_VOLUME_BYTES, MIN_VOLUME_BYTES};
pub use volume::{CreateVolume, ModifyVolume};

/// The configuration of a backend.
#[derive(Debug, Clone)]
pub struct Config {
    pub data_dir: PathBuf,
    pub pool: PoolChoice,
    /// Size of an image pool's image, in bytes. A smaller image grows; a larger one is refused.
    pub pool_size: Option<u64>,
    /// Whether the image of a new image pool is sparse.
    pub pool_sparse: bool,
    /// Block size of the filesystem of a new image pool, in bytes.
    pub pool_block_size: Option<u64>,
    /// How long the change record of a deleted snapshot is kept.
    pub retention: Duration,
    /// Maximum ratio of the total capacity of all volumes to the size of the pool.
    pub overcommit: f64,
    pub inline: InlineLimits,
    /// Access to container runtimes that mount volumes (KEP-2857). If set, a volume is mounted at
    /// its targets when it is published, not when it is staged, and its mount can be deferred to a
    /// runtime.
    pub runtime: Option<Arc<dyn Runtime>>,
    /// The process that thaws filesystems if this process is killed.
    pub freeze_guard: FreezeGuard,
}

/// The backend of one data directory. Clones share its state.
///
/// Two operations that change the same volume exclude each other: the second fails with
/// [`Error::Busy`]. Lists, usage and queries never do.
#[derive(Debug, Clone)]
pub struct Backend {
    store: Arc<Store>,
}

/// The catalog file of a pool.
fn catalog_path(root: &Path) -> PathBuf {
    root.join("catalog.redb")
}

/// The lock file of a data directory.
fn lock_path(data_dir: &Path) -> PathBuf {
    data_dir.join("lock")
}

/// The data directory of a driver that `path` is in, whether the path exists or not. Directories
/// that this process may not read are not recognized.
pub fn data_dir_of(path: &Path) -> Option<PathBuf> {
    let existing = path.ancestors().find_map(|part| match part.as_os_str().is_empty() {
        true => Path::new(".").canonicalize().ok(),
        false => part.canonicalize().ok(),
    })?;
    let is_data_dir =
        |directory: &&Path| lock_path(directory).exists() && pool::is_marked(directory);
    existing.ancestors().find(is_data_dir).map(Path::to_owned)
}

/// Locks a data directory until the returned file is closed.
fn lock_instance(data_dir: &Path) -> Result<Flock<File>> {
    let path = lock_path(data_dir);
    let mut options = File::options();
    options.write(true).create(true).truncate(false).mode(0o600);
    let file = options.open(&path).context(|| format!("opening {}", path.display()))?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| match errno {
        nix::Error::EWOULDBLOCK => Error::Precondition(format!(
            "{} is in use by another csi-loopback process; stop that process first",
            data_dir.display()
        )),
        errno => Error::io(format!("locking {}", path.display()), errno.into()),
    })
}

impl Backend {
    /// Opens or creates the data directory, and finishes or undoes what a previous process left
    /// unfinished. `Precondition` if another process uses the directory.
    pub fn open(config: Config) -> Result<Self> {
        let data_dir = config.data_dir.clone();
        Self::open_pool(config).map_err(|error| lost_pool::explain_start(&data_dir, error))
    }

    fn open_pool(config: Config) -> Result<Self> {
        let data_dir = &config.data_dir;
        let created = fs::DirBuilder::new().recursive(true).mode(0o700).create(data_dir);
        created.context(|| format!("creating {}", data_dir.display()))?;
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
            catalog: Catalog::open(&catalog_path(pool.root()), release_reserve(&pool))?,
            max_volume_bytes: pool::largest_file(pool.as_ref()),
            clones_ahead: ClonesAhead::start(pool.clone())?,
            pool,
            pool_reason: opened.reason,
            locks: Locks::default(),
            freeze_guard: Guard::new(config.freeze_guard.clone()),
            config,
            clock: SteadyClock::start(store::now().0, Instant::now()),
            crash_consistent: AtomicU64::new(0),
            needs_space: AtomicBool::new(false),
            unrecorded: Default::default(),
            _instance_lock: instance_lock,
        };
        info!(pool = %store.pool.kind(), reason = store.pool_reason, "opened the pool");
        reconcile::reconcile(&store)?;
        Ok(Self { store: Arc::new(store) })
    }

    /// The kind of the pool and the reason for it.
    pub fn pool_description(&self) -> String {
        format!("{} pool: {}", self.store.pool.kind(), self.store.pool_reason)
    }

    pub fn pool_kind(&self) -> PoolKind {
        self.store.pool.kind()
    }

    /// Total and available space of the pool, in bytes.
    pub fn pool_room(&self) -> Result<pool::Room> {
        self.store.pool.room()
    }

    /// The status of the pool and of its image.
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

    /// Grows the image of an image pool to `size` bytes while volumes are attached. Idempotent.
    /// `OutOfRange` for less than the current size, `Precondition` for another kind of pool.
    pub fn grow_pool(&self, size: u64) -> Result<PoolStatus> {
        let Config { data_dir, pool_size, .. } = &self.store.config;
        pool::grow(data_dir, self.store.pool.as_ref(), *pool_size, size)?;
        self.pool_status()
    }

    /// Drops hidden baselines when the pool is nearly full, and restores the reserve of a sparse
    /// pool image. Call this about once a second, so that space is freed before a pod gets ENOSPC.
    pub fn relieve_pressure(&self) -> Result<()> {
        maintenance::relieve_pressure(&self.store)
    }

    /// Gives an allocated pool image its own blocks where a copy of it shares them. Call this about
    /// once a second.
    pub fn unshare_image(&self) -> Result<()> {
        self.store.pool.image().map_or(Ok(()), pool::Image::unshare)
    }

    /// Bytes of an allocated pool image in blocks that another file shares.
    pub fn shared_image_bytes(&self) -> u64 {
        self.store.pool.image().map_or(0, pool::Image::shared)
    }

    /// Drops expired change records of deleted snapshots, and their ids after another retention
    /// period. Call this about once a minute.
    pub fn forget_expired(&self) -> Result<()> {
        maintenance::forget_expired(&self.store)
    }

    /// Runs an operation. If the pool's filesystem has shut down, the error says so.
    fn on_pool<T>(&self, operate: impl FnOnce(&Store) -> Result<T>) -> Result<T> {
        operate(&self.store).map_err(|error| lost_pool::explain(&self.store, error))
    }

    /// Fails if the catalog cannot be written or the pool is unavailable.
    pub fn healthy(&self) -> Result<()> {
        lost_pool::check(&self.store)?;
        self.store.catalog.check_writable()?;
        self.store.pool.room().map(drop)
    }

    /// Creates a volume (CSI CreateVolume). Idempotent by name; `AlreadyExists` if the name is used
    /// with other parameters. `required_bytes` 0 means the size of the source, or 1 GiB without a
    /// source.
    pub fn create_volume(&self, request: &CreateVolume) -> Result<Volume> {
        self.on_pool(|store| volume::create(store, request))
    }

    /// Deletes a volume and keeps its snapshots. Succeeds if the volume does not exist;
    /// `Precondition` while it is in use.
    pub fn delete_volume(&self, id: &str) -> Result<()> {
        self.on_pool(|store| volume::delete(store, id))
    }

    pub fn volume(&self, id: &str) -> Result<Volume> {
        self.on_pool(|store| volume::get(store, id))
    }

    /// A page of up to `max` volumes (0: all) after a token. `StaleToken` for an invalid token.
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

    /// Grows a volume to `required_bytes`, rounded up to whole blocks; `limit_bytes` 0 means no
    /// limit. Changes nothing if the volume is large enough. Returns the volume.
    pub fn expand_volume(&self, id: &str, required_bytes: u64, limit_bytes: u64) -> Result<Volume> {
        self.on_pool(|store| volume::expand(store, id, required_bytes, limit_bytes))
    }

    /// Changes the change tracking of a volume.
    pub fn modify_volume(&self, id: &str, modify: ModifyVolume) -> Result<()> {
        self.on_pool(|store| volume::modify(store, id, modify))
    }

    pub fn volume_condition(&self, id: &str) -> Result<Condition> {
        self.on_pool(|store| match inline::find(store, id)? {
            Some(row) => inline::condition(store, &row),
            None => health::condition(store, id),
        })
    }

    /// The condition of the pool (CSI NodeGetStorageHealth).
    pub fn pool_condition(&self) -> Result<Condition> {
        self.on_pool(health::of_pool)
    }

    /// The capacity available for volumes (CSI GetCapacity).
    pub fn capacity(&self) -> Result<Capacity> {
        self.on_pool(volume::room)
    }

    /// Whether this is an id of another pool.
    pub fn is_of_another_pool(&self, id: &str) -> Result<bool> {
        let Some(pool) = ids::pool_of(id) else { return Ok(false) };
        Ok(self.store.catalog.pool()? != pool)
    }

    /// Takes a snapshot (CSI CreateSnapshot). The snapshot and its change record are durable when
    /// this returns. Idempotent by name.
    pub fn create_snapshot(&self, name: &str, volume_id: &str) -> Result<Snapshot> {
        self.on_pool(|store| snapshot::create(store, name, volume_id))
    }

    /// The number of snapshots taken since this backend was opened whose filesystem could not be
    /// frozen, because a virtual machine may have mounted it.
    pub fn crash_consistent_snapshots(&self) -> u64 {
        self.store.crash_consistent.load(Ordering::Relaxed)
    }

    /// Deletes a snapshot. It can still be the base of a delta. Succeeds if the snapshot does not
    /// exist; `Invalid` for a member of a group.
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

    /// Takes snapshots of several volumes at the same time, all or none (CSI
    /// CreateVolumeGroupSnapshot).
    pub fn create_group(&self, name: &str, volume_ids: &[String]) -> Result<GroupSnapshot> {
        self.on_pool(|store| group::create(store, name, volume_ids))
    }

    /// Deletes a group with its members. Succeeds if the group does not exist. `Invalid` if
    /// `snapshot_ids` is not empty and differs from its members.
    pub fn delete_group(&self, id: &str, snapshot_ids: &[String]) -> Result<()> {
        self.on_pool(|store| group::delete(store, id, snapshot_ids))
    }

    pub fn group(&self, id: &str, snapshot_ids: &[String]) -> Result<GroupSnapshot> {
        self.on_pool(|store| group::get(store, id, snapshot_ids))
    }

    /// A page of the snapshots that can be bases, newest first. Paging is like
    /// [`Backend::volumes`].
    pub fn bases(&self, of: &BaseFilter, after: Option<&str>, max: usize) -> Result<Page<Base>> {
        self.on_pool(|store| base::list(store, of, after, max))
    }

    /// The sizes in a snapshot's change record; `None` if it cannot be read.
    pub fn record_sizes(&self, snapshot: &Snapshot) -> Result<Option<RecordSizes>> {
        self.on_pool(|store| Ok(base::sizes(store, snapshot)))
    }

    /// Sets how long a snapshot can be a base after its deletion; `None` means
    /// [`Config::retention`]. An expired base is dropped by the next [`Backend::forget_expired`].
    pub fn retain_base(&self, snapshot_id: &str, retention: Option<Retention>) -> Result<Base> {
        self.on_pool(|store| base::retain(store, snapshot_id, retention))
    }

    /// The number of deleted snapshots whose change record or id is kept, and when the first of
    /// them expires as a base (seconds since the epoch).
    pub fn retained_bases(&self) -> Result<(u64, Option<u64>)> {
        self.on_pool(base::retained)
    }

    /// When the volumes last had a snapshot.
    pub fn snapshot_times(&self) -> Result<SnapshotTimes> {
        self.on_pool(snapshot::times)
    }

    /// The number of volumes whose filesystem could not grow to their capacity.
    pub fn volumes_not_grown(&self) -> Result<u64> {
        self.on_pool(growth::failures)
    }

    /// The allocated blocks of a snapshot (CSI GetMetadataAllocated).
    pub fn allocated(&self, snapshot_id: &str) -> Result<BlockMap> {
        self.on_pool(|store| snapshot::allocated(store, snapshot_id))
    }

    /// The blocks that changed between two snapshots of a volume (CSI GetMetadataDelta). The base
    /// may be a deleted snapshot. `Precondition` if the changes are unknown.
    pub fn delta(&self, base_id: &str, target_id: &str) -> Result<BlockMap> {
        self.on_pool(|store| snapshot::delta(store, base_id, target_id))
    }

    /// Attaches a volume (CSI NodeStageVolume). Mounts it, unless [`Config::runtime`] is set: then
    /// it is mounted when it is published.
    pub fn stage(&self, volume_id: &str, path: &Path, capability: &Capability) -> Result<()> {
        self.on_pool(|store| attachment::stage(store, volume_id, path, capability))
    }

    /// Detaches a volume (CSI NodeUnstageVolume). Succeeds if the volume does not exist or is not
    /// staged at `path`.
    pub fn unstage(&self, volume_id: &str, path: &Path) -> Result<()> {
        if lost_pool::is_lost(&self.store) {
            return lost_pool::unstage(&self.store, volume_id, path);
        }
        self.on_pool(|store| attachment::unstage(store, volume_id, path))
    }

    /// Mounts a staged volume at `target`, or defers the mount to a container runtime (CSI
    /// NodePublishVolume).
    pub fn publish(
        &self,
        volume_id: &str,
        staging: &Path,
        target: &Path,
        wanted: &Publication,
    ) -> Result<()> {
        self.on_pool(|store| attachment::publish(store, volume_id, staging, target, wanted))
    }

    /// Removes the target, and deletes an inline volume (CSI NodeUnpublishVolume). Succeeds if the
    /// volume does not exist or is not published at `target`.
    pub fn unpublish(&self, volume_id: &str, target: &Path) -> Result<()> {
        if lost_pool::is_lost(&self.store) {
            return lost_pool::unpublish(&self.store, volume_id, target);
        }
        self.on_pool(|store| match inline::find(store, volume_id)? {
            Some(_) => inline::unpublish(store, volume_id, target),
            None => attachment::unpublish(store, volume_id, target),
        })
    }

    /// Whether the volume is published at `target`, according to the catalog.
    pub fn is_published(&self, volume_id: &str, target: &Path) -> Result<bool> {
        let reading = self.store.catalog.read()?;
        if let Some(row) = reading.get::<Inline>(volume_id)? {
            return Ok(row.target == target);
        }
        let attachment = reading.get::<Attachment>(volume_id)?;
        Ok(attachment.is_some_and(|attachment| attachment.published.contains_key(target)))
    }

    /// Creates an inline volume and mounts it at its target, or updates the content of an existing
    /// one (KEP-596).
    pub fn publish_inline(&self, publish: &PublishInline<'_>) -> Result<()> {
        self.on_pool(|store| inline::publish(store, publish))
    }

    /// The inline volume with this handle, if it is published.
    pub fn inline(&self, handle: &str) -> Result<Option<Inline>> {
        let found = self.on_pool(|store| inline::find(store, handle))?;
        Ok(found.filter(|row| row.phase == Phase::Ready))
    }

    /// The number of inline volumes, and their bytes in the pool and in memory.
    pub fn inline_usage(&self) -> Result<(u64, u64, u64)> {
        self.on_pool(inline::totals)
    }

    /// Removes inline volumes whose pod is gone, and unfinished ones. Checks every inline volume;
    /// call this every few seconds.
    pub fn collect_inline(&self) -> Result<()> {
        self.on_pool(inline::collect)
    }

    /// The usage of a volume that is mounted on this host. `path` is its staging path or a target.
    pub fn usage(&self, volume_id: &str, path: &Path) -> Result<Usage> {
        self.on_pool(|store| match inline::find(store, volume_id)? {
            Some(row) => inline::usage(store, &row, path),
            None => attachment::usage(store, volume_id, path),
        })
    }

    /// The usage and condition of a volume (CSI NodeGetVolumeStats). `path` is its staging path or
    /// a target. The statistics of a deferred volume come from its container runtime.
    pub fn stats(&self, volume_id: &str, path: &Path) -> Result<Stats> {
        self.on_pool(|store| match inline::find(store, volume_id)? {
            Some(row) => inline::stats(store, &row, path),
            None => attachment::stats(store, volume_id, path),
        })
    }

    /// Whether a container runtime mounts the volume that is in use at `path`. False if the volume
    /// is not in use there.
    pub fn is_deferred(&self, volume_id: &str, path: &Path) -> Result<bool> {
        self.on_pool(|store| match inline::find(store, volume_id)? {
            Some(row) => Ok(row.request.deferred.is_some() && row.target == path),
            None => attachment::is_deferred(store, volume_id, path),
        })
    }

    /// Grows device and filesystem to the capacity of the volume (CSI NodeExpandVolume). Returns
    /// the capacity in bytes.
    pub fn expand_on_node(&self, volume_id: &str, path: &Path) -> Result<u64> {
        self.on_pool(|store| attachment::expand(store, volume_id, path))
    }
}

/// Checks the catalog before it is opened. A pool with files but without a catalog is damaged, not
/// new.
fn check_catalog(root: &Path) -> Result<()> {
    let catalog = catalog_path(root);
    if catalog.metadata().is_ok_and(|metadata| metadata.len() > 0) {
        return catalog::verify_or_repair(&catalog);
    }
    for directory in [Directory::Volumes, Directory::Snapshots, Directory::Records] {
        let path = directory.path(root);
        let mut files = fs::read_dir(&path).context(|| format!("listing {}", path.display()))?;
        if files.next().is_some() {
            return Err(catalog::damaged("it is missing or empty, but the pool has files"));
        }
    }
    Ok(())
}

/// Releases the reserve of a sparse image when the catalog has no space left.
fn release_reserve(pool: &Arc<dyn Pool>) -> ReleaseReserve {
    let pool = Arc::clone(pool);
    ReleaseReserve::new(move || {
        if let Some(Err(error)) = pool.image().map(pool::Image::release_reserve) {
            warn!(%error, "failed to release the reserve of the pool image");
        }
    })
}
