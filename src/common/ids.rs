//! Ids of volumes, snapshots and groups: `<prefix>-<slug>-<nonce>`. The readable slug shows the
//! name. The nonce makes an id unique forever, so a reused name does not inherit old change
//! records. The backend makes ids; commands and the sidecar recognize them.

use sha2::{Digest, Sha256};

/// Hexadecimal digits in a nonce (64 random bits).
pub const NONCE_DIGITS: usize = 16;

/// Maximum length of a name that is used as a slug unchanged, in bytes.
const SLUG_BYTES: usize = 64;

pub const VOLUME_PREFIX: &str = "vol";
pub const SNAPSHOT_PREFIX: &str = "snap";
pub const GROUP_PREFIX: &str = "group";
pub const INLINE_PREFIX: &str = "inline";

/// The slug for `name`: the name itself if it is short and safe in a file name, else `x` and 32
/// hexadecimal digits of its SHA-256.
pub fn slug(name: &str) -> String {
    let safe = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    if !name.is_empty() && name.len() <= SLUG_BYTES && name.bytes().all(safe) {
        return name.to_owned();
    }
    let digest = Sha256::digest(name.as_bytes());
    let mut slug = String::from("x");
    digest[..16].iter().for_each(|byte| slug.push_str(&format!("{byte:02x}")));
    slug
}

/// The slug in an id. `None` if this driver did not generate the id.
pub fn name_of(id: &str) -> Option<&str> {
    let (head, nonce) = id.rsplit_once('-')?;
    let (prefix, slug) = head.split_once('-')?;
    let hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let known = [VOLUME_PREFIX, SNAPSHOT_PREFIX, GROUP_PREFIX, INLINE_PREFIX].contains(&prefix);
    let whole = nonce.len() == NONCE_DIGITS && nonce.bytes().all(hex);
    (known && whole && !slug.is_empty()).then_some(slug)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_ids_have_no_name() {
        for id in
            ["", "vol", "vol-", "vol--0123456789abcdef", "vol-a-0123", "disk-a-0123456789abcdef"]
        {
            assert_eq!(name_of(id), None, "{id}");
        }
    }
}
