//! Pods that opt in.

use std::path::Path;
use support::cluster::shared;

use csi_loopback::kubernetes::defer_annotation::ANNOTATION;
use serde_json::json;

use super::rig::{Rig, SIZE};
use support::cluster::kubelet::CreatedPod;
use support::cluster::runtime::{assert_served, demanding};
use support::driver::wait_for;

#[test]
#[ignore = "full tier"]
fn an_opted_in_claim_is_mounted_by_the_runtime_only() {
    let Some(rig) = shared().and_then(Rig::new) else { return };
    let id = rig.claim("data", SIZE);
    let watch = rig.watch();
    let pod = rig.run_opted("first");
    rig.assert_used(&pod, &id);
    let [stored] = rig.proxy.stored_volumes().try_into().unwrap();
    assert_eq!(
        (&stored["deferFSMount"], &stored["volumeHandle"]),
        (&"true".into(), &id.as_str().into())
    );
    assert!(rig.proxy.number("volumes_published_with_deferred_ops_total ") >= 1);
    assert_eq!(rig.proxy.number("csi_loopback_deferred_failures_total"), 0);
    rig.delete_and_wait(&pod, &[]);
    rig.wait_until_detached(&id);
    watch.assert_no_mounts();

    // A pod that does not opt in has the host's mount.
    let plain = rig.run("second", &[rig.claimed("data")], &demanding(&rig.class, "data"));
    assert_served(&rig, &plain);
    assert!(rig.is_on_the_host(&rig.target_of_claim(&plain, "data")));
    rig.proxy.wait_for_stored(0);
    assert_eq!(rig.exec(&plain, "cat /data/init"), "by init\nby init\n");
    rig.delete_and_wait(&plain, &[]);
    rig.wait_until_detached(&id);
}

/// The source of the container's mount at `/NAME`.
fn source(rig: &Rig<'_>, pod: &CreatedPod, name: &str) -> String {
    let line = rig.exec(pod, &format!("grep ' /{name} ' /proc/mounts"));
    line.split(' ').next().unwrap().to_owned()
}

#[test]
#[ignore = "full tier"]
fn only_the_named_volumes_of_a_pod_are_deferred() {
    let Some(rig) = shared().and_then(Rig::new) else { return };
    let ids = [rig.claim("left", SIZE), rig.claim("kept", SIZE)];
    let own = || json!({ "volumeAttributes": { "size": "64Mi" } });
    let volumes = [
        rig.claimed("left"),
        rig.claimed("kept"),
        rig.ephemeral("made"),
        rig.inline("own", own()),
        rig.inline("other", own()),
    ];
    let spec = json!({ "runtimeClassName": rig.class });
    let pod = rig.opted("mixed", " left, made,own", &volumes, &spec);
    let made = rig.claim_for(&pod, "made", SIZE);
    rig.wait_until_ready(&pod);
    let claim = |name: &str| rig.target_of_claim(&pod, name);
    let on_the_host = |target: &Path| rig.is_on_the_host(target);
    assert!(!on_the_host(&claim("left")) && !on_the_host(&claim("mixed-made")));
    assert!(!on_the_host(&rig.target(&pod, "own")));
    assert!(on_the_host(&claim("kept")) && on_the_host(&rig.target(&pod, "other")));
    for name in ["left", "kept", "made", "own", "other"] {
        assert!(source(&rig, &pod, name).starts_with("/dev/loop"), "{name}");
        let script = format!("echo {name} >/{name}/file; cat /{name}/file");
        assert_eq!(rig.exec(&pod, &script), format!("{name}\n"));
        rig.cluster.wait_for("kubelet's statistics", || rig.summary(&pod, name));
    }
    rig.proxy.wait_for_stored(3);
    assert_eq!(rig.proxy.number("csi_loopback_deferred_volumes "), 3);
    let abnormal = rig.proxy.metrics("volume_stats_health_status_abnormal{");
    assert_eq!((abnormal.len(), rig.proxy.number("volume_stats_health_status_abnormal{")), (3, 0));
    rig.delete_and_wait(&pod, &["own", "other"]);
    wait_for("the end of the metrics", || {
        rig.proxy.metrics("volume_stats_health_status_abnormal{").is_empty()
    });
    for id in ids.iter().chain([&made]) {
        rig.wait_until_detached(id);
    }
}

#[test]
#[ignore = "full tier"]
fn files_change_group_only_as_the_pods_policy_requires() {
    let Some(rig) = shared().and_then(Rig::new) else { return };
    let id = rig.claim("data", SIZE);
    let watch = rig.watch();
    let first = rig.run_opted("first");
    rig.exec(&first, "echo x >/data/file; chown 0:77 /data/file; sync");
    rig.delete_and_wait(&first, &[]);
    for (name, policy, group) in
        [("by-root", Some("OnRootMismatch"), "77"), ("by-rule", Some("Always"), "4321")]
    {
        let mut spec = demanding(&rig.class, "data");
        spec["securityContext"]["fsGroupChangePolicy"] = json!(policy);
        let pod = rig.opted(name, "data", &[rig.claimed("data")], &spec);
        rig.wait_until_ready(&pod);
        assert_eq!(rig.exec(&pod, "stat -c %g /data/file"), format!("{group}\n"), "{name}");
        rig.delete_and_wait(&pod, &[]);
    }
    rig.wait_until_detached(&id);
    watch.assert_no_mounts();
}

#[test]
#[ignore = "full tier"]
fn a_pod_can_opt_in_until_its_volumes_exist() {
    let Some(rig) = shared().and_then(Rig::new) else { return };
    let watch = rig.watch();
    // The claim does not exist yet.
    let pod = rig.create("late", &[rig.claimed("data")], &demanding(&rig.class, "data"));
    let opt_in = json!({ "metadata": { "annotations": { ANNOTATION: "data" } } });
    rig.cluster.merge(&rig.pods(), &pod.name, &opt_in);
    let id = rig.claim("data", SIZE);
    rig.wait_until_ready(&pod);
    assert_served(&rig, &pod);
    rig.proxy.wait_for_stored(1);
    rig.delete_and_wait(&pod, &[]);
    rig.wait_until_detached(&id);
    watch.assert_no_mounts();
}
