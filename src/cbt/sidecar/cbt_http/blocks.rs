//! Converts the extents of a stream to blocks of one size. Extents of equal length (FIXED_LENGTH)
//! of at least [`UNIT`] are blocks. All others are widened outwards to blocks of [`UNIT`]. Every
//! byte that the driver reports is in a block of a page, and no block occurs twice.

use super::problem::{misbehaves, stale};
use csi::BlockMetadataType as Type;
use grpc::proto::csi::v1 as csi;
use kubernetes::cbt_http::{Page, Problem};
use kubernetes::snapshot_delta::ChangedBlock;

/// Bytes of a block if extents differ in length, and of the smallest block.
pub const UNIT: u64 = 4096;
/// Maximum number of consecutive messages without an extent.
const MAX_EMPTY: usize = 1024;

/// The blocks of a page, collected from messages.
pub struct Blocks {
    /// Number of the first requested block.
    offset: u64,
    limit: usize,
    /// Bytes of a block, once known.
    unit: Option<u64>,
    /// Whether the stream was read from the wrong position, because blocks are not of [`UNIT`].
    needs_reread: bool,
    style: Option<Type>,
    /// Bytes.
    capacity: u64,
    /// End of the previous extent.
    end: u64,
    numbers: Vec<u64>,
    /// First block that does not fit on the page.
    next: Option<u64>,
    /// Consecutive messages without an extent.
    empty: usize,
}

impl Blocks {
    /// Without a `unit`, the caller has read from the start of the page for blocks of [`UNIT`].
    pub fn new(offset: u64, limit: usize, unit: Option<u64>) -> Self {
        Self {
            offset,
            limit,
            unit,
            needs_reread: false,
            style: None,
            capacity: 0,
            end: 0,
            numbers: Vec::new(),
            next: None,
            empty: 0,
        }
    }

    /// Maximum number of extents to request per message: one per block, and one that shows whether
    /// more follow.
    pub fn extents(&self) -> i32 {
        i32::try_from(self.limit).unwrap_or(i32::MAX).saturating_add(1)
    }

    /// Whether no further message is needed.
    pub fn is_complete(&self) -> bool {
        self.next.is_some() || self.needs_reread
    }

    /// Whether the stream was read from the wrong position for this page.
    pub fn needs_reread(&self) -> bool {
        self.needs_reread
    }

    /// Bytes of a block, if known.
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

    /// Adds a message's extents.
    ///
    /// # Errors
    /// The message breaks CSI's rules, or blocks have another size than `unit`.
    pub fn add(&mut self, message: &csi::GetMetadataDeltaResponse) -> Result<(), Problem> {
        let style = message.block_metadata_type();
        if style == Type::Unknown || self.style.is_some_and(|before| before != style) {
            return Err(misbehaves("block_metadata_type is missing or changes during the stream"));
        }
        self.style = Some(style);
        self.capacity = u64::try_from(message.volume_capacity_bytes).unwrap_or_default();
        self.empty = if message.block_metadata.is_empty() { self.empty + 1 } else { 0 };
        if self.empty > MAX_EMPTY {
            return Err(misbehaves(format!("{MAX_EMPTY} consecutive messages have no extent")));
        }
        let mut first = self.numbers.is_empty();
        for extent in &message.block_metadata {
            let (begin, end) = self.bounds(extent)?;
            if std::mem::take(&mut first) {
                self.learn_unit(style, begin, end)?;
                if self.needs_reread {
                    break;
                }
            }
            self.collect(style, begin, end)?;
            self.end = end;
            if self.is_complete() {
                break;
            }
        }
        Ok(())
    }

    /// Start and end of an extent, in bytes.
    fn bounds(&self, extent: &csi::BlockMetadata) -> Result<(u64, u64), Problem> {
        let csi::BlockMetadata { byte_offset, size_bytes } = *extent;
        let wrong = |what| misbehaves(format!("the extent at {byte_offset} {what}"));
        let begin = u64::try_from(byte_offset).map_err(|_| wrong("begins before the volume"))?;
        if size_bytes <= 0 {
            return Err(wrong("has no size"));
        }
        if begin < self.end {
            return Err(wrong("overlaps the previous one"));
        }
        let end = byte_offset.checked_add(size_bytes);
        let end = end.ok_or_else(|| wrong("ends past the end of any volume"))?;
        Ok((begin, end.unsigned_abs()))
    }

    /// Determines the block size from the first extent, or compares it with the known size.
    fn learn_unit(&mut self, style: Type, begin: u64, end: u64) -> Result<(), Problem> {
        let is_fixed = style == Type::FixedLength;
        let unit = if is_fixed { (end - begin).max(UNIT) } else { UNIT };
        let Some(before) = self.unit else {
            // A part of a block does not show the size of a block.
            let is_whole = begin.is_multiple_of(unit) && end != self.capacity;
            self.unit = Some(unit).filter(|_| !is_fixed || is_whole || self.offset == 0);
            self.needs_reread = self.offset != 0 && self.unit != Some(UNIT);
            return Ok(());
        };
        if before == unit || (is_fixed && self.is_last_block(begin, end, before)) {
            return Ok(());
        }
        Err(stale(format!(
            "offset: the block size of the CSI driver has changed from {before} to {unit} bytes; start from offset 0"
        )))
    }

    /// Whether an extent is the last block, shortened by the end of the volume.
    fn is_last_block(&self, begin: u64, end: u64, unit: u64) -> bool {
        end - begin < unit && end == self.capacity
    }

    fn collect(&mut self, style: Type, begin: u64, end: u64) -> Result<(), Problem> {
        let unit = self.unit.unwrap_or(UNIT);
        if style == Type::FixedLength && unit > UNIT {
            let is_whole = end - begin == unit || self.is_last_block(begin, end, unit);
            if !begin.is_multiple_of(unit) || !is_whole {
                return Err(misbehaves(format!(
                    "the extent at {begin} does not match the block size of {unit} bytes of the first extent"
                )));
            }
        }
        let collected = self.numbers.last().map_or(0, |last| last + 1);
        for number in (begin / unit).max(self.offset).max(collected)..end.div_ceil(unit) {
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
    use kubernetes::cbt_http::ProblemKind;

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

    /// All pages of a stream, each read from the extent that contains its offset.
    fn paged(style: Type, extents: &[(i64, i64)], limit: usize, portion: usize) -> Vec<u64> {
        let read = |offset: u64, unit: Option<u64>| {
            let begin = (offset * unit.unwrap_or(UNIT)) as i64;
            let from: Vec<_> =
                extents.iter().copied().filter(|(at, length)| at + length > begin).collect();
            let mut blocks = Blocks::new(offset, limit, unit);
            for part in from.chunks(portion) {
                if !blocks.is_complete() {
                    blocks.add(&message(style, part)).unwrap();
                }
            }
            blocks
        };
        let (mut all, mut offset) = (Vec::new(), 0);
        loop {
            let mut blocks = read(offset, None);
            if blocks.needs_reread() {
                let unit = blocks.unit().or_else(|| read(0, None).unit());
                blocks = read(offset, unit);
                assert!(!blocks.needs_reread());
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
        fn widened_blocks_cover_every_byte_exactly_once(
            extents in variable(), limit in 1..40usize, portion in 1..8usize,
        ) {
            let of = |(begin, length): &(i64, i64)| begin / 4096..(begin + length - 1) / 4096 + 1;
            let naive: BTreeSet<u64> = extents.iter().flat_map(of).map(|number| number as u64).collect();
            let naive: Vec<u64> = naive.into_iter().collect();
            prop_assert_eq!(paged(Type::VariableLength, &extents, limit, portion), naive);
        }

        #[test]
        fn fixed_extents_below_the_block_size_are_widened(
            numbers in prop::collection::btree_set(0..9000i64, 0..60), limit in 1..40usize,
        ) {
            let extents: Vec<_> = numbers.iter().map(|number| (number * 512, 512)).collect();
            let widened: BTreeSet<u64> = numbers.iter().map(|number| *number as u64 / 8).collect();
            let widened: Vec<u64> = widened.into_iter().collect();
            prop_assert_eq!(paged(Type::FixedLength, &extents, limit, 3), widened);
        }

        #[test]
        fn pages_of_fixed_extents_hold_exactly_the_extents(
            numbers in prop::collection::btree_set(0..500i64, 0..60), size in 4096..20_000i64,
            limit in 1..40usize, portion in 1..8usize,
        ) {
            let extents: Vec<_> = numbers.iter().map(|number| (number * size, size)).collect();
            let expected: Vec<u64> = numbers.iter().map(|number| *number as u64).collect();
            prop_assert_eq!(paged(Type::FixedLength, &extents, limit, portion), expected);
        }

        #[test]
        fn any_message_is_handled_in_bounded_time(
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
    fn invalid_extents_are_refused() {
        use Type::{FixedLength, Unknown, VariableLength};
        for (style, extents, words) in [
            (Unknown, &[(0, 4096)][..], "block_metadata_type"),
            (VariableLength, &[(-1, 4096)], "before the volume"),
            (VariableLength, &[(0, 0)], "no size"),
            (VariableLength, &[(0, -1)], "no size"),
            (VariableLength, &[(0, 4097), (4096, 1)], "the previous one"),
            (VariableLength, &[(4096, 1), (0, 1)], "the previous one"),
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
    fn a_changed_block_size_is_refused() {
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
        // The last block does not show the size of the others.
        let mut blocks = Blocks::new(1, 9, None);
        blocks.add(&sent).unwrap();
        assert!(blocks.needs_reread() && blocks.unit().is_none());
    }
}
