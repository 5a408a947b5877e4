//! Copies of all manifests in one object, `index/NONCE`, so that a command reads few objects in a
//! repository of many backups. A copy counts only while the list shows its manifest with the same
//! size and time: an index may be old, damaged or removed at any moment. Writers and `prune` put one
//! after they had to read many manifests. `verify` reads the manifests themselves.

use std::collections::{HashMap, HashSet};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::names::{INDEX, Listing, Stamp};
use super::{Inventory, MAX_DOCUMENT, Repository};
use crate::backup::document::{self, VERSION, nonce};
use crate::backup::manifest::{BackupId, Manifest};

/// An index is written again when it lacks this many manifests, or has as many of removed backups.
pub const MANY: usize = 32;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Index {
    version: u32,
    entries: Vec<Entry>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    /// Of the manifest's object.
    stamp: Stamp,
    manifest: Manifest,
}

/// The manifests of an index by id, until they are taken.
#[derive(Default)]
pub(super) struct Copies(HashMap<BackupId, Entry>);

impl Copies {
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The manifest of a backup, if it is that of the listed object.
    pub fn take(&mut self, id: &BackupId, listed: Stamp) -> Option<Manifest> {
        let entry = self.0.remove(id)?;
        (entry.stamp == listed && entry.manifest.check(id).is_ok()).then_some(entry.manifest)
    }
}

impl Repository {
    /// The newest index; empty if there is none that can be read.
    pub(super) async fn index(&self, listing: &Listing) -> Copies {
        let Some((_, path)) = listing.indexes.last() else { return Copies::default() };
        self.read_index(path).await.unwrap_or_default()
    }

    async fn read_index(&self, path: &str) -> Result<Copies> {
        let object = self.store.get(path, MAX_DOCUMENT).await?.context("it is gone")?;
        let opened = self.open_sealed(INDEX, path, object)?;
        let document = document::decompress(&opened, usize::try_from(MAX_DOCUMENT)?)?;
        let Index { entries, .. } = document::read("index", path, &document)?;
        let by_id = entries.into_iter().map(|entry| (entry.manifest.id.clone(), entry));
        Ok(Copies(by_id.collect()))
    }

    /// Writes an index of `inventory` without `removed`, if that saves the next command many reads.
    /// Without one, every command works.
    pub async fn update_index(&self, inventory: &Inventory, removed: &HashSet<String>) {
        let _ = self.try_update_index(inventory, removed).await;
    }

    async fn try_update_index(
        &self,
        inventory: &Inventory,
        removed: &HashSet<String>,
    ) -> Result<()> {
        let stays = |backup: &&Manifest| !removed.contains(backup.id.as_str());
        let staying: Vec<_> = inventory.backups.iter().filter(stays).collect();
        let copied = staying.iter().filter(|backup| inventory.copied.contains(&backup.id)).count();
        let (lacking, useless) = (staying.len() - copied, inventory.copies - copied);
        let mut old: Vec<_> = inventory.listing.indexes.iter().collect();
        if lacking + useless < MANY {
            // Two writers may have put one each.
            old.pop();
        } else {
            self.put_index(&staying, &inventory.listing).await?;
        }
        for (_, path) in old {
            self.store.delete(path).await?;
        }
        Ok(())
    }

    async fn put_index(&self, backups: &[&Manifest], listing: &Listing) -> Result<()> {
        let entry = |backup: &&Manifest| {
            let stamp = listing.attempts.get(&backup.id)?.manifest?;
            Some(Entry { stamp, manifest: (*backup).clone() })
        };
        let entries = backups.iter().filter_map(entry).collect();
        let document = document::write("index", &Index { version: VERSION, entries })?;
        anyhow::ensure!(document.len() as u64 <= MAX_DOCUMENT, "there are too many manifests");
        let path = format!("{INDEX}/{}", nonce()?);
        let sealed = self.seal(INDEX, &path, document::compress(&document)?)?;
        self.store.put(&path, sealed).await
    }
}
