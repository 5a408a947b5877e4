//! An answer that outlives its interruptions. Whenever the other side says that it is a matter of time, or the connection
//! breaks, or the time of a token or of a stream is over, it is asked anew, from the end of the last extent on, with growing
//! pauses and until `--timeout`. Anything else ends the answer.

use std::time::Duration;

use anyhow::{Result, anyhow};
use tokio::time::{Instant, sleep};

use super::super::block_map::{Message, Part, Progress, Source};
use super::Limits;
use super::failure::{Failure, Retry};

/// The pauses before another attempt: the first, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// An API that knows blocks: how it is asked, each time.
pub trait BlockApi: Sized {
    /// An answer on its way.
    type Answer;

    /// Asks for what lies from this byte on; for all that is wanted, if it is 0.
    ///
    /// # Errors
    /// Why there is no answer, and whether another attempt may help.
    async fn ask(&mut self, from: u64) -> Result<Self::Answer, Failure>;

    /// What comes next; `None` when the other side has said that nothing does.
    ///
    /// # Errors
    /// Why the answer broke, and whether another attempt may help.
    async fn message(&mut self, answer: &mut Self::Answer) -> Result<Option<Message>, Failure>;
}

/// The answer of an API, as long as it takes.
pub struct Resuming<A: BlockApi> {
    api: A,
    limits: Limits,
    under_way: Option<A::Answer>,
    pause: Duration,
    /// Progress at the last failure.
    failed_at: Option<u64>,
    /// Progress at the last failure after which only progress allows another attempt.
    refused_at: u64,
}

impl<A: BlockApi> Resuming<A> {
    pub fn new(api: A, limits: Limits) -> Self {
        Self { api, limits, under_way: None, pause: FIRST_PAUSE, failed_at: None, refused_at: 0 }
    }

    /// Waits until another attempt is due.
    ///
    /// # Errors
    /// There will be none, with the reason of the last one.
    async fn wait(&mut self, failure: Failure, progress: Progress) -> Result<()> {
        let Failure { error, retry, after } = failure;
        let again = match retry {
            Retry::Always => true,
            Retry::OnceBegun => progress.shape.is_some(),
            Retry::AfterProgress => progress.end > self.refused_at,
            Retry::Never => false,
        };
        if !again {
            return Err(error);
        }
        if retry == Retry::AfterProgress {
            self.refused_at = progress.end;
        }
        if self.failed_at.replace(progress.end) != Some(progress.end) {
            self.pause = FIRST_PAUSE;
        }
        let pause = self.pause.max(after);
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        if Instant::now() + pause >= self.limits.deadline {
            return Err(anyhow!("{}; {error:#}", super::super::timed_out(self.limits.timeout)));
        }
        // Who says when is busy, or as fast as is fair: that is nothing to tell each time.
        if after.is_zero() {
            let (pause_shown, end) = (humantime::format_duration(pause), progress.end);
            eprintln!("csi-loopback: {error:#}; going on from byte {end} in {pause_shown}");
        }
        sleep(pause).await;
        Ok(())
    }
}

impl<A: BlockApi> Source for Resuming<A> {
    async fn next(&mut self, progress: Progress) -> Result<Option<Part>> {
        loop {
            let failure = match &mut self.under_way {
                None => match self.api.ask(progress.end).await {
                    Ok(answer) => {
                        self.under_way = Some(answer);
                        return Ok(Some(Part::Anew));
                    }
                    Err(failure) => failure,
                },
                Some(answer) => match self.api.message(answer).await {
                    Ok(message) => return Ok(message.map(Part::Message)),
                    Err(failure) => failure,
                },
            };
            self.under_way = None;
            let at_the_end =
                progress.shape.is_some_and(|shape| shape.capacity_bytes == Some(progress.end));
            if at_the_end && failure.retry != Retry::Never {
                // Nothing can follow the last byte of the volume; nor could that be asked for.
                return Ok(None);
            }
            self.wait(failure, progress).await?;
        }
    }
}
