//! Publishing a volume that a container runtime mounts in the place of this host (KEP-2857).

use std::path::Path;
use std::time::Duration;

use super::super::deferral;
use super::super::error::{Error, Result};
use super::super::filesystem;
use super::super::loop_device::LoopDevice;
use super::super::model::{Access, Attachment, Deferral, Format, Mounted, Publication, Volume};
use super::super::runtime::DeferredMount;
use super::super::store::Store;
use super::super::target::check_directory;
use super::not_staged;

/// How long what somebody has mounted may take to go.
const PATIENCE: Duration = Duration::from_secs(1);

/// Intent, target, word to the runtime. Whatever fails after the intent, the row stays: the call is repeated, or the volume
/// unpublished. The caller holds the volume's lock and has checked what a second publish may be.
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
        leave(&mut attachment, device)?;
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

/// Has nobody here mount the volume any more. It has no target.
fn leave(attachment: &mut Attachment, device: &LoopDevice) -> Result<()> {
    if attachment.mounted == Mounted::AtStaging {
        // Staged by a driver that knew no runtimes.
        filesystem::unmount(&attachment.staging_path, |mount| mount.shows(device))?;
        attachment.mounted = Mounted::AtTargets;
    }
    deferral::wait_until_free(device, PATIENCE)
}
