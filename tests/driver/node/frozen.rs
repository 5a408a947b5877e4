//! A filesystem that another process freezes (fsfreeze in a backup hook). While a pod uses the
//! volume, the freeze stays and is reported; when no pod does, the driver ends it.

use std::fs;
use std::path::Path;
use std::process::Command;

use csi_loopback::proto::csi::v1 as csi;
use tonic::Code;

use super::super::inline::{assert_gone, internal_id};
use support::driver::*;
use support::inline::pod_volume;
use support::{MIB, path, run};

use csi::volume_capability::access_mode::Mode;

const FILESYSTEMS: [&str; 3] = ["ext4", "xfs", "btrfs"];
const END_OF_FREEZE: &str = "fsfreeze --unfreeze";

/// Freezes the filesystem, and leaves it so.
fn freeze(at: &Path) {
    run("fsfreeze", &["-f", path(at)]);
}

/// Whether the filesystem is frozen. Thaws it if it was not.
fn is_frozen(at: &Path) -> bool {
    let froze = Command::new("fsfreeze").args(["-f", path(at)]).output().unwrap();
    if froze.status.success() {
        run("fsfreeze", &["-u", path(at)]);
    }
    !froze.status.success()
}

/// Writes a file, which would block forever in a frozen filesystem.
fn write(directory: &Path) {
    assert!(!is_frozen(directory), "{} is frozen", directory.display());
    fs::write(directory.join("file"), "written").unwrap();
}

#[test]
fn a_freeze_by_another_process_ends_with_the_publication() {
    with_driver(|driver| {
        for fs_type in FILESYSTEMS {
            let wanted = mounted(fs_type);
            let volume = driver.volume(fs_type, 320 * MIB, wanted.clone());
            let target = driver.publish(&volume, &wanted);
            write(&target);
            freeze(&target);
            driver.ok(unpublishing(&volume, path(&target)));
            driver.ok(unstaging(&volume, path(&driver.staging(&volume))));
            write(&driver.publish(&volume, &wanted));
            // Frozen between two pods that use one staging.
            driver.unpublish(&volume, &target);
            freeze(&driver.staging(&volume));
            driver.ok(driver.publishing(&volume, &target, &wanted));
            write(&target);
            // Frozen and unpublished before this version, or unmounted by another process.
            freeze(&target);
            run("umount", &[path(&target)]);
            run("umount", &[path(&driver.staging(&volume))]);
            driver.restart();
            driver.unpublish(&volume, &target);
            driver.ok(driver.staging_of(&volume, &wanted));
            driver.ok(driver.publishing(&volume, &target, &wanted));
            write(&target);
            freeze(&target);
            run("umount", &[path(&target)]);
            run("umount", &[path(&driver.staging(&volume))]);
            driver.ok(unpublishing(&volume, path(&target)));
            driver.ok(unstaging(&volume, path(&driver.staging(&volume))));
            assert_eq!(loops_named(&volume), [""; 0], "{fs_type}");
        }
    });
}

#[test]
fn a_foreign_freeze_of_a_volume_in_use_is_reported_and_kept() {
    with_driver(|driver| {
        for fs_type in FILESYSTEMS {
            let wanted = mounted_as(fs_type, Mode::SingleNodeMultiWriter);
            let volume = driver.volume(fs_type, 320 * MIB, wanted.clone());
            let target = driver.publish(&volume, &wanted);
            let other = driver.scratch().join("other");
            driver.ok(driver.publishing(&volume, &other, &wanted));
            driver.ok(expand(&volume, 400 << 20));
            let frozen = Freeze::new(&target);
            driver.refused(create_snapshot("s", &volume), Code::Aborted, END_OF_FREEZE);
            let grows = expand_on_node(&volume, &target);
            // Without the capability, the next stage grows ext4.
            let grows = (fs_type != "ext4" || ext4_grows_online()).then_some(grows);
            if let Some(grows) = &grows {
                driver.refused(grows.clone(), Code::FailedPrecondition, END_OF_FREEZE);
            }
            let third = driver.scratch().join("third");
            let mut in_group = wanted.clone();
            if let Some(csi::volume_capability::AccessType::Mount(mount)) =
                &mut in_group.access_type
            {
                mount.volume_mount_group = "4000".to_owned();
            }
            let publish = driver.publishing(&volume, &third, &in_group);
            driver.refused(publish, Code::FailedPrecondition, END_OF_FREEZE);
            // The other pod still uses it.
            driver.unpublish(&volume, &other);
            driver.ok(stats(&volume, path(&target)));
            driver.restart();
            assert!(is_frozen(&target), "{fs_type}");
            drop(frozen);
            if let Some(grows) = grows {
                driver.ok(grows);
            }
            driver.snapshot(&format!("{fs_type}-s"), &volume);
            write(&target);
            driver.take_down(&volume);
        }
    });
}

/// By a process in the pod, whose mount ends with its mount namespace.
#[test]
fn a_frozen_filesystem_in_a_raw_volume_does_not_hold_it() {
    with_driver(|driver| {
        let volume = driver.volume("v", 320 * MIB, block());
        let device = driver.publish(&volume, &block());
        run("mkfs.ext4", &["-q", path(&device)]);
        let place = driver.scratch().join("place");
        fs::create_dir(&place).unwrap();
        let device = loops_named(&volume).remove(0);
        let script = format!("mount {device} {0} && fsfreeze -f {0}", path(&place));
        run("unshare", &["-m", "sh", "-c", &script]);
        driver.ok(unpublishing(&volume, path(&driver.target(&volume))));
        driver.ok(unstaging(&volume, path(&driver.staging(&volume))));
        assert_eq!(loops_named(&volume), [""; 0]);
    });
}

#[test]
fn a_frozen_inline_volume_is_removed() {
    with_driver(|driver| {
        let volume = pod_volume(driver, "uid", "scratch");
        driver.ok(volume.publishing(&[("size", "64Mi")]));
        let id = internal_id(&volume.target);
        freeze(&volume.target);
        driver.ok(unpublishing(&volume.handle, path(&volume.target)));
        assert_gone(&volume, &id);
    });
}
