//! Direct I/O on a file, without the page cache. After a write error the kernel keeps pages in its
//! cache that never reached the disk, and treats them as clean while the filesystem is mounted.
//! Direct reads return the data on disk, so such pages are never mistaken for stored data.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, PosixFadviseAdvice, fallocate, posix_fadvise};
use nix::sys::statvfs::fstatvfs;

use super::sys;

/// Alignment of offsets, lengths and memory for direct I/O, in bytes. Sufficient for every disk
/// that Linux supports.
const PAGE_BYTES: u64 = 4096;

/// Size of a single read or write, in bytes.
pub const CHUNK: usize = 1 << 20;

#[derive(Debug)]
pub struct DirectFile {
    file: File,
    /// False where the filesystem does not support direct I/O, such as tmpfs.
    direct: bool,
    /// Whether pages read through the page cache are dropped from it at the end.
    fills_cache: bool,
}

impl Drop for DirectFile {
    fn drop(&mut self) {
        if self.fills_cache {
            let _ = posix_fadvise(&self.file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
        }
    }
}

/// A buffer that is aligned for direct I/O.
pub struct Aligned {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    pub fn zeroed(len: usize) -> Self {
        let bytes = vec![0; len + PAGE_BYTES as usize];
        let start = bytes.as_ptr().align_offset(PAGE_BYTES as usize);
        Self { bytes, start, len }
    }

    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }

    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

impl DirectFile {
    /// Opens a file for reading and writing.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::open_with(path, File::options().read(true).write(true))
    }

    /// Opens a file for reading. Writes fail.
    pub fn open_for_reading(path: &Path) -> io::Result<Self> {
        Self::open_with(path, File::options().read(true))
    }

    /// Switches to reading through the page cache, filled by one sequential read, if the cache
    /// holds no page of the file. Then the cache equals the disk, and reads are much faster.
    pub fn via_empty_page_cache(self) -> io::Result<Self> {
        let file = File::open(format!("/proc/self/fd/{}", self.file.as_raw_fd()))?;
        if !self.direct || sys::cached_pages(&file).map_or(true, |pages| pages > 0) {
            return Ok(self);
        }
        let mut bytes = vec![0; CHUNK];
        let mut offset = 0;
        while let read @ 1.. = file.read_at(&mut bytes, offset)? {
            offset += read as u64;
        }
        Ok(Self { file, direct: false, fills_cache: true })
    }

    /// Creates an empty file that only root can read. Truncates an existing file.
    pub fn create(path: &Path) -> io::Result<Self> {
        Self::open_with(
            path,
            File::options().read(true).write(true).create(true).truncate(true).mode(0o600),
        )
    }

    fn open_with(path: &Path, options: &mut std::fs::OpenOptions) -> io::Result<Self> {
        match options.custom_flags(libc::O_DIRECT).open(path) {
            Ok(file) => {
                let direct = Self { file, direct: true, fills_cache: false };
                // Some filesystems accept the flag but reject the first read.
                match direct.read_some(&mut [0; 1], 0) {
                    Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {}
                    Err(e) => return Err(e),
                    Ok(_) => return Ok(direct),
                }
            }
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {}
            Err(e) => return Err(e),
        }
        let file = options.custom_flags(0).open(path)?;
        // The closest alternative to direct I/O: flush, then drop the cached pages. Only pages that
        // are on disk can be dropped. An error of the flush belongs to the writer.
        let _ = file.sync_data();
        posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?;
        Ok(Self { file, direct: false, fills_cache: false })
    }

    /// Length in bytes.
    pub fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    /// Reads all of `out`. `UnexpectedEof` if the file ends earlier.
    pub fn read_exact_at(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while done < out.len() {
            let chunk = (out.len() - done).min(CHUNK);
            match self.read_some(&mut out[done..done + chunk], offset + done as u64)? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                read => done += read,
            }
        }
        Ok(())
    }

    /// Reads at most [`CHUNK`] bytes at `offset` into `out`. Returns the number of bytes, 0 at the
    /// end of the file.
    pub fn read_some(&self, out: &mut [u8], offset: u64) -> io::Result<usize> {
        if !self.direct {
            return self.file.read_at(out, offset);
        }
        let len = out.len().min(CHUNK);
        let start = offset - offset % PAGE_BYTES;
        let skipped = (offset - start) as usize;
        let mut buffer = Aligned::zeroed((skipped + len).next_multiple_of(PAGE_BYTES as usize));
        let read = self.file.read_at(buffer.as_mut_slice(), start)?;
        let len = read.saturating_sub(skipped).min(len);
        out[..len].copy_from_slice(&buffer.as_slice()[skipped..skipped + len]);
        Ok(len)
    }

    /// Reads whole pages from `offset` into `out`. Data after the first `len` bytes of the file
    /// reads as zeros; `UnexpectedEof` if the file is shorter. All numbers are multiples of the
    /// page size, and `out` is [`Aligned`].
    pub fn read_pages(&self, out: &mut [u8], offset: u64, len: u64) -> io::Result<()> {
        let wanted = len.saturating_sub(offset).min(out.len() as u64) as usize;
        let mut done = 0;
        while done < wanted {
            match self.file.read_at(&mut out[done..wanted], offset + done as u64)? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                read => done += read,
            }
        }
        out[wanted..].fill(0);
        Ok(())
    }

    /// Writes whole pages at a page-aligned offset. Durable after [`Self::sync_data`].
    pub fn write_pages<'a>(
        &self,
        pages: impl ExactSizeIterator<Item = &'a [u8]>,
        offset: u64,
    ) -> io::Result<()> {
        let mut buffer = Aligned::zeroed(pages.len() * PAGE_BYTES as usize);
        for (to, page) in buffer.as_mut_slice().chunks_exact_mut(PAGE_BYTES as usize).zip(pages) {
            to.copy_from_slice(page);
        }
        self.file.write_all_at(buffer.as_slice(), offset)
    }

    /// Makes written data durable.
    pub fn sync_data(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Grows the content from `from` bytes to `to`. New blocks are written with zeros, so later
    /// writes to them need no space in the pool or below a sparse image. The file may be longer than
    /// `from` already. On an error its length is unchanged.
    pub fn grow(&self, from: u64, to: u64) -> io::Result<()> {
        let old = self.len()?;
        if old < to {
            self.file.set_len(to)?;
        }
        let filled = self.fill_with_zeros(from, to);
        if filled.is_err() && old < to {
            self.file.set_len(old)?;
        }
        filled
    }

    /// Shortens the file. This frees all blocks after `len` bytes, also those of
    /// [`DirectFile::reserve`].
    pub fn shorten(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    /// The available space of the filesystem, in bytes.
    pub fn available(&self) -> io::Result<u64> {
        let stat = fstatvfs(&self.file)?;
        Ok(stat.fragment_size().saturating_mul(stat.blocks_available()))
    }

    fn fill_with_zeros(&self, from: u64, to: u64) -> io::Result<()> {
        if from >= to {
            return Ok(());
        }
        let zeros = Aligned::zeroed(CHUNK);
        let mut offset = from;
        while offset < to {
            let len = (to - offset).min(CHUNK as u64);
            self.file.write_all_at(&zeros.as_slice()[..len as usize], offset)?;
            offset += len;
        }
        self.file.sync_data()
    }

    /// Reserves blocks up to `len` bytes, also beyond the end of the file. Returns false if there
    /// is no space. A filesystem that cannot reserve is treated as having space.
    pub fn reserve(&self, len: u64) -> bool {
        let reserved = fallocate(&self.file, FallocateFlags::FALLOC_FL_KEEP_SIZE, 0, len as i64);
        !matches!(reserved, Err(Errno::ENOSPC | Errno::EDQUOT))
    }
}
