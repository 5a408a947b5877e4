//! Rows of snapshots, their indexes, and the files to remove; catalogs of other format versions.

use std::collections::BTreeMap;

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use proptest::prelude::*;

use super::super::snapshots::SnapshotFile;
use super::super::verify::{MAX_COPIED_BYTES, verify};
use super::*;
use crate::model::{Predecessor, Retention, Snapshot, SnapshotPhase};
use crate::sys;

fn snapshot(id: &str, volume: u64, sequence: u64, phase: SnapshotPhase) -> Snapshot {
    Snapshot {
        id: id.to_owned(),
        name: id.to_owned(),
        volume_id: format!("vol-{volume}"),
        phase,
        capacity_bytes: 1 << 20,
        created_at: (1, 0),
        sequence,
        group_id: None,
        predecessor: Predecessor::None(ChainBreak::First),
        record_generation: 0,
        has_data: phase == SnapshotPhase::Ready,
        sector_size: Default::default(),
        format: None,
        crash_consistent: false,
        baseline_until: None,
        retention: None,
    }
}

/// The expected rows by id, and the expected unreferenced files.
#[derive(Default)]
struct Model {
    rows: BTreeMap<String, Snapshot>,
    removals: Vec<SnapshotFile>,
}

impl Model {
    fn files(row: &Snapshot) -> Vec<SnapshotFile> {
        let mut files = Vec::new();
        if row.has_data {
            files.push(SnapshotFile::data(row));
        }
        if !row.is_forgotten() {
            files.push(SnapshotFile::record(row));
        }
        files
    }

    fn put(&mut self, row: &Snapshot) {
        let previous = self.rows.insert(row.id.clone(), row.clone());
        self.removals.extend(previous.iter().flat_map(Self::files));
        let files = Self::files(row);
        self.removals.retain(|file| !files.contains(file));
    }

    fn remove(&mut self, id: &str) {
        let Some(row) = self.rows.remove(id) else { return };
        let files = [SnapshotFile::data(&row), SnapshotFile::record(&row)];
        self.removals.retain(|file| !files.contains(file));
    }

    fn check(&self, catalog: &Catalog) {
        let reading = catalog.read().unwrap();
        let exists =
            |row: &&Snapshot| matches!(row.phase, SnapshotPhase::Ready | SnapshotPhase::Taking);
        let existing: Vec<_> = self.rows.values().filter(exists).cloned().collect();
        assert_eq!(reading.select(|_: &Snapshot| true).unwrap(), existing);
        let mut every = BTreeMap::new();
        reading
            .for_each_snapshot(|row| {
                assert!(every.insert(row.id.clone(), row).is_none());
                Ok(())
            })
            .unwrap();
        assert_eq!(every, self.rows);
        for (id, row) in &self.rows {
            assert_eq!(reading.get::<Snapshot>(id).unwrap().as_ref(), Some(row));
        }
        let mut volumes: Vec<_> = self.rows.values().map(|row| row.volume_id.clone()).collect();
        volumes.sort();
        volumes.dedup();
        assert_eq!(reading.volumes_with_snapshots().unwrap(), volumes);
        for volume in volumes {
            let mut of: Vec<_> =
                self.rows.values().filter(|row| row.volume_id == volume).cloned().collect();
            of.sort_by_key(|row| (row.sequence, row.id.clone()));
            assert_eq!(reading.snapshots_of(&volume).unwrap(), of);
            let found = reading.find_snapshot_of(&volume, 3, |row| row.has_data).unwrap();
            assert_eq!(found.as_ref(), of.iter().find(|row| row.sequence >= 3 && row.has_data));
            let mut newest_first = Vec::new();
            reading
                .visit_newest_first(&volume, 5, |row| {
                    newest_first.push(row);
                    true
                })
                .unwrap();
            newest_first.reverse();
            assert_eq!(
                newest_first,
                of.iter().filter(|row| row.sequence < 5).cloned().collect::<Vec<_>>()
            );
            of.retain(|row| exists(&row));
            assert_eq!(reading.existing_snapshots_of(&volume).unwrap(), of);
        }
        // Rows with the default retention by its start, the others by its end.
        let ids = |time: u64, of: fn(&Snapshot) -> Option<u64>| -> Vec<String> {
            let mut rows: Vec<_> =
                self.rows.values().filter(|row| of(row).is_some_and(|at| at < time)).collect();
            rows.sort_by_key(|row| (of(row), row.id.clone()));
            rows.into_iter().map(|row| row.id.clone()).collect()
        };
        let since = |row: &Snapshot| row.retained_since().filter(|_| row.own_expiry().is_none());
        for time in 0..16 {
            assert_eq!(reading.retained_before(time).unwrap(), ids(time, since));
            assert_eq!(reading.expired_before(time).unwrap(), ids(time, Snapshot::own_expiry));
        }
        let mut ends = Vec::new();
        reading
            .visit_by_expiry(|row| {
                Ok({
                    ends.push(row.id);
                    true
                })
            })
            .unwrap();
        let all = [ids(u64::MAX, Snapshot::own_expiry), ids(u64::MAX, since)].concat();
        assert_eq!(ends, all);
        assert_eq!(reading.retained_count().unwrap(), all.len() as u64);
        let mut found = reading.removals().unwrap();
        let mut expected = self.removals.clone();
        found.sort_by_key(|file| format!("{file:?}"));
        expected.sort_by_key(|file| format!("{file:?}"));
        assert_eq!(found, expected);
    }
}

fn any_row() -> impl Strategy<Value = Snapshot> {
    let phase = prop_oneof![
        Just(SnapshotPhase::Taking),
        Just(SnapshotPhase::Ready),
        (0..8u64).prop_map(|at| SnapshotPhase::Deleted { at }),
        (0..8u64).prop_map(|at| SnapshotPhase::Forgotten { at }),
    ];
    let until = proptest::option::of(0..8u64);
    let retention = proptest::option::of(prop_oneof![
        (0..8u64).prop_map(Retention::For),
        (0..8u64).prop_map(Retention::Until),
    ]);
    (0..6u64, phase, any::<bool>(), 0..2u64, until, retention).prop_map(
        |(n, phase, has_data, generation, until, retention)| {
            // Two snapshots of a volume can have the same sequence number: a failed snapshot that
            // is not undone yet, and the next one.
            let row = snapshot(&format!("snap-{n}"), n / 3, n % 3 / 2 + 3, phase);
            Snapshot {
                has_data,
                record_generation: generation,
                baseline_until: until,
                retention,
                ..row
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn tables_and_indexes_agree_after_any_changes(
        changes in prop::collection::vec(
            prop_oneof![4 => any_row().prop_map(Ok), 1 => (0..6u64).prop_map(Err)], 1..24),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let catalog = Catalog::open(&directory.path().join("catalog.redb"), Default::default()).unwrap();
        let mut model = Model::default();
        for change in changes {
            match change {
                Ok(row) => {
                    catalog.write(|tx| tx.put(&row)).unwrap();
                    model.put(&row);
                }
                Err(n) => {
                    let id = format!("snap-{n}");
                    catalog.write(|tx| tx.remove::<Snapshot>(&id)).unwrap();
                    model.remove(&id);
                }
            }
            model.check(&catalog);
        }
    }
}

#[test]
fn a_file_is_listed_until_a_change_after_its_removal() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("catalog.redb");
    let catalog = Catalog::open(&path, Default::default()).unwrap();
    let row = snapshot("snap-a", 1, 1, SnapshotPhase::Ready);
    catalog.write(|tx| tx.put(&row)).unwrap();
    let deleted =
        Snapshot { phase: SnapshotPhase::Deleted { at: 1 }, has_data: false, ..row.clone() };
    catalog.write(|tx| tx.put(&deleted)).unwrap();
    let data = SnapshotFile::data(&row);
    let listed = |catalog: &Catalog| catalog.read().unwrap().removals().unwrap();
    assert_eq!(listed(&catalog), std::slice::from_ref(&data));
    catalog.note_removal(data.clone());
    let failing: Result<()> = catalog.write(|_| Err(Error::Failed("no".into())));
    assert!(failing.is_err());
    assert_eq!(listed(&catalog), std::slice::from_ref(&data), "nothing was written");
    catalog.write(|_| Ok(())).unwrap();
    assert_eq!(listed(&catalog), []);
    // A recorded removal does not cancel a later one of the same file.
    catalog.note_removal(data.clone());
    catalog.write(|tx| tx.schedule_removal(&data)).unwrap();
    assert_eq!(listed(&catalog), [data]);
}

#[test]
fn a_catalog_of_another_version_is_refused_unchanged() {
    let directory = tempfile::tempdir().unwrap();
    for (found, reported) in [(Some("1"), "1"), (Some("3"), "3"), (Some(""), ""), (None, "none")] {
        let path = directory.path().join(format!("{reported}.redb"));
        let catalog = Catalog::open(&path, Default::default()).unwrap();
        catalog
            .write(|tx| {
                let mut meta = tx.inner.open_table(META).map_err(failed)?;
                match found {
                    Some(version) => meta.insert(VERSION, version).map(drop),
                    None => meta.remove(VERSION).map(drop),
                }
                .map_err(failed)
            })
            .unwrap();
        drop(catalog);
        let before = std::fs::read(&path).unwrap();
        for refused in [verify(&path), verify_or_repair(&path), read_verified(&path, |_| Ok(()))] {
            let refused = refused.unwrap_err().to_string();
            let message = format!(
                "the catalog has format version {reported}, but this version of csi-loopback supports only 2; use the \
                 version of csi-loopback that wrote it"
            );
            assert_eq!(refused, message);
        }
        assert_eq!(std::fs::read(&path).unwrap(), before, "version {reported}");
        assert!(Catalog::open(&path, Default::default()).is_err());
    }
}

/// A catalog larger than the limit for a copy in memory.
#[test]
#[ignore = "full tier"]
fn damage_in_a_large_catalog_is_found_without_a_copy_of_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("catalog.redb");
    let catalog = Catalog::open(&path, Default::default()).unwrap();
    for batch in 0..50 {
        catalog
            .write(|tx| {
                (0..2000).try_for_each(|n| {
                    let n = batch * 2000 + n;
                    let deleted = SnapshotPhase::Deleted { at: n };
                    tx.put(&snapshot(&format!("snap-{n:08}"), n % 100, n, deleted))
                })
            })
            .unwrap();
    }
    drop(catalog);
    let count = |rows: &ReadTx| {
        let mut count = 0;
        rows.for_each_snapshot(|_| {
            count += 1;
            Ok(())
        })?;
        Ok(count)
    };
    let cached = || sys::cached_pages(&std::fs::File::open(&path).unwrap()).unwrap();
    assert_eq!(cached(), 0, "the driver does not use the page cache");
    assert_eq!(read_verified(&path, count).unwrap(), 100_000);
    assert_eq!(cached(), 0, "what was read through it is dropped");
    let mut bytes = std::fs::read(&path).unwrap();
    assert!(bytes.len() as u64 > MAX_COPIED_BYTES, "{} bytes", bytes.len());
    // Also with pages in the cache.
    assert!(cached() > 0);
    assert_eq!(read_verified(&path, count).unwrap(), 100_000);
    assert_eq!(std::fs::read(&path).unwrap(), bytes, "nothing is written");
    let row = b"snap-00040000";
    let at = bytes.windows(row.len()).rposition(|window| window == row).unwrap();
    bytes[at] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    assert!(matches!(verify(&path), Err(Error::Damaged(_))));
    let file = std::fs::File::open(&path).unwrap();
    file.sync_all().unwrap();
    posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).unwrap();
    assert_eq!(cached(), 0);
    assert!(matches!(verify(&path), Err(Error::Damaged(_))));
}
