//! Reads a change record one segment at a time. Data is used only after its checksum is verified.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use roaring::RoaringBitmap;

use super::super::error::{Context, Error, Result};
use super::super::units::{BLOCK_SIZE, MAX_VOLUME_BYTES};
use super::{
    Bitmap, END_MAGIC, Header, INDEX_ENTRY_BYTES, IndexEntry, MAGIC, MAX_HEADER_BYTES,
    MAX_INDEX_ENTRIES, MAX_SEGMENT_BYTES, SEGMENT_BLOCKS, TRAILER_BYTES, VERSION, damaged, u32_at,
    u64_at,
};

/// An open change record. Reads do not use the file position, so threads can share it.
#[derive(Debug)]
pub struct RecordReader {
    file: File,
    header: Header,
    index: Vec<IndexEntry>,
}

impl RecordReader {
    /// Opens a record and verifies its header and index. Segments are verified when they are read.
    pub fn open(file: File) -> Result<Self> {
        let size = file.metadata().context(reading)?.len();
        let header = read_header(&file, size)?;
        let index = read_index(&file, size)?;
        let reader = Self { file, header, index };
        reader.check_index(size)?;
        Ok(reader)
    }

    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The number of set blocks of a bitmap.
    pub fn blocks(&self, bitmap: Bitmap) -> u64 {
        self.entries(bitmap).map(|entry| entry.blocks).sum()
    }

    /// The non-empty segments of a bitmap, ascending.
    pub fn segments(&self, bitmap: Bitmap) -> impl Iterator<Item = u64> + '_ {
        self.entries(bitmap).map(|entry| u64::from(entry.segment))
    }

    /// The blocks of a segment, relative to its first block; `None` if it is empty.
    pub fn segment(&self, bitmap: Bitmap, segment: u64) -> Result<Option<RoaringBitmap>> {
        let mut window = Window::default();
        let stored = self.stored(bitmap, segment, &mut window)?;
        stored.map(|stored| window.bitmap(&stored)).transpose()
    }

    /// Reads a segment into `window` and verifies its checksum; `None` if it is empty.
    pub(super) fn stored(
        &self,
        bitmap: Bitmap,
        segment: u64,
        window: &mut Window,
    ) -> Result<Option<StoredSegment>> {
        let Some(entry) = self.entry(bitmap, segment) else { return Ok(None) };
        let range = window.read(&self.file, entry.offset, entry.length as usize)?;
        // Roaring does not detect bit errors, so verify the checksum first.
        if crc32c::crc32c(&window.bytes[range.clone()]) != entry.checksum {
            return Err(damaged(format_args!("bad checksum of segment {segment}")));
        }
        let remaining = self.capacity_blocks().saturating_sub(segment * SEGMENT_BLOCKS);
        // At most 2^24.
        let limit = remaining.min(SEGMENT_BLOCKS) as u32;
        Ok(Some(StoredSegment { segment, range, blocks: entry.blocks, limit }))
    }

    /// The stored size of a segment in bytes; `None` if it is empty.
    pub(super) fn stored_bytes(&self, bitmap: Bitmap, segment: u64) -> Option<usize> {
        self.entry(bitmap, segment).map(|entry| entry.length as usize)
    }

    fn entry(&self, bitmap: Bitmap, segment: u64) -> Option<IndexEntry> {
        let wanted = (bitmap.number(), segment);
        let key = |entry: &IndexEntry| (entry.bitmap, u64::from(entry.segment));
        let position = self.index.binary_search_by_key(&wanted, key).ok()?;
        Some(self.index[position])
    }

    fn capacity_blocks(&self) -> u64 {
        self.header.capacity_bytes / BLOCK_SIZE
    }

    fn entries(&self, bitmap: Bitmap) -> impl Iterator<Item = &IndexEntry> {
        self.index.iter().filter(move |entry| entry.bitmap == bitmap.number())
    }

    fn check_index(&self, size: u64) -> Result<()> {
        let segments = self.capacity_blocks().div_ceil(SEGMENT_BLOCKS);
        let sorted = self.index.is_sorted_by(|a, b| (a.bitmap, a.segment) < (b.bitmap, b.segment));
        let plausible = self.index.iter().all(|entry| {
            entry.bitmap <= 1
                && u64::from(entry.segment) < segments
                && entry.length as usize <= MAX_SEGMENT_BYTES
                && entry.offset.checked_add(u64::from(entry.length)).is_some_and(|end| end <= size)
        });
        if sorted && plausible { Ok(()) } else { Err(damaged("invalid index")) }
    }
}

/// A segment in a window.
#[derive(Debug, Clone)]
pub(super) struct StoredSegment {
    segment: u64,
    /// Its position in the window.
    range: Range<usize>,
    /// The number of its blocks.
    pub blocks: u64,
    /// All of its blocks are below this one.
    pub limit: u32,
}

/// A part of a record in memory. Small adjacent segments are read together.
#[derive(Debug, Default)]
pub(super) struct Window {
    start: u64,
    bytes: Vec<u8>,
    /// Minimum size of a read in bytes, if the file is large enough.
    minimum: usize,
}

impl Window {
    pub fn with_minimum_read(minimum: usize) -> Self {
        Self { minimum, ..Self::default() }
    }

    /// Discards the data but keeps the memory. Required before reading another record.
    pub fn clear(&mut self) {
        self.bytes.clear();
    }

    #[cfg(test)]
    pub fn capacity(&self) -> usize {
        self.bytes.capacity()
    }

    pub fn bytes(&self, stored: &StoredSegment) -> &[u8] {
        &self.bytes[stored.range.clone()]
    }

    /// The blocks of a segment.
    pub fn bitmap(&self, stored: &StoredSegment) -> Result<RoaringBitmap> {
        let mut rest = self.bytes(stored);
        let blocks = RoaringBitmap::deserialize_from(&mut rest)
            .map_err(|e| damaged(format_args!("segment {}: {e}", stored.segment)))?;
        let beyond = blocks.max().is_some_and(|max| max >= stored.limit);
        if !rest.is_empty() || beyond || blocks.len() != stored.blocks {
            return Err(stored.mismatch());
        }
        Ok(blocks)
    }

    /// Returns the position of a range of the file in the window, after reading it if necessary.
    fn read(&mut self, file: &File, offset: u64, length: usize) -> Result<Range<usize>> {
        let within = offset.checked_sub(self.start).map(|from| from as usize);
        if let Some(from) = within
            && from.checked_add(length).is_some_and(|end| end <= self.bytes.len())
        {
            return Ok(from..from + length);
        }
        let remaining = file.metadata().context(reading)?.len().saturating_sub(offset);
        let wanted = usize::try_from(remaining).unwrap_or(usize::MAX).min(self.minimum).max(length);
        self.start = offset;
        self.bytes.resize(wanted, 0);
        read_at(file, &mut self.bytes, offset)?;
        Ok(0..length)
    }
}

impl StoredSegment {
    /// The error for a segment that does not match the index.
    pub fn mismatch(&self) -> Error {
        damaged(format_args!("segment {} does not match the index", self.segment))
    }
}

fn read_header(file: &File, size: u64) -> Result<Header> {
    let mut start = [0; 16];
    if size < (start.len() + TRAILER_BYTES) as u64 {
        return Err(damaged("truncated"));
    }
    read_at(file, &mut start, 0)?;
    if start[..8] != MAGIC {
        return Err(damaged("not a change record"));
    }
    let version = u32_at(&start, 8);
    if version != VERSION {
        return Err(damaged(format_args!(
            "version {version} is not supported (supported: {VERSION})"
        )));
    }
    let length = u32_at(&start, 12) as usize;
    if length > MAX_HEADER_BYTES || (start.len() + length + 4) as u64 > size {
        return Err(damaged("invalid header"));
    }
    let mut bytes = vec![0; start.len() + length + 4];
    read_at(file, &mut bytes, 0)?;
    let (covered, checksum) = bytes.split_at(start.len() + length);
    if crc32c::crc32c(covered) != u32_at(checksum, 0) {
        return Err(damaged("bad checksum of the header"));
    }
    let header: Header = serde_json::from_slice(&covered[start.len()..])
        .map_err(|e| damaged(format_args!("header: {e}")))?;
    let capacity = header.capacity_bytes;
    if header.block_size != BLOCK_SIZE
        || capacity > MAX_VOLUME_BYTES
        || !capacity.is_multiple_of(BLOCK_SIZE)
    {
        return Err(damaged("invalid block size or capacity"));
    }
    Ok(header)
}

fn read_index(file: &File, size: u64) -> Result<Vec<IndexEntry>> {
    let mut trailer = [0; TRAILER_BYTES];
    let trailer_offset = size - TRAILER_BYTES as u64;
    read_at(file, &mut trailer, trailer_offset)?;
    if trailer[24..] != END_MAGIC || crc32c::crc32c(&trailer[..20]) != u32_at(&trailer, 20) {
        return Err(damaged("truncated, or a bad checksum of the trailer"));
    }
    let offset = u64_at(&trailer, 0);
    let entries = u32_at(&trailer, 8) as usize;
    let length = entries * INDEX_ENTRY_BYTES;
    if entries > MAX_INDEX_ENTRIES || offset.checked_add(length as u64) != Some(trailer_offset) {
        return Err(damaged("invalid index"));
    }
    let mut bytes = vec![0; length];
    read_at(file, &mut bytes, offset)?;
    if crc32c::crc32c(&bytes) != u32_at(&trailer, 12) {
        return Err(damaged("bad checksum of the index"));
    }
    let (entries, _) = bytes.as_chunks::<INDEX_ENTRY_BYTES>();
    Ok(entries.iter().map(IndexEntry::decode).collect())
}

fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> Result<()> {
    match file.read_exact_at(bytes, offset) {
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Err(damaged("truncated")),
        result => result.context(reading),
    }
}

fn reading() -> String {
    "reading a change record".to_owned()
}
