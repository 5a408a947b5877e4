//! Volumes in use: usage, condition, growth, and recovery at start.

use std::path::Path;
use std::time::Duration;

use super::super::deferral;
use super::super::error::{Error, Result};
use super::super::filesystem::{self, Mount};
use super::super::growth;
use super::super::health::{self, SystemState};
use super::super::loop_device::LoopDevice;
use super::super::model::{
    Access, Attachment, Condition, HealthProblem, Mounted, Publication, Stats, Usage, Volume,
};
use super::super::store::Store;
use super::super::volume;
use super::super::writeback;
use super::{device_of, is_mounted_at, is_of, thaw_unpublished};

/// A volume that is staged or published, with its device.
struct InUse {
    volume: Volume,
    attachment: Attachment,
    device: LoopDevice,
}

/// The volume that is staged or published at `path`.
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
    /// The path at which this host has the filesystem mounted: `path`, or any target if `path` is
    /// the staging path of a volume that is mounted at its targets. `None` if such a volume has no
    /// mount.
    fn mounted_at<'a>(&'a self, path: &'a Path) -> Result<Option<&'a Path>> {
        let Self { volume, attachment, device } = self;
        if attachment.mounted == Mounted::AtTargets && attachment.staging_path == path {
            for target in attachment.published.keys() {
                if is_mounted_at(target, device)? {
                    return Ok(Some(target));
                }
            }
            return Ok(None);
        }
        if is_mounted_at(path, device)? { Ok(Some(path)) } else { Err(missing(&volume.id, path)) }
    }
}

/// Whether a container runtime mounts the volume that is in use at `path`.
pub fn is_deferred(store: &Store, volume_id: &str, path: &Path) -> Result<bool> {
    let attachment = store.catalog.read()?.get::<Attachment>(volume_id)?;
    Ok(attachment.is_some_and(|attachment| {
        let target = attachment.deferred_at().map(|(target, _)| target);
        target.is_some_and(|target| target == path || attachment.staging_path == path)
    }))
}

/// The usage and condition of a volume. Never waits for another operation on it.
pub fn stats(store: &Store, volume_id: &str, path: &Path) -> Result<Stats> {
    if is_deferred(store, volume_id, path)? {
        let InUse { volume, attachment, .. } = in_use_at(store, volume_id, path)?;
        let Some((target, _)) = attachment.deferred_at() else {
            return Err(missing(volume_id, path));
        };
        return deferral::stats(store, target, || {
            let surroundings = SystemState::read(store, true)?;
            health::defect(store, &volume, Some(&attachment), &surroundings)
        });
    }
    let condition = health::condition(store, volume_id)?;
    stats_or_condition(usage(store, volume_id, path), condition)
}

/// If the usage cannot be read because the volume is damaged, returns the condition without a
/// usage.
pub fn stats_or_condition(usage: Result<Usage>, condition: Condition) -> Result<Stats> {
    let usage = match usage {
        Err(Error::Io { .. } | Error::Damaged(_) | Error::Failed(_)) if condition.is_abnormal() => {
            None
        }
        usage => Some(usage?),
    };
    Ok(Stats { usage, condition })
}

/// The usage of a volume. Never waits for another operation on it.
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

/// Grows device and filesystem to the capacity of the volume. Returns the capacity in bytes.
pub fn expand(store: &Store, volume_id: &str, path: &Path) -> Result<u64> {
    let _lock = store.locks.try_lock([volume_id])?;
    let used = in_use_at(store, volume_id, path)?;
    if used.attachment.published.is_empty() {
        thaw_unpublished(volume_id, &used.device, [used.attachment.staging_path.as_path()]);
    }
    let capability = &used.attachment.capability;
    let is_deferred = used.attachment.deferred_at().is_some();
    let place = match capability.access {
        Access::Mount { .. } if !is_deferred => used.mounted_at(path)?,
        Access::Mount { .. } | Access::Block => None,
    };
    let mut volume = used.volume.clone();
    volume::complete_growth(store, &mut volume, &store.open_volume(&used.volume)?)?;
    if used.device.size()? < volume.capacity_bytes {
        used.device.grow()?;
    }
    let deferred_read_only =
        || is_deferred && used.attachment.published.values().all(Publication::is_read_only);
    if capability.access == Access::Block || capability.is_read_only() || deferred_read_only() {
        return Ok(volume.capacity_bytes);
    }
    match (used.attachment.deferred_at(), place) {
        (Some((target, _)), _) => deferral::grow(store, &mut volume, target, &used.device)?,
        (None, _) => growth::on_node(store, &mut volume, used.device)?,
    }
    Ok(volume.capacity_bytes)
}

/// Checks the mounts of a volume whose device is correct. `None` if nothing is wrong.
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
    let is_mounted_at = |path| {
        let mount = filesystem::mount_among(mounts, path)?;
        Ok::<_, Error>(mount.is_some_and(|mount| is_of(mount, device)))
    };
    if let Mounted::AtStaging = attachment.mounted {
        if is_mounted_at(staging)? {
            return Ok(None);
        }
        let staging = staging.display();
        return not_mounted(format!(
            "the volume is staged but not mounted at {staging}; stage it again"
        ));
    }
    for target in attachment.published.keys() {
        if !is_mounted_at(target)? {
            let target = target.display();
            return not_mounted(format!(
                "the volume is published but not mounted at {target}; restart the pod"
            ));
        }
    }
    Ok(None)
}

/// Thaws the filesystem of a volume if a killed process left it frozen.
pub fn thaw_leftover(store: &Store, volume_id: &str) -> Result<()> {
    let Some(device) = device_of(store, volume_id)? else { return Ok(()) };
    let Some(mounted) = filesystem::open_mounted(&device)? else { return Ok(()) };
    if filesystem::thaw_leftover(&mounted)? {
        tracing::warn!(
            volume = volume_id,
            "thawed a filesystem that was frozen when the driver was killed"
        );
    }
    Ok(())
}

/// Removes an attachment whose device no longer exists, as after a reboot. A runtime is notified
/// first, because the device number may be reused for another volume.
pub fn forget_if_gone(store: &Store, attachment: &Attachment) -> Result<()> {
    let id = &attachment.volume_id;
    if device_of(store, id)?.is_some() {
        return Ok(());
    }
    if let Some((target, _)) = attachment.deferred_at() {
        match deferral::take_back(store, target, None, Duration::ZERO) {
            // Files were written to the target directory instead of the volume. Unpublish reports
            // that.
            Err(Error::Precondition(reason)) => {
                tracing::warn!(volume = id, reason, "files remain in a target directory")
            }
            taken => taken?,
        }
    }
    tracing::info!(volume = id, "removing the attachment of a volume without a loop device");
    writeback::unstaged(store, id)
}
