//! Migration of catalogs of format version 1, which had one table for all snapshots and no index.

use redb::{ReadableTable, TableDefinition, WriteTransaction};
use serde_json::Value;

use super::{META, Row, SWEEP, Table, VERSION, failed, snapshots, unreadable};
use crate::backend::error::Result;
use crate::backend::model::{Inline, Snapshot};
use crate::backend::store::now;

pub const FORMAT_VERSION: &str = "1";

const PREVIOUS: Table = TableDefinition::new("snapshots_of_version_1");

/// Converts the tables. The caller commits the transaction, so all or none are converted.
pub fn migrate(tx: &WriteTransaction) -> Result<()> {
    tx.rename_table(Snapshot::TABLE, PREVIOUS).map_err(failed)?;
    snapshots::make_tables(tx)?;
    let previous = tx.open_table(PREVIOUS).map_err(failed)?;
    let now = now().0;
    for entry in previous.iter().map_err(failed)? {
        let (id, json) = entry.map_err(failed)?;
        snapshot(id.value(), json.value(), now)?.store(tx)?;
    }
    drop(previous);
    tx.delete_table(PREVIOUS).map_err(failed)?;
    // Early catalogs of version 1 lack the table of inline volumes.
    tx.open_table(Inline::TABLE).map_err(failed)?;
    let mut meta = tx.open_table(META).map_err(failed)?;
    meta.insert(VERSION, super::FORMAT_VERSION).map_err(failed)?;
    // Version 1 has no list of files to remove.
    meta.insert(SWEEP, "due").map_err(failed)?;
    Ok(())
}

/// Converts a row. Version 1 did not record when a change record was dropped: the migration time is
/// used.
fn snapshot(id: &str, json: &[u8], now: u64) -> Result<Snapshot> {
    let mut row: Value = serde_json::from_slice(json).map_err(|e| unreadable(id, &e))?;
    if row["phase"] == "forgotten" {
        row["phase"] = serde_json::json!({ "forgotten": { "at": now } });
    }
    serde_json::from_value(row).map_err(|e| unreadable(id, &e))
}
