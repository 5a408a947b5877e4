//! Encryption with a key file: ChaCha20-Poly1305, with a key for each directory of the repository
//! that HKDF-SHA256 derives from the file, so that no key seals so many objects that random nonces
//! could repeat.

use std::fmt;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, Prk, Salt};

const MIN_KEY_BYTES: usize = 32;
const MAX_KEY_BYTES: u64 = 64 << 10;

/// The secret of a key file. It does not print.
#[derive(Clone)]
pub struct KeyFile(Vec<u8>);

impl fmt::Debug for KeyFile {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("KeyFile")
    }
}

impl KeyFile {
    /// # Errors
    /// The file cannot be read, or is too short to be a key.
    pub fn read(path: &Path) -> Result<Self> {
        let shown = path.display();
        let size = path.metadata().with_context(|| format!("--key-file {shown}: read"))?.len();
        if size > MAX_KEY_BYTES {
            bail!("--key-file {shown} has {size} bytes, {MAX_KEY_BYTES} at most");
        }
        let bytes = std::fs::read(path).with_context(|| format!("--key-file {shown}: read"))?;
        if bytes.len() < MIN_KEY_BYTES {
            bail!(
                "--key-file {shown} has {} bytes, {MIN_KEY_BYTES} at least; make one with \
                 `head -c 32 /dev/urandom >FILE`",
                bytes.len()
            );
        }
        Ok(Self(bytes))
    }

    /// The secret of one repository.
    pub fn secret(&self, repository_id: &str) -> Secret {
        Secret(Salt::new(HKDF_SHA256, repository_id.as_bytes()).extract(&self.0))
    }
}

/// From which the keys of a repository are derived.
#[derive(Clone)]
pub struct Secret(Prk);

impl Secret {
    pub fn key(&self, directory: &str) -> Result<Key> {
        let info = [directory.as_bytes()];
        let okm = self.0.expand(&info, &CHACHA20_POLY1305);
        let okm = okm.map_err(|_| anyhow!("derive a key for {directory}"))?;
        Ok(Key(LessSafeKey::new(UnboundKey::from(okm))))
    }
}

/// The key of a directory.
pub struct Key(LessSafeKey);

impl Key {
    /// The sealed form: nonce, ciphertext, tag. `path` is bound to it: at another path it does not
    /// open.
    pub fn seal(&self, path: &str, mut bytes: Vec<u8>) -> Result<Vec<u8>> {
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

    /// # Errors
    /// Not a byte was sealed with this key at this path, or one was changed since.
    pub fn open(&self, path: &str, mut sealed: Vec<u8>) -> Result<Vec<u8>> {
        let damaged = || anyhow!("{path} is damaged, or sealed with another key");
        let (nonce, _) = sealed.split_first_chunk::<NONCE_LEN>().ok_or_else(damaged)?;
        let nonce = Nonce::assume_unique_for_key(*nonce);
        let aad = Aad::from(path.as_bytes());
        let opened = self.0.open_within(nonce, aad, &mut sealed, NONCE_LEN..);
        let length = opened.map_err(|_| damaged())?.len();
        sealed.truncate(length);
        Ok(sealed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(secret: &[u8], repository: &str, directory: &str) -> Key {
        KeyFile(secret.to_vec()).secret(repository).key(directory).unwrap()
    }

    #[test]
    fn only_the_same_key_and_path_open_a_sealed_object() {
        let secret = [7; 32];
        let sealed = key(&secret, "r", "d").seal("d/p", b"data".to_vec()).unwrap();
        assert_eq!(sealed.len() as u64, 4 + NONCE_LEN as u64 + 16);
        let open = |secret: &[u8], repository, directory, path| {
            key(secret, repository, directory).open(path, sealed.clone())
        };
        assert_eq!(open(&secret, "r", "d", "d/p").unwrap(), b"data");
        assert!(open(&[8; 32], "r", "d", "d/p").is_err());
        assert!(open(&secret, "s", "d", "d/p").is_err());
        assert!(open(&secret, "r", "e", "d/p").is_err());
        assert!(open(&secret, "r", "d", "d/q").is_err());
    }

    #[test]
    fn any_changed_byte_of_a_sealed_object_is_found() {
        let key = key(&[7; 32], "r", "d");
        let sealed = key.seal("p", b"some data".to_vec()).unwrap();
        for at in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[at] ^= 1;
            assert!(key.open("p", changed).is_err(), "{at}");
        }
        assert!(key.open("p", sealed[..5].to_vec()).is_err());
    }

    #[test]
    fn a_short_key_file_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        std::fs::write(&path, [1; 31]).unwrap();
        assert!(KeyFile::read(&path).unwrap_err().to_string().contains("31 bytes"));
        std::fs::write(&path, [1; 32]).unwrap();
        assert_eq!(format!("{:?}", KeyFile::read(&path).unwrap()), "KeyFile");
    }
}
