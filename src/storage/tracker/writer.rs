//! Writes a change record from ascending ranges, one segment in memory at a time.

use std::fs::File;
use std::io::{self, BufWriter, Write};

use roaring::RoaringBitmap;

use super::super::error::{Context, Error, Result};
use super::super::fail_point::reach;
use super::super::units::BlockRange;
use super::{
    Bitmap, END_MAGIC, Header, INDEX_ENTRY_BYTES, IndexEntry, MAGIC, SEGMENT_BLOCKS, VERSION,
};

/// A buffered file with its current length.
struct Output {
    file: BufWriter<File>,
    offset: u64,
}

impl Output {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.offset += bytes.len() as u64;
        Ok(())
    }
}

/// One of the two bitmaps under construction.
struct Building {
    bitmap: Bitmap,
    segment: u64,
    blocks: RoaringBitmap,
}

impl Building {
    fn new(bitmap: Bitmap) -> Self {
        Self { bitmap, segment: 0, blocks: RoaringBitmap::new() }
    }
}

pub struct RecordWriter {
    output: Output,
    capacity_blocks: u64,
    allocated: Building,
    changed: Building,
    index: Vec<IndexEntry>,
}

impl RecordWriter {
    /// Starts a record in an empty file.
    pub fn new(file: File, header: &Header) -> Result<Self> {
        let json = serde_json::to_vec(header)
            .map_err(|e| Error::Failed(format!("encoding a change record's header: {e}")))?;
        let mut bytes = Vec::with_capacity(json.len() + 20);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((json.len() as u32).to_le_bytes());
        bytes.extend(json);
        bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
        let mut output = Output { file: BufWriter::new(file), offset: 0 };
        output.append(&bytes).context(writing)?;
        Ok(Self {
            output,
            capacity_blocks: header.capacity_bytes.div_ceil(header.block_size),
            allocated: Building::new(Bitmap::Allocated),
            changed: Building::new(Bitmap::Changed),
            index: Vec::new(),
        })
    }

    /// Sets `range` in one of the bitmaps. The ranges of a bitmap must be in ascending order of
    /// start; adjacent ranges may share one block.
    pub fn set(&mut self, bitmap: Bitmap, range: BlockRange) -> Result<()> {
        let mut start = range.start.0;
        let end = range.end.0.min(self.capacity_blocks);
        while start < end {
            let segment = start / SEGMENT_BLOCKS;
            let base = segment * SEGMENT_BLOCKS;
            let stop = end.min(base + SEGMENT_BLOCKS);
            let building = match bitmap {
                Bitmap::Allocated => &mut self.allocated,
                Bitmap::Changed => &mut self.changed,
            };
            if segment != building.segment {
                if segment < building.segment {
                    return Err(Error::Failed(
                        "the ranges of a change record are out of order".into(),
                    ));
                }
                flush(&mut self.output, &mut self.index, building)?;
                building.segment = segment;
            }
            building.blocks.insert_range((start - base) as u32..(stop - base) as u32);
            start = stop;
        }
        Ok(())
    }

    /// Writes the index and makes the file durable.
    pub fn finish(mut self) -> Result<()> {
        flush(&mut self.output, &mut self.index, &mut self.allocated)?;
        flush(&mut self.output, &mut self.index, &mut self.changed)?;
        self.index.sort_by_key(|entry| (entry.bitmap, entry.segment));
        let index_offset = self.output.offset;
        let mut bytes = Vec::with_capacity(self.index.len() * INDEX_ENTRY_BYTES + 32);
        self.index.iter().for_each(|entry| entry.encode(&mut bytes));
        let checksum = crc32c::crc32c(&bytes);
        let mut trailer = Vec::with_capacity(32);
        trailer.extend(index_offset.to_le_bytes());
        trailer.extend((self.index.len() as u32).to_le_bytes());
        trailer.extend(checksum.to_le_bytes());
        trailer.extend([0; 4]);
        trailer.extend(crc32c::crc32c(&trailer).to_le_bytes());
        trailer.extend(END_MAGIC);
        bytes.extend(trailer);
        self.output.append(&bytes).context(writing)?;
        let file = self.output.file.into_inner().map_err(io::IntoInnerError::into_error);
        let file = file.context(writing)?;
        reach("record.written")?;
        file.sync_all().context(writing)?;
        reach("record.flushed")
    }
}

fn flush(output: &mut Output, index: &mut Vec<IndexEntry>, building: &mut Building) -> Result<()> {
    let mut blocks = std::mem::take(&mut building.blocks);
    if blocks.is_empty() {
        return Ok(());
    }
    blocks.optimize();
    let mut bytes = Vec::with_capacity(blocks.serialized_size());
    blocks.serialize_into(&mut bytes).context(writing)?;
    index.push(IndexEntry {
        bitmap: building.bitmap.number(),
        segment: building.segment as u32,
        offset: output.offset,
        length: bytes.len() as u32,
        checksum: crc32c::crc32c(&bytes),
        blocks: blocks.len(),
    });
    output.append(&bytes).context(writing)
}

fn writing() -> String {
    "writing a change record".to_owned()
}
