//! Pods that opt in.

use std::path::Path;
use support::cluster::shared;

use csi_loopback::kubernetes::defer_annotation::ANNOTATION;
use serde_json::json;

use super::rig::{Rig, SIZE};
use support::MIB;
use support::cluster::kubelet::Made;
use support::cluster::runtime::{assert_served, demanding, device_of};
use support::driver::loops_named;

#[test]
#[ignore = "full tier"]
fn a_claim_of_any_class_is_mounted_by_the_runtime_alone_since_its_pod_says_so() {
    let Some(cluster) = shared() else { return };
    let Some(rig) = Rig::new(cluster) else { return };
    let id = rig.claim("data", SIZE);
    let watch = rig.watch();
    let pod = rig.run_opted("first");
    assert_served(&rig, &pod);
    let device = device_of(&rig, &pod, "main");
    assert_eq!(
        (&device, loops_named(&id)),
        (&device_of(&rig, &pod, "second"), vec![device.clone()])
    );
    let [left] = rig.proxy.remembered().try_into().unwrap();
    assert_eq!(
        (&left["deferFSMount"], &left["volumeHandle"]),
        (&"true".into(), &id.as_str().into())
    );
    assert!(rig.proxy.number("volumes_published_with_deferred_ops_total ") >= 1);
    rig.exec(&pod, "dd if=/dev/zero of=/data/large bs=1M count=64 2>/dev/null; sync");
    let (bytes, used) = cluster.wait_for("kubelet's figures", || {
        rig.summary(&pod, "data").filter(|(_, used)| *used >= 64 * MIB)
    });
    assert!(bytes > 200 * MIB && bytes <= SIZE && used < 128 * MIB, "{bytes} {used}");
    // What kubelet has made of the sub-path is no part of the volume, and goes with the pod.
    let target = rig.target_of_claim(&pod, "data");
    assert!(target.join("deep/part").is_dir() && !target.join("init").exists());
    assert_eq!(rig.proxy.number("csi_loopback_deferred_failures_total"), 0);
    rig.gone(&pod, &[]);
    rig.wait_until_detached(&id);
    watch.saw_nothing();

    // Who does not ask for it has it as ever.
    let plain = rig.run("second", &[rig.claimed("data")], &demanding(&rig.class, "data"));
    assert_served(&rig, &plain);
    assert!(rig.is_on_the_host(&rig.target_of_claim(&plain, "data")));
    rig.proxy.remembers(0);
    assert_eq!(rig.exec(&plain, "cat /data/init"), "by init\nby init\n");
    rig.gone(&plain, &[]);
    rig.wait_until_detached(&id);
}

/// The filesystem that the container has at `/NAME`.
fn source(rig: &Rig<'_>, pod: &Made, name: &str) -> String {
    let line = rig.exec(pod, &format!("grep ' /{name} ' /proc/mounts"));
    line.split(' ').next().unwrap().to_owned()
}

#[test]
#[ignore = "full tier"]
fn each_volume_of_a_pod_is_mounted_by_whom_the_pod_has_named() {
    let Some(cluster) = shared() else { return };
    let Some(rig) = Rig::new(cluster) else { return };
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
        cluster.wait_for("kubelet's figures", || rig.summary(&pod, name));
    }
    rig.proxy.remembers(3);
    assert_eq!(rig.proxy.number("csi_loopback_deferred_volumes "), 3);
    let abnormal = rig.proxy.metrics("volume_stats_health_status_abnormal{");
    assert_eq!((abnormal.len(), rig.proxy.number("volume_stats_health_status_abnormal{")), (3, 0));
    rig.gone(&pod, &["own", "other"]);
    assert_eq!(rig.proxy.metrics("volume_stats_health_status_abnormal{"), Vec::<String>::new());
    for id in ids.iter().chain([&made]) {
        rig.wait_until_detached(id);
    }
}

#[test]
#[ignore = "full tier"]
fn files_change_their_group_only_where_the_pods_policy_says_so() {
    let Some(cluster) = shared() else { return };
    let Some(rig) = Rig::new(cluster) else { return };
    let id = rig.claim("data", SIZE);
    let watch = rig.watch();
    let first = rig.run_opted("first");
    rig.exec(&first, "echo x >/data/file; chown 0:77 /data/file; sync");
    rig.gone(&first, &[]);
    for (name, policy, group) in
        [("by-root", Some("OnRootMismatch"), "77"), ("by-rule", Some("Always"), "4321")]
    {
        let mut spec = demanding(&rig.class, "data");
        spec["securityContext"]["fsGroupChangePolicy"] = json!(policy);
        let pod = rig.opted(name, "data", &[rig.claimed("data")], &spec);
        rig.wait_until_ready(&pod);
        assert_eq!(rig.exec(&pod, "stat -c %g /data/file"), format!("{group}\n"), "{name}");
        rig.gone(&pod, &[]);
    }
    rig.wait_until_detached(&id);
    watch.saw_nothing();
}

#[test]
#[ignore = "full tier"]
fn a_pod_may_opt_in_until_its_volumes_are_there() {
    let Some(cluster) = shared() else { return };
    let Some(rig) = Rig::new(cluster) else { return };
    let watch = rig.watch();
    // Its claim is still to come.
    let pod = rig.create("late", &[rig.claimed("data")], &demanding(&rig.class, "data"));
    let opt_in = json!({ "metadata": { "annotations": { ANNOTATION: "data" } } });
    cluster.merge(&rig.pods(), &pod.name, &opt_in);
    let id = rig.claim("data", SIZE);
    rig.wait_until_ready(&pod);
    assert_served(&rig, &pod);
    rig.proxy.remembers(1);
    rig.gone(&pod, &[]);
    rig.wait_until_detached(&id);
    watch.saw_nothing();
}

#[test]
#[ignore = "full tier"]
fn a_pod_whose_runtime_knows_nothing_of_volumes_is_counted_as_abnormal() {
    let Some(cluster) = shared() else { return };
    let Some(rig) = Rig::new(cluster) else { return };
    let id = rig.claim("data", SIZE);
    let pod = rig.opted("plain", "data", &[rig.claimed("data")], &json!({}));
    rig.wait_until_ready(&pod);
    let mount = rig.exec(&pod, "grep ' /data ' /proc/mounts");
    assert!(!mount.contains("/dev/loop"), "runc mounts nothing: {mount}");
    let names = format!(
        "namespace=\"{0}\",persistentvolumeclaim=\"data\",pod=\"plain\",volume=\"{0}-data\"",
        rig.namespace
    );
    let line = format!("volume_stats_health_status_abnormal{{{names}}} 1");
    cluster.wait_for("the number of it", || rig.proxy.metrics(&line).pop());
    assert_eq!(rig.summary(&pod, "data"), None, "no figures of the node's own disk");
    rig.gone(&pod, &[]);
    rig.wait_until_detached(&id);
}
