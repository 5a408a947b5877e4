//! A file that is read and written past the page cache. After a write error the kernel keeps pages in its cache that
//! never reached the disk and treats them as clean, for as long as anything keeps the filesystem mounted. What is read
//! here is what the disk holds, so such pages are never mistaken for stored data.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, PosixFadviseAdvice, fallocate, posix_fadvise};

use super::sys;

/// Alignment of offsets, lengths and memory for direct I/O, in bytes. Enough for every disk that the kernel supports.
const PAGE_BYTES: u64 = 4096;

/// Bytes that are copied or filled at a time.
pub const CHUNK: usize = 1 << 20;

#[derive(Debug)]
pub struct DirectFile {
    file: File,
    /// False where the filesystem does not support direct I/O, such as tmpfs.
    direct: bool,
    /// What was read through the page cache is dropped from it in the end.
    fills_cache: bool,
}

impl Drop for DirectFile {
    fn drop(&mut self) {
        if self.fills_cache {
            let _ = posix_fadvise(&self.file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
        }
    }
}

/// Memory at an address that direct I/O accepts.
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

    /// The same file read through the page cache, filled in one sequential read, if the cache holds no page of it: so what is
    /// read is what the disk holds, and much faster than page by page.
    pub fn through_an_empty_cache(self) -> io::Result<Self> {
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

    /// Creates an empty file that only root can read. An existing one is truncated.
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
                // Some filesystems accept the flag and refuse the first read.
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
        // The nearest to direct I/O: only pages that are on disk can be dropped from the cache. An error of the flush
        // belongs to the writer; the file now shows what is on disk.
        let _ = file.sync_data();
        posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?;
        Ok(Self { file, direct: false, fills_cache: false })
    }

    /// Length in bytes.
    pub fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    /// Reads all of `out`; `UnexpectedEof` where the file ends before.
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

    /// Reads at `offset` into `out`, at most [`CHUNK`] bytes; returns how many, 0 at the end of the file.
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

    /// Reads whole pages into `out`, from `offset` on. What lies behind the file's first `len` bytes is zeros; `UnexpectedEof`
    /// where the file is shorter than that. All of them are multiples of the page size, and `out` is [`Aligned`].
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

    /// Writes whole pages at an offset that is a multiple of the page size. They are durable after [`Self::sync_data`].
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

    /// Waits until what was written is on disk.
    pub fn sync_data(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Changes the length. A file that grows gets its blocks now, written with zeros, so that writes to them later need
    /// no room: neither here nor in a sparse image below. On an error the length is as before.
    pub fn resize(&self, len: u64) -> io::Result<()> {
        let old = self.len()?;
        self.file.set_len(len)?;
        let filled = self.fill_with_zeros(old, len);
        if filled.is_err() {
            self.file.set_len(old)?;
        }
        filled
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

    /// Reserves blocks up to `len` bytes, beyond the end of the file where that is more. False when there is no room
    /// for them. A filesystem that cannot reserve counts as one that has room.
    pub fn reserve(&self, len: u64) -> bool {
        let reserved = fallocate(&self.file, FallocateFlags::FALLOC_FL_KEEP_SIZE, 0, len as i64);
        !matches!(reserved, Err(Errno::ENOSPC | Errno::EDQUOT))
    }
}
