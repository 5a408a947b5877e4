//! Work that may block for as long as a disk does: on a thread of its own, and one at a time, however many ask for it.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;

type Result<T, E = NoResult> = std::result::Result<T, E>;

/// Why there is no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoResult {
    /// The work still runs.
    Late,
    /// It panicked, or no thread could be started for it.
    Failed,
}

/// Work that is run again and again. Cheap to clone.
pub struct Alone<T> {
    work: Arc<dyn Fn() -> T + Send + Sync>,
    /// The result of the latest run, once it has one.
    latest: Arc<Mutex<Option<watch::Receiver<Option<T>>>>>,
}

impl<T> Clone for Alone<T> {
    fn clone(&self) -> Self {
        Self { work: self.work.clone(), latest: self.latest.clone() }
    }
}

impl<T: Clone + Send + Sync + 'static> Alone<T> {
    pub fn new(work: Arc<dyn Fn() -> T + Send + Sync>) -> Self {
        Self { work, latest: Arc::default() }
    }

    /// The result of the run that is under way, or else of a new one, if it is there within `patience`.
    ///
    /// # Errors
    /// There is no result; a run that is late goes on, and no other begins until it has ended.
    pub async fn result(&self, patience: Duration) -> Result<T> {
        let mut run = self.run()?;
        let result = match timeout(patience, run.wait_for(Option::is_some)).await {
            Ok(Ok(result)) => result.clone(),
            Ok(Err(_)) => None,
            Err(_) => return Err(NoResult::Late),
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
            tracing::error!(%error, "no thread can be started");
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
    async fn each_request_has_a_result_that_is_not_older_than_the_run_before() {
        let count = AtomicUsize::new(0);
        let work = Alone::new(Arc::new(move || count.fetch_add(1, Ordering::Relaxed)));
        for expected in 0..3 {
            assert_eq!(work.result(LONG).await, Ok(expected));
        }
    }

    #[tokio::test]
    async fn work_that_panics_is_a_failure_and_is_run_again() {
        let first = AtomicUsize::new(0);
        let work = Alone::new(Arc::new(move || {
            assert!(first.fetch_add(1, Ordering::Relaxed) > 0, "on purpose");
        }));
        assert_eq!(work.result(LONG).await, Err(NoResult::Failed));
        assert_eq!(work.result(LONG).await, Ok(()));
    }
}
