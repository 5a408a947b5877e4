//! Encodes extents directly as response messages. GetMetadataAllocatedResponse and
//! GetMetadataDeltaResponse are equal on the wire (CSI: block_metadata_type 1,
//! volume_capacity_bytes 2, block_metadata 3). The session API's responses differ only in the
//! values of the type, so one encoder serves all four. It handles millions of extents per second
//! and therefore builds no intermediate message.

use prost::encoding::{WireType, encode_key, encode_varint};

use grpc::RawMessage;
use storage::Extent;

/// Maximum bytes of an extent: two keys, two lengths, two numbers below 2^63.
const LARGEST: usize = 2 + 2 * (1 + 9);

/// Typical bytes of an extent of a large volume.
const USUAL: usize = 14;

const EXTENT_KEY: u8 = key(3, WireType::LengthDelimited);
const OFFSET_KEY: u8 = key(1, WireType::Varint);
const SIZE_KEY: u8 = key(2, WireType::Varint);

const fn key(field: u8, wire_type: WireType) -> u8 {
    field << 3 | wire_type as u8
}

/// The fields at the start of each message: type and capacity.
#[derive(Clone)]
pub struct Preamble(Vec<u8>);

impl Preamble {
    /// `kind` is the API's number of the block metadata type.
    pub fn new(kind: i32, capacity_bytes: u64) -> Self {
        let mut preamble = Vec::new();
        for (field, value) in [(1, u64::from(kind.unsigned_abs())), (2, capacity_bytes)] {
            // Protobuf omits zeros.
            if value > 0 {
                encode_key(field, WireType::Varint, &mut preamble);
                encode_varint(value, &mut preamble);
            }
        }
        Self(preamble)
    }

    /// An empty message with capacity for `extents`, or for some thousands: it grows.
    pub fn begin(&self, extents: usize) -> Frame {
        let mut bytes = Vec::with_capacity(self.0.len() + extents.min(4096) * USUAL);
        bytes.extend_from_slice(&self.0);
        Frame { bytes, extents: 0 }
    }
}

/// A message under construction.
pub struct Frame {
    bytes: Vec<u8>,
    extents: usize,
}

impl Frame {
    pub fn extents(&self) -> usize {
        self.extents
    }

    pub fn push(&mut self, extent: Extent) {
        let mut entry = [0; LARGEST];
        let mut end = 2;
        if extent.offset > 0 {
            end = put(&mut entry, end, OFFSET_KEY, extent.offset);
        }
        if extent.length > 0 {
            end = put(&mut entry, end, SIZE_KEY, extent.length);
        }
        entry[0] = EXTENT_KEY;
        // At most 20, so one byte.
        entry[1] = (end - 2) as u8;
        self.bytes.extend_from_slice(&entry[..end]);
        self.extents += 1;
    }

    pub fn finish(self) -> RawMessage {
        RawMessage(self.bytes.into())
    }
}

/// Writes a key and a number below 2^63 at `at`, and returns the end.
fn put(entry: &mut [u8; LARGEST], at: usize, key: u8, mut value: u64) -> usize {
    entry[at] = key;
    let mut at = at + 1;
    while value >= 0x80 {
        entry[at] = value as u8 | 0x80;
        at += 1;
        value >>= 7;
    }
    entry[at] = value as u8;
    at + 1
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message;

    use super::*;
    use grpc::proto::csi::v1 as csi;
    use grpc::proto::snapshotsession as session;

    proptest! {
        #[test]
        fn a_frame_equals_the_encoded_response(
            capacity in 0..=i64::MAX as u64,
            extents in prop::collection::vec((0..=i64::MAX as u64, 0..=i64::MAX as u64), 0..50),
        ) {
            let frame = |kind| {
                let mut frame = Preamble::new(kind, capacity).begin(extents.len());
                for &(offset, length) in &extents {
                    frame.push(Extent { offset, length });
                }
                frame
            };
            let kind = csi::BlockMetadataType::FixedLength;
            let csi_frame = frame(kind.into());
            prop_assert_eq!(csi_frame.extents(), extents.len());
            let block = |&(offset, length): &(u64, u64)| csi::BlockMetadata {
                byte_offset: offset as i64,
                size_bytes: length as i64,
            };
            let blocks: Vec<_> = extents.iter().map(block).collect();
            let bytes = csi_frame.finish();
            prop_assert_eq!(&bytes, &RawMessage::of(&csi::GetMetadataDeltaResponse {
                block_metadata_type: kind.into(),
                volume_capacity_bytes: capacity as i64,
                block_metadata: blocks.clone(),
            }));
            prop_assert_eq!(&bytes, &RawMessage::of(&csi::GetMetadataAllocatedResponse {
                block_metadata_type: kind.into(),
                volume_capacity_bytes: capacity as i64,
                block_metadata: blocks,
            }));
            prop_assert_eq!(bytes.encode_to_vec(), bytes.0.to_vec());
            for kind in [session::BlockMetadataType::FixedLength, session::BlockMetadataType::VariableLength] {
                let block = |&(offset, length): &(u64, u64)| {
                    session::BlockMetadata { byte_offset: offset, size_bytes: length }
                };
                let blocks: Vec<_> = extents.iter().map(block).collect();
                let bytes = frame(kind.into()).finish();
                prop_assert_eq!(&bytes, &RawMessage::of(&session::GetAllocatedResponse {
                    block_metadata_type: kind.into(),
                    volume_size_bytes: capacity,
                    block_metadata: blocks.clone(),
                }));
                prop_assert_eq!(&bytes, &RawMessage::of(&session::GetDeltaResponse {
                    block_metadata_type: kind.into(),
                    volume_size_bytes: capacity,
                    block_metadata: blocks,
                }));
            }
        }
    }
}
