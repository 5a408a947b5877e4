//! Catalogs of format version 1, which had one table for all snapshots and no index.

use redb::{ReadableTable, TableDefinition, WriteTransaction};
use serde_json::Value;

use super::{META, Row, SWEEP, Table, VERSION, failed, snapshots, unreadable};
use crate::backend::error::Result;
use crate::backend::model::{Inline, Snapshot};
use crate::backend::store::now;

pub const FORMAT_VERSION: &str = "1";

const FORMER: Table = TableDefinition::new("snapshots_of_version_1");

/// Converts the tables, all or none of them: to be called in one transaction.
pub fn migrate(tx: &WriteTransaction) -> Result<()> {
    tx.rename_table(Snapshot::TABLE, FORMER).map_err(failed)?;
    snapshots::make_tables(tx)?;
    let former = tx.open_table(FORMER).map_err(failed)?;
    let now = now().0;
    for entry in former.iter().map_err(failed)? {
        let (id, json) = entry.map_err(failed)?;
        snapshot(id.value(), json.value(), now)?.store(tx)?;
    }
    drop(former);
    tx.delete_table(FORMER).map_err(failed)?;
    // Inline volumes came later than the rest of version 1.
    tx.open_table(Inline::TABLE).map_err(failed)?;
    let mut meta = tx.open_table(META).map_err(failed)?;
    meta.insert(VERSION, super::FORMAT_VERSION).map_err(failed)?;
    // Nothing says which files were to be removed.
    meta.insert(SWEEP, "due").map_err(failed)?;
    Ok(())
}

/// A row as it is now. When a change record was dropped was not recorded: it counts from the migration.
fn snapshot(id: &str, json: &[u8], now: u64) -> Result<Snapshot> {
    let mut row: Value = serde_json::from_slice(json).map_err(|e| unreadable(id, &e))?;
    if row["phase"] == "forgotten" {
        row["phase"] = serde_json::json!({ "forgotten": { "at": now } });
    }
    serde_json::from_value(row).map_err(|e| unreadable(id, &e))
}
