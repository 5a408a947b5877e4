//! Changes the group of a mounted tree, as kubelet does for fsGroup (CSI volume_mount_group).
//!
//! A hostile pod may write to the tree at the same time, so no path is used: every entry is opened
//! relative to its directory, without following symbolic links, and changed through that
//! descriptor. Other filesystems are not entered.

use std::ffi::{CStr, CString};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat};
use nix::unistd::{Gid, fchownat};

use super::super::error::{Context, Result};
use super::super::fail_point::hit;

const SETGID: u32 = 0o2000;
const DIRECTORY_BITS: u32 = SETGID | 0o770;
const FILE_BITS: u32 = 0o660;

/// Makes `group` the owner group of everything below `root`, with the owner's access rights, and
/// with setgid on directories so that new files inherit it. Does nothing if the root is already so.
pub fn give_to_group(root: &Path, group: u32) -> Result<()> {
    give_tree(root, group, false).context(|| {
        format!("changing the group of {} to {group} (volume_mount_group)", root.display())
    })
}

/// Like [`give_to_group`], but always changes the whole tree.
pub fn give_all_to_group(root: &Path, group: u32) -> Result<()> {
    give_tree(root, group, true)
        .context(|| format!("changing the group of {} to {group}", root.display()))
}

fn give_tree(root: &Path, group: u32, always: bool) -> io::Result<()> {
    let top: OwnedFd = File::open(root)?.into();
    let stat = fstat(&top)?;
    if !always && stat.st_gid == group && stat.st_mode & DIRECTORY_BITS == DIRECTORY_BITS {
        return Ok(());
    }
    let group = Gid::from_raw(group);
    // One directory per level is open at a time.
    let mut levels = vec![Level::open(&top)?];
    while let Some(level) = levels.last_mut() {
        let Some(name) = level.names.pop() else {
            levels.pop();
            continue;
        };
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let entry = match openat(&level.directory, name.as_c_str(), flags, Mode::empty()) {
            Ok(entry) => entry,
            Err(Errno::ENOENT) => continue,
            Err(e) => return Err(e.into()),
        };
        let found = fstat(&entry)?;
        if found.st_dev != stat.st_dev {
            continue;
        }
        give(&entry, &found, group)?;
        if kind(&found) == SFlag::S_IFDIR {
            levels.push(Level::open(&entry)?);
        }
    }
    // The root is last: it marks the tree as complete.
    give(&top, &stat, group)
}

/// A directory and its unvisited entries.
struct Level {
    directory: Dir,
    names: Vec<CString>,
}

impl Level {
    fn open(directory: &OwnedFd) -> io::Result<Self> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let mut directory = Dir::openat(directory, ".", flags, Mode::empty())?;
        let mut names = Vec::new();
        for entry in directory.iter() {
            let name: &CStr = entry.as_ref().map_err(|errno| io::Error::from(*errno))?.file_name();
            if name != c"." && name != c".." {
                names.push(name.to_owned());
            }
        }
        Ok(Self { directory, names })
    }
}

fn kind(stat: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(stat.st_mode & SFlag::S_IFMT.bits())
}

fn give(entry: &OwnedFd, stat: &FileStat, group: Gid) -> io::Result<()> {
    fchownat(entry, "", None, Some(group), AtFlags::AT_EMPTY_PATH)?;
    hit("ownership.group_set")?;
    let bits = match kind(stat) {
        SFlag::S_IFLNK => return Ok(()),
        SFlag::S_IFDIR => DIRECTORY_BITS,
        _ => FILE_BITS,
    };
    // chmod for an O_PATH descriptor: this path is the opened file, whatever its current name.
    let path = PathBuf::from(format!("/proc/self/fd/{}", entry.as_raw_fd()));
    fs::set_permissions(path, fs::Permissions::from_mode((stat.st_mode & 0o7777) | bits))?;
    hit("ownership.mode_set")
}
