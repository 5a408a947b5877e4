//! Publish and its reverse: a volume at the target where a pod finds it. Where a container runtime mounts it instead,
//! [`deferred`] goes on.

use std::fs;
use std::path::Path;
use std::time::Duration;

use super::super::deferral;
use super::super::error::{Context, Error, Result};
use super::super::fail_point::reach;
use super::super::filesystem::{self, Mount};
use super::super::loop_device::LoopDevice;
use super::super::model::{Access, Attachment, Format, Mounted, Publication, Volume};
use super::super::pool;
use super::super::store::Store;
use super::super::target::{check_directory, check_file, present, remove_target};
use super::super::writeback;
use super::{deferred, device_of, is_of, not_staged, shown_at};

/// How long a container's mount may take to go, where the next pod comes.
const PATIENCE: Duration = Duration::from_secs(1);

/// Shows a staged volume at `target`.
pub fn publish(
    store: &Store,
    volume_id: &str,
    staging: &Path,
    target: &Path,
    wanted: &Publication,
) -> Result<()> {
    if wanted.deferred.is_some() {
        deferral::check_capability(wanted)?;
        deferral::runtime(store)?;
    }
    // What kubelet repeats for a pod that runs (requiresRepublish) waits for nobody: a cut of the volume may take its time.
    if is_published(store, volume_id, staging, target, wanted)? {
        return Ok(());
    }
    let _lock = store.locks.take([volume_id])?;
    let reading = store.catalog.read()?;
    let volume = reading.live_volume(volume_id)?;
    let staged = reading.get::<Attachment>(volume_id)?.filter(|a| a.staging_path == staging);
    let Some(mut attachment) = staged else { return Err(not_staged(volume_id, staging)) };
    let Some(device) = store.device_of(&volume)? else {
        return Err(not_staged(volume_id, staging));
    };
    check_second_publish(&attachment, target, wanted)?;
    if let Some(deferral) = &wanted.deferred {
        return deferred::publish(store, &volume, attachment, &device, target, wanted, deferral);
    }
    if !shown_at(target, &device)? {
        check_target(&attachment, &device, target, wanted)?;
    }
    let first = attachment.published.insert(target.to_owned(), wanted.clone()).is_none();
    if first {
        store.catalog.write(|tx| tx.put(&attachment))?;
    }
    let shown = show(&volume, &attachment, &device, target, wanted);
    if shown.is_err() && first {
        // A publish that failed leaves nothing at the target; one that a pod uses stays.
        let _ = hide(store, Some(&device), attachment, target);
    }
    shown
}

/// Whether everything is as such a call has left it, so that nothing is to be done. Of a volume that is left to a
/// runtime that is never known: the word to the runtime may be gone, so it is left again, under the lock, as it might
/// be taken back meanwhile.
fn is_published(
    store: &Store,
    volume_id: &str,
    staging: &Path,
    target: &Path,
    wanted: &Publication,
) -> Result<bool> {
    if wanted.deferred.is_some() {
        return Ok(false);
    }
    let reading = store.catalog.read()?;
    let volume = reading.live_volume(volume_id)?;
    let staged = reading.get::<Attachment>(volume_id)?.filter(|a| a.staging_path == staging);
    if staged.is_none_or(|attachment| attachment.published.get(target) != Some(wanted)) {
        return Ok(false);
    }
    let Some(device) = store.device_of(&volume)? else { return Ok(false) };
    if !shown_at(target, &device)? {
        return Ok(false);
    }
    let is_read_only = match wanted.capability.access {
        Access::Mount { .. } => filesystem::is_read_only(target)?,
        Access::Block => device.is_read_only()?,
    };
    Ok(is_read_only == wanted.is_read_only())
}

/// CSI NodePublishVolume, the tables of what a second call answers.
fn check_second_publish(
    attachment: &Attachment,
    target: &Path,
    wanted: &Publication,
) -> Result<()> {
    let id = &attachment.volume_id;
    if let Some(before) = attachment.published.get(target) {
        if before == wanted {
            return Ok(());
        }
        return Err(Error::AlreadyExists(format!(
            "target_path: {id:?} is published at {} with other arguments",
            target.display()
        )));
    }
    let Some((elsewhere, other)) = attachment.published.iter().next() else { return Ok(()) };
    if wanted.deferred.is_some() || other.deferred.is_some() {
        return Err(Error::Precondition(format!(
            "target_path: {id:?} is published at {}; a volume that is left to a container runtime has one target, and is \
             mounted nowhere else: unpublish it there first",
            elsewhere.display()
        )));
    }
    if !wanted.capability.mode.shares() || !other.capability.mode.shares() {
        return Err(Error::Precondition(format!(
            "target_path: {id:?} is published at {} and its access mode allows one target",
            elsewhere.display()
        )));
    }
    if !other.capability.is_like(&wanted.capability) {
        return Err(Error::Precondition(format!(
            "volume_capability: {id:?} is published at {} with another capability",
            elsewhere.display()
        )));
    }
    Ok(())
}

/// Everything that can be known to fail is checked before anything is done.
fn check_target(
    attachment: &Attachment,
    device: &LoopDevice,
    target: &Path,
    wanted: &Publication,
) -> Result<()> {
    let id = &attachment.volume_id;
    match (&wanted.capability.access, &attachment.capability.access) {
        (Access::Mount { .. }, Access::Mount { .. }) => {
            match attachment.mounted {
                Mounted::AtStaging if !shown_at(&attachment.staging_path, device)? => {
                    return Err(not_staged(id, &attachment.staging_path));
                }
                Mounted::AtStaging => {}
                // Where this host has it, it may have it once more; where others have it, they have it alone.
                Mounted::AtTargets if filesystem::mounts_of(device)?.is_empty() => {
                    deferral::wait_until_free(device, PATIENCE)?;
                }
                Mounted::AtTargets => {}
            }
            check_directory("target_path", target)
        }
        (Access::Block, Access::Block) => {
            // A mount cannot keep anybody from writing to a device node; the device itself can.
            let mut others = attachment.published.values();
            if others.any(|other| other.is_read_only() != wanted.is_read_only()) {
                return Err(Error::Precondition(format!(
                    "readonly: {id:?} is published the other way elsewhere; a raw block volume is \
                     read-only everywhere or nowhere"
                )));
            }
            check_file("target_path", target)
        }
        _ => Err(Error::Precondition(format!(
            "volume_capability: {id:?} is staged the other way (block or mount)"
        ))),
    }
}

fn show(
    volume: &Volume,
    attachment: &Attachment,
    device: &LoopDevice,
    target: &Path,
    wanted: &Publication,
) -> Result<()> {
    let shown = shown_at(target, device)?;
    if matches!(wanted.capability.access, Access::Block) {
        device.set_read_only(wanted.is_read_only())?;
        return if shown { Ok(()) } else { show_device(device, target) };
    }
    if !shown {
        match attachment.mounted {
            Mounted::AtStaging => bind(attachment, target, wanted)?,
            Mounted::AtTargets => mount(volume, attachment, device, target, wanted)?,
        }
    }
    // Also where it was mounted before: a crash may have come between the two.
    if wanted.is_read_only() { filesystem::make_read_only(target) } else { Ok(()) }
}

/// The group whose the files are to be. They are given to it before the mount, so where that is it was done: a call
/// that is repeated for a pod that runs (requiresRepublish) takes no files from the group of another pod.
fn group_to_give(attachment: &Attachment, wanted: &Publication) -> Option<u32> {
    let Access::Mount { group, .. } = wanted.capability.access else { return None };
    group.filter(|_| !wanted.is_read_only() && !attachment.capability.is_read_only())
}

fn bind(attachment: &Attachment, target: &Path, wanted: &Publication) -> Result<()> {
    let staging = &attachment.staging_path;
    if let Some(group) = group_to_give(attachment, wanted) {
        filesystem::give_to_group(staging, group)?;
    }
    make_directory(target)?;
    filesystem::bind(staging, target)
}

/// Mounts the device itself. All targets are of one superblock, which is read-only if the volume is; a target that is
/// read-only for itself becomes so afterwards.
fn mount(
    volume: &Volume,
    attachment: &Attachment,
    device: &LoopDevice,
    target: &Path,
    wanted: &Publication,
) -> Result<()> {
    let Access::Mount { flags, .. } = &wanted.capability.access else { return Ok(()) };
    let Some(Format { fs_type, unfinished: false, .. }) = volume.format else {
        return Err(not_staged(&volume.id, &attachment.staging_path));
    };
    if let Some(group) = group_to_give(attachment, wanted) {
        let root = match filesystem::join(device, true)? {
            Some(root) => root,
            None => filesystem::mount_unseen(device, fs_type)?,
        };
        filesystem::give_to_group(&root.path(), group)?;
    }
    make_directory(target)?;
    let read_only = attachment.capability.is_read_only() || wanted.capability.is_read_only();
    filesystem::mount_device(device.path(), target, fs_type, flags, read_only)
}

fn make_directory(target: &Path) -> Result<()> {
    fs::create_dir_all(target).context(|| format!("making {}", target.display()))?;
    reach("publish.directory_made")
}

fn show_device(device: &LoopDevice, target: &Path) -> Result<()> {
    if let Some(parent) = target.parent() {
        fs::create_dir_all(parent).context(|| format!("making {}", parent.display()))?;
        reach("publish.parent_made")?;
    }
    if present(target)?.is_none() {
        pool::new_file(target)?;
    }
    filesystem::bind(device.path(), target)
}

/// Takes a volume away from `target`, and the target with it. OK when it is not published there.
pub fn unpublish(store: &Store, volume_id: &str, target: &Path) -> Result<()> {
    let _lock = store.locks.take([volume_id])?;
    let reading = store.catalog.read()?;
    let attachment = reading.get::<Attachment>(volume_id)?;
    let Some(attachment) = attachment.filter(|a| a.published.contains_key(target)) else {
        // After a reboot nothing is mounted there; the empty target may still be. What an unknown
        // volume never was at is nobody's to remove.
        return match reading.get::<Volume>(volume_id)? {
            Some(_) => remove_target(target),
            None => Ok(()),
        };
    };
    drop(reading);
    let device = device_of(store, volume_id)?;
    if attachment.published.get(target).is_some_and(|one| one.deferred.is_some()) {
        deferral::take_back(store, target, device.as_ref(), deferral::PATIENCE)?;
    }
    hide(store, device.as_ref(), attachment, target)
}

fn hide(
    store: &Store,
    device: Option<&LoopDevice>,
    mut attachment: Attachment,
    target: &Path,
) -> Result<()> {
    match device {
        Some(device) => {
            let last = attachment.published.keys().all(|other| other == target);
            if last && attachment.mounted == Mounted::AtTargets && shown_at(target, device)? {
                writeback::sync_before_unmount(store, &attachment.volume_id, target);
            }
            filesystem::unmount(target, |mount| is_of(mount, device))?;
            let raw = matches!(attachment.capability.access, Access::Block);
            if last && raw && device.is_read_only()? {
                device.set_read_only(false)?;
            }
        }
        // It was taken away from under its node, which is of no use to anybody now.
        None => filesystem::unmount(target, Mount::is_loop_node)?,
    }
    remove_target(target)?;
    attachment.published.remove(target);
    store.catalog.write(|tx| tx.put(&attachment))
}
