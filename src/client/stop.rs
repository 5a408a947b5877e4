//! When to stop work that must be undone: on a signal, or when time is up. Each step of the work
//! asks, so that the clean-up always knows which steps were taken.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::timed_out;

/// How long a call that is under way may go on after a signal. Calls take milliseconds; one that is
/// cut off leaves the clean-up to find out what it has done.
const GRACE: Duration = Duration::from_secs(10);

/// Cheap to clone; may be asked from any thread.
#[derive(Debug, Clone)]
pub struct Stop {
    signalled: watch::Receiver<bool>,
    deadline: Instant,
    timeout: Duration,
}

impl Stop {
    /// From here on SIGINT, SIGTERM and SIGHUP no longer end the process, but are told by the value
    /// returned.
    pub fn listen(timeout: Duration) -> Result<Self> {
        let (sender, signalled) = watch::channel(false);
        for kind in [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()] {
            let mut signals = signal(kind).context("listen to signals")?;
            let sender = sender.clone();
            tokio::spawn(async move {
                while signals.recv().await.is_some() {
                    sender.send_replace(true);
                }
            });
        }
        Ok(Self { signalled, deadline: Instant::now() + timeout, timeout })
    }

    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// # Errors
    /// It is time to stop.
    pub fn check(&self) -> Result<()> {
        if *self.signalled.borrow() {
            bail!("interrupted");
        }
        if Instant::now() >= self.deadline {
            bail!("{}", timed_out(self.timeout));
        }
        Ok(())
    }

    /// One step of the work: not begun after a stop, and cut off some time after one.
    pub async fn step<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        self.bound(work, GRACE).await
    }

    /// Work that changes nothing: cut off at once by a stop.
    pub async fn wait<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        self.bound(work, Duration::ZERO).await
    }

    async fn bound<T>(&self, work: impl Future<Output = Result<T>>, grace: Duration) -> Result<T> {
        self.check()?;
        tokio::select! {
            outcome = timeout_at(self.deadline, work) => match outcome {
                Ok(outcome) => outcome,
                Err(_) => bail!("{}", timed_out(self.timeout)),
            },
            () = self.signal(grace) => bail!("interrupted"),
        }
    }

    /// Returns this long after the first signal.
    async fn signal(&self, grace: Duration) {
        let mut signalled = self.signalled.clone();
        if signalled.wait_for(|signalled| *signalled).await.is_err() {
            // Nobody listens any more, so no signal will come.
            std::future::pending::<()>().await;
        }
        tokio::time::sleep(grace).await;
    }
}

#[cfg(test)]
impl Stop {
    /// Without signals of the system.
    pub fn by_hand(timeout: Duration) -> (watch::Sender<bool>, Self) {
        let (sender, signalled) = watch::channel(false);
        (sender, Self { signalled, deadline: Instant::now() + timeout, timeout })
    }

    /// Without signals.
    pub fn unsignalled(timeout: Duration) -> Self {
        Self::by_hand(timeout).1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_step_under_way_gets_a_grace_and_the_next_is_not_begun() {
        let (sender, stop) = Stop::by_hand(Duration::from_secs(600));
        let step = stop.step(async {
            sender.send_replace(true);
            tokio::time::sleep(Duration::from_millis(20)).await;
            Ok(())
        });
        step.await.unwrap();
        let begun = stop.step(async { Ok(()) }).await;
        assert_eq!(begun.unwrap_err().to_string(), "interrupted");
    }

    #[tokio::test]
    async fn waiting_ends_with_a_signal_and_with_the_time() {
        let (sender, stop) = Stop::by_hand(Duration::from_secs(600));
        let waiting = stop.wait(std::future::pending::<Result<()>>());
        let (outcome, _) = tokio::join!(waiting, async { sender.send_replace(true) });
        assert_eq!(outcome.unwrap_err().to_string(), "interrupted");

        // The sender is gone: that is no signal.
        let (_, stop) = Stop::by_hand(Duration::from_millis(20));
        let error = stop.step(std::future::pending::<Result<()>>()).await.unwrap_err();
        assert!(error.to_string().contains("--timeout"), "{error}");
        assert!(stop.check().is_err());
    }

    #[tokio::test]
    async fn a_signal_stops_the_work_and_not_the_process() {
        let stop = Stop::listen(Duration::from_secs(600)).unwrap();
        nix::sys::signal::raise(nix::sys::signal::Signal::SIGHUP).unwrap();
        let error = stop.wait(std::future::pending::<Result<()>>()).await.unwrap_err();
        assert_eq!(error.to_string(), "interrupted");
    }
}
