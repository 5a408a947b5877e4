//! Volumes in use on this node: stage, publish and their reverse, usage and online growth.
//!
//! The catalog's row says what is wanted, the kernel (loop devices, mountinfo) what is there. Every
//! operation writes the row first and then makes the kernel agree, so that repeating any of them,
//! also after a crash, converges.
//!
//! A filesystem is mounted at its staging path and bound to targets (`Mounted::AtStaging`), or, by a driver that knows
//! container runtimes, at no path until it is published: then at each target, or by a runtime in the place of this
//! host, and never by both (`deferred`).

mod deferred;
mod in_use;
mod publish;
mod stage;

use std::fs::File;
use std::io;
use std::path::Path;

use super::error::{Error, Result};
use super::filesystem::{self, Mount};
use super::loop_device::LoopDevice;
use super::store::Store;

pub use in_use::{
    defect, expand, forget_if_gone, is_deferred, readable, stats, thaw_left_over, usage,
};
pub use publish::{publish, unpublish};
pub use stage::{stage, unstage};

/// Whether a mount is of this volume's device: its filesystem, or its node.
fn is_of(mount: &Mount, device: &LoopDevice) -> bool {
    mount.shows(device) || mount.is_node_of(device)
}

/// Whether the device is what is mounted at `path`.
fn shown_at(path: &Path, device: &LoopDevice) -> Result<bool> {
    Ok(filesystem::mount_at(path)?.is_some_and(|mount| is_of(&mount, device)))
}

/// The device of a volume, even when its backing file was deleted under it.
fn device_of(store: &Store, volume_id: &str) -> Result<Option<LoopDevice>> {
    match File::open(store.volume_path(volume_id)) {
        Ok(backing) => Ok(LoopDevice::find(&backing)?.into_iter().next()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => LoopDevice::find_deleted(volume_id),
        Err(e) => Err(Error::io(format!("opening the backing file of {volume_id:?}"), e)),
    }
}

fn not_staged(volume_id: &str, staging: &Path) -> Error {
    Error::Precondition(format!(
        "staging_target_path: {volume_id:?} is not staged at {}; call NodeStageVolume first",
        staging.display()
    ))
}
