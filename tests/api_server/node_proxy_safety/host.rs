//! Volumes that were mounted on the host before the pod's opt-in was known: reported, never mounted
//! twice.

use std::fs;

use csi_loopback::proto::csi::v1 as csi;
use support::cluster::shared;
use tonic::Code;

use support::cluster::node_proxy::Rig;
use support::cluster::recorder::DEFERRING;
use support::inline::is_mounted;
use support::{path, run};

#[test]
fn a_late_opt_in_is_reported_and_not_mounted_twice() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::ours(cluster);
    let claim = rig.claim("data");
    let pod = rig.pod("app", &[&claim], None);
    let target = rig.mount(&pod, &claim).unwrap();
    assert!(is_mounted(&target));
    rig.opt_in(&pod, "data");
    rig.wait_for_event(&pod, &["was mounted on the host at"]);
    assert_eq!(rig.metric("csi_loopback_mounted_before_opt_in_total"), 1.0);
    rig.wait_until_opted_in(&pod);
    // Kubelet publishes again, to this proxy and to one that does not know of the mount.
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
    rig.wait_for_event(&pod, &["was mounted on the host", "delete the pod"]);
    // The pod can be deleted.
    rig.unmount(&pod, &claim);
    assert!(!is_mounted(&target));
}

#[test]
fn a_wrong_host_mount_is_unmounted_and_refused() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::recording(cluster, &DEFERRING);
    let (claim, pod) = rig.app();
    let target = rig.mount(&pod, &claim).unwrap();
    // Simulates the driver's mount: the proxy checks the target after each response.
    fs::create_dir_all(&target).unwrap();
    run("mount", &["-t", "tmpfs", "none", path(&target)]);
    let refused = rig.publish(&pod, &claim);
    run("umount", &[path(&target)]);
    let status = refused.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
    assert!(status.message().contains("mounted the volume on the host"), "{status:?}");
    let undone = rig.driver.last::<csi::NodeUnpublishVolumeRequest>();
    assert_eq!((undone.target_path.as_str(), undone.defer_fs_ops), (path(&target), true));
    assert_eq!(rig.failures("publish", "driver_mounted"), 1.0);
    assert_eq!(rig.metric("volumes_published_with_deferred_ops_total"), 1.0);
    assert_eq!(rig.vol_data(&target), None, "nothing is remembered");
    rig.wait_for_event(&pod, &["mounted the volume on the host"]);
    rig.unmount(&pod, &claim);
}
