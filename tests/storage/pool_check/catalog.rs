//! A damaged catalog.

use std::collections::BTreeSet;
use std::fs;
use std::panic::catch_unwind;

use csi_loopback::backend::check;
use csi_loopback::backend::{Error, PoolKind};

use super::damage::{History, checked, findings};
use support::kernel::{damage_below_page_cache, drop_page_cache};
use support::*;

/// redb itself does not detect a changed row after a clean shutdown.
#[test]
fn a_damaged_catalog_is_not_served() {
    with_pool(PoolKind::Copy, |pool| {
        let volume = pool.volume("v", MIB);
        pool.stop();
        let catalog = pool.data_dir().join("catalog.redb");
        let whole = fs::read(&catalog).unwrap();
        let row = format!("\"id\":\"{}\"", volume.id);
        let rows = whole.windows(row.len()).enumerate();
        let found = rows.filter(|(_, bytes)| *bytes == row.as_bytes()).map(|(at, _)| at);
        let mut damaged = whole.clone();
        found.for_each(|at| damaged[at + 8] ^= 1);
        assert_ne!(damaged, whole);
        fs::write(&catalog, &damaged).unwrap();
        let refused = pool.try_start().unwrap_err();
        assert!(matches!(refused, Error::Damaged(_)), "{refused}");
        assert_eq!(fs::read(&catalog).unwrap(), damaged, "the damaged file is kept");
        fs::write(&catalog, &whole).unwrap();
        pool.start();
        assert_eq!(pool.backend().volume(&volume.id).unwrap(), volume);
    });
}

/// A failed write can leave pages in the cache that never reached the disk.
#[test]
fn a_catalog_intact_only_in_the_page_cache_is_rewritten() {
    with_pool(PoolKind::Reflink, |pool| {
        let volume = pool.volume("v", MIB);
        let snapshot = pool.snapshot("s", &volume);
        pool.stop();
        let catalog = pool.data_dir().join("catalog.redb");
        damage_below_page_cache(&catalog, &pool.scratch().join("xfs.img"));
        assert!(matches!(check::check(pool.data_dir()), Err(Error::Damaged(_))));
        pool.start();
        assert_eq!(pool.backend().snapshot(&snapshot.id).unwrap(), snapshot);
        assert!(pool.data_dir().join("catalog.damaged").exists());
        pool.stop();
        drop_page_cache();
        pool.start();
        assert_eq!(pool.backend().snapshot(&snapshot.id).unwrap(), snapshot);
        let next = pool.snapshot("next", &volume);
        assert!(blocks(pool.backend().delta(&snapshot.id, &next.id).unwrap()).is_empty());
    });
}

#[test]
fn a_damaged_catalog_is_reported_without_a_panic() {
    with_pool(PoolKind::Copy, |pool| {
        let histories: Vec<_> =
            (0..4).map(|number| History::of(pool, &format!("v{number}"))).collect();
        pool.stop();
        let catalog = pool.data_dir().join("catalog.redb");
        let whole = fs::read(&catalog).unwrap();
        let clean = checked(pool);
        assert_eq!(clean.volumes, histories.len() as u64);
        let is_reported = |bytes: &[u8], what: &str| -> bool {
            fs::write(&catalog, bytes).unwrap();
            let data_dir = pool.data_dir().to_owned();
            match catch_unwind(move || check::check(&data_dir)) {
                Err(_) => panic!("{what}: the check panicked"),
                Ok(Err(Error::Damaged(message))) => {
                    assert!(message.contains("catalog"), "{what}: {message}");
                    true
                }
                Ok(Err(other)) => panic!("{what}: {other}"),
                // Unused bytes: the catalog is unchanged.
                Ok(Ok(report)) => {
                    assert_eq!(report.findings, clean.findings, "{what}");
                    assert_eq!(report.volumes, clean.volumes, "{what}");
                    assert_eq!(report.snapshots, clean.snapshots, "{what}");
                    false
                }
            }
        };
        let seed = std::time::SystemTime::now();
        let seed = seed.duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64;
        println!("report: flips in the catalog with seed {seed}");
        let used: Vec<usize> = (0..whole.len()).filter(|at| whole[*at] != 0).collect();
        let numbers = pattern(seed, 8 * 400);
        let mut found = 0;
        for (number, random) in numbers.chunks(8).enumerate() {
            let random = u64::from_le_bytes(random.try_into().unwrap());
            // The header, the text of the rows, and everywhere else.
            let at = if number < 100 { number * 3 } else { used[random as usize % used.len()] };
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << (random >> 61);
            found += u32::from(is_reported(&bytes, &format!("seed {seed}: byte {at}")));
        }
        assert!(found > 50, "{found}");
        // Every bit of a row is covered.
        let name = histories[0].snapshots[0].id.as_bytes();
        let rows = whole.windows(name.len()).enumerate().filter(|(_, bytes)| *bytes == name);
        let flips = rows.map(|(at, _)| {
            let mut bytes = whole.clone();
            bytes[at + 6] ^= 1;
            is_reported(&bytes, &format!("id at {at}"))
        });
        assert!(flips.filter(|is_reported| *is_reported).count() > 0);
        for length in [0, 1, 100, 4096, whole.len() / 2, whole.len() - 1] {
            assert!(is_reported(&whole[..length], &format!("truncated at {length}")));
        }
        fs::remove_file(&catalog).unwrap();
        assert!(matches!(check::check(pool.data_dir()), Err(Error::Damaged(_))));
        assert!(!catalog.exists());
        fs::write(&catalog, &whole).unwrap();
        assert_eq!(findings(&checked(pool)), BTreeSet::new());
    });
}
