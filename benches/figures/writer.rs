//! Writers: those that make a volume what a row needs, and one that measures how long it is held up.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::kernel::{self, Random};

/// How often neighbours of a fragmented volume were written apart.
const PASSES: u64 = 16;

/// Fills a file with data, from its start to its end, in few extents.
pub fn fill(path: &Path, bytes: u64) -> Result<()> {
    const PIECE: u64 = 4 << 20;
    let file = kernel::open_direct(path)?;
    let mut data = kernel::pages((PIECE / 4096) as usize, &mut Random(1));
    for offset in (0..bytes).step_by(PIECE as usize) {
        // No two blocks of the file are equal.
        for (page, number) in data.iter_mut().zip(offset / 4096..) {
            page.0[..8].copy_from_slice(&number.to_le_bytes());
        }
        let pages = (bytes - offset).min(PIECE) / 4096;
        kernel::write_pages(&file, &data[..pages as usize], offset)?;
    }
    Ok(file.sync_all()?)
}

/// Overwrites these blocks with something new, past the page cache.
pub fn change(path: &Path, blocks: &[u64], seed: u64) -> Result<()> {
    let file = kernel::open_direct(path)?;
    let mut random = Random(seed);
    let mut page = kernel::pages(1, &mut random);
    for block in blocks {
        page[0].0[..8].copy_from_slice(&random.next().to_le_bytes());
        kernel::write_pages(&file, &page, block * 4096)?;
    }
    Ok(file.sync_all()?)
}

/// Writes single blocks into a sparse file so that each is an extent of its own, as after long use: in
/// several passes, so that neighbours in the file are none on disk.
pub fn scatter(path: &Path, blocks: &[u64]) -> Result<()> {
    let file = File::options().write(true).open(path)?;
    let page = kernel::pages(1, &mut Random(7));
    for pass in 0..PASSES {
        for block in blocks.iter().filter(|block| Random(**block).next() % PASSES == pass) {
            file.write_all_at(&page[0].0, block * 4096)?;
        }
        file.sync_all()?;
    }
    Ok(())
}

/// `count` blocks below `limit` with a gap before each, ascending, spread evenly but not regularly.
pub fn scattered(count: usize, limit: u64, seed: u64) -> Vec<u64> {
    let room = limit / count as u64;
    let mut random = Random(seed);
    let gap = |random: &mut Random| random.below(room.saturating_sub(1).max(1));
    (0..count as u64).map(|number| number * room + gap(&mut random)).collect()
}

/// What a writer met while something happened.
pub struct Stalled<T> {
    pub result: T,
    /// The longest that one write took, of those under way while it happened.
    pub longest: Duration,
    /// Writes during it.
    pub writes: usize,
}

/// Writes 4 KiB at a time to random ones of `blocks`, directly, each as soon as the one before is done,
/// while `happens` runs.
pub fn beside<T>(
    path: &Path,
    blocks: &[u64],
    seed: u64,
    happens: impl FnOnce() -> Result<T>,
) -> Result<Stalled<T>> {
    /// The writer runs so long before.
    const LEAD: Duration = Duration::from_millis(200);
    let file = kernel::open_direct(path)?;
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let writing = scope.spawn(|| -> Result<Vec<(Instant, Instant)>> {
            let mut random = Random(seed);
            let mut page = kernel::pages(1, &mut random);
            let mut writes = Vec::new();
            while !done.load(Ordering::Relaxed) {
                let block = blocks[random.below(blocks.len() as u64) as usize];
                page[0].0[..8].copy_from_slice(&random.next().to_le_bytes());
                let begun = Instant::now();
                kernel::write_pages(&file, &page, block * 4096)?;
                writes.push((begun, Instant::now()));
            }
            Ok(writes)
        });
        thread::sleep(LEAD);
        let begun = Instant::now();
        let result = happens();
        let ended = Instant::now();
        done.store(true, Ordering::Relaxed);
        let writes = writing.join().ok().context("the writer panicked")??;
        let during = || writes.iter().filter(|(from, to)| *to >= begun && *from <= ended);
        let longest = during().map(|(from, to)| *to - *from).max().unwrap_or_default();
        Ok(Stalled { result: result?, longest, writes: during().count() })
    })
}
