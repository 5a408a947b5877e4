//! The results of `allocated` and `delta`: the union of bitmaps, read lazily. The cost follows the
//! number of extents. Memory is limited to one segment and a small window per record. Reading from
//! an offset skips everything before it.

use std::ops::Range;
use std::sync::Arc;

use roaring::RoaringBitmap;
use roaring::bitmap::IntoIter;

use super::super::error::{Error, Result};
use super::super::units::{BLOCK_SIZE, Block, BlockRange, Extent};
use super::reader::{StoredSegment, Window};
use super::stored::Cursor;
use super::{Bitmap, RecordReader, SEGMENT_BLOCKS};

/// Size of the window for reading a record, in bytes, unless its segments are larger.
const WINDOW_BYTES: usize = 64 << 10;
/// Total size of the windows of all records of one result, in bytes.
const ALL_WINDOWS_BYTES: usize = 1 << 20;

/// The format of reported extents (CSI `BlockMetadataType`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// Extents of any length.
    Variable,
    /// Extents of one size: the largest power of two, up to this many bytes, that divides the
    /// capacity. At least 4096.
    Fixed(u64),
}

/// The union of one bitmap of several records. Reads nothing until [`Self::extents`].
#[derive(Debug)]
pub struct BlockMap {
    capacity_bytes: u64,
    bitmap: Bitmap,
    records: Vec<Arc<RecordReader>>,
}

impl BlockMap {
    /// Without records, the result is empty.
    pub fn new(capacity_bytes: u64, bitmap: Bitmap, records: Vec<Arc<RecordReader>>) -> Self {
        Self { capacity_bytes, bitmap, records }
    }

    /// Capacity of the (target) snapshot, in bytes.
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// The unit of extents, in bytes. In the fixed style, each extent has this size.
    pub fn unit_bytes(&self, style: Style) -> u64 {
        match style {
            Style::Variable => BLOCK_SIZE,
            Style::Fixed(size) => fixed_size(size, self.capacity_bytes),
        }
    }

    /// The extents from the block that contains the byte at `starting_offset` on: ascending, not
    /// overlapping. `OutOfRange` past the capacity.
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
    /// In units of `blocks` blocks: the extents from `next` to `end` are not reported yet.
    Fixed {
        blocks: u64,
        next: u64,
        end: u64,
    },
}

/// An iterator over extents. It ends after an error.
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
            // A run may begin in the unit in which the last one ended.
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
    /// The first block to report.
    first: Block,
    /// The remaining segments of all records, in descending order.
    segments: Vec<u64>,
    /// The first block of the current segment, and its iterator.
    current: Option<(u64, Walk)>,
    /// One window per record, and one shared window for larger segments, so that a long chain of
    /// large segments needs the memory of one.
    windows: Vec<Window>,
    /// Size of a record's window, in bytes.
    window_bytes: usize,
    pending: Option<BlockRange>,
}

/// The iterator of a segment.
enum Walk {
    /// The segment is in one record only, and is read in its stored form.
    Stored { window: usize, stored: StoredSegment, cursor: Cursor },
    /// The union of the bitmaps of several records.
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
        let window_bytes = (ALL_WINDOWS_BYTES / map.records.len().max(1)).min(WINDOW_BYTES);
        let of_records = map.records.iter().map(|_| Window::with_minimum_read(window_bytes));
        let windows = of_records.chain([Window::default()]).collect();
        Self { map, first, segments, current: None, windows, window_bytes, pending: None }
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
            // At most 2^24: segments before the first block were filtered out.
            let first = self.first.0.saturating_sub(base) as u32;
            self.current = Some((base, self.walk(segment, first)?));
        }
    }

    /// Creates the iterator of a segment that exists in at least one record.
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

    /// Reads a segment of `bytes` bytes and returns the index of its window. The previous contents
    /// of a shared window are lost.
    fn read(
        &mut self,
        record: usize,
        segment: u64,
        bytes: usize,
    ) -> Result<(usize, Option<StoredSegment>)> {
        let records = &self.map.records;
        let at = if bytes > self.window_bytes { records.len() } else { record };
        if at == records.len() {
            // The window may contain data of another record.
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
        // A run at the end of a segment or container may continue in the next.
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
                let is_valid = match &run {
                    Some(run) => run.end <= stored.limit,
                    None => cursor.found() == stored.blocks,
                };
                if is_valid { Ok(run) } else { Err(stored.mismatch()) }
            }
            Self::Union(blocks) => Ok(blocks.next_range().map(|run| *run.start()..*run.end() + 1)),
        }
    }
}

impl Runs {
    /// The next partial run, so that the first units of a long run do not require reading all of
    /// it.
    fn part(&mut self) -> Option<Result<BlockRange>> {
        let part = self.next_in_segment();
        self.ending(part)
    }

    /// Ends the iteration after an error.
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

    /// Interval of the set blocks. Makes a segment much larger than a window.
    const EVERY: u64 = 128;

    /// A record with a set block in each interval of the given segments.
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
    fn a_chain_of_large_segments_needs_the_memory_of_one() {
        const RECORDS: u64 = 8;
        let records: Vec<_> =
            (0..RECORDS).map(|n| record(n, if n == 3 { &[0, 1] } else { &[0] })).collect();
        let segment = records[0].stored_bytes(Bitmap::Changed, 0).unwrap();
        assert!(segment > 2 * WINDOW_BYTES, "{segment}");
        let map = || BlockMap::new(capacity(), Bitmap::Changed, records.clone());
        let mut extents = map().extents(Style::Variable, 0).unwrap();
        for interval in 0..SEGMENT_BLOCKS / EVERY {
            let expected =
                BlockRange::new(Block(interval * EVERY), Block(interval * EVERY + RECORDS));
            assert_eq!(extents.next().unwrap().unwrap(), expected.extent());
        }
        let held: usize = extents.runs.windows.iter().map(Window::capacity).sum();
        assert!(held < 3 * segment, "{held} bytes are held for segments of {segment}");
        // The segment that exists in one record only.
        let of_one: Vec<Extent> = extents.map(Result::unwrap).collect();
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
