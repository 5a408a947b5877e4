//! Change records with more extents than a benchmark can write to a disk. While the driver is
//! stopped, the product's record writer replaces the record of a real snapshot of a sparse volume.

use std::fs::{self, File};

use anyhow::{Context, Result};
use csi_loopback::backend::tracker::{Bitmap, RecordReader, RecordWriter};
use csi_loopback::backend::{Block, BlockRange};
use support::random::Random;

use crate::harness::Driver;

/// Highly fragmented extents: 1 to 3 blocks long, 1 to 4 blocks apart.
#[derive(Debug, Clone)]
pub struct Pattern {
    random: Random,
    next: u64,
    remaining: u64,
}

impl Pattern {
    pub fn new(extents: u64) -> Self {
        Self { random: Random::new(11), next: 0, remaining: extents }
    }

    /// The size in bytes of a volume with this number of extents.
    pub fn capacity(extents: u64) -> u64 {
        // On average 4.5 blocks each.
        (extents * 5 * 4096).next_multiple_of(1 << 30)
    }

    /// Offset and length in bytes.
    pub fn bytes(self) -> impl Iterator<Item = (u64, u64)> {
        self.map(|(start, end)| (start * 4096, (end - start) * 4096))
    }
}

impl Iterator for Pattern {
    /// Start and end (exclusive) in blocks.
    type Item = (u64, u64);

    fn next(&mut self) -> Option<(u64, u64)> {
        self.remaining = self.remaining.checked_sub(1)?;
        let random = self.random.next_u64();
        let start = self.next + 1 + random % 4;
        self.next = start + 1 + (random >> 32) % 3;
        Some((start, self.next))
    }
}

/// A driver with two snapshots of a sparse volume, base and target, whose delta has this number of
/// extents.
pub fn driver_with_delta(extents: u64) -> Result<(Driver, String, String)> {
    let mut driver = Driver::start(64 << 30)?;
    let volume = driver.volume("sparse", Pattern::capacity(extents))?;
    let base = driver.snapshot("base", &volume)?;
    let target = driver.snapshot("target", &volume)?;
    driver.stop()?;
    let path = driver.pool.record(&target);
    let header = RecordReader::open(File::open(&path)?)?.header().clone();
    let made = path.with_extension("part");
    let mut writer = RecordWriter::new(File::create_new(&made)?, &header)?;
    for (start, end) in Pattern::new(extents) {
        writer.set(Bitmap::Changed, BlockRange::new(Block(start), Block(end)))?;
    }
    writer.finish().context("writing a record")?;
    fs::rename(&made, &path)?;
    driver.restart()?;
    Ok((driver, base, target))
}
