//! The comparison of `snapshot verify`: two images and the listing between them. Pure: two readers,
//! an iterator of extents, and no CSI.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, bail};

use storage::{BLOCK_SIZE, Extent};

/// Bytes of one read; a multiple of the block size.
pub const PIECE: usize = 1 << 20;

/// How many missed blocks are reported one by one.
const SHOWN: usize = 10;

/// An image that can be read at any offset.
pub trait ReadAt {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
}

impl ReadAt for File {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, buffer, offset)
    }
}

/// One of the two images to compare.
#[derive(Debug)]
pub struct Side<R> {
    /// `None`: an image without bytes.
    pub source: Option<R>,
    /// Size of the snapshot; bytes beyond it are zero.
    pub bytes: u64,
}

impl<R> Side<R> {
    /// An image of zeros: the base of a listing of allocated blocks.
    pub const fn zeros() -> Self {
        Self { source: None, bytes: 0 }
    }

    pub const fn new(source: R, bytes: u64) -> Self {
        Self { source: Some(source), bytes }
    }
}

/// Which pieces to compare.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sample {
    /// In hundredths of a percent; `None` for all pieces.
    pub share: Option<u16>,
    pub seed: u64,
}

impl Sample {
    /// Whether the piece with this number belongs to the sample.
    fn contains(self, piece: u64) -> bool {
        let Some(share) = self.share else { return true };
        // splitmix64: evenly distributed, and the same for the same seed.
        let mut mixed = self.seed.wrapping_add(piece.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % 10_000 < u64::from(share)
    }
}

/// The result of a comparison. Blocks have 4 KiB.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Comparison {
    /// Bytes compared: the size of the target, or of the sample.
    pub bytes: u64,
    /// Blocks that the listing touches.
    pub reported: u64,
    /// Reported blocks whose bytes differ.
    pub differing: u64,
    /// Blocks that differ and are not reported.
    pub missed: u64,
    /// Offsets in bytes of the first missed blocks.
    pub missed_at: Vec<u64>,
}

impl Comparison {
    /// Whether the base with the listed blocks of the target is the target.
    pub const fn proven(&self) -> bool {
        self.missed == 0
    }
}

/// Compares all bytes outside the listing, or those of the sample. `check` gets the offset of each
/// piece and the number of compared bytes, and decides whether to continue.
///
/// # Errors
/// An image ends before its size, the listing ends with an error or extends beyond the target,
/// `check` fails.
pub fn compare<R: ReadAt>(
    base: &Side<R>,
    target: &Side<R>,
    listing: impl Iterator<Item = Result<Extent>>,
    sample: Sample,
    mut check: impl FnMut(u64, u64) -> Result<()>,
) -> Result<Comparison> {
    let mut listing = Listing { extents: listing, current: None };
    let mut count = Count::default();
    let (mut a, mut b) = (vec![0; PIECE], vec![0; PIECE]);
    let mut offset = 0;
    while offset < target.bytes {
        check(offset, count.found.bytes)?;
        let end = target.bytes.min(offset + PIECE as u64);
        if sample.contains(offset / PIECE as u64) {
            let length = usize::try_from(end - offset)?;
            base.fill(&mut a[..length], offset).context("read the base")?;
            target.fill(&mut b[..length], offset).context("read the target")?;
            let mut at = offset;
            while at < end {
                let (until, reported) = listing.run(at, end)?;
                let bytes = usize::try_from(at - offset)?..usize::try_from(until - offset)?;
                count.run(at, &a[bytes.clone()], &b[bytes], reported);
                at = until;
            }
            count.found.bytes += end - offset;
        }
        offset = end;
    }
    if let Some(extent) = listing.seek(offset)? {
        bail!("the listing extends beyond the end of the target, at byte {}", extent.offset);
    }
    Ok(count.found)
}

impl<R: ReadAt> Side<R> {
    /// Fills `buffer` with the bytes from `offset`.
    fn fill(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let remaining = usize::try_from(self.bytes.saturating_sub(offset)).unwrap_or(usize::MAX);
        let (data, tail) = buffer.split_at_mut(remaining.min(buffer.len()));
        if let Some(source) = self.source.as_ref().filter(|_| !data.is_empty()) {
            let length = data.len();
            source
                .read_exact_at(data, offset)
                .with_context(|| format!("{length} bytes at {offset} of {}", self.bytes))?;
        } else {
            data.fill(0);
        }
        tail.fill(0);
        Ok(())
    }
}

/// The listing, consumed together with the bytes.
struct Listing<I> {
    extents: I,
    /// The latest of `extents`.
    current: Option<Extent>,
}

impl<I: Iterator<Item = Result<Extent>>> Listing<I> {
    /// The first extent that ends after `at`; offsets ascend from call to call.
    fn seek(&mut self, at: u64) -> Result<Option<Extent>> {
        while self.current.is_none_or(|extent| extent.end() <= at) {
            match self.extents.next() {
                Some(extent) => self.current = Some(extent?),
                None => return Ok(None),
            }
        }
        Ok(self.current)
    }

    /// The end of the run that starts at `at`, at most `end`, and whether the listing contains the
    /// run.
    fn run(&mut self, at: u64, end: u64) -> Result<(u64, bool)> {
        Ok(match self.seek(at)? {
            None => (end, false),
            Some(extent) if extent.offset > at => (extent.offset.min(end), false),
            Some(extent) => (extent.end().min(end), true),
        })
    }
}

/// Counts each block once, even if extents start or end inside of it.
#[derive(Debug, Default)]
struct Count {
    found: Comparison,
    /// The first block that is not counted yet as reported, as differing, as missed.
    reported_to: u64,
    differing_to: u64,
    missed_to: u64,
}

impl Count {
    /// Counts the bytes of both images in a run that starts at `offset`.
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
            // At most the length of a block, so it fits.
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

    impl ReadAt for &[u8] {
        fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
            let from = self.get(offset as usize..).and_then(|from| from.get(..buffer.len()));
            buffer.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
            Ok(())
        }
    }

    fn side(image: &[u8]) -> Side<&[u8]> {
        Side::new(image, image.len() as u64)
    }

    /// An empty base stands for the allocated blocks.
    fn check(base: &[u8], target: &[u8], delta: &[(u64, u64)]) -> Result<Comparison> {
        let delta = delta.iter().map(|&(offset, length)| Ok(Extent { offset, length }));
        let base = if base.is_empty() { Side::zeros() } else { side(base) };
        compare(&base, &side(target), delta, Sample::default(), |_, _| Ok(()))
    }

    /// An image of blocks that each hold one value.
    fn image(blocks: &[u8]) -> Vec<u8> {
        blocks.iter().map(|value| [*value; BLOCK]).collect::<Vec<_>>().concat()
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
    fn extents_inside_a_block_count_it_once() {
        let (base, target) = (image(&[0]), image(&[1]));
        let found = check(&base, &target, &[(0, 512), (1024, 512)]).unwrap();
        assert_eq!((found.reported, found.differing, found.missed), (1, 1, 1));
    }

    #[test]
    fn a_comparison_that_could_not_be_finished_is_an_error() {
        let (base, target) = (image(&[1, 1]), image(&[1, 1]));
        let all = Sample::default();
        let long = Side::new(&base[..4096], 8192);
        assert!(compare(&long, &side(&target), std::iter::empty(), all, |_, _| Ok(())).is_err());
        let broken = [Ok(Extent { offset: 0, length: 8192 }), Err(anyhow!("broken"))];
        let error = compare(&side(&base), &side(&target), broken.into_iter(), all, |_, _| Ok(()));
        assert_eq!(error.unwrap_err().to_string(), "broken");
        assert!(check(&base, &target, &[(8192, 4096)]).is_err());
        let stop = |_, _| Err(anyhow!("interrupted"));
        let stopped = compare(&side(&base), &side(&target), std::iter::empty(), all, stop);
        assert!(stopped.is_err());
    }

    #[test]
    fn a_sample_reads_about_its_share_and_the_same_for_a_seed() {
        struct Counted(std::cell::Cell<u64>);
        impl ReadAt for Counted {
            fn read_exact_at(&self, buffer: &mut [u8], _: u64) -> io::Result<()> {
                self.0.set(self.0.get() + 1);
                buffer.fill(0);
                Ok(())
            }
        }
        let pieces = 400;
        let read = |share, seed| {
            let target = Side::new(Counted(0.into()), pieces * PIECE as u64);
            let sample = Sample { share, seed };
            let found = compare(&Side::zeros(), &target, std::iter::empty(), sample, |_, _| Ok(()))
                .unwrap();
            assert_eq!(found.bytes, target.source.as_ref().unwrap().0.get() * PIECE as u64);
            found.bytes / PIECE as u64
        };
        assert_eq!(read(None, 0), pieces);
        assert_eq!(read(Some(10_000), 1), pieces);
        let tenth = read(Some(1000), 1);
        assert!((20..80).contains(&tenth), "{tenth}");
        assert_eq!(read(Some(1000), 1), tenth);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]
        #[test]
        fn every_block_counts_as_in_a_plain_comparison(
            base in prop_oneof![Just(Vec::new()), proptest::collection::vec(0..3u8, 1..600)],
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
            prop_assert_eq!((found.bytes, found.proven()), (blocks * 4096, missed.is_empty()));
            prop_assert_eq!(found.reported, report.len() as u64);
            prop_assert_eq!(found.differing, differs.intersection(&report).count() as u64);
            prop_assert_eq!(found.missed, missed.len() as u64);
            prop_assert_eq!(&found.missed_at[..], &missed[..missed.len().min(SHOWN)]);
        }
    }
}
