//! The stream that answers `allocated` and `delta`: frames of extents, held to what CSI promises of
//! them, so that whoever reads the extents need not doubt them.

use anyhow::{Result, bail};
use tonic::Streaming;

use super::connection::{Connection, refused};
use crate::backend::Extent;
use crate::proto::csi::v1 as csi;

/// A question about blocks. Snapshots go by id.
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

/// An answer on its way. It has ended well only when [`BlockMap::next`] has returned `None`.
pub struct BlockMap {
    answer: Answer,
    shape: Option<Shape>,
    /// The first byte after the last extent so far.
    end: u64,
}

/// What all messages of an answer have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    pub block_metadata_type: csi::BlockMetadataType,
    /// Of the volume as the (target) snapshot holds it.
    pub capacity_bytes: u64,
}

enum Answer {
    Allocated(Streaming<csi::GetMetadataAllocatedResponse>),
    Delta(Streaming<csi::GetMetadataDeltaResponse>),
}

/// A message of either answer.
struct Message {
    block_metadata_type: csi::BlockMetadataType,
    volume_capacity_bytes: i64,
    block_metadata: Vec<csi::BlockMetadata>,
}

impl BlockMap {
    /// Asks the driver.
    ///
    /// # Errors
    /// What the driver refuses before its first message.
    pub async fn open(connection: &Connection, query: Query, window: Window) -> Result<Self> {
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
                client
                    .get_metadata_allocated(request)
                    .await
                    .map(|r| Answer::Allocated(r.into_inner()))
            }
            Query::Delta { base, target } => {
                let request = csi::GetMetadataDeltaRequest {
                    base_snapshot_id: base,
                    target_snapshot_id: target,
                    starting_offset,
                    max_results,
                    ..csi::GetMetadataDeltaRequest::default()
                };
                client.get_metadata_delta(request).await.map(|r| Answer::Delta(r.into_inner()))
            }
        };
        Ok(Self { answer: answer.map_err(refused)?, shape: None, end: 0 })
    }

    /// The extents of the next message, ascending and not overlapping; `None` at the end.
    ///
    /// # Errors
    /// The stream broke, or is not what CSI promises. Nothing that came before is then complete.
    pub async fn next(&mut self) -> Result<Option<Vec<Extent>>> {
        let Some(message) = self.answer.message().await? else {
            if self.shape.is_none() {
                bail!("the driver answered without a message, so without the volume's capacity");
            }
            return Ok(None);
        };
        let shape = shape(&message)?;
        if *self.shape.get_or_insert(shape) != shape {
            bail!("the driver changed the block metadata type or the capacity in mid-stream");
        }
        let extents = message.block_metadata.iter();
        extents.map(|block| checked(block, shape, &mut self.end)).collect::<Result<_>>().map(Some)
    }

    /// Known once the first message has come.
    pub fn shape(&self) -> Option<Shape> {
        self.shape
    }
}

impl Answer {
    async fn message(&mut self) -> Result<Option<Message>> {
        Ok(match self {
            Self::Allocated(stream) => {
                stream.message().await.map_err(refused)?.map(|response| Message {
                    block_metadata_type: response.block_metadata_type(),
                    volume_capacity_bytes: response.volume_capacity_bytes,
                    block_metadata: response.block_metadata,
                })
            }
            Self::Delta(stream) => {
                stream.message().await.map_err(refused)?.map(|response| Message {
                    block_metadata_type: response.block_metadata_type(),
                    volume_capacity_bytes: response.volume_capacity_bytes,
                    block_metadata: response.block_metadata,
                })
            }
        })
    }
}

fn shape(message: &Message) -> Result<Shape> {
    let block_metadata_type = message.block_metadata_type;
    if block_metadata_type == csi::BlockMetadataType::Unknown {
        bail!("the driver does not say how its block metadata is cut (block_metadata_type)");
    }
    match u64::try_from(message.volume_capacity_bytes) {
        Ok(capacity_bytes) if capacity_bytes > 0 => {
            Ok(Shape { block_metadata_type, capacity_bytes })
        }
        _ => bail!("the driver reports a capacity of {} bytes", message.volume_capacity_bytes),
    }
}

/// The extent of a block, which starts at or after `end` and moves it.
fn checked(block: &csi::BlockMetadata, shape: Shape, end: &mut u64) -> Result<Extent> {
    let csi::BlockMetadata { byte_offset, size_bytes } = *block;
    let (Ok(offset), Ok(length)) = (u64::try_from(byte_offset), u64::try_from(size_bytes)) else {
        bail!("the driver reports a negative extent: {byte_offset}, {size_bytes} bytes");
    };
    let extent = Extent { offset, length };
    if length == 0 || offset < *end {
        bail!(
            "the driver reports an extent that is empty or out of order: {offset}, {length} bytes"
        );
    }
    // Two positive i64 never overflow an u64.
    if extent.end() > shape.capacity_bytes {
        bail!("the driver reports an extent past the end of the volume: {offset}, {length} bytes");
    }
    *end = extent.end();
    Ok(extent)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape {
        block_metadata_type: csi::BlockMetadataType::VariableLength,
        capacity_bytes: 1 << 20,
    };

    fn check(blocks: &[(i64, i64)]) -> Result<Vec<Extent>> {
        let mut end = 0;
        blocks
            .iter()
            .map(|&(byte_offset, size_bytes)| {
                checked(&csi::BlockMetadata { byte_offset, size_bytes }, SHAPE, &mut end)
            })
            .collect()
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
            &[(i64::MAX, i64::MAX)],
        ] {
            assert!(check(blocks).is_err(), "{blocks:?}");
        }
    }

    #[test]
    fn a_message_without_type_or_capacity_is_an_error() {
        let message = |block_metadata_type, volume_capacity_bytes| Message {
            block_metadata_type,
            volume_capacity_bytes,
            block_metadata: Vec::new(),
        };
        let variable = csi::BlockMetadataType::VariableLength;
        assert_eq!(shape(&message(variable, 1 << 20)).unwrap(), SHAPE);
        assert!(shape(&message(csi::BlockMetadataType::Unknown, 1 << 20)).is_err());
        assert!(shape(&message(variable, 0)).is_err());
        assert!(shape(&message(variable, -1)).is_err());
    }
}
