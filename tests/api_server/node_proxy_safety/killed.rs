//! Calls during which the proxy is killed or its client disconnects.

use std::fs;
use support::cluster::shared;

use csi_loopback::proto::csi::v1 as csi;

use support::cluster::Cluster;
use support::cluster::node_proxy::{BoundPod, Rig, Volume};
use support::cluster::recorder::{DEFERRING, Recorder};
use support::driver::{Rpc, unpublishing, wait_for};
use support::path;

type Recorded<'a> = Rig<'a, Recorder<'a>>;

/// A pod with one staged volume that must be deferred.
fn staged(cluster: &Cluster) -> (Recorded<'_>, BoundPod, Volume) {
    let rig = Rig::recording(cluster, &DEFERRING);
    let (claim, pod) = rig.app();
    rig.stage(&pod, &claim).unwrap();
    fs::create_dir_all(rig.target(&pod, &claim).parent().unwrap()).unwrap();
    (rig, pod, claim)
}

/// Kills the proxy while the driver holds a call, then starts another proxy.
fn kill_in<R>(rig: &mut Recorded<'_>, method: &str, request: R)
where
    R: Rpc + Send + 'static,
    R::Response: Send,
{
    rig.driver.hold(method);
    let call = rig.cluster.spawn_task(request.send(rig.channel()));
    wait_for("the call reaches the driver", || rig.driver.calls().iter().any(|one| one == method));
    rig.kill_proxy();
    assert!(rig.cluster.block_on(call).unwrap().is_err());
    rig.driver.release(method);
    rig.start_proxy();
}

#[test]
fn a_publish_survives_a_killed_proxy() {
    let Some(cluster) = shared() else { return };
    let (mut rig, pod, claim) = staged(cluster);
    let request = rig.publishing_request(&pod, &claim);
    kill_in(&mut rig, "NodePublishVolume", request.clone());
    rig.publish(&pod, &claim).unwrap();
    let wanted = csi::NodePublishVolumeRequest { defer_fs_ops: true, ..request };
    assert_eq!(rig.driver.seen::<csi::NodePublishVolumeRequest>(), [wanted.clone(), wanted]);
    assert_eq!(rig.metric("volumes_published_with_deferred_ops_total"), 1.0);
    rig.unmount(&pod, &claim);
    assert!(rig.driver.last::<csi::NodeUnpublishVolumeRequest>().defer_fs_ops);
    assert_eq!(rig.vol_data(&rig.target(&pod, &claim)), None);
}

#[test]
fn an_unpublish_survives_a_killed_proxy() {
    let Some(cluster) = shared() else { return };
    let (mut rig, pod, claim) = staged(cluster);
    rig.publish(&pod, &claim).unwrap();
    let target = rig.target(&pod, &claim);
    let request = unpublishing(&claim.handle(&pod), path(&target));
    kill_in(&mut rig, "NodeUnpublishVolume", request.clone());
    assert!(rig.vol_data(&target).is_some());
    rig.unpublish(&pod, &claim).unwrap();
    let wanted = csi::NodeUnpublishVolumeRequest { defer_fs_ops: true, ..request.clone() };
    assert_eq!(rig.driver.seen::<csi::NodeUnpublishVolumeRequest>(), [wanted.clone(), wanted]);
    assert_eq!(rig.vol_data(&target), None);
    // Again, for an unknown volume.
    rig.unpublish(&pod, &claim).unwrap();
    assert_eq!(rig.driver.last::<csi::NodeUnpublishVolumeRequest>(), request);
}

#[test]
fn a_publish_of_a_disconnected_client_is_kept() {
    let Some(cluster) = shared() else { return };
    let (rig, pod, claim) = staged(cluster);
    let request = rig.publishing_request(&pod, &claim);
    rig.driver.hold("NodePublishVolume");
    let call = cluster.spawn_task(request.send(rig.channel()));
    wait_for("the call reaches the driver", || {
        rig.driver.calls().iter().any(|one| one == "NodePublishVolume")
    });
    call.abort();
    assert!(cluster.block_on(call).unwrap_err().is_cancelled());
    // A running call's entry is kept, so wait until the proxy has seen the client disconnect.
    wait_for("the call's end", || rig.log().contains("the client disconnected"));
    rig.driver.release("NodePublishVolume");
    // The result is unknown to kubelet and to the proxy: the driver may have completed the call.
    rig.unmount(&pod, &claim);
    assert!(rig.driver.last::<csi::NodeUnpublishVolumeRequest>().defer_fs_ops);
    assert_eq!(rig.vol_data(&rig.target(&pod, &claim)), None);
}
