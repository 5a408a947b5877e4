//! Volumes in use on this node: stage, publish and their reverse, usage and online growth.
//!
//! The catalog's row says what is wanted, the kernel (loop devices, mountinfo) what is there. Every
//! operation writes the row first and then makes the kernel agree, so that repeating any of them,
//! also after a crash, converges.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::Path;

use super::error::{Context, Error, Result};
use super::fail_point::reach;
use super::filesystem::{self, Mount};
use super::format;
use super::loop_device::LoopDevice;
use super::model::{Access, Attachment, Capability, Mounted, Publication, Usage, Volume};
use super::pool;
use super::store::Store;
use super::target::{check_directory, check_file, present, remove_target};
use super::upkeep;

/// Attaches a volume and, unless it is used raw, mounts its filesystem at `path`, making it first
/// where there is none.
pub fn stage(store: &Store, volume_id: &str, path: &Path, capability: &Capability) -> Result<()> {
    let _lock = store.locks.take([volume_id])?;
    let reading = store.catalog.read()?;
    let volume = reading.live_volume(volume_id)?;
    if let Some(attachment) = reading.get::<Attachment>(volume_id)? {
        let attachment = same_stage(attachment, path, capability)?;
        let staged = bring_up(store, volume, &attachment);
        return staged.map_err(|error| upkeep::or_exhausted(store, error));
    }
    let attachment = Attachment {
        volume_id: volume_id.to_owned(),
        staging_path: path.to_owned(),
        capability: capability.clone(),
        published: BTreeMap::new(),
        mounted: Mounted::default(),
    };
    store.catalog.write(|tx| tx.put(&attachment))?;
    let staged = bring_up(store, volume, &attachment);
    if staged.is_err() {
        // What was not staged leaves nothing attached behind. If this fails too, the row tells the
        // next stage or unstage what to look for.
        let _ = take_down(store, &attachment);
    }
    staged.map_err(|error| upkeep::or_exhausted(store, error))
}

/// An earlier stage of the volume, if it is the same one.
fn same_stage(attachment: Attachment, path: &Path, capability: &Capability) -> Result<Attachment> {
    if attachment.staging_path != path {
        return Err(Error::Precondition(format!(
            "staging_target_path: {:?} is staged at {}; unstage it there first",
            attachment.volume_id,
            attachment.staging_path.display()
        )));
    }
    if !attachment.capability.is_like(capability) {
        return Err(Error::AlreadyExists(format!(
            "volume_capability: {:?} is staged here with another capability; unstage it first",
            attachment.volume_id
        )));
    }
    Ok(attachment)
}

fn bring_up(store: &Store, mut volume: Volume, attachment: &Attachment) -> Result<()> {
    let backing = store.open_volume(&volume)?;
    let device = LoopDevice::ensure(&backing)?;
    if device.size()? < volume.capacity_bytes {
        device.grow()?;
    }
    let path = &attachment.staging_path;
    let read_only = attachment.capability.is_read_only();
    let Access::Mount { fs_type, flags, .. } = &attachment.capability.access else {
        return format::forget(store, &mut volume);
    };
    let fs_type = format::ensure(store, &mut volume, &backing, &device, *fs_type)?;
    if !read_only && !filesystem::is_mounted(&device)? {
        format::grow_unmounted(store, &mut volume, &device)?;
    }
    fs::create_dir_all(path).context(|| format!("making {}", path.display()))?;
    reach("stage.directory_made")?;
    if !shown_at(path, &device)? {
        check_directory("staging_target_path", path)?;
        filesystem::mount_device(device.path(), path, fs_type, flags, read_only)?;
    }
    if read_only { Ok(()) } else { format::grow(store, &mut volume, &device, path) }
}

/// Whether a mount is of this volume's device: its filesystem, or its node.
fn is_of(mount: &Mount, device: &LoopDevice) -> bool {
    mount.shows(device) || mount.is_node_of(device)
}

/// Whether the device is what is mounted at `path`.
fn shown_at(path: &Path, device: &LoopDevice) -> Result<bool> {
    Ok(filesystem::mount_at(path)?.is_some_and(|mount| is_of(&mount, device)))
}

/// Unmounts and detaches a volume. OK when it is not staged at `path`.
pub fn unstage(store: &Store, volume_id: &str, path: &Path) -> Result<()> {
    let _lock = store.locks.take([volume_id])?;
    let Some(attachment) = store.catalog.read()?.get::<Attachment>(volume_id)? else {
        return Ok(());
    };
    if attachment.staging_path != path {
        return Ok(());
    }
    for target in attachment.published.keys() {
        if filesystem::mount_at(target)?.is_some() {
            return Err(Error::Precondition(format!(
                "volume_id: {volume_id:?} is still published at {}; unpublish it first",
                target.display()
            )));
        }
    }
    take_down(store, &attachment)
}

/// The device of a volume, even when its backing file was deleted under it.
fn device_of(store: &Store, volume_id: &str) -> Result<Option<LoopDevice>> {
    match File::open(store.volume_path(volume_id)) {
        Ok(backing) => Ok(LoopDevice::find(&backing)?.into_iter().next()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => LoopDevice::find_deleted(volume_id),
        Err(e) => Err(Error::io(format!("opening the backing file of {volume_id:?}"), e)),
    }
}

fn take_down(store: &Store, attachment: &Attachment) -> Result<()> {
    let id = &attachment.volume_id;
    if let Some(device) = device_of(store, id)? {
        filesystem::unmount(&attachment.staging_path, |mount| mount.shows(&device))?;
        device.release()?;
    }
    store.catalog.write(|tx| tx.remove::<Attachment>(id))
}

/// Shows a staged volume at `target`.
pub fn publish(
    store: &Store,
    volume_id: &str,
    staging: &Path,
    target: &Path,
    wanted: &Publication,
) -> Result<()> {
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
    if !shown_at(target, &device)? {
        check_target(&attachment, &device, target, wanted)?;
    }
    let first = attachment.published.insert(target.to_owned(), wanted.clone()).is_none();
    if first {
        store.catalog.write(|tx| tx.put(&attachment))?;
    }
    let shown = show(&attachment, &device, target, wanted);
    if shown.is_err() && first {
        // A publish that failed leaves nothing at the target; one that a pod uses stays.
        let _ = hide(store, Some(&device), attachment, target);
    }
    shown
}

/// Whether everything is as such a call has left it, so that nothing is to be done.
fn is_published(
    store: &Store,
    volume_id: &str,
    staging: &Path,
    target: &Path,
    wanted: &Publication,
) -> Result<bool> {
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

fn not_staged(volume_id: &str, staging: &Path) -> Error {
    Error::Precondition(format!(
        "staging_target_path: {volume_id:?} is not staged at {}; call NodeStageVolume first",
        staging.display()
    ))
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
            if !shown_at(&attachment.staging_path, device)? {
                return Err(not_staged(id, &attachment.staging_path));
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
    attachment: &Attachment,
    device: &LoopDevice,
    target: &Path,
    wanted: &Publication,
) -> Result<()> {
    let read_only = wanted.is_read_only();
    let shown = shown_at(target, device)?;
    let Access::Mount { group, .. } = wanted.capability.access else {
        device.set_read_only(read_only)?;
        return if shown { Ok(()) } else { show_device(device, target) };
    };
    let staging = &attachment.staging_path;
    // Before the mount, so where that is it was done: a call that is repeated for a pod that runs (requiresRepublish) takes
    // no files from the group of another pod.
    if let Some(group) = group
        && !shown
        && !read_only
        && !attachment.capability.is_read_only()
    {
        filesystem::give_to_group(staging, group)?;
    }
    if !shown {
        fs::create_dir_all(target).context(|| format!("making {}", target.display()))?;
        reach("publish.directory_made")?;
        filesystem::bind(staging, target)?;
    }
    // Also where it was mounted before: a crash may have come between the two.
    if read_only { filesystem::make_read_only(target) } else { Ok(()) }
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
            filesystem::unmount(target, |mount| is_of(mount, device))?;
            let last = attachment.published.keys().all(|other| other == target);
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

/// The attachment of a volume that is in use at `path`, staged or published, with its device.
fn in_use_at(
    store: &Store,
    volume_id: &str,
    path: &Path,
) -> Result<(Volume, Attachment, LoopDevice)> {
    let reading = store.catalog.read()?;
    let volume = reading.live_volume(volume_id)?;
    let missing = || {
        Error::Missing(format!("volume_path: {volume_id:?} is not in use at {}", path.display()))
    };
    let attachment = reading.get::<Attachment>(volume_id)?.ok_or_else(missing)?;
    if attachment.staging_path != path && !attachment.published.contains_key(path) {
        return Err(missing());
    }
    let device = store.device_of(&volume)?.ok_or_else(missing)?;
    if matches!(attachment.capability.access, Access::Mount { .. }) && !shown_at(path, &device)? {
        return Err(missing());
    }
    Ok((volume, attachment, device))
}

/// How full a volume is. Never waits for another operation on it.
pub fn usage(store: &Store, volume_id: &str, path: &Path) -> Result<Usage> {
    let (_, attachment, device) = in_use_at(store, volume_id, path)?;
    match attachment.capability.access {
        Access::Block => Ok(Usage::Block { total_bytes: device.size()? }),
        Access::Mount { .. } => filesystem::usage(path),
    }
}

/// Grows device and filesystem to the volume's capacity, which is returned in bytes.
pub fn expand(store: &Store, volume_id: &str, path: &Path) -> Result<u64> {
    let _lock = store.locks.take([volume_id])?;
    let (mut volume, attachment, device) = in_use_at(store, volume_id, path)?;
    if device.size()? < volume.capacity_bytes {
        device.grow()?;
    }
    if let Access::Mount { .. } = attachment.capability.access
        && !attachment.capability.is_read_only()
    {
        format::grow(store, &mut volume, &device, &attachment.staging_path)?;
    }
    Ok(volume.capacity_bytes)
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

/// Forgets an attachment of which the kernel knows nothing any more, as after a reboot.
pub fn forget_if_gone(store: &Store, attachment: &Attachment) -> Result<()> {
    let id = &attachment.volume_id;
    if device_of(store, id)?.is_some() {
        return Ok(());
    }
    tracing::info!(volume = id, "no longer attached; forgetting where it was");
    store.catalog.write(|tx| tx.remove::<Attachment>(id))
}
