//! Publishes a deferred volume, which a container runtime mounts instead of this host (KEP-2857).

use std::path::Path;

use super::super::deferral;
use super::super::error::{Error, Result};
use super::super::filesystem;
use super::super::loop_device::LoopDevice;
use super::super::model::{Access, Attachment, Deferral, Format, Mounted, Publication, Volume};
use super::super::runtime::DeferredMount;
use super::super::store::Store;
use super::super::target::check_directory;
use super::not_staged;

/// Writes the intent, creates the target and notifies the runtime. If a step after the intent
/// fails, the row remains: the caller repeats the call or unpublishes the volume. The caller holds
/// the volume's lock and has checked that a second publish is allowed.
pub fn publish(
    store: &Store,
    volume: &Volume,
    mut attachment: Attachment,
    device: &LoopDevice,
    target: &Path,
    wanted: &Publication,
    deferral: &Deferral,
) -> Result<()> {
    let not_staged = || not_staged(&volume.id, &attachment.staging_path);
    let Access::Mount { flags, .. } = &wanted.capability.access else { return Err(not_staged()) };
    if attachment.capability.access == Access::Block {
        return Err(Error::Precondition(format!(
            "volume_capability: {:?} is staged as a raw block volume; unstage it first",
            volume.id
        )));
    }
    let Some(Format { fs_type, unfinished: false, .. }) = volume.format else {
        return Err(not_staged());
    };
    if !attachment.published.contains_key(target) {
        check_directory("target_path", target)?;
        prepare(&mut attachment, device)?;
        attachment.published.insert(target.to_owned(), wanted.clone());
        store.catalog.write(|tx| tx.put(&attachment))?;
    }
    if let Some(found) = deferral::defect(device, &filesystem::all_mounts()?) {
        return Err(Error::Precondition(format!("volume_id: {:?}: {}", volume.id, found.message)));
    }
    let read_only = wanted.is_read_only() || attachment.capability.is_read_only();
    deferral::hand_over(
        store,
        &DeferredMount {
            target,
            device: device.path(),
            fs_type,
            flags: &deferral::mount_flags(flags, fs_type, read_only),
            deferral,
        },
    )
}

/// Ends the mount at the staging path, if there is one. The volume has no target yet.
fn prepare(attachment: &mut Attachment, device: &LoopDevice) -> Result<()> {
    if attachment.mounted == Mounted::AtStaging {
        // Staged before runtimes were configured.
        filesystem::unmount(&attachment.staging_path, |mount| mount.is_filesystem_of(device))?;
        attachment.mounted = Mounted::AtTargets;
    }
    deferral::wait_until_unmounted(device, deferral::PREVIOUS_MOUNT_TIMEOUT)
}
