//! Periodic tasks that may block, one run after the other.

use std::fmt::Display;
use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};

use super::shutdown::Shutdown;
use super::task::blocking;

/// Runs `task` immediately and then at every interval, until draining begins.
pub async fn run<E>(
    every: Duration,
    task: impl Fn() -> Result<(), E> + Clone + Send + 'static,
    shutdown: Shutdown,
) where
    E: Display + Send + 'static,
{
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = shutdown.draining() => return,
        }
        // A panic is already logged; the next run may succeed.
        if let Ok(Err(error)) = blocking(task.clone()).await {
            tracing::error!(%error, "periodic task failed");
        }
    }
}
