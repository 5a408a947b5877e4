//! Stage and unstage: a volume's loop device, its filesystem, and the mount at the staging path.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use tracing::warn;

use super::super::error::{Context, Error, Result};
use super::super::fail_point::reach;
use super::super::filesystem;
use super::super::format;
use super::super::growth;
use super::super::loop_device::LoopDevice;
use super::super::maintenance;
use super::super::model::{Access, Attachment, Capability, FsType, Mounted, Volume};
use super::super::sector;
use super::super::store::Store;
use super::super::target::check_directory;
use super::super::volume;
use super::super::writeback;
use super::{device_of, is_mounted_at, thaw_unpublished};

/// Attaches a volume and, unless it is a raw block volume, creates its filesystem if it has none.
/// Mounts it at `path`, unless container runtimes are configured.
pub fn stage(store: &Store, volume_id: &str, path: &Path, capability: &Capability) -> Result<()> {
    let _lock = store.locks.try_lock([volume_id])?;
    let reading = store.catalog.read()?;
    let volume = reading.live_volume(volume_id)?;
    if let Some(attachment) = reading.get::<Attachment>(volume_id)? {
        let attachment = same_stage(attachment, path, capability)?;
        let staged = bring_up(store, volume, &attachment);
        staged.map_err(|error| maintenance::or_exhausted(store, error))?;
        return writeback::staged(store, volume_id);
    }
    let attachment = Attachment {
        volume_id: volume_id.to_owned(),
        staging_path: path.to_owned(),
        capability: capability.clone(),
        published: BTreeMap::new(),
        mounted: match (&store.config.runtime, &capability.access) {
            (Some(_), Access::Mount { .. }) => Mounted::AtTargets,
            (None, _) | (_, Access::Block) => Mounted::AtStaging,
        },
    };
    store.catalog.write(|tx| tx.put(&attachment))?;
    let staged = bring_up(store, volume, &attachment);
    if staged.is_err() {
        // A failed stage leaves nothing attached. If this fails too, the row records what the next
        // stage or unstage must undo.
        let _ = take_down(store, &attachment);
    }
    staged.map_err(|error| maintenance::or_exhausted(store, error))?;
    writeback::staged(store, volume_id)
}

/// Checks that a repeated stage has the same arguments as the first.
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
            "volume_capability: {:?} is staged with another capability; unstage it first",
            attachment.volume_id
        )));
    }
    Ok(attachment)
}

fn bring_up(store: &Store, mut volume: Volume, attachment: &Attachment) -> Result<()> {
    let backing = store.open_for_device(&volume)?;
    volume::complete_growth(store, &mut volume, &backing)?;
    let mut device = LoopDevice::ensure(&backing, volume.sector_size)?;
    if device.size()? < volume.capacity_bytes
        && let Err(error) = device.grow()
    {
        // The condition of the volume reports the size of its device.
        warn!(volume = volume.id, %error, "failed to grow a loop device");
    }
    if attachment.published.is_empty() {
        thaw_unpublished(&volume.id, &device, [attachment.staging_path.as_path()]);
    }
    let Access::Mount { fs_type, .. } = &attachment.capability.access else {
        return format::forget(store, &mut volume);
    };
    let fs_type = format::ensure(store, &mut volume, &backing, &device, *fs_type)?;
    sector::check(&volume, fs_type, &device.open(false)?)?;
    // A container runtime may have mounted a deferred volume; its growth is left to
    // NodeExpandVolume.
    if !attachment.capability.is_read_only() && attachment.deferred_at().is_none() {
        drop(backing);
        filesystem::repair_recorded_errors(fs_type, &device)?;
        device = growth::at_stage(store, &mut volume, device)?;
    }
    match attachment.mounted {
        Mounted::AtStaging => mount(attachment, &device, fs_type),
        Mounted::AtTargets => Ok(()),
    }
}

fn mount(attachment: &Attachment, device: &LoopDevice, fs_type: FsType) -> Result<()> {
    let Attachment { staging_path: path, capability, .. } = attachment;
    let Access::Mount { flags, .. } = &capability.access else { return Ok(()) };
    let read_only = capability.is_read_only();
    fs::create_dir_all(path).context(|| format!("creating {}", path.display()))?;
    reach("stage.directory_made")?;
    if !is_mounted_at(path, device)? {
        check_directory("staging_target_path", path)?;
        filesystem::mount_device(device.path(), path, fs_type, flags, read_only)?;
    }
    Ok(())
}

/// Unmounts and detaches a volume. Succeeds if it is not staged at `path`.
pub fn unstage(store: &Store, volume_id: &str, path: &Path) -> Result<()> {
    let _lock = store.locks.try_lock([volume_id])?;
    let Some(attachment) = store.catalog.read()?.get::<Attachment>(volume_id)? else {
        return Ok(());
    };
    if attachment.staging_path != path {
        return Ok(());
    }
    for (target, publication) in &attachment.published {
        // A deferred volume has no mount on this host; only the row shows that it is published.
        if publication.deferred.is_some() || filesystem::mount_at(target)?.is_some() {
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
    if let Some(device) = device_of(store, id)? {
        let staging = &attachment.staging_path;
        thaw_unpublished(id, &device, [staging.as_path()]);
        if is_mounted_at(staging, &device)? {
            writeback::sync_before_unmount(store, id, staging);
        }
        filesystem::unmount(staging, |mount| mount.is_filesystem_of(&device))?;
        writeback::flush_before_detach(store, id, &device);
        reach("unstage.flushed")?;
        device.release()?;
    }
    writeback::unstaged(store, id)
}
