//! Session tokens. A token is the name of a SnapshotSessionData, and whoever knows it has the session.

use anyhow::Context;

/// What names of objects may have, and no character twice as likely as another: 32 of them, five bits each.
const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
/// Characters: 260 bits.
const LENGTH: usize = 52;

/// A new token, from the system's generator.
///
/// # Errors
/// The system has no random numbers.
pub fn new() -> anyhow::Result<String> {
    let mut random = [0; LENGTH];
    getrandom::fill(&mut random).context("making a session token")?;
    Ok(random.iter().map(|byte| char::from(ALPHABET[usize::from(byte & 31)])).collect())
}

/// Whether it has the form of a token that [`new`] has made.
pub fn is_one(text: &str) -> bool {
    text.len() == LENGTH && text.bytes().all(|byte| ALPHABET.contains(&byte))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::kubernetes::name;

    #[test]
    fn a_token_is_an_objects_name_of_at_least_256_bits_and_never_the_same() {
        let tokens: HashSet<String> = (0..1000).map(|_| new().unwrap()).collect();
        assert_eq!(tokens.len(), 1000);
        assert!(tokens.iter().all(|token| is_one(token) && name::is_object(token)));
        const { assert!(LENGTH * 5 >= 256) };
        let used: HashSet<char> = tokens.iter().flat_map(|token| token.chars()).collect();
        assert_eq!(used.len(), 32, "every character occurs");
        for other in ["", "a", &"a".repeat(51), &"A".repeat(52), &"1".repeat(52)] {
            assert!(!is_one(other), "{other}");
        }
    }
}
