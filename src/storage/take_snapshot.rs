//! Takes snapshots with change records, of one volume or of several at the same time.
//!
//! ```text
//! intent (catalog) → copy → flush, make immutable → record → commit (catalog)
//!   → remove old baselines → begin clones for the next snapshots
//! ```
//!
//! Before the commit nothing refers to the new files, and [`undo`] removes them; start-up does the
//! same after a crash. After the commit only unneeded data remains to be removed.

use std::fs::File;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tracing::{debug, error, warn};

use super::catalog::SnapshotFile;
use super::error::{Context, Error, Result};
use super::extents::Finding;
use super::fail_point::reach;
use super::maintenance;
use super::model::{ChainBreak, Group, Phase, Predecessor, Snapshot, SnapshotPhase, Volume};
use super::point_in_time::{self, CopyJob, Durations, timed};
use super::pool::{self, Directory};
use super::snapshot_time;
use super::store::{Store, now};
use super::tracker::{Bitmap, Header, RecordWriter};
use super::units::BlockRange;

/// A volume and the row of its new snapshot. The caller holds the volume's lock.
struct Member {
    volume: Volume,
    snapshot: Snapshot,
    source: File,
    target: File,
}

/// Durations of the steps, each for all members. The rest (catalog transactions, opening files)
/// does not grow with the volume.
#[derive(Debug, Default)]
struct StepTimes {
    copies: Durations,
    /// Flushing data and directory, and making the data immutable.
    seal: Duration,
    /// Comparing extent maps or contents.
    compare: Duration,
    /// Writing and flushing the records.
    record: Duration,
    commit: Duration,
}

impl StepTimes {
    /// Logs one line for each call.
    fn log(&self, snapshots: &[Snapshot]) {
        let Self { copies, seal, compare, record, commit } = self;
        let us = |duration: &Duration| duration.as_micros() as u64;
        debug!(
            snapshot = snapshots.first().map(|first| first.id.as_str()),
            members = snapshots.len(),
            pre_clone_us = us(&copies.pre_clone),
            frozen_us = us(&copies.frozen),
            flush_us = us(&copies.flush),
            clone_us = us(&copies.clone),
            seal_us = us(seal),
            compare_us = us(compare),
            record_us = us(record),
            commit_us = us(commit),
            "took a snapshot"
        );
    }
}

/// Takes one snapshot of each volume, all at the same time. `rows` are in phase `Taking` and not
/// yet in the catalog; with a `group` they are its members. On an error everything is undone.
pub fn take(
    store: &Store,
    rows: Vec<(Volume, Snapshot)>,
    group: Option<Group>,
) -> Result<Vec<Snapshot>> {
    let snapshots: Vec<Snapshot> = rows.iter().map(|(_, snapshot)| snapshot.clone()).collect();
    store.catalog.write(|tx| {
        snapshots.iter().try_for_each(|snapshot| tx.put(snapshot))?;
        match &group {
            Some(group) => tx.put(group).and_then(|()| tx.claim_name(group)),
            None => snapshots.iter().try_for_each(|snapshot| tx.claim_name(snapshot)),
        }
    })?;
    let mut times = StepTimes::default();
    let taken = copy_and_record(store, rows, &mut times).and_then(|members| {
        let committed = timed(&mut times.commit, || commit(store, &members, group.as_ref()))?;
        Ok((members, committed))
    });
    match taken {
        Ok((members, (snapshots, unneeded))) => {
            times.log(&snapshots);
            let unfrozen = snapshots.iter().filter(|snapshot| snapshot.crash_consistent).count();
            store.crash_consistent.fetch_add(unfrozen as u64, Ordering::Relaxed);
            remove_data(store, &unneeded);
            members.into_iter().for_each(|member| clone_ahead(store, member));
            Ok(snapshots)
        }
        Err(cause) => {
            if let Err(error) = undo(store, &snapshots, group.as_ref()) {
                // The rows remain as an intent: the next call or start undoes them.
                error!(%error, "failed to undo an unfinished snapshot; the next call or start tries again");
            }
            Err(cause)
        }
    }
}

/// Performs all steps before the commit, and adds the duration of each to `times`.
fn copy_and_record(
    store: &Store,
    rows: Vec<(Volume, Snapshot)>,
    times: &mut StepTimes,
) -> Result<Vec<Member>> {
    let mut members = Vec::with_capacity(rows.len());
    for (volume, snapshot) in rows {
        let source = store.open_volume(&volume)?;
        let target = target(store, &volume, &snapshot)?;
        store.pool.prepare_target(&target, volume.capacity_bytes)?;
        members.push(Member { volume, snapshot, source, target });
    }
    let copies: Vec<CopyJob<'_>> = members
        .iter()
        .map(|member| CopyJob {
            volume: &member.volume,
            source: &member.source,
            target: &member.target,
        })
        .collect();
    let copied = point_in_time::copy_all(store, &copies)?;
    times.copies = copied.durations;
    timed(&mut times.seal, || {
        members.iter().try_for_each(seal)?;
        pool::sync_directory(&Directory::Snapshots.path(store.pool.root()))
    })?;
    let volumes = members.iter().map(|member| &member.volume);
    let taken_at = snapshot_time::ascending(volumes, copied.taken_at);
    for (member, crash_consistent) in members.iter_mut().zip(copied.crash_consistent) {
        member.snapshot.created_at = taken_at;
        member.snapshot.crash_consistent = crash_consistent;
        member.snapshot.predecessor = record(store, member, times)?;
    }
    timed(&mut times.record, || pool::sync_directory(&Directory::Records.path(store.pool.root())))?;
    Ok(members)
}

/// The file of a new snapshot: the clone made ahead, or else an empty file.
fn target(store: &Store, volume: &Volume, snapshot: &Snapshot) -> Result<File> {
    let path = store.pool.snapshot_path(&snapshot.id);
    let ahead = match &volume.baseline {
        Some(baseline) => {
            store.clones_ahead.claim(&store.pool.clone_ahead_path(baseline), &path)?
        }
        None => None,
    };
    ahead.map_or_else(|| pool::new_file(&path), Ok)
}

/// Begins to clone a new baseline for the next snapshot.
fn clone_ahead(store: &Store, Member { volume, snapshot, target, .. }: Member) {
    if volume.change_tracking && store.pool.clones_atomically() {
        store.clones_ahead.begin(target, store.pool.clone_ahead_path(&snapshot.id));
    }
}

/// Makes a copy durable and immutable.
fn seal(member: &Member) -> Result<()> {
    let flushing = || format!("flushing snapshot {:?}", member.snapshot.id);
    // Twice: an fsync during a shutdown of the pool's filesystem can report success without
    // durability; the next one fails.
    member.target.sync_all().context(flushing)?;
    reach("snapshot.flushed")?;
    pool::set_immutable(&member.target, true)?;
    member.target.sync_all().context(flushing)?;
    reach("snapshot.sealed")
}

/// Writes the change record of a copy and returns its predecessor.
fn record(store: &Store, member: &Member, times: &mut StepTimes) -> Result<Predecessor> {
    let Member { volume, snapshot, target, .. } = member;
    let (predecessor, baseline) = baseline(store, volume)?;
    let header = Header::new(
        &snapshot.id,
        &volume.id,
        baseline.as_ref().map(|(baseline, _)| baseline.id.as_str()),
        snapshot.sequence,
        snapshot.capacity_bytes,
    );
    let path = store.pool.record_path(&snapshot.id, snapshot.record_generation);
    let mut writer = RecordWriter::new(pool::new_file(&path)?, &header)?;
    reach("snapshot.comparing")?;
    let old = baseline.as_ref().map(|(baseline, file)| (file, baseline.capacity_bytes));
    let hidden = baseline.iter().find(|(row, _)| row.phase != SnapshotPhase::Ready);
    let hidden = hidden.map(|(row, _)| row.id.as_str());
    let mut report = |finding: Finding| {
        if let Some(id) = hidden {
            maintenance::check_need(store, id)?;
        }
        let range = BlockRange::covering(finding.start..finding.end);
        if finding.allocated {
            writer.set(Bitmap::Allocated, range)?;
        }
        if finding.changed && baseline.is_some() {
            writer.set(Bitmap::Changed, range)?;
        }
        Ok(())
    };
    timed(&mut times.compare, || {
        let new = (target, snapshot.capacity_bytes);
        store.pool.compare(old, new, volume.change_precision, &mut report)
    })?;
    // The extent map of a truncated baseline looks like zeros: changes would be missing.
    if let Some((row, file)) = &baseline {
        pool::check_length(file, format_args!("the data of {:?}", row.id), row.capacity_bytes)?;
    }
    timed(&mut times.record, || writer.finish())?;
    Ok(predecessor)
}

/// The predecessor of a new change record, and the baseline with which the copy is compared.
fn baseline(store: &Store, volume: &Volume) -> Result<(Predecessor, Option<(Snapshot, File)>)> {
    let none = |reason| Ok((Predecessor::None(reason), None));
    if !volume.change_tracking {
        return none(ChainBreak::TrackingOff);
    }
    let Some(id) = &volume.baseline else { return none(volume.chain_break) };
    let Some(snapshot) = store.catalog.read()?.get::<Snapshot>(id)? else {
        error!(volume = volume.id, snapshot = id, "the baseline is not in the catalog");
        return none(ChainBreak::BaselineLost);
    };
    match store.open_snapshot(&snapshot) {
        Ok(file) => Ok((Predecessor::Snapshot(snapshot.id.clone()), Some((snapshot, file)))),
        Err(Error::Damaged(what)) => {
            error!(
                volume = volume.id,
                snapshot = id,
                what,
                "the baseline is missing; the chain of change records starts again"
            );
            none(ChainBreak::BaselineLost)
        }
        Err(error) => Err(error),
    }
}

/// Publishes the snapshots and makes them the next baselines. Returns them and the previous
/// baselines whose data is no longer needed.
fn commit(
    store: &Store,
    members: &[Member],
    group: Option<&Group>,
) -> Result<(Vec<Snapshot>, Vec<Snapshot>)> {
    let reading = store.catalog.read()?;
    let mut snapshots = Vec::with_capacity(members.len());
    let mut volumes = Vec::with_capacity(members.len());
    let mut unneeded = Vec::new();
    for Member { volume, snapshot, .. } in members {
        let (mut volume, mut snapshot) = (volume.clone(), snapshot.clone());
        if let Some(previous) = &volume.baseline
            && let Some(mut previous) = reading.get::<Snapshot>(previous)?
            && matches!(
                previous.phase,
                SnapshotPhase::Deleted { .. } | SnapshotPhase::Forgotten { .. }
            )
        {
            previous.has_data = false;
            previous.baseline_until = Some(now().0.max(snapshot.created_at.0));
            unneeded.push(previous);
        }
        snapshot.phase = SnapshotPhase::Ready;
        snapshot.has_data = true;
        volume.next_sequence = snapshot.sequence + 1;
        volume.newest_snapshot_at = Some(snapshot.created_at);
        volume.baseline = volume.change_tracking.then(|| snapshot.id.clone());
        volume.chain_break =
            if volume.change_tracking { ChainBreak::First } else { ChainBreak::TrackingOff };
        snapshots.push(snapshot);
        volumes.push(volume);
    }
    store.catalog.write(|tx| {
        snapshots.iter().chain(&unneeded).try_for_each(|snapshot| tx.put(snapshot))?;
        volumes.iter().try_for_each(|volume| tx.put(volume))?;
        let Some(group) = group else { return Ok(()) };
        let created_at = snapshots.first().map_or(group.created_at, |first| first.created_at);
        tx.put(&Group { phase: Phase::Ready, created_at, ..group.clone() })
    })?;
    Ok((snapshots, unneeded))
}

/// Removes data that the catalog no longer refers to. If that fails, the next start removes it.
pub fn remove_data(store: &Store, snapshots: &[Snapshot]) {
    for snapshot in snapshots {
        if let Err(error) = store.remove(SnapshotFile::data(snapshot)) {
            warn!(snapshot = snapshot.id, %error, "failed to remove unneeded snapshot data; the next start tries again");
        }
    }
}

/// Undoes snapshots that were not committed. Files are removed before the rows, which name them.
pub fn undo(store: &Store, snapshots: &[Snapshot], group: Option<&Group>) -> Result<()> {
    let reading = store.catalog.read()?;
    let mut undone = Vec::new();
    for snapshot in snapshots {
        let row = reading.get::<Snapshot>(&snapshot.id)?;
        undone.extend(row.filter(|row| row.phase == SnapshotPhase::Taking));
    }
    // A failed commit may still have reached the disk. This transaction overwrites it. If this one
    // fails, nothing is removed.
    store.catalog.write(|tx| undone.iter().try_for_each(|row| tx.put(row)))?;
    for row in &undone {
        pool::remove(&store.pool.snapshot_path(&row.id))?;
        pool::remove(&store.pool.record_path(&row.id, row.record_generation))?;
    }
    let group = match group {
        Some(group) => reading.get::<Group>(&group.id)?.filter(|row| row.phase == Phase::Creating),
        None => None,
    };
    store.catalog.write(|tx| {
        for row in &undone {
            tx.release_name(row)?;
            tx.remove::<Snapshot>(&row.id)?;
        }
        let Some(group) = &group else { return Ok(()) };
        tx.release_name(group)?;
        tx.remove::<Group>(&group.id)
    })
}
