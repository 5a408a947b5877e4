//! Growth of a volume's filesystem to the volume's capacity, when the volume is staged or by
//! NodeExpandVolume. A growth never costs the volume: on an error the filesystem keeps its size and
//! is mounted, the row keeps the reason, and the next stage or NodeExpandVolume tries again.
//!
//! A filesystem that is not mounted grows in a copy of the backing file:
//!
//! ```text
//! check room → copy → grow → mount once → flush → rename over the backing file → record
//! ```
//!
//! Until the rename nothing has changed, so a growth that is killed, loses power or fails is
//! undone by removing the copy. After the rename no earlier state is needed. No pod has the volume
//! in between. On a pool that clones, the copy is a clone. On other pools the kernel grows the
//! filesystem in place, and only an ext4 that needs resize2fs is copied, up to a limit.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;

use tracing::{info, warn};

use super::deferral::{UNMOUNT_TIMEOUT, wait_until_unmounted};
use super::error::{Context, Error, FREE_SPACE_ADVICE, Result};
use super::fail_point::reach;
use super::filesystem::{self, Method};
use super::loop_device::{Lifetime, LoopDevice};
use super::maintenance;
use super::model::{Condition, Format, FsType, HealthProblem, Volume};
use super::pool::{self, Directory};
use super::store::Store;
use super::writeback;

/// The maximum size of a copy on a pool that does not clone, in bytes. It takes some seconds.
const MAX_COPY_BYTES: u64 = 1 << 30;

/// The format, if the filesystem is smaller than the volume and can grow.
fn growable(volume: &Volume) -> Option<Format> {
    volume.format.filter(|format| {
        format.size_bytes < volume.capacity_bytes
            && filesystem::grows_to(format.fs_type, volume.capacity_bytes)
    })
}

/// Grows the filesystem of a volume whose device is attached, before pods use it. The caller knows
/// that no container runtime has it. Returns the device, which can be another one. A failed growth
/// is no error.
pub fn at_stage(store: &Store, volume: &mut Volume, device: LoopDevice) -> Result<LoopDevice> {
    let Some(format) = growable(volume) else { return Ok(device) };
    let grown = grow(store, volume, &device);
    // The backing file may be another one. Its removal by a power loss must be excluded before a
    // pod writes to it.
    pool::sync_directory(&Directory::Volumes.path(store.pool.root()))?;
    let _ = conclude(store, volume, format, grown);
    LoopDevice::ensure(&store.open_for_device(volume)?, volume.sector_size)
}

/// Grows the filesystem of a volume in use. `Precondition` if it keeps its size: kubelet then
/// mounts the volume. (After another error it does not start the pod.)
pub fn on_node(store: &Store, volume: &mut Volume, device: LoopDevice) -> Result<()> {
    let Some(format) = growable(volume) else { return Ok(()) };
    let grown = grow(store, volume, &device);
    pool::sync_directory(&Directory::Volumes.path(store.pool.root()))?;
    LoopDevice::ensure(&store.open_for_device(volume)?, volume.sector_size)?;
    conclude(store, volume, format, grown)
}

/// Grows the filesystem of a deferred volume with `grow`, which requests it from the container
/// runtime. Its errors are temporary and returned as they are, except if the growth at stage has
/// failed: before the pod runs, no runtime can do it, and the pod must start nevertheless.
pub fn by_runtime(
    store: &Store,
    volume: &mut Volume,
    device: &LoopDevice,
    grow: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let Some(format) = growable(volume) else { return Ok(()) };
    let checked = check(store, volume, format.fs_type, device);
    if checked.is_ok() && volume.growth_failure.is_none() {
        grow()?;
        return conclude(store, volume, format, Ok(()));
    }
    conclude(store, volume, format, checked.and_then(|()| grow()))
}

/// Records the result. Returns the reason of a failed growth as `Precondition`.
fn conclude(store: &Store, volume: &mut Volume, format: Format, grown: Result<()>) -> Result<()> {
    let concluded = grown.and_then(|()| {
        reach("growth.done")?;
        let size_bytes = volume.capacity_bytes;
        let format = Some(Format { size_bytes, ..format });
        put(store, volume, Volume { format, growth_failure: None, ..volume.clone() })
    });
    let Err(error) = concluded else { return Ok(()) };
    let message = format!(
        "the filesystem of volume {:?} could not grow to {} bytes and keeps its size: {error}; the \
         next stage or NodeExpandVolume tries again",
        volume.id, volume.capacity_bytes
    );
    warn!(volume = volume.id, "{message}");
    let growth_failure = Some(message.clone());
    if volume.growth_failure != growth_failure
        && let Err(error) = put(store, volume, Volume { growth_failure, ..volume.clone() })
    {
        warn!(volume = volume.id, %error, "failed to record why a filesystem could not grow");
    }
    Err(match error {
        error @ Error::Busy(_) => error,
        _ => Error::Precondition(message),
    })
}

fn put(store: &Store, volume: &mut Volume, changed: Volume) -> Result<()> {
    store.catalog.write(|tx| tx.put(&changed))?;
    *volume = changed;
    Ok(())
}

/// The condition of a volume whose filesystem could not grow.
pub fn defect(volume: &Volume) -> Option<Condition> {
    let message = volume.growth_failure.as_ref()?;
    growable(volume).map(|_| Condition::abnormal(HealthProblem::NotGrown, message.clone()))
}

/// The number of volumes whose filesystem could not grow.
pub fn failures(store: &Store) -> Result<u64> {
    let mut failures = 0;
    store.catalog.read()?.scan(None, |volume: Volume| {
        failures += u64::from(defect(&volume).is_some());
        Ok(true)
    })?;
    Ok(failures)
}

/// `OutOfRange` if a filesystem in `backing` cannot grow to `bytes`.
pub fn check_size(fs_type: FsType, backing: &File, bytes: u64) -> Result<()> {
    let largest = filesystem::largest_growth(fs_type, backing)?;
    if bytes <= largest {
        return Ok(());
    }
    Err(Error::OutOfRange(format!(
        "capacity_range: the {fs_type} was created too small to grow to {bytes} bytes, because it \
         would have too many allocation groups; request at most {largest} bytes, or create a new \
         volume and copy the files"
    )))
}

/// Checks everything that is known before a growth starts.
fn check(store: &Store, volume: &Volume, fs_type: FsType, device: &LoopDevice) -> Result<()> {
    let (bytes, have) = (volume.capacity_bytes, device.size()?);
    if have < bytes {
        return Err(Error::Failed(format!("{} has {have} bytes", device.path().display())));
    }
    let superblock = device.open(false)?;
    check_size(fs_type, &superblock, bytes)?;
    let unit = pool::filesystem_block_size(store.pool.root())?;
    check_room(store, filesystem::growth_cost(fs_type, &superblock, bytes, unit)?)
}

/// A growth must not take the last space from pods.
fn check_room(store: &Store, bytes: u64) -> Result<()> {
    let room = store.pool.room()?;
    let available = room.available.saturating_sub(maintenance::reserve(room));
    if bytes <= available {
        return Ok(());
    }
    Err(Error::Exhausted(format!(
        "it needs about {bytes} bytes in the pool, which has {available} available; \
         {FREE_SPACE_ADVICE}"
    )))
}

fn grow(store: &Store, volume: &Volume, device: &LoopDevice) -> Result<()> {
    let (id, bytes) = (&volume.id, volume.capacity_bytes);
    let Some(Format { fs_type, .. }) = volume.format else { return Ok(()) };
    check(store, volume, fs_type, device)?;
    if filesystem::mounted_type(device)?.is_some() {
        return grow_in_use(fs_type, device, bytes);
    }
    let method = filesystem::growth_method(fs_type, &device.open(false)?, bytes)?;
    info!(volume = id, bytes, "growing the filesystem of a volume");
    if method == Method::Mounted && !store.pool.clones_atomically() {
        return grow_once_mounted(fs_type, device, bytes);
    }
    let backing = store.open_volume(volume)?;
    check_copy(store, &backing)?;
    device.release()?;
    let copied = grow_copy(store, volume, fs_type, &backing, method);
    let replaced = copied.and_then(|()| {
        fs::rename(store.pool.growing_path(id), store.pool.volume_path(id))
            .context(|| format!("replacing the backing file of {id:?}"))?;
        reach("growth.replaced")
    });
    if replaced.is_err()
        && let Err(error) = discard(store, id)
    {
        warn!(volume = id, %error, "failed to remove the copy of a failed growth; the next stage or start tries again");
    }
    replaced
}

/// Grows a filesystem that pods may use.
fn grow_in_use(fs_type: FsType, device: &LoopDevice, bytes: u64) -> Result<()> {
    filesystem::check_growth_mounted(fs_type, &device.open(false)?, bytes)?;
    if let Some(mount) = filesystem::mounts_of(device)?.first() {
        filesystem::refuse_frozen(&mount.target)?;
    }
    match filesystem::join(device, true)? {
        Some(root) => filesystem::grow_mounted(fs_type, root.file(), device.path(), bytes),
        None => Err(Error::Busy("it was unmounted meanwhile".to_owned())),
    }
}

/// Mounts an unmounted filesystem and grows it. Waits until it is unmounted: the next mount
/// recovers it if the growth failed.
fn grow_once_mounted(fs_type: FsType, device: &LoopDevice, bytes: u64) -> Result<()> {
    let root = filesystem::mount_detached(device, fs_type)?;
    let grown = filesystem::grow_mounted(fs_type, root.file(), device.path(), bytes);
    drop(root);
    wait_until_unmounted(device, UNMOUNT_TIMEOUT)?;
    grown
}

/// On a pool that does not clone, a copy takes time and space.
fn check_copy(store: &Store, backing: &File) -> Result<()> {
    if store.pool.clones_atomically() {
        return Ok(());
    }
    let metadata = backing.metadata().context(|| "reading a backing file".to_owned())?;
    let bytes = metadata.blocks().saturating_mul(512);
    if bytes > MAX_COPY_BYTES {
        return Err(Error::Failed(format!(
            "it needs a copy of {bytes} bytes, and a pool of kind {} copies at most \
             {MAX_COPY_BYTES}; grant CAP_SYS_RESOURCE, or restore a snapshot of the volume to a pool \
             of another kind",
            store.pool.kind()
        )));
    }
    check_room(store, bytes)
}

/// Makes a grown copy of a backing file without a device, and makes it durable.
fn grow_copy(
    store: &Store,
    volume: &Volume,
    fs_type: FsType,
    backing: &File,
    method: Method,
) -> Result<()> {
    let bytes = volume.capacity_bytes;
    // A tool of a killed driver may still write to an earlier copy: that is another file.
    discard(store, &volume.id)?;
    writeback::flush_file(store, &volume.id, backing)?;
    let copy = pool::new_file(&store.pool.growing_path(&volume.id))?;
    store.pool.adopt(&copy)?;
    store.pool.copy(backing, &copy, bytes, &mut || Ok(()))?;
    reach("growth.copied")?;
    let lifetime = Lifetime::LastUser { shares_blocks: true };
    let (device, handle) = LoopDevice::attach(&copy, lifetime, volume.sector_size)?;
    match method {
        Method::Mounted => grow_once_mounted(fs_type, &device, bytes)?,
        Method::Unmounted => filesystem::grow_unmounted(device.path(), bytes)?,
    }
    // Whether it can be mounted. This replays a log, too.
    drop(filesystem::mount_detached(&device, fs_type)?);
    wait_until_unmounted(&device, UNMOUNT_TIMEOUT)?;
    reach("growth.proven")?;
    let flushing = || "flushing a grown filesystem".to_owned();
    handle.sync_all().context(flushing)?;
    drop(handle);
    device.release()?;
    // Twice, as for a snapshot.
    copy.sync_all().and_then(|()| copy.sync_all()).context(flushing)?;
    reach("growth.flushed")
}

/// Removes what a growth of this volume left.
pub fn discard(store: &Store, volume_id: &str) -> Result<()> {
    pool::remove(&store.pool.growing_path(volume_id))
}
