//! A volume is mounted either by this host or by a runtime, at one target.

use std::fs;

use csi_loopback::backend::{Error, FsType};

use super::*;

#[test]
fn a_second_target_of_a_deferred_volume_is_refused() {
    with_rig(|rig| {
        let (volume, target) = rig.deferred_volume("v", FsType::Ext4);
        let second = rig.target("second");
        for wanted in [deferred(), on_host(one_writer())] {
            refused(rig.publish(&volume, &second, &wanted), "one target");
        }
        // At the same target, other arguments are a conflict.
        let answer = rig.publish(&volume, &target, &on_host(one_writer()));
        assert!(matches!(answer, Err(Error::AlreadyExists(_))), "{answer:?}");
        assert!(!second.exists() && rig.runtime.entry(&second).is_none());
        assert!(rig.runtime.entry(&target).is_some());
        rig.unpublish_and_unstage(&volume, &target);
        rig.stage(&volume, &one_writer());
        rig.publish(&volume, &target, &on_host(one_writer())).unwrap();
        refused(rig.publish(&volume, &second, &deferred()), "one target");
        let answer = rig.publish(&volume, &target, &deferred());
        assert!(matches!(answer, Err(Error::AlreadyExists(_))), "{answer:?}");
        assert!(rig.runtime.entry(&target).is_none());
        rig.unpublish_and_unstage(&volume, &target);
    });
}

#[test]
#[ignore = "full tier"]
fn the_host_does_not_mount_a_volume_mounted_elsewhere() {
    for_each_filesystem(|rig, fs_type| {
        let (volume, target) = rig.deferred_volume("v", fs_type);
        let entry = rig.runtime.entry(&target).unwrap();
        rig.backend().unpublish(&volume.id, &target).unwrap();
        // By a runtime that kept its entry.
        let container = entry.mount();
        refused(
            rig.publish(&volume, &target, &on_host(one_writer())),
            "still mounted in a container",
        );
        refused(rig.publish(&volume, &target, &deferred()), "still mounted in a container");
        assert!(!is_mounted_on_host(&entry.device) && rig.runtime.entry(&target).is_none());
        drop(container);
        rig.publish(&volume, &target, &on_host(one_writer())).unwrap();
        assert!(is_mounted_on_host(&entry.device));
        rig.unpublish_and_unstage(&volume, &target);
    });
}

#[test]
fn only_a_volume_with_one_writer_or_none_is_deferred() {
    with_rig(|rig| {
        use AccessMode::*;
        let mut number = 0;
        for mode in [SingleNodeWriter, SingleNodeMultiWriter, SingleNodeReaderOnly] {
            for readonly in [false, true] {
                number += 1;
                let volume = rig.volume(&format!("v{number}"), FsType::Ext4);
                let target = rig.target(&volume.name);
                let capability = Capability { mode, ..one_writer() };
                rig.stage(&volume, &capability);
                let wanted = Publication { capability, readonly, ..deferred() };
                let answer = rig.publish(&volume, &target, &wanted);
                if readonly || mode == SingleNodeReaderOnly {
                    answer.unwrap();
                    assert_eq!(rig.runtime.entry(&target).unwrap().flags, ["ro"]);
                } else {
                    assert!(
                        matches!(&answer, Err(Error::Invalid { field, .. }) if field.ends_with("access_mode")),
                        "{answer:?}"
                    );
                    assert!(rig.runtime.entry(&target).is_none() && !target.exists());
                }
                rig.backend().unpublish(&volume.id, &target).unwrap();
                rig.backend().unstage(&volume.id, &rig.staging(&volume)).unwrap();
            }
        }
        let raw = rig.pool.volume("raw", MIB);
        rig.stage(&raw, &support::raw());
        let target = rig.target("raw");
        for capability in [support::raw(), one_writer()] {
            let wanted = Publication { capability, ..deferred() };
            assert!(rig.publish(&raw, &target, &wanted).is_err());
        }
        rig.backend().unstage(&raw.id, &rig.staging(&raw)).unwrap();
    });
}

#[test]
fn a_mounted_volume_is_deferred_after_its_last_target() {
    for_each_filesystem(|rig, fs_type| {
        rig.restart(false);
        let volume = rig.volume("v", fs_type);
        rig.stage(&volume, &one_writer());
        let (target, staging) = (rig.target("v"), rig.staging(&volume));
        rig.publish(&volume, &target, &on_host(one_writer())).unwrap();
        fs::write(target.join("kept"), "x").unwrap();
        rig.restart(true);
        let other = rig.target("other");
        refused(rig.publish(&volume, &other, &deferred()), "one target");
        // It continues as staged.
        rig.backend().stage(&volume.id, &staging, &one_writer()).unwrap();
        assert!(support::inline::is_mounted(&staging) && target.join("kept").exists());
        rig.backend().unpublish(&volume.id, &target).unwrap();
        rig.publish(&volume, &target, &deferred()).unwrap();
        let entry = rig.runtime.entry(&target).unwrap();
        assert!(!is_mounted_on_host(&entry.device));
        rig.backend().stage(&volume.id, &staging, &one_writer()).unwrap();
        assert!(!is_mounted_on_host(&entry.device));
        let container = rig.container(&target);
        assert!(container.file("kept").exists());
        drop(container);
        rig.unpublish_and_unstage(&volume, &target);
    });
}
