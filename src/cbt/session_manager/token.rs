//! Session tokens. A token is the name of a SnapshotSessionData, and gives its holder access to the
//! session.

use anyhow::Context;

/// 32 characters that are valid in object names, so that each has five random bits.
const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
/// Length in characters: 260 bits.
const LENGTH: usize = 52;

/// Creates a token from the system's random number generator.
///
/// # Errors
/// The system has no random numbers.
pub fn new() -> anyhow::Result<String> {
    let mut random = [0; LENGTH];
    getrandom::fill(&mut random).context("failed to create a session token")?;
    Ok(random.iter().map(|byte| char::from(ALPHABET[usize::from(byte & 31)])).collect())
}

/// Whether the text has the form of a token of [`new`].
pub fn is_valid(text: &str) -> bool {
    text.len() == LENGTH && text.bytes().all(|byte| ALPHABET.contains(&byte))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use kubernetes::name;

    #[test]
    fn tokens_are_unique_object_names_of_over_256_bits() {
        let tokens: HashSet<String> = (0..1000).map(|_| new().unwrap()).collect();
        assert_eq!(tokens.len(), 1000);
        assert!(tokens.iter().all(|token| is_valid(token) && name::is_object(token)));
        const { assert!(LENGTH * 5 >= 256) };
        let used: HashSet<char> = tokens.iter().flat_map(|token| token.chars()).collect();
        assert_eq!(used.len(), 32, "every character occurs");
        for other in ["", "a", &"a".repeat(51), &"A".repeat(52), &"1".repeat(52)] {
            assert!(!is_valid(other), "{other}");
        }
    }
}
