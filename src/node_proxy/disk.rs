//! The state directory, one writer at a time and off the threads that serve: a disk that stands still holds up those who have something
//! to write, each for a bounded time, and nobody else.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::refusal::{Refusal, Result};
use crate::crust::{self, Directory, Problem, Served};

/// How long a write may take, waiting for others included.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Time between two looks whether it is one's turn.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Cheap to clone.
#[derive(Debug, Clone)]
pub struct Disk {
    directory: Directory,
    turn: Arc<Semaphore>,
    served: Arc<Mutex<Option<Served>>>,
}

impl Disk {
    /// Takes the directory. One that another process serves, or that others may write to, is an error; where the disk is the
    /// trouble it is taken later.
    pub fn open(directory: Directory) -> crust::Result<Self> {
        let disk = Self { directory, turn: Arc::new(Semaphore::new(1)), served: Arc::default() };
        match disk.serve() {
            Err(problem @ Problem::Io { .. }) => {
                tracing::error!(%problem, "the state directory cannot be used; volumes that are to be left to a runtime are refused until it can");
            }
            served => served?,
        }
        Ok(disk)
    }

    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// Whether it is served by this process.
    pub fn is_served(&self) -> bool {
        self.held().is_some()
    }

    /// Takes the directory, if it is not taken.
    pub fn serve(&self) -> crust::Result<()> {
        let mut held = self.held();
        if held.is_none() {
            *held = Some(self.directory.serve()?);
        }
        Ok(())
    }

    /// Does something to the directory when it is its turn.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> crust::Result<T> + Send + 'static,
    ) -> Result<T> {
        let late = || Refusal::NotRemembered(format!("it takes longer than {TIMEOUT:?}"));
        let worked = async {
            // Nobody closes it.
            let turn = self.turn.clone().acquire_owned().await.map_err(|_| late())?;
            let work = spawn_blocking(move || {
                let _turn = turn;
                work()
            });
            let worked = work.await.map_err(|_| late())?;
            worked.map_err(|problem| Refusal::NotRemembered(problem.to_string()))
        };
        timeout(TIMEOUT, worked).await.map_err(|_| late())?
    }

    /// The turn, on a thread that may block. None where it does not come in time.
    pub fn turn(&self) -> Option<OwnedSemaphorePermit> {
        let until = Instant::now() + TIMEOUT;
        loop {
            match self.turn.clone().try_acquire_owned() {
                Ok(turn) => return Some(turn),
                Err(_) if Instant::now() < until => sleep(LOOK_AGAIN),
                Err(_) => return None,
            }
        }
    }

    fn held(&self) -> MutexGuard<'_, Option<Served>> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
