//! The root of a volume that somebody hostile may be writing to: everything in it is reached from its descriptor, one name at
//! a time, and no link is followed.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat, readlinkat, renameat};
use nix::sys::stat::{FileStat, Mode, SFlag, fchmod, fstat, fstatat, mkdirat};
use nix::unistd::{UnlinkatFlags, symlinkat, unlinkat};

use super::super::super::error::{Error, Result};
use super::super::super::fail_point::reach;
use super::{c_string, generation, io_error};

const DIRECTORY: OFlag =
    OFlag::O_RDONLY.union(OFlag::O_DIRECTORY).union(OFlag::O_NOFOLLOW).union(OFlag::O_CLOEXEC);

/// So much is removed in one call, and no more: the next one goes on.
const MOST_REMOVED: usize = 1 << 18;

pub struct Root(OwnedFd);

impl Root {
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW;
        Ok(Self(File::options().read(true).custom_flags(flags).open(path)?.into()))
    }

    fn directory(&self, name: &[u8]) -> io::Result<OwnedFd> {
        let name = CString::new(name)?;
        Ok(openat(&self.0, name.as_c_str(), DIRECTORY, Mode::empty())?)
    }

    pub fn is_directory(&self, name: &str) -> bool {
        self.directory(name.as_bytes()).is_ok()
    }

    /// Where a link leads; `None` where there is none.
    pub fn link(&self, name: &[u8]) -> Option<PathBuf> {
        let name = CString::new(name).ok()?;
        readlinkat(&self.0, name.as_c_str()).ok().map(PathBuf::from)
    }

    pub fn names(&self, directory: &str) -> io::Result<Names> {
        Names::of(&self.directory(directory.as_bytes())?)
    }

    /// A file of so many bytes, opened for reading; `None` for anything else.
    pub fn read(&self, directory: &str, name: &str, bytes: u64) -> io::Result<Option<File>> {
        let directory = self.directory(directory.as_bytes())?;
        // Looked at before it is opened: to open a device is to use it.
        let fits = |stat: &FileStat| kind(stat) == SFlag::S_IFREG && stat.st_size as u64 == bytes;
        if !fits(&fstatat(&directory, name, AtFlags::AT_SYMLINK_NOFOLLOW)?) {
            return Ok(None);
        }
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        let file = openat(&directory, name, flags, Mode::empty())?;
        Ok(fits(&fstat(&file)?).then(|| File::from(file)))
    }

    /// Makes a directory. The setgid bit that it inherits stays.
    pub fn make_directory(&self, name: &str, mode: u32) -> Result<()> {
        let make = || -> io::Result<()> {
            mkdirat(&self.0, name, Mode::from_bits_truncate(mode))?;
            let made = self.directory(name.as_bytes())?;
            let inherited = fstat(&made)?.st_mode & Mode::S_ISGID.bits();
            Ok(fchmod(&made, Mode::from_bits_truncate(mode | inherited))?)
        };
        make().map_err(|e| io_error("making a directory", e))?;
        reach("content.directory_made")
    }

    /// Writes a file. One that is there is written anew; a link is none.
    pub fn write(&self, directory: &str, name: &str, bytes: &[u8], mode: u32) -> Result<()> {
        let failed = |e: io::Error| io_error("writing a file", e);
        let make = || -> io::Result<File> {
            let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_TRUNC | OFlag::O_NONBLOCK;
            let flags = flags | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            let directory = self.directory(directory.as_bytes())?;
            let file = openat(&directory, name, flags, Mode::S_IRUSR | Mode::S_IWUSR)?;
            fchmod(&file, Mode::from_bits_truncate(mode))?;
            Ok(file.into())
        };
        let mut file = make().map_err(failed)?;
        reach("content.file_made")?;
        file.write_all(bytes).map_err(failed)?;
        reach("content.file_written")
    }

    pub fn make_link(&self, target: &Path, name: &str) -> Result<()> {
        symlinkat(target, &self.0, name).map_err(|e| io_error("making a link", e))?;
        reach("content.link_made")
    }

    pub fn rename(&self, from: &str, to: &str) -> Result<()> {
        renameat(&self.0, from, &self.0, to).map_err(|e| io_error("exchanging a link", e))?;
        reach("content.renamed")
    }
}

fn kind(stat: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(stat.st_mode & SFlag::S_IFMT.bits())
}

/// The names in a directory, as they come.
pub struct Names(Dir);

impl Names {
    fn of(directory: &OwnedFd) -> io::Result<Self> {
        Ok(Self(Dir::openat(directory, ".", DIRECTORY, Mode::empty())?))
    }

    pub fn iter(&mut self) -> impl Iterator<Item = io::Result<CString>> + '_ {
        let names = self.0.iter().map(|entry| Ok(entry?.file_name().to_owned()));
        names.filter(|name| !matches!(name.as_deref(), Ok(name) if name == c"." || name == c".."))
    }
}

/// Removes what is not wanted, however much and however deep, with few descriptors: what is in a directory is lifted out of
/// it instead of being descended into.
#[derive(Debug, Default)]
pub struct Sweep {
    removed: usize,
}

impl Sweep {
    /// Everything in the root that is not to be kept.
    pub fn all_but(&mut self, root: &Root, is_kept: &dyn Fn(&[u8]) -> bool) -> Result<()> {
        loop {
            let before = self.removed;
            let mut names = Names::of(&root.0).map_err(|e| io_error("listing the volume", e))?;
            for name in names.iter() {
                let name = name.map_err(|e| io_error("listing the volume", e))?;
                if !is_kept(name.to_bytes()) {
                    self.tree(root, name.to_bytes())?;
                }
            }
            // What is removed while it is listed may hide something of what is left.
            if self.removed == before {
                return Ok(());
            }
        }
    }

    /// One entry of the root, with all that is in it. OK when it is gone.
    pub fn tree(&mut self, root: &Root, name: &[u8]) -> Result<()> {
        let mut lifted = vec![c_string(name)?];
        while let Some(name) = lifted.last().cloned() {
            if self.remove(&root.0, &name)? {
                lifted.pop();
                continue;
            }
            let directory = match root.directory(name.to_bytes()) {
                Ok(directory) => directory,
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(io_error("opening a directory that is to go", e)),
            };
            if let Some(inner) = self.empty(root, &directory)? {
                lifted.push(inner);
            }
        }
        Ok(())
    }

    /// Removes what is in a directory, up to the first directory in it that is not empty, which becomes one of the root.
    fn empty(&mut self, root: &Root, directory: &OwnedFd) -> Result<Option<CString>> {
        let failed = |e: io::Error| io_error("listing a directory that is to go", e);
        let mut names = Names::of(directory).map_err(failed)?;
        for name in names.iter() {
            let name = name.map_err(failed)?;
            if self.remove(directory, &name)? {
                continue;
            }
            let outside = c_string(generation()?.as_bytes())?;
            renameat(directory, name.as_c_str(), &root.0, outside.as_c_str())
                .map_err(|e| io_error("lifting a directory that is to go", e))?;
            reach("content.lifted")?;
            return Ok(Some(outside));
        }
        Ok(None)
    }

    /// Whether it is gone; false for a directory with something in it.
    fn remove(&mut self, directory: &OwnedFd, name: &CStr) -> Result<bool> {
        if self.removed >= MOST_REMOVED {
            return Err(Error::Busy(format!(
                "the volume held more than {MOST_REMOVED} files that do not belong there; the next call goes on"
            )));
        }
        self.removed += 1;
        let removed = match unlinkat(directory, name, UnlinkatFlags::NoRemoveDir) {
            Err(Errno::EISDIR) => unlinkat(directory, name, UnlinkatFlags::RemoveDir),
            other => other,
        };
        match removed {
            Ok(()) => reach("content.removed").map(|()| true),
            Err(Errno::ENOENT) => Ok(true),
            Err(Errno::ENOTEMPTY | Errno::EEXIST) => Ok(false),
            Err(e) => Err(io_error("removing what does not belong there", e)),
        }
    }
}
