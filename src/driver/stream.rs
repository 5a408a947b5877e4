//! Streams of block metadata. Extents are read on demand, a few messages ahead of the client, and a
//! slow client blocks no thread.
//!
//! A stream ends without an error only if everything was sent. Therefore the producer reports the
//! end explicitly to the response stream: a producer that disappears without this report, for any
//! reason, is an error.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{self, Duration};
use std::vec;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tokio_stream::Stream;
use tonic::Status;

use super::frame::{Frame, Preamble};
use super::status;
use grpc::RawMessage;
use grpc::call::Call;
use storage::Extent;
use telemetry::shutdown::Shutdown;
use telemetry::task;

/// Extents per message if the client does not specify a number.
const DEFAULT_EXTENTS: usize = 4096;
/// Maximum extents per message: at up to 24 bytes each, a message stays below gRPC's default limit
/// of 4 MiB.
const MAX_EXTENTS: usize = 128 << 10;
/// Bytes of messages per batch: large enough that passing a batch on costs little compared with
/// encoding it, small enough that the memory of a stream is negligible.
const BATCH_BYTES: usize = 64 << 10;
/// Memory of a message in addition to its bytes.
const MESSAGE_BYTES: usize = 64;
/// How long a ready message waits for others in its batch.
const BATCH_TIME: Duration = Duration::from_millis(5);

/// Extents per message for `max_results`, which is not negative.
pub fn extents_per_message(max_results: usize) -> usize {
    match max_results {
        0 => DEFAULT_EXTENTS,
        requested => requested.min(MAX_EXTENTS),
    }
}

/// Groups extents into messages, and messages into batches.
pub struct Batcher<I> {
    extents: I,
    preamble: Preamble,
    per_message: usize,
    /// Maximum time that ready messages wait for others.
    batch_time: Duration,
    started: bool,
}

/// Messages that are passed on together.
#[derive(Default)]
struct Batch {
    messages: Vec<RawMessage>,
    extents: usize,
    /// What follows the messages: `None` if more follow, otherwise the end of the stream or an
    /// error.
    end: Option<Result<(), Status>>,
}

impl Batch {
    fn ending(end: Result<(), Status>) -> Self {
        Self { end: Some(end), ..Self::default() }
    }
}

impl<I, E> Batcher<I>
where
    I: Iterator<Item = Result<Extent, E>>,
    E: Into<status::Failure>,
{
    pub fn new(extents: I, preamble: Preamble, per_message: usize) -> Self {
        Self { extents, preamble, per_message, batch_time: BATCH_TIME, started: false }
    }

    /// The next messages. The first batch is a single message, so that the client does not wait. It
    /// is sent even without extents, because it carries type and capacity. Blocks.
    fn next_batch(&mut self) -> Batch {
        let start = time::Instant::now();
        let first = !std::mem::replace(&mut self.started, true);
        let (mut batch, mut bytes) = (Batch::default(), 0);
        loop {
            let (frame, end) = self.next_frame();
            batch.end = end;
            if frame.extents() > 0 || (first && !matches!(batch.end, Some(Err(_)))) {
                batch.extents += frame.extents();
                let message = frame.finish();
                bytes += message.0.len() + MESSAGE_BYTES;
                batch.messages.push(message);
            }
            let full = bytes >= BATCH_BYTES || start.elapsed() >= self.batch_time;
            if first || batch.end.is_some() || full {
                return batch;
            }
        }
    }

    /// The next message, and what follows it if known.
    fn next_frame(&mut self) -> (Frame, Option<Result<(), Status>>) {
        let mut frame = self.preamble.begin(self.per_message);
        while frame.extents() < self.per_message {
            match self.extents.next() {
                Some(Ok(extent)) => frame.push(extent),
                Some(Err(error)) => return (frame, Some(Err(status::of(error)))),
                None => return (frame, Some(Ok(()))),
            }
        }
        (frame, None)
    }
}

/// The response stream of a metadata RPC.
pub struct Messages {
    batches: mpsc::Receiver<Batch>,
    ready: vec::IntoIter<RawMessage>,
    end: Option<Result<(), Status>>,
}

impl Messages {
    fn new(batches: mpsc::Receiver<Batch>) -> Self {
        Self { batches, ready: vec::IntoIter::default(), end: None }
    }

    /// These messages and this end.
    pub fn of(messages: Vec<RawMessage>, end: Result<(), Status>) -> Self {
        let (_, batches) = mpsc::channel(1);
        Self { batches, ready: messages.into_iter(), end: Some(end) }
    }

    /// These messages, and OK at this time, or never.
    pub fn ending_at(messages: Vec<RawMessage>, time: Option<Instant>) -> Self {
        let (sender, batches) = mpsc::channel(1);
        task::spawn(async move {
            match time {
                Some(time) => sleep_until(time).await,
                None => sender.closed().await,
            }
            let _ = sender.send(Batch::ending(Ok(()))).await;
        });
        Self { ready: messages.into_iter(), ..Self::new(batches) }
    }
}

impl Stream for Messages {
    type Item = Result<RawMessage, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(message) = self.ready.next() {
                return Poll::Ready(Some(Ok(message)));
            }
            if let Some(end) = self.end.take() {
                return Poll::Ready(end.err().map(Err));
            }
            match ready!(self.batches.poll_recv(context)) {
                Some(batch) => (self.ready, self.end) = (batch.messages.into_iter(), batch.end),
                None => return Poll::Ready(Some(Err(status::exiting()))),
            }
        }
    }
}

/// Conditions that abort a stream.
pub struct Limits {
    pub deadline: Option<Instant>,
    pub shutdown: Shutdown,
}

impl Limits {
    /// Waits until a limit is reached and returns its status.
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

/// Starts a stream.
pub fn start<I, E>(batcher: Batcher<I>, limits: Limits, mut call: Call) -> Messages
where
    I: Iterator<Item = Result<Extent, E>> + Send + 'static,
    E: Into<status::Failure>,
{
    let (sender, receiver) = mpsc::channel(1);
    task::spawn(async move {
        let last = tokio::select! {
            biased;
            status = limits.reached() => Batch::ending(Err(status)),
            last = produce(batcher, &sender, &mut call) => match last {
                Some(last) => last,
                // The client disconnected; dropping the call logs it.
                None => return,
            },
        };
        // Otherwise the client disconnected; dropping the call logs it.
        if let Ok(permit) = sender.reserve().await {
            call.add_messages(last.messages.len(), last.extents);
            call.end(last.end.as_ref().and_then(|end| end.as_ref().err()));
            // Send last: a client that has the whole response finds the call in the log and metrics.
            permit.send(last);
        }
    });
    Messages::new(receiver)
}

/// Sends all batches except the last one, which it returns. Returns `None` if the client
/// disconnected.
async fn produce<I, E>(
    mut batcher: Batcher<I>,
    sender: &mpsc::Sender<Batch>,
    call: &mut Call,
) -> Option<Batch>
where
    I: Iterator<Item = Result<Extent, E>> + Send + 'static,
    E: Into<status::Failure>,
{
    loop {
        let work = task::blocking(move || {
            let batch = batcher.next_batch();
            (batcher, batch)
        });
        let Ok((rest, batch)) = work.await else {
            return Some(Batch::ending(Err(status::panicked(call.method()))));
        };
        if batch.end.is_some() {
            return Some(batch);
        }
        batcher = rest;
        if !send(batch, sender, call).await {
            return None;
        }
    }
}

/// Sends a batch. Returns false if the client disconnected.
async fn send(batch: Batch, sender: &mpsc::Sender<Batch>, call: &mut Call) -> bool {
    let Ok(permit) = sender.reserve().await else { return false };
    call.add_messages(batch.messages.len(), batch.extents);
    permit.send(batch);
    true
}

#[cfg(test)]
#[path = "stream_tests.rs"]
mod tests;
