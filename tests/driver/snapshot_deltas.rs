//! ListSnapshotDeltas (KEP-3314, VolumeSnapshotDelta) on the real driver: its pages equal the
//! metadata streams, its tokens survive the driver but nothing else, and it requires its flag.

use csi_loopback::backend::PoolKind;
use csi_loopback::proto::csi::v1 as csi;
use support::driver::*;
use support::{BLOCK, MIB, have_root, pattern, write_direct};
use tonic::Code;

use csi::controller_service_capability::rpc;

const ON: &str = "--enable-snapshot-deltas";
const FIXED: [&str; 5] = [ON, "--block-metadata-type", "fixed", "--block-size", "64Ki"];
const VARIABLE: [&str; 1] = [ON];
/// Maximum entries of a page (docs/reference/driver.md).
const LARGEST_PAGE: usize = 4096;

fn deltas(from: &str, to: &str) -> csi::ListSnapshotDeltasRequest {
    csi::ListSnapshotDeltasRequest {
        from_snapshot_id: from.to_owned(),
        to_snapshot_id: to.to_owned(),
        ..Default::default()
    }
}

fn page(from: &str, to: &str, max_entries: i32, token: &str) -> csi::ListSnapshotDeltasRequest {
    csi::ListSnapshotDeltasRequest {
        max_entries,
        starting_token: token.to_owned(),
        ..deltas(from, to)
    }
}

fn with_deltas(run: impl FnOnce(&mut Driver)) {
    if have_root() {
        run(&mut Driver::with(PoolKind::Image, &VARIABLE));
    }
}

/// Two snapshots of a raw volume with runs and single blocks, also within one unit of 64 KiB and
/// across two.
fn sample(driver: &Driver) -> (String, String, String) {
    let volume = driver.volume("v", 64 * MIB, block());
    let device = driver.publish(&volume, &block());
    let write = |runs: &[(u64, u64)]| {
        for (first, blocks) in runs {
            write_direct(&device, first * BLOCK, &pattern(*first, (blocks * BLOCK) as usize));
        }
    };
    write(&[(1, 2), (9, 1), (14, 4), (300, 1), (16383, 1)]);
    let first = driver.snapshot("first", &volume);
    write(&[(0, 1), (2, 3), (40, 1), (60, 9), (2000, 1)]);
    let second = driver.snapshot("second", &volume);
    (volume, first, second)
}

/// Block and size in bytes of each entry of a page, after the checks that apply to every page.
fn blocks(answer: &csi::ListSnapshotDeltasResponse) -> Vec<(u64, u64)> {
    assert_eq!(answer.volume_size_bytes, 64 * MIB);
    let blocks = answer.changed_blocks.iter().map(|block| {
        assert_eq!(block.token, None, "this driver returns no data tokens");
        (block.offset, block.block_size_bytes)
    });
    blocks.collect()
}

/// All pages together, from `token`.
fn rest(driver: &Driver, from: &str, to: &str, max: i32, token: &str) -> Vec<(u64, u64)> {
    let (mut all, mut token) = (Vec::new(), token.to_owned());
    loop {
        let answer = driver.ok(page(from, to, max, &token));
        let of_page = blocks(&answer);
        all.extend(&of_page);
        token = answer.next_token;
        if token.is_empty() {
            assert!(max == 0 || of_page.len() <= max as usize, "{} of {max}", of_page.len());
            return all;
        }
        // A page with a token is full, so that the list ends.
        let full = if max == 0 { LARGEST_PAGE } else { LARGEST_PAGE.min(max as usize) };
        assert_eq!(of_page.len(), full);
    }
}

/// The content of a stream, divided into blocks of `size` bytes.
fn cut_up(streamed: &Metadata, size: u64) -> Vec<(u64, u64)> {
    let extents = streamed.extents();
    let of = |(offset, length): (u64, u64)| {
        assert_eq!((offset % size, length % size), (0, 0));
        (offset / size..(offset + length) / size).map(move |number| (number, size))
    };
    extents.into_iter().flat_map(of).collect()
}

#[test]
fn pages_together_equal_the_streams_in_both_styles() {
    with_deltas(|driver| {
        let (_, first, second) = sample(driver);
        for (flags, size) in [(&VARIABLE[..], BLOCK), (&FIXED[..], 64 << 10)] {
            driver.restart_with(flags);
            let changed = cut_up(&driver.ok(delta(&first, &second)), size);
            let held = cut_up(&driver.ok(allocated(&second)), size);
            assert!(changed.len() > 4 && held.len() > changed.len(), "there is something to page");
            for (from, expected) in [(first.as_str(), &changed), ("", &held), (&second, &vec![])] {
                let count = expected.len() as i32;
                for max in [0, 1, 2, 3, 7, count - 1, count, count + 1, 10_000, i32::MAX] {
                    let all = rest(driver, from, &second, max.max(0), "");
                    assert_eq!(all, *expected, "{size} by {max} from {from:?}");
                }
            }
        }
    });
}

#[test]
fn a_page_has_a_default_and_maximum_size() {
    with_deltas(|driver| {
        let volume = driver.volume("v", 64 * MIB, block());
        let content = pattern(1, 5000 * BLOCK as usize);
        driver.with_device(&volume, |device| write_direct(device, 0, &content));
        let snapshot = driver.snapshot("a", &volume);
        for max in [0, LARGEST_PAGE as i32 + 1, i32::MAX] {
            let answer = driver.ok(page("", &snapshot, max, ""));
            assert_eq!(answer.changed_blocks.len(), LARGEST_PAGE);
            let answer = driver.ok(page("", &snapshot, max, &answer.next_token));
            assert_eq!((answer.changed_blocks.len(), answer.next_token.as_str()), (904, ""));
        }
        for max in [-1, i32::MIN] {
            driver.refused(page("", &snapshot, max, ""), Code::InvalidArgument, "max_entries");
        }
    });
}

#[test]
fn a_page_token_remains_valid_after_a_kill() {
    with_deltas(|driver| {
        let (_, first, second) = sample(driver);
        for from in [first.as_str(), ""] {
            let whole = rest(driver, from, &second, 0, "");
            let begun = driver.ok(page(from, &second, 3, ""));
            driver.kill();
            driver.start_again();
            let mut all = blocks(&begun);
            all.extend(rest(driver, from, &second, 2, &begun.next_token));
            assert_eq!(all, whole);
            assert_eq!(
                driver.ok(page(from, &second, 3, "")),
                begun,
                "the same call, the same page"
            );
        }
    });
}

#[test]
fn an_invalid_page_token_is_refused() {
    with_deltas(|driver| {
        let (volume, first, second) = sample(driver);
        let third = driver.snapshot("third", &volume);
        let token = driver.ok(page(&first, &second, 1, "")).next_token;
        assert!(token.len() <= 128, "CSI, Size limits");
        let refused = |from: &str, to: &str, token: &str| {
            driver.refused(page(from, to, 0, token), Code::InvalidArgument, "starting_token: ");
        };
        // Valid, but for other snapshots.
        refused("", &second, &token);
        refused(&first, &third, &token);
        refused(&second, &third, &token);
        refused(&first, &second, &driver.ok(page("", &second, 1, "")).next_token);
        // From another list of this driver.
        let lists = csi::ListSnapshotsRequest { max_entries: 1, ..Default::default() };
        refused(&first, &second, &driver.ok(lists).next_token);
        refused(&first, &second, &second);
        for token in [" ", "\0", &format!("{token}A"), &"A".repeat(1 << 20)] {
            refused(&first, &second, token);
        }
        assert!(driver.ok(page(&first, &second, 0, &token)).next_token.is_empty());
    });
}

#[test]
fn a_page_token_is_aborted_when_its_delta_is_gone() {
    with_deltas(|driver| {
        let (volume, first, second) = sample(driver);
        let third = driver.snapshot("third", &volume);
        let stale = |driver: &Driver, from: &str, token: &str| {
            driver.refused(
                page(from, &second, 0, token),
                Code::Aborted,
                "starting_token: is stale",
            );
        };
        let begun = driver.ok(page(&first, &second, 1, ""));
        let held = driver.ok(page("", &second, 1, "")).next_token;
        let token = begun.next_token.as_str();
        let rest_of_list = rest(driver, &first, &second, 0, token);

        // Blocks of another size have other numbers.
        driver.restart_with(&FIXED);
        stale(driver, &first, token);
        stale(driver, "", &held);
        driver.restart_with(&VARIABLE);
        assert_eq!(rest(driver, &first, &second, 0, token), rest_of_list);

        // The base may be deleted until its record is dropped.
        driver.ok(delete_snapshot(&first));
        assert_eq!(rest(driver, &first, &second, 4, token), rest_of_list);
        // Ages have a resolution of one second, and a starting driver checks records.
        std::thread::sleep(std::time::Duration::from_secs(2));
        driver.restart_with(&[ON, "--change-record-retention", "0s"]);
        wait_for("the record of the base is dropped", || {
            driver.call(deltas(&first, &second)).is_err()
        });
        driver.refused(deltas(&first, &second), Code::FailedPrecondition, "from_snapshot_id");
        stale(driver, &first, token);
        assert!(!rest(driver, "", &second, 0, &held).is_empty());

        // The target must exist. Starting over reports why it does not.
        // Maintenance of the volume may still run.
        driver.call_patiently(delete_snapshot(&second)).unwrap();
        stale(driver, "", &held);
        driver.refused(deltas("", &second), Code::NotFound, &second);
        driver.ok(deltas("", &third));
    });
}

#[test]
fn each_error_has_its_code_and_names_the_field() {
    with_deltas(|driver| {
        let (volume, first, second) = sample(driver);
        let other = driver.volume("w", MIB, block());
        let foreign = driver.snapshot("foreign", &other);
        let long = "x".repeat(129);
        driver.refused(deltas(&first, ""), Code::InvalidArgument, "to_snapshot_id: ");
        driver.refused(deltas("", ""), Code::InvalidArgument, "to_snapshot_id: ");
        driver.refused(deltas(&first, &long), Code::InvalidArgument, "to_snapshot_id: ");
        driver.refused(deltas(&long, &second), Code::InvalidArgument, "from_snapshot_id: ");
        driver.refused(deltas(&second, &first), Code::InvalidArgument, "from_snapshot_id: ");
        driver.refused(deltas(&foreign, &second), Code::InvalidArgument, "from_snapshot_id: ");
        driver.refused(deltas("", NO_SNAPSHOT), Code::NotFound, NO_SNAPSHOT);
        driver.refused(deltas(&first, NO_SNAPSHOT), Code::NotFound, NO_SNAPSHOT);
        driver.refused(deltas(NO_SNAPSHOT, &second), Code::NotFound, NO_SNAPSHOT);
        driver.ok(modify(&volume, &[("changeTracking", "false")]));
        let untracked = driver.snapshot("third", &volume);
        let broken = deltas(&second, &untracked);
        driver.refused(broken.clone(), Code::FailedPrecondition, "from_snapshot_id: ");
        driver.refused(broken, Code::FailedPrecondition, "full backup");
        assert!(!driver.ok(deltas("", &untracked)).changed_blocks.is_empty());
    });
}

#[test]
fn snapshot_deltas_require_the_flag() {
    with_driver(|driver| {
        let (_, first, second) = sample(driver);
        let of_csi = controller_capabilities(driver);
        let is_of_csi = |number: &i32| *number < 1000;
        assert!(of_csi.iter().all(is_of_csi), "{of_csi:?}");
        for req in [deltas(&first, &second), deltas("", ""), page("", &second, -1, "x")] {
            driver.refused(req, Code::Unimplemented, ON);
        }
        driver.restart_with(&VARIABLE);
        let capability = rpc::Type::ListBlockSnapshotDeltas.into();
        assert_eq!(controller_capabilities(driver), [of_csi, vec![capability]].concat());
        assert!(!driver.ok(deltas(&first, &second)).changed_blocks.is_empty());
    });
}

#[test]
fn faults_apply_to_pages_and_the_log_has_no_secret() {
    let only = "method=ListSnapshotDeltas,times=1";
    let rules = [format!("stream-abort,after=2,{only}"), format!("tracking-lost,{only}")];
    let mut flags = vec![ON, "--log-level", "trace", "--enable-faults"];
    flags.extend(rules.iter().flat_map(|rule| ["--fault", rule.as_str()]));
    let Some(driver) = driver_with(PoolKind::Image, &flags) else { return };
    let (_, first, second) = sample(&driver);
    assert!(!driver.ok(delta(&first, &second)).extents().is_empty(), "the rules are for another");
    driver.refused(deltas("", &second), Code::Unavailable, "the stream was aborted");
    // Allocated blocks need no tracking.
    assert!(!driver.ok(deltas("", &second)).changed_blocks.is_empty());
    driver.refused(deltas(&first, &second), Code::FailedPrecondition, "full backup");
    let req = csi::ListSnapshotDeltasRequest {
        secrets: map(&[("key", "hunter2")]),
        ..deltas(&first, &second)
    };
    assert!(!driver.ok(req).changed_blocks.is_empty());
    let log = driver.log();
    assert!(log.contains("TRACE") && !log.contains("hunter2"), "{log}");
    let both = |line: &&str| {
        let names = [&first, &second].iter().all(|id| line.contains(id.as_str()));
        line.contains("ListSnapshotDeltas") && line.contains("code=\"OK\"") && names
    };
    assert_eq!(log.lines().filter(both).count(), 1, "{log}");
}
