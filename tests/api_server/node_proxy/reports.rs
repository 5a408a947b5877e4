//! What the proxy tells: numbers, and the driver's answers as they are.

use csi::node_service_capability::rpc::Type;
use csi_loopback::proto::csi::v1 as csi;
use prost::Message;
use serde_json::Value;
use support::cluster::shared;
use tonic::Code;

use support::cluster::node_proxy::{Rig, node_proxy_rules};
use support::cluster::recorder::{self, DEFERRING, Recorder};
use support::driver::{assert_refused, wait_for};
use support::path;

#[test]
fn each_publish_of_a_volume_that_is_left_is_counted_when_it_succeeds() {
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
    rig.behind.refuse("NodePublishVolume", Code::Aborted, "at it");
    assert!(rig.publish(&pod, &left).is_err());
    assert_eq!((published(), rig.failures("publish", "driver_refused")), (2.0, 1.0));
}

#[test]
fn a_volumes_condition_is_told_from_its_first_measurement_until_it_is_taken_back() {
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
    let told = |rig: &Rig<'_, _>| -> Vec<String> {
        let page = rig.metrics();
        let of_volumes = |line: &&str| line.starts_with("volume_stats_health_status_abnormal{");
        page.lines().filter(of_volumes).map(str::to_owned).collect()
    };
    assert!(told(&rig).is_empty());
    for (abnormal, wanted) in [(true, 1), (false, 0), (true, 1)] {
        let answer = recorder::stats(Some((abnormal, "a word")));
        rig.behind.answer("NodeGetVolumeStats", Ok(answer.encode_to_vec()));
        assert_eq!(rig.stats(&pod, &left).unwrap(), answer);
        assert_eq!(rig.stats(&other, &host).unwrap(), answer);
        assert_eq!(told(&rig), [format!("{name} {wanted}")]);
    }
    rig.restart_proxy();
    assert!(told(&rig).is_empty());
    rig.stats(&pod, &left).unwrap();
    assert_eq!(told(&rig), [format!("{name} 1")]);
    // A driver that says nothing of its condition says nothing bad of it.
    rig.behind.answer("NodeGetVolumeStats", Ok(recorder::stats(None).encode_to_vec()));
    rig.stats(&pod, &left).unwrap();
    assert_eq!(told(&rig), [format!("{name} 0")]);
    rig.unmount(&pod, &left);
    assert!(told(&rig).is_empty());
}

/// CSI v1.13 has no condition in the answer of NodeGetVolumeStats.
#[test]
fn the_health_of_a_volume_is_read_where_the_driver_tells_no_condition() {
    let Some(cluster) = shared() else { return };
    let has = [&DEFERRING[..], &[Type::GetVolumeHealth]].concat();
    let rig = Rig::recording(cluster, &has);
    let claim = rig.claim("data");
    let pod = rig.pod("app", &[&claim], Some("data"));
    let target = rig.mount(&pod, &claim).unwrap();
    let told = || {
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
        rig.behind.answer("NodeGetVolumeHealth", Ok(health(reasons)));
        rig.stats(&pod, &claim).unwrap();
        assert_eq!(told().as_deref(), Some(wanted));
    }
    let asked: csi::NodeGetVolumeHealthRequest = rig.behind.last();
    assert_eq!(
        (asked.volume_id, asked.volume_publish_path.as_str()),
        (claim.handle(&pod), path(&target))
    );
    // What is not known changes nothing, and costs kubelet no figures.
    rig.behind.refuse("NodeGetVolumeHealth", Code::Internal, "not now");
    assert_eq!(rig.stats(&pod, &claim).unwrap(), recorder::stats(None));
    assert_eq!(told().as_deref(), Some("1"));
    // A driver that tells a condition is not asked as well.
    rig.behind.forget();
    let fine = recorder::stats(Some((false, "fine")));
    rig.behind.answer("NodeGetVolumeStats", Ok(fine.encode_to_vec()));
    rig.stats(&pod, &claim).unwrap();
    assert_eq!(
        (told().as_deref(), rig.behind.calls()),
        (Some("0"), vec!["NodeGetVolumeStats".to_owned()])
    );
}

#[test]
fn what_the_driver_refuses_reaches_kubelet_as_it_is_and_is_counted_by_call() {
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
    methods.iter().for_each(|method| rig.behind.refuse(method, Code::OutOfRange, words));
    for (pod, volume) in [(&pod, &left), (&other, &host)] {
        let request = rig.publishing_request(pod, volume);
        assert_refused(rig.call(request), Code::OutOfRange, words, "publish");
        assert_refused(rig.stats(pod, volume), Code::OutOfRange, words, "stats");
        assert_refused(rig.expand(pod, volume, 1), Code::OutOfRange, words, "expand");
        assert_refused(rig.unpublish(pod, volume), Code::OutOfRange, words, "unpublish");
    }
    // Those of the pod that did not opt in are none of the proxy's business.
    for call in ["publish", "stats", "expand", "unpublish"] {
        assert_eq!(rig.failures(call, "driver_refused"), 1.0, "{call}");
    }
    assert!(rig.events(&pod).is_empty());
}

#[test]
fn the_api_server_is_asked_for_the_pods_of_the_node_and_told_events_and_no_more() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::recording(cluster, &[]);
    let claim = rig.claim("data");
    let pod = rig.pod("app", &[&claim], Some("data"));
    assert!(rig.mount(&pod, &claim).is_err());
    rig.told(&pod, &["DEFER_FS_OPS"]);
    let is_proxys = |request: &Value| request["user"]["username"] == rig.account.user().as_str();
    // The log is a moment behind.
    let requests = cluster.wait_for("the event's line", || {
        let all: Vec<Value> = cluster.requests().into_iter().filter(is_proxys).collect();
        all.iter().any(|one| one["verb"] == "create").then_some(all)
    });
    for request in &requests {
        let (verb, uri) =
            (request["verb"].as_str().unwrap(), request["requestURI"].as_str().unwrap());
        match verb {
            "list" | "watch" => {
                assert!(uri.starts_with("/api/v1/pods?"), "{uri}");
                let selector = format!("fieldSelector=spec.nodeName%3D{}", rig.node);
                assert!(uri.contains(&selector), "{uri}");
            }
            "create" => assert_eq!(uri, format!("/api/v1/namespaces/{}/events?", rig.namespace)),
            _ => panic!("{verb} {uri}"),
        }
        let code = request["responseStatus"]["code"].as_i64();
        assert!(code.is_none_or(|code| code < 400), "{request}");
    }
}

#[test]
fn what_the_driver_says_of_itself_is_what_kubelet_hears() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::recording(cluster, &DEFERRING);
    let info = rig.call(csi::GetPluginInfoRequest {}).unwrap();
    assert_eq!(info.name, rig.behind.name);
    let direct = rig.call_driver(csi::NodeGetCapabilitiesRequest {}).unwrap();
    assert_eq!(rig.call(csi::NodeGetCapabilitiesRequest {}).unwrap(), direct);
    let direct = rig.call_driver(csi::NodeGetInfoRequest {}).unwrap();
    assert_eq!(rig.call(csi::NodeGetInfoRequest {}).unwrap(), direct);
    let node = rig.call(csi::ListVolumesRequest::default());
    assert_refused(node, Code::Unimplemented, "ListVolumes", "what the driver does not have");
}

#[test]
fn a_proxy_that_may_not_tell_events_refuses_all_the_same() {
    let Some(cluster) = shared() else { return };
    let pods = node_proxy_rules()
        .into_iter()
        .filter(|rule| rule.resources.iter().flatten().any(|resource| resource == "pods"));
    let recorder = Recorder::start(cluster, &[]);
    let mut rig = Rig::prepare(cluster, recorder, &pods.collect::<Vec<_>>());
    rig.start_proxy();
    let claim = rig.claim("data");
    let pod = rig.pod("app", &[&claim], Some("data"));
    let answer = rig.mount(&pod, &claim);
    assert_refused(answer, Code::FailedPrecondition, "DEFER_FS_OPS", "no capability");
    wait_for("a line", || rig.log().contains("an event could not be told"));
    rig.behind.set_capabilities(Some(&DEFERRING));
    rig.mount(&pod, &claim).unwrap();
}
