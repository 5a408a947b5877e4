//! Writers that prepare volumes, and a writer that measures its stalls.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use support::random::Random;

use crate::kernel;

/// Number of passes that write a fragmented volume.
const PASSES: u64 = 16;

/// Fills a file with data sequentially, in few extents.
pub fn fill(path: &Path, bytes: u64) -> Result<()> {
    const CHUNK: u64 = 4 << 20;
    let file = kernel::open_direct(path)?;
    let mut data = kernel::pages((CHUNK / 4096) as usize, &mut Random::new(1));
    for offset in (0..bytes).step_by(CHUNK as usize) {
        // No two blocks of the file are equal.
        for (page, number) in data.iter_mut().zip(offset / 4096..) {
            page.0[..8].copy_from_slice(&number.to_le_bytes());
        }
        let pages = (bytes - offset).min(CHUNK) / 4096;
        kernel::write_pages(&file, &data[..pages as usize], offset)?;
    }
    Ok(file.sync_all()?)
}

/// Overwrites these blocks with new data, with direct I/O.
pub fn change(path: &Path, blocks: &[u64], seed: u64) -> Result<()> {
    let file = kernel::open_direct(path)?;
    let mut random = Random::new(seed);
    let mut page = kernel::pages(1, &mut random);
    for block in blocks {
        page[0].0[..8].copy_from_slice(&random.next_u64().to_le_bytes());
        kernel::write_pages(&file, &page, block * 4096)?;
    }
    Ok(file.sync_all()?)
}

/// Writes single blocks into a sparse file, so that each is a separate extent as after long use. It
/// writes in several passes, so that neighbours in the file are not adjacent on disk.
pub fn scatter(path: &Path, blocks: &[u64]) -> Result<()> {
    let file = File::options().write(true).open(path)?;
    let page = kernel::pages(1, &mut Random::new(7));
    for pass in 0..PASSES {
        for block in blocks.iter().filter(|block| Random::new(**block).next_u64() % PASSES == pass)
        {
            file.write_all_at(&page[0].0, block * 4096)?;
        }
        file.sync_all()?;
    }
    Ok(())
}

/// `count` blocks below `limit` with a gap before each, ascending, spread evenly but not regularly.
pub fn scattered(count: usize, limit: u64, seed: u64) -> Vec<u64> {
    let stride = limit / count as u64;
    let mut random = Random::new(seed);
    let gap = |random: &mut Random| random.below(stride.saturating_sub(1).max(1));
    (0..count as u64).map(|number| number * stride + gap(&mut random)).collect()
}

/// The result of an operation, and its effect on a concurrent writer.
pub struct Stalled<T> {
    pub result: T,
    /// The longest write that overlapped with the operation.
    pub longest: Duration,
    /// Number of writes that overlapped with the operation.
    pub writes: usize,
}

/// Writes 4 KiB with direct I/O to random `blocks`, one write after the other, while `operation`
/// runs.
pub fn write_during<T>(
    path: &Path,
    blocks: &[u64],
    seed: u64,
    operation: impl FnOnce() -> Result<T>,
) -> Result<Stalled<T>> {
    /// The writer starts this long before the operation.
    const LEAD: Duration = Duration::from_millis(200);
    let file = kernel::open_direct(path)?;
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let writing = scope.spawn(|| -> Result<Vec<(Instant, Instant)>> {
            let mut random = Random::new(seed);
            let mut page = kernel::pages(1, &mut random);
            let mut writes = Vec::new();
            while !done.load(Ordering::Relaxed) {
                let block = blocks[random.below(blocks.len() as u64) as usize];
                page[0].0[..8].copy_from_slice(&random.next_u64().to_le_bytes());
                let begun = Instant::now();
                kernel::write_pages(&file, &page, block * 4096)?;
                writes.push((begun, Instant::now()));
            }
            Ok(writes)
        });
        thread::sleep(LEAD);
        let begun = Instant::now();
        let result = operation();
        let ended = Instant::now();
        done.store(true, Ordering::Relaxed);
        let writes = writing.join().ok().context("the writer panicked")??;
        let during = || writes.iter().filter(|(from, to)| *to >= begun && *from <= ended);
        let longest = during().map(|(from, to)| *to - *from).max().unwrap_or_default();
        Ok(Stalled { result: result?, longest, writes: during().count() })
    })
}
