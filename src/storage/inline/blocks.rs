//! The storage of an inline volume in the pool: a file, its loop device and a filesystem.

use std::fs::File;

use super::super::error::{Context, Error, Result};
use super::super::fail_point::reach;
use super::super::format;
use super::super::loop_device::{Lifetime, LoopDevice, timeless};
use super::super::model::{
    Access, Condition, Format, FsType, HealthProblem, Inline, InlineRequest, Phase,
};
use super::super::pool::{self, Directory};
use super::super::store::{Store, length};
use super::super::units::{BLOCK_SIZE, MIN_VOLUME_BYTES};

/// Default sizes in bytes: of a writable volume in the pool, of a writable volume in memory, and of
/// a content volume. Never more than `--inline-max-size`.
const SCRATCH_BYTES: u64 = 1 << 30;
const MEMORY_BYTES: u64 = 64 << 20;
const CONTENT_BYTES: u64 = 16 << 20;

fn requested_filesystem(request: &InlineRequest) -> Option<FsType> {
    match request.capability.access {
        Access::Mount { fs_type, .. } => fs_type,
        Access::Block => None,
    }
}

fn default_bytes(store: &Store, request: &InlineRequest) -> u64 {
    let bytes = match (request.read_only_content, request.in_memory) {
        (true, _) => CONTENT_BYTES,
        (false, true) => MEMORY_BYTES,
        (false, false) => SCRATCH_BYTES,
    };
    bytes.min(store.config.inline.max_size)
}

/// The capacity of a new volume in bytes: whole blocks, at minimum the minimum of its filesystem.
pub fn capacity(store: &Store, request: &InlineRequest) -> Result<u64> {
    let requested = request.size_bytes.unwrap_or_else(|| default_bytes(store, request));
    let minimum = match request.in_memory {
        true => 0,
        false => requested_filesystem(request).unwrap_or(FsType::Ext4).min_bytes(),
    };
    let bytes = requested.max(minimum).max(MIN_VOLUME_BYTES);
    let rounded = bytes.div_ceil(BLOCK_SIZE).saturating_mul(BLOCK_SIZE);
    if rounded > store.max_volume_bytes {
        return Err(Error::OutOfRange(format!(
            "volume_context: size: {bytes} bytes exceed the largest supported volume, {} bytes",
            store.max_volume_bytes
        )));
    }
    Ok(rounded)
}

/// Opens the backing file in the pool, if it exists.
fn open(store: &Store, row: &Inline, write: bool) -> Result<Option<File>> {
    pool::open_file(&store.pool.volume_path(&row.id), write)
}

/// The problem of the backing file, if any.
fn problem(row: &Inline, backing: Option<&File>) -> Result<Option<Condition>> {
    let Some(backing) = backing else {
        let message = "its backing file is missing; delete the pod";
        return Ok(Some(Condition::abnormal(HealthProblem::BackingFileMissing, message)));
    };
    let (bytes, capacity) = (length(backing)?, row.capacity_bytes);
    Ok((bytes < capacity).then(|| {
        let message =
            format!("its backing file has {bytes} bytes, expected {capacity}; delete the pod");
        Condition::abnormal(HealthProblem::BackingFileShort, message)
    }))
}

/// The problem of the volume's storage, if any.
pub fn defect(store: &Store, row: &Inline) -> Result<Option<Condition>> {
    problem(row, open(store, row, false)?.as_ref())
}

/// The device of a volume, even if its backing file was deleted. A volume in memory has none.
pub fn device(store: &Store, row: &Inline) -> Result<Option<LoopDevice>> {
    if row.request.in_memory {
        return Ok(None);
    }
    match open(store, row, false)? {
        Some(backing) => Ok(LoopDevice::find(&backing)?.into_iter().next()),
        None => LoopDevice::find_deleted(&row.id),
    }
}

/// Returns the device of a volume. Creates the file and device of a new volume; attaches the file
/// of an existing one again after a reboot.
pub fn attach(store: &Store, row: &Inline) -> Result<LoopDevice> {
    if row.phase == Phase::Creating {
        // The file is new, so it has no device.
        let backing = timeless(make(store, row)?, store.pool.root());
        let attached = LoopDevice::attach(&backing, Lifetime::Explicit, row.request.sector_size);
        return attached.map(|(device, _)| device);
    }
    let backing = open(store, row, true)?;
    match (problem(row, backing.as_ref())?, backing) {
        (None, Some(backing)) => {
            LoopDevice::ensure(&timeless(backing, store.pool.root()), row.request.sector_size)
        }
        (problem, _) => {
            let problem = problem.map(|found| found.message).unwrap_or_default();
            Err(Error::Damaged(format!("volume_id: {:?}: {problem}", row.handle)))
        }
    }
}

/// Creates the backing file durably.
fn make(store: &Store, row: &Inline) -> Result<File> {
    let doing = || format!("creating the backing file of inline volume {:?}", row.handle);
    let file = pool::new_file(&store.pool.volume_path(&row.id))?;
    store.pool.adopt(&file)?;
    file.set_len(row.capacity_bytes).context(doing)?;
    reach("inline.sized")?;
    file.sync_all().context(doing)?;
    reach("inline.flushed")?;
    pool::sync_directory(&Directory::Volumes.path(store.pool.root()))?;
    Ok(file)
}

/// Returns the type of the filesystem on the device. Creates the filesystem of a new volume.
pub fn filesystem(store: &Store, row: &mut Inline, device: &LoopDevice) -> Result<FsType> {
    match row.format {
        Some(Format { fs_type, unfinished: false, .. }) => return Ok(fs_type),
        _ if row.phase == Phase::Creating => {}
        // A filesystem that a pod has used is never created again.
        _ => {
            return Err(Error::Damaged(format!(
                "volume_id: {:?} has no filesystem; delete the pod",
                row.handle
            )));
        }
    }
    let fs_type = requested_filesystem(&row.request).unwrap_or(FsType::Ext4);
    format::make(store, row, device, fs_type).map(|()| fs_type)
}

/// Removes the backing file. The caller has detached the device.
pub fn remove(store: &Store, row: &Inline) -> Result<()> {
    if row.request.in_memory {
        return Ok(());
    }
    pool::remove(&store.pool.volume_path(&row.id))
}
