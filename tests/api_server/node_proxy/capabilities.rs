//! No call contains a field that the driver has no capability for. If a pod needs such a field, the
//! call fails with the reason until the driver has the capability (stories 5 and 6).

use csi::node_service_capability::rpc::Type;
use csi::volume_capability::{AccessType, MountVolume};
use csi_loopback::proto::csi::v1 as csi;
use serde_json::{Value, json};
use support::cluster::shared;
use tonic::Code;

use support::cluster::node_proxy::{Ours, Rig};
use support::cluster::recorder::{DEFERRING, PLAIN, Recorder};
use support::driver::{assert_refused, wait_for};
use support::inline::is_mounted;
use support::ops::Ops;
use support::path;

const FINE: &str = r#"echo '{"usage":[{"unit":"BYTES","total":10,"used":4,"available":6}],"volume_condition":{"abnormal":false,"message":"fine"}}'"#;

/// The mount of the last publish that the driver received.
fn mount(rig: &Rig<'_, Recorder<'_>>) -> MountVolume {
    let request: csi::NodePublishVolumeRequest = rig.driver.last();
    match request.volume_capability.unwrap().access_type.unwrap() {
        AccessType::Mount(mount) => mount,
        other => panic!("{other:?}"),
    }
}

fn in_group(policy: Option<&str>) -> Value {
    json!({ "securityContext": { "fsGroup": 4059, "fsGroupChangePolicy": policy } })
}

#[test]
fn story_6_a_missing_capability_fails_the_mount() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::recording(cluster, &PLAIN);
    let (claim, pod) = rig.app();
    for turn in 1..=3 {
        let answer = rig.mount(&pod, &claim);
        assert_refused(answer, Code::FailedPrecondition, "DEFER_FS_OPS", "no capability");
        assert_eq!(rig.failures("publish", "missing_capability"), f64::from(turn));
    }
    let event =
        rig.wait_for_event(&pod, &["DEFER_FS_OPS", "upgrade the driver", &claim.handle(&pod)]);
    assert_eq!(event.reason.as_deref(), Some("FailedMount"));
    assert_eq!(event.type_.as_deref(), Some("Warning"));
    assert_eq!(event.involved_object.name.as_deref(), Some("app"));
    let source = event.source.unwrap();
    assert_eq!(source.component.as_deref(), Some("csi-loopback-node-proxy"));
    assert_eq!(source.host.as_deref(), Some(rig.node.as_str()));
    // Kubelet retries every few seconds, which must be reported once.
    assert_eq!(rig.events(&pod).len(), 1);
    assert!(rig.driver.seen_raw("NodePublishVolume").is_empty());
    assert_eq!(rig.metric("csi_loopback_deferred_volumes"), 0.0);
    assert!(rig.vol_data(&rig.target(&pod, &claim)).is_none());
    rig.driver.set_capabilities(Some(&DEFERRING));
    rig.mount(&pod, &claim).unwrap();
    assert!(rig.driver.last::<csi::NodePublishVolumeRequest>().defer_fs_ops);
}

#[test]
fn story_6_with_the_driver_of_this_project() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::ours(cluster);
    rig.driver.restart(false);
    let (claim, pod) = rig.app();
    let answer = rig.mount(&pod, &claim);
    assert_refused(answer, Code::FailedPrecondition, "DEFER_FS_OPS", "a downgraded driver");
    rig.wait_for_event(&pod, &["DEFER_FS_OPS"]);
    let target = rig.target(&pod, &claim);
    assert!(!is_mounted(&target));
    rig.driver.restart(true);
    rig.mount(&pod, &claim).unwrap();
    assert!(!is_mounted(&target));
    assert!(rig.driver.ops.entry(path(&target)).mount_info().unwrap().is_some());
    rig.unmount(&pod, &claim);
}

#[test]
fn a_driver_without_the_call_for_capabilities_has_none() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::recording(cluster, &PLAIN);
    rig.driver.set_capabilities(None);
    let own = rig.inline("own", &[]);
    let (pod, plain) = (rig.pod("app", &[&own], Some("own")), rig.pod("plain", &[&own], None));
    // Kubelet itself requests them, so a real kubelet would not get this far.
    let publish = |pod| {
        let mut request = csi::NodePublishVolumeRequest {
            volume_id: own.handle(pod),
            target_path: path(&rig.target(pod, &own)).to_owned(),
            ..Default::default()
        };
        request.volume_capability = Some(support::driver::mounted(""));
        rig.set_up(&request)
    };
    assert_refused(publish(&pod), Code::FailedPrecondition, "DEFER_FS_OPS", "UNIMPLEMENTED");
    publish(&plain).unwrap();
}

#[test]
fn each_part_of_a_volume_group_needs_its_capability() {
    let Some(cluster) = shared() else { return };
    use Type::{DeferFsOps, DeferFsOpsWithSupplementalGroup as Group};
    let rig = Rig::recording(cluster, &DEFERRING);
    let claim = rig.claim("data");
    let policy = Some("OnRootMismatch");
    let free = rig.pod("free", &[&claim], Some("data"));
    let grouped = rig.pod_with("grouped", &[&claim], Some("data"), in_group(None));
    let choosy = rig.pod_with("choosy", &[&claim], Some("data"), in_group(policy));
    let filled = |mount: MountVolume| {
        (mount.volume_supplemental_group, mount.volume_supplemental_group_change_policy)
    };
    let words = |id: &str, policy: &str| (id.to_owned(), policy.to_owned());
    for (pod, wanted) in [
        (&free, words("", "")),
        (&grouped, words("4059", "")),
        (&choosy, words("4059", "OnRootMismatch")),
    ] {
        rig.mount(pod, &claim).unwrap();
        assert_eq!(filled(mount(&rig)), wanted, "{}", pod.name);
        assert_eq!(mount(&rig).fs_type, "ext4");
        rig.unmount(pod, &claim);
    }
    let staging = [Type::StageUnstageVolume];
    let few = |more: &[Type]| {
        rig.driver.set_capabilities(Some(&[&staging, more].concat()));
    };
    few(&[DeferFsOps]);
    rig.mount(&free, &claim).unwrap();
    rig.unmount(&free, &claim);
    for pod in [&grouped, &choosy] {
        let missing = "DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP;";
        assert_refused(rig.mount(pod, &claim), Code::FailedPrecondition, missing, &pod.name);
        rig.wait_for_event(pod, &[missing, "fsGroup"]);
    }
    few(&[DeferFsOps, Group]);
    rig.mount(&grouped, &claim).unwrap();
    rig.unmount(&grouped, &claim);
    let missing = "DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP_CHANGE_POLICY;";
    assert_refused(rig.mount(&choosy, &claim), Code::FailedPrecondition, missing, "choosy");
    rig.wait_for_event(&choosy, &[missing, "fsGroupChangePolicy"]);
    // The KEP's first capability is required for the others.
    few(&[Group]);
    assert_refused(rig.mount(&grouped, &claim), Code::FailedPrecondition, "DEFER_FS_OPS;", "no");
}

#[test]
fn a_volume_group_from_kubelet_is_not_changed() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::recording(cluster, &[&DEFERRING[..], &[Type::VolumeMountGroup]].concat());
    let claim = rig.claim("data");
    for (name, opted, supplemental) in [("left", Some("data"), "4059"), ("host", None, "")] {
        let pod = rig.pod_with(name, &[&claim], opted, in_group(None));
        rig.mount(&pod, &claim).unwrap();
        let mount = mount(&rig);
        assert_eq!(mount.volume_mount_group, "4059");
        assert_eq!(mount.volume_supplemental_group, supplemental);
        rig.unmount(&pod, &claim);
    }
}

#[test]
fn the_group_reaches_the_runtime() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::ours(cluster);
    let claim = rig.claim("data");
    let policy = in_group(Some("OnRootMismatch"));
    let pod = rig.pod_with("app", &[&claim], Some("data"), policy);
    let target = rig.mount(&pod, &claim).unwrap();
    let info = rig.driver.ops.entry(path(&target)).mount_info().unwrap().unwrap();
    let (group, policy) = info.group().unwrap().unwrap();
    assert_eq!((group, policy.to_string().as_str()), (4059, "OnRootMismatch"));
    rig.unmount(&pod, &claim);
}

#[test]
fn an_unavailable_driver_is_retried_without_an_event() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::recording(cluster, &DEFERRING);
    let (claim, pod) = rig.app();
    let request = rig.publishing_request(&pod, &claim);
    rig.stage(&pod, &claim).unwrap();
    rig.driver.stop();
    assert_refused(rig.set_up(&request), Code::Unavailable, "try again", "no driver");
    assert_eq!(rig.failures("publish", "driver_away"), 1.0);
    rig.driver.start_again();
    rig.set_up(&request).unwrap();
    assert!(rig.driver.last::<csi::NodePublishVolumeRequest>().defer_fs_ops);
    assert!(rig.events(&pod).is_empty());
}

#[test]
fn story_5_a_downgrade_stops_stats_and_expansion_only() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::recording(cluster, &DEFERRING);
    let (claim, pod) = rig.app();
    let target = rig.mount(&pod, &claim).unwrap();
    rig.driver.set_capabilities(Some(&PLAIN));
    rig.driver.forget();
    let answer = rig.stats(&pod, &claim);
    assert_refused(answer, Code::FailedPrecondition, "DEFER_FS_OPS", "figures");
    // Kubelet treats FAILED_PRECONDITION as a volume in use and would not retry.
    let answer = rig.expand(&pod, &claim, 1 << 30);
    assert_refused(answer, Code::Unimplemented, "DEFER_FS_OPS", "growth");
    for call in ["stats", "expand"] {
        assert_eq!(rig.failures(call, "missing_capability"), 1.0, "{call}");
    }
    let log = rig.log();
    let logged = |line: &&str| line.contains("NodeGetVolumeStats") && line.contains("DEFER_FS_OPS");
    assert!(log.lines().any(|line| logged(&line)), "{log}");
    assert!(rig.driver.calls().is_empty());
    // An upgrade is enough for both.
    rig.driver.set_capabilities(Some(&DEFERRING));
    rig.stats(&pod, &claim).unwrap();
    rig.expand(&pod, &claim, 1 << 30).unwrap();
    rig.driver.set_capabilities(Some(&PLAIN));
    rig.unmount(&pod, &claim);
    assert!(!rig.driver.last::<csi::NodeUnpublishVolumeRequest>().defer_fs_ops);
    assert!(rig.vol_data(&target).is_none());
    assert_eq!(rig.metric("csi_loopback_deferred_volumes"), 0.0);
}

/// Claims the volume like csi-loopback-runc for a container.
fn claim_by_a_runtime(ops: &Ops, target: &str) {
    let grow = r#"[ "$2" = stats ] || { echo '{"capacity_bytes":67108864}'; exit; }"#;
    let program = ops.program("runtime", &format!("{grow}\n{FINE}"));
    ops.entry(target).write_runtime_cli(&program).unwrap();
}

#[test]
fn story_5_with_the_driver_of_this_project() {
    let Some(cluster) = shared() else { return };
    let mut rig: Rig<'_, Ours> = Rig::ours(cluster);
    let (claim, pod) = rig.app();
    let target = rig.mount(&pod, &claim).unwrap();
    claim_by_a_runtime(&rig.driver.ops, path(&target));
    assert_eq!(rig.stats(&pod, &claim).unwrap().usage[0].total, 10);
    let size = 2 * support::cluster::node_proxy::SIZE;
    rig.driver.driver.ok(support::driver::expand(&claim.handle(&pod), size));
    assert_eq!(rig.expand(&pod, &claim, size).unwrap(), size as i64);
    assert!(!is_mounted(&target));
    rig.driver.restart(false);
    assert_refused(rig.stats(&pod, &claim), Code::FailedPrecondition, "DEFER_FS_OPS", "figures");
    let answer = rig.expand(&pod, &claim, size);
    assert_refused(answer, Code::Unimplemented, "DEFER_FS_OPS", "growth");
    rig.unmount(&pod, &claim);
    assert!(rig.vol_data(&target).is_none() && !target.exists());
    rig.driver.restart(true);
    let again = rig.pod("again", &[&claim], Some("data"));
    let target = rig.mount(&again, &claim).unwrap();
    wait_for("the volume is left", || {
        rig.driver.ops.entry(path(&target)).mount_info().unwrap().is_some()
    });
    rig.unmount(&again, &claim);
}

#[test]
fn an_unpublish_has_the_field_without_capabilities() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::recording(cluster, &DEFERRING);
    let (claim, pod) = rig.app();
    let target = rig.mount(&pod, &claim).unwrap();
    rig.driver.refuse("NodeGetCapabilities", Code::Internal, "not now");
    assert_refused(rig.stats(&pod, &claim), Code::Unavailable, "try again", "figures");
    rig.unpublish(&pod, &claim).unwrap();
    assert!(rig.driver.last::<csi::NodeUnpublishVolumeRequest>().defer_fs_ops);
    assert!(rig.vol_data(&target).is_none());
}
