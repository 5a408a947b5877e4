//! Repairing an ext4 that has recorded errors. The kernel mounts it nevertheless, and may then write
//! to blocks that belong to other files. XFS and btrfs refuse such a mount.

use std::time::Duration;

use tracing::warn;

use super::super::command;
use super::super::error::{Error, Result};
use super::super::fail_point::reach;
use super::super::loop_device::LoopDevice;
use super::super::model::FsType;
use super::grow::Ext4Layout;
use super::{await_tools, mounts_of, tool};

/// A check of many terabytes takes hours. It blocks only calls for its volume.
const LIMIT: Duration = Duration::from_secs(12 * 3600);

/// Repairs the filesystem on `device` if it has recorded errors and is not mounted. Only the repairs
/// of `e2fsck -p` are made, which need no decision. An interrupted repair is repeated: the record is
/// cleared last.
pub fn repair_recorded_errors(fs_type: FsType, device: &LoopDevice) -> Result<()> {
    let has_errors = fs_type == FsType::Ext4 && Ext4Layout::read(&device.open(false)?)?.has_errors;
    if !has_errors || !mounts_of(device)?.is_empty() {
        return Ok(());
    }
    let device = device.path();
    await_tools(device)?;
    // 1: errors were corrected.
    let repaired = command::run_within(LIMIT, tool("e2fsck", &["-p"]).arg(device), &[0, 1]);
    repaired.map_err(|error| {
        Error::Failed(format!(
            "the ext4 of the volume has errors that were not repaired ({error}): restore a snapshot, \
             or run e2fsck while it is staged as a raw block volume"
        ))
    })?;
    warn!(device = %device.display(), "repaired an ext4 with recorded errors");
    reach("filesystem.repaired")
}
