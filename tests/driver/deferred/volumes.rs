//! The life of a deferred volume: passed to the runtime, mounted in a container only, measured,
//! expanded, unpublished.

use std::fs;

use csi_loopback::backend::{Error, FsType, GroupPolicy, Source, VolumeRequest};

use super::*;

#[test]
fn a_deferred_volume_is_never_mounted_on_the_host() {
    for_each_filesystem(|rig, fs_type| {
        let (volume, target) = rig.deferred_volume("v", fs_type);
        let entry = rig.runtime.entry(&target).unwrap();
        assert_eq!(entry.fs_type, fs_type);
        assert_eq!(entry.flags.contains(&"nouuid".to_owned()), fs_type == FsType::Xfs);
        assert!(target.is_dir() && !is_mounted_on_host(&entry.device));
        let container = rig.container(&target);
        fs::write(container.file("kept"), "written in the container").unwrap();
        assert!(!is_mounted_on_host(&entry.device) && !target.join("kept").exists());
        // A restart and repeated calls of kubelet change nothing, and restore a lost entry.
        rig.restart(true);
        for is_lost in [false, true] {
            if is_lost {
                rig.runtime.state().entries.clear();
            }
            rig.publish(&volume, &target, &deferred()).unwrap();
        }
        rig.backend().stage(&volume.id, &rig.staging(&volume), &one_writer()).unwrap();
        assert_eq!(rig.runtime.entry(&target), Some(entry.clone()));
        assert!(!is_mounted_on_host(&entry.device));
        fs::write(container.file("more"), "x").unwrap();
        let stats = rig.backend().stats(&volume.id, &target).unwrap();
        assert!(total(&stats.usage.unwrap()) > BYTES / 2 && !stats.condition.is_abnormal());
        drop(container);
        rig.unpublish_and_unstage(&volume, &target);
        assert_eq!(rig.runtime.entry(&target), None);
        let kept = rig.on_host(&volume, |at| fs::read_to_string(at.join("kept")).unwrap());
        assert_eq!(kept, "written in the container");
    });
}

#[test]
fn a_deferred_volume_grows_in_its_container() {
    for_each_filesystem(|rig, fs_type| {
        if !grows_mounted(fs_type) {
            return;
        }
        let (volume, target) = rig.deferred_volume("v", fs_type);
        let container = rig.container(&target);
        let size =
            |rig: &Rig| total(&rig.backend().stats(&volume.id, &target).unwrap().usage.unwrap());
        let before = size(rig);
        rig.backend().expand_volume(&volume.id, 2 * BYTES, 0).unwrap();
        // By its target, and by the staging path, which also identifies it.
        rig.runtime.state().unavailable = true;
        let failed = rig.backend().expand_on_node(&volume.id, &target);
        assert!(matches!(failed, Err(Error::Unavailable(_))), "{failed:?}");
        rig.runtime.state().unavailable = false;
        let staging = rig.staging(&volume);
        assert_eq!(rig.backend().expand_on_node(&volume.id, &staging).unwrap(), 2 * BYTES);
        assert!(size(rig) > before + BYTES / 2, "{} after {before}", size(rig));
        let format = rig.backend().volume(&volume.id).unwrap().format.unwrap();
        assert_eq!(format.size_bytes, 2 * BYTES);
        drop(container);
        rig.unpublish_and_unstage(&volume, &target);
    });
}

#[test]
fn a_larger_restored_volume_grows_before_it_is_mounted() {
    for_each_filesystem(|rig, fs_type| {
        let (source, at) = rig.deferred_volume("source", fs_type);
        let container = rig.container(&at);
        fs::write(container.file("kept"), "x").unwrap();
        let snapshot = rig.pool.snapshot("snapshot", &source);
        let larger = rig.pool.create(
            "larger",
            VolumeRequest {
                required_bytes: 2 * BYTES,
                source: Some(Source::Snapshot(snapshot.id)),
                ..support::request()
            },
        );
        rig.stage(&larger, &one_writer());
        let format = rig.backend().volume(&larger.id).unwrap().format.unwrap();
        assert_eq!((format.fs_type, format.size_bytes), (fs_type, 2 * BYTES));
        // Both at the same time, although they have the same filesystem identity.
        let target = rig.target("larger");
        rig.publish(&larger, &target, &deferred()).unwrap();
        let second = rig.container(&target);
        assert!(second.file("kept").exists());
        let stats = rig.backend().stats(&larger.id, &target).unwrap();
        assert!(total(&stats.usage.unwrap()) > BYTES * 3 / 2);
        drop((container, second));
        rig.unpublish_and_unstage(&larger, &target);
        rig.unpublish_and_unstage(&source, &at);
    });
}

#[test]
fn a_runtime_receives_group_policy_and_read_only() {
    with_rig(|rig| {
        let volume = rig.volume("v", FsType::Ext4);
        rig.stage(&volume, &one_writer());
        let target = rig.target("v");
        // An option that only this host could use is not passed on.
        let access = Access::Mount { fs_type: None, flags: vec!["bind".into()], group: None };
        let capability = Capability { access, ..one_writer() };
        let answer = rig.publish(&volume, &target, &Publication { capability, ..deferred() });
        assert!(matches!(answer, Err(Error::Invalid { .. })), "{answer:?}");
        let deferral = Deferral { group: Some(4059), policy: Some(GroupPolicy::OnRootMismatch) };
        let wanted = Publication { readonly: true, deferred: Some(deferral), ..deferred() };
        rig.publish(&volume, &target, &wanted).unwrap();
        let entry = rig.runtime.entry(&target).unwrap();
        assert_eq!((entry.deferral, entry.flags), (deferral, vec!["ro".to_owned()]));
        let container = rig.container(&target);
        assert!(fs::write(container.file("x"), "x").is_err());
        drop(container);
        rig.unpublish_and_unstage(&volume, &target);
    });
}

#[test]
fn an_unclaimed_deferred_volume_is_abnormal() {
    with_rig(|rig| {
        let (volume, target) = rig.deferred_volume("v", FsType::Ext4);
        for path in [&target, &rig.staging(&volume)] {
            assert!(rig.backend().is_deferred(&volume.id, path).unwrap());
            let stats = rig.backend().stats(&volume.id, path).unwrap();
            assert!(stats.usage.is_none() && stats.condition.is_abnormal(), "{stats:?}");
            assert!(stats.condition.message.contains("not claimed"), "{stats:?}");
        }
        // Correct on the host, unless a process mounts it there.
        let condition = || rig.backend().volume_condition(&volume.id).unwrap();
        assert!(!condition().is_abnormal(), "{:?}", condition());
        let device = rig.runtime.entry(&target).unwrap().device;
        support::run("mount", &[path(&device), path(&target)]);
        let stats = rig.backend().stats(&volume.id, &target).unwrap();
        let repeated = rig.publish(&volume, &target, &deferred());
        support::kernel::unmount(&target);
        assert!(stats.condition.is_abnormal(), "{stats:?}");
        assert!(stats.condition.message.contains("mounted on this host"), "{stats:?}");
        refused(repeated, "mounted on this host");
        rig.unpublish_and_unstage(&volume, &target);
    });
}

#[test]
#[ignore = "full tier"]
fn a_deferred_volume_is_unpublished_after_its_container() {
    with_rig(|rig| {
        let (volume, target) = rig.deferred_volume("v", FsType::Ext4);
        let container = rig.container(&target);
        // Directories of kubelet for sub-paths, and a deeper one.
        fs::create_dir_all(target.join("a/b/c")).unwrap();
        refused(rig.backend().unpublish(&volume.id, &target), "still mounted in a container");
        refused(rig.backend().unstage(&volume.id, &rig.staging(&volume)), "published");
        assert!(rig.runtime.entry(&target).is_some() && target.join("a/b/c").exists());
        fs::write(container.file("x"), "the container has lost nothing").unwrap();
        drop(container);
        rig.runtime.state().unavailable = true;
        let failed = rig.backend().unpublish(&volume.id, &target);
        assert!(matches!(failed, Err(Error::Unavailable(_))), "{failed:?}");
        rig.runtime.state().unavailable = false;
        rig.unpublish_and_unstage(&volume, &target);
    });
}

#[test]
fn unpublish_reports_files_written_to_the_host_directory() {
    with_rig(|rig| {
        let (volume, target) = rig.deferred_volume("v", FsType::Ext4);
        let outside = rig.pool.scratch().join("outside");
        fs::create_dir_all(outside.join("empty")).unwrap();
        // Published by an earlier version, which mounted no guard.
        support::kernel::unmount(&target);
        fs::create_dir_all(target.join("stray/below")).unwrap();
        fs::create_dir_all(target.join("kept")).unwrap();
        fs::write(target.join("kept/file"), "x").unwrap();
        std::os::unix::fs::symlink(&outside, target.join("link")).unwrap();
        for _ in 0..2 {
            refused(rig.backend().unpublish(&volume.id, &target), path(&target));
        }
        assert_eq!(rig.runtime.entry(&target), None, "no runtime has it any more");
        assert_eq!(fs::read_to_string(target.join("kept/file")).unwrap(), "x");
        assert!(!target.join("stray").exists() && target.join("link").is_symlink());
        assert!(outside.join("empty").exists(), "nothing is followed");
        fs::rename(&target, rig.pool.scratch().join("moved away")).unwrap();
        rig.unpublish_and_unstage(&volume, &target);
    });
}

#[test]
fn a_guard_keeps_data_off_the_hosts_directory() {
    with_rig(|rig| {
        let (volume, target) = rig.deferred_volume("v", FsType::Ext4);
        let guards = || support::kernel::guards_at(&target);
        let refuses = || {
            assert_eq!(guards(), 1);
            let written = fs::write(target.join("file"), "x").unwrap_err();
            assert_eq!(written.raw_os_error(), Some(libc::ENOSPC), "{written}");
            fs::remove_file(target.join("file")).unwrap();
        };
        refuses();
        rig.publish(&volume, &target, &deferred()).unwrap();
        refuses();
        rig.restart(true);
        refuses();
        // An unmounted guard, as after an upgrade, returns with the next publish.
        support::kernel::unmount(&target);
        fs::create_dir_all(target.join("sub/path")).unwrap();
        rig.publish(&volume, &target, &deferred()).unwrap();
        refuses();
        // More components than any limit of the driver.
        let deep = (0..300).fold(target.clone(), |path, _| path.join("a"));
        fs::create_dir_all(deep).unwrap();
        let in_use = fs::File::open(&target).unwrap();
        rig.unpublish_and_unstage(&volume, &target);
        drop(in_use);
        // A guard that no record knows hides no volume.
        let volume = rig.volume("w", FsType::Ext4);
        fs::create_dir_all(&target).unwrap();
        let guard = ["-t", "tmpfs", "csi-loopback-deferred-volume"];
        support::run("mount", &[&guard[..], &[path(&target)]].concat());
        rig.stage(&volume, &one_writer());
        rig.publish(&volume, &target, &on_host(one_writer())).unwrap();
        fs::write(target.join("file"), "x").unwrap();
        rig.unpublish_and_unstage(&volume, &target);
        assert_eq!(guards(), 0);
    });
}

#[test]
fn a_deferred_volume_can_be_published_again_after_a_reboot() {
    with_rig(|rig| {
        let (volume, target) = rig.deferred_volume("v", FsType::Ext4);
        rig.pool.stop();
        support::kernel::detach_loops_named(&volume.id);
        rig.pool.start();
        // The device in the entry may belong to another volume.
        assert!(rig.runtime.state().entries.is_empty());
        rig.stage(&volume, &one_writer());
        rig.publish(&volume, &target, &deferred()).unwrap();
        drop(rig.container(&target));
        rig.unpublish_and_unstage(&volume, &target);
    });
}

#[test]
fn without_the_feature_deferred_volumes_can_be_unpublished() {
    with_rig(|rig| {
        let (volume, target) = rig.deferred_volume("v", FsType::Ext4);
        rig.restart(false);
        const FLAG: &str = "--enable-defer-fs-ops";
        refused(rig.publish(&volume, &target, &deferred()), FLAG);
        refused(rig.backend().stats(&volume.id, &target), FLAG);
        rig.backend().expand_volume(&volume.id, 2 * BYTES, 0).unwrap();
        refused(rig.backend().expand_on_node(&volume.id, &target), FLAG);
        rig.backend().unpublish(&volume.id, &target).unwrap();
        assert!(!target.exists());
        // A volume staged for mounting at its targets is mounted there by any driver.
        rig.backend().stage(&volume.id, &rig.staging(&volume), &one_writer()).unwrap();
        assert!(!support::inline::is_mounted(&rig.staging(&volume)));
        rig.publish(&volume, &target, &on_host(one_writer())).unwrap();
        assert!(support::inline::is_mounted(&target));
        rig.backend().expand_on_node(&volume.id, &target).unwrap();
        assert!(total(&rig.backend().usage(&volume.id, &target).unwrap()) > BYTES * 3 / 2);
        rig.unpublish_and_unstage(&volume, &target);
        // And after an upgrade.
        rig.restart(true);
        let (volume, target) = rig.deferred_volume("w", FsType::Ext4);
        rig.unpublish_and_unstage(&volume, &target);
    });
}
