//! Key files of a repository: which exist, one more, one less. Removing one is a prune: a slot goes
//! only if another slot of its master key stays.

use std::collections::{BTreeMap, BTreeSet};
use std::time::SystemTime;

use anyhow::{Context, Result, bail, ensure};

use super::names::KEYS;
use super::run::Ended;
use super::seal::{KeyFile, Master, Masters, Slot};
use super::{MAX_DOCUMENT, Repository};
use crate::backup::document;
use crate::backup::failure::Failure;
use crate::backup::protocol::{Family, Outcome, Plan, Removal};

/// In place of a slot: the repository is not encrypted.
const NONE: &str = "none";

/// The name of a slot, `MASTER.KEY.N`: N makes it unique.
fn parts(name: &str) -> Option<(&str, &str)> {
    let (master, rest) = name.split_once('.')?;
    Some((master, rest.split_once('.')?.0))
}

impl Repository {
    /// The slots of all key files, by name.
    pub(super) async fn slots(&self) -> Result<Vec<String>> {
        let listed = self.store.list(Some(KEYS)).await?;
        let name = |path: &str| Some(path.strip_prefix(KEYS)?.strip_prefix('/')?.to_owned());
        Ok(listed.iter().filter_map(|object| name(&object.path)).collect())
    }

    /// The master key of new backups, as intents name it.
    pub(super) fn key_name(&self) -> String {
        self.masters.0.keys().next().cloned().unwrap_or_else(|| NONE.to_owned())
    }

    /// Opens the master keys. `create`: makes one if the repository has none yet.
    pub(super) async fn unlock(&mut self, create: bool) -> Result<()> {
        let mut slots = self.slots().await?;
        if slots.is_empty() {
            let location = self.location();
            ensure!(
                create,
                "the repository {location} was not made completely; repeat `backup create`"
            );
            self.first_slot().await?;
            slots = self.slots().await?;
        }
        let location = self.location().to_string();
        let Some(file) = self.key.clone() else {
            ensure!(
                slots.iter().any(|name| name == NONE),
                Failure::wrong_key(format!(
                    "the repository {location} is encrypted; name its key with --key-file"
                ))
            );
            return Ok(());
        };
        let id = file.id()?;
        let mut masters = BTreeMap::new();
        for name in &slots {
            let Some((master, _)) = parts(name).filter(|(_, key)| *key == id) else { continue };
            if let Some(slot) = self.slot(name).await? {
                let opened = Master::open(&slot, &file);
                let opened = opened.with_context(|| format!("{file}: {KEYS}/{name}"))?;
                masters.insert(master.to_owned(), opened);
            }
        }
        if masters.is_empty() && slots.iter().all(|name| name == NONE) {
            bail!(Failure::wrong_key(format!(
                "{file}: the repository {location} is not encrypted"
            )));
        }
        ensure!(
            !masters.is_empty(),
            Failure::wrong_key(format!("{file}: it is not the key of the repository {location}"))
        );
        self.masters = Masters(masters);
        Ok(())
    }

    async fn first_slot(&self) -> Result<()> {
        match &self.key {
            None => self.store.put(&format!("{KEYS}/{NONE}"), Vec::new()).await,
            Some(file) => {
                let (id, master) = Master::generate()?;
                self.put_slot(&id, &master, file).await
            }
        }
    }

    async fn slot(&self, name: &str) -> Result<Option<Slot>> {
        let path = format!("{KEYS}/{name}");
        let document = self.store.get(&path, MAX_DOCUMENT).await?;
        document.map(|document| document::read("key", &path, &document)).transpose()
    }

    async fn put_slot(&self, id: &str, master: &Master, file: &KeyFile) -> Result<()> {
        let created = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
        let slot = master.slot(id, file, created)?;
        let path = format!("{KEYS}/{id}.{}.{}", slot.key, document::nonce()?);
        self.store.put(&path, document::write("key", &slot)?).await
    }

    /// Adds a key file; returns its id.
    ///
    /// # Errors
    /// The repository is not encrypted.
    pub async fn add_key(&self, file: &KeyFile) -> Result<String> {
        ensure!(!self.masters.0.is_empty(), "the repository is not encrypted");
        for (id, master) in &self.masters.0 {
            self.put_slot(id, master, file).await?;
        }
        file.id()
    }

    /// Of the key file by which the repository was opened; none without encryption.
    pub fn key_id(&self) -> Result<Option<String>> {
        self.key.as_ref().map(KeyFile::id).transpose()
    }

    /// The ids of all key files, and when each was added.
    pub async fn keys(&self) -> Result<BTreeMap<String, String>> {
        let mut keys = BTreeMap::new();
        for name in self.slots().await? {
            if let Some((_, key)) = parts(&name)
                && let Some(slot) = self.slot(&name).await?
            {
                keys.insert(key.to_owned(), slot.created);
            }
        }
        Ok(keys)
    }

    /// Removes a key file by its id.
    ///
    /// # Errors
    /// It is not a key of the repository, or no other key would be left.
    pub async fn remove_key(&self, key: &str) -> Result<()> {
        let slots = self.slots().await?;
        let of_master = |master: &str, is_target: bool| -> BTreeSet<String> {
            let wanted = |name: &&String| {
                parts(name).is_some_and(|(one, of)| one == master && (of == key) == is_target)
            };
            slots.iter().filter(wanted).cloned().collect()
        };
        let masters: BTreeSet<&str> =
            slots.iter().filter_map(|name| parts(name)).map(|(master, _)| master).collect();
        let mut plan = Plan::default();
        for master in masters {
            let family =
                Family { targets: of_master(master, true), keepers: of_master(master, false) };
            if family.targets.is_empty() {
                continue;
            }
            ensure!(!family.keepers.is_empty(), "key {key} is the only one; add another one first");
            plan.targets.extend(family.targets.iter().cloned());
            plan.families.push(family);
        }
        ensure!(!plan.targets.is_empty(), "no key {key}; `backup key list` shows all");
        // All go or none: a key that opens some of the backups surprises.
        plan.sets.push(plan.targets.clone());
        let mut removal = Removal::new(document::nonce()?, plan);
        match self.run_on_keys(&mut removal).await? {
            Ended::With(Outcome::Removed(gone)) if !gone.is_empty() => Ok(()),
            _ => bail!(
                "key {key} stays: another process removes the other keys; add one of them again"
            ),
        }
    }
}
