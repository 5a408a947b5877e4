//! A pool on any filesystem: a snapshot is a sparse copy, and content tells what changed.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::unistd::{Whence, lseek};

use super::super::error::{Context, Error, Result};
use super::super::extents::Finding;
use super::super::units::BLOCK_SIZE;
use super::{Pool, PoolKind, Room, filesystem_room};

/// Bytes read at a time.
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

    fn pre_clone(&self, source: &File, target: &File) -> Result<()> {
        make_equal(source, target)
    }

    fn clone(&self, source: &File, target: &File) -> Result<()> {
        make_equal(source, target)
    }

    fn clones_atomically(&self) -> bool {
        false
    }

    fn compare(
        &self,
        old: Option<(&File, u64)>,
        new: (&File, u64),
        report: &mut dyn FnMut(Finding) -> Result<()>,
    ) -> Result<()> {
        compare(old, new, report)
    }
}

/// Writes to `target` what differs in `source`, so that a second call costs only what has changed
/// since the first. Holes stay holes.
fn make_equal(source: &File, target: &File) -> Result<()> {
    let size = source.metadata().context(copying)?.len();
    target.set_len(size).context(copying)?;
    let mut walk = Walk::new(Some(target), source, size);
    let (mut old, mut new) = (Buffer::new(), Buffer::new());
    while let Some(step) = walk.next_step()? {
        if !step.in_new {
            let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
            let (start, length) = (step.start as i64, (step.end - step.start) as i64);
            fallocate(target, mode, start, length).context(copying)?;
            continue;
        }
        let wanted = new.read(source, step.start, step.end)?;
        let differs = !step.in_old || old.read(target, step.start, step.end)? != wanted;
        if differs {
            target.write_all_at(wanted, step.start).context(copying)?;
        }
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
    let mut walk = Walk::new(old_file, new_file, size);
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

/// A range of at most [`CHUNK`] bytes that holds data in one of two files, or in both.
#[derive(Debug, Clone, Copy)]
struct Step {
    start: u64,
    end: u64,
    in_old: bool,
    in_new: bool,
}

/// Walks two files together and skips what is a hole in both.
struct Walk<'a> {
    old: Option<DataRanges<'a>>,
    new: DataRanges<'a>,
    position: u64,
    size: u64,
}

impl<'a> Walk<'a> {
    fn new(old: Option<&'a File>, new: &'a File, size: u64) -> Self {
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

/// Which parts of a file hold data (lseek SEEK_DATA and SEEK_HOLE), asked once per part.
struct DataRanges<'a> {
    file: &'a File,
    data: Option<(u64, u64)>,
}

impl<'a> DataRanges<'a> {
    fn new(file: &'a File) -> Self {
        Self { file, data: None }
    }

    /// Whether there is data at `position`, and up to where that is so, at most `size`.
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
            None => Err(Error::Failed("lost the place in a file".to_owned())),
        }
    }

    /// `None` past the last of what is sought.
    fn seek(&self, from: u64, whence: Whence) -> Result<Option<u64>> {
        match lseek(self.file, from as i64, whence) {
            Ok(offset) => Ok(Some(offset as u64)),
            Err(Errno::ENXIO) => Ok(None),
            Err(e) => Err(Error::io("looking for data", io::Error::from(e))),
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

    /// Reads what `file` (of `size` bytes) has in the range; the rest, or all without a file, is
    /// zeros.
    fn fill(&mut self, file: Option<&File>, start: u64, end: u64, size: u64) -> Result<()> {
        self.bytes.clear();
        self.bytes.resize((end - start) as usize, 0);
        if let Some(file) = file
            && start < size
        {
            let there = (end.min(size) - start) as usize;
            file.read_exact_at(&mut self.bytes[..there], start).context(copying)?;
        }
        Ok(())
    }
}

fn copying() -> String {
    "copying a backing file".to_owned()
}
