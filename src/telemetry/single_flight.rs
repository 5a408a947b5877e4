//! Work that may block as long as a disk does. It runs on its own thread, at most once at a time;
//! concurrent requests share the result.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;

type Result<T, E = NoResult> = std::result::Result<T, E>;

/// Why there is no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoResult {
    /// The work did not finish in time and continues.
    TimedOut,
    /// The work panicked, or its thread could not be started.
    Failed,
}

/// Repeated work with at most one run at a time. Clones share the run.
pub struct SingleFlight<T> {
    work: Arc<dyn Fn() -> T + Send + Sync>,
    /// The result of the latest run, if it has finished.
    latest: Arc<Mutex<Option<watch::Receiver<Option<T>>>>>,
}

impl<T> Clone for SingleFlight<T> {
    fn clone(&self) -> Self {
        Self { work: self.work.clone(), latest: self.latest.clone() }
    }
}

impl<T: Clone + Send + Sync + 'static> SingleFlight<T> {
    pub fn new(work: Arc<dyn Fn() -> T + Send + Sync>) -> Self {
        Self { work, latest: Arc::default() }
    }

    /// Waits at most `limit` for the result of the current run, or of a new one.
    ///
    /// # Errors
    /// There is no result. A run that times out continues, and no other run starts before it ends.
    pub async fn result(&self, limit: Duration) -> Result<T> {
        let mut run = self.run()?;
        let result = match timeout(limit, run.wait_for(Option::is_some)).await {
            Ok(Ok(result)) => result.clone(),
            Ok(Err(_)) => None,
            Err(_) => return Err(NoResult::TimedOut),
        };
        result.ok_or(NoResult::Failed)
    }

    fn run(&self) -> Result<watch::Receiver<Option<T>>> {
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        // A run that panicked has closed its channel.
        let is_running =
            |run: &&watch::Receiver<Option<T>>| run.borrow().is_none() && run.has_changed().is_ok();
        if let Some(running) = latest.as_ref().filter(is_running) {
            return Ok(running.clone());
        }
        let (done, run) = watch::channel(None);
        let work = self.work.clone();
        let thread = thread::Builder::new().name("check".to_owned());
        thread.spawn(move || done.send_replace(Some(work()))).map_err(|error| {
            tracing::error!(%error, "failed to start a thread");
            NoResult::Failed
        })?;
        *latest = Some(run.clone());
        Ok(run)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn each_request_gets_the_result_of_a_new_run() {
        let count = AtomicUsize::new(0);
        let work = SingleFlight::new(Arc::new(move || count.fetch_add(1, Ordering::Relaxed)));
        for expected in 0..3 {
            assert_eq!(work.result(LONG).await, Ok(expected));
        }
    }

    #[tokio::test]
    async fn work_that_panics_fails_and_can_run_again() {
        let first = AtomicUsize::new(0);
        let work = SingleFlight::new(Arc::new(move || {
            assert!(first.fetch_add(1, Ordering::Relaxed) > 0, "on purpose");
        }));
        assert_eq!(work.result(LONG).await, Err(NoResult::Failed));
        assert_eq!(work.result(LONG).await, Ok(()));
    }
}
