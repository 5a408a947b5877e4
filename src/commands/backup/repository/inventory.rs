//! What a repository holds: one list, and the manifests that it names, most of them from an index.

use std::collections::{BTreeSet, HashMap, HashSet};

use anyhow::{Context, Result, anyhow, bail, ensure};
use tokio::task::JoinSet;

use super::Repository;
use super::names::Listing;
use crate::backup::failure::Failure;
use crate::backup::manifest::{BackupId, Intent, Manifest, check_chain, check_pair};

/// Requests at the same time.
pub(super) const PARALLEL: usize = 32;

/// What a repository holds.
#[derive(Debug, Default)]
pub struct Inventory {
    /// With an intent and a readable manifest, oldest first, and bases before what counts from them.
    pub backups: Vec<Manifest>,
    /// Why backups of these cannot be restored as they are, as far as a list shows.
    pub broken: HashMap<BackupId, String>,
    /// Manifests that cannot be read, or were lost, and why.
    pub damaged: Vec<(BackupId, anyhow::Error)>,
    /// Without a manifest: being written, interrupted, or being removed. The intent is missing if it
    /// cannot be read.
    pub unfinished: Vec<(BackupId, Option<Intent>)>,
    pub listing: Listing,
    /// Backups whose manifest is from the index, and the number of manifests in it.
    pub copied: HashSet<BackupId>,
    pub copies: usize,
}

impl Inventory {
    pub(super) async fn read(repository: &Repository, use_index: bool) -> Result<Self> {
        let listing = Listing::new(repository.store.list(None).await?);
        let mut inventory = Self::default();
        let mut manifests = Vec::new();
        let mut index = match use_index {
            true => repository.index(&listing).await,
            false => Default::default(),
        };
        inventory.copies = index.len();
        for (id, attempt) in &listing.attempts {
            match (attempt.manifest, attempt.intents.first()) {
                (Some(stamp), Some(_)) => match index.take(id, stamp) {
                    Some(manifest) => {
                        inventory.copied.insert(id.clone());
                        inventory.backups.push(manifest);
                    }
                    None => manifests.push(id.clone()),
                },
                (None, Some(references)) => {
                    if attempt.was_complete && !listing.is_marked(id) {
                        let error = anyhow!("its manifest is missing");
                        inventory.damaged.push((id.clone(), error));
                    } else {
                        let intent = repository.intent(id, references).await.unwrap_or_default();
                        inventory.unfinished.push((id.clone(), intent));
                    }
                }
                // What a removal left.
                (_, None) => inventory.unfinished.push((id.clone(), None)),
            }
        }
        for (id, manifest) in repository.manifests(manifests).await? {
            match manifest {
                Ok(Some(manifest)) => inventory.backups.push(manifest),
                // Removed since.
                Ok(None) => {}
                Err(error) => inventory.damaged.push((id, error)),
            }
        }
        inventory.listing = listing;
        inventory.put_in_order();
        let mut known = HashMap::new();
        for backup in &inventory.backups {
            if let Err(error) = inventory.check(backup, &known) {
                inventory.broken.insert(backup.id.clone(), format!("{error:#}"));
            }
            known.insert(&backup.id, backup);
        }
        Ok(inventory)
    }

    /// `known`: the backups before it, with its base.
    fn check(&self, backup: &Manifest, known: &HashMap<&BackupId, &Manifest>) -> Result<()> {
        let id = &backup.id;
        ensure!(self.listing.is_whole(backup), "objects of backup {id} are missing or truncated");
        let Some(base) = &backup.subject.base else { return Ok(()) };
        let older = known.get(&base.backup);
        let older = older.with_context(|| {
            format!("backup {id} needs backup {}, which is missing", base.backup)
        })?;
        check_pair(backup, older)?;
        match self.broken.get(&base.backup) {
            Some(problem) => bail!("{problem}, which backup {id} needs"),
            None => Ok(()),
        }
    }

    fn put_in_order(&mut self) {
        let mut backups = std::mem::take(&mut self.backups);
        backups.sort_by(|a, b| a.id.cmp(&b.id));
        let numbers: HashMap<_, _> =
            backups.iter().enumerate().map(|(number, one)| (one.id.clone(), number)).collect();
        let mut order = Vec::with_capacity(backups.len());
        let mut placed = HashSet::new();
        for number in 0..backups.len() {
            let mut above = vec![number];
            let mut at = number;
            while let Some(base) = &backups[at].subject.base
                && let Some(base) = numbers.get(&base.backup)
                && !placed.contains(base)
                && !above.contains(base)
            {
                above.push(*base);
                at = *base;
            }
            order.extend(above.into_iter().rev().filter(|number| placed.insert(*number)));
        }
        let mut backups: Vec<_> = backups.into_iter().map(Some).collect();
        self.backups = order.into_iter().filter_map(|number| backups[number].take()).collect();
    }

    /// Whether a backup can be built on, and reported to exist: it can be restored, and no prune
    /// wants it gone.
    pub fn is_sound(&self, backup: &Manifest) -> bool {
        !self.broken.contains_key(&backup.id) && !self.listing.is_marked(&backup.id)
    }

    /// Why a backup is not sound.
    pub fn problem(&self, backup: &Manifest) -> Option<String> {
        let broken = self.broken.get(&backup.id).cloned();
        let marked = self.listing.is_marked(&backup.id);
        broken.or_else(|| marked.then(|| "a prune is removing it, or was interrupted".to_owned()))
    }

    /// The backup that `reference` names: an id, the beginning of one, or a snapshot by name or
    /// handle.
    ///
    /// # Errors
    /// There is none, or several.
    pub fn find(&self, reference: &str) -> Result<&Manifest> {
        let all = || self.backups.iter();
        if let Some(exact) = all().find(|backup| backup.id.as_str() == reference) {
            return Ok(exact);
        }
        if let Some((id, error)) = self.damaged.iter().find(|(id, _)| id.as_str() == reference) {
            bail!(Failure::damaged(format!("backup {id}: {error:#}")));
        }
        let slug = common::ids::slug(reference);
        let names = |backup: &&Manifest| {
            let subject = &backup.subject;
            (!reference.is_empty() && backup.id.as_str().starts_with(reference))
                || subject.snapshot == reference
                || subject.snapshot == slug
                || subject.snapshot_id == reference
        };
        let mut named: Vec<_> = all().filter(names).collect();
        // A damaged one has been replaced by a later backup of the snapshot.
        if named.len() > 1 && named.iter().any(|backup| self.is_sound(backup)) {
            named.retain(|backup| self.is_sound(backup));
        }
        match named.as_slice() {
            [only] => Ok(only),
            [] => bail!("no backup {reference:?} in the repository; `backup list` shows all"),
            several => {
                let ids: Vec<_> = several.iter().map(|backup| backup.id.as_str()).collect();
                bail!("several backups are named {reference:?}, use an id: {}", ids.join(", "))
            }
        }
    }

    /// A backup and all that it counts from, newest first.
    ///
    /// # Errors
    /// One is missing, or they are not a chain.
    pub fn chain(&self, backup: &Manifest) -> Result<Vec<Manifest>> {
        let mut chain = vec![backup.clone()];
        let mut seen = BTreeSet::from([&backup.id]);
        while let Some(base) = chain.last().and_then(|newest| newest.subject.base.clone()) {
            let found = self.backups.iter().find(|one| one.id == base.backup);
            let found = found.ok_or_else(|| {
                let (id, base) = (&backup.id, &base.backup);
                Failure::damaged(format!("backup {id} needs backup {base}, which is missing"))
            })?;
            ensure!(
                seen.insert(&found.id),
                Failure::damaged(format!("the chain of {} has no end", backup.id))
            );
            chain.push(found.clone());
        }
        let damaged = || Failure::damaged(format!("the chain of backup {} is damaged", backup.id));
        check_chain(&chain).with_context(damaged)?;
        Ok(chain)
    }
}

impl Repository {
    /// Manifests by id, several at a time.
    async fn manifests(
        &self,
        ids: Vec<BackupId>,
    ) -> Result<Vec<(BackupId, Result<Option<Manifest>>)>> {
        let mut found = Vec::with_capacity(ids.len());
        let mut jobs = JoinSet::new();
        for id in ids {
            if jobs.len() >= PARALLEL
                && let Some(job) = jobs.join_next().await
            {
                found.push(job.context("the reading task panicked")?);
            }
            let repository = self.clone();
            jobs.spawn(async move {
                let manifest = repository.manifest(&id).await;
                (id, manifest)
            });
        }
        while let Some(job) = jobs.join_next().await {
            found.push(job.context("the reading task panicked")?);
        }
        found.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(found)
    }
}
