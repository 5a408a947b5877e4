//! What was mounted on the host before anybody could know that the pod wants it left to its runtime: told, and never done twice.

use csi_loopback::proto::csi::v1 as csi;
use support::cluster::shared;
use tonic::Code;

use super::api_server::{wait_until_known, with_way};
use support::cluster::node_proxy::Rig;
use support::cluster::proxy::Way;
use support::inline::is_mounted;

const TOLD: &str = "csi_loopback_mounted_before_opt_in_total";

#[test]
fn a_pod_that_nobody_told_of_in_time_is_mounted_on_the_host_and_told_so_once() {
    let Some(cluster) = shared() else { return };
    let (mut rig, way) = with_way(cluster, "300ms");
    cluster.turn(&way, Way::Refused);
    rig.start_proxy();
    let (claim, other) = (rig.claim("data"), rig.claim("other"));
    // One that names only its other volume has nothing to be told.
    let pod = rig.pod("app", &[&claim], Some("data"));
    let content = rig.pod("content", &[&other], None);
    rig.mount(&pod, &claim).unwrap();
    assert!(!rig.behind.last::<csi::NodePublishVolumeRequest>().defer_fs_ops);
    rig.mount(&content, &other).unwrap();
    assert_eq!(rig.metric("csi_loopback_unknown_pods_total"), 2.0);
    cluster.turn(&way, Way::Open);
    let event = rig.told(&pod, &["was mounted on the host at", "delete the pod"]);
    assert_eq!(
        (event.reason.as_deref(), event.type_.as_deref()),
        (Some("FailedMount"), Some("Warning"))
    );
    wait_until_known(&rig, &pod);
    // What changes of the pod brings it up again, and is no news.
    rig.cluster.merge(
        &rig.pods(),
        &pod.name,
        &serde_json::json!({ "metadata": { "labels": { "seen": "again" } } }),
    );
    rig.stats(&pod, &claim).unwrap();
    // It is the host's, and goes as that.
    assert!(!rig.behind.last::<csi::NodeGetVolumeStatsRequest>().defer_fs_ops);
    rig.unmount(&pod, &claim);
    assert!(!rig.behind.last::<csi::NodeUnpublishVolumeRequest>().defer_fs_ops);
    rig.unmount(&content, &other);
    assert_eq!(rig.metric(TOLD), 1.0);
    assert_eq!((rig.events(&pod).len(), rig.events(&content).len()), (1, 0));
    assert!(rig.log().contains("was mounted on the host at"));
}

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
    wait_until_known(&rig, &pod);
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
