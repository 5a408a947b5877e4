//! The root directory of a volume that a hostile pod may write to. Every entry is opened from the
//! root's descriptor, one name at a time, without following links.

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
use super::{c_string, io_error, new_generation};

const DIRECTORY: OFlag =
    OFlag::O_RDONLY.union(OFlag::O_DIRECTORY).union(OFlag::O_NOFOLLOW).union(OFlag::O_CLOEXEC);

/// Maximum number of removals in one call. The next call continues.
const MAX_REMOVALS: usize = 1 << 18;

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

    /// The target of a link. `None` if it is not a link.
    pub fn link(&self, name: &[u8]) -> Option<PathBuf> {
        let name = CString::new(name).ok()?;
        readlinkat(&self.0, name.as_c_str()).ok().map(PathBuf::from)
    }

    pub fn names(&self, directory: &str) -> io::Result<Names> {
        Names::of(&self.directory(directory.as_bytes())?)
    }

    /// Opens a regular file of exactly `bytes` bytes for reading. `None` for anything else.
    pub fn read(&self, directory: &str, name: &str, bytes: u64) -> io::Result<Option<File>> {
        let directory = self.directory(directory.as_bytes())?;
        // Check before opening: opening a device has side effects.
        let fits = |stat: &FileStat| kind(stat) == SFlag::S_IFREG && stat.st_size as u64 == bytes;
        if !fits(&fstatat(&directory, name, AtFlags::AT_SYMLINK_NOFOLLOW)?) {
            return Ok(None);
        }
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        let file = openat(&directory, name, flags, Mode::empty())?;
        Ok(fits(&fstat(&file)?).then(|| File::from(file)))
    }

    /// Creates a directory. Keeps the inherited setgid bit.
    pub fn make_directory(&self, name: &str, mode: u32) -> Result<()> {
        let make = || -> io::Result<()> {
            mkdirat(&self.0, name, Mode::from_bits_truncate(mode))?;
            let made = self.directory(name.as_bytes())?;
            let inherited = fstat(&made)?.st_mode & Mode::S_ISGID.bits();
            Ok(fchmod(&made, Mode::from_bits_truncate(mode | inherited))?)
        };
        make().map_err(|e| io_error("creating a directory", e))?;
        reach("content.directory_made")
    }

    /// Writes a file. Truncates an existing file; a link is an error.
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
        symlinkat(target, &self.0, name).map_err(|e| io_error("creating a link", e))?;
        reach("content.link_made")
    }

    pub fn rename(&self, from: &str, to: &str) -> Result<()> {
        renameat(&self.0, from, &self.0, to).map_err(|e| io_error("replacing a link", e))?;
        reach("content.renamed")
    }
}

fn kind(stat: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(stat.st_mode & SFlag::S_IFMT.bits())
}

/// The names in a directory, unordered.
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

/// Removes trees of any size and depth with few descriptors: a subdirectory is moved to the root
/// instead of being descended into.
#[derive(Debug, Default)]
pub struct Sweep {
    removed: usize,
}

impl Sweep {
    /// Removes every entry of the root for which `is_kept` is false.
    pub fn retain(&mut self, root: &Root, is_kept: &dyn Fn(&[u8]) -> bool) -> Result<()> {
        loop {
            let before = self.removed;
            let mut names = Names::of(&root.0).map_err(|e| io_error("listing the volume", e))?;
            for name in names.iter() {
                let name = name.map_err(|e| io_error("listing the volume", e))?;
                if !is_kept(name.to_bytes()) {
                    self.remove_tree(root, name.to_bytes())?;
                }
            }
            // Removing entries during a listing may hide others, so list again.
            if self.removed == before {
                return Ok(());
            }
        }
    }

    /// Removes one entry of the root recursively. Succeeds if it does not exist.
    pub fn remove_tree(&mut self, root: &Root, name: &[u8]) -> Result<()> {
        let mut moved = vec![c_string(name)?];
        while let Some(name) = moved.last().cloned() {
            if self.remove(&root.0, &name)? {
                moved.pop();
                continue;
            }
            let directory = match root.directory(name.to_bytes()) {
                Ok(directory) => directory,
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(io_error("opening an unwanted directory", e)),
            };
            if let Some(inner) = self.empty(root, &directory)? {
                moved.push(inner);
            }
        }
        Ok(())
    }

    /// Removes the entries of a directory up to the first non-empty subdirectory, which it moves to
    /// the root and returns.
    fn empty(&mut self, root: &Root, directory: &OwnedFd) -> Result<Option<CString>> {
        let failed = |e: io::Error| io_error("listing an unwanted directory", e);
        let mut names = Names::of(directory).map_err(failed)?;
        for name in names.iter() {
            let name = name.map_err(failed)?;
            if self.remove(directory, &name)? {
                continue;
            }
            let outside = c_string(new_generation()?.as_bytes())?;
            renameat(directory, name.as_c_str(), &root.0, outside.as_c_str())
                .map_err(|e| io_error("moving an unwanted directory", e))?;
            reach("content.lifted")?;
            return Ok(Some(outside));
        }
        Ok(None)
    }

    /// Removes an entry. Returns false for a non-empty directory.
    fn remove(&mut self, directory: &OwnedFd, name: &CStr) -> Result<bool> {
        if self.removed >= MAX_REMOVALS {
            return Err(Error::Busy(format!(
                "the volume contained more than {MAX_REMOVALS} unwanted files; the next call continues"
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
            Err(e) => Err(io_error("removing an unwanted file", e)),
        }
    }
}
