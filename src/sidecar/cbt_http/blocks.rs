//! From the extents of a stream to blocks of one size. Extents of one length (FIXED_LENGTH) are blocks, if that is not below
//! [`UNIT`]; all others are widened outwards to blocks of [`UNIT`]: each byte that the driver reports is in a block of the
//! page, and no block is there twice.

use super::problem::{misbehaves, stale};
use crate::kubernetes::cbt_http::{Page, Problem};
use crate::kubernetes::snapshot_delta::ChangedBlock;
use crate::proto::csi::v1 as csi;
use csi::BlockMetadataType as Type;

/// Bytes of a block where extents differ in length, and of the smallest block.
pub const UNIT: u64 = 4096;
/// Messages without an extent that may follow each other.
const MAX_EMPTY: usize = 1024;

/// The blocks of a page, as they come.
pub struct Blocks {
    /// Number of the first block that is wanted.
    offset: u64,
    limit: usize,
    /// Bytes of a block, once it is known.
    unit: Option<u64>,
    /// Whether the page begins at another place than the one that was read, since blocks are not of [`UNIT`].
    elsewhere: bool,
    style: Option<Type>,
    /// Bytes.
    capacity: u64,
    /// Where the extent before ended.
    end: u64,
    numbers: Vec<u64>,
    /// The first one that is too many.
    next: Option<u64>,
    /// Messages without an extent, one after the other.
    empty: usize,
}

impl Blocks {
    /// Without a `unit`, the caller has read from the place where the page begins if blocks are of [`UNIT`].
    pub fn new(offset: u64, limit: usize, unit: Option<u64>) -> Self {
        Self {
            offset,
            limit,
            unit,
            elsewhere: false,
            style: None,
            capacity: 0,
            end: 0,
            numbers: Vec::new(),
            next: None,
            empty: 0,
        }
    }

    /// How many extents of a message suffice: each has a block, and one more says whether more follows.
    pub fn extents(&self) -> i32 {
        i32::try_from(self.limit).unwrap_or(i32::MAX).saturating_add(1)
    }

    /// Whether nothing of what follows is on this page.
    pub fn are_enough(&self) -> bool {
        self.next.is_some() || self.elsewhere
    }

    /// Whether the page begins at another place than the one that was read.
    pub fn is_elsewhere(&self) -> bool {
        self.elsewhere
    }

    /// Bytes of a block, if they are known.
    pub fn unit(&self) -> Option<u64> {
        self.unit
    }

    pub fn page(self) -> Page {
        let block_size_bytes = self.unit.unwrap_or_default();
        let block = |offset| ChangedBlock { offset, block_size_bytes, data_token: None };
        Page {
            volume_size_bytes: Some(self.capacity).filter(|bytes| *bytes != 0),
            changed_blocks: self.numbers.into_iter().map(block).collect(),
            next: self.next,
        }
    }

    /// Takes a message in.
    ///
    /// # Errors
    /// No driver may send it, or blocks have another size than `unit`.
    pub fn add(&mut self, message: &csi::GetMetadataDeltaResponse) -> Result<(), Problem> {
        let style = message.block_metadata_type();
        if style == Type::Unknown || self.style.is_some_and(|before| before != style) {
            return Err(misbehaves("block_metadata_type is not told or changes in mid-stream"));
        }
        self.style = Some(style);
        self.capacity = u64::try_from(message.volume_capacity_bytes).unwrap_or_default();
        self.empty = if message.block_metadata.is_empty() { self.empty + 1 } else { 0 };
        if self.empty > MAX_EMPTY {
            return Err(misbehaves(format!("{MAX_EMPTY} messages in a row have no extent")));
        }
        let mut first = self.numbers.is_empty();
        for extent in &message.block_metadata {
            let (begin, end) = self.bounds(extent)?;
            if std::mem::take(&mut first) {
                self.learn(style, begin, end)?;
                if self.elsewhere {
                    break;
                }
            }
            self.take(style, begin, end)?;
            self.end = end;
            if self.are_enough() {
                break;
            }
        }
        Ok(())
    }

    /// Where an extent begins and ends, in bytes.
    fn bounds(&self, extent: &csi::BlockMetadata) -> Result<(u64, u64), Problem> {
        let csi::BlockMetadata { byte_offset, size_bytes } = *extent;
        let wrong = |what| misbehaves(format!("the extent at {byte_offset} {what}"));
        let begin = u64::try_from(byte_offset).map_err(|_| wrong("begins before the volume"))?;
        if size_bytes <= 0 {
            return Err(wrong("has no size"));
        }
        if begin < self.end {
            return Err(wrong("begins before the end of the one before it"));
        }
        let end = byte_offset.checked_add(size_bytes);
        let end = end.ok_or_else(|| wrong("ends past the end of any volume"))?;
        Ok((begin, end.unsigned_abs()))
    }

    /// Finds the block size by the first extent, or checks that it is the one that was found before.
    fn learn(&mut self, style: Type, begin: u64, end: u64) -> Result<(), Problem> {
        let is_fixed = style == Type::FixedLength;
        let unit = if is_fixed { (end - begin).max(UNIT) } else { UNIT };
        let Some(before) = self.unit else {
            // Part of a block does not show how large a block is.
            let is_whole = begin.is_multiple_of(unit) && end != self.capacity;
            self.unit = Some(unit).filter(|_| !is_fixed || is_whole || self.offset == 0);
            self.elsewhere = self.offset != 0 && self.unit != Some(UNIT);
            return Ok(());
        };
        if before == unit || (is_fixed && self.is_cut(begin, end, before)) {
            return Ok(());
        }
        Err(stale(format!(
            "offset: the CSI driver's blocks have changed from {before} to {unit} bytes; start from offset 0"
        )))
    }

    /// Whether an extent is what the end of the volume has left of its last block.
    fn is_cut(&self, begin: u64, end: u64, unit: u64) -> bool {
        end - begin < unit && end == self.capacity
    }

    fn take(&mut self, style: Type, begin: u64, end: u64) -> Result<(), Problem> {
        let unit = self.unit.unwrap_or(UNIT);
        if style == Type::FixedLength && unit > UNIT {
            let is_whole = end - begin == unit || self.is_cut(begin, end, unit);
            if !begin.is_multiple_of(unit) || !is_whole {
                return Err(misbehaves(format!(
                    "the extent at {begin} is not one of the blocks of {unit} bytes that it began with"
                )));
            }
        }
        let told = self.numbers.last().map_or(0, |last| last + 1);
        for number in (begin / unit).max(self.offset).max(told)..end.div_ceil(unit) {
            if self.numbers.len() == self.limit {
                self.next = Some(number);
                return Ok(());
            }
            self.numbers.push(number);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::kubernetes::cbt_http::ProblemKind;

    fn message(style: Type, extents: &[(i64, i64)]) -> csi::GetMetadataDeltaResponse {
        let extent = |(byte_offset, size_bytes): &(i64, i64)| csi::BlockMetadata {
            byte_offset: *byte_offset,
            size_bytes: *size_bytes,
        };
        csi::GetMetadataDeltaResponse {
            block_metadata_type: style.into(),
            volume_capacity_bytes: 1 << 20,
            block_metadata: extents.iter().map(extent).collect(),
        }
    }

    /// Extents in ascending order, none overlapping, from gaps and lengths.
    fn variable() -> impl Strategy<Value = Vec<(i64, i64)>> {
        prop::collection::vec((0..20_000i64, 1..20_000i64), 0..30).prop_map(|pieces| {
            let mut at = 0;
            let extent = |(gap, length): (i64, i64)| {
                let begin = at + gap;
                at = begin + length;
                (begin, length)
            };
            pieces.into_iter().map(extent).collect()
        })
    }

    /// All pages of a stream, as they are read of a driver: from the extent on that holds the offset.
    fn paged(style: Type, extents: &[(i64, i64)], limit: usize, portion: usize) -> Vec<u64> {
        let read = |offset: u64, unit: Option<u64>| {
            let begin = (offset * unit.unwrap_or(UNIT)) as i64;
            let from: Vec<_> =
                extents.iter().copied().filter(|(at, length)| at + length > begin).collect();
            let mut blocks = Blocks::new(offset, limit, unit);
            for part in from.chunks(portion) {
                if !blocks.are_enough() {
                    blocks.add(&message(style, part)).unwrap();
                }
            }
            blocks
        };
        let (mut all, mut offset) = (Vec::new(), 0);
        loop {
            let mut blocks = read(offset, None);
            if blocks.is_elsewhere() {
                let unit = blocks.unit().or_else(|| read(0, None).unit());
                blocks = read(offset, unit);
                assert!(!blocks.is_elsewhere());
            }
            let page = blocks.page();
            assert!(page.changed_blocks.len() <= limit);
            assert!(page.next.is_none_or(|_| page.changed_blocks.len() == limit));
            all.extend(page.changed_blocks.iter().map(|block| block.offset));
            match page.next {
                Some(next) => offset = next,
                None => return all,
            }
        }
    }

    proptest! {
        #[test]
        fn pages_of_widened_blocks_hold_every_byte_and_no_block_twice(
            extents in variable(), limit in 1..40usize, portion in 1..8usize,
        ) {
            let of = |(begin, length): &(i64, i64)| begin / 4096..(begin + length - 1) / 4096 + 1;
            let naive: BTreeSet<u64> = extents.iter().flat_map(of).map(|number| number as u64).collect();
            let naive: Vec<u64> = naive.into_iter().collect();
            prop_assert_eq!(paged(Type::VariableLength, &extents, limit, portion), naive);
        }

        #[test]
        fn fixed_extents_below_the_smallest_block_are_widened(
            numbers in prop::collection::btree_set(0..9000i64, 0..60), limit in 1..40usize,
        ) {
            let extents: Vec<_> = numbers.iter().map(|number| (number * 512, 512)).collect();
            let widened: BTreeSet<u64> = numbers.iter().map(|number| *number as u64 / 8).collect();
            let widened: Vec<u64> = widened.into_iter().collect();
            prop_assert_eq!(paged(Type::FixedLength, &extents, limit, 3), widened);
        }

        #[test]
        fn pages_of_fixed_extents_are_those_extents(
            numbers in prop::collection::btree_set(0..500i64, 0..60), size in 4096..20_000i64,
            limit in 1..40usize, portion in 1..8usize,
        ) {
            let extents: Vec<_> = numbers.iter().map(|number| (number * size, size)).collect();
            let expected: Vec<u64> = numbers.iter().map(|number| *number as u64).collect();
            prop_assert_eq!(paged(Type::FixedLength, &extents, limit, portion), expected);
        }

        #[test]
        fn whatever_a_driver_sends_is_taken_or_refused_in_bounded_time(
            style in 0..4i32, extents in prop::collection::vec((any::<i64>(), any::<i64>()), 0..5),
            offset in any::<u64>(), unit in prop::option::of(1..=u64::MAX),
        ) {
            let mut sent = message(Type::Unknown, &extents);
            sent.block_metadata_type = style;
            let mut blocks = Blocks::new(offset, 10, unit);
            if blocks.add(&sent).is_ok() {
                prop_assert!(blocks.page().changed_blocks.len() <= 10);
            }
        }
    }

    #[test]
    fn extents_that_no_driver_may_send_are_refused() {
        use Type::{FixedLength, Unknown, VariableLength};
        for (style, extents, words) in [
            (Unknown, &[(0, 4096)][..], "block_metadata_type"),
            (VariableLength, &[(-1, 4096)], "before the volume"),
            (VariableLength, &[(0, 0)], "no size"),
            (VariableLength, &[(0, -1)], "no size"),
            (VariableLength, &[(0, 4097), (4096, 1)], "the one before"),
            (VariableLength, &[(4096, 1), (0, 1)], "the one before"),
            (VariableLength, &[(i64::MAX, 1)], "any volume"),
            (FixedLength, &[(0, 8192), (8192, 16384)], "8192 bytes"),
            (FixedLength, &[(0, 8192), (16384, 512)], "8192 bytes"),
            (FixedLength, &[(512, 8192)], "8192 bytes"),
        ] {
            let refused = Blocks::new(0, 9, None).add(&message(style, extents)).unwrap_err();
            assert!(refused.message.contains(words), "{}", refused.message);
        }
        let mut blocks = Blocks::new(0, 9, None);
        blocks.add(&message(VariableLength, &[(0, 1)])).unwrap();
        assert!(blocks.add(&message(FixedLength, &[(4096, 4096)])).is_err());
        let mut blocks = Blocks::new(0, 9, None);
        for _ in 0..MAX_EMPTY {
            blocks.add(&message(VariableLength, &[])).unwrap();
        }
        assert!(blocks.add(&message(VariableLength, &[])).is_err());
    }

    #[test]
    fn blocks_of_another_size_than_a_moment_before_are_refused() {
        let mut blocks = Blocks::new(3, 9, Some(4096));
        let refused = blocks.add(&message(Type::FixedLength, &[(65536, 65536)])).unwrap_err();
        assert_eq!((refused.kind, refused.code.as_deref()), (ProblemKind::Driver, Some("ABORTED")));
        assert!(
            Blocks::new(3, 9, Some(65536)).add(&message(Type::VariableLength, &[(0, 1)])).is_err()
        );
    }

    #[test]
    fn the_last_block_of_a_volume_may_be_shorter() {
        let last = (1 << 20) - 512;
        let extents = [(0, 3 << 18), (3 << 18, last - (3 << 18))];
        let mut sent = message(Type::FixedLength, &extents);
        sent.volume_capacity_bytes = last;
        let mut blocks = Blocks::new(0, 9, None);
        blocks.add(&sent).unwrap();
        assert_eq!(blocks.numbers, [0, 1]);
        sent.block_metadata.remove(0);
        let mut blocks = Blocks::new(1, 9, blocks.unit());
        blocks.add(&sent).unwrap();
        assert_eq!(blocks.numbers, [1]);
        // It does not show how large the others are.
        let mut blocks = Blocks::new(1, 9, None);
        blocks.add(&sent).unwrap();
        assert!(blocks.is_elsewhere() && blocks.unit().is_none());
    }
}
