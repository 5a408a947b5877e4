//! Volumes that this host mounts while deferral is enabled: at their targets, and not at the
//! staging path.

use std::fs;
use std::os::unix::fs::MetadataExt;

use csi_loopback::backend::FsType;

use super::*;
use support::inline::is_mounted;

#[test]
fn a_volume_is_mounted_at_targets_not_at_staging() {
    for_each_filesystem(|rig, fs_type| {
        let volume = rig.volume("v", fs_type);
        let shared = support::mounted(fs_type);
        rig.stage(&volume, &shared);
        let (one, two, three) = (rig.target("one"), rig.target("two"), rig.target("three"));
        assert!(!is_mounted(&rig.staging(&volume)));
        for _ in 0..2 {
            rig.publish(&volume, &one, &Publication::on_host(shared.clone(), false)).unwrap();
            for target in [&two, &three] {
                let wanted = Publication::on_host(shared.clone(), true);
                rig.publish(&volume, target, &wanted).unwrap();
            }
        }
        fs::write(one.join("file"), "x").unwrap();
        for target in [&two, &three] {
            assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "x");
            assert!(fs::write(target.join("no"), "x").is_err());
        }
        assert!(!is_mounted(&rig.staging(&volume)));
        let staging = rig.staging(&volume);
        assert!(total(&rig.backend().usage(&volume.id, &staging).unwrap()) > BYTES / 2);
        assert!(!rig.backend().volume_condition(&volume.id).unwrap().is_abnormal());
        assert!(!rig.pool.snapshot("s", &volume).crash_consistent);
        if grows_mounted(fs_type) {
            // One target changes it for all.
            rig.backend().expand_volume(&volume.id, 2 * BYTES, 0).unwrap();
            rig.backend().expand_on_node(&volume.id, &one).unwrap();
            assert!(total(&rig.backend().usage(&volume.id, &two).unwrap()) > BYTES * 3 / 2);
        }
        refused(rig.backend().unstage(&volume.id, &staging), "published");
        for target in [&two, &one, &three] {
            rig.backend().unpublish(&volume.id, target).unwrap();
            assert!(!target.exists());
        }
        rig.backend().unstage(&volume.id, &staging).unwrap();
    });
}

#[test]
fn a_read_only_volume_has_a_read_only_superblock() {
    with_rig(|rig| {
        let volume = rig.volume("v", FsType::Ext4);
        rig.on_host(&volume, |at| fs::write(at.join("file"), "x").unwrap());
        let capability = Capability { mode: AccessMode::SingleNodeReaderOnly, ..one_writer() };
        rig.stage(&volume, &capability);
        let target = rig.target("v");
        rig.publish(&volume, &target, &on_host(capability.clone())).unwrap();
        rig.publish(&volume, &target, &on_host(capability)).unwrap();
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let line = table.lines().find(|line| line.contains(path(&target))).unwrap();
        let of_superblock = line.split(' ').next_back().unwrap();
        assert!(of_superblock.split(',').any(|option| option == "ro"), "{line}");
        assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "x");
        rig.unpublish_and_unstage(&volume, &target);
    });
}

#[test]
fn a_group_is_applied_before_a_pod_sees_the_files() {
    for_each_filesystem(|rig, fs_type| {
        let volume = rig.volume("v", fs_type);
        let in_group = |group| {
            let access = Access::Mount { fs_type: None, flags: Vec::new(), group: Some(group) };
            on_host(Capability { access, mode: AccessMode::SingleNodeMultiWriter })
        };
        rig.stage(&volume, &in_group(1).capability);
        let (one, two) = (rig.target("one"), rig.target("two"));
        rig.publish(&volume, &one, &in_group(5001)).unwrap();
        fs::write(one.join("file"), "x").unwrap();
        let group = || fs::metadata(one.join("file")).unwrap().gid();
        assert_eq!(group(), 5001);
        rig.publish(&volume, &two, &in_group(5002)).unwrap();
        assert_eq!(group(), 5002);
        rig.publish(&volume, &one, &in_group(5001)).unwrap();
        assert_eq!(group(), 5002);
        // Unmounted by another process: the next call restores the mount and its group.
        support::kernel::unmount(&one);
        assert!(rig.backend().volume_condition(&volume.id).unwrap().is_abnormal());
        rig.publish(&volume, &one, &in_group(5001)).unwrap();
        assert_eq!(group(), 5001);
        rig.backend().unpublish(&volume.id, &two).unwrap();
        rig.unpublish_and_unstage(&volume, &one);
    });
}
