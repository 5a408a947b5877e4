//! The catalog: a transactional store of volumes, snapshots, groups and attachments. It is in the
//! pool, so a power loss affects rows and files together. Rows are JSON, keyed by id; a second
//! table maps names to ids. Every commit is durable when it returns.

mod file;
mod snapshots;
mod verify;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard};

use nix::errno::Errno;
use redb::{
    Database, ReadTransaction, ReadableDatabase, ReadableTable, TableDefinition, WriteTransaction,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tracing::warn;

use super::direct::DirectFile;
use super::error::{Context, Error, Kind, Result};
use super::fail_point::reach;
use super::ids;
use super::model::{Attachment, Group, Inline, Phase, Snapshot, SnapshotPhase, Volume};
use super::pool::sync_directory;
use file::{CatalogFile, Mode};

pub use file::ReleaseReserve;
pub use snapshots::SnapshotFile;
pub use verify::{damaged, read_verified, verify_or_repair};

type Table = TableDefinition<'static, &'static str, &'static [u8]>;

const NAMES: TableDefinition<&str, &str> = TableDefinition::new("names");
const META: TableDefinition<&str, &str> = TableDefinition::new("meta");
const FORMAT_VERSION: &str = "2";

/// Keys of `META`: the format version, and the digits of the pool in ids.
const VERSION: &str = "version";
const POOL: &str = "pool";

/// Size of the page cache of the catalog, in bytes.
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

/// A row that has a name and an id. Names of different types do not collide.
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
    release_reserve: ReleaseReserve,
    /// Locked for reading during a write transaction, and for writing while the store is reopened.
    store: RwLock<OpenStore>,
    /// Files that were removed since the last transaction. The next one records the removals.
    removed: Mutex<Vec<SnapshotFile>>,
    /// The digits of the pool in new ids, once they were read. They never change.
    pool: OnceLock<String>,
}

struct OpenStore {
    database: Database,
    file: CatalogFile,
}

impl OpenStore {
    fn new(file: DirectFile, release_reserve: ReleaseReserve) -> Result<Self> {
        let file = CatalogFile::new(file, Mode::Durable, release_reserve)
            .map_err(|e| Error::io("catalog", e))?;
        Ok(Self { database: Self::database(&file)?, file })
    }

    /// A store of the same open file. Its changes stay in memory.
    fn overlay(&self, is_verified: bool) -> Result<Self> {
        let file = self.file.overlay().map_err(|e| Error::io("catalog", e))?;
        let database = match is_verified {
            true => Self::database(&file)?,
            // Page by page, so much slower than by path.
            false => verify::open_verified(file.clone())?,
        };
        Ok(Self { database, file })
    }

    fn database(file: &CatalogFile) -> Result<Database> {
        let mut builder = Database::builder();
        builder.set_cache_size(CACHE_BYTES).create_with_backend(file.clone()).map_err(failed)
    }

    /// Whether it can serve transactions of this mode. A durable store serves readers too.
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
    /// Opens or creates the catalog at `path`. After a crash it holds the last commit.
    /// `release_reserve` is called when the catalog cannot grow.
    pub fn open(path: &Path, release_reserve: ReleaseReserve) -> Result<Self> {
        let creating = || format!("creating the catalog {}", path.display());
        if !path.try_exists().context(creating)? {
            // Under a temporary name: redb cannot open a file whose creation was interrupted.
            let part = path.with_extension("part");
            drop(Self::with(
                &part,
                DirectFile::create(&part).context(creating)?,
                release_reserve.clone(),
            )?);
            reach("catalog.made")?;
            fs::rename(&part, path).context(creating)?;
            reach("catalog.named")?;
            path.parent().map_or(Ok(()), sync_directory)?;
        }
        Self::with(path, open_file(path)?, release_reserve)
    }

    fn with(path: &Path, file: DirectFile, release_reserve: ReleaseReserve) -> Result<Self> {
        let is_blank = file.len().context(|| format!("opening {}", path.display()))? == 0;
        let store = RwLock::new(OpenStore::new(file, release_reserve.clone())?);
        let catalog = Self {
            path: path.to_owned(),
            release_reserve,
            store,
            removed: Mutex::default(),
            pool: OnceLock::new(),
        };
        catalog.prepare(is_blank)?;
        Ok(catalog)
    }

    /// The store, reopened if it had an I/O error.
    fn store(&self, mode: Mode) -> Result<RwLockReadGuard<'_, OpenStore>> {
        let store = self.store.read().unwrap_or_else(PoisonError::into_inner);
        if store.serves(mode) {
            return Ok(store);
        }
        drop(store);
        self.reopen(mode)?;
        Ok(self.store.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Reopens the store from disk: the committed rows, and perhaps the transaction that failed.
    /// Readers of the previous store get an error at their next access. While the disk rejects
    /// writes, or no file can be opened, readers get a store of the file that is open already. It
    /// keeps recovery changes in memory.
    fn reopen(&self, mode: Mode) -> Result<()> {
        let mut store = self.store.write().unwrap_or_else(PoisonError::into_inner);
        if store.serves(mode) {
            return Ok(());
        }
        store.file.retire();
        let verified = verify::verify(&self.path);
        let is_verified = verified.is_ok();
        let opened = verified
            .and_then(|()| OpenStore::new(open_file(&self.path)?, self.release_reserve.clone()));
        *store = match opened {
            Ok(opened) => {
                warn!("reopened the catalog after an I/O error");
                opened
            }
            Err(error) if mode == Mode::Overlay && !matches!(error, Error::Damaged(_)) => {
                warn!(%error, "the catalog is not writable; it is read-only until the next change succeeds");
                store.overlay(is_verified)?
            }
            Err(error) => return Err(error),
        };
        Ok(())
    }

    /// Fails while the catalog cannot be written.
    pub fn check_writable(&self) -> Result<()> {
        self.store(Mode::Durable).map(drop)
    }

    /// Creates the tables of a new catalog, and rejects one of another format version.
    fn prepare(&self, is_blank: bool) -> Result<()> {
        if is_blank {
            let pool = ids::new_pool()?;
            return self.write(|tx| {
                tx.inner.open_table(Volume::TABLE).map_err(failed)?;
                tx.inner.open_table(Group::TABLE).map_err(failed)?;
                tx.inner.open_table(Attachment::TABLE).map_err(failed)?;
                tx.inner.open_table(Inline::TABLE).map_err(failed)?;
                tx.inner.open_table(NAMES).map_err(failed)?;
                snapshots::make_tables(&tx.inner)?;
                let mut meta = tx.inner.open_table(META).map_err(failed)?;
                meta.insert(VERSION, FORMAT_VERSION).map_err(failed)?;
                meta.insert(POOL, pool.as_str()).map_err(failed)?;
                Ok(())
            });
        }
        self.read()?.check_version()
    }

    /// The digits of the pool in new ids. A catalog from before they existed receives them.
    pub fn pool(&self) -> Result<&str> {
        if let Some(pool) = self.pool.get() {
            return Ok(pool);
        }
        let pool = self.read_pool()?;
        Ok(self.pool.get_or_init(|| pool))
    }

    fn read_pool(&self) -> Result<String> {
        if let Some(pool) = self.read()?.pool()? {
            return Ok(pool);
        }
        let new = ids::new_pool()?;
        self.write(|tx| {
            let mut meta = tx.inner.open_table(META).map_err(failed)?;
            // Another call may have been faster.
            if let Some(pool) = meta.get(POOL).map_err(failed)? {
                return Ok(pool.value().to_owned());
            }
            meta.insert(POOL, new.as_str()).map_err(failed)?;
            Ok(new)
        })
    }

    /// A consistent view of all rows.
    pub fn read(&self) -> Result<ReadTx> {
        self.store(Mode::Overlay)?.database.begin_read().map(ReadTx).map_err(failed)
    }

    /// Runs `change` in a transaction: durable on `Ok`, without effect on `Err`.
    pub fn write<T>(&self, change: impl FnOnce(&WriteTx) -> Result<T>) -> Result<T> {
        let store = self.store(Mode::Durable)?;
        let has_room = store.file.has_room();
        let mut inner = store.database.begin_write().map_err(failed)?;
        // In one phase, a damaged last commit looks like one that a crash interrupted: the store
        // would return to the previous commit, and acknowledged changes would be lost.
        inner.set_two_phase_commit(true);
        let tx = WriteTx { inner, has_room };
        let removed = std::mem::take(&mut *self.removed());
        // Before `change`, which may create one of these files again.
        let result = tx
            .record_removals(&removed)
            .and_then(|()| change(&tx))
            .and_then(|value| reach("catalog.changed").map(|()| value));
        let result = match result {
            Ok(value) => tx.inner.commit().map_err(failed).map(|()| value),
            Err(error) => {
                // This fails too after an I/O error. Report the first error.
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

    /// Notes that a scheduled file was removed. The next transaction records it.
    pub fn note_removal(&self, file: SnapshotFile) {
        self.removed().push(file);
    }

    fn removed(&self) -> MutexGuard<'_, Vec<SnapshotFile>> {
        self.removed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A read transaction.
pub struct ReadTx(ReadTransaction);

impl ReadTx {
    /// Rejects a catalog of another format version. A catalog file always has its tables: one
    /// without tables is damaged, not new.
    fn check_version(&self) -> Result<()> {
        let meta = self.0.open_table(META);
        let meta = meta.map_err(|_| verify::damaged("its tables are missing"))?;
        let version = meta.get(VERSION).map_err(failed)?;
        match version.as_ref().map(|version| version.value()) {
            Some(FORMAT_VERSION) => Ok(()),
            other => Err(Error::Damaged(format!(
                "the catalog has format version {}, but this version of csi-loopback supports only \
                 {FORMAT_VERSION}; use the version of csi-loopback that wrote it",
                other.unwrap_or("none")
            ))),
        }
    }

    /// The digits of the pool in new ids.
    pub fn pool(&self) -> Result<Option<String>> {
        let meta = self.0.open_table(META).map_err(failed)?;
        let pool = meta.get(POOL).map_err(failed)?;
        Ok(pool.map(|pool| pool.value().to_owned()))
    }

    pub fn get<R: Row>(&self, key: &str) -> Result<Option<R>> {
        R::find(&self.0, key)
    }

    /// A volume that exists in the API.
    pub fn live_volume(&self, id: &str) -> Result<Volume> {
        self.get::<Volume>(id)?
            .filter(|volume| volume.phase == Phase::Ready)
            .ok_or_else(|| Error::not_found(Kind::Volume, id))
    }

    /// A snapshot that exists in the API.
    pub fn live_snapshot(&self, id: &str) -> Result<Snapshot> {
        self.get::<Snapshot>(id)?
            .filter(|snapshot| snapshot.phase == SnapshotPhase::Ready)
            .ok_or_else(|| Error::not_found(Kind::Snapshot, id))
    }

    pub fn by_name<R: Named>(&self, name: &str) -> Result<Option<R>> {
        let names = self.0.open_table(NAMES).map_err(failed)?;
        let id = names.get(name_key::<R>(name).as_str()).map_err(failed)?;
        id.map_or(Ok(None), |id| self.get(id.value()))
    }

    /// Visits the rows after the key `after`, in key order, until `visit` returns false.
    pub fn scan<R: Row>(
        &self,
        after: Option<&str>,
        visit: impl FnMut(R) -> Result<bool>,
    ) -> Result<()> {
        scan(&self.0.open_table(R::TABLE).map_err(failed)?, after, visit)
    }

    /// All rows that match `filter`. For snapshots, only those that exist or are being taken.
    pub fn select<R: Row>(&self, filter: impl Fn(&R) -> bool) -> Result<Vec<R>> {
        select(&self.0.open_table(R::TABLE).map_err(failed)?, filter)
    }
}

/// A write transaction.
pub struct WriteTx {
    inner: WriteTransaction,
    has_room: bool,
}

impl WriteTx {
    pub fn put<R: Row>(&self, row: &R) -> Result<()> {
        row.store(&self.inner)
    }

    pub fn remove<R: Row>(&self, key: &str) -> Result<()> {
        R::discard(&self.inner, key)
    }

    /// All rows. No other transaction can change them until this one ends.
    pub fn all<R: Row>(&self) -> Result<Vec<R>> {
        select(&self.inner.open_table(R::TABLE).map_err(failed)?, |_| true)
    }

    /// `Exhausted` if the catalog has no space to grow.
    pub fn check_room(&self) -> Result<()> {
        if self.has_room { Ok(()) } else { Err(Error::io("catalog", Errno::ENOSPC.into())) }
    }

    /// Maps the row's name to its id. `Exhausted` if the catalog has no space to grow.
    pub fn claim_name<R: Named>(&self, row: &R) -> Result<()> {
        self.check_room()?;
        let mut names = self.inner.open_table(NAMES).map_err(failed)?;
        names.insert(name_key::<R>(row.name()).as_str(), row.key()).map_err(failed)?;
        Ok(())
    }

    /// Removes the mapping of the row's name, if it still maps to this row.
    pub fn release_name<R: Named>(&self, row: &R) -> Result<()> {
        let key = name_key::<R>(row.name());
        let mut names = self.inner.open_table(NAMES).map_err(failed)?;
        let is_current =
            names.get(key.as_str()).map_err(failed)?.is_some_and(|id| id.value() == row.key());
        if is_current {
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
    filter: impl Fn(&R) -> bool,
) -> Result<Vec<R>> {
    let mut rows = Vec::new();
    scan(table, None, |row| {
        if filter(&row) {
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
    Error::Damaged(format!(
        "catalog: failed to decode the row of {key:?}: {error}; run `pool check`"
    ))
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
