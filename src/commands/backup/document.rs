//! JSON documents of a repository. Each carries the SHA-256 of its own text, so that any changed
//! byte is found:
//! `{"hash":"<hex>","<kind>":<text>}` and a newline, without other white space.

use std::cell::RefCell;
use std::fmt;
use std::io::Read;

use anyhow::{Context, Result, anyhow, bail};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::Digest;

use super::failure::Failure;

/// The version of the repository format that this program writes, and the only one that it reads.
pub const VERSION: u32 = 2;

/// 64 random bits, in hex, for a unique name.
pub fn nonce() -> Result<String> {
    let random = getrandom::u64().map_err(|error| anyhow!("get random bytes: {error}"))?;
    Ok(format!("{random:016x}"))
}

/// A SHA-256, in hex.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Hash([u8; 32]);

impl Hash {
    pub fn of(bytes: &[u8]) -> Self {
        Self(sha2::Sha256::digest(bytes).into())
    }
}

impl fmt::Display for Hash {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(out, "{byte:02x}"))
    }
}

impl fmt::Debug for Hash {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{self}")
    }
}

impl From<Hash> for String {
    fn from(hash: Hash) -> Self {
        hash.to_string()
    }
}

impl TryFrom<String> for Hash {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let wrong = || "a hash has 64 lowercase hex digits".to_owned();
        let is_digit = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        if text.len() != 64 || !text.as_bytes().iter().all(is_digit) {
            return Err(wrong());
        }
        let mut hash = [0; 32];
        for (byte, digits) in hash.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let digits = std::str::from_utf8(digits).map_err(|_| wrong())?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| wrong())?;
        }
        Ok(Self(hash))
    }
}

/// A hash of the hashes of many objects, in their order.
#[derive(Clone, Default)]
pub struct RunningHash(sha2::Sha256);

impl RunningHash {
    pub fn add(&mut self, hash: &Hash) {
        self.0.update(hash.0);
    }

    pub fn finish(self) -> Hash {
        Hash(self.0.finalize().into())
    }
}

/// The document of a value.
pub fn write<T: Serialize>(kind: &str, value: &T) -> Result<Vec<u8>> {
    let text = serde_json::to_vec(value).with_context(|| format!("write a {kind}"))?;
    let mut document = format!("{{\"hash\":\"{}\",\"{kind}\":", Hash::of(&text)).into_bytes();
    document.extend_from_slice(&text);
    document.extend_from_slice(b"}\n");
    Ok(document)
}

/// The value of a document.
///
/// # Errors
/// A byte of it was changed, or another version wrote it.
pub fn read<T: DeserializeOwned>(kind: &str, path: &str, document: &[u8]) -> Result<T> {
    let text =
        text(kind, document).with_context(|| Failure::damaged(format!("{path} is damaged")))?;
    #[derive(Deserialize)]
    struct Versioned {
        version: u32,
    }
    let parse = || format!("{path} is not a {kind}");
    let Versioned { version } = serde_json::from_slice(text).with_context(parse)?;
    if version != VERSION {
        return Err(OtherVersion { path: path.to_owned(), version }.into());
    }
    serde_json::from_slice(text).with_context(parse)
}

/// A document that another version of this program wrote.
#[derive(Debug, thiserror::Error)]
#[error(
    "{path} has format version {version}, this program reads {VERSION}; use the program that wrote it"
)]
pub struct OtherVersion {
    path: String,
    pub version: u32,
}

fn text<'d>(kind: &str, document: &'d [u8]) -> Result<&'d [u8]> {
    let parts = document.strip_prefix(b"{\"hash\":\"").and_then(|rest| rest.split_at_checked(64));
    let middle = format!("\",\"{kind}\":");
    let text = parts.and_then(|(hash, rest)| {
        let text = rest.strip_prefix(middle.as_bytes())?.strip_suffix(b"}\n")?;
        Some((hash, text))
    });
    let Some((hash, text)) = text else { bail!("it is not a document of kind {kind}") };
    if Hash::of(text).to_string().as_bytes() != hash {
        bail!("its text does not have its hash");
    }
    Ok(text)
}

/// Compresses, as documents of many entries and chunks are.
pub fn compress(bytes: &[u8]) -> Result<Vec<u8>> {
    /// zstd's own default: more costs time and saves little on disk images.
    const LEVEL: i32 = 3;
    thread_local! {
        /// Its tables have the size of a chunk, and are not cleared when it is used again.
        static COMPRESSOR: RefCell<Option<zstd::bulk::Compressor<'static>>> =
            const { RefCell::new(None) };
    }
    let compress = |kept: &mut Option<zstd::bulk::Compressor<'_>>| {
        let compressor = match kept {
            Some(compressor) => compressor,
            None => kept.insert(zstd::bulk::Compressor::new(LEVEL)?),
        };
        compressor.compress(bytes)
    };
    let mut compressed = COMPRESSOR.with_borrow_mut(compress).context("compress")?;
    // Its room is that of bytes which cannot be compressed, and many chunks wait for their pack.
    compressed.shrink_to_fit();
    Ok(compressed)
}

/// The opposite. An input of more than `limit` bytes is an error.
pub fn decompress(bytes: &[u8], limit: usize) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    let decoder = zstd::stream::read::Decoder::new(bytes).context("decompress")?;
    decoder.take(limit as u64 + 1).read_to_end(&mut out).context("decompress")?;
    if out.len() > limit {
        bail!("it has more than {limit} bytes");
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Sample {
        version: u32,
        text: String,
    }

    fn sample(version: u32) -> Sample {
        Sample { version, text: "a \"b\"".to_owned() }
    }

    #[test]
    fn any_changed_byte_of_a_document_is_found() {
        let document = write("sample", &sample(VERSION)).unwrap();
        assert_eq!(read::<Sample>("sample", "p", &document).unwrap(), sample(VERSION));
        for at in 0..document.len() {
            for flip in [1, 0x20, 0x80] {
                let mut changed = document.clone();
                changed[at] ^= flip;
                assert!(read::<Sample>("sample", "p", &changed).is_err(), "{at}");
            }
        }
        assert!(read::<Sample>("sample", "p", &document[..document.len() - 1]).is_err());
        assert!(read::<Sample>("other", "p", &document).is_err());
        assert!(read::<Sample>("sample", "p", b"").is_err());
    }

    #[test]
    fn another_version_is_refused_by_number() {
        let document = write("sample", &sample(3)).unwrap();
        let error = read::<Sample>("sample", "p", &document).unwrap_err().to_string();
        assert!(error.contains("format version 3"), "{error}");
    }

    #[test]
    fn a_hash_reads_only_64_lowercase_digits() {
        let hash = Hash::of(b"x");
        assert_eq!(Hash::try_from(hash.to_string()).unwrap(), hash);
        for wrong in
            [String::new(), "g".repeat(64), "é".repeat(32), hash.to_string().to_uppercase()]
        {
            assert!(Hash::try_from(wrong).is_err());
        }
    }

    #[test]
    fn decompression_stops_at_its_limit() {
        let small = compress(&vec![0; 1 << 20]).unwrap();
        assert_eq!(decompress(&small, 1 << 20).unwrap().len(), 1 << 20);
        assert!(decompress(&small, (1 << 20) - 1).is_err());
    }
}
