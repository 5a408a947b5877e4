//! Volumes that nobody will unpublish: what a crash left half-way, and what belonged to pods that vanished.

use std::io;

use super::super::error::{Error, Result};
use super::super::model::{Inline, Phase};
use super::super::store::Store;
use super::{blocks, lock_key, take_away};

/// At a start: whatever was on its way in or out goes, and so does what nobody uses any more.
pub fn settle(store: &Store) -> Result<()> {
    collect(store)
}

/// One round. What is under way is left to whoever is at it.
pub fn collect(store: &Store) -> Result<()> {
    for row in store.catalog.read()?.select(|_: &Inline| true)? {
        let Ok(_lock) = store.locks.take([lock_key(&row.handle).as_str()]) else { continue };
        let handle = row.handle.clone();
        // One volume in trouble does not keep the others waiting.
        if let Err(error) = look_after(store, row) {
            tracing::error!(volume = handle, %error, "an inline volume is not settled yet");
        }
    }
    Ok(())
}

fn look_after(store: &Store, seen: Inline) -> Result<()> {
    // It may have come or gone before the lock was had.
    let Some(row) = store.catalog.read()?.get::<Inline>(&seen.handle)? else { return Ok(()) };
    if row.phase != Phase::Ready {
        tracing::info!(volume = row.handle, phase = ?row.phase, "removing an unfinished inline volume");
        return take_away(store, row);
    }
    if is_abandoned(store, &row)? {
        tracing::info!(volume = row.handle, "removing an inline volume whose pod is gone");
        return take_away(store, row);
    }
    Ok(())
}

/// Whether the place where its pod had it is gone, and nobody has its filesystem mounted, in whatever mount namespace.
fn is_abandoned(store: &Store, row: &Inline) -> Result<bool> {
    match row.target.symlink_metadata() {
        Ok(_) => return Ok(false),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(Error::io(format!("looking at {}", row.target.display()), e)),
    }
    match blocks::device(store, row)? {
        Some(device) => Ok(!device.is_held()?),
        None => Ok(true),
    }
}
