//! A repository: where it is ([`location`]), its objects ([`store`]), their encryption ([`seal`]),
//! and who uses it ([`lock`]). The layout is documented in docs/reference/backup.md:
//!
//! - `repository.json`: version, id, encryption
//! - `backups/ID/manifest`: makes the backup visible; written last, removed first
//! - `backups/ID/intent`: a backup that is being written, until the manifest exists
//! - `backups/ID/pages/N`, `backups/ID/packs/N`: its chunks
//! - `locks/N`: who uses the repository, and until when

pub mod location;
pub mod lock;
pub mod seal;
pub mod store;

use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::{Deserialize, Serialize};

use super::document::{self, Hash, VERSION};
use super::manifest::{
    BackupId, CHUNK_BYTES, Chunk, Intent, Manifest, PACK_BYTES, Page, check_chain,
};
pub use location::Location;
use seal::{KeyFile, Secret};
pub use store::Store;

const DESCRIPTION: &str = "repository.json";
const BACKUPS: &str = "backups";
/// Which is sealed and stored, so that a wrong key is known before anything else is read.
const KEY_CHECK: &[u8] = b"csi-loopback backup repository";

/// Bytes that a document may have. A manifest has one size for all volumes, and a page 512 chunks.
const MAX_DOCUMENT: u64 = 16 << 20;
/// A pack is closed at 16 MiB; a chunk that does not compress is larger than its bytes.
const MAX_PACK: u64 = PACK_BYTES as u64 + 2 * CHUNK_BYTES;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Description {
    version: u32,
    id: String,
    created: String,
    encryption: Option<Encryption>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Encryption {
    cipher: String,
    /// A known text, sealed, in hex.
    check: String,
}

const CIPHER: &str = "chacha20-poly1305";

/// An open repository. Cheap to clone.
#[derive(Clone)]
pub struct Repository {
    pub store: Store,
    location: Arc<Location>,
    secret: Option<Secret>,
}

/// What a repository holds.
#[derive(Debug, Default)]
pub struct Inventory {
    /// Oldest first.
    pub backups: Vec<Manifest>,
    /// Manifests that cannot be read, and why.
    pub damaged: Vec<(BackupId, anyhow::Error)>,
    /// Without a manifest: being written, interrupted, or being removed. The intent is missing in
    /// the last case.
    pub unfinished: Vec<(BackupId, Option<Intent>)>,
}

impl Repository {
    /// Opens a repository. `create`: makes it where there is nothing yet.
    ///
    /// # Errors
    /// There is none, it has a key and none was given, or the other way round, or another key.
    pub async fn open(
        location: &Location,
        create: bool,
        key_file: Option<&Path>,
        credentials: Option<&Path>,
    ) -> Result<Self> {
        let key = key_file.map(KeyFile::read).transpose()?;
        let store = Store::new(location.store(create, credentials)?);
        let description = match store.get(DESCRIPTION, MAX_DOCUMENT).await? {
            Some(document) => document::read::<Description>("repository", DESCRIPTION, &document)?,
            None if create => describe(&store, location, key.as_ref()).await?,
            None => {
                bail!("--repository {location}: there is no repository; `backup create` makes one")
            }
        };
        let secret = unlock(&description, location, key)?;
        Ok(Self { store, location: Arc::new(location.clone()), secret })
    }

    pub fn location(&self) -> &Location {
        &self.location
    }

    /// All backups and what else there is.
    pub async fn inventory(&self) -> Result<Inventory> {
        let mut inventory = Inventory::default();
        for name in self.store.directories(BACKUPS).await? {
            // Another name is not this program's.
            let Ok(id) = BackupId::try_from(name) else { continue };
            match self.manifest(&id).await {
                Ok(Some(manifest)) => inventory.backups.push(manifest),
                Ok(None) => {
                    let intent = self.intent(&id).await.unwrap_or_default();
                    inventory.unfinished.push((id, intent));
                }
                Err(error) => inventory.damaged.push((id, error)),
            }
        }
        inventory.backups.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(inventory)
    }

    pub async fn manifest(&self, id: &BackupId) -> Result<Option<Manifest>> {
        let path = path(id, "manifest");
        let Some(document) = self.document(id, &path).await? else { return Ok(None) };
        let manifest: Manifest = document::read("manifest", &path, &document)?;
        manifest.check(id).with_context(|| format!("{path} is damaged"))?;
        Ok(Some(manifest))
    }

    /// Makes a backup visible.
    pub async fn publish(&self, manifest: &Manifest) -> Result<()> {
        let path = path(&manifest.id, "manifest");
        let sealed = self.seal(&manifest.id, &path, document::write("manifest", manifest)?)?;
        if !self.store.create(&path, sealed.clone()).await? {
            // An answer that was lost, and the request repeated; or another process.
            let existing = self.store.get(&path, MAX_DOCUMENT).await?;
            ensure!(existing == Some(sealed), "another process has written backup {}", manifest.id);
        }
        self.store.delete(&self::path(&manifest.id, "intent")).await
    }

    pub async fn intent(&self, id: &BackupId) -> Result<Option<Intent>> {
        let path = path(id, "intent");
        let Some(document) = self.document(id, &path).await? else { return Ok(None) };
        let intent: Intent = document::read("intent", &path, &document)?;
        ensure!(intent.id == *id, "{path} is that of {}", intent.id);
        Ok(Some(intent))
    }

    pub async fn put_intent(&self, intent: &Intent) -> Result<()> {
        let path = path(&intent.id, "intent");
        let sealed = self.seal(&intent.id, &path, document::write("intent", intent)?)?;
        self.store.put(&path, sealed).await
    }

    /// A page, and the hash of its object.
    pub async fn page(&self, id: &BackupId, number: u32) -> Result<Option<(Page, Hash)>> {
        let path = page_path(id, number);
        let Some(object) = self.store.get(&path, MAX_DOCUMENT).await? else { return Ok(None) };
        let hash = Hash::of(&object);
        let opened = self.open_sealed(id, &path, object)?;
        let limit = usize::try_from(MAX_DOCUMENT)?;
        let document =
            document::decompress(&opened, limit).with_context(|| format!("{path} is damaged"))?;
        Ok(Some((document::read("page", &path, &document)?, hash)))
    }

    /// Writes a page and returns the hash of its object.
    pub async fn put_page(&self, page: &Page) -> Result<Hash> {
        let path = page_path(&page.backup, page.number);
        let document = document::compress(&document::write("page", page)?)?;
        let sealed = self.seal(&page.backup, &path, document)?;
        let hash = Hash::of(&sealed);
        self.store.put(&path, sealed).await?;
        Ok(hash)
    }

    pub async fn put_pack(&self, id: &BackupId, number: u32, pack: Vec<u8>) -> Result<()> {
        self.store.put(&pack_path(id, number), pack).await
    }

    /// # Errors
    /// The pack does not exist, or is not the one that the page was written for.
    pub async fn pack(&self, page: &Page) -> Result<Vec<u8>> {
        let path = pack_path(&page.backup, page.number);
        let pack = self.store.get(&path, MAX_PACK).await?;
        let pack = pack.ok_or_else(|| anyhow!("{path} is missing"))?;
        ensure!(
            pack.len() as u64 == page.pack_bytes && Hash::of(&pack) == page.pack_hash,
            "{path} is damaged: it does not have the size and the hash of its page"
        );
        Ok(pack)
    }

    /// The stored form of a chunk.
    pub async fn stored_chunk(&self, id: &BackupId, page: u32, chunk: &Chunk) -> Result<Vec<u8>> {
        self.store.get_range(&pack_path(id, page), chunk.at, chunk.stored).await
    }

    /// How the chunks of a backup are sealed.
    pub fn coder(&self, id: &BackupId) -> Result<super::chunk::Coder> {
        let key = self.secret.as_ref().map(|secret| secret.key(&directory(id))).transpose()?;
        Ok(super::chunk::Coder::new(id, key))
    }

    /// The backup that `reference` names: an id, the beginning of one, or a snapshot by name or
    /// handle.
    ///
    /// # Errors
    /// There is none, or several.
    pub fn find<'i>(&self, inventory: &'i Inventory, reference: &str) -> Result<&'i Manifest> {
        let all = || inventory.backups.iter();
        if let Some(exact) = all().find(|backup| backup.id.as_str() == reference) {
            return Ok(exact);
        }
        if let Some((id, error)) = inventory.damaged.iter().find(|(id, _)| id.as_str() == reference)
        {
            bail!("backup {id}: {error:#}");
        }
        let names = |backup: &&Manifest| {
            let subject = &backup.subject;
            (!reference.is_empty() && backup.id.as_str().starts_with(reference))
                || subject.snapshot == reference
                || subject.snapshot_id == reference
        };
        let mut named = all().filter(names);
        match (named.next(), named.next()) {
            (Some(only), None) => Ok(only),
            (None, _) => {
                bail!("no backup {reference:?} in {}; `backup list` shows all", self.location)
            }
            (Some(_), Some(_)) => {
                let ids: Vec<_> = all().filter(names).map(|backup| backup.id.as_str()).collect();
                bail!("several backups are named {reference:?}, use an id: {}", ids.join(", "))
            }
        }
    }

    /// The chain of a backup, newest first: itself, its base, the base of that, to a full one.
    ///
    /// # Errors
    /// A backup of it is missing, damaged, or does not belong to it.
    pub fn chain(&self, inventory: &Inventory, backup: &Manifest) -> Result<Vec<Manifest>> {
        let mut chain = vec![backup.clone()];
        while let Some(base) = chain.last().and_then(|last| last.subject.base.clone()) {
            if let Some((_, error)) = inventory.damaged.iter().find(|(id, _)| *id == base.backup) {
                bail!("backup {} needs backup {}: {error:#}", backup.id, base.backup);
            }
            let found = inventory.backups.iter().find(|other| other.id == base.backup);
            let found = found.ok_or_else(|| {
                anyhow!("backup {} needs backup {}, which is missing", backup.id, base.backup)
            })?;
            ensure!(
                chain.len() <= inventory.backups.len(),
                "the chain of {} has no end",
                backup.id
            );
            chain.push(found.clone());
        }
        check_chain(&chain)?;
        Ok(chain)
    }

    /// Removes a backup, or what is there of one. Interrupted at any point, it leaves either the
    /// whole backup or one that nothing takes for a backup.
    pub async fn remove(&self, id: &BackupId) -> Result<()> {
        self.store.delete(&path(id, "manifest")).await?;
        // Without it no writer continues what is removed from here on.
        self.store.delete(&path(id, "intent")).await?;
        self.store.delete_all(&directory(id)).await
    }

    /// Removes what processes that were killed have left of objects that they wrote. Only for a
    /// process that has the repository alone.
    pub fn sweep(&self) -> Result<()> {
        match &*self.location {
            // A lock may be taken at any time, so its directory is left alone.
            Location::Directory(path) => location::sweep(&path.join(BACKUPS)),
            Location::S3 { .. } | Location::Claim { .. } => Ok(()),
        }
    }

    async fn document(&self, id: &BackupId, path: &str) -> Result<Option<Vec<u8>>> {
        let object = self.store.get(path, MAX_DOCUMENT).await?;
        object.map(|object| self.open_sealed(id, path, object)).transpose()
    }

    fn seal(&self, id: &BackupId, path: &str, bytes: Vec<u8>) -> Result<Vec<u8>> {
        match &self.secret {
            Some(secret) => secret.key(&directory(id))?.seal(path, bytes),
            None => Ok(bytes),
        }
    }

    fn open_sealed(&self, id: &BackupId, path: &str, bytes: Vec<u8>) -> Result<Vec<u8>> {
        match &self.secret {
            Some(secret) => secret.key(&directory(id))?.open(path, bytes),
            None => Ok(bytes),
        }
    }
}

fn directory(id: &BackupId) -> String {
    format!("{BACKUPS}/{id}")
}

fn path(id: &BackupId, name: &str) -> String {
    format!("{BACKUPS}/{id}/{name}")
}

fn page_path(id: &BackupId, number: u32) -> String {
    format!("{BACKUPS}/{id}/pages/{number:08}")
}

fn pack_path(id: &BackupId, number: u32) -> String {
    format!("{BACKUPS}/{id}/packs/{number:08}")
}

/// Writes the description of a new repository, unless another process is faster.
async fn describe(
    store: &Store,
    location: &Location,
    key: Option<&KeyFile>,
) -> Result<Description> {
    if !store.is_empty().await? {
        bail!(
            "--repository {location}: there are other files and no repository; name an empty place"
        );
    }
    let id = getrandom::u64().map_err(|error| anyhow!("get random bytes: {error}"))?;
    let id = format!("{id:016x}");
    let check =
        key.map(|key| key.secret(&id).key(DESCRIPTION)?.seal(DESCRIPTION, KEY_CHECK.to_vec()));
    let encryption = check.transpose()?.map(|check| Encryption {
        cipher: CIPHER.to_owned(),
        check: check.iter().map(|byte| format!("{byte:02x}")).collect(),
    });
    let created = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let description = Description { version: VERSION, id, created, encryption };
    let document = document::write("repository", &description)?;
    if store.create(DESCRIPTION, document).await? {
        return Ok(description);
    }
    let other = store.get(DESCRIPTION, MAX_DOCUMENT).await?.unwrap_or_default();
    document::read("repository", DESCRIPTION, &other)
}

fn unlock(
    description: &Description,
    location: &Location,
    key: Option<KeyFile>,
) -> Result<Option<Secret>> {
    let (encryption, key) = match (&description.encryption, key) {
        (None, None) => return Ok(None),
        (None, Some(_)) => bail!("--key-file: the repository {location} is not encrypted"),
        (Some(_), None) => {
            bail!("the repository {location} is encrypted; name its key with --key-file")
        }
        (Some(encryption), Some(key)) => (encryption, key),
    };
    ensure!(
        encryption.cipher == CIPHER,
        "the repository {location} has cipher {}; this program has {CIPHER}",
        encryption.cipher
    );
    let secret = key.secret(&description.id);
    let check: Option<Vec<u8>> = encryption
        .check
        .as_bytes()
        .chunks(2)
        .map(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok())
        .collect();
    let opened = secret.key(DESCRIPTION)?.open(DESCRIPTION, check.unwrap_or_default());
    match opened {
        Ok(text) if text == KEY_CHECK => Ok(Some(secret)),
        _ => bail!("--key-file: it is not the key of the repository {location}"),
    }
}
