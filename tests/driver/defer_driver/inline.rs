//! Volumes of pods that a runtime mounts.

use csi_loopback::proto::csi::v1 as csi;
use tonic::Code;

use super::rig::{is_gone, with_rig};
use support::driver::*;
use support::inline::{PodVolume, is_mounted, pod_volume};
use support::path;

fn deferred(volume: &PodVolume) -> csi::NodePublishVolumeRequest {
    let publish = volume.publishing(&[("size", "32Mi")]);
    csi::NodePublishVolumeRequest { defer_fs_ops: true, ..publish }
}

#[test]
fn a_pods_own_volume_is_left_to_a_runtime_by_the_field() {
    with_rig("30s", |rig| {
        let driver = &rig.driver;
        for pod in ["one", "two"] {
            let before = rig.counted();
            let volume = pod_volume(driver, pod, "scratch");
            std::fs::create_dir_all(volume.target.parent().unwrap()).unwrap();
            let publish = deferred(&volume);
            for _ in 0..2 {
                driver.ok(publish.clone());
                assert!(!is_mounted(&volume.target) && volume.target.is_dir());
            }
            assert_eq!(rig.counted(), before + 1);
            let told = rig.crust.staged(&volume.target).unwrap();
            let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
            assert!(!mounts.contains(&format!(" {} ", told.volume_backing_path)), "{mounts}");
            let told = driver.ok(stats(&volume.handle, path(&volume.target)));
            assert_eq!(told.usage[0].total, 1000);
            let grow = expand_on_node(&volume.handle, &volume.target);
            driver.refused(grow, Code::FailedPrecondition, "keeps its size");
            driver.unpublish(&volume.handle, &volume.target);
            assert!(is_gone(&volume.target) && rig.crust.staged(&volume.target).is_none());
        }
    });
}

#[test]
fn a_pods_own_volume_is_refused_while_the_feature_is_off_and_goes_in_any_case() {
    with_rig("30s", |rig| {
        let volume = pod_volume(&rig.driver, "one", "scratch");
        std::fs::create_dir_all(volume.target.parent().unwrap()).unwrap();
        let publish = deferred(&volume);
        rig.driver.ok(publish.clone());
        rig.restart(false);
        let flag = "--enable-defer-fs-ops";
        rig.driver.refused(publish.clone(), Code::FailedPrecondition, flag);
        let told = stats(&volume.handle, path(&volume.target));
        rig.driver.refused(told, Code::FailedPrecondition, flag);
        rig.driver.unpublish(&volume.handle, &volume.target);
        assert!(is_gone(&volume.target));
        rig.driver.refused(publish, Code::FailedPrecondition, flag);
        assert!(is_gone(&volume.target) && !is_mounted(&volume.target));
        // The crust_ops of then was not told.
        rig.restart(true);
    });
}
