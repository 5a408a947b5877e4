//! The condition of volumes and of the pool (CSI VolumeCondition, VolumeHealth).

use std::fs::File;

use super::attachment;
use super::error::{Error, Result};
use super::filesystem::{self, Mount};
use super::growth;
use super::list::Page;
use super::loop_device::AttachedFiles;
use super::lost_pool;
use super::maintenance;
use super::model::{Access, Attachment, Condition, HealthProblem, Volume};
use super::store::{Store, length};
use super::volume;
use super::writeback;

/// The state of the pool and the kernel, read once for any number of volumes.
#[derive(Debug, Default)]
pub struct SystemState {
    /// Set if the pool's filesystem has shut down.
    lost_pool: Option<Condition>,
    /// Set if the pool is nearly full.
    shortage: Option<Condition>,
    attached: AttachedFiles,
    mounts: Vec<Mount>,
}

impl SystemState {
    /// Reads devices and mounts only if a volume is in use.
    pub fn read(store: &Store, is_any_in_use: bool) -> Result<Self> {
        if let Some(found) = lost_pool::defect(store)? {
            return Ok(Self { lost_pool: Some(found), ..Self::default() });
        }
        let mut state = Self { shortage: maintenance::shortage(store)?, ..Self::default() };
        if is_any_in_use {
            state.attached = AttachedFiles::read()?;
            state.mounts = filesystem::all_mounts()?;
        }
        Ok(state)
    }
}

/// A page of volumes, each with its condition.
pub fn list(store: &Store, after: Option<&str>, max: usize) -> Result<Page<(Volume, Condition)>> {
    let page = volume::list(store, after, max)?;
    let reading = store.catalog.read()?;
    let mut volumes = Vec::with_capacity(page.items.len());
    for volume in page.items {
        let attachment = reading.get::<Attachment>(&volume.id)?;
        volumes.push((volume, attachment));
    }
    let is_any_in_use = volumes.iter().any(|(_, attachment)| attachment.is_some());
    let state = SystemState::read(store, is_any_in_use);
    let mut items = Vec::with_capacity(volumes.len());
    for (volume, attachment) in volumes {
        // An error for one volume must not hide the others.
        let found = match &state {
            Ok(state) => defect(store, &volume, attachment.as_ref(), state),
            Err(error) => Ok(Some(unknown(error))),
        };
        let condition = found.map_or_else(|error| unknown(&error), or_healthy);
        items.push((volume, condition));
    }
    Ok(Page { items, next: page.next })
}

/// The condition of one volume.
pub fn condition(store: &Store, id: &str) -> Result<Condition> {
    let reading = store.catalog.read()?;
    let volume = reading.live_volume(id)?;
    let attachment = reading.get::<Attachment>(id)?;
    let state = SystemState::read(store, attachment.is_some())?;
    defect(store, &volume, attachment.as_ref(), &state).map(or_healthy)
}

/// The condition of the pool, which affects all of its volumes.
pub fn of_pool(store: &Store) -> Result<Condition> {
    let SystemState { lost_pool, shortage, .. } = SystemState::read(store, false)?;
    Ok(lost_pool.or(shortage).unwrap_or_else(|| Condition::healthy("the pool is healthy")))
}

pub fn or_healthy(found: Option<Condition>) -> Condition {
    found.unwrap_or_else(|| Condition::healthy("the volume is healthy"))
}

fn unknown(error: &Error) -> Condition {
    Condition::abnormal(HealthProblem::Unknown, error.to_string())
}

/// The problem of a volume, if any.
pub fn defect(
    store: &Store,
    volume: &Volume,
    attachment: Option<&Attachment>,
    state: &SystemState,
) -> Result<Option<Condition>> {
    let abnormal = |problem, message| Ok(Some(Condition::abnormal(problem, message)));
    if let Some(found) = &state.lost_pool {
        return Ok(Some(found.clone()));
    }
    let backing = match store.find_volume(volume) {
        Ok(backing) => backing,
        Err(Error::Damaged(message)) => {
            return abnormal(HealthProblem::BackingFileMissing, message);
        }
        Err(error) => return Err(error),
    };
    let bytes = length(&backing)?;
    if bytes < volume.capacity_bytes {
        let message = format!(
            "the backing file has {bytes} bytes, expected {}; restore the volume from a backup",
            volume.capacity_bytes
        );
        return abnormal(HealthProblem::BackingFileShort, message);
    }
    if let Some(lost) = writeback::lost(store, volume) {
        return abnormal(HealthProblem::WritesLost, writeback::describe(&volume.id, &lost));
    }
    if let Some(attachment) = attachment
        && let Some(found) = attachment_defect(volume, attachment, &backing, state)?
    {
        return Ok(Some(found));
    }
    Ok(growth::defect(volume).or_else(|| state.shortage.clone()))
}

fn attachment_defect(
    volume: &Volume,
    attachment: &Attachment,
    backing: &File,
    state: &SystemState,
) -> Result<Option<Condition>> {
    let abnormal = |problem, message| Ok(Some(Condition::abnormal(problem, message)));
    let devices = state.attached.of_file(backing)?;
    if let Err(foreign) = devices.refuse_foreign() {
        return abnormal(HealthProblem::ForeignLoopDevice, foreign.to_string());
    }
    let Some(device) = devices.ours.into_iter().next() else {
        let message = "the volume is staged but has no loop device; stage it again".to_owned();
        return abnormal(HealthProblem::LoopDeviceMissing, message);
    };
    let bytes = device.size()?;
    if bytes != volume.capacity_bytes {
        let message = format!(
            "{} has {bytes} bytes, the volume {}; expand the volume or stage it again",
            device.path().display(),
            volume.capacity_bytes
        );
        return abnormal(HealthProblem::LoopDeviceSize, message);
    }
    if matches!(attachment.capability.access, Access::Block) {
        return Ok(None);
    }
    attachment::defect(attachment, &device, &state.mounts)
}
