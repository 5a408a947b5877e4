//! Entries on disk. Every file is written beside its name, made durable and renamed, so that whoever reads sees all or
//! nothing; a crash leaves at most a file whose name nobody reads.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::{MountInfo, Problem, Result, Target};

const MOUNT_INFO: &str = "mountInfo.json";
const RUNTIME_CLI: &str = "runtime-cli";
/// Not the proposal's: the path that the entry's name is the hash of, which cannot be told from it.
const TARGET: &str = "target";
/// More than any of these files has.
const MAX_FILE: u64 = 64 << 10;
const DIRECTORY_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;

/// The directory of all entries.
#[derive(Debug, Clone)]
pub struct Directory {
    root: PathBuf,
}

impl Directory {
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The entry of a target, whether it is there or not.
    pub fn entry(&self, target: &Target) -> Entry {
        let digest = Sha256::digest(target.as_path().as_os_str().as_bytes());
        let name: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        Entry { path: self.root.join(name) }
    }

    /// All entries that there are, with what is none left out. Empty where there is no directory.
    pub fn entries(&self) -> Result<Vec<Entry>> {
        let what = || format!("listing {}", self.root.display());
        let listed = match fs::read_dir(&self.root) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            listed => listed.map_err(|e| Problem::io(what(), e))?,
        };
        let mut entries = Vec::new();
        for found in listed {
            let found = found.map_err(|e| Problem::io(what(), e))?;
            let is_directory = found.file_type().is_ok_and(|kind| kind.is_dir());
            let name = found.file_name();
            let is_hash = name.len() == 64
                && name.as_bytes().iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
            if is_directory && is_hash {
                entries.push(Entry { path: found.path() });
            }
        }
        Ok(entries)
    }
}

/// What is handed over for one target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    path: PathBuf,
}

impl Entry {
    /// Its directory; a runtime keeps its own files there.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the entry. Repeating it with the same is nothing.
    pub fn stage(&self, target: &Target, info: &MountInfo) -> Result<()> {
        make_directory(&self.path)?;
        if self.target()?.as_ref() != Some(target) {
            self.write(TARGET, target.as_path().as_os_str().as_bytes())?;
        }
        if self.mount_info()?.as_ref() == Some(info) {
            return Ok(());
        }
        self.write(MOUNT_INFO, &info.to_json())
    }

    /// Removes it with all that is in it. OK when it is not there.
    pub fn unstage(&self) -> Result<()> {
        // What says that there is an entry goes first: half of one is none.
        self.remove(MOUNT_INFO)?;
        match fs::remove_dir_all(&self.path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => {
                removed.map_err(|e| Problem::io(format!("removing {}", self.path.display()), e))
            }
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

    /// A file of the entry, whole. None where there is none.
    pub fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let path = self.path.join(name);
        let what = || format!("reading {}", path.display());
        let opened = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(&path);
        let file = match opened {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(|e| Problem::io(what(), e))?,
        };
        let metadata = file.metadata().map_err(|e| Problem::io(what(), e))?;
        if !metadata.is_file()
            || metadata.uid() != nix::unistd::geteuid().as_raw()
            || metadata.mode() & 0o022 != 0
        {
            return Err(Problem::Unsafe(format!(
                "{}: is not a file that only its owner may write to",
                path.display()
            )));
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
        // One writer a process and name: a file that a crash has left is replaced.
        let beside = self.path.join(format!(".{name}.{}", std::process::id()));
        let written = (|| {
            let mut file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(FILE_MODE)
                .custom_flags(libc::O_NOFOLLOW)
                .open(&beside)?;
            file.write_all(bytes)?;
            file.sync_all()?;
            fs::rename(&beside, &path)
        })();
        written.map_err(|e| Problem::io(format!("writing {}", path.display()), e))?;
        sync(&self.path)
    }

    /// OK when it is not there.
    pub fn remove(&self, name: &str) -> Result<()> {
        let path = self.path.join(name);
        match fs::remove_file(&path) {
            Err(e)
                if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
            {
                Ok(())
            }
            Err(e) => Err(Problem::io(format!("removing {}", path.display()), e)),
            Ok(()) => sync(&self.path),
        }
    }
}

/// Makes a directory with its parents, for its owner alone.
fn make_directory(path: &Path) -> Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(DIRECTORY_MODE)
        .create(path)
        .map_err(|e| Problem::io(format!("making {}", path.display()), e))?;
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
