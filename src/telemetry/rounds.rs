//! Housekeeping: rounds that may block, one after the other.

use std::fmt::Display;
use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio::time::{MissedTickBehavior, interval};

use super::shutdown::Shutdown;

/// Makes a round at once and then as often as this, until the end begins.
pub async fn keep<E>(
    every: Duration,
    round: impl Fn() -> Result<(), E> + Clone + Send + 'static,
    shutdown: Shutdown,
) where
    E: Display + Send + 'static,
{
    let mut rounds = interval(every);
    rounds.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = rounds.tick() => {}
            () = shutdown.draining() => return,
        }
        // A panic is in the log already; the next round may do better.
        if let Ok(Err(error)) = spawn_blocking(round.clone()).await {
            tracing::error!(%error, "housekeeping failed");
        }
    }
}
