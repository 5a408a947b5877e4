//! Which volumes are deferred: those that the pod names, of every kind, and no others.

use csi_loopback::proto::csi::v1 as csi;
use prost::Message;
use serde_json::json;
use support::cluster::shared;
use tonic::Code;

use support::cluster::node_proxy::{BoundPod, Ours, ProxiedDriver, Rig, Volume, claim_rules};
use support::cluster::recorder::{DEFERRING, PLAIN, Recorder};
use support::driver::assert_refused;
use support::inline::is_mounted;
use support::path;

/// Whether crust_ops has the volume for a runtime and the host has not mounted it.
fn is_left(rig: &Rig<'_, Ours>, pod: &BoundPod, volume: &Volume) -> bool {
    let target = rig.target(pod, volume);
    let left = rig.driver.ops.entry(path(&target)).mount_info().unwrap().is_some();
    assert_ne!(left, is_mounted(&target), "{}", volume.name);
    assert_eq!(left, rig.vol_data(&target).is_some(), "{}", volume.name);
    left
}

/// Whether the driver's last publish request was deferred.
fn was_deferred(rig: &Rig<'_, Recorder<'_>>) -> bool {
    rig.driver.last::<csi::NodePublishVolumeRequest>().defer_fs_ops
}

#[test]
fn named_volumes_of_every_kind_are_deferred() {
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
fn another_driver_gets_kubelets_bytes_plus_the_fields() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::recording(cluster, &DEFERRING);
    let (claim, pod) = rig.app();
    rig.mount(&pod, &claim).unwrap();
    let kubelets = rig.publishing_request(&pod, &claim);
    let came = rig.driver.seen_raw("NodePublishVolume").pop().unwrap();
    assert!(came.starts_with(&kubelets.encode_to_vec()));
    let wanted = csi::NodePublishVolumeRequest { defer_fs_ops: true, ..kubelets };
    assert_eq!(rig.driver.last::<csi::NodePublishVolumeRequest>(), wanted);
    rig.stats(&pod, &claim).unwrap();
    assert!(rig.driver.last::<csi::NodeGetVolumeStatsRequest>().defer_fs_ops);
    let wanted = csi::NodeExpandVolumeRequest {
        defer_fs_ops: true,
        ..rig.expansion_request(&pod, &claim, 1 << 30)
    };
    assert_eq!(rig.expand(&pod, &claim, 1 << 30).unwrap(), 1 << 30);
    assert_eq!(rig.driver.last::<csi::NodeExpandVolumeRequest>(), wanted);
    rig.unmount(&pod, &claim);
    assert!(rig.driver.last::<csi::NodeUnpublishVolumeRequest>().defer_fs_ops);
    assert_eq!(
        rig.driver.calls(),
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
fn calls_without_opt_in_are_forwarded_unchanged() {
    let Some(cluster) = shared() else { return };
    // With and without the capabilities.
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
        let last = |method: &str| rig.driver.seen_raw(method).pop().unwrap();
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
fn a_claim_is_identified_through_the_api_server() {
    let Some(cluster) = shared() else { return };
    let recorder = Recorder::start(cluster, &DEFERRING);
    let rig = Rig::with_claim_rights(cluster, recorder);
    let (left, mounted) = (rig.claim("left"), rig.claim("mounted"));
    let scratch = rig.ephemeral("app", "scratch");
    let pod = rig.pod("app", &[&left, &mounted, &scratch], Some("left,scratch"));
    for (volume, deferred) in [(&left, true), (&mounted, false), (&scratch, true)] {
        rig.mount(&pod, volume).unwrap();
        assert_eq!(was_deferred(&rig), deferred, "{}", volume.name);
        assert_eq!(rig.vol_data(&rig.target(&pod, volume)).is_some(), deferred);
    }
    // A volume that none of the pod's claims is bound to.
    let stranger = rig.claim("stranger");
    let answer = rig.mount(&pod, &stranger);
    assert_refused(answer, Code::Unavailable, "stranger", "a claim that is not the pod's");
    [&left, &mounted, &scratch].iter().for_each(|volume| rig.unmount(&pod, volume));
}

#[test]
fn an_unidentified_claim_is_not_mounted() {
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
    assert!(rig.driver.seen_raw("NodePublishVolume").is_empty());
    assert_eq!(rig.metric("csi_loopback_deferred_volumes"), 0.0);
    // No lookup is needed for an inline volume, or if all claims are named, or none.
    rig.mount(&some, &own).unwrap();
    assert!(was_deferred(&rig));
    for (name, opted, deferred) in [("all", Some("left,mounted"), true), ("none", None, false)] {
        let pod = rig.pod(name, &[&left, &mounted], opted);
        for volume in [&left, &mounted] {
            rig.publish(&pod, volume).unwrap();
            assert_eq!(was_deferred(&rig), deferred, "{name} {}", volume.name);
        }
    }
    cluster.grant(&rig.account, &claim_rules());
    rig.mount(&some, &left).unwrap();
    assert!(was_deferred(&rig));
    rig.mount(&some, &mounted).unwrap();
    assert!(!was_deferred(&rig));
}

#[test]
fn a_raw_block_volume_is_identified_by_its_use() {
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
    let event = rig.wait_for_event(&pod, &["raw block"]);
    assert_eq!(event.reason.as_deref(), Some("FailedMount"));
    assert_eq!(rig.failures("publish", "raw_block"), 1.0);
    assert!(rig.driver.seen_raw("NodePublishVolume").is_empty());
}

#[test]
fn a_pod_may_opt_in_until_its_volume_is_published() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::recording(cluster, &DEFERRING);
    let (first, second) = (rig.claim("first"), rig.claim("second"));
    let pod = rig.pod("app", &[&first, &second], None);
    // Like a scheduler at PostBind.
    rig.opt_in(&pod, "first,second");
    rig.wait_until_opted_in(&pod);
    rig.mount(&pod, &first).unwrap();
    assert!(was_deferred(&rig));
}

#[test]
fn a_new_pod_of_the_same_name_is_distinguished() {
    let Some(cluster) = shared() else { return };
    let recorder = Recorder::start(cluster, &DEFERRING);
    let mut rig = Rig::with_flags(cluster, recorder, &["--pod-timeout", "1s"]);
    rig.pod_info = true;
    let claim = rig.claim("data");
    let first = rig.pod("app", &[&claim], None);
    rig.mount(&first, &claim).unwrap();
    assert!(!was_deferred(&rig));
    rig.unmount(&first, &claim);
    rig.delete(&first);
    let second = rig.pod("app", &[&claim], Some("data"));
    rig.wait_until_opted_in(&second);
    rig.mount(&second, &claim).unwrap();
    assert!(was_deferred(&rig));
    rig.unmount(&second, &claim);
    // A late call for the deleted pod does not depend on the new one.
    let status = rig.publish(&first, &claim).unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    assert_eq!(rig.failures("publish", "pod_unknown"), 1.0);
}

/// Kubelet's request at a path outside of kubelet's directory.
fn elsewhere<B: ProxiedDriver>(
    rig: &Rig<'_, B>,
    pod: &BoundPod,
    volume: &Volume,
) -> csi::NodePublishVolumeRequest {
    let mut request = rig.publishing_request(pod, volume);
    request.volume_context.extend(rig.pod_info_of(pod, volume));
    let target = rig.scratch().join("elsewhere").join(&pod.uid).join(&volume.name).join("at");
    request.target_path = path(&target).to_owned();
    request
}

#[test]
fn at_another_path_the_pod_comes_from_pod_info() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::recording(cluster, &DEFERRING);
    let (data, more) = (rig.claim("data"), rig.claim("more"));
    let own = rig.inline("own", &[]);
    let publish = |pod: &BoundPod, volume: &Volume| {
        let answer = rig.set_up(&elsewhere(&rig, pod, volume));
        answer.map(|()| was_deferred(&rig))
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
    // The claim cannot be identified.
    let some = rig.pod("some", &[&data, &more, &own], Some("data"));
    let answer = publish(&some, &data);
    assert_refused(answer, Code::FailedPrecondition, "kubernetes.io~csi", "one of several claims");
    assert_eq!(rig.failures("publish", "ambiguous"), 1.0);
    rig.wait_for_event(&some, &["kubernetes.io~csi"]);
    assert!(!publish(&some, &own).unwrap());
    // Without pod info the pod is unknown.
    let mut request = elsewhere(&rig, &all, &data);
    request.volume_context.clear();
    request.target_path += "-unknown";
    rig.set_up(&request).unwrap();
    assert!(!was_deferred(&rig));
}
