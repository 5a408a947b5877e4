//! Wrong metadata: responses that violate CSI, each in one way. They prove that the rules of
//! `conformance` find violations, and show a backup client what a faulty driver sends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prost::Message as _;
use prost::bytes::Bytes;
use tokio::time::{Instant, sleep};
use tokio_stream::StreamExt;
use tonic::{Code, Response, Status};

use super::super::stream::Messages;
use grpc::RawMessage;
use grpc::proto::csi::v1 as csi;

/// How long a call waits for others with [`Way::LossIfBusy`].
const BUSY: Duration = Duration::from_millis(10);
const BLOCK: i64 = 4096;

/// How a response is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Unimplemented,
    /// The last of several tuples is missing, or the one that contains an offset.
    LostTuple,
    /// The same while another call runs.
    LossIfBusy,
    /// The same from the second call on.
    LossIfRepeated,
    /// The first tuple after a starting offset above zero is missing.
    LossIfResumed,
    /// A tuple that crosses the starting offset is missing.
    LateStart,
    /// A tuple ends before the starting offset.
    EarlyTuple,
    EmptyTuple,
    RepeatedTuple,
    /// The last two tuples are in the wrong order.
    SwappedTuples,
    /// A tuple follows the capacity.
    PastEnd,
    UnknownType,
    ChangedType,
    /// The type is FIXED_LENGTH, and sizes vary.
    UnevenBlocks,
    NoCapacity,
    ChangedCapacity,
    DoubledCapacity,
    /// All tuples are in one message.
    Crowded,
    /// Only the first message is sent if max_results is 1.
    ShortIfSmall,
    /// A stream without tuples has no message.
    NoMessage,
    /// The stream ends with OK at its deadline.
    OkAtDeadline,
    /// A call with a negative max_results never ends.
    Endless,
    NegativeOffsetCode,
    OffsetBeyondOk,
    MissingIdCode,
    NotFoundCode,
    NotFoundOk,
    /// An error has no message.
    Silent,
    /// An error has details.
    Details,
}

/// The names of the ways in a rule.
const NAMES: [(&str, Way); 29] = [
    ("unimplemented", Way::Unimplemented),
    ("lost-tuple", Way::LostTuple),
    ("loss-if-busy", Way::LossIfBusy),
    ("loss-if-repeated", Way::LossIfRepeated),
    ("loss-if-resumed", Way::LossIfResumed),
    ("late-start", Way::LateStart),
    ("early-tuple", Way::EarlyTuple),
    ("empty-tuple", Way::EmptyTuple),
    ("repeated-tuple", Way::RepeatedTuple),
    ("swapped-tuples", Way::SwappedTuples),
    ("past-end", Way::PastEnd),
    ("unknown-type", Way::UnknownType),
    ("changed-type", Way::ChangedType),
    ("uneven-blocks", Way::UnevenBlocks),
    ("no-capacity", Way::NoCapacity),
    ("changed-capacity", Way::ChangedCapacity),
    ("doubled-capacity", Way::DoubledCapacity),
    ("crowded", Way::Crowded),
    ("short-if-small", Way::ShortIfSmall),
    ("no-message", Way::NoMessage),
    ("ok-at-deadline", Way::OkAtDeadline),
    ("endless", Way::Endless),
    ("negative-offset-code", Way::NegativeOffsetCode),
    ("offset-beyond-ok", Way::OffsetBeyondOk),
    ("missing-id-code", Way::MissingIdCode),
    ("not-found-code", Way::NotFoundCode),
    ("not-found-ok", Way::NotFoundOk),
    ("silent", Way::Silent),
    ("details", Way::Details),
];

impl Way {
    /// # Errors
    /// No way has this name.
    pub fn named(text: &str) -> Result<Self, String> {
        let found = NAMES.iter().find(|(name, _)| *name == text).map(|(_, way)| *way);
        found.ok_or_else(|| {
            let names: Vec<&str> = NAMES.iter().map(|(name, _)| *name).collect();
            format!("how={text} is none of {}", names.join(", "))
        })
    }
}

/// The fields of a metadata call, and its deadline.
#[derive(Debug, Clone, Copy)]
pub struct Requested {
    pub starting_offset: i64,
    pub max_results: i32,
    pub has_ids: bool,
    pub deadline: Option<Instant>,
}

/// Calls of a rule: running ones, and all so far.
#[derive(Debug, Default)]
pub struct Seen {
    running: AtomicU64,
    all: AtomicU64,
}

/// How the response to a call is made wrong.
pub struct Wrong {
    pub way: Way,
    /// Selects a tuple by an offset in bytes.
    pub at: Option<u64>,
    pub seen: Arc<Seen>,
}

/// A whole response.
struct Reply {
    messages: Vec<csi::GetMetadataAllocatedResponse>,
    end: Result<(), Status>,
}

impl Wrong {
    /// The wrong response instead of the right one.
    pub async fn apply(
        &self,
        requested: Requested,
        right: Result<Response<Messages>, Status>,
    ) -> Result<Response<Messages>, Status> {
        let is_busy = self.is_busy().await;
        let number = self.seen.all.fetch_add(1, Ordering::Relaxed);
        if self.way == Way::Endless && requested.max_results < 0 {
            return Ok(Response::new(Messages::ending_at(Vec::new(), None)));
        }
        let mut reply = read(right).await;
        if let (Way::OkAtDeadline, Some(deadline)) = (self.way, requested.deadline) {
            reply.messages.truncate(1);
            let first = encoded(reply.messages);
            return Ok(Response::new(Messages::ending_at(first, Some(deadline))));
        }
        let is_now = match self.way {
            Way::LossIfBusy => is_busy,
            Way::LossIfRepeated => number > 0,
            _ => true,
        };
        if is_now {
            self.change(requested, &mut reply);
        }
        let Reply { messages, end } = reply;
        match end {
            Err(status) if messages.is_empty() => Err(status),
            end => Ok(Response::new(Messages::of(encoded(messages), end))),
        }
    }

    /// Whether another call runs. Waits for one.
    async fn is_busy(&self) -> bool {
        if self.way != Way::LossIfBusy {
            return false;
        }
        self.seen.running.fetch_add(1, Ordering::Relaxed);
        sleep(BUSY).await;
        self.seen.running.fetch_sub(1, Ordering::Relaxed) > 1
    }

    fn change(&self, requested: Requested, reply: &mut Reply) {
        match self.way {
            Way::Unimplemented
            | Way::NegativeOffsetCode
            | Way::OffsetBeyondOk
            | Way::MissingIdCode
            | Way::NotFoundCode
            | Way::NotFoundOk
            | Way::Silent
            | Way::Details => self.change_status(requested, reply),
            _ if reply.end.is_ok() => self.change_messages(requested, &mut reply.messages),
            _ => {}
        }
    }

    fn change_status(&self, requested: Requested, reply: &mut Reply) {
        let code = reply.end.as_ref().err().map(Status::code);
        let coded = |code| Err(Status::new(code, "wrong (--fault wrong-metadata)"));
        let offset = requested.starting_offset;
        let end = match (self.way, code) {
            (Way::Unimplemented, _) => {
                reply.messages.clear();
                coded(Code::Unimplemented)
            }
            (Way::NegativeOffsetCode, Some(Code::OutOfRange)) if offset < 0 => {
                coded(Code::InvalidArgument)
            }
            (Way::OffsetBeyondOk, Some(Code::OutOfRange)) if offset > 0 => Ok(()),
            (Way::MissingIdCode, Some(Code::InvalidArgument)) if !requested.has_ids => {
                coded(Code::NotFound)
            }
            (Way::NotFoundCode, Some(Code::NotFound)) => coded(Code::Internal),
            (Way::NotFoundOk, Some(Code::NotFound)) => Ok(()),
            (Way::Silent, Some(code)) => Err(Status::new(code, "")),
            (Way::Details, Some(code)) => {
                Err(Status::with_details(code, "wrong", Bytes::from_static(b"\x08\x05")))
            }
            _ => return,
        };
        reply.end = end;
    }

    fn change_messages(
        &self,
        requested: Requested,
        messages: &mut Vec<csi::GetMetadataAllocatedResponse>,
    ) {
        // The first message exists even without tuples.
        let Some(first) = messages.first().cloned() else { return };
        let empty = csi::GetMetadataAllocatedResponse { block_metadata: Vec::new(), ..first };
        let (capacity, variable) =
            (empty.volume_capacity_bytes, csi::BlockMetadataType::VariableLength);
        let fixed = i32::from(csi::BlockMetadataType::FixedLength);
        let with = |byte_offset, size_bytes| csi::GetMetadataAllocatedResponse {
            block_metadata: vec![csi::BlockMetadata { byte_offset, size_bytes }],
            ..empty.clone()
        };
        let each = |messages: &mut Vec<_>,
                    change: &dyn Fn(&mut csi::GetMetadataAllocatedResponse)| {
            messages.iter_mut().for_each(change);
        };
        let tuples = || messages.iter().flat_map(|message| message.block_metadata.iter());
        match self.way {
            Way::LostTuple | Way::LossIfBusy | Way::LossIfRepeated => lose(messages, self.at),
            Way::LossIfResumed if requested.starting_offset > 0 => {
                let first = tuples().next().map(|tuple| tuple.byte_offset);
                lose(
                    messages,
                    first.and_then(|first| u64::try_from(first).ok()).or(Some(u64::MAX)),
                );
            }
            Way::LateStart => {
                let start = requested.starting_offset;
                each(messages, &|message| {
                    message.block_metadata.retain(|tuple| tuple.byte_offset >= start);
                });
            }
            Way::EarlyTuple if requested.starting_offset >= BLOCK => {
                messages.insert(0, with(0, 512))
            }
            Way::EmptyTuple => messages.push(with(capacity, 0)),
            Way::RepeatedTuple => {
                let repeated = tuples().last().copied();
                messages.extend(repeated.map(|tuple| with(tuple.byte_offset, tuple.size_bytes)));
            }
            Way::SwappedTuples => {
                let mut all: Vec<_> = tuples().copied().collect();
                if let [.., a, b] = all.as_mut_slice() {
                    std::mem::swap(a, b);
                }
                let places = messages.iter_mut().flat_map(|one| one.block_metadata.iter_mut());
                places.zip(all).for_each(|(place, tuple)| *place = tuple);
            }
            Way::PastEnd => messages.push(with(capacity, BLOCK)),
            Way::UnknownType => each(messages, &|message| message.block_metadata_type = 0),
            Way::ChangedType => {
                let other =
                    if empty.block_metadata_type == fixed { variable.into() } else { fixed };
                messages.push(csi::GetMetadataAllocatedResponse {
                    block_metadata_type: other,
                    ..empty
                });
            }
            Way::UnevenBlocks => each(messages, &|message| message.block_metadata_type = fixed),
            Way::NoCapacity => each(messages, &|message| message.volume_capacity_bytes = 0),
            Way::ChangedCapacity => messages.push(csi::GetMetadataAllocatedResponse {
                volume_capacity_bytes: capacity + BLOCK,
                ..empty
            }),
            Way::DoubledCapacity => each(messages, &|message| message.volume_capacity_bytes *= 2),
            Way::Crowded => {
                let block_metadata = tuples().copied().collect();
                *messages = vec![csi::GetMetadataAllocatedResponse { block_metadata, ..empty }];
            }
            Way::ShortIfSmall if requested.max_results == 1 => messages.truncate(1),
            Way::NoMessage => messages.retain(|message| !message.block_metadata.is_empty()),
            _ => {}
        }
    }
}

/// Removes the tuple that contains the offset; without one, the last of several tuples.
fn lose(messages: &mut [csi::GetMetadataAllocatedResponse], at: Option<u64>) {
    let Some(at) = at else {
        let last = messages.iter_mut().rev().find(|message| !message.block_metadata.is_empty());
        last.map(|message| message.block_metadata.pop());
        return;
    };
    let at = i64::try_from(at).unwrap_or(i64::MAX);
    for message in messages {
        message.block_metadata.retain(|tuple| {
            !(tuple.byte_offset..tuple.byte_offset + tuple.size_bytes).contains(&at)
        });
    }
}

async fn read(right: Result<Response<Messages>, Status>) -> Reply {
    let mut reply = Reply { messages: Vec::new(), end: Ok(()) };
    match right {
        Ok(response) => {
            let mut stream = response.into_inner();
            while let Some(message) = stream.next().await {
                // Both responses have the same fields.
                let decoded = message.map(|message| {
                    csi::GetMetadataAllocatedResponse::decode(message.0).unwrap_or_default()
                });
                match decoded {
                    Ok(message) => reply.messages.push(message),
                    Err(status) => reply.end = Err(status),
                }
            }
        }
        Err(status) => reply.end = Err(status),
    }
    reply
}

fn encoded(messages: Vec<csi::GetMetadataAllocatedResponse>) -> Vec<RawMessage> {
    messages.iter().map(RawMessage::of).collect()
}
