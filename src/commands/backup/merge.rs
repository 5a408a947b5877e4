//! A chain of backups as one: for each byte of the volume, the newest backup that has it. Pages are
//! read in the order of the volume, one at a time of each backup, so that memory does not grow with
//! the volume. A merge covers the volume, a part of it, or what may differ from another backup.

use std::collections::VecDeque;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};

use super::document::{Hash, RunningHash};
use super::failure::Failure;
use super::listing::Listing;
use super::manifest::{BackupId, Chunk, Manifest, Page};
use super::repository::Repository;
use storage::Extent;
use telemetry::memo::{Keep, Memo};

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
    end: u64,
    only: Option<Only>,
}

/// Where a device may differ from the newest backup: in the extents of the first `own` layers, and
/// of others.
struct Only {
    own: usize,
    others: Vec<Layer>,
}

impl Merge {
    /// All up to byte `end`; what is after the volume reads zero. `chain`: newest first.
    pub fn new(repository: &Repository, chain: &[Manifest], end: u64) -> Self {
        let layer = |(number, manifest): (usize, &Manifest)| {
            Layer::new(Source::Pages(Box::new(Pages::new(repository, manifest))), number)
        };
        let layers = chain.iter().enumerate().map(layer).collect();
        Self { layers, at: 0, end, only: None }
    }

    /// What may differ on a device that holds `held` (a chain), apart from `changes`. A byte that
    /// only common backups of both chains have is the same, as is one that no backup has.
    pub fn differing(
        repository: &Repository,
        chain: &[Manifest],
        end: u64,
        held: &[Manifest],
        changes: Changes,
    ) -> Self {
        let apart = |these: &[Manifest], those: &[Manifest]| {
            let common = these.iter().position(|one| those.iter().any(|other| other.id == one.id));
            common.unwrap_or(these.len())
        };
        // The number of the layer is for the content, which none of these yields.
        let pages = |manifest| Source::Pages(Box::new(Pages::new(repository, manifest)));
        let others = held[..apart(held, chain)].iter().map(pages);
        let others = others.chain([Source::Changes(changes)]);
        let others = others.map(|source| Layer::new(source, usize::MAX)).collect();
        let only = Some(Only { own: apart(chain, held), others });
        Self { only, ..Self::new(repository, chain, end) }
    }

    /// The bytes from `at` to `end`, without the pages before.
    pub async fn part(
        repository: &Repository,
        chain: &[Manifest],
        cache: &PageCache,
        at: u64,
        end: u64,
    ) -> Result<Self> {
        let mut layers = Vec::with_capacity(chain.len());
        for (number, manifest) in chain.iter().enumerate() {
            let pages = Pages::reaching(repository, manifest, cache, at).await?;
            layers.push(Layer::new(Source::Pages(Box::new(pages)), number));
        }
        Ok(Self { layers, at, end, only: None })
    }

    /// The next run; `None` at the end.
    ///
    /// # Errors
    /// A page is missing or damaged, or the driver does not list the changes.
    pub async fn next(&mut self) -> Result<Option<Run>> {
        let mut end = loop {
            let others = self.only.iter_mut().flat_map(|only| &mut only.others);
            for layer in self.layers.iter_mut().chain(others) {
                layer.advance(self.at).await?;
            }
            if self.at >= self.end {
                return Ok(None);
            }
            let Some(Only { own, others }) = &self.only else { break self.end };
            let next = self.layers[..*own].iter().chain(others);
            let next = next.filter_map(|layer| Some(layer.pieces.front()?.extent));
            let (at, covered): (u64, u64) = next.fold((self.end, 0), |(at, covered), extent| {
                let reaches = if extent.offset <= self.at { extent.end() } else { 0 };
                (at.min(extent.offset), covered.max(reaches))
            });
            if covered > 0 {
                break covered.min(self.end);
            }
            self.at = at;
        };
        // Newer backups hide older ones, so a run ends where a newer one begins.
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

/// One backup of the chain, or the extents of a listing.
struct Layer {
    source: Source,
    number: usize,
    /// Of what was read last; ascending.
    pieces: VecDeque<Piece>,
}

enum Source {
    Pages(Box<Pages>),
    Changes(Changes),
}

/// What changed on a device since a backup: extents that ascend.
pub struct Changes {
    pub first: Vec<Extent>,
    /// Has the others.
    pub listing: Option<Box<Listing>>,
}

impl Changes {
    async fn next(&mut self) -> Result<Option<Vec<Extent>>> {
        match &mut self.listing {
            _ if !self.first.is_empty() => Ok(Some(std::mem::take(&mut self.first))),
            Some(listing) => listing.next().await,
            None => Ok(None),
        }
    }
}

impl Layer {
    fn new(source: Source, number: usize) -> Self {
        Self { source, number, pieces: VecDeque::new() }
    }

    /// Drops what ends at or before byte `at`, and reads on until something is left or all is read.
    async fn advance(&mut self, at: u64) -> Result<()> {
        loop {
            while self.pieces.front().is_some_and(|piece| piece.extent.end() <= at) {
                self.pieces.pop_front();
            }
            if !self.pieces.is_empty() {
                return Ok(());
            }
            let pages = match &mut self.source {
                Source::Pages(pages) => pages,
                Source::Changes(changes) => {
                    let Some(extents) = changes.next().await? else { return Ok(()) };
                    let piece = |extent| Piece { extent, chunk: None };
                    self.pieces.extend(extents.into_iter().map(piece));
                    continue;
                }
            };
            let Some(page) = pages.next().await? else { return Ok(()) };
            for chunk in page.chunks.into_iter().filter(|chunk| chunk.end() > at) {
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

/// Pages that were read, for reads that jump. Cheap to clone.
#[derive(Clone)]
pub struct PageCache(Memo<(BackupId, u32), Arc<Page>>);

impl PageCache {
    /// Bytes of all pages, about.
    const BYTES: u64 = 32 << 20;

    pub fn new() -> Self {
        Self(Memo::weighed(Self::BYTES, Keep::Always, |page| {
            let extents: usize =
                page.chunks.iter().map(|one| one.data.len() + one.zeros.len()).sum();
            (256 + page.chunks.len() * 192 + extents * 16) as u64
        }))
    }
}

/// The pages of a backup, one after the other, each checked.
pub struct Pages {
    repository: Repository,
    manifest: Manifest,
    number: u32,
    end: u64,
    /// Of all pages, which are held against the manifest.
    hash: RunningHash,
    pub totals: super::manifest::Totals,
    /// Of a reader that jumps: it does not see all pages, and relies on the hash of each.
    cache: Option<PageCache>,
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
            cache: None,
        }
    }

    /// From the first page on that reaches beyond byte `at`.
    pub async fn reaching(
        repository: &Repository,
        manifest: &Manifest,
        cache: &PageCache,
        at: u64,
    ) -> Result<Self> {
        let mut pages = Self { cache: Some(cache.clone()), ..Self::new(repository, manifest) };
        let mut end = manifest.pages();
        while pages.number < end {
            let middle = pages.number + (end - pages.number) / 2;
            match pages.read(middle).await?.end > at {
                true => end = middle,
                false => pages.number = middle + 1,
            }
        }
        Ok(pages)
    }

    /// The next page; `None` when all have been read and are those that the manifest names.
    ///
    /// # Errors
    /// A page is missing, damaged, or not the one that was written.
    pub async fn next(&mut self) -> Result<Option<Page>> {
        let Manifest { id, pages_hash, totals, .. } = &self.manifest;
        if self.number == self.manifest.pages() {
            let is_part = self.cache.is_some();
            let damaged = |what| Failure::damaged(format!("backup {id} is damaged: its {what}"));
            let has_hash = self.hash.clone().finish() == *pages_hash;
            ensure!(is_part || has_hash, damaged("pages do not have their hash"));
            let has_sums = self.totals == *totals;
            ensure!(is_part || has_sums, damaged("sums are not those of its pages"));
            return Ok(None);
        }
        let page = Arc::unwrap_or_clone(self.read(self.number).await?);
        page.chunks.iter().for_each(|chunk| self.totals.add(chunk));
        self.end = page.end;
        self.number += 1;
        Ok(Some(page))
    }

    async fn read(&mut self, number: u32) -> Result<Arc<Page>> {
        let attempt = self.manifest.attempt_of(number).clone();
        if let Some(PageCache(cache)) = &self.cache
            && let Some(page) = cache.get(&(attempt.clone(), number))
        {
            return Ok(page);
        }
        let Manifest { id, subject, .. } = &self.manifest;
        let page = self.repository.page(&attempt, number).await?;
        let (page, hash, _): (Page, Hash, u64) = page.ok_or_else(|| {
            Failure::damaged(format!("backup {id} is damaged: page {number} is missing"))
        })?;
        page.check(&attempt, number, self.end, subject.capacity_bytes)
            .with_context(|| Failure::damaged(format!("backup {id}: page {number} is damaged")))?;
        self.hash.add(&hash);
        let page = Arc::new(page);
        if let Some(PageCache(cache)) = &self.cache {
            cache.insert((attempt, number), Arc::clone(&page));
        }
        Ok(page)
    }
}
