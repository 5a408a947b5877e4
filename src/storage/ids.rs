//! Makes the ids of [`common::ids`].

use super::error::{Error, Result};
pub use common::ids::*;

/// A new id for `name` in the pool with these digits.
pub fn new_id(pool: &str, prefix: &str, name: &str) -> Result<String> {
    Ok(format!("{prefix}-{}-{pool}{}", slug(name), random_digits::<{ NONCE_DIGITS / 2 }>()?))
}

/// The digits of a new pool.
pub fn new_pool() -> Result<String> {
    random_digits::<{ POOL_DIGITS / 2 }>()
}

fn random_digits<const BYTES: usize>() -> Result<String> {
    let mut random = [0u8; BYTES];
    getrandom::fill(&mut random)
        .map_err(|e| Error::Failed(format!("failed to get random bytes for a new id: {e}")))?;
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_safe_name_is_readable_in_its_id() {
        let id = new_id("0a1b2c", SNAPSHOT_PREFIX, "before-upgrade.1").unwrap();
        assert!(id.starts_with("snap-before-upgrade.1-0a1b2c"));
        assert_eq!((name_of(&id), pool_of(&id)), (Some("before-upgrade.1"), Some("0a1b2c")));
    }

    #[test]
    fn an_unsafe_name_never_becomes_part_of_a_path() {
        for name in ["../../etc/passwd", "a/b", "", "name with spaces", &"n".repeat(128), "ä"] {
            let id = new_id(&new_pool().unwrap(), VOLUME_PREFIX, name).unwrap();
            assert!(id.len() < 64 && !id.contains('/') && !id.contains(".."), "{id}");
            assert_eq!(name_of(&id), Some(slug(name).as_str()));
        }
    }

    #[test]
    fn a_name_used_again_gets_another_id() {
        let id = || new_id("0a1b2c", VOLUME_PREFIX, "a").unwrap();
        assert_ne!(id(), id());
    }
}
