//! The catalog: one transactional store for volumes, snapshots, groups and attachments, kept in the
//! pool beside the files that it speaks of, so that both meet a power cut together. Rows are JSON,
//! keyed by id; a second table leads from names to ids. Every commit is durable when it returns.

mod file;
mod snapshots;
mod verify;
mod version_1;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use nix::errno::Errno;
use redb::{
    Database, ReadTransaction, ReadableDatabase, ReadableTable, TableDefinition, WriteTransaction,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tracing::{info, warn};

use super::direct::DirectFile;
use super::error::{Context, Error, Kind, Result};
use super::fail_point::reach;
use super::model::{Attachment, Group, Inline, Volume};
use super::pool::sync_directory;
use file::{CatalogFile, Mode};

pub use file::Relief;
pub use snapshots::SnapshotFile;
pub use verify::{read_verified, verify_or_rescue};

type Table = TableDefinition<'static, &'static str, &'static [u8]>;

const NAMES: TableDefinition<&str, &str> = TableDefinition::new("names");
const META: TableDefinition<&str, &str> = TableDefinition::new("meta");
const FORMAT_VERSION: &str = "2";

/// Key of `META`: the version of the format.
const VERSION: &str = "version";
/// Key of `META` that is there until a start has searched the directories for leftover files.
const SWEEP: &str = "sweep";

/// Memory for pages of the catalog, in bytes.
const CACHE_BYTES: usize = 4 << 20;

/// A row type and its table.
pub trait Row: Serialize + DeserializeOwned {
    const TABLE: Table;

    fn key(&self) -> &str;

    fn find(tx: &ReadTransaction, key: &str) -> Result<Option<Self>> {
        find_in(tx, Self::TABLE, key)
    }

    fn store(&self, tx: &WriteTransaction) -> Result<()> {
        insert_into(tx, Self::TABLE, self)
    }

    fn discard(tx: &WriteTransaction, key: &str) -> Result<()> {
        tx.open_table(Self::TABLE).map_err(failed)?.remove(key).map_err(failed)?;
        Ok(())
    }
}

/// A row that has a name beside its id. Names of different types do not collide.
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
row!(Group, "groups", id, Kind::GroupSnapshot);
row!(Attachment, "attachments", volume_id);
row!(Inline, "inline", handle);

/// The size of a page of the store, in bytes.
const PAGE_BYTES: u64 = 4096;

pub struct Catalog {
    path: PathBuf,
    relief: Relief,
    /// Held for reading while a transaction is written, and for writing while the store is opened again.
    store: RwLock<Opened>,
    /// Files that were removed since the last change, which will record it.
    removed: Mutex<Vec<SnapshotFile>>,
}

struct Opened {
    database: Database,
    file: CatalogFile,
}

impl Opened {
    fn new(file: DirectFile, mode: Mode, relief: Relief) -> Result<Self> {
        let file = CatalogFile::new(file, mode, relief).map_err(|e| Error::io("catalog", e))?;
        let database = Database::builder()
            .set_cache_size(CACHE_BYTES)
            .create_with_backend(file.clone())
            .map_err(failed)?;
        Ok(Self { database, file })
    }

    fn open(path: &Path, mode: Mode, relief: &Relief) -> Result<Self> {
        Self::new(open_file(path)?, mode, relief.clone())
    }

    /// Whether it can be used as a file of this mode. A durable one serves readers, too.
    fn serves(&self, mode: Mode) -> bool {
        !self.file.has_failed() && (mode == Mode::Overlay || self.file.is_durable())
    }
}

fn open_file(path: &Path) -> Result<DirectFile> {
    DirectFile::open(path).context(|| format!("opening the catalog {}", path.display()))
}

impl fmt::Debug for Catalog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Catalog")
    }
}

impl Catalog {
    /// Opens the catalog at `path`, or makes it. After a crash the last commit is what is found. `relief`: room that is held
    /// back for it.
    pub fn open(path: &Path, relief: Relief) -> Result<Self> {
        let making = || format!("making the catalog {}", path.display());
        if !path.try_exists().context(making)? {
            // Under another name: the store does not open what a crash leaves of its own making.
            let part = path.with_extension("part");
            drop(Self::with(&part, DirectFile::create(&part).context(making)?, relief.clone())?);
            reach("catalog.made")?;
            fs::rename(&part, path).context(making)?;
            reach("catalog.named")?;
            path.parent().map_or(Ok(()), sync_directory)?;
        }
        Self::with(path, open_file(path)?, relief)
    }

    fn with(path: &Path, file: DirectFile, relief: Relief) -> Result<Self> {
        let is_blank = file.len().context(|| format!("opening {}", path.display()))? == 0;
        let store = RwLock::new(Opened::new(file, Mode::Durable, relief.clone())?);
        let catalog = Self { path: path.to_owned(), relief, store, removed: Mutex::default() };
        catalog.prepare(is_blank)?;
        Ok(catalog)
    }

    /// The store, opened again if it has met an I/O error since.
    fn store(&self, mode: Mode) -> Result<RwLockReadGuard<'_, Opened>> {
        let store = self.store.read().unwrap_or_else(PoisonError::into_inner);
        if store.serves(mode) {
            return Ok(store);
        }
        drop(store);
        self.reopen(mode)?;
        Ok(self.store.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Opens the store from what the disk holds: what was committed before, and perhaps what was being committed when
    /// the I/O error came. Readers of the former store get an error at their next access to the file. While the disk
    /// does not accept writes, readers get a store that keeps the repairs of opening in memory.
    fn reopen(&self, mode: Mode) -> Result<()> {
        let mut store = self.store.write().unwrap_or_else(PoisonError::into_inner);
        if store.serves(mode) {
            return Ok(());
        }
        store.file.retire();
        verify::verify(&self.path)?;
        *store = match Opened::open(&self.path, Mode::Durable, &self.relief) {
            Ok(opened) => {
                warn!("the catalog met an I/O error; it was opened again");
                opened
            }
            Err(error) if mode == Mode::Overlay => {
                warn!(%error, "the catalog cannot be written; it is read-only until the next change succeeds");
                Opened::open(&self.path, Mode::Overlay, &self.relief)?
            }
            Err(error) => return Err(error),
        };
        Ok(())
    }

    /// Fails while the catalog cannot be written.
    pub fn check_writable(&self) -> Result<()> {
        self.store(Mode::Durable).map(drop)
    }

    /// Makes the tables, where nothing was written yet, converts those of an earlier version, and refuses a later one.
    fn prepare(&self, is_blank: bool) -> Result<()> {
        if is_blank {
            return self.write(|tx| {
                tx.inner.open_table(Volume::TABLE).map_err(failed)?;
                tx.inner.open_table(Group::TABLE).map_err(failed)?;
                tx.inner.open_table(Attachment::TABLE).map_err(failed)?;
                tx.inner.open_table(Inline::TABLE).map_err(failed)?;
                tx.inner.open_table(NAMES).map_err(failed)?;
                snapshots::make_tables(&tx.inner)?;
                let mut meta = tx.inner.open_table(META).map_err(failed)?;
                meta.insert(VERSION, FORMAT_VERSION).map_err(failed)?;
                Ok(())
            });
        }
        if self.read()?.is_of_version_1()? {
            info!(to = FORMAT_VERSION, "converting the catalog from format version 1");
            self.write(|tx| version_1::migrate(&tx.inner))?;
        }
        Ok(())
    }

    /// A consistent view of all rows.
    pub fn read(&self) -> Result<Reading> {
        self.store(Mode::Overlay)?.database.begin_read().map(Reading).map_err(failed)
    }

    /// Runs `change` in a transaction: all of it is durable on `Ok`, none of it happened on `Err`.
    pub fn write<T>(&self, change: impl FnOnce(&Writing) -> Result<T>) -> Result<T> {
        let store = self.store(Mode::Durable)?;
        let has_room = store.file.has_room();
        let tx = Writing { inner: store.database.begin_write().map_err(failed)?, has_room };
        let removed = std::mem::take(&mut *self.removed());
        // First: the change may name one of them again.
        let result = tx
            .are_removed(&removed)
            .and_then(|()| change(&tx))
            .and_then(|value| reach("catalog.changed").map(|()| value));
        let result = match result {
            Ok(value) => tx.inner.commit().map_err(failed).map(|()| value),
            Err(error) => {
                // After an I/O error this fails too; the first one is reported.
                let _ = tx.inner.abort();
                Err(error)
            }
        };
        if result.is_err() {
            self.removed().extend(removed);
        }
        let value = result?;
        reach("catalog.committed")?;
        Ok(value)
    }

    /// To be called when a file that was to be removed is gone. It is recorded with the next change.
    pub fn is_removed(&self, file: SnapshotFile) {
        self.removed().push(file);
    }

    fn removed(&self) -> MutexGuard<'_, Vec<SnapshotFile>> {
        self.removed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A read transaction.
pub struct Reading(ReadTransaction);

impl Reading {
    /// Whether it has the former format. A catalog that has a name has its tables: one that seems to have none was damaged,
    /// and is not taken for a new one.
    fn is_of_version_1(&self) -> Result<bool> {
        let meta = self.0.open_table(META);
        let meta = meta.map_err(|_| verify::damaged("it has lost its tables"))?;
        let version = meta.get(VERSION).map_err(failed)?;
        match version.as_ref().map(|version| version.value()) {
            Some(FORMAT_VERSION) => Ok(false),
            Some(version_1::FORMAT_VERSION) => Ok(true),
            other => Err(Error::Damaged(format!(
                "the catalog has format version {}, and this program knows 1 and {FORMAT_VERSION}; use the version of \
                 csi-loopback that wrote it, or a later one",
                other.unwrap_or("none")
            ))),
        }
    }

    /// Whether leftover files have to be looked for in the directories.
    pub fn is_sweep_due(&self) -> Result<bool> {
        let meta = self.0.open_table(META).map_err(failed)?;
        Ok(meta.get(SWEEP).map_err(failed)?.is_some())
    }

    pub fn get<R: Row>(&self, key: &str) -> Result<Option<R>> {
        R::find(&self.0, key)
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

    /// All rows for which `wanted` holds. Of snapshots, those that exist or are being created.
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
        row.store(&self.inner)
    }

    pub fn remove<R: Row>(&self, key: &str) -> Result<()> {
        R::discard(&self.inner, key)
    }

    /// Records that no leftover files have to be looked for.
    pub fn sweep_is_done(&self) -> Result<()> {
        self.inner.open_table(META).map_err(failed)?.remove(SWEEP).map_err(failed)?;
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

fn find_in<R: Row>(tx: &ReadTransaction, table: Table, key: &str) -> Result<Option<R>> {
    let table = tx.open_table(table).map_err(failed)?;
    let row = table.get(key).map_err(failed)?;
    row.map(|row| decode(key, row.value())).transpose()
}

fn insert_into<R: Row>(tx: &WriteTransaction, table: Table, row: &R) -> Result<()> {
    let json = serde_json::to_vec(row).map_err(|e| Error::Failed(format!("catalog: {e}")))?;
    tx.open_table(table).map_err(failed)?.insert(row.key(), json.as_slice()).map_err(failed)?;
    Ok(())
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
    serde_json::from_slice(json).map_err(|e| unreadable(key, &e))
}

fn unreadable(key: &str, error: &serde_json::Error) -> Error {
    Error::Damaged(format!("catalog: the row of {key:?} is not readable: {error}"))
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
pub mod tests;
