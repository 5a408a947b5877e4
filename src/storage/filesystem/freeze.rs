//! Freezes filesystems for a snapshot. The freeze ends by [`Frozen::thaw`], by drop, or by a
//! watchdog at the deadline. If the process is killed, the freeze guard ends it, or else the next
//! start ([`thaw_leftover`]).
//!
//! Another process may freeze a volume as well (fsfreeze in a backup hook). While a pod uses the
//! volume that freeze is reported where it prevents a call ([`refuse_frozen`]), and never ended.
//! When no pod uses it, it is ended ([`thaw_unused`]).

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::statvfs::{FsFlags, fstatvfs};

use super::super::error::{Context, Error, Result};
use super::super::fail_point::{hit, reach};
use super::super::freeze_guard::{Guard, Hold};
use super::super::loop_device::LoopDevice;
use super::super::sys;
use super::detached;
use super::mounts::open_mounted;

/// Mounted filesystems that are frozen as long as this value exists.
#[derive(Debug)]
pub struct Frozen {
    state: Arc<Mutex<State>>,
    since: Instant,
    /// Dropped to stop the watchdog.
    _end: Sender<()>,
    /// Dropped after the thaw, so that no descriptor keeps a mount busy.
    hold: Option<Hold>,
}

#[derive(Debug, Default)]
struct State {
    frozen: Vec<File>,
    expired: bool,
}

impl State {
    /// Thaws all filesystems. Returns whether all were still frozen, or the last error.
    fn thaw(&mut self) -> Result<bool> {
        let mut result = Ok(true);
        for directory in self.frozen.drain(..) {
            match sys::thaw(&directory).and_then(|()| hit("freeze.thawed")) {
                Ok(()) => {}
                // Another process thawed it first.
                Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
                    result = result.map(|_| false);
                }
                Err(e) => result = Err(Error::io("thawing a filesystem", e)),
            }
        }
        result
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Frozen {
    /// Freezes the filesystems of these directories, all or none, for at most `deadline`. The
    /// caller has synced them, so that the freeze writes little. `Unavailable` if no freeze guard
    /// would thaw them after a kill of this process.
    pub fn freeze(guard: &Arc<Guard>, directories: Vec<File>, deadline: Duration) -> Result<Self> {
        let hold = guard.hold(&directories, deadline)?;
        let state = Arc::new(Mutex::new(State::default()));
        let (end, watched) = mpsc::channel();
        let frozen = Self { state: Arc::clone(&state), since: Instant::now(), _end: end, hold };
        thread::Builder::new()
            .name("freeze-watchdog".to_owned())
            .spawn(move || {
                if watched.recv_timeout(deadline) == Err(RecvTimeoutError::Timeout) {
                    let mut state = lock(&state);
                    state.expired = true;
                    if let Err(error) = state.thaw() {
                        tracing::error!(%error, "the freeze watchdog failed to thaw a filesystem");
                    }
                }
            })
            .context(|| "starting the freeze watchdog".to_owned())?;
        directories.into_iter().try_for_each(|directory| frozen.add(directory))?;
        Ok(frozen)
    }

    fn add(&self, directory: File) -> Result<()> {
        match sys::freeze(&directory) {
            Ok(()) => {}
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {
                return Err(Error::Busy(frozen_elsewhere(&directory)));
            }
            Err(e) => return Err(Error::io("freezing a filesystem", e)),
        }
        let mut state = lock(&self.state);
        state.frozen.push(directory);
        reach("freeze.frozen")?;
        if state.expired { state.thaw().map(drop) } else { Ok(()) }
    }

    /// Ends the freeze and returns its duration. An error if it ended before: then the copies are
    /// not consistent.
    pub fn thaw(mut self) -> Result<Duration> {
        let (was_frozen, duration) = {
            let mut state = lock(&self.state);
            let was_frozen = state.thaw()?;
            (was_frozen && !state.expired, self.since.elapsed())
        };
        drop(self.hold.take());
        if !was_frozen {
            return Err(Error::Busy(
                "the filesystem was thawed before the copy was complete; try again when it is less busy"
                    .to_owned(),
            ));
        }
        Ok(duration)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        if let Err(error) = lock(&self.state).thaw() {
            tracing::error!(%error, "failed to thaw a filesystem");
        }
    }
}

/// `Precondition` if the filesystem mounted at `root` is frozen: then a write to it blocks until
/// another process thaws it, and cannot be interrupted. Pods are not affected.
pub fn refuse_frozen(root: &Path) -> Result<()> {
    // The mount may be read-only, and the filesystem not.
    let writable = detached::writable_clone(root).map(detached::Root::into_file);
    let root = File::open(root).context(|| format!("opening {}", root.display()))?;
    let writable = writable.as_ref().unwrap_or(&root);
    // Nothing can be written to a read-only filesystem.
    if fstatvfs(writable).is_ok_and(|found| found.flags().contains(FsFlags::ST_RDONLY)) {
        return Ok(());
    }
    match sys::reconfigure_unchanged(writable) {
        Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {
            Err(Error::Precondition(frozen_elsewhere(&root)))
        }
        // Any other error concerns this check. The write that follows reports its own.
        _ => Ok(()),
    }
}

/// Says that another process froze the filesystem of `root`, and how to end that.
fn frozen_elsewhere(root: &File) -> String {
    let path = fs::read_link(format!("/proc/self/fd/{}", root.as_raw_fd())).unwrap_or_default();
    // A detached mount has no path.
    if path.parent().is_none() {
        return "the filesystem is frozen by another process; end the freeze with fsfreeze --unfreeze in the container that \
                has it mounted"
            .to_owned();
    }
    let path = path.display();
    format!(
        "the filesystem at {path} is frozen by another process; end the freeze (fsfreeze --unfreeze {path}) and try again"
    )
}

/// Maximum number of freezes of one filesystem that are ended together. Linux counts them.
const MAX_FREEZES: usize = 16;

/// Thaws the filesystem on a device, also if another process froze it. The caller knows that no pod
/// uses it: a frozen filesystem would hold the device after the last unmount, and block the next
/// pod. Returns whether it was frozen.
pub fn thaw_unused(device: &LoopDevice) -> Result<bool> {
    let mounted = match open_mounted(device) {
        Ok(mounted) => mounted,
        // Its mounts are covered.
        Err(_) => detached::join(device, false)?.map(detached::Root::into_file),
    };
    let Some(mounted) = mounted else { return Ok(false) };
    let mut freezes = 0;
    while freezes < MAX_FREEZES && thaw_leftover(&mounted)? {
        freezes += 1;
    }
    Ok(freezes > 0)
}

/// Thaws a filesystem that a killed process left frozen. Returns false if it was not frozen.
pub fn thaw_leftover(directory: &File) -> Result<bool> {
    match sys::thaw(directory) {
        Ok(()) => reach("freeze.left_over_thawed").map(|()| true),
        Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) => Ok(false),
        Err(e) => Err(Error::io("thawing a filesystem", e)),
    }
}
