//! Pages contain exactly what the driver's streams report.

use csi_loopback::kubernetes::cbt_http::ProblemKind;
use support::cluster::shared;

use super::rig::{Rig, SIZE};
use support::BLOCK;
use support::driver::{Metadata, allocated, delete_snapshot, delta};

const LARGE: [&str; 4] = ["--block-metadata-type", "fixed", "--block-size", "64Ki"];

/// The extents of a stream, divided into blocks of `size` bytes.
fn cut_up(streamed: &Metadata, size: u64) -> Vec<(u64, u64)> {
    let of = |(offset, length): (u64, u64)| {
        assert_eq!((offset % size, length % size), (0, 0));
        (offset / size..(offset + length) / size).map(move |number| (number, size))
    };
    streamed.extents().into_iter().flat_map(of).collect()
}

/// Compares delta and allocated pages of several sizes with the driver's own streams.
fn pages_equal_streams(rig: &Rig<'_>, size: u64) -> (String, String) {
    let (first, second) = rig.sample();
    let changed = cut_up(&rig.driver.ok(delta(&first, &second)), size);
    let held = cut_up(&rig.driver.ok(allocated(&second)), size);
    assert!(changed.len() > 4 && held.len() > changed.len(), "there is something to page");
    for (base, expected) in [(first.as_str(), &changed), ("", &held), (&second, &vec![])] {
        let count = expected.len() as u32;
        for limit in [1, 2, 3, 7, count, count + 1, 4096] {
            let all = rig.desk.all(&rig.replica, (base, &second), 0, limit.max(1));
            assert_eq!(all, *expected, "by {limit} from {base:?}");
        }
    }
    let page = rig.desk.page(&rig.replica, &rig.desk.page_request(&first, &second, 0, 1));
    assert_eq!(page.volume_size_bytes, Some(SIZE));
    (first, second)
}

#[test]
fn the_pages_together_equal_the_drivers_stream() {
    let Some(cluster) = shared() else { return };
    pages_equal_streams(&Rig::new(cluster, &[]), BLOCK);
}

#[test]
#[ignore = "full tier"]
fn offsets_count_the_drivers_large_blocks() {
    let Some(cluster) = shared() else { return };
    pages_equal_streams(&Rig::new(cluster, &LARGE), 64 << 10);
}

#[test]
#[ignore = "full tier"]
fn a_page_may_start_at_any_block_of_the_volume() {
    let Some(cluster) = shared() else { return };
    for flags in [&[][..], &LARGE] {
        let rig = Rig::new(cluster, flags);
        let (first, second) = rig.sample();
        let whole = rig.desk.all(&rig.replica, (&first, &second), 0, 4096);
        let size = whole[0].1;
        let last = SIZE / size;
        // A replica that has served no page before returns the same.
        let fresh = rig.desk.spawn(&["--cbt-http-lease", "another"]);
        cluster.wait_for("the other leads, too", || fresh.leads().then_some(()));
        for from in [1, 3, whole[1].0, whole[whole.len() - 1].0, last] {
            let expected: Vec<_> = whole.iter().copied().filter(|(n, _)| *n >= from).collect();
            for replica in [&fresh, &rig.replica] {
                let rest = rig.desk.all(replica, (&first, &second), from, 5);
                assert_eq!(rest, expected, "from {from}");
            }
        }
        for past in [last + 1, u64::MAX / size / 2] {
            let problem =
                rig.desk.problem(&fresh, &rig.desk.page_request(&first, &second, past, 5));
            assert_eq!(problem.kind, ProblemKind::Driver, "{problem:?}");
            assert_eq!(problem.code.as_deref(), Some("OUT_OF_RANGE"));
        }
        let problem =
            rig.desk.problem(&fresh, &rig.desk.page_request(&first, &second, u64::MAX, 5));
        assert!(matches!(problem.kind, ProblemKind::Driver | ProblemKind::Invalid), "{problem:?}");
    }
}

#[test]
fn a_page_costs_the_driver_one_call() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster, &[]);
    let (first, second) = rig.sample();
    let calls = || {
        let log = rig.driver.log();
        let is_call = |line: &&str| line.contains("GetMetadataDelta") && line.contains("code=");
        log.lines().filter(is_call).count()
    };
    let pages = 8;
    assert_eq!(rig.desk.all(&rig.replica, (&first, &second), 0, 2).len(), 2 * pages - 1);
    cluster.wait_for("the calls in the log", || (calls() >= pages).then_some(()));
    assert_eq!(calls(), pages);
}

#[test]
fn pages_continue_after_the_driver_was_killed() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::new(cluster, &[]);
    let (first, second) = rig.sample();
    let whole = rig.desk.all(&rig.replica, (&first, &second), 0, 4096);
    let page = rig.desk.page(&rig.replica, &rig.desk.page_request(&first, &second, 0, 3));
    rig.driver.kill();
    rig.driver.start_again();
    let next = page.next.unwrap();
    let rest = cluster.wait_for("the driver is found again", || {
        let reply = rig.desk.ask(&rig.replica, &rig.desk.page_request(&first, &second, next, 4096));
        (reply.status == 200).then(|| reply.page())
    });
    let all = page.changed_blocks.iter().chain(&rest.changed_blocks);
    assert_eq!(all.map(|one| (one.offset, one.block_size_bytes)).collect::<Vec<_>>(), whole);
}

#[test]
fn a_drivers_error_is_reported_with_its_code() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster, &[]);
    let (first, second) = rig.sample();
    let refused = |base: &str, target: &str| {
        let problem = rig.desk.problem(&rig.replica, &rig.desk.page_request(base, target, 0, 9));
        assert_eq!(problem.kind, ProblemKind::Driver);
        (problem.code.unwrap(), problem.message)
    };
    assert_eq!(refused(&second, &first).0, "INVALID_ARGUMENT");
    rig.driver.ok(delete_snapshot(&second));
    let (code, message) = refused(&first, &second);
    assert_eq!(code, "NOT_FOUND");
    assert!(message.contains(&second), "{message}");
}

#[test]
fn a_stopped_driver_is_unavailable_until_it_restarts() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::new(cluster, &[]);
    let (first, second) = rig.sample();
    let request = rig.desk.page_request(&first, &second, 0, 9);
    let before = rig.desk.page(&rig.replica, &request);
    rig.driver.kill();
    let reply = rig.desk.ask(&rig.replica, &request);
    assert_eq!(reply.problem().kind, ProblemKind::Unavailable);
    assert!(reply.headers.contains_key("retry-after"));
    rig.driver.start_again();
    let after = cluster.wait_for("the driver is found again", || {
        let reply = rig.desk.ask(&rig.replica, &request);
        (reply.status == 200).then(|| reply.page())
    });
    assert_eq!(after, before);
}
