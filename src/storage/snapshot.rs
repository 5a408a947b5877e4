//! Snapshots: create, delete and list, and the results of `allocated` and `delta`.

use std::sync::Arc;

use super::catalog::ReadTx;
use super::error::{Error, Kind, Result};
use super::ids::{self, SNAPSHOT_PREFIX};
use super::list::{self, Page};
use super::model::{Predecessor, Snapshot, SnapshotPhase, Volume};
use super::pool;
use super::snapshot_time;
use super::store::{SNAPSHOT_NAME_LOCK, Store, now};
use super::take_snapshot;
use super::tracker::{Bitmap, BlockMap, RecordReader};
use super::writeback;

/// Which snapshots to list (CSI ListSnapshotsRequest).
#[derive(Debug, Clone, Default)]
pub struct SnapshotFilter {
    pub snapshot_id: Option<String>,
    pub volume_id: Option<String>,
}

/// When the existing volumes last had a snapshot. A deleted snapshot counts while its id is kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SnapshotTimes {
    /// When the newest snapshot was taken, in seconds since the epoch.
    pub newest: Option<u64>,
    /// When the newest snapshot of the volume was taken that has waited longest for another.
    pub stalest: Option<u64>,
    /// The number of volumes that have had no snapshot.
    pub volumes_without: u64,
}

/// Maximum number of attempts to open records that are concurrently replaced.
const LOOKUP_ATTEMPTS: usize = 3;

/// Takes a snapshot, or returns the existing one with this name.
pub fn create(store: &Store, name: &str, volume_id: &str) -> Result<Snapshot> {
    let name_lock = format!("{SNAPSHOT_NAME_LOCK}{name}");
    let _lock = store.locks.try_lock([name_lock.as_str(), volume_id])?;
    let reading = store.catalog.read()?;
    if let Some(existing) = reading.by_name::<Snapshot>(name)? {
        if existing.phase == SnapshotPhase::Ready {
            return or_exists(existing, name, volume_id);
        }
        take_snapshot::undo(store, std::slice::from_ref(&existing), None)?;
    }
    let volume = reading.live_volume(volume_id)?;
    drop(reading);
    writeback::check(store, &volume)?;
    let row = new_row(store.catalog.pool()?, &volume, name, None)?;
    let snapshots = take_snapshot::take(store, vec![(volume, row)], None)?;
    snapshots.into_iter().next().ok_or_else(|| Error::Failed("no snapshot was taken".to_owned()))
}

/// Reads the row of one snapshot of each volume.
pub fn times(store: &Store) -> Result<SnapshotTimes> {
    let (reading, mut times) = (store.catalog.read()?, SnapshotTimes::default());
    reading.scan(None, |volume: Volume| {
        let mut last = None;
        reading.visit_newest_first(&volume.id, u64::MAX, |row| {
            last = (row.phase != SnapshotPhase::Taking).then_some(row.created_at.0);
            last.is_none()
        })?;
        times.newest = times.newest.max(last);
        times.stalest = times.stalest.into_iter().chain(last).min();
        times.volumes_without += u64::from(last.is_none());
        Ok(true)
    })?;
    Ok(times)
}

fn or_exists(existing: Snapshot, name: &str, volume_id: &str) -> Result<Snapshot> {
    if existing.volume_id == volume_id {
        return Ok(existing);
    }
    Err(Error::AlreadyExists(format!(
        "name: a snapshot named {name:?} of volume {:?} exists; choose another name",
        existing.volume_id
    )))
}

/// The row of a new snapshot.
pub fn new_row(
    pool: &str,
    volume: &Volume,
    name: &str,
    group_id: Option<&str>,
) -> Result<Snapshot> {
    Ok(Snapshot {
        id: ids::new_id(pool, SNAPSHOT_PREFIX, name)?,
        name: name.to_owned(),
        volume_id: volume.id.clone(),
        phase: SnapshotPhase::Taking,
        capacity_bytes: volume.capacity_bytes,
        created_at: now(),
        sequence: volume.next_sequence,
        group_id: group_id.map(str::to_owned),
        predecessor: Predecessor::None(volume.chain_break),
        record_generation: 0,
        has_data: false,
        sector_size: volume.sector_size,
        format: volume.format,
        crash_consistent: false,
        baseline_until: None,
        retention: None,
    })
}

/// Deletes a snapshot. Its record is kept, so that it can be a base. Its data is kept, hidden,
/// while it is the baseline. Succeeds if the snapshot does not exist.
pub fn delete(store: &Store, id: &str) -> Result<()> {
    let found = store.catalog.read()?.get::<Snapshot>(id)?;
    let Some(snapshot) = found else { return Ok(()) };
    let _lock = store.locks.try_lock([snapshot.volume_id.as_str()])?;
    let reading = store.catalog.read()?;
    let Some(snapshot) = reading.get::<Snapshot>(id)? else { return Ok(()) };
    match snapshot.phase {
        SnapshotPhase::Ready => {}
        SnapshotPhase::Taking => return Ok(()),
        // A failed deletion may have left unneeded files.
        SnapshotPhase::Deleted { .. } | SnapshotPhase::Forgotten { .. } => {
            return finish_deletion(store, &[snapshot]);
        }
    }
    if let Some(group) = &snapshot.group_id {
        return Err(Error::invalid(
            "snapshot_id",
            format!("{id:?} belongs to group snapshot {group:?}; delete the group snapshot"),
        ));
    }
    let row = deleted(&reading, snapshot)?;
    store.catalog.write(|tx| tx.release_name(&row).and_then(|()| tx.put(&row)))?;
    finish_deletion(store, &[row])
}

/// The row of a deleted snapshot.
pub fn deleted(reading: &ReadTx, snapshot: Snapshot) -> Result<Snapshot> {
    let volume = reading.get::<Volume>(&snapshot.volume_id)?;
    let is_baseline =
        volume.as_ref().is_some_and(|volume| volume.baseline.as_ref() == Some(&snapshot.id));
    // After the clock was set back, the retention must not start before the snapshot was taken.
    let at = match &volume {
        Some(volume) => snapshot_time::not_before_newest(volume, now().0),
        None => now().0.max(snapshot.created_at.0),
    };
    Ok(Snapshot { phase: SnapshotPhase::Deleted { at }, has_data: is_baseline, ..snapshot })
}

/// Removes unreferenced data after a deletion of snapshots or of their volume.
pub fn finish_deletion(store: &Store, rows: &[Snapshot]) -> Result<()> {
    let gone: Vec<Snapshot> = rows.iter().filter(|row| !row.has_data).cloned().collect();
    take_snapshot::remove_data(store, &gone);
    rows.iter().try_for_each(|row| collect(store, &row.volume_id))
}

/// Removes all rows and records of a volume when it and its snapshots are deleted.
pub fn collect(store: &Store, volume_id: &str) -> Result<()> {
    let reading = store.catalog.read()?;
    if reading.get::<Volume>(volume_id)?.is_some() {
        return Ok(());
    }
    let rows = reading.snapshots_of(volume_id)?;
    let alive = |row: &Snapshot| matches!(row.phase, SnapshotPhase::Ready | SnapshotPhase::Taking);
    if rows.is_empty() || rows.iter().any(alive) {
        return Ok(());
    }
    for row in &rows {
        store.remove_clone_ahead(&row.id, pool::remove)?;
        pool::remove(&store.pool.snapshot_path(&row.id))?;
        pool::remove(&store.pool.record_path(&row.id, row.record_generation))?;
    }
    store.catalog.write(|tx| rows.iter().try_for_each(|row| tx.remove::<Snapshot>(&row.id)))
}

/// A page of the existing snapshots, in order of id.
pub fn list(
    store: &Store,
    filter: &SnapshotFilter,
    after: Option<&str>,
    max: usize,
) -> Result<Page<Snapshot>> {
    let reading = store.catalog.read()?;
    if let Some(id) = &filter.snapshot_id {
        let found = reading.get::<Snapshot>(id)?.filter(|row| matches(filter, row));
        return Ok(Page { items: found.into_iter().collect(), next: None });
    }
    if let Some(volume_id) = &filter.volume_id {
        let mut rows = reading.existing_snapshots_of(volume_id)?;
        rows.retain(|row| matches(filter, row));
        rows.sort_unstable_by(|a, b| a.id.cmp(&b.id));
        return list::page_of(rows, after, max);
    }
    list::page(&reading, after, max, |row| matches(filter, row))
}

fn matches(filter: &SnapshotFilter, row: &Snapshot) -> bool {
    row.phase == SnapshotPhase::Ready
        && filter.volume_id.as_ref().is_none_or(|volume| *volume == row.volume_id)
}

/// The allocated blocks of a snapshot.
pub fn allocated(store: &Store, id: &str) -> Result<BlockMap> {
    retry(|| {
        let snapshot = store.catalog.read()?.live_snapshot(id)?;
        let record = store.open_record(&snapshot)?;
        Ok(BlockMap::new(snapshot.capacity_bytes, Bitmap::Allocated, vec![record]))
    })
}

/// The blocks that changed in any snapshot after `base_id` up to `target_id`. The base may be
/// deleted.
pub fn delta(store: &Store, base_id: &str, target_id: &str) -> Result<BlockMap> {
    retry(|| {
        let reading = store.catalog.read()?;
        let target = reading.live_snapshot(target_id)?;
        let base = reading
            .get::<Snapshot>(base_id)?
            .filter(|base| base.phase != SnapshotPhase::Taking)
            .ok_or_else(|| Error::not_found(Kind::Snapshot, base_id))?;
        let records = chain(store, &reading, &base, &target)?;
        Ok(BlockMap::new(target.capacity_bytes, Bitmap::Changed, records))
    })
}

/// The records after `base` up to `target`.
fn chain(
    store: &Store,
    reading: &ReadTx,
    base: &Snapshot,
    target: &Snapshot,
) -> Result<Vec<Arc<RecordReader>>> {
    if base.volume_id != target.volume_id {
        return Err(Error::invalid(
            "base_snapshot_id",
            format!(
                "{:?} is a snapshot of volume {:?}, the target of {:?}; both must be of the same volume",
                base.id, base.volume_id, target.volume_id
            ),
        ));
    }
    if base.sequence > target.sequence {
        return Err(Error::invalid(
            "base_snapshot_id",
            format!("{:?} is newer than the target {:?}; swap them", base.id, target.id),
        ));
    }
    if base.is_forgotten() {
        return Err(no_delta(base, target, "the base's change record was dropped"));
    }
    let mut records = Vec::new();
    let mut current = target.clone();
    while current.id != base.id {
        let predecessor = match &current.predecessor {
            Predecessor::Snapshot(id) => id.clone(),
            Predecessor::None(reason) => {
                return Err(no_delta(base, target, &format!("at {:?}, {reason}", current.id)));
            }
        };
        records.push(store.open_record(&current)?);
        current = reading.get::<Snapshot>(&predecessor)?.ok_or_else(|| {
            Error::Damaged(format!("snapshot {predecessor:?} is missing; run `pool check`"))
        })?;
        if current.sequence < base.sequence {
            return Err(no_delta(base, target, "the base was taken while change tracking was off"));
        }
    }
    Ok(records)
}

fn no_delta(base: &Snapshot, target: &Snapshot, reason: &str) -> Error {
    Error::Precondition(format!(
        "base_snapshot_id: the changes from {:?} to {:?} are unknown: {reason}; take a full backup",
        base.id, target.id
    ))
}

/// Runs a query again if record files were replaced meanwhile.
fn retry<T>(mut query: impl FnMut() -> Result<T>) -> Result<T> {
    let mut result = query();
    for _ in 1..LOOKUP_ATTEMPTS {
        if !matches!(result, Err(Error::Damaged(_))) {
            break;
        }
        result = query();
    }
    result
}
