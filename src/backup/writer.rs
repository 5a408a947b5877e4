//! Writes the packs and pages of a backup, in the order of the volume. A page is written after its
//! pack, so the pages that exist are a journal: another attempt can use them, and continue after the
//! last one.

use anyhow::{Context, Result, ensure};
use tokio::task::JoinHandle;

use super::chunk::Coded;
use super::document::{Hash, RunningHash, VERSION};
use super::manifest::{
    BackupId, Chunk, Intent, MAX_PARTS, Manifest, PACK_BYTES, PAGE_CHUNKS, PAGE_EXTENTS, Page,
    Part, Totals,
};
use super::repository::Repository;
use super::repository::names::Listing;

/// Holds up to two packs: the one being filled, and the one on its way.
pub struct Writer {
    repository: Repository,
    id: BackupId,
    /// Of interrupted attempts.
    parts: Vec<Part>,
    own: Part,
    /// Of the page being filled.
    number: u32,
    pack: Vec<u8>,
    chunks: Vec<Chunk>,
    extents: usize,
    end: u64,
    hash: RunningHash,
    totals: Totals,
    upload: Option<JoinHandle<Result<Uploaded>>>,
}

/// A page and its pack.
struct Uploaded {
    hash: Hash,
    page_bytes: u64,
    /// 0 without a pack.
    pack_bytes: u64,
}

impl Writer {
    pub fn new(repository: &Repository, id: BackupId) -> Self {
        let own = Part { attempt: id.clone(), pages: 0, page_bytes: 0, packs: 0, pack_bytes: 0 };
        Self {
            repository: repository.clone(),
            id,
            parts: Vec::new(),
            own,
            number: 0,
            pack: Vec::new(),
            chunks: Vec::new(),
            extents: 0,
            end: 0,
            hash: RunningHash::default(),
            totals: Totals::default(),
            upload: None,
        }
    }

    /// Uses the pages of an interrupted attempt, as far as they can be read.
    pub async fn continue_after(&mut self, attempt: &Intent, listing: &Listing) -> Result<()> {
        let capacity = attempt.subject.capacity_bytes;
        let mut parts = attempt.parts.clone();
        let begin = parts.iter().map(|part| part.pages).sum();
        let Some(listed) = listing.attempts.get(&attempt.id) else { return Ok(()) };
        parts.push(listed.part(&attempt.id, begin..begin + listed.pages_from(begin)));
        if parts.len() >= MAX_PARTS {
            return Ok(());
        }
        for part in parts {
            let first = self.number;
            while self.number < first + part.pages {
                let page = self.repository.page(&part.attempt, self.number).await;
                let Ok(Some((page, hash, _))) = page else { break };
                let is_sound = page.check(&part.attempt, self.number, self.end, capacity).is_ok();
                let listed = listing.attempts.get(&part.attempt);
                let pack_bytes = listed.map(|listed| listed.pack_bytes(self.number));
                if !is_sound || pack_bytes != Some(page.pack_bytes) {
                    break;
                }
                page.chunks.iter().for_each(|chunk| self.totals.add(chunk));
                self.hash.add(&hash);
                self.end = page.end;
                self.number += 1;
            }
            let found = listing.attempts.get(&part.attempt);
            let used = found.map(|found| found.part(&part.attempt, first..self.number));
            let is_all = self.number == first + part.pages;
            // The last one is named even without pages: the intent refers to it.
            self.parts.extend(used);
            if !is_all {
                break;
            }
        }
        Ok(())
    }

    /// What it uses of interrupted attempts.
    pub fn parts(&self) -> &[Part] {
        &self.parts
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
        let mut page = Page {
            version: VERSION,
            backup: self.id.clone(),
            number: self.number,
            end: self.end,
            pack_bytes: pack.len() as u64,
            pack_crc: 0,
            chunks: std::mem::take(&mut self.chunks),
        };
        self.number = self.number.checked_add(1).context("the backup has too many pages")?;
        let repository = self.repository.clone();
        self.upload = Some(tokio::spawn(async move {
            let pack_bytes = page.pack_bytes;
            if !pack.is_empty() {
                let sum = move || (crc32c::crc32c(&pack), pack);
                let summed = tokio::task::spawn_blocking(sum).await;
                let (crc, pack) = summed.context("the task panicked")?;
                page.pack_crc = crc;
                repository.put_pack(&page.backup, page.number, pack).await?;
            }
            let (hash, page_bytes) = repository.put_page(page).await?;
            Ok(Uploaded { hash, page_bytes, pack_bytes })
        }));
        Ok(())
    }

    /// Waits for the pack on its way.
    async fn uploaded(&mut self) -> Result<()> {
        if let Some(upload) = self.upload.take() {
            let uploaded = upload.await.context("the writing task panicked")??;
            self.hash.add(&uploaded.hash);
            self.own.pages += 1;
            self.own.page_bytes += uploaded.page_bytes;
            self.own.packs += u32::from(uploaded.pack_bytes > 0);
            self.own.pack_bytes += uploaded.pack_bytes;
        }
        Ok(())
    }

    /// Writes what is left, and returns the manifest of the backup, which is not yet visible.
    pub async fn finish(mut self, intent: &Intent, created: String) -> Result<Manifest> {
        ensure!(intent.id == self.id, "the intent is that of {}", intent.id);
        if !self.chunks.is_empty() {
            self.close_page().await?;
        }
        self.uploaded().await?;
        let mut parts = self.parts;
        parts.push(self.own);
        Ok(Manifest {
            version: VERSION,
            id: self.id,
            created,
            subject: intent.subject.clone(),
            origin: intent.origin.clone(),
            parts,
            pages_hash: self.hash.finish(),
            totals: self.totals,
        })
    }
}
