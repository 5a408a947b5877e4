//! Start-up after anything: what a process that died left half-way is undone or finished, so that
//! the catalog, the files and the kernel agree again. Everything is found through the catalog's
//! intents and by inode; nothing is ever swept.

use std::fs;

use tracing::{debug, error, info, warn};

use super::attachment;
use super::catalog::SnapshotFile;
use super::cut;
use super::error::{Context, Result};
use super::group;
use super::inline;
use super::model::{Attachment, Group, Phase, Snapshot, SnapshotPhase, Source, Volume};
use super::pool::Directory;
use super::snapshot;
use super::store::Store;
use super::volume;

/// Runs before anything else is served.
pub fn reconcile(store: &Store) -> Result<()> {
    thaw(store)?;
    undo_cuts(store)?;
    settle_volumes(store)?;
    settle_removals(store)?;
    report_lost_data(store)?;
    settle_attachments(store)?;
    inline::collect(store)?;
    forget_gone_volumes(store)
}

/// First of all: a pod may be waiting on a filesystem that was frozen for a cut.
fn thaw(store: &Store) -> Result<()> {
    let reading = store.catalog.read()?;
    let mut volume_ids: Vec<String> = reading
        .select(|row: &Snapshot| row.phase == SnapshotPhase::Cutting)?
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
        if let Err(error) = attachment::thaw_left_over(store, &id) {
            // One volume in trouble does not keep the others waiting.
            error!(volume = id, %error, "could not see to a filesystem that may be frozen");
        }
    }
    Ok(())
}

fn undo_cuts(store: &Store) -> Result<()> {
    let reading = store.catalog.read()?;
    let groups = reading.select(|group: &Group| group.phase == Phase::Creating)?;
    for group in groups {
        info!(group = group.id, "undoing an unfinished group snapshot");
        let undone = cut::undo(store, &group::members(&reading, &group)?, Some(&group));
        told(undone, &group.id);
    }
    let reading = store.catalog.read()?;
    let cutting = reading.select(|row: &Snapshot| row.phase == SnapshotPhase::Cutting)?;
    for row in &cutting {
        info!(snapshot = row.id, "undoing an unfinished snapshot");
        told(cut::undo(store, std::slice::from_ref(row), None), &row.id);
    }
    Ok(())
}

/// One object in trouble does not keep a driver from serving the others: the row that says what is
/// to be done stays, and the next start tries again.
fn told(result: Result<()>, object: &str) {
    if let Err(error) = result {
        error!(object, %error, "not settled yet; the next start tries again");
    }
}

fn settle_volumes(store: &Store) -> Result<()> {
    for mut volume in store.catalog.read()?.select(|_: &Volume| true)? {
        if volume.phase != Phase::Ready {
            info!(volume = volume.id, phase = ?volume.phase, "removing an unfinished volume");
            let id = volume.id.clone();
            told(volume::drop_volume(store, volume), &id);
            continue;
        }
        let settled = store
            .open_volume(&volume)
            .and_then(|file| volume::settle_growth(store, &mut volume, &file));
        if let Err(error) = settled {
            error!(volume = volume.id, %error, "a volume is damaged, or its growth not settled yet");
        }
    }
    Ok(())
}

/// Files of snapshots that nothing refers to go.
fn settle_removals(store: &Store) -> Result<()> {
    if store.catalog.read()?.is_sweep_due()? {
        let files = leftover_files(store)?;
        store.catalog.write(|tx| {
            files.iter().try_for_each(|file| tx.remove_later(file))?;
            tx.sweep_is_done()
        })?;
    }
    let files = store.catalog.read()?.removals()?;
    for file in files {
        debug!(?file, "removing a file that nothing refers to");
        let object = format!("{file:?}");
        told(store.remove(file), &object);
    }
    Ok(())
}

/// Files of snapshots that no row refers to, for a catalog that has no list of them.
fn leftover_files(store: &Store) -> Result<Vec<SnapshotFile>> {
    let mut files = Vec::new();
    let reading = store.catalog.read()?;
    reading.every_snapshot(|row| {
        if !row.has_data && store.snapshot_path(&row.id).exists() {
            files.push(SnapshotFile::data(&row));
        }
        Ok(())
    })?;
    let directory = Directory::Records.path(store.pool.root());
    let listing = || format!("listing {}", directory.display());
    for entry in fs::read_dir(&directory).context(listing)? {
        let name = entry.context(listing)?.file_name();
        let parts = name.to_str().and_then(|name| name.rsplit_once('.'));
        let Some((id, Ok(generation))) = parts.map(|(id, g)| (id, g.parse::<u64>())) else {
            warn!(?name, "an unknown file among the change records; `pool check` says more");
            continue;
        };
        let Some(row) = reading.get::<Snapshot>(id)? else {
            warn!(?name, "a change record of no known snapshot; `pool check` says more");
            continue;
        };
        if row.record_generation != generation || row.is_forgotten() {
            files.push(SnapshotFile::Record { id: row.id, generation });
        }
    }
    Ok(files)
}

/// The data of a snapshot that is needed and missing is reported.
fn report_lost_data(store: &Store) -> Result<()> {
    store.catalog.read()?.scan(None, |row: Snapshot| {
        if row.has_data && !store.snapshot_path(&row.id).exists() {
            error!(snapshot = row.id, "the data of a snapshot is gone");
        }
        Ok(true)
    })
}

fn settle_attachments(store: &Store) -> Result<()> {
    for attachment in store.catalog.read()?.select(|_: &Attachment| true)? {
        told(attachment::forget_if_gone(store, &attachment), &attachment.volume_id);
    }
    Ok(())
}

fn forget_gone_volumes(store: &Store) -> Result<()> {
    let ids = store.catalog.read()?.volumes_with_snapshots()?;
    ids.iter().for_each(|id| told(snapshot::collect(store, id), id));
    Ok(())
}

#[cfg(test)]
mod tests;
