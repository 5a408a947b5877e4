//! `restore`: a backup and its chain, written to a device or a file. Each byte is written once,
//! from the newest backup that has it, after its chunk was verified. [`Reader`] has the chunks for
//! other uses, too.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::sync::Arc;

use anyhow::{Context, Result};
use tokio::task::JoinSet;

use super::blocking;
use super::chunk::Coder;
use super::copying::parallel;
use super::document::Hash;
use super::failure::Failure;
use super::manifest::{BackupId, Manifest};
use super::merge::{Changes, Content, Merge, Place, Run};
use super::repository::{Repository, names};
use super::target::Target;
use crate::client::progress;
use crate::client::stop::Stop;
use common::fail_point::hit;
use storage::Extent;

/// Runs that are written together, at most.
const RUNS: usize = 4096;

/// What a restore did, in bytes.
#[derive(Debug, Clone, Copy, Default, serde::Serialize, serde::Deserialize)]
pub struct Restored {
    pub written_bytes: u64,
    /// What the target held already.
    pub kept_bytes: u64,
}

/// A restore under way.
pub struct Restore {
    merge: Merge,
    reader: Reader,
    target: Arc<Target>,
    kept: Kept,
    done: Restored,
}

/// What is not written, because the target holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kept {
    /// Everything is written.
    Nothing,
    /// Chunks, which are compared by their hashes and not fetched.
    Chunks,
    /// Blocks.
    Blocks,
}

/// Reads the chunks of a chain.
pub struct Reader {
    repository: Repository,
    /// By the attempt that wrote the chunks.
    coders: HashMap<BackupId, Coder>,
    pub chunks: Chunks,
    /// Chunks to keep besides those of the last window, which the next one often continues with.
    room: usize,
}

pub type Chunks = HashMap<Key, Arc<Vec<u8>>>;

/// A chunk, by layer, page, and where it is in the pack.
pub type Key = (usize, u32, u64);

fn key(place: &Place) -> Key {
    (place.layer, place.page, place.chunk.at)
}

impl Restore {
    /// `chain`: newest first. `resume`: what the target holds already is not written again.
    pub fn new(
        repository: &Repository,
        chain: &[Manifest],
        target: Target,
        resume: bool,
    ) -> Result<Self> {
        let kept = if resume && !target.is_fresh { Kept::Chunks } else { Kept::Nothing };
        let merge = Merge::new(repository, chain, target.size);
        Self::with(repository, chain, target, merge, kept)
    }

    /// To a target that holds the backup of another chain, apart from `changes`.
    pub fn in_place(
        repository: &Repository,
        chain: &[Manifest],
        target: Target,
        held: &[Manifest],
        changes: Changes,
    ) -> Result<Self> {
        let merge = Merge::differing(repository, chain, target.size, held, changes);
        Self::with(repository, chain, target, merge, Kept::Blocks)
    }

    fn with(
        repository: &Repository,
        chain: &[Manifest],
        target: Target,
        merge: Merge,
        kept: Kept,
    ) -> Result<Self> {
        let reader = Reader::new(repository, chain, 0)?;
        Ok(Self { merge, reader, target: Arc::new(target), kept, done: Restored::default() })
    }

    /// Writes what the merge has, and syncs the target.
    pub async fn run(mut self, stop: &Stop) -> Result<Restored> {
        loop {
            stop.check()?;
            let window = stop.wait(window(&mut self.merge)).await?;
            let Some(last) = window.last() else { break };
            let end = last.extent.end();
            self.write(window, stop).await?;
            hit("restore.written")?;
            let done = self.done.written_bytes + self.done.kept_bytes;
            progress::report_data(done, end, self.target.size);
        }
        let target = Arc::clone(&self.target);
        blocking(move || target.sync()).await?;
        Ok(self.done)
    }

    async fn write(&mut self, window: Vec<Run>, stop: &Stop) -> Result<()> {
        let (window, kept) = self.without_kept(window).await?;
        stop.wait(self.reader.fetch(&window)).await?;
        let (target, chunks) = (Arc::clone(&self.target), self.reader.chunks.clone());
        let compare = self.kept == Kept::Blocks;
        let (written, same) =
            blocking(move || write_runs(&target, &window, &chunks, compare)).await?;
        self.done.written_bytes += written;
        self.done.kept_bytes += kept + same;
        Ok(())
    }

    /// The runs without those whose bytes the target holds, and how many bytes that are.
    async fn without_kept(&self, window: Vec<Run>) -> Result<(Vec<Run>, u64)> {
        if self.kept != Kept::Chunks {
            return Ok((window, 0));
        }
        let target = Arc::clone(&self.target);
        blocking(move || {
            let mut used: HashMap<Key, (Arc<Place>, Vec<Extent>)> = HashMap::new();
            for run in &window {
                if let Content::Data { chunk, .. } = &run.content {
                    let entry =
                        used.entry(key(chunk)).or_insert_with(|| (Arc::clone(chunk), Vec::new()));
                    entry.1.push(run.extent);
                }
            }
            let mut kept = HashMap::new();
            for (key, (place, extents)) in used {
                if holds(&target, &place, &extents)? {
                    kept.insert(key, place.chunk.bytes);
                }
            }
            let is_kept = |run: &Run| match &run.content {
                Content::Data { chunk, .. } => kept.contains_key(&key(chunk)),
                Content::Zeros => false,
            };
            let rest = window.into_iter().filter(|run| !is_kept(run)).collect();
            Ok((rest, kept.values().sum()))
        })
        .await
    }
}

impl Reader {
    pub fn new(repository: &Repository, chain: &[Manifest], room: usize) -> Result<Self> {
        let attempts = chain.iter().flat_map(|one| &one.parts).map(|part| &part.attempt);
        let coders = attempts.map(|id| Ok((id.clone(), repository.coder(id)?)));
        let coders = coders.collect::<Result<_>>()?;
        Ok(Self { repository: repository.clone(), coders, chunks: HashMap::new(), room })
    }

    /// Gets the chunks of a window, and forgets others if there are too many.
    pub async fn fetch(&mut self, window: &[Run]) -> Result<()> {
        let mut wanted: HashMap<Key, Arc<Place>> = HashMap::new();
        for run in window {
            if let Content::Data { chunk, .. } = &run.content {
                wanted.entry(key(chunk)).or_insert_with(|| Arc::clone(chunk));
            }
        }
        if self.chunks.len() > self.room {
            self.chunks.retain(|key, _| wanted.contains_key(key));
        }
        let mut jobs = JoinSet::new();
        for (key, place) in wanted {
            if self.chunks.contains_key(&key) {
                continue;
            }
            let Some(coder) = self.coders.get(&place.attempt).cloned() else { continue };
            let (repository, id) = (self.repository.clone(), place.attempt.clone());
            jobs.spawn(async move {
                let pack = names::pack(&id, place.page);
                let stored = repository.stored_chunk(&id, place.page, &place.chunk).await?;
                let bytes = blocking(move || coder.decode(&place.chunk, stored)).await;
                Ok::<_, anyhow::Error>((key, bytes.context(pack)?))
            });
        }
        while let Some(job) = jobs.join_next().await {
            let (key, bytes) = job.context("the reading task panicked")??;
            self.chunks.insert(key, Arc::new(bytes));
        }
        Ok(())
    }
}

/// The next runs, of as many chunks as are read at the same time.
pub async fn window(merge: &mut Merge) -> Result<Vec<Run>> {
    let mut runs = Vec::new();
    let mut chunks = std::collections::HashSet::new();
    while runs.len() < RUNS && chunks.len() < parallel() {
        let Some(run) = merge.next().await? else { break };
        if let Content::Data { chunk, .. } = &run.content {
            chunks.insert(key(chunk));
        }
        runs.push(run);
    }
    Ok(runs)
}

/// Whether the target holds a chunk. Only one that is needed whole has a hash to compare with.
fn holds(target: &Target, place: &Place, extents: &[Extent]) -> Result<bool> {
    if extents.iter().map(|extent| extent.length).sum::<u64>() != place.chunk.bytes {
        return Ok(false);
    }
    let mut bytes = vec![0; usize::try_from(place.chunk.bytes)?];
    let mut rest = bytes.as_mut_slice();
    for extent in extents {
        let (piece, after) = rest.split_at_mut(usize::try_from(extent.length)?);
        target.read(piece, extent.offset)?;
        rest = after;
    }
    Ok(Hash::of(&bytes) == place.chunk.hash)
}

/// Returns how many bytes of data were written, and how many were not, because the target holds
/// them: `compare`.
fn write_runs(target: &Target, runs: &[Run], chunks: &Chunks, compare: bool) -> Result<(u64, u64)> {
    let mut written = 0;
    let mut same = 0;
    for run in runs {
        match bytes_of(run, chunks)? {
            None if target.is_fresh => {}
            None => target.zero(run.extent)?,
            Some(bytes) => {
                let new = match compare {
                    true => target.write_changed(bytes, run.extent.offset)?,
                    false => target.write(bytes, run.extent.offset).map(|()| run.extent.length)?,
                };
                written += new;
                same += run.extent.length - new;
            }
        }
    }
    Ok((written, same))
}

/// `None`: zeros.
pub fn bytes_of<'c>(run: &Run, chunks: &'c Chunks) -> Result<Option<&'c [u8]>> {
    let Content::Data { chunk, from } = &run.content else { return Ok(None) };
    let from = usize::try_from(*from)?;
    let until = from + usize::try_from(run.extent.length)?;
    let bytes = chunks.get(&key(chunk)).and_then(|bytes| bytes.get(from..until));
    let outside = || Failure::damaged("a chunk is damaged: an extent is outside of it");
    Ok(Some(bytes.ok_or_else(outside)?))
}

/// Writes all of the volume to a stream, in order. Returns how many bytes of data it has.
pub async fn to_stream(
    repository: &Repository,
    chain: &[Manifest],
    mut out: File,
    stop: &Stop,
) -> Result<u64> {
    let capacity = chain.first().map_or(0, |newest| newest.subject.capacity_bytes);
    let mut merge = Merge::new(repository, chain, capacity);
    let mut reader = Reader::new(repository, chain, 0)?;
    let mut written = 0;
    loop {
        let window = stop.wait(window(&mut merge)).await?;
        let Some(last) = window.last() else { return Ok(written) };
        let end = last.extent.end();
        stop.wait(reader.fetch(&window)).await?;
        let chunks = reader.chunks.clone();
        let write = blocking(move || {
            let mut data = 0;
            for run in &window {
                match bytes_of(run, &chunks)? {
                    Some(bytes) => {
                        out.write_all(bytes)?;
                        data += run.extent.length;
                    }
                    None => drop(io::copy(&mut io::repeat(0).take(run.extent.length), &mut out)?),
                }
            }
            Ok((out, data))
        });
        // The reader of the stream may be slow, so that only a signal ends the wait.
        let (returned, data) = stop.whole(write).await.context("write to standard output")?;
        out = returned;
        written += data;
        progress::report_data(written, end, capacity);
    }
}
