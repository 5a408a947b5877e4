//! Shared by the fuzz targets: files in memory, change records from fuzzed runs, and damage as
//! disks and users cause it.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use arbitrary::Arbitrary;
use csi_loopback::backend::tracker::{Bitmap, Header, RecordReader, RecordWriter, SEGMENT_BLOCKS};
use csi_loopback::backend::{
    BLOCK_SIZE, Block, BlockRange, ChainBreak, MAX_VOLUME_BYTES, Phase, Source, Volume,
    VolumeRequest,
};
use csi_loopback::fuzzing::Catalog;
use nix::sys::memfd::{MFdFlags, memfd_create};

/// A file in memory that holds `bytes`.
pub fn file_of(bytes: &[u8]) -> File {
    let mut file: File = memfd_create("fuzzed", MFdFlags::MFD_CLOEXEC).unwrap().into();
    file.write_all(bytes).unwrap();
    file
}

/// A path to open an open file again.
pub fn path_of(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// A run of blocks, near the start of one of the first segments, or near its end, where it may
/// continue in the next one.
#[derive(Debug, Clone, Arbitrary)]
pub struct Run {
    segment: u8,
    at_end: bool,
    gap: u8,
    length: u8,
}

/// The blocks of the runs below `capacity_blocks`.
pub fn blocks_of(runs: &[Run], capacity_blocks: u64) -> BTreeSet<u64> {
    let mut blocks = BTreeSet::new();
    for run in runs.iter().take(64) {
        let base = u64::from(run.segment % 4) * SEGMENT_BLOCKS;
        let base = if run.at_end { base + SEGMENT_BLOCKS - 100 } else { base };
        let start = base + u64::from(run.gap);
        blocks.extend((start..start + u64::from(run.length)).filter(|b| *b < capacity_blocks));
    }
    blocks
}

/// A capacity in whole blocks, up to the maximum of a volume.
pub fn capacity_of(blocks: u64) -> u64 {
    (1 + blocks % (MAX_VOLUME_BYTES / BLOCK_SIZE)) * BLOCK_SIZE
}

/// The bytes of a record with these blocks.
pub fn record_of(header: &Header, allocated: &BTreeSet<u64>, changed: &BTreeSet<u64>) -> Vec<u8> {
    let file = file_of(&[]);
    let mut writer = RecordWriter::new(file.try_clone().unwrap(), header).unwrap();
    for (bitmap, blocks) in [(Bitmap::Allocated, allocated), (Bitmap::Changed, changed)] {
        for block in blocks {
            writer.set(bitmap, BlockRange::new(Block(*block), Block(block + 1))).unwrap();
        }
    }
    writer.finish().unwrap();
    std::fs::read(path_of(&file)).unwrap()
}

/// All blocks of a bitmap, read through its segments.
pub fn read_blocks(
    record: &RecordReader,
    bitmap: Bitmap,
) -> csi_loopback::backend::Result<BTreeSet<u64>> {
    let mut blocks = BTreeSet::new();
    for segment in record.segments(bitmap) {
        let set = record.segment(bitmap, segment)?.expect("a listed segment exists");
        blocks.extend(set.iter().map(|block| segment * SEGMENT_BLOCKS + u64::from(block)));
    }
    Ok(blocks)
}

/// Damage of a file outside of the driver. At most a few bits flip: a 32-bit checksum detects that,
/// but cannot detect a forged file with a matching checksum.
#[derive(Debug, Clone, Arbitrary)]
pub struct Damage {
    flips: [Option<u32>; 2],
    zeroed: Option<(u32, u16)>,
    copied: Option<(u32, u32, u16)>,
    truncate_to: Option<u32>,
    appended: Option<u8>,
}

/// Damage affects sectors with content: most of a catalog is unused.
const SECTOR: usize = 512;

impl Damage {
    pub fn apply(&self, bytes: &mut Vec<u8>) {
        let length = bytes.len();
        let sectors: Vec<usize> = (0..length.div_ceil(SECTOR))
            .filter(|n| bytes[n * SECTOR..].iter().take(SECTOR).any(|byte| *byte != 0))
            .collect();
        let position = |at: u32| {
            let at = at as usize;
            (sectors[at / SECTOR % sectors.len()] * SECTOR + at % SECTOR).min(length - 1)
        };
        if let Some((at, count)) = self.zeroed {
            let at = position(at);
            bytes[at..length.min(at + usize::from(count))].fill(0);
        }
        if let Some((from, to, count)) = self.copied {
            let (from, to) = (position(from), position(to));
            let count = usize::from(count).min(length - from).min(length - to);
            bytes.copy_within(from..from + count, to);
        }
        for bit in self.flips.into_iter().flatten() {
            let at = position(bit / 8);
            bytes[at] ^= 1 << (bit % 8);
        }
        if let Some(at) = self.truncate_to {
            bytes.truncate(position(at));
        }
        if let Some(count) = self.appended {
            bytes.extend(std::iter::repeat_n(0xa5, usize::from(count)));
        }
    }
}

/// The row of a volume, one of several that differ in `state`.
pub fn volume(number: u64, state: u64) -> Volume {
    Volume {
        id: format!("vol-v{number:02}-{number:016x}"),
        name: format!("v{number:02}"),
        capacity_bytes: (1 + number) << 20,
        phase: Phase::Ready,
        change_tracking: true,
        change_precision: Default::default(),
        sector_size: Default::default(),
        format: None,
        source: number
            .is_multiple_of(3)
            .then(|| Source::Snapshot("snap-s-0123456789abcdef".to_owned())),
        request: VolumeRequest { required_bytes: 1 << 20, ..VolumeRequest::default() },
        next_sequence: 1 + state,
        newest_snapshot_at: None,
        baseline: None,
        chain_break: ChainBreak::First,
        lost_writes: None,
        growth_failure: None,
    }
}

fn commit(catalog: &Catalog, volumes: &[Volume]) {
    let old = catalog.read().unwrap().select(|_: &Volume| true).unwrap();
    let written = catalog.write(|tx| {
        old.iter().try_for_each(|volume| tx.remove::<Volume>(&volume.id))?;
        volumes.iter().try_for_each(|volume| tx.put(volume).and_then(|()| tx.claim_name(volume)))
    });
    written.unwrap();
}

/// A catalog with these volumes. Its file is deleted and remains open.
pub fn catalog(volumes: &[Volume]) -> Catalog {
    let directory = tempfile::tempdir().unwrap();
    let catalog = Catalog::open(&directory.path().join("catalog"), Default::default()).unwrap();
    commit(&catalog, volumes);
    catalog
}

/// A catalog that contained these sets of rows, one after the other: after a graceful end, and
/// after a crash.
pub fn catalog_bytes(history: &[&[Volume]]) -> (Vec<u8>, Vec<u8>) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("catalog");
    let catalog = Catalog::open(&path, Default::default()).unwrap();
    history.iter().for_each(|volumes| commit(&catalog, volumes));
    let crashed = std::fs::read(&path).unwrap();
    drop(catalog);
    (std::fs::read(&path).unwrap(), crashed)
}
