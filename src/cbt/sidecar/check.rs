//! `--check-streams`: checks every response of a driver against the contract of its stream (CSI,
//! SnapshotMetadata), on the encoded messages. It refuses what that text forbids: a type that is
//! none, a capacity that is not positive, either of them changing, extents without a size, in
//! another order, overlapping, before starting_offset or outside of the volume, and fixed lengths
//! that differ or do not divide the volume into blocks. The last block of a fixed length may exceed
//! the capacity. A backup from a response that breaks the contract may lack data, which would only
//! show at a restore.

use super::fields::{BLOCK_METADATA, Value, next_field};
use super::refusal::{Reason, Refusal};
use grpc::proto::csi::v1::BlockMetadataType as Type;

/// Fields of a response.
const BLOCK_METADATA_TYPE: u32 = 1;
const CAPACITY: u32 = 2;
/// Fields of an extent.
const OFFSET: u32 = 1;
const SIZE: u32 = 2;

/// The state of the check of one stream.
#[derive(Debug)]
pub struct StreamCheck {
    /// Bytes.
    starting_offset: u64,
    /// Block metadata type and capacity (bytes), which every message must repeat.
    shape: Option<[u64; 2]>,
    /// Start and end of the last extent.
    begin: u64,
    end: u64,
    /// Size of the first extent.
    size: Option<u64>,
    /// Whether the extents are not blocks of that size.
    is_uneven: bool,
}

impl StreamCheck {
    /// `starting_offset` is the request's, in bytes, and not negative.
    pub fn new(starting_offset: i64) -> Self {
        Self {
            starting_offset: starting_offset.unsigned_abs(),
            shape: None,
            begin: 0,
            end: 0,
            size: None,
            is_uneven: false,
        }
    }

    /// Checks the next message and returns its number of extents.
    pub fn check(&mut self, message: &[u8]) -> Result<u64, Refusal> {
        self.accept(message).map_err(broken)
    }

    fn accept(&mut self, mut message: &[u8]) -> Result<u64, &'static str> {
        let mut shape = [0; 2];
        let mut extents = 0;
        while let Some(field) = next(&mut message)? {
            match field {
                (BLOCK_METADATA_TYPE, Value::Number(number)) => shape[0] = number,
                (CAPACITY, Value::Number(number)) => shape[1] = number,
                (BLOCK_METADATA, Value::Bytes(bytes)) => {
                    self.extent(bytes)?;
                    extents += 1;
                }
                (BLOCK_METADATA_TYPE | CAPACITY | BLOCK_METADATA, _) => return Err(MALFORMED),
                _ => {}
            }
        }
        if *self.shape.get_or_insert(shape) != shape {
            return Err("block_metadata_type or capacity changed");
        }
        let [kind, capacity] = shape;
        if !(1..=i64::MAX as u64).contains(&capacity) {
            return Err("volume_capacity_bytes is missing or negative");
        }
        let is_inside = match i32::try_from(kind).map(Type::try_from) {
            Ok(Ok(Type::FixedLength)) if self.is_uneven => {
                return Err("FIXED_LENGTH extents are not blocks of one size");
            }
            Ok(Ok(Type::FixedLength)) => extents == 0 || self.begin < capacity,
            Ok(Ok(Type::VariableLength)) => self.end <= capacity,
            _ => return Err("block_metadata_type is neither FIXED_LENGTH nor VARIABLE_LENGTH"),
        };
        if !is_inside {
            return Err("an extent is past the capacity");
        }
        Ok(extents)
    }

    fn extent(&mut self, mut bytes: &[u8]) -> Result<(), &'static str> {
        let (mut offset, mut size) = (0, 0);
        while let Some(field) = next(&mut bytes)? {
            match field {
                (OFFSET, Value::Number(number)) => offset = number,
                (SIZE, Value::Number(number)) => size = number,
                (OFFSET | SIZE, _) => return Err(MALFORMED),
                _ => {}
            }
        }
        if size == 0 || [offset, size].iter().any(|number| *number > i64::MAX as u64) {
            return Err("an extent is empty or negative");
        }
        if offset < self.end {
            return Err("extents are not ascending, or overlap");
        }
        // The sum of two int64 fits a uint64.
        (self.begin, self.end) = (offset, offset + size);
        let first = *self.size.get_or_insert(size);
        self.is_uneven |= size != first || !offset.is_multiple_of(first);
        if self.end <= self.starting_offset {
            return Err("an extent ends before starting_offset");
        }
        Ok(())
    }
}

const MALFORMED: &str = "a message is malformed";

/// The next field of a message of this API.
fn next<'m>(rest: &mut &'m [u8]) -> Result<Option<(u32, Value<'m>)>, &'static str> {
    next_field(rest).map_err(|_| MALFORMED)
}

fn broken(how: &str) -> Refusal {
    let message = format!(
        "the CSI driver's response breaks the contract of the stream (--check-streams): {how}; discard the received \
         data, and report the error to the driver's maintainers"
    );
    Refusal::new(Reason::ContractBroken, message)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message;

    use super::*;
    use grpc::proto::csi::v1 as csi;

    fn message(kind: i32, capacity: i64, extents: &[(i64, i64)]) -> Vec<u8> {
        let block = |(byte_offset, size_bytes): &(i64, i64)| csi::BlockMetadata {
            byte_offset: *byte_offset,
            size_bytes: *size_bytes,
        };
        let message = csi::GetMetadataDeltaResponse {
            block_metadata_type: kind,
            volume_capacity_bytes: capacity,
            block_metadata: extents.iter().map(block).collect(),
        };
        message.encode_to_vec()
    }

    /// Result of the check of these messages, with a request from byte `starting_offset`.
    fn outcome(starting_offset: i64, messages: &[Vec<u8>]) -> Result<u64, &'static str> {
        let mut check = StreamCheck::new(starting_offset);
        messages.iter().map(|message| check.accept(message)).sum()
    }

    #[test]
    fn a_stream_that_keeps_the_contract_passes() {
        let whole = [
            message(2, 100, &[(0, 10), (10, 5)]),
            message(2, 100, &[]),
            message(2, 100, &[(99, 1)]),
        ];
        assert_eq!(outcome(0, &whole), Ok(3));
        // Rounded down: the extent holds the requested byte.
        assert_eq!(outcome(9, &whole), Ok(3));
        assert_eq!(outcome(0, &[]), Ok(0));
        // The last block exceeds the capacity.
        let fixed = [message(1, 100, &[(0, 8), (16, 8)]), message(1, 100, &[(96, 8)])];
        assert_eq!(outcome(0, &fixed), Ok(3));
    }

    #[test]
    fn each_breach_of_the_contract_is_named() {
        let good = || message(2, 100, &[(10, 10)]);
        for (starting_offset, messages, named) in [
            (0, vec![good(), message(1, 100, &[])], "block_metadata_type"),
            (0, vec![good(), message(2, 101, &[])], "capacity changed"),
            (0, vec![good(), message(2, 0, &[])], "capacity changed"),
            (0, vec![message(0, 100, &[(0, 8)])], "neither FIXED_LENGTH nor"),
            (0, vec![message(9, 100, &[])], "neither FIXED_LENGTH nor"),
            (0, vec![message(-1, 100, &[])], "neither FIXED_LENGTH nor"),
            (0, vec![message(1, 100, &[(0, 8), (8, 16)])], "blocks of one size"),
            (
                0,
                vec![message(1, 100, &[(0, 8)]), message(1, 100, &[(16, 4)])],
                "blocks of one size",
            ),
            (0, vec![message(1, 100, &[(4, 8)])], "blocks of one size"),
            (0, vec![message(1, 96, &[(96, 8)])], "past the capacity"),
            (0, vec![message(2, 0, &[])], "volume_capacity_bytes"),
            (0, vec![message(2, 100, &[(10, 10), (19, 1)])], "overlap"),
            (0, vec![good(), message(2, 100, &[(10, 10)])], "overlap"),
            (0, vec![good(), message(2, 100, &[(5, 1)])], "ascending"),
            (20, vec![good()], "starting_offset"),
            (0, vec![message(2, 100, &[(95, 6)])], "past the capacity"),
            (0, vec![message(2, -1, &[])], "volume_capacity_bytes"),
            (0, vec![message(2, 100, &[(10, 0)])], "empty"),
            (0, vec![message(2, 100, &[(-1, 1)])], "negative"),
            (0, vec![message(2, 100, &[(1, -1)])], "negative"),
            (0, vec![message(2, i64::MAX, &[(i64::MAX, i64::MAX)])], "past the capacity"),
            (0, vec![good()[..good().len() - 1].to_vec()], "malformed"),
            // A capacity with a text value; an extent with a numeric value.
            (0, vec![vec![0x12, 1, b'x']], "malformed"),
            (0, vec![vec![0x18, 1]], "malformed"),
        ] {
            let breach = outcome(starting_offset, &messages).expect_err(named);
            assert!(breach.contains(named), "{breach}: {named}");
        }
        let refusal = StreamCheck::new(0).check(&[0xff]).unwrap_err();
        assert_eq!(refusal.reason, Reason::ContractBroken);
        assert!(refusal.message().contains("discard"), "{refusal:?}");
    }

    /// Type, capacity, and extents: offset and size.
    type Sent = (i32, i64, Vec<(i64, i64)>);

    /// The expected result for the decoded messages.
    fn expected(starting_offset: i64, messages: &[Sent]) -> bool {
        let extents: Vec<_> = messages.iter().flat_map(|(_, _, extents)| extents).collect();
        let is_one =
            messages.windows(2).all(|pair| (pair[0].0, pair[0].1) == (pair[1].0, pair[1].1));
        let ascends = extents.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0);
        let (kind, capacity, _) = &messages[0];
        let is_fixed = *kind == 1;
        let fits = |(offset, size): &&(i64, i64)| {
            let end = offset + size;
            let is_inside = if is_fixed { *offset < *capacity } else { end <= *capacity };
            *offset >= 0 && *size > 0 && end > starting_offset && is_inside
        };
        let first = extents.first().map_or(1, |(_, size)| *size);
        let is_even = |(offset, size): &&(i64, i64)| *size == first && offset % first == 0;
        is_one && ascends && extents.iter().all(fits) && (!is_fixed || extents.iter().all(is_even))
    }

    proptest! {
        #[test]
        fn the_check_agrees_with_the_decoded_messages(
            starting_offset in 0_i64..20,
            messages in prop::collection::vec(
                (1..=2_i32, 28..=30_i64, prop::collection::vec((0_i64..30, 0_i64..4), 0..4)), 1..4,
            ),
            // Most of them sorted and consistent, so that some keep the contract.
            is_sorted in prop::bool::weighted(0.8),
        ) {
            let mut messages = messages;
            if is_sorted {
                let (kind, capacity, _) = messages[0];
                let mut end = 0;
                for (other, another, extents) in &mut messages {
                    (*other, *another) = (kind, capacity);
                    for (offset, size) in extents {
                        *offset = end + *offset % 4;
                        *size += 1;
                        end = *offset + *size;
                    }
                }
            }
            let encoded: Vec<_> =
                messages.iter().map(|(kind, capacity, extents)| message(*kind, *capacity, extents)).collect();
            let checked = outcome(starting_offset, &encoded);
            prop_assert_eq!(checked.is_ok(), expected(starting_offset, &messages), "{:?}", checked);
            let extents = messages.iter().map(|(_, _, extents)| extents.len() as u64).sum::<u64>();
            prop_assert!(checked.is_err() || checked == Ok(extents));
        }

        #[test]
        fn any_bytes_are_checked_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = StreamCheck::new(0).check(&bytes);
        }
    }
}
