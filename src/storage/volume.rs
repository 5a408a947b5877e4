//! Volumes: create (empty or from a source), expand, modify and delete.

use std::fs::File;

use tracing::info;

use super::error::{Context, Error, FREE_SPACE_ADVICE, Result};
use super::fail_point::reach;
use super::growth;
use super::ids::{self, VOLUME_PREFIX};
use super::inline;
use super::list::{self, Page};
use super::loop_device::LoopDevice;
use super::maintenance;
use super::model::{
    Attachment, Capacity, ChainBreak, Format, FsType, Phase, Precision, Snapshot, SnapshotPhase,
    Source, Volume, VolumeRequest,
};
use super::point_in_time::{self, CopyJob};
use super::pool::{self, Directory};
use super::sector::SectorSize;
use super::snapshot;
use super::store::{Store, VOLUME_NAME_LOCK, length};
use super::take_snapshot;
use super::units::{BLOCK_SIZE, MIN_VOLUME_BYTES};
use super::writeback;

/// The default capacity of a new volume without a source, in bytes.
const DEFAULT_BYTES: u64 = 1 << 30;

/// The arguments of CreateVolume.
#[derive(Debug, Clone)]
pub struct CreateVolume {
    pub name: String,
    pub request: VolumeRequest,
}

/// Creates a volume, or returns the existing one with this name.
pub fn create(store: &Store, create: &CreateVolume) -> Result<Volume> {
    let CreateVolume { name, request } = create;
    let name_lock = format!("{VOLUME_NAME_LOCK}{name}");
    // A source volume must not be attached or detached meanwhile. A source snapshot never changes.
    let source_lock = match &request.source {
        Some(Source::Volume(id)) => Some(id.as_str()),
        Some(Source::Snapshot(_)) | None => None,
    };
    let _lock = store.locks.try_lock([name_lock.as_str()].into_iter().chain(source_lock))?;
    let existing = store.catalog.read()?.by_name::<Volume>(name)?;
    match existing {
        Some(existing) if existing.phase == Phase::Ready => {
            return or_exists(existing, request);
        }
        Some(unfinished) => drop_volume(store, unfinished)?,
        None => {}
    }
    let source = request.source.as_ref().map(|source| open_source(store, source)).transpose()?;
    let volume = Volume {
        id: ids::new_id(store.catalog.pool()?, VOLUME_PREFIX, name)?,
        name: name.clone(),
        capacity_bytes: capacity(store, request, source.as_ref())?,
        phase: Phase::Creating,
        change_tracking: request.change_tracking,
        change_precision: request.change_precision,
        sector_size: sector_size(request, source.as_ref())?,
        format: source.as_ref().and_then(|source| source.format),
        source: request.source.clone(),
        request: request.clone(),
        next_sequence: 1,
        newest_snapshot_at: None,
        baseline: None,
        chain_break: ChainBreak::First,
        lost_writes: None,
        growth_failure: None,
    };
    // A deletion by this id, which a list of files shows, must not remove the file meanwhile.
    let _id_lock = store.locks.try_lock([volume.id.as_str()])?;
    store.catalog.write(|tx| tx.put(&volume).and_then(|()| tx.claim_name(&volume)))?;
    let ready = Volume { phase: Phase::Ready, ..volume.clone() };
    let made = make_file(store, &volume, source.as_ref())
        .and_then(|()| store.catalog.write(|tx| tx.put(&ready)));
    match made {
        Ok(()) => Ok(ready),
        Err(cause) => {
            if let Err(error) = drop_volume(store, volume) {
                // The row remains as an intent: the next call or start undoes it.
                tracing::error!(%error, "failed to undo the creation of a volume; the next call or start tries again");
            }
            Err(cause)
        }
    }
}

/// CSI CreateVolume: the same name with compatible parameters returns the same volume.
fn or_exists(existing: Volume, request: &VolumeRequest) -> Result<Volume> {
    let capacity = existing.capacity_bytes;
    let fits = request.required_bytes <= capacity
        && (request.limit_bytes == 0 || capacity <= request.limit_bytes);
    let same_parameters = VolumeRequest {
        required_bytes: existing.request.required_bytes,
        limit_bytes: existing.request.limit_bytes,
        ..request.clone()
    } == existing.request;
    // An expanded volume still matches the call that created it.
    if same_parameters && (fits || *request == existing.request) {
        return Ok(existing);
    }
    Err(Error::AlreadyExists(format!(
        "name: a volume named {:?} of {capacity} bytes exists with other parameters; use another \
         name",
        existing.name
    )))
}

/// The open source of a new volume.
struct OpenSource {
    file: File,
    capacity_bytes: u64,
    format: Option<Format>,
    sector_size: SectorSize,
    object: SourceObject,
}

enum SourceObject {
    /// The id. The snapshot can be deleted meanwhile; its data remains.
    Snapshot(String),
    Volume(Box<Volume>),
}

fn open_source(store: &Store, source: &Source) -> Result<OpenSource> {
    let reading = store.catalog.read()?;
    Ok(match source {
        Source::Snapshot(id) => {
            let snapshot = reading.live_snapshot(id)?;
            let file = store.open_snapshot(&snapshot).or_else(|error| {
                // It may have been deleted since the lookup.
                store.catalog.read()?.live_snapshot(id).and(Err(error))
            })?;
            let Snapshot { id, capacity_bytes, format, sector_size, .. } = snapshot;
            let object = SourceObject::Snapshot(id);
            OpenSource { file, capacity_bytes, format, sector_size, object }
        }
        Source::Volume(id) => {
            let volume = reading.live_volume(id)?;
            writeback::check(store, &volume)?;
            let file = store.open_volume(&volume)?;
            let Volume { capacity_bytes, format, sector_size, .. } = volume;
            let object = SourceObject::Volume(Box::new(volume));
            OpenSource { file, capacity_bytes, format, sector_size, object }
        }
    })
}

/// The sectors of a new volume: as requested, or its source's. Data that was written on small
/// sectors may not be readable on larger ones.
fn sector_size(request: &VolumeRequest, source: Option<&OpenSource>) -> Result<SectorSize> {
    let inherited = source.map(|source| source.sector_size).unwrap_or_default();
    match request.sector_size {
        None => Ok(inherited),
        Some(requested) if requested.bytes() <= inherited.bytes() => Ok(requested),
        Some(_) => Err(Error::invalid(
            "parameters",
            format!(
                "sectorSize: the source has sectors of {} bytes, which its data may need; omit the parameter",
                inherited.bytes()
            ),
        )),
    }
}

/// The capacity of a new volume in bytes: whole blocks, at minimum the size of its source and the
/// minimum of its filesystem.
fn capacity(store: &Store, request: &VolumeRequest, source: Option<&OpenSource>) -> Result<u64> {
    let limit = request.limit_bytes;
    let source_bytes = source.map_or(0, |source| source.capacity_bytes);
    let required = match request.required_bytes {
        0 if source_bytes > 0 => source_bytes,
        0 if limit > 0 => DEFAULT_BYTES.min(limit),
        0 => DEFAULT_BYTES,
        required => required,
    };
    if required < source_bytes {
        return Err(Error::OutOfRange(format!(
            "capacity_range: {required} bytes are less than the {source_bytes} bytes of the source"
        )));
    }
    let minimum = request.fs_type.map_or(MIN_VOLUME_BYTES, FsType::min_bytes);
    let bytes = whole_blocks(store, required.max(minimum), limit)?;
    // A raw block volume does not grow its filesystem.
    if let (Some(source), Some(_)) = (source, request.fs_type)
        && let Some(format) = source.format
    {
        growth::check_size(format.fs_type, &source.file, bytes)?;
    }
    let room = room(store)?;
    if bytes > room.maximum_volume {
        return Err(Error::Exhausted(format!(
            "capacity_range: {bytes} bytes exceed the {} bytes that the pool can provision now; \
             {FREE_SPACE_ADVICE}, or increase --overcommit",
            room.maximum_volume
        )));
    }
    Ok(bytes)
}

/// Rounds `bytes` up to whole blocks and checks the limits.
fn whole_blocks(store: &Store, bytes: u64, limit: u64) -> Result<u64> {
    let rounded = bytes.div_ceil(BLOCK_SIZE).saturating_mul(BLOCK_SIZE);
    if rounded > store.max_volume_bytes {
        return Err(Error::OutOfRange(format!(
            "capacity_range: {bytes} bytes exceed the largest supported volume, {} bytes",
            store.max_volume_bytes
        )));
    }
    if limit > 0 && rounded > limit {
        return Err(Error::OutOfRange(format!(
            "capacity_range: the volume needs {rounded} bytes (whole blocks of {BLOCK_SIZE} bytes), \
             which exceeds the limit of {limit}"
        )));
    }
    Ok(rounded)
}

/// Creates the backing file of `volume` durably.
fn make_file(store: &Store, volume: &Volume, source: Option<&OpenSource>) -> Result<()> {
    let doing = || format!("creating the backing file of volume {:?}", volume.name);
    let path = store.pool.volume_path(&volume.id);
    let file = pool::new_file(&path)?;
    store.pool.adopt(&file)?;
    if let Some(OpenSource { file: source, capacity_bytes, object, .. }) = source {
        match object {
            SourceObject::Snapshot(id) => {
                // The snapshot may be deleted meanwhile: its data remains while it is open.
                let mut may_continue = || maintenance::check_need(store, id);
                store.pool.copy(source, &file, *capacity_bytes, &mut may_continue)?;
                reach("volume.cloned")?;
            }
            SourceObject::Volume(volume) => {
                file.set_len(*capacity_bytes).context(doing)?;
                point_in_time::copy_all(store, &[CopyJob { volume, source, target: &file }])?;
            }
        }
    }
    file.set_len(volume.capacity_bytes).context(doing)?;
    reach("volume.sized")?;
    file.sync_all().context(doing)?;
    reach("volume.flushed")?;
    pool::sync_directory(&Directory::Volumes.path(store.pool.root()))
}

/// Deletes a volume and keeps its snapshots. Succeeds if it does not exist.
pub fn delete(store: &Store, id: &str) -> Result<()> {
    let _lock = store.locks.try_lock([id])?;
    let reading = store.catalog.read()?;
    let Some(volume) = reading.get::<Volume>(id)? else {
        // A failed deletion may have left unneeded files.
        return snapshot::collect(store, id);
    };
    if let Some(attachment) = reading.get::<Attachment>(id)? {
        let place = attachment.published.keys().next().unwrap_or(&attachment.staging_path);
        return Err(Error::Precondition(format!(
            "volume_id: {id:?} is in use at {}; unpublish and unstage it first",
            place.display()
        )));
    }
    drop(reading);
    drop_volume(store, volume)
}

/// Deletes a volume in any state: intent, file, row. Start-up does the same for unfinished volumes.
pub fn drop_volume(store: &Store, volume: Volume) -> Result<()> {
    let volume = Volume { phase: Phase::Deleting, ..volume };
    store.catalog.write(|tx| tx.put(&volume))?;
    let path = store.pool.volume_path(&volume.id);
    if let Ok(backing) = File::open(&path) {
        LoopDevice::detach_all(&backing)?;
    }
    pool::remove(&path)?;
    growth::discard(store, &volume.id)?;
    if let Some(baseline) = &volume.baseline {
        store.remove_clone_ahead(baseline, pool::remove)?;
    }
    // No further snapshot will need the baseline.
    let mut rows = store.catalog.read()?.snapshots_of(&volume.id)?;
    rows.retain(|row| row.phase != SnapshotPhase::Ready && row.has_data);
    rows.iter_mut().for_each(|row| row.has_data = false);
    store.catalog.write(|tx| {
        rows.iter().try_for_each(|row| tx.put(row))?;
        tx.release_name(&volume)?;
        tx.remove::<Volume>(&volume.id)
    })?;
    take_snapshot::remove_data(store, &rows);
    snapshot::collect(store, &volume.id)
}

pub fn list(store: &Store, after: Option<&str>, max: usize) -> Result<Page<Volume>> {
    list::page(&store.catalog.read()?, after, max, |volume: &Volume| volume.phase == Phase::Ready)
}

/// Grows a volume and its device. Does nothing if it is large enough.
pub fn expand(store: &Store, id: &str, required_bytes: u64, limit_bytes: u64) -> Result<Volume> {
    let _lock = store.locks.try_lock([id])?;
    let mut volume = store.catalog.read()?.live_volume(id)?;
    let file = store.open_volume(&volume)?;
    complete_growth(store, &mut volume, &file)?;
    if required_bytes > volume.capacity_bytes {
        let bytes = whole_blocks(store, required_bytes, limit_bytes)?;
        if let Some(format) = volume.format {
            growth::check_size(format.fs_type, &file, bytes)?;
        }
        grow_file(store, &mut volume, &file, bytes)?;
    }
    for device in LoopDevice::find(&file)? {
        if device.size()? < volume.capacity_bytes {
            device.grow()?;
        }
    }
    Ok(volume)
}

/// Grows the backing file and the row of a volume to `bytes`, which exceeds the current size.
fn grow_file(store: &Store, volume: &mut Volume, file: &File, bytes: u64) -> Result<()> {
    let more = bytes - volume.capacity_bytes;
    let room = room(store)?;
    if more > room.maximum_volume {
        return Err(Error::Exhausted(format!(
            "capacity_range: {more} more bytes exceed the {} bytes that the pool can provision now; \
             {FREE_SPACE_ADVICE}, or increase --overcommit",
            room.maximum_volume
        )));
    }
    // File first: after an interruption, the row takes the size of the file.
    file.set_len(bytes).context(|| format!("growing volume {:?}", volume.id))?;
    reach("volume.grown")?;
    complete_growth(store, volume, file)
}

/// Completes an expansion that was interrupted between file and row: the row takes the size of the
/// file. The file is never truncated, because a loop device may already have its new size and
/// contain data there. The caller holds the volume's lock, and calls this before it attaches or
/// grows a device, so that no device is larger than the volume.
pub fn complete_growth(store: &Store, volume: &mut Volume, file: &File) -> Result<()> {
    let bytes = length(file)? / BLOCK_SIZE * BLOCK_SIZE;
    if bytes <= volume.capacity_bytes {
        return Ok(());
    }
    info!(volume = volume.id, bytes, "growing a volume to the size of its backing file");
    writeback::flush_file(store, &volume.id, file)?;
    reach("volume.growth_flushed")?;
    let grown = Volume { capacity_bytes: bytes, ..volume.clone() };
    store.catalog.write(|tx| tx.put(&grown))?;
    *volume = grown;
    Ok(())
}

/// The changes of ModifyVolume; `None` keeps the current value.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ModifyVolume {
    /// Disabling it ends the chain of change records: no baseline is kept.
    pub change_tracking: Option<bool>,
    pub change_precision: Option<Precision>,
}

pub fn modify(store: &Store, id: &str, modify: ModifyVolume) -> Result<()> {
    if modify == ModifyVolume::default() {
        return get(store, id).map(drop);
    }
    let _lock = store.locks.try_lock([id])?;
    let volume = store.catalog.read()?.live_volume(id)?;
    let modified = Volume {
        change_tracking: modify.change_tracking.unwrap_or(volume.change_tracking),
        change_precision: modify.change_precision.unwrap_or(volume.change_precision),
        ..volume.clone()
    };
    if modified == volume {
        return Ok(());
    }
    if volume.change_tracking && !modified.change_tracking {
        return maintenance::drop_baseline(store, modified, ChainBreak::TrackingOff);
    }
    store.catalog.write(|tx| tx.put(&modified))
}

/// The capacity for new volumes. Volumes are thin: their total may exceed the pool by the factor
/// `--overcommit`.
pub fn room(store: &Store) -> Result<Capacity> {
    let room = store.pool.room()?;
    let mut provisioned: u64 = 0;
    store.catalog.read()?.scan(None, |volume: Volume| {
        provisioned = provisioned.saturating_add(volume.capacity_bytes);
        Ok(true)
    })?;
    provisioned = provisioned.saturating_add(inline::provisioned_bytes(store)?);
    let limit = (room.total as f64 * store.config.overcommit) as u64;
    let available = room.available.saturating_sub(maintenance::reserve(room));
    let maximum = if available == 0 { 0 } else { limit.saturating_sub(provisioned) };
    Ok(Capacity {
        available,
        maximum_volume: maximum.min(store.max_volume_bytes) / BLOCK_SIZE * BLOCK_SIZE,
        minimum_volume: MIN_VOLUME_BYTES,
        provisioned,
    })
}

/// The volume, or `NotFound`.
pub fn get(store: &Store, id: &str) -> Result<Volume> {
    store.catalog.read()?.live_volume(id)
}
