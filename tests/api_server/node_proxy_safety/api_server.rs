//! An API server that is away, that says nothing, or that is slow to tell.

use std::fs;
use support::cluster::shared;

use csi_loopback::proto::csi::v1 as csi;
use tonic::Code;

use support::MIB;
use support::cluster::Cluster;
use support::cluster::node_proxy::{Rig, node_proxy_rules};
use support::cluster::proxy::{Proxy, Way};
use support::cluster::recorder::{DEFERRING, PLAIN, Recorder};
use support::driver::Rpc;

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

#[test]
#[ignore = "full tier"]
fn behind_a_driver_that_cannot_defer_a_pod_needs_nothing_of_the_api_server() {
    let Some(cluster) = shared() else { return };
    for away in AWAY {
        let (mut rig, way) = with_way(cluster, "300ms");
        rig.behind.set_capabilities(Some(&PLAIN));
        cluster.turn(&way, away);
        rig.start_proxy();
        let volumes = [rig.claim("data"), rig.inline("inline", &[]), rig.raw_claim("raw")];
        let pod = rig.pod("app", &[&volumes[0], &volumes[1], &volumes[2]], None);
        for volume in &volumes {
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
        }
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
        rig.wait_until_heard(&pods[0]);
        // Both came by the same watch, in this order.
        cluster.turn(&way, away);
        rig.mount(&pods[0], &volumes[0]).unwrap();
        assert!(rig.behind.last::<csi::NodePublishVolumeRequest>().defer_fs_ops, "{away:?}");
        rig.unmount(&pods[0], &volumes[0]);
        assert!(rig.behind.last::<csi::NodeUnpublishVolumeRequest>().defer_fs_ops, "{away:?}");
    }
}

#[test]
fn a_pod_that_nobody_reports_is_not_mounted_on_the_host_and_the_proxy_is_not_ready() {
    let Some(cluster) = shared() else { return };
    for away in AWAY {
        let (mut rig, way) = with_way(cluster, "300ms");
        cluster.turn(&way, away);
        rig.start_proxy();
        let volumes = [rig.claim("left"), rig.claim("mounted")];
        let opted = rig.pod("opted", &[&volumes[0]], Some("left"));
        let other = rig.pod("other", &[&volumes[1]], None);
        for (pod, volume) in [(&opted, &volumes[0]), (&other, &volumes[1])] {
            rig.stage(pod, volume).unwrap();
            let status = rig.publish(pod, volume).unwrap_err();
            assert_eq!(status.code(), Code::Unavailable, "{away:?}: {status:?}");
            assert!(status.message().contains(&pod.uid), "{status:?}");
        }
        let calls = rig.behind.calls();
        assert!(!calls.iter().any(|call| call == "NodePublishVolume"), "{away:?}: {calls:?}");
        assert_eq!(rig.failures("publish", "pod_unknown"), 2.0);
        assert_eq!(rig.page("/readyz"), 503, "{away:?}");
        assert_eq!(rig.page("/healthz"), 200, "{away:?}");
        cluster.turn(&way, Way::Open);
        cluster.wait_for("the proxy knows the pods", || rig.publish(&opted, &volumes[0]).ok());
        assert!(rig.behind.last::<csi::NodePublishVolumeRequest>().defer_fs_ops, "{away:?}");
        rig.publish(&other, &volumes[1]).unwrap();
        assert!(!rig.behind.last::<csi::NodePublishVolumeRequest>().defer_fs_ops);
        assert_eq!(rig.page("/readyz"), 200, "{away:?}");
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
        rig.wait_until_heard(&pod);
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
    rig.wait_until_heard(&known);
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
        // The watch may report the pod while the request for it is under way, which the proxy then cancels.
        let is_cancelled = one["responseStatus"]["message"] == "context canceled";
        assert!(code < 400 || (is_cancelled && *verb == "get"), "{one}");
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
