//! The answers to `allocated` and `delta`: the union of bitmaps, walked lazily. Cost follows the
//! number of extents, memory is bounded by one segment, and starting anywhere reads nothing before.

use std::sync::Arc;

use roaring::RoaringBitmap;
use roaring::bitmap::IntoIter;

use super::super::error::{Error, Result};
use super::super::units::{BLOCK_SIZE, Block, BlockRange, Extent};
use super::{Bitmap, RecordReader, SEGMENT_BLOCKS};

/// How blocks are reported (CSI `BlockMetadataType`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// Extents as long as they are.
    Variable,
    /// Extents of one size: the largest power of two, up to this many bytes, that divides the
    /// capacity. At least 4096.
    Fixed(u64),
}

/// Which blocks an answer reports: the union of one bitmap of each of the records. Cheap to make.
#[derive(Debug)]
pub struct BlockMap {
    capacity_bytes: u64,
    bitmap: Bitmap,
    records: Vec<Arc<RecordReader>>,
}

impl BlockMap {
    /// With no records, the empty answer.
    pub fn new(capacity_bytes: u64, bitmap: Bitmap, records: Vec<Arc<RecordReader>>) -> Self {
        Self { capacity_bytes, bitmap, records }
    }

    /// Capacity of the (target) snapshot, in bytes.
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// The extents from the block that holds the byte at `starting_offset` on: ascending, not
    /// overlapping, none that ends at or before it. `OutOfRange` past the capacity.
    pub fn extents(self, style: Style, starting_offset: u64) -> Result<Extents> {
        let capacity = self.capacity_bytes;
        if starting_offset > capacity {
            return Err(Error::OutOfRange(format!(
                "starting_offset: {starting_offset} is past the end of the snapshot ({capacity} bytes)"
            )));
        }
        let granularity = match style {
            Style::Variable => BLOCK_SIZE,
            Style::Fixed(size) => fixed_size(size, capacity),
        };
        let first = Block::holding(starting_offset - starting_offset % granularity);
        let runs = Runs::new(self, first);
        let shape = match style {
            Style::Variable => Shape::Variable,
            Style::Fixed(_) => Shape::Fixed { blocks: granularity / BLOCK_SIZE, next: 0, end: 0 },
        };
        Ok(Extents { runs, shape })
    }
}

/// The largest power of two up to `size` that divides `capacity`; both are multiples of 4096.
fn fixed_size(size: u64, capacity: u64) -> u64 {
    let divides = 1 << capacity.trailing_zeros().min(63);
    let largest = 1 << size.max(BLOCK_SIZE).ilog2();
    largest.min(divides).max(BLOCK_SIZE)
}

enum Shape {
    Variable,
    /// In units of `blocks` blocks: the extents from `next` to `end` are still to be reported.
    Fixed {
        blocks: u64,
        next: u64,
        end: u64,
    },
}

/// The extents of an answer. After an error it ends.
pub struct Extents {
    runs: Runs,
    shape: Shape,
}

impl Iterator for Extents {
    type Item = Result<Extent>;

    fn next(&mut self) -> Option<Self::Item> {
        let Shape::Fixed { blocks, next, end } = &mut self.shape else {
            return self.runs.next().map(|run| run.map(|run| run.extent()));
        };
        while *next >= *end {
            let run = match self.runs.next()? {
                Ok(run) => run,
                Err(error) => return Some(Err(error)),
            };
            // A run may begin in the unit that the last one ended in.
            *next = (*end).max(run.start.0 / *blocks);
            *end = run.end.0.div_ceil(*blocks);
        }
        let start = Block(*next * *blocks);
        *next += 1;
        Some(Ok(BlockRange::new(start, Block(start.0 + *blocks)).extent()))
    }
}

/// Maximal runs of set blocks, across segments.
struct Runs {
    map: BlockMap,
    /// Nothing before this block is reported.
    first: Block,
    /// The segments that any of the records has, last first.
    segments: Vec<u64>,
    current: Option<(u64, IntoIter)>,
    pending: Option<BlockRange>,
}

impl Runs {
    fn new(map: BlockMap, first: Block) -> Self {
        let mut segments: Vec<u64> = map
            .records
            .iter()
            .flat_map(|record| record.segments(map.bitmap))
            .filter(|segment| (segment + 1) * SEGMENT_BLOCKS > first.0)
            .collect();
        segments.sort_unstable_by(|a, b| b.cmp(a));
        segments.dedup();
        Self { map, first, segments, current: None, pending: None }
    }

    /// The next run within a segment.
    fn next_in_segment(&mut self) -> Result<Option<BlockRange>> {
        loop {
            if let Some((base, blocks)) = &mut self.current {
                if let Some(run) = blocks.next_range() {
                    let start = Block(*base + u64::from(*run.start()));
                    let end = Block(*base + u64::from(*run.end()) + 1);
                    return Ok(Some(BlockRange::new(start, end)));
                }
                self.current = None;
            }
            let Some(segment) = self.segments.pop() else { return Ok(None) };
            let base = segment * SEGMENT_BLOCKS;
            let mut blocks = self.union(segment)?.into_iter();
            if self.first.0 > base {
                blocks.advance_to((self.first.0 - base) as u32);
            }
            self.current = Some((base, blocks));
        }
    }

    fn union(&self, segment: u64) -> Result<RoaringBitmap> {
        let mut union = RoaringBitmap::new();
        for record in &self.map.records {
            if let Some(blocks) = record.segment(self.map.bitmap, segment)? {
                union |= blocks;
            }
        }
        Ok(union)
    }

    fn advance(&mut self) -> Result<Option<BlockRange>> {
        let mut run = match self.pending.take() {
            Some(run) => run,
            None => match self.next_in_segment()? {
                Some(run) => run,
                None => return Ok(None),
            },
        };
        // A run that reaches the end of a segment, or of a container, may go on behind it.
        while let Some(next) = self.next_in_segment()? {
            if next.start != run.end {
                self.pending = Some(next);
                break;
            }
            run.end = next.end;
        }
        Ok(Some(run))
    }
}

impl Iterator for Runs {
    type Item = Result<BlockRange>;

    fn next(&mut self) -> Option<Self::Item> {
        let run = self.advance().transpose();
        if matches!(run, Some(Err(_))) {
            self.segments.clear();
            self.current = None;
            self.pending = None;
        }
        run
    }
}
