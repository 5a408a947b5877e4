//! The proxy's metrics, and the driver's responses, which it relays.

use csi::node_service_capability::rpc::Type;
use csi_loopback::proto::csi::v1 as csi;
use prost::Message;
use support::cluster::shared;
use tonic::Code;

use support::cluster::node_proxy::{Rig, node_proxy_rules};
use support::cluster::recorder::{self, DEFERRING, Recorder};
use support::driver::{assert_refused, wait_for};
use support::path;

#[test]
fn successful_publishes_of_deferred_volumes_are_counted() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::recording(cluster, &DEFERRING);
    let (left, host) = (rig.claim("left"), rig.claim("host"));
    let pod = rig.pod("app", &[&left], Some("left"));
    let other = rig.pod("other", &[&host], None);
    let published = || rig.metric("volumes_published_with_deferred_ops_total");
    assert_eq!(published(), 0.0);
    rig.mount(&pod, &left).unwrap();
    rig.mount(&other, &host).unwrap();
    assert_eq!(published(), 1.0);
    rig.publish(&pod, &left).unwrap();
    assert_eq!(published(), 2.0);
    rig.driver.refuse("NodePublishVolume", Code::Aborted, "at it");
    assert!(rig.publish(&pod, &left).is_err());
    assert_eq!((published(), rig.failures("publish", "driver_refused")), (2.0, 1.0));
}

#[test]
fn a_volumes_condition_is_reported_until_unpublish() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::recording(cluster, &DEFERRING);
    let (left, host) = (rig.claim("left"), rig.claim("host"));
    let pod = rig.pod("app", &[&left], Some("left"));
    let other = rig.pod("other", &[&host], None);
    rig.mount(&pod, &left).unwrap();
    rig.mount(&other, &host).unwrap();
    let namespace = rig.namespace.clone();
    let name = format!(
        "volume_stats_health_status_abnormal{{namespace=\"{namespace}\",persistentvolumeclaim=\"left\",pod=\"app\",volume=\"{namespace}-left\"}}"
    );
    let reported = |rig: &Rig<'_, _>| -> Vec<String> {
        let page = rig.metrics();
        let of_volumes = |line: &&str| line.starts_with("volume_stats_health_status_abnormal{");
        page.lines().filter(of_volumes).map(str::to_owned).collect()
    };
    assert!(reported(&rig).is_empty());
    for (abnormal, wanted) in [(true, 1), (false, 0), (true, 1)] {
        let answer = recorder::stats(Some((abnormal, "a word")));
        rig.driver.answer("NodeGetVolumeStats", Ok(answer.encode_to_vec()));
        assert_eq!(rig.stats(&pod, &left).unwrap(), answer);
        assert_eq!(rig.stats(&other, &host).unwrap(), answer);
        assert_eq!(reported(&rig), [format!("{name} {wanted}")]);
    }
    rig.restart_proxy();
    assert!(reported(&rig).is_empty());
    rig.stats(&pod, &left).unwrap();
    assert_eq!(reported(&rig), [format!("{name} 1")]);
    // A driver without a condition does not report a bad one.
    rig.driver.answer("NodeGetVolumeStats", Ok(recorder::stats(None).encode_to_vec()));
    rig.stats(&pod, &left).unwrap();
    assert_eq!(reported(&rig), [format!("{name} 0")]);
    rig.unmount(&pod, &left);
    assert!(reported(&rig).is_empty());
}

/// NodeGetVolumeStats of CSI v1.13 has no condition.
#[test]
fn volume_health_is_used_without_a_condition() {
    let Some(cluster) = shared() else { return };
    let has = [&DEFERRING[..], &[Type::GetVolumeHealth]].concat();
    let rig = Rig::recording(cluster, &has);
    let (claim, pod) = rig.app();
    let target = rig.mount(&pod, &claim).unwrap();
    let reported = || {
        let page = rig.metrics();
        let line =
            page.lines().find(|line| line.starts_with("volume_stats_health_status_abnormal{"));
        line.and_then(|line| line.rsplit_once(' ')).map(|(_, value)| value.to_owned())
    };
    let health = |reasons: &[&str]| {
        let entry = |reason: &&str| csi::volume_health::VolumeHealthEntry {
            reason: (*reason).to_owned(),
            ..Default::default()
        };
        let health_statuses = reasons.iter().map(entry).collect();
        let volume_health = csi::VolumeHealth { volume_id: String::new(), health_statuses };
        csi::NodeGetVolumeHealthResponse { volume_health: Some(volume_health) }.encode_to_vec()
    };
    let not_mounted = ["NotMounted"].as_slice();
    for (reasons, wanted) in [(not_mounted, "1"), (&[], "0"), (not_mounted, "1")] {
        rig.driver.answer("NodeGetVolumeHealth", Ok(health(reasons)));
        rig.stats(&pod, &claim).unwrap();
        assert_eq!(reported().as_deref(), Some(wanted));
    }
    let request: csi::NodeGetVolumeHealthRequest = rig.driver.last();
    assert_eq!(
        (request.volume_id, request.volume_publish_path.as_str()),
        (claim.handle(&pod), path(&target))
    );
    // An unknown health changes nothing, and kubelet still gets its stats.
    rig.driver.refuse("NodeGetVolumeHealth", Code::Internal, "not now");
    assert_eq!(rig.stats(&pod, &claim).unwrap(), recorder::stats(None));
    assert_eq!(reported().as_deref(), Some("1"));
    // A driver that reports a condition gets no second call.
    rig.driver.forget();
    let fine = recorder::stats(Some((false, "fine")));
    rig.driver.answer("NodeGetVolumeStats", Ok(fine.encode_to_vec()));
    rig.stats(&pod, &claim).unwrap();
    assert_eq!(
        (reported().as_deref(), rig.driver.calls()),
        (Some("0"), vec!["NodeGetVolumeStats".to_owned()])
    );
}

#[test]
fn driver_errors_reach_kubelet_and_are_counted() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::recording(cluster, &DEFERRING);
    let (left, host) = (rig.claim("left"), rig.claim("host"));
    let pod = rig.pod("app", &[&left], Some("left"));
    let other = rig.pod("other", &[&host], None);
    rig.mount(&pod, &left).unwrap();
    rig.mount(&other, &host).unwrap();
    let words = "no room: 7 of 9";
    let methods =
        ["NodePublishVolume", "NodeUnpublishVolume", "NodeGetVolumeStats", "NodeExpandVolume"];
    methods.iter().for_each(|method| rig.driver.refuse(method, Code::OutOfRange, words));
    for (pod, volume) in [(&pod, &left), (&other, &host)] {
        let request = rig.publishing_request(pod, volume);
        assert_refused(rig.call(request), Code::OutOfRange, words, "publish");
        assert_refused(rig.stats(pod, volume), Code::OutOfRange, words, "stats");
        assert_refused(rig.expand(pod, volume, 1), Code::OutOfRange, words, "expand");
        assert_refused(rig.unpublish(pod, volume), Code::OutOfRange, words, "unpublish");
    }
    // Calls of the pod without opt-in are not counted.
    for call in ["publish", "stats", "expand", "unpublish"] {
        assert_eq!(rig.failures(call, "driver_refused"), 1.0, "{call}");
    }
    assert!(rig.events(&pod).is_empty());
}

#[test]
fn the_drivers_identity_is_relayed_to_kubelet() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::recording(cluster, &DEFERRING);
    let info = rig.call(csi::GetPluginInfoRequest {}).unwrap();
    assert_eq!(info.name, rig.driver.name);
    let direct = rig.call_driver(csi::NodeGetCapabilitiesRequest {}).unwrap();
    assert_eq!(rig.call(csi::NodeGetCapabilitiesRequest {}).unwrap(), direct);
    let direct = rig.call_driver(csi::NodeGetInfoRequest {}).unwrap();
    assert_eq!(rig.call(csi::NodeGetInfoRequest {}).unwrap(), direct);
    let node = rig.call(csi::ListVolumesRequest::default());
    assert_refused(node, Code::Unimplemented, "ListVolumes", "what the driver does not have");
}

#[test]
fn without_event_permission_mounts_are_still_refused() {
    let Some(cluster) = shared() else { return };
    let pods = node_proxy_rules()
        .into_iter()
        .filter(|rule| rule.resources.iter().flatten().any(|resource| resource == "pods"));
    let recorder = Recorder::start(cluster, &[]);
    let mut rig = Rig::prepare(cluster, recorder, &pods.collect::<Vec<_>>());
    rig.start_proxy();
    let (claim, pod) = rig.app();
    let answer = rig.mount(&pod, &claim);
    assert_refused(answer, Code::FailedPrecondition, "DEFER_FS_OPS", "no capability");
    wait_for("a line", || rig.log().contains("failed to record event"));
    rig.driver.set_capabilities(Some(&DEFERRING));
    rig.mount(&pod, &claim).unwrap();
}
