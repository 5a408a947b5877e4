//! A damaged catalog is refused, or has exactly the committed rows. It never becomes an empty one.
//!
//!     CATALOG_DAMAGE=full  every bit of the header and every byte of the pages

use std::path::PathBuf;

use super::*;

/// The part of the first page with the header and both commit slots of redb.
const HEADER: usize = 320;
/// The byte with the flags of the header: the primary slot, recovery, two-phase commit.
const FLAGS: usize = 9;

/// A catalog as a file holds it.
struct State {
    name: &'static str,
    bytes: Vec<u8>,
    rows: Vec<String>,
}

/// A catalog after an orderly stop, and after a kill. The last transaction changes few pages.
fn states(directory: &Path) -> [State; 2] {
    let path = directory.join("catalog.redb");
    let catalog = Catalog::open(&path, Default::default()).unwrap();
    for id in ["a", "b", "c"] {
        catalog.write(|tx| tx.put(&volume(id))).unwrap();
    }
    let rows = ids(&catalog);
    let killed = fs::read(&path).unwrap();
    drop(catalog);
    let stopped = fs::read(&path).unwrap();
    [("stopped", stopped), ("killed", killed)].map(|(name, bytes)| State {
        name,
        bytes,
        rows: rows.clone(),
    })
}

fn read(path: &Path, bytes: &[u8]) -> Result<Vec<String>> {
    fs::write(path, bytes).unwrap();
    let rows = read_verified(path, |tx| tx.select(|_: &Volume| true))?;
    Ok(rows.into_iter().map(|row| row.id).collect())
}

/// Where bits are flipped, and which ones. Not the bit that selects the slot: no checksum covers it,
/// and after a kill both values are possible, before and after the second phase of a commit.
fn flips(length: usize) -> Vec<(usize, u8)> {
    let is_full = std::env::var("CATALOG_DAMAGE").is_ok_and(|value| value == "full");
    let mut flips = Vec::new();
    for at in 0..length {
        let masks: &[u8] = match at {
            FLAGS => &[2, 4, 8, 16, 32, 64, 128],
            _ if is_full && at < HEADER => &[1, 2, 4, 8, 16, 32, 64, 128],
            0..HEADER => &[0x10],
            _ if is_full || at % 53 == 0 => &[0x04],
            _ => &[],
        };
        flips.extend(masks.iter().map(|mask| (at, *mask)));
    }
    flips
}

#[test]
fn a_damaged_catalog_is_refused_and_never_empty() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("damaged.redb");
    for state in states(directory.path()) {
        let refused = std::cell::Cell::new(0);
        let try_bytes = |bytes: &[u8], what: &dyn fmt::Debug| match read(&path, bytes) {
            Ok(rows) => assert_eq!(rows, state.rows, "{}: {what:?}", state.name),
            Err(Error::Damaged(message)) => {
                assert!(message.contains("Recovery"), "{message}");
                refused.set(refused.get() + 1);
            }
            Err(error) => panic!("{}: {what:?}: {error}", state.name),
        };
        try_bytes(&state.bytes, &"intact");
        assert_eq!(refused.get(), 0);
        let mut bytes = state.bytes.clone();
        for (at, mask) in flips(bytes.len()) {
            bytes[at] ^= mask;
            try_bytes(&bytes, &(at, mask));
            bytes[at] ^= mask;
        }
        let page = PAGE_BYTES as usize;
        for start in (0..bytes.len()).step_by(page) {
            let mut zeroed = bytes.clone();
            zeroed[start..start + page].fill(0);
            try_bytes(&zeroed, &("zeroed", start));
            try_bytes(&bytes[..start], &("truncated", start));
            try_bytes(&bytes[..start + page / 2], &("truncated", start + page / 2));
        }
        try_bytes(&vec![0; bytes.len()], &"zeros");
        println!("{}: {} of a file of {} bytes refused", state.name, refused.get(), bytes.len());
        assert!(refused.get() > 100, "{} refused", refused.get());
    }
}

/// What a start does, in its order.
fn start(path: &Path) -> Result<Vec<String>> {
    verify_or_repair(path)?;
    Ok(ids(&Catalog::open(path, Default::default())?))
}

#[test]
fn a_lost_commit_is_refused_after_a_kill() {
    let directory = tempfile::tempdir().unwrap();
    let [_, killed] = states(directory.path());
    let path: PathBuf = directory.path().join("killed.redb");
    fs::write(&path, &killed.bytes).unwrap();
    assert_eq!(start(&path).unwrap(), killed.rows);
    // Each commit slot has 128 bytes. The one of the last commit cannot be replaced by the other.
    let outcomes = [64, 192].map(|slot| {
        let mut bytes = killed.bytes.clone();
        bytes[slot + 8] ^= 1;
        fs::write(&path, bytes).unwrap();
        start(&path)
    });
    let refused = outcomes.iter().filter(|outcome| matches!(outcome, Err(Error::Damaged(_))));
    assert_eq!(refused.count(), 1, "{outcomes:?}");
    let rows = outcomes.into_iter().find_map(Result::ok).unwrap();
    assert_eq!(rows, killed.rows);
}
