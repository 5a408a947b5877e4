//! A message of CSI's SnapshotMetadata as one of the session API. They differ in one field, the first, which says how the
//! extents are cut: FIXED_LENGTH is 1 there and 0 here, which on the wire is to be absent, VARIABLE_LENGTH 2 there and 1
//! here. So that field alone is replaced, and the extents stay the bytes that they are.

use prost::bytes::{Bytes, BytesMut};
use prost::encoding::WireType;

use crate::grpc::RawMessage;
use crate::proto::csi::v1::BlockMetadataType as Csi;
use crate::sidecar::fields::{Value, next_field};
use crate::sidecar::refusal::{Reason, Refusal};

/// Field of both responses that holds the type.
const TYPE: u32 = 1;
/// The field on the wire, with VARIABLE_LENGTH as the session API has it.
const VARIABLE: [u8; 2] = [(TYPE as u8) << 3 | WireType::Varint as u8, 1];

/// The same message for a client of a session.
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

/// Where a message has its type.
#[derive(Debug, Default)]
struct Found {
    /// What the last one says, which is the one that counts.
    value: i32,
    /// Bytes that it takes at the start of the message.
    leading: usize,
    /// Bytes of the others: start and end of each. Messages as they are usually encoded have none.
    others: Vec<(usize, usize)>,
}

/// Looks at all fields of the message, not into them. Nothing if it is no message.
fn find(message: &[u8]) -> Option<Found> {
    let mut found = Found::default();
    let mut rest = message;
    loop {
        let start = message.len() - rest.len();
        let Some((field, value)) = next_field(&mut rest).ok()? else { return Some(found) };
        match value {
            _ if field != TYPE => continue,
            // As an int32 is read (protobuf, "Encoding"): of more bits the lowest.
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

    /// The message without the field: shared, where only its start is missing.
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
        "the CSI driver sent a message that does not tell block_metadata_type, or is none; see to the driver",
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message;

    use super::*;
    use crate::proto::csi::v1 as csi;
    use crate::proto::snapshotsession as session;

    /// What decoding as CSI's and encoding as the session's makes of it.
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
        fn rewriting_is_decoding_as_csi_and_encoding_as_the_session_api(
            style in 1..=2,
            capacity in 0..=i64::MAX,
            blocks in prop::collection::vec((0..=i64::MAX, 0..=i64::MAX), 0..50),
        ) {
            let bytes = message(style, capacity, &blocks);
            let expected = translated(&bytes);
            prop_assert!(expected.is_some());
            prop_assert_eq!(rewritten(&bytes), expected);
        }

        /// However the parts of a message are put together: the one that is read has the same meaning.
        #[test]
        fn the_type_is_found_wherever_it_stands_and_the_last_one_counts(
            parts in prop::collection::vec((-1..=3, 0..=i64::MAX, prop::collection::vec((1..=9_i64, 1..=9_i64), 0..3)), 1..5),
        ) {
            let bytes: Vec<u8> = parts.iter().flat_map(|(style, capacity, blocks)| {
                let mut part = message(0, *capacity, blocks);
                if *style >= 0 {
                    // Behind the rest, and also where it is 0.
                    part.extend([0x08, *style as u8]);
                }
                part
            }).collect();
            let decoded = |bytes: &[u8]| session::GetDeltaResponse::decode(bytes).unwrap();
            let expected = translated(&bytes).map(|bytes| decoded(&bytes));
            prop_assert_eq!(rewritten(&bytes).map(|bytes| decoded(&bytes)), expected);
        }

        #[test]
        fn what_is_no_message_is_never_given_a_style(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            if let Some(rewritten) = rewritten(&bytes) {
                // It was a message as far as its fields go.
                let style = find(&bytes).unwrap().style().unwrap();
                prop_assert!(style != Csi::Unknown);
                prop_assert!(rewritten.len() <= bytes.len() + VARIABLE.len());
            } else {
                prop_assert_eq!(translated(&bytes), None);
            }
        }
    }

    #[test]
    fn a_message_without_a_known_type_ends_the_answer() {
        for style in [0, 3, -1] {
            assert_eq!(rewritten(&message(style, 1 << 30, &[(0, 4096)])), None, "{style}");
        }
        let whole = message(2, 1 << 30, &[(0, 4096)]);
        assert_eq!(rewritten(&whole[..whole.len() - 1]), None, "cut off");
        assert_eq!(rewritten(&[0x0a, 0x01, 0x01]), None, "a type that is no number");
        assert_eq!(rewritten(&[]), None);
    }

    #[test]
    fn what_this_version_does_not_know_is_passed_on() {
        let mut bytes = message(1, 1 << 30, &[(0, 4096)]);
        let unknown = [0x22, 0x02, 0x08, 0x01, 0x28, 0x07];
        bytes.extend(unknown);
        let rewritten = rewritten(&bytes).unwrap();
        assert_eq!(rewritten, bytes[2..]);
        assert!(rewritten.ends_with(&unknown));
    }
}
