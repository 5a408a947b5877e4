//! Encryption with key files. A repository has a random master key, from which HKDF-SHA256 derives
//! a key for each attempt to write a backup, so that no key seals so many objects that random nonces
//! could repeat. The master key is stored once for each key file, sealed with it ([`Slot`]).
//!
//! Two writers that make a repository at the same time make two master keys. Both stay, and each
//! object opens with one of them; new backups use the one with the smaller id.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, KeyType, Prk, Salt};
use serde::{Deserialize, Serialize};

use crate::backup::document::VERSION;
use crate::backup::failure::Failure;

const MIN_KEY_BYTES: usize = 32;
const MAX_KEY_BYTES: u64 = 64 << 10;
const MASTER_BYTES: usize = 32;

/// The secret of a key file. It does not print; what prints is where it comes from.
#[derive(Clone)]
pub struct KeyFile {
    bytes: Vec<u8>,
    /// For errors: a flag or variable, with its value.
    source: String,
}

impl fmt::Debug for KeyFile {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "KeyFile({})", self.source)
    }
}

impl fmt::Display for KeyFile {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.source)
    }
}

impl KeyFile {
    /// `name`: the flag or variable that names the file.
    ///
    /// # Errors
    /// The file cannot be read, or is too short to be a key.
    pub fn read(path: &Path, name: &str) -> Result<Self> {
        let source = format!("{name} {}", path.display());
        let file = File::open(path).with_context(|| format!("{source}: read"))?;
        Self::from_reader(file, source)
    }

    /// A key of at most 64 KiB. `source`: where it comes from, for errors.
    ///
    /// # Errors
    /// It cannot be read, or is too short or too long to be a key.
    pub fn from_reader(reader: impl Read, source: String) -> Result<Self> {
        let mut bytes = Vec::new();
        let read = reader.take(MAX_KEY_BYTES + 1).read_to_end(&mut bytes);
        read.with_context(|| format!("{source}: read"))?;
        let length = bytes.len();
        if length as u64 > MAX_KEY_BYTES {
            bail!("{source} has more than {MAX_KEY_BYTES} bytes");
        }
        if length < MIN_KEY_BYTES {
            bail!(
                "{source} has {length} bytes, {MIN_KEY_BYTES} at least; make a key with \
                 `head -c 32 /dev/urandom >FILE`"
            );
        }
        Ok(Self { bytes, source })
    }

    fn secret(&self) -> Secret {
        Secret::new(b"csi-loopback key file", &self.bytes)
    }

    /// By which the slots of this key file are found. It reveals nothing of the key.
    pub fn id(&self) -> Result<String> {
        let mut id = [0; 8];
        self.secret().expand("id", &mut id)?;
        Ok(hex(&id))
    }
}

/// A master key, sealed with a key file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Slot {
    pub version: u32,
    /// Id of the master key.
    pub master: String,
    /// Id of the key file.
    pub key: String,
    /// When the slot was made, in UTC.
    pub created: String,
    /// In hex.
    sealed: String,
}

/// A master key.
#[derive(Clone)]
pub struct Master([u8; MASTER_BYTES]);

impl Master {
    /// A new one.
    pub fn generate() -> Result<(String, Self)> {
        let (mut id, mut bytes) = ([0; 8], [0; MASTER_BYTES]);
        for part in [&mut id[..], &mut bytes[..]] {
            getrandom::fill(part).map_err(|error| anyhow!("get random bytes: {error}"))?;
        }
        Ok((hex(&id), Self(bytes)))
    }

    pub fn slot(&self, id: &str, file: &KeyFile, created: String) -> Result<Slot> {
        let sealed = file.secret().key("slot")?.seal(id, self.0.to_vec())?;
        let (master, key) = (id.to_owned(), file.id()?);
        Ok(Slot { version: VERSION, master, key, created, sealed: hex(&sealed) })
    }

    /// # Errors
    /// The slot was sealed with another key file, or is damaged.
    pub fn open(slot: &Slot, file: &KeyFile) -> Result<Self> {
        let sealed = from_hex(&slot.sealed).context("the slot is damaged")?;
        let opened = file.secret().key("slot")?.open(&slot.master, sealed)?;
        let master = opened.try_into().map_err(|_| anyhow!("the slot is damaged"))?;
        Ok(Self(master))
    }

    fn secret(&self) -> Secret {
        Secret::new(b"csi-loopback master key", &self.0)
    }
}

/// The master keys of an open repository, by id.
#[derive(Clone, Default)]
pub struct Masters(pub BTreeMap<String, Master>);

impl Masters {
    /// The keys of an attempt; the first one seals.
    pub fn keys(&self, directory: &str) -> Result<Option<Keys>> {
        let keys = self.0.values().map(|master| master.secret().key(directory));
        let keys = keys.collect::<Result<Vec<_>>>()?;
        Ok((!keys.is_empty()).then_some(Keys(keys)))
    }
}

/// From which keys are derived.
struct Secret(Prk);

/// Bytes of this number from HKDF.
struct Length(usize);

impl KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

impl Secret {
    fn new(salt: &[u8], bytes: &[u8]) -> Self {
        Self(Salt::new(HKDF_SHA256, salt).extract(bytes))
    }

    fn key(&self, purpose: &str) -> Result<Key> {
        let info = [purpose.as_bytes()];
        let okm = self.0.expand(&info, &CHACHA20_POLY1305);
        let okm = okm.map_err(|_| anyhow!("derive a key for {purpose}"))?;
        Ok(Key(LessSafeKey::new(UnboundKey::from(okm))))
    }

    fn expand(&self, purpose: &str, out: &mut [u8]) -> Result<()> {
        let info = [purpose.as_bytes()];
        let okm = self.0.expand(&info, Length(out.len()));
        let filled = okm.and_then(|okm| okm.fill(out));
        filled.map_err(|_| anyhow!("derive {purpose}"))
    }
}

/// The keys of an attempt, one for each master key.
pub struct Keys(Vec<Key>);

impl Keys {
    pub fn seal(&self, path: &str, bytes: Vec<u8>) -> Result<Vec<u8>> {
        self.0.first().context("there is no key")?.seal(path, bytes)
    }

    /// # Errors
    /// Not a byte was sealed with one of the keys at this path, or one was changed since.
    pub fn open(&self, path: &str, sealed: Vec<u8>) -> Result<Vec<u8>> {
        let Some((last, others)) = self.0.split_last() else { bail!("there is no key") };
        for key in others {
            if let Ok(opened) = key.open(path, sealed.clone()) {
                return Ok(opened);
            }
        }
        last.open(path, sealed)
    }
}

/// The key of a directory.
struct Key(LessSafeKey);

impl Key {
    /// The sealed form: nonce, ciphertext, tag. `path` is bound to it: at another path it does not
    /// open.
    fn seal(&self, path: &str, mut bytes: Vec<u8>) -> Result<Vec<u8>> {
        let mut nonce = [0; NONCE_LEN];
        getrandom::fill(&mut nonce).map_err(|error| anyhow!("get random bytes: {error}"))?;
        let aad = Aad::from(path.as_bytes());
        let sealed = Nonce::assume_unique_for_key(nonce);
        let tag = self.0.seal_in_place_separate_tag(sealed, aad, &mut bytes);
        let tag = tag.map_err(|_| anyhow!("encrypt {path}"))?;
        let mut out = Vec::with_capacity(nonce.len() + bytes.len() + tag.as_ref().len());
        out.extend_from_slice(&nonce);
        out.extend_from_slice(&bytes);
        out.extend_from_slice(tag.as_ref());
        Ok(out)
    }

    fn open(&self, path: &str, mut sealed: Vec<u8>) -> Result<Vec<u8>> {
        let damaged = || Failure::damaged(format!("{path} is damaged, or sealed with another key"));
        let (nonce, _) = sealed.split_first_chunk::<NONCE_LEN>().ok_or_else(damaged)?;
        let nonce = Nonce::assume_unique_for_key(*nonce);
        let aad = Aad::from(path.as_bytes());
        let opened = self.0.open_within(nonce, aad, &mut sealed, NONCE_LEN..);
        let length = opened.map_err(|_| damaged())?.len();
        sealed.truncate(length);
        Ok(sealed)
    }
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Result<Vec<u8>> {
    ensure!(text.len().is_multiple_of(2), "it has an odd number of digits");
    let digits = text.as_bytes().chunks(2);
    let byte = |digits: &[u8]| Ok(u8::from_str_radix(std::str::from_utf8(digits)?, 16)?);
    digits.map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(masters: &[u8], directory: &str) -> Keys {
        let master = |byte: &u8| (format!("{byte:016x}"), Master([*byte; MASTER_BYTES]));
        Masters(masters.iter().map(master).collect()).keys(directory).unwrap().unwrap()
    }

    #[test]
    fn only_the_same_key_and_path_open_a_sealed_object() {
        let sealed = keys(&[7], "d").seal("d/p", b"data".to_vec()).unwrap();
        assert_eq!(sealed.len() as u64, 4 + NONCE_LEN as u64 + 16);
        let open =
            |masters: &[u8], directory, path| keys(masters, directory).open(path, sealed.clone());
        for masters in [&[7][..], &[7, 8], &[6, 7]] {
            assert_eq!(open(masters, "d", "d/p").unwrap(), b"data");
        }
        assert!(open(&[8], "d", "d/p").is_err());
        assert!(open(&[7], "e", "d/p").is_err());
        assert!(open(&[7], "d", "d/q").is_err());
    }

    #[test]
    fn any_changed_byte_of_a_sealed_object_is_found() {
        let keys = keys(&[7], "d");
        let sealed = keys.seal("p", b"some data".to_vec()).unwrap();
        for at in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[at] ^= 1;
            assert!(keys.open("p", changed).is_err(), "{at}");
        }
        assert!(keys.open("p", sealed[..5].to_vec()).is_err());
    }

    #[test]
    fn each_key_file_opens_its_slot_of_a_master_key() {
        let (id, master) = Master::generate().unwrap();
        let [one, two] = [1, 2]
            .map(|byte| KeyFile::from_reader(&[byte; 32][..], "--key-file".to_owned()).unwrap());
        assert_ne!(one.id().unwrap(), two.id().unwrap());
        let slot = master.slot(&id, &one, String::new()).unwrap();
        assert_eq!(Master::open(&slot, &one).unwrap().0, master.0);
        assert!(Master::open(&slot, &two).is_err());
        let other = Slot { master: "0".to_owned(), ..slot };
        assert!(Master::open(&other, &one).is_err());
    }

    #[test]
    fn a_short_or_long_key_is_refused_and_none_is_printed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        std::fs::write(&path, [1; 31]).unwrap();
        let refused = || KeyFile::read(&path, "--key-file").unwrap_err().to_string();
        assert!(refused().starts_with("--key-file /") && refused().contains("31 bytes"));
        std::fs::write(&path, vec![1; (64 << 10) + 1]).unwrap();
        assert!(refused().contains("more than 65536 bytes"), "{}", refused());
        std::fs::write(&path, "k".repeat(32)).unwrap();
        let key = KeyFile::read(&path, "--key-file").unwrap();
        assert!(!format!("{key:?} {key}").contains("kkk"));
    }
}
