//! Volumes in use on this node: stage, publish and their reverse, usage and online growth.
//!
//! The catalog's row says what is wanted, the kernel (loop devices, mountinfo) what is there. Every
//! operation writes the row first and then makes the kernel agree, so that repeating any of them,
//! also after a crash, converges.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use super::error::{Context, Error, Result};
use super::filesystem;
use super::loop_device::LoopDevice;
use super::model::{Access, Attachment, Capability, Format, FsType, Publication, Usage, Volume};
use super::pool;
use super::store::Store;

/// Attaches a volume and, unless it is used raw, mounts its filesystem at `path`, making it first
/// where there is none.
pub fn stage(store: &Store, volume_id: &str, path: &Path, capability: &Capability) -> Result<()> {
    let _lock = store.locks.take([volume_id])?;
    let reading = store.catalog.read()?;
    let volume = reading.live_volume(volume_id)?;
    let attachment = match reading.get::<Attachment>(volume_id)? {
        Some(attachment) => same_stage(attachment, path, capability)?,
        None => {
            let attachment = Attachment {
                volume_id: volume_id.to_owned(),
                staging_path: path.to_owned(),
                capability: capability.clone(),
                published: BTreeMap::new(),
            };
            store.catalog.write(|tx| tx.put(&attachment))?;
            attachment
        }
    };
    let staged = bring_up(store, volume, &attachment);
    if staged.is_err() && attachment.published.is_empty() {
        // What was not staged leaves nothing attached behind. If this fails too, the row tells the
        // next stage or unstage what to look for.
        let _ = take_down(store, &attachment);
    }
    staged
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
    if attachment.capability != *capability {
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
    let Capability { access: Access::Mount { fs_type, flags, .. }, mode } = &attachment.capability
    else {
        return Ok(());
    };
    let fs_type = ensure_format(store, &mut volume, &backing, &device, *fs_type)?;
    let grows = !mode.read_only() && needs_growth(&volume).is_some();
    if grows && !filesystem::grows_online(fs_type) && filesystem::mounts_of(&device)?.is_empty() {
        filesystem::grow_unmounted(fs_type, device.path())?;
        grown(store, &mut volume)?;
    }
    fs::create_dir_all(path).context(|| format!("making {}", path.display()))?;
    match filesystem::mount_at(path)? {
        Some(mount) if mount.shows(&device) => {}
        Some(_) => {
            return Err(Error::Precondition(format!(
                "staging_target_path: something else is mounted at {}",
                path.display()
            )));
        }
        None => {
            filesystem::mount_device(device.path(), path, fs_type, flags, mode.read_only())?;
        }
    }
    if mode.read_only() { Ok(()) } else { grow_filesystem(store, &mut volume, &device, path) }
}

/// Makes sure that the volume holds the filesystem that is wanted, and never destroys data.
fn ensure_format(
    store: &Store,
    volume: &mut Volume,
    backing: &File,
    device: &LoopDevice,
    wanted: Option<FsType>,
) -> Result<FsType> {
    let present = match volume.format {
        Some(Format { unfinished: true, .. }) => None,
        Some(format) => Some(format.fs_type),
        None => {
            let found = filesystem::recognise(&device.open(false)?)?;
            if found.is_none() && holds_data(backing)? {
                return Err(Error::Precondition(format!(
                    "volume_capability: {:?} holds data that is no filesystem known here; use it as \
                     a block volume",
                    volume.id
                )));
            }
            if let Some(fs_type) = found {
                // Written through the raw device; how far it has grown is not known.
                volume.format = Some(Format { fs_type, size_bytes: 0, unfinished: false });
                store.catalog.write(|tx| tx.put(&*volume))?;
            }
            found
        }
    };
    let fs_type = wanted.or(present).or(volume.request.fs_type).unwrap_or(FsType::Ext4);
    match present {
        Some(present) if present == fs_type => return Ok(fs_type),
        Some(present) => {
            return Err(Error::Precondition(format!(
                "fs_type: {:?} holds {present}, not {fs_type}",
                volume.id
            )));
        }
        None => {}
    }
    let size_bytes = volume.capacity_bytes;
    for unfinished in [true, false] {
        if !unfinished {
            filesystem::make(fs_type, device.path())?;
            device.flush()?;
        }
        volume.format = Some(Format { fs_type, size_bytes, unfinished });
        store.catalog.write(|tx| tx.put(&*volume))?;
    }
    Ok(fs_type)
}

fn holds_data(backing: &File) -> Result<bool> {
    use nix::unistd::{Whence, lseek};
    match lseek(backing, 0, Whence::SeekData) {
        Ok(_) => Ok(true),
        Err(nix::Error::ENXIO) => Ok(false),
        Err(e) => Err(Error::io("looking for data", io::Error::from(e))),
    }
}

/// The filesystem of a volume that is smaller than the volume.
fn needs_growth(volume: &Volume) -> Option<FsType> {
    let format = volume.format?;
    (format.size_bytes < volume.capacity_bytes).then_some(format.fs_type)
}

/// Notes that a volume's filesystem is as large as the volume.
fn grown(store: &Store, volume: &mut Volume) -> Result<()> {
    let size_bytes = volume.capacity_bytes;
    volume.format = volume.format.map(|format| Format { size_bytes, ..format });
    store.catalog.write(|tx| tx.put(&*volume))
}

/// Grows the mounted filesystem to the volume's capacity, where it has not been done.
fn grow_filesystem(
    store: &Store,
    volume: &mut Volume,
    device: &LoopDevice,
    mounted_at: &Path,
) -> Result<()> {
    let Some(fs_type) = needs_growth(volume) else { return Ok(()) };
    if !filesystem::grows_online(fs_type) {
        return Err(Error::Precondition(format!(
            "volume_path: growing a mounted {fs_type} needs CAP_SYS_RESOURCE, which this process \
             lacks; grant it, or unstage and stage the volume, which grows it too"
        )));
    }
    filesystem::grow(fs_type, device.path(), mounted_at)?;
    grown(store, volume)
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

fn take_down(store: &Store, attachment: &Attachment) -> Result<()> {
    let id = &attachment.volume_id;
    // Without its file nothing says which device it was; the mount goes all the same.
    let backing = File::open(store.volume_path(id)).ok();
    let device = match &backing {
        Some(backing) => LoopDevice::find(backing)?.into_iter().next(),
        None => None,
    };
    if matches!(attachment.capability.access, Access::Mount { .. }) {
        let path = &attachment.staging_path;
        let ours = |mount: &filesystem::Mount| device.as_ref().is_none_or(|d| mount.shows(d));
        if filesystem::mount_at(path)?.as_ref().is_some_and(ours) {
            filesystem::unmount(path)?;
        }
    }
    if let Some(backing) = &backing {
        LoopDevice::detach_all(backing)?;
    }
    store.catalog.write(|tx| tx.remove::<Attachment>(id))
}

/// Shows a staged volume at `target`.
pub fn publish(
    store: &Store,
    volume_id: &str,
    staging: &Path,
    target: &Path,
    capability: &Capability,
    readonly: bool,
) -> Result<()> {
    let _lock = store.locks.take([volume_id])?;
    let reading = store.catalog.read()?;
    let volume = reading.live_volume(volume_id)?;
    let staged = reading.get::<Attachment>(volume_id)?.filter(|a| a.staging_path == staging);
    let Some(mut attachment) = staged else { return Err(not_staged(volume_id, staging)) };
    let Some(device) = store.device_of(&volume)? else {
        return Err(not_staged(volume_id, staging));
    };
    let wanted = Publication { capability: capability.clone(), readonly };
    check_second_publish(&attachment, target, &wanted)?;
    let first = attachment.published.insert(target.to_owned(), wanted).is_none();
    if first {
        store.catalog.write(|tx| tx.put(&attachment))?;
    }
    let readonly = readonly || capability.mode.read_only();
    let shown = match (&capability.access, &attachment.capability.access) {
        (Access::Block, Access::Block) => show_device(&attachment, &device, target, readonly),
        (Access::Mount { group, .. }, Access::Mount { .. }) => {
            show_filesystem(&attachment, &device, target, *group, readonly)
        }
        _ => Err(Error::Precondition(format!(
            "volume_capability: {volume_id:?} is staged the other way (block or mount)"
        ))),
    };
    if shown.is_err() && first {
        // A publish that failed leaves nothing at the target; one that a pod uses stays.
        let _ = hide(store, &device, attachment, target);
    }
    shown
}

fn not_staged(volume_id: &str, staging: &Path) -> Error {
    Error::Precondition(format!(
        "staging_target_path: {volume_id:?} is not staged at {:?}; call NodeStageVolume first",
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
    if other.capability != wanted.capability {
        return Err(Error::Precondition(format!(
            "volume_capability: {id:?} is published at {} with another capability",
            elsewhere.display()
        )));
    }
    Ok(())
}

fn show_filesystem(
    attachment: &Attachment,
    device: &LoopDevice,
    target: &Path,
    group: Option<u32>,
    readonly: bool,
) -> Result<()> {
    let staging = &attachment.staging_path;
    if !filesystem::mount_at(staging)?.is_some_and(|mount| mount.shows(device)) {
        return Err(not_staged(&attachment.volume_id, staging));
    }
    if let Some(group) = group
        && !readonly
    {
        filesystem::give_to_group(staging, group)?;
    }
    fs::create_dir_all(target).context(|| format!("making {}", target.display()))?;
    match filesystem::mount_at(target)? {
        Some(mount) if mount.shows(device) => {}
        Some(_) => return Err(taken(target)),
        None => filesystem::bind(staging, target)?,
    }
    // Also where it was mounted before: a crash may have come between the two.
    if readonly { filesystem::make_read_only(target) } else { Ok(()) }
}

fn show_device(
    attachment: &Attachment,
    device: &LoopDevice,
    target: &Path,
    readonly: bool,
) -> Result<()> {
    // A mount cannot keep anybody from writing to a device node; the device itself can.
    let others = attachment.published.iter().filter(|(path, _)| *path != target);
    let mut modes = others.map(|(_, other)| other.readonly || other.capability.mode.read_only());
    if modes.any(|other| other != readonly) {
        return Err(Error::Precondition(format!(
            "readonly: {:?} is published the other way elsewhere; a raw block volume is read-only \
             everywhere or nowhere",
            attachment.volume_id
        )));
    }
    device.set_read_only(readonly)?;
    if let Some(parent) = target.parent() {
        fs::create_dir_all(parent).context(|| format!("making {}", parent.display()))?;
    }
    match fs::symlink_metadata(target) {
        Ok(present) if present.is_file() => {}
        Ok(present) if present.file_type().is_block_device() => {
            let mount = filesystem::mount_at(target)?;
            let ours = mount.is_some_and(|mount| mount.is_node_of(device));
            return if ours { Ok(()) } else { Err(taken(target)) };
        }
        Ok(_) => return Err(taken(target)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => drop(pool::new_file(target)?),
        Err(e) => return Err(Error::io(format!("looking at {}", target.display()), e)),
    }
    filesystem::bind(device.path(), target)
}

fn taken(target: &Path) -> Error {
    Error::Precondition(format!("target_path: something else is at {}", target.display()))
}

/// Takes a volume away from `target`, and the target with it. OK when it is not published there.
pub fn unpublish(store: &Store, volume_id: &str, target: &Path) -> Result<()> {
    let _lock = store.locks.take([volume_id])?;
    let reading = store.catalog.read()?;
    let attachment = reading.get::<Attachment>(volume_id)?;
    let Some(attachment) = attachment.filter(|a| a.published.contains_key(target)) else {
        return remove_left_over(target);
    };
    let backing = File::open(store.volume_path(volume_id)).ok();
    let device = match &backing {
        Some(backing) => LoopDevice::find(backing)?.into_iter().next(),
        None => None,
    };
    match device {
        Some(device) => hide(store, &device, attachment, target),
        None => {
            filesystem::unmount(target)?;
            forget_target(store, attachment, target)
        }
    }
}

/// After a reboot nothing is known of a target, and nothing is mounted there: only the empty
/// directory or file is left. What is not empty is not touched.
fn remove_left_over(target: &Path) -> Result<()> {
    let removed = match fs::symlink_metadata(target) {
        Ok(present) if present.is_dir() => fs::remove_dir(target),
        Ok(present) if present.is_file() && present.len() == 0 => fs::remove_file(target),
        Ok(_) | Err(_) => Ok(()),
    };
    let other = [libc::ENOTEMPTY, libc::EBUSY, libc::ENOENT];
    match removed {
        Err(e) if e.raw_os_error().is_some_and(|code| other.contains(&code)) => Ok(()),
        result => result.context(|| format!("removing {}", target.display())),
    }
}

fn hide(store: &Store, device: &LoopDevice, attachment: Attachment, target: &Path) -> Result<()> {
    while let Some(mount) = filesystem::mount_at(target)?
        && (mount.shows(device) || mount.is_node_of(device))
    {
        filesystem::unmount(target)?;
    }
    let last = attachment.published.keys().all(|other| other == target);
    if last && matches!(attachment.capability.access, Access::Block) && device.is_read_only()? {
        device.set_read_only(false)?;
    }
    forget_target(store, attachment, target)
}

/// Removes an unmounted target and its row. A directory that is not empty is somebody's data.
fn forget_target(store: &Store, mut attachment: Attachment, target: &Path) -> Result<()> {
    let removed = match fs::symlink_metadata(target) {
        Ok(present) if present.is_dir() => fs::remove_dir(target),
        Ok(_) => fs::remove_file(target),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(e),
    };
    removed.context(|| format!("removing {}", target.display()))?;
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
    if matches!(attachment.capability.access, Access::Mount { .. })
        && !filesystem::mount_at(path)?.is_some_and(|mount| mount.shows(&device))
    {
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
        && !attachment.capability.mode.read_only()
    {
        grow_filesystem(store, &mut volume, &device, &attachment.staging_path)?;
    }
    Ok(volume.capacity_bytes)
}

/// Thaws the filesystem of a volume that a dead process may have left frozen.
pub fn thaw_left_over(store: &Store, volume_id: &str) -> Result<()> {
    let reading = store.catalog.read()?;
    let (Some(volume), Some(attachment)) =
        (reading.get::<Volume>(volume_id)?, reading.get::<Attachment>(volume_id)?)
    else {
        return Ok(());
    };
    let Some(device) = store.device_of(&volume)? else { return Ok(()) };
    let path = &attachment.staging_path;
    if filesystem::mount_at(path)?.is_some_and(|mount| mount.shows(&device))
        && filesystem::thaw_left_over(path)?
    {
        tracing::warn!(volume = volume_id, "thawed a filesystem that a crash had left frozen");
    }
    Ok(())
}

/// Forgets an attachment of which the kernel knows nothing any more, as after a reboot.
pub fn forget_if_gone(store: &Store, attachment: &Attachment) -> Result<()> {
    let path = store.volume_path(&attachment.volume_id);
    if let Ok(backing) = File::open(&path)
        && !LoopDevice::find(&backing)?.is_empty()
    {
        return Ok(());
    }
    tracing::info!(volume = attachment.volume_id, "no longer attached; forgetting where it was");
    store.catalog.write(|tx| tx.remove::<Attachment>(&attachment.volume_id))
}
