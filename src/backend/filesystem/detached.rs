//! Mounts that no directory shows. Two things are done through them: a filesystem that this kernel has mounted where this
//! process cannot look (a container's mount namespace) is reached by joining its superblock, and one that nobody has
//! mounted is looked after with nobody seeing it. Either lasts as long as the [`Root`].
//!
//! A device whose filesystem is *not* live may be mounted by a virtual machine, of which this kernel knows nothing: whoever
//! mounts it then has to know better.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;

use super::super::error::{Context, Error, Result};
use super::super::fail_point::{meet, reach};
use super::super::loop_device::LoopDevice;
use super::super::model::FsType;
use super::super::sys;

/// The root of a filesystem that is mounted nowhere to be seen.
#[derive(Debug)]
pub struct Root(File);

impl Root {
    /// A path to it, for this process and as long as this lives.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.0.as_raw_fd()))
    }

    pub fn into_file(self) -> File {
        self.0
    }
}

/// The filesystem of a device that this kernel has mounted, in whatever mount namespace: each shows its superblocks in
/// sysfs for as long as they live, a frozen one whose last mount is gone among them. (To ask by opening the device for
/// oneself would fail whoever mounts it at that moment.)
pub fn live(device: &LoopDevice) -> Result<Option<FsType>> {
    let Some(name) = device.path().file_name() else { return Ok(None) };
    for fs_type in [FsType::Ext4, FsType::Xfs] {
        if Path::new("/sys/fs").join(fs_type.name()).join(name).exists() {
            return Ok(Some(fs_type));
        }
    }
    let by_identity = match fs::read_dir("/sys/fs/btrfs") {
        // The kernel has not loaded it, so nothing of it is mounted.
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

/// Joins the live superblock of a device, frozen or not; `None` when there is none.
pub fn join(device: &LoopDevice, write: bool) -> Result<Option<Root>> {
    let Some(fs_type) = live(device)? else { return Ok(None) };
    // Should it go away at this very moment, this would be a mount of its own: one that changes nothing.
    let to_look: &[&str] = match fs_type {
        FsType::Ext4 => &["ro", "noload"],
        FsType::Xfs => &["ro", "norecovery", "nouuid"],
        FsType::Btrfs => &["ro", "rescue=nologreplay"],
    };
    let joined = match write {
        true => mount(device, fs_type, to_write(fs_type)),
        false => match mount(device, fs_type, to_look) {
            // A live superblock is joined as what it is: whoever asks for the other is told this.
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {
                mount(device, fs_type, to_write(fs_type))
            }
            joined => joined,
        },
    };
    let doing = || format!("joining the filesystem that is mounted of {}", device.path().display());
    joined.context(doing).map(|root| Some(Root(root)))
}

/// Mounts, for writing, what nobody has mounted. `Busy` when somebody has: the superblock would be one with his.
pub fn mount_unseen(device: &LoopDevice, fs_type: FsType) -> Result<Root> {
    if live(device)?.is_some() {
        return Err(Error::Busy(format!(
            "{} is mounted somewhere; try again when it is not",
            device.path().display()
        )));
    }
    let doing =
        || format!("mounting {} ({fs_type}): check the kernel log", device.path().display());
    mount(device, fs_type, to_write(fs_type)).context(doing).map(Root)
}

/// A restored volume has the identity of its source, which may be mounted too.
const fn to_write(fs_type: FsType) -> &'static [&'static str] {
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
    meet("filesystem.mounted_unseen")?;
    // What the mount hangs on is no file that can be asked anything; its root is, and keeps it.
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    Ok(openat(&mounted, ".", flags, Mode::empty())?.into())
}

/// Grows what is mounted at `root` to its device, which has so many bytes. Of xfs and btrfs: their tools insist on a
/// mount that can be seen. (ext4 grows when it is not mounted.)
pub fn grow(root: &Root, fs_type: FsType, device_bytes: u64) -> Result<()> {
    let grown = match fs_type {
        FsType::Xfs => sys::xfs_grow(&root.0, device_bytes),
        FsType::Btrfs => sys::btrfs_grow(&root.0),
        FsType::Ext4 => Err(io::ErrorKind::Unsupported.into()),
    };
    grown.context(|| format!("growing a filesystem ({fs_type})"))?;
    reach("filesystem.grown_unseen")
}
