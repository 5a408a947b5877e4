//! `backup create`: the blocks of a snapshot, read from a device with its data, as a new backup.

use std::time::SystemTime;

use anyhow::{Result, bail, ensure};

use super::copying::Copying;
use super::document::VERSION;
use super::listing::BaseUnusable;
use super::manifest::{BackupId, Base, Intent, Manifest, Subject};
use super::origin::Origin;
use super::repository::lock::Lock;
use super::repository::{Inventory, Repository};
use super::writer::Writer;
use crate::client::stop::Stop;

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
    pub stop: &'j Stop,
    pub lock: &'j mut Lock,
}

impl Job<'_> {
    /// Makes a backup of a snapshot, or continues an interrupted one.
    pub async fn create(
        &mut self,
        inventory: &Inventory,
        origin: &Origin<'_>,
        mut subject: Subject,
        choice: &BaseChoice,
    ) -> Result<Created> {
        match choose(self.repository, inventory, &subject, choice)? {
            Chosen::Exists(manifest) => {
                let manifest = *manifest;
                return Ok(Created { manifest, existed: true, resumed: false, cleaned: Ok(()) });
            }
            Chosen::Full(because) => subject.full_because = because,
            Chosen::Incremental(mut base) => {
                base.expires = origin.expiry(&base.snapshot_id, &subject).await;
                subject.base = Some(base);
            }
        }
        let outcome = self.write(inventory, origin, subject.clone()).await;
        match outcome {
            Err(error) if *choice == BaseChoice::Auto && error.is::<BaseUnusable>() => {
                subject.base = None;
                subject.full_because = Some(format!("{error:#}"));
                self.write(inventory, origin, subject).await
            }
            Err(error) if error.is::<BaseUnusable>() => Err(error
                .context("the base is not usable any more; --base auto takes a full backup then")),
            outcome => outcome,
        }
    }

    async fn write(
        &mut self,
        inventory: &Inventory,
        origin: &Origin<'_>,
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
            let (repository, stop, lock) = (self.repository, self.stop, &*self.lock);
            let copying =
                Copying { repository, stop, lock, intent: &intent, resumed, writer: &mut writer };
            match origin.copy(copying).await {
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
    let is_same = |one: &&Manifest| {
        let other = &one.subject;
        other.snapshot_id == subject.snapshot_id && other.group == subject.group
    };
    match choice {
        BaseChoice::None => {
            // A repeated `--group` completes its set, instead of a second one.
            let mut full = of_volume().filter(|one| one.subject.is_full());
            match full.find(|one| subject.group.is_some() && is_same(one)) {
                Some(existing) => Ok(Chosen::Exists(Box::new(existing.clone()))),
                None => Ok(Chosen::Full(None)),
            }
        }
        BaseChoice::Backup(reference) => {
            let backup = repository.find(inventory, reference)?;
            may_be_base(backup, subject)?;
            repository.chain(inventory, backup)?;
            Ok(Chosen::Incremental(base(backup)))
        }
        BaseChoice::Auto => {
            if let Some(existing) = of_volume().find(is_same) {
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

#[cfg(test)]
mod tests {
    use super::super::repository::Location;
    use super::*;
    use crate::backup::manifest::samples;

    #[tokio::test]
    async fn a_repeated_group_backup_completes_its_set() {
        let directory = tempfile::tempdir().unwrap();
        let location = Location::Directory(directory.path().to_owned());
        let repository = Repository::open(&location, true, None, None).await.unwrap();
        let member = |number: usize| {
            let mut backup = samples::backup(number);
            backup.subject.base = None;
            backup.subject.group = Some(samples::group());
            backup
        };
        let exists = |backups: &[&Manifest], subject: &Subject| {
            let backups = backups.iter().copied().cloned().collect();
            let inventory = Inventory { backups, ..Inventory::default() };
            let chosen = choose(&repository, &inventory, subject, &BaseChoice::None).unwrap();
            matches!(chosen, Chosen::Exists(_))
        };
        let [first, second] = [0, 1].map(member);
        for (own, other) in [(&first, &second), (&second, &first)] {
            assert!(exists(&[own], &own.subject) && !exists(&[own], &other.subject));
            assert!(exists(&[&first, &second], &own.subject));
        }
        // Without a base, only a full backup will do, and single snapshots get another one.
        let mut incremental = samples::backup(1);
        incremental.subject.group = Some(samples::group());
        assert!(!exists(&[&incremental], &second.subject));
        let alone = samples::backup(0);
        assert!(!exists(&[&alone], &alone.subject));
    }
}
