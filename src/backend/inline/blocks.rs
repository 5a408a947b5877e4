//! The blocks of an inline volume: a file of the pool, or one in memory, behind a loop device, with a filesystem.

use std::fs::File;
use std::io;

use super::super::error::{Context, Error, Result};
use super::super::fail_point::reach;
use super::super::filesystem;
use super::super::loop_device::LoopDevice;
use super::super::model::{Access, Format, FsType, Inline, InlineRequest, Snapshot};
use super::super::pool::{self, Directory};
use super::super::store::{Store, length};
use super::super::units::{BLOCK_SIZE, MIN_VOLUME_BYTES};
use super::{memory, wipe};

/// Size of a volume that is to be written to, and of one of content, when none is asked for, in bytes.
const SCRATCH_BYTES: u64 = 1 << 30;
const CONTENT_BYTES: u64 = 16 << 20;

fn wanted_filesystem(request: &InlineRequest) -> Option<FsType> {
    match request.capability.access {
        Access::Mount { fs_type, .. } => fs_type,
        Access::Block => None,
    }
}

/// The capacity of a new volume in bytes: whole blocks, at least its source and what its filesystem needs.
pub fn capacity(store: &Store, request: &InlineRequest) -> Result<u64> {
    let source = match &request.from_snapshot {
        Some(id) => store.catalog.read()?.live_snapshot(id)?.capacity_bytes,
        None => 0,
    };
    let wanted = match (request.size_bytes, request.read_only_content) {
        (Some(bytes), _) if bytes < source => {
            return Err(Error::OutOfRange(format!(
                "volume_context: size: {bytes} bytes are less than the {source} of the snapshot"
            )));
        }
        (Some(bytes), _) => bytes,
        (None, _) if source > 0 => source,
        (None, true) => CONTENT_BYTES,
        (None, false) => SCRATCH_BYTES.min(store.config.inline.max_size),
    };
    let least = wanted_filesystem(request).unwrap_or(FsType::Ext4).min_bytes();
    let bytes = wanted.max(least).max(MIN_VOLUME_BYTES);
    let rounded = bytes.div_ceil(BLOCK_SIZE).saturating_mul(BLOCK_SIZE);
    if rounded > store.max_volume_bytes {
        return Err(Error::OutOfRange(format!(
            "volume_context: size: {bytes} bytes are more than the largest volume here, {} bytes",
            store.max_volume_bytes
        )));
    }
    Ok(rounded)
}

/// The device of a volume, even when its backing file was deleted under it.
pub fn device(store: &Store, row: &Inline) -> Result<Option<LoopDevice>> {
    if row.request.in_memory {
        return memory::find(&row.id);
    }
    match File::open(store.volume_path(&row.id)) {
        Ok(backing) => Ok(LoopDevice::find(&backing)?.into_iter().next()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => LoopDevice::find_deleted(&row.id),
        Err(e) => Err(Error::io(format!("opening the backing file of {:?}", row.handle), e)),
    }
}

/// The volume's device with a filesystem on it, both made where they are not there.
pub fn attach(store: &Store, row: &mut Inline) -> Result<(LoopDevice, FsType)> {
    let device = match row.request.in_memory {
        true => in_memory(store, row)?,
        false => LoopDevice::ensure(&file(store, row)?)?,
    };
    match row.format {
        Some(Format { fs_type, unfinished: false, .. }) => Ok((device, fs_type)),
        Some(_) | None => format(store, row, &device).map(|fs_type| (device, fs_type)),
    }
}

/// What was in memory is lost with it, as after a reboot: then the volume begins anew.
fn in_memory(store: &Store, row: &mut Inline) -> Result<LoopDevice> {
    if let Some(device) = memory::find(&row.id)? {
        return Ok(device);
    }
    if row.format.is_some() {
        note(store, row, None)?;
    }
    memory::make(&row.id, row.capacity_bytes)
}

/// The backing file in the pool. Until there is a filesystem it holds nothing, and is made anew.
fn file(store: &Store, row: &Inline) -> Result<File> {
    let path = store.volume_path(&row.id);
    let doing = || format!("making the backing file of inline volume {:?}", row.handle);
    if row.format.is_some() {
        return File::options().read(true).write(true).open(&path).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => Error::Damaged(format!(
                "the backing file of {:?} is gone; delete the pod",
                row.handle
            )),
            _ => Error::io(doing(), e),
        });
    }
    let file = pool::new_file(&path)?;
    store.pool.adopt(&file)?;
    if let Some(id) = &row.request.from_snapshot {
        let source: Snapshot = store.catalog.read()?.live_snapshot(id)?;
        store.pool.clone(&store.open_snapshot(&source)?, &file)?;
        reach("inline.cloned")?;
    }
    file.set_len(row.capacity_bytes).context(doing)?;
    reach("inline.sized")?;
    file.sync_all().context(doing)?;
    reach("inline.flushed")?;
    pool::sync_directory(&Directory::Volumes.path(store.pool.root()))?;
    Ok(file)
}

fn format(store: &Store, row: &mut Inline, device: &LoopDevice) -> Result<FsType> {
    let wanted = wanted_filesystem(&row.request);
    let size_bytes = row.capacity_bytes;
    if row.request.from_snapshot.is_some() {
        let found = filesystem::recognise(&device.open(false)?)?;
        let fs_type = found.filter(|found| wanted.is_none_or(|wanted| wanted == *found));
        let fs_type = fs_type.ok_or_else(|| {
            let found = found.map_or("no filesystem known here", FsType::name);
            Error::Precondition(format!(
                "fs_type: the snapshot holds {found}; leave fsType out, or use another snapshot"
            ))
        })?;
        // How far it has grown is not known.
        note(store, row, Some(Format { fs_type, size_bytes: 0, unfinished: false }))?;
        return Ok(fs_type);
    }
    let fs_type = wanted.unwrap_or(FsType::Ext4);
    note(store, row, Some(Format { fs_type, size_bytes, unfinished: true }))?;
    filesystem::make(fs_type, device.path())?;
    reach("inline.formatted")?;
    device.flush()?;
    reach("inline.format_flushed")?;
    note(store, row, Some(Format { fs_type, size_bytes, unfinished: false }))?;
    Ok(fs_type)
}

fn note(store: &Store, row: &mut Inline, format: Option<Format>) -> Result<()> {
    row.format = format;
    store.catalog.write(|tx| tx.put(&*row))
}

/// Grows the mounted filesystem to the volume's capacity, where it is smaller.
pub fn grow(store: &Store, row: &mut Inline, device: &LoopDevice) -> Result<()> {
    let Some(format) = row.format.filter(|format| format.size_bytes < row.capacity_bytes) else {
        return Ok(());
    };
    filesystem::grow(format.fs_type, device.path(), &row.target)?;
    reach("inline.grown")?;
    note(store, row, Some(Format { size_bytes: row.capacity_bytes, ..format }))
}

/// Removes the backing file. The device is gone already, and with it all that was in memory.
pub fn remove(store: &Store, row: &Inline) -> Result<()> {
    if row.request.in_memory {
        return Ok(());
    }
    let path = store.volume_path(&row.id);
    if row.carries_secret {
        wipe::wipe(&path)?;
    }
    pool::remove(&path)
}

/// What is wrong with the backing file, if anything.
pub fn defect(store: &Store, row: &Inline) -> Result<Option<String>> {
    if row.request.in_memory {
        return Ok(None);
    }
    let bytes = match File::open(store.volume_path(&row.id)) {
        Ok(backing) => length(&backing)?,
        Err(e) if e.kind() == io::ErrorKind::NotFound => 0,
        Err(e) => {
            return Err(Error::io(format!("opening the backing file of {:?}", row.handle), e));
        }
    };
    Ok((bytes < row.capacity_bytes).then(|| {
        format!(
            "the backing file has {bytes} bytes instead of {}; delete the pod",
            row.capacity_bytes
        )
    }))
}
