//! The state directory. One writer at a time works on a blocking thread. A disk that hangs delays
//! only the calls that write, each for a limited time.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::refusal::{Refusal, Result};
use crate::crust::{self, Directory, DirectoryLock, Problem};
use telemetry::task;

/// Timeout of a write, including the wait for other writers.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Interval of polling for the writer permit.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The state directory; clones share its lock and writer permit.
#[derive(Debug, Clone)]
pub struct StateDir {
    directory: Directory,
    writer: Arc<Semaphore>,
    lock: Arc<Mutex<Option<DirectoryLock>>>,
}

impl StateDir {
    /// Locks the directory.
    ///
    /// # Errors
    /// Another process has locked it, or others can write to it. After an I/O error it is locked
    /// later.
    pub fn open(directory: Directory) -> crust::Result<Self> {
        let writer = Arc::new(Semaphore::new(1));
        let state_dir = Self { directory, writer, lock: Arc::default() };
        match state_dir.lock_directory() {
            Err(problem @ Problem::Io { .. }) => {
                tracing::error!(%problem, "the state directory is unusable; refusing to defer volumes until it is usable");
            }
            locked => locked?,
        }
        Ok(state_dir)
    }

    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// Whether this process has locked the directory.
    pub fn is_locked(&self) -> bool {
        self.held().is_some()
    }

    /// Locks the directory if it is not locked yet.
    pub fn lock_directory(&self) -> crust::Result<()> {
        let mut held = self.held();
        if held.is_none() {
            *held = Some(self.directory.lock()?);
        }
        Ok(())
    }

    /// Runs `work` on a blocking thread as the only writer.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> crust::Result<T> + Send + 'static,
    ) -> Result<T> {
        let late = || {
            Refusal::StateUnavailable(format!("the operation exceeded its timeout of {TIMEOUT:?}"))
        };
        let worked = async {
            // The semaphore is never closed.
            let permit = self.writer.clone().acquire_owned().await.map_err(|_| late())?;
            let work = task::blocking(move || {
                let _permit = permit;
                work()
            });
            let worked = work.await.map_err(|_| late())?;
            worked.map_err(|problem| Refusal::StateUnavailable(problem.to_string()))
        };
        timeout(TIMEOUT, worked).await.map_err(|_| late())?
    }

    /// Waits for the writer permit on a blocking thread. `None`: the wait timed out.
    pub fn acquire_writer(&self) -> Option<OwnedSemaphorePermit> {
        let until = Instant::now() + TIMEOUT;
        loop {
            match self.writer.clone().try_acquire_owned() {
                Ok(permit) => return Some(permit),
                Err(_) if Instant::now() < until => sleep(POLL_INTERVAL),
                Err(_) => return None,
            }
        }
    }

    fn held(&self) -> MutexGuard<'_, Option<DirectoryLock>> {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
