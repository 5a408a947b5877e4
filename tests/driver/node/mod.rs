//! Volumes on a node over the wire: staged, published, used, expanded and removed, with
//! interruptions.

mod foreign;
mod frozen;
mod group;
mod read_only;

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use csi_loopback::proto::csi::v1 as csi;
use nix::sys::statvfs::statvfs;
use support::driver::*;
use support::{BLOCK, MIB, path, pattern, read_all, run, write_direct};
use tonic::Code;

use csi::volume_capability::access_mode::Mode;
use csi::volume_usage::Unit;

/// Filesystems with their minimum size in MiB.
const FILESYSTEMS: [(&str, u64); 4] = [("", 32), ("ext4", 32), ("xfs", 300), ("btrfs", 128)];

/// Writes a file of a filesystem, or the first block of a device.
fn write(target: &Path) -> io::Result<()> {
    if target.is_dir() {
        return fs::write(target.join("new"), "x");
    }
    let mut device = File::options().write(true).open(target)?;
    device.write_all(&pattern(1, BLOCK as usize))?;
    device.sync_all()
}

/// The second publish of a volume, at the same target or another one, with the same arguments or
/// others.
fn second_publish(driver: &Driver, mode: Mode, same_target: bool, same: bool) -> Result<(), Code> {
    let name = format!("{mode:?}-{same_target}-{same}");
    let volume = driver.volume(&name, 32 * MIB, mounted(""));
    let wanted = mounted_as("", mode);
    let target = driver.publish(&volume, &wanted);
    let second = if same_target { target.clone() } else { target.with_extension("2") };
    let answer = driver.call(csi::NodePublishVolumeRequest {
        readonly: !same,
        ..driver.publishing(&volume, &second, &wanted)
    });
    // Whatever the response, the first publication still exists, once, and unchanged.
    let mounts = mounts_at(&target);
    assert_eq!(mounts.len(), 1, "{name}");
    let reads = matches!(mode, Mode::SingleNodeReaderOnly | Mode::MultiNodeReaderOnly);
    assert_eq!(mounts[0].has("ro"), reads, "{name}");
    assert_eq!(mounts_at(&driver.staging(&volume))[0].has("ro"), reads, "{name}");
    assert_eq!(mounts_at(&second).len(), usize::from(same_target || answer.is_ok()), "{name}");
    driver.unpublish(&volume, &second);
    driver.take_down(&volume);
    answer.map(drop).map_err(|status| status.code())
}

#[test]
fn a_volume_is_mounted_with_its_requested_filesystem() {
    with_driver(|driver| {
        for (fs_type, mib) in FILESYSTEMS {
            let wanted = mounted(fs_type);
            let volume = driver.volume(&format!("v-{fs_type}"), mib * MIB, wanted.clone());
            let target = driver.publish(&volume, &wanted);
            let expected = if fs_type.is_empty() { "ext4" } else { fs_type };
            for place in [&driver.staging(&volume), &target] {
                let mounts = mounts_at(place);
                assert_eq!(mounts.len(), 1, "{fs_type}");
                assert_eq!(mounts[0].fs_type, expected);
            }
            fs::write(target.join("file"), pattern(1, 100_000)).unwrap();
            driver.take_down(&volume);
            assert!(!target.exists(), "{fs_type}");
            assert!(mounts_at(&driver.staging(&volume)).is_empty(), "{fs_type}");
            // A capability without a filesystem uses the existing one.
            let target = driver.publish(&volume, &mounted(""));
            assert_eq!(mounts_at(&target)[0].fs_type, expected);
            assert_eq!(fs::read(target.join("file")).unwrap(), pattern(1, 100_000));
            driver.take_down(&volume);
        }
    });
}

#[test]
fn a_raw_volume_is_a_device_of_its_size_with_4096_byte_sectors() {
    for_each_driver(|driver| {
        let volume = driver.volume("v", 5 * MIB, block());
        let device = driver.publish(&volume, &block());
        let content = pattern(1, 5 << 20);
        write_direct(&device, 0, &content);
        assert!(read_all(&device) == content);
        let sector = Command::new("blockdev").args(["--getss", path(&device)]).output().unwrap();
        assert_eq!(sector.stdout, b"4096\n");
        driver.take_down(&volume);
        assert!(!device.exists());
        assert!(driver.with_device(&volume, read_all) == content);
    });
}

#[test]
fn a_class_parameter_gives_a_volume_512_byte_sectors() {
    with_driver(|driver| {
        let parameters = |text| map(&[("sectorSize", text)]);
        let request = |name, text| csi::CreateVolumeRequest {
            parameters: parameters(text),
            ..create(name, 32 * MIB, block())
        };
        let volume = driver.ok(request("v", "512")).volume.unwrap();
        assert_eq!(volume.volume_context, parameters("512"));
        let id = volume.volume_id;
        // A repeated call matches, one with other sectors does not, and it never changes.
        assert_eq!(driver.ok(request("v", "512")).volume.unwrap().volume_id, id);
        driver.refused(request("v", "4096"), Code::AlreadyExists, "other parameters");
        driver.refused(request("w", "1024"), Code::InvalidArgument, "neither 512 nor 4096");
        driver.refused(
            modify(&id, &[("sectorSize", "4096")]),
            Code::InvalidArgument,
            "unknown key",
        );
        let staging = csi::NodeStageVolumeRequest {
            volume_context: parameters("512"),
            ..driver.staging_of(&id, &block())
        };
        driver.ok(staging);
        let device = driver.publish(&id, &block());
        let sector = Command::new("blockdev").args(["--getss", path(&device)]).output().unwrap();
        assert_eq!(sector.stdout, b"512\n");
        assert_eq!(driver.cli_json(&["volume", "show", "v"])["sector_size_bytes"], 512);
        driver.take_down(&id);
        let made = driver.cli_json(&["volume", "create", "c", "--sector-size", "512", "--block"]);
        let made = driver.cli_json(&["volume", "show", made["id"].as_str().unwrap()]);
        assert_eq!(made["sector_size_bytes"], 512);
        driver.ok(request("plain", "4096"));
        assert_eq!(driver.cli_json(&["volume", "show", "plain"])["sector_size_bytes"], 4096);
    });
}

#[test]
fn stage_publish_unpublish_and_unstage_can_be_repeated() {
    with_driver(|driver| {
        for (name, wanted) in [("fs", mounted("")), ("raw", block())] {
            let volume = driver.volume(name, 32 * MIB, wanted.clone());
            let (staging, target) = (driver.staging(&volume), driver.target(&volume));
            for _ in 0..2 {
                (0..3).for_each(|_| drop(driver.stage(&volume, &wanted)));
                for _ in 0..3 {
                    driver.ok(driver.publishing(&volume, &target, &wanted));
                    assert_eq!(mounts_at(&target).len(), 1);
                }
                assert!(mounts_at(&staging).len() <= 1);
                let elsewhere = driver.scratch().join("elsewhere");
                let again = csi::NodeStageVolumeRequest {
                    staging_target_path: path(&elsewhere).to_owned(),
                    ..driver.staging_of(&volume, &wanted)
                };
                driver.refused(again, Code::FailedPrecondition, "staging_target_path");
                let other = driver.staging_of(&volume, &mounted_as("", Mode::SingleNodeWriter));
                driver.refused(other, Code::AlreadyExists, "volume_capability");
                let early = unstaging(&volume, path(&staging));
                driver.refused(early, Code::FailedPrecondition, "unpublish");
                (0..3).for_each(|_| driver.unpublish(&volume, &target));
                assert!(!target.exists());
                // Unstaging it from another path changes nothing.
                driver.ok(unstaging(&volume, path(&elsewhere)));
                driver.ok(driver.publishing(&volume, &target, &wanted));
                driver.unpublish(&volume, &target);
                (0..3).for_each(|_| driver.unstage(&volume));
                assert!(mounts_at(&staging).is_empty());
            }
        }
    });
}

#[test]
fn unstaging_a_missing_or_unknown_volume_succeeds() {
    with_driver(|driver| {
        let nowhere = driver.scratch().join("nowhere");
        driver.ok(unpublishing("vol-none-0123456789abcdef", path(&nowhere)));
        driver.ok(unstaging("vol-none-0123456789abcdef", path(&nowhere)));
        let volume = driver.volume("v", 32 * MIB, mounted(""));
        driver.unpublish(&volume, &nowhere);
        driver.ok(unstaging(&volume, path(&nowhere)));
        // Another process was faster.
        let (staging, target) = (driver.staging(&volume), driver.publish(&volume, &mounted("")));
        run("umount", &[path(&target)]);
        fs::remove_dir(&target).unwrap();
        run("umount", &[path(&staging)]);
        driver.take_down(&volume);
        driver.ok(delete_volume(&volume));
    });
}

#[test]
fn a_second_publish_follows_the_table_of_access_modes() {
    with_driver(|driver| {
        for mode in [
            Mode::SingleNodeWriter,
            Mode::SingleNodeReaderOnly,
            Mode::SingleNodeSingleWriter,
            Mode::SingleNodeMultiWriter,
            Mode::MultiNodeReaderOnly,
        ] {
            let elsewhere = match mode {
                Mode::SingleNodeMultiWriter | Mode::MultiNodeReaderOnly => Ok(()),
                _ => Err(Code::FailedPrecondition),
            };
            let publish = |same_target, same| second_publish(driver, mode, same_target, same);
            assert_eq!(publish(true, true), Ok(()), "{mode:?}");
            assert_eq!(publish(true, false), Err(Code::AlreadyExists), "{mode:?}");
            assert_eq!(publish(false, true), elsewhere, "{mode:?}");
            assert_eq!(publish(false, false), elsewhere, "{mode:?}");
        }
    });
}

#[test]
fn a_second_publish_with_another_capability_is_refused() {
    with_driver(|driver| {
        let volume = driver.volume("v", 32 * MIB, mounted(""));
        let target = driver.publish(&volume, &mounted(""));
        let other = driver.scratch().join("other");
        let noatime = with_flags("", Mode::SingleNodeMultiWriter, &["noatime"]);
        for wanted in [mounted_as("", Mode::SingleNodeSingleWriter), noatime, block()] {
            let again = driver.publishing(&volume, &target, &wanted);
            driver.refused(again, Code::AlreadyExists, "target_path");
            let elsewhere = driver.publishing(&volume, &other, &wanted);
            driver.refused(elsewhere, Code::FailedPrecondition, "");
            assert!(!other.exists());
            assert_eq!(mounts_at(&target).len(), 1);
        }
    });
}

#[test]
fn a_failed_publish_leaves_nothing_and_unmounts_no_pod() {
    with_driver(|driver| {
        let volume = driver.volume("v", 32 * MIB, mounted(""));
        let (staging, target) = (driver.staging(&volume), driver.target(&volume));
        let publishing = driver.publishing(&volume, &target, &mounted(""));
        driver.refused(publishing.clone(), Code::FailedPrecondition, "staging_target_path");
        let nowhere = csi::NodePublishVolumeRequest {
            staging_target_path: String::new(),
            ..publishing.clone()
        };
        driver.refused(nowhere, Code::FailedPrecondition, "staging_target_path");
        driver.stage(&volume, &mounted(""));
        let elsewhere = csi::NodePublishVolumeRequest {
            staging_target_path: "/nowhere".to_owned(),
            ..publishing.clone()
        };
        driver.refused(elsewhere, Code::FailedPrecondition, "staging_target_path");
        assert!(!target.exists());

        driver.ok(publishing.clone());
        fs::write(target.join("file"), "of the pod").unwrap();
        run("umount", &[path(&staging)]);
        let _ = driver.call(publishing.clone());
        let other = csi::NodePublishVolumeRequest { readonly: true, ..publishing.clone() };
        driver.refused(other, Code::AlreadyExists, "target_path");
        let elsewhere = driver.publishing(&volume, &target.with_extension("2"), &mounted(""));
        driver.refused(elsewhere, Code::FailedPrecondition, "staging_target_path");
        assert!(!target.with_extension("2").exists());
        assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "of the pod");
        // Staging it again repairs it.
        driver.stage(&volume, &mounted(""));
        driver.ok(publishing);
        assert_eq!(fs::read_to_string(staging.join("file")).unwrap(), "of the pod");
    });
}

/// Like a backup product that reads a snapshot: a claim that is ReadOnlyMany.
#[test]
fn a_multi_reader_volume_is_read_only_at_each_target() {
    with_driver(|driver| {
        let source = driver.volume("source", 32 * MIB, mounted(""));
        fs::write(driver.publish(&source, &mounted("")).join("file"), "kept").unwrap();
        let snapshot = driver.snapshot("s", &source);
        let readers =
            [mounted_as("", Mode::MultiNodeReaderOnly), block_as(Mode::MultiNodeReaderOnly)];
        for (name, wanted) in ["files", "device"].into_iter().zip(readers) {
            let volume = driver.copy(name, Source::Snapshot(&snapshot), wanted.clone());
            let req = csi::ValidateVolumeCapabilitiesRequest {
                volume_id: volume.clone(),
                volume_capabilities: vec![wanted.clone()],
                ..Default::default()
            };
            assert!(driver.ok(req).confirmed.is_some(), "{name}");
            let (target, other) = (driver.publish(&volume, &wanted), driver.scratch().join(name));
            driver.ok(driver.publishing(&volume, &other, &wanted));
            for target in [&target, &other] {
                if target.is_dir() {
                    assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "kept");
                }
                assert!(write(target).is_err(), "{}", target.display());
            }
            driver.unpublish(&volume, &other);
            driver.take_down(&volume);
        }
    });
}

#[test]
fn a_read_only_block_volume_is_writable_after_unpublish() {
    with_driver(|driver| {
        let volume = driver.volume("v", MIB, block());
        let wanted = block_as(Mode::SingleNodeMultiWriter);
        driver.stage(&volume, &wanted);
        let (target, other) = (driver.target(&volume), driver.scratch().join("other"));
        let request = |target: &Path, readonly| csi::NodePublishVolumeRequest {
            readonly,
            ..driver.publishing(&volume, target, &wanted)
        };
        driver.ok(request(&target, true));
        write(&target).unwrap_err();
        // A device is read-only everywhere or nowhere; the first publication is not affected.
        driver.refused(request(&other, false), Code::FailedPrecondition, "readonly");
        assert!(!other.exists());
        write(&target).unwrap_err();
        driver.ok(request(&other, true));
        driver.unpublish(&volume, &other);
        write(&target).unwrap_err();
        driver.unpublish(&volume, &target);
        driver.ok(request(&target, false));
        write(&target).unwrap();
        driver.refused(request(&other, true), Code::FailedPrecondition, "readonly");
        write(&target).unwrap();
        driver.take_down(&volume);
        let reader = block_as(Mode::SingleNodeReaderOnly);
        let target = driver.publish(&volume, &reader);
        write(&target).unwrap_err();
        driver.take_down(&volume);
    });
}

#[test]
fn mount_flags_that_change_the_kind_of_mount_are_refused() {
    with_driver(|driver| {
        let volume = driver.volume("v", 32 * MIB, mounted(""));
        for flag in ["bind", "rbind", "remount", "move", "loop", "noatime,bind", "no-such-flag"] {
            let wanted = with_flags("", Mode::SingleNodeWriter, &[flag]);
            let status = driver.call(driver.staging_of(&volume, &wanted)).unwrap_err();
            assert!(status.message().contains("mount_flags"), "{flag}: {status:?}");
            let expected =
                if flag == "no-such-flag" { Code::Internal } else { Code::InvalidArgument };
            assert_eq!(status.code(), expected, "{flag}: {status:?}");
            assert!(mounts_at(&driver.staging(&volume)).is_empty(), "{flag}");
        }
        // No loop device remains attached.
        driver.ok(delete_volume(&volume));
    });
}

#[test]
fn a_mount_group_owns_existing_and_new_files() {
    with_driver(|driver| {
        let volume = driver.volume("v", 32 * MIB, mounted(""));
        let target = driver.publish(&volume, &mounted(""));
        fs::create_dir(target.join("directory")).unwrap();
        fs::write(target.join("directory/file"), "x").unwrap();
        fs::set_permissions(target.join("directory/file"), PermissionsExt::from_mode(0o600))
            .unwrap();
        symlink("/etc/passwd", target.join("link")).unwrap();
        let passwd = fs::metadata("/etc/passwd").unwrap();
        driver.take_down(&volume);

        let target = driver.publish(&volume, &in_group("4242"));
        for (name, bits) in [("", 0o2770), ("directory", 0o2770), ("directory/file", 0o660)] {
            let found = fs::metadata(target.join(name)).unwrap();
            assert_eq!(found.gid(), 4242, "{name}");
            assert_eq!(found.mode() & bits, bits, "{name}: {:o}", found.mode());
        }
        assert_eq!(fs::symlink_metadata(target.join("link")).unwrap().gid(), 4242);
        let after = fs::metadata("/etc/passwd").unwrap();
        assert_eq!((after.gid(), after.mode()), (passwd.gid(), passwd.mode()));
        fs::write(target.join("directory/new"), "y").unwrap();
        assert_eq!(fs::metadata(target.join("directory/new")).unwrap().gid(), 4242);
        driver.take_down(&volume);

        // Pods that share a volume may have different groups; the last one wins.
        let shared = driver.publish(&volume, &mounted(""));
        let other = driver.scratch().join("other");
        driver.ok(driver.publishing(&volume, &other, &in_group("4243")));
        assert_eq!(fs::metadata(shared.join("directory/file")).unwrap().gid(), 4243);
        driver.unpublish(&volume, &other);
        driver.take_down(&volume);
    });
}

#[test]
fn stats_report_bytes_and_inodes_or_the_device_size() {
    with_driver(|driver| {
        let volume = driver.volume("v", 64 * MIB, mounted(""));
        let target = driver.publish(&volume, &mounted(""));
        let usage = |place: &Path| {
            let answer = driver.ok(stats(&volume, path(place)));
            assert!(!answer.volume_condition.unwrap().abnormal);
            let find = |unit: Unit| {
                let mut of_unit = answer.usage.iter().filter(|usage| usage.unit() == unit);
                let found = *of_unit.next().unwrap();
                assert!(of_unit.next().is_none());
                found
            };
            (find(Unit::Bytes), find(Unit::Inodes))
        };
        let (bytes, inodes) = usage(&target);
        let stat = statvfs(&target).unwrap();
        assert_eq!(bytes.total as u64, stat.blocks() * stat.fragment_size());
        assert_eq!(inodes.total as u64, stat.files());
        assert!(bytes.used + bytes.available <= bytes.total && bytes.available > 0);
        assert_eq!(inodes.used + inodes.available, inodes.total);
        fs::write(target.join("file"), pattern(1, 10 << 20)).unwrap();
        File::open(target.join("file")).unwrap().sync_all().unwrap();
        let (more, more_inodes) = usage(&driver.staging(&volume));
        assert_eq!(more.total, bytes.total);
        assert!((10 << 20..11 << 20).contains(&(more.used - bytes.used)), "{more:?} {bytes:?}");
        assert_eq!(more_inodes.used, inodes.used + 1);

        let raw = driver.volume("r", 5 * MIB, block());
        let device = driver.publish(&raw, &block());
        let answer = driver.ok(stats(&raw, path(&device)));
        assert_eq!(answer.usage.len(), 1);
        assert_eq!((answer.usage[0].unit(), answer.usage[0].total), (Unit::Bytes, 5 << 20));

        let elsewhere = driver.scratch().join("elsewhere");
        let unknown = "vol-none-0123456789abcdef";
        let long = "/x".repeat(5000);
        for (id, place) in [
            (unknown, path(&target)),
            (&volume, path(&elsewhere)),
            (&volume, path(&device)),
            (&volume, "relative"),
            (&volume, "/etc"),
            (&volume, "a\0b"),
            (&volume, &long),
        ] {
            driver.refused(stats(id, place), Code::NotFound, "");
            driver.refused(expand_on_node(id, Path::new(place)), Code::NotFound, "");
        }
    });
}

#[test]
fn a_volume_is_published_as_filesystem_or_device_not_both() {
    with_driver(|driver| {
        for (name, wanted, other) in [("f", mounted(""), block()), ("r", block(), mounted(""))] {
            let volume = driver.volume(name, 32 * MIB, wanted.clone());
            driver.stage(&volume, &wanted);
            let request = driver.publishing(&volume, &driver.target(&volume), &other);
            driver.refused(request, Code::FailedPrecondition, "volume_capability");
            assert!(!driver.target(&volume).exists());
            driver.unstage(&volume);
        }
    });
}

#[test]
fn a_context_with_an_unknown_key_is_refused() {
    with_driver(|driver| {
        let volume = driver.volume("v", 32 * MIB, mounted(""));
        let stage = driver.staging_of(&volume, &mounted(""));
        let publish = driver.publishing(&volume, &driver.target(&volume), &mounted(""));
        let pod = map(&[
            ("csi.storage.k8s.io/pod.name", "p"),
            ("csi.storage.k8s.io/ephemeral", "false"),
            ("storage.kubernetes.io/csiProvisionerIdentity", "1"),
        ]);
        let unknown = map(&[("colour", "red")]);
        for field in ["volume_context", "publish_context"] {
            let (mut stage, mut publish) = (stage.clone(), publish.clone());
            if field == "volume_context" {
                stage.volume_context.clone_from(&unknown);
                publish.volume_context.clone_from(&unknown);
            } else {
                stage.publish_context.clone_from(&unknown);
                publish.publish_context.clone_from(&unknown);
            }
            let words = format!("{field}: unknown key \"colour\"");
            driver.refused(stage, Code::InvalidArgument, &words);
            driver.refused(publish, Code::InvalidArgument, &words);
        }
        driver.ok(csi::NodeStageVolumeRequest { volume_context: pod.clone(), ..stage });
        driver.ok(csi::NodePublishVolumeRequest { volume_context: pod, ..publish });
        driver.take_down(&volume);
    });
}
