//! A container runtime as the backend knows one, and containers: processes with a mount namespace of their own, in which the
//! device is mounted.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};

use csi_loopback::backend::{
    Condition, Deferral, DeferredMount, Error, FsType, Result, Runtime, RuntimeStats, Usage,
};
use nix::sys::statvfs::statvfs;

use crate::support::path;

/// Where a container has the volume, in its own namespace.
const INSIDE: &str = "/mnt/v";

/// What was handed over for a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Word {
    pub device: PathBuf,
    pub fs_type: FsType,
    pub flags: Vec<String>,
    pub deferral: Deferral,
}

#[derive(Debug, Default)]
pub struct State {
    pub words: BTreeMap<PathBuf, Word>,
    /// The container of a target, by the process that keeps its namespace.
    pub claimed: BTreeMap<PathBuf, u32>,
    /// All calls fail.
    pub away: bool,
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

    pub fn word(&self, target: &Path) -> Option<Word> {
        self.state().words.get(target).cloned()
    }

    /// Starts a container with the volume that is left here for `target`.
    pub fn container(&self, target: &Path) -> Container {
        let container = Container::start(&self.word(target).unwrap());
        self.state().claimed.insert(target.to_owned(), container.child.id());
        container
    }

    fn answer(&self) -> Result<MutexGuard<'_, State>> {
        let state = self.state();
        if state.away { Err(Error::Unavailable("crust_ops is away".to_owned())) } else { Ok(state) }
    }
}

impl Runtime for TestRuntime {
    fn stage(&self, mount: &DeferredMount<'_>) -> Result<()> {
        let word = Word {
            device: mount.device.to_owned(),
            fs_type: mount.fs_type,
            flags: mount.flags.to_vec(),
            deferral: *mount.deferral,
        };
        self.answer()?.words.insert(mount.target.to_owned(), word);
        Ok(())
    }

    fn unstage(&self, target: &Path) -> Result<()> {
        let mut state = self.answer()?;
        state.words.remove(target);
        state.claimed.remove(target);
        Ok(())
    }

    fn stats(&self, target: &Path) -> Result<RuntimeStats> {
        let state = self.answer()?;
        let Some(pid) = state.claimed.get(target) else {
            let message = "not claimed by a container runtime".to_owned();
            return Ok(RuntimeStats {
                usage: None,
                condition: Condition { abnormal: true, message },
            });
        };
        let condition = Condition { abnormal: false, message: "mounted in a container".to_owned() };
        Ok(RuntimeStats { usage: statvfs(&seen_from_here(*pid)).ok().map(usage), condition })
    }

    fn expand(&self, target: &Path, _bytes: u64) -> Result<()> {
        let (pid, word) = {
            let state = self.answer()?;
            let pid = state.claimed.get(target).copied();
            let pid = pid.ok_or_else(|| Error::Unavailable("no container".to_owned()))?;
            (pid, state.words[target].clone())
        };
        let tool = match word.fs_type {
            FsType::Ext4 => format!("resize2fs {}", path(&word.device)),
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

fn seen_from_here(pid: u32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/root{INSIDE}"))
}

/// Runs a script in a container.
fn inside(pid: u32, script: &str) {
    let pid = pid.to_string();
    let output = Command::new("nsenter").args(["-m", "-t", &pid, "sh", "-ec", script]).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
}

/// It ends with the value.
pub struct Container {
    child: Child,
}

impl Container {
    pub fn start(word: &Word) -> Self {
        let script = format!(
            "mount -t tmpfs none /mnt; mkdir {INSIDE}; mount -t {} -o \"$1\" \"$2\" {INSIDE}; echo up; exec cat",
            word.fs_type
        );
        let mut options = word.flags.join(",");
        if options.is_empty() {
            options.push_str("rw");
        }
        let mut child = Command::new("unshare")
            .args(["-m", "--propagation", "private", "sh", "-ec", &script, "sh", &options])
            .arg(&word.device)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut said).unwrap();
        let container = Self { child };
        assert_eq!(said, "up\n", "the container has not mounted {word:?}");
        container
    }

    /// A file of the volume, as this process reaches it.
    pub fn file(&self, name: &str) -> PathBuf {
        seen_from_here(self.child.id()).join(name)
    }

    /// Runs a script in it.
    pub fn run(&self, script: &str) {
        inside(self.child.id(), script);
    }

    /// Writes on and on, in it, until it ends: `one` is always the first of the two to be written.
    pub fn write_on(&self) -> Writer {
        let script = format!(
            "cd {INSIDE}; n=0; while :; do n=$((n+1)); for f in one two; do \
             echo $n > .$f; sync .$f; mv .$f $f; done; echo $n > $n; rm -f $((n-50)); done"
        );
        let pid = self.child.id().to_string();
        let child = Command::new("nsenter").args(["-m", "-t", &pid, "sh", "-c", &script]).spawn();
        Writer(child.unwrap())
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub struct Writer(Child);

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
