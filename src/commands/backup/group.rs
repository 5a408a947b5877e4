//! Backups of a group snapshot: one per member, as a set. The set is complete when all of them
//! exist.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use super::manifest::{Group, Manifest, Subject};
use super::repository::Inventory;
use super::restoring::{Done, Restorer};
use crate::client::connection::Connection;
use crate::client::names;
use grpc::proto::csi::v1 as csi;

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
        group_snapshot: names::name_of(&first.group_snapshot_id).to_owned(),
        members,
    };
    Ok(snapshots.first().map(group))
}

/// The newest backup of each member of a set, oldest first.
pub fn backups<'i>(inventory: &'i Inventory, group: &Group) -> Vec<&'i Manifest> {
    let mut found: Vec<&Manifest> = Vec::new();
    for backup in inventory.backups.iter().rev() {
        let Subject { group: own, snapshot_id, .. } = &backup.subject;
        let is_known = found.iter().any(|one| one.subject.snapshot_id == *snapshot_id);
        if own.as_ref() == Some(group) && !is_known && inventory.is_sound(backup) {
            found.push(backup);
        }
    }
    found.reverse();
    found
}

pub fn is_complete(inventory: &Inventory, group: &Group) -> bool {
    backups(inventory, group).len() == group.members as usize
}

/// The backups of the set with this name or id of a group snapshot, one per member, oldest first.
///
/// # Errors
/// There is no such set, or several, or it is incomplete.
pub fn find<'i>(inventory: &'i Inventory, reference: &str) -> Result<Vec<&'i Manifest>> {
    let sets = inventory.backups.iter().filter_map(|backup| backup.subject.group.as_ref());
    let mut named =
        sets.filter(|set| set.group_snapshot_id == reference || set.group_snapshot == reference);
    let set =
        named.next().with_context(|| format!("no set of the group snapshot {reference:?}"))?;
    ensure!(
        named.all(|other| other == set),
        "several sets are named {reference:?}, use the id of the group snapshot"
    );
    let found = backups(inventory, set);
    ensure!(
        is_complete(inventory, set),
        "the set of {} is incomplete: {} of {} backups; repeat `backup create --group`",
        set.group_snapshot_id,
        found.len(),
        set.members
    );
    Ok(found)
}

/// Restores all members of a set to files of a directory, named after their volumes.
pub async fn restore(from: &Restorer<'_>, reference: &str, directory: &Path) -> Result<Vec<Done>> {
    let members = find(from.inventory, reference)?;
    std::fs::create_dir_all(directory).with_context(|| format!("make {}", directory.display()))?;
    let mut targets = Vec::with_capacity(members.len());
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
        // A name in a hostile repository must not choose what is overwritten.
        let is_link = path.symlink_metadata().is_ok_and(|meta| meta.is_symlink());
        ensure!(!is_link, "{} is a symbolic link; remove it", path.display());
        from.check_file(&path)?;
        targets.push((backup, path));
    }
    let mut done = Vec::with_capacity(targets.len());
    for (backup, path) in targets {
        done.push(from.restore(backup, &path).await?);
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backup::manifest::samples;

    fn inventory(numbers: &[usize]) -> Inventory {
        let member = |number: &usize| {
            let mut backup = samples::backup(*number);
            backup.subject.group = Some(samples::group());
            backup
        };
        Inventory { backups: numbers.iter().map(member).collect(), ..Inventory::default() }
    }

    #[test]
    fn a_set_is_complete_when_each_member_has_a_backup() {
        for (numbers, complete) in [(&[0][..], false), (&[0, 0], false), (&[0, 1, 1], true)] {
            let is_complete = is_complete(&inventory(numbers), &samples::group());
            assert_eq!(is_complete, complete, "{numbers:?}");
        }
        let whole = inventory(&[0, 1]);
        for reference in ["g", "g-id"] {
            assert_eq!(find(&whole, reference).unwrap().len(), 2);
        }
        let error = find(&inventory(&[0, 0]), "g").unwrap_err().to_string();
        assert!(error.contains("incomplete: 1 of 2"), "{error}");
        assert!(find(&whole, "other").is_err());
        let mut several = whole;
        several.backups[1].subject.group =
            Some(Group { group_snapshot_id: "other".to_owned(), ..samples::group() });
        let error = find(&several, "g").unwrap_err().to_string();
        assert!(error.contains("several sets"), "{error}");
    }
}
