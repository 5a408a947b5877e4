//! Freezes filesystems for a snapshot. The freeze ends by [`Frozen::thaw`], by drop, or by a
//! watchdog at the deadline. If the process is killed, the freeze guard ends it, or else the next
//! start ([`thaw_leftover`]).

use std::fs::File;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::super::error::{Context, Error, Result};
use super::super::fail_point::{hit, reach};
use super::super::freeze_guard::{Guard, Hold};
use super::super::sys;

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
                return Err(Error::Busy(
                    "the filesystem is already frozen by another program; thaw it (fsfreeze -u)"
                        .to_owned(),
                ));
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

/// Thaws a filesystem that a killed process left frozen. Returns false if it was not frozen.
pub fn thaw_leftover(directory: &File) -> Result<bool> {
    match sys::thaw(directory) {
        Ok(()) => reach("freeze.left_over_thawed").map(|()| true),
        Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) => Ok(false),
        Err(e) => Err(Error::io("thawing a filesystem", e)),
    }
}
