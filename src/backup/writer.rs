//! Writes the packs and pages of a backup, in the order of the volume. A page is written after its
//! pack, so the pages that exist are a journal: an interrupted backup continues after the last of
//! them.

use anyhow::{Context, Result};
use tokio::task::JoinHandle;

use super::chunk::Coded;
use super::document::{Hash, RunningHash, VERSION};
use super::manifest::{
    BackupId, Chunk, Intent, Manifest, PACK_BYTES, PAGE_CHUNKS, PAGE_EXTENTS, Page, Totals,
};
use super::repository::Repository;

/// Holds up to two packs: the one being filled, and the one on its way.
pub struct Writer {
    repository: Repository,
    id: BackupId,
    /// Of the page being filled.
    number: u32,
    pack: Vec<u8>,
    chunks: Vec<Chunk>,
    extents: usize,
    end: u64,
    hash: RunningHash,
    totals: Totals,
    upload: Option<JoinHandle<Result<Hash>>>,
}

impl Writer {
    /// Continues a backup after the pages that it has; a new one has none.
    ///
    /// # Errors
    /// The repository cannot be read.
    pub async fn resume(repository: &Repository, intent: &Intent) -> Result<Self> {
        let mut writer = Self {
            repository: repository.clone(),
            id: intent.id.clone(),
            number: 0,
            pack: Vec::new(),
            chunks: Vec::new(),
            extents: 0,
            end: 0,
            hash: RunningHash::default(),
            totals: Totals::default(),
            upload: None,
        };
        let capacity = intent.subject.capacity_bytes;
        // What cannot be read is written again, and so is all that follows.
        while let Ok(Some((page, hash))) = repository.page(&writer.id, writer.number).await {
            if page.check(&writer.id, writer.number, writer.end, capacity).is_err() {
                break;
            }
            page.chunks.iter().for_each(|chunk| writer.totals.add(chunk));
            writer.hash.add(&hash);
            writer.end = page.end;
            writer.number += 1;
        }
        Ok(writer)
    }

    /// What lies before this byte of the volume is written.
    pub fn end(&self) -> u64 {
        self.end
    }

    #[cfg(test)]
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Adds a chunk. `end`: what lies before this byte of the volume is then complete.
    pub async fn push(&mut self, coded: Coded, end: u64) -> Result<()> {
        let Coded { mut chunk, stored } = coded;
        self.end = end;
        if chunk.data.is_empty() && chunk.zeros.is_empty() {
            return Ok(());
        }
        if self.extend_zeros(&chunk) {
            return Ok(());
        }
        chunk.at = self.pack.len() as u64;
        self.pack.extend_from_slice(&stored);
        self.extents += chunk.data.len() + chunk.zeros.len();
        self.totals.add(&chunk);
        self.chunks.push(chunk);
        let is_full = self.pack.len() >= PACK_BYTES
            || self.chunks.len() >= PAGE_CHUNKS
            || self.extents >= PAGE_EXTENTS;
        if is_full { self.close_page().await } else { Ok(()) }
    }

    /// Adds a run of zeros to the previous one, so that a discarded volume takes one entry and not
    /// one for each MiB.
    fn extend_zeros(&mut self, chunk: &Chunk) -> bool {
        let (Some(last), [zeros]) = (self.chunks.last_mut(), chunk.zeros.as_slice()) else {
            return false;
        };
        match last.zeros.last_mut() {
            Some(run)
                if last.data.is_empty() && chunk.data.is_empty() && run.0 + run.1 == zeros.0 =>
            {
                run.1 += zeros.1;
                self.totals.zero_bytes += zeros.1;
                true
            }
            _ => false,
        }
    }

    async fn close_page(&mut self) -> Result<()> {
        self.uploaded().await?;
        let pack = std::mem::take(&mut self.pack);
        self.extents = 0;
        let page = Page {
            version: VERSION,
            backup: self.id.clone(),
            number: self.number,
            end: self.end,
            pack_bytes: pack.len() as u64,
            pack_hash: Hash::of(&pack),
            chunks: std::mem::take(&mut self.chunks),
        };
        self.number = self.number.checked_add(1).context("the backup has too many pages")?;
        let repository = self.repository.clone();
        self.upload = Some(tokio::spawn(async move {
            if !pack.is_empty() {
                repository.put_pack(&page.backup, page.number, pack).await?;
            }
            repository.put_page(&page).await
        }));
        Ok(())
    }

    /// Waits for the pack on its way.
    async fn uploaded(&mut self) -> Result<()> {
        if let Some(upload) = self.upload.take() {
            self.hash.add(&upload.await.context("the writing task panicked")??);
        }
        Ok(())
    }

    /// Writes what is left, and returns the manifest of the backup, which is not yet visible.
    pub async fn finish(mut self, intent: &Intent, created: String) -> Result<Manifest> {
        if !self.chunks.is_empty() {
            self.close_page().await?;
        }
        self.uploaded().await?;
        Ok(Manifest {
            version: VERSION,
            id: self.id,
            created,
            subject: intent.subject.clone(),
            pages: self.number,
            pages_hash: self.hash.finish(),
            totals: self.totals,
        })
    }
}
