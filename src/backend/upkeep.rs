//! What happens without being asked: hidden baselines go when the pool runs full, and the records of
//! deleted snapshots are forgotten when their retention is over.

use tracing::{info, warn};

use super::catalog::SnapshotFile;
use super::error::{Error, MORE_ROOM, Result};
use super::model::{
    ChainBreak, Condition, HealthProblem, Predecessor, Snapshot, SnapshotPhase, Volume,
};
use super::pool::{self, Directory, Image, Room};
use super::store::{Store, now};
use super::tracker::{Bitmap, BlockMap, Header, RecordWriter, Style};
use super::units::{Block, BlockRange};
use super::writeback;

/// Room kept back for the catalog, for records, and for noticing in time, in bytes.
pub fn reserve(room: Room) -> u64 {
    (room.total / 20).min(1 << 30)
}

/// Whether the pool is so full that a pod may soon meet ENOSPC.
pub fn under_pressure(room: Room) -> bool {
    room.available < reserve(room)
}

/// What a device or a tool failed with, told apart: a loop device without room behind it looks like a
/// broken disk.
pub fn or_exhausted(store: &Store, error: Error) -> Error {
    let of_device = matches!(error, Error::Io { .. } | Error::Failed(_));
    match store.pool.room() {
        Ok(room) if of_device && under_pressure(room) => {
            Error::Exhausted(format!("{error}: the pool is nearly full; {MORE_ROOM}"))
        }
        _ => error,
    }
}

/// What volumes have to fear of a lack of room, if anything.
pub fn shortage(store: &Store) -> Result<Option<Condition>> {
    let abnormal = |message| Ok(Some(Condition::abnormal(HealthProblem::PoolNearlyFull, message)));
    if let Some(image) = store.pool.image()
        && let Some(danger) = image.danger()?
    {
        return abnormal(danger);
    }
    let room = store.pool.room()?;
    if !under_pressure(room) {
        return Ok(None);
    }
    abnormal(format!(
        "the pool is nearly full: {} of {} bytes are left; {MORE_ROOM}",
        room.available, room.total
    ))
}

/// Makes room before pods meet the end of it, in the pool and below its image.
pub fn relieve_pressure(store: &Store) -> Result<()> {
    let below = store.pool.image().map_or(Ok(()), Image::restore_reserve);
    drop_baselines(store).and(below)
}

/// Drops hidden baselines, oldest first, until there is room. A delta across the gap then fails; it
/// is never guessed.
fn drop_baselines(store: &Store) -> Result<()> {
    if !under_pressure(store.pool.room()?) {
        return Ok(());
    }
    let mut hidden = Vec::new();
    for volume in store.catalog.read()?.select(|volume: &Volume| volume.baseline.is_some())? {
        if let Some((since, _)) = hidden_baseline(store, &volume.id)? {
            hidden.push((since, volume.id));
        }
    }
    if hidden.is_empty() {
        return Ok(());
    }
    // Blocks that a write in the page cache is to replace are shared until it is written back. Until then a baseline that
    // is dropped frees nothing, and so all would be dropped. A failure is no reason to make no room.
    if let Err(error) = writeback::sync_mounted(store.pool.root()) {
        warn!(%error, "could not write back the pool before baselines are dropped");
    }
    hidden.sort_unstable();
    for (_, volume_id) in hidden {
        if !under_pressure(store.pool.room()?) {
            break;
        }
        // Whoever holds the volume now may be about to free the baseline himself, or has done so.
        let Ok(_lock) = store.locks.take([volume_id.as_str()]) else { continue };
        let Some((_, volume)) = hidden_baseline(store, &volume_id)? else { continue };
        warn!(
            volume = volume.id,
            baseline = volume.baseline,
            "the pool is nearly full: dropping a hidden baseline; the next backup of this volume \
             has to be a full one"
        );
        drop_baseline(store, volume, ChainBreak::BaselineDropped)?;
    }
    Ok(())
}

/// When the baseline of a volume was cut, if only the next cut still needs its data.
fn hidden_baseline(store: &Store, volume_id: &str) -> Result<Option<((u64, u32), Volume)>> {
    let reading = store.catalog.read()?;
    let Some(volume) = reading.get::<Volume>(volume_id)? else { return Ok(None) };
    let Some(baseline) = &volume.baseline else { return Ok(None) };
    let hidden = reading.get::<Snapshot>(baseline)?.filter(|row| row.phase != SnapshotPhase::Ready);
    Ok(hidden.map(|row| (row.created_at, volume)))
}

/// Makes the next cut of a volume start a new chain, and frees the data that was kept for it.
/// The caller holds the volume's lock; `volume` is written as it is given, without its baseline.
pub fn drop_baseline(store: &Store, mut volume: Volume, reason: ChainBreak) -> Result<()> {
    let reading = store.catalog.read()?;
    let baseline = match volume.baseline.take() {
        Some(id) => reading.get::<Snapshot>(&id)?,
        None => None,
    };
    volume.chain_break = reason;
    let unneeded = baseline
        .filter(|row| row.phase != SnapshotPhase::Ready)
        .map(|row| Snapshot { has_data: false, ..row });
    store.catalog.write(|tx| {
        tx.put(&volume)?;
        unneeded.iter().try_for_each(|row| tx.put(row))
    })?;
    // At once: whether one more has to go is decided by the room that this one has made.
    unneeded.map_or(Ok(()), |row| store.remove_and_free(SnapshotFile::data(&row)))
}

/// Drops the records of deleted snapshots that are past their retention; and the ids of those whose records were dropped as long
/// ago as the driver keeps records.
pub fn forget_expired(store: &Store) -> Result<()> {
    let now = now().0;
    let reading = store.catalog.read()?;
    let mut due = reading.retained_before(now.saturating_sub(store.retention()))?;
    due.extend(reading.ended_before(now)?);
    drop(reading);
    for id in due {
        let Some(row) = store.catalog.read()?.get::<Snapshot>(&id)? else { continue };
        let Ok(_lock) = store.locks.take([row.volume_id.as_str()]) else { continue };
        match forget(store, &id, now) {
            Ok(()) => {}
            // One that cannot be folded, for want of room or worse, does not keep the others.
            Err(error) => warn!(snapshot = id, %error, "not forgotten yet"),
        }
    }
    Ok(())
}

/// Drops the record of a deleted snapshot, or its row where the record was dropped before. The caller holds the volume's lock.
fn forget(store: &Store, id: &str, now: u64) -> Result<()> {
    let row = store.catalog.read()?.get::<Snapshot>(id)?;
    let is_expired =
        |row: &Snapshot| row.retained_until(store.retention()).is_some_and(|end| end < now);
    let Some(row) = row.filter(is_expired) else { return Ok(()) };
    if row.is_forgotten() {
        return store.catalog.write(|tx| tx.remove::<Snapshot>(id));
    }
    drop_record(store, row)
}

/// Drops the record of a deleted snapshot. Its changes are folded into its successor's, so that
/// deltas across it stay exact; as a base it is gone. The newest of a chain stays: the next cut
/// counts from it.
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
    let folded = successor.as_ref().map(|next| fold(store, &row, next)).transpose()?;
    let phase = SnapshotPhase::Forgotten { at: now().0 };
    let forgotten = Snapshot { phase, retention: None, ..row.clone() };
    store.catalog.write(|tx| {
        folded.iter().try_for_each(|next| tx.put(next))?;
        tx.put(&forgotten)
    })?;
    info!(snapshot = row.id, "forgot a change record that was past its retention");
    store.remove(SnapshotFile::record(&row))?;
    successor.map_or(Ok(()), |next| store.remove(SnapshotFile::record(&next)))
}

/// Writes the successor's record anew, counting from before `row`; returns the successor's new row.
fn fold(store: &Store, row: &Snapshot, successor: &Snapshot) -> Result<Snapshot> {
    let predecessor = match &row.predecessor {
        Predecessor::Snapshot(id) => Predecessor::Snapshot(id.clone()),
        Predecessor::None(_) => Predecessor::None(ChainBreak::Retention),
    };
    let folded = Snapshot {
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
    // Until the commit no row refers to the file.
    store.catalog.write(|tx| tx.remove_later(&SnapshotFile::record(&folded)))?;
    let path = store.record_path(&successor.id, folded.record_generation);
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
    Ok(folded)
}
