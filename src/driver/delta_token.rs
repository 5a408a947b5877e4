//! The page token of ListSnapshotDeltas (KEP-3314): the compared snapshots, the next block, and the
//! block size. The driver keeps no other state of a list, so a token survives a restart. It grants
//! no access and is not a secret; the checksum detects accidental changes.
//!
//! It fits the 128 bytes that CSI allows for a string, whatever the length of the ids, because it
//! contains a digest of them.
//!
//! | bytes | content |
//! |---|---|
//! | 1 | version, 1 |
//! | 1 | binary logarithm of the block size in bytes |
//! | 8 | number of the next block, big-endian |
//! | 16 | prefix of the SHA-256 of base and target, each preceded by its length |
//! | 8 | prefix of the SHA-256 of all preceding bytes |
//!
//! The encoding is base64url without padding.

use std::fmt;
use std::str::FromStr;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use sha2::{Digest, Sha256};

const VERSION: u8 = 1;
/// Bytes of the digest of the snapshot pair.
const PAIR: usize = 16;
/// Bytes covered by the checksum.
const CHECKED: usize = 2 + 8 + PAIR;
const TOKEN_BYTES: usize = CHECKED + 8;
/// Characters of a token.
const LENGTH: usize = (TOKEN_BYTES * 8).div_ceil(6);
// CSI "Size limits".
const _: () = assert!(LENGTH <= 128);
/// Valid binary logarithms of a block size: at least 4 KiB, within an int64.
const BLOCK_SIZES: std::ops::RangeInclusive<u8> = 12..=62;

/// A position in the list of blocks that differ between two snapshots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaToken {
    pair: [u8; PAIR],
    next_block: u64,
    /// Binary logarithm.
    block_size: u8,
}

impl DeltaToken {
    /// `base` is empty if there is no base. The block size is in bytes, a power of two of at least
    /// 4096.
    pub fn new(base: &str, target: &str, next_block: u64, block_size: u64) -> Self {
        let block_size = block_size.trailing_zeros() as u8;
        debug_assert!(BLOCK_SIZES.contains(&block_size));
        Self { pair: pair(base, target), next_block, block_size }
    }

    pub fn is_of(&self, base: &str, target: &str) -> bool {
        self.pair == pair(base, target)
    }

    /// Number of the first block of the page.
    pub fn next_block(&self) -> u64 {
        self.next_block
    }

    /// In bytes.
    pub fn block_size(&self) -> u64 {
        1 << self.block_size
    }
}

fn pair(base: &str, target: &str) -> [u8; PAIR] {
    let mut digest = Sha256::new();
    for id in [base, target] {
        digest.update((id.len() as u64).to_be_bytes());
        digest.update(id);
    }
    first(digest)
}

fn check(bytes: &[u8]) -> [u8; TOKEN_BYTES - CHECKED] {
    first(Sha256::new().chain_update(bytes))
}

fn first<const N: usize>(digest: Sha256) -> [u8; N] {
    let digest = digest.finalize();
    std::array::from_fn(|at| digest[at])
}

impl fmt::Display for DeltaToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut bytes = vec![VERSION, self.block_size];
        bytes.extend(self.next_block.to_be_bytes());
        bytes.extend(self.pair);
        bytes.extend(check(&bytes));
        f.write_str(&URL_SAFE_NO_PAD.encode(bytes))
    }
}

impl FromStr for DeltaToken {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const MALFORMED: &str = "is not a token of ListSnapshotDeltas";
        const CORRUPT: &str = "is not the token that was returned: it was changed";
        // Checked first: a client may send any length.
        if text.len() != LENGTH {
            return Err(MALFORMED);
        }
        let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|_| MALFORMED)?;
        let (checked, sum) = bytes.split_at_checked(CHECKED).ok_or(MALFORMED)?;
        if sum != check(checked) {
            return Err(CORRUPT);
        }
        let ([VERSION, block_size], rest) = checked.split_first_chunk().ok_or(MALFORMED)? else {
            return Err("is from another version of the driver");
        };
        if !BLOCK_SIZES.contains(block_size) {
            return Err(CORRUPT);
        }
        let (next_block, pair) = rest.split_first_chunk().ok_or(MALFORMED)?;
        Ok(Self {
            pair: pair.try_into().map_err(|_| MALFORMED)?,
            next_block: u64::from_be_bytes(*next_block),
            block_size: *block_size,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Any ids that a request can contain.
    fn ids() -> impl Strategy<Value = String> {
        "\\PC{0,128}"
    }

    fn tokens() -> impl Strategy<Value = (String, String, DeltaToken)> {
        (ids(), ids(), any::<u64>(), 12..=62u32).prop_map(|(base, target, next, bits)| {
            let token = DeltaToken::new(&base, &target, next, 1 << bits);
            (base, target, token)
        })
    }

    /// Bytes with a valid checksum.
    fn sealed(bytes: &[u8]) -> String {
        URL_SAFE_NO_PAD.encode([bytes, &check(bytes)].concat())
    }

    proptest! {
        #[test]
        fn a_token_round_trips_and_has_a_fixed_length(
            (base, target, token) in tokens(), next in any::<u64>(), bits in 12..=62u32,
        ) {
            let text = token.to_string();
            prop_assert_eq!(text.len(), LENGTH);
            prop_assert_eq!(text.parse(), Ok(token));
            prop_assert!(token.is_of(&base, &target));
            let whole = DeltaToken::new(&base, &target, next, 1 << bits);
            let read: DeltaToken = whole.to_string().parse().unwrap();
            prop_assert_eq!((read.next_block(), read.block_size()), (next, 1 << bits));
        }

        #[test]
        fn a_token_is_valid_for_one_pair_only(
            (base, target, token) in tokens(), other in ids(), split in any::<prop::sample::Index>(),
        ) {
            prop_assert_eq!(token.is_of(&target, &base), base == target);
            prop_assert_eq!(token.is_of(&other, &target), other == base);
            prop_assert_eq!(token.is_of(&base, &other), other == target);
            // The same characters, split elsewhere.
            let both: Vec<char> = format!("{base}{target}").chars().collect();
            let at = split.index(both.len() + 1);
            let (one, two): (String, String) =
                (both[..at].iter().collect(), both[at..].iter().collect());
            prop_assert_eq!(token.is_of(&one, &two), one == base);
        }

        #[test]
        fn an_altered_token_is_refused(
            (_, _, token) in tokens(), at in any::<prop::sample::Index>(), other in "[A-Za-z0-9_=+/é-]",
        ) {
            let text = token.to_string();
            let at = at.index(LENGTH);
            let changed = format!("{}{other}{}", &text[..at], &text[at + 1..]);
            prop_assert_eq!(changed.parse::<DeltaToken>().is_ok(), changed == text);
            prop_assert!(text[..at].parse::<DeltaToken>().is_err());
            let longer = format!("{text}{other}");
            prop_assert!(longer.parse::<DeltaToken>().is_err());
        }

        #[test]
        fn no_input_panics(text in "\\PC*", bytes in prop::collection::vec(any::<u8>(), CHECKED)) {
            let _ = text.parse::<DeltaToken>();
            if let Ok(token) = sealed(&bytes).parse::<DeltaToken>() {
                prop_assert_eq!(token.to_string(), sealed(&bytes));
            }
        }
    }

    #[test]
    fn a_token_with_another_version_or_block_size_is_refused() {
        let token = |version: u8, size: u8| {
            let mut bytes = [7; CHECKED];
            (bytes[0], bytes[1]) = (version, size);
            sealed(&bytes).parse::<DeltaToken>()
        };
        assert_eq!(token(1, 12).unwrap().block_size(), 4096);
        assert!(token(2, 12).unwrap_err().contains("version"));
        assert!([0, 11, 63, 255].iter().all(|size| token(1, *size).is_err()));
    }
}
