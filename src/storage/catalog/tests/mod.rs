mod damage;
pub mod snapshots;

use super::*;
use crate::fail_point::in_tests;
use crate::model::{ChainBreak, Phase, VolumeRequest};

pub fn volume(id: &str) -> Volume {
    Volume {
        id: id.to_owned(),
        name: id.to_owned(),
        capacity_bytes: 1 << 20,
        phase: Phase::Ready,
        change_tracking: true,
        change_precision: Default::default(),
        sector_size: Default::default(),
        format: None,
        source: None,
        request: VolumeRequest::default(),
        next_sequence: 1,
        newest_snapshot_at: None,
        baseline: None,
        chain_break: ChainBreak::First,
        lost_writes: None,
        growth_failure: None,
    }
}

fn ids(catalog: &Catalog) -> Vec<String> {
    let rows = catalog.read().unwrap().select(|_: &Volume| true).unwrap();
    rows.into_iter().map(|row| row.id).collect()
}

/// Makes every operation on the file fail until it is reopened.
fn fail(catalog: &Catalog) {
    catalog.store.read().unwrap().file.retire();
}

#[test]
fn after_an_io_error_the_catalog_has_the_committed_rows() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("catalog.redb");
    let catalog = Catalog::open(&path, Default::default()).unwrap();
    catalog.write(|tx| tx.put(&volume("a"))).unwrap();
    for round in 0..3 {
        let reading = catalog.read().unwrap();
        let failing = catalog.write(|tx| {
            tx.put(&volume("lost"))?;
            fail(&catalog);
            Ok(())
        });
        assert!(failing.is_err());
        assert!(!ids(&catalog).contains(&"lost".to_owned()));
        catalog.write(|tx| tx.put(&volume(&format!("b{round}")))).unwrap();
        assert_eq!(ids(&catalog).len(), round + 2);
        // An older reader sees its rows, or an error.
        if let Ok(rows) = reading.select(|_: &Volume| true) {
            assert_eq!(rows.len(), round + 1);
        }
        drop(reading);
        assert_eq!(ids(&catalog).len(), round + 2);
    }
    drop(catalog);
    read_verified(&path, |_| Ok(())).unwrap();
    assert_eq!(ids(&Catalog::open(&path, Default::default()).unwrap()), ["a", "b0", "b1", "b2"]);
}

#[test]
fn a_catalog_that_is_not_writable_can_be_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("catalog.redb");
    let catalog = Catalog::open(&path, Default::default()).unwrap();
    catalog.write(|tx| tx.put(&volume("a"))).unwrap();
    for round in 0..2 {
        fail(&catalog);
        in_tests::fail_after(Some(0));
        assert!(catalog.check_writable().is_err());
        assert_eq!(ids(&catalog)[0], "a", "round {round}");
        assert!(catalog.write(|tx| tx.put(&volume("lost"))).is_err());
        assert_eq!(ids(&catalog).len(), 1 + round);
        in_tests::fail_after(None);
        // A read does not end the read-only state.
        assert!(!ids(&catalog).contains(&"lost".to_owned()));
        catalog.check_writable().unwrap();
        catalog.write(|tx| tx.put(&volume(&format!("b{round}")))).unwrap();
        assert_eq!(ids(&catalog).len(), 2 + round);
    }
    drop(catalog);
    read_verified(&path, |_| Ok(())).unwrap();
    assert_eq!(ids(&Catalog::open(&path, Default::default()).unwrap()), ["a", "b0", "b1"]);
}

/// As without free descriptors: then the open file is all that the catalog has.
#[test]
fn a_catalog_that_cannot_be_opened_is_verified_and_read() {
    let directory = tempfile::tempdir().unwrap();
    let [path, aside] = ["catalog.redb", "aside"].map(|name| directory.path().join(name));
    let catalog = Catalog::open(&path, Default::default()).unwrap();
    catalog.write(|tx| tx.put(&volume("a"))).unwrap();
    fs::rename(&path, &aside).unwrap();
    fs::create_dir(&path).unwrap();
    fail(&catalog);
    assert!(catalog.check_writable().is_err());
    assert_eq!(ids(&catalog), ["a"]);

    let intact = fs::read(&aside).unwrap();
    let mut damaged = intact.clone();
    damaged[PAGE_BYTES as usize..].iter_mut().for_each(|byte| *byte ^= 1);
    fs::write(&aside, damaged).unwrap();
    fail(&catalog);
    let read = catalog.read().map(drop);
    assert!(matches!(read, Err(Error::Damaged(_))), "{read:?}");

    fs::write(&aside, intact).unwrap();
    fs::remove_dir(&path).unwrap();
    fs::rename(&aside, &path).unwrap();
    catalog.write(|tx| tx.put(&volume("b"))).unwrap();
    assert_eq!(ids(&catalog), ["a", "b"]);
}

/// The tables are created before the catalog gets its name.
#[test]
fn a_catalog_without_tables_is_damaged_and_not_new() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("catalog.redb");
    drop(Database::create(&path).unwrap());
    let read = read_verified(&path, |rows| rows.select(|_: &Volume| true));
    assert!(matches!(read, Err(Error::Damaged(_))), "{read:?}");
    assert!(matches!(Catalog::open(&path, Default::default()), Err(Error::Damaged(_))));
}
