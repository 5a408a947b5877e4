//! Whether a catalog is whole, before anything in it is believed. Every checksum is compared with what the disk holds, and
//! not with what the page cache holds; nothing is written.

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

use super::file::{CatalogFile, Mode, Relief};
use super::{PAGE_BYTES, Reading, failed, version_1};
use crate::backend::direct::{CHUNK, DirectFile};
use crate::backend::error::{Context, Error, Result};
use crate::backend::fail_point::reach;
use crate::backend::pool::sync_directory;

/// A catalog up to this size, in bytes, is verified on a copy in memory. A larger one is read page by page, through the page
/// cache where that holds none of it yet: the kernel then keeps as much of it as there is memory for.
const MAX_COPIED_BYTES: u64 = 32 << 20;

/// Memory for pages of a larger catalog while it is verified, in bytes.
const CACHE_BYTES: usize = 16 << 20;

/// What `read` finds in the catalog at `path`, which is verified first. Nothing is repaired or changed.
pub fn read_verified<T>(path: &Path, read: impl FnOnce(&Reading) -> Result<T>) -> Result<T> {
    unless_it_panics(|| {
        let store = verified(open(path)?)?;
        let rows = || store.begin_read().map(Reading).map_err(failed);
        if rows()?.is_of_version_1()? {
            let tx = store.begin_write().map_err(failed)?;
            version_1::migrate(&tx)?;
            tx.commit().map_err(failed)?;
        }
        read(&rows()?)
    })
}

/// Fails unless the catalog at `path` is whole.
pub fn verify(path: &Path) -> Result<()> {
    unless_it_panics(|| verified(open(path)?).map(drop))
}

/// Like [`verify`], for a start. A catalog that is damaged on disk and whole in the page cache is written again from
/// there: pages that a failed write left in the cache are lost for good when the cache is dropped.
pub fn verify_or_rescue(path: &Path) -> Result<()> {
    let Err(damage) = verify(path) else { return Ok(()) };
    let Ok(file) = File::open(path) else { return Err(damage) };
    let cached = copy_of(|out, offset| file.read_at(out, offset));
    let Ok(cached) = cached else { return Err(damage) };
    if unless_it_panics(|| verified(open_copy(&cached)?)).is_err() {
        return Err(damage);
    }
    error!(%damage, "the catalog is damaged on disk and whole in the page cache; writing it again");
    replace(path, &cached)
}

/// The store below panics at some of what cannot be.
fn unless_it_panics<T>(read: impl FnOnce() -> Result<T>) -> Result<T> {
    let result = catch_unwind(AssertUnwindSafe(read));
    result.unwrap_or_else(|_| Err(damaged("it contradicts itself")))
}

/// Opens what the disk holds. Changes stay in memory.
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
    let file = file.through_an_empty_cache().context(reading)?;
    let file = CatalogFile::new(file, Mode::Overlay, Relief::default()).context(reading)?;
    let mut builder = Database::builder();
    builder.set_cache_size(CACHE_BYTES).create_with_backend(file).map_err(damaged)
}

fn open_copy(copy: &File) -> Result<Database> {
    Database::open(format!("/proc/self/fd/{}", copy.as_raw_fd())).map_err(damaged)
}

/// Compares every checksum of a store, and looks at the version of its format.
fn verified(mut store: Database) -> Result<Database> {
    if !store.check_integrity().map_err(damaged)? {
        return Err(damaged("its checksums do not match"));
    }
    store.begin_read().map(Reading).map_err(failed)?.is_of_version_1()?;
    Ok(store)
}

/// Replaces the catalog at `path` by a copy. The former file stays, as `catalog.damaged`.
fn replace(path: &Path, copy: &File) -> Result<()> {
    let doing = || format!("writing {} again", path.display());
    let part = path.with_extension("part");
    let file = DirectFile::create(&part).context(doing)?;
    file.resize(copy.metadata().context(doing)?.len()).context(doing)?;
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

/// A copy in memory of what `read` returns: bytes at an offset, 0 at the end.
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

pub fn damaged(what: impl fmt::Display) -> Error {
    Error::Damaged(format!("the catalog is damaged: {what}; restore it from a backup"))
}
