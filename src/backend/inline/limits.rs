//! How much inline volumes may take, so that no pod fills the pool, or the memory, of its node.

use super::super::error::{Error, MORE_ROOM, Result};
use super::super::model::Inline;
use super::super::store::Store;
use super::super::upkeep;

/// Bounds of inline volumes on this node. Sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InlineLimits {
    /// The largest volume.
    pub max_size: u64,
    /// How many there may be.
    pub max_volumes: u64,
    /// All of those in the pool together; `None` for a quarter of the pool.
    pub max_total: Option<u64>,
    /// All of those in memory together.
    pub max_memory: u64,
}

impl Default for InlineLimits {
    fn default() -> Self {
        Self { max_size: 10 << 30, max_volumes: 256, max_total: None, max_memory: 512 << 20 }
    }
}

/// Writes the row of a new volume down, if there is room for it beside all others.
pub fn admit(store: &Store, row: &Inline) -> Result<()> {
    let limits = &store.config.inline;
    if row.capacity_bytes > limits.max_size {
        return Err(exhausted(format!(
            "{} bytes are more than the {} that an inline volume may have (--inline-max-size); ask for less",
            row.capacity_bytes, limits.max_size
        )));
    }
    let room = store.pool.room()?;
    if !row.request.in_memory && upkeep::under_pressure(room) {
        return Err(exhausted(format!(
            "the pool is nearly full, {} of {} bytes are left; {MORE_ROOM}",
            room.available, room.total
        )));
    }
    let total = limits.max_total.unwrap_or(room.total / 4);
    // One transaction: of two that are the last to fit, one is refused.
    store.catalog.write(|tx| {
        tx.check_room()?;
        let others: Vec<Inline> = tx.all()?;
        let (count, pool, memory) = sum(&others);
        if count >= limits.max_volumes {
            return Err(exhausted(format!(
                "there are {count} inline volumes on this node, as many as there may be (--inline-max-volumes); delete pods"
            )));
        }
        let (used, most, flag) = match row.request.in_memory {
            true => (memory, limits.max_memory, "--inline-max-memory"),
            false => (pool, total, "--inline-max-total"),
        };
        if used.saturating_add(row.capacity_bytes) > most {
            return Err(exhausted(format!(
                "{} bytes beside the {used} of other inline volumes are more than the {most} of this node ({flag}); ask for \
                 less or delete pods",
                row.capacity_bytes
            )));
        }
        tx.put(row)
    })
}

fn exhausted(reason: String) -> Error {
    Error::Exhausted(format!("volume_context: size: {reason}"))
}

/// How many, their bytes in the pool, and in memory.
fn sum(rows: &[Inline]) -> (u64, u64, u64) {
    let bytes = |in_memory| {
        let those = rows.iter().filter(|row| row.request.in_memory == in_memory);
        those.fold(0_u64, |sum, row| sum.saturating_add(row.capacity_bytes))
    };
    (rows.len() as u64, bytes(false), bytes(true))
}

/// How many there are, their bytes in the pool, and in memory.
pub fn in_all(store: &Store) -> Result<(u64, u64, u64)> {
    Ok(sum(&store.catalog.read()?.select(|_: &Inline| true)?))
}

/// The bytes that the pool has promised to inline volumes.
pub fn promised(store: &Store) -> Result<u64> {
    in_all(store).map(|(_, pool, _)| pool)
}
