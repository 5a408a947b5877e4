//! A crust_ops that is absent, fails, does not respond or is restarted. The volume is never mounted
//! on this host instead.

use csi_loopback::proto::csi::v1 as csi;
use tonic::Code;

use super::crust_ops::Mood;
use super::rig::{is_gone, with_rig};
use support::driver::*;
use support::{MIB, path};

#[test]
fn publish_fails_until_crust_ops_is_reachable() {
    with_rig("30s", |rig| {
        let volume = rig.staged("a");
        let target = rig.driver.target(&volume);
        rig.crust.stop();
        for _ in 0..2 {
            let refused = rig.driver.call(rig.deferring(&volume)).unwrap_err();
            assert_eq!(refused.code(), Code::Unavailable, "{refused:?}");
            assert!(refused.message().contains("RuntimeStageVolume: crust_ops"), "{refused:?}");
            rig.assert_not_mounted(&volume);
        }
        assert_eq!(rig.counted(), 0);
        rig.crust.serve();
        rig.driver.ok(rig.deferring(&volume));
        assert!(rig.crust.staged(&target).is_some());
        assert_eq!(rig.counted(), 1);
        // Each call uses a new connection, however often crust_ops restarts.
        for _ in 0..3 {
            rig.crust.stop();
            rig.driver.refused(rig.stats(&volume), Code::Unavailable, "RuntimeGetVolumeStats: ");
            rig.crust.serve();
            assert_eq!(rig.driver.ok(rig.stats(&volume)).usage[0].total, 1000);
        }
        rig.crust.stop();
        rig.driver.ok(expand(&volume, 64 * MIB));
        let grow = expand_on_node(&volume, &target);
        rig.driver.refused(grow.clone(), Code::Unavailable, "RuntimeExpandVolume: ");
        let unpublish = unpublishing(&volume, path(&target));
        rig.driver.refused(unpublish.clone(), Code::Unavailable, "RuntimeUnstageVolume: ");
        rig.crust.serve();
        rig.driver.ok(grow);
        rig.driver.ok(unpublish);
        assert!(is_gone(&target) && rig.crust.staged(&target).is_none());
        rig.driver.unstage(&volume);
    });
}

#[test]
fn a_failed_deferred_publish_can_be_undone() {
    with_rig("30s", |rig| {
        let volume = rig.staged("a");
        let target = rig.driver.target(&volume);
        rig.crust.is(Mood::Fails(Code::Internal, Some("stage")));
        let refused = rig.driver.call(rig.deferring(&volume)).unwrap_err();
        // Kubelet undoes only calls with an unknown result.
        assert_eq!(refused.code(), Code::Unavailable, "{refused:?}");
        assert!(refused.message().contains("INTERNAL: on purpose"), "{refused:?}");
        rig.driver.take_down(&volume);
        assert!(is_gone(&target));
        assert_eq!((rig.counted(), rig.crust.calls().contains(&"unstage")), (0, true));
    });
}

#[test]
fn a_silent_crust_ops_does_not_block_the_driver() {
    with_rig("2s", |rig| {
        let (volume, other) = (rig.staged("a"), rig.staged("b"));
        rig.crust.is(Mood::Silent);
        let silent = "within 2s (--crust-timeout)";
        rig.driver.refused(rig.deferring(&volume), Code::Unavailable, silent);
        rig.assert_not_mounted(&volume);
        rig.driver.refused(rig.deferring(&other), Code::Unavailable, silent);
        rig.driver.refused(rig.stats(&volume), Code::Unavailable, silent);
        let unpublish = unpublishing(&volume, path(&rig.driver.target(&volume)));
        rig.driver.refused(unpublish, Code::Unavailable, silent);
        rig.crust.is(Mood::Well);
        rig.driver.take_down(&volume);
        rig.driver.take_down(&other);
    });
}

#[test]
fn each_crust_ops_error_keeps_its_code_and_message() {
    with_rig("30s", |rig| {
        let volume = rig.deferred("a");
        let target = rig.driver.target(&volume);
        rig.driver.ok(expand(&volume, 64 * MIB));
        let grow = || expand_on_node(&volume, &target);
        for (code, stats, grown) in [
            (Code::PermissionDenied, Code::Internal, Code::Internal),
            (Code::FailedPrecondition, Code::Ok, Code::Unavailable),
            (Code::NotFound, Code::Ok, Code::FailedPrecondition),
            (Code::Unavailable, Code::Ok, Code::Unavailable),
        ] {
            rig.crust.is(Mood::Fails(code, None));
            rig.driver.refused(grow(), grown, "on purpose");
            match stats {
                Code::Ok => {
                    let reported = rig.driver.ok(rig.stats(&volume));
                    let condition = reported.volume_condition.unwrap();
                    assert!(reported.usage.is_empty() && condition.message.contains("on purpose"));
                    assert_eq!(condition.abnormal, code != Code::Unavailable, "{code:?}");
                }
                stats => rig.driver.refused(rig.stats(&volume), stats, "on purpose"),
            }
            rig.assert_not_mounted(&volume);
        }
        rig.crust.is(Mood::Lies);
        rig.driver.refused(rig.stats(&volume), Code::Internal, "negative");
        rig.crust.is(Mood::Fails(Code::InvalidArgument, Some("stage")));
        let again = csi::NodePublishVolumeRequest { ..rig.deferring(&volume) };
        rig.driver.refused(again, Code::InvalidArgument, "volume_capability: RuntimeStageVolume");
        rig.crust.is(Mood::Well);
        rig.driver.take_down(&volume);
    });
}
