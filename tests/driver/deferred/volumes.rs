//! A volume's way through a runtime: handed over, mounted in a container alone, measured, grown, taken back.

use std::fs;

use csi_loopback::backend::{Error, FsType, GroupPolicy, Source, VolumeRequest};

use super::*;

#[test]
fn a_volume_that_is_left_to_a_runtime_is_never_mounted_on_the_host() {
    for_each_filesystem(|rig, fs_type| {
        let (volume, target) = rig.left("v", fs_type);
        let word = rig.runtime.word(&target).unwrap();
        assert_eq!(word.fs_type, fs_type);
        assert_eq!(word.flags.contains(&"nouuid".to_owned()), fs_type == FsType::Xfs);
        assert!(target.is_dir() && !is_seen(&word.device));
        let container = rig.container(&target);
        fs::write(container.file("kept"), "written in the container").unwrap();
        assert!(!is_seen(&word.device) && !target.join("kept").exists());
        // A restart, and kubelet that repeats itself, change nothing of it.
        rig.restart(true);
        rig.publish(&volume, &target, &deferred()).unwrap();
        rig.backend().stage(&volume.id, &rig.staging(&volume), &one_writer()).unwrap();
        assert_eq!(rig.runtime.word(&target), Some(word.clone()));
        assert!(!is_seen(&word.device));
        fs::write(container.file("more"), "x").unwrap();
        let stats = rig.backend().stats(&volume.id, &target).unwrap();
        assert!(total(&stats.usage.unwrap()) > BYTES / 2 && !stats.condition.is_abnormal());
        drop(container);
        rig.take_down(&volume, &target);
        assert_eq!(rig.runtime.word(&target), None);
        let kept = rig.on_host(&volume, |at| fs::read_to_string(at.join("kept")).unwrap());
        assert_eq!(kept, "written in the container");
    });
}

#[test]
fn a_volume_grows_in_its_container() {
    for_each_filesystem(|rig, fs_type| {
        if !grows_mounted(fs_type) {
            return;
        }
        let (volume, target) = rig.left("v", fs_type);
        let container = rig.container(&target);
        let size =
            |rig: &Rig| total(&rig.backend().stats(&volume.id, &target).unwrap().usage.unwrap());
        let before = size(rig);
        rig.backend().expand_volume(&volume.id, 2 * BYTES, 0).unwrap();
        // By its target, and by the staging path, which leads to it too.
        rig.runtime.state().away = true;
        let failed = rig.backend().expand_on_node(&volume.id, &target);
        assert!(matches!(failed, Err(Error::Unavailable(_))), "{failed:?}");
        rig.runtime.state().away = false;
        let staging = rig.staging(&volume);
        assert_eq!(rig.backend().expand_on_node(&volume.id, &staging).unwrap(), 2 * BYTES);
        assert!(size(rig) > before + BYTES / 2, "{} after {before}", size(rig));
        let format = rig.backend().volume(&volume.id).unwrap().format.unwrap();
        assert_eq!(format.size_bytes, 2 * BYTES);
        drop(container);
        rig.take_down(&volume, &target);
    });
}

#[test]
fn a_restored_volume_that_is_larger_has_grown_before_anybody_mounts_it() {
    for_each_filesystem(|rig, fs_type| {
        let (source, at) = rig.left("source", fs_type);
        let container = rig.container(&at);
        fs::write(container.file("kept"), "x").unwrap();
        let snapshot = rig.pool.snapshot("cut", &source);
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
        // Both at a time, though they have one identity.
        let target = rig.target("larger");
        rig.publish(&larger, &target, &deferred()).unwrap();
        let second = rig.container(&target);
        assert!(second.file("kept").exists());
        let stats = rig.backend().stats(&larger.id, &target).unwrap();
        assert!(total(&stats.usage.unwrap()) > BYTES * 3 / 2);
        drop((container, second));
        rig.take_down(&larger, &target);
        rig.take_down(&source, &at);
    });
}

#[test]
fn a_runtime_is_told_group_policy_and_that_nothing_is_to_be_written() {
    with_rig(|rig| {
        let volume = rig.volume("v", FsType::Ext4);
        rig.stage(&volume, &one_writer());
        let target = rig.target("v");
        let deferral = Deferral { group: Some(4059), policy: Some(GroupPolicy::OnRootMismatch) };
        let wanted = Publication { readonly: true, deferred: Some(deferral), ..deferred() };
        rig.publish(&volume, &target, &wanted).unwrap();
        let word = rig.runtime.word(&target).unwrap();
        assert_eq!((word.deferral, word.flags), (deferral, vec!["ro".to_owned()]));
        let container = rig.container(&target);
        assert!(fs::write(container.file("x"), "x").is_err());
        drop(container);
        rig.take_down(&volume, &target);
    });
}

#[test]
fn a_word_that_was_lost_is_left_again_when_the_call_is_repeated() {
    with_rig(|rig| {
        let (volume, target) = rig.left("v", FsType::Ext4);
        rig.runtime.state().words.clear();
        rig.publish(&volume, &target, &deferred()).unwrap();
        assert!(rig.runtime.word(&target).is_some());
        rig.take_down(&volume, &target);
    });
}

#[test]
fn a_volume_that_no_runtime_has_claimed_is_told_to_be_abnormal() {
    with_rig(|rig| {
        let (volume, target) = rig.left("v", FsType::Ext4);
        for path in [&target, &rig.staging(&volume)] {
            assert!(rig.backend().is_deferred(&volume.id, path).unwrap());
            let stats = rig.backend().stats(&volume.id, path).unwrap();
            assert!(stats.usage.is_none() && stats.condition.is_abnormal(), "{stats:?}");
            assert!(stats.condition.message.contains("not claimed"), "{stats:?}");
        }
        // On the host it is as it should be, unless somebody mounts it there.
        let condition = || rig.backend().volume_condition(&volume.id).unwrap();
        assert!(!condition().is_abnormal(), "{:?}", condition());
        let device = rig.runtime.word(&target).unwrap().device;
        support::run("mount", &[path(&device), path(&target)]);
        let stats = rig.backend().stats(&volume.id, &target).unwrap();
        let repeated = rig.publish(&volume, &target, &deferred());
        support::kernel::unmount(&target);
        assert!(stats.condition.is_abnormal(), "{stats:?}");
        assert!(stats.condition.message.contains("mounted on this host"), "{stats:?}");
        refused(repeated, "mounted on this host");
        rig.take_down(&volume, &target);
    });
}

#[test]
#[ignore = "full tier"]
fn a_volume_is_taken_back_when_no_container_has_it() {
    with_rig(|rig| {
        let (volume, target) = rig.left("v", FsType::Ext4);
        let container = rig.container(&target);
        // What kubelet makes for sub-paths, and one deeper than that.
        fs::create_dir_all(target.join("a/b/c")).unwrap();
        refused(rig.backend().unpublish(&volume.id, &target), "still mounted in a container");
        refused(rig.backend().unstage(&volume.id, &rig.staging(&volume)), "published");
        assert!(rig.runtime.word(&target).is_some() && target.join("a/b/c").exists());
        fs::write(container.file("x"), "the container has lost nothing").unwrap();
        drop(container);
        rig.runtime.state().away = true;
        let failed = rig.backend().unpublish(&volume.id, &target);
        assert!(matches!(failed, Err(Error::Unavailable(_))), "{failed:?}");
        rig.runtime.state().away = false;
        rig.take_down(&volume, &target);
    });
}

#[test]
fn files_that_were_written_past_a_volume_stay_and_unpublish_names_their_path_until_they_are_gone() {
    with_rig(|rig| {
        let (volume, target) = rig.left("v", FsType::Ext4);
        let outside = rig.pool.scratch().join("outside");
        fs::create_dir_all(outside.join("empty")).unwrap();
        fs::create_dir_all(target.join("stray/below")).unwrap();
        fs::create_dir_all(target.join("kept")).unwrap();
        fs::write(target.join("kept/file"), "x").unwrap();
        std::os::unix::fs::symlink(&outside, target.join("link")).unwrap();
        for _ in 0..2 {
            refused(rig.backend().unpublish(&volume.id, &target), path(&target));
        }
        assert_eq!(rig.runtime.word(&target), None, "no runtime has it any more");
        assert_eq!(fs::read_to_string(target.join("kept/file")).unwrap(), "x");
        assert!(!target.join("stray").exists() && target.join("link").is_symlink());
        assert!(outside.join("empty").exists(), "nothing is followed");
        fs::rename(&target, rig.pool.scratch().join("moved away")).unwrap();
        rig.take_down(&volume, &target);
    });
}

#[test]
fn a_reboot_leaves_a_volume_that_can_be_published_again() {
    with_rig(|rig| {
        let (volume, target) = rig.left("v", FsType::Ext4);
        rig.pool.stop();
        for device in support::kernel::loops_named(&volume.id) {
            support::run("losetup", &["-d", &device]);
        }
        rig.pool.start();
        // The device that it was told will be somebody else's.
        assert!(rig.runtime.state().words.is_empty());
        rig.stage(&volume, &one_writer());
        rig.publish(&volume, &target, &deferred()).unwrap();
        drop(rig.container(&target));
        rig.take_down(&volume, &target);
    });
}

#[test]
fn a_driver_that_no_longer_knows_runtimes_takes_volumes_back_and_does_nothing_else() {
    with_rig(|rig| {
        let (volume, target) = rig.left("v", FsType::Ext4);
        rig.restart(false);
        const FLAG: &str = "--enable-defer-fs-ops";
        refused(rig.publish(&volume, &target, &deferred()), FLAG);
        refused(rig.backend().stats(&volume.id, &target), FLAG);
        rig.backend().expand_volume(&volume.id, 2 * BYTES, 0).unwrap();
        refused(rig.backend().expand_on_node(&volume.id, &target), FLAG);
        rig.backend().unpublish(&volume.id, &target).unwrap();
        assert!(!target.exists());
        // What was staged to be mounted at its targets is mounted at them, by whatever driver.
        rig.backend().stage(&volume.id, &rig.staging(&volume), &one_writer()).unwrap();
        assert!(!support::inline::is_mounted(&rig.staging(&volume)));
        rig.publish(&volume, &target, &on_host(one_writer())).unwrap();
        assert!(support::inline::is_mounted(&target));
        rig.backend().expand_on_node(&volume.id, &target).unwrap();
        assert!(total(&rig.backend().usage(&volume.id, &target).unwrap()) > BYTES * 3 / 2);
        rig.take_down(&volume, &target);
        // And up again.
        rig.restart(true);
        let (volume, target) = rig.left("w", FsType::Ext4);
        rig.take_down(&volume, &target);
    });
}
