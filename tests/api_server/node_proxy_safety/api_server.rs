//! An unavailable, silent or slow API server.

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

/// The kinds of an unavailable API server.
const AWAY: [Way; 2] = [Way::Refused, Way::Hanging];

/// A recording driver with all of the KEP's capabilities, and a proxy whose connection to the API
/// server can be blocked. Calls wait this long for a pod.
pub fn with_way<'a>(cluster: &'a Cluster, pod_timeout: &str) -> (Rig<'a, Recorder<'a>>, Proxy) {
    let recorder = Recorder::start(cluster, &DEFERRING);
    let mut rig = Rig::prepare(cluster, recorder, &node_proxy_rules());
    let way = cluster.proxy();
    rig.kubeconfig = cluster.kubeconfig_through(&way, &rig.account);
    rig.set_flags(&["--pod-timeout", pod_timeout]);
    (rig, way)
}

#[test]
#[ignore = "full tier"]
fn without_the_capability_no_api_server_is_needed() {
    let Some(cluster) = shared() else { return };
    for away in AWAY {
        let (mut rig, way) = with_way(cluster, "300ms");
        rig.driver.set_capabilities(Some(&PLAIN));
        cluster.turn(&way, away);
        rig.start_proxy();
        let volumes = [rig.claim("data"), rig.inline("inline", &[]), rig.raw_claim("raw")];
        let pod = rig.pod("app", &[&volumes[0], &volumes[1], &volumes[2]], None);
        for volume in &volumes {
            rig.stage(&pod, volume).unwrap();
            let request = rig.publishing_request(&pod, volume);
            rig.set_up(&request).unwrap();
            assert_eq!(rig.driver.last::<csi::NodePublishVolumeRequest>(), request, "{away:?}");
            // Kubelet repeats the call without a change.
            rig.set_up(&request).unwrap();
            rig.stats(&pod, volume).unwrap();
            assert!(!rig.driver.last::<csi::NodeGetVolumeStatsRequest>().defer_fs_ops);
            if volume.persistent.is_some() {
                rig.expand(&pod, volume, 64 * MIB).unwrap();
                assert!(!rig.driver.last::<csi::NodeExpandVolumeRequest>().defer_fs_ops);
            }
            rig.unmount(&pod, volume);
            assert!(!rig.driver.last::<csi::NodeUnpublishVolumeRequest>().defer_fs_ops);
        }
        rig.stop_proxy();
    }
}

#[test]
fn cached_pods_are_known_during_an_outage() {
    let Some(cluster) = shared() else { return };
    for away in AWAY {
        let (mut rig, way) = with_way(cluster, "50s");
        rig.start_proxy();
        let volumes = [rig.claim("left"), rig.claim("mounted")];
        let pods = [
            rig.pod("opted", &[&volumes[0]], Some("left")),
            rig.pod("other", &[&volumes[1]], None),
        ];
        rig.wait_until_opted_in(&pods[0]);
        // The same watch delivered both, in this order.
        cluster.turn(&way, away);
        rig.mount(&pods[0], &volumes[0]).unwrap();
        assert!(rig.driver.last::<csi::NodePublishVolumeRequest>().defer_fs_ops, "{away:?}");
        rig.unmount(&pods[0], &volumes[0]);
        assert!(rig.driver.last::<csi::NodeUnpublishVolumeRequest>().defer_fs_ops, "{away:?}");
    }
}

#[test]
fn an_unknown_pod_is_not_mounted_on_the_host() {
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
        let calls = rig.driver.calls();
        assert!(!calls.iter().any(|call| call == "NodePublishVolume"), "{away:?}: {calls:?}");
        assert_eq!(rig.failures("publish", "pod_unknown"), 2.0);
        assert_eq!(rig.page("/readyz"), 503, "{away:?}");
        assert_eq!(rig.page("/healthz"), 200, "{away:?}");
        cluster.turn(&way, Way::Open);
        cluster.wait_for("the proxy knows the pods", || rig.publish(&opted, &volumes[0]).ok());
        assert!(rig.driver.last::<csi::NodePublishVolumeRequest>().defer_fs_ops, "{away:?}");
        rig.publish(&other, &volumes[1]).unwrap();
        assert!(!rig.driver.last::<csi::NodePublishVolumeRequest>().defer_fs_ops);
        assert_eq!(rig.page("/readyz"), 200, "{away:?}");
        rig.unmount(&opted, &volumes[0]);
        rig.unmount(&other, &volumes[1]);
    }
}

#[test]
fn deferred_volumes_work_during_an_outage() {
    let Some(cluster) = shared() else { return };
    for away in AWAY {
        let (mut rig, way) = with_way(cluster, "300ms");
        rig.start_proxy();
        let (claim, pod) = rig.app();
        rig.wait_until_opted_in(&pod);
        let target = rig.mount(&pod, &claim).unwrap();
        rig.kill_proxy();
        cluster.turn(&way, away);
        rig.start_proxy();
        // A restarted kubelet publishes again: a stored volume needs no pod.
        rig.publish(&pod, &claim).unwrap();
        assert!(rig.driver.last::<csi::NodePublishVolumeRequest>().defer_fs_ops, "{away:?}");
        rig.stats(&pod, &claim).unwrap();
        assert!(rig.driver.last::<csi::NodeGetVolumeStatsRequest>().defer_fs_ops, "{away:?}");
        rig.expand(&pod, &claim, 64 * MIB).unwrap();
        assert!(rig.driver.last::<csi::NodeExpandVolumeRequest>().defer_fs_ops, "{away:?}");
        rig.unmount(&pod, &claim);
        assert!(rig.driver.last::<csi::NodeUnpublishVolumeRequest>().defer_fs_ops, "{away:?}");
        assert_eq!(rig.vol_data(&target), None);
    }
}

#[test]
fn a_delayed_watch_is_waited_for() {
    let Some(cluster) = shared() else { return };
    let (mut rig, way) = with_way(cluster, "50s");
    rig.start_proxy();
    let first = rig.claim("first");
    let known = rig.pod("known", &[&first], Some("first"));
    rig.wait_until_opted_in(&known);
    // The watch is connected, but delivers nothing.
    cluster.turn(&way, Way::Hanging);
    let (claim, pod) = rig.app();
    rig.stage(&pod, &claim).unwrap();
    let request = rig.publishing_request(&pod, &claim);
    fs::create_dir_all(rig.target(&pod, &claim).parent().unwrap()).unwrap();
    let call = cluster.spawn_task(request.send(rig.channel()));
    // Meanwhile other calls are served in order: the waiting call blocks no thread.
    for _ in 0..3 {
        rig.mount(&known, &first).unwrap();
        rig.unmount(&known, &first);
    }
    assert!(!call.is_finished());
    cluster.turn(&way, Way::Open);
    cluster.block_on(call).unwrap().unwrap();
    let last = rig.driver.last::<csi::NodePublishVolumeRequest>();
    assert!(last.defer_fs_ops && last.target_path.contains(&pod.uid));
    rig.unmount(&pod, &claim);
}

/// Without kubelet's pod info, the watch is enough.
#[test]
fn the_proxy_reads_only_pods_of_its_node() {
    let Some(cluster) = shared() else { return };
    for pod_info in [false, true] {
        let mut rig = Rig::start(cluster, Recorder::start(cluster, &PLAIN));
        rig.pod_info = pod_info;
        let (claim, pod) = rig.app();
        // A whole life: it fails with an event, is corrected, published, measured, expanded and
        // unpublished.
        assert!(rig.mount(&pod, &claim).is_err());
        rig.wait_for_event(&pod, &["DEFER_FS_OPS"]);
        rig.driver.set_capabilities(Some(&DEFERRING));
        rig.mount(&pod, &claim).unwrap();
        rig.stats(&pod, &claim).unwrap();
        rig.expand(&pod, &claim, 64 * MIB).unwrap();
        rig.unmount(&pod, &claim);
        rig.stop_proxy();
        let (user, mut all) = (rig.account.user(), cluster.requests());
        all.retain(|one| one["user"]["username"] == user.as_str());
        assert!(!all.is_empty());
        for one in all {
            let (verb, what) = (&one["verb"], &one["objectRef"]["resource"]);
            let uri = one["requestURI"].as_str().unwrap();
            let code = one["responseStatus"]["code"].as_u64().unwrap_or(200);
            // The watch may report the pod during the lookup, which the proxy then cancels.
            let is_cancelled = one["responseStatus"]["message"] == "context canceled";
            assert!(code < 400 || (is_cancelled && *verb == "get"), "{one}");
            match (verb.as_str().unwrap(), what.as_str().unwrap()) {
                ("list" | "watch", "pods") => {
                    assert!(uri.contains(&format!("spec.nodeName%3D{}", rig.node)), "{uri}");
                }
                ("get", "pods") if pod_info => assert!(uri.contains(&pod.name), "{uri}"),
                ("create", "events") => {
                    assert_eq!(uri, format!("/api/v1/namespaces/{}/events?", rig.namespace));
                }
                _ => panic!("{one}"),
            }
        }
    }
}
