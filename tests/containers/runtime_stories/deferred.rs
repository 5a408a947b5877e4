//! The runtime mounts (story 1).

use serde_json::json;
use support::cluster::shared;

use crate::node_proxy_kubelet::rig::{Rig, SIZE};
use support::cluster::runtime::{assert_served, demanding, device_of};
use support::driver::stats;
use support::path;

#[test]
fn story_1_only_the_runtime_mounts_the_claim() {
    let Some(rig) = shared().and_then(Rig::new) else { return };
    let id = rig.claim("data", SIZE);
    let _webhooks = rig.webhooks_for_claims();
    let watch = rig.watch();
    let pod = rig.run("first", &[rig.claimed("data")], &demanding(&rig.class, "data"));
    assert_eq!(rig.opt_in(&pod).as_deref(), Some("data"));
    rig.assert_used(&pod, &id);
    assert_eq!(rig.handed_over(), 1);
    rig.delete_and_wait(&pod, &[]);
    rig.wait_until_detached(&id);

    let again = rig.run("second", &[rig.claimed("data")], &demanding(&rig.class, "data"));
    assert_eq!(rig.exec(&again, "cat /data/init /data/shared"), "by init\nby init\nshared\n");
    assert_served(&rig, &again);
    rig.delete_and_wait(&again, &[]);
    rig.wait_until_detached(&id);
    watch.assert_no_mounts();
}

#[test]
#[ignore = "full tier"]
fn a_volume_without_a_capable_runtime_is_abnormal() {
    let Some(rig) = shared().and_then(Rig::new) else { return };
    let id = rig.claim("data", SIZE);
    let pod = rig.opted("plain", "data", &[rig.claimed("data")], &json!({}));
    rig.wait_until_ready(&pod);
    let mount = rig.exec(&pod, "grep ' /data ' /proc/mounts");
    assert!(!mount.contains("/dev/loop"), "runc mounts nothing: {mount}");
    let target = rig.target_of_claim(&pod, "data");
    let answer = rig.driver.ok(stats(&id, path(&target)));
    let condition = answer.volume_condition.unwrap();
    assert!(condition.abnormal && condition.message.contains("not claimed"), "{condition:?}");
    assert!(answer.usage.is_empty(), "statistics of the node's disk: {:?}", answer.usage);
    assert_eq!(rig.summary(&pod, "data"), None);
    let names = format!(
        "namespace=\"{0}\",persistentvolumeclaim=\"data\",pod=\"plain\",volume=\"{0}-data\"",
        rig.namespace
    );
    let line = format!("volume_stats_health_status_abnormal{{{names}}} 1");
    rig.cluster.wait_for("the metric of the volume", || rig.proxy.metrics(&line).pop());
    // Nothing is written on the host.
    let output = rig.exec(&pod, "echo data >/data/file || echo refused");
    assert!(output.contains("No space left") && output.contains("refused"), "{output}");
    assert!(rig.exec(&pod, "cat /data/THIS-IS-NOT-THE-VOLUME").contains("RuntimeClass"));
    rig.delete_and_wait(&pod, &[]);

    // The same claim with the runtime that it needs.
    let pod = rig.run_opted("right");
    device_of(&rig, &pod, "main");
    let target = rig.target_of_claim(&pod, "data");
    let answer = rig.driver.ok(stats(&id, path(&target)));
    assert!(!answer.volume_condition.unwrap().abnormal && !answer.usage.is_empty());
    rig.delete_and_wait(&pod, &[]);
    rig.wait_until_detached(&id);
}
