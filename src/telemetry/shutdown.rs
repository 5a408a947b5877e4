//! The end of a process, in one place. `Running → Draining → Ending`: at SIGTERM or SIGINT no new
//! work is taken and what runs may finish; when the drain time is over, what still runs is cut off
//! with an error. A second signal exits at once.

use std::io;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use tokio::runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::time::sleep;

/// Threads that serve connections: they only pass messages on.
const THREADS: usize = 2;
/// Threads that may be blocked, of a role that says nothing of it.
pub(super) const BLOCKING_THREADS: usize = 512;
/// How long what was cut off at the end has to tell its clients.
const GRACE: Duration = Duration::from_secs(1);
/// Exit code of a process that a second signal ended: 128 + SIGTERM, as a shell would show it.
const EXIT_AT_ONCE: i32 = 143;

/// Runs a role to its end. What has not ended by then does not keep the process alive. So many `threads` may be blocked at most;
/// they end when idle.
///
/// # Errors
/// The threads cannot be started, or what the role ends with.
pub(super) fn run_to_end(
    threads: usize,
    role: impl Future<Output = anyhow::Result<()>>,
) -> anyhow::Result<ExitCode> {
    let runtime = runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .max_blocking_threads(threads)
        .enable_all()
        .build()
        .context("starting the threads")?;
    let result = runtime.block_on(role);
    runtime.shutdown_background();
    result.map(|()| ExitCode::SUCCESS)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    Running,
    /// Nothing new begins; what runs may finish.
    Draining,
    /// What still runs ends now, with an error.
    Ending,
}

/// Tells how far the end has come. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Shutdown(watch::Receiver<Phase>);

impl Shutdown {
    /// Watches for signals; `drain` is the time from the first one to [`Phase::Ending`]. To be called
    /// inside a runtime.
    pub fn on_signal(drain: Duration) -> io::Result<Self> {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let (phase, shutdown) = Self::by_hand();
        tokio::spawn(async move {
            let name = next_signal(&mut terminate, &mut interrupt).await;
            tracing::info!(signal = name, drain_timeout = ?drain, "draining");
            phase.send_replace(Phase::Draining);
            tokio::select! {
                () = sleep(drain) => { phase.send_replace(Phase::Ending); }
                name = next_signal(&mut terminate, &mut interrupt) => exit_at_once(name),
            }
            exit_at_once(next_signal(&mut terminate, &mut interrupt).await);
        });
        Ok(shutdown)
    }

    /// A shutdown that its sender moves along; dropping the sender ends everything.
    pub fn by_hand() -> (watch::Sender<Phase>, Self) {
        let (sender, receiver) = watch::channel(Phase::Running);
        (sender, Self(receiver))
    }

    /// Whether nothing new may begin.
    pub fn is_draining(&self) -> bool {
        *self.0.borrow() >= Phase::Draining
    }

    /// Waits until nothing new may begin.
    pub async fn draining(&self) {
        self.reached(Phase::Draining).await;
    }

    /// Waits until everything has to end.
    pub async fn ending(&self) {
        self.reached(Phase::Ending).await;
    }

    /// Waits until everything should have ended, with the moment that it has to tell its clients. It bounds hyper's graceful
    /// shutdown, which by itself waits for clients that do not read.
    pub async fn overdue(&self) {
        self.ending().await;
        sleep(GRACE).await;
    }

    async fn reached(&self, phase: Phase) {
        // An error means that nobody is left to say more: then everything ends.
        let _ = self.0.clone().wait_for(|now| *now >= phase).await;
    }
}

async fn next_signal(terminate: &mut Signal, interrupt: &mut Signal) -> &'static str {
    tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    }
}

fn exit_at_once(name: &str) -> ! {
    tracing::warn!(signal = name, "second signal: exiting at once");
    std::process::exit(EXIT_AT_ONCE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn draining_comes_before_ending() {
        let (phase, shutdown) = Shutdown::by_hand();
        phase.send_replace(Phase::Draining);
        shutdown.draining().await;
        let early = tokio::time::timeout(Duration::from_millis(20), shutdown.ending()).await;
        assert!(early.is_err());
        phase.send_replace(Phase::Ending);
        shutdown.ending().await;
    }

    #[tokio::test]
    async fn a_lost_sender_ends_everything() {
        let (phase, shutdown) = Shutdown::by_hand();
        drop(phase);
        shutdown.ending().await;
    }
}
