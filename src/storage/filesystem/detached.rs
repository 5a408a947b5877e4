//! Detached mounts, which have no path. They serve two purposes: joining the superblock of a
//! filesystem that this kernel has mounted in another mount namespace, and working on an unmounted
//! filesystem without a visible mount. A mount lasts as long as its [`Root`].
//!
//! A filesystem that this kernel has *not* mounted may be mounted by a virtual machine. The caller
//! must exclude that before it mounts the filesystem for writing.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;

use super::super::error::{Context, Error, Result};
use super::super::fail_point::hit;
use super::super::loop_device::LoopDevice;
use super::super::model::FsType;
use super::super::sys;

/// The root directory of a detached mount.
#[derive(Debug)]
pub struct Root(File);

impl Root {
    /// A path to the root, valid in this process as long as this value exists. Its last part is not
    /// a link.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/.", self.0.as_raw_fd()))
    }

    pub fn file(&self) -> &File {
        &self.0
    }

    pub fn into_file(self) -> File {
        self.0
    }
}

/// The type of the filesystem on a device that this kernel has mounted, in any mount namespace.
/// Superblocks appear in sysfs as long as they exist, also frozen ones without a mount. (Opening
/// the device exclusively would answer this too, but makes a concurrent mount fail.)
pub fn mounted_type(device: &LoopDevice) -> Result<Option<FsType>> {
    mounted_type_at(device.path())
}

/// Whether this kernel has mounted the filesystem on a block device, in any mount namespace.
/// `device` has no symbolic links.
pub fn is_mounted(device: &Path) -> Result<bool> {
    Ok(mounted_type_at(device)?.is_some())
}

fn mounted_type_at(device: &Path) -> Result<Option<FsType>> {
    let Some(name) = device.file_name() else { return Ok(None) };
    for fs_type in [FsType::Ext4, FsType::Xfs] {
        if Path::new("/sys/fs").join(fs_type.name()).join(name).exists() {
            return Ok(Some(fs_type));
        }
    }
    let by_identity = match fs::read_dir("/sys/fs/btrfs") {
        // The kernel module is not loaded, so no btrfs is mounted.
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        listed => listed.context(|| "listing /sys/fs/btrfs".to_owned())?,
    };
    for entry in by_identity {
        let entry = entry.context(|| "listing /sys/fs/btrfs".to_owned())?;
        if entry.path().join("devices").join(name).symlink_metadata().is_ok() {
            return Ok(Some(FsType::Btrfs));
        }
    }
    Ok(None)
}

/// Joins the existing superblock of a device, frozen or not. `None` if there is none.
pub fn join(device: &LoopDevice, write: bool) -> Result<Option<Root>> {
    let Some(fs_type) = mounted_type(device)? else { return Ok(None) };
    // If the superblock disappears now, this becomes a new mount. These options make it change
    // nothing.
    let read_only_options: &[&str] = match fs_type {
        FsType::Ext4 => &["ro", "noload"],
        FsType::Xfs => &["ro", "norecovery", "nouuid"],
        FsType::Btrfs => &["ro", "rescue=nologreplay"],
    };
    let joined = match write {
        true => mount(device, fs_type, write_options(fs_type)),
        false => match mount(device, fs_type, read_only_options) {
            // Joining with the other read-only state fails with EBUSY.
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {
                mount(device, fs_type, write_options(fs_type))
            }
            joined => joined,
        },
    };
    let doing = || format!("joining the mounted filesystem of {}", device.path().display());
    joined.context(doing).map(|root| Some(Root(root)))
}

/// Mounts an unmounted filesystem for writing. `Busy` if it is mounted: both mounts would share one
/// superblock.
pub fn mount_detached(device: &LoopDevice, fs_type: FsType) -> Result<Root> {
    if mounted_type(device)?.is_some() {
        return Err(Error::Busy(format!(
            "{} is mounted; try again after it is unmounted",
            device.path().display()
        )));
    }
    let doing =
        || format!("mounting {} ({fs_type}): check the kernel log", device.path().display());
    mount(device, fs_type, write_options(fs_type)).context(doing).map(Root)
}

/// A writable mount of the filesystem or tmpfs that is mounted at `path`, possibly read-only. The
/// mount at `path` stays as it is.
pub fn writable_clone(path: &Path) -> Result<Root> {
    let cloned = super::clone_mount(path, false).and_then(|mount| open_root(&mount));
    cloned.context(|| format!("cloning the mount at {}", path.display())).map(Root)
}

/// A restored volume has the UUID of its source, which may also be mounted.
const fn write_options(fs_type: FsType) -> &'static [&'static str] {
    match fs_type {
        FsType::Xfs => &["nouuid"],
        FsType::Ext4 | FsType::Btrfs => &[],
    }
}

fn mount(device: &LoopDevice, fs_type: FsType, options: &[&str]) -> io::Result<File> {
    let name = match fs_type {
        FsType::Ext4 => c"ext4",
        FsType::Xfs => c"xfs",
        FsType::Btrfs => c"btrfs",
    };
    let source = device.path().to_str().ok_or(io::ErrorKind::InvalidInput)?;
    let mounted = sys::detached_mount(name, source, options)?;
    hit("filesystem.mounted_unseen")?;
    open_root(&mounted)
}

/// A mount's descriptor is opened with O_PATH and supports no ioctl. The root directory does, and
/// keeps the mount.
fn open_root(mount: &OwnedFd) -> io::Result<File> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    Ok(openat(mount, ".", flags, Mode::empty())?.into())
}
