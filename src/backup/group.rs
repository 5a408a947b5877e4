//! Backups of a group snapshot: one for each member, as a set. The set is complete when all of them exist.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use super::manifest::{Group, Manifest};
use super::{Done, Restorer};
use crate::client::connection::Connection;
use crate::client::names;
use crate::proto::csi::v1 as csi;

/// The snapshots of a group snapshot, by the group's name or id.
pub async fn snapshots(connection: &Connection, reference: &str) -> Result<Vec<csi::Snapshot>> {
    let mut found = Vec::new();
    names::each_snapshot(connection, "", |snapshot| {
        let id = &snapshot.group_snapshot_id;
        if !id.is_empty() && (id == reference || names::name_of(id) == reference) {
            found.push(snapshot);
        }
    })
    .await?;
    let Some(first) = found.first() else {
        bail!("no group snapshot {reference:?}; `snapshot list --output json` shows the groups")
    };
    if let Some(other) = found.iter().find(|one| one.group_snapshot_id != first.group_snapshot_id) {
        bail!(
            "several group snapshots are named {reference:?}, use an id: {}, {}",
            first.group_snapshot_id,
            other.group_snapshot_id
        );
    }
    for snapshot in &found {
        ensure!(
            snapshot.ready_to_use,
            "snapshot {} is not ready; repeat later",
            snapshot.snapshot_id
        );
    }
    Ok(found)
}

/// The set of these snapshots.
pub fn set(snapshots: &[csi::Snapshot]) -> Result<Option<Group>> {
    let members = u32::try_from(snapshots.len())?;
    let group = |first: &csi::Snapshot| Group {
        group_snapshot_id: first.group_snapshot_id.clone(),
        members,
    };
    Ok(snapshots.first().map(group))
}

/// Restores all members of a set to files of a directory, named after their volumes.
pub async fn restore(
    from: &Restorer<'_>,
    reference: &str,
    directory: &Path,
    resume: bool,
) -> Result<Vec<Done>> {
    let in_set = |backup: &&Manifest| {
        backup.subject.group.as_ref().is_some_and(|group| {
            let id = &group.group_snapshot_id;
            id == reference || names::name_of(id) == reference
        })
    };
    // Of a member that was backed up twice, the newer one.
    let mut members: Vec<&Manifest> = Vec::new();
    for backup in from.inventory.backups.iter().rev().filter(in_set) {
        if !members.iter().any(|one| one.subject.snapshot_id == backup.subject.snapshot_id) {
            members.push(backup);
        }
    }
    let group = members.first().and_then(|first| first.subject.group.as_ref());
    let group = group.with_context(|| format!("no set of the group snapshot {reference:?}"))?;
    ensure!(
        members.iter().all(|one| one.subject.group.as_ref() == Some(group)),
        "several sets are named {reference:?}, use the id of the group snapshot"
    );
    ensure!(
        members.len() == group.members as usize,
        "the set of {} is incomplete: {} of {} backups; repeat `backup create --group`",
        group.group_snapshot_id,
        members.len(),
        group.members
    );
    std::fs::create_dir_all(directory).with_context(|| format!("make {}", directory.display()))?;
    let mut done = Vec::with_capacity(members.len());
    for backup in members {
        // The id of a volume is the driver's text, and must not lead out of the directory.
        let volume = &backup.subject.volume;
        let is_plain = !volume.is_empty() && !volume.starts_with('.') && !volume.contains('/');
        ensure!(
            is_plain,
            "the volume name {volume:?} is not a file name; restore {} alone",
            backup.id
        );
        let path = directory.join(format!("{volume}.img"));
        done.push(from.restore(backup, &path, resume).await?);
    }
    Ok(done)
}
