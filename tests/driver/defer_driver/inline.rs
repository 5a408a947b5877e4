//! Deferred inline volumes.

use csi_loopback::proto::csi::v1 as csi;
use tonic::Code;

use super::rig::{is_gone, with_rig};
use support::driver::*;
use support::inline::{PodVolume, pod_volume};
use support::path;

fn deferred(volume: &PodVolume) -> csi::NodePublishVolumeRequest {
    let publish = volume.publishing(&[("size", "32Mi")]);
    csi::NodePublishVolumeRequest { defer_fs_ops: true, ..publish }
}

#[test]
fn the_field_defers_an_inline_volume() {
    with_rig("30s", |rig| {
        let driver = &rig.driver;
        for pod in ["one", "two"] {
            let before = rig.counted();
            let volume = pod_volume(driver, pod, "scratch");
            std::fs::create_dir_all(volume.target.parent().unwrap()).unwrap();
            let publish = deferred(&volume);
            for _ in 0..2 {
                driver.ok(publish.clone());
                assert_eq!(support::kernel::guards_at(&volume.target), 1);
            }
            assert_eq!(rig.counted(), before + 1);
            let reported = rig.crust.staged(&volume.target).unwrap();
            let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
            assert!(!mounts.contains(&format!(" {} ", reported.volume_backing_path)), "{mounts}");
            let reported = driver.ok(stats(&volume.handle, path(&volume.target)));
            assert_eq!(reported.usage[0].total, 1000);
            let grow = expand_on_node(&volume.handle, &volume.target);
            driver.refused(grow, Code::FailedPrecondition, "cannot be expanded");
            driver.unpublish(&volume.handle, &volume.target);
            assert!(is_gone(&volume.target) && rig.crust.staged(&volume.target).is_none());
        }
    });
}
