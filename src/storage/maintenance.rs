//! Background work: drops hidden baselines when the pool is nearly full, and drops expired change
//! records of deleted snapshots.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tracing::{info, warn};

use super::catalog::SnapshotFile;
use super::error::{Error, FREE_SPACE_ADVICE, Result};
use super::model::{
    ChainBreak, Condition, HealthProblem, Predecessor, Snapshot, SnapshotPhase, Volume,
};
use super::pool::{self, Directory, Image, Room};
use super::steady_clock::SETTLING;
use super::store::{Store, now};
use super::tracker::{Bitmap, BlockMap, Header, RecordWriter, Style};
use super::units::{Block, BlockRange};
use super::writeback;

/// Free space to keep for the catalog, change records and the reaction time, in bytes.
pub fn reserve(room: Room) -> u64 {
    (room.total / 20).min(1 << 30)
}

/// Whether the pool is so full that a pod may soon get ENOSPC.
pub fn under_pressure(room: Room) -> bool {
    room.available < reserve(room)
}

/// Maps an error of a device or tool to `Exhausted` if the pool is nearly full: a loop device
/// without space for its file fails like a broken disk.
pub fn or_exhausted(store: &Store, error: Error) -> Error {
    let of_device = matches!(error, Error::Io { .. } | Error::Failed(_));
    match store.pool.room() {
        Ok(room) if of_device && under_pressure(room) => {
            Error::Exhausted(format!("{error}: the pool is nearly full; {FREE_SPACE_ADVICE}"))
        }
        _ => error,
    }
}

/// The condition of all volumes if the pool is nearly full.
pub fn shortage(store: &Store) -> Result<Option<Condition>> {
    let abnormal = |message| Ok(Some(Condition::abnormal(HealthProblem::PoolNearlyFull, message)));
    if let Some(image) = store.pool.image()
        && let Some(danger) = image.space_warning()?
    {
        return abnormal(danger);
    }
    let room = store.pool.room()?;
    if !under_pressure(room) {
        return Ok(None);
    }
    abnormal(format!(
        "the pool is nearly full: {} of {} bytes are free; {FREE_SPACE_ADVICE}",
        room.available, room.total
    ))
}

/// Frees space before pods get ENOSPC, and restores the reserve of a sparse image.
pub fn relieve_pressure(store: &Store) -> Result<()> {
    let below = store.pool.image().map_or(Ok(()), Image::restore_reserve);
    drop_baselines(store).and(below)
}

/// Drops hidden baselines, oldest first, until enough space is free. A delta across the gap then
/// fails.
fn drop_baselines(store: &Store) -> Result<()> {
    if !under_pressure(store.pool.room()?) {
        store.needs_space.store(false, Ordering::Relaxed);
        return Ok(());
    }
    let mut hidden = Vec::new();
    for volume in store.catalog.read()?.select(|volume: &Volume| volume.baseline.is_some())? {
        if let Some((since, _)) = hidden_baseline(store, &volume.id)? {
            hidden.push((since, volume.id));
        }
    }
    // Blocks with pending writes in the page cache remain shared until writeback. Without it,
    // dropping a baseline would free nothing, and all baselines would be dropped. If it fails,
    // continue.
    if !hidden.is_empty()
        && let Err(error) = writeback::sync_mounted(store.pool.root())
    {
        warn!(%error, "failed to write back the pool before dropping baselines");
    }
    hidden.sort_unstable();
    let mut are_used = false;
    for (_, volume_id) in hidden {
        if !under_pressure(store.pool.room()?) {
            break;
        }
        // An operation that holds the lock may free the baseline.
        let Ok(_lock) = store.locks.try_lock([volume_id.as_str()]) else {
            are_used = true;
            continue;
        };
        let Some((_, volume)) = hidden_baseline(store, &volume_id)? else { continue };
        // Dropping it would free nothing.
        if volume.baseline.iter().any(|id| store.is_in_use(id).unwrap_or(false)) {
            are_used = true;
            continue;
        }
        warn!(
            volume = volume.id,
            baseline = volume.baseline,
            "the pool is nearly full: dropping a hidden baseline; the next backup of this volume \
             must be a full backup"
        );
        drop_baseline(store, volume, ChainBreak::BaselineDropped)?;
    }
    let needs_space = under_pressure(store.pool.room()?);
    if !store.needs_space.swap(needs_space, Ordering::Relaxed) && needs_space && are_used {
        warn!(
            "the pool is nearly full and every hidden baseline is in use: operations that use the data of a deleted \
             snapshot stop"
        );
    }
    Ok(())
}

/// `Exhausted` if pods need the space of this snapshot: it is deleted, the pool is nearly full, and
/// all data that can be dropped is in use. An operation that reads the data of a deleted snapshot,
/// or prevents that it is dropped, calls this at every step: pods come first.
pub fn check_need(store: &Store, snapshot_id: &str) -> Result<()> {
    if !store.needs_space.load(Ordering::Relaxed) || !under_pressure(store.pool.room()?) {
        return Ok(());
    }
    let row = store.catalog.read()?.get::<Snapshot>(snapshot_id)?;
    if row.is_some_and(|row| row.phase == SnapshotPhase::Ready) {
        return Ok(());
    }
    Err(Error::Exhausted(format!(
        "stopped to free the data of the deleted snapshot {snapshot_id:?}, because the pool is nearly full and pods need \
         the space; {FREE_SPACE_ADVICE}"
    )))
}

/// The volume and the creation time of its baseline, if the baseline is a deleted snapshot.
fn hidden_baseline(store: &Store, volume_id: &str) -> Result<Option<((u64, u32), Volume)>> {
    let reading = store.catalog.read()?;
    let Some(volume) = reading.get::<Volume>(volume_id)? else { return Ok(None) };
    let Some(baseline) = &volume.baseline else { return Ok(None) };
    let hidden = reading.get::<Snapshot>(baseline)?.filter(|row| row.phase != SnapshotPhase::Ready);
    Ok(hidden.map(|row| (row.created_at, volume)))
}

/// Makes the next snapshot of a volume start a new chain, and frees the data of a hidden baseline.
/// The caller holds the volume's lock. `volume` is stored without its baseline.
pub fn drop_baseline(store: &Store, mut volume: Volume, reason: ChainBreak) -> Result<()> {
    let reading = store.catalog.read()?;
    let baseline = match volume.baseline.take() {
        Some(id) => reading.get::<Snapshot>(&id)?,
        None => None,
    };
    volume.chain_break = reason;
    if let Some(row) = &baseline {
        store.remove_clone_ahead(&row.id, pool::remove_and_free)?;
    }
    let unneeded = baseline
        .filter(|row| row.phase != SnapshotPhase::Ready)
        .map(|row| Snapshot { has_data: false, ..row });
    store.catalog.write(|tx| {
        tx.put(&volume)?;
        unneeded.iter().try_for_each(|row| tx.put(row))
    })?;
    // Wait until the space is free: it decides whether another baseline is dropped.
    unneeded.map_or(Ok(()), |row| store.remove_and_free(SnapshotFile::data(&row)))
}

/// Drops expired change records of deleted snapshots, and the ids of records dropped one retention
/// period ago.
pub fn forget_expired(store: &Store) -> Result<()> {
    let now = now().0;
    let steady_for = store.clock.steady_for(now, Instant::now());
    let reading = store.catalog.read()?;
    let mut due = reading.retained_before(now.saturating_sub(store.retention()))?;
    due.extend(reading.expired_before(now)?);
    drop(reading);
    for id in due {
        let Some(row) = store.catalog.read()?.get::<Snapshot>(&id)? else { continue };
        let Ok(_lock) = store.locks.try_lock([row.volume_id.as_str()]) else { continue };
        match forget(store, &id, now, steady_for) {
            Ok(()) => {}
            // An error for one snapshot must not affect the others.
            Err(error) => warn!(snapshot = id, %error, "failed to drop an expired change record"),
        }
    }
    Ok(())
}

/// Drops the record of an expired snapshot, or its row if the record was dropped before. The caller
/// holds the volume's lock.
fn forget(store: &Store, id: &str, now: u64, steady_for: Duration) -> Result<()> {
    let row = store.catalog.read()?.get::<Snapshot>(id)?;
    let is_expired = |row: &Snapshot| {
        let ends = row.retained_since().zip(row.retained_until(store.retention()));
        // A clock that has just been set may be wrong.
        ends.is_some_and(|(since, end)| {
            end < now && steady_for >= SETTLING.min(Duration::from_secs(end - since))
        })
    };
    let Some(row) = row.filter(is_expired) else { return Ok(()) };
    if row.is_forgotten() {
        return store.catalog.write(|tx| tx.remove::<Snapshot>(id));
    }
    drop_record(store, row)
}

/// Drops the record of a deleted snapshot. Its changes are merged into its successor's record, so
/// that deltas across it remain exact; it is no longer a base. The baseline is kept, because the
/// next snapshot refers to it.
fn drop_record(store: &Store, row: Snapshot) -> Result<()> {
    let reading = store.catalog.read()?;
    let volume = reading.get::<Volume>(&row.volume_id)?;
    if volume.is_some_and(|volume| volume.baseline.as_deref() == Some(row.id.as_str())) {
        return Ok(());
    }
    let follows = Predecessor::Snapshot(row.id.clone());
    let successor = reading.find_snapshot_of(&row.volume_id, row.sequence + 1, |next| {
        next.predecessor == follows && !next.is_forgotten()
    })?;
    let merged = successor.as_ref().map(|next| merge(store, &row, next)).transpose()?;
    // The retention of the id never starts before the record's, after the clock was set back.
    let at = now().0.max(row.retained_since().unwrap_or(0));
    let phase = SnapshotPhase::Forgotten { at };
    let forgotten = Snapshot { phase, retention: None, ..row.clone() };
    store.catalog.write(|tx| {
        merged.iter().try_for_each(|next| tx.put(next))?;
        tx.put(&forgotten)
    })?;
    info!(snapshot = row.id, "dropped an expired change record");
    store.remove(SnapshotFile::record(&row))?;
    successor.map_or(Ok(()), |next| store.remove(SnapshotFile::record(&next)))
}

/// Writes a new record of the successor that includes the changes of `row`. Returns the successor's
/// new row.
fn merge(store: &Store, row: &Snapshot, successor: &Snapshot) -> Result<Snapshot> {
    let predecessor = match &row.predecessor {
        Predecessor::Snapshot(id) => Predecessor::Snapshot(id.clone()),
        Predecessor::None(_) => Predecessor::None(ChainBreak::Retention),
    };
    let merged = Snapshot {
        predecessor: predecessor.clone(),
        record_generation: successor.record_generation + 1,
        ..successor.clone()
    };
    let since = match &predecessor {
        Predecessor::Snapshot(id) => Some(id.as_str()),
        Predecessor::None(_) => None,
    };
    let newer = store.open_record(successor)?;
    let mut changes = Vec::new();
    if since.is_some() {
        changes = vec![store.open_record(row)?, newer.clone()];
    }
    let capacity = successor.capacity_bytes;
    let header =
        Header::new(&successor.id, &successor.volume_id, since, successor.sequence, capacity);
    // Before the commit no row refers to the file.
    store.catalog.write(|tx| tx.schedule_removal(&SnapshotFile::record(&merged)))?;
    let path = store.pool.record_path(&successor.id, merged.record_generation);
    let mut writer = RecordWriter::new(pool::new_file(&path)?, &header)?;
    let parts = [(Bitmap::Allocated, vec![newer]), (Bitmap::Changed, changes)];
    for (bitmap, records) in parts {
        for extent in BlockMap::new(capacity, bitmap, records).extents(Style::Variable, 0)? {
            let extent = extent?;
            let range =
                BlockRange::new(Block::holding(extent.offset), Block::holding(extent.end()));
            writer.set(bitmap, range)?;
        }
    }
    writer.finish()?;
    pool::sync_directory(&Directory::Records.path(store.pool.root()))?;
    Ok(merged)
}
