//! Snapshots of deferred volumes: frozen if this kernel has them mounted, crash consistent if it
//! cannot know.

use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use csi_loopback::backend::{FsType, Snapshot, Source, VolumeRequest};

use super::*;
use support::{fsck, kernel::wait_for};

/// A volume made from a snapshot, as a raw device for a while.
fn with_restored(rig: &mut Rig, snapshot: &Snapshot, check: impl FnOnce(&Path)) -> Volume {
    let source = Some(Source::Snapshot(snapshot.id.clone()));
    let name = format!("of-{}", snapshot.name);
    let volume = rig.pool.create(&name, VolumeRequest { source, ..support::request() });
    let attached = rig.pool.attach(&volume.id);
    check(&attached.target);
    rig.pool.detach(&attached);
    volume
}

#[test]
fn a_deferred_volume_in_a_container_is_frozen_for_snapshots() {
    for_each_filesystem(|rig, fs_type| {
        let (volume, target) = rig.deferred_volume("v", fs_type);
        let container = rig.container(&target);
        let writer = container.start_writer();
        wait_for("both files", || container.file("two").exists());
        for round in 0..3 {
            sleep(Duration::from_millis(30 * round));
            let snapshot = rig.pool.snapshot(&format!("s{round}"), &volume);
            assert!(!snapshot.crash_consistent);
            // No journal is replayed before the check.
            let restored = with_restored(rig, &snapshot, |device| {
                fsck::check_frozen_copy(fs_type.name(), device);
            });
            let number = |at: &Path, name: &str| -> u64 {
                fs::read_to_string(at.join(name)).unwrap().trim().parse().unwrap()
            };
            let (one, two) = rig.on_host(&restored, |at| (number(at, "one"), number(at, "two")));
            assert!(one == two || one == two + 1, "{one} and {two}");
        }
        // The writer continues afterwards.
        let now = || fs::read_to_string(container.file("one")).unwrap();
        let before = now();
        wait_for("the writer continues", || now() != before);
        drop(writer);
        drop(container);
        assert!(!is_mounted_on_host(&rig.runtime.entry(&target).unwrap().device));
        rig.unpublish_and_unstage(&volume, &target);
    });
}

#[test]
fn a_snapshot_of_a_vm_volume_is_reported_crash_consistent() {
    for_each_filesystem(|rig, fs_type| {
        let (volume, target) = rig.deferred_volume("v", fs_type);
        let snapshot = rig.pool.snapshot("s", &volume);
        assert!(snapshot.crash_consistent);
        assert!(rig.backend().crash_consistent_snapshots() > 0);
        rig.restart(true);
        assert_eq!(rig.backend().crash_consistent_snapshots(), 0);
        assert!(rig.backend().snapshot(&snapshot.id).unwrap().crash_consistent);
        with_restored(rig, &snapshot, |device| fsck::check(fs_type.name(), device));
        // Nothing is mounted for the snapshot, nor when the volume is staged again after it has
        // grown.
        rig.backend().expand_volume(&volume.id, 2 * BYTES, 0).unwrap();
        rig.backend().stage(&volume.id, &rig.staging(&volume), &one_writer()).unwrap();
        let format = rig.backend().volume(&volume.id).unwrap().format.unwrap();
        assert_eq!(format.size_bytes, BYTES);
        rig.backend().unpublish(&volume.id, &target).unwrap();
        // Now no container has it mounted.
        assert!(!rig.pool.snapshot("t", &volume).crash_consistent);
        rig.backend().unstage(&volume.id, &rig.staging(&volume)).unwrap();
        assert!(!rig.pool.snapshot("u", &volume).crash_consistent);
    });
}

#[test]
fn a_group_with_deferred_members_has_one_point_in_time() {
    with_rig(|rig| {
        let (first, at_first) = rig.deferred_volume("first", FsType::Ext4);
        let (second, at_second) = rig.deferred_volume("second", FsType::Xfs);
        let idle = rig.volume("idle", FsType::Ext4);
        rig.stage(&idle, &one_writer());
        let ids = [first.id.clone(), second.id.clone(), idle.id.clone()];
        refused(rig.backend().create_group("neither", &ids), "only one such volume");
        let container = rig.container(&at_first);
        let group = rig.backend().create_group("one", &ids).unwrap();
        let flags: Vec<bool> = group.snapshots.iter().map(|one| one.crash_consistent).collect();
        assert_eq!(flags, [false, true, false]);
        let another = rig.container(&at_second);
        let group = rig.backend().create_group("both", &ids).unwrap();
        assert!(group.snapshots.iter().all(|one| !one.crash_consistent));
        drop((container, another));
        rig.unpublish_and_unstage(&first, &at_first);
        rig.unpublish_and_unstage(&second, &at_second);
        rig.backend().unstage(&idle.id, &rig.staging(&idle)).unwrap();
    });
}

#[test]
fn a_deferred_volume_in_use_can_be_cloned() {
    with_rig(|rig| {
        let (volume, target) = rig.deferred_volume("v", FsType::Xfs);
        let container = rig.container(&target);
        fs::write(container.file("kept"), "x").unwrap();
        let source = Some(Source::Volume(volume.id.clone()));
        let clone = rig.pool.create("clone", VolumeRequest { source, ..support::request() });
        assert!(rig.on_host(&clone, |at| at.join("kept").exists()));
        drop(container);
        rig.unpublish_and_unstage(&volume, &target);
    });
}
