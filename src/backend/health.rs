//! What is wrong with volumes, if anything (CSI VolumeCondition).

use std::fs::File;

use super::attachment;
use super::error::{Error, Result};
use super::filesystem::{self, Mount};
use super::list::Page;
use super::loop_device::AttachedFiles;
use super::lost_pool;
use super::model::{Access, Attachment, Condition, Volume};
use super::store::{Store, length};
use super::upkeep;
use super::volume;
use super::writeback;

/// What the pool and the kernel show at one moment: read once, however many volumes are judged by it.
#[derive(Debug, Default)]
pub struct Surroundings {
    /// Why no volume of the pool can be used.
    lost_pool: Option<String>,
    /// What volumes have to fear of a lack of room.
    shortage: Option<String>,
    attached: AttachedFiles,
    mounts: Vec<Mount>,
}

impl Surroundings {
    /// Devices and mounts only where a volume is in use: the others have none.
    pub fn read(store: &Store, is_any_in_use: bool) -> Result<Self> {
        if let Some(message) = lost_pool::defect(store)? {
            return Ok(Self { lost_pool: Some(message), ..Self::default() });
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
            Err(error) => Ok(Some(error.to_string())),
        };
        let condition = found.map_or_else(|error| abnormal(error.to_string()), of_defect);
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

fn of_defect(found: Option<String>) -> Condition {
    let healthy = || Condition { abnormal: false, message: "the volume is healthy".to_owned() };
    found.map_or_else(healthy, abnormal)
}

fn abnormal(message: String) -> Condition {
    Condition { abnormal: true, message }
}

/// What is wrong with a volume, if anything.
pub fn defect(
    store: &Store,
    volume: &Volume,
    attachment: Option<&Attachment>,
    surroundings: &Surroundings,
) -> Result<Option<String>> {
    if let Some(message) = &surroundings.lost_pool {
        return Ok(Some(message.clone()));
    }
    let backing = match store.open_volume(volume) {
        Ok(backing) => backing,
        Err(Error::Damaged(message)) => return Ok(Some(message)),
        Err(error) => return Err(error),
    };
    let bytes = length(&backing)?;
    if bytes < volume.capacity_bytes {
        return Ok(Some(format!(
            "the backing file has {bytes} bytes instead of {}; restore the volume from a backup",
            volume.capacity_bytes
        )));
    }
    if let Some(lost) = writeback::lost(store, volume) {
        return Ok(Some(writeback::describe(&volume.id, &lost)));
    }
    if let Some(attachment) = attachment
        && let Some(message) = attachment_defect(volume, attachment, &backing, surroundings)?
    {
        return Ok(Some(message));
    }
    Ok(surroundings.shortage.clone())
}

fn attachment_defect(
    volume: &Volume,
    attachment: &Attachment,
    backing: &File,
    surroundings: &Surroundings,
) -> Result<Option<String>> {
    let devices = surroundings.attached.of_file(backing)?;
    if let Err(foreign) = devices.refuse_foreign() {
        return Ok(Some(foreign.to_string()));
    }
    let Some(device) = devices.ours.into_iter().next() else {
        return Ok(Some("the volume is staged but has no loop device; stage it again".to_owned()));
    };
    let bytes = device.size()?;
    if bytes != volume.capacity_bytes {
        return Ok(Some(format!(
            "{} has {bytes} bytes, the volume {}; expand or stage it again",
            device.path().display(),
            volume.capacity_bytes
        )));
    }
    if matches!(attachment.capability.access, Access::Block) {
        return Ok(None);
    }
    attachment::defect(attachment, &device, &surroundings.mounts)
}
