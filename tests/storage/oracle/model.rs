//! The mirror of volumes and snapshots: the content of each block.

use std::collections::BTreeSet;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::files::Files;
use support::BLOCK;

/// Numbers of blocks.
pub type Blocks = BTreeSet<u64>;

/// A checksum of a block's content.
type Print = u32;

/// Size of a single read from a device, in bytes.
const PIECE: usize = 4 << 20;

const ZEROS: [u8; BLOCK as usize] = [0; BLOCK as usize];

fn print_of(block: &[u8]) -> Print {
    crc32c::crc32c(block)
}

fn prints_of(bytes: &[u8]) -> impl Iterator<Item = Print> {
    bytes.chunks(BLOCK as usize).map(print_of)
}

/// The blocks that overlap a range of bytes.
pub fn blocks_of(range: &Range<u64>) -> Range<u64> {
    range.start / BLOCK..range.end.div_ceil(BLOCK)
}

/// The contents of a volume at one point in time.
#[derive(Clone)]
pub struct Content {
    prints: Vec<Print>,
    /// The written blocks (also with zeros) that were not erased since. `None` for a mounted
    /// volume.
    data: Option<Vec<bool>>,
}

impl Content {
    /// From the bytes of a volume.
    fn of(bytes: &[u8]) -> Self {
        Self { prints: prints_of(bytes).collect(), data: None }
    }

    /// Reads a device in pieces with direct I/O, because it may be large.
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

    /// The blocks that are not zero.
    pub fn non_zero(&self) -> Blocks {
        let zero = print_of(&ZEROS);
        let blocks = self.prints.iter().enumerate().filter(|(_, print)| **print != zero);
        blocks.map(|(block, _)| block as u64).collect()
    }

    /// The blocks with data, if known.
    pub fn data(&self) -> Option<Blocks> {
        let data = self.data.as_ref()?.iter().enumerate();
        Some(data.filter(|(_, data)| **data).map(|(block, _)| block as u64).collect())
    }

    /// The blocks that differ from `old`, which is zero past its end.
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

/// The bytes of a raw volume.
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

    /// From bytes that were read, which must match `expected`.
    pub fn of(bytes: Vec<u8>, expected: &Content) -> Self {
        assert!(Content::of(&bytes).holds_the_same(expected), "the content of a volume differs");
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

    /// `range` consists of whole blocks.
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

/// The use of a volume and its expected content.
#[derive(Clone)]
pub enum Inside {
    Raw(Image),
    Mounted(Files),
}

/// A snapshot, possibly deleted.
pub struct SnapshotState {
    pub id: String,
    pub group: Option<String>,
    pub deleted: bool,
    /// Whether its record may be dropped, so that it is no longer a base.
    pub perhaps_forgotten: bool,
    /// Whether its id may also be dropped.
    pub perhaps_dropped: bool,
    /// The number of the chain. Changes are known only within a chain.
    pub chain: u32,
    pub content: Content,
    /// The blocks that may be reported as changed since the previous snapshot, if known.
    pub touched: Option<Blocks>,
    /// The files of a mounted volume.
    pub files: Option<Files>,
}

/// A volume in use, with its snapshots, oldest first.
pub struct Volume {
    pub id: String,
    pub capacity: u64,
    /// Its device or mount path.
    pub at: PathBuf,
    pub inside: Inside,
    pub snapshots: Vec<SnapshotState>,
    /// Blocks of a raw volume that were written or erased since the last snapshot.
    pub touched: Blocks,
    pub tracking: bool,
    /// The chain of the next snapshot.
    pub chain: u32,
}

impl Volume {
    /// The indexes of snapshots that exist.
    pub fn alive(&self) -> Vec<usize> {
        (0..self.snapshots.len()).filter(|snapshot| !self.snapshots[*snapshot].deleted).collect()
    }

    /// The blocks that the next snapshot may report: the touched ones, unless they had no data
    /// before and have none now.
    pub fn may_be_reported(&self, new: &Content) -> Option<Blocks> {
        let before = match self.snapshots.last() {
            Some(snapshot) => snapshot.content.data()?,
            None => Blocks::new(),
        };
        let now = new.data()?;
        let is_data = |block: &u64| before.contains(block) || now.contains(block);
        Some(self.touched.iter().copied().filter(is_data).collect())
    }
}
