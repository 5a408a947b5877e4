//! What was mounted on the host before anybody could know that the pod wants it left to its runtime: told, and never done twice.

use std::fs;

use csi_loopback::proto::csi::v1 as csi;
use support::cluster::shared;
use tonic::Code;

use support::cluster::node_proxy::Rig;
use support::cluster::recorder::DEFERRING;
use support::inline::is_mounted;
use support::{path, run};

#[test]
fn a_pod_that_opts_in_after_it_was_mounted_is_told_so_and_not_mounted_twice() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::ours(cluster);
    let claim = rig.claim("data");
    let pod = rig.pod("app", &[&claim], None);
    let target = rig.mount(&pod, &claim).unwrap();
    assert!(is_mounted(&target));
    rig.opt_in(&pod, "data");
    rig.told(&pod, &["was mounted on the host at"]);
    assert_eq!(rig.metric("csi_loopback_mounted_before_opt_in_total"), 1.0);
    rig.wait_until_heard(&pod);
    // Kubelet publishes again, to this proxy and to one that was never told of the mount.
    for restarted in [false, true] {
        if restarted {
            rig.restart_proxy();
        }
        let status = rig.publish(&pod, &claim).unwrap_err();
        assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
        assert!(status.message().contains("mounted on the host"), "{status:?}");
        assert_eq!(rig.failures("publish", "mounted_on_host"), 1.0);
        assert_eq!(rig.vol_data(&target), None, "nothing is remembered");
        assert!(is_mounted(&target), "what the pod uses stays");
    }
    rig.told(&pod, &["is mounted on the host", "delete the pod"]);
    // The pod can end.
    rig.unmount(&pod, &claim);
    assert!(!is_mounted(&target));
}

#[test]
fn a_driver_that_mounts_a_deferred_volume_on_the_host_has_it_taken_back_and_the_pod_is_refused() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::recording(cluster, &DEFERRING);
    let claim = rig.claim("data");
    let pod = rig.pod("app", &[&claim], Some("data"));
    let target = rig.mount(&pod, &claim).unwrap();
    // As if the driver had done that: the proxy looks behind each of its answers.
    fs::create_dir_all(&target).unwrap();
    run("mount", &["-t", "tmpfs", "none", path(&target)]);
    let refused = rig.publish(&pod, &claim);
    run("umount", &[path(&target)]);
    let status = refused.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
    assert!(status.message().contains("mounted the volume on the host"), "{status:?}");
    let undone = rig.behind.last::<csi::NodeUnpublishVolumeRequest>();
    assert_eq!((undone.target_path.as_str(), undone.defer_fs_ops), (path(&target), true));
    assert_eq!(rig.failures("publish", "driver_mounted"), 1.0);
    assert_eq!(rig.metric("volumes_published_with_deferred_ops_total"), 1.0);
    assert_eq!(rig.vol_data(&target), None, "nothing is remembered");
    rig.told(&pod, &["mounted the volume on the host"]);
    rig.unmount(&pod, &claim);
}
