//! Performs the operations of the protocol's machines ([`crate::backup::protocol`]) on the store.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, anyhow};

use super::Repository;
use super::names::{self, BACKUPS, KEYS, Listing, MARKS, RESERVE, object};
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
        loop {
            let operation = machine.next(Answer::Done);
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
                Operation::Delete(part, id) => {
                    let id = BackupId::try_from(id.clone()).map_err(|error| anyhow!(error))?;
                    self.delete(*part, &id).await?;
                }
                Operation::ListMarks(_) => {
                    let is_on_backup = |on: &str| BackupId::try_from(on.to_owned()).is_ok();
                    for (on, by) in self.marks().await? {
                        if is_on_backup(&on) {
                            machine.next(Answer::Listed(Name::Mark(on, by)));
                        }
                    }
                }
                Operation::PutMark(..) | Operation::DeleteMark(..) | Operation::More => {
                    self.change_mark(&operation).await?;
                }
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
                _ => self.change_mark(&operation).await?,
            }
        }
    }

    async fn change_mark(&self, operation: &Operation<String>) -> Result<()> {
        match operation {
            Operation::PutMark(on, by) => self.put_mark(&names::mark(on, by)).await,
            Operation::DeleteMark(on, by) => self.store.delete(&names::mark(on, by)).await,
            _ => Ok(()),
        }
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
        let mut objects = Vec::new();
        if !ids.is_empty() && wanted.len() <= FEW {
            for id in &wanted {
                objects.extend(self.store.list(Some(&format!("{BACKUPS}/{id}"))).await?);
            }
        } else {
            objects = self.store.list(Some(BACKUPS)).await?;
        }
        let listing = Listing::new(objects);
        let mut names = Vec::new();
        for (id, attempt) in &listing.attempts {
            for references in &attempt.intents {
                let references = references.ids().map(ToString::to_string).collect();
                names.push(Name::Intent(id.to_string(), references));
            }
            if attempt.has_manifest {
                names.push(Name::Manifest(id.to_string()));
            }
            if is_whole(id.as_str(), &by_id, &listing, known.chain.is_empty()) {
                names.push(Name::Data(id.to_string()));
            }
        }
        Ok(names)
    }

    async fn delete(&self, part: Part, id: &BackupId) -> Result<()> {
        match part {
            Part::Manifest => {
                self.store.delete(&object(id, "complete")).await?;
                self.store.delete(&object(id, "manifest")).await
            }
            Part::Data => {
                self.store.delete_all(&object(id, "packs")).await?;
                self.store.delete_all(&object(id, "pages")).await
            }
            Part::Intent => self.store.delete_all(&names::directory(id)).await,
        }
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
