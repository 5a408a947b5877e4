//! Publish and unpublish: the mount of a volume at a pod's target. [`deferred`] publishes a volume
//! that a container runtime mounts.

use std::fs;
use std::path::Path;

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
use super::{deferred, device_of, is_mounted_at, is_of, not_staged, thaw_unpublished};

/// Publishes a staged volume at `target`.
pub fn publish(
    store: &Store,
    volume_id: &str,
    staging: &Path,
    target: &Path,
    requested: &Publication,
) -> Result<()> {
    if requested.deferred.is_some() {
        deferral::check_capability(requested)?;
        deferral::runtime(store)?;
    }
    // kubelet repeats the call for a running pod (requiresRepublish). That call must not wait for a
    // snapshot of the volume.
    if is_published(store, volume_id, staging, target, requested)? {
        return Ok(());
    }
    let _lock = store.locks.try_lock([volume_id])?;
    let reading = store.catalog.read()?;
    let volume = reading.live_volume(volume_id)?;
    let staged = reading.get::<Attachment>(volume_id)?.filter(|a| a.staging_path == staging);
    let Some(mut attachment) = staged else { return Err(not_staged(volume_id, staging)) };
    let Some(device) = store.device_of(&volume)? else {
        return Err(not_staged(volume_id, staging));
    };
    check_second_publish(&attachment, target, requested)?;
    if attachment.published.is_empty() {
        thaw_unpublished(volume_id, &device, [attachment.staging_path.as_path()]);
    }
    if let Some(deferral) = &requested.deferred {
        return deferred::publish(store, &volume, attachment, &device, target, requested, deferral);
    }
    if !is_mounted_at(target, &device)? {
        check_target(&attachment, &device, target, requested)?;
    }
    let first = attachment.published.insert(target.to_owned(), requested.clone()).is_none();
    if first {
        store.catalog.write(|tx| tx.put(&attachment))?;
    }
    let mounted = mount_target(&volume, &attachment, &device, target, requested);
    if mounted.is_err() && first {
        // A failed first publish leaves nothing at the target. A target that a pod uses remains.
        let _ = unmount_target(store, Some(&device), attachment, target);
    }
    mounted
}

/// Whether the volume is already published as requested. Always false for a deferred volume: the
/// file for the runtime may be missing, so it is written again under the lock, because a concurrent
/// unpublish may remove it.
fn is_published(
    store: &Store,
    volume_id: &str,
    staging: &Path,
    target: &Path,
    requested: &Publication,
) -> Result<bool> {
    if requested.deferred.is_some() {
        return Ok(false);
    }
    let reading = store.catalog.read()?;
    let volume = reading.live_volume(volume_id)?;
    let staged = reading.get::<Attachment>(volume_id)?.filter(|a| a.staging_path == staging);
    if staged.is_none_or(|attachment| attachment.published.get(target) != Some(requested)) {
        return Ok(false);
    }
    let Some(device) = store.device_of(&volume)? else { return Ok(false) };
    if !is_mounted_at(target, &device)? {
        return Ok(false);
    }
    let is_read_only = match requested.capability.access {
        Access::Mount { .. } => filesystem::is_read_only(target)?,
        Access::Block => device.is_read_only()?,
    };
    Ok(is_read_only == requested.is_read_only())
}

/// Checks a second call as required by CSI NodePublishVolume (tables of responses).
fn check_second_publish(
    attachment: &Attachment,
    target: &Path,
    requested: &Publication,
) -> Result<()> {
    let id = &attachment.volume_id;
    if let Some(before) = attachment.published.get(target) {
        if before == requested {
            return Ok(());
        }
        return Err(Error::AlreadyExists(format!(
            "target_path: {id:?} is published at {} with other arguments",
            target.display()
        )));
    }
    let Some((elsewhere, other)) = attachment.published.iter().next() else { return Ok(()) };
    if requested.deferred.is_some() || other.deferred.is_some() {
        return Err(Error::Precondition(format!(
            "target_path: {id:?} is published at {}; a deferred volume can have only one target: \
             unpublish it there first",
            elsewhere.display()
        )));
    }
    if !requested.capability.mode.shares() || !other.capability.mode.shares() {
        return Err(Error::Precondition(format!(
            "target_path: {id:?} is published at {} and its access mode allows only one target",
            elsewhere.display()
        )));
    }
    if !other.capability.is_like(&requested.capability) {
        return Err(Error::Precondition(format!(
            "volume_capability: {id:?} is published at {} with another capability",
            elsewhere.display()
        )));
    }
    Ok(())
}

/// Checks every known reason for a failure before anything is changed.
fn check_target(
    attachment: &Attachment,
    device: &LoopDevice,
    target: &Path,
    requested: &Publication,
) -> Result<()> {
    let id = &attachment.volume_id;
    match (&requested.capability.access, &attachment.capability.access) {
        (Access::Mount { .. }, Access::Mount { .. }) => {
            match attachment.mounted {
                Mounted::AtStaging if !is_mounted_at(&attachment.staging_path, device)? => {
                    return Err(not_staged(id, &attachment.staging_path));
                }
                Mounted::AtStaging => {}
                // This host may mount it a second time. If a container still has it mounted, wait.
                Mounted::AtTargets if filesystem::mounts_of(device)?.is_empty() => {
                    deferral::wait_until_unmounted(device, deferral::PREVIOUS_MOUNT_TIMEOUT)?;
                }
                Mounted::AtTargets => {}
            }
            check_directory("target_path", target)
        }
        (Access::Block, Access::Block) => {
            // A read-only mount does not prevent writes to a device node; a read-only device does.
            let mut others = attachment.published.values();
            if others.any(|other| other.is_read_only() != requested.is_read_only()) {
                return Err(Error::Precondition(format!(
                    "readonly: {id:?} is published with another value of readonly; a raw block \
                     volume is read-only at all targets or at none"
                )));
            }
            check_file("target_path", target)
        }
        _ => Err(Error::Precondition(format!(
            "volume_capability: {id:?} is staged with the other access type (block or mount)"
        ))),
    }
}

fn mount_target(
    volume: &Volume,
    attachment: &Attachment,
    device: &LoopDevice,
    target: &Path,
    requested: &Publication,
) -> Result<()> {
    let mounted = is_mounted_at(target, device)?;
    if matches!(requested.capability.access, Access::Block) {
        device.set_read_only(requested.is_read_only())?;
        return if mounted { Ok(()) } else { bind_device(device, target) };
    }
    if !mounted {
        match attachment.mounted {
            Mounted::AtStaging => bind(attachment, target, requested)?,
            Mounted::AtTargets => mount(volume, attachment, device, target, requested)?,
        }
    }
    cover_if_writable(target, requested)
}

/// Covers a writable mount of a read-only publication by a read-only one. It is writable if the
/// driver was killed while it replaced the mount.
fn cover_if_writable(target: &Path, requested: &Publication) -> Result<()> {
    if !requested.is_read_only() || filesystem::is_read_only(target)? {
        return Ok(());
    }
    filesystem::bind_read_only(target, target)
}

/// The group that must own the files. Ownership is changed before the mount, so an existing mount
/// needs no change: a repeated call for a running pod (requiresRepublish) takes no files from the
/// group of another pod.
fn requested_group(attachment: &Attachment, requested: &Publication) -> Option<u32> {
    let Access::Mount { group, .. } = requested.capability.access else { return None };
    group.filter(|_| !requested.is_read_only() && !attachment.capability.is_read_only())
}

fn bind(attachment: &Attachment, target: &Path, requested: &Publication) -> Result<()> {
    let staging = &attachment.staging_path;
    if let Some(group) = requested_group(attachment, requested) {
        filesystem::give_to_group(staging, group)?;
    }
    make_directory(target)?;
    match requested.is_read_only() {
        true => filesystem::bind_read_only(staging, target),
        false => filesystem::bind(staging, target),
    }
}

/// Mounts the device at the target. All targets share one superblock, which is read-only if the
/// volume is. If the target alone is read-only, its mount is replaced.
fn mount(
    volume: &Volume,
    attachment: &Attachment,
    device: &LoopDevice,
    target: &Path,
    requested: &Publication,
) -> Result<()> {
    let Access::Mount { flags, .. } = &requested.capability.access else { return Ok(()) };
    let Some(Format { fs_type, unfinished: false, .. }) = volume.format else {
        return Err(not_staged(&volume.id, &attachment.staging_path));
    };
    if let Some(group) = requested_group(attachment, requested) {
        let root = match filesystem::join(device, true)? {
            Some(root) => root,
            None => filesystem::mount_detached(device, fs_type)?,
        };
        filesystem::give_to_group(&root.path(), group)?;
    }
    make_directory(target)?;
    let read_only = attachment.capability.is_read_only() || requested.capability.is_read_only();
    filesystem::mount_device(device.path(), target, fs_type, flags, read_only)?;
    match requested.is_read_only() && !read_only {
        true => filesystem::replace_by_read_only(target, |mount| is_of(mount, device)),
        false => Ok(()),
    }
}

fn make_directory(target: &Path) -> Result<()> {
    fs::create_dir_all(target).context(|| format!("creating {}", target.display()))?;
    reach("publish.directory_made")
}

fn bind_device(device: &LoopDevice, target: &Path) -> Result<()> {
    if let Some(parent) = target.parent() {
        fs::create_dir_all(parent).context(|| format!("creating {}", parent.display()))?;
        reach("publish.parent_made")?;
    }
    if present(target)?.is_none() {
        pool::new_file(target)?;
    }
    filesystem::bind(device.path(), target)
}

/// Unpublishes a volume and removes the target. Succeeds if the volume is not published there.
pub fn unpublish(store: &Store, volume_id: &str, target: &Path) -> Result<()> {
    let _lock = store.locks.try_lock([volume_id])?;
    let reading = store.catalog.read()?;
    let attachment = reading.get::<Attachment>(volume_id)?;
    let Some(attachment) = attachment.filter(|a| a.published.contains_key(target)) else {
        // After a reboot nothing is mounted, but the empty target may remain. For an unknown volume
        // nothing is removed.
        return match reading.get::<Volume>(volume_id)? {
            Some(_) => remove_target(target),
            None => Ok(()),
        };
    };
    drop(reading);
    let device = device_of(store, volume_id)?;
    if attachment.published.get(target).is_some_and(|one| one.deferred.is_some()) {
        deferral::take_back(store, target, device.as_ref(), deferral::UNMOUNT_TIMEOUT)?;
    }
    unmount_target(store, device.as_ref(), attachment, target)
}

fn unmount_target(
    store: &Store,
    device: Option<&LoopDevice>,
    mut attachment: Attachment,
    target: &Path,
) -> Result<()> {
    match device {
        Some(device) => {
            let last = attachment.published.keys().all(|other| other == target);
            if last {
                let own = [attachment.staging_path.as_path(), target];
                thaw_unpublished(&attachment.volume_id, device, own);
            }
            if last && attachment.mounted == Mounted::AtTargets && is_mounted_at(target, device)? {
                writeback::sync_before_unmount(store, &attachment.volume_id, target);
            }
            filesystem::unmount(target, |mount| is_of(mount, device))?;
            let raw = matches!(attachment.capability.access, Access::Block);
            if last && raw && device.is_read_only()? {
                device.set_read_only(false)?;
            }
        }
        // The device was detached while its node was mounted. The node is useless now.
        None => filesystem::unmount(target, Mount::is_loop_node)?,
    }
    remove_target(target)?;
    attachment.published.remove(target);
    store.catalog.write(|tx| tx.put(&attachment))
}
