//! Finds changes in units of 4 KiB if the pool's blocks are larger. Copy-on-write copies whole
//! blocks, so an extent map shows a block of 64 KiB as changed after a write of 4 KiB. Therefore
//! ranges that differ in the maps are compared by content, in batches of limited size and on all
//! processors.
//!
//! Unreadable data is treated as changed.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use tracing::warn;

use super::super::direct::{Aligned, DirectFile};
use super::super::error::{Context, Result};
use super::super::extents::{self, Finding};
use super::super::units::BLOCK_SIZE;

/// The size of a piece that one thread compares, in bytes. It needs twice that much memory.
const PIECE_BYTES: u64 = 1 << 20;

/// Maximum changed bytes in a batch.
const BATCH_BYTES: u64 = 64 << 20;

/// Maximum findings in a batch.
const BATCH_FINDINGS: usize = 16_384;

/// Maximum number of threads: more do not make a disk faster.
const MAX_WORKERS: usize = 8;

/// Like [`extents::compare`], but reports only blocks of 4 KiB with different content as changed.
/// Whether a range is allocated follows the filesystem's blocks.
pub fn compare(
    old: (&File, u64),
    new: (&File, u64),
    report: &mut dyn FnMut(Finding) -> Result<()>,
) -> Result<()> {
    let contents = Contents { old: Content::open(old)?, new: Content::open(new)? };
    let mut batch = Batch::default();
    extents::compare(Some(old), new, |finding| batch.add(finding, &contents, report))?;
    batch.flush(&contents, report)
}

/// A file to compare, read with direct I/O.
struct Content {
    file: DirectFile,
    bytes: u64,
}

impl Content {
    fn open((file, bytes): (&File, u64)) -> Result<Self> {
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let file = DirectFile::open_for_reading(&path)
            .context(|| "opening a snapshot's data to compare it".to_owned())?;
        Ok(Self { file, bytes })
    }

    fn read<'b>(&self, to: &'b mut Aligned, offset: u64, length: usize) -> io::Result<&'b [u8]> {
        let out = &mut to.as_mut_slice()[..length];
        self.file.read_pages(out, offset, self.bytes)?;
        Ok(out)
    }
}

struct Contents {
    old: Content,
    new: Content,
}

/// A part of a finding that one thread compares: at most [`PIECE_BYTES`], in bytes.
type Piece = Range<u64>;

/// Whether each block of a piece differs.
type Differs = Vec<bool>;

impl Contents {
    /// `buffers` are for the old and the new file.
    fn differs(&self, piece: &Piece, buffers: &mut [Aligned; 2]) -> io::Result<Differs> {
        let length = (piece.end - piece.start) as usize;
        let [old, new] = buffers;
        let old = self.old.read(old, piece.start, length)?;
        let new = self.new.read(new, piece.start, length)?;
        let blocks = |bytes| <[u8]>::chunks(bytes, BLOCK_SIZE as usize);
        Ok(blocks(old).zip(blocks(new)).map(|(old, new)| old != new).collect())
    }

    /// Compares pieces on all processors.
    fn compare(&self, pieces: &[Piece]) -> Vec<Differs> {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let next = AtomicUsize::new(0);
        let results: Mutex<Vec<Differs>> = Mutex::new(vec![Differs::new(); pieces.len()]);
        let work = || {
            let mut buffers = [(); 2].map(|()| Aligned::zeroed(PIECE_BYTES as usize));
            while let index = next.fetch_add(1, Ordering::Relaxed)
                && let Some(piece) = pieces.get(index)
            {
                let differs = self.differs(piece, &mut buffers).unwrap_or_else(|error| {
                    let Piece { start, end } = *piece;
                    warn!(start, end, %error, "failed to compare data; treating it as changed");
                    vec![true; (end - start).div_ceil(BLOCK_SIZE) as usize]
                });
                results.lock().unwrap_or_else(PoisonError::into_inner)[index] = differs;
            }
        };
        thread::scope(|scope| {
            for _ in 1..processors.min(MAX_WORKERS).min(pieces.len()) {
                scope.spawn(work);
            }
            work();
        });
        results.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Findings that are not yet reported.
#[derive(Default)]
struct Batch {
    findings: Vec<Finding>,
    changed_bytes: u64,
}

impl Batch {
    fn add(
        &mut self,
        mut finding: Finding,
        contents: &Contents,
        report: &mut dyn FnMut(Finding) -> Result<()>,
    ) -> Result<()> {
        while finding.changed && finding.end - finding.start > BATCH_BYTES - self.changed_bytes {
            let end = finding.start + BATCH_BYTES - self.changed_bytes;
            if end > finding.start {
                self.push(Finding { end, ..finding });
                finding.start = end;
            }
            self.flush(contents, report)?;
        }
        self.push(finding);
        if self.findings.len() >= BATCH_FINDINGS { self.flush(contents, report) } else { Ok(()) }
    }

    fn push(&mut self, finding: Finding) {
        if finding.changed {
            self.changed_bytes += finding.end - finding.start;
        }
        match self.findings.last_mut() {
            Some(last) if last.continues(&finding) => last.end = finding.end,
            _ => self.findings.push(finding),
        }
    }

    /// Compares the changed findings, and reports all findings of the batch.
    fn flush(
        &mut self,
        contents: &Contents,
        report: &mut dyn FnMut(Finding) -> Result<()>,
    ) -> Result<()> {
        let findings = std::mem::take(&mut self.findings);
        self.changed_bytes = 0;
        let changed = findings.iter().filter(|finding| finding.changed);
        let all: Vec<Piece> = changed.flat_map(pieces).collect();
        let mut compared = contents.compare(&all).into_iter();
        for finding in findings {
            if !finding.changed {
                report(finding)?;
                continue;
            }
            for (piece, differs) in pieces(&finding).zip(compared.by_ref()) {
                report_piece(finding, piece, &differs, report)?;
            }
        }
        Ok(())
    }
}

fn pieces(finding: &Finding) -> impl Iterator<Item = Piece> + use<> {
    let Finding { start, end, .. } = *finding;
    (start..end).step_by(PIECE_BYTES as usize).map(move |start| start..end.min(start + PIECE_BYTES))
}

/// Reports runs of different blocks, and runs of equal allocated blocks.
fn report_piece(
    finding: Finding,
    piece: Piece,
    differs: &[bool],
    report: &mut dyn FnMut(Finding) -> Result<()>,
) -> Result<()> {
    let mut start = piece.start;
    for run in differs.chunk_by(|a, b| a == b) {
        let end = piece.end.min(start + run.len() as u64 * BLOCK_SIZE);
        let changed = run.first() == Some(&true);
        if changed || finding.allocated {
            report(Finding { start, end, changed, ..finding })?;
        }
        start = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;

    fn file(bytes: u64, written: &[(u64, u8)]) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(bytes).unwrap();
        for &(offset, byte) in written {
            file.write_all_at(&[byte], offset).unwrap();
        }
        file
    }

    fn finding(start: u64, end: u64, allocated: bool, changed: bool) -> Finding {
        Finding { start, end, allocated, changed }
    }

    /// The reported findings for these input findings.
    fn compared(old: (&File, u64), new: (&File, u64), findings: &[Finding]) -> Vec<Finding> {
        let contents =
            Contents { old: Content::open(old).unwrap(), new: Content::open(new).unwrap() };
        let mut reported: Vec<Finding> = Vec::new();
        let mut report = |finding: Finding| {
            match reported.last_mut() {
                Some(last) if last.continues(&finding) => last.end = finding.end,
                _ => reported.push(finding),
            }
            Ok(())
        };
        let mut batch = Batch::default();
        for finding in findings {
            batch.add(*finding, &contents, &mut report).unwrap();
        }
        batch.flush(&contents, &mut report).unwrap();
        reported
    }

    #[test]
    fn only_the_different_part_of_a_copied_block_is_changed() {
        let size = 256 * KIB;
        let old = file(size, &[(70 * KIB, 1)]);
        let new = file(size, &[(70 * KIB, 1), (81 * KIB, 2), (130 * KIB, 3)]);
        let findings = [
            finding(0, 64 * KIB, true, false),
            finding(64 * KIB, 128 * KIB, true, true),
            finding(128 * KIB, 192 * KIB, false, true),
        ];
        let expected = [
            finding(0, 80 * KIB, true, false),
            finding(80 * KIB, 84 * KIB, true, true),
            finding(84 * KIB, 128 * KIB, true, false),
            finding(128 * KIB, 132 * KIB, false, true),
        ];
        assert_eq!(compared((&old, size), (&new, size), &findings), expected);
    }

    #[test]
    fn data_past_the_old_file_is_compared_with_zeros() {
        let (old, new) = (file(64 * KIB, &[(0, 1)]), file(128 * KIB, &[(0, 1), (100 * KIB, 1)]));
        // As after a growth of the volume.
        let findings = [finding(0, 128 * KIB, true, true)];
        let reported = compared((&old, 64 * KIB), (&new, 128 * KIB), &findings);
        let changed: Vec<_> = reported.iter().filter(|finding| finding.changed).collect();
        assert_eq!(changed, [&finding(100 * KIB, 104 * KIB, true, true)]);
    }

    #[test]
    fn more_than_one_batch_is_compared_completely() {
        let size = 2 * BATCH_BYTES + 3 * MIB;
        let places: Vec<u64> = (0..size / MIB).map(|number| number * MIB + 516 * KIB).collect();
        let written: Vec<(u64, u8)> = places.iter().map(|place| (*place, 7)).collect();
        let (old, new) = (file(size, &[]), file(size, &written));
        let reported = compared((&old, size), (&new, size), &[finding(0, size, false, true)]);
        let expected: Vec<_> =
            places.iter().map(|place| finding(*place, place + 4 * KIB, false, true)).collect();
        assert_eq!(reported, expected);
    }

    #[test]
    fn unreadable_data_is_treated_as_changed() {
        let (old, new) = (file(64 * KIB, &[]), file(64 * KIB, &[]));
        let findings = [finding(0, 128 * KIB, true, true)];
        // The file is shorter than the size of the snapshot.
        let reported = compared((&old, 128 * KIB), (&new, 128 * KIB), &findings);
        assert_eq!(reported, findings);
    }
}
