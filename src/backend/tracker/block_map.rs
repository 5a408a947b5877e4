//! The answers to `allocated` and `delta`: the union of bitmaps, walked lazily. Cost follows the
//! number of extents, memory is bounded by one segment, and starting anywhere reads nothing before.

use std::ops::Range;
use std::sync::Arc;

use roaring::RoaringBitmap;
use roaring::bitmap::IntoIter;

use super::super::error::{Error, Result};
use super::super::units::{BLOCK_SIZE, Block, BlockRange, Extent};
use super::reader::{Stored, Window};
use super::stored::Cursor;
use super::{Bitmap, RecordReader, SEGMENT_BLOCKS};

/// How much of a record is read at a time, in bytes, if its segments are not larger.
const WINDOW_BYTES: usize = 64 << 10;
/// The same for all records of an answer together.
const ALL_WINDOWS_BYTES: usize = 1 << 20;

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

    /// What extents are multiples of, in bytes. In the style fixed, each is one of these.
    pub fn unit_bytes(&self, style: Style) -> u64 {
        match style {
            Style::Variable => BLOCK_SIZE,
            Style::Fixed(size) => fixed_size(size, self.capacity_bytes),
        }
    }

    /// The extents from the block that holds the byte at `starting_offset` on: ascending, not
    /// overlapping, none that ends at or before it. `OutOfRange` past the capacity.
    pub fn extents(self, style: Style, starting_offset: u64) -> Result<Extents> {
        let capacity = self.capacity_bytes;
        if starting_offset > capacity {
            return Err(Error::OutOfRange(format!(
                "{starting_offset} is past the end of the snapshot ({capacity} bytes)"
            )));
        }
        let unit = self.unit_bytes(style);
        let first = Block::holding(starting_offset - starting_offset % unit);
        let runs = Runs::new(self, first);
        let shape = match style {
            Style::Variable => Shape::Variable,
            Style::Fixed(_) => Shape::Fixed { blocks: unit / BLOCK_SIZE, next: 0, end: 0 },
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
            let run = match self.runs.part()? {
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
    /// The first block of the segment that is being walked, and how.
    current: Option<(u64, Walk)>,
    /// For each record, what was read of it last.
    windows: Vec<Window>,
    pending: Option<BlockRange>,
}

/// How a segment is walked.
enum Walk {
    /// It is in one record only: as it lies there.
    Stored { record: usize, stored: Stored, cursor: Cursor },
    /// The union of several.
    Union(IntoIter),
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
        let ahead = (ALL_WINDOWS_BYTES / map.records.len().max(1)).min(WINDOW_BYTES);
        let windows = map.records.iter().map(|_| Window::reading_ahead(ahead)).collect();
        Self { map, first, segments, current: None, windows, pending: None }
    }

    /// The next run within a segment.
    fn next_in_segment(&mut self) -> Result<Option<BlockRange>> {
        loop {
            if let Some((base, walk)) = &mut self.current {
                if let Some(run) = walk.next(&self.windows)? {
                    let start = Block(*base + u64::from(run.start));
                    let end = Block(*base + u64::from(run.end));
                    return Ok(Some(BlockRange::new(start, end)));
                }
                self.current = None;
            }
            let Some(segment) = self.segments.pop() else { return Ok(None) };
            let base = segment * SEGMENT_BLOCKS;
            // At most 2^24: segments before the first block are not there.
            let first = self.first.0.saturating_sub(base) as u32;
            self.current = Some((base, self.walk(segment, first)?));
        }
    }

    /// Begins to walk a segment that at least one of the records has.
    fn walk(&mut self, segment: u64, first: u32) -> Result<Walk> {
        let mut found = Vec::new();
        for (record, (reader, window)) in self.map.records.iter().zip(&mut self.windows).enumerate()
        {
            let stored = reader.stored(self.map.bitmap, segment, window)?;
            found.extend(stored.map(|stored| (record, stored)));
        }
        if let [(record, stored)] = found.as_slice() {
            let (record, stored) = (*record, stored.clone());
            let cursor = Cursor::new(self.windows[record].bytes(&stored), first)?;
            return Ok(Walk::Stored { record, stored, cursor });
        }
        let mut union = RoaringBitmap::new();
        for (record, stored) in &found {
            union |= self.windows[*record].bitmap(stored)?;
        }
        let mut blocks = union.into_iter();
        blocks.advance_to(first);
        Ok(Walk::Union(blocks))
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

impl Walk {
    #[inline]
    fn next(&mut self, windows: &[Window]) -> Result<Option<Range<u32>>> {
        match self {
            Self::Stored { record, stored, cursor } => {
                let run = cursor.next(windows[*record].bytes(stored))?;
                let right = match &run {
                    Some(run) => run.end <= stored.limit,
                    None => cursor.found() == stored.blocks,
                };
                if right { Ok(run) } else { Err(stored.disagrees()) }
            }
            Self::Union(blocks) => Ok(blocks.next_range().map(|run| *run.start()..*run.end() + 1)),
        }
    }
}

impl Runs {
    /// The next run as far as it lies together: the first units of a long one are had without reading it to its end.
    fn part(&mut self) -> Option<Result<BlockRange>> {
        let part = self.next_in_segment();
        self.ending(part)
    }

    /// Ends the walk after an error.
    fn ending(&mut self, run: Result<Option<BlockRange>>) -> Option<Result<BlockRange>> {
        if run.is_err() {
            self.segments.clear();
            self.current = None;
            self.pending = None;
        }
        run.transpose()
    }
}

impl Iterator for Runs {
    type Item = Result<BlockRange>;

    fn next(&mut self) -> Option<Self::Item> {
        let run = self.advance();
        self.ending(run)
    }
}
