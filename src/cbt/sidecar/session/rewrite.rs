//! Converts a message of CSI's SnapshotMetadata to the session API. They differ only in the first
//! field, block_metadata_type: FIXED_LENGTH is 1 in CSI and 0 (absent on the wire) in the session
//! API, VARIABLE_LENGTH is 2 in CSI and 1 there. Only this field is replaced; the extents stay
//! encoded.

use prost::bytes::{Bytes, BytesMut};
use prost::encoding::WireType;

use crate::sidecar::fields::{Value, next_field};
use crate::sidecar::refusal::{Reason, Refusal};
use grpc::RawMessage;
use grpc::proto::csi::v1::BlockMetadataType as Csi;

/// Number of the field block_metadata_type, in both responses.
const TYPE: u32 = 1;
/// The encoded field with the session API's VARIABLE_LENGTH.
const VARIABLE: [u8; 2] = [(TYPE as u8) << 3 | WireType::Varint as u8, 1];

/// Converts a message of CSI for a client of a session.
pub fn of_csi(message: RawMessage) -> Result<RawMessage, Refusal> {
    let found = find(&message.0).ok_or_else(no_style)?;
    let rest = found.without(&message.0);
    match found.style() {
        Some(Csi::FixedLength) => Ok(RawMessage(rest)),
        Some(Csi::VariableLength) => {
            let mut bytes = BytesMut::with_capacity(VARIABLE.len() + rest.len());
            bytes.extend_from_slice(&VARIABLE);
            bytes.extend_from_slice(&rest);
            Ok(RawMessage(bytes.freeze()))
        }
        // A wrong guess would be a wrong backup.
        Some(Csi::Unknown) | None => Err(no_style()),
    }
}

/// Occurrences of the type field in a message.
#[derive(Debug, Default)]
struct Found {
    /// Value of the last occurrence, which takes precedence.
    value: i32,
    /// Bytes of the occurrences at the start of the message.
    leading: usize,
    /// Start and end of the other occurrences. Usual encoders produce none.
    others: Vec<(usize, usize)>,
}

/// Finds the type field among the top-level fields. `None` if the message is malformed.
fn find(message: &[u8]) -> Option<Found> {
    let mut found = Found::default();
    let mut rest = message;
    loop {
        let start = message.len() - rest.len();
        let Some((field, value)) = next_field(&mut rest).ok()? else { return Some(found) };
        match value {
            _ if field != TYPE => continue,
            // An int32 takes the lowest 32 bits (protobuf, "Encoding").
            Value::Number(number) => found.value = number as i32,
            Value::Bytes(_) | Value::Other => return None,
        }
        let end = message.len() - rest.len();
        match start == found.leading {
            true => found.leading = end,
            false => found.others.push((start, end)),
        }
    }
}

impl Found {
    fn style(&self) -> Option<Csi> {
        Csi::try_from(self.value).ok()
    }

    /// The message without the field. Shares memory if only the start is removed.
    fn without(&self, message: &Bytes) -> Bytes {
        if self.others.is_empty() {
            return message.slice(self.leading..);
        }
        let mut rest = BytesMut::with_capacity(message.len());
        let mut from = self.leading;
        for (start, end) in &self.others {
            rest.extend_from_slice(&message[from..*start]);
            from = *end;
        }
        rest.extend_from_slice(&message[from..]);
        rest.freeze()
    }
}

fn no_style() -> Refusal {
    Refusal::new(
        Reason::NoStyle,
        "the CSI driver sent a message that is malformed or lacks block_metadata_type; report the error to the driver's maintainers",
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message;

    use super::*;
    use grpc::proto::csi::v1 as csi;
    use grpc::proto::snapshotsession as session;

    /// The result of decoding with CSI's type and encoding with the session's.
    fn translated(bytes: &[u8]) -> Option<Vec<u8>> {
        let csi::GetMetadataDeltaResponse {
            block_metadata_type,
            volume_capacity_bytes,
            block_metadata,
        } = csi::GetMetadataDeltaResponse::decode(bytes).ok()?;
        let style = match Csi::try_from(block_metadata_type).ok()? {
            Csi::FixedLength => session::BlockMetadataType::FixedLength,
            Csi::VariableLength => session::BlockMetadataType::VariableLength,
            Csi::Unknown => return None,
        };
        let block = |block: csi::BlockMetadata| session::BlockMetadata {
            byte_offset: block.byte_offset as u64,
            size_bytes: block.size_bytes as u64,
        };
        let message = session::GetDeltaResponse {
            block_metadata_type: style.into(),
            volume_size_bytes: volume_capacity_bytes as u64,
            block_metadata: block_metadata.into_iter().map(block).collect(),
        };
        Some(message.encode_to_vec())
    }

    fn rewritten(bytes: &[u8]) -> Option<Vec<u8>> {
        let message = RawMessage(Bytes::copy_from_slice(bytes));
        of_csi(message).ok().map(|message| message.0.to_vec())
    }

    fn message(style: i32, capacity: i64, blocks: &[(i64, i64)]) -> Vec<u8> {
        let block = |&(byte_offset, size_bytes): &(i64, i64)| csi::BlockMetadata {
            byte_offset,
            size_bytes,
        };
        let message = csi::GetMetadataDeltaResponse {
            block_metadata_type: style,
            volume_capacity_bytes: capacity,
            block_metadata: blocks.iter().map(block).collect(),
        };
        message.encode_to_vec()
    }

    proptest! {
        #[test]
        fn rewriting_equals_decoding_and_encoding(
            style in 1..=2,
            capacity in 0..=i64::MAX,
            blocks in prop::collection::vec((0..=i64::MAX, 0..=i64::MAX), 0..50),
        ) {
            let bytes = message(style, capacity, &blocks);
            let expected = translated(&bytes);
            prop_assert!(expected.is_some());
            prop_assert_eq!(rewritten(&bytes), expected);
        }

        /// Parts of a message in any order are decoded to the same meaning.
        #[test]
        fn the_last_type_field_wins_at_any_position(
            parts in prop::collection::vec((-1..=3, 0..=i64::MAX, prop::collection::vec((1..=9_i64, 1..=9_i64), 0..3)), 1..5),
        ) {
            let bytes: Vec<u8> = parts.iter().flat_map(|(style, capacity, blocks)| {
                let mut part = message(0, *capacity, blocks);
                if *style >= 0 {
                    // After the other fields, and also with the value 0.
                    part.extend([0x08, *style as u8]);
                }
                part
            }).collect();
            let decoded = |bytes: &[u8]| session::GetDeltaResponse::decode(bytes).unwrap();
            let expected = translated(&bytes).map(|bytes| decoded(&bytes));
            prop_assert_eq!(rewritten(&bytes).map(|bytes| decoded(&bytes)), expected);
        }

        #[test]
        fn malformed_bytes_never_get_a_style(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            if let Some(rewritten) = rewritten(&bytes) {
                // All top-level fields were valid.
                let style = find(&bytes).unwrap().style().unwrap();
                prop_assert!(style != Csi::Unknown);
                prop_assert!(rewritten.len() <= bytes.len() + VARIABLE.len());
            } else {
                prop_assert_eq!(translated(&bytes), None);
            }
        }
    }

    #[test]
    fn a_message_without_a_known_type_ends_the_stream() {
        for style in [0, 3, -1] {
            assert_eq!(rewritten(&message(style, 1 << 30, &[(0, 4096)])), None, "{style}");
        }
        let whole = message(2, 1 << 30, &[(0, 4096)]);
        assert_eq!(rewritten(&whole[..whole.len() - 1]), None, "truncated");
        assert_eq!(rewritten(&[0x0a, 0x01, 0x01]), None, "a type that is not a number");
        assert_eq!(rewritten(&[]), None);
    }

    #[test]
    fn unknown_fields_are_relayed() {
        let mut bytes = message(1, 1 << 30, &[(0, 4096)]);
        let unknown = [0x22, 0x02, 0x08, 0x01, 0x28, 0x07];
        bytes.extend(unknown);
        let rewritten = rewritten(&bytes).unwrap();
        assert_eq!(rewritten, bytes[2..]);
        assert!(rewritten.ends_with(&unknown));
    }
}
