//! Requests that cannot be deferred: each fails with its code and field, and nothing is published.

use csi::volume_capability::access_mode::Mode;
use csi_loopback::proto::csi::v1 as csi;
use tonic::Code;

use super::rig::{Rig, grouped, is_gone, with_rig};
use support::driver::*;

#[track_caller]
fn assert_refused(rig: &Rig, req: csi::NodePublishVolumeRequest, code: Code, words: &str) {
    let volume = req.volume_id.clone();
    rig.driver.refused(req, code, words);
    rig.assert_not_mounted(&volume);
    assert!(is_gone(&rig.driver.target(&volume)), "a target was made");
    assert!(rig.crust.calls().is_empty(), "{:?}", rig.crust.calls());
}

#[test]
fn impossible_deferrals_are_refused_by_field() {
    with_rig("30s", |rig| {
        let volume = rig.staged("a");
        let defer = |wanted: csi::VolumeCapability| csi::NodePublishVolumeRequest {
            volume_capability: Some(wanted),
            ..rig.deferring(&volume)
        };
        let plain = |wanted| csi::NodePublishVolumeRequest { defer_fs_ops: false, ..defer(wanted) };
        let secret = csi::NodePublishVolumeRequest {
            secrets: map(&[("password", "hunter2")]),
            ..rig.deferring(&volume)
        };
        for (req, words) in [
            (defer(mounted_as("", Mode::SingleNodeWriter)), "volume_capability: access_mode"),
            (defer(mounted_as("", Mode::SingleNodeMultiWriter)), "volume_capability: access_mode"),
            (defer(block_as(Mode::SingleNodeSingleWriter)), "defer_fs_ops: "),
            (secret, "secrets: "),
            (plain(grouped("2000", "", "")), "volume_capability: volume_supplemental_group"),
            (plain(grouped("2000", "Always", "2000")), "volume_capability: volume_supplemental"),
            (defer(grouped("", "Always", "")), "volume_supplemental_group_change_policy requires"),
            (defer(grouped("2000", "Never", "")), "neither Always nor OnRootMismatch"),
            (defer(grouped("2000", "", "3000")), "volume_mount_group differ"),
            (defer(grouped("staff", "", "")), "is not a decimal group id"),
        ] {
            assert_refused(rig, req, Code::InvalidArgument, words);
        }
        assert!(!rig.driver.log().contains("hunter2"));
        assert_eq!(rig.counted(), 0);
        rig.driver.unstage(&volume);
    });
}
