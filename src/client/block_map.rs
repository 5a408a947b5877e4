//! The answer to `allocated` and `delta`: messages of extents, held to what CSI promises of them, so that
//! whoever reads the extents need not doubt them. Where the messages come from is the [`Source`]'s: a driver's
//! socket ([`Driver`]), or a driver's sidecar (`cluster`), which may be asked again after an interruption.

use anyhow::{Result, bail};
use tonic::{Response, Status, Streaming};

use super::connection::{Connection, refused};
use crate::backend::Extent;
use crate::proto::csi::v1 as csi;

/// A question about blocks. Snapshots go by id at a driver, by name in a cluster.
#[derive(Debug, Clone)]
pub enum Query {
    Allocated { snapshot: String },
    Delta { base: String, target: String },
}

/// Where an answer starts and in what portions it comes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Window {
    /// In bytes from the start of the volume.
    pub starting_offset: i64,
    /// Extents in one message, at most; 0 leaves it to the driver.
    pub max_results: i32,
}

/// What all messages of an answer have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    pub block_metadata_type: csi::BlockMetadataType,
    /// Of the volume as the (target) snapshot holds it; every API of streams says it.
    pub capacity_bytes: Option<u64>,
}

/// Where the messages of an answer come from.
pub trait Source {
    /// What comes next. `None` only when the answer is whole: the other side has said so.
    ///
    /// # Errors
    /// The answer broke, and will not go on.
    async fn next(&mut self, progress: Progress) -> Result<Option<Part>>;
}

/// How much of an answer has come.
#[derive(Debug, Clone, Copy, Default)]
pub struct Progress {
    pub shape: Option<Shape>,
    /// The first byte after the last extent; 0 before the first.
    pub end: u64,
}

/// What a source has to give.
pub enum Part {
    Message(Message),
    /// The answer begins anew, at the last progress or somewhat before: what has come is not wanted again.
    Anew,
}

/// An answer on its way. It has ended well only when [`BlockMap::next`] has returned `None`.
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
    /// The stream broke, or is not what CSI promises. Nothing that came before is then complete.
    pub async fn next(&mut self) -> Result<Option<Vec<Extent>>> {
        loop {
            match self.source.next(self.checks.progress).await? {
                Some(Part::Message(message)) => return self.checks.accept(&message).map(Some),
                Some(Part::Anew) => self.checks.begin_anew(),
                None if self.checks.progress.shape.is_none() => {
                    bail!("the driver answered without a message, so without the volume's capacity")
                }
                None => return Ok(None),
            }
        }
    }

    /// Known once the first message has come.
    pub fn shape(&self) -> Option<Shape> {
        self.checks.progress.shape
    }
}

/// What an answer is held to.
#[derive(Debug, Default)]
struct Checks {
    progress: Progress,
    /// Where the stream under way has come to: the first byte after its last extent.
    end: u64,
    /// Where the stream under way has to go on: what it says of before has been said.
    seam: u64,
}

impl Checks {
    fn begin_anew(&mut self) {
        self.end = 0;
        self.seam = self.progress.end;
    }

    /// The extents of a message that are new.
    fn accept(&mut self, message: &Message) -> Result<Vec<Extent>> {
        let shape = shape(message)?;
        if *self.progress.shape.get_or_insert(shape) != shape {
            bail!("the driver changed the block metadata type or the capacity in mid-stream");
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

/// A driver's answer over its socket.
pub struct Driver(Answer<csi::GetMetadataAllocatedResponse, csi::GetMetadataDeltaResponse>);

impl BlockMap<Driver> {
    /// Asks the driver.
    ///
    /// # Errors
    /// What the driver refuses before its first message.
    pub async fn open(connection: &Connection, query: Query, window: Window) -> Result<Self> {
        Ok(Self::new(Driver::ask(connection, query, window).await.map_err(refused)?))
    }
}

impl Driver {
    /// # Errors
    /// What the driver refuses before its first message.
    pub async fn ask(
        connection: &Connection,
        query: Query,
        window: Window,
    ) -> Result<Self, Status> {
        let Window { starting_offset, max_results } = window;
        let mut client = connection.snapshot_metadata();
        let answer = match query {
            Query::Allocated { snapshot } => {
                let request = csi::GetMetadataAllocatedRequest {
                    snapshot_id: snapshot,
                    starting_offset,
                    max_results,
                    ..csi::GetMetadataAllocatedRequest::default()
                };
                client.get_metadata_allocated(request).await.map(Answer::allocated)
            }
            Query::Delta { base, target } => {
                let request = csi::GetMetadataDeltaRequest {
                    base_snapshot_id: base,
                    target_snapshot_id: target,
                    starting_offset,
                    max_results,
                    ..csi::GetMetadataDeltaRequest::default()
                };
                client.get_metadata_delta(request).await.map(Answer::delta)
            }
        };
        answer.map(Self)
    }

    /// The next message; `None` at the end.
    ///
    /// # Errors
    /// The status with which the stream ended.
    pub async fn message(&mut self) -> Result<Option<Message>, Status> {
        self.0.message().await
    }
}

impl Source for Driver {
    async fn next(&mut self, _: Progress) -> Result<Option<Part>> {
        let message = self.message().await.map_err(refused)?;
        Ok(message.map(Part::Message))
    }
}

/// One stream of messages, of either kind.
pub enum Answer<A, D> {
    Allocated(Streaming<A>),
    Delta(Streaming<D>),
}

impl<A: Into<Message>, D: Into<Message>> Answer<A, D> {
    pub fn allocated(response: Response<Streaming<A>>) -> Self {
        Self::Allocated(response.into_inner())
    }

    pub fn delta(response: Response<Streaming<D>>) -> Self {
        Self::Delta(response.into_inner())
    }

    /// The next message; `None` when the other side has said that there is none.
    ///
    /// # Errors
    /// The status with which the stream ended. One without a cause is the other side's own.
    pub async fn message(&mut self) -> Result<Option<Message>, Status> {
        match self {
            Self::Allocated(stream) => Ok(stream.message().await.map_err(truncated)?.map(A::into)),
            Self::Delta(stream) => Ok(stream.message().await.map_err(truncated)?.map(D::into)),
        }
    }
}

/// A stream that just stops, as one through a proxy may, has no status; tonic makes one up, whose text
/// is all that tells it from the other side's.
fn truncated(status: Status) -> Status {
    if status.message().starts_with("protocol error: missing grpc-status") {
        return Status::unavailable(
            "the stream ended without a status, so its answer is not whole",
        );
    }
    status
}

/// A message of any answer, as it came. Its numbers hold those of every API: some are int64, some uint64.
pub struct Message {
    pub block_metadata_type: csi::BlockMetadataType,
    /// `None`: it is not said.
    pub capacity_bytes: Option<i128>,
    /// Offsets and lengths, in bytes.
    pub blocks: Vec<(i128, i128)>,
}

/// The responses of an API. `$style`: from the number of a block metadata type to CSI's; `$capacity`: the field.
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

/// The type of that number; `Unknown` where there is none.
pub fn csi_style(number: i32) -> csi::BlockMetadataType {
    number.try_into().unwrap_or(csi::BlockMetadataType::Unknown)
}

message_of!(volume_capacity_bytes, csi_style; csi::GetMetadataAllocatedResponse, csi::GetMetadataDeltaResponse);

fn shape(message: &Message) -> Result<Shape> {
    let block_metadata_type = message.block_metadata_type;
    if block_metadata_type == csi::BlockMetadataType::Unknown {
        bail!("the driver does not say how its block metadata is cut (block_metadata_type)");
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
    // No sum of two numbers of 64 bits overflows one of 128.
    let (Ok(offset), Ok(length), true) = (
        u64::try_from(offset),
        u64::try_from(length),
        offset + length <= shape.capacity_bytes.unwrap_or(u64::MAX).into(),
    ) else {
        bail!("the driver reports an extent past the end of the volume: {offset}, {length} bytes");
    };
    *end = offset + length;
    Ok(Extent { offset, length })
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

    #[test]
    fn what_was_said_before_the_seam_is_cut_off() {
        let extent = |offset, length| Extent { offset, length };
        let mut checks = Checks::default();
        checks.accept(&message(&[(4096, 4096), (16384, 8192)])).unwrap();
        checks.begin_anew();
        // Rounded down, with an extent that reaches over the seam at 24576.
        let again = checks.accept(&message(&[(4096, 4096), (16384, 12288), (32768, 4096)]));
        assert_eq!(again.unwrap(), [extent(24576, 4096), extent(32768, 4096)]);
        assert_eq!(checks.progress.end, 36864);
        // Within the new stream the order holds as in any other.
        assert!(checks.accept(&message(&[(16384, 4096)])).is_err());
    }

    #[test]
    fn an_answer_that_begins_anew_keeps_its_shape() {
        let mut checks = Checks::default();
        checks.accept(&message(&[(0, 4096)])).unwrap();
        checks.begin_anew();
        let grown = Message { capacity_bytes: Some(1 << 21), ..message(&[]) };
        assert!(checks.accept(&grown).is_err());
        let fixed = csi::BlockMetadataType::FixedLength;
        assert!(checks.accept(&Message { block_metadata_type: fixed, ..message(&[]) }).is_err());
        assert!(checks.accept(&message(&[])).unwrap().is_empty());
    }

    /// A server that answers with one message and an end of the stream, with or without a status.
    async fn lone_message(status: bool) -> Result<Vec<Option<Vec<Extent>>>> {
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
        let query = Query::Allocated { snapshot: "s".to_owned() };
        let mut map = BlockMap::open(&connection, query, Window::default()).await?;
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
    async fn a_stream_that_just_stops_is_not_a_whole_answer() {
        let whole = lone_message(true).await.unwrap();
        assert_eq!(whole, [Some(vec![Extent { offset: 0, length: 4096 }]), None]);
        let error = lone_message(false).await.unwrap_err().to_string();
        assert!(error.starts_with("UNAVAILABLE: the stream ended without a status"), "{error}");
    }
}
