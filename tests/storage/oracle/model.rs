//! The mirror of volumes and snapshots: what each of their blocks holds.

use std::collections::BTreeSet;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::files::Files;
use support::BLOCK;

/// Numbers of blocks.
pub type Blocks = BTreeSet<u64>;

/// What a block holds, as far as telling blocks apart goes.
type Print = u32;

/// Bytes that are read from a device at a time.
const PIECE: usize = 4 << 20;

const ZEROS: [u8; BLOCK as usize] = [0; BLOCK as usize];

fn print_of(block: &[u8]) -> Print {
    crc32c::crc32c(block)
}

fn prints_of(bytes: &[u8]) -> impl Iterator<Item = Print> {
    bytes.chunks(BLOCK as usize).map(print_of)
}

/// The blocks that lie in a range of bytes, or partly so.
pub fn blocks_of(range: &Range<u64>) -> Range<u64> {
    range.start / BLOCK..range.end.div_ceil(BLOCK)
}

/// What the blocks of a volume hold at one moment.
#[derive(Clone)]
pub struct Content {
    prints: Vec<Print>,
    /// Which of them were written, be it with zeros, and not erased since. Not known of a volume that
    /// a filesystem is mounted from.
    data: Option<Vec<bool>>,
}

impl Content {
    /// Of a volume's bytes.
    fn of(bytes: &[u8]) -> Self {
        Self { prints: prints_of(bytes).collect(), data: None }
    }

    /// Of a device, which may be large: past the page cache, piece by piece.
    pub fn read(device: &Path) -> Self {
        let file = File::options().read(true).custom_flags(libc::O_DIRECT).open(device).unwrap();
        let mut buffer = vec![0; PIECE + BLOCK as usize];
        let start = buffer.as_ptr().align_offset(BLOCK as usize);
        let piece = &mut buffer[start..start + PIECE];
        let mut prints = Vec::new();
        loop {
            let length = file.read_at(piece, prints.len() as u64 * BLOCK).unwrap();
            if length == 0 {
                return Self { prints, data: None };
            }
            assert_eq!(length as u64 % BLOCK, 0, "half a block is read from {}", device.display());
            prints.extend(prints_of(&piece[..length]));
        }
    }

    pub fn capacity(&self) -> u64 {
        self.prints.len() as u64 * BLOCK
    }

    /// The blocks that hold something else than zeros.
    pub fn non_zero(&self) -> Blocks {
        let zero = print_of(&ZEROS);
        let blocks = self.prints.iter().enumerate().filter(|(_, print)| **print != zero);
        blocks.map(|(block, _)| block as u64).collect()
    }

    /// The blocks that hold data, where that is known.
    pub fn data(&self) -> Option<Blocks> {
        let data = self.data.as_ref()?.iter().enumerate();
        Some(data.filter(|(_, data)| **data).map(|(block, _)| block as u64).collect())
    }

    /// The blocks in which this one is not what `old` is; past the end of that there are zeros.
    pub fn differing_from(&self, old: &Self) -> Blocks {
        let zero = print_of(&ZEROS);
        let was = |block: usize| old.prints.get(block).copied().unwrap_or(zero);
        let blocks = self.prints.iter().enumerate();
        blocks
            .filter(|(block, print)| was(*block) != **print)
            .map(|(block, _)| block as u64)
            .collect()
    }

    pub fn holds_the_same(&self, other: &Self) -> bool {
        self.prints == other.prints
    }
}

/// A raw volume: each byte of it.
#[derive(Clone)]
pub struct Image {
    bytes: Vec<u8>,
    content: Content,
}

impl Image {
    pub fn empty(size: u64) -> Self {
        let content = Content { prints: Vec::new(), data: Some(Vec::new()) };
        let mut image = Self { bytes: Vec::new(), content };
        image.grow(size);
        image
    }

    /// Of what was read, which has to be `expected`.
    pub fn of(bytes: Vec<u8>, expected: &Content) -> Self {
        assert!(Content::of(&bytes).holds_the_same(expected), "a volume holds something else");
        Self { bytes, content: expected.clone() }
    }

    pub fn grow(&mut self, size: u64) {
        self.bytes.resize(size as usize, 0);
        let blocks = (size / BLOCK) as usize;
        self.content.prints.resize(blocks, print_of(&ZEROS));
        self.content.data.iter_mut().for_each(|data| data.resize(blocks, false));
    }

    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        self.put(offset, bytes, true);
    }

    /// `range` is of whole blocks.
    pub fn erase(&mut self, range: &Range<u64>) {
        self.put(range.start, &vec![0; (range.end - range.start) as usize], false);
    }

    fn put(&mut self, offset: u64, bytes: &[u8], is_data: bool) {
        let range = offset..offset + bytes.len() as u64;
        self.bytes[range.start as usize..range.end as usize].copy_from_slice(bytes);
        for block in blocks_of(&range) {
            let at = (block * BLOCK) as usize;
            self.content.prints[block as usize] = print_of(&self.bytes[at..at + BLOCK as usize]);
            self.content.data.iter_mut().for_each(|data| data[block as usize] = is_data);
        }
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub fn content(&self) -> &Content {
        &self.content
    }
}

/// What a volume is used for, with what has to be in it.
#[derive(Clone)]
pub enum Inside {
    Raw(Image),
    Mounted(Files),
}

/// A snapshot that was cut, perhaps deleted since.
pub struct Cut {
    pub id: String,
    pub group: Option<String>,
    pub deleted: bool,
    /// Whether its record may have gone since, so that it is no base any more.
    pub perhaps_forgotten: bool,
    /// Whether its id may have gone, too.
    pub perhaps_dropped: bool,
    /// Between cuts of one chain changes are known, across chains they are not.
    pub chain: u32,
    pub content: Content,
    /// The blocks that may be reported as changed since the cut before, where that is known.
    pub touched: Option<Blocks>,
    /// The files in it, of a mounted volume.
    pub files: Option<Files>,
}

/// A volume that is in use, with its snapshots, oldest first.
pub struct Volume {
    pub id: String,
    pub capacity: u64,
    /// Its device, or what is mounted from it.
    pub at: PathBuf,
    pub inside: Inside,
    pub cuts: Vec<Cut>,
    /// Blocks of a raw volume that were written or erased since the last cut.
    pub touched: Blocks,
    pub tracking: bool,
    /// That of the next cut.
    pub chain: u32,
}

impl Volume {
    /// The indexes of snapshots that exist.
    pub fn alive(&self) -> Vec<usize> {
        (0..self.cuts.len()).filter(|cut| !self.cuts[*cut].deleted).collect()
    }

    /// The blocks that the next cut may report: those touched, unless they were no data before
    /// and are none now.
    pub fn may_be_reported(&self, new: &Content) -> Option<Blocks> {
        let before = match self.cuts.last() {
            Some(cut) => cut.content.data()?,
            None => Blocks::new(),
        };
        let now = new.data()?;
        let is_data = |block: &u64| before.contains(block) || now.contains(block);
        Some(self.touched.iter().copied().filter(is_data).collect())
    }
}
