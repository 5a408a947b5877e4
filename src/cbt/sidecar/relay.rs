//! Relays a response stream from the driver to the client. Messages stay encoded, and are read from
//! the driver only when the client reads, so that flow control works end to end. The stream ends
//! successfully only if the driver reports success.

use std::future::pending;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};
use tokio_stream::Stream;
use tonic::{Code, Status};

use super::call::Call;
use super::check::StreamCheck;
use super::driver_link::MetadataStream;
use super::fields::{BLOCK_METADATA, Value, next_field};
use super::nodes::of_node;
use super::refusal::{Reason, Refusal};
use super::stream_limit::{StreamPermit, ended_for_others};
use grpc::RawMessage;
use kubernetes::secret::Secrets;
use telemetry::shutdown::Shutdown;
use telemetry::task;

/// What ends a stream early.
pub struct Limits {
    pub deadline: Instant,
    /// Maximum time that the client does not read.
    pub stall_timeout: Option<Duration>,
    pub shutdown: Shutdown,
}

impl Limits {
    /// Waits for the first limit.
    async fn reached(self, state: &Mutex<State>, revoked: impl Future<Output = ()>) -> Refusal {
        tokio::select! {
            () = sleep_until(self.deadline) => too_long(),
            () = revoked => ended_for_others(),
            () = stalled(state, self.stall_timeout) => not_read(),
            () = self.shutdown.ending() => exiting(),
        }
    }
}

/// Waits until the client has not read for this time.
async fn stalled(state: &Mutex<State>, time: Option<Duration>) {
    let Some(time) = time else { return pending().await };
    let mut next = Instant::now() + time;
    loop {
        sleep_until(next).await;
        let unread = match &*lock(state) {
            State::Open(open) => open.unread,
            State::Over(_) => None,
        };
        next = unread.unwrap_or_else(Instant::now) + time;
        if next <= Instant::now() {
            return;
        }
    }
}

/// The response stream of all calls. The limits also apply while the client does not read, so that
/// nothing polls the stream: then the driver's stream is dropped, and the client receives the
/// status when it reads again.
pub struct Relay {
    state: Arc<Mutex<State>>,
    // Dropped with the stream, which ends the task that enforces the limits.
    _done: oneshot::Sender<()>,
}

enum State {
    Open(Box<Open>),
    /// Ended; with the status that the client has not received yet.
    Over(Option<Status>),
}

struct Open {
    from: MetadataStream,
    check: Option<StreamCheck>,
    rewrite: Option<Rewrite>,
    secrets: Secrets,
    node: Option<String>,
    call: Call,
    deadline: Instant,
    reader: Option<Waker>,
    /// Since when a message waits for the client to read. `None` while the client waits.
    unread: Option<Instant>,
    _stream: StreamPermit,
}

/// Converts a message of another API of the driver.
pub type Rewrite = fn(RawMessage) -> Result<RawMessage, Refusal>;

/// A driver's response stream, and what the relay needs with it.
pub struct Opened {
    pub answer: MetadataStream,
    /// Check of each message, with `--check-streams`.
    pub check: Option<StreamCheck>,
    /// Conversion of each message, if the driver's API is not the client's.
    pub rewrite: Option<Rewrite>,
    /// The secrets that the driver received.
    pub secrets: Secrets,
    pub stream: StreamPermit,
    /// The node whose sidecar answers, if it is not the driver itself.
    pub node: Option<String>,
}

impl Open {
    /// Returns the message for the client and its number of extents.
    fn forward(&mut self, message: RawMessage) -> Result<(RawMessage, u64), Refusal> {
        let extents = match &mut self.check {
            None => extents(&message.0),
            Some(check) => check.check(&message.0)?,
        };
        let message = match self.rewrite {
            None => message,
            Some(rewrite) => rewrite(message)?,
        };
        Ok((message, extents))
    }
}

impl Relay {
    pub fn new(opened: Opened, limits: Limits, mut call: Call) -> Self {
        call.relaying();
        let Opened { answer: from, check, rewrite, secrets, stream, node } = opened;
        let (unread, revoked) = (Some(Instant::now()), stream.revoked());
        let open = Open {
            from,
            check,
            rewrite,
            secrets,
            node,
            call,
            deadline: limits.deadline,
            reader: None,
            unread,
            _stream: stream,
        };
        let state = Arc::new(Mutex::new(State::Open(Box::new(open))));
        let (done, ended) = oneshot::channel();
        let limited = state.clone();
        task::spawn(async move {
            tokio::select! {
                _ = ended => {}
                refusal = limits.reached(&limited, revoked) => terminate(&limited, &refusal),
            }
        });
        Self { state, _done: done }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends a stream that is still open and drops the driver's stream.
fn terminate(state: &Mutex<State>, refusal: &Refusal) {
    let mut state = lock(state);
    let reader = match &mut *state {
        State::Open(open) => open.reader.take(),
        State::Over(_) => return,
    };
    state.end(Some(refusal));
    drop(state);
    if let Some(reader) = reader {
        reader.wake();
    }
}

impl State {
    fn end(&mut self, refusal: Option<&Refusal>) {
        if let Self::Open(open) = self {
            let status = match refusal {
                Some(refusal) => Some(open.call.refused(refusal)),
                None => {
                    open.call.succeeded();
                    None
                }
            };
            *self = Self::Over(status);
        }
    }
}

impl Stream for Relay {
    type Item = Result<RawMessage, Status>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut state = lock(&self.state);
        let end = match &mut *state {
            State::Over(status) => return Poll::Ready(status.take().map(Err)),
            State::Open(open) => match Pin::new(&mut open.from).poll_next(context) {
                Poll::Pending => {
                    open.unread = None;
                    open.reader = Some(context.waker().clone());
                    return Poll::Pending;
                }
                Poll::Ready(Some(Ok(message))) => match open.forward(message) {
                    Ok((message, extents)) => {
                        open.call.relayed(extents, message.0.len() as u64);
                        open.unread = Some(Instant::now());
                        return Poll::Ready(Some(Ok(message)));
                    }
                    Err(refusal) => Some(refusal),
                },
                Poll::Ready(Some(Err(status))) => Some(match &open.node {
                    None => of_driver(&status, &open.secrets),
                    Some(node) => of_node(&status, node, &open.secrets),
                }),
                // Some drivers end a stream with OK when its time is over, possibly before the task that
                // enforces the deadline runs.
                Poll::Ready(None) if Instant::now() >= open.deadline => Some(too_long()),
                // tonic reports a stream that ends without a status as an error.
                Poll::Ready(None) => None,
            },
        };
        state.end(end.as_ref());
        match &mut *state {
            State::Over(status) => Poll::Ready(status.take().map(Err)),
            State::Open(_) => Poll::Ready(None),
        }
    }
}

/// Maps a driver's error for the client. The driver's own errors keep their code. If the connection
/// failed, the client can only resume.
pub fn of_driver(status: &Status, secrets: &Secrets) -> Refusal {
    use std::error::Error as _;
    // Only errors of the connection have a source, and only non-gRPC responses have this prefix.
    if status.source().is_some() || status.message().starts_with("protocol error: ") {
        return disconnected();
    }
    if status.message().starts_with("Error, decoded message length too large") {
        let message = "the CSI driver sent a message that is too large; use a smaller max_results";
        return Refusal::new(Reason::MessageTooLarge, message);
    }
    let code = match status.code() {
        // The driver's error does not state a cause.
        Code::Unknown | Code::Ok => Code::Internal,
        code => code,
    };
    let text = secrets.hide(status.message());
    let message = match (code, text.is_empty()) {
        (_, true) => "the CSI driver gave no reason".to_owned(),
        (Code::FailedPrecondition, _) => format!("{text} (take a full backup)"),
        _ => text,
    };
    Refusal::new(Reason::Driver(code), message)
}

pub fn too_long() -> Refusal {
    Refusal::new(
        Reason::TooLong,
        "the deadline of the call or --max-streaming-duration-min expired before the response was complete; resume \
         at starting_offset",
    )
}

fn not_read() -> Refusal {
    Refusal::new(
        Reason::TooLong,
        "the client did not read the response within --stall-timeout; resume at starting_offset",
    )
}

pub fn exiting() -> Refusal {
    Refusal::new(
        Reason::Exiting,
        "the sidecar is exiting; resume at starting_offset with another replica",
    )
}

pub fn disconnected() -> Refusal {
    Refusal::new(
        Reason::DriverDisconnected,
        "the connection to the CSI driver failed and the response is incomplete; resume at starting_offset",
    )
}

/// Counts the extents in an encoded message. Counting stops where the message is malformed.
fn extents(mut message: &[u8]) -> u64 {
    let mut found = 0;
    while let Ok(Some((field, value))) = next_field(&mut message) {
        found += u64::from(field == BLOCK_METADATA && matches!(value, Value::Bytes(_)));
    }
    found
}

#[cfg(test)]
mod tests {
    use prost::Message;
    use tokio_stream::StreamExt;
    use tonic::codec::Codec;
    use tonic_prost::ProstCodec;

    use super::*;
    use crate::sidecar::call::ConcurrencyLimit;
    use crate::sidecar::metrics::{Metrics, Operation};
    use crate::sidecar::stream_limit::StreamLimit;
    use grpc::proto::csi::v1 as csi;

    #[test]
    fn extents_are_counted_in_encoded_messages() {
        for count in [0_u64, 1, 2, 300] {
            let block =
                |index| csi::BlockMetadata { byte_offset: index as i64 * 8192, size_bytes: 4096 };
            let message = csi::GetMetadataDeltaResponse {
                block_metadata_type: 2,
                volume_capacity_bytes: 1 << 40,
                block_metadata: (0..count).map(block).collect(),
            };
            let bytes = message.encode_to_vec();
            assert_eq!(extents(&bytes), count);
            assert!(extents(&bytes[..bytes.len() - 1]) <= count);
        }
        assert_eq!(extents(&[0xff; 20]), 0);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_can_be_counted(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
            proptest::prop_assert!(extents(&bytes) <= bytes.len() as u64);
        }
    }

    /// A stream that the driver has ended with OK.
    fn ended_relay(deadline: Instant) -> Relay {
        let metrics = Metrics::new(|_| ());
        let running = ConcurrencyLimit::new(1).try_acquire().unwrap();
        let budget = Arc::default();
        let call =
            Call::begin(Operation::Allocated, metrics, Code::PermissionDenied, budget, running);
        let decoder = ProstCodec::<RawMessage, RawMessage>::default().decoder();
        let opened = Opened {
            answer: MetadataStream::new_empty(decoder, tonic::body::Body::empty()),
            check: None,
            rewrite: None,
            secrets: Secrets::default(),
            stream: StreamLimit::new(1).acquire("user", "namespace").unwrap(),
            node: None,
        };
        let (_, shutdown) = Shutdown::manual();
        Relay::new(opened, Limits { deadline, stall_timeout: None, shutdown }, call)
    }

    #[tokio::test]
    async fn a_success_of_the_driver_after_the_deadline_is_none() {
        // The task that enforces the deadline has not run yet.
        let mut late = ended_relay(Instant::now());
        let status = late.next().await.expect("a status").unwrap_err();
        assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
        assert!(late.next().await.is_none());
        let mut in_time = ended_relay(Instant::now() + Duration::from_secs(60));
        assert!(in_time.next().await.is_none());
    }
}
