//! An attempt to write a backup: its intent, the look at what it refers to, the data by the caller,
//! and the manifest ([`super::protocol`]).

use std::time::SystemTime;

use anyhow::{Result, bail};

use super::document::VERSION;
use super::manifest::{BackupId, Intent, Manifest, Subject};
use super::protocol::{self, Outcome};
use super::repository::names::object;
use super::repository::{Ended, Inventory, Known, Repository};
use super::writer::Writer;

/// What the backup counts from, or the attempt that it continues, is gone or marked: an attempt
/// that begins after another look may succeed.
#[derive(Debug, thiserror::Error)]
#[error("{0} is being removed by a prune; repeat the command")]
pub struct Overtaken(String);

impl Overtaken {
    pub fn new(id: &BackupId) -> Self {
        Self(id.to_string())
    }
}

/// An attempt that has not put anything yet.
pub struct Attempt<'a> {
    repository: &'a Repository,
    /// Of its base, newest first.
    chain: Vec<Manifest>,
    pub intent: Intent,
    pub writer: Writer,
    machine: protocol::Attempt<String>,
}

impl<'a> Attempt<'a> {
    /// An attempt that continues an interrupted one of the same blocks, if there is one.
    ///
    /// # Errors
    /// The base does not exist, or the repository cannot be read.
    pub async fn new(
        repository: &'a Repository,
        inventory: &Inventory,
        subject: Subject,
        origin: Option<BackupId>,
    ) -> Result<Self> {
        let chain = match &subject.base {
            Some(base) => inventory.chain(inventory.find(base.backup.as_str())?)?,
            None => Vec::new(),
        };
        let now = SystemTime::now();
        let id = BackupId::after(subject.base.as_ref().map(|base| &base.backup), now)?;
        let mut writer = Writer::new(repository, id.clone());
        if let Some(interrupted) = interrupted(inventory, &subject, origin.as_ref()) {
            writer.continue_after(interrupted, &inventory.listing).await?;
            if writer.end() == 0 {
                writer = Writer::new(repository, id.clone());
            }
        }
        let begun = humantime::format_rfc3339_millis(now).to_string();
        let parts = writer.parts().to_vec();
        let intent = Intent { version: VERSION, id, begun, subject, origin, parts };
        let references = repository.references(&intent);
        let [base, after] =
            [&references.base, &references.after].map(|id| id.as_ref().map(ToString::to_string));
        let machine = protocol::Attempt::new(intent.id.to_string(), base, after);
        Ok(Self { repository, chain, intent, writer, machine })
    }

    /// What the driver takes as the base of the listing.
    pub fn base_id(&self) -> Option<&str> {
        Some(self.chain.first()?.subject.base_id())
    }

    pub fn is_continued(&self) -> bool {
        !self.intent.parts.is_empty()
    }

    /// Puts the intent, and makes sure of what it refers to. Data may be written after this.
    ///
    /// # Errors
    /// [`Overtaken`]; or the base has lost objects.
    pub async fn begin(&mut self) -> Result<()> {
        let known = Known { intent: Some(&self.intent), chain: &self.chain, ..Known::default() };
        match self.repository.run(&mut self.machine, known).await? {
            Ended::Write => Ok(()),
            Ended::With(Outcome::Marked(id) | Outcome::Missing(id)) => Err(Overtaken(id).into()),
            Ended::With(outcome) => bail!("the attempt ended: {outcome:?}"),
        }
    }

    /// Puts the manifest. The backup exists, and is acknowledged, when this returns.
    ///
    /// # Errors
    /// A prune has removed the attempt.
    pub async fn publish(self, created: String) -> Result<Manifest> {
        self.publish_if(created, |_| Ok(())).await
    }

    /// The same, if the manifest passes a check.
    pub async fn publish_if(
        mut self,
        created: String,
        check: impl FnOnce(&Manifest) -> Result<()>,
    ) -> Result<Manifest> {
        let manifest = self.writer.finish(&self.intent, created).await?;
        check(&manifest)?;
        let known = Known { manifest: Some(&manifest), ..Known::default() };
        match self.repository.run(&mut self.machine, known).await? {
            Ended::With(Outcome::Acknowledged) => {}
            _ => bail!(
                "a prune has removed this attempt {}, which had put nothing for a day, or its \
                 objects are missing; repeat the command",
                manifest.id
            ),
        }
        // By this a lost manifest is noticed.
        self.repository.store.put(&object(&manifest.id, "complete"), Vec::new()).await?;
        Ok(manifest)
    }
}

/// The interrupted attempt of the same blocks that got furthest. Its writer may still live: both
/// then write on, each its own pages.
fn interrupted<'i>(
    inventory: &'i Inventory,
    subject: &Subject,
    origin: Option<&BackupId>,
) -> Option<&'i Intent> {
    let same = |intent: &&Intent| {
        let other = &intent.subject;
        let bases = [&other.base, &subject.base].map(|base| base.as_ref().map(|base| &base.backup));
        other.volume_id == subject.volume_id
            && other.snapshot_id == subject.snapshot_id
            && other.capacity_bytes == subject.capacity_bytes
            && bases[0] == bases[1]
            && other.group == subject.group
            && intent.origin.as_ref() == origin
            && !inventory.listing.is_marked(&intent.id)
    };
    let pages = |intent: &&Intent| {
        let before: u32 = intent.parts.iter().map(|part| part.pages).sum();
        let own = inventory.listing.attempts.get(&intent.id);
        before + own.map_or(0, |own| own.pages_from(before))
    };
    let unfinished = inventory.unfinished.iter().filter_map(|(_, intent)| intent.as_ref());
    unfinished.filter(same).max_by_key(pages)
}

/// Whether backups that the caller has found exist: an acknowledgement.
///
/// # Errors
/// The repository cannot be read.
pub async fn exist(
    repository: &Repository,
    inventory: &Inventory,
    backups: &[&Manifest],
) -> Result<bool> {
    let mut chains = Vec::new();
    for backup in backups {
        if !inventory.is_sound(backup) {
            return Ok(false);
        }
        chains.extend(inventory.chain(backup)?);
    }
    let ids: Vec<_> = backups.iter().map(|backup| &backup.id).collect();
    Ok(repository.confirm(&ids, &chains).await? == Outcome::Acknowledged)
}
