//! A fake container runtime for the backend.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use csi_loopback::backend::{
    Condition, Deferral, DeferredMount, Error, FsType, HealthProblem, Result, Runtime,
    RuntimeStats, Usage,
};
use nix::sys::statvfs::statvfs;

use support::container::{Container, INSIDE, inside, path_from_host};
use support::path;

/// The entry for a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub device: PathBuf,
    pub fs_type: FsType,
    pub flags: Vec<String>,
    pub deferral: Deferral,
}

impl Entry {
    /// Mounts the volume in a container.
    pub fn mount(&self) -> Container {
        Container::start(&self.device, self.fs_type.name(), &self.flags)
    }
}

#[derive(Debug, Default)]
pub struct State {
    pub entries: BTreeMap<PathBuf, Entry>,
    /// The container of a target, identified by the process that holds its namespace.
    pub claimed: BTreeMap<PathBuf, u32>,
    /// All calls fail.
    pub unavailable: bool,
}

#[derive(Debug, Default)]
pub struct TestRuntime {
    state: Mutex<State>,
}

impl TestRuntime {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub fn entry(&self, target: &Path) -> Option<Entry> {
        self.state().entries.get(target).cloned()
    }

    /// Starts a container with the deferred volume of `target`.
    pub fn container(&self, target: &Path) -> Container {
        let container = self.entry(target).unwrap().mount();
        self.state().claimed.insert(target.to_owned(), container.pid());
        container
    }

    fn available(&self) -> Result<MutexGuard<'_, State>> {
        let state = self.state();
        if state.unavailable {
            Err(Error::Unavailable("crust_ops is unavailable".to_owned()))
        } else {
            Ok(state)
        }
    }
}

impl Runtime for TestRuntime {
    fn stage(&self, mount: &DeferredMount<'_>) -> Result<()> {
        let entry = Entry {
            device: mount.device.to_owned(),
            fs_type: mount.fs_type,
            flags: mount.flags.to_vec(),
            deferral: *mount.deferral,
        };
        self.available()?.entries.insert(mount.target.to_owned(), entry);
        Ok(())
    }

    fn unstage(&self, target: &Path) -> Result<()> {
        let mut state = self.available()?;
        state.entries.remove(target);
        state.claimed.remove(target);
        Ok(())
    }

    fn stats(&self, target: &Path) -> Result<RuntimeStats> {
        let state = self.available()?;
        let Some(pid) = state.claimed.get(target) else {
            let message = "not claimed by a container runtime".to_owned();
            return Ok(RuntimeStats {
                usage: None,
                condition: Condition::abnormal(HealthProblem::Runtime, message),
            });
        };
        let condition = Condition::healthy("mounted in a container");
        Ok(RuntimeStats { usage: statvfs(&path_from_host(*pid)).ok().map(usage), condition })
    }

    fn expand(&self, target: &Path, _bytes: u64) -> Result<()> {
        let (pid, entry) = {
            let state = self.available()?;
            let pid = state.claimed.get(target).copied();
            let pid = pid.ok_or_else(|| Error::Unavailable("no container".to_owned()))?;
            (pid, state.entries[target].clone())
        };
        let tool = match entry.fs_type {
            FsType::Ext4 => format!("resize2fs {}", path(&entry.device)),
            FsType::Xfs => format!("xfs_growfs -d {INSIDE}"),
            FsType::Btrfs => format!("btrfs filesystem resize max {INSIDE}"),
        };
        inside(pid, &tool);
        Ok(())
    }
}

fn usage(stat: nix::sys::statvfs::Statvfs) -> Usage {
    let bytes = |blocks: u64| blocks * stat.fragment_size();
    Usage::Mount {
        total_bytes: bytes(stat.blocks()),
        used_bytes: bytes(stat.blocks() - stat.blocks_free()),
        available_bytes: bytes(stat.blocks_available()),
        total_inodes: stat.files(),
        used_inodes: stat.files() - stat.files_free(),
        free_inodes: stat.files_free(),
    }
}
