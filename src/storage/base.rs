//! Bases of deltas: which snapshots can be a base, and how long each is retained.

use super::error::{Error, Kind, Result};
use super::list::Page;
use super::model::{Predecessor, Retention, Snapshot, SnapshotPhase, Volume};
use super::store::{Store, now};
use super::tracker::Bitmap;
use super::units::BLOCK_SIZE;

/// Maximum number of rows to read when searching for the first expiry. Rows before it can be ids
/// that are no longer bases.
const MAX_VISITED: usize = 10_000;

/// A snapshot that can be the base of a delta.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Base {
    pub snapshot: Snapshot,
    /// When it expires, in seconds since the epoch. `None` for an existing snapshot, and for a
    /// deleted one that is the baseline of its volume: their retention has not begun.
    pub expires_at: Option<u64>,
}

/// Which bases to list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BaseFilter {
    /// All snapshots of this volume.
    Volume(String),
    /// The snapshots from which the changes to this snapshot are known, including itself.
    Target(String),
}

impl Base {
    fn new(store: &Store, snapshot: Snapshot) -> Self {
        let expires_at = expiry(&snapshot, store.retention());
        Self { snapshot, expires_at }
    }
}

/// A deleted snapshot that still has data is a baseline, and does not expire.
fn expiry(row: &Snapshot, default: u64) -> Option<u64> {
    row.retained_until(default).filter(|_| !row.has_data)
}

/// Up to `max` bases (0: all) after the token `after`, newest first. `StaleToken` for an invalid
/// token.
pub fn list(store: &Store, of: &BaseFilter, after: Option<&str>, max: usize) -> Result<Page<Base>> {
    let before = after.map_or(Ok(u64::MAX), sequence)?;
    let mut rows: Vec<Snapshot> = Vec::new();
    // One row more than the page holds shows that a next page exists.
    let take = |row: Snapshot| {
        if row.is_base() && row.sequence < before {
            rows.push(row);
        }
        max == 0 || rows.len() <= max
    };
    match of {
        BaseFilter::Volume(id) => of_volume(store, id, before, take)?,
        BaseFilter::Target(id) => of_target(store, id, take)?,
    }
    let has_more = max > 0 && rows.len() > max;
    if has_more {
        rows.truncate(max);
    }
    let next = rows.last().filter(|_| has_more).map(|last| last.sequence.to_string());
    Ok(Page { items: rows.into_iter().map(|row| Base::new(store, row)).collect(), next })
}

/// Bytes in the change record of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordSizes {
    pub allocated: u64,
    /// Since the previous base; `None` without one.
    pub changed: Option<u64>,
}

/// The sizes in a snapshot's change record; `None` if it cannot be read. Reads only the record's
/// index.
pub fn sizes(store: &Store, snapshot: &Snapshot) -> Option<RecordSizes> {
    let record = store.open_record(snapshot).ok()?;
    let bytes = |bitmap| (record.blocks(bitmap) * BLOCK_SIZE).min(snapshot.capacity_bytes);
    let has_base = matches!(snapshot.predecessor, Predecessor::Snapshot(_));
    let changed = has_base.then(|| bytes(Bitmap::Changed));
    Some(RecordSizes { allocated: bytes(Bitmap::Allocated), changed })
}

/// The token of a page is the sequence number of the last snapshot on the previous page.
fn sequence(token: &str) -> Result<u64> {
    let is_number = token.bytes().all(|byte| byte.is_ascii_digit());
    token.parse().ok().filter(|_| is_number).ok_or_else(|| Error::stale_token(token))
}

fn of_volume(
    store: &Store,
    id: &str,
    before: u64,
    mut take: impl FnMut(Snapshot) -> bool,
) -> Result<()> {
    let reading = store.catalog.read()?;
    let mut is_known = false;
    reading.visit_newest_first(id, before, |row| {
        is_known = true;
        take(row)
    })?;
    if is_known || reading.get::<Volume>(id)?.is_some() {
        return Ok(());
    }
    let snapshots = reading.find_snapshot_of(id, 0, |_| true)?;
    snapshots.map(drop).ok_or_else(|| Error::not_found(Kind::Volume, id))
}

fn of_target(store: &Store, id: &str, mut take: impl FnMut(Snapshot) -> bool) -> Result<()> {
    let reading = store.catalog.read()?;
    let mut current = Some(reading.live_snapshot(id)?);
    while let Some(row) = current.take() {
        if let Predecessor::Snapshot(id) = &row.predecessor {
            current = reading.get::<Snapshot>(id)?;
        }
        if !take(row) {
            break;
        }
    }
    Ok(())
}

/// Sets or clears the retention of a snapshot. Idempotent. `Precondition` if its change record was
/// dropped.
pub fn retain(store: &Store, id: &str, retention: Option<Retention>) -> Result<Base> {
    let row = base(store, id)?;
    let _lock = store.locks.try_lock([row.volume_id.as_str()])?;
    let row = base(store, id)?;
    let changed = match retention {
        Some(Retention::For(0)) => release(row.clone(), now().0),
        _ => Snapshot { retention, ..row.clone() },
    };
    if row == changed {
        return Ok(Base::new(store, row));
    }
    store.catalog.write(|tx| {
        // A change that frees space must succeed on a full pool.
        if retention != Some(Retention::For(0)) {
            tx.check_room()?;
        }
        tx.put(&changed)
    })?;
    Ok(Base::new(store, changed))
}

/// Ends a retention that may not have started by the clock: it may have been set back since.
fn release(mut row: Snapshot, now: u64) -> Snapshot {
    if let SnapshotPhase::Deleted { at } = &mut row.phase {
        *at = now.min(*at);
        row.baseline_until = row.baseline_until.map(|until| until.min(now));
    }
    Snapshot { retention: Some(Retention::For(0)), ..row }
}

fn base(store: &Store, id: &str) -> Result<Snapshot> {
    let row = store.catalog.read()?.get::<Snapshot>(id)?;
    match row {
        Some(row) if row.is_base() => Ok(row),
        Some(row) if row.is_forgotten() => Err(Error::Precondition(format!(
            "snapshot_id: {id:?} is no longer a base: its change record expired; take a full backup"
        ))),
        _ => Err(Error::not_found(Kind::Snapshot, id)),
    }
}

/// The number of deleted snapshots with a row, and when the first of them expires as a base.
pub fn retained(store: &Store) -> Result<(u64, Option<u64>)> {
    let reading = store.catalog.read()?;
    let (mut first, mut visited): (Option<u64>, usize) = (None, 0);
    reading.visit_by_expiry(|row| {
        visited += 1;
        let expiry = expiry(&row, store.retention())
            .filter(|_| matches!(row.phase, SnapshotPhase::Deleted { .. }));
        first = first.into_iter().chain(expiry).min();
        Ok(expiry.is_none() && visited < MAX_VISITED)
    })?;
    Ok((reading.retained_count()?, first))
}
