//! Recovery at start: undoes or finishes unfinished operations, so that catalog, files and kernel
//! agree. All work is derived from intents in the catalog and from inodes; unknown files are never
//! removed.

use tracing::{debug, error, info};

use super::attachment;
use super::error::Result;
use super::group;
use super::growth;
use super::inline;
use super::model::{Attachment, Group, Phase, Snapshot, SnapshotPhase, Source, Volume};
use super::snapshot;
use super::store::Store;
use super::take_snapshot;
use super::volume;

/// Runs before the driver serves requests.
pub fn reconcile(store: &Store) -> Result<()> {
    thaw(store)?;
    undo_snapshots(store)?;
    reconcile_volumes(store)?;
    reconcile_removals(store)?;
    log_missing_data(store)?;
    reconcile_attachments(store)?;
    inline::collect(store)?;
    forget_deleted_volumes(store)
}

/// Runs first: a pod may be blocked on a frozen filesystem.
fn thaw(store: &Store) -> Result<()> {
    let reading = store.catalog.read()?;
    let mut volume_ids: Vec<String> = reading
        .select(|row: &Snapshot| row.phase == SnapshotPhase::Taking)?
        .into_iter()
        .map(|row| row.volume_id)
        .collect();
    for volume in reading.select(|volume: &Volume| volume.phase == Phase::Creating)? {
        if let Some(Source::Volume(id)) = volume.source {
            volume_ids.push(id);
        }
    }
    drop(reading);
    for id in volume_ids {
        if let Err(error) = attachment::thaw_leftover(store, &id) {
            // An error for one volume must not affect the others.
            error!(volume = id, %error, "failed to thaw a filesystem; it may still be frozen");
        }
    }
    Ok(())
}

fn undo_snapshots(store: &Store) -> Result<()> {
    let reading = store.catalog.read()?;
    let groups = reading.select(|group: &Group| group.phase == Phase::Creating)?;
    for group in groups {
        info!(group = group.id, "undoing an unfinished group snapshot");
        let undone = take_snapshot::undo(store, &group::members(&reading, &group)?, Some(&group));
        log_error(undone, &group.id);
    }
    let reading = store.catalog.read()?;
    let unfinished = reading.select(|row: &Snapshot| row.phase == SnapshotPhase::Taking)?;
    for row in &unfinished {
        info!(snapshot = row.id, "undoing an unfinished snapshot");
        log_error(take_snapshot::undo(store, std::slice::from_ref(row), None), &row.id);
    }
    Ok(())
}

/// Logs an error instead of returning it, so that one object does not prevent the start. Its row
/// remains, and the next start tries again.
fn log_error(result: Result<()>, object: &str) {
    if let Err(error) = result {
        error!(object, %error, "recovery failed; the next start tries again");
    }
}

fn reconcile_volumes(store: &Store) -> Result<()> {
    for mut volume in store.catalog.read()?.select(|_: &Volume| true)? {
        if volume.phase != Phase::Ready {
            info!(volume = volume.id, phase = ?volume.phase, "removing an unfinished volume");
            let id = volume.id.clone();
            log_error(volume::drop_volume(store, volume), &id);
            continue;
        }
        log_error(growth::discard(store, &volume.id), &volume.id);
        let result = store
            .open_volume(&volume)
            .and_then(|file| volume::complete_growth(store, &mut volume, &file));
        if let Err(error) = result {
            error!(volume = volume.id, %error, "a volume is damaged, or its expansion is not complete");
        }
    }
    Ok(())
}

/// Removes unreferenced files of snapshots.
fn reconcile_removals(store: &Store) -> Result<()> {
    let files = store.catalog.read()?.removals()?;
    for file in files {
        debug!(?file, "removing a file that nothing refers to");
        let object = format!("{file:?}");
        log_error(store.remove(file), &object);
    }
    Ok(())
}

/// Logs snapshots whose data is missing.
fn log_missing_data(store: &Store) -> Result<()> {
    store.catalog.read()?.scan(None, |row: Snapshot| {
        if row.has_data && !store.pool.snapshot_path(&row.id).exists() {
            error!(snapshot = row.id, "the data of a snapshot is missing");
        }
        Ok(true)
    })
}

fn reconcile_attachments(store: &Store) -> Result<()> {
    for attachment in store.catalog.read()?.select(|_: &Attachment| true)? {
        log_error(attachment::forget_if_gone(store, &attachment), &attachment.volume_id);
    }
    Ok(())
}

fn forget_deleted_volumes(store: &Store) -> Result<()> {
    let ids = store.catalog.read()?.volumes_with_snapshots()?;
    ids.iter().for_each(|id| log_error(snapshot::collect(store, id), id));
    Ok(())
}

#[cfg(test)]
pub mod tests;
