//! What a restore writes to: a block device or a file. Regions of zeros become holes.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};

use crate::client::in_use;
use storage::{BLOCK_SIZE, Extent};

/// Zeros to write at a time where there is no other way.
const PIECE: u64 = 1 << 20;
const ZEROS: [u8; BLOCK_SIZE as usize] = [0; BLOCK_SIZE as usize];

#[derive(Debug)]
pub struct Target {
    file: File,
    path: PathBuf,
    /// In bytes.
    pub size: u64,
    /// It reads zero everywhere, because it was empty.
    pub is_fresh: bool,
}

impl Target {
    /// Opens a device, an existing file, or makes a file. A file that is missing or empty gets
    /// `capacity` bytes.
    ///
    /// # Errors
    /// It is smaller than `capacity`, or in use.
    pub fn open(path: &Path, capacity: u64) -> Result<Self> {
        let shown = path.display();
        in_use::check_path(path).context("--to")?;
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        match path.metadata() {
            // The kernel refuses it while the device is mounted.
            Ok(meta) if meta.file_type().is_block_device() => {
                options.custom_flags(nix::libc::O_EXCL);
            }
            Ok(meta) if meta.is_file() => {}
            Ok(_) => bail!("--to {shown} is neither a block device nor a file"),
            Err(_) if path.starts_with("/dev") => bail!("--to {shown}: there is no such device"),
            Err(_) => {
                options.create_new(true);
            }
        }
        let mut file = match options.open(path) {
            Err(error) if error.raw_os_error() == Some(Errno::EBUSY as i32) => {
                bail!("--to {shown} is in use, for example mounted; unmount it first")
            }
            file => file.with_context(|| format!("--to {shown}: open"))?,
        };
        in_use::check_open(path, &file).context("--to")?;
        let size =
            file.seek(SeekFrom::End(0)).with_context(|| format!("--to {shown}: get its size"))?;
        let is_fresh = size == 0;
        if is_fresh {
            file.set_len(capacity).with_context(|| format!("--to {shown}: set its size"))?;
        }
        let size = if is_fresh { capacity } else { size };
        ensure!(
            size >= capacity,
            "--to {shown} has {size} bytes, and the backup {capacity}; name a larger target"
        );
        Ok(Self { file, path: path.to_owned(), size, is_fresh })
    }

    /// Whether it is this block device, by whatever path.
    pub fn is_device(&self, device: &Path) -> bool {
        let number = |meta: Metadata| meta.file_type().is_block_device().then(|| meta.rdev());
        let own = self.file.metadata().ok().and_then(number);
        own.is_some() && own == device.metadata().ok().and_then(number)
    }

    pub fn write(&self, bytes: &[u8], offset: u64) -> Result<()> {
        let written = self.file.write_all_at(bytes, offset);
        written.with_context(|| {
            format!("write {} bytes at {offset} of {}", bytes.len(), self.path.display())
        })
    }

    /// Writes the blocks that the target does not hold. Returns how many bytes those are.
    pub fn write_changed(&self, bytes: &[u8], offset: u64) -> Result<u64> {
        let mut held = vec![0; bytes.len()];
        self.read(&mut held, offset)?;
        let mut written = 0;
        for (is_held, range) in runs(bytes, offset, |range| held[range.clone()] == bytes[range]) {
            if !is_held {
                written += range.len() as u64;
                self.write(&bytes[range.clone()], offset + range.start as u64)?;
            }
        }
        Ok(written)
    }

    pub fn read(&self, bytes: &mut [u8], offset: u64) -> Result<()> {
        let read = self.file.read_exact_at(bytes, offset);
        read.with_context(|| {
            format!("read {} bytes at {offset} of {}", bytes.len(), self.path.display())
        })
    }

    /// Makes a region read zero, without room where the target can.
    pub fn zero(&self, region: Extent) -> Result<()> {
        if region.length == 0 {
            return Ok(());
        }
        let (offset, length) = (i64::try_from(region.offset)?, i64::try_from(region.length)?);
        let keep = FallocateFlags::FALLOC_FL_KEEP_SIZE;
        for how in [FallocateFlags::FALLOC_FL_PUNCH_HOLE, FallocateFlags::FALLOC_FL_ZERO_RANGE] {
            match fallocate(&self.file, how | keep, offset, length) {
                Ok(()) => return Ok(()),
                // The target cannot, or not at this alignment.
                Err(Errno::EOPNOTSUPP | Errno::EINVAL | Errno::ENOSYS | Errno::ENODEV) => {}
                Err(error) => {
                    let at = format!("zero {length} bytes at {offset} of {}", self.path.display());
                    return Err(error).context(at);
                }
            }
        }
        let zeros = vec![0; usize::try_from(PIECE.min(region.length))?];
        let mut at = region.offset;
        while at < region.end() {
            let length = PIECE.min(region.end() - at);
            self.write(&zeros[..usize::try_from(length)?], at)?;
            at += length;
        }
        Ok(())
    }

    /// Copies an extent from a device or file; blocks of zeros become holes.
    pub fn copy_from(&self, source: &File, extent: Extent) -> Result<()> {
        let mut buffer = vec![0; usize::try_from(PIECE.min(extent.length))?];
        let mut at = extent.offset;
        while at < extent.end() {
            // Ends at a block, so that the blocks of the next piece are whole.
            let end = extent.end().min((at / PIECE + 1) * PIECE);
            let piece =
                buffer.get_mut(..usize::try_from(end - at)?).context("a piece is too long")?;
            source.read_exact_at(piece, at).with_context(|| format!("read the source at {at}"))?;
            let is_zero = |range: Range<usize>| piece[range.clone()] == ZEROS[..range.len()];
            for (is_zero, range) in runs(piece, at, is_zero) {
                let offset = at + range.start as u64;
                if is_zero {
                    self.zero(Extent { offset, length: range.len() as u64 })?;
                } else {
                    self.write(&piece[range], offset)?;
                }
            }
            at = end;
        }
        Ok(())
    }

    pub fn sync(&self) -> Result<()> {
        self.file.sync_all().with_context(|| format!("sync {}", self.path.display()))
    }
}

/// Runs of blocks for which `of` yields the same, of bytes that begin at this offset of the volume.
fn runs<T: PartialEq>(
    bytes: &[u8],
    offset: u64,
    of: impl Fn(Range<usize>) -> T,
) -> Vec<(T, Range<usize>)> {
    let mut runs: Vec<(T, Range<usize>)> = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let left = BLOCK_SIZE - (offset + at as u64) % BLOCK_SIZE;
        let end = bytes.len().min(at + usize::try_from(left).unwrap_or(bytes.len()));
        let kind = of(at..end);
        match runs.last_mut() {
            Some((same, range)) if *same == kind => range.end = end,
            _ => runs.push((kind, at..end)),
        }
        at = end;
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_file_gets_the_size_and_a_smaller_one_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        let target = Target::open(&path, 8192).unwrap();
        assert!(target.is_fresh && path.metadata().unwrap().len() == 8192);
        let error = format!("{:#}", Target::open(&path, 8192).unwrap_err());
        assert!(error.contains("another program"), "{error}");
        drop(target);
        assert!(!Target::open(&path, 8192).unwrap().is_fresh);
        let error = Target::open(&path, 8193).unwrap_err().to_string();
        assert!(error.contains("larger target"), "{error}");
        assert_eq!(path.metadata().unwrap().len(), 8192);
        assert!(Target::open(directory.path(), 1).is_err());
        let error = Target::open(Path::new("/dev/no-such-disk"), 1).unwrap_err().to_string();
        assert!(error.contains("no such device"), "{error}");
    }

    #[test]
    fn copied_extents_are_exact_and_zeros_become_holes() {
        let directory = tempfile::tempdir().unwrap();
        let source = directory.path().join("source");
        let mut bytes = vec![5; 3 << 20];
        bytes[8192..(1 << 20) + 8192].fill(0);
        std::fs::write(&source, &bytes).unwrap();
        let path = directory.path().join("target");
        std::fs::write(&path, vec![9; 3 << 20]).unwrap();
        let target = Target::open(&path, 3 << 20).unwrap();
        let extent = Extent { offset: 512, length: (2 << 20) + 100 };
        target.copy_from(&File::open(source).unwrap(), extent).unwrap();
        bytes[..512].fill(9);
        bytes[512 + (2 << 20) + 100..].fill(9);
        assert!(std::fs::read(&path).unwrap() == bytes);
    }

    #[test]
    fn a_region_that_held_data_reads_zero() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        std::fs::write(&path, [7; 20000]).unwrap();
        let target = Target::open(&path, 8192).unwrap();
        target.zero(Extent { offset: 100, length: 9900 }).unwrap();
        let mut expected = [7; 20000];
        expected[100..10000].fill(0);
        assert_eq!(std::fs::read(&path).unwrap(), expected);
    }
}
