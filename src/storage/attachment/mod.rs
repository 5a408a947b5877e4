//! Volumes in use on this node: stage, publish, unstage, unpublish, usage and online growth.
//!
//! The catalog's row holds the desired state; the kernel (loop devices, mountinfo) holds the actual
//! state. Every operation writes the row first and then changes the kernel, so repeating an
//! operation converges, also after a crash.
//!
//! A filesystem is mounted at its staging path and bind-mounted at targets (`Mounted::AtStaging`).
//! With container runtimes configured it is mounted only when it is published
//! (`Mounted::AtTargets`): by this host at each target, or by a runtime (`deferred`), never by
//! both.

mod deferred;
mod freeze;
mod in_use;
mod publish;
mod stage;

use std::path::Path;

use super::error::{Error, Result};
use super::filesystem::{self, Mount};
use super::loop_device::LoopDevice;
use super::pool;
use super::store::Store;

pub use freeze::thaw_unpublished;
pub use in_use::{
    defect, expand, forget_if_gone, is_deferred, stats, stats_or_condition, thaw_leftover, usage,
};
pub use publish::{publish, unpublish};
pub use stage::{stage, unstage};

/// Whether a mount is the filesystem on this device, or its device node.
fn is_of(mount: &Mount, device: &LoopDevice) -> bool {
    mount.is_filesystem_of(device) || mount.is_node_of(device)
}

/// Whether the device is mounted at `path`.
fn is_mounted_at(path: &Path, device: &LoopDevice) -> Result<bool> {
    Ok(filesystem::mount_at(path)?.is_some_and(|mount| is_of(&mount, device)))
}

/// The device of a volume, even if its backing file was deleted.
fn device_of(store: &Store, volume_id: &str) -> Result<Option<LoopDevice>> {
    match pool::open_file(&store.pool.volume_path(volume_id), false)? {
        Some(backing) => Ok(LoopDevice::find(&backing)?.into_iter().next()),
        None => LoopDevice::find_deleted(volume_id),
    }
}

fn not_staged(volume_id: &str, staging: &Path) -> Error {
    Error::Precondition(format!(
        "staging_target_path: {volume_id:?} is not staged at {}; stage it there first",
        staging.display()
    ))
}
