//! Calls in whose middle the proxy is killed, or its client goes away.

use std::fs;
use support::cluster::shared;

use csi_loopback::proto::csi::v1 as csi;

use support::cluster::Cluster;
use support::cluster::node_proxy::{Bound, Rig, Volume};
use support::cluster::recorder::{DEFERRING, Recorder};
use support::driver::{Rpc, unpublishing, wait_for};
use support::path;

type Recorded<'a> = Rig<'a, Recorder<'a>>;

/// A pod whose one volume is staged and is to be left to its runtime.
fn staged(cluster: &Cluster) -> (Recorded<'_>, Bound, Volume) {
    let rig = Rig::recording(cluster, &DEFERRING);
    let claim = rig.claim("data");
    let pod = rig.pod("app", &[&claim], Some("data"));
    rig.stage(&pod, &claim).unwrap();
    fs::create_dir_all(rig.target(&pod, &claim).parent().unwrap()).unwrap();
    (rig, pod, claim)
}

/// Has the driver get a call and not answer it, and meanwhile kills the proxy; then another one takes over.
fn kill_in<R>(rig: &mut Recorded<'_>, method: &str, request: R)
where
    R: Rpc + Send + 'static,
    R::Answer: Send,
{
    rig.behind.hold(method);
    let call = rig.cluster.beside(request.send(rig.channel()));
    wait_for("the call reaches the driver", || rig.behind.calls().iter().any(|one| one == method));
    rig.kill_proxy();
    assert!(rig.cluster.block_on(call).unwrap().is_err());
    rig.behind.release(method);
    rig.start_proxy();
}

#[test]
fn a_publish_in_whose_middle_the_proxy_is_killed_is_remembered_and_repeated() {
    let Some(cluster) = shared() else { return };
    let (mut rig, pod, claim) = staged(cluster);
    let asked = rig.publishing_request(&pod, &claim);
    kill_in(&mut rig, "NodePublishVolume", asked.clone());
    rig.publish(&pod, &claim).unwrap();
    let wanted = csi::NodePublishVolumeRequest { defer_fs_ops: true, ..asked };
    assert_eq!(rig.behind.seen::<csi::NodePublishVolumeRequest>(), [wanted.clone(), wanted]);
    assert_eq!(rig.metric("volumes_published_with_deferred_ops_total"), 1.0);
    rig.unmount(&pod, &claim);
    assert!(rig.behind.last::<csi::NodeUnpublishVolumeRequest>().defer_fs_ops);
    assert_eq!(rig.vol_data(&rig.target(&pod, &claim)), None);
}

#[test]
fn a_publish_that_is_never_repeated_is_taken_back_as_what_it_was() {
    let Some(cluster) = shared() else { return };
    let (mut rig, pod, claim) = staged(cluster);
    let asked = rig.publishing_request(&pod, &claim);
    kill_in(&mut rig, "NodePublishVolume", asked);
    // The pod was deleted meanwhile.
    rig.unmount(&pod, &claim);
    assert!(rig.behind.last::<csi::NodeUnpublishVolumeRequest>().defer_fs_ops);
    assert_eq!(rig.vol_data(&rig.target(&pod, &claim)), None);
}

#[test]
fn an_unpublish_in_whose_middle_the_proxy_is_killed_is_repeated_and_then_forgotten() {
    let Some(cluster) = shared() else { return };
    let (mut rig, pod, claim) = staged(cluster);
    rig.publish(&pod, &claim).unwrap();
    let target = rig.target(&pod, &claim);
    let asked = unpublishing(&claim.handle(&pod), path(&target));
    kill_in(&mut rig, "NodeUnpublishVolume", asked.clone());
    assert!(rig.vol_data(&target).is_some());
    rig.unpublish(&pod, &claim).unwrap();
    let wanted = csi::NodeUnpublishVolumeRequest { defer_fs_ops: true, ..asked.clone() };
    assert_eq!(rig.behind.seen::<csi::NodeUnpublishVolumeRequest>(), [wanted.clone(), wanted]);
    assert_eq!(rig.vol_data(&target), None);
    // Once more: that of a volume that nobody knows of.
    rig.unpublish(&pod, &claim).unwrap();
    assert_eq!(rig.behind.last::<csi::NodeUnpublishVolumeRequest>(), asked);
}

#[test]
fn a_publish_whose_client_goes_away_is_remembered() {
    let Some(cluster) = shared() else { return };
    let (rig, pod, claim) = staged(cluster);
    let asked = rig.publishing_request(&pod, &claim);
    rig.behind.hold("NodePublishVolume");
    let call = cluster.beside(asked.send(rig.channel()));
    wait_for("the call reaches the driver", || {
        rig.behind.calls().iter().any(|one| one == "NodePublishVolume")
    });
    call.abort();
    assert!(cluster.block_on(call).unwrap_err().is_cancelled());
    // While it is under way nothing of it is forgotten: the proxy has to have heard that nobody waits for it.
    wait_for("the call's end", || rig.log().contains("the client went away"));
    rig.behind.release("NodePublishVolume");
    // Kubelet does not know what became of it, and neither does the proxy: the driver may have done it.
    rig.unmount(&pod, &claim);
    assert!(rig.behind.last::<csi::NodeUnpublishVolumeRequest>().defer_fs_ops);
    assert_eq!(rig.vol_data(&rig.target(&pod, &claim)), None);
}
