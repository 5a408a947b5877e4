//! What was left to a runtime is taken back as that, whoever has been restarted meanwhile: proxy, kubelet, driver, node.

use std::fs;
use support::cluster::shared;

use csi_loopback::proto::csi::v1 as csi;
use nix::sys::signal::Signal;
use tonic::Code;

use support::cluster::node_proxy::{Bound, Rig, Volume};
use support::cluster::recorder::{DEFERRING, Recorder};
use support::driver::{Rpc, assert_refused, stats, wait_for};
use support::inline::is_mounted;
use support::path;

/// Looks for targets that are gone as often as this.
const OFTEN: [&str; 2] = ["--collect-every", "100ms"];

fn known(rig: &Rig<'_, Recorder<'_>>) -> f64 {
    rig.metric("csi_loopback_deferred_volumes")
}

/// Leaves an inline volume at a target of no pod directory, and takes the target away: once the proxy has forgotten it, it has looked
/// at all.
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

/// Begins a publish that the driver holds, and waits until it has it.
fn begin(
    rig: &Rig<'_, Recorder<'_>>,
    pod: &Bound,
    volume: &Volume,
) -> tokio::task::JoinHandle<Result<csi::NodePublishVolumeResponse, tonic::Status>> {
    let (request, channel) = (rig.publishing_request(pod, volume), rig.channel());
    fs::create_dir_all(rig.target(pod, volume).parent().unwrap()).unwrap();
    rig.behind.forget();
    rig.behind.hold("NodePublishVolume");
    let call = rig.cluster.beside(async move { request.send(channel).await });
    wait_for("the driver's call", || {
        rig.behind.calls().iter().any(|name| name == "NodePublishVolume")
    });
    call
}

#[test]
fn what_is_left_is_written_down_before_the_driver_hears_of_it() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::recording(cluster, &DEFERRING);
    let claim = rig.claim("data");
    let pod = rig.pod("app", &[&claim], Some("data"));
    rig.stage(&pod, &claim).unwrap();
    let call = begin(&rig, &pod, &claim);
    let target = rig.target(&pod, &claim);
    let data = rig.vol_data(&target).unwrap();
    assert_eq!(data["deferFSMount"], "true");
    assert_eq!(data["volumeHandle"], claim.handle(&pod).as_str());
    rig.kill_proxy();
    rig.behind.release("NodePublishVolume");
    assert!(cluster.block_on(call).unwrap().is_err());
    rig.start_proxy();
    rig.unmount(&pod, &claim);
    assert!(rig.behind.last::<csi::NodeUnpublishVolumeRequest>().defer_fs_ops);
    assert!(rig.vol_data(&target).is_none());
}

#[test]
fn after_a_restart_of_the_proxy_each_call_has_the_field_though_the_pod_is_gone() {
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
    // What kubelet does when it starts again and finds the pod on its disk: it looks, and takes away.
    for (pod, volume, deferred) in [(&pod, &left, true), (&other, &host, false)] {
        rig.stats(pod, volume).unwrap();
        let asked: csi::NodeGetVolumeStatsRequest = rig.behind.last();
        assert_eq!(asked.defer_fs_ops, deferred);
        rig.expand(pod, volume, 1 << 30).unwrap();
        assert_eq!(rig.behind.last::<csi::NodeExpandVolumeRequest>().defer_fs_ops, deferred);
    }
    rig.kill_proxy();
    rig.start_proxy();
    for (pod, volume, deferred) in [(&pod, &left, true), (&other, &host, false)] {
        rig.unmount(pod, volume);
        assert_eq!(rig.behind.last::<csi::NodeUnpublishVolumeRequest>().defer_fs_ops, deferred);
    }
    assert_eq!(known(&rig), 0.0);
}

#[test]
fn a_kubelet_that_starts_again_publishes_again_and_it_is_the_same_volume() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::recording(cluster, &DEFERRING);
    let claim = rig.claim("data");
    let pod = rig.pod("app", &[&claim], Some("data"));
    let target = rig.mount(&pod, &claim).unwrap();
    let before = rig.vol_data(&target);
    rig.mount(&pod, &claim).unwrap();
    // Also when the pod's object went in the meantime, and the proxy has not seen it since.
    rig.stop_proxy();
    rig.delete(&pod);
    rig.start_proxy();
    rig.mount(&pod, &claim).unwrap();
    let asked: Vec<csi::NodePublishVolumeRequest> = rig.behind.seen();
    assert_eq!(asked.iter().map(|asked| asked.defer_fs_ops).collect::<Vec<_>>(), [true; 3]);
    assert_eq!(rig.vol_data(&target), before);
    assert_eq!(known(&rig), 1.0);
    rig.unmount(&pod, &claim);
    assert_eq!(known(&rig), 0.0);
}

#[test]
fn a_node_that_starts_again_leaves_the_volume_to_the_runtime_again() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::ours(cluster);
    let claim = rig.claim("data");
    let pod = rig.pod("app", &[&claim], Some("data"));
    let target = rig.mount(&pod, &claim).unwrap();
    rig.kill_proxy();
    rig.behind.driver.kill();
    rig.behind.ops.signal(Signal::SIGKILL);
    rig.behind.ops.wait();
    // What is handed over to runtimes is in memory.
    fs::remove_dir_all(rig.behind.ops.crust_dir()).unwrap();
    rig.behind.ops.start_again();
    rig.behind.driver.start_again();
    rig.start_proxy();
    rig.mount(&pod, &claim).unwrap();
    assert!(rig.behind.ops.entry(path(&target)).mount_info().unwrap().is_some());
    assert!(!is_mounted(&target));
    rig.unmount(&pod, &claim);
    assert!(rig.vol_data(&target).is_none());
    assert_eq!(rig.metric("csi_loopback_deferred_volumes"), 0.0);
}

#[test]
fn an_entry_goes_when_the_driver_has_taken_the_volume_back_and_not_before() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::recording(cluster, &DEFERRING);
    let (data, more) = (rig.claim("data"), rig.claim("more"));
    let pod = rig.pod("app", &[&data, &more], Some("data,more"));
    let target = rig.mount(&pod, &data).unwrap();
    let other = rig.mount(&pod, &more).unwrap();
    rig.behind.refuse("NodeUnpublishVolume", Code::Internal, "busy");
    for _ in 0..2 {
        assert_refused(rig.unpublish(&pod, &data), Code::Internal, "busy", "a busy volume");
        assert!(rig.vol_data(&target).is_some());
    }
    rig.behind.answer_as_ever("NodeUnpublishVolume");
    rig.unmount(&pod, &data);
    let asked: Vec<csi::NodeUnpublishVolumeRequest> = rig.behind.seen();
    assert!(asked.iter().all(|asked| asked.defer_fs_ops) && asked.len() == 3);
    assert!(!rig.entry(&target).path().exists() && rig.vol_data(&other).is_some());
    // Once more, as kubelet does that has not heard of it: there is nothing to add.
    rig.call(support::driver::unpublishing(&data.handle(&pod), path(&target))).unwrap();
    assert!(!rig.behind.last::<csi::NodeUnpublishVolumeRequest>().defer_fs_ops);
    rig.unmount(&pod, &more);
    assert_eq!(known(&rig), 0.0);
}

#[test]
fn a_target_that_is_gone_is_forgotten_and_none_while_kubelets_directory_is_not_to_be_seen() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with_flags(cluster, Recorder::start(cluster, &DEFERRING), &OFTEN);
    let claim = rig.claim("data");
    let pod = rig.pod("app", &[&claim], Some("data"));
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
fn a_publish_under_way_is_not_forgotten_however_long_it_takes() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with_flags(cluster, Recorder::start(cluster, &DEFERRING), &OFTEN);
    let claim = rig.claim("data");
    let own = rig.inline("own", &[]);
    let (pod, other) =
        (rig.pod("app", &[&claim], Some("data")), rig.pod("other", &[&own], Some("own")));
    // Its target goes while the other one is under way, so that it tells of rounds.
    let gone = rig.mount(&other, &own).unwrap();
    let call = begin(&rig, &pod, &claim);
    let target = rig.target(&pod, &claim);
    assert!(!target.exists());
    fs::remove_dir(&gone).unwrap();
    wait_for("rounds", || rig.vol_data(&gone).is_none());
    assert!(rig.vol_data(&target).is_some());
    rig.behind.release("NodePublishVolume");
    cluster.block_on(call).unwrap().unwrap();
    await_rounds(&rig, "after");
    assert!(rig.vol_data(&target).is_some());
    rig.unmount(&pod, &claim);
    assert!(rig.behind.last::<csi::NodeUnpublishVolumeRequest>().defer_fs_ops);
}

#[test]
fn a_publish_that_the_driver_refuses_is_forgotten_with_its_target() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with_flags(cluster, Recorder::start(cluster, &DEFERRING), &OFTEN);
    let claim = rig.claim("data");
    let pod = rig.pod("app", &[&claim], Some("data"));
    rig.behind.refuse("NodePublishVolume", Code::InvalidArgument, "no such option");
    let answer = rig.mount(&pod, &claim);
    assert_refused(answer, Code::InvalidArgument, "no such option", "the driver's own words");
    let entry = rig.entry(&rig.target(&pod, &claim));
    wait_for("it is forgotten", || !entry.path().exists());
    assert_eq!(known(&rig), 0.0);
}

#[test]
fn figures_and_growth_find_the_volume_by_where_it_is_staged_too() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::recording(cluster, &DEFERRING);
    let claim = rig.claim("data");
    let pod = rig.pod("app", &[&claim], Some("data"));
    rig.mount(&pod, &claim).unwrap();
    let staging = rig.staging(&claim).unwrap();
    let asked = |at: &str| {
        rig.call(stats(&claim.handle(&pod), at)).unwrap();
        rig.behind.last::<csi::NodeGetVolumeStatsRequest>().defer_fs_ops
    };
    assert!(asked(path(&staging)));
    assert!(!asked("/elsewhere"));
    let request = csi::NodeExpandVolumeRequest {
        volume_path: path(&staging).to_owned(),
        ..rig.expansion_request(&pod, &claim, 1 << 30)
    };
    rig.call(request).unwrap();
    assert!(rig.behind.last::<csi::NodeExpandVolumeRequest>().defer_fs_ops);
    // The same path for another volume is another volume's.
    rig.call(stats("another", path(&staging))).unwrap();
    assert!(!rig.behind.last::<csi::NodeGetVolumeStatsRequest>().defer_fs_ops);
    rig.unmount(&pod, &claim);
}

#[test]
fn two_pods_of_one_volume_are_told_apart_by_their_targets() {
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
        let asked: csi::NodeGetVolumeStatsRequest = rig.behind.last();
        assert_eq!(asked.defer_fs_ops, deferred, "{}", pod.name);
    }
    for (pod, deferred, known_then) in [(&host, false, 1.0), (&left, true, 0.0)] {
        rig.unpublish(pod, &claim).unwrap();
        let asked: csi::NodeUnpublishVolumeRequest = rig.behind.last();
        assert_eq!((asked.defer_fs_ops, known(&rig)), (deferred, known_then), "{}", pod.name);
    }
}

#[test]
fn what_the_host_has_mounted_already_is_not_left_as_well() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::ours(cluster);
    let claim = rig.claim("data");
    let pod = rig.pod("app", &[&claim], None);
    // The pod has its volume from the host, and opts in too late.
    rig.stage(&pod, &claim).unwrap();
    let request = rig.publishing_request(&pod, &claim);
    fs::create_dir_all(rig.target(&pod, &claim).parent().unwrap()).unwrap();
    rig.call_driver(request.clone()).unwrap();
    let target = rig.target(&pod, &claim);
    assert!(is_mounted(&target));
    rig.opt_in(&pod, "data");
    rig.wait_until_heard(&pod);
    let answer = rig.call(request);
    assert_refused(answer, Code::FailedPrecondition, "mounted on the host", "a late opt-in");
    rig.told(&pod, &["mounted on the host", "delete the pod"]);
    assert_eq!(rig.failures("publish", "mounted_on_host"), 1.0);
    assert!(rig.vol_data(&target).is_none() && is_mounted(&target));
    rig.unmount(&pod, &claim);
    assert!(!target.exists());
}
