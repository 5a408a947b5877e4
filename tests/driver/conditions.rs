//! Capacity of the pool, conditions of damaged volumes, and responses while an operation is in
//! progress.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use csi_loopback::backend::PoolKind;
use csi_loopback::proto::csi::v1 as csi;
use support::driver::*;
use support::http::{HTTP, fetch, http_address};
use support::inline::pod_volume;
use support::{BLOCK, GIB, MIB, path, run, zero};
use tonic::{Code, Status};

use csi::StorageHealthErrorType as Storage;
use csi::volume_capability::access_mode::Mode;

fn condition(driver: &Driver, volume_id: &str) -> csi::VolumeCondition {
    let answer = driver.ok(get_volume(volume_id));
    answer.status.unwrap().volume_condition.unwrap()
}

fn room(driver: &Driver) -> (u64, u64) {
    let answer = driver.ok(csi::GetCapacityRequest::default());
    assert_eq!(answer.minimum_volume_size, Some(MIB as i64));
    (answer.available_capacity as u64, answer.maximum_volume_size.unwrap() as u64)
}

#[test]
fn capacity_is_limited_by_the_pool_and_overcommit() {
    let flags = ["--pool-size", "1Gi", "--overcommit", "3"];
    let Some(driver) = driver_with(PoolKind::Image, &flags) else { return };
    let (available, maximum) = room(&driver);
    assert!((GIB * 3 / 4..GIB).contains(&available), "{available}");
    assert!((GIB * 5 / 2..=3 * GIB).contains(&maximum), "{maximum}");
    driver.refused(create("v", maximum + BLOCK, block()), Code::ResourceExhausted, "overcommit");
    let volume = driver.volume("v", maximum, block());
    assert_eq!(room(&driver).1, 0);
    driver.refused(create("w", MIB, block()), Code::ResourceExhausted, "overcommit");
    driver.refused(expand(&volume, maximum + BLOCK), Code::ResourceExhausted, "capacity_range");
    driver.with_device(&volume, |device| zero(device, 0, 200 * MIB, false));
    let (left, _) = room(&driver);
    // The catalog and the pool's filesystem themselves free and use a little space.
    assert!((199 * MIB..220 * MIB).contains(&(available - left)), "{available} {left}");
    driver.ok(delete_volume(&volume));
    assert_eq!(room(&driver).1, maximum);
    let with = |wanted| {
        let volume_capabilities = vec![wanted];
        driver.ok(csi::GetCapacityRequest { volume_capabilities, ..Default::default() })
    };
    assert!(with(mounted("btrfs")).available_capacity > 0);
    assert_eq!(with(mounted("vfat")).available_capacity, 0);
    assert_eq!(with(block_as(Mode::MultiNodeSingleWriter)).maximum_volume_size, Some(0));
}

#[test]
fn a_nearly_full_pool_is_reported_and_accepts_no_volumes() {
    let Some(driver) = driver_with(PoolKind::Image, &["--pool-size", "512Mi"]) else { return };
    let (volume, idle) = (driver.volume("v", GIB, block()), driver.volume("idle", MIB, block()));
    assert!(!condition(&driver, &idle).abnormal);
    let device = driver.publish(&volume, &block());
    let mut filled = 0;
    while room(&driver).0 > 0 {
        zero(&device, filled, 4 * MIB, false);
        filled += 4 * MIB;
    }
    zero(&device, filled, 4 * MIB, false);
    for id in [&volume, &idle] {
        let found = condition(&driver, id);
        assert!(found.abnormal && found.message.contains("nearly full"), "{found:?}");
    }
    assert_eq!(room(&driver), (0, 0));
    driver.refused(create("w", MIB, block()), Code::ResourceExhausted, "capacity_range");
    driver.refused(expand(&idle, 2 * MIB), Code::ResourceExhausted, "capacity_range");
    let answer = driver.ok(stats(&volume, path(&device)));
    assert!(answer.volume_condition.unwrap().abnormal);
    let storage = || driver.ok(csi::NodeGetStorageHealthRequest::default()).backend_health;
    let [full]: [_; 1] = storage().try_into().unwrap();
    assert_eq!((full.status(), full.reason.as_str()), (Storage::StorageDegraded, "PoolNearlyFull"));
    // Deletion frees space, and succeeds.
    driver.take_down(&volume);
    driver.ok(delete_volume(&volume));
    wait_for("space is available again", || room(&driver).0 > 200 * MIB);
    assert!(!condition(&driver, &idle).abnormal && storage().is_empty());
    driver.volume("w", MIB, block());
}

#[test]
fn a_staged_volume_without_its_file_can_be_unstaged() {
    let Some(driver) = driver_with(PoolKind::Copy, &[]) else { return };
    for (name, wanted) in [("f", mounted("")), ("r", block())] {
        let volume = driver.volume(name, 32 * MIB, wanted.clone());
        let target = driver.publish(&volume, &wanted);
        fs::remove_file(driver.backing_file(&volume)).unwrap();
        let answer = driver.ok(stats(&volume, path(&target)));
        let found = answer.volume_condition.unwrap();
        assert!(found.abnormal && found.message.contains("is missing"), "{found:?}");
        driver.take_down(&volume);
        assert!(mounts_at(&target).is_empty() && mounts_at(&driver.staging(&volume)).is_empty());
        let left = loops_named(&volume);
        detach_loops_named(&volume);
        assert!(left.is_empty(), "{name}: {left:?} is still attached");
        driver.ok(delete_volume(&volume));
    }
}

#[test]
fn a_detached_loop_device_makes_its_volume_abnormal() {
    with_driver(|driver| {
        let volume = driver.volume("v", MIB, block());
        driver.stage(&volume, &block());
        assert!(!condition(driver, &volume).abnormal);
        detach_loops_named(&volume);
        let found = condition(driver, &volume);
        assert!(found.abnormal && found.message.contains("stage it again"), "{found:?}");
        driver.stage(&volume, &block());
        assert!(!condition(driver, &volume).abnormal);
    });
}

#[test]
fn volumes_of_a_shut_down_pool_can_be_unstaged() {
    let Some(mut driver) = driver_with(PoolKind::Image, &HTTP) else { return };
    let volume = driver.volume("v", 32 * MIB, mounted(""));
    let idle = driver.volume("idle", MIB, block());
    driver.publish(&volume, &mounted(""));
    let inline = pod_volume(&driver, "pod", "scratch");
    driver.ok(inline.publishing(&[("size", "16Mi")]));
    assert!(fetch(http_address(&driver), "/healthz").0.contains(" 200 "));

    shut_down_pool(driver.pid().as_raw() as u32);
    let (status, body) = fetch(http_address(&driver), "/healthz");
    assert!(status.contains(" 503 ") && body.contains("shut down"), "{status}: {body}");
    driver.refused(csi::ProbeRequest {}, Code::FailedPrecondition, "shut down");
    let entries = driver.ok(csi::ListVolumesRequest::default()).entries;
    assert_eq!(entries.len(), 2);
    for entry in entries {
        let found = entry.status.unwrap().volume_condition.unwrap();
        assert!(found.abnormal && found.message.contains("shut down"), "{found:?}");
    }
    let answer = driver.ok(stats(&inline.handle, path(&inline.target)));
    assert!(answer.volume_condition.unwrap().message.contains("shut down"));
    let storage = driver.ok(csi::NodeGetStorageHealthRequest::default()).backend_health;
    let [lost]: [_; 1] = storage.try_into().unwrap();
    assert_eq!(
        (lost.status(), lost.reason.as_str()),
        (Storage::StorageUnreachable, "PoolShutDown")
    );
    assert!(lost.message.contains("shut down"), "{lost:?}");
    for (id, at) in [(&idle, Path::new("")), (&inline.handle, inline.target.as_path())] {
        assert_eq!(health_on_node(&driver, id, at)[0].reason, "PoolShutDown");
    }
    driver.refused(create_snapshot("s", &idle), Code::Unavailable, "shut down");
    driver.refused(create("w", MIB, block()), Code::Unavailable, "shut down");

    for _ in 0..2 {
        driver.ok(unpublishing(&inline.handle, path(&inline.target)));
        driver.take_down(&volume);
    }
    assert!(!inline.target.exists() && loops_named(&volume).is_empty());
    // The start of the driver shows that nothing keeps the filesystem mounted.
    driver.restart();
    assert!(fetch(http_address(&driver), "/healthz").0.contains(" 200 "));
    assert!(driver.log().contains("removing an inline volume"));
    for id in [&volume, &idle] {
        assert!(!condition(&driver, id).abnormal);
        driver.snapshot(&format!("of {id}"), id);
    }
    driver.publish(&volume, &mounted(""));
    driver.ok(inline.publishing(&[("size", "16Mi")]));
}

/// Freezes the filesystem while a call gives its files ([`many_files`]) to the group 4242. The call
/// waits until the thaw, and holds the volume.
fn freeze_during_change(staging: &Path) -> Freeze {
    wait_for("the call changes files", || {
        let mut some = fs::read_dir(staging).unwrap().take(50).flatten();
        some.any(|entry| entry.metadata().is_ok_and(|found| found.gid() == 4242))
    });
    Freeze::new(staging)
}

/// Enough files to freeze the filesystem while they are given to a group.
fn many_files(directory: &Path) {
    for number in 0..30_000 {
        File::create(directory.join(number.to_string())).unwrap();
    }
}

#[test]
fn operations_exclude_each_other_per_volume_only() {
    with_driver(|driver| {
        let volume = driver.volume("v", 128 * MIB, mounted(""));
        let other = driver.volume("w", MIB, block());
        let staging = driver.stage(&volume, &mounted(""));
        let target = driver.target(&volume);
        many_files(&staging);
        let a = driver.snapshot("a", &volume);
        let b = driver.snapshot("b", &volume);
        let slow = driver.publishing(&volume, &target, &in_group("4242"));
        std::thread::scope(|scope| {
            let slow = scope.spawn(|| driver.call_patiently(slow));
            let frozen = freeze_during_change(&staging);
            let busy: Vec<Result<(), Status>> = vec![
                driver.call(create_snapshot("c", &volume)).map(drop),
                driver.call(delete_snapshot(&a)).map(drop),
                driver.call(create_group_snapshot("g", &[&other, &volume])).map(drop),
                driver.call(delete_volume(&volume)).map(drop),
                driver.call(expand(&volume, GIB)).map(drop),
                driver.call(modify(&volume, &[("changeTracking", "false")])).map(drop),
                driver.call(from_source("clone", Source::Volume(&volume), 0)).map(drop),
                driver.call(driver.staging_of(&volume, &mounted(""))).map(drop),
                driver.call(driver.publishing(&volume, &target, &mounted(""))).map(drop),
                driver.call(unpublishing(&volume, path(&target))).map(drop),
                driver.call(unstaging(&volume, path(&staging))).map(drop),
                driver.call(expand_on_node(&volume, &staging)).map(drop),
            ];
            let free: Vec<Result<(), Status>> = vec![
                driver.call(stats(&volume, path(&staging))).map(drop),
                driver.call(get_volume(&volume)).map(drop),
                driver.call(csi::ListVolumesRequest::default()).map(drop),
                driver.call(csi::ListSnapshotsRequest::default()).map(drop),
                driver.call(csi::GetCapacityRequest::default()).map(drop),
                driver.call(csi::ProbeRequest {}).map(drop),
                driver.call(allocated(&a)).map(drop),
                driver.call(delta(&a, &b)).map(drop),
                driver.call(create_snapshot("of-other", &other)).map(drop),
                driver.call(from_source("restored", Source::Snapshot(&a), 0)).map(drop),
                driver.call(create("new", MIB, block())).map(drop),
            ];
            let still = driver.call(expand(&volume, 1));
            // Before any assertion: a panic here would leave the slow call waiting.
            drop(frozen);
            slow.join().unwrap().unwrap();
            for (number, answer) in busy.into_iter().enumerate() {
                assert_refused(answer, Code::Aborted, "in progress", &format!("busy {number}"));
            }
            for (number, answer) in free.into_iter().enumerate() {
                assert!(answer.is_ok(), "free {number}: {answer:?}");
            }
            assert_refused(still, Code::Aborted, "in progress", "it held on until the end");
        });
        // The refused calls had no effect, and each of them succeeds now.
        assert_eq!(all_snapshots(driver).len(), 3);
        driver.snapshot("c", &volume);
        driver.copy("clone", Source::Volume(&volume), block());
    });
}

#[test]
fn a_repeated_call_for_a_running_pod_does_not_wait() {
    with_driver(|driver| {
        let shared = mounted_as("", Mode::SingleNodeMultiWriter);
        let volume = driver.volume("v", 128 * MIB, shared.clone());
        let staging = driver.stage(&volume, &shared);
        fs::write(staging.join("file"), "x").unwrap();
        many_files(&staging);
        let [first, second, reading] =
            ["first", "second", "reading"].map(|name| driver.scratch().join(name));
        let running = driver.publishing(&volume, &first, &shared);
        let readonly = csi::NodePublishVolumeRequest {
            readonly: true,
            ..driver.publishing(&volume, &reading, &shared)
        };
        driver.ok(running.clone());
        driver.ok(readonly.clone());
        let mut of_group = in_group("4242");
        of_group.access_mode = shared.access_mode;
        let slow = driver.publishing(&volume, &second, &of_group);
        std::thread::scope(|scope| {
            let slow = scope.spawn(|| driver.call_patiently(slow));
            let frozen = freeze_during_change(&staging);
            let repeated = [running.clone(), readonly.clone()].map(|one| driver.call(one));
            let another = driver.call(csi::NodePublishVolumeRequest { readonly: true, ..running });
            drop(frozen);
            slow.join().unwrap().unwrap();
            assert!(repeated.iter().all(Result::is_ok), "{repeated:?}");
            assert_refused(another, Code::Aborted, "in progress", "with another argument");
        });
        // A changed publication is repaired: here a crash occurred before the mount was read-only.
        run("mount", &["-o", "remount,bind,rw", path(&reading)]);
        driver.ok(readonly);
        assert!(fs::write(reading.join("file"), "y").is_err());
    });
}

#[test]
fn a_foreign_freeze_prevents_a_snapshot_and_is_kept() {
    with_driver(|driver| {
        let volume = driver.volume("v", 32 * MIB, mounted(""));
        let staging = driver.stage(&volume, &mounted(""));
        let frozen = Freeze::new(&staging);
        driver.refused(create_snapshot("a", &volume), Code::Aborted, "frozen");
        // It is still frozen: a second freeze fails.
        let again = std::process::Command::new("fsfreeze").arg("-f").arg(&staging).output();
        assert!(!again.unwrap().status.success());
        drop(frozen);
        assert!(all_snapshots(driver).is_empty());
        driver.snapshot("a", &volume);
        fs::write(staging.join("file"), "x").unwrap();
    });
}
