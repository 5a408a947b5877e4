//! The content of test volumes, as a model: which pattern each sector holds. All bytes of a pattern
//! differ from zero and from the bytes of all other patterns at the same place. Therefore a range
//! of metadata is exact for a sector if and only if it is exact for each of its bytes, and no driver
//! that works in bytes is accused.

use std::ops::Range;
use std::sync::Arc;

/// The unit of the model in bytes: the smallest unit that a block device writes.
pub const SECTOR: u64 = 512;
/// Sectors of a chunk, which images share.
const CHUNK: usize = 2048;
/// The last number of a pattern.
const PATTERNS: u8 = 250;

/// The content of a volume at one point in time. Clones share what they have in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// In bytes.
    size: u64,
    /// The pattern of each sector; 0 means zeros. A chunk that is missing has only zeros.
    chunks: Vec<Option<Arc<[u8; CHUNK]>>>,
}

impl Image {
    /// A volume of zeros.
    pub fn new(size: u64) -> Self {
        Self { size, chunks: vec![None; chunks(size)] }
    }

    /// In bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Adds zeros at the end.
    pub fn grow(&mut self, size: u64) {
        self.size = self.size.max(size);
        self.chunks.resize(chunks(self.size), None);
    }

    /// Notes that a range of bytes, whose ends are multiples of a sector, has this pattern.
    pub fn set(&mut self, range: Range<u64>, pattern: u8) {
        for sector in range.start / SECTOR..range.end.min(self.size) / SECTOR {
            let (chunk, at) = place(sector);
            if let Some(chunk) = self.chunks.get_mut(chunk) {
                Arc::make_mut(chunk.get_or_insert_with(|| Arc::new([0; CHUNK])))[at] = pattern;
            }
        }
    }

    /// The pattern of a sector; zeros follow the end.
    pub fn pattern(&self, sector: u64) -> u8 {
        let (chunk, at) = place(sector);
        self.chunks.get(chunk).and_then(Option::as_ref).map_or(0, |chunk| chunk[at])
    }

    /// The number of sectors.
    pub fn sectors(&self) -> u64 {
        self.size / SECTOR
    }

    /// The ranges of bytes whose content differs from zeros.
    pub fn data(&self) -> Ranges {
        self.differences(&Self::new(0))
    }

    /// The ranges of bytes whose content differs from that of `base`. Zeros follow the end of a
    /// smaller base.
    pub fn differences(&self, base: &Self) -> Ranges {
        let mut ranges = Ranges::default();
        for chunk in 0..self.chunks.len() {
            let of = |image: &Self| image.chunks.get(chunk).cloned().flatten();
            let (old, new) = (of(base), of(self));
            if old == new {
                continue;
            }
            let first = (chunk * CHUNK) as u64;
            for sector in first..(first + CHUNK as u64).min(self.sectors()) {
                if self.pattern(sector) != base.pattern(sector) {
                    ranges.add(sector * SECTOR..(sector + 1) * SECTOR);
                }
            }
        }
        ranges
    }
}

fn chunks(size: u64) -> usize {
    size.div_ceil(SECTOR * CHUNK as u64) as usize
}

fn place(sector: u64) -> (usize, usize) {
    ((sector / CHUNK as u64) as usize, (sector % CHUNK as u64) as usize)
}

/// Ascending ranges of bytes that do not touch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ranges(pub Vec<Range<u64>>);

impl Ranges {
    /// Adds a range that starts at or after the start of the last one.
    pub fn add(&mut self, range: Range<u64>) {
        match self.0.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ if range.is_empty() => {}
            _ => self.0.push(range),
        }
    }

    /// Ranges in any order.
    pub fn of(mut ranges: Vec<Range<u64>>) -> Self {
        ranges.sort_by_key(|range| range.start);
        let mut all = Self::default();
        ranges.into_iter().for_each(|range| all.add(range));
        all
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The number of bytes.
    pub fn bytes(&self) -> u64 {
        self.0.iter().map(|range| range.end - range.start).sum()
    }

    /// What is in these ranges and not in the others.
    pub fn without(&self, others: &Self) -> Self {
        let mut rest = Self::default();
        let mut others = others.0.iter().peekable();
        for range in &self.0 {
            let mut start = range.start;
            while let Some(other) = others.peek().filter(|other| other.start < range.end) {
                rest.add(start..other.start.max(start));
                start = start.max(other.end);
                if other.end > range.end {
                    break;
                }
                others.next();
            }
            rest.add(start.min(range.end)..range.end);
        }
        rest
    }

    /// The part within a range.
    pub fn within(&self, whole: Range<u64>) -> Self {
        let clip = |range: &Range<u64>| range.start.max(whole.start)..range.end.min(whole.end);
        Self(self.0.iter().map(clip).filter(|range| !range.is_empty()).collect())
    }
}

/// The bytes of patterns, from a seed.
#[derive(Debug, Clone, Copy)]
pub struct Patterns {
    pub seed: u64,
}

impl Patterns {
    /// The number of the pattern that follows.
    pub const fn next(number: u8) -> u8 {
        if number >= PATTERNS { 1 } else { number + 1 }
    }

    /// Fills `buffer`, which starts at this offset, with a pattern; 0 means zeros.
    pub fn fill(&self, pattern: u8, offset: u64, buffer: &mut [u8]) {
        if pattern == 0 {
            buffer.fill(0);
            return;
        }
        let mut word = mixed(self.seed ^ (offset / 8));
        for (byte, at) in buffer.iter_mut().zip(offset..) {
            if at % 8 == 0 {
                word = mixed(self.seed ^ (at / 8));
            }
            let local = (word >> (at % 8 * 8)) as u8;
            *byte = 1 + ((u16::from(local) + u16::from(pattern)) % 255) as u8;
        }
    }
}

/// SplitMix64: a number whose bits depend on all bits of `value`.
pub const fn mixed(value: u64) -> u64 {
    let mut value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

#[cfg(test)]
// One range of bytes, not its numbers.
#[expect(clippy::single_range_in_vec_init)]
mod tests {
    use super::*;

    #[test]
    fn patterns_differ_in_each_byte_and_have_no_zeros() {
        let patterns = Patterns { seed: 7 };
        let all: Vec<Vec<u8>> = (1..=PATTERNS)
            .map(|number| {
                let mut bytes = vec![0; 4096];
                patterns.fill(number, 8192, &mut bytes);
                bytes
            })
            .collect();
        for at in 0..4096 {
            let mut seen: Vec<u8> = all.iter().map(|bytes| bytes[at]).collect();
            seen.sort_unstable();
            seen.dedup();
            assert!(seen.len() == all.len() && seen[0] > 0, "byte {at}");
        }
    }

    #[test]
    fn differences_are_exact_across_chunks_and_sizes() {
        let chunk = SECTOR * CHUNK as u64;
        let mut base = Image::new(2 * chunk);
        base.set(0..1024, 3);
        let mut image = base.clone();
        image.grow(3 * chunk + SECTOR);
        image.set(512..1024, 3);
        image.set(1024..1536, 4);
        image.set(2 * chunk - 512..2 * chunk + 512, 5);
        image.set(3 * chunk..3 * chunk + SECTOR, 6);
        let expected =
            [1024..1536, 2 * chunk - 512..2 * chunk + 512, 3 * chunk..3 * chunk + SECTOR];
        assert_eq!(image.differences(&base).0, expected);
        image.set(0..512, 0);
        assert_eq!(image.differences(&base).0[0], 0..512);
    }

    #[test]
    fn ranges_without_others_are_the_rest() {
        let ranges = Ranges(vec![0..10, 20..30, 40..50]);
        let others = Ranges(vec![2..4, 5..25, 28..45]);
        assert_eq!(ranges.without(&others).0, [0..2, 4..5, 25..28, 45..50]);
        assert_eq!(ranges.without(&Ranges::default()), ranges);
        assert!(ranges.without(&Ranges(vec![0..100])).is_empty());
        assert_eq!(ranges.within(25..45).0, [25..30, 40..45]);
        assert_eq!(Ranges::of(vec![20..30, 0..10, 5..20]).0, [0..30]);
    }
}
