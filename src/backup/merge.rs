//! A chain of backups as one: for each byte of the volume, the newest backup that has it. Pages are
//! read in the order of the volume, one at a time of each backup, so that memory does not grow with
//! the volume.

use std::collections::VecDeque;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};

use super::document::{Hash, RunningHash};
use super::failure::Failure;
use super::manifest::{BackupId, Chunk, Manifest, Page};
use super::repository::Repository;
use crate::backend::Extent;

/// A part of the volume, all of it from one place.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    pub extent: Extent,
    pub content: Content,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    /// Zeros, because no backup of the chain has it, or because the newest one says so.
    Zeros,
    /// Bytes of a chunk, from this one on.
    Data { chunk: Arc<Place>, from: u64 },
}

/// Where a chunk is.
#[derive(Debug, Clone, PartialEq)]
pub struct Place {
    /// The number of its backup in the chain, 0 for the newest.
    pub layer: usize,
    /// Which wrote it.
    pub attempt: BackupId,
    pub page: u32,
    pub chunk: Chunk,
}

/// The runs of a chain.
pub struct Merge {
    layers: Vec<Layer>,
    at: u64,
    capacity: u64,
}

impl Merge {
    /// `chain`: newest first.
    pub fn new(repository: &Repository, chain: &[Manifest]) -> Self {
        let capacity = chain.first().map_or(0, |newest| newest.subject.capacity_bytes);
        let layer = |(number, manifest): (usize, &Manifest)| {
            Layer::new(Pages::new(repository, manifest), number)
        };
        Self { layers: chain.iter().enumerate().map(layer).collect(), at: 0, capacity }
    }

    /// The next run; `None` at the end of the volume.
    ///
    /// # Errors
    /// A page is missing or damaged.
    pub async fn next(&mut self) -> Result<Option<Run>> {
        for layer in &mut self.layers {
            layer.advance(self.at).await?;
        }
        if self.at >= self.capacity {
            return Ok(None);
        }
        // Newer backups hide older ones, so a run ends where a newer one begins.
        let mut end = self.capacity;
        let mut found = None;
        for layer in &self.layers {
            match layer.pieces.front() {
                Some(piece) if piece.extent.offset <= self.at => {
                    end = end.min(piece.extent.end());
                    found = Some(piece);
                    break;
                }
                Some(piece) => end = end.min(piece.extent.offset),
                None => {}
            }
        }
        let extent = Extent { offset: self.at, length: end - self.at };
        let content = match found.map(|piece| (&piece.chunk, piece)) {
            Some((Some((chunk, from)), piece)) => {
                let from = from + (self.at - piece.extent.offset);
                Content::Data { chunk: Arc::clone(chunk), from }
            }
            _ => Content::Zeros,
        };
        self.at = end;
        Ok(Some(Run { extent, content }))
    }
}

/// An extent of one backup.
struct Piece {
    extent: Extent,
    /// Its chunk and where its bytes begin in that; zeros have none.
    chunk: Option<(Arc<Place>, u64)>,
}

/// One backup of the chain.
struct Layer {
    pages: Pages,
    number: usize,
    /// Of the page that was read last; ascending.
    pieces: VecDeque<Piece>,
}

impl Layer {
    fn new(pages: Pages, number: usize) -> Self {
        Self { pages, number, pieces: VecDeque::new() }
    }

    /// Drops what ends at or before byte `at`, and reads on until something is left or the backup
    /// ends.
    async fn advance(&mut self, at: u64) -> Result<()> {
        loop {
            while self.pieces.front().is_some_and(|piece| piece.extent.end() <= at) {
                self.pieces.pop_front();
            }
            if !self.pieces.is_empty() {
                return Ok(());
            }
            let Some(page) = self.pages.next().await? else { return Ok(()) };
            for chunk in page.chunks {
                let attempt = page.backup.clone();
                let place = Place { layer: self.number, attempt, page: page.number, chunk };
                self.pieces.extend(pieces(Arc::new(place)));
            }
        }
    }
}

/// The extents of a chunk, ascending.
fn pieces(place: Arc<Place>) -> Vec<Piece> {
    let extent = |&(offset, length): &(u64, u64)| Extent { offset, length };
    let mut from = 0;
    let mut pieces = Vec::new();
    for piece in &place.chunk.data {
        pieces.push(Piece { extent: extent(piece), chunk: Some((Arc::clone(&place), from)) });
        from += piece.1;
    }
    let zeros = place.chunk.zeros.iter();
    pieces.extend(zeros.map(|zeros| Piece { extent: extent(zeros), chunk: None }));
    pieces.sort_by_key(|piece| piece.extent.offset);
    pieces
}

/// The pages of a backup, one after the other, each checked, and all of them against the manifest.
pub struct Pages {
    repository: Repository,
    manifest: Manifest,
    number: u32,
    end: u64,
    hash: RunningHash,
    pub totals: super::manifest::Totals,
}

impl Pages {
    pub fn new(repository: &Repository, manifest: &Manifest) -> Self {
        Self {
            repository: repository.clone(),
            manifest: manifest.clone(),
            number: 0,
            end: 0,
            hash: RunningHash::default(),
            totals: Default::default(),
        }
    }

    /// The next page; `None` when all have been read and are those that the manifest names.
    ///
    /// # Errors
    /// A page is missing, damaged, or not the one that was written.
    pub async fn next(&mut self) -> Result<Option<Page>> {
        let Manifest { id, pages_hash, subject, totals, .. } = &self.manifest;
        if self.number == self.manifest.pages() {
            let found = self.hash.clone().finish();
            ensure!(
                found == *pages_hash,
                Failure::damaged(format!(
                    "backup {id} is damaged: its pages do not have their hash"
                ))
            );
            ensure!(
                self.totals == *totals,
                Failure::damaged(format!(
                    "backup {id} is damaged: its sums are not those of its pages"
                ))
            );
            return Ok(None);
        }
        let attempt = self.manifest.attempt_of(self.number);
        let page = self.repository.page(attempt, self.number).await?;
        let (page, hash, _): (Page, Hash, u64) = page.ok_or_else(|| {
            Failure::damaged(format!("backup {id} is damaged: page {} is missing", self.number))
        })?;
        page.check(attempt, self.number, self.end, subject.capacity_bytes).with_context(|| {
            Failure::damaged(format!("backup {id}: page {} is damaged", self.number))
        })?;
        page.chunks.iter().for_each(|chunk| self.totals.add(chunk));
        self.hash.add(&hash);
        self.end = page.end;
        self.number += 1;
        Ok(Some(page))
    }
}
