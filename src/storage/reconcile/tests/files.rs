//! Volumes, snapshots, groups and records whose creation or removal was interrupted.

use super::*;
use crate::catalog::SnapshotFile;
use common::fail_point::in_tests::fail_after;

#[test]
fn root_unneeded_data_is_removed_and_needed_data_is_kept() {
    for_each_pool(|pool| {
        let volume = pool.volume("v");
        pool.write(&volume, 0, 1);
        let a = pool.snapshot("a", &volume);
        pool.backend().delete_snapshot(&a.id).unwrap();
        pool.write(&volume, 1, 1);
        let b = pool.snapshot("b", &volume);
        // The process died after the commit: the old baseline still exists.
        let left = pool.store().pool.snapshot_path(&a.id);
        assert!(!left.exists());
        let row = pool.row(&a.id);
        pool.put(&Snapshot { has_data: true, ..row.clone() });
        pool.put(&row);
        let file = pool::new_file(&left).unwrap();
        file.set_len(a.capacity_bytes).unwrap();
        pool::set_immutable(&file, true).unwrap();
        // Deleted through the API, but the baseline: its data is kept.
        pool.backend().delete_snapshot(&b.id).unwrap();
        drop(file);
        pool.recover();
        assert!(!pool.store().pool.snapshot_path(&a.id).exists());
        assert!(pool.store().pool.snapshot_path(&b.id).exists());
        pool.write(&volume, 2, 1);
        let c = pool.snapshot("c", &volume);
        assert_eq!(pool.delta(&b, &c), [2]);
        assert_eq!(pool.delta(&a, &c), [1, 2]);
    });
}

#[test]
fn root_a_lost_baseline_breaks_the_chain() {
    for_each_pool(|pool| {
        let volume = pool.volume("v");
        let a = pool.snapshot("a", &volume);
        pool::remove(&pool.store().pool.snapshot_path(&a.id)).unwrap();
        pool.restart();
        pool.write(&volume, 1, 1);
        let b = pool.snapshot("b", &volume);
        assert_eq!(b.predecessor, Predecessor::None(ChainBreak::BaselineLost));
        let refused = pool.backend().delta(&a.id, &b.id).unwrap_err();
        assert!(matches!(refused, Error::Precondition(_)), "{refused}");
        let c = pool.snapshot("c", &volume);
        assert!(pool.delta(&b, &c).is_empty());
    });
}

#[test]
fn root_only_the_current_record_generation_is_kept() {
    for_each_pool(|pool| {
        let volume = pool.volume("v");
        let snapshots = [0, 1, 2].map(|number| {
            pool.write(&volume, number, 1);
            pool.snapshot(&format!("s{number}"), &volume)
        });
        let [a, b, c] = &snapshots;
        pool.backend().delete_snapshot(&b.id).unwrap();
        // A merge of b into c wrote its file but did not commit.
        let newer = SnapshotFile::Record { id: c.id.clone(), generation: 1 };
        pool.store().catalog.write(|tx| tx.schedule_removal(&newer)).unwrap();
        let newer = pool.store().pool.record_path(&c.id, 1);
        write_record(&newer, c, Some(&a.id), 3, &[1, 2]);
        pool.backend = None;
        let found = check::check(&pool.config.data_dir).unwrap().findings;
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].kind, check::FindingKind::Unfinished);
        pool.recover();
        assert!(!pool.store().pool.record_path(&c.id, 1).exists());
        assert_eq!(pool.delta(a, c), [1, 2]);
        assert_eq!(pool.delta(b, c), [2]);
        // The merge was committed but the old files were not removed.
        write_record(&pool.store().pool.record_path(&c.id, 1), c, Some(&a.id), 3, &[1, 2]);
        let predecessor = Predecessor::Snapshot(a.id.clone());
        pool.put(&Snapshot { predecessor, record_generation: 1, ..pool.row(&c.id) });
        pool.put(&Snapshot { phase: SnapshotPhase::Forgotten { at: now().0 }, ..pool.row(&b.id) });
        pool.recover();
        let store = pool.store();
        assert!(
            store.pool.record_path(&c.id, 1).exists() && !store.pool.record_path(&c.id, 0).exists()
        );
        assert!(!store.pool.record_path(&b.id, 0).exists());
        assert_eq!(pool.delta(a, c), [1, 2]);
        let refused = pool.backend().delta(&b.id, &c.id).unwrap_err();
        assert!(matches!(refused, Error::Precondition(_)), "{refused}");
    });
}

/// Failing steps of an expansion: after the file is extended, after the flush, and in the catalog.
#[test]
fn root_a_failed_expansion_never_shrinks_the_volume() {
    for_each_pool(|pool| {
        for steps in 0..3 {
            let volume = pool.volume(&format!("v{steps}"));
            let backend = pool.backend().clone();
            fail_after(Some(steps));
            let failed = backend.expand_volume(&volume.id, 8 * MIB, 0);
            fail_after(None);
            assert!(failed.is_err(), "{steps}: {failed:?}");
            assert_eq!(backend.volume(&volume.id).unwrap().capacity_bytes, 4 * MIB);
            // An attached device has the size of the file.
            let staged = pool.stage(&volume, &raw());
            let device = pool.device(&volume).unwrap();
            device.grow().unwrap();
            assert_eq!(device.size().unwrap(), 8 * MIB);
            let written = device.open(true).unwrap();
            written.write_all_at(&[7; BLOCK as usize], 7 * MIB).unwrap();
            written.sync_all().unwrap();
            for required in [5 * MIB, 6 * MIB] {
                let grown = backend.expand_volume(&volume.id, required, required).unwrap();
                assert_eq!(grown.capacity_bytes, 8 * MIB, "{steps}");
            }
            assert_eq!(backend.expand_on_node(&volume.id, &staged).unwrap(), 8 * MIB);
            let snapshot = pool.snapshot(&format!("s{steps}"), &volume);
            assert_eq!(snapshot.capacity_bytes, 8 * MIB);
            let data = File::open(pool.store().pool.snapshot_path(&snapshot.id)).unwrap();
            let mut block = [0; BLOCK as usize];
            data.read_exact_at(&mut block, 7 * MIB).unwrap();
            assert_eq!(block, [7; BLOCK as usize]);
            let grown = backend.expand_volume(&volume.id, 12 * MIB, 0).unwrap();
            assert_eq!((grown.capacity_bytes, device.size().unwrap()), (12 * MIB, 12 * MIB));
            drop(written);
            backend.unstage(&volume.id, &staged).unwrap();
        }
        pool.recover();
    });
}

#[test]
fn root_a_staged_volume_is_never_smaller_than_its_device() {
    for_each_pool(|pool| {
        let volume = pool.volume("v");
        fail_after(Some(0));
        assert!(pool.backend().expand_volume(&volume.id, 8 * MIB, 0).is_err());
        fail_after(None);
        let staged = pool.stage(&volume, &raw());
        assert_eq!(pool.device(&volume).unwrap().size().unwrap(), 8 * MIB);
        assert_eq!(pool.snapshot("s", &volume).capacity_bytes, 8 * MIB);
        pool.backend().unstage(&volume.id, &staged).unwrap();
        pool.recover();
    });
}

#[test]
fn root_retention_of_a_deleted_baseline_starts_when_replaced() {
    for_each_pool(|pool| {
        let volume = pool.volume("v");
        let base = pool.snapshot("base", &volume);
        pool.backend().delete_snapshot(&base.id).unwrap();
        // Deleted long before the retention of one hour.
        let long_ago = now().0 - 7200;
        let deleted = SnapshotPhase::Deleted { at: long_ago };
        pool.put(&Snapshot { phase: deleted, ..pool.row(&base.id) });
        pool.backend().forget_expired().unwrap();
        pool.write(&volume, 3, 1);
        let target = pool.snapshot("target", &volume);
        for _ in 0..2 {
            pool.backend().forget_expired().unwrap();
            assert_eq!(pool.delta(&base, &target), [3], "the base of a running backup");
            pool.recover();
        }
        pool.put(&Snapshot { baseline_until: Some(long_ago), ..pool.row(&base.id) });
        pool.store().clock.settle();
        pool.backend().forget_expired().unwrap();
        let refused = pool.backend().delta(&base.id, &target.id).unwrap_err();
        assert!(matches!(refused, Error::Precondition(_)), "{refused}");
        pool.recover();
    });
}
