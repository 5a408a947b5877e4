//! A clock that was set back or ahead, as rows of the catalog that it wrote.

use super::super::super::model::Retention;
use super::*;

const HOUR: u64 = 3600;

/// As if the clock had been an hour ahead when the snapshot was taken.
fn an_hour_ahead(pool: &Pool, snapshot: &Snapshot) -> (u64, u32) {
    let created_at = (snapshot.created_at.0 + HOUR, snapshot.created_at.1);
    pool.put(&Snapshot { created_at, ..pool.row(&snapshot.id) });
    let volume = pool.backend().volume(&snapshot.volume_id).unwrap();
    pool.put(&Volume { newest_snapshot_at: Some(created_at), ..volume });
    created_at
}

#[test]
fn root_times_ascend_after_the_clock_was_set_back() {
    for_each_pool(|pool| {
        let [volume, other] = ["v", "other"].map(|name| pool.volume(name));
        let first = pool.snapshot("first", &volume);
        let mut times = vec![an_hour_ahead(pool, &first)];
        times.push(pool.snapshot("second", &volume).created_at);
        pool.restart();
        let ids = [other.id.clone(), volume.id.clone()];
        let group = pool.backend().create_group("group", &ids).unwrap();
        let of_group = group.group.created_at;
        assert!(group.snapshots.iter().all(|row| row.created_at == of_group), "one point in time");
        times.push(of_group);
        // The chain continues after its newest snapshots were deleted.
        pool.backend().delete_group(&group.group.id, &[]).unwrap();
        times.push(pool.snapshot("third", &volume).created_at);
        assert!(times.is_sorted_by(|a, b| a < b), "{times:?}");
        // A restored volume has times of its own.
        let source = Some(Source::Snapshot(first.id));
        let mut request = pool.request("restored");
        request.request.source = source;
        let restored = pool.backend().create_volume(&request).unwrap();
        assert!(pool.snapshot("of restored", &restored).created_at < times[0]);
        pool.recover();
    });
}

#[test]
fn root_a_clock_that_was_set_ahead_drops_no_record() {
    for_each_pool(|pool| {
        let volume = pool.volume("v");
        let base = pool.snapshot("base", &volume);
        pool.write(&volume, 3, 1);
        let target = pool.snapshot("target", &volume);
        pool.backend().delete_snapshot(&base.id).unwrap();
        // The same as a clock that is two hours ahead now: the retention is one hour.
        let phase = SnapshotPhase::Deleted { at: now().0 - 2 * HOUR };
        pool.put(&Snapshot { phase, ..pool.row(&base.id) });
        for _ in 0..2 {
            pool.backend().forget_expired().unwrap();
            assert_eq!(pool.delta(&base, &target), [3]);
            pool.restart();
        }
        pool.store().clock.settle();
        pool.backend().forget_expired().unwrap();
        let refused = pool.backend().delta(&base.id, &target.id).unwrap_err();
        assert!(matches!(refused, Error::Precondition(_)), "{refused}");
        pool.recover();
    });
}

#[test]
fn root_a_clock_that_was_set_back_shortens_no_retention() {
    for_each_pool(|pool| {
        let volume = pool.volume("v");
        let base = pool.snapshot("base", &volume);
        let ahead = an_hour_ahead(pool, &base);
        pool.backend().delete_snapshot(&base.id).unwrap();
        let target = pool.snapshot("target", &volume);
        let row = pool.row(&base.id);
        assert!(row.retained_since() >= Some(ahead.0), "{row:?}");
        assert!(pool.delta(&base, &target).is_empty());
        // Releasing it takes effect at once nevertheless.
        pool.backend().retain_base(&base.id, Some(Retention::For(0))).unwrap();
        std::thread::sleep(Duration::from_millis(1100));
        pool.backend().forget_expired().unwrap();
        let refused = pool.backend().delta(&base.id, &target.id).unwrap_err();
        assert!(matches!(refused, Error::Precondition(_)), "{refused}");
        pool.recover();
    });
}
