//! A driver that is restarted without the feature while pods run and start (stories 5 and 6).

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
fn story_5_pods_survive_a_downgrade_without_stats_or_resize() {
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
    // The pod ends as usual: the driver finds no mount, and removes its records.
    rig.delete(&pod);
    rig.wait_until_cleaned_up(&pod, &[]);
    rig.wait_until_detached(&id);

    rig.restart_driver(true);
    // Entries that the downgraded driver could not unstage are collected or overwritten.
    let again = rig.run("second", &[rig.claimed("data")], &demanding(&rig.class, "data"));
    assert_eq!(rig.exec(&again, "cat /data/after"), "after\n");
    let target = rig.target_of_claim(&again, "data");
    assert!(!rig.driver.ok(stats(&id, path(&target))).usage.is_empty());
    rig.delete_and_wait(&again, &[]);
    watch.assert_no_mounts();
}

#[test]
#[ignore = "full tier"]
fn story_6_a_pod_created_after_a_downgrade_waits() {
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
        rig.wait_for_event("kubelet", "FailedMount", pod, &["FailedPrecondition", CAPABILITY]);
    }
    assert_eq!(rig.handed_over(), 0);
    // A driver that does not defer mounts a claim's volume at staging; no pod gets it at its
    // target.
    assert!(!is_mounted(&rig.target(&inline, "data")));
    assert!(!is_mounted(&rig.target_of_claim(&claim, "data")));
    rig.restart_driver(true);
    for pod in [&inline, &claim] {
        wait_for(&format!("{} runs after all", pod.name), || rig.is_ready(&pod.name));
    }
    assert_eq!(rig.host_mounts(), Vec::<String>::new(), "the staged mount was removed");
    let watch = rig.watch();
    for pod in [&inline, &claim] {
        assert_served(&rig, pod);
        device_of(&rig, pod, "main");
    }
    rig.delete(&inline);
    rig.wait_until_cleaned_up(&inline, &["data"]);
    rig.delete_and_wait(&claim, &[]);
    rig.wait_until_detached(&id);
    watch.assert_no_mounts();
}
