//! What is wrong with volumes and with the pool, if anything (CSI VolumeCondition, VolumeHealth).

use std::fs::File;

use super::attachment;
use super::error::{Error, Result};
use super::filesystem::{self, Mount};
use super::list::Page;
use super::loop_device::AttachedFiles;
use super::lost_pool;
use super::model::{Access, Attachment, Condition, HealthProblem, Volume};
use super::store::{Store, length};
use super::upkeep;
use super::volume;
use super::writeback;

/// What the pool and the kernel show at one moment: read once, however many volumes are judged by it.
#[derive(Debug, Default)]
pub struct Surroundings {
    /// Why no volume of the pool can be used.
    lost_pool: Option<Condition>,
    /// What volumes have to fear of a lack of room.
    shortage: Option<Condition>,
    attached: AttachedFiles,
    mounts: Vec<Mount>,
}

impl Surroundings {
    /// Devices and mounts only where a volume is in use: the others have none.
    pub fn read(store: &Store, is_any_in_use: bool) -> Result<Self> {
        if let Some(found) = lost_pool::defect(store)? {
            return Ok(Self { lost_pool: Some(found), ..Self::default() });
        }
        let mut surroundings = Self { shortage: upkeep::shortage(store)?, ..Self::default() };
        if is_any_in_use {
            surroundings.attached = AttachedFiles::read()?;
            surroundings.mounts = filesystem::all_mounts()?;
        }
        Ok(surroundings)
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
    let surroundings = Surroundings::read(store, is_any_in_use);
    let mut items = Vec::with_capacity(volumes.len());
    for (volume, attachment) in volumes {
        // A volume that cannot be judged does not hide the others.
        let found = match &surroundings {
            Ok(surroundings) => defect(store, &volume, attachment.as_ref(), surroundings),
            Err(error) => Ok(Some(unknown(error))),
        };
        let condition = found.map_or_else(|error| unknown(&error), of_defect);
        items.push((volume, condition));
    }
    Ok(Page { items, next: page.next })
}

/// The condition of one volume.
pub fn condition(store: &Store, id: &str) -> Result<Condition> {
    let reading = store.catalog.read()?;
    let volume = reading.live_volume(id)?;
    let attachment = reading.get::<Attachment>(id)?;
    let surroundings = Surroundings::read(store, attachment.is_some())?;
    defect(store, &volume, attachment.as_ref(), &surroundings).map(of_defect)
}

/// The condition of the pool: what is wrong with all of its volumes.
pub fn of_pool(store: &Store) -> Result<Condition> {
    let Surroundings { lost_pool, shortage, .. } = Surroundings::read(store, false)?;
    Ok(lost_pool.or(shortage).unwrap_or_else(|| Condition::healthy("the pool is healthy")))
}

pub fn of_defect(found: Option<Condition>) -> Condition {
    found.unwrap_or_else(|| Condition::healthy("the volume is healthy"))
}

fn unknown(error: &Error) -> Condition {
    Condition::abnormal(HealthProblem::Unknown, error.to_string())
}

/// What is wrong with a volume, if anything.
pub fn defect(
    store: &Store,
    volume: &Volume,
    attachment: Option<&Attachment>,
    surroundings: &Surroundings,
) -> Result<Option<Condition>> {
    let abnormal = |problem, message| Ok(Some(Condition::abnormal(problem, message)));
    if let Some(found) = &surroundings.lost_pool {
        return Ok(Some(found.clone()));
    }
    let backing = match store.open_volume(volume) {
        Ok(backing) => backing,
        Err(Error::Damaged(message)) => {
            return abnormal(HealthProblem::BackingFileMissing, message);
        }
        Err(error) => return Err(error),
    };
    let bytes = length(&backing)?;
    if bytes < volume.capacity_bytes {
        let message = format!(
            "the backing file has {bytes} bytes instead of {}; restore the volume from a backup",
            volume.capacity_bytes
        );
        return abnormal(HealthProblem::BackingFileShort, message);
    }
    if let Some(lost) = writeback::lost(store, volume) {
        return abnormal(HealthProblem::WritesLost, writeback::describe(&volume.id, &lost));
    }
    if let Some(attachment) = attachment
        && let Some(found) = attachment_defect(volume, attachment, &backing, surroundings)?
    {
        return Ok(Some(found));
    }
    Ok(surroundings.shortage.clone())
}

fn attachment_defect(
    volume: &Volume,
    attachment: &Attachment,
    backing: &File,
    surroundings: &Surroundings,
) -> Result<Option<Condition>> {
    let abnormal = |problem, message| Ok(Some(Condition::abnormal(problem, message)));
    let devices = surroundings.attached.of_file(backing)?;
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
            "{} has {bytes} bytes, the volume {}; expand or stage it again",
            device.path().display(),
            volume.capacity_bytes
        );
        return abnormal(HealthProblem::LoopDeviceSize, message);
    }
    if matches!(attachment.capability.access, Access::Block) {
        return Ok(None);
    }
    attachment::defect(attachment, &device, &surroundings.mounts)
}
