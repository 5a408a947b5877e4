//! Copies the blocks of a snapshot from a device to a repository. Several chunks are read and
//! compressed at a time, and written in the order of the volume.

use std::collections::VecDeque;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use tokio::sync::oneshot;

use super::attempt::Attempt;
use super::chunk::{self, Coded, Coder};
use super::listing::Blocks;
use super::manifest::{CHUNK_BYTES, CHUNK_EXTENTS};
use super::repository::Repository;
use super::writer::Writer;
use crate::client::block_map::{Source, clip};
use crate::client::progress;
use crate::client::stop::Stop;
use storage::Extent;
use telemetry::task;

/// A backup that is being written.
pub struct Copying<'c, 'r> {
    pub repository: &'c Repository,
    pub stop: &'c Stop,
    pub attempt: &'c mut Attempt<'r>,
}

impl Copying<'_, '_> {
    /// Copies the `first` blocks and all further ones.
    pub async fn copy<S: Source>(
        &mut self,
        first: Option<Vec<Extent>>,
        blocks: Blocks<S>,
        device: &Path,
    ) -> Result<()> {
        let opened = File::open(device).with_context(|| format!("open {}", device.display()))?;
        let mut queue = Queue {
            device: Arc::new(opened),
            keep_zeros: !self.attempt.intent.subject.is_full(),
            coder: self.repository.coder(&self.attempt.intent.id)?,
            capacity: self.attempt.intent.subject.capacity_bytes,
            jobs: VecDeque::new(),
            copied: 0,
        };
        let copied = self.pump(first, blocks, &mut queue).await;
        // The volume cannot be removed while the device is open.
        queue.settle().await;
        copied
    }

    /// Reads the extents in chunks, several at a time, and writes them in order.
    async fn pump<S: Source>(
        &mut self,
        mut next: Option<Vec<Extent>>,
        mut blocks: Blocks<S>,
        queue: &mut Queue,
    ) -> Result<()> {
        let mut plan = Plan::default();
        while let Some(extents) = next {
            let listed = blocks.capacity().unwrap_or(queue.capacity);
            ensure!(
                listed >= queue.capacity,
                "the driver lists blocks of a volume of {listed} bytes, and the snapshot has {}",
                queue.capacity
            );
            for mut extent in clip(extents, queue.capacity) {
                while extent.length > 0 {
                    if let Some(chunk) = plan.take(&mut extent) {
                        self.stop.check()?;
                        queue.push(chunk, &mut self.attempt.writer).await?;
                    }
                }
            }
            next = self.stop.wait(blocks.next()).await?;
        }
        if !plan.extents.is_empty() {
            queue.push(plan.finish(), &mut self.attempt.writer).await?;
        }
        queue.drain(&mut self.attempt.writer).await
    }
}

/// The extents of the next chunk.
#[derive(Default)]
struct Plan {
    extents: Vec<Extent>,
    bytes: u64,
}

impl Plan {
    /// Takes as much of `rest` as fits. Returns the extents when the chunk is full.
    fn take(&mut self, rest: &mut Extent) -> Option<Vec<Extent>> {
        let length = rest.length.min(CHUNK_BYTES - self.bytes);
        match self.extents.last_mut() {
            Some(last) if last.end() == rest.offset => last.length += length,
            _ => self.extents.push(Extent { offset: rest.offset, length }),
        }
        self.bytes += length;
        *rest = Extent { offset: rest.offset + length, length: rest.length - length };
        let is_full = self.bytes == CHUNK_BYTES || self.extents.len() == CHUNK_EXTENTS;
        is_full.then(|| self.finish())
    }

    fn finish(&mut self) -> Vec<Extent> {
        self.bytes = 0;
        std::mem::take(&mut self.extents)
    }
}

/// Chunks in work, in the order of the volume.
struct Queue {
    device: Arc<File>,
    keep_zeros: bool,
    coder: Coder,
    capacity: u64,
    jobs: VecDeque<(oneshot::Receiver<Result<Coded>>, u64)>,
    /// Bytes of data.
    copied: u64,
}

impl Queue {
    async fn push(&mut self, extents: Vec<Extent>, writer: &mut Writer) -> Result<()> {
        if self.jobs.len() >= parallel() {
            self.pop(writer).await?;
        }
        let end = extents.last().map_or(0, Extent::end);
        let (device, coder, keep_zeros) =
            (Arc::clone(&self.device), self.coder.clone(), self.keep_zeros);
        let job = move || chunk::read(&*device, &extents, keep_zeros, &coder);
        self.jobs.push_back((task::blocking(job), end));
        Ok(())
    }

    async fn pop(&mut self, writer: &mut Writer) -> Result<()> {
        if let Some((job, end)) = self.jobs.pop_front() {
            let coded = job.await.context("the task panicked")??;
            self.copied += coded.chunk.bytes;
            writer.push(coded, end).await?;
            progress::report_data(self.copied, end, self.capacity);
        }
        Ok(())
    }

    async fn drain(&mut self, writer: &mut Writer) -> Result<()> {
        while !self.jobs.is_empty() {
            self.pop(writer).await?;
        }
        Ok(())
    }

    /// Waits until no task reads the device.
    async fn settle(&mut self) {
        for (job, _) in self.jobs.drain(..) {
            // After an error, which was reported, its chunk is not needed.
            drop(job.await);
        }
    }
}

/// Maximum number of chunks in work.
pub fn parallel() -> usize {
    std::thread::available_parallelism().map_or(2, usize::from).clamp(2, 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_has_up_to_1_mib_and_joins_neighbours() {
        let mut plan = Plan::default();
        let mut chunks = Vec::new();
        for (offset, length) in [(0, 4096), (4096, 4096), (1 << 20, (2 << 20) + 4096)] {
            let mut extent = Extent { offset, length };
            while extent.length > 0 {
                chunks.extend(plan.take(&mut extent));
            }
        }
        chunks.push(plan.finish());
        let extent = |offset, length| Extent { offset, length };
        let second = (2 << 20) - 8192;
        let expected = [
            vec![extent(0, 8192), extent(1 << 20, (1 << 20) - 8192)],
            vec![extent(second, 1 << 20)],
            vec![extent(second + (1 << 20), 12288)],
        ];
        assert_eq!(chunks, expected);
        for block in 0..CHUNK_EXTENTS as u64 - 1 {
            assert_eq!(plan.take(&mut extent(block * 1024, 512)), None);
        }
        assert!(plan.take(&mut extent(1 << 30, 512)).is_some());
    }
}
