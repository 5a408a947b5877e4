//! Extent maps of immutable files, and their comparison.
//!
//! Rule: copy-on-write never overwrites a block that another file references. Therefore the *same
//! logical offset at the same physical address, written in both* means unchanged. A range that
//! reads as zeros in both (a hole or an unwritten extent) is unchanged too. Everything else is
//! changed. An extent whose address says nothing about content (inline, encoded, delayed, unknown)
//! is treated as changed and as data: reporting too much is safe, too little is not. An impossible
//! map is an error, never an empty result.

use std::fs::File;
use std::ops::Range;

use linux_raw_sys::ioctl::{
    FIEMAP_EXTENT_DATA_ENCRYPTED, FIEMAP_EXTENT_DATA_INLINE, FIEMAP_EXTENT_DATA_TAIL,
    FIEMAP_EXTENT_DELALLOC, FIEMAP_EXTENT_ENCODED, FIEMAP_EXTENT_LAST, FIEMAP_EXTENT_MERGED,
    FIEMAP_EXTENT_NOT_ALIGNED, FIEMAP_EXTENT_SHARED, FIEMAP_EXTENT_UNKNOWN,
    FIEMAP_EXTENT_UNWRITTEN,
};

use super::error::{Context, Error, Result};
use super::sys::{self, FiemapExtent};

/// Flags of extents whose address says nothing about content.
const OPAQUE: u32 = FIEMAP_EXTENT_UNKNOWN
    | FIEMAP_EXTENT_DELALLOC
    | FIEMAP_EXTENT_ENCODED
    | FIEMAP_EXTENT_DATA_ENCRYPTED
    | FIEMAP_EXTENT_NOT_ALIGNED
    | FIEMAP_EXTENT_DATA_INLINE
    | FIEMAP_EXTENT_DATA_TAIL;

/// Flags that this module understands; any other makes an extent opaque.
const UNDERSTOOD: u32 = OPAQUE
    | FIEMAP_EXTENT_LAST
    | FIEMAP_EXTENT_MERGED
    | FIEMAP_EXTENT_SHARED
    | FIEMAP_EXTENT_UNWRITTEN;

/// The content of a range of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Content {
    /// Reads as zeros: a hole or an unwritten extent.
    Zero,
    /// Written, at this physical address (bytes) for the range's first byte.
    Written(u64),
    /// Unknown: not equal to anything, including itself.
    Opaque,
}

impl Content {
    /// The content `bytes` further in the same extent.
    fn advanced_by(self, bytes: u64) -> Self {
        match self {
            Self::Written(physical) => Self::Written(physical.wrapping_add(bytes)),
            Self::Zero | Self::Opaque => self,
        }
    }
}

/// A range of a file, in bytes, with one kind of content. Never empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    start: u64,
    end: u64,
    content: Content,
}

/// A range found by a comparison, in bytes. Findings are ascending. The flags are independent: a
/// discarded range is changed but not allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finding {
    pub start: u64,
    pub end: u64,
    pub allocated: bool,
    pub changed: bool,
}

impl Finding {
    /// Whether `next` is adjacent and has the same flags.
    pub fn continues(&self, next: &Self) -> bool {
        self.end == next.start && self.allocated == next.allocated && self.changed == next.changed
    }
}

/// Reads a batch of extents from the given byte on.
type Fetch<'a> = Box<dyn FnMut(u64) -> Result<Vec<FiemapExtent>> + 'a>;

/// Reads and validates the extents of a file.
pub struct ExtentReader<'a> {
    fetch: Fetch<'a>,
    batch: std::vec::IntoIter<FiemapExtent>,
    /// The first byte after the last extent.
    position: u64,
    /// The start of the contiguous range that ends at `position`.
    run_start: u64,
    /// The content at `position` if the last extent continues.
    continuation: Option<Content>,
    /// The end of the range to read.
    limit: u64,
    at_end: bool,
}

impl<'a> ExtentReader<'a> {
    /// The extents of `file` below `limit` bytes.
    pub fn new(file: &'a File, limit: u64) -> Self {
        let fetch = move |start| {
            sys::fiemap(file, start, limit).context(|| "reading an extent map".to_owned())
        };
        Self::with(Box::new(fetch), limit)
    }

    pub fn with(fetch: Fetch<'a>, limit: u64) -> Self {
        let batch = Vec::new().into_iter();
        Self { fetch, batch, position: 0, run_start: 0, continuation: None, limit, at_end: false }
    }

    /// The next extent, truncated to the part from the previous one's end to the limit.
    pub fn next_extent(&mut self) -> Result<Option<FiemapExtent>> {
        loop {
            if let Some(extent) = self.batch.next() {
                let Some(extent) = self.checked(extent)? else { continue };
                return Ok(Some(extent));
            }
            if self.at_end || self.position >= self.limit {
                return Ok(None);
            }
            let before = self.position;
            let batch = (self.fetch)(before)?;
            let Some(last) = batch.last() else { return Ok(None) };
            if last.logical.saturating_add(last.length) <= before {
                return Err(damaged(last, "makes no progress"));
            }
            self.check_order(&batch)?;
            self.batch = batch.into_iter();
        }
    }

    /// A batch may begin with the extent in which the last batch ended. Any other overlap would
    /// contradict reported extents.
    fn check_order(&self, batch: &[FiemapExtent]) -> Result<()> {
        let mut end = self.run_start;
        for extent in batch {
            if extent.logical < end {
                return Err(damaged(extent, "overlaps the previous one or is out of order"));
            }
            end = extent.logical.saturating_add(extent.length);
        }
        Ok(())
    }

    /// Validates an extent. `None` if it is outside the range to read.
    fn checked(&mut self, extent: FiemapExtent) -> Result<Option<FiemapExtent>> {
        self.at_end |= extent.flags & FIEMAP_EXTENT_LAST != 0;
        let end = extent.logical.checked_add(extent.length);
        let Some(end) = end.filter(|end| *end > extent.logical) else {
            return Err(damaged(&extent, "is empty or overflows"));
        };
        if extent.physical.checked_add(extent.length).is_none() {
            return Err(damaged(&extent, "overflows its device"));
        }
        // The following extents are beyond the limit.
        self.at_end |= end >= self.limit;
        let start = extent.logical.max(self.position);
        let skipped = start - extent.logical;
        let continues = self.continuation == Some(content(&extent).advanced_by(skipped));
        if skipped > 0 && !continues {
            return Err(damaged(&extent, "contradicts the previous one"));
        }
        let end = end.min(self.limit);
        if start >= end {
            return Ok(None);
        }
        if start > self.position || !continues {
            self.run_start = start;
        }
        self.position = end;
        self.continuation = Some(content(&extent).advanced_by(end - extent.logical));
        let physical = extent.physical + skipped;
        Ok(Some(FiemapExtent::new(start, physical, end - start, extent.flags)))
    }
}

fn damaged(extent: &FiemapExtent, what: &str) -> Error {
    Error::Damaged(format!(
        "the kernel returned an invalid extent map: the extent at {} of {} bytes {what}",
        extent.logical, extent.length
    ))
}

/// A file as contiguous pieces from 0 to `end`.
struct Pieces<'a> {
    extents: ExtentReader<'a>,
    pending: Option<FiemapExtent>,
    position: u64,
    end: u64,
}

impl<'a> Pieces<'a> {
    fn new(extents: ExtentReader<'a>, end: u64) -> Self {
        Self { extents, pending: None, position: 0, end }
    }

    /// `None` at the end.
    fn next_piece(&mut self) -> Result<Option<Piece>> {
        if self.position >= self.end {
            return Ok(None);
        }
        if self.pending.is_none() {
            self.pending = self.extents.next_extent()?;
        }
        let start = self.position;
        let piece = match self.pending {
            Some(extent) if extent.logical <= start => {
                self.pending = None;
                Piece { start, end: extent.logical + extent.length, content: content(&extent) }
            }
            Some(extent) => Piece { start, end: extent.logical, content: Content::Zero },
            None => Piece { start, end: self.end, content: Content::Zero },
        };
        self.position = piece.end;
        Ok(Some(piece))
    }
}

fn content(extent: &FiemapExtent) -> Content {
    let flags = extent.flags;
    if flags & OPAQUE != 0 || flags & !UNDERSTOOD != 0 {
        Content::Opaque
    } else if flags & FIEMAP_EXTENT_UNWRITTEN != 0 {
        Content::Zero
    } else {
        Content::Written(extent.physical)
    }
}

/// Compares `new` with `old` (or with zeros), both immutable and of the given sizes in bytes.
/// Reports every range of `new` that is allocated or changed, in ascending order. The cost follows
/// the number of extents.
pub fn compare(
    old: Option<(&File, u64)>,
    new: (&File, u64),
    mut report: impl FnMut(Finding) -> Result<()>,
) -> Result<()> {
    let (file, size) = new;
    let new = ExtentReader::new(file, size);
    match old {
        Some((file, old_size)) => {
            let old = ExtentReader::new(file, old_size.min(size));
            compare_maps(Some(old), new, size, &mut report)
        }
        None => compare_maps(None, new, size, &mut report),
    }
}

pub fn compare_maps(
    old: Option<ExtentReader<'_>>,
    new: ExtentReader<'_>,
    size: u64,
    report: &mut impl FnMut(Finding) -> Result<()>,
) -> Result<()> {
    let mut new = Pieces::new(new, size);
    let mut old = old.map(|old| Pieces::new(old, size));
    let mut left: Option<Piece> = None;
    while let Some(right) = new.next_piece()? {
        let mut start = right.start;
        while start < right.end {
            if left.is_none_or(|piece| piece.end <= start)
                && let Some(old) = old.as_mut()
            {
                left = old.next_piece()?;
                continue;
            }
            // Without an older file, compare with zeros.
            let before = left.unwrap_or(Piece { start: 0, end: size, content: Content::Zero });
            let end = right.end.min(before.end);
            let finding = Finding {
                start,
                end,
                allocated: right.content != Content::Zero,
                changed: differ(before, right, start),
            };
            if finding.allocated || finding.changed {
                report(finding)?;
            }
            start = end;
        }
    }
    Ok(())
}

/// Whether two pieces that contain the byte `at` differ there.
fn differ(old: Piece, new: Piece, at: u64) -> bool {
    match (old.content, new.content) {
        (Content::Zero, Content::Zero) => false,
        (Content::Written(a), Content::Written(b)) => a + (at - old.start) != b + (at - new.start),
        _ => true,
    }
}

/// Splits the data of `file` below `size` into ranges (bytes) of at most `extents` extents and
/// `bytes` bytes. The file may change meanwhile: missed data is cloned later.
pub fn data_ranges(
    file: &File,
    size: u64,
    extents: usize,
    bytes: u64,
    mut visit: impl FnMut(Range<u64>) -> Result<()>,
) -> Result<()> {
    let mut reader = ExtentReader::new(file, size);
    let mut range = 0..0;
    let mut count = 0;
    while let Some(extent) = reader.next_extent()? {
        let end = extent.logical + extent.length;
        if count > 0 && (count >= extents || end - range.start > bytes) {
            visit(range.clone())?;
            count = 0;
        }
        if count == 0 {
            range.start = extent.logical;
        }
        range.end = end;
        count += 1;
        while range.end - range.start > bytes {
            visit(range.start..range.start + bytes)?;
            range.start += bytes;
        }
    }
    if count > 0 { visit(range) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(logical: u64, physical: u64, length: u64, flags: u32) -> FiemapExtent {
        FiemapExtent::new(logical, physical, length, flags)
    }

    fn reader(extents: Vec<FiemapExtent>, limit: u64) -> ExtentReader<'static> {
        // Returns two at a time, beginning with the one that contains `start`, as the kernel does.
        let fetch = move |start: u64| {
            let from = extents.iter().filter(|e| e.logical + e.length > start);
            Ok(from.take(2).copied().collect())
        };
        ExtentReader::with(Box::new(fetch), limit)
    }

    fn findings(
        old: Option<Vec<FiemapExtent>>,
        new: Vec<FiemapExtent>,
        size: u64,
    ) -> Vec<(u64, u64, bool, bool)> {
        let mut out = Vec::new();
        let old = old.map(|extents| reader(extents, size));
        compare_maps(old, reader(new, size), size, &mut |f: Finding| {
            out.push((f.start, f.end, f.allocated, f.changed));
            Ok(())
        })
        .unwrap();
        out
    }

    #[test]
    fn opaque_extents_are_changed_even_at_the_same_address() {
        for flag in [
            FIEMAP_EXTENT_UNKNOWN,
            FIEMAP_EXTENT_DELALLOC,
            FIEMAP_EXTENT_ENCODED,
            FIEMAP_EXTENT_DATA_ENCRYPTED,
            FIEMAP_EXTENT_NOT_ALIGNED,
            FIEMAP_EXTENT_DATA_INLINE,
            FIEMAP_EXTENT_DATA_TAIL,
            1 << 30,
        ] {
            let map = vec![extent(0, 1000, 100, flag)];
            assert_eq!(findings(Some(map.clone()), map, 100), [(0, 100, true, true)], "{flag:#x}");
        }
    }

    /// Start, end, allocated, changed.
    type Expected = &'static [(u64, u64, bool, bool)];

    #[test]
    fn same_address_or_zeros_in_both_is_unchanged() {
        let data = || vec![extent(0, 1000, 100, 0)];
        let unwritten = || vec![extent(0, 1000, 100, FIEMAP_EXTENT_UNWRITTEN)];
        let split = vec![extent(0, 1000, 40, 0), extent(40, 1040, 60, 0)];
        let moved = vec![extent(0, 5000, 100, 0)];
        let shifted = vec![extent(10, 1000, 90, 0)];
        let grown = vec![extent(0, 1000, 100, 0), extent(150, 9000, 50, 0)];
        let cases: [(&str, Option<Vec<_>>, Vec<_>, Expected); 9] = [
            ("split", Some(data()), split, &[(0, 40, true, false), (40, 100, true, false)]),
            ("another address", Some(data()), moved, &[(0, 100, true, true)]),
            ("shifted", Some(data()), shifted, &[(0, 10, false, true), (10, 100, true, true)]),
            ("discarded", Some(data()), vec![], &[(0, 100, false, true)]),
            ("zeroed", Some(data()), unwritten(), &[(0, 100, false, true)]),
            ("a hole, then unwritten", Some(vec![]), unwritten(), &[]),
            ("unwritten, then a hole", Some(unwritten()), vec![], &[]),
            ("grown", Some(data()), grown, &[(0, 100, true, false), (150, 200, true, true)]),
            ("without an older file", None, data(), &[(0, 100, true, true)]),
        ];
        for (name, old, new, expected) in cases {
            assert_eq!(findings(old, new, 200), expected, "{name}");
        }
    }

    #[test]
    fn an_impossible_extent_map_is_an_error() {
        let refused =
            [extent(0, 0, 0, 0), extent(u64::MAX - 1, 0, 10, 0), extent(0, u64::MAX - 1, 10, 0)];
        for bad in refused {
            let mut reader = ExtentReader::with(Box::new(move |_| Ok(vec![bad])), u64::MAX);
            assert!(matches!(reader.next_extent(), Err(Error::Damaged(_))), "{bad:?}");
        }
        let mut stuck = ExtentReader::with(Box::new(|_| Ok(vec![extent(0, 0, 10, 0)])), 100);
        assert!(stuck.next_extent().unwrap().is_some());
        assert!(matches!(stuck.next_extent(), Err(Error::Damaged(_))));
    }

    #[test]
    fn overlapping_or_unordered_extents_are_an_error() {
        let maps = [
            vec![vec![extent(50, 0, 50, 0), extent(0, 1000, 10, 0)]],
            vec![vec![extent(0, 0, 50, 0), extent(40, 1000, 50, 0)]],
            vec![vec![extent(50, 0, 50, 0)], vec![extent(40, 1000, 100, 0)]],
            // A later batch contradicts a reported extent: the last one, or an earlier one.
            vec![vec![extent(0, 0, 50, FIEMAP_EXTENT_UNWRITTEN)], vec![extent(0, 0, 60, 0)]],
            vec![vec![extent(0, 1000, 50, 0)], vec![extent(0, 2000, 60, 0)]],
            vec![
                vec![extent(0, 0, 50, FIEMAP_EXTENT_UNWRITTEN), extent(50, 1050, 50, 0)],
                vec![extent(40, 1040, 70, 0)],
            ],
        ];
        for map in maps {
            let mut batches = map.clone().into_iter();
            let fetch = move |_| Ok(batches.next().unwrap_or_default());
            let mut reader = ExtentReader::with(Box::new(fetch), 1000);
            let mut read = || -> Result<()> {
                while reader.next_extent()?.is_some() {}
                Ok(())
            };
            assert!(matches!(read(), Err(Error::Damaged(_))), "{map:?}");
        }
    }

    #[test]
    fn extents_past_the_limit_end_the_map() {
        let fetch = |_| Ok(vec![extent(200, 0, 10, 0)]);
        let mut reader = ExtentReader::with(Box::new(fetch), 100);
        assert!(reader.next_extent().unwrap().is_none());
    }
}
