//! A driver that is replaced by one without the capabilities, and later by one with them (stories 5
//! and 6).

use serde_json::json;
use support::cluster::shared;

use super::rig::{Rig, SIZE};
use support::cluster::runtime::{assert_served, demanding, device_of};
use support::driver::wait_for;

const PUBLISHED: &str = "volumes_published_with_deferred_ops_total ";
const PROXY: &str = "csi-loopback-node-proxy";
const CAPABILITY: &str = "DEFER_FS_OPS";
const LARGER: u64 = 2 * SIZE;

/// Number of calls that failed because of the missing capability.
fn failed(rig: &Rig<'_>, call: &str) -> u64 {
    let labels = format!("{{call=\"{call}\",reason=\"missing_capability\"}}");
    rig.proxy.number(&format!("csi_loopback_deferred_failures_total{labels}"))
}

#[test]
#[ignore = "full tier"]
fn after_a_downgrade_stats_and_expansion_fail_until_the_upgrade() {
    let Some(mut rig) = shared().and_then(Rig::new) else { return };
    // Otherwise kubelet repeats the publish, which fails, and does not expand the volume: see the
    // next test.
    rig.publishes_once();
    let id = rig.claim("data", SIZE);
    let watch = rig.watch();
    let pod = rig.run_opted("first");
    assert_served(&rig, &pod);
    rig.cluster.wait_for("kubelet's statistics", || rig.summary(&pod, "data"));
    rig.restart_driver(false);
    assert_eq!(rig.exec(&pod, "echo after >/data/after; cat /data/after"), "after\n");
    wait_for("kubelet's log message", || {
        let log = rig.kubelet_log();
        let mut lines = log.lines().filter(|line| line.contains(&pod.uid));
        lines.any(|line| {
            line.contains("Failed to calculate volume metrics") && line.contains(CAPABILITY)
        })
    });
    assert!(failed(&rig, "stats") > 0);
    assert_eq!(failed(&rig, "publish"), 0);

    rig.grow("data", &id, LARGER);
    let condition =
        rig.cluster.wait_for("the claim's condition", || rig.condition("data", "NodeResizeError"));
    assert!(condition.contains(CAPABILITY), "{condition}");
    rig.wait_for_event("kubelet", "VolumeResizeFailed", &pod, &[CAPABILITY]);
    assert!(failed(&rig, "expand") > 0);
    assert_eq!(rig.capacity("data"), Some(SIZE.to_string()));
    rig.restart_driver(true);
    wait_for("the capacity of the claim", || rig.capacity("data") == Some(LARGER.to_string()));
    wait_for("the condition's end", || rig.condition("data", "NodeResizeError").is_none());
    rig.cluster.wait_for("kubelet's statistics", || {
        rig.summary(&pod, "data").filter(|(bytes, _)| *bytes > SIZE)
    });

    rig.restart_driver(false);
    rig.delete(&pod);
    rig.wait_until_cleaned_up(&pod, &[]);
    rig.wait_until_detached(&id);
    rig.proxy.wait_for_stored(0);
    rig.restart_driver(true);
    let again = rig.run_opted("second");
    assert_eq!(rig.exec(&again, "cat /data/after"), "after\n");
    rig.delete_and_wait(&again, &[]);
    rig.wait_until_detached(&id);
    watch.assert_no_mounts();
}

/// With a driver that requires republish, as ours does, kubelet publishes before all other
/// operations.
#[test]
#[ignore = "full tier"]
fn republish_reports_a_downgrade_and_expands_after_the_upgrade() {
    let Some(mut rig) = shared().and_then(Rig::new) else { return };
    let id = rig.claim("data", SIZE);
    let watch = rig.watch();
    let pod = rig.run_opted("first");
    let published = rig.proxy.number(PUBLISHED);
    wait_for("another publish", || rig.proxy.number(PUBLISHED) > published);
    rig.restart_driver(false);
    rig.wait_for_event(PROXY, "FailedMount", &pod, &[CAPABILITY]);
    rig.grow("data", &id, LARGER);
    assert!(failed(&rig, "publish") > 0);
    // The pod runs, and its writes reach the volume.
    assert_eq!(rig.exec(&pod, "echo kept >/data/file; cat /data/file"), "kept\n");
    assert!(rig.is_ready(&pod.name) && device_of(&rig, &pod, "main").starts_with("/dev/loop"));
    rig.restart_driver(true);
    wait_for("the capacity of the claim", || rig.capacity("data") == Some(LARGER.to_string()));
    rig.delete_and_wait(&pod, &[]);
    let again = rig.run_opted("second");
    assert_eq!(rig.exec(&again, "cat /data/file"), "kept\n");
    rig.delete_and_wait(&again, &[]);
    rig.wait_until_detached(&id);
    watch.assert_no_mounts();
}

#[test]
#[ignore = "full tier"]
fn a_pod_created_after_a_downgrade_starts_after_the_upgrade() {
    let Some(mut rig) = shared().and_then(Rig::new) else { return };
    rig.restart_driver(false);
    let id = rig.claim("data", SIZE);
    let volume = rig.inline("data", json!({ "volumeAttributes": { "size": "64Mi" } }));
    let demanding = demanding(&rig.class, "data");
    let inline = rig.opted("inline", "data", &[volume], &demanding);
    let claim = rig.opted("claim", "data", &[rig.claimed("data")], &demanding);
    for pod in [&inline, &claim] {
        rig.wait_for_event(PROXY, "FailedMount", pod, &["data", CAPABILITY]);
        rig.wait_for_event("kubelet", "FailedMount", pod, &["FailedPrecondition", CAPABILITY]);
        assert!(!rig.is_ready(&pod.name));
    }
    assert!(!rig.is_on_the_host(&rig.target(&inline, "data")));
    assert!(!rig.is_on_the_host(&rig.target_of_claim(&claim, "data")));
    assert_eq!((rig.handed_over(), rig.proxy.stored_volumes().len()), (0, 0));
    rig.restart_driver(true);
    for pod in [&inline, &claim] {
        rig.wait_until_ready(pod);
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
