//! A pool on any filesystem. A snapshot is a sparse copy; changes are found by comparing contents.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::unistd::{Whence, lseek};

use super::super::error::{Context, Error, Result};
use super::super::extents::Finding;
use super::super::fail_point::reach;
use super::super::model::Precision;
use super::super::store::length;
use super::super::units::BLOCK_SIZE;
use super::{Pool, PoolKind, Room, check_length, filesystem_room};

/// Size of a single read, in bytes.
const CHUNK: u64 = 1 << 20;

#[derive(Debug)]
pub struct CopyPool {
    root: PathBuf,
}

impl CopyPool {
    pub fn open(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }
}

impl Pool for CopyPool {
    fn kind(&self) -> PoolKind {
        PoolKind::Copy
    }

    fn root(&self) -> &Path {
        &self.root
    }

    fn room(&self) -> Result<Room> {
        filesystem_room(&self.root)
    }

    fn adopt(&self, _file: &File) -> Result<()> {
        Ok(())
    }

    fn clone(
        &self,
        source: &File,
        target: &File,
        after_step: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        make_equal(source, target, after_step)
    }

    fn clones_atomically(&self) -> bool {
        false
    }

    fn compare(
        &self,
        old: Option<(&File, u64)>,
        new: (&File, u64),
        _precision: Precision,
        report: &mut dyn FnMut(Finding) -> Result<()>,
    ) -> Result<()> {
        compare(old, new, report)
    }
}

/// Copies the parts of `source` that differ from `target`, so a second call only costs changes.
/// Holes remain holes.
fn make_equal(
    source: &File,
    target: &File,
    after_step: &mut dyn FnMut() -> Result<()>,
) -> Result<()> {
    let size = length(source)?;
    target.set_len(size).context(copying)?;
    let mut walk = Walk::new(Some((target, size)), (source, size));
    let (mut old, mut new) = (Buffer::new(), Buffer::new());
    while let Some(step) = walk.next_step()? {
        if step.in_new {
            let expected = new.read(source, step.start, step.end)?;
            if step.in_old && old.read(target, step.start, step.end)? == expected {
                after_step()?;
                continue;
            }
            target.write_all_at(expected, step.start).context(copying)?;
        } else {
            let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
            let (start, length) = (step.start as i64, (step.end - step.start) as i64);
            fallocate(target, mode, start, length).context(copying)?;
        }
        reach("copy.part_made")?;
        after_step()?;
    }
    Ok(())
}

fn compare(
    old: Option<(&File, u64)>,
    new: (&File, u64),
    report: &mut dyn FnMut(Finding) -> Result<()>,
) -> Result<()> {
    let (new_file, size) = new;
    let old_file = old.map(|(file, _)| file);
    let old_size = old.map_or(0, |(_, size)| size);
    let mut walk = Walk::new(old, new);
    let (mut before, mut after) = (Buffer::new(), Buffer::new());
    while let Some(step) = walk.next_step()? {
        before.fill(old_file.filter(|_| step.in_old), step.start, step.end, old_size)?;
        after.fill(step.in_new.then_some(new_file), step.start, step.end, size)?;
        let mut start = step.start;
        while start < step.end {
            let end = step.end.min(start - start % BLOCK_SIZE + BLOCK_SIZE);
            let at = (start - step.start) as usize..(end - step.start) as usize;
            let changed = before.bytes[at.clone()] != after.bytes[at];
            if changed || step.in_new {
                report(Finding { start, end, allocated: step.in_new, changed })?;
            }
            start = end;
        }
    }
    Ok(())
}

/// A range of at most [`CHUNK`] bytes with data in at least one of two files.
#[derive(Debug, Clone, Copy)]
struct Step {
    start: u64,
    end: u64,
    in_old: bool,
    in_new: bool,
}

/// Iterates over two files and skips ranges that are holes in both.
struct Walk<'a> {
    old: Option<DataRanges<'a>>,
    new: DataRanges<'a>,
    position: u64,
    size: u64,
}

impl<'a> Walk<'a> {
    /// Each file with its size in bytes.
    fn new(old: Option<(&'a File, u64)>, new: (&'a File, u64)) -> Self {
        let (_, size) = new;
        Self { old: old.map(DataRanges::new), new: DataRanges::new(new), position: 0, size }
    }

    fn next_step(&mut self) -> Result<Option<Step>> {
        while self.position < self.size {
            let start = self.position;
            let (in_new, new_end) = self.new.at(start, self.size)?;
            let (in_old, old_end) = match self.old.as_mut() {
                Some(old) => old.at(start, self.size)?,
                None => (false, self.size),
            };
            let end = new_end.min(old_end);
            if !in_new && !in_old {
                self.position = end;
                continue;
            }
            let end = end.min(start - start % CHUNK + CHUNK);
            self.position = end;
            return Ok(Some(Step { start, end, in_old, in_new }));
        }
        Ok(None)
    }
}

/// The data ranges of a file (lseek SEEK_DATA and SEEK_HOLE). Caches the current range.
struct DataRanges<'a> {
    file: &'a File,
    /// Size of the file in bytes.
    bytes: u64,
    data: Option<(u64, u64)>,
}

impl<'a> DataRanges<'a> {
    fn new((file, bytes): (&'a File, u64)) -> Self {
        Self { file, bytes, data: None }
    }

    /// Whether there is data at `position`, and the end of that range, at most `size`.
    fn at(&mut self, position: u64, size: u64) -> Result<(bool, u64)> {
        if self.data.is_none_or(|(_, end)| end <= position) {
            let start = self.seek(position, Whence::SeekData)?.unwrap_or(size);
            let end = if start < size {
                self.seek(start, Whence::SeekHole)?.unwrap_or(size)
            } else {
                size.max(position + 1)
            };
            self.data = Some((start, end));
        }
        match self.data {
            Some((start, end)) if start <= position => Ok((true, end.min(size))),
            Some((start, _)) => Ok((false, start.min(size))),
            None => Err(Error::Failed("no data range in a file".to_owned())),
        }
    }

    /// `None` at the end of the file. A file that became shorter is damaged, not empty.
    fn seek(&self, from: u64, whence: Whence) -> Result<Option<u64>> {
        match lseek(self.file, from as i64, whence) {
            Ok(offset) => Ok(Some(offset as u64)),
            Err(Errno::ENXIO) => {
                check_length(self.file, "a file of the pool", self.bytes).map(|()| None)
            }
            Err(e) => Err(Error::io("searching for data", io::Error::from(e))),
        }
    }
}

struct Buffer {
    bytes: Vec<u8>,
}

impl Buffer {
    fn new() -> Self {
        Self { bytes: Vec::new() }
    }

    fn read(&mut self, file: &File, start: u64, end: u64) -> Result<&[u8]> {
        self.bytes.resize((end - start) as usize, 0);
        file.read_exact_at(&mut self.bytes, start).context(copying)?;
        Ok(&self.bytes)
    }

    /// Reads the range from `file` (of `size` bytes). Zeros past its end, or without a file.
    fn fill(&mut self, file: Option<&File>, start: u64, end: u64, size: u64) -> Result<()> {
        self.bytes.clear();
        self.bytes.resize((end - start) as usize, 0);
        if let Some(file) = file
            && start < size
        {
            let available = (end.min(size) - start) as usize;
            file.read_exact_at(&mut self.bytes[..available], start).context(copying)?;
        }
        Ok(())
    }
}

fn copying() -> String {
    "copying a backing file".to_owned()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BLOCKS: u64 = 3 * CHUNK / BLOCK_SIZE;

    /// A change of a volume. Positions and lengths are in blocks.
    #[derive(Debug, Clone)]
    enum Change {
        Write(u64, u64, u8),
        WriteZeros(u64, u64),
        Punch(u64, u64),
        Grow(u64),
    }

    fn changes() -> impl Strategy<Value = Vec<Change>> {
        let place = || {
            let near_a_chunk = (1..3 * CHUNK / BLOCK_SIZE).prop_map(|n| n / 256 * 256 + n % 3);
            (prop_oneof![0..BLOCKS, near_a_chunk], prop_oneof![1..4u64, 1..600u64])
        };
        let change = prop_oneof![
            4 => (place(), 1..4u8).prop_map(|((at, count), fill)| Change::Write(at, count, fill)),
            1 => place().prop_map(|(at, count)| Change::WriteZeros(at, count)),
            2 => place().prop_map(|(at, count)| Change::Punch(at, count)),
            1 => (1..300u64).prop_map(Change::Grow),
        ];
        prop::collection::vec(change, 0..12)
    }

    /// A volume's file and its expected blocks. `None` is a hole.
    struct Model {
        file: File,
        blocks: Vec<Option<u8>>,
    }

    impl Model {
        fn new() -> Self {
            let file = tempfile::tempfile().unwrap();
            file.set_len(BLOCKS * BLOCK_SIZE).unwrap();
            Self { file, blocks: vec![None; BLOCKS as usize] }
        }

        fn apply(&mut self, change: &Change) {
            let size = self.blocks.len() as u64;
            let (at, count, fill) = match *change {
                Change::Write(at, count, fill) => (at, count, Some(fill)),
                Change::WriteZeros(at, count) => (at, count, Some(0)),
                Change::Punch(at, count) => (at, count, None),
                Change::Grow(by) => {
                    self.file.set_len((size + by) * BLOCK_SIZE).unwrap();
                    self.blocks.resize((size + by) as usize, None);
                    return;
                }
            };
            let end = size.min(at + count);
            let length = (end - at) * BLOCK_SIZE;
            match fill {
                Some(fill) => {
                    let bytes = vec![fill; length as usize];
                    self.file.write_all_at(&bytes, at * BLOCK_SIZE).unwrap();
                }
                None => {
                    let mode =
                        FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
                    fallocate(&self.file, mode, (at * BLOCK_SIZE) as i64, length as i64).unwrap();
                }
            }
            self.blocks[at as usize..end as usize].fill(fill);
        }

        fn size(&self) -> u64 {
            self.blocks.len() as u64 * BLOCK_SIZE
        }

        fn byte(&self, block: usize) -> u8 {
            self.blocks.get(block).copied().flatten().unwrap_or(0)
        }
    }

    /// The byte of each block of a file, and whether the block is data.
    fn content(file: &File) -> (Vec<u8>, Vec<bool>) {
        let size = file.metadata().unwrap().len();
        let mut bytes = vec![0; size as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        let blocks = bytes
            .chunks(BLOCK_SIZE as usize)
            .map(|block| {
                assert!(block.iter().all(|byte| *byte == block[0]));
                block[0]
            })
            .collect();
        let mut ranges = DataRanges::new((file, size));
        let data =
            (0..size / BLOCK_SIZE).map(|block| ranges.at(block * BLOCK_SIZE, size).unwrap().0);
        (blocks, data.collect())
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

        #[test]
        fn copies_are_equal_and_comparisons_exact(
            history in prop::collection::vec(changes(), 1..4),
            reused in prop::option::of(changes()),
        ) {
            let mut volume = Model::new();
            let mut before: Option<(File, Vec<u8>)> = None;
            for changes in &history {
                changes.iter().for_each(|change| volume.apply(change));
                // As for a snapshot: once before the freeze and once during it.
                let mut target = Model::new();
                reused.iter().flatten().for_each(|change| target.apply(change));
                let target = target.file;
                target.set_len(volume.size()).unwrap();
                make_equal(&volume.file, &target, &mut || Ok(())).unwrap();
                changes.iter().rev().for_each(|change| volume.apply(change));
                make_equal(&volume.file, &target, &mut || Ok(())).unwrap();

                let (bytes, data) = content(&target);
                let expected: Vec<u8> = (0..volume.blocks.len()).map(|b| volume.byte(b)).collect();
                prop_assert!(bytes == expected);
                for (block, is_data) in data.iter().enumerate() {
                    prop_assert!(!is_data || volume.blocks[block].is_some(), "no hole at {}", block);
                }

                let old = before.as_ref().map(|(file, bytes)| (file, bytes.len() as u64 * BLOCK_SIZE));
                let mut found = Vec::new();
                compare(old, (&target, volume.size()), &mut |finding| {
                    found.push(finding);
                    Ok(())
                })
                .unwrap();
                let mut allocated = vec![false; bytes.len()];
                let mut changed = vec![false; bytes.len()];
                let mut last = 0;
                for finding in found {
                    prop_assert!(last <= finding.start && finding.start < finding.end);
                    last = finding.end;
                    let at = (finding.start / BLOCK_SIZE) as usize;
                    prop_assert_eq!(finding.end, (at as u64 + 1) * BLOCK_SIZE);
                    (allocated[at], changed[at]) = (finding.allocated, finding.changed);
                }
                prop_assert_eq!(&allocated, &data);
                for block in 0..bytes.len() {
                    let was = before.as_ref().and_then(|(_, old)| old.get(block).copied());
                    let differs = was.unwrap_or(0) != bytes[block];
                    prop_assert_eq!(changed[block], differs, "block {}", block);
                }
                before = Some((target, bytes));
            }
        }
    }

    #[test]
    fn equal_blocks_are_not_written_again() {
        use nix::fcntl::{FcntlArg, SealFlag, fcntl};
        use nix::sys::memfd::{MFdFlags, memfd_create};

        let mut volume = Model::new();
        volume.apply(&Change::Write(10, 600, 1));
        let target = File::from(memfd_create("copy", MFdFlags::MFD_ALLOW_SEALING).unwrap());
        make_equal(&volume.file, &target, &mut || Ok(())).unwrap();
        fcntl(&target, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_WRITE)).unwrap();
        make_equal(&volume.file, &target, &mut || Ok(())).unwrap();
        volume.apply(&Change::Write(300, 1, 2));
        let copied = make_equal(&volume.file, &target, &mut || Ok(()));
        assert!(copied.is_err(), "the seal does not hold");
    }

    /// Both reads of an empty file succeed: SEEK_DATA reports no data, which is what a hole looks
    /// like.
    #[test]
    fn a_file_that_is_truncated_while_it_is_read_is_an_error() {
        let model = || {
            let mut model = Model::new();
            (0..BLOCKS).step_by(2).for_each(|at| model.apply(&Change::Write(at, 1, 1)));
            model
        };
        let (volume, target) = (model(), tempfile::tempfile().unwrap());
        let mut steps = 0;
        let copied = make_equal(&volume.file, &target, &mut || {
            steps += 1;
            if steps == 3 { volume.file.set_len(0).context(copying) } else { Ok(()) }
        });
        assert!(steps == 3 && copied.is_err(), "{steps}");

        let [old, new] = [model(), model()];
        for truncated in [&old, &new] {
            let mut found = 0;
            let compared =
                compare(Some((&old.file, old.size())), (&new.file, new.size()), &mut |_| {
                    found += 1;
                    if found == 3 { truncated.file.set_len(0).context(copying) } else { Ok(()) }
                });
            assert!(found >= 3 && compared.is_err());
            truncated.file.set_len(truncated.size()).unwrap();
        }
    }
}
