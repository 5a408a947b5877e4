//! The freeze that a snapshot is cut under. It ends by [`Frozen::thaw`], by drop, or by a watchdog at
//! its deadline, whichever comes first; after a crash the freeze guard ends it, or else the next start
//! ([`thaw_left_over`]).

use std::fs::File;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::super::error::{Context, Error, Result};
use super::super::fail_point::{meet, reach};
use super::super::freeze_guard::{Guard, Hold};
use super::super::sys;

/// Mounted filesystems that are frozen while this lives.
#[derive(Debug)]
pub struct Frozen {
    state: Arc<Mutex<State>>,
    since: Instant,
    /// Dropped to end the watchdog.
    _end: Sender<()>,
    /// Dropped when all is thawed, so that no descriptor keeps a mount busy.
    hold: Option<Hold>,
}

#[derive(Debug, Default)]
struct State {
    frozen: Vec<File>,
    expired: bool,
}

impl State {
    /// Thaws what is frozen, and says whether all of it still was; the last error, if any, after all
    /// were tried.
    fn thaw(&mut self) -> Result<bool> {
        let mut result = Ok(true);
        for directory in self.frozen.drain(..) {
            match sys::thaw(&directory).and_then(|()| meet("freeze.thawed")) {
                Ok(()) => {}
                // Somebody else was faster.
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
    /// Freezes the filesystems that these directories are on, all or none, for at most `deadline`. The caller has synced
    /// them, so that the freeze has little to write. `Unavailable` when nobody would thaw them should this process be killed.
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
                        tracing::error!(%error, "the watchdog could not thaw a filesystem");
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
                    "the filesystem was frozen by somebody else; thaw it (fsfreeze -u)".to_owned(),
                ));
            }
            Err(e) => return Err(Error::io("freezing a filesystem", e)),
        }
        let mut state = lock(&self.state);
        state.frozen.push(directory);
        reach("freeze.frozen")?;
        if state.expired { state.thaw().map(drop) } else { Ok(()) }
    }

    /// Ends the freeze and says how long it lasted. An error when it had ended before: what was copied
    /// is then not consistent.
    pub fn thaw(mut self) -> Result<Duration> {
        let (lasted, took) = {
            let mut state = lock(&self.state);
            let lasted = state.thaw()?;
            (lasted && !state.expired, self.since.elapsed())
        };
        drop(self.hold.take());
        if !lasted {
            return Err(Error::Busy(
                "the filesystem did not stay frozen long enough; try again when it is less busy"
                    .to_owned(),
            ));
        }
        Ok(took)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        if let Err(error) = lock(&self.state).thaw() {
            tracing::error!(%error, "a filesystem may still be frozen");
        }
    }
}

/// Thaws a filesystem that a cut left frozen when its process died. False when it was not frozen.
pub fn thaw_left_over(directory: &File) -> Result<bool> {
    match sys::thaw(directory) {
        Ok(()) => reach("freeze.left_over_thawed").map(|()| true),
        Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) => Ok(false),
        Err(e) => Err(Error::io("thawing a filesystem", e)),
    }
}
