//! Performs the operations of the protocol's machines ([`crate::backup::protocol`]) on the store.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use anyhow::{Context, Result, anyhow};
use tokio::task::JoinSet;

use super::Repository;
use super::inventory::PARALLEL;
use super::names::{self, BACKUPS, KEYS, Listing, MARKS, RESERVE, directory, object};
use super::store::Listed;
use crate::backup::manifest::{BackupId, Intent, Manifest};
use crate::backup::protocol::{Answer, Confirm, Machine, Name, Operation, Outcome, Part};

/// How far a machine was driven.
#[derive(Debug, PartialEq)]
pub enum Ended {
    /// It wants the data of the backup to be written.
    Write,
    With(Outcome<String>),
}

/// What a machine may put, and the manifests by which it judges whether data is whole.
#[derive(Default, Clone, Copy)]
pub struct Known<'k> {
    pub intent: Option<&'k Intent>,
    pub manifest: Option<&'k Manifest>,
    pub chain: &'k [Manifest],
}

/// More attempts than this are listed with all others.
const FEW: usize = 4;

impl Repository {
    /// Whether backups exist, and no prune wants them gone. `chains`: they and all they need.
    pub async fn confirm(&self, ids: &[&BackupId], chains: &[Manifest]) -> Result<Outcome<String>> {
        let mut confirm = Confirm::new(ids.iter().map(|id| id.to_string()), None);
        let known = Known { chain: chains, ..Known::default() };
        match self.run(&mut confirm, known).await? {
            Ended::With(outcome) => Ok(outcome),
            Ended::Write => Err(anyhow!("a look at the repository writes nothing")),
        }
    }

    /// Drives a machine until it ends or wants data to be written.
    pub async fn run(&self, machine: &mut impl Machine<String>, known: Known<'_>) -> Result<Ended> {
        let mut together = Vec::<Operation<String>>::new();
        loop {
            let operation = machine.next(Answer::Done);
            if together.first().is_some_and(|first| !first.goes_with(&operation)) {
                self.change(std::mem::take(&mut together)).await?;
            }
            match &operation {
                Operation::PutIntent(_) => {
                    self.put_intent(known.intent.context("there is no intent")?).await?;
                }
                Operation::PutManifest(_) => {
                    self.put_manifest(known.manifest.context("there is no manifest")?).await?;
                }
                Operation::ListAttempts(ids) => {
                    for name in self.attempts(ids, known).await? {
                        machine.next(Answer::Listed(name));
                    }
                }
                Operation::ListMarks(_) => {
                    let is_on_backup = |on: &str| BackupId::try_from(on.to_owned()).is_ok();
                    for (on, by) in self.marks().await? {
                        if is_on_backup(&on) {
                            machine.next(Answer::Listed(Name::Mark(on, by)));
                        }
                    }
                }
                Operation::PutMark(..) | Operation::DeleteMark(..) | Operation::Delete(..) => {
                    together.push(operation);
                }
                Operation::More => {}
                Operation::Write => return Ok(Ended::Write),
                Operation::End(outcome) => return Ok(Ended::With(outcome.clone())),
            }
        }
    }

    /// The same for a machine whose ids are slots of keys.
    pub(super) async fn run_on_keys(&self, machine: &mut impl Machine<String>) -> Result<Ended> {
        loop {
            let operation = machine.next(Answer::Done);
            match &operation {
                Operation::ListAttempts(_) => {
                    for slot in self.slots().await? {
                        machine.next(Answer::Listed(Name::Intent(slot.clone(), Vec::new())));
                        machine.next(Answer::Listed(Name::Manifest(slot)));
                    }
                }
                Operation::Delete(Part::Intent, slot) => {
                    self.store.delete(&format!("{KEYS}/{slot}")).await?;
                }
                Operation::ListMarks(_) => {
                    for (on, by) in self.marks().await? {
                        if on.contains('.') {
                            machine.next(Answer::Listed(Name::Mark(on, by)));
                        }
                    }
                }
                Operation::End(outcome) => return Ok(Ended::With(outcome.clone())),
                Operation::PutMark(on, by) => self.put_mark(&names::mark(on, by)).await?,
                Operation::DeleteMark(on, by) => self.store.delete(&names::mark(on, by)).await?,
                _ => {}
            }
        }
    }

    /// Performs operations that [go together](Operation::goes_with).
    async fn change(&self, operations: Vec<Operation<String>>) -> Result<()> {
        let mut marks = JoinSet::new();
        let (mut lifted, mut deleted) = (Vec::new(), (Part::Manifest, BTreeSet::new()));
        for operation in operations {
            match operation {
                Operation::PutMark(on, by) => {
                    if marks.len() >= PARALLEL
                        && let Some(put) = marks.join_next().await
                    {
                        put.context("the task panicked")??;
                    }
                    let repository = self.clone();
                    marks.spawn(async move { repository.put_mark(&names::mark(&on, &by)).await });
                }
                Operation::DeleteMark(on, by) => lifted.push(names::mark(&on, &by)),
                Operation::Delete(part, id) => {
                    deleted.0 = part;
                    deleted.1.insert(BackupId::try_from(id).map_err(|error| anyhow!(error))?);
                }
                _ => {}
            }
        }
        while let Some(put) = marks.join_next().await {
            put.context("the task panicked")??;
        }
        self.store.delete_all(lifted).await?;
        self.delete(deleted.0, &deleted.1).await
    }

    /// A mark is an empty object. A full store may still have no room for its name.
    pub async fn put_mark(&self, path: &str) -> Result<()> {
        match self.store.put(path, Vec::new()).await {
            Ok(()) => Ok(()),
            Err(error) => {
                self.store.delete(RESERVE).await.map_err(|_| error)?;
                self.store.put(path, Vec::new()).await
            }
        }
    }

    async fn marks(&self) -> Result<BTreeSet<(String, String)>> {
        let listed = self.store.list(Some(MARKS)).await?;
        Ok(listed.iter().filter_map(|object| names::parse_mark(&object.path)).collect())
    }

    async fn attempts(&self, ids: &[String], known: Known<'_>) -> Result<Vec<Name<String>>> {
        let backups = || known.chain.iter().chain(known.manifest);
        let by_id: BTreeMap<&str, &Manifest> =
            backups().map(|backup| (backup.id.as_str(), backup)).collect();
        let mut wanted: BTreeSet<&str> = ids.iter().map(String::as_str).collect();
        wanted.extend(backups().flat_map(|one| &one.parts).map(|part| part.attempt.as_str()));
        if ids.is_empty() {
            wanted.clear();
        }
        let listing = Listing::new(self.objects_of(&wanted).await?);
        let mut names = Vec::new();
        for (id, attempt) in &listing.attempts {
            for references in &attempt.intents {
                let references = references.ids().map(ToString::to_string).collect();
                names.push(Name::Intent(id.to_string(), references));
            }
            if attempt.manifest.is_some() {
                names.push(Name::Manifest(id.to_string()));
            }
            if is_whole(id.as_str(), &by_id, &listing, known.chain.is_empty()) {
                names.push(Name::Data(id.to_string()));
            }
        }
        Ok(names)
    }

    /// The objects of these attempts, and perhaps of others; of all without an id.
    async fn objects_of(&self, ids: &BTreeSet<&str>) -> Result<Vec<Listed>> {
        if ids.is_empty() || ids.len() > FEW {
            return self.store.list(Some(BACKUPS)).await;
        }
        let mut objects = Vec::new();
        for id in ids {
            objects.extend(self.store.list(Some(&format!("{BACKUPS}/{id}"))).await?);
        }
        Ok(objects)
    }

    async fn delete(&self, part: Part, ids: &BTreeSet<BackupId>) -> Result<()> {
        if ids.is_empty() {
            return Ok(());
        }
        if part == Part::Manifest {
            for name in ["complete", "manifest"] {
                self.store.delete_all(ids.iter().map(|id| object(id, name)).collect()).await?;
            }
            return Ok(());
        }
        let directories: Vec<String> = match part {
            Part::Data => {
                ids.iter().flat_map(|id| ["packs", "pages"].map(|of| object(id, of))).collect()
            }
            _ => ids.iter().map(directory).collect(),
        };
        let wanted: HashSet<&str> = directories.iter().map(String::as_str).collect();
        let is_wanted =
            |path: &str| path.match_indices('/').any(|(end, _)| wanted.contains(&path[..end]));
        let objects = self.objects_of(&ids.iter().map(BackupId::as_str).collect()).await?;
        let paths = objects.into_iter().map(|object| object.path);
        self.store.delete_all(paths.filter(|path| is_wanted(path)).collect()).await?;
        self.store.clear(&directories);
        Ok(())
    }
}

/// Whether a backup and all that it counts from have all of their objects. `alone`: only the backup.
fn is_whole(id: &str, backups: &BTreeMap<&str, &Manifest>, listing: &Listing, alone: bool) -> bool {
    let mut at = Some(id);
    // No chain is longer than all backups.
    for _ in 0..=backups.len() {
        let Some(id) = at else { return true };
        let Some(backup) = backups.get(id) else { return false };
        if !listing.is_whole(backup) {
            return false;
        }
        let base = backup.subject.base.as_ref().filter(|_| !alone);
        at = base.map(|base| base.backup.as_str());
    }
    at.is_none()
}
