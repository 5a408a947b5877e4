//! The units of the backend: a bare `u64` counts bytes, a [`Block`] counts 4 KiB blocks, an
//! [`Extent`] is a range of bytes and a [`BlockRange`] a range of blocks. They are different types
//! so that a factor of 4096 cannot be forgotten.

use std::ops::Range;

/// Bytes in a block: the granularity of change records, and the sector size of every loop device.
pub const BLOCK_SIZE: u64 = 4096;

/// The largest volume, in bytes (64 TiB, 2^34 blocks).
pub const MAX_VOLUME_BYTES: u64 = 64 << 40;

/// The smallest volume, in bytes.
pub const MIN_VOLUME_BYTES: u64 = 1 << 20;

/// The index of a block, in blocks of [`BLOCK_SIZE`] from the start of the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Block(pub u64);

impl Block {
    /// The block that holds the byte at `offset`.
    pub const fn holding(offset: u64) -> Self {
        Self(offset / BLOCK_SIZE)
    }

    /// The first block that starts at or after the byte at `offset`.
    pub const fn at_or_after(offset: u64) -> Self {
        Self(offset.div_ceil(BLOCK_SIZE))
    }

    /// Where the block starts, in bytes.
    pub const fn offset(self) -> u64 {
        self.0 * BLOCK_SIZE
    }
}

/// A half-open range of blocks; empty when `start >= end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockRange {
    pub start: Block,
    pub end: Block,
}

impl BlockRange {
    pub const fn new(start: Block, end: Block) -> Self {
        Self { start, end }
    }

    /// The smallest range of whole blocks that covers the bytes `range`: rounds outwards, since
    /// reporting too much is safe and too little is not.
    pub const fn covering(range: Range<u64>) -> Self {
        Self { start: Block::holding(range.start), end: Block::at_or_after(range.end) }
    }

    pub const fn is_empty(&self) -> bool {
        self.start.0 >= self.end.0
    }

    /// The number of blocks in the range.
    pub const fn blocks(&self) -> u64 {
        self.end.0.saturating_sub(self.start.0)
    }

    /// The same range in bytes.
    pub const fn extent(&self) -> Extent {
        Extent { offset: self.start.offset(), length: self.blocks() * BLOCK_SIZE }
    }
}

/// A range of bytes of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Extent {
    /// Start, in bytes.
    pub offset: u64,
    /// Length, in bytes.
    pub length: u64,
}

impl Extent {
    /// The first byte after the extent.
    pub const fn end(&self) -> u64 {
        self.offset + self.length
    }
}
