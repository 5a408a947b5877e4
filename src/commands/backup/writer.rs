//! Writes the packs and pages of a backup, in the order of the volume. A page is written after its
//! pack, so the pages that exist are a journal: another attempt can use them, and continue after the
//! last one.

use std::collections::VecDeque;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::chunk::Coded;
use super::document::{Hash, RunningHash, VERSION};
use super::manifest::{
    BackupId, Chunk, Intent, MAX_PARTS, Manifest, PACK_BYTES, PAGE_CHUNKS, PAGE_EXTENTS, Page,
    Part, Totals,
};
use super::repository::Repository;
use super::repository::names::Listing;
use telemetry::task;

/// Packs on their way at a time: one is flushed while the next one is sent.
const UPLOADS: usize = 2;

/// Holds the pack being filled, and [`UPLOADS`] more.
pub struct Writer {
    repository: Repository,
    id: BackupId,
    /// Of interrupted attempts.
    parts: Vec<Part>,
    own: Part,
    /// Of the page being filled.
    number: u32,
    pack: Vec<Bytes>,
    pack_bytes: usize,
    chunks: Vec<Chunk>,
    extents: usize,
    end: u64,
    hash: RunningHash,
    totals: Totals,
    uploads: VecDeque<JoinHandle<Result<Uploaded>>>,
    /// The newest page was written.
    written: Option<oneshot::Receiver<()>>,
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
            pack_bytes: 0,
            chunks: Vec::new(),
            extents: 0,
            end: 0,
            hash: RunningHash::default(),
            totals: Totals::default(),
            uploads: VecDeque::new(),
            written: None,
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
        chunk.at = self.pack_bytes as u64;
        self.pack_bytes += stored.len();
        if !stored.is_empty() {
            self.pack.push(stored.into());
        }
        self.extents += chunk.data.len() + chunk.zeros.len();
        self.totals.add(&chunk);
        self.chunks.push(chunk);
        let is_full = self.pack_bytes >= PACK_BYTES
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
        while self.uploads.len() >= UPLOADS {
            self.uploaded().await?;
        }
        let pack = std::mem::take(&mut self.pack);
        self.extents = 0;
        let page = Page {
            version: VERSION,
            backup: self.id.clone(),
            number: self.number,
            end: self.end,
            pack_bytes: std::mem::take(&mut self.pack_bytes) as u64,
            pack_crc: 0,
            chunks: std::mem::take(&mut self.chunks),
        };
        self.number = self.number.checked_add(1).context("the backup has too many pages")?;
        let (done, written) = oneshot::channel();
        let earlier = self.written.replace(written);
        let upload = upload(self.repository.clone(), page, pack, earlier);
        self.uploads.push_back(task::spawn(async move {
            let uploaded = upload.await?;
            // A writer that has failed does not wait.
            let _ = done.send(());
            Ok(uploaded)
        }));
        Ok(())
    }

    /// Waits for the first page on its way.
    async fn uploaded(&mut self) -> Result<()> {
        let Some(upload) = self.uploads.pop_front() else { return Ok(()) };
        let uploaded = upload.await.context("the writing task panicked")??;
        self.hash.add(&uploaded.hash);
        self.own.pages += 1;
        self.own.page_bytes += uploaded.page_bytes;
        self.own.packs += u32::from(uploaded.pack_bytes > 0);
        self.own.pack_bytes += uploaded.pack_bytes;
        Ok(())
    }

    /// Writes what is left, and returns the manifest of the backup, which is not yet visible.
    pub async fn finish(mut self, intent: &Intent, created: String) -> Result<Manifest> {
        ensure!(intent.id == self.id, "the intent is that of {}", intent.id);
        if !self.chunks.is_empty() {
            self.close_page().await?;
        }
        while !self.uploads.is_empty() {
            self.uploaded().await?;
        }
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

/// Writes a pack, and after it and after the `earlier` page the page.
async fn upload(
    repository: Repository,
    mut page: Page,
    pack: Vec<Bytes>,
    earlier: Option<oneshot::Receiver<()>>,
) -> Result<Uploaded> {
    let pack_bytes = page.pack_bytes;
    if pack_bytes > 0 {
        let sum = move || {
            let sum = pack.iter().fold(0, |sum, part| crc32c::crc32c_append(sum, part));
            (sum, pack.into_iter().collect())
        };
        let summed = task::blocking(sum).await;
        let (crc, pack) = summed.context("the task panicked")?;
        page.pack_crc = crc;
        repository.put_pack(&page.backup, page.number, pack).await?;
    }
    if let Some(earlier) = earlier {
        earlier.await.context("an earlier page was not written")?;
    }
    let (hash, page_bytes) = repository.put_page(page).await?;
    Ok(Uploaded { hash, page_bytes, pack_bytes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backup::manifest::samples;
    use crate::backup::repository::Location;

    fn page(backup: &BackupId, number: u32) -> Page {
        let (end, chunks) = (u64::from(number + 1) << 20, Vec::new());
        Page {
            version: VERSION,
            backup: backup.clone(),
            number,
            end,
            pack_bytes: 4,
            pack_crc: 0,
            chunks,
        }
    }

    #[tokio::test]
    async fn a_page_is_written_after_the_earlier_one() {
        let directory = tempfile::tempdir().unwrap();
        let location = Location::Directory(directory.path().join("repository"));
        let repository = Repository::open(&location, true, None, None).await.unwrap();
        let id = samples::backup(0).id;
        let pack = || vec![Bytes::from_static(b"ab"), Bytes::from_static(b"cd")];
        let (done, earlier) = oneshot::channel();
        let second = tokio::spawn(upload(repository.clone(), page(&id, 1), pack(), Some(earlier)));
        let path = directory.path().join("repository/backups").join(id.as_str()).join("packs");
        while !path.join("00000001").exists() {
            tokio::task::yield_now().await;
        }
        assert!(repository.page(&id, 1).await.unwrap().is_none());
        upload(repository.clone(), page(&id, 0), pack(), None).await.unwrap();
        done.send(()).unwrap();
        second.await.unwrap().unwrap();
        let (written, _, _) = repository.page(&id, 1).await.unwrap().unwrap();
        assert_eq!(repository.pack(&written).await.unwrap(), b"abcd");
        // Without the earlier page there is none.
        let (failed, earlier) = oneshot::channel::<()>();
        drop(failed);
        assert!(upload(repository.clone(), page(&id, 2), pack(), Some(earlier)).await.is_err());
        assert!(repository.page(&id, 2).await.unwrap().is_none());
    }
}
