//! The runtime of a door, and when its calls end: at a time limit, a signal, or the end of the run.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::{Response, Status};

use crate::client::stop;

/// What all calls of a door share.
pub struct Calls {
    pub runtime: Runtime,
    /// Of each call.
    pub timeout: Duration,
    pub stop: Stop,
}

/// When the run ends early.
#[derive(Debug)]
pub struct Stop {
    /// By the user, or by the time limit.
    early: stop::Stop,
    /// The clean-up runs: it does not stop.
    pub is_cleaning: AtomicBool,
}

impl Calls {
    /// Starts the runtime. `whole` is the time limit of the run.
    ///
    /// # Errors
    /// The system has no threads.
    pub fn start(
        signalled: watch::Receiver<bool>,
        timeout: Duration,
        whole: Duration,
    ) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .context("start the runtime")?;
        let early = stop::Stop::new(signalled, Instant::now() + whole, whole);
        let stop = Stop { early, is_cleaning: AtomicBool::new(false) };
        Ok(Self { runtime, timeout, stop })
    }

    /// From now on SIGINT, SIGTERM and SIGHUP stop the run instead of the process.
    ///
    /// # Errors
    /// The signals cannot be handled.
    pub fn listen(&self, sender: &watch::Sender<bool>) -> Result<()> {
        let _context = self.runtime.enter();
        stop::forward_signals(sender)
    }

    /// One call; nothing if the run was stopped.
    pub fn once<T>(
        &self,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Option<Result<Response<T>, Status>> {
        if self.stop.is_now() {
            return None;
        }
        self.runtime.block_on(async {
            tokio::select! {
                result = tokio::time::timeout(self.timeout, call) => {
                    let late = || Status::deadline_exceeded("no response within --call-timeout");
                    Some(result.unwrap_or_else(|_| Err(late())))
                }
                () = self.stop.wait() => None,
            }
        })
    }
}

impl Stop {
    pub fn is_now(&self) -> bool {
        self.early.check().is_err() && !self.is_cleaning.load(Ordering::Relaxed)
    }

    /// Returns when the run ends early.
    pub async fn wait(&self) {
        if self.is_cleaning.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
        let _early = self.early.whole(std::future::pending::<Result<()>>()).await;
    }
}
