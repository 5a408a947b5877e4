//! A stream of block metadata: extents are read on demand, one message ahead of the client, and no
//! thread waits while a client is slow.
//!
//! A clean end means that everything was sent. So the end is said explicitly between the producer and
//! the response: a producer that is gone without having said it, for whatever reason, is an error.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep_until};
use tokio_stream::Stream;
use tonic::Status;
use tonic::metadata::MetadataMap;

use super::call::Call;
use super::{response, status};
use crate::backend::{Extent, Result as Checked};
use crate::proto::csi::v1::BlockMetadata;
use crate::telemetry::shutdown::Shutdown;

/// Extents in a message when the client does not say.
const DEFAULT_EXTENTS: usize = 4096;
/// Extents in a message, at most: of up to 24 bytes each, they stay under gRPC's default of 4 MiB.
const MAX_EXTENTS: usize = 128 << 10;

/// Extents per message for `max_results`, which is not negative.
pub fn extents_per_message(max_results: usize) -> usize {
    match max_results {
        0 => DEFAULT_EXTENTS,
        asked => asked.min(MAX_EXTENTS),
    }
}

/// Cuts extents into messages.
pub struct Batches<I> {
    extents: I,
    per_message: usize,
    begun: bool,
}

impl<I: Iterator<Item = Checked<Extent>>> Batches<I> {
    pub fn new(extents: I, per_message: usize) -> Self {
        Self { extents, per_message, begun: false }
    }

    /// The extents of the next message, `None` at the end. The first message is there even when there
    /// is nothing to report: it tells type and capacity. Blocks.
    fn next(&mut self) -> Result<Option<Vec<BlockMetadata>>, Status> {
        let mut batch = Vec::new();
        for extent in self.extents.by_ref().take(self.per_message) {
            let Extent { offset, length } = extent?;
            batch.push(BlockMetadata {
                byte_offset: response::bytes(offset),
                size_bytes: response::bytes(length),
            });
        }
        let first = !std::mem::replace(&mut self.begun, true);
        Ok((first || !batch.is_empty()).then_some(batch))
    }
}

/// What the producer says: a message, the end, or a failure, after which comes nothing.
type Step<M> = Result<Option<M>, Status>;

/// The response stream of a metadata RPC.
pub struct Messages<M>(mpsc::Receiver<Step<M>>);

impl<M> Stream for Messages<M> {
    type Item = Result<M, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(match ready!(self.0.poll_recv(context)) {
            Some(step) => step.transpose(),
            None => Some(Err(status::exiting())),
        })
    }
}

/// When a stream is cut off before its end.
pub struct Limits {
    pub deadline: Option<Instant>,
    pub shutdown: Shutdown,
}

impl Limits {
    /// Waits for the first limit to be reached.
    async fn reached(&self) -> Status {
        let deadline = async {
            match self.deadline {
                Some(deadline) => sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = deadline => status::deadline(),
            () = self.shutdown.ending() => status::exiting(),
        }
    }
}

/// Starts to send `batches`, each made into a message by `message`.
pub fn start<I, M>(
    batches: Batches<I>,
    message: impl Fn(Vec<BlockMetadata>) -> M + Send + 'static,
    limits: Limits,
    mut call: Call,
) -> Messages<M>
where
    I: Iterator<Item = Checked<Extent>> + Send + 'static,
    M: Send + 'static,
{
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        let last = tokio::select! {
            biased;
            status = limits.reached() => Err(status),
            end = produce(batches, message, &sender, &mut call) => match end {
                End::Complete => Ok(None),
                End::Failed(status) => Err(status),
                // Dropping the call says so in the log.
                End::ClientGone => return,
            },
        };
        let error = last.as_ref().err().cloned();
        if sender.send(last).await.is_ok() {
            call.end(error.as_ref());
        }
    });
    Messages(receiver)
}

enum End {
    Complete,
    Failed(Status),
    ClientGone,
}

async fn produce<I, M>(
    mut batches: Batches<I>,
    message: impl Fn(Vec<BlockMetadata>) -> M,
    sender: &mpsc::Sender<Step<M>>,
    call: &mut Call,
) -> End
where
    I: Iterator<Item = Checked<Extent>> + Send + 'static,
{
    loop {
        let step = spawn_blocking(move || {
            let next = batches.next();
            (batches, next)
        });
        let batch = match step.await {
            Err(_) => return End::Failed(status::panicked(call.method())),
            Ok((_, Err(status))) => return End::Failed(status),
            Ok((_, Ok(None))) => return End::Complete,
            Ok((rest, Ok(Some(batch)))) => {
                batches = rest;
                batch
            }
        };
        let extents = batch.len();
        if sender.send(Ok(Some(message(batch)))).await.is_err() {
            return End::ClientGone;
        }
        call.streamed(extents);
    }
}

/// When the client's `grpc-timeout` passes. The server applies it by itself up to the start of a
/// response, not to the stream that follows.
pub fn deadline(metadata: &MetadataMap) -> Option<Instant> {
    let timeout = parse_timeout(metadata.get("grpc-timeout")?.to_str().ok()?)?;
    Instant::now().checked_add(timeout)
}

/// gRPC over HTTP/2, "Timeout": at most 8 digits and a unit.
fn parse_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let number: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(number * 3600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

#[cfg(test)]
#[path = "stream_tests.rs"]
mod tests;
