//! A stream of block metadata: extents are read on demand, some messages ahead of the client, and no
//! thread waits while a client is slow.
//!
//! A clean end means that everything was sent. So the end is said explicitly between the producer and
//! the response: a producer that is gone without having said it, for whatever reason, is an error.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{self, Duration};
use std::vec;

use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep_until};
use tokio_stream::Stream;
use tonic::Status;

use super::call::Call;
use super::frame::{Frame, Head};
use super::status;
use crate::backend::Extent;
use crate::grpc::RawMessage;
use crate::telemetry::shutdown::Shutdown;

/// Extents in a message when the client does not say.
const DEFAULT_EXTENTS: usize = 4096;
/// Extents in a message, at most: of up to 24 bytes each, they stay under gRPC's default of 4 MiB.
const MAX_EXTENTS: usize = 128 << 10;
/// Bytes of messages that are made in one go: enough that handing them over costs nothing beside
/// making them, little enough that a stream's memory is nothing to speak of.
const STEP_BYTES: usize = 64 << 10;
/// What a message takes beside its bytes.
const MESSAGE_BYTES: usize = 64;
/// How long messages wait for others.
const STEP_TIME: Duration = Duration::from_millis(5);

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
    head: Head,
    per_message: usize,
    /// How long messages that are ready wait for others, at most.
    step_time: Duration,
    begun: bool,
}

/// Messages that were made in one go.
#[derive(Default)]
struct Step {
    messages: Vec<RawMessage>,
    extents: usize,
    /// What follows them: nothing yet, the end of the answer, or a failure.
    end: Option<Result<(), Status>>,
}

impl Step {
    fn ending(end: Result<(), Status>) -> Self {
        Self { end: Some(end), ..Self::default() }
    }
}

impl<I, E> Batches<I>
where
    I: Iterator<Item = Result<Extent, E>>,
    E: Into<Status>,
{
    pub fn new(extents: I, head: Head, per_message: usize) -> Self {
        Self { extents, head, per_message, step_time: STEP_TIME, begun: false }
    }

    /// The next messages. The first step is one message, which the client waits for; it is there even
    /// when there is nothing to report, for it tells type and capacity. Blocks.
    fn step(&mut self) -> Step {
        let begun = time::Instant::now();
        let first = !std::mem::replace(&mut self.begun, true);
        let (mut step, mut bytes) = (Step::default(), 0);
        loop {
            let (frame, end) = self.frame();
            step.end = end;
            if frame.extents() > 0 || (first && !matches!(step.end, Some(Err(_)))) {
                step.extents += frame.extents();
                let message = frame.finish();
                bytes += message.0.len() + MESSAGE_BYTES;
                step.messages.push(message);
            }
            let full = bytes >= STEP_BYTES || begun.elapsed() >= self.step_time;
            if first || step.end.is_some() || full {
                return step;
            }
        }
    }

    /// The next message, and what follows it when that is known.
    fn frame(&mut self) -> (Frame, Option<Result<(), Status>>) {
        let mut frame = self.head.begin(self.per_message);
        while frame.extents() < self.per_message {
            match self.extents.next() {
                Some(Ok(extent)) => frame.push(extent),
                Some(Err(error)) => return (frame, Some(Err(error.into()))),
                None => return (frame, Some(Ok(()))),
            }
        }
        (frame, None)
    }
}

/// The response stream of a metadata RPC.
pub struct Messages {
    steps: mpsc::Receiver<Step>,
    ready: vec::IntoIter<RawMessage>,
    end: Option<Result<(), Status>>,
}

impl Messages {
    fn new(steps: mpsc::Receiver<Step>) -> Self {
        Self { steps, ready: vec::IntoIter::default(), end: None }
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
            match ready!(self.steps.poll_recv(context)) {
                Some(step) => (self.ready, self.end) = (step.messages.into_iter(), step.end),
                None => return Poll::Ready(Some(Err(status::exiting()))),
            }
        }
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

/// Starts to send `batches`.
pub fn start<I, E>(batches: Batches<I>, limits: Limits, mut call: Call) -> Messages
where
    I: Iterator<Item = Result<Extent, E>> + Send + 'static,
    E: Into<Status>,
{
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        let last = tokio::select! {
            biased;
            status = limits.reached() => Step::ending(Err(status)),
            last = produce(batches, &sender, &mut call) => match last {
                Some(last) => last,
                // The client has gone. Dropping the call says so in the log.
                None => return,
            },
        };
        // The client has gone, otherwise: dropping the call says so in the log.
        if let Ok(place) = sender.reserve().await {
            call.streamed(last.messages.len(), last.extents);
            call.end(last.end.as_ref().and_then(|end| end.as_ref().err()));
            // After that: who has the whole answer finds the call in the log and among the metrics.
            place.send(last);
        }
    });
    Messages::new(receiver)
}

/// Sends all steps but the last, which it returns unless the client has gone.
async fn produce<I, E>(
    mut batches: Batches<I>,
    sender: &mpsc::Sender<Step>,
    call: &mut Call,
) -> Option<Step>
where
    I: Iterator<Item = Result<Extent, E>> + Send + 'static,
    E: Into<Status>,
{
    loop {
        let work = spawn_blocking(move || {
            let step = batches.step();
            (batches, step)
        });
        let Ok((rest, step)) = work.await else {
            return Some(Step::ending(Err(status::panicked(call.method()))));
        };
        if step.end.is_some() {
            return Some(step);
        }
        batches = rest;
        if !hand_over(step, sender, call).await {
            return None;
        }
    }
}

/// Whether the client was still there to take the step.
async fn hand_over(step: Step, sender: &mpsc::Sender<Step>, call: &mut Call) -> bool {
    let Ok(place) = sender.reserve().await else { return false };
    call.streamed(step.messages.len(), step.extents);
    place.send(step);
    true
}

#[cfg(test)]
#[path = "stream_tests.rs"]
mod tests;
