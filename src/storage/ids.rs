//! Makes the ids of [`common::ids`].

use super::error::{Error, Result};
pub use common::ids::*;

/// A new id for `name`.
pub fn new_id(prefix: &str, name: &str) -> Result<String> {
    let mut nonce = [0u8; NONCE_DIGITS / 2];
    getrandom::fill(&mut nonce)
        .map_err(|e| Error::Failed(format!("failed to get random bytes for a new id: {e}")))?;
    Ok(format!("{prefix}-{}-{:016x}", slug(name), u64::from_be_bytes(nonce)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_safe_name_is_readable_in_its_id() {
        let id = new_id(SNAPSHOT_PREFIX, "before-upgrade.1").unwrap();
        assert!(id.starts_with("snap-before-upgrade.1-"));
        assert_eq!(name_of(&id), Some("before-upgrade.1"));
    }

    #[test]
    fn an_unsafe_name_never_becomes_part_of_a_path() {
        for name in ["../../etc/passwd", "a/b", "", "name with spaces", &"n".repeat(128), "ä"] {
            let id = new_id(VOLUME_PREFIX, name).unwrap();
            assert!(id.len() < 64 && !id.contains('/') && !id.contains(".."), "{id}");
            assert_eq!(name_of(&id), Some(slug(name).as_str()));
        }
    }

    #[test]
    fn a_name_used_again_gets_another_id() {
        assert_ne!(new_id(VOLUME_PREFIX, "a").unwrap(), new_id(VOLUME_PREFIX, "a").unwrap());
    }
}
