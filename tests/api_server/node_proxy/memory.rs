//! A deferred volume is unpublished as deferred, after a restart of proxy, kubelet, driver or node.

use std::fs;
use support::cluster::shared;

use csi_loopback::proto::csi::v1 as csi;
use nix::sys::signal::Signal;
use tonic::Code;

use support::cluster::node_proxy::{BoundPod, Rig, Volume};
use support::cluster::recorder::{DEFERRING, Recorder};
use support::driver::{Rpc, assert_refused, stats, wait_for};
use support::inline::is_mounted;
use support::path;

/// A short interval for the collection of entries.
const OFTEN: [&str; 2] = ["--collect-every", "100ms"];

fn known(rig: &Rig<'_, Recorder<'_>>) -> f64 {
    rig.metric("csi_loopback_deferred_volumes")
}

/// Publishes a deferred inline volume at a target outside of kubelet's pods and removes the target:
/// when its entry is removed, a round of collection is complete.
fn await_rounds(rig: &Rig<'_, Recorder<'_>>, name: &str) {
    let own = rig.inline("own", &[]);
    let pod = rig.pod(name, &[&own], Some("own"));
    let mut request = rig.publishing_request(&pod, &own);
    request.volume_context.extend(rig.pod_info_of(&pod, &own));
    let target = rig.scratch().join(name).join("volume/at");
    request.target_path = path(&target).to_owned();
    rig.set_up(&request).unwrap();
    assert!(rig.vol_data(&target).is_some());
    fs::remove_dir(&target).unwrap();
    wait_for("rounds", || rig.vol_data(&target).is_none());
}

/// Starts a publish that the driver holds, and waits until the driver has received it.
fn begin(
    rig: &Rig<'_, Recorder<'_>>,
    pod: &BoundPod,
    volume: &Volume,
) -> tokio::task::JoinHandle<Result<csi::NodePublishVolumeResponse, tonic::Status>> {
    let (request, channel) = (rig.publishing_request(pod, volume), rig.channel());
    fs::create_dir_all(rig.target(pod, volume).parent().unwrap()).unwrap();
    rig.driver.forget();
    rig.driver.hold("NodePublishVolume");
    let call = rig.cluster.spawn_task(async move { request.send(channel).await });
    wait_for("the driver's call", || {
        rig.driver.calls().iter().any(|name| name == "NodePublishVolume")
    });
    call
}

#[test]
fn a_deferred_volume_is_stored_before_the_driver_call() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::recording(cluster, &DEFERRING);
    let (claim, pod) = rig.app();
    rig.stage(&pod, &claim).unwrap();
    let call = begin(&rig, &pod, &claim);
    let target = rig.target(&pod, &claim);
    let data = rig.vol_data(&target).unwrap();
    assert_eq!(data["deferFSMount"], "true");
    assert_eq!(data["volumeHandle"], claim.handle(&pod).as_str());
    rig.kill_proxy();
    rig.driver.release("NodePublishVolume");
    assert!(cluster.block_on(call).unwrap().is_err());
    rig.start_proxy();
    rig.unmount(&pod, &claim);
    assert!(rig.driver.last::<csi::NodeUnpublishVolumeRequest>().defer_fs_ops);
    assert!(rig.vol_data(&target).is_none());
}

#[test]
fn calls_keep_the_field_after_a_proxy_restart() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::recording(cluster, &DEFERRING);
    let (left, host) = (rig.claim("left"), rig.claim("host"));
    let pod = rig.pod("app", &[&left], Some("left"));
    let other = rig.pod("other", &[&host], None);
    rig.mount(&pod, &left).unwrap();
    rig.mount(&other, &host).unwrap();
    rig.stop_proxy();
    rig.delete(&pod);
    rig.delete(&other);
    rig.start_proxy();
    // Like a restarted kubelet that finds the pod on its disk: stats, then unpublish.
    for (pod, volume, deferred) in [(&pod, &left, true), (&other, &host, false)] {
        rig.stats(pod, volume).unwrap();
        let request: csi::NodeGetVolumeStatsRequest = rig.driver.last();
        assert_eq!(request.defer_fs_ops, deferred);
        rig.expand(pod, volume, 1 << 30).unwrap();
        assert_eq!(rig.driver.last::<csi::NodeExpandVolumeRequest>().defer_fs_ops, deferred);
    }
    rig.kill_proxy();
    rig.start_proxy();
    for (pod, volume, deferred) in [(&pod, &left, true), (&other, &host, false)] {
        rig.unmount(pod, volume);
        assert_eq!(rig.driver.last::<csi::NodeUnpublishVolumeRequest>().defer_fs_ops, deferred);
    }
    assert_eq!(known(&rig), 0.0);
}

#[test]
fn a_kubelet_restart_publishes_the_same_volume() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::recording(cluster, &DEFERRING);
    let (claim, pod) = rig.app();
    let target = rig.mount(&pod, &claim).unwrap();
    let before = rig.vol_data(&target);
    rig.mount(&pod, &claim).unwrap();
    // Also if the pod was deleted meanwhile and the proxy has not seen it since.
    rig.stop_proxy();
    rig.delete(&pod);
    rig.start_proxy();
    rig.mount(&pod, &claim).unwrap();
    let request: Vec<csi::NodePublishVolumeRequest> = rig.driver.seen();
    assert_eq!(request.iter().map(|request| request.defer_fs_ops).collect::<Vec<_>>(), [true; 3]);
    assert_eq!(rig.vol_data(&target), before);
    assert_eq!(known(&rig), 1.0);
    rig.unmount(&pod, &claim);
    assert_eq!(known(&rig), 0.0);
}

#[test]
fn a_node_restart_defers_the_volume_again() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::ours(cluster);
    let (claim, pod) = rig.app();
    let target = rig.mount(&pod, &claim).unwrap();
    rig.kill_proxy();
    rig.driver.driver.kill();
    rig.driver.ops.signal(Signal::SIGKILL);
    rig.driver.ops.wait();
    // Handovers to runtimes are in memory.
    fs::remove_dir_all(rig.driver.ops.crust_dir()).unwrap();
    rig.driver.ops.start_again();
    rig.driver.driver.start_again();
    rig.start_proxy();
    rig.mount(&pod, &claim).unwrap();
    assert!(rig.driver.ops.entry(path(&target)).mount_info().unwrap().is_some());
    assert!(!is_mounted(&target));
    rig.unmount(&pod, &claim);
    assert!(rig.vol_data(&target).is_none());
    assert_eq!(rig.metric("csi_loopback_deferred_volumes"), 0.0);
}

#[test]
fn an_entry_is_deleted_only_after_unpublish() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::recording(cluster, &DEFERRING);
    let (data, more) = (rig.claim("data"), rig.claim("more"));
    let pod = rig.pod("app", &[&data, &more], Some("data,more"));
    let target = rig.mount(&pod, &data).unwrap();
    let other = rig.mount(&pod, &more).unwrap();
    rig.driver.refuse("NodeUnpublishVolume", Code::Internal, "busy");
    for _ in 0..2 {
        assert_refused(rig.unpublish(&pod, &data), Code::Internal, "busy", "a busy volume");
        assert!(rig.vol_data(&target).is_some());
    }
    rig.driver.reset_answer("NodeUnpublishVolume");
    rig.unmount(&pod, &data);
    let request: Vec<csi::NodeUnpublishVolumeRequest> = rig.driver.seen();
    assert!(request.iter().all(|request| request.defer_fs_ops) && request.len() == 3);
    assert!(!rig.entry(&target).path().exists() && rig.vol_data(&other).is_some());
    // Again, like a kubelet that has not received the response: nothing is added.
    rig.call(support::driver::unpublishing(&data.handle(&pod), path(&target))).unwrap();
    assert!(!rig.driver.last::<csi::NodeUnpublishVolumeRequest>().defer_fs_ops);
    rig.unmount(&pod, &more);
    assert_eq!(known(&rig), 0.0);
}

#[test]
fn entries_of_deleted_targets_are_removed() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with_flags(cluster, Recorder::start(cluster, &DEFERRING), &OFTEN);
    let (claim, pod) = rig.app();
    let target = rig.mount(&pod, &claim).unwrap();
    let (pods, away) = (rig.kubelet().join("pods"), rig.kubelet().join("away"));
    await_rounds(&rig, "first");
    assert!(rig.vol_data(&target).is_some());
    fs::rename(&pods, &away).unwrap();
    await_rounds(&rig, "second");
    assert!(rig.vol_data(&target).is_some());
    fs::rename(&away, &pods).unwrap();
    fs::remove_dir_all(pods.join(&pod.uid)).unwrap();
    wait_for("it is forgotten", || !rig.entry(&target).path().exists());
    assert_eq!(known(&rig), 0.0);
}

#[test]
fn the_entry_of_a_running_publish_is_kept() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with_flags(cluster, Recorder::start(cluster, &DEFERRING), &OFTEN);
    let claim = rig.claim("data");
    let own = rig.inline("own", &[]);
    let (pod, other) =
        (rig.pod("app", &[&claim], Some("data")), rig.pod("other", &[&own], Some("own")));
    // The other target disappears meanwhile, so that it shows rounds of collection.
    let gone = rig.mount(&other, &own).unwrap();
    let call = begin(&rig, &pod, &claim);
    let target = rig.target(&pod, &claim);
    assert!(!target.exists());
    fs::remove_dir(&gone).unwrap();
    wait_for("rounds", || rig.vol_data(&gone).is_none());
    assert!(rig.vol_data(&target).is_some());
    rig.driver.release("NodePublishVolume");
    cluster.block_on(call).unwrap().unwrap();
    await_rounds(&rig, "after");
    assert!(rig.vol_data(&target).is_some());
    rig.unmount(&pod, &claim);
    assert!(rig.driver.last::<csi::NodeUnpublishVolumeRequest>().defer_fs_ops);
}

#[test]
fn a_refused_publish_is_removed_with_its_target() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with_flags(cluster, Recorder::start(cluster, &DEFERRING), &OFTEN);
    let (claim, pod) = rig.app();
    rig.driver.refuse("NodePublishVolume", Code::InvalidArgument, "no such option");
    let answer = rig.mount(&pod, &claim);
    assert_refused(answer, Code::InvalidArgument, "no such option", "the driver's own words");
    let entry = rig.entry(&rig.target(&pod, &claim));
    wait_for("it is forgotten", || !entry.path().exists());
    assert_eq!(known(&rig), 0.0);
}

#[test]
fn stats_and_expansion_also_use_the_staging_path() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::recording(cluster, &DEFERRING);
    let (claim, pod) = rig.app();
    rig.mount(&pod, &claim).unwrap();
    let staging = rig.staging(&claim).unwrap();
    let is_deferred_at = |at: &str| {
        rig.call(stats(&claim.handle(&pod), at)).unwrap();
        rig.driver.last::<csi::NodeGetVolumeStatsRequest>().defer_fs_ops
    };
    assert!(is_deferred_at(path(&staging)));
    assert!(!is_deferred_at("/elsewhere"));
    let request = csi::NodeExpandVolumeRequest {
        volume_path: path(&staging).to_owned(),
        ..rig.expansion_request(&pod, &claim, 1 << 30)
    };
    rig.call(request).unwrap();
    assert!(rig.driver.last::<csi::NodeExpandVolumeRequest>().defer_fs_ops);
    // The same path for another volume belongs to another volume.
    rig.call(stats("another", path(&staging))).unwrap();
    assert!(!rig.driver.last::<csi::NodeGetVolumeStatsRequest>().defer_fs_ops);
    rig.unmount(&pod, &claim);
}

#[test]
fn two_pods_of_a_volume_are_distinguished_by_target() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::recording(cluster, &DEFERRING);
    let claim = rig.claim("data");
    let left = rig.pod("left", &[&claim], Some("data"));
    let host = rig.pod("host", &[&claim], None);
    rig.mount(&left, &claim).unwrap();
    rig.mount(&host, &claim).unwrap();
    rig.restart_proxy();
    for (pod, deferred) in [(&left, true), (&host, false)] {
        rig.stats(pod, &claim).unwrap();
        let request: csi::NodeGetVolumeStatsRequest = rig.driver.last();
        assert_eq!(request.defer_fs_ops, deferred, "{}", pod.name);
    }
    for (pod, deferred, known_then) in [(&host, false, 1.0), (&left, true, 0.0)] {
        rig.unpublish(pod, &claim).unwrap();
        let request: csi::NodeUnpublishVolumeRequest = rig.driver.last();
        assert_eq!((request.defer_fs_ops, known(&rig)), (deferred, known_then), "{}", pod.name);
    }
}
