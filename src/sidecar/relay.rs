//! An answer on its way from the driver to the client. Messages pass through as the bytes that they are; they are
//! taken from the driver only as the client takes them, so that flow control reaches from end to end. An
//! end is passed on as clean only when the driver has said that it is.

use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use prost::bytes::{Buf, Bytes};
use prost::encoding::{WireType, decode_key, decode_varint};
use tokio::time::{Instant, Sleep, sleep_until};
use tokio_stream::Stream;
use tonic::codec::Streaming;
use tonic::{Code, Response, Status};

use super::call::{Call, Running};
use super::refusal::{Reason, Refusal};
use super::secrets::Secrets;
use crate::grpc::RawMessage;
use crate::telemetry::shutdown::Shutdown;

/// Field of both responses that holds the extents.
const BLOCK_METADATA: u32 = 3;

/// What cuts an answer off.
pub struct Limits {
    pub deadline: Instant,
    pub shutdown: Shutdown,
}

/// The response stream of both calls.
pub struct Relay {
    from: Streaming<RawMessage>,
    /// The driver's word was in the headers: it has none to add.
    said: bool,
    deadline: Pin<Box<Sleep>>,
    ending: Pin<Box<dyn Future<Output = ()> + Send>>,
    secrets: Secrets,
    call: Option<Call>,
    _stream: Running,
}

impl Relay {
    pub fn new(
        answer: Response<Streaming<RawMessage>>,
        secrets: Secrets,
        limits: Limits,
        mut call: Call,
        stream: Running,
    ) -> Self {
        call.relaying();
        let shutdown = limits.shutdown;
        Self {
            said: answer.metadata().contains_key("grpc-status"),
            from: answer.into_inner(),
            deadline: Box::pin(sleep_until(limits.deadline)),
            ending: Box::pin(async move { shutdown.ending().await }),
            secrets,
            call: Some(call),
            _stream: stream,
        }
    }

    /// The next message, `None` after an end that the driver has declared.
    fn poll_driver(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Refusal>> {
        match ready!(Pin::new(&mut self.from).poll_next(context)) {
            Some(Ok(message)) => Poll::Ready(Ok(Some(message.0))),
            Some(Err(status)) => Poll::Ready(Err(of_driver(&status, &self.secrets))),
            None if self.said => Poll::Ready(Ok(None)),
            None => match ready!(pin!(self.from.trailers()).poll(context)) {
                Ok(Some(_)) => Poll::Ready(Ok(None)),
                Ok(None) | Err(_) => Poll::Ready(Err(broke_off())),
            },
        }
    }

    fn poll_limits(&mut self, context: &mut Context<'_>) -> Poll<Refusal> {
        if self.deadline.as_mut().poll(context).is_ready() {
            return Poll::Ready(too_long());
        }
        if self.ending.as_mut().poll(context).is_ready() {
            return Poll::Ready(exiting());
        }
        Poll::Pending
    }
}

impl Stream for Relay {
    type Item = Result<RawMessage, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let relay = &mut *self;
        if relay.call.is_none() {
            return Poll::Ready(None);
        }
        // First, so that a driver that is always ready cannot outrun them.
        let next = match relay.poll_limits(context) {
            Poll::Ready(refusal) => Err(refusal),
            Poll::Pending => ready!(relay.poll_driver(context)),
        };
        let Some(call) = relay.call.as_mut() else { return Poll::Ready(None) };
        match next {
            Ok(Some(message)) => {
                call.relayed(extents(&message), message.len() as u64);
                Poll::Ready(Some(Ok(RawMessage(message))))
            }
            Ok(None) => {
                call.succeeded();
                relay.call = None;
                Poll::Ready(None)
            }
            Err(refusal) => {
                let status = call.refused(&refusal);
                relay.call = None;
                Poll::Ready(Some(Err(status)))
            }
        }
    }
}

/// What a driver's error is to the client: the same, as far as it is the driver's. What failed between driver
/// and sidecar is nothing that the client could do about, except to go on from where it was.
pub fn of_driver(status: &Status, secrets: &Secrets) -> Refusal {
    use std::error::Error as _;
    // Only what comes from the connection has a source.
    if status.source().is_some() {
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
fn extents(message: &[u8]) -> u64 {
    let mut rest = message;
    let mut found = 0;
    while !rest.is_empty() {
        let Ok((field, wire_type)) = decode_key(&mut rest) else { break };
        let Ok(number) = decode_varint(&mut rest) else { break };
        match wire_type {
            WireType::Varint => {}
            WireType::LengthDelimited if number <= rest.len() as u64 => {
                rest.advance(number as usize);
                found += u64::from(field == BLOCK_METADATA);
            }
            _ => break,
        }
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
