//! Volumes that begin with a snapshot's data.

use std::fs;
use std::io::ErrorKind;

use csi_loopback::backend::PoolKind;
use csi_loopback::proto::csi::v1 as csi;
use tonic::Code;

use super::{assert_pool_is_clean, device_bytes};
use support::driver::*;
use support::inline::{PodVolume, is_mounted, pod_volume};
use support::{ALL_KINDS, MIB, have_root, pattern};

const ALLOWED: &[&str] = &["--inline-from-snapshot"];
const SIZE: u64 = 320 * MIB;

/// A snapshot of a volume that is in use, with this in the file `data`.
fn cut_with(driver: &Driver, fs_type: &str, content: &[u8]) -> (String, String) {
    let volume = driver.volume(&format!("source-{fs_type}"), SIZE, mounted(fs_type));
    let target = driver.publish(&volume, &mounted(fs_type));
    fs::write(target.join("data"), content).unwrap();
    let snapshot = driver.snapshot(&format!("snapshot-{fs_type}"), &volume);
    (volume, snapshot)
}

fn from(
    volume: &PodVolume,
    snapshot: &str,
    more: &[(&str, &str)],
) -> csi::NodePublishVolumeRequest {
    volume.publishing(&[&[("fromSnapshot", snapshot)], more].concat())
}

#[test]
#[ignore = "full tier"]
fn a_volume_begins_with_a_snapshots_data_and_never_changes_it() {
    if !have_root() {
        return;
    }
    for kind in ALL_KINDS {
        println!("with a pool of kind {kind}");
        let mut driver = Driver::with(kind, ALLOWED);
        for fs_type in ["ext4", "xfs", "btrfs"] {
            println!("with {fs_type}");
            let content = pattern(1, 200_000);
            let (source, snapshot) = cut_with(&driver, fs_type, &content);
            // The source stays mounted: the copies have its identity.
            let [first, second] =
                ["first", "second"].map(|name| pod_volume(&driver, "uid-1", name));
            driver.ok(from(&first, &snapshot, &[]));
            assert_eq!(device_bytes(&first.target), SIZE);
            assert_eq!(fs::read(first.file("data")).unwrap(), content);
            fs::write(first.file("data"), pattern(2, 200_000)).unwrap();
            driver.ok(from(&second, &snapshot, &[]));
            assert_eq!(fs::read(second.file("data")).unwrap(), content, "of the snapshot");
            let source_file = driver.target(&source).join("data");
            assert_eq!(fs::read(source_file).unwrap(), content, "of its source");
            // It is used on when the snapshot is gone.
            driver.ok(delete_snapshot(&snapshot));
            driver.restart();
            driver.ok(from(&first, &snapshot, &[]));
            assert_eq!(fs::read(first.file("data")).unwrap(), pattern(2, 200_000));
            let third = pod_volume(&driver, "uid-1", "third");
            driver.refused(from(&third, &snapshot, &[]), Code::NotFound, &snapshot);
            for volume in [first, second] {
                driver.unpublish(&volume.handle, &volume.target);
                assert!(!is_mounted(&volume.target));
            }
            driver.take_down(&source);
            driver.ok(delete_volume(&source));
        }
        driver.stop();
        assert_pool_is_clean(&driver);
    }
}

#[test]
fn a_larger_volume_than_its_snapshot_has_room_for_more() {
    if !have_root() {
        return;
    }
    let driver = Driver::with(PoolKind::Image, ALLOWED);
    for fs_type in ["ext4", "xfs", "btrfs"] {
        if fs_type == "ext4" && !ext4_grows_online() {
            println!("a mounted ext4 cannot be grown here");
            continue;
        }
        println!("with {fs_type}");
        let (source, snapshot) = cut_with(&driver, fs_type, b"small");
        let volume = pod_volume(&driver, "uid-1", fs_type);
        let small = from(&volume, &snapshot, &[("size", "32Mi")]);
        driver.refused(small, Code::OutOfRange, "size");
        for _ in 0..2 {
            driver.ok(from(&volume, &snapshot, &[("size", "640Mi")]));
            let told = driver.ok(stats(&volume.handle, volume.target.to_str().unwrap()));
            assert!(told.usage[0].total as u64 > SIZE, "{told:?}");
        }
        assert_eq!(fs::read(volume.file("data")).unwrap(), b"small");
        driver.unpublish(&volume.handle, &volume.target);
        driver.take_down(&source);
    }
}

#[test]
fn a_snapshots_data_is_read_through_a_read_only_volume() {
    if !have_root() {
        return;
    }
    let driver = Driver::with(PoolKind::Image, ALLOWED);
    for fs_type in ["ext4", "xfs", "btrfs"] {
        println!("with {fs_type}");
        let (source, snapshot) = cut_with(&driver, fs_type, b"data");
        let volume = pod_volume(&driver, "uid-1", fs_type);
        let request =
            csi::NodePublishVolumeRequest { readonly: true, ..from(&volume, &snapshot, &[]) };
        driver.ok(request.clone());
        driver.ok(request);
        assert_eq!(fs::read(volume.file("data")).unwrap(), b"data");
        let refused = fs::write(volume.file("new"), "").unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ReadOnlyFilesystem);
        driver.unpublish(&volume.handle, &volume.target);
        driver.take_down(&source);
    }
}

#[test]
fn what_is_no_snapshot_with_that_filesystem_is_refused_and_nothing_is_made() {
    if !have_root() {
        return;
    }
    let driver = Driver::with(PoolKind::Copy, ALLOWED);
    let (source, snapshot) = cut_with(&driver, "ext4", b"data");
    let raw = driver.volume("raw", MIB, block());
    let empty = driver.snapshot("empty", &raw);
    let volume = pod_volume(&driver, "uid-1", "scratch");
    let other = csi::NodePublishVolumeRequest {
        volume_capability: Some(mounted("xfs")),
        ..from(&volume, &snapshot, &[])
    };
    driver.refused(other, Code::FailedPrecondition, "ext4");
    driver.refused(from(&volume, &empty, &[]), Code::FailedPrecondition, "no filesystem");
    for unknown in [NO_SNAPSHOT, "../../etc/passwd", "x", &source, &raw, &volume.handle] {
        driver.refused(from(&volume, unknown, &[]), Code::NotFound, unknown);
    }
    for more in [("content/a", "x"), ("readOnlyContent", "true"), ("medium", "Memory")] {
        let request = from(&volume, &snapshot, &[more]);
        driver.refused(request, Code::InvalidArgument, "fromSnapshot");
    }
    assert!(!volume.target.exists());
    let files = fs::read_dir(driver.data_dir().join("volumes")).unwrap();
    assert_eq!(files.count(), 2, "those of the persistent volumes");
    driver.take_down(&source);
}

#[test]
fn snapshots_are_out_of_reach_until_the_flag_says_otherwise() {
    if !have_root() {
        return;
    }
    let mut driver = Driver::with(PoolKind::Copy, ALLOWED);
    let (source, snapshot) = cut_with(&driver, "ext4", b"data");
    let [old, new] = ["old", "new"].map(|name| pod_volume(&driver, "uid-1", name));
    driver.ok(from(&old, &snapshot, &[]));
    fs::write(old.file("data"), "of the pod").unwrap();
    driver.restart_with(&[]);
    let off = from(&new, &snapshot, &[]);
    driver.refused(off, Code::FailedPrecondition, "--inline-from-snapshot");
    // Whether there is such a snapshot is nobody's business then.
    let unknown = from(&new, NO_SNAPSHOT, &[]);
    driver.refused(unknown, Code::FailedPrecondition, "--inline-from-snapshot");
    driver.ok(from(&old, &snapshot, &[]));
    assert_eq!(fs::read_to_string(old.file("data")).unwrap(), "of the pod");
    driver.unpublish(&old.handle, &old.target);
    driver.take_down(&source);
}
