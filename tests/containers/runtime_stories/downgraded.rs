//! A driver that once deferred and does so no more (stories 5 and 6): restarted with the feature off, while pods run and begin.

use serde_json::json;
use support::cluster::shared;
use tonic::Code;

use crate::node_proxy_kubelet::rig::{Rig, SIZE};
use support::cluster::runtime::{assert_served, demanding, device_of};
use support::driver::{expand_on_node, stats, wait_for};
use support::inline::is_mounted;
use support::path;

const FLAG: &str = "--enable-defer-fs-ops";
const CAPABILITY: &str = "DEFER_FS_OPS";

#[test]
#[ignore = "full tier"]
fn story_5_a_pod_that_runs_outlives_a_downgrade_without_stats_and_growth() {
    let Some(cluster) = shared() else { return };
    let Some(mut rig) = Rig::new(cluster) else { return };
    let id = rig.claim("data", SIZE);
    let _webhooks = rig.webhooks_for_claims();
    let watch = rig.watch();
    let pod = rig.run("first", &[rig.claimed("data")], &demanding(&rig.class, "data"));
    assert_eq!(rig.opt_in(&pod).as_deref(), Some("data"));
    assert_served(&rig, &pod);
    rig.restart_driver(false);
    assert_eq!(rig.exec(&pod, "echo after >/data/after; cat /data/after"), "after\n");
    let target = rig.target_of_claim(&pod, "data");
    rig.driver.refused(stats(&id, path(&target)), Code::FailedPrecondition, FLAG);
    rig.driver.refused(expand_on_node(&id, &target), Code::FailedPrecondition, FLAG);
    // The pod ends as ever: the driver finds nothing mounted, and takes away what is its own.
    rig.delete(&pod);
    rig.wait_until_nothing_is_left(&pod, &[]);
    rig.wait_until_detached(&id);

    rig.restart_driver(true);
    // What the downgraded driver could take back from nobody is collected, or overwritten.
    let again = rig.run("second", &[rig.claimed("data")], &demanding(&rig.class, "data"));
    assert_eq!(rig.exec(&again, "cat /data/after"), "after\n");
    let target = rig.target_of_claim(&again, "data");
    assert!(!rig.driver.ok(stats(&id, path(&target))).usage.is_empty());
    rig.gone(&again, &[]);
    watch.saw_nothing();
}

#[test]
#[ignore = "full tier"]
fn story_6_a_pod_that_begins_at_a_downgrade_waits_for_the_upgrade() {
    let Some(cluster) = shared() else { return };
    let Some(mut rig) = Rig::new(cluster) else { return };
    // The policy is as before the downgrade.
    let _webhooks = rig.webhooks(&[rig.entry(&rig.storage_class), rig.entry("")]);
    rig.restart_driver(false);
    let id = rig.claim("data", SIZE);
    let volume = rig.inline("data", json!({ "volumeAttributes": { "size": "64Mi" } }));
    let inline = rig.create("inline", &[volume], &demanding(&rig.class, "data"));
    let claim = rig.create("claim", &[rig.claimed("data")], &demanding(&rig.class, "data"));
    for pod in [&inline, &claim] {
        assert_eq!(rig.opt_in(pod).as_deref(), Some("data"));
        rig.told_by("kubelet", "FailedMount", pod, &["FailedPrecondition", CAPABILITY]);
    }
    assert_eq!(rig.handed_over(), 0);
    // A driver that does not defer mounts a claim's volume where it is staged, for whoever may come; no pod gets it there.
    assert!(!is_mounted(&rig.target(&inline, "data")));
    assert!(!is_mounted(&rig.target_of_claim(&claim, "data")));
    rig.restart_driver(true);
    for pod in [&inline, &claim] {
        wait_for(&format!("{} runs after all", pod.name), || rig.is_ready(&pod.name));
    }
    assert_eq!(rig.host_mounts(), Vec::<String>::new(), "that has been taken away");
    let watch = rig.watch();
    for pod in [&inline, &claim] {
        assert_served(&rig, pod);
        device_of(&rig, pod, "main");
    }
    rig.delete(&inline);
    rig.wait_until_nothing_is_left(&inline, &["data"]);
    rig.gone(&claim, &[]);
    rig.wait_until_detached(&id);
    watch.saw_nothing();
}
