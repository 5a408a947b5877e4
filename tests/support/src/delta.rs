//! The property of an incremental backup: the base, with the reported extents of the target copied
//! onto it, equals the target, byte by byte.

use std::fs::File;
use std::os::unix::fs::FileExt;

use super::{BLOCK, MIB};

/// Asserts that `base` with `extents` (offset and length in bytes, ascending) copied from `target`
/// equals `target`. Without a base, the base is all zeros. Returns the number of blocks that differ
/// between base and target.
#[track_caller]
pub fn apply_and_compare(
    what: &str,
    base: Option<&File>,
    target: &File,
    extents: &[(u64, u64)],
    size: u64,
) -> u64 {
    let (mut is, mut copy) = (vec![0; MIB as usize], vec![0; MIB as usize]);
    let (mut differing, mut next) = (0, 0);
    for start in (0..size).step_by(MIB as usize) {
        let end = size.min(start + MIB);
        let (is, copy) = (&mut is[..(end - start) as usize], &mut copy[..(end - start) as usize]);
        target.read_exact_at(is, start).unwrap();
        match base {
            Some(base) => base.read_exact_at(copy, start).unwrap(),
            None => copy.fill(0),
        }
        if is == copy {
            continue;
        }
        differing += differing_blocks(is, copy).len() as u64;
        next += extents[next..].iter().take_while(|(from, length)| from + length <= start).count();
        for (from, length) in extents[next..].iter().take_while(|(from, _)| *from < end) {
            let range =
                (from.max(&start) - start) as usize..((from + length).min(end) - start) as usize;
            copy[range.clone()].copy_from_slice(&is[range]);
        }
        let missed = differing_blocks(is, copy);
        assert!(
            missed.is_empty(),
            "{what}: the delta misses {} blocks after offset {start}, the first at {}",
            missed.len(),
            start + missed[0] * BLOCK
        );
    }
    differing
}

/// The blocks in which two contents differ, ascending.
pub fn differing_blocks(a: &[u8], b: &[u8]) -> Vec<u64> {
    let pairs = a.chunks(BLOCK as usize).zip(b.chunks(BLOCK as usize));
    (0..).zip(pairs).filter(|(_, (a, b))| a != b).map(|(number, _)| number).collect()
}
