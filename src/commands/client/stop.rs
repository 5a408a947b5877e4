//! When to stop work that must be undone: on a signal, or when time is over. Each step of the work
//! checks, so that the clean-up knows which steps ran.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::{Options, timed_out};
use telemetry::task;

/// A signal has stopped the work.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub struct Interrupted;

/// How long a running call may continue after a signal. Calls take milliseconds; after a cancelled
/// call the clean-up must find out what it did.
const GRACE: Duration = Duration::from_secs(10);

/// Clones share the signal; any thread may check.
#[derive(Debug, Clone)]
pub struct Stop {
    signalled: watch::Receiver<bool>,
    /// Of the whole work.
    deadline: Instant,
    /// Of each step.
    timeout: Duration,
}

/// Sends `true` on SIGINT, SIGTERM and SIGHUP, which no longer end the process. Needs a runtime.
///
/// # Errors
/// The signals cannot be handled.
pub fn forward_signals(sender: &watch::Sender<bool>) -> Result<()> {
    for kind in [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()] {
        let mut signals = signal(kind).context("handle signals")?;
        let sender = sender.clone();
        task::spawn(async move {
            while signals.recv().await.is_some() {
                sender.send_replace(true);
            }
        });
    }
    Ok(())
}

impl Stop {
    /// `signalled` becomes true after a signal.
    pub fn new(signalled: watch::Receiver<bool>, deadline: Instant, timeout: Duration) -> Self {
        Self { signalled, deadline, timeout }
    }

    /// Handles SIGINT, SIGTERM and SIGHUP from now on: they no longer end the process.
    pub fn listen(options: &Options) -> Result<Self> {
        Self::listen_until(options.deadline(), options.timeout)
    }

    /// Leaves signals to their default, which ends the process.
    pub fn without_signals(options: &Options) -> Self {
        let (_, signalled) = watch::channel(false);
        Self::new(signalled, options.deadline(), options.timeout)
    }

    fn listen_until(deadline: Instant, timeout: Duration) -> Result<Self> {
        let (sender, signalled) = watch::channel(false);
        forward_signals(&sender)?;
        Ok(Self::new(signalled, deadline, timeout))
    }

    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// # Errors
    /// It is time to stop.
    pub fn check(&self) -> Result<()> {
        if *self.signalled.borrow() {
            bail!(Interrupted);
        }
        if Instant::now() >= self.deadline {
            bail!("{}", timed_out(self.timeout));
        }
        Ok(())
    }

    /// One step of the work: does not start after a stop, and is cancelled some time after one.
    pub async fn step<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        self.bound(work, GRACE, Instant::now() + self.timeout).await
    }

    /// A step that changes nothing: a stop cancels it at once.
    pub async fn wait<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        self.bound(work, Duration::ZERO, Instant::now() + self.timeout).await
    }

    /// Like [`Self::wait`], for the whole work.
    pub async fn whole<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        self.bound(work, Duration::ZERO, self.deadline).await
    }

    async fn bound<T>(
        &self,
        work: impl Future<Output = Result<T>>,
        grace: Duration,
        deadline: Instant,
    ) -> Result<T> {
        self.check()?;
        tokio::select! {
            outcome = timeout_at(deadline.min(self.deadline), work) => match outcome {
                Ok(outcome) => outcome,
                Err(_) => bail!("{}", timed_out(self.timeout)),
            },
            () = self.signal(grace) => Err(Interrupted.into()),
        }
    }

    /// Returns this long after the first signal.
    async fn signal(&self, grace: Duration) {
        let mut signalled = self.signalled.clone();
        if signalled.wait_for(|signalled| *signalled).await.is_err() {
            // The sender is gone, so no signal will come.
            std::future::pending::<()>().await;
        }
        tokio::time::sleep(grace).await;
    }
}

#[cfg(test)]
impl Stop {
    /// The caller sends the signal.
    pub fn by_hand(timeout: Duration) -> (watch::Sender<bool>, Self) {
        let (sender, signalled) = watch::channel(false);
        (sender, Self::new(signalled, Instant::now() + timeout, timeout))
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
    async fn a_running_step_gets_a_grace_and_the_next_does_not_start() {
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

        // The sender is gone, which is no signal.
        let (_, stop) = Stop::by_hand(Duration::from_millis(20));
        let error = stop.step(std::future::pending::<Result<()>>()).await.unwrap_err();
        assert!(error.to_string().contains("--timeout"), "{error}");
        assert!(stop.check().is_err());
    }

    #[tokio::test]
    async fn the_timeout_limits_a_step_and_not_the_whole() {
        let (_sender, mut stop) = Stop::by_hand(Duration::from_secs(600));
        stop.timeout = Duration::from_millis(20);
        for _ in 0..2 {
            let error = stop.wait(std::future::pending::<Result<()>>()).await.unwrap_err();
            assert!(error.to_string().contains("--timeout"), "{error}");
        }
        stop.check().unwrap();
    }

    #[tokio::test]
    async fn a_signal_stops_the_work_and_not_the_process() {
        let soon = Duration::from_secs(600);
        let stop = Stop::listen_until(Instant::now() + soon, soon).unwrap();
        nix::sys::signal::raise(nix::sys::signal::Signal::SIGHUP).unwrap();
        let error = stop.wait(std::future::pending::<Result<()>>()).await.unwrap_err();
        assert_eq!(error.to_string(), "interrupted");
    }
}
