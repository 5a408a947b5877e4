//! What is published for a runtime, and what becomes of it.

use csi::node_service_capability::{Type as Node, rpc::Type as N};
use csi_loopback::proto::crust::volume_group_change_policy::Policy;
use csi_loopback::proto::crust::volume_type::Type;
use csi_loopback::proto::csi::v1 as csi;
use tonic::Code;

use super::rig::{grouped, is_gone, one_pod, with_rig};
use support::driver::*;
use support::{MIB, path};

fn capabilities(driver: &Driver) -> Vec<i32> {
    let answer = driver.ok(csi::NodeGetCapabilitiesRequest {}).capabilities;
    let number = |one: &csi::NodeServiceCapability| match one.r#type.as_ref().unwrap() {
        Node::Rpc(rpc) => rpc.r#type,
    };
    answer.iter().map(number).collect()
}

#[test]
fn the_capabilities_are_advertised_with_the_flag_and_only_then() {
    with_rig("30s", |rig| {
        let extensions = [
            N::DeferFsOps,
            N::DeferFsOpsWithSupplementalGroup,
            N::DeferFsOpsWithSupplementalGroupChangePolicy,
        ]
        .map(i32::from);
        assert_eq!(extensions, [2857, 2858, 2859]);
        let on = capabilities(&rig.driver);
        assert!(extensions.iter().all(|one| on.contains(one)), "{on:?}");
        rig.restart(false);
        let off = capabilities(&rig.driver);
        assert!(extensions.iter().all(|one| !off.contains(one)), "{off:?}");
        assert_eq!(on.len(), off.len() + 3);
    });
}

#[test]
fn a_volume_that_is_left_to_a_runtime_is_told_to_it_and_mounted_nowhere_here() {
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
        let told = rig.crust.staged(&target).unwrap();
        assert_eq!(told.volume_type.unwrap().r#type(), Type::Block);
        assert!(told.volume_backing_path.starts_with("/dev/loop"), "{told:?}");
        assert_eq!(
            (told.fs_type.as_str(), told.volume_supplemental_group.as_str()),
            ("ext4", "2000")
        );
        let policy = told.volume_supplemental_group_change_policy.unwrap().policy();
        assert_eq!(policy, Policy::OnRootMismatch);

        let told = rig.driver.ok(rig.stats(&volume));
        assert_eq!((told.usage[0].total, told.usage[0].used, told.usage.len()), (1000, 400, 2));
        assert_eq!(told.volume_condition.unwrap().message, "in a container");
        let by_field = csi::NodeGetVolumeStatsRequest { defer_fs_ops: true, ..rig.stats(&volume) };
        assert_eq!(rig.driver.ok(by_field).usage.len(), 2);

        rig.driver.ok(expand(&volume, 64 * MIB));
        let grown = rig.driver.ok(expand_on_node(&volume, &target)).capacity_bytes;
        assert_eq!(grown as u64, 64 * MIB);
        let asked = rig.crust.expanded().pop().unwrap();
        assert_eq!(asked.volume_target_path, path(&target));
        assert_eq!(asked.capacity_range.unwrap().required_bytes as u64, 64 * MIB);

        rig.driver.unpublish(&volume, &target);
        assert!(rig.crust.staged(&target).is_none() && is_gone(&target));
        rig.driver.unstage(&volume);
        assert!(rig.driver.log().contains("deferred=true"), "{}", rig.driver.log());
        // Once more is another time.
        rig.driver.stage(&volume, &one_pod());
        rig.driver.ok(rig.deferring(&volume));
        assert_eq!(rig.counted(), 2);
        rig.driver.take_down(&volume);
    });
}

#[test]
fn what_is_not_left_to_a_runtime_is_mounted_here_and_not_counted() {
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

#[test]
fn the_removed_parameter_is_refused_and_a_volume_that_was_made_with_it_is_not_mounted_here() {
    with_rig("30s", |rig| {
        let driver = &rig.driver;
        let annotation = "cbt.storage.k8s.io/defer-fs-mount";
        for value in ["true", "false"] {
            let made = csi::CreateVolumeRequest {
                parameters: map(&[("deferFSMount", value)]),
                ..create("a", 32 * MIB, one_pod())
            };
            driver.refused(made.clone(), Code::InvalidArgument, "parameters: deferFSMount");
            driver.refused(made, Code::InvalidArgument, annotation);
        }
        // Its PersistentVolume has the context for good.
        let volume = driver.volume("old", 32 * MIB, one_pod());
        let context = map(&[("deferFSMount", "true")]);
        let stage = csi::NodeStageVolumeRequest {
            volume_context: context.clone(),
            ..driver.staging_of(&volume, &one_pod())
        };
        driver.ok(stage);
        let target = driver.target(&volume);
        let here = csi::NodePublishVolumeRequest {
            volume_context: context,
            ..driver.publishing(&volume, &target, &one_pod())
        };
        for words in ["volume_context: deferFSMount", annotation] {
            driver.refused(here.clone(), Code::FailedPrecondition, words);
        }
        rig.assert_not_mounted(&volume);
        assert!(is_gone(&target) && rig.crust.calls().is_empty());
        // By the annotation of its pod, which the node proxy turns into the field.
        driver.ok(csi::NodePublishVolumeRequest { defer_fs_ops: true, ..here });
        rig.assert_not_mounted(&volume);
        assert!(rig.crust.staged(&target).is_some());
        driver.take_down(&volume);

        let raw = driver.volume("raw", 32 * MIB, block());
        let target = driver.publish(&raw, &block());
        assert_eq!(mounts_at(&target).len(), 1);
        driver.take_down(&raw);
    });
}
