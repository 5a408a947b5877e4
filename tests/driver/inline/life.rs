//! The life of an inline volume, from publish to unpublish.

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use csi_loopback::backend::PoolKind;
use csi_loopback::proto::csi::v1 as csi;
use tonic::Code;

use super::{assert_gone, assert_pool_is_clean, condition, device_bytes, internal_id};
use support::driver::*;
use support::http::{HTTP, fetch, http_address};
use support::inline::{PodVolume, is_mounted, pod_volume};
use support::{MIB, path, pattern, run};

use csi::volume_capability::access_mode::Mode;

#[test]
fn an_inline_volume_survives_restarts_until_unpublish() {
    for_each_driver(|driver| {
        for fs_type in ["ext4", "xfs", "btrfs"] {
            println!("with {fs_type}");
            let volume = pod_volume(driver, &format!("uid-{fs_type}"), "scratch");
            let publishing = csi::NodePublishVolumeRequest {
                volume_capability: Some(mounted(fs_type)),
                ..volume.publishing(&[("size", "320Mi")])
            };
            driver.ok(publishing.clone());
            let [mount] = &mounts_at(&volume.target)[..] else { panic!("mounted once") };
            assert_eq!(mount.fs_type, fs_type);
            let id = internal_id(&volume.target);
            assert_eq!(device_bytes(&volume.target), 320 * MIB);
            // Like an emptyDir.
            assert_eq!(fs::read_dir(&volume.target).unwrap().count(), 0, "{fs_type}");
            let mode = fs::metadata(&volume.target).unwrap().mode();
            assert_eq!(mode & 0o7777, 0o777, "{fs_type}");
            fs::write(volume.file("written"), pattern(1, 100_000)).unwrap();
            for end in [Driver::restart, killed] {
                end(driver);
                driver.ok(publishing.clone());
                assert_eq!(fs::read(volume.file("written")).unwrap(), pattern(1, 100_000));
                assert_eq!(internal_id(&volume.target), id);
                assert_eq!(mounts_at(&volume.target).len(), 1);
            }
            let at = volume.target.to_str().unwrap();
            let reported = driver.ok(stats(&volume.handle, at));
            assert!(reported.usage.len() == 2 && reported.usage[0].used >= 100_000, "{reported:?}");
            assert!(!reported.volume_condition.unwrap().abnormal);
            driver.unpublish(&volume.handle, &volume.target);
            assert_gone(&volume, &id);
            driver.refused(stats(&volume.handle, at), Code::NotFound, &volume.handle);
        }
        driver.stop();
        assert_pool_is_clean(driver);
        driver.start_again();
    });
}

fn killed(driver: &mut Driver) {
    driver.kill();
    driver.start_again();
}

#[test]
fn inline_volumes_with_equal_attributes_are_separate() {
    with_driver(|driver| {
        let attributes = [("size", "32Mi")];
        let volumes = [("uid-1", "a"), ("uid-1", "b"), ("uid-2", "a"), ("uid-2", "b")];
        let volumes = volumes.map(|(pod, name)| pod_volume(driver, pod, name));
        for volume in &volumes {
            driver.ok(volume.publishing(&attributes));
            assert!(!volume.file("mine").exists(), "it begins empty");
            fs::write(volume.file("mine"), &volume.handle).unwrap();
        }
        let ids: std::collections::BTreeSet<_> =
            volumes.iter().map(|volume| internal_id(&volume.target)).collect();
        assert_eq!(ids.len(), volumes.len());
        let [first, others @ ..] = &volumes;
        driver.unpublish(&first.handle, &first.target);
        for volume in others {
            assert_eq!(fs::read_to_string(volume.file("mine")).unwrap(), volume.handle);
        }
        // The same handle again is another volume.
        driver.ok(first.publishing(&attributes));
        assert!(!first.file("mine").exists());
        volumes.iter().for_each(|volume| driver.unpublish(&volume.handle, &volume.target));
    });
}

#[test]
fn inline_and_persistent_volumes_coexist() {
    with_driver(|driver| {
        let persistent = driver.volume("data", 32 * MIB, mounted(""));
        let target = driver.publish(&persistent, &mounted(""));
        let inline = pod_volume(driver, "uid-1", "scratch");
        driver.ok(inline.publishing(&[("size", "32Mi")]));
        fs::write(target.join("file"), "persistent").unwrap();
        fs::write(inline.file("file"), "inline").unwrap();
        assert_eq!(volume_ids(driver), [persistent.as_str()]);
        let snapshot = driver.snapshot("s", &persistent);
        driver.unpublish(&inline.handle, &inline.target);
        assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "persistent");
        driver.ok(inline.publishing(&[("size", "32Mi")]));
        fs::write(inline.file("file"), "inline").unwrap();
        driver.take_down(&persistent);
        driver.ok(delete_snapshot(&snapshot));
        driver.ok(delete_volume(&persistent));
        assert_eq!(fs::read_to_string(inline.file("file")).unwrap(), "inline");
        driver.unpublish(&inline.handle, &inline.target);
    });
}

#[test]
fn a_handle_has_one_target_and_one_set_of_arguments() {
    with_driver(|driver| {
        let volume = pod_volume(driver, "uid-1", "scratch");
        let first = volume.publishing(&[("size", "64Mi")]);
        driver.ok(first.clone());
        fs::write(volume.file("written"), "by the pod").unwrap();
        let with = |wanted| csi::NodePublishVolumeRequest {
            volume_capability: Some(wanted),
            ..first.clone()
        };
        for other in [
            volume.publishing(&[("size", "65Mi")]),
            volume.publishing(&[]),
            volume.publishing(&[("size", "64Mi"), ("medium", "Memory")]),
            volume.publishing_content(&[("size", "64Mi"), ("content/a", "x")], &[]),
            with(mounted("xfs")),
            with(mounted_as("", Mode::SingleNodeWriter)),
            with(with_flags("", Mode::SingleNodeMultiWriter, &["noatime"])),
            with(in_group("4242")),
            csi::NodePublishVolumeRequest { readonly: true, ..first.clone() },
        ] {
            driver.refused(other, Code::AlreadyExists, &volume.handle);
        }
        let elsewhere = volume.target.with_file_name("elsewhere");
        let target_path = elsewhere.display().to_string();
        let moved = csi::NodePublishVolumeRequest { target_path, ..first.clone() };
        driver.refused(moved, Code::FailedPrecondition, "target_path");
        assert!(!elsewhere.exists());
        // 64Mi in another form, and arguments that the volume does not depend on.
        let alike = csi::NodePublishVolumeRequest {
            staging_target_path: "nowhere".to_owned(),
            ..volume.publishing(&[("size", "65536Ki"), ("csi.storage.k8s.io/more", "later")])
        };
        driver.ok(alike);
        assert_eq!(fs::read_to_string(volume.file("written")).unwrap(), "by the pod");
        driver.unpublish(&volume.handle, &volume.target);
    });
}

#[test]
fn unpublish_of_a_missing_or_partial_volume_succeeds() {
    let Some(mut driver) = driver_with(PoolKind::Copy, &[]) else { return };
    let unknown = pod_volume(&driver, "uid-0", "never");
    driver.unpublish(&unknown.handle, &unknown.target);
    let volume = pod_volume(&driver, "uid-1", "scratch");
    type Disturb = fn(&Driver, &Path);
    let disturb: [(&str, Disturb); 5] = [
        ("nothing is done to it", |_, _| {}),
        ("another process unmounts it", |_, target| run("umount", &[path(target)])),
        ("another process unmounts it and removes the target", |_, target| {
            run("umount", &[path(target)]);
            fs::remove_dir(target).unwrap();
        }),
        ("its file is deleted under it", |driver, target| {
            fs::remove_file(driver.backing_file(&internal_id(target))).unwrap();
        }),
        ("the machine has restarted", |driver, target| {
            let id = internal_id(target);
            run("umount", &[path(target)]);
            detach_loops_named(&id);
            assert!(driver.backing_file(&id).exists());
        }),
    ];
    for (what, disturb) in disturb {
        println!("{what}");
        driver.ok(volume.publishing(&[("size", "32Mi")]));
        let id = internal_id(&volume.target);
        // A call with another target does not refer to this volume.
        let elsewhere = volume.target.with_file_name("elsewhere");
        driver.unpublish(&volume.handle, &elsewhere);
        assert!(is_mounted(&volume.target));
        disturb(&driver, &volume.target);
        for _ in 0..2 {
            driver.unpublish(&volume.handle, &volume.target);
            assert_gone(&volume, &id);
            assert!(!driver.backing_file(&id).exists());
        }
    }
    driver.stop();
    assert_pool_is_clean(&driver);
}

#[test]
fn a_repeated_publish_restores_a_lost_mount() {
    with_driver(|driver| {
        let volume = pod_volume(driver, "uid-1", "scratch");
        driver.ok(volume.publishing(&[("size", "32Mi")]));
        fs::write(volume.file("written"), "by the pod").unwrap();
        assert!(!condition(driver, &volume).abnormal);
        run("umount", &[path(&volume.target)]);
        let req = stats(&volume.handle, volume.target.to_str().unwrap());
        driver.refused(req, Code::NotFound, "volume_path");
        driver.ok(volume.publishing(&[("size", "32Mi")]));
        assert_eq!(fs::read_to_string(volume.file("written")).unwrap(), "by the pod");
        assert!(!condition(driver, &volume).abnormal);
        driver.unpublish(&volume.handle, &volume.target);
    });
}

#[test]
fn a_failed_inline_publish_leaves_nothing() {
    let Some(mut driver) = driver_with(PoolKind::Copy, &[]) else { return };
    let volume = pod_volume(&driver, "uid-1", "scratch");
    let directory = volume.target.parent().unwrap();
    let volumes = || fs::read_dir(driver.data_dir().join("volumes")).unwrap().count();
    fs::create_dir_all(directory).unwrap();
    File::create(&volume.target).unwrap();
    driver.refused(volume.publishing(&[]), Code::FailedPrecondition, "target_path");
    fs::remove_file(&volume.target).unwrap();
    fs::create_dir(&volume.target).unwrap();
    run("mount", &["-t", "tmpfs", "tmpfs", path(&volume.target)]);
    driver.refused(volume.publishing(&[]), Code::FailedPrecondition, "target_path");
    driver.unpublish(&volume.handle, &volume.target);
    assert_eq!(mounts_at(&volume.target).len(), 1, "what is another's stays");
    run("umount", &[path(&volume.target)]);
    let flags = with_flags("", Mode::SingleNodeMultiWriter, &["no-such-option"]);
    let flagged = csi::NodePublishVolumeRequest {
        volume_capability: Some(flags),
        ..volume.publishing(&[("size", "32Mi")])
    };
    driver.refused(flagged, Code::Internal, "mount_flags");
    assert!(!is_mounted(&volume.target));
    assert_eq!(volumes(), 0);
    driver.ok(volume.publishing(&[("size", "32Mi")]));
    // Not over another volume either.
    let other = PodVolume { handle: "csi-other".to_owned(), target: volume.target.clone() };
    driver.refused(other.publishing(&[]), Code::FailedPrecondition, "target_path");
    driver.unpublish(&other.handle, &other.target);
    assert!(is_mounted(&volume.target));
    driver.unpublish(&volume.handle, &volume.target);
    assert_eq!(volumes(), 0);
    driver.stop();
    assert_pool_is_clean(&driver);
}

#[test]
fn a_scratch_volume_is_writable_for_all_or_for_its_group() {
    with_driver(|driver| {
        let open = pod_volume(driver, "uid-1", "open");
        driver.ok(open.publishing(&[("size", "32Mi")]));
        let write = |target: &Path, user: &[&str]| {
            // Root enters the directory: its parents belong to the test.
            let mut command = Command::new("setpriv");
            let touched =
                command.args(user).args(["touch", "written"]).current_dir(target).status();
            assert!(touched.unwrap().success(), "{user:?}");
            fs::metadata(target.join("written")).unwrap()
        };
        let other_user = ["--reuid=65534", "--regid=65534", "--clear-groups"];
        assert_eq!(write(&open.target, &other_user).uid(), 65534);

        let grouped = pod_volume(driver, "uid-1", "grouped");
        let publishing = csi::NodePublishVolumeRequest {
            volume_capability: Some(in_group("4242")),
            ..grouped.publishing(&[("size", "32Mi")])
        };
        driver.ok(publishing.clone());
        let root = fs::metadata(&grouped.target).unwrap();
        assert_eq!((root.gid(), root.mode() & 0o2070), (4242, 0o2070), "{:o}", root.mode());
        let member = ["--reuid=65534", "--regid=65534", "--groups=4242"];
        assert_eq!(write(&grouped.target, &member).gid(), 4242);
        // The pod's changes to its files remain.
        let written = grouped.file("written");
        fs::set_permissions(&written, PermissionsExt::from_mode(0o600)).unwrap();
        driver.ok(publishing);
        assert_eq!(fs::metadata(written).unwrap().mode() & 0o777, 0o600);
        for volume in [open, grouped] {
            driver.unpublish(&volume.handle, &volume.target);
        }
    });
}

#[test]
fn gauges_count_inline_volumes_and_their_bytes() {
    let Some(driver) = driver_with(PoolKind::Copy, &HTTP) else { return };
    let address = http_address(&driver);
    let check = |count: u64, bytes: u64| {
        let (_, body) = fetch(address, "/metrics");
        for (name, value) in
            [("inline_volumes", count), ("inline_pool_bytes", bytes), ("inline_memory_bytes", 0)]
        {
            let line = format!("\ncsi_loopback_{name} {value}\n");
            assert!(body.contains(&line), "{line} is not in\n{body}");
        }
    };
    check(0, 0);
    let volumes = ["a", "b"].map(|name| pod_volume(&driver, "uid-1", name));
    driver.ok(volumes[0].publishing(&[("size", "32Mi")]));
    driver.ok(volumes[1].publishing(&[("size", "64Mi")]));
    check(2, 96 * MIB);
    volumes.iter().for_each(|volume| driver.unpublish(&volume.handle, &volume.target));
    check(0, 0);
}
