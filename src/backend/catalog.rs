//! The catalog: one transactional store for volumes, snapshots, groups and attachments, kept in the
//! pool beside the files that it speaks of, so that both meet a power cut together. Rows are JSON,
//! keyed by id; a second table leads from names to ids. Every commit is durable when it returns.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::memfd::{MFdFlags, memfd_create};
use redb::{
    Database, ReadTransaction, ReadableDatabase, ReadableTable, StorageBackend, TableDefinition,
    WriteTransaction,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tracing::warn;

use super::error::{Context, Error, Kind, Result};
use super::fail_point::{meet, reach};
use super::model::{Attachment, Group, Inline, Snapshot, Volume};
use super::pool::sync_directory;

type Table = TableDefinition<'static, &'static str, &'static [u8]>;

const NAMES: TableDefinition<&str, &str> = TableDefinition::new("names");
const META: TableDefinition<&str, &str> = TableDefinition::new("meta");
const FORMAT_VERSION: &str = "1";

/// Memory for pages of the catalog, in bytes.
const CACHE_BYTES: usize = 4 << 20;

/// A row type, its table and how its names are told from those of other types.
pub trait Row: Serialize + DeserializeOwned {
    const TABLE: Table;
    fn key(&self) -> &str;
}

/// A row that has a name beside its id.
pub trait Named: Row {
    const KIND: Kind;
    fn name(&self) -> &str;
}

macro_rules! row {
    ($type:ty, $table:literal, $key:ident) => {
        impl Row for $type {
            const TABLE: Table = TableDefinition::new($table);
            fn key(&self) -> &str {
                &self.$key
            }
        }
    };
    ($type:ty, $table:literal, $key:ident, $kind:expr) => {
        row!($type, $table, $key);
        impl Named for $type {
            const KIND: Kind = $kind;
            fn name(&self) -> &str {
                &self.name
            }
        }
    };
}

row!(Volume, "volumes", id, Kind::Volume);
row!(Snapshot, "snapshots", id, Kind::Snapshot);
row!(Group, "groups", id, Kind::GroupSnapshot);
row!(Attachment, "attachments", volume_id);
row!(Inline, "inline", handle);

/// Room that a small catalog holds, in bytes. Constant, so that it does not come and go.
const LEAST_BYTES: u64 = 4 << 20;

/// The file under the store. It takes room when the store grows, not when a page is first written,
/// and the room to double once more ahead of that. Where that is not to be had nothing new is given
/// a name: what there is for growth is left to deletions, which need some too. (Were the store to
/// meet ENOSPC itself it would refuse everything until it is opened again.)
#[derive(Debug, Clone)]
struct Reserved {
    file: Arc<File>,
    /// Whether the room that [`Self::held`] says is there.
    ahead: Arc<AtomicBool>,
    /// An operation has failed: the store above then refuses everything until it is opened again.
    failed: Arc<AtomicBool>,
}

impl Reserved {
    fn new(file: Arc<File>) -> Self {
        let reserved = Self { file, ahead: Arc::default(), failed: Arc::default() };
        reserved.reserve_ahead();
        reserved
    }

    /// How much room is held for a store of `len` bytes.
    fn held(len: u64) -> u64 {
        LEAST_BYTES.max(2 * len)
    }

    fn reserve_ahead(&self) {
        let held = self.file.metadata().map_or(0, |metadata| Self::held(metadata.len()));
        let mode = FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let taken = fallocate(&self.file, mode, 0, held as i64);
        // A filesystem that cannot reserve is taken as it is.
        let full = matches!(taken, Err(Errno::ENOSPC | Errno::EDQUOT));
        self.ahead.store(!full, Ordering::Relaxed);
    }

    /// Does something with the file, unless anything has failed before: whoever still has this store
    /// when it was opened again must not write.
    fn unless_failed<T>(&self, operate: impl FnOnce(&File) -> io::Result<T>) -> io::Result<T> {
        if self.failed.load(Ordering::Acquire) {
            return Err(io::Error::other("there was an I/O error before"));
        }
        operate(&self.file).inspect_err(|_| self.failed.store(true, Ordering::Release))
    }

    /// Writes all of the file again and waits until it is on disk: after a flush that failed, pages
    /// that are on no disk pass for clean ones.
    fn rewrite(&self) -> io::Result<()> {
        let mut bytes = vec![0; self.file.metadata()?.len() as usize];
        self.file.read_exact_at(&mut bytes, 0)?;
        self.file.write_all_at(&bytes, 0)?;
        self.file.sync_all()
    }

    fn resize(&self, len: u64) -> io::Result<()> {
        let old = self.file.metadata()?.len();
        // Asked for what is there already, a full XFS would say ENOSPC.
        let reserved = self.ahead.load(Ordering::Relaxed) && len <= Self::held(old);
        self.file.set_len(len)?;
        if len > old && !reserved {
            let reserve = nix::fcntl::posix_fallocate(&self.file, old as i64, (len - old) as i64);
            if let Err(errno) = reserve {
                self.file.set_len(old)?;
                return Err(errno.into());
            }
        }
        self.reserve_ahead();
        meet("page.sized")
    }

    fn has_room(&self) -> bool {
        if !self.ahead.load(Ordering::Relaxed) {
            self.reserve_ahead();
        }
        self.ahead.load(Ordering::Relaxed)
    }
}

impl StorageBackend for Reserved {
    fn len(&self) -> io::Result<u64> {
        self.unless_failed(|file| Ok(file.metadata()?.len()))
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.unless_failed(|file| file.read_exact_at(out, offset))
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.unless_failed(|_| self.resize(len))
    }

    fn sync_data(&self) -> io::Result<()> {
        self.unless_failed(|file| file.sync_data().and_then(|()| meet("page.flushed")))
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.unless_failed(|file| {
            file.write_all_at(data, offset).and_then(|()| meet("page.written"))
        })
    }
}

pub struct Catalog {
    /// Held for reading while a transaction is written, and for writing while the store is opened
    /// anew.
    store: RwLock<Opened>,
}

struct Opened {
    database: Database,
    file: Reserved,
}

impl Opened {
    fn new(file: Arc<File>) -> Result<Self> {
        let file = Reserved::new(file);
        let database = Database::builder()
            .set_cache_size(CACHE_BYTES)
            .create_with_backend(file.clone())
            .map_err(failed)?;
        Ok(Self { database, file })
    }

    fn has_failed(&self) -> bool {
        self.file.failed.load(Ordering::Acquire)
    }
}

impl fmt::Debug for Catalog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Catalog")
    }
}

impl Catalog {
    /// Opens the catalog at `path`, or makes it. After a crash the last commit is what is found.
    pub fn open(path: &Path) -> Result<Self> {
        let making = || format!("making the catalog {}", path.display());
        if !path.try_exists().context(making)? {
            // Under another name: the store does not open what a crash leaves of its own making.
            let part = path.with_extension("part");
            drop(Self::open_file(&part, true)?);
            reach("catalog.made")?;
            fs::rename(&part, path).context(making)?;
            reach("catalog.named")?;
            path.parent().map_or(Ok(()), sync_directory)?;
        }
        Self::open_file(path, false)
    }

    fn open_file(path: &Path, anew: bool) -> Result<Self> {
        let file = File::options()
            .read(true)
            .write(true)
            .create(anew)
            .truncate(anew)
            .mode(0o600)
            .open(path)
            .context(|| format!("opening the catalog {}", path.display()))?;
        let opening = || format!("opening the catalog {}", path.display());
        let is_blank = file.metadata().context(opening)?.len() == 0;
        let catalog = Self { store: RwLock::new(Opened::new(Arc::new(file))?) };
        catalog.prepare(is_blank)?;
        Ok(catalog)
    }

    /// The store, opened again if it has met an I/O error since. What was committed before is there,
    /// what was being committed then may be. Readers of the former store go on with what they have in
    /// memory, or get an error: it reads and writes nothing any more.
    fn store(&self) -> Result<RwLockReadGuard<'_, Opened>> {
        let store = self.store.read().unwrap_or_else(PoisonError::into_inner);
        if !store.has_failed() {
            return Ok(store);
        }
        drop(store);
        let mut store = self.store.write().unwrap_or_else(PoisonError::into_inner);
        if store.has_failed() {
            let again = || "opening the catalog again after an I/O error".to_owned();
            store.file.rewrite().context(again)?;
            *store = Opened::new(store.file.file.clone())?;
            warn!("the catalog met an I/O error; it was opened again");
        }
        drop(store);
        Ok(self.store.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Makes the tables, where nothing was written yet, and checks the format's version. A catalog that has a name has its tables: one
    /// that seems to have none was damaged, and is not taken for a new one.
    fn prepare(&self, is_blank: bool) -> Result<()> {
        if !is_blank && self.read()?.0.open_table(META).is_err() {
            return Err(damaged("it has lost its tables"));
        }
        if is_blank {
            self.write(|tx| {
                tx.inner.open_table(Volume::TABLE).map_err(failed)?;
                tx.inner.open_table(Snapshot::TABLE).map_err(failed)?;
                tx.inner.open_table(Group::TABLE).map_err(failed)?;
                tx.inner.open_table(Attachment::TABLE).map_err(failed)?;
                tx.inner.open_table(NAMES).map_err(failed)?;
                let mut meta = tx.inner.open_table(META).map_err(failed)?;
                meta.insert("version", FORMAT_VERSION).map_err(failed)?;
                Ok(())
            })?;
        }
        // It came later than the others.
        if self.read()?.0.open_table(Inline::TABLE).is_err() {
            self.write(|tx| tx.inner.open_table(Inline::TABLE).map(drop).map_err(failed))?;
        }
        let tx = self.read()?;
        let meta = tx.0.open_table(META).map_err(failed)?;
        let version = meta.get("version").map_err(failed)?;
        match version.as_ref().map(|version| version.value()) {
            Some(FORMAT_VERSION) => Ok(()),
            other => Err(Error::Damaged(format!(
                "the catalog has format version {other:?}, this program knows {FORMAT_VERSION}"
            ))),
        }
    }

    /// A consistent view of all rows.
    pub fn read(&self) -> Result<Reading> {
        self.store()?.database.begin_read().map(Reading).map_err(failed)
    }

    /// Runs `change` in a transaction: all of it is durable on `Ok`, none of it happened on `Err`.
    pub fn write<T>(&self, change: impl FnOnce(&Writing) -> Result<T>) -> Result<T> {
        let store = self.store()?;
        let has_room = store.file.has_room();
        let tx = Writing { inner: store.database.begin_write().map_err(failed)?, has_room };
        let result = change(&tx).and_then(|value| reach("catalog.changed").map(|()| value));
        match result {
            Ok(value) => {
                tx.inner.commit().map_err(failed)?;
                reach("catalog.committed")?;
                Ok(value)
            }
            Err(error) => {
                // After an I/O error this fails too; the first one is what has to be told.
                let _ = tx.inner.abort();
                Err(error)
            }
        }
    }
}

/// What `read` finds in the catalog at `path`, of which every checksum was looked at: without that a
/// flipped bit passes for what was written. It is done on a copy in memory, so that nothing is
/// repaired or changed. Memory: the size of the catalog, for as long as this runs.
pub fn read_verified<T>(path: &Path, read: impl FnOnce(&Reading) -> Result<T>) -> Result<T> {
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(damaged("it is missing")),
        Err(e) => return Err(Error::io("opening the catalog", e)),
    };
    let copying = || "copying the catalog".to_owned();
    let mut copy =
        memfd_create("catalog", MFdFlags::MFD_CLOEXEC).map(File::from).context(copying)?;
    if io::copy(&mut file, &mut copy).context(copying)? == 0 {
        return Err(damaged("it is empty"));
    }
    let copy_path = format!("/proc/self/fd/{}", copy.as_raw_fd());
    // The store below panics at some of what cannot be.
    let result = catch_unwind(AssertUnwindSafe(|| {
        let whole = Database::open(&copy_path).and_then(|mut store| store.check_integrity());
        match whole {
            Ok(true) => {}
            Ok(false) => return Err(damaged("its checksums do not match")),
            Err(error) => return Err(damaged(error)),
        }
        let catalog = Catalog::open(Path::new(&copy_path))?;
        let rows = catalog.read()?;
        read(&rows)
    }));
    result.unwrap_or_else(|_| Err(damaged("it contradicts itself")))
}

fn damaged(what: impl fmt::Display) -> Error {
    Error::Damaged(format!("the catalog is damaged: {what}; restore it from a backup"))
}

/// A read transaction.
pub struct Reading(ReadTransaction);

impl Reading {
    pub fn get<R: Row>(&self, key: &str) -> Result<Option<R>> {
        let table = self.0.open_table(R::TABLE).map_err(failed)?;
        let row = table.get(key).map_err(failed)?;
        row.map(|row| decode(key, row.value())).transpose()
    }

    pub fn by_name<R: Named>(&self, name: &str) -> Result<Option<R>> {
        let names = self.0.open_table(NAMES).map_err(failed)?;
        let id = names.get(name_key::<R>(name).as_str()).map_err(failed)?;
        id.map_or(Ok(None), |id| self.get(id.value()))
    }

    /// Visits the rows after the key `after`, in order of key, until `visit` says false.
    pub fn scan<R: Row>(
        &self,
        after: Option<&str>,
        visit: impl FnMut(R) -> Result<bool>,
    ) -> Result<()> {
        scan(&self.0.open_table(R::TABLE).map_err(failed)?, after, visit)
    }

    /// All rows for which `wanted` holds.
    pub fn select<R: Row>(&self, wanted: impl Fn(&R) -> bool) -> Result<Vec<R>> {
        select(&self.0.open_table(R::TABLE).map_err(failed)?, wanted)
    }
}

/// A write transaction.
pub struct Writing {
    inner: WriteTransaction,
    has_room: bool,
}

impl Writing {
    pub fn put<R: Row>(&self, row: &R) -> Result<()> {
        let mut table = self.inner.open_table(R::TABLE).map_err(failed)?;
        let json = serde_json::to_vec(row).map_err(|e| Error::Failed(format!("catalog: {e}")))?;
        table.insert(row.key(), json.as_slice()).map_err(failed)?;
        Ok(())
    }

    pub fn remove<R: Row>(&self, key: &str) -> Result<()> {
        self.inner.open_table(R::TABLE).map_err(failed)?.remove(key).map_err(failed)?;
        Ok(())
    }

    /// All rows, as this transaction has them: nobody else changes any until it ends.
    pub fn all<R: Row>(&self) -> Result<Vec<R>> {
        select(&self.inner.open_table(R::TABLE).map_err(failed)?, |_| true)
    }

    /// Fails with `Exhausted` when the catalog has no room to grow.
    pub fn check_room(&self) -> Result<()> {
        if self.has_room { Ok(()) } else { Err(Error::io("catalog", Errno::ENOSPC.into())) }
    }

    /// Makes the row's name lead to its id. `Exhausted` when the catalog has no room to grow.
    pub fn name<R: Named>(&self, row: &R) -> Result<()> {
        self.check_room()?;
        let mut names = self.inner.open_table(NAMES).map_err(failed)?;
        names.insert(name_key::<R>(row.name()).as_str(), row.key()).map_err(failed)?;
        Ok(())
    }

    /// Frees the row's name for another, if it still leads to this row.
    pub fn unname<R: Named>(&self, row: &R) -> Result<()> {
        let key = name_key::<R>(row.name());
        let mut names = self.inner.open_table(NAMES).map_err(failed)?;
        let ours =
            names.get(key.as_str()).map_err(failed)?.is_some_and(|id| id.value() == row.key());
        if ours {
            names.remove(key.as_str()).map_err(failed)?;
        }
        Ok(())
    }
}

fn scan<R: Row>(
    table: &impl ReadableTable<&'static str, &'static [u8]>,
    after: Option<&str>,
    mut visit: impl FnMut(R) -> Result<bool>,
) -> Result<()> {
    use std::ops::Bound::{Excluded, Unbounded};
    let from = after.map_or(Unbounded, Excluded);
    for entry in table.range::<&str>((from, Unbounded)).map_err(failed)? {
        let (key, row) = entry.map_err(failed)?;
        if !visit(decode(key.value(), row.value())?)? {
            break;
        }
    }
    Ok(())
}

fn select<R: Row>(
    table: &impl ReadableTable<&'static str, &'static [u8]>,
    wanted: impl Fn(&R) -> bool,
) -> Result<Vec<R>> {
    let mut rows = Vec::new();
    scan(table, None, |row| {
        if wanted(&row) {
            rows.push(row);
        }
        Ok(true)
    })?;
    Ok(rows)
}

fn name_key<R: Named>(name: &str) -> String {
    format!("{}/{name}", R::KIND)
}

fn decode<R: Row>(key: &str, json: &[u8]) -> Result<R> {
    serde_json::from_slice(json)
        .map_err(|e| Error::Damaged(format!("catalog: the row of {key:?} is not readable: {e}")))
}

fn failed(error: impl Into<redb::Error>) -> Error {
    match error.into() {
        redb::Error::Io(source) => Error::io("catalog", source),
        redb::Error::Corrupted(what) => {
            Error::Damaged(format!("catalog: {what}; run `pool check`"))
        }
        other => Error::Failed(format!("catalog: {other}")),
    }
}

#[cfg(test)]
mod tests;
