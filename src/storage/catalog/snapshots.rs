//! The tables of snapshots. Existing snapshots have their own table, because deleted ones are many:
//! lists and starts read only existing ones. Indexes map a volume to its snapshots, and a time to
//! expired rows. Another table lists files to remove. All are updated in the transaction that
//! writes the row.

use redb::{
    ReadOnlyTable, ReadTransaction, ReadableTable, ReadableTableMetadata, TableDefinition,
    TableError, TableHandle, WriteTransaction,
};

use super::{Named, ReadTx, Row, Table, WriteTx, decode, failed, find_in, insert_into, scan};
use crate::error::{Kind, Result};
use crate::model::Snapshot;

/// Deleted snapshots whose change record or id is kept.
const RETAINED: Table = TableDefinition::new("retained_snapshots");
/// Volume id, sequence number and snapshot id of every row.
const BY_VOLUME: TableDefinition<(&str, u64, &str), ()> =
    TableDefinition::new("snapshots_by_volume");
/// A time in seconds since the epoch, and the id of a row in `RETAINED`.
type TimeIndex = TableDefinition<'static, (u64, &'static str), ()>;

/// The start of the retention of rows with the default retention.
const BY_AGE: TimeIndex = TableDefinition::new("snapshots_by_age");
/// The end of the retention of rows with their own retention. Older catalogs lack this table; it is
/// created with its first entry.
const BY_EXPIRY: TimeIndex = TableDefinition::new("snapshots_by_expiry");
/// Unreferenced files that may still exist: kind, snapshot id, generation of the record.
const REMOVALS: TableDefinition<(&str, &str, u64), ()> = TableDefinition::new("removals");

/// A file of a snapshot: its data or its change record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SnapshotFile {
    Data { id: String },
    Record { id: String, generation: u64 },
}

const DATA: &str = "data";
const RECORD: &str = "record";

impl SnapshotFile {
    pub fn data(row: &Snapshot) -> Self {
        Self::Data { id: row.id.clone() }
    }

    pub fn record(row: &Snapshot) -> Self {
        Self::Record { id: row.id.clone(), generation: row.record_generation }
    }

    fn key(&self) -> (&str, &str, u64) {
        match self {
            Self::Data { id } => (DATA, id, 0),
            Self::Record { id, generation } => (RECORD, id, *generation),
        }
    }

    fn from_key((kind, id, generation): (&str, &str, u64)) -> Self {
        let id = id.to_owned();
        if kind == DATA { Self::Data { id } } else { Self::Record { id, generation } }
    }

    /// The files that a row refers to.
    fn of(row: &Snapshot) -> impl Iterator<Item = Self> {
        let data = row.has_data.then(|| Self::data(row));
        let record = (!row.is_forgotten()).then(|| Self::record(row));
        data.into_iter().chain(record)
    }
}

impl Row for Snapshot {
    /// Snapshots that exist or are being taken.
    const TABLE: Table = TableDefinition::new("snapshots");

    fn key(&self) -> &str {
        &self.id
    }

    fn find(tx: &ReadTransaction, id: &str) -> Result<Option<Self>> {
        match find_in(tx, Self::TABLE, id)? {
            None => find_in(tx, RETAINED, id),
            found => Ok(found),
        }
    }

    /// Schedules the removal of files that only the previous row referenced.
    fn store(&self, tx: &WriteTransaction) -> Result<()> {
        let previous = take(tx, &self.id)?;
        let table = if self.retained_since().is_some() { RETAINED } else { Self::TABLE };
        insert_into(tx, table, self)?;
        let mut by_volume = tx.open_table(BY_VOLUME).map_err(failed)?;
        by_volume.insert(volume_key(self), ()).map_err(failed)?;
        if let Some((index, time)) = time_index(self) {
            let mut index = tx.open_table(index).map_err(failed)?;
            index.insert((time, self.id.as_str()), ()).map_err(failed)?;
        }
        let mut removals = tx.open_table(REMOVALS).map_err(failed)?;
        for file in previous.iter().flat_map(SnapshotFile::of) {
            removals.insert(file.key(), ()).map_err(failed)?;
        }
        for file in SnapshotFile::of(self) {
            removals.remove(file.key()).map_err(failed)?;
        }
        Ok(())
    }

    /// The caller has removed the files.
    fn discard(tx: &WriteTransaction, id: &str) -> Result<()> {
        let Some(row) = take(tx, id)? else { return Ok(()) };
        let mut by_volume = tx.open_table(BY_VOLUME).map_err(failed)?;
        by_volume.remove(volume_key(&row)).map_err(failed)?;
        let mut removals = tx.open_table(REMOVALS).map_err(failed)?;
        for file in [SnapshotFile::data(&row), SnapshotFile::record(&row)] {
            removals.remove(file.key()).map_err(failed)?;
        }
        Ok(())
    }
}

impl Named for Snapshot {
    const KIND: Kind = Kind::Snapshot;
    fn name(&self) -> &str {
        &self.name
    }
}

fn volume_key(row: &Snapshot) -> (&str, u64, &str) {
    (&row.volume_id, row.sequence, &row.id)
}

/// The time index of a deleted snapshot's row, and its time.
fn time_index(row: &Snapshot) -> Option<(TimeIndex, u64)> {
    match row.own_expiry() {
        Some(end) => Some((BY_EXPIRY, end)),
        None => row.retained_since().map(|since| (BY_AGE, since)),
    }
}

/// Removes a row from its table and its time index.
fn take(tx: &WriteTransaction, id: &str) -> Result<Option<Snapshot>> {
    for table in [Snapshot::TABLE, RETAINED] {
        let mut table = tx.open_table(table).map_err(failed)?;
        let Some(json) = table.remove(id).map_err(failed)? else { continue };
        let row: Snapshot = decode(id, json.value())?;
        if let Some((index, time)) = time_index(&row) {
            let mut index = tx.open_table(index).map_err(failed)?;
            index.remove((time, id)).map_err(failed)?;
        }
        return Ok(Some(row));
    }
    Ok(None)
}

/// Creates the tables that do not exist.
pub fn make_tables(tx: &WriteTransaction) -> Result<()> {
    tx.open_table(Snapshot::TABLE).map_err(failed)?;
    tx.open_table(RETAINED).map_err(failed)?;
    tx.open_table(BY_VOLUME).map_err(failed)?;
    tx.open_table(BY_AGE).map_err(failed)?;
    tx.open_table(REMOVALS).map_err(failed)?;
    Ok(())
}

impl ReadTx {
    /// Visits the ids of a volume's snapshots from sequence number `from` on, in order, including
    /// deleted ones, until `visit` returns false.
    fn visit_ids_of(
        &self,
        volume_id: &str,
        from: u64,
        mut visit: impl FnMut(&str) -> Result<bool>,
    ) -> Result<()> {
        let table = self.0.open_table(BY_VOLUME).map_err(failed)?;
        for entry in table.range((volume_id, from, "")..).map_err(failed)? {
            let (key, _) = entry.map_err(failed)?;
            let (volume, _, id) = key.value();
            if volume != volume_id || !visit(id)? {
                break;
            }
        }
        Ok(())
    }

    /// All snapshots of a volume in order of sequence number, including deleted ones.
    pub fn snapshots_of(&self, volume_id: &str) -> Result<Vec<Snapshot>> {
        self.rows_of(volume_id, |id| self.get(id))
    }

    /// The snapshots of a volume that exist or are being taken, in order of sequence number.
    pub fn existing_snapshots_of(&self, volume_id: &str) -> Result<Vec<Snapshot>> {
        self.rows_of(volume_id, |id| find_in(&self.0, Snapshot::TABLE, id))
    }

    fn rows_of(
        &self,
        volume_id: &str,
        find: impl Fn(&str) -> Result<Option<Snapshot>>,
    ) -> Result<Vec<Snapshot>> {
        let mut rows = Vec::new();
        self.visit_ids_of(volume_id, 0, |id| {
            rows.extend(find(id)?);
            Ok(true)
        })?;
        Ok(rows)
    }

    /// The first snapshot of a volume from sequence number `from` on that matches `filter`.
    pub fn find_snapshot_of(
        &self,
        volume_id: &str,
        from: u64,
        filter: impl Fn(&Snapshot) -> bool,
    ) -> Result<Option<Snapshot>> {
        let mut found = None;
        self.visit_ids_of(volume_id, from, |id| {
            found = self.get::<Snapshot>(id)?.filter(&filter);
            Ok(found.is_none())
        })?;
        Ok(found)
    }

    /// The ids of the volumes that have snapshots, including deleted ones.
    pub fn volumes_with_snapshots(&self) -> Result<Vec<String>> {
        let table = self.0.open_table(BY_VOLUME).map_err(failed)?;
        let mut volumes: Vec<String> = Vec::new();
        loop {
            // One lookup for each volume, independent of its number of snapshots.
            let from = volumes.last().map_or(String::new(), |last| format!("{last}\0"));
            let mut rest = table.range((from.as_str(), 0, "")..).map_err(failed)?;
            let Some(entry) = rest.next() else { return Ok(volumes) };
            let (key, _) = entry.map_err(failed)?;
            volumes.push(key.value().0.to_owned());
        }
    }

    /// The ids of deleted snapshots with the default retention that began before `time` (seconds
    /// since the epoch), oldest first.
    pub fn retained_before(&self, time: u64) -> Result<Vec<String>> {
        self.ids_before(BY_AGE, time)
    }

    /// The ids of deleted snapshots with their own retention that ended before `time` (seconds
    /// since the epoch), oldest first.
    pub fn expired_before(&self, time: u64) -> Result<Vec<String>> {
        self.ids_before(BY_EXPIRY, time)
    }

    fn ids_before(&self, index: TimeIndex, time: u64) -> Result<Vec<String>> {
        let mut ids = Vec::new();
        if let Some(index) = self.time_index(index)? {
            for entry in index.range(..(time, "")).map_err(failed)? {
                let (key, _) = entry.map_err(failed)?;
                ids.push(key.value().1.to_owned());
            }
        }
        Ok(ids)
    }

    fn time_index(
        &self,
        index: TimeIndex,
    ) -> Result<Option<ReadOnlyTable<(u64, &'static str), ()>>> {
        match self.0.open_table(index) {
            Err(TableError::TableDoesNotExist(_)) if index.name() == BY_EXPIRY.name() => Ok(None),
            index => index.map(Some).map_err(failed),
        }
    }

    /// Visits the rows of deleted snapshots in order of expiry: first those with their own
    /// retention until `visit` returns false, then the others until it returns false again.
    pub fn visit_by_expiry(&self, mut visit: impl FnMut(Snapshot) -> Result<bool>) -> Result<()> {
        for index in [BY_EXPIRY, BY_AGE] {
            let Some(index) = self.time_index(index)? else { continue };
            for entry in index.iter().map_err(failed)? {
                let (key, _) = entry.map_err(failed)?;
                let row = self.get::<Snapshot>(key.value().1)?;
                if !row.map_or(Ok(true), &mut visit)? {
                    break;
                }
            }
        }
        Ok(())
    }

    /// The number of deleted snapshots whose record or id is kept.
    pub fn retained_count(&self) -> Result<u64> {
        self.0.open_table(RETAINED).map_err(failed)?.len().map_err(failed)
    }

    /// Visits the snapshots of a volume, including deleted ones, from the last one before this
    /// sequence number to the first, until `visit` returns false.
    pub fn visit_newest_first(
        &self,
        volume_id: &str,
        before: u64,
        mut visit: impl FnMut(Snapshot) -> bool,
    ) -> Result<()> {
        let table = self.0.open_table(BY_VOLUME).map_err(failed)?;
        let range = table.range((volume_id, 0, "")..(volume_id, before, "")).map_err(failed)?;
        for entry in range.rev() {
            let (key, _) = entry.map_err(failed)?;
            if self.get(key.value().2)?.is_some_and(|row| !visit(row)) {
                break;
            }
        }
        Ok(())
    }

    /// Visits the rows of all snapshots, including deleted ones.
    pub fn for_each_snapshot(&self, mut visit: impl FnMut(Snapshot) -> Result<()>) -> Result<()> {
        for table in [Snapshot::TABLE, RETAINED] {
            let table = self.0.open_table(table).map_err(failed)?;
            scan(&table, None, |row| visit(row).map(|()| true))?;
        }
        Ok(())
    }

    /// Unreferenced files that may still exist.
    pub fn removals(&self) -> Result<Vec<SnapshotFile>> {
        let table = self.0.open_table(REMOVALS).map_err(failed)?;
        let mut files = Vec::new();
        for entry in table.iter().map_err(failed)? {
            files.push(SnapshotFile::from_key(entry.map_err(failed)?.0.value()));
        }
        Ok(files)
    }
}

impl WriteTx {
    /// Schedules a file for removal, unless a row refers to it at the next start.
    pub fn schedule_removal(&self, file: &SnapshotFile) -> Result<()> {
        let mut removals = self.inner.open_table(REMOVALS).map_err(failed)?;
        removals.insert(file.key(), ()).map_err(failed)?;
        Ok(())
    }

    /// Records that scheduled files were removed.
    pub fn record_removals(&self, files: &[SnapshotFile]) -> Result<()> {
        if files.is_empty() {
            return Ok(());
        }
        let mut removals = self.inner.open_table(REMOVALS).map_err(failed)?;
        files.iter().try_for_each(|file| removals.remove(file.key()).map(drop)).map_err(failed)
    }
}
