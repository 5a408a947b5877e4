//! Bases of deltas and their retention: the BaseAdmin service, its commands and its metrics.

use std::time::{SystemTime, UNIX_EPOCH};

use csi_loopback::backend::PoolKind;
use csi_loopback::proto::admin::v1 as admin;
use csi_loopback::proto::csi::v1 as csi;
use prost_types::Timestamp;
use serde_json::Value;
use support::driver::*;
use support::http::{HTTP, fetch, http_address};
use support::{MIB, kernel};
use tonic::Code;

use admin::base::Retention as Kept;
use admin::set_base_retention_request::Retention;

const DAY: i64 = 86_400;

fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs().try_into().unwrap()
}

fn of_volume(id: &str) -> admin::ListBasesRequest {
    admin::ListBasesRequest { volume_id: id.to_owned(), ..Default::default() }
}

fn keep(id: &str, retention: Retention) -> admin::SetBaseRetentionRequest {
    admin::SetBaseRetentionRequest { snapshot_id: id.to_owned(), retention: Some(retention) }
}

fn ids(answer: &admin::ListBasesResponse) -> Vec<String> {
    answer.bases.iter().map(|base| base.snapshot_id.clone()).collect()
}

/// A driver, a volume and three snapshots of it, of which the first two are deleted.
fn sample() -> Option<(Driver, String, [String; 3])> {
    let driver = driver_with(PoolKind::Image, &HTTP)?;
    let volume = driver.volume("v", MIB, block());
    let snapshots = ["a", "b", "c"].map(|name| driver.snapshot(name, &volume));
    for id in &snapshots[..2] {
        driver.ok(delete_snapshot(id));
    }
    Some((driver, volume, snapshots))
}

#[test]
fn bases_and_their_retention_survive_a_kill() {
    let Some((mut driver, volume, [a, b, c])) = sample() else { return };
    let listed = driver.ok(of_volume(&volume));
    assert_eq!(
        (ids(&listed), listed.next_token.as_str()),
        (vec![c.clone(), b.clone(), a.clone()], "")
    );
    for base in &listed.bases {
        assert_eq!((&base.volume_id, &base.retention), (&volume, &None));
        let ends = base.expires_at.map(|end| end.seconds);
        let expected = base.deleted_at.map(|at| at.seconds + 90 * DAY);
        assert_eq!((ends, base.deleted_at.is_none()), (expected, base.snapshot_id == c));
        assert!((now() - base.created_at.unwrap().seconds) < 600, "{base:?}");
    }
    let until = Timestamp { seconds: now() + 365 * DAY, nanos: 0 };
    assert_eq!(driver.ok(keep(&a, Retention::Until(until))).expires_at, Some(until));
    let week = u64::try_from(7 * DAY).unwrap();
    assert_eq!(driver.ok(keep(&c, Retention::ForSeconds(week))).expires_at, None);
    driver.kill();
    driver.start_again();
    let listed = driver.ok(of_volume(&volume)).bases;
    let kept: Vec<_> = listed.iter().map(|base| base.retention).collect();
    assert_eq!(kept, [Some(Kept::ForSeconds(week)), None, Some(Kept::Until(until))]);
    assert_eq!(listed[2].expires_at, Some(until));
    // After its release, the next periodic task removes it; a start runs the task first.
    driver.ok(keep(&b, Retention::ForSeconds(0)));
    driver.ok(delta(&b, &c));
    std::thread::sleep(std::time::Duration::from_millis(2100));
    driver.restart();
    kernel::wait_for("the base is dropped", || driver.call(delta(&b, &c)).is_err());
    driver.refused(delta(&b, &c), Code::FailedPrecondition, "full backup");
    driver.refused(
        keep(&b, Retention::ByDefault(true)),
        Code::FailedPrecondition,
        "no longer a base",
    );
    driver.ok(delta(&a, &c));
    let target = admin::ListBasesRequest { target_snapshot_id: c.clone(), ..Default::default() };
    assert_eq!(ids(&driver.ok(target)), [c, a]);
}

#[test]
fn metrics_report_retained_bases_and_the_next_expiry() {
    let Some((driver, _, [a, b, _])) = sample() else { return };
    let check = |end: i64| {
        let (_, body) = fetch(http_address(&driver), "/metrics");
        for line in [
            "\ncsi_loopback_retained_snapshots 2\n".to_owned(),
            format!("\ncsi_loopback_base_expiry_timestamp_seconds {end}\n"),
        ] {
            assert!(body.contains(&line), "{line} is not in\n{body}");
        }
    };
    let end =
        |id: &str| driver.ok(keep(id, Retention::ByDefault(true))).expires_at.unwrap().seconds;
    check(end(&a).min(end(&b)));
    let soon = Timestamp { seconds: now() + DAY, nanos: 0 };
    driver.ok(keep(&b, Retention::Until(soon)));
    check(soon.seconds);
}

#[test]
fn metrics_report_the_age_of_snapshots() {
    let Some(driver) = driver_with(PoolKind::Image, &HTTP) else { return };
    let metric = |name: &str| {
        let (_, body) = fetch(http_address(&driver), "/metrics");
        let prefix = format!("csi_loopback_{name} ");
        let value = body.lines().find_map(|line| line.strip_prefix(&prefix));
        value.map(|value| value.parse::<i64>().unwrap())
    };
    let times = || {
        ["newest", "stalest_volume"].map(|of| metric(&format!("{of}_snapshot_timestamp_seconds")))
    };
    let [old, new, _without] =
        ["old", "new", "without"].map(|name| driver.volume(name, MIB, block()));
    assert_eq!((times(), metric("volumes_without_snapshot")), ([None; 2], Some(3)));
    let taken = |name: &str, volume: &str| {
        let req = csi::CreateSnapshotRequest {
            name: name.to_owned(),
            source_volume_id: volume.to_owned(),
            ..Default::default()
        };
        driver.ok(req).snapshot.unwrap()
    };
    let first = taken("first", &old);
    std::thread::sleep(std::time::Duration::from_millis(1100));
    let second = taken("second", &new);
    let [first_at, second_at] =
        [&first, &second].map(|snapshot| Some(snapshot.creation_time.unwrap().seconds));
    assert!(first_at < second_at);
    assert_eq!((times(), metric("volumes_without_snapshot")), ([second_at, first_at], Some(1)));
    // Backup clients delete the snapshots that they have read.
    driver.ok(delete_snapshot(&first.snapshot_id));
    assert_eq!(times(), [second_at, first_at]);
    driver.ok(delete_volume(&old));
    assert_eq!((times(), metric("volumes_without_snapshot")), ([second_at; 2], Some(1)));
}

#[test]
fn each_error_names_its_field() {
    let Some((driver, volume, [a, _, c])) = sample() else { return };
    let (list, long) = (of_volume(&volume), "x".repeat(129));
    let target = |id: &str| admin::ListBasesRequest {
        target_snapshot_id: id.to_owned(),
        ..Default::default()
    };
    let (volume_id, target_snapshot_id) = (volume, c.clone());
    let both = admin::ListBasesRequest { volume_id, target_snapshot_id, ..Default::default() };
    for (bad, field) in [
        (Default::default(), "volume_id: "),
        (of_volume(&long), "volume_id: "),
        (target(&long), "target_snapshot_id: "),
        (both, "target_snapshot_id: "),
        (admin::ListBasesRequest { max_entries: -1, ..list.clone() }, "max_entries: "),
    ] {
        driver.refused(bad, Code::InvalidArgument, field);
    }
    let starting_token = "x".into();
    let bad = admin::ListBasesRequest { starting_token, ..list };
    driver.refused(bad, Code::Aborted, "starting_token: ");
    driver.refused(of_volume("vol-none"), Code::NotFound, "vol-none");
    // The target must exist.
    driver.refused(target(&a), Code::NotFound, &a);
    let none = admin::SetBaseRetentionRequest { snapshot_id: a.clone(), retention: None };
    driver.refused(none, Code::InvalidArgument, "retention: ");
    let unnamed = keep("", Retention::ForSeconds(1));
    driver.refused(unnamed, Code::InvalidArgument, "snapshot_id: ");
    driver.refused(keep("snap-none", Retention::ForSeconds(1)), Code::NotFound, "snap-none");
}

#[test]
fn the_commands_list_keep_and_release_bases() {
    let Some((driver, volume, [a, b, c])) = sample() else { return };
    let listed = driver.cli_json(&["base", "list", "--volume", "v"]);
    let listed: Vec<_> = listed.as_array().unwrap().iter().map(|row| &row["snapshot_id"]).collect();
    assert_eq!(listed, [&c, &b, &a]);
    let kept = driver.cli_json(&["base", "keep", &a, "--until", "2099-01-31"]);
    assert_eq!(kept[0]["expires"], "2099-01-31T00:00:00Z");
    assert_eq!(kept[0]["volume_id"], volume.as_str());
    let kept = driver.cli_json(&["base", "keep", "c", "--for", "30days"]);
    assert_eq!(
        (&kept[0]["kept_for_seconds"], &kept[0]["expires"]),
        (&(30 * DAY).into(), &Value::Null)
    );
    let shown = driver.cli(&["base", "list", "--target", "c"]);
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(
        shown.contains("for 30 days") && shown.contains("until 2099-01-31T00:00:00Z"),
        "{shown}"
    );
    let kept = driver.cli_json(&["base", "keep", &a, "--default"]);
    assert_eq!(kept[0]["kept_until"], Value::Null);
    let released = driver.cli_json(&["base", "release", &b]);
    assert_eq!(released[0]["expires"], released[0]["deleted"]);
    let refused = driver.cli(&["base", "keep", &a, "--until", "2001-01-01"]);
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && said.contains("until: is not in the future"), "{said}");
}
