//! Peers of the driver: simple programs that do the same work by reading all data.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::kernel::{self, CpuClock};

/// The result and cost of a comparison of two files.
pub struct Compared {
    pub time: Duration,
    pub cpu: Duration,
    /// The 4 KiB blocks that differ.
    pub blocks: Vec<u64>,
}

/// Reads up to `limit` bytes of both files, `step` bytes at a time, and compares 4 KiB blocks.
///
/// Steps of 1 MiB are the best case of a single-threaded program. Steps of 4 KiB are the algorithm
/// of csi-driver-host-path's SnapshotMetadata: two reads and a comparison per block of the volume.
pub fn compare(base: &Path, target: &Path, step: usize, limit: u64) -> Result<Compared> {
    let begun = Instant::now();
    let clock = CpuClock::own();
    let (mut left, mut right) = (File::open(base)?.take(limit), File::open(target)?.take(limit));
    let (mut old, mut new) = (vec![0; step], vec![0; step]);
    let mut blocks = Vec::new();
    let mut first = 0;
    loop {
        let read = fill(&mut right, &mut new)?;
        if fill(&mut left, &mut old)? != read {
            anyhow::bail!("the files differ in length");
        }
        if read == 0 {
            break;
        }
        let pairs = old[..read].chunks(4096).zip(new[..read].chunks(4096));
        blocks.extend(pairs.zip(first..).filter(|((a, b), _)| a != b).map(|(_, block)| block));
        first += (read as u64).div_ceil(4096);
    }
    Ok(Compared { time: begun.elapsed(), cpu: clock.spent(), blocks })
}

fn fill(file: &mut impl Read, buffer: &mut [u8]) -> std::io::Result<usize> {
    let mut read = 0;
    while read < buffer.len() {
        match file.read(&mut buffer[read..])? {
            0 => break,
            bytes => read += bytes,
        }
    }
    Ok(read)
}

/// CreateSnapshot of csi-driver-host-path for a raw block volume: `cp`, without reflinks, which
/// most of its filesystems do not support.
pub fn copy(from: &Path, to: &Path) -> Result<Duration> {
    let begun = Instant::now();
    crate::harness::run(
        "cp",
        &["--reflink=never", crate::harness::text(from), crate::harness::text(to)],
    )?;
    Ok(begun.elapsed())
}

/// Copies bytes through a unix socket from one thread to another: without HTTP/2 and gRPC, with a
/// buffer of 256 KiB on both sides.
pub fn through_a_socket(data: &[u8]) -> Result<Duration> {
    const STEP: usize = 256 << 10;
    let (mut sender, mut receiver) = UnixStream::pair()?;
    let total = data.len();
    thread::scope(|scope| {
        let reading = scope.spawn(move || -> std::io::Result<usize> {
            let mut buffer = vec![0; STEP];
            let mut received = 0;
            loop {
                match receiver.read(&mut buffer)? {
                    0 => return Ok(received),
                    bytes => received += bytes,
                }
            }
        });
        let begun = Instant::now();
        for piece in data.chunks(STEP) {
            sender.write_all(piece)?;
        }
        drop(sender);
        let received = reading.join().ok().context("the reader panicked")??;
        anyhow::ensure!(received == total, "received {received} of {total} bytes");
        Ok(begun.elapsed())
    })
}

/// Drops both files from the page cache.
pub fn make_cold(files: [&Path; 2]) -> Result<()> {
    files.into_iter().try_for_each(kernel::uncache)
}
