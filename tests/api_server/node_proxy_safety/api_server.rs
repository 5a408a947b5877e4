//! An API server that is away, that says nothing, or that is slow to tell.

use std::fs;
use support::cluster::shared;

use csi_loopback::proto::csi::v1 as csi;
use tonic::Code;

use support::MIB;
use support::cluster::Cluster;
use support::cluster::node_proxy::{Bound, Rig, node_proxy_rules};
use support::cluster::proxy::{Proxy, Way};
use support::cluster::recorder::{DEFERRING, PLAIN, Recorder};
use support::driver::{Rpc, wait_for};

/// All ways to have no API server.
const AWAY: [Way; 2] = [Way::Refused, Way::Hanging];

/// A recording driver that has all capabilities of the proposal, and a proxy whose way to the API server can be cut; calls wait so
/// long for a pod.
pub fn with_way<'a>(cluster: &'a Cluster, pod_timeout: &str) -> (Rig<'a, Recorder<'a>>, Proxy) {
    let behind = Recorder::start(cluster, &DEFERRING);
    let mut rig = Rig::prepare(cluster, behind, &node_proxy_rules());
    let way = cluster.proxy();
    rig.kubeconfig = cluster.kubeconfig_through(&way, &rig.account);
    rig.set_flags(&["--pod-timeout", pod_timeout]);
    (rig, way)
}

/// Waits until the proxy has written down that a pod has opted in: it knows the pod then.
pub fn wait_until_known<B: support::cluster::node_proxy::Behind>(rig: &Rig<'_, B>, pod: &Bound) {
    let file = rig.state_dir().join("opted-in/pods.json");
    wait_for("the proxy knows that the pod has opted in", || {
        fs::read_to_string(&file).is_ok_and(|pods| pods.contains(&pod.uid))
    });
}

#[test]
#[ignore = "full tier"]
fn a_pod_that_did_not_opt_in_needs_nothing_of_the_api_server() {
    let Some(cluster) = shared() else { return };
    for away in AWAY {
        let (mut rig, way) = with_way(cluster, "300ms");
        rig.behind.set_capabilities(Some(&PLAIN));
        cluster.turn(&way, away);
        rig.start_proxy();
        let volumes = [rig.claim("data"), rig.inline("inline", &[]), rig.raw_claim("raw")];
        let pod = rig.pod("app", &[&volumes[0], &volumes[1], &volumes[2]], None);
        for (number, volume) in volumes.iter().enumerate() {
            rig.stage(&pod, volume).unwrap();
            let asked = rig.publishing_request(&pod, volume);
            rig.set_up(&asked).unwrap();
            assert_eq!(rig.behind.last::<csi::NodePublishVolumeRequest>(), asked, "{away:?}");
            // Kubelet repeats it, and it is no other then.
            rig.set_up(&asked).unwrap();
            rig.stats(&pod, volume).unwrap();
            assert!(!rig.behind.last::<csi::NodeGetVolumeStatsRequest>().defer_fs_ops);
            if volume.persistent.is_some() {
                rig.expand(&pod, volume, 64 * MIB).unwrap();
                assert!(!rig.behind.last::<csi::NodeExpandVolumeRequest>().defer_fs_ops);
            }
            rig.unmount(&pod, volume);
            assert!(!rig.behind.last::<csi::NodeUnpublishVolumeRequest>().defer_fs_ops);
            let unknown = rig.metric("csi_loopback_unknown_pods_total");
            assert_eq!(unknown, 2.0 * (number + 1) as f64, "{away:?}");
        }
        assert!(rig.log().contains(&pod.uid), "the log tells of it");
        rig.stop_proxy();
    }
}

#[test]
fn a_pod_that_the_watch_has_told_of_is_known_while_the_api_server_is_away() {
    let Some(cluster) = shared() else { return };
    for away in AWAY {
        let (mut rig, way) = with_way(cluster, "50s");
        rig.start_proxy();
        let volumes = [rig.claim("left"), rig.claim("mounted")];
        let pods = [
            rig.pod("opted", &[&volumes[0]], Some("left")),
            rig.pod("other", &[&volumes[1]], None),
        ];
        wait_until_known(&rig, &pods[0]);
        // Both came by the same watch, in this order.
        cluster.turn(&way, away);
        rig.mount(&pods[0], &volumes[0]).unwrap();
        assert!(rig.behind.last::<csi::NodePublishVolumeRequest>().defer_fs_ops, "{away:?}");
        rig.unmount(&pods[0], &volumes[0]);
        assert!(rig.behind.last::<csi::NodeUnpublishVolumeRequest>().defer_fs_ops, "{away:?}");
    }
}

#[test]
fn a_pod_that_has_opted_in_is_not_mounted_on_the_host_by_a_proxy_that_starts_without_the_api_server()
 {
    let Some(cluster) = shared() else { return };
    for away in AWAY {
        let (mut rig, way) = with_way(cluster, "300ms");
        rig.start_proxy();
        let volumes = [rig.claim("left"), rig.claim("mounted")];
        let opted = rig.pod("opted", &[&volumes[0]], Some("left"));
        let other = rig.pod("other", &[&volumes[1]], None);
        wait_until_known(&rig, &opted);
        rig.kill_proxy();
        cluster.turn(&way, away);
        rig.start_proxy();
        rig.behind.forget();
        rig.stage(&opted, &volumes[0]).unwrap();
        for _ in 0..2 {
            let status = rig.publish(&opted, &volumes[0]).unwrap_err();
            assert_eq!(status.code(), Code::Unavailable, "{away:?}: {status:?}");
            assert!(status.message().contains(&opted.uid), "{status:?}");
        }
        let calls = rig.behind.calls();
        assert!(!calls.iter().any(|call| call == "NodePublishVolume"), "{away:?}: {calls:?}");
        assert_eq!(rig.failures("publish", "pod_unknown"), 2.0);
        // Whoever never opted in has to pay for nothing of that.
        rig.mount(&other, &volumes[1]).unwrap();
        assert!(!rig.behind.last::<csi::NodePublishVolumeRequest>().defer_fs_ops);
        cluster.turn(&way, Way::Open);
        cluster.wait_for("the proxy knows the pod again", || rig.publish(&opted, &volumes[0]).ok());
        assert!(rig.behind.last::<csi::NodePublishVolumeRequest>().defer_fs_ops, "{away:?}");
        rig.unmount(&opted, &volumes[0]);
        rig.unmount(&other, &volumes[1]);
    }
}

#[test]
fn what_was_left_to_a_runtime_is_taken_back_measured_and_grown_without_the_api_server() {
    let Some(cluster) = shared() else { return };
    for away in AWAY {
        let (mut rig, way) = with_way(cluster, "300ms");
        rig.start_proxy();
        let claim = rig.claim("data");
        let pod = rig.pod("app", &[&claim], Some("data"));
        wait_until_known(&rig, &pod);
        let target = rig.mount(&pod, &claim).unwrap();
        rig.kill_proxy();
        cluster.turn(&way, away);
        rig.start_proxy();
        // Kubelet publishes again when it has restarted: what is remembered needs no pod.
        rig.publish(&pod, &claim).unwrap();
        assert!(rig.behind.last::<csi::NodePublishVolumeRequest>().defer_fs_ops, "{away:?}");
        rig.stats(&pod, &claim).unwrap();
        assert!(rig.behind.last::<csi::NodeGetVolumeStatsRequest>().defer_fs_ops, "{away:?}");
        rig.expand(&pod, &claim, 64 * MIB).unwrap();
        assert!(rig.behind.last::<csi::NodeExpandVolumeRequest>().defer_fs_ops, "{away:?}");
        rig.unmount(&pod, &claim);
        assert!(rig.behind.last::<csi::NodeUnpublishVolumeRequest>().defer_fs_ops, "{away:?}");
        assert_eq!(rig.vol_data(&target), None);
    }
}

#[test]
fn a_watch_that_is_behind_is_waited_for() {
    let Some(cluster) = shared() else { return };
    let (mut rig, way) = with_way(cluster, "50s");
    rig.start_proxy();
    let first = rig.claim("first");
    let known = rig.pod("known", &[&first], Some("first"));
    wait_until_known(&rig, &known);
    // The watch is there, and says nothing of what happens now.
    cluster.turn(&way, Way::Hanging);
    let claim = rig.claim("data");
    let pod = rig.pod("app", &[&claim], Some("data"));
    rig.stage(&pod, &claim).unwrap();
    let asked = rig.publishing_request(&pod, &claim);
    fs::create_dir_all(rig.target(&pod, &claim).parent().unwrap()).unwrap();
    let call = cluster.beside(asked.send(rig.channel()));
    // Meanwhile others are served, and not out of turn: the call is waited with, and no thread.
    for _ in 0..3 {
        rig.mount(&known, &first).unwrap();
        rig.unmount(&known, &first);
    }
    assert!(!call.is_finished());
    cluster.turn(&way, Way::Open);
    cluster.block_on(call).unwrap().unwrap();
    let last = rig.behind.last::<csi::NodePublishVolumeRequest>();
    assert!(last.defer_fs_ops && last.target_path.contains(&pod.uid));
    rig.unmount(&pod, &claim);
}

#[test]
fn the_proxy_asks_for_pods_of_its_node_and_nothing_else() {
    let Some(cluster) = shared() else { return };
    let behind = Recorder::start(cluster, &PLAIN);
    let mut rig = Rig::start(cluster, behind);
    rig.pod_info = true;
    let claim = rig.claim("data");
    let pod = rig.pod("app", &[&claim], Some("data"));
    // A whole life: it fails with an event, is mended, published, measured, grown and taken back.
    assert!(rig.mount(&pod, &claim).is_err());
    rig.told(&pod, &["DEFER_FS_OPS"]);
    rig.behind.set_capabilities(Some(&DEFERRING));
    rig.mount(&pod, &claim).unwrap();
    rig.stats(&pod, &claim).unwrap();
    rig.expand(&pod, &claim, 64 * MIB).unwrap();
    rig.unmount(&pod, &claim);
    rig.stop_proxy();
    let user = format!("system:serviceaccount:{}:{}", rig.account.namespace, rig.account.name);
    let all = cluster.requests();
    let mine: Vec<_> = all.iter().filter(|one| one["user"]["username"] == user.as_str()).collect();
    assert!(!mine.is_empty());
    for one in mine {
        let (verb, what) = (&one["verb"], &one["objectRef"]["resource"]);
        let uri = one["requestURI"].as_str().unwrap();
        let code = one["responseStatus"]["code"].as_u64().unwrap_or(200);
        assert!(code < 400, "{one}");
        match (verb.as_str().unwrap(), what.as_str().unwrap()) {
            ("list" | "watch", "pods") => {
                assert!(uri.contains(&format!("spec.nodeName%3D{}", rig.node)), "{uri}");
            }
            ("get", "pods") => assert!(uri.contains(&pod.name), "{uri}"),
            ("create", "events") => {}
            _ => panic!("{one}"),
        }
    }
}
