//! Volumes and the pool as an administrator sees them: rows of the catalog together with what the
//! kernel reports. Read only; no call waits for another operation on a volume.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::attachment;
use super::error::{Context, Result};
use super::health;
use super::inline;
use super::list::Page;
use super::model::{Attachment, Condition, Inline, Mounted, Usage, Volume};
use super::store::Store;

/// A volume and its use on this node.
#[derive(Debug, Clone)]
pub struct VolumeDetails {
    pub volume: Volume,
    pub attachment: Option<Attachment>,
    /// Path of the loop device, if one is attached.
    pub device: Option<String>,
    /// Bytes of the backing file that occupy space in the pool, shared blocks included.
    pub allocated_bytes: u64,
    /// `None` where this host has not mounted the filesystem.
    pub used_bytes: Option<u64>,
    pub condition: Condition,
}

/// The volume, or `NotFound`. A part that a damaged pool cannot report is left out; the condition
/// says why.
pub fn of_volume(store: &Store, id: &str) -> Result<VolumeDetails> {
    let reading = store.catalog.read()?;
    let volume = reading.live_volume(id)?;
    let attachment = reading.get::<Attachment>(id)?;
    drop(reading);
    let device = store.device_of(&volume).ok().flatten();
    let allocated =
        store.pool.volume_path(id).metadata().context(|| format!("reading the size of {id:?}"));
    let condition = health::condition(store, id)?;
    let allocated_bytes = match allocated {
        Ok(metadata) => metadata.blocks().saturating_mul(512),
        Err(_) if condition.is_abnormal() => 0,
        Err(error) => return Err(error),
    };
    let mounted = attachment.as_ref().and_then(mounted_at);
    let usage = mounted.map(|path| attachment::usage(store, id, path));
    Ok(VolumeDetails {
        device: device.map(|device| device.path().display().to_string()),
        allocated_bytes,
        used_bytes: match usage {
            Some(Ok(Usage::Mount { used_bytes, .. })) => Some(used_bytes),
            Some(Ok(Usage::Block { .. }) | Err(_)) | None => None,
        },
        condition,
        volume,
        attachment,
    })
}

/// A path at which this host has mounted the filesystem.
fn mounted_at(attachment: &Attachment) -> Option<&Path> {
    if attachment.deferred_at().is_some() {
        return None;
    }
    match attachment.mounted {
        Mounted::AtStaging => Some(&attachment.staging_path),
        Mounted::AtTargets => attachment.published.keys().next().map(AsRef::as_ref),
    }
}

/// Up to `max` inline volumes after the handle `after`, each with its condition.
pub fn inline_volumes(
    store: &Store,
    after: Option<&str>,
    max: usize,
) -> Result<Page<(Inline, Condition)>> {
    let mut rows: Vec<Inline> = Vec::new();
    store.catalog.read()?.scan(after, |row: Inline| {
        rows.push(row);
        // One more than the page holds shows that another page follows.
        Ok(rows.len() <= max)
    })?;
    let has_more = rows.len() > max;
    rows.truncate(max);
    let next = rows.last().filter(|_| has_more).map(|row| row.handle.clone());
    let mut items = Vec::with_capacity(rows.len());
    for row in rows {
        let condition = inline::condition(store, &row)?;
        items.push((row, condition));
    }
    Ok(Page { items, next })
}
