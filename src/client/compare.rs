//! The proof behind `snapshot verify`: two devices read from end to end beside the delta between
//! them. Pure: two readers, an iterator of extents, and nothing of CSI.

use std::io::Read;

use anyhow::{Context, Result, bail};

use crate::backend::{BLOCK_SIZE, Extent};

/// Bytes to read at a time; a multiple of the block size.
pub const PIECE: usize = 1 << 20;

/// How many missed blocks are told one by one.
const SHOWN: usize = 10;

/// One of the two images to compare.
#[derive(Debug)]
pub struct Side<R> {
    /// Read from its start to `bytes`.
    pub source: R,
    /// Size of the snapshot; what lies beyond counts as zeros.
    pub bytes: u64,
}

/// What a comparison found. Blocks are of 4 KiB.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Comparison {
    /// Bytes compared: the size of the target.
    pub bytes: u64,
    /// Blocks that the delta touches.
    pub reported: u64,
    /// Blocks among them whose bytes differ.
    pub differing: u64,
    /// Blocks that differ though the delta does not report them.
    pub missed: u64,
    /// Offsets in bytes of the first few of those.
    pub missed_at: Vec<u64>,
}

impl Comparison {
    /// Whether the base plus the delta is the target.
    pub const fn proven(&self) -> bool {
        self.missed == 0
    }
}

/// Reads both sides whole and holds every byte outside the delta against its counterpart. `check` is
/// asked once for each piece whether to go on.
///
/// # Errors
/// A side that ends before its size, a delta that ends with an error or reaches past the target, and
/// what `check` says.
pub fn compare<A: Read, B: Read>(
    mut base: Side<A>,
    mut target: Side<B>,
    delta: impl Iterator<Item = Result<Extent>>,
    mut check: impl FnMut() -> Result<()>,
) -> Result<Comparison> {
    let mut delta = Delta { extents: delta, current: None };
    let mut count = Count::default();
    let (mut a, mut b) = (vec![0; PIECE], vec![0; PIECE]);
    let mut offset = 0;
    while offset < target.bytes {
        check()?;
        let end = target.bytes.min(offset + PIECE as u64);
        let length = usize::try_from(end - offset)?;
        base.fill(&mut a[..length], offset).context("read the base")?;
        target.fill(&mut b[..length], offset).context("read the target")?;
        let mut at = offset;
        while at < end {
            let (until, reported) = delta.run(at, end)?;
            let bytes = usize::try_from(at - offset)?..usize::try_from(until - offset)?;
            count.run(at, &a[bytes.clone()], &b[bytes], reported);
            at = until;
        }
        offset = end;
    }
    if let Some(extent) = delta.seek(offset)? {
        bail!("the delta reaches past the end of the target, at {}", extent.offset);
    }
    Ok(Comparison { bytes: offset, ..count.found })
}

impl<R: Read> Side<R> {
    /// Fills `buffer` with the bytes from `offset` on, up to which the source was read before.
    fn fill(&mut self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let left = usize::try_from(self.bytes.saturating_sub(offset)).unwrap_or(usize::MAX);
        let (data, tail) = buffer.split_at_mut(left.min(buffer.len()));
        let at = || format!("the bytes from {offset} on, of {}", self.bytes);
        self.source.read_exact(data).with_context(at)?;
        tail.fill(0);
        Ok(())
    }
}

/// The delta, consumed in step with the bytes.
struct Delta<I> {
    extents: I,
    /// The extent that was last taken from `extents`.
    current: Option<Extent>,
}

impl<I: Iterator<Item = Result<Extent>>> Delta<I> {
    /// The first extent that ends after `at`. Asked with ascending offsets.
    fn seek(&mut self, at: u64) -> Result<Option<Extent>> {
        while self.current.is_none_or(|extent| extent.end() <= at) {
            match self.extents.next() {
                Some(extent) => self.current = Some(extent?),
                None => return Ok(None),
            }
        }
        Ok(self.current)
    }

    /// Where the run that starts at `at` ends, at most `end`, and whether the delta reports it.
    fn run(&mut self, at: u64, end: u64) -> Result<(u64, bool)> {
        Ok(match self.seek(at)? {
            None => (end, false),
            Some(extent) if extent.offset > at => (extent.offset.min(end), false),
            Some(extent) => (extent.end().min(end), true),
        })
    }
}

/// Counts blocks, each once, also where extents begin or end inside a block.
#[derive(Debug, Default)]
struct Count {
    found: Comparison,
    /// The first block not yet counted as reported, as differing, as missed.
    reported_to: u64,
    differing_to: u64,
    missed_to: u64,
}

impl Count {
    /// Takes the bytes of a run, which starts at `offset`, of both sides.
    fn run(&mut self, offset: u64, a: &[u8], b: &[u8], reported: bool) {
        let end = offset + a.len() as u64;
        if reported {
            let first = self.reported_to.max(offset / BLOCK_SIZE);
            self.reported_to = end.div_ceil(BLOCK_SIZE);
            self.found.reported += self.reported_to.saturating_sub(first);
        }
        if a == b {
            return;
        }
        let mut at = offset;
        let (mut a, mut b) = (a, b);
        while !a.is_empty() {
            // At most a block's length, so it fits.
            let length = ((BLOCK_SIZE - at % BLOCK_SIZE) as usize).min(a.len());
            let (block_a, block_b);
            (block_a, a) = a.split_at(length);
            (block_b, b) = b.split_at(length);
            if block_a != block_b {
                self.differs(at / BLOCK_SIZE, reported);
            }
            at += length as u64;
        }
    }

    fn differs(&mut self, block: u64, reported: bool) {
        let found = &mut self.found;
        if reported {
            if block >= self.differing_to {
                self.differing_to = block + 1;
                found.differing += 1;
            }
        } else if block >= self.missed_to {
            self.missed_to = block + 1;
            found.missed += 1;
            if found.missed_at.len() < SHOWN {
                found.missed_at.push(block * BLOCK_SIZE);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use anyhow::anyhow;
    use proptest::prelude::*;

    use super::*;

    const BLOCK: usize = BLOCK_SIZE as usize;

    fn side(image: &[u8]) -> Side<&[u8]> {
        Side { source: image, bytes: image.len() as u64 }
    }

    fn check(base: &[u8], target: &[u8], delta: &[(u64, u64)]) -> Result<Comparison> {
        let delta = delta.iter().map(|&(offset, length)| Ok(Extent { offset, length }));
        compare(side(base), side(target), delta, || Ok(()))
    }

    /// An image of blocks that each hold one value.
    fn image(blocks: &[u8]) -> Vec<u8> {
        blocks.iter().map(|value| [*value; BLOCK]).collect::<Vec<_>>().concat()
    }

    #[test]
    fn what_the_delta_reports_may_differ_and_nothing_else() {
        let (base, target) = (image(&[1, 1, 1, 1]), image(&[1, 2, 1, 3]));
        let found = check(&base, &target, &[(4096, 8192), (12288, 4096)]).unwrap();
        assert!(found.proven());
        let expected =
            Comparison { bytes: 16384, reported: 3, differing: 2, ..Comparison::default() };
        assert_eq!(found, expected);

        let found = check(&base, &target, &[(4096, 4096)]).unwrap();
        assert!(!found.proven());
        assert_eq!((found.missed, found.missed_at), (1, vec![12288]));
    }

    #[test]
    fn growth_counts_as_zeros_in_the_base() {
        let (base, target) = (image(&[1]), image(&[1, 0, 5]));
        assert!(check(&base, &target, &[(8192, 4096)]).unwrap().proven());
        assert_eq!(check(&base, &target, &[]).unwrap().missed_at, [8192]);
    }

    #[test]
    fn a_single_byte_in_the_last_odd_piece_is_found() {
        let base = vec![7; PIECE + 5000];
        let mut target = base.clone();
        target[PIECE + 4999] = 8;
        let found = check(&base, &target, &[(0, PIECE as u64 + 4096)]).unwrap();
        assert_eq!(found.missed_at, [PIECE as u64 + 4096]);
    }

    #[test]
    fn only_the_first_missed_blocks_are_listed_but_all_are_counted() {
        let (base, target) = (image(&[0; 300]), image(&[1; 300]));
        let found = check(&base, &target, &[]).unwrap();
        assert_eq!((found.missed, found.missed_at.len()), (300, SHOWN));
    }

    #[test]
    fn extents_inside_a_block_count_it_once() {
        let (base, target) = (image(&[0]), image(&[1]));
        let found = check(&base, &target, &[(0, 512), (1024, 512)]).unwrap();
        assert_eq!((found.reported, found.differing, found.missed), (1, 1, 1));
    }

    #[test]
    fn a_comparison_that_could_not_be_finished_is_an_error() {
        let (base, target) = (image(&[1, 1]), image(&[1, 1]));
        let long = Side { source: &base[..4096], bytes: 8192 };
        assert!(compare(long, side(&target), std::iter::empty(), || Ok(())).is_err());
        let broken = [Ok(Extent { offset: 0, length: 8192 }), Err(anyhow!("cut"))];
        let error = compare(side(&base), side(&target), broken.into_iter(), || Ok(()));
        assert_eq!(error.unwrap_err().to_string(), "cut");
        assert!(check(&base, &target, &[(8192, 4096)]).is_err());
        let stop = || Err(anyhow!("interrupted"));
        assert!(compare(side(&base), side(&target), std::iter::empty(), stop).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]
        #[test]
        fn every_block_is_judged_as_a_plain_comparison_judges_it(
            base in proptest::collection::vec(0..3u8, 1..600),
            grown in proptest::collection::vec(0..3u8, 0..20),
            writes in proptest::collection::vec((0..600usize, 0..3u8), 0..40),
            report in proptest::collection::btree_set(0..620u64, 0..60),
        ) {
            let mut target = base.clone();
            target.extend(&grown);
            let blocks = target.len() as u64;
            for (block, value) in writes {
                if let Some(slot) = target.get_mut(block) {
                    *slot = value;
                }
            }
            let report: BTreeSet<_> = report.into_iter().filter(|block| *block < blocks).collect();
            let delta: Vec<_> = report.iter().map(|block| (block * 4096, 4096)).collect();
            let found = check(&image(&base), &image(&target), &delta).unwrap();

            let differs: BTreeSet<_> = (0..blocks)
                .filter(|block| {
                    let at = *block as usize;
                    base.get(at).copied().unwrap_or(0) != target[at]
                })
                .collect();
            let missed: Vec<_> = differs.difference(&report).map(|block| block * 4096).collect();
            prop_assert_eq!(found.reported, report.len() as u64);
            prop_assert_eq!(found.differing, differs.intersection(&report).count() as u64);
            prop_assert_eq!(found.missed, missed.len() as u64);
            prop_assert_eq!(&found.missed_at[..], &missed[..missed.len().min(SHOWN)]);
        }
    }
}
