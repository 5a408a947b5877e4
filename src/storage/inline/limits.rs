//! Limits of inline volumes, so that pods do not fill the pool or the memory of their node.

use super::super::error::{Error, FREE_SPACE_ADVICE, Result};
use super::super::maintenance;
use super::super::model::Inline;
use super::super::store::Store;

/// Limits of inline volumes on this node. Sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InlineLimits {
    /// Maximum size of a volume.
    pub max_size: u64,
    /// Maximum number of volumes.
    pub max_volumes: u64,
    /// Maximum total size of the volumes in the pool; `None` for a quarter of the pool.
    pub max_total: Option<u64>,
    /// Maximum total size of the volumes in memory.
    pub max_memory: u64,
}

impl Default for InlineLimits {
    fn default() -> Self {
        Self { max_size: 10 << 30, max_volumes: 256, max_total: None, max_memory: 512 << 20 }
    }
}

/// Stores the row of a new volume if it is within the limits.
pub fn admit(store: &Store, row: &Inline) -> Result<()> {
    let limits = &store.config.inline;
    if row.capacity_bytes > limits.max_size {
        return Err(exhausted(format!(
            "{} bytes exceed the maximum of {} for an inline volume (--inline-max-size); request less",
            row.capacity_bytes, limits.max_size
        )));
    }
    let room = store.pool.room()?;
    if !row.request.in_memory && maintenance::under_pressure(room) {
        return Err(exhausted(format!(
            "the pool is nearly full, {} of {} bytes are free; {FREE_SPACE_ADVICE}",
            room.available, room.total
        )));
    }
    let total = limits.max_total.unwrap_or(room.total / 4);
    // One transaction, so that two concurrent calls cannot both take the last space.
    store.catalog.write(|tx| {
        tx.check_room()?;
        let others: Vec<Inline> = tx.all()?;
        let (count, pool, memory) = sum(&others);
        if count >= limits.max_volumes {
            return Err(exhausted(format!(
                "this node has {count} inline volumes, the maximum (--inline-max-volumes); delete pods"
            )));
        }
        let (used, limit, flag) = match row.request.in_memory {
            true => (memory, limits.max_memory, "--inline-max-memory"),
            false => (pool, total, "--inline-max-total"),
        };
        if used.saturating_add(row.capacity_bytes) > limit {
            return Err(exhausted(format!(
                "{} bytes and the {used} of other inline volumes exceed the maximum of {limit} for this node ({flag}); \
                 request less or delete pods",
                row.capacity_bytes
            )));
        }
        tx.put(row)
    })
}

fn exhausted(reason: String) -> Error {
    Error::Exhausted(format!("volume_context: size: {reason}"))
}

/// The number of volumes, and their bytes in the pool and in memory.
fn sum(rows: &[Inline]) -> (u64, u64, u64) {
    let bytes = |in_memory| {
        let those = rows.iter().filter(|row| row.request.in_memory == in_memory);
        those.fold(0_u64, |sum, row| sum.saturating_add(row.capacity_bytes))
    };
    (rows.len() as u64, bytes(false), bytes(true))
}

/// The number of inline volumes, and their bytes in the pool and in memory.
pub fn totals(store: &Store) -> Result<(u64, u64, u64)> {
    Ok(sum(&store.catalog.read()?.select(|_: &Inline| true)?))
}

/// The total capacity of the inline volumes in the pool, in bytes.
pub fn provisioned_bytes(store: &Store) -> Result<u64> {
    totals(store).map(|(_, pool, _)| pool)
}
