//! Ids of volumes, snapshots and groups: `<prefix>-<slug>-<pool><nonce>`. The readable slug shows the
//! name. The pool's digits tell the pools of many nodes apart. The nonce makes an id unique forever,
//! so a reused name does not inherit old change records. The backend makes ids; commands and the
//! sidecar recognize them.

use sha2::{Digest, Sha256};

/// Hexadecimal digits of a pool (24 random bits), and of a nonce (40 random bits).
pub const POOL_DIGITS: usize = 6;
pub const NONCE_DIGITS: usize = 10;

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
    parts(id).map(|(slug, _)| slug)
}

/// The digits of the pool in an id. `None` if this driver did not generate the id.
pub fn pool_of(id: &str) -> Option<&str> {
    parts(id).and_then(|(_, digits)| digits.get(..POOL_DIGITS))
}

/// The slug, and the digits of pool and nonce.
fn parts(id: &str) -> Option<(&str, &str)> {
    let (head, digits) = id.rsplit_once('-')?;
    let (prefix, slug) = head.split_once('-')?;
    let hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let known = [VOLUME_PREFIX, SNAPSHOT_PREFIX, GROUP_PREFIX, INLINE_PREFIX].contains(&prefix);
    let whole = digits.len() == POOL_DIGITS + NONCE_DIGITS && digits.bytes().all(hex);
    (known && whole && !slug.is_empty()).then_some((slug, digits))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_ids_have_no_name() {
        for id in
            ["", "vol", "vol-", "vol--0123456789abcdef", "vol-a-0123", "disk-a-0123456789abcdef"]
        {
            assert_eq!((name_of(id), pool_of(id)), (None, None), "{id}");
        }
    }
}
