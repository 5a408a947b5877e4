//! Which volumes are left to a runtime: those that the pod names, of whatever kind.

use csi_loopback::proto::csi::v1 as csi;

use crate::cluster::Cluster;
use crate::cluster::node_proxy::Rig;
use crate::cluster::recorder::DEFERRING;
use crate::support::inline::is_mounted;

pub fn a_volume_that_the_pod_names_is_left_to_its_runtime_and_any_other_is_mounted(
    cluster: &Cluster,
) {
    let rig = Rig::ours(cluster);
    let (left, mounted) = (rig.claim("left"), rig.claim("mounted"));
    let pods = [rig.pod("a", &[&left], Some("left")), rig.pod("b", &[&mounted], None)];
    let target = rig.mount(&pods[0], &left).unwrap();
    assert!(!is_mounted(&target) && target.is_dir());
    let target = rig.mount(&pods[1], &mounted).unwrap();
    assert!(is_mounted(&target));
    rig.unmount(&pods[0], &left);
    rig.unmount(&pods[1], &mounted);
}

pub fn another_providers_driver_gets_kubelets_request_with_the_fields_behind_it(cluster: &Cluster) {
    let rig = Rig::recording(cluster, &DEFERRING);
    let claim = rig.claim("data");
    let pod = rig.pod("app", &[&claim], Some("data"));
    let asked = rig.publishing_request(&pod, &claim);
    rig.mount(&pod, &claim).unwrap();
    let wanted = csi::NodePublishVolumeRequest { defer_fs_ops: true, ..asked };
    assert_eq!(rig.behind.last::<csi::NodePublishVolumeRequest>(), wanted);
    rig.unmount(&pod, &claim);
    assert!(rig.behind.last::<csi::NodeUnpublishVolumeRequest>().defer_fs_ops);
}
