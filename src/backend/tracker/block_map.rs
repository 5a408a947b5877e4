//! The answers to `allocated` and `delta`: the union of bitmaps, walked lazily. Cost follows the
//! number of extents, memory is bounded by one segment and a small window for each record, and starting anywhere reads
//! nothing before.

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
    /// For each record, what was read of it last; then one for all segments that are larger than such a window. So a long
    /// chain of large segments takes the memory of one.
    windows: Vec<Window>,
    /// Bytes of a record's window.
    ahead: usize,
    pending: Option<BlockRange>,
}

/// How a segment is walked.
enum Walk {
    /// It is in one record only: as it lies there.
    Stored { window: usize, stored: Stored, cursor: Cursor },
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
        let of_records = map.records.iter().map(|_| Window::reading_ahead(ahead));
        let windows = of_records.chain([Window::default()]).collect();
        Self { map, first, segments, current: None, windows, ahead, pending: None }
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
        let bitmap = self.map.bitmap;
        let sizes = self.map.records.iter().map(|record| record.stored_bytes(bitmap, segment));
        let found: Vec<(usize, usize)> =
            sizes.enumerate().filter_map(|(record, size)| Some((record, size?))).collect();
        if let [(record, bytes)] = found.as_slice()
            && let (window, Some(stored)) = self.read(*record, segment, *bytes)?
        {
            let cursor = Cursor::new(self.windows[window].bytes(&stored), first)?;
            return Ok(Walk::Stored { window, stored, cursor });
        }
        let mut union = RoaringBitmap::new();
        for (record, bytes) in found {
            if let (window, Some(stored)) = self.read(record, segment, bytes)? {
                union |= self.windows[window].bitmap(&stored)?;
            }
        }
        let mut blocks = union.into_iter();
        blocks.advance_to(first);
        Ok(Walk::Union(blocks))
    }

    /// Reads a segment of so many bytes, and says into which window. What a window of several records held before is lost.
    fn read(
        &mut self,
        record: usize,
        segment: u64,
        bytes: usize,
    ) -> Result<(usize, Option<Stored>)> {
        let records = &self.map.records;
        let at = if bytes > self.ahead { records.len() } else { record };
        if at == records.len() {
            // What is in it is of another record.
            self.windows[at].clear();
        }
        let stored = records[record].stored(self.map.bitmap, segment, &mut self.windows[at])?;
        Ok((at, stored))
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
            Self::Stored { window, stored, cursor } => {
                let run = cursor.next(windows[*window].bytes(stored))?;
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

#[cfg(test)]
mod tests {
    use super::super::{Header, RecordWriter};
    use super::*;

    /// Every so many blocks one is set, so that a segment is much larger than a window of a record.
    const EVERY: u64 = 128;

    /// A record with a block set in each stretch of the given segments.
    fn record(number: u64, segments: &[u64]) -> Arc<RecordReader> {
        let file = tempfile::tempfile().unwrap();
        let header = Header::new("snap-a", "vol-a", Some("snap-b"), 7, capacity());
        let mut writer = RecordWriter::new(file.try_clone().unwrap(), &header).unwrap();
        for segment in segments {
            let first = segment * SEGMENT_BLOCKS;
            for block in (first + number..first + SEGMENT_BLOCKS).step_by(EVERY as usize) {
                writer
                    .set(Bitmap::Changed, BlockRange::new(Block(block), Block(block + 1)))
                    .unwrap();
            }
        }
        writer.finish().unwrap();
        Arc::new(RecordReader::open(file).unwrap())
    }

    fn capacity() -> u64 {
        2 * SEGMENT_BLOCKS * BLOCK_SIZE
    }

    #[test]
    fn a_chain_of_large_segments_takes_the_memory_of_one_and_is_whole() {
        const RECORDS: u64 = 8;
        let records: Vec<_> =
            (0..RECORDS).map(|n| record(n, if n == 3 { &[0, 1] } else { &[0] })).collect();
        let segment = records[0].stored_bytes(Bitmap::Changed, 0).unwrap();
        assert!(segment > 2 * WINDOW_BYTES, "{segment}");
        let map = || BlockMap::new(capacity(), Bitmap::Changed, records.clone());
        let mut answer = map().extents(Style::Variable, 0).unwrap();
        for stretch in 0..SEGMENT_BLOCKS / EVERY {
            let expected =
                BlockRange::new(Block(stretch * EVERY), Block(stretch * EVERY + RECORDS));
            assert_eq!(answer.next().unwrap().unwrap(), expected.extent());
        }
        let held: usize = answer.runs.windows.iter().map(Window::held).sum();
        assert!(held < 3 * segment, "{held} bytes are held for segments of {segment}");
        // The segment that one record alone has.
        let of_one: Vec<Extent> = answer.map(Result::unwrap).collect();
        assert_eq!(of_one.len() as u64, SEGMENT_BLOCKS / EVERY);
        let last = Block(2 * SEGMENT_BLOCKS - EVERY + 3);
        assert_eq!(of_one.last(), Some(&BlockRange::new(last, Block(last.0 + 1)).extent()));
        let from_the_last = map().extents(Style::Variable, last.0 * BLOCK_SIZE).unwrap();
        assert_eq!(
            from_the_last.map(Result::unwrap).collect::<Vec<_>>(),
            of_one[of_one.len() - 1..]
        );
    }
}
