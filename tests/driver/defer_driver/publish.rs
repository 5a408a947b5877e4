//! Deferred publications and their end.

use csi::node_service_capability::rpc::Type as N;
use csi_loopback::proto::crust::volume_group_change_policy::Policy;
use csi_loopback::proto::crust::volume_type::Type;
use csi_loopback::proto::csi::v1 as csi;
use tonic::Code;

use super::rig::{grouped, is_gone, one_pod, with_rig};
use support::driver::*;
use support::{MIB, path};

#[test]
fn deferral_capabilities_require_the_flag() {
    with_rig("30s", |rig| {
        let extensions = [
            N::DeferFsOps,
            N::DeferFsOpsWithSupplementalGroup,
            N::DeferFsOpsWithSupplementalGroupChangePolicy,
        ]
        .map(i32::from);
        assert_eq!(extensions, [2857, 2858, 2859]);
        let on = node_capabilities(&rig.driver);
        assert!(extensions.iter().all(|one| on.contains(one)), "{on:?}");
        rig.restart(false);
        let off = node_capabilities(&rig.driver);
        assert!(extensions.iter().all(|one| !off.contains(one)), "{off:?}");
        assert_eq!(on.len(), off.len() + 3);
    });
}

#[test]
fn a_deferred_volume_is_passed_to_crust_ops_not_mounted() {
    with_rig("30s", |rig| {
        let volume = rig.staged("a");
        rig.assert_not_mounted(&volume);
        let target = rig.driver.target(&volume);
        let wanted = grouped("2000", "OnRootMismatch", "2000");
        let publish = csi::NodePublishVolumeRequest {
            volume_capability: Some(wanted),
            ..rig.deferring(&volume)
        };
        for _ in 0..3 {
            rig.driver.ok(publish.clone());
            rig.assert_not_mounted(&volume);
        }
        assert!(target.is_dir());
        assert_eq!(rig.counted(), 1, "a call that is repeated counts once");
        let reported = rig.crust.staged(&target).unwrap();
        assert_eq!(reported.volume_type.unwrap().r#type(), Type::Block);
        assert!(reported.volume_backing_path.starts_with("/dev/loop"), "{reported:?}");
        assert_eq!(
            (reported.fs_type.as_str(), reported.volume_supplemental_group.as_str()),
            ("ext4", "2000")
        );
        let policy = reported.volume_supplemental_group_change_policy.unwrap().policy();
        assert_eq!(policy, Policy::OnRootMismatch);

        let reported = rig.driver.ok(rig.stats(&volume));
        assert_eq!(
            (reported.usage[0].total, reported.usage[0].used, reported.usage.len()),
            (1000, 400, 2)
        );
        assert_eq!(reported.volume_condition.unwrap().message, "in a container");
        let by_field = csi::NodeGetVolumeStatsRequest { defer_fs_ops: true, ..rig.stats(&volume) };
        assert_eq!(rig.driver.ok(by_field).usage.len(), 2);

        rig.driver.ok(expand(&volume, 64 * MIB));
        let grown = rig.driver.ok(expand_on_node(&volume, &target)).capacity_bytes;
        assert_eq!(grown as u64, 64 * MIB);
        let req = rig.crust.expanded().pop().unwrap();
        assert_eq!(req.volume_target_path, path(&target));
        assert_eq!(req.capacity_range.unwrap().required_bytes as u64, 64 * MIB);

        rig.driver.unpublish(&volume, &target);
        assert!(rig.crust.staged(&target).is_none() && is_gone(&target));
        rig.driver.unstage(&volume);
        let log = rig.driver.log();
        for method in ["NodePublishVolume", "NodeGetVolumeStats"] {
            let mut lines = log.lines().filter(|line| line.contains("deferred=true"));
            assert!(lines.any(|line| line.contains(method)), "{method}: {log}");
        }
        // Publishing again after the unpublish counts again.
        rig.driver.stage(&volume, &one_pod());
        rig.driver.ok(rig.deferring(&volume));
        assert_eq!(rig.counted(), 2);
        rig.driver.take_down(&volume);
    });
}

#[test]
fn a_volume_without_deferral_is_mounted_and_not_counted() {
    with_rig("30s", |rig| {
        let volume = rig.staged("a");
        let target = rig.driver.target(&volume);
        rig.driver.ok(rig.driver.publishing(&volume, &target, &one_pod()));
        assert_eq!(mounts_at(&target).len(), 1);
        assert!(rig.driver.ok(rig.stats(&volume)).usage[0].total > 0);
        let by_field = csi::NodeGetVolumeStatsRequest { defer_fs_ops: true, ..rig.stats(&volume) };
        rig.driver.refused(by_field, Code::FailedPrecondition, "defer_fs_ops: ");
        let by_field =
            csi::NodeExpandVolumeRequest { defer_fs_ops: true, ..expand_on_node(&volume, &target) };
        rig.driver.refused(by_field, Code::FailedPrecondition, "defer_fs_ops: ");
        // The row decides.
        let by_field = csi::NodeUnpublishVolumeRequest {
            defer_fs_ops: true,
            ..unpublishing(&volume, path(&target))
        };
        rig.driver.ok(by_field);
        assert!(is_gone(&target) && rig.crust.calls().is_empty());
        assert_eq!(rig.counted(), 0);
        rig.driver.unstage(&volume);
    });
}
