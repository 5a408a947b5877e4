//! Group snapshots: snapshots of several volumes at the same time, all or none.

use std::collections::BTreeSet;

use super::catalog::ReadTx;
use super::error::{Error, Kind, Result};
use super::ids::{self, GROUP_PREFIX};
use super::model::{Group, GroupSnapshot, Phase, Snapshot, SnapshotPhase};
use super::snapshot;
use super::store::{GROUP_NAME_LOCK, Store, now};
use super::take_snapshot;
use super::writeback;

/// Takes a group snapshot, or returns the existing one with this name.
pub fn create(store: &Store, name: &str, volume_ids: &[String]) -> Result<GroupSnapshot> {
    let requested: BTreeSet<&str> = volume_ids.iter().map(String::as_str).collect();
    if requested.is_empty() || requested.len() != volume_ids.len() {
        return Err(Error::invalid(
            "source_volume_ids",
            "must name at least one volume, and each volume only once",
        ));
    }
    let name_lock = format!("{GROUP_NAME_LOCK}{name}");
    let _lock = store.locks.try_lock(requested.iter().copied().chain([name_lock.as_str()]))?;
    let reading = store.catalog.read()?;
    if let Some(existing) = reading.by_name::<Group>(name)? {
        let members = members(&reading, &existing)?;
        if existing.phase == Phase::Ready {
            return or_exists(existing, members, &requested);
        }
        take_snapshot::undo(store, &members, Some(&existing))?;
    }
    let pool = store.catalog.pool()?;
    let group_id = ids::new_id(pool, GROUP_PREFIX, name)?;
    let mut rows = Vec::with_capacity(volume_ids.len());
    for (number, id) in volume_ids.iter().enumerate() {
        let volume = reading.live_volume(id)?;
        writeback::check(store, &volume)?;
        let row = snapshot::new_row(pool, &volume, &format!("{name}-{number}"), Some(&group_id))?;
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
    take_snapshot::take(store, rows, Some(group))?;
    get(store, &group_id, &[])
}

fn or_exists(
    group: Group,
    snapshots: Vec<Snapshot>,
    requested: &BTreeSet<&str>,
) -> Result<GroupSnapshot> {
    let actual: BTreeSet<&str> = group.volume_ids.iter().map(String::as_str).collect();
    if actual == *requested {
        return Ok(GroupSnapshot { group, snapshots });
    }
    Err(Error::AlreadyExists(format!(
        "name: a group snapshot named {:?} of other volumes exists; choose another name",
        group.name
    )))
}

/// The members of a group, in the order of its volumes.
pub fn members(reading: &ReadTx, group: &Group) -> Result<Vec<Snapshot>> {
    let mut members = Vec::with_capacity(group.snapshot_ids.len());
    for id in &group.snapshot_ids {
        members.extend(reading.get::<Snapshot>(id)?);
    }
    Ok(members)
}

/// A ready group. `snapshot_ids`, unless empty, must be its members.
pub fn get(store: &Store, id: &str, snapshot_ids: &[String]) -> Result<GroupSnapshot> {
    let reading = store.catalog.read()?;
    let group = reading
        .get::<Group>(id)?
        .filter(|group| group.phase == Phase::Ready)
        .ok_or_else(|| Error::not_found(Kind::GroupSnapshot, id))?;
    check_members(&group, snapshot_ids)?;
    Ok(GroupSnapshot { snapshots: members(&reading, &group)?, group })
}

/// Deletes a group with its members. Succeeds if it does not exist.
pub fn delete(store: &Store, id: &str, snapshot_ids: &[String]) -> Result<()> {
    let found = store.catalog.read()?.get::<Group>(id)?;
    let Some(group) = found else { return Ok(()) };
    check_members(&group, snapshot_ids)?;
    let _lock = store.locks.try_lock(group.volume_ids.iter().map(String::as_str))?;
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
        tx.release_name(&group)?;
        tx.remove::<Group>(id)
    })?;
    snapshot::finish_deletion(store, &rows)
}

fn check_members(group: &Group, snapshot_ids: &[String]) -> Result<()> {
    let given: BTreeSet<&String> = snapshot_ids.iter().collect();
    let actual: BTreeSet<&String> = group.snapshot_ids.iter().collect();
    if snapshot_ids.is_empty() || given == actual {
        return Ok(());
    }
    Err(Error::invalid(
        "snapshot_ids",
        format!("differs from the members of group snapshot {:?}", group.id),
    ))
}
