//! Handles a pool whose filesystem has shut down. XFS and ext4 do that when they cannot write their
//! log. Then every file fails until the filesystem is unmounted, which attached volumes prevent.
//! This module detects the state, reports what to do, and releases volumes by the state of the
//! kernel, without the catalog. The next start removes their rows.

use std::fs::File;
use std::io;
use std::path::Path;

use super::attachment::thaw_unpublished;
use super::deferral;
use super::error::{Error, Result};
use super::filesystem::{self, Mount};
use super::ids::{self, INLINE_PREFIX};
use super::loop_device::LoopDevice;
use super::model::{Condition, HealthProblem};
use super::pool::PoolKind;
use super::store::Store;
use super::target::remove_target;
use super::{catalog_path, lock_path};

/// `Unavailable` if the pool's filesystem has shut down or is read-only.
///
/// Such a filesystem refuses to open a file for writing. (statfs and FS_IOC_FSGETXATTR still
/// succeed.) The call does not access the disk, because the inode is in use, and consumes no
/// writeback error.
pub fn check(store: &Store) -> Result<()> {
    let path = catalog_path(store.pool.root());
    match File::options().read(true).write(true).open(&path) {
        Ok(_) => Ok(()),
        Err(error) if is_of_a_lost_filesystem(&error) => {
            Err(Error::Unavailable(describe(store.pool.kind(), &error)))
        }
        Err(error) => Err(Error::io(format!("opening {}", path.display()), error)),
    }
}

fn is_of_a_lost_filesystem(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EIO | libc::EROFS | libc::ESHUTDOWN | libc::EUCLEAN))
}

const REPAIR: &str =
    "repair the filesystem before the mount if it is an ext4 (e2fsck), or if the mount fails";

fn describe(kind: PoolKind, error: &io::Error) -> String {
    let remount = match kind {
        PoolKind::Image => "restart the driver, which mounts the pool again",
        PoolKind::Reflink | PoolKind::Copy => {
            "stop the driver, unmount and mount that filesystem, and start the driver"
        }
    };
    format!(
        "the pool's filesystem has shut down or become read-only after an error ({error}; see the kernel log); delete the pods \
         that use its volumes, so that they are unstaged, then {remount}; {REPAIR}"
    )
}

pub fn is_lost(store: &Store) -> bool {
    matches!(check(store), Err(Error::Unavailable(_)))
}

/// The condition of all volumes if the pool has shut down.
pub fn defect(store: &Store) -> Result<Option<Condition>> {
    match check(store) {
        Err(Error::Unavailable(message)) => {
            Ok(Some(Condition::abnormal(HealthProblem::PoolShutDown, message)))
        }
        checked => checked.map(|()| None),
    }
}

/// Replaces an error by its cause if the pool has shut down.
pub fn explain(store: &Store, error: Error) -> Error {
    match (&error, check(store)) {
        (
            Error::Invalid { .. } | Error::NotFound { .. } | Error::Busy(_) | Error::StaleToken(_),
            _,
        ) => error,
        (_, Err(Error::Unavailable(cause))) => Error::Unavailable(format!("{cause} ({error})")),
        _ => error,
    }
}

/// Maximum number of volumes in the message of a failed start.
const MAX_NAMES: usize = 20;

/// Replaces the error of a failed start if the pool has shut down: its filesystem cannot be
/// unmounted while volumes are attached.
pub fn explain_start(data_dir: &Path, error: Error) -> Error {
    let lock = File::options().write(true).open(lock_path(data_dir));
    let is_of_directory = lock.is_err_and(|error| is_of_a_lost_filesystem(&error));
    let attached = LoopDevice::named_and_lost(is_of_directory.then_some(data_dir));
    let attached = attached.unwrap_or_default();
    // The filesystem of an image pool differs from the one of the data directory.
    let is_io = matches!(&error, Error::Io { source, .. } if is_of_a_lost_filesystem(source));
    if !is_of_directory && (!is_io || attached.is_empty()) {
        return error;
    }
    let what = "the pool's filesystem has shut down or become read-only after an error (see the kernel log)";
    let then = match is_of_directory {
        true => "unmount and mount the filesystem, and start the driver",
        false => "start the driver, which mounts the filesystem again",
    };
    if attached.is_empty() {
        return Error::Unavailable(format!("{what}; {then}; {REPAIR} ({error})"));
    }
    let name = |(device, id): &(LoopDevice, String)| format!("{id} ({})", device.path().display());
    let mut names: Vec<String> = attached.iter().take(MAX_NAMES).map(name).collect();
    if attached.len() > MAX_NAMES {
        names.push(format!("{} more", attached.len() - MAX_NAMES));
    }
    Error::Unavailable(format!(
        "{what}, and attached volumes keep it mounted: {}; delete the pods that use them, unmount their filesystems \
         (umount), detach the devices (losetup -d), then {then}; {REPAIR} ({error})",
        names.join(", ")
    ))
}

/// Unpublishes a volume (CSI NodeUnpublishVolume).
pub fn unpublish(store: &Store, volume_id: &str, target: &Path) -> Result<()> {
    let _lock = store.locks.try_lock([volume_id])?;
    let found = device_of(volume_id, target)?;
    let device = found.as_ref().map(|(device, _)| device);
    if store.config.runtime.is_some()
        && filesystem::mount_at(target)?.is_none_or(|mount| mount.is_guard())
    {
        // A container runtime may have mounted it. Taking back an unknown volume does nothing.
        deferral::take_back(store, target, device, deferral::UNMOUNT_TIMEOUT)?;
    }
    match device {
        Some(device) => {
            filesystem::unmount(target, |mount| {
                mount.is_filesystem_of(device) || mount.is_node_of(device)
            })?;
        }
        // The device was detached while its node was mounted. The node is useless now.
        None if ids::name_of(volume_id).is_some() => {
            filesystem::unmount(target, Mount::is_loop_node)?;
        }
        // An inline volume in memory has no device; the source of its mount is its id.
        None => {
            let is_its = |mount: &Mount| {
                mount.source.to_str().is_some_and(|id| is_inline_of(id, &ids::slug(volume_id)))
            };
            if filesystem::mount_at(target)?.is_none_or(|mount| !is_its(&mount)) {
                return Ok(());
            }
            filesystem::unmount(target, is_its)?;
        }
    }
    if let Some((device, id)) = found.filter(|(_, id)| is_inline(id)) {
        device.release_named(&id)?;
    }
    remove_target(target)
}

/// Unmounts and detaches a volume (CSI NodeUnstageVolume).
pub fn unstage(store: &Store, volume_id: &str, staging: &Path) -> Result<()> {
    let _lock = store.locks.try_lock([volume_id])?;
    let Some((device, id)) = device_of(volume_id, staging)? else { return Ok(()) };
    // The path as in mountinfo, with symbolic links resolved.
    let staged_at = filesystem::mount_at(staging)?.map(|mount| mount.target);
    let is_elsewhere = |mount: &Mount| {
        let is_of_device = mount.is_filesystem_of(&device) || mount.is_node_of(&device);
        is_of_device && Some(&mount.target) != staged_at.as_ref()
    };
    if let Some(mount) = filesystem::all_mounts()?.into_iter().find(is_elsewhere) {
        return Err(Error::Precondition(format!(
            "volume_id: {volume_id:?} is still published at {}; unpublish it first",
            mount.target.display()
        )));
    }
    thaw_unpublished(volume_id, &device, [staging]);
    filesystem::unmount(staging, |mount| mount.is_filesystem_of(&device))?;
    device.release_named(&id)
}

fn is_inline(id: &str) -> bool {
    id.split_once('-').is_some_and(|(prefix, _)| prefix == INLINE_PREFIX)
}

fn is_inline_of(id: &str, slug: &str) -> bool {
    is_inline(id) && ids::name_of(id) == Some(slug)
}

/// The device of a volume and the id of its backing file. An inline volume is found by its target
/// and its handle, which is part of the id.
fn device_of(volume_id: &str, target: &Path) -> Result<Option<(LoopDevice, String)>> {
    let devices = LoopDevice::named()?.into_iter();
    if ids::name_of(volume_id).is_some() {
        return Ok(devices.into_iter().find(|(_, id)| id == volume_id));
    }
    let slug = ids::slug(volume_id);
    let mounted = filesystem::mount_at(target)?;
    let mut of_handle = devices.filter(|(device, id)| {
        let is_there = mounted.as_ref().is_some_and(|mount| mount.is_filesystem_of(device));
        is_there && is_inline_of(id, &slug)
    });
    Ok(of_handle.next())
}
