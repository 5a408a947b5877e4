//! Stories 5 and 6: the driver runs without the feature, and then with it again.

use csi_loopback::proto::csi::v1 as csi;
use tonic::Code;

use super::rig::{is_gone, one_pod, with_rig};
use support::MIB;
use support::driver::*;

const FLAG: &str = "--enable-defer-fs-ops";

#[test]
fn story_5_a_downgraded_driver_only_unpublishes() {
    with_rig("30s", |rig| {
        let (gone, stays) = (rig.deferred("gone"), rig.deferred("stays"));
        rig.driver.ok(expand(&stays, 64 * MIB));
        rig.restart(false);
        for volume in [&gone, &stays] {
            rig.assert_not_mounted(volume);
            rig.driver.refused(rig.stats(volume), Code::FailedPrecondition, FLAG);
        }
        let by_field = csi::NodeGetVolumeStatsRequest { defer_fs_ops: true, ..rig.stats(&stays) };
        rig.driver.refused(by_field, Code::FailedPrecondition, FLAG);
        let grow = expand_on_node(&stays, &rig.driver.target(&stays));
        rig.driver.refused(grow.clone(), Code::FailedPrecondition, FLAG);
        let before = rig.crust.calls().len();
        // The pod ends. Kubelet does not send the field, and there is no crust_ops.
        rig.driver.take_down(&gone);
        assert!(is_gone(&rig.driver.target(&gone)));
        assert_eq!(rig.crust.calls().len(), before);
        // The other volume's pod still exists at the upgrade.
        rig.restart(true);
        assert_eq!(rig.driver.ok(rig.stats(&stays)).usage[0].total, 1000);
        rig.driver.ok(grow);
        rig.driver.take_down(&stays);
        assert!(rig.crust.staged(&rig.driver.target(&stays)).is_none());
        assert_eq!(rig.counted(), 0, "what was published before this start");
    });
}

#[test]
fn story_6_a_downgraded_driver_publishes_no_deferred_volume() {
    with_rig("30s", |rig| {
        let volume = rig.staged("field");
        rig.restart(false);
        let target = rig.driver.target(&volume);
        for _ in 0..2 {
            rig.driver.refused(rig.deferring(&volume), Code::FailedPrecondition, FLAG);
            rig.assert_not_mounted(&volume);
            assert!(is_gone(&target));
        }
        // The staged volume can be mounted on this host if no deferral is requested.
        rig.driver.ok(rig.driver.publishing(&volume, &target, &one_pod()));
        assert_eq!(mounts_at(&target).len(), 1);
        rig.driver.unpublish(&volume, &target);
        rig.restart(true);
        rig.driver.ok(rig.deferring(&volume));
        assert_eq!(rig.counted(), 1);
        rig.assert_not_mounted(&volume);
        assert!(rig.crust.staged(&target).is_some());
        rig.driver.take_down(&volume);
        assert!(!rig.driver.log().contains("PANIC"));
    });
}
