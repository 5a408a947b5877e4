//! Foreign mounts, files and data: neither hidden, removed nor overwritten.

use std::fs::{self};
use std::os::unix::fs::symlink;
use std::path::Path;

use csi_loopback::proto::csi::v1 as csi;
use tonic::Code;

use support::driver::*;
use support::{BLOCK, MIB, path, pattern, read_all, run, write_direct};

#[test]
fn unstage_and_unpublish_keep_foreign_files() {
    with_driver(|driver| {
        let volume = driver.volume("v", 32 * MIB, mounted(""));
        let raw = driver.volume("r", MIB, block());
        driver.stage(&volume, &mounted(""));
        driver.stage(&raw, &block());
        let (file, full) = (driver.scratch().join("file"), driver.scratch().join("full"));
        fs::write(&file, "precious").unwrap();
        fs::create_dir(&full).unwrap();
        fs::write(full.join("file"), "precious").unwrap();
        let unharmed = |how: &str| {
            for file in [&file, &full.join("file")] {
                let content = fs::read_to_string(file).unwrap_or_default();
                assert_eq!(content, "precious", "{} {how}", file.display());
            }
        };
        for id in [&volume, &raw, "vol-none-0123456789abcdef"] {
            for place in [&file, &full] {
                let _ = driver.call(unpublishing(id, path(place)));
                let _ = driver.call(unstaging(id, path(place)));
            }
            unharmed("after unpublish and unstage");
        }
        // An empty directory may belong to another program.
        let empty = driver.scratch().join("empty");
        fs::create_dir(&empty).unwrap();
        driver.ok(unpublishing("vol-none-0123456789abcdef", path(&empty)));
        assert!(empty.is_dir());
        // Publishing over it and unpublishing again do not remove it either.
        for (id, wanted) in [(&volume, mounted("")), (&raw, block())] {
            for place in [&file, &full] {
                let published = driver.call(driver.publishing(id, place, &wanted));
                let how = format!("after a publish that ended with {published:?}");
                assert_eq!(mounts_at(place).len(), usize::from(published.is_ok()), "{how}");
                driver.unpublish(id, place);
                assert!(mounts_at(place).is_empty());
                unharmed(&how);
            }
        }
    });
}

#[test]
fn a_foreign_mount_is_neither_hidden_nor_unmounted() {
    with_driver(|driver| {
        let volume = driver.volume("v", 32 * MIB, mounted(""));
        let other = driver.volume("w", 32 * MIB, mounted(""));
        driver.stage(&other, &mounted(""));
        let place = driver.staging(&volume);
        fs::create_dir(&place).unwrap();
        run("mount", &["-t", "tmpfs", "none", path(&place)]);
        let stage = driver.staging_of(&volume, &mounted(""));
        driver.refused(stage, Code::FailedPrecondition, "staging_target_path");
        let publish = driver.publishing(&other, &place, &mounted(""));
        driver.refused(publish, Code::FailedPrecondition, "target_path");
        driver.unpublish(&other, &place);
        driver.unstage(&volume);
        let left = mounts_at(&place);
        assert_eq!(left.len(), 1);
        assert_eq!(left[0].fs_type, "tmpfs");
        run("umount", &[path(&place)]);
        driver.publish(&volume, &mounted(""));
    });
}

#[test]
fn paths_below_a_symbolic_link_work_like_others() {
    with_driver(|driver| {
        let (real, link) = (driver.scratch().join("real"), driver.scratch().join("link"));
        fs::create_dir(&real).unwrap();
        symlink(&real, &link).unwrap();
        for (name, wanted) in [("fs", mounted("")), ("raw", block())] {
            let volume = driver.volume(name, 32 * MIB, wanted.clone());
            let place = |word: &str| link.join(format!("{name}-{word}")).display().to_string();
            let (staging, target) = (place("staging"), place("target"));
            for _ in 0..2 {
                driver.ok(csi::NodeStageVolumeRequest {
                    staging_target_path: staging.clone(),
                    ..driver.staging_of(&volume, &wanted)
                });
            }
            for _ in 0..2 {
                driver.ok(csi::NodePublishVolumeRequest {
                    staging_target_path: staging.clone(),
                    ..driver.publishing(&volume, Path::new(&target), &wanted)
                });
            }
            let below = || mounts().into_iter().filter(|one| one.target.starts_with(&real)).count();
            assert_eq!(below(), if name == "fs" { 2 } else { 1 });
            assert!(!driver.ok(stats(&volume, &target)).usage.is_empty());
            driver.ok(unpublishing(&volume, &target));
            driver.ok(unstaging(&volume, &staging));
            assert_eq!(below(), 0);
        }
    });
}

#[test]
fn a_path_that_is_a_symbolic_link_is_refused() {
    with_driver(|driver| {
        let (real, link) = (driver.scratch().join("real"), driver.scratch().join("link"));
        fs::create_dir(&real).unwrap();
        symlink(&real, &link).unwrap();
        let volume = driver.volume("v", 32 * MIB, mounted(""));
        let stage = csi::NodeStageVolumeRequest {
            staging_target_path: path(&link).to_owned(),
            ..driver.staging_of(&volume, &mounted(""))
        };
        driver.refused(stage, Code::FailedPrecondition, "staging_target_path");
        driver.stage(&volume, &mounted(""));
        let publish = driver.publishing(&volume, &link, &mounted(""));
        driver.refused(publish, Code::FailedPrecondition, "target_path");
        assert!(mounts_at(&real).is_empty() && link.is_symlink());
    });
}

#[test]
fn a_device_with_foreign_data_is_never_formatted() {
    with_driver(|driver| {
        let volume = driver.volume("v", 64 * MIB, block());
        driver.with_device(&volume, |device| {
            write_direct(device, 40 * MIB, &pattern(1, BLOCK as usize));
        });
        for fs_type in ["", "ext4", "xfs", "btrfs"] {
            let request = driver.staging_of(&volume, &mounted(fs_type));
            driver.refused(request, Code::FailedPrecondition, "contains data");
            let content = driver.with_device(&volume, read_all);
            let at = 40 * MIB as usize;
            assert!(content[at..at + BLOCK as usize] == pattern(1, BLOCK as usize));
            assert!(content[..at].iter().all(|byte| *byte == 0), "{fs_type}");
        }
        // An existing filesystem of another origin is used, and not replaced.
        let made = driver.volume("made", 64 * MIB, block());
        driver.with_device(&made, |device| run("mkfs.ext4", &["-q", "-L", "mine", path(device)]));
        driver.refused(driver.staging_of(&made, &mounted("xfs")), Code::FailedPrecondition, "ext4");
        let target = driver.publish(&made, &mounted(""));
        assert_eq!(mounts_at(&target)[0].fs_type, "ext4");
        driver.take_down(&made);
        let content = driver.with_device(&made, read_all);
        assert_eq!(&content[1024 + 120..1024 + 124], b"mine");
    });
}
