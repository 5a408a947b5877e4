//! The storage backend of redb. Pages of a commit are collected and written to disk together at the
//! flush. A file in [`Mode::Overlay`] is never written: changes stay in memory.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use redb::StorageBackend;

use super::PAGE_BYTES;
use crate::direct::{CHUNK, DirectFile};
use crate::fail_point::hit;

const PAGE: usize = PAGE_BYTES as usize;

/// Minimum reserved space, in bytes. It is constant, so that small size changes do not change the
/// reserve.
const MIN_RESERVED_BYTES: u64 = 4 << 20;

/// The file is shortened only if at least this is available, in bytes. Shortening frees the reserved
/// space, too, which a full disk may not give back: others take it, and a full XFS first refills its
/// own reserve of up to 32 MiB.
const MIN_TO_SHORTEN: u64 = 64 << 20;

/// Maximum size of collected pages, in bytes. More are written before the flush.
const MAX_COLLECTED_BYTES: usize = 4 << 20;

/// Where written pages go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// To disk: durable when a flush returns.
    Durable,
    /// To memory: for reading a catalog whose disk rejects writes.
    Overlay,
}

/// A callback that releases reserved disk space when the catalog cannot grow.
#[derive(Clone)]
pub struct ReleaseReserve(Arc<dyn Fn() + Send + Sync>);

impl ReleaseReserve {
    pub fn new(release: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Arc::new(release))
    }
}

/// No reserve.
impl Default for ReleaseReserve {
    fn default() -> Self {
        Self::new(|| {})
    }
}

impl fmt::Debug for ReleaseReserve {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReleaseReserve")
    }
}

/// A handle to the catalog file. redb and the catalog share it.
#[derive(Debug, Clone)]
pub struct CatalogFile(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    file: Arc<DirectFile>,
    mode: Mode,
    release_reserve: ReleaseReserve,
    written: RwLock<Written>,
    /// The space of [`reserved_bytes`] is allocated.
    has_reserve: AtomicBool,
    /// An operation failed, or the file was replaced. All later operations fail until it is
    /// reopened.
    failed: AtomicBool,
}

/// Pages that were written but are not in the file yet.
#[derive(Debug)]
struct Written {
    /// Length in bytes, including pending pages.
    len: u64,
    /// By offset in bytes.
    pages: BTreeMap<u64, Box<[u8]>>,
}

/// The space to allocate for a store of `len` bytes: enough to double it.
fn reserved_bytes(len: u64) -> u64 {
    MIN_RESERVED_BYTES.max(2 * len)
}

impl CatalogFile {
    pub fn new(file: DirectFile, mode: Mode, release_reserve: ReleaseReserve) -> io::Result<Self> {
        Self::with(Arc::new(file), mode, release_reserve)
    }

    /// A new handle in [`Mode::Overlay`] to the same open file. It needs no descriptor.
    pub fn overlay(&self) -> io::Result<Self> {
        Self::with(Arc::clone(&self.0.file), Mode::Overlay, ReleaseReserve::default())
    }

    fn with(
        file: Arc<DirectFile>,
        mode: Mode,
        release_reserve: ReleaseReserve,
    ) -> io::Result<Self> {
        let written = Written { len: file.len()?, pages: BTreeMap::new() };
        let file = Self(Arc::new(Inner {
            file,
            mode,
            release_reserve,
            written: RwLock::new(written),
            has_reserve: AtomicBool::default(),
            failed: AtomicBool::default(),
        }));
        file.reserve_ahead();
        Ok(file)
    }

    pub fn is_durable(&self) -> bool {
        self.0.mode == Mode::Durable
    }

    pub fn has_failed(&self) -> bool {
        self.0.failed.load(Ordering::Acquire)
    }

    /// Makes every later operation on this file fail.
    pub fn retire(&self) {
        self.0.failed.store(true, Ordering::Release);
    }

    /// Whether the store can grow. If not, new names are refused: the remaining space is for
    /// deletions, which also need some.
    pub fn has_room(&self) -> bool {
        if !self.0.has_reserve.load(Ordering::Relaxed) {
            self.reserve_ahead();
        }
        self.0.has_reserve.load(Ordering::Relaxed)
    }

    fn reserve_ahead(&self) {
        if self.is_durable() {
            let reserved = self.0.file.reserve(reserved_bytes(self.read_guard().len));
            self.0.has_reserve.store(reserved, Ordering::Relaxed);
        }
    }

    fn read_guard(&self) -> RwLockReadGuard<'_, Written> {
        self.0.written.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_guard(&self) -> RwLockWriteGuard<'_, Written> {
        self.0.written.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs an operation, unless a previous one failed.
    fn unless_failed<T>(&self, operation: impl FnOnce(&Inner) -> io::Result<T>) -> io::Result<T> {
        if self.has_failed() {
            return Err(io::Error::other("a previous I/O error closed the catalog"));
        }
        operation(&self.0).inspect_err(|_| self.retire())
    }

    fn resize(&self, len: u64) -> io::Result<()> {
        let mut written = self.write_guard();
        drop(written.pages.split_off(&len));
        if self.is_durable() {
            self.0.resize_file(written.len, len)?;
        }
        written.len = len;
        drop(written);
        if !self.is_durable() {
            return Ok(());
        }
        self.reserve_ahead();
        hit("page.sized")
    }
}

impl Inner {
    /// Changes the length of the store in the file.
    fn resize_file(&self, old: u64, len: u64) -> io::Result<()> {
        if len > old {
            return self.file.grow(old, len).or_else(|e| {
                if !matches!(e.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT)) {
                    return Err(e);
                }
                // A deletion may also need a page.
                (self.release_reserve.0)();
                self.file.grow(old, len)
            });
        }
        // Otherwise the file is longer than the store, and redb uses its length at the next start.
        match self.file.available() {
            Ok(MIN_TO_SHORTEN..) => self.file.shorten(len),
            _ => Ok(()),
        }
    }

    /// The page at `offset`, including pending writes. Zeros past the end of the file.
    fn page(&self, written: &Written, offset: u64) -> io::Result<Box<[u8]>> {
        if let Some(page) = written.pages.get(&offset) {
            return Ok(page.clone());
        }
        let mut page = vec![0; PAGE].into_boxed_slice();
        self.read_stored(&mut page, offset)?;
        Ok(page)
    }

    /// Reads from the file. In an overlay the store can be larger than the file: the rest reads as
    /// zeros.
    fn read_stored(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        if self.mode == Mode::Durable {
            return self.file.read_exact_at(out, offset);
        }
        let stored = self.file.len()?.saturating_sub(offset).min(out.len() as u64) as usize;
        out[stored..].fill(0);
        self.file.read_exact_at(&mut out[..stored], offset)
    }

    fn read(&self, written: &Written, out: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset + out.len() as u64;
        if end > written.len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.read_stored(out, offset)?;
        let first = offset - offset % PAGE_BYTES;
        for (&at, page) in written.pages.range(first..end) {
            let (from, to) = (at.max(offset), (at + PAGE_BYTES).min(end));
            out[(from - offset) as usize..(to - offset) as usize]
                .copy_from_slice(&page[(from - at) as usize..(to - at) as usize]);
        }
        Ok(())
    }

    fn collect(&self, written: &mut Written, data: &[u8], offset: u64) -> io::Result<()> {
        let end = offset + data.len() as u64;
        if end > written.len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut at = offset;
        while at < end {
            let start = at - at % PAGE_BYTES;
            let to = end.min(start + PAGE_BYTES);
            let part = &data[(at - offset) as usize..(to - offset) as usize];
            let page = if part.len() == PAGE {
                part.into()
            } else {
                let mut page = self.page(written, start)?;
                page[(at - start) as usize..(to - start) as usize].copy_from_slice(part);
                page
            };
            written.pages.insert(start, page);
            at = to;
        }
        let is_full = written.pages.len() * PAGE > MAX_COLLECTED_BYTES;
        if is_full && self.mode == Mode::Durable { self.write_out(written) } else { Ok(()) }
    }

    /// Writes the collected pages to the file, adjacent pages in one write.
    fn write_out(&self, written: &mut Written) -> io::Result<()> {
        let pages: Vec<(u64, Box<[u8]>)> = std::mem::take(&mut written.pages).into_iter().collect();
        let adjacent = |a: &(u64, Box<[u8]>), b: &(u64, Box<[u8]>)| {
            a.0 + PAGE_BYTES == b.0 && !b.0.is_multiple_of(CHUNK as u64)
        };
        for run in pages.chunk_by(adjacent) {
            let Some((offset, _)) = run.first() else { continue };
            self.file.write_pages(run.iter().map(|(_, page)| &page[..]), *offset)?;
            hit("page.written")?;
        }
        Ok(())
    }
}

impl StorageBackend for CatalogFile {
    fn len(&self) -> io::Result<u64> {
        self.unless_failed(|_| Ok(self.read_guard().len))
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.unless_failed(|inner| inner.read(&self.read_guard(), out, offset))
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.unless_failed(|_| self.resize(len))
    }

    fn sync_data(&self) -> io::Result<()> {
        self.unless_failed(|inner| {
            if inner.mode == Mode::Overlay {
                return Ok(());
            }
            inner.write_out(&mut self.write_guard())?;
            inner.file.sync_data()?;
            hit("page.flushed")
        })
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.unless_failed(|inner| inner.collect(&mut self.write_guard(), data, offset))
    }
}
