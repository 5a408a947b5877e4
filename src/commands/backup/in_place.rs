//! A restore in place (`--from`): the device holds a backup and what changed since, so only what
//! differs is written.
//!
//! The proof: the device is opened exclusively, and the driver reports that it is the device of the
//! backup's volume. Only then a snapshot of the volume is taken, which has what the device holds. So
//! the driver's delta from the backup's snapshot to the new one has every block in which the device
//! differs from the backup. An older snapshot would prove nothing about later writes.
//!
//! A restore that is killed has written to the device alone. The next one takes a snapshot of its
//! own, and the delta to that has these writes: the same command completes the restore.

use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::time::Instant;

use super::document::nonce;
use super::listing::{BaseUnusable, Listing, Query};
use super::manifest::Manifest;
use super::merge::Changes;
use super::restore::{Restore, Restored};
use super::restoring::{Done, Restorer};
use super::target::Target;
use crate::client::connection::{Connection, refused};
use crate::client::stop::Stop;
use crate::client::{names, node};
use common::fail_point::hit;
use grpc::proto::csi::v1 as csi;

/// Time limit for the removal of the snapshot.
const CLEAN_UP: Duration = Duration::from_secs(60);

/// Names of snapshots, before the number of the restore's run.
const PREFIX: &str = "csi-loopback-restore-";
const NONCE_DIGITS: usize = 16;

/// What to do where nothing is proven.
const INSTEAD: &str = "restore the whole volume, without --from";

/// Restores `backup` to the device, which holds `held` and what changed since.
pub async fn restore(
    from: &Restorer<'_>,
    connection: &Connection,
    backup: &Manifest,
    held: &Manifest,
    to: &Path,
) -> Result<Done> {
    let target = open(from.stop, connection, backup, held, to).await?;
    let restored = write(from, connection, backup, held, target).await;
    let bounded = connection.until(Instant::now() + CLEAN_UP);
    let removed = remove_snapshots(&bounded, &held.subject.volume_id).await;
    match (restored, removed) {
        (Ok(done), removed) => removed.map(|()| Done::new(backup, to, done)),
        (Err(error), Ok(())) => Err(error),
        (Err(error), Err(left)) => Err(error.context(format!("{left:#}"))),
    }
}

/// Opens the device, and checks that the driver proves what it holds.
async fn open(
    stop: &Stop,
    connection: &Connection,
    backup: &Manifest,
    held: &Manifest,
    to: &Path,
) -> Result<Target> {
    let (shown, id) = (to.display(), &held.subject.volume_id);
    let is_device = to.metadata().is_ok_and(|meta| meta.file_type().is_block_device());
    ensure!(is_device, "--from: --to {shown} is no block device; {INSTEAD}");
    let target = Target::open(to, backup.subject.capacity_bytes)?;
    let volume = stop.wait(node::details(connection, id)).await;
    let volume = volume.with_context(|| {
        format!("--from {}: nothing proves what {shown} holds; {INSTEAD}", held.id)
    })?;
    let volume = volume.with_context(|| {
        format!("--from: the driver does not report the devices of its volumes; {INSTEAD}")
    })?;
    ensure!(
        target.is_device(Path::new(&volume.device)),
        "--from {}: --to {shown} is not the device of its volume {id}, which {}; name that device, \
         or {INSTEAD}",
        held.id,
        match volume.device.as_str() {
            "" => "has none: publish it".to_owned(),
            device => format!("is {device}"),
        }
    );
    let is_shared = volume.publications.len() > 1;
    let is_deferred = volume.publications.iter().any(|one| one.deferred);
    ensure!(
        !is_shared && !is_deferred,
        "--from: the volume of --to {shown} is published at {}; unpublish all other paths",
        volume.publications.iter().map(|one| &*one.target_path).collect::<Vec<_>>().join(", ")
    );
    Ok(target)
}

async fn write(
    from: &Restorer<'_>,
    connection: &Connection,
    backup: &Manifest,
    held: &Manifest,
    target: Target,
) -> Result<Restored> {
    let (chain, held_chain) = (from.inventory.chain(backup)?, from.inventory.chain(held)?);
    let Restorer { repository, stop, .. } = from;
    let snapshot = take_snapshot(connection, stop, &held.subject.volume_id).await?;
    hit("restore.snapshot_taken")?;
    let base = held.subject.base_id().to_owned();
    let query = Query::Delta { base, target: snapshot };
    let opened = stop.wait(Listing::open(connection, query, 0)).await;
    let opened = match opened {
        Ok(mut listing) => stop.wait(listing.next()).await.map(|first| (listing, first)),
        Err(error) => Err(error),
    };
    let (listing, first) = opened.map_err(|error| match error.is::<BaseUnusable>() {
        true => error.context(format!(
            "--from {}: the driver does not know what changed since; {INSTEAD}",
            held.id
        )),
        false => error,
    })?;
    let listed = listing.capacity();
    ensure!(
        listed.is_none_or(|bytes| bytes == target.size),
        "--to has {} bytes, and the snapshot of its volume {listed:?}; {INSTEAD}",
        target.size
    );
    let changes = Changes { first: first.unwrap_or_default(), listing: Some(Box::new(listing)) };
    let restore = Restore::in_place(repository, &chain, target, &held_chain, changes)?;
    restore.run(stop).await.with_context(|| {
        format!("restore {} in place, which is incomplete; the same command continues", backup.id)
    })
}

/// Takes a snapshot under a new name, so that the driver cannot return an older one.
async fn take_snapshot(connection: &Connection, stop: &Stop, volume_id: &str) -> Result<String> {
    // The device is open exclusively, so no other restore uses one.
    stop.wait(remove_snapshots(connection, volume_id)).await?;
    let request = csi::CreateSnapshotRequest {
        source_volume_id: volume_id.to_owned(),
        name: format!("{PREFIX}{}", nonce()?),
        secrets: connection.secrets(),
        ..csi::CreateSnapshotRequest::default()
    };
    let mut controller = connection.controller();
    let taken = stop.step(async { controller.create_snapshot(request).await.map_err(refused) });
    let taken = taken.await.context("take a snapshot of what --to holds")?;
    let snapshot = taken.into_inner().snapshot.unwrap_or_default();
    ensure!(snapshot.ready_to_use, "snapshot {} is not ready; {INSTEAD}", snapshot.snapshot_id);
    Ok(snapshot.snapshot_id)
}

/// Removes the snapshots of restores of this volume, also of killed ones.
async fn remove_snapshots(connection: &Connection, volume_id: &str) -> Result<()> {
    let is_own = |id: &str| {
        let nonce = names::name_of(id).strip_prefix(PREFIX);
        nonce.is_some_and(|nonce| {
            nonce.len() == NONCE_DIGITS && nonce.bytes().all(|byte| byte.is_ascii_hexdigit())
        })
    };
    let mut found = Vec::new();
    names::each_snapshot(connection, volume_id, |snapshot| found.push(snapshot.snapshot_id))
        .await?;
    for snapshot_id in found.into_iter().filter(|id| is_own(id)) {
        let doing = format!("delete snapshot {snapshot_id}, which the restore took");
        let secrets = connection.secrets();
        let request = csi::DeleteSnapshotRequest { snapshot_id, secrets };
        connection.controller().delete_snapshot(request).await.map_err(refused).context(doing)?;
    }
    Ok(())
}
