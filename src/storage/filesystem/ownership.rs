//! Changes the group of a mounted tree, as kubelet does for fsGroup (CSI volume_mount_group). Like
//! kubelet, it logs a file that refuses the change, such as an immutable one, and continues: that
//! file must not keep the pod from starting.
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

use nix::dir::{Dir, OwningIter};
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat};
use nix::unistd::{Gid, fchownat};
use tracing::warn;

use super::super::error::{Context, Result};
use super::super::fail_point::hit;
use super::freeze::refuse_frozen;

const SETGID: u32 = 0o2000;
const DIRECTORY_BITS: u32 = SETGID | 0o770;
const FILE_BITS: u32 = 0o660;

/// Maximum depth of a tree: two files are open for each level.
const MAX_DEPTH: usize = 1000;

/// Makes `group` the owner group of everything below `root`, with the owner's access rights, and
/// with setgid on directories so that new files inherit it. Does nothing if the root is already so.
/// `Precondition` if the filesystem is frozen.
pub fn give_to_group(root: &Path, group: u32) -> Result<()> {
    give_tree(root, group, false)
}

/// Like [`give_to_group`], but always changes the whole tree.
pub fn give_all_to_group(root: &Path, group: u32) -> Result<()> {
    give_tree(root, group, true)
}

fn give_tree(root: &Path, group: u32, always: bool) -> Result<()> {
    let doing =
        || format!("changing the group of {} to {group} (volume_mount_group)", root.display());
    let top: OwnedFd = File::open(root).context(doing)?.into();
    let stat = fstat(&top).context(doing)?;
    if !always && stat.st_gid == group && stat.st_mode & DIRECTORY_BITS == DIRECTORY_BITS {
        return Ok(());
    }
    refuse_frozen(root)?;
    let mut gift = Gift { group: Gid::from_raw(group), refused: Refused::default() };
    gift.give_all(&top, &stat).context(doing)?;
    gift.refused.log(root);
    Ok(())
}

/// A change of the group of a tree.
struct Gift {
    group: Gid,
    refused: Refused,
}

/// The files that refused the change.
#[derive(Default)]
struct Refused {
    count: u64,
    first: Option<(CString, io::Error)>,
}

impl Refused {
    fn add(&mut self, name: &CStr, error: impl Into<io::Error>) {
        self.count += 1;
        self.first.get_or_insert_with(|| (name.to_owned(), error.into()));
    }

    fn log(&self, root: &Path) {
        let Some((name, error)) = &self.first else { return };
        let root = root.display();
        warn!(%root, files = self.count, first = ?name, %error, "files of a volume keep their group or mode");
    }
}

impl Gift {
    fn give_all(&mut self, top: &OwnedFd, stat: &FileStat) -> io::Result<()> {
        let mut levels = vec![Level::open(top)?];
        while let Some(level) = levels.last_mut() {
            let Some(entry) = level.names.next() else {
                levels.pop();
                continue;
            };
            let entry = entry?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            let opened = match openat(&level.directory, name, flags, Mode::empty()) {
                Ok(opened) => opened,
                Err(Errno::ENOENT) => continue,
                Err(e) => return Err(e.into()),
            };
            let found = fstat(&opened)?;
            if found.st_dev != stat.st_dev {
                continue;
            }
            self.give(name, &opened, &found)?;
            if kind(&found) != SFlag::S_IFDIR {
                continue;
            }
            if levels.len() < MAX_DEPTH {
                levels.push(Level::open(&opened)?);
            } else {
                self.refused.add(name, Errno::ENAMETOOLONG);
            }
        }
        // The root is last: it marks the tree as complete.
        self.give(c".", top, stat)
    }

    fn give(&mut self, name: &CStr, entry: &OwnedFd, stat: &FileStat) -> io::Result<()> {
        let given = fchownat(entry, "", None, Some(self.group), AtFlags::AT_EMPTY_PATH);
        self.unless_refused(name, given.map_err(io::Error::from))?;
        hit("ownership.group_set")?;
        let bits = match kind(stat) {
            SFlag::S_IFLNK => return Ok(()),
            SFlag::S_IFDIR => DIRECTORY_BITS,
            _ => FILE_BITS,
        };
        // chmod for an O_PATH descriptor: this path is the opened file, whatever its current name.
        let path = PathBuf::from(format!("/proc/self/fd/{}", entry.as_raw_fd()));
        let mode = fs::Permissions::from_mode((stat.st_mode & 0o7777) | bits);
        self.unless_refused(name, fs::set_permissions(path, mode))?;
        hit("ownership.mode_set")
    }

    /// Returns an error unless it concerns this file only, or the lack of room for the change. A
    /// filesystem that has shut down is an error.
    fn unless_refused(&mut self, name: &CStr, changed: io::Result<()>) -> io::Result<()> {
        use libc::{EACCES, EDQUOT, ENOSPC, EOPNOTSUPP, EPERM, EROFS};
        let refusals = [EPERM, EACCES, EROFS, EOPNOTSUPP, ENOSPC, EDQUOT];
        match changed {
            Err(error) if error.raw_os_error().is_some_and(|code| refusals.contains(&code)) => {
                self.refused.add(name, error);
                Ok(())
            }
            changed => changed,
        }
    }
}

/// A directory and its unvisited entries. They are read a part at a time: a directory may have any
/// number.
struct Level {
    directory: OwnedFd,
    names: OwningIter,
}

impl Level {
    fn open(directory: &OwnedFd) -> io::Result<Self> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let names = Dir::openat(directory, ".", flags, Mode::empty())?.into_iter();
        Ok(Self { directory: directory.try_clone()?, names })
    }
}

fn kind(stat: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(stat.st_mode & SFlag::S_IFMT.bits())
}
