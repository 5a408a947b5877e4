//! Ends a freeze by another process (fsfreeze in a backup hook) of a volume that no pod uses. It
//! would hold the device after the last unmount, and block the writes of the next pod.

use std::path::Path;

use tracing::warn;

use super::super::filesystem;
use super::super::loop_device::LoopDevice;

/// Thaws the filesystem on the device of a volume, unless this host has it mounted at a path other
/// than `own`, the volume's paths. The caller knows that the volume is not published, or is being
/// unpublished at its last target, and holds its lock, so no snapshot has it frozen. An error is
/// logged, and must not prevent an unmount.
pub fn thaw_unpublished<'a>(
    volume_id: &str,
    device: &LoopDevice,
    own: impl IntoIterator<Item = &'a Path>,
) {
    let thawed =
        filesystem::is_mounted_only_at(device, own).and_then(|is_unused| match is_unused {
            true => filesystem::thaw_unused(device),
            false => Ok(false),
        });
    match thawed {
        Ok(true) => warn!(
            volume = volume_id,
            "thawed a filesystem that another process had frozen; no pod uses it"
        ),
        Ok(false) => {}
        Err(error) => {
            warn!(volume = volume_id, %error, "failed to check whether another process has frozen a filesystem")
        }
    }
}
