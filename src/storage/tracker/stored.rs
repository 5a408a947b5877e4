//! Iterates over the runs of a segment in its stored form, without building a bitmap: most results
//! come from one record, and sparse changes of a large volume have many containers of one block.
//!
//! The format is roaring's portable format (RoaringFormatSpec): a header with the key (the upper 16
//! bits of the blocks) and the number of blocks of each container, then the containers: an array of
//! 16-bit numbers, a bitmap of 8 KiB, or runs. The checksum is already verified, but everything
//! that could cause a missing block is validated again.

use std::ops::Range;

use super::super::error::{Error, Result};
use super::damaged;

const COOKIE: u16 = 12_346;
const COOKIE_WITH_RUNS: u16 = 12_347;
/// A header with runs contains offsets if the segment has at least this many containers.
const OFFSETS_FROM: usize = 4;
/// Maximum number of blocks in an array container.
const ARRAY_MAX: usize = 4096;
const BITMAP_WORDS: usize = 1024;

/// The position of the iteration. Each call takes the bytes, so that the caller can reuse its
/// buffer.
#[derive(Debug, Default)]
pub struct Cursor {
    containers: usize,
    next: usize,
    /// Offset of the flags that mark run containers, if any.
    flags_at: Option<usize>,
    keys_at: usize,
    /// Offset of the next container.
    data_at: usize,
    /// Blocks before this one are skipped.
    first: u32,
    /// The upper half of the blocks of the current container.
    base: u32,
    container: Container,
    /// The number of blocks so far, from the containers, or from the header for skipped containers.
    found: u64,
}

#[derive(Debug)]
enum Container {
    Array { at: usize, end: usize },
    Bitmap { at: usize, bit: u32 },
    Runs { at: usize, end: usize },
}

impl Default for Container {
    fn default() -> Self {
        Self::Array { at: 0, end: 0 }
    }
}

impl Cursor {
    /// Starts at the first block at or after `first`.
    pub fn new(bytes: &[u8], first: u32) -> Result<Self> {
        let cookie = half(bytes, 0)?;
        let mut cursor = Self { first, ..Self::default() };
        if cookie == COOKIE_WITH_RUNS {
            cursor.containers = usize::from(half(bytes, 2)?) + 1;
            cursor.flags_at = Some(4);
            cursor.keys_at = 4 + cursor.containers.div_ceil(8);
        } else if cookie == COOKIE && half(bytes, 2)? == 0 {
            cursor.containers = usize::from(half(bytes, 4)?) | usize::from(half(bytes, 6)?) << 16;
            cursor.keys_at = 8;
        } else {
            return Err(malformed());
        }
        if cursor.containers > 1 << 16 {
            return Err(malformed());
        }
        let has_offsets = cursor.flags_at.is_none() || cursor.containers >= OFFSETS_FROM;
        let entry = if has_offsets { 4 + 4 } else { 4 };
        cursor.data_at = cursor.keys_at + cursor.containers * entry;
        Ok(cursor)
    }

    /// The next run of blocks, ascending. Adjacent runs of two containers are not merged.
    #[inline]
    pub fn next(&mut self, bytes: &[u8]) -> Result<Option<Range<u32>>> {
        loop {
            let Some(run) = self.next_in_container(bytes)? else {
                if !self.open(bytes)? {
                    return Ok(None);
                }
                continue;
            };
            self.found += u64::from(run.end - run.start);
            let run = self.base + run.start..self.base + run.end;
            if run.end > self.first {
                return Ok(Some(run.start.max(self.first)..run.end));
            }
        }
    }

    /// At the end: the number of blocks, including skipped ones.
    pub fn found(&self) -> u64 {
        self.found
    }

    /// Moves to the next container. Returns false at the end.
    fn open(&mut self, bytes: &[u8]) -> Result<bool> {
        if self.next == self.containers {
            return if self.data_at == bytes.len() { Ok(false) } else { Err(malformed()) };
        }
        let (index, at) = (self.next, self.data_at);
        let key = u32::from(half(bytes, self.keys_at + 4 * index)?) << 16;
        let blocks = usize::from(half(bytes, self.keys_at + 4 * index + 2)?) + 1;
        if index > 0 && key <= self.base {
            return Err(malformed());
        }
        let has_runs = match self.flags_at {
            Some(flags) => byte(bytes, flags + index / 8)? >> (index % 8) & 1 == 1,
            None => false,
        };
        (self.container, self.data_at) = if has_runs {
            let end = at + 2 + 4 * usize::from(half(bytes, at)?);
            (Container::Runs { at: at + 2, end }, end)
        } else if blocks <= ARRAY_MAX {
            let end = at + 2 * blocks;
            (Container::Array { at, end }, end)
        } else {
            (Container::Bitmap { at, bit: 0 }, at + 8 * BITMAP_WORDS)
        };
        if self.data_at > bytes.len() {
            return Err(malformed());
        }
        self.base = key;
        self.next += 1;
        if key + BITS <= self.first {
            // All of its blocks are before `first`.
            self.container = Container::default();
            self.found += blocks as u64;
        }
        Ok(true)
    }

    /// The next run of the container, relative to its first block.
    #[inline]
    fn next_in_container(&mut self, bytes: &[u8]) -> Result<Option<Range<u32>>> {
        match &mut self.container {
            Container::Array { at, end } => {
                if at == end {
                    return Ok(None);
                }
                let start = u32::from(half(bytes, *at)?);
                let mut last = start;
                *at += 2;
                while at < end {
                    let block = u32::from(half(bytes, *at)?);
                    if block != last + 1 {
                        if block <= last {
                            return Err(malformed());
                        }
                        break;
                    }
                    last = block;
                    *at += 2;
                }
                Ok(Some(start..last + 1))
            }
            Container::Bitmap { at, bit } => {
                let Some(start) = next_bit(bytes, *at, *bit, true)? else { return Ok(None) };
                *bit = next_bit(bytes, *at, start, false)?.unwrap_or(BITS);
                Ok(Some(start..*bit))
            }
            Container::Runs { at, end } => {
                if at == end {
                    return Ok(None);
                }
                let start = u32::from(half(bytes, *at)?);
                let stop = start + u32::from(half(bytes, *at + 2)?) + 1;
                *at += 4;
                // The next run must not begin before the end of this one.
                if stop > BITS || (*at < *end && u32::from(half(bytes, *at)?) < stop) {
                    return Err(malformed());
                }
                Ok(Some(start..stop))
            }
        }
    }
}

const BITS: u32 = 1 << 16;

/// The first set (or clear) bit from `from` on in the bitmap at `at`.
#[inline]
fn next_bit(bytes: &[u8], at: usize, from: u32, set: bool) -> Result<Option<u32>> {
    let mut index = from / 64;
    let mut mask = u64::MAX << (from % 64);
    while index < BITMAP_WORDS as u32 {
        let word = word(bytes, at + 8 * index as usize)?;
        let wanted = if set { word } else { !word } & mask;
        if wanted != 0 {
            return Ok(Some(index * 64 + wanted.trailing_zeros()));
        }
        mask = u64::MAX;
        index += 1;
    }
    Ok(None)
}

fn byte(bytes: &[u8], at: usize) -> Result<u8> {
    bytes.get(at).copied().ok_or_else(malformed)
}

#[inline]
fn half(bytes: &[u8], at: usize) -> Result<u16> {
    match bytes.get(at..).and_then(<[u8]>::first_chunk) {
        Some(half) => Ok(u16::from_le_bytes(*half)),
        None => Err(malformed()),
    }
}

#[inline]
fn word(bytes: &[u8], at: usize) -> Result<u64> {
    match bytes.get(at..).and_then(<[u8]>::first_chunk) {
        Some(word) => Ok(u64::from_le_bytes(*word)),
        None => Err(malformed()),
    }
}

#[cold]
fn malformed() -> Error {
    damaged("a segment is not a roaring bitmap")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use roaring::RoaringBitmap;

    use super::*;

    fn stored(blocks: &RoaringBitmap, optimized: bool) -> Vec<u8> {
        let mut blocks = blocks.clone();
        if optimized {
            blocks.optimize();
        }
        let mut bytes = Vec::new();
        blocks.serialize_into(&mut bytes).unwrap();
        bytes
    }

    fn walk(bytes: &[u8], first: u32) -> Result<(RoaringBitmap, u64)> {
        let (mut cursor, mut all) = (Cursor::new(bytes, first)?, RoaringBitmap::new());
        let mut end = 0;
        while let Some(run) = cursor.next(bytes)? {
            assert!(run.start >= end && run.start < run.end, "{run:?} after {end}");
            end = run.end;
            all.insert_range(run);
        }
        Ok((all, cursor.found()))
    }

    /// Runs of different lengths and distances, for all three kinds of containers.
    fn bitmaps() -> impl Strategy<Value = RoaringBitmap> {
        let gap = prop_oneof![4 => 1_u32..4, 2 => 1_u32..3000, 1 => 1_u32..400_000];
        let length = prop_oneof![6 => 1_u32..3, 2 => 1_u32..200, 1 => 1_u32..200_000];
        prop::collection::vec((gap, length, 1_u32..4000), 0..20).prop_map(|parts| {
            let (mut blocks, mut at) = (RoaringBitmap::new(), 0);
            for (gap, length, times) in parts {
                // Many short runs make arrays and bitmaps, few long ones make run containers.
                for _ in 0..if length < 3 { times } else { 1 } {
                    at += gap;
                    blocks.insert_range(at..(at + length).min(1 << 24));
                    at = (at + length).min(1 << 24);
                }
            }
            blocks
        })
    }

    proptest! {
        #[test]
        fn stored_segments_yield_the_blocks_of_their_bitmap(
            blocks in bitmaps(),
            first in 0_u32..1 << 24,
            optimized: bool,
        ) {
            let bytes = stored(&blocks, optimized);
            let (whole, found) = walk(&bytes, 0).unwrap();
            prop_assert_eq!(found, blocks.len());
            prop_assert_eq!(&whole, &blocks);
            let mut rest = blocks.clone();
            rest.remove_range(0..first);
            let (walked, found) = walk(&bytes, first).unwrap();
            prop_assert_eq!((walked, found), (rest, blocks.len()));
        }

        #[test]
        fn truncated_or_extended_segments_are_rejected(blocks in bitmaps(), cut in any::<prop::sample::Index>()) {
            let mut bytes = stored(&blocks, true);
            prop_assert!(walk(&bytes[..cut.index(bytes.len())], 0).is_err());
            bytes.push(0);
            prop_assert!(walk(&bytes, 0).is_err());
        }

        #[test]
        fn arbitrary_bytes_yield_a_result_or_an_error(
            blocks in bitmaps(),
            flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        ) {
            let mut bytes = stored(&blocks, true);
            for (at, flip) in flips {
                let at = at.index(bytes.len());
                bytes[at] ^= flip;
            }
            // Bytes that roaring accepts have the same result here, or are rejected.
            if let (Ok((walked, _)), Ok(read)) = (walk(&bytes, 0), RoaringBitmap::deserialize_from(&*bytes)) {
                prop_assert_eq!(walked, read);
            }
        }
    }
}
