//! Repairing an ext4 that has recorded errors. The kernel mounts it nevertheless, and may then write
//! to blocks that belong to other files. XFS and btrfs refuse such a mount.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use tracing::warn;

use super::super::command;
use super::super::error::{Context, Error, Result};
use super::super::fail_point::reach;
use super::super::model::FsType;
use super::grow::Ext4Layout;
use super::{await_tools, tool};

/// A check of many terabytes takes hours. It blocks only calls for its volume.
const LIMIT: Duration = Duration::from_secs(12 * 3600);

/// Repairs the filesystem on `device`, which nothing has mounted, if it has recorded errors. Only
/// the repairs of `e2fsck -p` are made, which need no decision. An interrupted repair is repeated:
/// the record is cleared last.
pub fn repair_recorded_errors(fs_type: FsType, device: &Path) -> Result<()> {
    if fs_type != FsType::Ext4 || !has_recorded_errors(device)? {
        return Ok(());
    }
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

fn has_recorded_errors(device: &Path) -> Result<bool> {
    let opened = File::open(device).context(|| format!("opening {}", device.display()))?;
    Ok(Ext4Layout::read(&opened)?.has_errors)
}
