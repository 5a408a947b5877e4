//! `backup create`: the blocks of a snapshot, read from a device with its data, as a new backup.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::time::SystemTime;

use anyhow::{Result, bail, ensure};

use super::attempt::{self, Attempt, Overtaken};
use super::copying::Copying;
use super::listing::BaseUnusable;
use super::manifest::{Base, Manifest, Subject};
use super::origin::Origin;
use super::repository::{Inventory, Repository};
use crate::client::format;
use crate::client::stop::Stop;
use grpc::proto::admin::v1 as admin;

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
}

/// How often a backup begins again because a prune removes what it would use.
const ATTEMPTS: usize = 3;

impl Job<'_> {
    /// Makes a backup of a snapshot, or continues an interrupted one.
    pub async fn create(
        &self,
        origin: &Origin<'_>,
        subject: &Subject,
        choice: &BaseChoice,
    ) -> Result<Created> {
        for _ in 1..ATTEMPTS {
            match self.try_create(origin, subject.clone(), choice).await {
                Err(error) if error.is::<Overtaken>() => {}
                outcome => return outcome,
            }
        }
        self.try_create(origin, subject.clone(), choice).await
    }

    async fn try_create(
        &self,
        origin: &Origin<'_>,
        mut subject: Subject,
        choice: &BaseChoice,
    ) -> Result<Created> {
        let inventory = self.repository.inventory().await?;
        let bases = match choice {
            BaseChoice::None => Vec::new(),
            BaseChoice::Auto | BaseChoice::Backup(_) => origin.bases(&subject).await,
        };
        match choose(&inventory, &subject, choice, &bases)? {
            Chosen::Exists(manifest) => {
                let manifest = *manifest;
                if attempt::exist(self.repository, &inventory, &[&manifest]).await? {
                    return Ok(Created {
                        manifest,
                        existed: true,
                        resumed: false,
                        cleaned: Ok(()),
                    });
                }
                return Err(Overtaken::new(&manifest.id).into());
            }
            Chosen::Full(because) => subject.full_because = because,
            Chosen::Incremental(mut base) => {
                let listed = bases.iter().find(|one| one.snapshot_id == base.snapshot_id);
                base.expires = listed.and_then(|one| format::time(one.expires_at.as_ref()));
                subject.base = Some(base);
            }
        }
        let outcome = self.write(&inventory, origin, subject.clone()).await;
        match outcome {
            Err(error) if *choice == BaseChoice::Auto && error.is::<BaseUnusable>() => {
                subject.base = None;
                subject.full_because = Some(format!("{error:#}"));
                self.write(&inventory, origin, subject).await
            }
            Err(error) if error.is::<BaseUnusable>() => {
                Err(error.context("the base cannot be used; --base auto takes a full backup then"))
            }
            outcome => outcome,
        }
    }

    async fn write(
        &self,
        inventory: &Inventory,
        origin: &Origin<'_>,
        subject: Subject,
    ) -> Result<Created> {
        let (repository, stop) = (self.repository, self.stop);
        let mut attempt = Attempt::new(repository, inventory, subject, None).await?;
        let resumed = attempt.is_continued();
        let cleaned = if resumed && attempt.writer.end() == attempt.intent.subject.capacity_bytes {
            attempt.begin().await?;
            Ok(())
        } else {
            origin.copy(Copying { repository, stop, attempt: &mut attempt }).await?
        };
        let created = humantime::format_rfc3339_millis(SystemTime::now()).to_string();
        let manifest = attempt.publish(created).await?;
        repository.update_index(inventory, &HashSet::new()).await;
        Ok(Created { manifest, existed: false, resumed, cleaned })
    }
}

enum Chosen {
    Exists(Box<Manifest>),
    Full(Option<String>),
    Incremental(Base),
}

fn choose(
    inventory: &Inventory,
    subject: &Subject,
    choice: &BaseChoice,
    bases: &[admin::Base],
) -> Result<Chosen> {
    // What a prune wants gone, or what has lost objects, does not exist here.
    let of_volume = || {
        let all = inventory.backups.iter().filter(|one| inventory.is_sound(one));
        all.filter(|one| one.subject.volume_id == subject.volume_id)
    };
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
            let backup = inventory.find(reference)?;
            may_be_base(backup, subject)?;
            if let Some(problem) = inventory.problem(backup) {
                bail!("--base {} cannot be used: {problem}", backup.id);
            }
            Ok(Chosen::Incremental(base(backup)))
        }
        BaseChoice::Auto => {
            if let Some(existing) = of_volume().find(is_same) {
                return Ok(Chosen::Exists(Box::new(existing.clone())));
            }
            let others = of_volume().filter(|one| may_be_base(one, subject).is_ok());
            let Some(newest) = newest(others, subject, bases) else {
                let volume = &subject.volume;
                let because = format!("the repository has no earlier backup of volume {volume}");
                let mut unusable = inventory.backups.iter().filter(|one| {
                    one.subject.volume_id == subject.volume_id && !inventory.is_sound(one)
                });
                let because = match unusable.find_map(|one| inventory.problem(one)) {
                    Some(problem) => format!("{because} that can be a base: {problem}"),
                    None => because,
                };
                return Ok(Chosen::Full(Some(because)));
            };
            Ok(Chosen::Incremental(base(newest)))
        }
    }
}

/// The backup to count from: of the newest snapshot in the driver's list of bases, newest first. A
/// snapshot outside of it, as all are without a list, is tried only if there is no other: the driver
/// then gives the reason why it is no base. Its time is only a hint, because the clock may have been
/// set back.
fn newest<'b>(
    backups: impl Iterator<Item = &'b Manifest>,
    subject: &Subject,
    bases: &[admin::Base],
) -> Option<&'b Manifest> {
    let places: HashMap<&str, usize> =
        bases.iter().enumerate().map(|(place, base)| (base.snapshot_id.as_str(), place)).collect();
    backups.max_by_key(|backup| {
        let Subject { snapshot_id, snapshot_created, .. } = &backup.subject;
        let place = places.get(snapshot_id.as_str()).copied().map(Reverse);
        (place, *snapshot_created <= subject.snapshot_created, snapshot_created, &backup.id)
    })
}

/// # Errors
/// The backup is of another volume, of the same snapshot, or of a larger one.
fn may_be_base(backup: &Manifest, subject: &Subject) -> Result<()> {
    let (id, base) = (&backup.id, &backup.subject);
    if base.volume_id != subject.volume_id {
        bail!("--base {id} is a backup of volume {}, not of {}", base.volume_id, subject.volume_id);
    }
    if base.snapshot_id == subject.snapshot_id {
        bail!("--base {id} is a backup of the same snapshot {}", base.snapshot_id);
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
    use super::*;
    use crate::backup::manifest::samples;

    #[test]
    fn a_repeated_group_backup_completes_its_set() {
        let member = |number: usize| {
            let mut backup = samples::backup_from(number, None);
            backup.subject.group = Some(samples::group());
            backup
        };
        let exists = |backups: &[&Manifest], subject: &Subject| {
            let backups = backups.iter().copied().cloned().collect();
            let inventory = Inventory { backups, ..Inventory::default() };
            let chosen = choose(&inventory, subject, &BaseChoice::None, &[]).unwrap();
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

    #[test]
    fn auto_counts_from_the_newest_base_of_the_driver() {
        let backups = [0, 1, 2].map(samples::backup);
        let mut subject = samples::backup(3).subject;
        let base = |number: usize| admin::Base {
            snapshot_id: format!("s{number}"),
            ..admin::Base::default()
        };
        let chosen = |subject: &Subject, bases: &[admin::Base]| {
            newest(backups.iter(), subject, bases).map(|backup| backup.id.clone())
        };
        assert_eq!(chosen(&subject, &[]), Some(samples::id(2)), "by time");
        let listed = [base(3), base(0), base(1)];
        assert_eq!(chosen(&subject, &listed), Some(samples::id(0)), "in the driver's order");
        // The clock was set back: all seem to be newer, and the driver decides.
        subject.snapshot_created = Some("2025-12-31".to_owned());
        assert_eq!(chosen(&subject, &listed), Some(samples::id(0)));
        assert_eq!(chosen(&subject, &[base(3)]), Some(samples::id(2)));
        assert_eq!(chosen(&subject, &[]), Some(samples::id(2)));
    }
}
