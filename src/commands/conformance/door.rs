//! How the rules reach a driver. A door makes volumes and snapshots, changes the content of
//! volumes, and reads metadata; the rules and the situations know nothing else of a driver.

use std::fmt;
use std::time::Duration;

use tonic::{Code, Status};

use super::content::Image;
pub use crate::client::block_map::{Query, Window};
use grpc::code_name;

/// A volume of the test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    pub name: String,
    pub id: String,
    /// In bytes.
    pub size: u64,
}

/// A snapshot of the test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Names it as the target of a call.
    pub id: String,
    /// Names it as the base of a delta.
    pub base: String,
    /// Bytes that a volume needs at least to hold it; 0 if the driver does not report it.
    pub size: u64,
}

/// The content of a new volume.
#[derive(Debug, Clone, Copy)]
pub enum Source<'a> {
    Snapshot(&'a Snapshot),
    Volume(&'a Volume),
}

/// How a range of a volume changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Writes a pattern; 0 writes zeros.
    Write(u8),
    /// Discards the range, so that it reads as zeros.
    Discard,
    /// Writes zeros without data: the device may allocate or discard the range.
    ZeroOut,
}

/// A change of a volume. Offset and length in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Edit {
    pub offset: u64,
    pub length: u64,
    pub change: Change,
}

/// A tuple of block metadata, as it is on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuple {
    pub offset: i64,
    pub size: i64,
}

impl Tuple {
    /// The first byte after the tuple.
    pub const fn end(self) -> i64 {
        self.offset.saturating_add(self.size)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    pub block_metadata_type: i32,
    pub capacity: i64,
    pub tuples: Vec<Tuple>,
}

/// What arrived of a metadata call.
#[derive(Debug, Clone)]
pub struct Stream {
    pub messages: Vec<Message>,
    pub end: End,
    pub first_message: Duration,
    pub whole: Duration,
}

#[derive(Debug, Clone)]
pub enum End {
    /// The driver reported success.
    Complete,
    Failed(Failure),
    /// Neither an end nor, for this long, another message with tuples.
    Endless(Duration),
    /// The user or the time limit of the run stopped it.
    Stopped,
}

impl Stream {
    pub fn tuples(&self) -> impl Iterator<Item = Tuple> {
        self.messages.iter().flat_map(|message| message.tuples.iter().copied())
    }
}

/// An error status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub code: Code,
    pub message: String,
    pub has_details: bool,
    /// The driver sent it, rather than the client's transport.
    pub is_sent: bool,
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        Self {
            code: status.code(),
            is_sent: std::error::Error::source(&status).is_none(),
            has_details: !status.details().is_empty(),
            message: status.message().to_owned(),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", code_name(self.code), self.message)
    }
}

/// Why a door cannot do something.
#[derive(Debug, Clone)]
pub enum Refusal {
    /// The driver or the machine refuses it, for this reason.
    Refused(String),
    /// The same, and nothing was made: the driver refuses the request itself.
    Final(String),
    /// The user or the time limit of the run stopped it.
    Stopped,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(reason) | Self::Final(reason) => f.write_str(reason),
            Self::Stopped => f.write_str("stopped"),
        }
    }
}

pub type Done<T> = Result<T, Refusal>;

/// The driver, as the report names it.
#[derive(Debug, Clone, Default)]
pub struct About {
    pub name: String,
    pub version: String,
}

/// A driver. Each method waits for its result.
pub trait Door: Sync {
    fn about(&self) -> &About;

    /// Whether the driver advertises the SnapshotMetadata service.
    fn has_metadata(&self) -> bool;

    /// A raw block volume of at least this size in bytes.
    fn make_volume(&self, name: &str, bytes: u64, source: Option<Source<'_>>) -> Done<Volume>;

    /// Changes the volume and flushes it. Returns its size in bytes.
    fn change(&self, volume: &Volume, edits: &[Edit]) -> Done<u64>;

    /// The sectors, as ranges of bytes, whose content differs from the image.
    fn compare(&self, volume: &Volume, image: &Image) -> Done<super::content::Ranges>;

    /// Does `work` while the volume is in use.
    fn while_used(&self, volume: &Volume, work: &mut dyn FnMut()) -> Done<()>;

    /// Grows the volume to at least this size in bytes. Returns its size.
    fn grow(&self, volume: &Volume, bytes: u64) -> Done<u64>;

    /// A snapshot that is ready to use.
    fn snapshot(&self, volume: &Volume, name: &str) -> Done<Snapshot>;

    fn delete_snapshot(&self, snapshot: &Snapshot) -> Done<()>;

    fn delete_volume(&self, volume: &Volume) -> Done<()>;

    /// A metadata call. It ends as endless after `patience` without an end.
    fn stream(&self, query: &Query, window: Window, patience: Duration) -> Stream;

    /// A metadata call with this deadline, which only the driver enforces: the client reads nothing
    /// before the deadline, and then everything. `None` if the door cannot do this.
    fn stream_past_deadline(
        &self,
        query: &Query,
        window: Window,
        deadline: Duration,
    ) -> Option<Stream>;

    /// The sidecar between the clients and the driver; `None` for a driver's socket.
    fn sidecar(&self) -> Option<&dyn Sidecar>;

    /// Removes everything that the run made. Returns what remains, each with the reason.
    fn clean_up(&self) -> Vec<String>;
}

/// What a caller of a sidecar does wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    NoToken,
    /// A token with another signature.
    InvalidToken,
    /// A token for another audience.
    OtherAudience,
    /// The token of an account without rights.
    NoRights,
    NoNamespace,
}

/// The service that clients in a cluster call instead of the driver.
pub trait Sidecar: Sync {
    /// Why no TLS connection is possible that trusts only the published authorities.
    fn tls_problem(&self) -> Option<String>;

    /// A call with a fault, and the token that it used.
    fn call_with(&self, fault: Fault, query: &Query) -> Done<(Stream, String)>;
}
