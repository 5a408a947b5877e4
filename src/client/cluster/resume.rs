//! An answer that outlives its interruptions. Whenever the sidecar says UNAVAILABLE, or the connection breaks,
//! or the time of a token or of a stream is over, everything is looked up and asked anew, from the end of the
//! last extent on, with growing pauses and until `--timeout`. Anything else ends the answer.

use std::time::Duration;

use anyhow::{Result, anyhow};
use tokio::time::{Instant, sleep};

use super::super::block_map::{Part, Progress, Query, Source, Window};
use super::Limits;
use super::failure::{Failure, Retry, Subject};
use super::find::{Finder, Service};
use super::token::{Token, Tokens};
use super::wire::{self, Sidecar};

/// The pauses before another attempt: the first, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// The answer of a driver's sidecar, as long as it takes.
pub struct Resuming {
    finder: Finder,
    tokens: Tokens,
    query: Query,
    window: Window,
    limits: Limits,
    /// What stays the same for all attempts, once known.
    driver: Option<String>,
    under_way: Option<Attempt>,
    pause: Duration,
    /// Progress at the last failure.
    failed_at: Option<u64>,
    /// Progress at the last failure after which only progress allows another attempt.
    refused_at: u64,
}

/// A stream, and what is needed to tell of its end.
struct Attempt {
    sidecar: Sidecar,
    driver: String,
    service: Service,
    account: String,
}

impl Resuming {
    pub fn new(
        finder: Finder,
        tokens: Tokens,
        query: Query,
        window: Window,
        limits: Limits,
    ) -> Self {
        Self {
            finder,
            tokens,
            query,
            window,
            limits,
            driver: None,
            under_way: None,
            pause: FIRST_PAUSE,
            failed_at: None,
            refused_at: 0,
        }
    }

    /// Looks everything up and asks for what is missing.
    async fn attempt(&mut self, progress: Progress) -> Result<Attempt, Failure> {
        let driver = self.driver().await?;
        let service = self.finder.service(&driver).await?;
        let Token { secret, account } = self.tokens.take(&service.audience).await?;
        let subject = subject(&self.finder, &driver, &service, &account);
        let mut window = self.window;
        if let (1.., Ok(end)) = (progress.end, i64::try_from(progress.end)) {
            window.starting_offset = end;
        }
        let query = self.query.clone();
        let opened = wire::open(&service, secret, query, window, &subject, self.limits.deadline);
        Ok(Attempt { sidecar: opened.await?, driver, service, account })
    }

    /// The driver; and the base by its handle from here on. Neither can change.
    async fn driver(&mut self) -> Result<String, Failure> {
        if let Some(driver) = &self.driver {
            return Ok(driver.clone());
        }
        let driver = match &mut self.query {
            Query::Allocated { snapshot } => self.finder.driver(snapshot).await?,
            Query::Delta { base, target } => {
                let driver = self.finder.driver(target).await?;
                *base = self.finder.base(base).await?;
                driver
            }
        };
        self.driver = Some(driver.clone());
        Ok(driver)
    }

    /// Waits until another attempt is due.
    ///
    /// # Errors
    /// There will be none, with the reason of the last one.
    async fn wait(&mut self, failure: Failure, progress: Progress) -> Result<()> {
        let Failure { error, retry } = failure;
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
        let pause = self.pause;
        self.pause = (pause * 2).min(LONGEST_PAUSE);
        if Instant::now() + pause >= self.limits.deadline {
            return Err(anyhow!("{}; {error:#}", super::super::timed_out(self.limits.timeout)));
        }
        let (pause_shown, end) = (humantime::format_duration(pause), progress.end);
        eprintln!("csi-loopback: {error:#}; going on from byte {end} in {pause_shown}");
        sleep(pause).await;
        Ok(())
    }
}

impl Source for Resuming {
    async fn next(&mut self, progress: Progress) -> Result<Option<Part>> {
        loop {
            let failure = match &mut self.under_way {
                None => match self.attempt(progress).await {
                    Ok(attempt) => {
                        self.under_way = Some(attempt);
                        return Ok(Some(Part::Anew));
                    }
                    Err(failure) => failure,
                },
                Some(attempt) => match attempt.sidecar.message().await {
                    Ok(message) => return Ok(message.map(Part::Message)),
                    Err(status) => {
                        let Attempt { driver, service, account, .. } = attempt;
                        Failure::stream(status, &subject(&self.finder, driver, service, account))
                    }
                },
            };
            self.under_way = None;
            let at_the_end =
                progress.shape.is_some_and(|shape| shape.capacity_bytes == progress.end);
            if at_the_end && failure.retry != Retry::Never {
                // Nothing can follow the last byte of the volume; nor could that be asked for.
                return Ok(None);
            }
            self.wait(failure, progress).await?;
        }
    }
}

fn subject<'a>(
    finder: &'a Finder,
    driver: &'a str,
    service: &'a Service,
    account: &'a str,
) -> Subject<'a> {
    let Service { address, audience, .. } = service;
    Subject { namespace: finder.namespace(), driver, audience, account, address }
}
