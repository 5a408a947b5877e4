//! Listings of allocated and changed blocks: messages of extents, checked against the contract of
//! CSI, so that a consumer can rely on it. A [`Source`] provides the messages: a driver's socket
//! ([`Driver`]), or a driver's sidecar (`cluster`), which resumes after an interruption.

use anyhow::{Result, anyhow, bail};
use tokio::time::Instant;
use tonic::{Code, Response, Status, Streaming};

use super::connection::{Connection, refused};
use grpc::proto::csi::v1 as csi;
use storage::Extent;

/// What to list. A driver identifies snapshots by id, a cluster by name.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Query {
    Allocated { snapshot: String },
    Delta { base: String, target: String },
}

impl Query {
    /// The call of CSI.
    pub const fn method(&self) -> &'static str {
        match self {
            Self::Allocated { .. } => "GetMetadataAllocated",
            Self::Delta { .. } => "GetMetadataDelta",
        }
    }
}

/// The changes since this base cannot be listed, and never will be: a full backup is needed.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct BaseUnusable(pub String);

impl BaseUnusable {
    /// Whether a delta that ends with this code never works: its changes are unknown, or the driver
    /// does not know the base, or it is newer than the target.
    pub const fn is_meant_by(code: Code) -> bool {
        matches!(
            code,
            Code::FailedPrecondition
                | Code::InvalidArgument
                | Code::NotFound
                | Code::DataLoss
                | Code::Unimplemented
        )
    }
}

/// Where a listing starts, and the size of its messages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Window {
    /// In bytes from the start of the volume.
    pub starting_offset: i64,
    /// Maximum number of extents per message; 0 means the driver's default.
    pub max_results: i32,
}

/// What all messages of a listing have in common. Of a listing without messages: an unknown type,
/// and the size of the snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    pub block_metadata_type: csi::BlockMetadataType,
    /// Capacity of the (target) snapshot or of its volume; every streaming API reports it.
    pub capacity_bytes: Option<u64>,
}

/// Where the messages of a listing come from.
pub trait Source {
    /// The next part. `None` only when the server has reported the end of a complete listing.
    ///
    /// # Errors
    /// The listing broke and cannot be resumed.
    fn next(&mut self, progress: Progress) -> impl Future<Output = Result<Option<Part>>>;

    /// Size of the (target) snapshot in bytes, from elsewhere than the listing, which may have no
    /// message.
    fn size(&self) -> Option<u64>;
}

/// How much of a listing has arrived.
#[derive(Debug, Clone, Copy, Default)]
pub struct Progress {
    pub shape: Option<Shape>,
    /// The first byte after the last extent; 0 before the first.
    pub end: u64,
}

/// A part of a listing.
pub enum Part {
    Message(Message),
    /// The stream restarts at the last progress or shortly before it; repeated extents are dropped.
    Restart,
}

/// Processes a listing, from whichever source.
pub trait Consumer {
    type Output;

    /// # Errors
    /// The listing broke, or processing failed.
    async fn consume<S: Source>(self, map: BlockMap<S>) -> Result<Self::Output>;
}

/// A listing in progress. It is complete only when [`BlockMap::next`] has returned `None`.
pub struct BlockMap<S> {
    source: S,
    checks: Checks,
}

impl<S: Source> BlockMap<S> {
    pub fn new(source: S) -> Self {
        Self { source, checks: Checks::default() }
    }

    /// The extents of the next message, ascending and not overlapping; `None` at the end.
    ///
    /// # Errors
    /// The stream broke or violates the contract of CSI. The extents so far are incomplete then.
    pub async fn next(&mut self) -> Result<Option<Vec<Extent>>> {
        loop {
            match self.source.next(self.checks.progress).await? {
                Some(Part::Message(message)) => return self.checks.accept(&message).map(Some),
                Some(Part::Restart) => self.checks.restart(),
                None => {
                    // A stream without messages is an empty listing (CSI, "Special considerations
                    // for processing a snapshot metadata gRPC stream").
                    self.checks.progress.shape.get_or_insert(Shape {
                        block_metadata_type: csi::BlockMetadataType::Unknown,
                        capacity_bytes: self.source.size(),
                    });
                    return Ok(None);
                }
            }
        }
    }

    /// Size of the (target) snapshot, from elsewhere than the listing.
    pub fn size(&self) -> Option<u64> {
        self.source.size()
    }

    /// Known after the first message, and at the end.
    pub fn shape(&self) -> Option<Shape> {
        self.checks.progress.shape
    }
}

/// The contract of CSI, and what of it depends on earlier messages.
#[derive(Debug, Default)]
struct Checks {
    progress: Progress,
    /// The first byte after the last extent of the current stream.
    end: u64,
    /// Where the current stream must continue; extents before it are repetitions.
    seam: u64,
}

impl Checks {
    fn restart(&mut self) {
        self.end = 0;
        self.seam = self.progress.end;
    }

    /// The extents of a message without repetitions.
    fn accept(&mut self, message: &Message) -> Result<Vec<Extent>> {
        let shape = shape(message)?;
        if *self.progress.shape.get_or_insert(shape) != shape {
            bail!("the driver changed the block metadata type or the capacity during the stream");
        }
        let mut extents = Vec::with_capacity(message.blocks.len());
        for block in &message.blocks {
            let extent = checked(*block, shape, &mut self.end)?;
            if extent.end() > self.seam {
                let offset = extent.offset.max(self.seam);
                extents.push(Extent { offset, length: extent.end() - offset });
                self.progress.end = extent.end();
            }
        }
        Ok(extents)
    }
}

/// The parts of extents before a byte, the end of a snapshot: its volume may have grown since.
pub fn clip(mut extents: Vec<Extent>, end: u64) -> Vec<Extent> {
    extents.retain(|extent| extent.offset < end);
    if let Some(last) = extents.last_mut().filter(|last| last.end() > end) {
        last.length = end - last.offset;
    }
    extents
}

/// A listing over a driver's socket.
pub struct Driver {
    stream: Stream<csi::GetMetadataAllocatedResponse, csi::GetMetadataDeltaResponse>,
    /// Of the target, in bytes.
    size: Option<u64>,
    /// Next step after a refusal of a snapshot.
    hint: Option<String>,
}

impl BlockMap<Driver> {
    /// Starts a listing. `size`: that of the target in bytes, if known. `hint`: the next step if the
    /// driver refuses a snapshot.
    ///
    /// # Errors
    /// The driver refuses it before the first message.
    pub async fn open(
        connection: &Connection,
        query: Query,
        window: Window,
        size: Option<u64>,
        hint: Option<String>,
    ) -> Result<Self> {
        match Driver::request(connection, query, window).await {
            Ok(driver) => Ok(Self::new(Driver { size, hint, ..driver })),
            Err(status) => Err(refused_with(status, hint.as_deref())),
        }
    }
}

/// The error of a status; a refused snapshot is followed by the hint.
fn refused_with(status: Status, hint: Option<&str>) -> anyhow::Error {
    let is_refused = matches!(status.code(), Code::NotFound | Code::InvalidArgument);
    match hint.filter(|_| is_refused) {
        Some(hint) => anyhow!("{}; {hint}", refused(status)),
        None => refused(status),
    }
}

impl Driver {
    /// Starts a stream.
    ///
    /// # Errors
    /// The driver refuses it before the first message.
    pub async fn request(
        connection: &Connection,
        query: Query,
        window: Window,
    ) -> Result<Self, Status> {
        let Window { starting_offset, max_results } = window;
        let mut client = connection.snapshot_metadata();
        let deadline = connection.deadline();
        let stream = match query {
            Query::Allocated { snapshot } => {
                let request = csi::GetMetadataAllocatedRequest {
                    secrets: connection.secrets(),
                    snapshot_id: snapshot,
                    starting_offset,
                    max_results,
                };
                client.get_metadata_allocated(request).await.map(Answer::Allocated)
            }
            Query::Delta { base, target } => {
                let request = csi::GetMetadataDeltaRequest {
                    secrets: connection.secrets(),
                    base_snapshot_id: base,
                    target_snapshot_id: target,
                    starting_offset,
                    max_results,
                };
                client.get_metadata_delta(request).await.map(Answer::Delta)
            }
        };
        Ok(Self { stream: Stream::new(stream?, deadline), size: None, hint: None })
    }

    /// The next message; `None` at the end.
    ///
    /// # Errors
    /// The status with which the stream ended.
    pub async fn message(&mut self) -> Result<Option<Message>, Status> {
        self.stream.message().await
    }
}

impl Source for Driver {
    async fn next(&mut self, _: Progress) -> Result<Option<Part>> {
        let message = self.message().await;
        let message = message.map_err(|status| refused_with(status, self.hint.as_deref()))?;
        Ok(message.map(Part::Message))
    }

    fn size(&self) -> Option<u64> {
        self.size
    }
}

/// The response to a call of either kind.
pub enum Answer<A, D> {
    Allocated(Response<Streaming<A>>),
    Delta(Response<Streaming<D>>),
}

/// One stream of messages, of either kind.
pub struct Stream<A, D> {
    answer: Answer<A, D>,
    /// Of the call.
    deadline: Instant,
}

impl<A: Into<Message>, D: Into<Message>> Stream<A, D> {
    pub fn new(answer: Answer<A, D>, deadline: Instant) -> Self {
        Self { answer, deadline }
    }

    /// The next message; `None` at the end of the stream.
    ///
    /// # Errors
    /// The status that ended the stream. A status without a cause comes from the server.
    pub async fn message(&mut self) -> Result<Option<Message>, Status> {
        let message = match &mut self.answer {
            Answer::Allocated(stream) => stream.get_mut().message().await.map(|it| it.map(A::into)),
            Answer::Delta(stream) => stream.get_mut().message().await.map(|it| it.map(D::into)),
        };
        let message = message.map_err(truncated)?;
        if message.is_none() && Instant::now() >= self.deadline {
            // Some servers end a call with OK when its time is over.
            return Err(Status::deadline_exceeded(
                "the stream ended after its time limit, so the listing may be incomplete",
            ));
        }
        Ok(message)
    }
}

/// A stream that ends without a status, as through a proxy, gets one from tonic, which only its
/// text distinguishes from one of the server.
fn truncated(status: Status) -> Status {
    if status.message().starts_with("protocol error: missing grpc-status") {
        return Status::unavailable(
            "the stream ended without a status, so the listing is incomplete",
        );
    }
    status
}

/// An unchecked message of any API. Its numbers hold int64 and uint64.
pub struct Message {
    pub block_metadata_type: csi::BlockMetadataType,
    /// `None` where the API does not report it.
    pub capacity_bytes: Option<i128>,
    /// Offsets and lengths, in bytes.
    pub blocks: Vec<(i128, i128)>,
}

/// Converts the responses of an API. `$style` maps the number of a block metadata type to CSI's;
/// `$capacity` is a field.
macro_rules! message_of {
    ($capacity:ident, $style:expr; $($response:ty),*) => {$(
        impl From<$response> for $crate::client::block_map::Message {
            fn from(response: $response) -> Self {
                let blocks = response.block_metadata.into_iter();
                Self {
                    block_metadata_type: $style(response.block_metadata_type),
                    capacity_bytes: Some(response.$capacity.into()),
                    blocks: blocks
                        .map(|block| (block.byte_offset.into(), block.size_bytes.into()))
                        .collect(),
                }
            }
        }
    )*};
}
pub(super) use message_of;

/// The type with that number; `Unknown` if none has it.
pub fn csi_style(number: i32) -> csi::BlockMetadataType {
    number.try_into().unwrap_or(csi::BlockMetadataType::Unknown)
}

message_of!(volume_capacity_bytes, csi_style; csi::GetMetadataAllocatedResponse, csi::GetMetadataDeltaResponse);

fn shape(message: &Message) -> Result<Shape> {
    let block_metadata_type = message.block_metadata_type;
    if block_metadata_type == csi::BlockMetadataType::Unknown {
        bail!("the driver does not report the block metadata type (block_metadata_type)");
    }
    let Some(reported) = message.capacity_bytes else {
        return Ok(Shape { block_metadata_type, capacity_bytes: None });
    };
    match u64::try_from(reported) {
        Ok(bytes) if bytes > 0 => Ok(Shape { block_metadata_type, capacity_bytes: Some(bytes) }),
        _ => bail!("the driver reports a capacity of {reported} bytes"),
    }
}

/// The extent of a block, which starts at or after `end` and moves it.
fn checked((offset, length): (i128, i128), shape: Shape, end: &mut u64) -> Result<Extent> {
    if offset < 0 || length < 0 {
        bail!("the driver reports a negative extent: {offset}, {length} bytes");
    }
    if length == 0 || offset < (*end).into() {
        bail!(
            "the driver reports an extent that is empty or out of order: {offset}, {length} bytes"
        );
    }
    let capacity = i128::from(shape.capacity_bytes.unwrap_or(u64::MAX));
    // The sum of two 64-bit numbers fits 128 bits. The last block of a fixed length may exceed the
    // capacity.
    let is_fixed = shape.block_metadata_type == csi::BlockMetadataType::FixedLength;
    let inside = if is_fixed { offset < capacity } else { offset + length <= capacity };
    let (Ok(start), Ok(last), true) =
        (u64::try_from(offset), u64::try_from((offset + length).min(capacity)), inside)
    else {
        bail!("the driver reports an extent past the end of the volume: {offset}, {length} bytes");
    };
    *end = last;
    Ok(Extent { offset: start, length: last - start })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape {
        block_metadata_type: csi::BlockMetadataType::VariableLength,
        capacity_bytes: Some(1 << 20),
    };

    fn message(blocks: &[(i128, i128)]) -> Message {
        Message {
            block_metadata_type: SHAPE.block_metadata_type,
            capacity_bytes: Some(1 << 20),
            blocks: blocks.to_vec(),
        }
    }

    fn check(blocks: &[(i128, i128)]) -> Result<Vec<Extent>> {
        Checks::default().accept(&message(blocks))
    }

    #[test]
    fn ascending_extents_pass() {
        let extents = check(&[(0, 4096), (4096, 4096), (1 << 19, 1 << 19)]).unwrap();
        assert_eq!(extents[2], Extent { offset: 1 << 19, length: 1 << 19 });
    }

    #[test]
    fn extents_that_break_the_contract_are_an_error() {
        for blocks in [
            &[(-4096, 4096)][..],
            &[(0, -1)],
            &[(0, 0)],
            &[(4096, 4096), (0, 4096)],
            &[(0, 8192), (4096, 4096)],
            &[((1 << 20) - 4096, 8192)],
            &[(i64::MAX.into(), i64::MAX.into())],
            &[(u64::MAX.into(), u64::MAX.into())],
        ] {
            assert!(check(blocks).is_err(), "{blocks:?}");
        }
    }

    #[test]
    fn a_message_without_type_or_capacity_is_an_error() {
        let message = |block_metadata_type, capacity_bytes| Message {
            block_metadata_type,
            capacity_bytes: Some(capacity_bytes),
            ..message(&[])
        };
        let variable = csi::BlockMetadataType::VariableLength;
        assert_eq!(shape(&message(variable, 1 << 20)).unwrap(), SHAPE);
        assert!(shape(&message(csi::BlockMetadataType::Unknown, 1 << 20)).is_err());
        assert!(shape(&message(variable, 0)).is_err());
        assert!(shape(&message(variable, -1)).is_err());
    }

    /// A server that sends one message and ends the stream, with or without a status. The deadline
    /// of the call may be over then.
    async fn lone_message(status: bool, is_late: bool) -> Result<Vec<Option<Vec<Extent>>>> {
        let directory = tempfile::tempdir()?;
        let socket = directory.path().join("csi.sock");
        let listener = tokio::net::UnixListener::bind(&socket)?;
        let server = tokio::spawn(async move {
            let mut connection =
                h2::server::handshake(listener.accept().await.unwrap().0).await.unwrap();
            while let Some(Ok((_, mut respond))) = connection.accept().await {
                let head = http_response();
                let mut body = respond.send_response(head, false).unwrap();
                body.send_data(framed(), !status).unwrap();
                if status {
                    let trailers = [("grpc-status".parse().unwrap(), "0".parse().unwrap())];
                    body.send_trailers(trailers.into_iter().collect()).unwrap();
                }
            }
        });
        let soon = tokio::time::Instant::now() + std::time::Duration::from_secs(60);
        let endpoint = socket.to_str().unwrap().parse().unwrap();
        let connection = Connection::open(&endpoint, soon).await?;
        let deadline = if is_late { tokio::time::Instant::now() } else { soon };
        let connection = connection.until(deadline);
        let query = Query::Allocated { snapshot: "s".to_owned() };
        let mut map = BlockMap::open(&connection, query, Window::default(), None, None).await?;
        let first = map.next().await?;
        let second = map.next().await;
        server.abort();
        Ok(vec![first, second?])
    }

    fn http_response() -> tonic::codegen::http::Response<()> {
        let builder = tonic::codegen::http::Response::builder();
        builder.header("content-type", "application/grpc").body(()).unwrap()
    }

    fn framed() -> prost::bytes::Bytes {
        let message = prost::Message::encode_to_vec(&csi::GetMetadataAllocatedResponse {
            block_metadata_type: csi::BlockMetadataType::VariableLength.into(),
            volume_capacity_bytes: 1 << 20,
            block_metadata: vec![csi::BlockMetadata { byte_offset: 0, size_bytes: 4096 }],
        });
        let length = u32::try_from(message.len()).unwrap().to_be_bytes();
        [&[0][..], &length, &message].concat().into()
    }

    #[tokio::test]
    async fn a_stream_without_a_status_or_too_late_is_incomplete() {
        let whole = lone_message(true, false).await.unwrap();
        assert_eq!(whole, [Some(vec![Extent { offset: 0, length: 4096 }]), None]);
        let error = lone_message(false, false).await.unwrap_err().to_string();
        assert!(error.starts_with("UNAVAILABLE: the stream ended without a status"), "{error}");
        let error = lone_message(true, true).await.unwrap_err().to_string();
        assert!(error.starts_with("DEADLINE_EXCEEDED: the stream ended after"), "{error}");
    }

    #[test]
    fn the_last_block_of_a_fixed_length_may_exceed_the_capacity() {
        let fixed = Shape { block_metadata_type: csi::BlockMetadataType::FixedLength, ..SHAPE };
        let last = ((1 << 20) - 4096, 8192);
        let found = checked(last, fixed, &mut 0).unwrap();
        assert_eq!((found.offset, found.length), ((1 << 20) - 4096, 4096));
        assert!(checked((1 << 20, 4096), fixed, &mut 0).is_err());
        assert!(checked(last, SHAPE, &mut 0).is_err());
    }

    #[test]
    fn a_listing_of_a_grown_volume_ends_with_the_snapshot() {
        let extents = [(0, 4096), (8192, 8192), (20480, 4096)];
        let extents = extents.map(|(offset, length)| Extent { offset, length }).to_vec();
        let [first, mut second] = [extents[0], extents[1]];
        second.length = 4096;
        assert_eq!(clip(extents.clone(), 12288), [first, second]);
        assert_eq!(clip(extents.clone(), 8192), [first]);
        assert_eq!(clip(extents.clone(), 1 << 20), extents);
    }
}
