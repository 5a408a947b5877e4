//! The freeze that a snapshot is cut under. It ends by [`Frozen::thaw`], by drop, or by a watchdog at
//! its deadline, whichever comes first; after a crash start-up ends it ([`thaw_left_over`]).

use std::fs::File;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use super::super::error::{Context, Error, Result};
use super::super::sys;

/// Mounted filesystems that are frozen while this lives.
#[derive(Debug)]
pub struct Frozen {
    state: Arc<Mutex<State>>,
    /// Dropped to end the watchdog.
    _end: Sender<()>,
}

#[derive(Debug, Default)]
struct State {
    frozen: Vec<File>,
    expired: bool,
}

impl State {
    /// Thaws what is frozen; the last error, if any, after all were tried.
    fn thaw(&mut self) -> Result<()> {
        let mut result = Ok(());
        for directory in self.frozen.drain(..) {
            match sys::thaw(&directory) {
                Ok(()) => {}
                // Somebody else was faster: it runs, which is what was wanted here.
                Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {}
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
    /// Freezes the filesystems mounted at `paths`, all or none, for at most `deadline`.
    pub fn freeze<'a>(paths: impl Iterator<Item = &'a Path>, deadline: Duration) -> Result<Self> {
        let state = Arc::new(Mutex::new(State::default()));
        let (end, watched) = mpsc::channel();
        let frozen = Self { state: Arc::clone(&state), _end: end };
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
        for path in paths {
            frozen.add(path)?;
        }
        Ok(frozen)
    }

    fn add(&self, path: &Path) -> Result<()> {
        let directory =
            File::open(path).context(|| format!("opening {} to freeze it", path.display()))?;
        // Most of what the freeze would have to write is written before it stops anybody.
        nix::unistd::syncfs(&directory).context(|| format!("syncing {}", path.display()))?;
        match sys::freeze(&directory) {
            Ok(()) => {}
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {
                return Err(Error::Busy(format!(
                    "the filesystem at {} was frozen by somebody else; thaw it (fsfreeze -u)",
                    path.display()
                )));
            }
            Err(e) => return Err(Error::io(format!("freezing {}", path.display()), e)),
        }
        let mut state = lock(&self.state);
        state.frozen.push(directory);
        if state.expired { state.thaw() } else { Ok(()) }
    }

    /// Ends the freeze. An error when it had ended before: what was copied is then not consistent.
    pub fn thaw(self) -> Result<()> {
        let mut state = lock(&self.state);
        state.thaw()?;
        if state.expired {
            return Err(Error::Busy(
                "the filesystem could not be kept frozen long enough; try again when it is less busy"
                    .to_owned(),
            ));
        }
        Ok(())
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        if let Err(error) = lock(&self.state).thaw() {
            tracing::error!(%error, "a filesystem may still be frozen");
        }
    }
}

/// Thaws a filesystem that a cut left frozen when its process died. OK when it is not frozen.
pub fn thaw_left_over(path: &Path) -> Result<bool> {
    let Ok(directory) = File::open(path) else { return Ok(false) };
    match sys::thaw(&directory) {
        Ok(()) => Ok(true),
        Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) => Ok(false),
        Err(e) => Err(Error::io(format!("thawing {}", path.display()), e)),
    }
}
