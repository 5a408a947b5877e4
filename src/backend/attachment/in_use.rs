//! Volumes that are in use: how full they are and what is wrong with them, growing them, and what a start finds.

use std::path::Path;
use std::time::Duration;

use super::super::deferral;
use super::super::error::{Error, Result};
use super::super::filesystem::{self, Mount};
use super::super::format;
use super::super::health::{self, Surroundings};
use super::super::loop_device::LoopDevice;
use super::super::model::{
    Access, Attachment, Condition, HealthProblem, Mounted, Publication, Stats, Usage, Volume,
};
use super::super::store::Store;
use super::super::volume;
use super::super::writeback;
use super::{device_of, is_of, shown_at};

/// A volume in use, seen from one of its places.
struct InUse {
    volume: Volume,
    attachment: Attachment,
    device: LoopDevice,
}

/// The volume that is in use at `path`, staged or published.
fn in_use_at(store: &Store, volume_id: &str, path: &Path) -> Result<InUse> {
    let reading = store.catalog.read()?;
    let volume = reading.live_volume(volume_id)?;
    let missing = || missing(volume_id, path);
    let attachment = reading.get::<Attachment>(volume_id)?.ok_or_else(missing)?;
    if attachment.staging_path != path && !attachment.published.contains_key(path) {
        return Err(missing());
    }
    let device = store.device_of(&volume)?.ok_or_else(missing)?;
    Ok(InUse { volume, attachment, device })
}

fn missing(volume_id: &str, path: &Path) -> Error {
    Error::Missing(format!("volume_path: {volume_id:?} is not in use at {}", path.display()))
}

impl InUse {
    /// Where the filesystem is mounted on this host: at `path` or, where that is the staging path of a volume that is
    /// mounted at its targets, at any of these; `None` where it has none.
    fn mounted_at<'a>(&'a self, path: &'a Path) -> Result<Option<&'a Path>> {
        let Self { volume, attachment, device } = self;
        if attachment.mounted == Mounted::AtTargets && attachment.staging_path == path {
            for target in attachment.published.keys() {
                if shown_at(target, device)? {
                    return Ok(Some(target));
                }
            }
            return Ok(None);
        }
        if shown_at(path, device)? { Ok(Some(path)) } else { Err(missing(&volume.id, path)) }
    }
}

/// Whether the volume that is in use at `path` is left to a container runtime.
pub fn is_deferred(store: &Store, volume_id: &str, path: &Path) -> Result<bool> {
    let attachment = store.catalog.read()?.get::<Attachment>(volume_id)?;
    Ok(attachment.is_some_and(|attachment| {
        let target = attachment.deferred_at().map(|(target, _)| target);
        target.is_some_and(|target| target == path || attachment.staging_path == path)
    }))
}

/// How a volume is. Never waits for another operation on it.
pub fn stats(store: &Store, volume_id: &str, path: &Path) -> Result<Stats> {
    if is_deferred(store, volume_id, path)? {
        let InUse { volume, attachment, .. } = in_use_at(store, volume_id, path)?;
        let Some((target, _)) = attachment.deferred_at() else {
            return Err(missing(volume_id, path));
        };
        return deferral::stats(store, target, || {
            let surroundings = Surroundings::read(store, true)?;
            health::defect(store, &volume, Some(&attachment), &surroundings)
        });
    }
    let condition = health::condition(store, volume_id)?;
    readable(usage(store, volume_id, path), condition)
}

/// A volume whose numbers cannot be read because it is broken still tells its condition, which is
/// what the caller needs to know then.
pub fn readable(usage: Result<Usage>, condition: Condition) -> Result<Stats> {
    let usage = match usage {
        Err(Error::Io { .. } | Error::Damaged(_) | Error::Failed(_)) if condition.is_abnormal() => {
            None
        }
        usage => Some(usage?),
    };
    Ok(Stats { usage, condition })
}

/// How full a volume is. Never waits for another operation on it.
pub fn usage(store: &Store, volume_id: &str, path: &Path) -> Result<Usage> {
    let used = in_use_at(store, volume_id, path)?;
    if let Access::Block = used.attachment.capability.access {
        return Ok(Usage::Block { total_bytes: used.device.size()? });
    }
    match used.mounted_at(path)? {
        Some(place) => filesystem::usage(place),
        None => Err(missing(volume_id, path)),
    }
}

/// Grows device and filesystem to the volume's capacity, which is returned in bytes.
pub fn expand(store: &Store, volume_id: &str, path: &Path) -> Result<u64> {
    let _lock = store.locks.take([volume_id])?;
    let used = in_use_at(store, volume_id, path)?;
    let capability = &used.attachment.capability;
    let is_deferred = used.attachment.deferred_at().is_some();
    let place = match capability.access {
        Access::Mount { .. } if !is_deferred => used.mounted_at(path)?,
        Access::Mount { .. } | Access::Block => None,
    };
    let mut volume = used.volume.clone();
    volume::settle_growth(store, &mut volume, &store.open_volume(&used.volume)?)?;
    if used.device.size()? < volume.capacity_bytes {
        used.device.grow()?;
    }
    let left_read_only =
        || is_deferred && used.attachment.published.values().all(Publication::is_read_only);
    if capability.access == Access::Block || capability.is_read_only() || left_read_only() {
        return Ok(volume.capacity_bytes);
    }
    match (used.attachment.deferred_at(), place) {
        (Some((target, _)), _) => deferral::grow(store, &mut volume, target, &used.device)?,
        (None, Some(place)) => format::grow(store, &mut volume, &used.device, place)?,
        (None, None) => format::grow_unseen(store, &mut volume, &used.device)?,
    }
    Ok(volume.capacity_bytes)
}

/// What is wrong with a volume in use whose device is as it should be, if anything.
pub fn defect(
    attachment: &Attachment,
    device: &LoopDevice,
    mounts: &[Mount],
) -> Result<Option<Condition>> {
    let staging = &attachment.staging_path;
    let not_mounted = |message| Ok(Some(Condition::abnormal(HealthProblem::NotMounted, message)));
    if attachment.deferred_at().is_some() {
        return Ok(deferral::defect(device, mounts));
    }
    let shown_at = |path| {
        let mount = filesystem::mount_among(mounts, path)?;
        Ok::<_, Error>(mount.is_some_and(|mount| is_of(mount, device)))
    };
    if let Mounted::AtStaging = attachment.mounted {
        if shown_at(staging)? {
            return Ok(None);
        }
        let staging = staging.display();
        return not_mounted(format!(
            "the volume is staged but not mounted at {staging}; stage it again"
        ));
    }
    for target in attachment.published.keys() {
        if !shown_at(target)? {
            let target = target.display();
            return not_mounted(format!(
                "the volume is published but not mounted at {target}; restart the pod"
            ));
        }
    }
    Ok(None)
}

/// Thaws the filesystem of a volume that a dead process may have left frozen.
pub fn thaw_left_over(store: &Store, volume_id: &str) -> Result<()> {
    let Some(device) = device_of(store, volume_id)? else { return Ok(()) };
    let Some(mounted) = filesystem::open_mounted(&device)? else { return Ok(()) };
    if filesystem::thaw_left_over(&mounted)? {
        tracing::warn!(volume = volume_id, "thawed a filesystem that a crash had left frozen");
    }
    Ok(())
}

/// Forgets an attachment of which the kernel knows nothing any more, as after a reboot. First a runtime has to: the
/// device that it was told is somebody else's next.
pub fn forget_if_gone(store: &Store, attachment: &Attachment) -> Result<()> {
    let id = &attachment.volume_id;
    if device_of(store, id)?.is_some() {
        return Ok(());
    }
    if let Some((target, _)) = attachment.deferred_at() {
        match deferral::take_back(store, target, None, Duration::ZERO) {
            // Files were written past the volume: the call that unpublishes says so.
            Err(Error::Precondition(reason)) => {
                tracing::warn!(volume = id, reason, "files are left at a target")
            }
            taken => taken?,
        }
    }
    tracing::info!(volume = id, "no longer attached; forgetting where it was");
    writeback::unstaged(store, id)
}
