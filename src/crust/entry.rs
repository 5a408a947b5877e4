//! Entries on disk. Every file is written beside the entries, made durable and renamed into its own, so that whoever reads
//! sees all or nothing; a crash leaves at most a file whose name nobody reads, and nothing strange in an entry. An entry's
//! directory is opened once for each step and never through a link.

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
use crate::fail_point::meet;

const MOUNT_INFO: &str = "mountInfo.json";
const RUNTIME_CLI: &str = "runtime-cli";
/// Not the proposal's: the path that the entry's name is the hash of, which cannot be told from it.
const TARGET: &str = "target";
/// How the names of files begin that are being written. No entry is called like this.
const PARTIAL: &str = ".partial.";
/// More than any of these files has.
const MAX_FILE: u64 = 64 << 10;
const DIRECTORY_MODE: u32 = 0o700;
const FILE_MODE: Mode = Mode::from_bits_truncate(0o600);

/// The directory of all entries.
#[derive(Debug, Clone)]
pub struct Directory {
    root: PathBuf,
}

/// Keeps others from serving a directory, as long as it is there.
#[derive(Debug)]
pub struct Served {
    _lock: Flock<File>,
}

impl Directory {
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Makes the directory where there is none, and takes it to serve it: one that others may write to, or that another
    /// process serves, is refused.
    pub fn serve(&self) -> Result<Served> {
        make_directory(&self.root)?;
        self.check()?;
        let what = || format!("opening {}", self.root.display());
        let opened = File::open(&self.root).map_err(|e| Problem::io(what(), e))?;
        match Flock::lock(opened, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => Ok(Served { _lock: lock }),
            Err((_, Errno::EWOULDBLOCK)) => Err(Problem::Unsafe(format!(
                "{}: another process serves it; stop that first, or choose another directory",
                self.root.display()
            ))),
            Err((_, errno)) => Err(Problem::io(what(), errno.into())),
        }
    }

    /// Whether it is there, and nobody's but ours to write to.
    pub fn check(&self) -> Result<()> {
        trust::directory(&self.root).map(drop)
    }

    /// The entry of a target, whether it is there or not.
    pub fn entry(&self, target: &Target) -> Entry {
        let digest = Sha256::digest(target.as_path().as_os_str().as_bytes());
        let name: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        Entry { path: self.root.join(name) }
    }

    /// All entries that there are, with what is none left out. Empty where there is no directory.
    pub fn entries(&self) -> Result<Vec<Entry>> {
        let is_hash = |name: &[u8]| {
            name.len() == 64 && name.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        };
        self.entries_called(is_hash)
    }

    /// The directories in it whose names are like this.
    pub fn entries_called(&self, like: impl Fn(&[u8]) -> bool) -> Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for found in self.list()? {
            let is_directory = found.file_type().is_ok_and(|kind| kind.is_dir());
            if is_directory && like(found.file_name().as_bytes()) {
                entries.push(Entry { path: found.path() });
            }
        }
        Ok(entries)
    }

    /// Removes what writers that are gone have left half written, at least so old.
    pub fn remove_partial(&self, age: Duration) -> Result<()> {
        for found in self.list()? {
            let is_partial = found.file_name().as_bytes().starts_with(PARTIAL.as_bytes())
                && found.file_type().is_ok_and(|kind| kind.is_file());
            let is_old = found.metadata().and_then(|found| found.modified());
            if is_partial && is_old.is_ok_and(|modified| is_past(modified, age)) {
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
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            listed => listed.map_err(|e| Problem::io(what(), e))?,
        };
        listed.map(|found| found.map_err(|e| Problem::io(what(), e))).collect()
    }
}

/// What is handed over for one target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    path: PathBuf,
}

impl Entry {
    /// The entry with this directory, for a layout that names them otherwise.
    pub fn at(path: PathBuf) -> Self {
        Self { path }
    }

    /// Its directory; a runtime keeps its own files there.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes its directory, with nothing in it. Repeating it is nothing.
    pub fn make_directory(&self) -> Result<()> {
        make_directory(&self.path)
    }

    /// Makes the entry of a target, with nothing in it but whose it is. Repeating it is nothing.
    pub fn make(&self, target: &Target) -> Result<()> {
        make_directory(&self.path)?;
        // What is there already may be anything: what cannot be read is replaced as well.
        if matches!(self.target(), Ok(Some(there)) if there == *target) {
            return Ok(());
        }
        self.write(TARGET, target.as_path().as_os_str().as_bytes())
    }

    /// Writes the entry. Repeating it with the same is nothing.
    pub fn stage(&self, target: &Target, info: &MountInfo) -> Result<()> {
        self.make(target)?;
        self.hand_over(info)
    }

    /// Writes what is to be mounted, and nothing else.
    pub fn hand_over(&self, info: &MountInfo) -> Result<()> {
        make_directory(&self.path)?;
        match self.mount_info() {
            Ok(Some(there)) if there == *info => Ok(()),
            _ => self.write(MOUNT_INFO, &info.to_json()),
        }
    }

    /// Removes it with all that is in it. OK when it is not there.
    pub fn unstage(&self) -> Result<()> {
        // What says that there is an entry goes first: half of one is none.
        match self.remove(MOUNT_INFO) {
            // What is no directory of ours is not looked into.
            Ok(()) | Err(Problem::Unsafe(_)) => {}
            Err(other) => return Err(other),
        }
        let what = || format!("removing {}", self.path.display());
        match fs::remove_dir_all(&self.path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed
                .and_then(|()| meet("crust.entry.removed"))
                .map_err(|e| Problem::io(what(), e)),
        }?;
        self.path.parent().map_or(Ok(()), sync)
    }

    /// None: there is no entry, or not a whole one.
    pub fn mount_info(&self) -> Result<Option<MountInfo>> {
        self.read(MOUNT_INFO)?.map(|bytes| MountInfo::parse(&bytes)).transpose()
    }

    /// The target that the entry is of, as far as it says.
    pub fn target(&self) -> Result<Option<Target>> {
        let Some(bytes) = self.read(TARGET)? else { return Ok(None) };
        let path = PathBuf::from(std::ffi::OsStr::from_bytes(&bytes));
        Target::new("target", path).map(Some)
    }

    /// The program of the runtime that has claimed the volume. None: no runtime has.
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

    /// The names of all that is in it but what crust_ops writes: what runtimes have left. Empty where there is no entry.
    pub fn left_by_runtimes(&self) -> Result<Vec<String>> {
        if self.open()?.is_none() {
            return Ok(Vec::new());
        }
        let within = Directory::new(&self.path).list()?;
        let names = within.iter().map(|found| found.file_name().to_string_lossy().into_owned());
        Ok(names.filter(|name| name != MOUNT_INFO && name != TARGET).collect())
    }

    /// Whether nothing was written or removed in it for so long. False where there is none.
    pub fn is_untouched_for(&self, age: Duration) -> bool {
        let modified = fs::symlink_metadata(&self.path).and_then(|found| found.modified());
        modified.is_ok_and(|modified| is_past(modified, age))
    }

    /// A file of the entry, whole. None where there is none.
    pub fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let Some(directory) = self.open()? else { return Ok(None) };
        let path = self.path.join(name);
        let what = || format!("reading {}", path.display());
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        let file = match openat(&directory, plain(name)?, flags, Mode::empty()) {
            Err(Errno::ENOENT) => return Ok(None),
            Err(Errno::ELOOP) => return Err(no_file(&path)),
            opened => File::from(opened.map_err(|e| Problem::io(what(), e.into()))?),
        };
        let metadata = file.metadata().map_err(|e| Problem::io(what(), e))?;
        if !metadata.is_file() || !is_ours(&metadata) {
            return Err(no_file(&path));
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
        let name = plain(name)?;
        let written = Partial::write(&self.path, bytes).and_then(|partial| {
            partial.become_file(&directory, name)?;
            meet("crust.file.named")?;
            nix::unistd::fsync(&directory)?;
            Ok(())
        });
        written.map_err(|e| Problem::io(what(), e))
    }

    /// OK when it is not there.
    pub fn remove(&self, name: &str) -> Result<()> {
        let Some(directory) = self.open()? else { return Ok(()) };
        let removed = match unlinkat(&directory, plain(name)?, UnlinkatFlags::NoRemoveDir) {
            Err(Errno::ENOENT) => return Ok(()),
            removed => removed.map_err(io::Error::from),
        };
        let durable = removed.and_then(|()| {
            meet("crust.file.removed")?;
            Ok(nix::unistd::fsync(&directory)?)
        });
        durable.map_err(|e| Problem::io(format!("removing {}", self.path.join(name).display()), e))
    }

    /// Its directory, which nobody else may write to. None where there is none.
    fn open(&self) -> Result<Option<OwnedFd>> {
        let what = || format!("opening {}", self.path.display());
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let directory = match nix::fcntl::open(&self.path, flags, Mode::empty()) {
            Err(Errno::ENOENT) => return Ok(None),
            Err(Errno::ELOOP | Errno::ENOTDIR) => return Err(no_directory(&self.path)),
            opened => File::from(opened.map_err(|e| Problem::io(what(), e.into()))?),
        };
        let metadata = directory.metadata().map_err(|e| Problem::io(what(), e))?;
        if !is_ours(&metadata) {
            return Err(no_directory(&self.path));
        }
        Ok(Some(directory.into()))
    }
}

/// A file that is written, and has no name yet that anybody reads.
struct Partial {
    directory: OwnedFd,
    name: String,
    named: bool,
}

impl Partial {
    /// Writes it beside the entry.
    fn write(entry: &Path, bytes: &[u8]) -> io::Result<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PARTIAL}{}.{number}", std::process::id());
        let directory = entry.parent().ok_or(io::ErrorKind::InvalidInput)?;
        let directory: OwnedFd = File::open(directory)?.into();
        // One that a process of the same number has left.
        let _ = unlinkat(&directory, name.as_str(), UnlinkatFlags::NoRemoveDir);
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
        let mut file = File::from(openat(&directory, name.as_str(), flags, FILE_MODE)?);
        let partial = Self { directory, name, named: false };
        file.write_all(bytes)?;
        file.sync_all()?;
        meet("crust.file.written")?;
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

/// A name that leads nowhere else.
fn plain(name: &str) -> Result<&str> {
    match name {
        "" | "." | ".." => Err(Problem::invalid("name", "is no name of a file")),
        name if name.contains('/') => Err(Problem::invalid("name", "is no name of a file")),
        name => Ok(name),
    }
}

/// Whether it is this user's, and nobody else may write to it.
fn is_ours(metadata: &fs::Metadata) -> bool {
    metadata.uid() == nix::unistd::geteuid().as_raw() && metadata.mode() & 0o022 == 0
}

fn no_file(path: &Path) -> Problem {
    Problem::Unsafe(format!("{}: is not a file that only its owner may write to", path.display()))
}

fn no_directory(path: &Path) -> Problem {
    let shown = path.display();
    Problem::Unsafe(format!("{shown}: is not a directory that only its owner may write to"))
}

fn is_past(moment: SystemTime, age: Duration) -> bool {
    // A moment to come, by a clock that was set back, is none that has passed.
    moment.elapsed().is_ok_and(|elapsed| elapsed >= age)
}

/// Makes a directory with its parents, for its owner alone. What is there is left as it is.
fn make_directory(path: &Path) -> Result<()> {
    let what = || format!("making {}", path.display());
    if fs::symlink_metadata(path).is_ok() {
        return Ok(());
    }
    DirBuilder::new()
        .recursive(true)
        .mode(DIRECTORY_MODE)
        .create(path)
        .and_then(|()| meet("crust.entry.made"))
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

    #[test]
    fn what_is_staged_is_read_back_and_can_be_taken_back_at_any_time() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = Directory::new(scratch.path().join("crust"));
        let target = Target::new("path", "/some/target").unwrap();
        let entry = directory.entry(&target);
        assert_eq!(entry.mount_info().unwrap(), None);
        entry.unstage().unwrap();
        let info = MountInfo::new("/dev/loop1".into(), "ext4".into(), vec!["noatime".into()]);
        entry.stage(&target, &info).unwrap();
        entry.stage(&target, &info).unwrap();
        assert_eq!(entry.mount_info().unwrap(), Some(info));
        assert_eq!(entry.target().unwrap(), Some(target));
        assert_eq!(directory.entries().unwrap(), std::slice::from_ref(&entry));
        assert_eq!(entry.runtime_cli().unwrap(), None);
        entry.write_runtime_cli(Path::new("/bin/x")).unwrap();
        assert_eq!(entry.runtime_cli().unwrap(), Some("/bin/x".into()));
        entry.unstage().unwrap();
        assert!(directory.entries().unwrap().is_empty());
    }
}
