//! A listing that survives interruptions. After a temporary error, a broken connection, an expired
//! token or the time limit of a stream, it repeats the request from the end of the last extent,
//! with increasing pauses, until `--timeout` passes without progress. Any other error ends the
//! listing.

use std::time::Duration;

use anyhow::{Result, anyhow};
use tokio::time::{Instant, sleep};

use super::super::block_map::{Message, Part, Progress, Source};
use super::super::progress;
use super::Limits;
use super::failure::{Failure, Retry};
use telemetry::rate_limited_log::RateLimitedLog;

/// The pauses before another attempt: the first, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// An API that lists blocks: one attempt.
pub trait BlockApi: Sized {
    /// A response in progress.
    type Response;

    /// Requests the blocks from this byte; 0 means all requested blocks.
    ///
    /// # Errors
    /// No response, and whether another attempt can succeed.
    async fn request(&mut self, from: u64) -> Result<Self::Response, Failure>;

    /// The next message; `None` at the end.
    ///
    /// # Errors
    /// The response broke, and whether another attempt can succeed.
    async fn message(&mut self, response: &mut Self::Response) -> Result<Option<Message>, Failure>;

    /// Size of the (target) snapshot in bytes, as Kubernetes knows it.
    fn size(&self) -> Option<u64> {
        None
    }
}

/// A listing of an API with as many attempts as it takes.
pub struct Resuming<A: BlockApi> {
    api: A,
    limits: Limits,
    current: Option<A::Response>,
    pause: Duration,
    /// When the last failure with progress occurred.
    progress_at: Instant,
    /// Progress at the last failure.
    failed_at: Option<u64>,
    /// Progress at the last failure after which only progress allows another attempt.
    refused_at: u64,
    /// An equal failure at the same place is noted once.
    noted: RateLimitedLog,
}

impl<A: BlockApi> Resuming<A> {
    pub fn new(api: A, limits: Limits) -> Self {
        Self {
            api,
            limits,
            current: None,
            pause: FIRST_PAUSE,
            progress_at: Instant::now(),
            failed_at: None,
            refused_at: 0,
            noted: RateLimitedLog::default(),
        }
    }

    /// Waits before another attempt.
    ///
    /// # Errors
    /// No attempt follows; the error is the last one.
    async fn wait(&mut self, failure: Failure, reached: Progress) -> Result<()> {
        let Failure { error, retry, after } = failure;
        let again = match retry {
            Retry::Always => true,
            Retry::OnceBegun => reached.shape.is_some(),
            Retry::AfterProgress => reached.end > self.refused_at,
            Retry::Never => false,
        };
        if !again {
            return Err(error);
        }
        if retry == Retry::AfterProgress {
            self.refused_at = reached.end;
        }
        if self.failed_at.replace(reached.end) != Some(reached.end) {
            self.pause = FIRST_PAUSE;
            self.progress_at = Instant::now();
        }
        let pause = self.pause.max(after);
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        let deadline = self.limits.deadline.min(self.progress_at + self.limits.timeout);
        if Instant::now() + pause >= deadline {
            return Err(anyhow!("{}; {error:#}", super::super::timed_out(self.limits.timeout)));
        }
        // A server that sets the pause limits its rate, which is no news each time.
        if after.is_zero() {
            let (error, end) = (format!("{error:#}"), reached.end);
            if self.noted.is_new(&format!("{error} {end}")) {
                let pause = humantime::format_duration(pause);
                progress::note(&format!("{error}; resuming from byte {end} in {pause}"));
            }
        }
        sleep(pause).await;
        Ok(())
    }
}

impl<A: BlockApi> Source for Resuming<A> {
    async fn next(&mut self, progress: Progress) -> Result<Option<Part>> {
        loop {
            let failure = match &mut self.current {
                None => match self.api.request(progress.end).await {
                    Ok(response) => {
                        self.current = Some(response);
                        return Ok(Some(Part::Restart));
                    }
                    Err(failure) => failure,
                },
                Some(response) => match self.api.message(response).await {
                    Ok(message) => return Ok(message.map(Part::Message)),
                    Err(failure) => failure,
                },
            };
            self.current = None;
            let at_the_end =
                progress.shape.is_some_and(|shape| shape.capacity_bytes == Some(progress.end));
            if at_the_end && failure.retry != Retry::Never {
                // Nothing can follow the last byte of the volume, and a request from there is
                // invalid.
                return Ok(None);
            }
            self.wait(failure, progress).await?;
        }
    }

    fn size(&self) -> Option<u64> {
        self.api.size()
    }
}
