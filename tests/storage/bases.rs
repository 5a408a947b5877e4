//! How long a snapshot can be the base of a delta, with its own or the default retention.

use std::thread::sleep;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use csi_loopback::backend::{Backend, BaseFilter, Error, Retention, Snapshot};
use support::*;

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

/// A retention ends at the end of its last second.
fn next_round(pool: &Pool) {
    sleep(Duration::from_millis(1100));
    pool.backend().forget_expired().unwrap();
}

/// Snapshots of a volume. Block 2 n is written before the n-th.
fn snapshots(pool: &mut Pool, count: u64) -> (Attached, Vec<Snapshot>) {
    let volume = pool.volume("v", 64 * MIB);
    let attached = pool.attach(&volume.id);
    let take = |number| {
        write_direct(&attached.target, number * 2 * BLOCK, &pattern(number, BLOCK as usize));
        pool.snapshot(&format!("s{number}"), &volume)
    };
    let taken = (0..count).map(take).collect();
    (attached, taken)
}

fn bases(backend: &Backend, of: &BaseFilter) -> Vec<(String, Option<u64>)> {
    let page = backend.bases(of, None, 0).unwrap();
    page.items.into_iter().map(|base| (base.snapshot.id, base.expires_at)).collect()
}

#[test]
#[ignore = "full tier"]
fn a_base_expires_at_the_end_of_its_own_retention() {
    if !have_root() {
        return;
    }
    for kind in ALL_KINDS {
        let mut pool = Pool::with(kind, |config| config.retention = Duration::ZERO);
        let (attached, all) = snapshots(&mut pool, 5);
        let id = |number: usize| all[number].id.as_str();
        let keep = |pool: &Pool, number: usize, retention| {
            pool.backend().retain_base(id(number), retention).unwrap().expires_at
        };
        // Set before and after the deletion, by a duration and by a time.
        assert_eq!(keep(&pool, 0, Some(Retention::For(3600))), None);
        for number in [0, 1, 2] {
            pool.backend().delete_snapshot(id(number)).unwrap();
        }
        let until = now() + 1800;
        assert_eq!(keep(&pool, 2, Some(Retention::Until(until))), Some(until));
        let delta = |pool: &Pool, from: usize| pool.backend().delta(id(from), id(4)).map(blocks);
        // The id is kept for the driver's retention, which ends with the next round.
        let is_refused = |pool: &Pool, from: usize| {
            matches!(delta(pool, from), Err(Error::Precondition(_) | Error::NotFound { .. }))
        };
        for _ in 0..2 {
            next_round(&pool);
            assert!(is_refused(&pool, 1), "{kind}");
            assert_eq!(delta(&pool, 0).unwrap(), [2, 4, 6, 8], "{kind}");
            assert_eq!(delta(&pool, 2).unwrap(), [6, 8], "{kind}");
            pool.restart();
        }
        let (count, first) = pool.backend().retained_bases().unwrap();
        assert!(count >= 2 && first == Some(until), "{count}, {first:?}");
        // A released base is dropped in the next round, an extended one is not.
        let end = keep(&pool, 0, Some(Retention::For(0))).unwrap();
        assert!(end <= now(), "{end}");
        assert_eq!(delta(&pool, 0).unwrap(), [2, 4, 6, 8]);
        assert_eq!(keep(&pool, 2, Some(Retention::Until(until + 1))), Some(until + 1));
        next_round(&pool);
        assert!(is_refused(&pool, 0), "{kind}");
        assert_eq!(delta(&pool, 2).unwrap(), [6, 8], "{kind}");
        let refused = pool.backend().retain_base(id(0), None).unwrap_err();
        assert!(matches!(refused, Error::Precondition(_)), "{refused}");
        // The default retention, which has ended.
        keep(&pool, 2, None);
        next_round(&pool);
        assert!(is_refused(&pool, 2), "{kind}");
        assert_eq!(delta(&pool, 3).unwrap(), [8], "{kind}");
        pool.detach(&attached);
        pool.stop_sound();
    }
}

/// Also if the default retention is over at once.
#[test]
fn a_released_baseline_is_kept_until_the_next_snapshot() {
    for (default, own) in [(3600, Some(Retention::For(0))), (0, None)] {
        let default = Duration::from_secs(default);
        let pool = pool_with(ALL_KINDS[1], |config| config.retention = default);
        let Some(mut pool) = pool else { return };
        let (attached, all) = snapshots(&mut pool, 1);
        let base = &all[0].id;
        pool.backend().delete_snapshot(base).unwrap();
        let released = pool.backend().retain_base(base, own).unwrap();
        assert_eq!(released.expires_at, None, "{own:?}");
        next_round(&pool);
        write_direct(&attached.target, 0, &pattern(9, BLOCK as usize));
        let volume = pool.backend().volume(&attached.volume_id).unwrap();
        let next = pool.snapshot("next", &volume);
        assert_eq!(blocks(pool.backend().delta(base, &next.id).unwrap()), [0], "{own:?}");
        next_round(&pool);
        let refused = pool.backend().delta(base, &next.id);
        assert!(matches!(refused, Err(Error::Precondition(_))), "{own:?}");
    }
}

#[test]
fn bases_are_listed_newest_first_by_volume_or_target() {
    let Some(mut pool) = pool_with(ALL_KINDS[1], |_| {}) else { return };
    let (attached, all) = snapshots(&mut pool, 4);
    let id = |number: usize| all[number].id.clone();
    for on in [false, true] {
        pool.backend().modify_volume(&attached.volume_id, tracking(on)).unwrap();
    }
    let volume = pool.backend().volume(&attached.volume_id).unwrap();
    let [after, last] = ["after", "last"].map(|name| pool.snapshot(name, &volume).id);
    let begun = now();
    for deleted in [&id(1), &id(2), &after, &last] {
        pool.backend().delete_snapshot(deleted).unwrap();
    }
    let of_volume = BaseFilter::Volume(volume.id.clone());
    let listed = bases(pool.backend(), &of_volume);
    let ids: Vec<_> = listed.iter().map(|(id, _)| id.clone()).collect();
    assert_eq!(ids, [last.clone(), after.clone(), id(3), id(2), id(1), id(0)]);
    for (listed_id, end) in &listed {
        // Existing snapshots, and the baseline of the next one.
        let has_none = [&last, &id(3), &id(0)].contains(&listed_id);
        let in_an_hour = end.is_some_and(|end| (begun + 3600..begun + 3660).contains(&end));
        assert_eq!((end.is_none(), in_an_hour), (has_none, !has_none), "{listed_id}: {end:?}");
    }
    // In pages, while bases expire.
    let (mut paged, mut token) = (Vec::new(), None);
    loop {
        let page = pool.backend().bases(&of_volume, token.as_deref(), 2).unwrap();
        assert!(page.items.len() <= 2);
        paged.extend(page.items.into_iter().map(|base| base.snapshot.id));
        match page.next {
            Some(next) => token = Some(next),
            None => break,
        }
    }
    assert_eq!(paged, ids);
    for bad in ["x", "-1", "+1", "", "99999999999999999999999"] {
        let refused = pool.backend().bases(&of_volume, Some(bad), 2);
        assert!(matches!(refused, Err(Error::StaleToken(_))), "{bad:?}");
    }
    let of_target = |id: &str| bases(pool.backend(), &BaseFilter::Target(id.to_owned()));
    let chain: Vec<_> = of_target(&id(3)).into_iter().map(|(id, _)| id).collect();
    assert_eq!(chain, [id(3), id(2), id(1), id(0)]);
    let newest = pool.snapshot("newest", &volume).id;
    let chain: Vec<_> = of_target(&newest).into_iter().map(|(id, _)| id).collect();
    assert_eq!(chain, [newest.clone(), last, after]);
    for base in &chain {
        pool.backend().delta(base, &newest).unwrap();
    }
    for of in [BaseFilter::Volume("vol-none".into()), BaseFilter::Target(id(1))] {
        let refused = pool.backend().bases(&of, None, 0);
        assert!(matches!(refused, Err(Error::NotFound { .. })), "{of:?}");
    }
    let none = pool.backend().retain_base("snap-none", None);
    assert!(matches!(none, Err(Error::NotFound { .. })), "{none:?}");
}
