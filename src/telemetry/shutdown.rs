//! Graceful shutdown: `Running → Draining → Ending`. SIGTERM or SIGINT starts draining: no new work
//! starts, and running work may finish. After the drain timeout, remaining work is aborted with an
//! error. A second signal exits immediately, except right after the first: timeout(1) sends its signal
//! to the program and to its process group, and a terminal sends Ctrl-C to all of a pipeline.

use std::io;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use tokio::runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use super::task;

/// Threads that serve connections; they only pass messages.
const THREADS: usize = 2;
/// Maximum number of blocked threads of a role that does not set it.
pub(super) const BLOCKING_THREADS: usize = 512;
/// Time for aborted work to report its error to clients.
const GRACE: Duration = Duration::from_secs(1);
/// Signals within this time count as one.
const TOGETHER: Duration = Duration::from_millis(500);
/// Exit code after a second signal: 128 + SIGTERM, as in a shell.
const EXIT_SECOND_SIGNAL: i32 = 143;

/// Runs a role until it ends. Work that has not ended then does not keep the process alive. At most
/// `threads` threads may be blocked; idle ones end.
///
/// # Errors
/// The threads cannot be started, or the role fails.
pub(super) fn run_to_end(
    threads: usize,
    role: impl Future<Output = anyhow::Result<()>>,
) -> anyhow::Result<ExitCode> {
    let runtime = runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .max_blocking_threads(threads)
        .enable_all()
        .build()
        .context("failed to start the threads")?;
    let result = runtime.block_on(role);
    runtime.shutdown_background();
    result.map(|()| ExitCode::SUCCESS)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    Running,
    /// No new work starts; running work may finish.
    Draining,
    /// Running work is aborted with an error.
    Ending,
}

/// The phase of the shutdown, shared by all clones.
#[derive(Debug, Clone)]
pub struct Shutdown(watch::Receiver<Phase>);

impl Shutdown {
    /// Watches for signals; `drain` is the time from the first one to [`Phase::Ending`]. Must be
    /// called inside a tokio runtime.
    pub fn on_signal(drain: Duration) -> io::Result<Self> {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let (phase, shutdown) = Self::manual();
        task::spawn(async move {
            let name = next_signal(&mut terminate, &mut interrupt).await;
            let first = Instant::now();
            tracing::info!(signal = name, drain_timeout = ?drain, "draining");
            phase.send_replace(Phase::Draining);
            let second = async {
                loop {
                    let name = next_signal(&mut terminate, &mut interrupt).await;
                    if first.elapsed() >= TOGETHER {
                        exit_now(name);
                    }
                }
            };
            let end = async {
                sleep(drain).await;
                phase.send_replace(Phase::Ending);
                std::future::pending().await
            };
            tokio::select! { () = second => {}, () = end => {} }
        });
        Ok(shutdown)
    }

    /// A shutdown that is controlled by its sender. Dropping the sender ends everything.
    pub fn manual() -> (watch::Sender<Phase>, Self) {
        let (sender, receiver) = watch::channel(Phase::Running);
        (sender, Self(receiver))
    }

    /// Whether draining has begun.
    pub fn is_draining(&self) -> bool {
        *self.0.borrow() >= Phase::Draining
    }

    /// Waits until draining begins.
    pub async fn draining(&self) {
        self.reached(Phase::Draining).await;
    }

    /// Waits until running work must end.
    pub async fn ending(&self) {
        self.reached(Phase::Ending).await;
    }

    /// Waits until running work must end, plus the time to report errors to clients. It bounds
    /// hyper's graceful shutdown, which waits for clients that do not read.
    pub async fn overdue(&self) {
        self.ending().await;
        sleep(GRACE).await;
    }

    async fn reached(&self, phase: Phase) {
        // An error means that the sender was dropped: then everything ends.
        let _ = self.0.clone().wait_for(|now| *now >= phase).await;
    }
}

async fn next_signal(terminate: &mut Signal, interrupt: &mut Signal) -> &'static str {
    tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    }
}

fn exit_now(name: &str) -> ! {
    tracing::warn!(signal = name, "second signal: exiting immediately");
    std::process::exit(EXIT_SECOND_SIGNAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn draining_comes_before_ending() {
        let (phase, shutdown) = Shutdown::manual();
        phase.send_replace(Phase::Draining);
        shutdown.draining().await;
        let early = tokio::time::timeout(Duration::from_millis(20), shutdown.ending()).await;
        assert!(early.is_err());
        phase.send_replace(Phase::Ending);
        shutdown.ending().await;
    }

    #[tokio::test]
    async fn a_lost_sender_ends_everything() {
        let (phase, shutdown) = Shutdown::manual();
        drop(phase);
        shutdown.ending().await;
    }
}
