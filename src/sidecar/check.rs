//! `--check-streams`: what every answer of a driver has to keep to (CSI, SnapshotMetadata; KEP-3314, "Metadata Format"), checked
//! on the messages as they lie there, of CSI's API and of that of sessions: their fields have the same numbers. A backup made
//! of an answer that breaks the contract may lack data, and nobody would notice before it is restored.

use super::fields::{BLOCK_METADATA, Value, next_field};
use super::refusal::{Reason, Refusal};

/// Fields of a response.
const BLOCK_METADATA_TYPE: u32 = 1;
const CAPACITY: u32 = 2;
/// Fields of an extent.
const OFFSET: u32 = 1;
const SIZE: u32 = 2;

/// One answer, as far as it has come.
#[derive(Debug)]
pub struct StreamCheck {
    /// Bytes.
    starting_offset: u64,
    /// Block metadata type and capacity in bytes, which are those of the first message.
    shape: Option<[u64; 2]>,
    /// The first byte after the last extent.
    end: u64,
}

impl StreamCheck {
    /// Of an answer that was asked for from this byte on, which is not negative.
    pub fn new(starting_offset: i64) -> Self {
        Self { starting_offset: starting_offset.unsigned_abs(), shape: None, end: 0 }
    }

    /// Checks the next message; returns how many extents it has.
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
        let [_, capacity] = shape;
        if capacity > i64::MAX as u64 || self.end > capacity {
            return Err("an extent ends past the capacity, or that is negative");
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
        // No sum of two int64 overflows an uint64.
        self.end = offset + size;
        if self.end <= self.starting_offset {
            return Err("an extent ends before starting_offset");
        }
        Ok(())
    }
}

const MALFORMED: &str = "a message is none of this API";

/// The next field of a message of this API.
fn next<'m>(rest: &mut &'m [u8]) -> Result<Option<(u32, Value<'m>)>, &'static str> {
    next_field(rest).map_err(|_| MALFORMED)
}

fn broken(how: &str) -> Refusal {
    let message = format!(
        "the CSI driver broke the contract of its answer (--check-streams): {how}; discard what was sent, and report it to \
         the driver's maintainers"
    );
    Refusal::new(Reason::ContractBroken, message)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message;

    use super::*;
    use crate::proto::csi::v1 as csi;

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

    /// How an answer from byte `starting_offset` on ends whose messages are these.
    fn outcome(starting_offset: i64, messages: &[Vec<u8>]) -> Result<u64, &'static str> {
        let mut check = StreamCheck::new(starting_offset);
        messages.iter().map(|message| check.accept(message)).sum()
    }

    #[test]
    fn an_answer_that_keeps_the_contract_passes() {
        let whole = [
            message(2, 100, &[(0, 10), (10, 5)]),
            message(2, 100, &[]),
            message(2, 100, &[(99, 1)]),
        ];
        assert_eq!(outcome(0, &whole), Ok(3));
        // Rounded down: the extent holds the byte that was asked for.
        assert_eq!(outcome(9, &whole), Ok(3));
        assert_eq!(outcome(0, &[]), Ok(0));
    }

    #[test]
    fn each_breach_of_the_contract_is_named() {
        let good = || message(2, 100, &[(10, 10)]);
        for (starting_offset, messages, named) in [
            (0, vec![good(), message(1, 100, &[])], "block_metadata_type"),
            (0, vec![good(), message(2, 101, &[])], "capacity changed"),
            (0, vec![good(), message(2, 0, &[])], "capacity changed"),
            (0, vec![message(2, 100, &[(10, 10), (19, 1)])], "overlap"),
            (0, vec![good(), message(2, 100, &[(10, 10)])], "overlap"),
            (0, vec![good(), message(2, 100, &[(5, 1)])], "ascending"),
            (20, vec![good()], "starting_offset"),
            (0, vec![message(2, 100, &[(95, 6)])], "past the capacity"),
            (0, vec![message(2, -1, &[])], "negative"),
            (0, vec![message(2, 100, &[(10, 0)])], "empty"),
            (0, vec![message(2, 100, &[(-1, 1)])], "negative"),
            (0, vec![message(2, 100, &[(1, -1)])], "negative"),
            (0, vec![message(2, i64::MAX, &[(i64::MAX, i64::MAX)])], "past the capacity"),
            (0, vec![good()[..good().len() - 1].to_vec()], "none of this API"),
            // A capacity that is text; an extent that is a number.
            (0, vec![vec![0x12, 1, b'x']], "none of this API"),
            (0, vec![vec![0x18, 1]], "none of this API"),
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

    /// The same of messages that are decoded.
    fn expected(starting_offset: i64, messages: &[Sent]) -> bool {
        let extents: Vec<_> = messages.iter().flat_map(|(_, _, extents)| extents).collect();
        let is_one =
            messages.windows(2).all(|pair| (pair[0].0, pair[0].1) == (pair[1].0, pair[1].1));
        let ascends = extents.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0);
        let fits = |(offset, size): &&(i64, i64)| {
            let end = offset + size;
            *offset >= 0 && *size > 0 && end > starting_offset && end <= messages[0].1
        };
        is_one && ascends && extents.iter().all(fits)
    }

    proptest! {
        #[test]
        fn the_bytes_are_judged_as_the_decoded_messages_would_be(
            starting_offset in 0_i64..20,
            messages in prop::collection::vec(
                (1..=2_i32, 28..=30_i64, prop::collection::vec((0_i64..30, 0_i64..4), 0..4)), 1..4,
            ),
            // Most of them sorted and of one shape, so that some keep the contract.
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
            let judged = outcome(starting_offset, &encoded);
            prop_assert_eq!(judged.is_ok(), expected(starting_offset, &messages), "{:?}", judged);
            let extents = messages.iter().map(|(_, _, extents)| extents.len() as u64).sum::<u64>();
            prop_assert!(judged.is_err() || judged == Ok(extents));
        }

        #[test]
        fn whatever_a_driver_sends_is_judged(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = StreamCheck::new(0).check(&bytes);
        }
    }
}
