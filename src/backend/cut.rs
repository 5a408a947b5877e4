//! The cut: from a volume, or several at one moment, to snapshots with change records.
//!
//! ```text
//! intent (catalog) → copies → durable, immutable → records → commit (catalog) → old baselines go
//! ```
//!
//! Until the commit nothing refers to the new files, and [`undo`] takes every trace of them back; so
//! does start-up after a crash. After it only what nobody needs is left to remove.

use std::fs::File;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tracing::{debug, error, warn};

use super::catalog::SnapshotFile;
use super::error::{Context, Error, Result};
use super::extents::Finding;
use super::fail_point::reach;
use super::model::{ChainBreak, Group, Phase, Predecessor, Snapshot, SnapshotPhase, Volume};
use super::point_in_time::{self, Copy, Durations, timed};
use super::pool::{self, Directory};
use super::store::{Store, now};
use super::tracker::{Bitmap, Header, RecordWriter};
use super::units::BlockRange;

/// A volume to be cut, with the row of the snapshot to be. The caller holds the volume's lock.
struct Member {
    volume: Volume,
    snapshot: Snapshot,
    source: File,
    target: File,
}

/// Where the time of a cut went, each step for all members together. What is not in it, the catalog's
/// transactions and opening files, does not grow with the volume.
#[derive(Debug, Default)]
struct Steps {
    copies: Durations,
    /// Data and directory made durable and immutable.
    seal: Duration,
    /// The extent maps (or contents) compared.
    compare: Duration,
    /// The records written and made durable.
    record: Duration,
    commit: Duration,
}

impl Steps {
    /// One line for each cut.
    fn log(&self, snapshots: &[Snapshot]) {
        let Self { copies, seal, compare, record, commit } = self;
        let us = |duration: &Duration| duration.as_micros() as u64;
        debug!(
            snapshot = snapshots.first().map(|first| first.id.as_str()),
            members = snapshots.len(),
            pre_clone_us = us(&copies.pre_clone),
            frozen_us = us(&copies.frozen),
            settle_us = us(&copies.settle),
            clone_us = us(&copies.clone),
            seal_us = us(seal),
            compare_us = us(compare),
            record_us = us(record),
            commit_us = us(commit),
            "cut"
        );
    }
}

/// Cuts one snapshot of each volume, at one moment. `rows` are in phase `Cutting` and not yet in
/// the catalog; with a `group` they are its members. On an error no trace is left.
pub fn cut(
    store: &Store,
    rows: Vec<(Volume, Snapshot)>,
    group: Option<Group>,
) -> Result<Vec<Snapshot>> {
    let snapshots: Vec<Snapshot> = rows.iter().map(|(_, snapshot)| snapshot.clone()).collect();
    store.catalog.write(|tx| {
        snapshots.iter().try_for_each(|snapshot| tx.put(snapshot))?;
        match &group {
            Some(group) => tx.put(group).and_then(|()| tx.name(group)),
            None => snapshots.iter().try_for_each(|snapshot| tx.name(snapshot)),
        }
    })?;
    let mut steps = Steps::default();
    let cut = make(store, rows, &mut steps)
        .and_then(|members| timed(&mut steps.commit, || commit(store, members, group.as_ref())));
    match cut {
        Ok((snapshots, unneeded)) => {
            steps.log(&snapshots);
            let unfrozen = snapshots.iter().filter(|snapshot| snapshot.crash_consistent).count();
            store.crash_consistent.fetch_add(unfrozen as u64, Ordering::Relaxed);
            remove_data(store, &unneeded);
            Ok(snapshots)
        }
        Err(cause) => {
            if let Err(error) = undo(store, &snapshots, group.as_ref()) {
                // The rows stay as an intent: the next call or start-up undoes them.
                error!(%error, "a failed cut could not be undone yet");
            }
            Err(cause)
        }
    }
}

/// Everything up to the commit.
fn make(store: &Store, rows: Vec<(Volume, Snapshot)>, steps: &mut Steps) -> Result<Vec<Member>> {
    let mut members = Vec::with_capacity(rows.len());
    for (volume, snapshot) in rows {
        let source = store.open_volume(&volume)?;
        let target = pool::new_file(&store.snapshot_path(&snapshot.id))?;
        store.pool.adopt(&target)?;
        target
            .set_len(volume.capacity_bytes)
            .context(|| format!("sizing snapshot {:?}", snapshot.id))?;
        reach("cut.sized")?;
        members.push(Member { volume, snapshot, source, target });
    }
    let copies: Vec<Copy<'_>> = members
        .iter()
        .map(|member| Copy {
            volume: &member.volume,
            source: &member.source,
            target: &member.target,
        })
        .collect();
    let copied = point_in_time::copy_all(store, &copies)?;
    steps.copies = copied.took;
    timed(&mut steps.seal, || {
        members.iter().try_for_each(seal)?;
        pool::sync_directory(&Directory::Snapshots.path(store.pool.root()))
    })?;
    for (member, crash_consistent) in members.iter_mut().zip(copied.crash_consistent) {
        member.snapshot.created_at = copied.moment;
        member.snapshot.crash_consistent = crash_consistent;
        member.snapshot.predecessor = record(store, member, steps)?;
    }
    timed(&mut steps.record, || pool::sync_directory(&Directory::Records.path(store.pool.root())))?;
    Ok(members)
}

/// Makes a copy durable and immutable.
fn seal(member: &Member) -> Result<()> {
    let flushing = || format!("flushing snapshot {:?}", member.snapshot.id);
    // Twice: an fsync in flight while the pool's filesystem shuts down can report success with
    // nothing durable; the next one then fails.
    member.target.sync_all().context(flushing)?;
    reach("cut.flushed")?;
    pool::set_immutable(&member.target, true)?;
    member.target.sync_all().context(flushing)?;
    reach("cut.sealed")
}

/// Writes the change record of a sealed copy, and says what it counts from.
fn record(store: &Store, member: &Member, steps: &mut Steps) -> Result<Predecessor> {
    let Member { volume, snapshot, target, .. } = member;
    let baseline = baseline(store, volume)?;
    let predecessor = match &baseline {
        Ok((baseline, _)) => Predecessor::Snapshot(baseline.id.clone()),
        Err(reason) => Predecessor::None(*reason),
    };
    let baseline = baseline.ok();
    let header = Header::new(
        &snapshot.id,
        &volume.id,
        baseline.as_ref().map(|(baseline, _)| baseline.id.as_str()),
        snapshot.sequence,
        snapshot.capacity_bytes,
    );
    let path = store.record_path(&snapshot.id, snapshot.record_generation);
    let mut writer = RecordWriter::new(pool::new_file(&path)?, &header)?;
    let old = baseline.as_ref().map(|(baseline, file)| (file, baseline.capacity_bytes));
    let mut report = |finding: Finding| {
        let range = BlockRange::covering(finding.start..finding.end);
        if finding.allocated {
            writer.set(Bitmap::Allocated, range)?;
        }
        if finding.changed && baseline.is_some() {
            writer.set(Bitmap::Changed, range)?;
        }
        Ok(())
    };
    timed(&mut steps.compare, || {
        let new = (target, snapshot.capacity_bytes);
        store.pool.compare(old, new, volume.change_precision, &mut report)
    })?;
    timed(&mut steps.record, || writer.finish())?;
    Ok(predecessor)
}

/// What the next cut of a volume compares with, or why there is nothing.
fn baseline(store: &Store, volume: &Volume) -> Result<Result<(Snapshot, File), ChainBreak>> {
    if !volume.change_tracking {
        return Ok(Err(ChainBreak::TrackingOff));
    }
    let Some(id) = &volume.baseline else { return Ok(Err(volume.chain_break)) };
    let Some(snapshot) = store.catalog.read()?.get::<Snapshot>(id)? else {
        error!(volume = volume.id, snapshot = id, "the baseline is not in the catalog");
        return Ok(Err(ChainBreak::BaselineLost));
    };
    match store.open_snapshot(&snapshot) {
        Ok(file) => Ok(Ok((snapshot, file))),
        Err(Error::Damaged(what)) => {
            error!(volume = volume.id, snapshot = id, what, "the chain of changes is broken here");
            Ok(Err(ChainBreak::BaselineLost))
        }
        Err(error) => Err(error),
    }
}

/// Makes the snapshots exist, and the next cut compare with them. Returns them with the former
/// baselines whose data nobody needs any more.
fn commit(
    store: &Store,
    members: Vec<Member>,
    group: Option<&Group>,
) -> Result<(Vec<Snapshot>, Vec<Snapshot>)> {
    let reading = store.catalog.read()?;
    let mut snapshots = Vec::with_capacity(members.len());
    let mut volumes = Vec::with_capacity(members.len());
    let mut unneeded = Vec::new();
    for Member { mut volume, mut snapshot, .. } in members {
        if let Some(former) = &volume.baseline
            && let Some(mut former) = reading.get::<Snapshot>(former)?
            && matches!(
                former.phase,
                SnapshotPhase::Deleted { .. } | SnapshotPhase::Forgotten { .. }
            )
        {
            former.has_data = false;
            former.baseline_until = Some(now().0);
            unneeded.push(former);
        }
        snapshot.phase = SnapshotPhase::Ready;
        snapshot.has_data = true;
        volume.next_sequence = snapshot.sequence + 1;
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

/// Removes data that the catalog no longer refers to. What cannot be removed now is removed at the
/// next start.
pub fn remove_data(store: &Store, snapshots: &[Snapshot]) {
    for snapshot in snapshots {
        if let Err(error) = store.remove(SnapshotFile::data(snapshot)) {
            warn!(snapshot = snapshot.id, %error, "data that nobody needs stays until the next start");
        }
    }
}

/// Takes back a cut that was not committed: files first, since the rows say which they are.
pub fn undo(store: &Store, snapshots: &[Snapshot], group: Option<&Group>) -> Result<()> {
    let reading = store.catalog.read()?;
    let mut undone = Vec::new();
    for snapshot in snapshots {
        let row = reading.get::<Snapshot>(&snapshot.id)?;
        undone.extend(row.filter(|row| row.phase == SnapshotPhase::Cutting));
    }
    // A commit that failed may yet have reached the disk. Once this one has, it cannot have; and if
    // this one fails, nothing is removed.
    store.catalog.write(|tx| undone.iter().try_for_each(|row| tx.put(row)))?;
    for row in &undone {
        pool::remove(&store.snapshot_path(&row.id))?;
        pool::remove(&store.record_path(&row.id, row.record_generation))?;
    }
    let group = match group {
        Some(group) => reading.get::<Group>(&group.id)?.filter(|row| row.phase == Phase::Creating),
        None => None,
    };
    store.catalog.write(|tx| {
        for row in &undone {
            tx.unname(row)?;
            tx.remove::<Snapshot>(&row.id)?;
        }
        let Some(group) = &group else { return Ok(()) };
        tx.unname(group)?;
        tx.remove::<Group>(&group.id)
    })
}
