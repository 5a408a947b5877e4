//! A repository: where it is ([`location`]), its objects ([`store`]) and their names ([`names`]),
//! their encryption ([`seal`], [`keys`]), and what it holds ([`inventory`]). [`run`] drives the
//! protocol by which processes share it.

pub mod format_1;
pub mod index;
mod inventory;
pub mod keys;
pub mod location;
pub mod names;
mod run;
pub mod seal;
pub mod store;

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use anyhow::{Context, Result, bail, ensure};
use object_store::PutPayload;
use serde::{Deserialize, Serialize};

use super::document::{self, Hash, OtherVersion, VERSION};
use super::failure::Failure;
use super::manifest::{BackupId, CHUNK_BYTES, Chunk, Intent, Manifest, PACK_BYTES, Page};
pub use inventory::Inventory;
pub use location::Location;
use names::{BACKUPS, DESCRIPTION, INDEX, KEYS, MARKS, RESERVE, References, directory, object};
pub use run::{Ended, Known};
use seal::{KeyFile, Masters};
pub use store::Store;

/// Bytes that a document may have. A manifest has one size for all volumes, and a page 512 chunks.
const MAX_DOCUMENT: u64 = 16 << 20;
/// A pack is closed at 16 MiB; a chunk that does not compress is larger than its bytes.
const MAX_PACK: u64 = PACK_BYTES as u64 + 2 * CHUNK_BYTES;
/// A prune of a full store removes it first: marks need directory entries.
const RESERVE_BYTES: usize = 1 << 20;

/// The same for all repositories, so that two writers may put it at the same time.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Description {
    version: u32,
}

/// An open repository. Cheap to clone.
#[derive(Clone)]
pub struct Repository {
    pub store: Store,
    location: Arc<Location>,
    masters: Masters,
    /// The key files by which it was opened; none without encryption.
    key: Option<KeyFile>,
}

impl Repository {
    /// Opens a repository. `create`: makes it where there is nothing yet.
    ///
    /// # Errors
    /// There is none, it has a key and none was given, or the other way round, or another key.
    pub async fn open(
        location: &Location,
        create: bool,
        key: Option<KeyFile>,
        credentials: Option<&Path>,
    ) -> Result<Self> {
        let root = location.directory();
        let store = Store::new(location.store(create, credentials)?, root.map(Path::to_owned));
        match store.get(DESCRIPTION, MAX_DOCUMENT).await? {
            Some(document) => {
                let read = document::read::<Description>("repository", DESCRIPTION, &document);
                read.map_err(|error| other_format(location, error))?;
            }
            None if create => describe(&store, location, root).await?,
            None => {
                bail!(Failure::no_repository(format!(
                    "--repository {location}: there is no repository; `backup create` makes one"
                )))
            }
        }
        let mut opened =
            Self { store, location: Arc::new(location.clone()), masters: Masters::default(), key };
        opened.unlock(create).await?;
        Ok(opened)
    }

    pub fn location(&self) -> &Location {
        &self.location
    }

    /// All backups and what else there is.
    pub async fn inventory(&self) -> Result<Inventory> {
        Inventory::read(self, true).await
    }

    /// The same from the manifests themselves, without an index.
    pub async fn unindexed_inventory(&self) -> Result<Inventory> {
        Inventory::read(self, false).await
    }

    pub async fn manifest(&self, id: &BackupId) -> Result<Option<Manifest>> {
        let path = object(id, "manifest");
        let Some(document) = self.document(id, &path).await? else { return Ok(None) };
        let manifest: Manifest = document::read("manifest", &path, &document)?;
        manifest.check(id).with_context(|| damaged(&path))?;
        Ok(Some(manifest))
    }

    async fn put_manifest(&self, manifest: &Manifest) -> Result<()> {
        let path = object(&manifest.id, "manifest");
        let sealed =
            self.seal(&directory(&manifest.id), &path, document::write("manifest", manifest)?)?;
        self.store.put(&path, sealed).await
    }

    async fn intent(&self, id: &BackupId, references: &References) -> Result<Option<Intent>> {
        let path = references.path(id);
        let Some(document) = self.document(id, &path).await? else { return Ok(None) };
        let intent: Intent = document::read("intent", &path, &document)?;
        ensure!(intent.id == *id, "{path} is that of {}", intent.id);
        Ok(Some(intent))
    }

    /// Reads the intents of what a backup consists of. A restore does not need them.
    ///
    /// # Errors
    /// One is missing or damaged.
    pub async fn check_intents(&self, inventory: &Inventory, backup: &Manifest) -> Result<()> {
        for part in &backup.parts {
            let found = inventory.listing.attempts.get(&part.attempt);
            for references in found.map(|found| &found.intents).into_iter().flatten() {
                self.intent(&part.attempt, references).await?;
            }
        }
        Ok(())
    }

    /// What an attempt refers to, which the name of its intent says.
    pub fn references(&self, intent: &Intent) -> References {
        References {
            key: self.key_name(),
            base: intent.subject.base.as_ref().map(|base| base.backup.clone()),
            after: intent.parts.last().map(|part| part.attempt.clone()),
        }
    }

    async fn put_intent(&self, intent: &Intent) -> Result<()> {
        let path = self.references(intent).path(&intent.id);
        let sealed =
            self.seal(&directory(&intent.id), &path, document::write("intent", intent)?)?;
        self.store.put(&path, sealed).await
    }

    /// A page of an attempt, and the hash and size of its object.
    pub async fn page(&self, id: &BackupId, number: u32) -> Result<Option<(Page, Hash, u64)>> {
        let path = names::page(id, number);
        let Some(object) = self.store.get(&path, MAX_DOCUMENT).await? else { return Ok(None) };
        let (hash, size) = (Hash::of(&object), object.len() as u64);
        let opened = self.open_sealed(&directory(id), &path, object)?;
        let limit = usize::try_from(MAX_DOCUMENT)?;
        let document = document::decompress(&opened, limit).with_context(|| damaged(&path))?;
        Ok(Some((document::read("page", &path, &document)?, hash, size)))
    }

    /// Writes a page; returns the hash and the size of its object.
    pub async fn put_page(&self, page: Page) -> Result<(Hash, u64)> {
        let path = names::page(&page.backup, page.number);
        let repository = self.clone();
        let at = path.clone();
        let work = move || {
            let document = document::compress(&document::write("page", &page)?)?;
            let sealed = repository.seal(&directory(&page.backup), &at, document)?;
            Ok((Hash::of(&sealed), sealed))
        };
        let (hash, sealed) = super::blocking(work).await?;
        let size = sealed.len() as u64;
        self.store.put(&path, sealed).await?;
        Ok((hash, size))
    }

    pub async fn put_pack(&self, id: &BackupId, number: u32, pack: PutPayload) -> Result<()> {
        self.store.put(&names::pack(id, number), pack).await
    }

    /// # Errors
    /// The pack does not exist, or is not the one that the page was written for.
    pub async fn pack(&self, page: &Page) -> Result<Vec<u8>> {
        let path = names::pack(&page.backup, page.number);
        let pack = self.store.get(&path, MAX_PACK).await?;
        let pack = pack.ok_or_else(|| Failure::damaged(format!("{path} is missing")))?;
        ensure!(
            pack.len() as u64 == page.pack_bytes && crc32c::crc32c(&pack) == page.pack_crc,
            Failure::damaged(format!(
                "{path} is damaged: it does not have the size and the checksum of its page"
            ))
        );
        Ok(pack)
    }

    /// The stored form of a chunk.
    pub async fn stored_chunk(&self, id: &BackupId, page: u32, chunk: &Chunk) -> Result<Vec<u8>> {
        self.store.get_range(&names::pack(id, page), chunk.at, chunk.stored).await
    }

    /// How the chunks of an attempt are sealed.
    pub fn coder(&self, id: &BackupId) -> Result<super::chunk::Coder> {
        Ok(super::chunk::Coder::new(id, self.masters.keys(&directory(id))?))
    }

    /// Removes staged files and empty directories that killed processes left before this time.
    pub fn sweep(&self, before: SystemTime, known: &HashSet<&str>) {
        for (directory, known) in
            [("", None), (INDEX, None), (KEYS, None), (MARKS, None), (BACKUPS, Some(known))]
        {
            let is_known = |name: &str| known.is_none_or(|known| known.contains(name));
            self.store.sweep(directory, is_known, before);
        }
    }

    /// Puts the reserve if a prune has used it, and if there is room for it again.
    pub async fn restore_reserve(&self) {
        if self.store.get_range(RESERVE, 0, 1).await.is_err() {
            // Without it, all but a prune of a full store works.
            let _ = self.store.put(RESERVE, vec![0; RESERVE_BYTES]).await;
        }
    }

    async fn document(&self, id: &BackupId, path: &str) -> Result<Option<Vec<u8>>> {
        let object = self.store.get(path, MAX_DOCUMENT).await?;
        object.map(|object| self.open_sealed(&directory(id), path, object)).transpose()
    }

    /// `of`: the directory whose keys seal it, of an attempt or [`INDEX`].
    fn seal(&self, of: &str, path: &str, bytes: Vec<u8>) -> Result<Vec<u8>> {
        match self.masters.keys(of)? {
            Some(keys) => keys.seal(path, bytes),
            None => Ok(bytes),
        }
    }

    fn open_sealed(&self, of: &str, path: &str, bytes: Vec<u8>) -> Result<Vec<u8>> {
        match self.masters.keys(of)? {
            Some(keys) => keys.open(path, bytes),
            None => Ok(bytes),
        }
    }
}

fn damaged(path: &str) -> Failure {
    Failure::damaged(format!("{path} is damaged"))
}

/// Writes the description of a new repository. Another process may do so as well.
async fn describe(store: &Store, location: &Location, root: Option<&Path>) -> Result<()> {
    let own = [DESCRIPTION, RESERVE, BACKUPS, INDEX, KEYS, MARKS];
    let is_own = |path: &str| path.split('/').next().is_some_and(|top| own.contains(&top));
    if store.list(None).await?.iter().any(|object| !is_own(&object.path)) {
        bail!(
            "--repository {location}: there are other files and no repository; name an empty place"
        );
    }
    make(store, root).await
}

/// Puts what every repository has.
async fn make(store: &Store, root: Option<&Path>) -> Result<()> {
    if let Some(root) = root {
        // A full filesystem may have no room for it later.
        std::fs::create_dir_all(root.join(MARKS)).context("make the directory of marks")?;
    }
    store.put(RESERVE, vec![0; RESERVE_BYTES]).await?;
    store.put(DESCRIPTION, document::write("repository", &Description { version: VERSION })?).await
}

/// What to do about a repository of another format.
fn other_format(location: &Location, error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref::<OtherVersion>() {
        Some(OtherVersion { version, .. }) => Failure::no_repository(format!(
            "--repository {location} has format {version}, and this program reads and writes format \
             {VERSION}; name another directory or prefix, or set --replace-format-1 of `backup \
             create`, which removes the backups of format 1"
        ))
        .into(),
        None => error.context(format!("--repository {location}")),
    }
}
