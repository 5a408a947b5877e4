//! Group snapshots: several volumes cut at one moment, all or none.

use std::collections::BTreeSet;

use super::catalog::Reading;
use super::cut;
use super::error::{Error, Kind, Result};
use super::ids::{self, GROUP_PREFIX};
use super::model::{Group, GroupSnapshot, Phase, Snapshot, SnapshotPhase};
use super::snapshot;
use super::store::{GROUP_NAME_LOCK, Store, now};
use super::writeback;

/// Cuts the volumes together, or returns what a call with this name has cut before.
pub fn create(store: &Store, name: &str, volume_ids: &[String]) -> Result<GroupSnapshot> {
    let wanted: BTreeSet<&str> = volume_ids.iter().map(String::as_str).collect();
    if wanted.is_empty() || wanted.len() != volume_ids.len() {
        return Err(Error::invalid(
            "source_volume_ids",
            "name at least one volume, and each only once",
        ));
    }
    let name_lock = format!("{GROUP_NAME_LOCK}{name}");
    let _lock = store.locks.take(wanted.iter().copied().chain([name_lock.as_str()]))?;
    let reading = store.catalog.read()?;
    if let Some(existing) = reading.by_name::<Group>(name)? {
        let members = members(&reading, &existing)?;
        if existing.phase == Phase::Ready {
            return same_or_taken(existing, members, &wanted);
        }
        cut::undo(store, &members, Some(&existing))?;
    }
    let group_id = ids::new_id(GROUP_PREFIX, name)?;
    let mut rows = Vec::with_capacity(volume_ids.len());
    for (number, id) in volume_ids.iter().enumerate() {
        let volume = reading.live_volume(id)?;
        writeback::check(store, &volume)?;
        let row = snapshot::new_row(&volume, &format!("{name}-{number}"), Some(&group_id))?;
        rows.push((volume, row));
    }
    drop(reading);
    let group = Group {
        id: group_id.clone(),
        name: name.to_owned(),
        phase: Phase::Creating,
        snapshot_ids: rows.iter().map(|(_, row)| row.id.clone()).collect(),
        volume_ids: volume_ids.to_vec(),
        created_at: now(),
    };
    cut::cut(store, rows, Some(group))?;
    get(store, &group_id, &[])
}

fn same_or_taken(
    group: Group,
    snapshots: Vec<Snapshot>,
    wanted: &BTreeSet<&str>,
) -> Result<GroupSnapshot> {
    let has: BTreeSet<&str> = group.volume_ids.iter().map(String::as_str).collect();
    if has == *wanted {
        return Ok(GroupSnapshot { group, snapshots });
    }
    Err(Error::AlreadyExists(format!(
        "name: a group snapshot named {:?} of other volumes exists; choose another name",
        group.name
    )))
}

/// The members of a group, in the order of its volumes.
pub fn members(reading: &Reading, group: &Group) -> Result<Vec<Snapshot>> {
    let mut members = Vec::with_capacity(group.snapshot_ids.len());
    for id in &group.snapshot_ids {
        members.extend(reading.get::<Snapshot>(id)?);
    }
    Ok(members)
}

/// A group that exists. `snapshot_ids`, unless empty, must be its members.
pub fn get(store: &Store, id: &str, snapshot_ids: &[String]) -> Result<GroupSnapshot> {
    let reading = store.catalog.read()?;
    let group = reading
        .get::<Group>(id)?
        .filter(|group| group.phase == Phase::Ready)
        .ok_or_else(|| Error::not_found(Kind::GroupSnapshot, id))?;
    check_members(&group, snapshot_ids)?;
    Ok(GroupSnapshot { snapshots: members(&reading, &group)?, group })
}

/// Deletes a group with all of its members. OK when it does not exist.
pub fn delete(store: &Store, id: &str, snapshot_ids: &[String]) -> Result<()> {
    let found = store.catalog.read()?.get::<Group>(id)?;
    let Some(group) = found else { return Ok(()) };
    check_members(&group, snapshot_ids)?;
    let _lock = store.locks.take(group.volume_ids.iter().map(String::as_str))?;
    let reading = store.catalog.read()?;
    let found = reading.get::<Group>(id)?.filter(|group| group.phase == Phase::Ready);
    let Some(group) = found else { return Ok(()) };
    let mut rows = Vec::new();
    for member in members(&reading, &group)? {
        if member.phase == SnapshotPhase::Ready {
            rows.push(snapshot::deleted(&reading, member)?);
        }
    }
    store.catalog.write(|tx| {
        rows.iter().try_for_each(|row| tx.put(row))?;
        tx.unname(&group)?;
        tx.remove::<Group>(id)
    })?;
    snapshot::finish_deletion(store, &rows)
}

fn check_members(group: &Group, snapshot_ids: &[String]) -> Result<()> {
    let given: BTreeSet<&String> = snapshot_ids.iter().collect();
    let has: BTreeSet<&String> = group.snapshot_ids.iter().collect();
    if snapshot_ids.is_empty() || given == has {
        return Ok(());
    }
    Err(Error::invalid(
        "snapshot_ids",
        format!("they are not the members of group snapshot {:?}", group.id),
    ))
}
