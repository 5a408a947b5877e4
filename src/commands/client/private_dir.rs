//! Directories of processes that remove them at their end. Only a killed process leaves one; its
//! lock is gone then, and the next process with the same prefix finds the directory and may remove
//! it.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use nix::fcntl::{Flock, FlockArg};
use nix::unistd::geteuid;

/// Directories that a process creates at most until other processes leave one to it.
const ATTEMPTS: u32 = 100;
/// Digits of the number of a run.
const NONCE_DIGITS: usize = 16;

/// A directory that only its user can read, locked until it is dropped.
#[derive(Debug)]
pub struct PrivateDir {
    pub root: PathBuf,
    /// The number of the process's run, which its name ends with.
    pub nonce: String,
    _lock: Flock<File>,
}

impl PrivateDir {
    /// Creates a directory below `parent`, with a name that begins with `prefix`.
    ///
    /// # Errors
    /// It cannot be created.
    pub fn create(parent: &Path, prefix: &str) -> Result<Self> {
        Self::create_with(parent, prefix, |_| {})
    }

    /// `before_lock` is called for each directory before it is locked.
    fn create_with(
        parent: &Path,
        prefix: &str,
        mut before_lock: impl FnMut(&Path),
    ) -> Result<Self> {
        for _ in 0..ATTEMPTS {
            let random = getrandom::u64().map_err(|error| anyhow!("{error}"))?;
            let nonce = format!("{random:016x}");
            let root = parent.join(format!("{prefix}{nonce}"));
            make(&root)?;
            before_lock(&root);
            // A process that removes leftovers may lock the directory first, and remove it.
            if let Some(lock) = lock(&root).filter(|_| root.exists()) {
                return Ok(Self { root, nonce, _lock: lock });
            }
        }
        bail!("other commands remove the directories {prefix}… in {}", parent.display())
    }

    /// The directories below `parent` whose process has ended.
    pub fn abandoned(parent: &Path, prefix: &str) -> Vec<Self> {
        let entries = fs::read_dir(parent).into_iter().flatten().flatten();
        entries
            .filter_map(|entry| {
                let name = entry.file_name().into_string().ok()?;
                let nonce = name.strip_prefix(prefix)?.to_owned();
                let is_nonce =
                    nonce.len() == NONCE_DIGITS && nonce.bytes().all(|b| b.is_ascii_hexdigit());
                let root = entry.path();
                // Another user may have created a directory with such a name.
                let is_own = fs::symlink_metadata(&root)
                    .is_ok_and(|data| data.is_dir() && data.uid() == geteuid().as_raw());
                let lock = lock(&root).filter(|_| is_nonce && is_own)?;
                Some(Self { root, nonce, _lock: lock })
            })
            .collect()
    }
}

/// The lock on a private directory; `None` while another process holds it.
fn lock(root: &Path) -> Option<Flock<File>> {
    let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW;
    let directory = OpenOptions::new().read(true).custom_flags(flags).open(root).ok()?;
    Flock::lock(directory, FlockArg::LockExclusiveNonblock).ok()
}

/// Makes a directory that only its user can read.
///
/// # Errors
/// It exists, or cannot be made.
pub fn make(path: &Path) -> Result<()> {
    fs::DirBuilder::new()
        .mode(0o700)
        .create(path)
        .with_context(|| format!("create {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PREFIX: &str = "csi-loopback-test-";

    #[test]
    fn only_directories_of_ended_processes_are_abandoned() {
        let parent = tempfile::tempdir().unwrap();
        let running = PrivateDir::create(parent.path(), PREFIX).unwrap();
        let abandoned = || PrivateDir::abandoned(parent.path(), PREFIX);
        assert!(abandoned().is_empty());
        for other in ["csi-loopback-test-x", "other"] {
            fs::create_dir(parent.path().join(other)).unwrap();
        }
        let root = running.root.clone();
        drop(running);
        let found: Vec<_> = abandoned().into_iter().map(|one| one.root).collect();
        assert_eq!(found, [root]);
    }

    #[test]
    fn commands_that_start_at_the_same_time_do_not_fail() {
        let parent = tempfile::tempdir().unwrap();
        let abandoned = || PrivateDir::abandoned(parent.path(), PREFIX);
        let mut taken = Vec::new();
        // The other command has locked the first directory, and has removed the second one.
        let own = PrivateDir::create_with(parent.path(), PREFIX, |root| match taken.len() {
            0 => taken.extend(abandoned()),
            1 => {
                taken.extend(abandoned());
                fs::remove_dir(root).unwrap();
            }
            _ => {}
        });
        let own = own.unwrap();
        assert!(own.root.exists() && taken.iter().all(|other| other.root != own.root));
        assert!(taken.len() == 2 && abandoned().is_empty());
    }
}
