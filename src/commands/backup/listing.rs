//! The blocks of a snapshot, as a driver lists them over its socket (CSI GetMetadataAllocated and
//! GetMetadataDelta). An interrupted listing continues at the end of the last extent.

use std::time::Duration;

use anyhow::{Result, anyhow};
use tokio::time::{Instant, sleep};
use tonic::{Code, Status};

pub use crate::client::block_map::{BaseUnusable, Query};
use crate::client::block_map::{BlockMap, Driver, Part, Progress, Source, Window};
use crate::client::connection::{Connection, refused};
use grpc::Endpoint;
use storage::Extent;

/// Maximum number of attempts without progress.
const ATTEMPTS: u32 = 6;
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Time limit of a listing, which takes as long as its reader.
const LIFETIME: Duration = Duration::from_secs(365 * 86_400);

/// A listing of blocks.
pub struct Listing(Blocks<Resuming>);

impl Listing {
    /// Connects to a driver's socket and starts a listing of the blocks from byte `from` on.
    ///
    /// # Errors
    /// No driver accepts the connection, or it refuses; [`BaseUnusable`] if it does not know the
    /// changes since the base.
    pub async fn connect(endpoint: &Endpoint, query: Query, from: u64) -> Result<Self> {
        let connection = Connection::open(endpoint, Instant::now() + LIFETIME).await?;
        Self::open(&connection, query, from).await
    }

    /// Starts a listing of the blocks from byte `from` on.
    ///
    /// # Errors
    /// The driver refuses; [`BaseUnusable`] if it does not know the changes since the base.
    pub(crate) async fn open(connection: &Connection, query: Query, from: u64) -> Result<Self> {
        let mut source = Resuming {
            connection: connection.until(Instant::now() + LIFETIME),
            query,
            from,
            answer: None,
            attempts: 0,
            failed_at: 0,
        };
        // Before the first message is read: a refusal must be known before volumes are created.
        source.connect(Progress::default()).await?;
        Ok(Self(Blocks::new(BlockMap::new(source), from)))
    }

    /// Extents, ascending and not overlapping; `None` at the end.
    ///
    /// # Errors
    /// The driver refuses, or the stream breaks too often.
    pub async fn next(&mut self) -> Result<Option<Vec<Extent>>> {
        self.0.next().await
    }

    /// Bytes of the volume, after the first message. A listing may have none.
    pub fn capacity(&self) -> Option<u64> {
        self.0.capacity()
    }

    /// The blocks, for code that accepts any source.
    pub(super) fn into_blocks(self) -> Blocks<impl Source> {
        self.0
    }
}

/// The blocks of a listing from a byte of the volume on.
pub(super) struct Blocks<S> {
    map: BlockMap<S>,
    from: u64,
}

impl<S: Source> Blocks<S> {
    pub fn new(map: BlockMap<S>, from: u64) -> Self {
        Self { map, from }
    }

    /// Extents, ascending and not overlapping; `None` at the end.
    pub async fn next(&mut self) -> Result<Option<Vec<Extent>>> {
        let Some(mut extents) = self.map.next().await? else { return Ok(None) };
        // A driver may begin with the extent that contains this byte.
        extents.retain(|extent| extent.end() > self.from);
        if let Some(first) = extents.first_mut().filter(|first| first.offset < self.from) {
            let end = first.end();
            *first = Extent { offset: self.from, length: end - self.from };
        }
        Ok(Some(extents))
    }

    pub fn capacity(&self) -> Option<u64> {
        self.map.shape()?.capacity_bytes
    }
}

/// A listing that is requested again after an interruption.
struct Resuming {
    connection: Connection,
    query: Query,
    from: u64,
    answer: Option<Driver>,
    attempts: u32,
    /// Progress at the last failure.
    failed_at: u64,
}

impl Resuming {
    async fn connect(&mut self, progress: Progress) -> Result<()> {
        while self.answer.is_none() {
            let offset = progress.end.max(self.from);
            let window = Window { starting_offset: i64::try_from(offset)?, max_results: 0 };
            match Driver::request(&self.connection, self.query.clone(), window).await {
                Ok(answer) => self.answer = Some(answer),
                Err(status) => self.wait(status, progress).await?,
            }
        }
        Ok(())
    }

    /// Waits before another attempt.
    ///
    /// # Errors
    /// The error is final, or there were too many attempts.
    async fn wait(&mut self, status: Status, progress: Progress) -> Result<()> {
        let code = status.code();
        let error = refused(status);
        if matches!(self.query, Query::Delta { .. }) && BaseUnusable::is_meant_by(code) {
            return Err(BaseUnusable(format!("{error:#}")).into());
        }
        if !may_pass(code) {
            return Err(error);
        }
        if progress.end > self.failed_at {
            (self.failed_at, self.attempts) = (progress.end, 0);
        }
        self.attempts += 1;
        if self.attempts >= ATTEMPTS {
            return Err(anyhow!("{error:#}; no progress in {ATTEMPTS} attempts"));
        }
        let pause = FIRST_PAUSE * 2_u32.pow(self.attempts);
        sleep(pause.min(LONGEST_PAUSE)).await;
        Ok(())
    }
}

impl Source for Resuming {
    async fn next(&mut self, progress: Progress) -> Result<Option<Part>> {
        if let Some(answer) = &mut self.answer {
            match answer.message().await {
                Ok(message) => return Ok(message.map(Part::Message)),
                Err(status) => {
                    self.answer = None;
                    // No block follows the last byte of the volume, and a request there is refused.
                    let shape = progress.shape.filter(|_| may_pass(status.code()));
                    if shape.is_some_and(|shape| shape.capacity_bytes == Some(progress.end)) {
                        return Ok(None);
                    }
                    self.wait(status, progress).await?;
                }
            }
        }
        self.connect(progress).await?;
        Ok(Some(Part::Restart))
    }

    /// Its reader knows it.
    fn size(&self) -> Option<u64> {
        None
    }
}

/// Whether another attempt may succeed after this code.
const fn may_pass(code: Code) -> bool {
    matches!(
        code,
        Code::Unavailable | Code::DeadlineExceeded | Code::Aborted | Code::ResourceExhausted
    )
}
