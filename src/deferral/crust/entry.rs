//! Entries on disk. Every file is written next to the entries, synced, and renamed into its entry,
//! so that a reader sees all of it or nothing. A crash leaves at most a file whose name no reader
//! uses, and never an unknown file in an entry. Each step opens the entry's directory once and
//! never through a link.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag, openat, renameat};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, unlinkat};
use sha2::{Digest, Sha256};

use super::{MountInfo, Problem, Result, Target, trust};
use common::fail_point::hit;

const MOUNT_INFO: &str = "mountInfo.json";
const RUNTIME_CLI: &str = "runtime-cli";
/// An addition to the proposal: the target path, which cannot be derived from the entry's name, its
/// hash.
const TARGET: &str = "target";
/// Prefix of files that are being written. No entry has such a name.
const PARTIAL: &str = ".partial.";
/// Maximum bytes of a file.
const MAX_FILE: u64 = 64 << 10;
const DIRECTORY_MODE: u32 = 0o700;
const FILE_MODE: Mode = Mode::from_bits_truncate(0o600);

/// The directory of all entries.
#[derive(Debug, Clone)]
pub struct Directory {
    root: PathBuf,
}

/// The lock on a directory; it is released on drop.
#[derive(Debug)]
pub struct DirectoryLock {
    _lock: Flock<File>,
}

impl Directory {
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Creates the directory if it is missing, and locks it. A directory that others can write to,
    /// or that another process has locked, is refused.
    pub fn lock(&self) -> Result<DirectoryLock> {
        create_directory(&self.root)?;
        self.check()?;
        let what = || format!("opening {}", self.root.display());
        let opened = File::open(&self.root).map_err(|e| Problem::io(what(), e))?;
        match Flock::lock(opened, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => Ok(DirectoryLock { _lock: lock }),
            Err((_, Errno::EWOULDBLOCK)) => Err(Problem::Unsafe(format!(
                "{}: another process uses this directory; stop it, or choose another directory",
                self.root.display()
            ))),
            Err((_, errno)) => Err(Problem::io(what(), errno.into())),
        }
    }

    /// Checks that the directory exists and that only root can write to it.
    pub fn check(&self) -> Result<()> {
        trust::directory(&self.root).map(drop)
    }

    /// The entry of a target, whether or not it exists.
    pub fn entry(&self, target: &Target) -> Entry {
        let digest = Sha256::digest(target.as_path().as_os_str().as_bytes());
        let name: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        Entry { path: self.root.join(name) }
    }

    /// All entries, including incomplete ones. Empty if the directory does not exist.
    pub fn entries(&self) -> Result<Vec<Entry>> {
        let is_hash = |name: &[u8]| {
            name.len() == 64 && name.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        };
        self.entries_named(is_hash)
    }

    /// Everything whose name matches. What is no directory is an entry too, and an error when it is
    /// read.
    pub fn entries_named(&self, matches: impl Fn(&[u8]) -> bool) -> Result<Vec<Entry>> {
        let matching =
            self.list()?.into_iter().filter(|found| matches(found.file_name().as_bytes()));
        Ok(matching.map(|found| Entry { path: found.path() }).collect())
    }

    /// Removes incomplete files of at least this age, which a killed writer left.
    pub fn remove_partial(&self, age: Duration) -> Result<()> {
        for found in self.list()? {
            let is_partial = found.file_name().as_bytes().starts_with(PARTIAL.as_bytes())
                && found.file_type().is_ok_and(|kind| kind.is_file());
            let is_old = found.metadata().and_then(|found| found.modified());
            if is_partial && is_old.is_ok_and(|modified| is_older(modified, age)) {
                let path = found.path();
                fs::remove_file(&path)
                    .map_err(|e| Problem::io(format!("removing {}", path.display()), e))?;
            }
        }
        Ok(())
    }

    fn list(&self) -> Result<Vec<fs::DirEntry>> {
        let what = || format!("listing {}", self.root.display());
        let listed = match fs::read_dir(&self.root) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                // A dangling link is not a missing directory.
                return match fs::symlink_metadata(&self.root) {
                    Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
                    Err(e) => Err(Problem::io(what(), e)),
                    Ok(_) => Err(unsafe_directory(&self.root)),
                };
            }
            listed => listed.map_err(|e| Problem::io(what(), e))?,
        };
        listed.map(|found| found.map_err(|e| Problem::io(what(), e))).collect()
    }
}

/// The files of one target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    path: PathBuf,
}

impl Entry {
    /// The entry at this directory, for a layout that names entries differently.
    pub fn at(path: PathBuf) -> Self {
        Self { path }
    }

    /// The entry's directory, where a runtime keeps its own files.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Creates the empty directory of the entry. Idempotent.
    pub fn create_directory(&self) -> Result<()> {
        create_directory(&self.path)
    }

    /// Creates the entry of a target, with the file `target` only. Idempotent.
    pub fn make(&self, target: &Target) -> Result<()> {
        create_directory(&self.path)?;
        // An unreadable file is replaced too.
        if matches!(self.target(), Ok(Some(written)) if written == *target) {
            return Ok(());
        }
        self.write(TARGET, target.as_path().as_os_str().as_bytes())
    }

    /// Writes the complete entry. Idempotent.
    pub fn stage(&self, target: &Target, info: &MountInfo) -> Result<()> {
        self.make(target)?;
        self.write_mount_info(info)
    }

    /// Writes `mountInfo.json`, and nothing else. Idempotent.
    pub fn write_mount_info(&self, info: &MountInfo) -> Result<()> {
        create_directory(&self.path)?;
        match self.mount_info() {
            Ok(Some(written)) if written == *info => Ok(()),
            _ => self.write(MOUNT_INFO, &info.to_json()),
        }
    }

    /// Removes the entry with all its files. Succeeds if it does not exist.
    pub fn unstage(&self) -> Result<()> {
        // Without `mountInfo.json` an entry is incomplete, so this file is removed first.
        match self.remove(MOUNT_INFO) {
            // An unsafe directory is removed without being opened.
            Ok(()) | Err(Problem::Unsafe(_)) => {}
            Err(other) => return Err(other),
        }
        let what = || format!("removing {}", self.path.display());
        match fs::remove_dir_all(&self.path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed
                .and_then(|()| hit("crust.entry.removed"))
                .map_err(|e| Problem::io(what(), e)),
        }?;
        self.path.parent().map_or(Ok(()), sync)
    }

    /// `None`: the entry does not exist or is incomplete.
    pub fn mount_info(&self) -> Result<Option<MountInfo>> {
        self.read(MOUNT_INFO)?.map(|bytes| MountInfo::parse(&bytes)).transpose()
    }

    /// The entry's target. `None`: the file is missing.
    pub fn target(&self) -> Result<Option<Target>> {
        let Some(bytes) = self.read(TARGET)? else { return Ok(None) };
        let path = PathBuf::from(std::ffi::OsStr::from_bytes(&bytes));
        Target::new("target", path).map(Some)
    }

    /// The program of the runtime that has claimed the volume. `None`: the volume is unclaimed.
    pub fn runtime_cli(&self) -> Result<Option<PathBuf>> {
        let Some(bytes) = self.read(RUNTIME_CLI)? else { return Ok(None) };
        let line = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
        Ok(Some(PathBuf::from(std::ffi::OsStr::from_bytes(line))))
    }

    pub fn write_runtime_cli(&self, program: &Path) -> Result<()> {
        self.write(RUNTIME_CLI, program.as_os_str().as_bytes())
    }

    pub fn remove_runtime_cli(&self) -> Result<()> {
        self.remove(RUNTIME_CLI)
    }

    /// The names of all files that crust_ops did not write, which are the runtime's. Empty if the
    /// entry does not exist.
    pub fn runtime_files(&self) -> Result<Vec<String>> {
        if self.open()?.is_none() {
            return Ok(Vec::new());
        }
        let within = Directory::new(&self.path).list()?;
        let names = within.iter().map(|found| found.file_name().to_string_lossy().into_owned());
        Ok(names.filter(|name| name != MOUNT_INFO && name != TARGET).collect())
    }

    /// Whether the entry exists, complete or not.
    pub fn exists(&self) -> Result<bool> {
        match fs::symlink_metadata(&self.path) {
            Ok(_) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(Problem::io(format!("reading {}", self.path.display()), e)),
        }
    }

    /// Whether the entry exists and has not changed for `age`.
    pub fn is_unchanged_for(&self, age: Duration) -> bool {
        let modified = fs::symlink_metadata(&self.path).and_then(|found| found.modified());
        modified.is_ok_and(|modified| is_older(modified, age))
    }

    /// Reads a file of the entry. `None`: it does not exist.
    pub fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let Some(directory) = self.open()? else { return Ok(None) };
        let path = self.path.join(name);
        let what = || format!("reading {}", path.display());
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        let file = match openat(&directory, file_name(name)?, flags, Mode::empty()) {
            Err(Errno::ENOENT) => return Ok(None),
            Err(Errno::ELOOP) => return Err(unsafe_file(&path)),
            opened => File::from(opened.map_err(|e| Problem::io(what(), e.into()))?),
        };
        let metadata = file.metadata().map_err(|e| Problem::io(what(), e))?;
        if !metadata.is_file() || !is_private(&metadata) {
            return Err(unsafe_file(&path));
        }
        let mut bytes = Vec::new();
        file.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(|e| Problem::io(what(), e))?;
        if bytes.len() as u64 > MAX_FILE {
            return Err(Problem::Unsafe(format!(
                "{}: is larger than {MAX_FILE} bytes",
                path.display()
            )));
        }
        Ok(Some(bytes))
    }

    /// Replaces a file of the entry, atomically and durably.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let path = self.path.join(name);
        let what = || format!("writing {}", path.display());
        let Some(directory) = self.open()? else {
            return Err(Problem::io(what(), io::ErrorKind::NotFound.into()));
        };
        let name = file_name(name)?;
        let written = Partial::write(&self.path, bytes).and_then(|partial| {
            partial.become_file(&directory, name)?;
            hit("crust.file.named")?;
            nix::unistd::fsync(&directory)?;
            Ok(())
        });
        written.map_err(|e| Problem::io(what(), e))
    }

    /// Succeeds if the file does not exist.
    pub fn remove(&self, name: &str) -> Result<()> {
        let Some(directory) = self.open()? else { return Ok(()) };
        let removed = match unlinkat(&directory, file_name(name)?, UnlinkatFlags::NoRemoveDir) {
            Err(Errno::ENOENT) => return Ok(()),
            removed => removed.map_err(io::Error::from),
        };
        let durable = removed.and_then(|()| {
            hit("crust.file.removed")?;
            Ok(nix::unistd::fsync(&directory)?)
        });
        durable.map_err(|e| Problem::io(format!("removing {}", self.path.join(name).display()), e))
    }

    /// Opens the entry's directory, which only its owner may write to. `None`: it does not exist.
    fn open(&self) -> Result<Option<OwnedFd>> {
        let what = || format!("opening {}", self.path.display());
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let directory = match nix::fcntl::open(&self.path, flags, Mode::empty()) {
            Err(Errno::ENOENT) => return Ok(None),
            Err(Errno::ELOOP | Errno::ENOTDIR) => return Err(unsafe_directory(&self.path)),
            opened => File::from(opened.map_err(|e| Problem::io(what(), e.into()))?),
        };
        let metadata = directory.metadata().map_err(|e| Problem::io(what(), e))?;
        if !is_private(&metadata) {
            return Err(unsafe_directory(&self.path));
        }
        Ok(Some(directory.into()))
    }
}

/// A file that is being written and has no final name yet; removed on drop.
struct Partial {
    directory: OwnedFd,
    name: String,
    named: bool,
}

impl Partial {
    /// Writes the file next to the entry.
    fn write(entry: &Path, bytes: &[u8]) -> io::Result<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PARTIAL}{}.{number}", std::process::id());
        let directory = entry.parent().ok_or(io::ErrorKind::InvalidInput)?;
        let directory: OwnedFd = File::open(directory)?.into();
        // A killed process with the same id may have left a file.
        let _ = unlinkat(&directory, name.as_str(), UnlinkatFlags::NoRemoveDir);
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
        let mut file = File::from(openat(&directory, name.as_str(), flags, FILE_MODE)?);
        let partial = Self { directory, name, named: false };
        file.write_all(bytes)?;
        file.sync_all()?;
        hit("crust.file.written")?;
        Ok(partial)
    }

    fn become_file(mut self, directory: impl AsFd, name: &str) -> io::Result<()> {
        renameat(&self.directory, self.name.as_str(), directory, name)?;
        self.named = true;
        Ok(())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.named {
            let _ = unlinkat(&self.directory, self.name.as_str(), UnlinkatFlags::NoRemoveDir);
        }
    }
}

/// Checks that the name has one path component.
fn file_name(name: &str) -> Result<&str> {
    match name {
        "" | "." | ".." => Err(Problem::invalid("name", "is not a file name")),
        name if name.contains('/') => Err(Problem::invalid("name", "is not a file name")),
        name => Ok(name),
    }
}

/// Whether this user owns the file and only this user can write to it.
fn is_private(metadata: &fs::Metadata) -> bool {
    metadata.uid() == nix::unistd::geteuid().as_raw() && metadata.mode() & 0o022 == 0
}

fn unsafe_file(path: &Path) -> Problem {
    Problem::Unsafe(format!("{}: is not a file that only its owner may write to", path.display()))
}

fn unsafe_directory(path: &Path) -> Problem {
    let shown = path.display();
    Problem::Unsafe(format!("{shown}: is not a directory that only its owner may write to"))
}

fn is_older(time: SystemTime, age: Duration) -> bool {
    // A time in the future, after the clock was set back, has not passed.
    time.elapsed().is_ok_and(|elapsed| elapsed >= age)
}

/// Creates a directory and its parents with mode 0700. An existing directory is unchanged.
fn create_directory(path: &Path) -> Result<()> {
    let what = || format!("creating {}", path.display());
    if fs::symlink_metadata(path).is_ok() {
        return Ok(());
    }
    DirBuilder::new()
        .recursive(true)
        .mode(DIRECTORY_MODE)
        .create(path)
        .and_then(|()| hit("crust.entry.made"))
        .map_err(|e| Problem::io(what(), e))?;
    path.parent().map_or(Ok(()), sync)
}

fn sync(directory: &Path) -> Result<()> {
    let synced = File::open(directory).and_then(|directory| directory.sync_all());
    match synced {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        synced => synced.map_err(|e| Problem::io(format!("syncing {}", directory.display()), e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_named_by_the_hash_of_its_target() {
        let directory = Directory::new("/var/run/crust");
        let target = Target::new("path", "/a").unwrap();
        let name = directory.entry(&target).path().file_name().unwrap().to_owned();
        // printf /a | sha256sum
        assert_eq!(name, "6a50dc8584134c7de537c0052ff6d236bf874355e050c90523e0c5ff2a543a28");
    }
}
