//! Change records: for each snapshot, the allocated blocks (`allocated`) and the blocks that
//! changed since its predecessor (`changed`), as roaring bitmaps in one immutable file with
//! checksums.
//!
//! Both bitmaps are divided into segments of [`SEGMENT_BLOCKS`] blocks (64 GiB of the volume), each
//! with a checksum and an index entry. A query reads only the segments that it reports, and needs
//! the memory of one segment. A volume of 64 TiB (2^34 blocks) exceeds one 32-bit bitmap, but not
//! many. docs/design/on-disk-format.md describes the layout.

mod block_map;
mod reader;
mod stored;
#[cfg(test)]
mod tests;
mod writer;

use serde::{Deserialize, Serialize};

pub use block_map::{BlockMap, Extents, Style};
pub use reader::RecordReader;
pub use writer::RecordWriter;

use super::error::Error;
use super::units::BLOCK_SIZE;

/// Blocks in a segment (2^24: 64 GiB; at most 2 MiB of bitmap).
pub const SEGMENT_BLOCKS: u64 = 1 << 24;

const MAGIC: [u8; 8] = *b"CBTRECRD";
const END_MAGIC: [u8; 8] = *b"CBTREEND";
const VERSION: u32 = 1;
const INDEX_ENTRY_BYTES: usize = 32;
const TRAILER_BYTES: usize = 32;
/// Limits that a reader enforces before it has verified a checksum.
const MAX_HEADER_BYTES: usize = 16 << 10;
const MAX_INDEX_ENTRIES: usize = 2 * 1024;
const MAX_SEGMENT_BYTES: usize = 4 << 20;

/// Identifies the snapshot of a record, so that a misplaced file is detected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    pub snapshot_id: String,
    pub volume_id: String,
    /// The snapshot that `changed` refers to; `None` at the start of a chain.
    pub predecessor: Option<String>,
    pub sequence: u64,
    pub block_size: u64,
    pub capacity_bytes: u64,
}

impl Header {
    pub fn new(
        snapshot_id: &str,
        volume_id: &str,
        predecessor: Option<&str>,
        sequence: u64,
        capacity_bytes: u64,
    ) -> Self {
        Self {
            snapshot_id: snapshot_id.to_owned(),
            volume_id: volume_id.to_owned(),
            predecessor: predecessor.map(str::to_owned),
            sequence,
            block_size: BLOCK_SIZE,
            capacity_bytes,
        }
    }
}

/// The two bitmaps of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bitmap {
    Allocated,
    Changed,
}

impl Bitmap {
    const fn number(self) -> u32 {
        match self {
            Self::Allocated => 0,
            Self::Changed => 1,
        }
    }
}

/// The location of a segment's bitmap in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct IndexEntry {
    bitmap: u32,
    segment: u32,
    offset: u64,
    length: u32,
    checksum: u32,
    /// The number of set blocks.
    blocks: u64,
}

impl IndexEntry {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend(self.bitmap.to_le_bytes());
        out.extend(self.segment.to_le_bytes());
        out.extend(self.offset.to_le_bytes());
        out.extend(self.length.to_le_bytes());
        out.extend(self.checksum.to_le_bytes());
        out.extend(self.blocks.to_le_bytes());
    }

    fn decode(bytes: &[u8; INDEX_ENTRY_BYTES]) -> Self {
        Self {
            bitmap: u32_at(bytes, 0),
            segment: u32_at(bytes, 4),
            offset: u64_at(bytes, 8),
            length: u32_at(bytes, 16),
            checksum: u32_at(bytes, 20),
            blocks: u64_at(bytes, 24),
        }
    }
}

/// Decodes the little-endian number at `at`. The caller's buffer is long enough.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

fn damaged(what: impl std::fmt::Display) -> Error {
    Error::Damaged(format!("change record: {what}; take a full backup and run `pool check`"))
}
