//! Which volumes are left to a runtime: those that the pod names, of whatever kind, and no others.

use csi_loopback::proto::csi::v1 as csi;
use prost::Message;
use serde_json::json;
use support::cluster::shared;
use tonic::Code;

use support::cluster::node_proxy::{Behind, Bound, Ours, Rig, Volume, claim_rules};
use support::cluster::recorder::{DEFERRING, PLAIN, Recorder};
use support::driver::assert_refused;
use support::inline::is_mounted;
use support::path;

/// Whether crust_ops has the volume for a runtime, and the host has not got it.
fn is_left(rig: &Rig<'_, Ours>, pod: &Bound, volume: &Volume) -> bool {
    let target = rig.target(pod, volume);
    let left = rig.behind.ops.entry(path(&target)).mount_info().unwrap().is_some();
    assert_ne!(left, is_mounted(&target), "{}", volume.name);
    assert_eq!(left, rig.vol_data(&target).is_some(), "{}", volume.name);
    left
}

/// What the driver was asked last to publish, whether it is to be left to a runtime.
fn asked(rig: &Rig<'_, Recorder<'_>>) -> bool {
    rig.behind.last::<csi::NodePublishVolumeRequest>().defer_fs_ops
}

#[test]
fn a_claim_a_generic_ephemeral_and_an_inline_volume_are_left_where_the_pod_names_them() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::ours(cluster);
    for (pod, opted) in [("named", Some("data, scratch,own")), ("plain", None)] {
        let claim = rig.claim(&format!("data-{pod}"));
        let claim = Volume { name: "data".into(), ..claim };
        let volumes =
            [claim, rig.ephemeral(pod, "scratch"), rig.inline("own", &[("size", "32Mi")])];
        let all: Vec<&Volume> = volumes.iter().collect();
        let pod = rig.pod(pod, &all, opted);
        for volume in &volumes {
            rig.mount(&pod, volume).unwrap();
            assert_eq!(is_left(&rig, &pod, volume), opted.is_some(), "{}", volume.name);
        }
        let known = if opted.is_some() { 3.0 } else { 0.0 };
        assert_eq!(rig.metric("csi_loopback_deferred_volumes"), known);
        volumes.iter().for_each(|volume| rig.unmount(&pod, volume));
        assert_eq!(rig.metric("csi_loopback_deferred_volumes"), 0.0);
        assert!(!rig.kubelet().join("pods").join(&pod.uid).exists());
    }
}

#[test]
fn another_providers_driver_gets_kubelets_bytes_with_the_fields_behind_them() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::recording(cluster, &DEFERRING);
    let claim = rig.claim("data");
    let pod = rig.pod("app", &[&claim], Some("data"));
    rig.mount(&pod, &claim).unwrap();
    let kubelets = rig.publishing_request(&pod, &claim);
    let came = rig.behind.seen_raw("NodePublishVolume").pop().unwrap();
    assert!(came.starts_with(&kubelets.encode_to_vec()));
    let wanted = csi::NodePublishVolumeRequest { defer_fs_ops: true, ..kubelets };
    assert_eq!(rig.behind.last::<csi::NodePublishVolumeRequest>(), wanted);
    rig.stats(&pod, &claim).unwrap();
    assert!(rig.behind.last::<csi::NodeGetVolumeStatsRequest>().defer_fs_ops);
    let wanted = csi::NodeExpandVolumeRequest {
        defer_fs_ops: true,
        ..rig.expansion_request(&pod, &claim, 1 << 30)
    };
    assert_eq!(rig.expand(&pod, &claim, 1 << 30).unwrap(), 1 << 30);
    assert_eq!(rig.behind.last::<csi::NodeExpandVolumeRequest>(), wanted);
    rig.unmount(&pod, &claim);
    assert!(rig.behind.last::<csi::NodeUnpublishVolumeRequest>().defer_fs_ops);
    assert_eq!(
        rig.behind.calls(),
        [
            "NodeStageVolume",
            "NodePublishVolume",
            "NodeGetVolumeStats",
            "NodeExpandVolume",
            "NodeUnpublishVolume",
            "NodeUnstageVolume"
        ]
    );
}

#[test]
fn calls_for_a_pod_that_did_not_opt_in_are_passed_on_byte_for_byte() {
    let Some(cluster) = shared() else { return };
    // With the capabilities and without.
    for capabilities in [&DEFERRING[..], &PLAIN] {
        let rig = Rig::recording(cluster, capabilities);
        let claim = rig.claim("data");
        let group = json!({ "securityContext": { "fsGroup": 4059 } });
        let pod = rig.pod_with("app", &[&claim], None, group);
        rig.mount(&pod, &claim).unwrap();
        rig.stats(&pod, &claim).unwrap();
        rig.expand(&pod, &claim, 1 << 30).unwrap();
        let target = rig.target(&pod, &claim);
        rig.unpublish(&pod, &claim).unwrap();
        let last = |method: &str| rig.behind.seen_raw(method).pop().unwrap();
        let publishing = rig.publishing_request(&pod, &claim).encode_to_vec();
        assert_eq!(last("NodePublishVolume"), publishing);
        let stats = support::driver::stats(&claim.handle(&pod), path(&target));
        assert_eq!(last("NodeGetVolumeStats"), stats.encode_to_vec());
        let expansion = rig.expansion_request(&pod, &claim, 1 << 30).encode_to_vec();
        assert_eq!(last("NodeExpandVolume"), expansion);
        let unpublishing = support::driver::unpublishing(&claim.handle(&pod), path(&target));
        assert_eq!(last("NodeUnpublishVolume"), unpublishing.encode_to_vec());
        assert!(rig.vol_data(&target).is_none() && rig.events(&pod).is_empty());
        assert!(!rig.metrics().contains("deferred_failures_total{"));
    }
}

#[test]
fn where_a_pod_names_some_of_its_claims_the_api_server_says_which_one_is_meant() {
    let Some(cluster) = shared() else { return };
    let recorder = Recorder::start(cluster, &DEFERRING);
    let rig = Rig::telling_claims_apart(cluster, recorder);
    let (left, mounted) = (rig.claim("left"), rig.claim("mounted"));
    let scratch = rig.ephemeral("app", "scratch");
    let pod = rig.pod("app", &[&left, &mounted, &scratch], Some("left,scratch"));
    for (volume, deferred) in [(&left, true), (&mounted, false), (&scratch, true)] {
        rig.mount(&pod, volume).unwrap();
        assert_eq!(asked(&rig), deferred, "{}", volume.name);
        assert_eq!(rig.vol_data(&rig.target(&pod, volume)).is_some(), deferred);
    }
    // A volume that no claim of the pod is bound to is nobody's.
    let stranger = rig.claim("stranger");
    let answer = rig.mount(&pod, &stranger);
    assert_refused(answer, Code::Unavailable, "stranger", "a claim that is not the pod's");
    [&left, &mounted, &scratch].iter().for_each(|volume| rig.unmount(&pod, volume));
}

#[test]
fn where_nobody_may_say_which_claim_is_meant_the_mount_waits_until_somebody_may() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::recording(cluster, &DEFERRING);
    let (left, mounted) = (rig.claim("left"), rig.claim("mounted"));
    let own = rig.inline("own", &[]);
    let some = rig.pod("some", &[&left, &mounted, &own], Some("left,own"));
    for volume in [&left, &mounted] {
        let answer = rig.mount(&some, volume);
        assert_refused(answer, Code::Unavailable, "persistentvolumeclaims", &volume.name);
    }
    assert_eq!(rig.failures("publish", "claims_unknown"), 2.0);
    assert!(rig.behind.seen_raw("NodePublishVolume").is_empty());
    assert_eq!(rig.metric("csi_loopback_deferred_volumes"), 0.0);
    // Nobody has to be asked for an inline volume, nor where all claims are named, or none.
    rig.mount(&some, &own).unwrap();
    assert!(asked(&rig));
    for (name, opted, deferred) in [("all", Some("left,mounted"), true), ("none", None, false)] {
        let pod = rig.pod(name, &[&left, &mounted], opted);
        for volume in [&left, &mounted] {
            rig.publish(&pod, volume).unwrap();
            assert_eq!(asked(&rig), deferred, "{name} {}", volume.name);
        }
    }
    cluster.grant(&rig.account, &claim_rules());
    rig.mount(&some, &left).unwrap();
    assert!(asked(&rig));
    rig.mount(&some, &mounted).unwrap();
    assert!(!asked(&rig));
}

#[test]
fn a_raw_block_volume_beside_others_is_told_from_them_by_its_use() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::ours(cluster);
    let (data, raw) = (rig.claim("data"), rig.raw_claim("raw"));
    let pod = rig.pod("app", &[&data, &raw], Some("data"));
    rig.mount(&pod, &data).unwrap();
    assert!(is_left(&rig, &pod, &data));
    let device = rig.mount(&pod, &raw).unwrap();
    assert!(std::os::unix::fs::FileTypeExt::is_block_device(
        &std::fs::metadata(device).unwrap().file_type()
    ));
    assert_eq!(rig.metric("csi_loopback_deferred_volumes"), 1.0);
    rig.unmount(&pod, &raw);
    rig.unmount(&pod, &data);
}

#[test]
fn a_raw_block_volume_that_is_named_is_refused_with_an_event() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::recording(cluster, &DEFERRING);
    let raw = rig.raw_claim("raw");
    let pod = rig.pod("app", &[&raw], Some("raw"));
    let answer = rig.mount(&pod, &raw);
    assert_refused(answer, Code::FailedPrecondition, "raw block", "a raw block volume");
    let event = rig.told(&pod, &["raw block"]);
    assert_eq!(event.reason.as_deref(), Some("FailedMount"));
    assert_eq!(rig.failures("publish", "raw_block"), 1.0);
    assert!(rig.behind.seen_raw("NodePublishVolume").is_empty());
}

#[test]
fn a_pod_may_opt_in_until_its_volume_is_published() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::recording(cluster, &DEFERRING);
    let (first, second) = (rig.claim("first"), rig.claim("second"));
    let pod = rig.pod("app", &[&first, &second], None);
    // As a scheduler does at PostBind.
    rig.opt_in(&pod, "first,second");
    rig.wait_until_heard(&pod);
    rig.mount(&pod, &first).unwrap();
    assert!(asked(&rig));
}

#[test]
fn a_pod_of_the_same_name_is_another_pod() {
    let Some(cluster) = shared() else { return };
    let recorder = Recorder::start(cluster, &DEFERRING);
    let mut rig = Rig::with_flags(cluster, recorder, &["--pod-timeout", "1s"]);
    rig.pod_info = true;
    let claim = rig.claim("data");
    let first = rig.pod("app", &[&claim], None);
    rig.mount(&first, &claim).unwrap();
    assert!(!asked(&rig));
    rig.unmount(&first, &claim);
    rig.delete(&first);
    let second = rig.pod("app", &[&claim], Some("data"));
    rig.wait_until_heard(&second);
    rig.mount(&second, &claim).unwrap();
    assert!(asked(&rig));
    rig.unmount(&second, &claim);
    // A late call for the one that is gone: what the other one wants is nothing to it.
    let status = rig.publish(&first, &claim).unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    assert_eq!(rig.failures("publish", "pod_unknown"), 1.0);
}

/// The request of kubelet, at a path that is none of kubelet's.
fn elsewhere<B: Behind>(
    rig: &Rig<'_, B>,
    pod: &Bound,
    volume: &Volume,
) -> csi::NodePublishVolumeRequest {
    let mut request = rig.publishing_request(pod, volume);
    request.volume_context.extend(rig.pod_info_of(pod, volume));
    let target = rig.scratch().join("elsewhere").join(&pod.uid).join(&volume.name).join("at");
    request.target_path = path(&target).to_owned();
    request
}

#[test]
fn at_a_path_that_is_none_of_kubelets_the_pod_is_known_from_pod_info() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::recording(cluster, &DEFERRING);
    let (data, more) = (rig.claim("data"), rig.claim("more"));
    let own = rig.inline("own", &[]);
    let publish = |pod: &Bound, volume: &Volume| {
        let answer = rig.set_up(&elsewhere(&rig, pod, volume));
        answer.map(|()| asked(&rig))
    };
    let all = rig.pod("all", &[&data, &more, &own], Some("data,more,own"));
    let inline = rig.pod("inline", &[&data, &more, &own], Some("own"));
    let none = rig.pod("none", &[&data, &own], None);
    for (pod, of_claim, of_inline) in
        [(&all, true, true), (&inline, false, true), (&none, false, false)]
    {
        assert_eq!(publish(pod, &data).unwrap(), of_claim, "{}", pod.name);
        assert_eq!(publish(pod, &own).unwrap(), of_inline, "{}", pod.name);
    }
    // Which of its claims is meant nothing tells.
    let some = rig.pod("some", &[&data, &more, &own], Some("data"));
    let answer = publish(&some, &data);
    assert_refused(answer, Code::FailedPrecondition, "kubernetes.io~csi", "one of several claims");
    assert_eq!(rig.failures("publish", "ambiguous"), 1.0);
    rig.told(&some, &["kubernetes.io~csi"]);
    assert!(!publish(&some, &own).unwrap());
    // Without pod info nobody knows whose it is.
    let mut request = elsewhere(&rig, &all, &data);
    request.volume_context.clear();
    request.target_path += "-unknown";
    rig.set_up(&request).unwrap();
    assert!(!asked(&rig));
}
