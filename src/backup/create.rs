//! `backup create`: the blocks of a snapshot, read from a temporary volume, as a new backup.

use std::collections::VecDeque;
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, anyhow, bail, ensure};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::chunk::{self, Coded, Coder};
use super::document::VERSION;
use super::listing::{BaseUnusable, Listing};
use super::manifest::{
    BackupId, Base, CHUNK_BYTES, CHUNK_EXTENTS, Group, Intent, Manifest, Subject,
};
use super::progress;
use super::repository::lock::Lock;
use super::repository::{Inventory, Repository};
use super::writer::Writer;
use crate::backend::Extent;
use crate::client::block_map::Query;
use crate::client::connection::Connection;
use crate::client::format;
use crate::client::names;
use crate::client::scratch::Scratch;
use crate::client::stop::Stop;
use crate::proto::admin::v1 as admin;
use crate::proto::csi::v1 as csi;

/// How long the removal of the temporary volume may take.
const CLEAN_UP: Duration = Duration::from_secs(60);

/// What a backup counts from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BaseChoice {
    /// A full backup.
    None,
    /// The newest earlier backup of the volume; a full backup if there is none that can be used.
    Auto,
    /// A backup, by reference.
    Backup(String),
}

/// A backup that exists now.
pub struct Created {
    pub manifest: Manifest,
    /// It existed before.
    pub existed: bool,
    /// An interrupted one was continued.
    pub resumed: bool,
    /// The error says what remains of the temporary volume.
    pub cleaned: Result<()>,
}

/// What all steps of a backup need.
pub struct Job<'j> {
    pub repository: &'j Repository,
    pub connection: &'j Connection,
    pub stop: &'j Stop,
    pub lock: &'j mut Lock,
}

/// The snapshot with this name or id, ready to be read.
pub async fn snapshot(connection: &Connection, reference: &str) -> Result<csi::Snapshot> {
    let snapshot = names::find_snapshot(connection, reference).await?;
    let snapshot = snapshot.with_context(|| {
        format!(
            "no snapshot {reference:?}; `snapshot list` shows all, and a deleted one has no data"
        )
    })?;
    ensure!(snapshot.ready_to_use, "snapshot {} is not ready; repeat later", snapshot.snapshot_id);
    Ok(snapshot)
}

/// What a backup of a snapshot is a backup of.
pub fn subject(snapshot: &csi::Snapshot, group: Option<Group>) -> Result<Subject> {
    let id = &snapshot.snapshot_id;
    let capacity_bytes = u64::try_from(snapshot.size_bytes).unwrap_or_default();
    ensure!(capacity_bytes > 0, "the driver reports no size of snapshot {id}");
    Ok(Subject {
        volume_id: snapshot.source_volume_id.clone(),
        volume: names::name_of(&snapshot.source_volume_id).to_owned(),
        snapshot_id: id.clone(),
        snapshot: names::name_of(id).to_owned(),
        snapshot_created: format::time(snapshot.creation_time.as_ref()),
        capacity_bytes,
        base: None,
        full_because: None,
        group,
    })
}

impl Job<'_> {
    /// Makes a backup of a snapshot, or continues an interrupted one.
    pub async fn create(
        &mut self,
        inventory: &Inventory,
        snapshot: &csi::Snapshot,
        choice: &BaseChoice,
        group: Option<Group>,
    ) -> Result<Created> {
        let mut subject = subject(snapshot, group)?;
        match choose(self.repository, inventory, &subject, choice)? {
            Chosen::Exists(manifest) => {
                let manifest = *manifest;
                return Ok(Created { manifest, existed: true, resumed: false, cleaned: Ok(()) });
            }
            Chosen::Full(because) => subject.full_because = because,
            Chosen::Incremental(mut base) => {
                base.expires = expiry(self.connection, &base.snapshot_id, &subject).await;
                subject.base = Some(base);
            }
        }
        let outcome = self.write(inventory, snapshot, subject.clone()).await;
        match outcome {
            Err(error) if *choice == BaseChoice::Auto && error.is::<BaseUnusable>() => {
                subject.base = None;
                subject.full_because = Some(format!("{error:#}"));
                self.write(inventory, snapshot, subject).await
            }
            Err(error) if error.is::<BaseUnusable>() => Err(error
                .context("the base is not usable any more; --base auto takes a full backup then")),
            outcome => outcome,
        }
    }

    async fn write(
        &mut self,
        inventory: &Inventory,
        snapshot: &csi::Snapshot,
        subject: Subject,
    ) -> Result<Created> {
        let interrupted = interrupted(inventory, &subject);
        let resumed = interrupted.is_some();
        let now = SystemTime::now();
        let intent = match interrupted {
            Some(intent) => intent.clone(),
            None => Intent {
                version: VERSION,
                id: BackupId::generate(now)?,
                begun: humantime::format_rfc3339_millis(now).to_string(),
                subject,
            },
        };
        // Ids are in the order of time everywhere, and prune relies on it.
        ensure!(
            intent.subject.base.as_ref().is_none_or(|base| base.backup < intent.id),
            "the base was made later than now, by its id: correct the clock of this machine"
        );
        self.lock.claim(&intent.id).await?;
        let mut writer = Writer::resume(self.repository, &intent).await?;
        let cleaned = if resumed && writer.end() == intent.subject.capacity_bytes {
            Ok(())
        } else {
            let copied = self.copy(snapshot, &intent, resumed, &mut writer).await;
            match copied {
                Err(error) if error.is::<BaseUnusable>() => {
                    // Half a delta is of no use to a full backup.
                    self.repository.remove(&intent.id).await?;
                    return Err(error);
                }
                copied => copied?,
            }
        };
        self.lock.check()?;
        let created = humantime::format_rfc3339_millis(SystemTime::now()).to_string();
        let manifest = writer.finish(&intent, created).await?;
        self.repository.publish(&manifest).await?;
        Ok(Created { manifest, existed: false, resumed, cleaned })
    }

    /// Copies what is missing. The inner result is that of the clean-up.
    async fn copy(
        &mut self,
        snapshot: &csi::Snapshot,
        intent: &Intent,
        resumed: bool,
        writer: &mut Writer,
    ) -> Result<Result<()>> {
        let target = snapshot.snapshot_id.clone();
        let query = match &intent.subject.base {
            None => Query::Allocated { snapshot: target },
            Some(base) => Query::Delta { base: base.snapshot_id.clone(), target },
        };
        // First of all: what the driver refuses needs no volume.
        let listing = self.stop.wait(Listing::open(self.connection, query, writer.end())).await?;
        if !resumed {
            self.repository.put_intent(intent).await?;
        }
        let mut scratch = Scratch::start(self.connection).await?;
        let copied = self.copy_from(&mut scratch, snapshot, intent, listing, writer).await;
        let bounded = self.connection.until(Instant::now() + CLEAN_UP);
        match (copied, scratch.clean(&bounded).await) {
            (Ok(()), cleaned) => Ok(cleaned),
            (Err(error), Ok(())) => Err(error),
            (Err(error), Err(left)) => Err(error.context(format!("{left:#}"))),
        }
    }

    async fn copy_from(
        &mut self,
        scratch: &mut Scratch,
        snapshot: &csi::Snapshot,
        intent: &Intent,
        listing: Listing,
        writer: &mut Writer,
    ) -> Result<()> {
        let device = scratch.attach(self.connection, self.stop, snapshot).await?;
        let device = File::open(&device).context("open the device of the temporary volume")?;
        let mut queue = Queue {
            device: Arc::new(device),
            keep_zeros: !intent.subject.is_full(),
            coder: self.repository.coder(&intent.id)?,
            capacity: intent.subject.capacity_bytes,
            jobs: VecDeque::new(),
        };
        let copied = self.pump(listing, &mut queue, writer).await;
        // The device must be closed before the volume can be removed.
        queue.settle().await;
        copied
    }

    /// Reads the extents in chunks, several at a time, and writes them in their order.
    async fn pump(
        &self,
        mut listing: Listing,
        queue: &mut Queue,
        writer: &mut Writer,
    ) -> Result<()> {
        let mut plan = Plan::default();
        while let Some(extents) = self.stop.wait(listing.next()).await? {
            ensure!(
                listing.capacity() == Some(queue.capacity),
                "the driver lists blocks of a volume of {:?} bytes, and the snapshot has {}",
                listing.capacity(),
                queue.capacity
            );
            for mut extent in extents {
                while extent.length > 0 {
                    if let Some(chunk) = plan.take(&mut extent) {
                        self.stop.check()?;
                        self.lock.check()?;
                        queue.push(chunk, writer).await?;
                    }
                }
            }
        }
        if !plan.extents.is_empty() {
            queue.push(plan.finish(), writer).await?;
        }
        queue.drain(writer).await
    }
}

/// An interrupted backup of the same blocks.
fn interrupted<'i>(inventory: &'i Inventory, subject: &Subject) -> Option<&'i Intent> {
    let same = |intent: &&Intent| {
        let other = &intent.subject;
        let bases = [&other.base, &subject.base].map(|base| base.as_ref().map(|base| &base.backup));
        other.volume_id == subject.volume_id
            && other.snapshot_id == subject.snapshot_id
            && other.capacity_bytes == subject.capacity_bytes
            && bases[0] == bases[1]
            && other.group == subject.group
    };
    inventory.unfinished.iter().filter_map(|(_, intent)| intent.as_ref()).find(same)
}

enum Chosen {
    Exists(Box<Manifest>),
    Full(Option<String>),
    Incremental(Base),
}

fn choose(
    repository: &Repository,
    inventory: &Inventory,
    subject: &Subject,
    choice: &BaseChoice,
) -> Result<Chosen> {
    let of_volume =
        || inventory.backups.iter().filter(|one| one.subject.volume_id == subject.volume_id);
    let base = |backup: &Manifest| Base {
        backup: backup.id.clone(),
        snapshot_id: backup.subject.snapshot_id.clone(),
        expires: None,
    };
    match choice {
        BaseChoice::None => Ok(Chosen::Full(None)),
        BaseChoice::Backup(reference) => {
            let backup = repository.find(inventory, reference)?;
            may_be_base(backup, subject)?;
            repository.chain(inventory, backup)?;
            Ok(Chosen::Incremental(base(backup)))
        }
        BaseChoice::Auto => {
            let existing = of_volume().find(|one| {
                let other = &one.subject;
                other.snapshot_id == subject.snapshot_id && other.group == subject.group
            });
            if let Some(existing) = existing {
                return Ok(Chosen::Exists(Box::new(existing.clone())));
            }
            let earlier = of_volume().filter(|one| may_be_base(one, subject).is_ok());
            let newest = earlier.max_by(|a, b| {
                let time = a.subject.snapshot_created.cmp(&b.subject.snapshot_created);
                time.then_with(|| a.id.cmp(&b.id))
            });
            let Some(newest) = newest else {
                let volume = &subject.volume;
                let because = format!("the repository has no earlier backup of volume {volume}");
                return Ok(Chosen::Full(Some(because)));
            };
            match repository.chain(inventory, newest) {
                Ok(_) => Ok(Chosen::Incremental(base(newest))),
                Err(error) => Ok(Chosen::Full(Some(format!("{error:#}")))),
            }
        }
    }
}

/// # Errors
/// The backup is of another volume, or not of an earlier snapshot.
fn may_be_base(backup: &Manifest, subject: &Subject) -> Result<()> {
    let (id, base) = (&backup.id, &backup.subject);
    if base.volume_id != subject.volume_id {
        bail!("--base {id} is a backup of volume {}, not of {}", base.volume_id, subject.volume_id);
    }
    if base.snapshot_id == subject.snapshot_id {
        bail!("--base {id} is a backup of the same snapshot {}", base.snapshot_id);
    }
    if let (Some(then), Some(now)) = (&base.snapshot_created, &subject.snapshot_created) {
        ensure!(
            then <= now,
            "--base {id} is a backup of snapshot {}, which is newer than {}",
            base.snapshot_id,
            subject.snapshot_id
        );
    }
    ensure!(
        base.capacity_bytes <= subject.capacity_bytes,
        "--base {id} is of a volume of {} bytes, and the snapshot has {}",
        base.capacity_bytes,
        subject.capacity_bytes
    );
    Ok(())
}

/// When the handle of a base expires, as far as the driver reports it.
async fn expiry(connection: &Connection, base: &str, subject: &Subject) -> Option<String> {
    let mut request = admin::ListBasesRequest {
        target_snapshot_id: subject.snapshot_id.clone(),
        ..Default::default()
    };
    loop {
        // Other drivers do not have this call, and the time is for people to read.
        let page = connection.base_admin().list_bases(request.clone()).await.ok()?.into_inner();
        if let Some(found) = page.bases.iter().find(|one| one.snapshot_id == base) {
            return format::time(found.expires_at.as_ref());
        }
        if page.next_token.is_empty() {
            return None;
        }
        request.starting_token = page.next_token;
    }
}

/// Extents on their way to a chunk.
#[derive(Default)]
struct Plan {
    extents: Vec<Extent>,
    bytes: u64,
}

impl Plan {
    /// Takes as much of `rest` as fits; returns the extents of a chunk when it is full.
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

/// Chunks that are being read and compressed, in the order of the volume.
struct Queue {
    device: Arc<File>,
    keep_zeros: bool,
    coder: Coder,
    capacity: u64,
    jobs: VecDeque<(JoinHandle<Result<Coded>>, u64)>,
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
        self.jobs.push_back((tokio::task::spawn_blocking(job), end));
        Ok(())
    }

    async fn pop(&mut self, writer: &mut Writer) -> Result<()> {
        if let Some((job, end)) = self.jobs.pop_front() {
            writer.push(job.await.map_err(|error| anyhow!("read: {error}"))??, end).await?;
            progress::report(end, self.capacity);
        }
        Ok(())
    }

    async fn drain(&mut self, writer: &mut Writer) -> Result<()> {
        while !self.jobs.is_empty() {
            self.pop(writer).await?;
        }
        Ok(())
    }

    /// Waits until nothing reads the device any more.
    async fn settle(&mut self) {
        for (job, _) in self.jobs.drain(..) {
            // Its chunk is not wanted any more, and an error was reported before.
            drop(job.await);
        }
    }
}

/// Chunks that are worked on at the same time.
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
