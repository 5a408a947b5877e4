//! Verifies the integrity of a catalog before it is used. All checksums are compared with the data
//! on disk, not with the page cache. Nothing is written.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use nix::sys::memfd::{MFdFlags, memfd_create};
use redb::{Database, ReadableDatabase};
use tracing::error;

use super::file::{CatalogFile, Mode, ReleaseReserve};
use super::{PAGE_BYTES, ReadTx, failed};
use crate::direct::{CHUNK, DirectFile};
use crate::error::{Context, Error, Result};
use crate::fail_point::reach;
use crate::pool::sync_directory;

/// Maximum size of a catalog that is verified on a copy in memory, in bytes. A larger one is read
/// page by page, through the page cache if that holds none of it: the kernel then limits the
/// memory.
pub(super) const MAX_COPIED_BYTES: u64 = 32 << 20;

/// Size of the page cache for verifying a larger catalog, in bytes.
const CACHE_BYTES: usize = 16 << 20;

/// Verifies the catalog at `path` and runs `read` on it. Nothing is repaired or changed.
pub fn read_verified<T>(path: &Path, read: impl FnOnce(&ReadTx) -> Result<T>) -> Result<T> {
    catch_panics(|| {
        let store = verified(open(path)?)?;
        let rows = store.begin_read().map(ReadTx).map_err(failed)?;
        read(&rows)
    })
}

/// Fails if the catalog at `path` is damaged.
pub fn verify(path: &Path) -> Result<()> {
    catch_panics(|| verified(open(path)?).map(drop))
}

/// Like [`verify`], for a start. A catalog that is damaged on disk but intact in the page cache is
/// rewritten from the cache: pages of a failed write exist only there, and are lost when the kernel
/// drops them.
pub fn verify_or_repair(path: &Path) -> Result<()> {
    let Err(damage) = verify(path) else { return Ok(()) };
    let Ok(file) = File::open(path) else { return Err(damage) };
    let cached = copy_of(|out, offset| file.read_at(out, offset));
    let Ok(cached) = cached else { return Err(damage) };
    if catch_panics(|| verified(open_copy(&cached)?)).is_err() {
        return Err(damage);
    }
    error!(%damage, "the catalog is damaged on disk but intact in the page cache; rewriting it");
    replace(path, &cached)
}

/// Opens a store and verifies it. No file is opened.
pub(super) fn open_verified(file: CatalogFile) -> Result<Database> {
    catch_panics(|| verified(open_in_place(file)?))
}

/// redb panics on some corrupt files.
fn catch_panics<T>(read: impl FnOnce() -> Result<T>) -> Result<T> {
    let result = catch_unwind(AssertUnwindSafe(read));
    result.unwrap_or_else(|_| Err(damaged("its contents are inconsistent")))
}

/// Opens the data on disk. Changes stay in memory.
fn open(path: &Path) -> Result<Database> {
    let file = match DirectFile::open_for_reading(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(damaged("it is missing")),
        Err(e) => return Err(Error::io("opening the catalog", e)),
    };
    let reading = || "reading the catalog".to_owned();
    if file.len().context(reading)? <= MAX_COPIED_BYTES {
        return open_copy(&copy_of(|out, offset| file.read_some(out, offset))?);
    }
    let file = file.via_empty_page_cache().context(reading)?;
    open_in_place(
        CatalogFile::new(file, Mode::Overlay, ReleaseReserve::default()).context(reading)?,
    )
}

fn open_in_place(file: CatalogFile) -> Result<Database> {
    let mut builder = Database::builder();
    builder.set_cache_size(CACHE_BYTES).create_with_backend(file).map_err(unusable)
}

fn open_copy(copy: &File) -> Result<Database> {
    Database::open(format!("/proc/self/fd/{}", copy.as_raw_fd())).map_err(unusable)
}

/// Verifies every checksum of a store and its format version.
fn verified(mut store: Database) -> Result<Database> {
    if !store.check_integrity().map_err(unusable)? {
        return Err(damaged("its checksums do not match"));
    }
    store.begin_read().map(ReadTx).map_err(failed)?.check_version()?;
    Ok(store)
}

/// Replaces the catalog at `path` with a copy. The previous file is kept as `catalog.damaged`.
fn replace(path: &Path, copy: &File) -> Result<()> {
    let doing = || format!("rewriting {}", path.display());
    let part = path.with_extension("part");
    let file = DirectFile::create(&part).context(doing)?;
    file.grow(0, copy.metadata().context(doing)?.len()).context(doing)?;
    let mut bytes = vec![0; CHUNK];
    let mut offset = 0;
    while let read @ 1.. = copy.read_at(&mut bytes, offset).context(doing)? {
        file.write_pages(bytes[..read].chunks_exact(PAGE_BYTES as usize), offset).context(doing)?;
        offset += read as u64;
    }
    file.sync_data().context(doing)?;
    reach("catalog.written_again")?;
    verify(&part)?;
    let damaged = path.with_extension("damaged");
    match fs::remove_file(&damaged) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(Error::io(doing(), e)),
        _ => {}
    }
    fs::hard_link(path, &damaged).context(doing)?;
    fs::rename(&part, path).context(doing)?;
    reach("catalog.replaced")?;
    path.parent().map_or(Ok(()), sync_directory)
}

/// Copies a file to memory. `read` reads bytes at an offset and returns 0 at the end.
fn copy_of(read: impl Fn(&mut [u8], u64) -> io::Result<usize>) -> Result<File> {
    let copying = || "reading the catalog".to_owned();
    let mut copy =
        memfd_create("catalog", MFdFlags::MFD_CLOEXEC).map(File::from).context(copying)?;
    let mut bytes = vec![0; CHUNK];
    let mut offset = 0;
    while let read @ 1.. = read(&mut bytes, offset).context(copying)? {
        copy.write_all(&bytes[..read]).context(copying)?;
        offset += read as u64;
    }
    if offset == 0 { Err(damaged("it is empty")) } else { Ok(copy) }
}

/// An error of the disk or of the process is not damage. One of redb without a code of the system
/// is: contents that it does not accept.
fn unusable(error: impl Into<redb::Error>) -> Error {
    match error.into() {
        redb::Error::Io(source) if source.raw_os_error().is_some() => {
            Error::io("reading the catalog", source)
        }
        other => damaged(other),
    }
}

pub fn damaged(what: impl fmt::Display) -> Error {
    Error::Damaged(format!(
        "the catalog is damaged: {what}; restore catalog.redb from a backup, or save the volumes \
         (docs/reference/driver.md, Recovery)"
    ))
}
