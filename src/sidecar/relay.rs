//! An answer on its way from the driver to the client. Messages pass through as the bytes that they are; they are
//! taken from the driver only as the client takes them, so that flow control reaches from end to end. An
//! end is passed on as clean only when the driver has said that it is.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};
use tokio_stream::Stream;
use tonic::{Code, Status};

use super::call::{Call, Running};
use super::check::StreamCheck;
use super::driver_link::Answer;
use super::fields::{BLOCK_METADATA, Value, next_field};
use super::refusal::{Reason, Refusal};
use crate::grpc::RawMessage;
use crate::kubernetes::secret::Secrets;
use crate::telemetry::shutdown::Shutdown;

/// What cuts an answer off.
pub struct Limits {
    pub deadline: Instant,
    pub shutdown: Shutdown,
}

impl Limits {
    /// Waits for the first of them.
    async fn reached(self) -> Refusal {
        tokio::select! {
            () = sleep_until(self.deadline) => too_long(),
            () = self.shutdown.ending() => exiting(),
        }
    }
}

/// The response stream of all calls. Its limits hold also while the client does not read and so nobody asks for
/// the next message: then the driver's side is given up, and the client is told when it reads on.
pub struct Relay {
    state: Arc<Mutex<State>>,
    // Dropped with the stream, which ends the one that minds the limits.
    _done: oneshot::Sender<()>,
}

enum State {
    Open(Box<Open>),
    /// Over; what is left to be told, if anything.
    Over(Option<Status>),
}

struct Open {
    from: Answer,
    check: Option<StreamCheck>,
    rewrite: Option<Rewrite>,
    secrets: Secrets,
    call: Call,
    reader: Option<Waker>,
    _stream: Running,
}

/// Makes a message of another API of the driver's.
pub type Rewrite = fn(RawMessage) -> Result<RawMessage, Refusal>;

/// A driver's answer that has begun, and what goes with it.
pub struct Opened {
    pub answer: Answer,
    /// What each message is held to, with `--check-streams`.
    pub check: Option<StreamCheck>,
    /// For each message, where it is not the client's API that was asked.
    pub rewrite: Option<Rewrite>,
    /// Which the driver was given.
    pub secrets: Secrets,
    pub stream: Running,
}

impl Open {
    /// The message as it goes to the client, and how many extents it has.
    fn passed(&mut self, message: RawMessage) -> Result<(RawMessage, u64), Refusal> {
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
        let Opened { answer: from, check, rewrite, secrets, stream } = opened;
        let open = Open { from, check, rewrite, secrets, call, reader: None, _stream: stream };
        let state = Arc::new(Mutex::new(State::Open(Box::new(open))));
        let (done, ended) = oneshot::channel();
        let minded = state.clone();
        tokio::spawn(async move {
            tokio::select! {
                _ = ended => {}
                refusal = limits.reached() => cut_off(&minded, &refusal),
            }
        });
        Self { state, _done: done }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends an answer that is still open; this lets go of the driver.
fn cut_off(state: &Mutex<State>, refusal: &Refusal) {
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
                    open.reader = Some(context.waker().clone());
                    return Poll::Pending;
                }
                Poll::Ready(Some(Ok(message))) => match open.passed(message) {
                    Ok((message, extents)) => {
                        open.call.relayed(extents, message.0.len() as u64);
                        return Poll::Ready(Some(Ok(message)));
                    }
                    Err(refusal) => Some(refusal),
                },
                Poll::Ready(Some(Err(status))) => Some(of_driver(&status, &open.secrets)),
                // An end without the driver's word is an error of the stream.
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

/// What a driver's error is to the client: the same, as far as it is the driver's. What failed between driver
/// and sidecar is nothing that the client could do about, except to go on from where it was.
pub fn of_driver(status: &Status, secrets: &Secrets) -> Refusal {
    use std::error::Error as _;
    // Only what comes from the connection has a source, and only what is no gRPC begins so.
    if status.source().is_some() || status.message().starts_with("protocol error: ") {
        return broke_off();
    }
    if status.message().starts_with("Error, decoded message length too large") {
        let message = "the driver sent a message that is too large; ask for fewer max_results";
        return Refusal::new(Reason::MessageTooLarge, message);
    }
    let code = match status.code() {
        // A driver's way to say nothing.
        Code::Unknown | Code::Ok => Code::Internal,
        code => code,
    };
    let said = secrets.hide(status.message());
    let message = match (code, said.is_empty()) {
        (_, true) => "the CSI driver gave no reason".to_owned(),
        (Code::FailedPrecondition, _) => format!("{said} (take a full backup)"),
        _ => said,
    };
    Refusal::new(Reason::Driver(code), message)
}

pub fn too_long() -> Refusal {
    Refusal::new(
        Reason::TooLong,
        "the deadline of the call, or --max-streaming-duration-min, passed before the answer was complete; go on \
         with starting_offset",
    )
}

pub fn exiting() -> Refusal {
    Refusal::new(
        Reason::Exiting,
        "the sidecar is exiting; go on with starting_offset, another replica answers",
    )
}

pub fn broke_off() -> Refusal {
    Refusal::new(
        Reason::DriverBrokeOff,
        "the CSI driver broke off; what was sent is not the whole answer: go on with starting_offset",
    )
}

/// Extents in a message, which is not decoded for that. What is no such message has those that were found.
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

    use super::*;
    use crate::proto::csi::v1 as csi;

    #[test]
    fn extents_are_counted_as_they_lie_there() {
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
        fn whatever_a_driver_sends_can_be_counted(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
            proptest::prop_assert!(extents(&bytes) <= bytes.len() as u64);
        }
    }

    #[test]
    fn a_drivers_error_is_passed_on_and_unknown_is_internal() {
        let none = Secrets::default();
        let refusal = of_driver(&Status::out_of_range("starting_offset: past the end"), &none);
        assert_eq!(
            (refusal.code(), refusal.message()),
            (Code::OutOfRange, "starting_offset: past the end")
        );
        assert_eq!(of_driver(&Status::unknown("x"), &none).code(), Code::Internal);
        let broken = Status::from_error(Box::new(std::io::Error::other("reset")));
        assert_eq!(of_driver(&broken, &none).reason, Reason::DriverBrokeOff);
        let full = of_driver(&Status::failed_precondition("the chain is broken"), &none);
        assert!(full.message().contains("full backup"));
    }
}
