//! A driver that is replaced by one without the capabilities, and by one with them again (stories 5 and 6).

use serde_json::json;
use support::cluster::shared;

use super::rig::{Rig, SIZE};
use support::cluster::runtime::{assert_served, demanding, device_of};
use support::driver::wait_for;

const PUBLISHED: &str = "volumes_published_with_deferred_ops_total ";
const PROXY: &str = "csi-loopback-node-proxy";
const CAPABILITY: &str = "DEFER_FS_OPS";
const LARGER: u64 = 2 * SIZE;

/// Calls that came to nothing for want of the capability.
fn failed(rig: &Rig<'_>, call: &str) -> u64 {
    let labels = format!("{{call=\"{call}\",reason=\"missing_capability\"}}");
    rig.proxy.number(&format!("csi_loopback_deferred_failures_total{labels}"))
}

#[test]
#[ignore = "full tier"]
fn after_a_downgrade_figures_and_growth_fail_aloud_until_the_upgrade_and_the_pod_ends_in_any_case()
{
    let Some(cluster) = shared() else { return };
    let Some(mut rig) = Rig::new(cluster) else { return };
    // Else kubelet would be at that, which fails, and not come to the growth: see below.
    rig.publishes_once();
    let id = rig.claim("data", SIZE);
    let watch = rig.watch();
    let pod = rig.run_opted("first");
    assert_served(&rig, &pod);
    cluster.wait_for("kubelet's figures", || rig.summary(&pod, "data"));
    rig.restart_driver(false);
    assert_eq!(rig.exec(&pod, "echo after >/data/after; cat /data/after"), "after\n");
    wait_for("kubelet's log of it", || {
        let log = rig.kubelet_log();
        let mut lines = log.lines().filter(|line| line.contains(&pod.uid));
        lines.any(|line| {
            line.contains("Failed to calculate volume metrics") && line.contains(CAPABILITY)
        })
    });
    assert!(failed(&rig, "stats") > 0);
    assert_eq!(failed(&rig, "publish"), 0);

    rig.grow("data", &id, LARGER);
    let said =
        cluster.wait_for("the claim's condition", || rig.condition("data", "NodeResizeError"));
    assert!(said.contains(CAPABILITY), "{said}");
    rig.told_by("kubelet", "VolumeResizeFailed", &pod, &[CAPABILITY]);
    assert!(failed(&rig, "expand") > 0);
    assert_eq!(rig.capacity("data"), Some(SIZE.to_string()));
    rig.restart_driver(true);
    wait_for("kubelet's word of it", || rig.capacity("data") == Some(LARGER.to_string()));
    wait_for("the condition's end", || rig.condition("data", "NodeResizeError").is_none());
    cluster.wait_for("kubelet's figures", || {
        rig.summary(&pod, "data").filter(|(bytes, _)| *bytes > SIZE)
    });

    rig.restart_driver(false);
    rig.delete(&pod);
    rig.wait_until_nothing_is_left(&pod, &[]);
    rig.wait_until_detached(&id);
    rig.proxy.remembers(0);
    rig.restart_driver(true);
    let again = rig.run_opted("second");
    assert_eq!(rig.exec(&again, "cat /data/after"), "after\n");
    rig.gone(&again, &[]);
    watch.saw_nothing();
}

/// A driver that has kubelet publish again and again, as ours has: kubelet tries that before all else.
#[test]
#[ignore = "full tier"]
fn a_pod_whose_volume_is_published_again_is_told_of_a_downgrade_and_grows_after_the_upgrade() {
    let Some(cluster) = shared() else { return };
    let Some(mut rig) = Rig::new(cluster) else { return };
    let id = rig.claim("data", SIZE);
    let watch = rig.watch();
    let pod = rig.run_opted("first");
    let published = rig.proxy.number(PUBLISHED);
    wait_for("another publish", || rig.proxy.number(PUBLISHED) > published);
    rig.restart_driver(false);
    rig.told_by(PROXY, "FailedMount", &pod, &[CAPABILITY]);
    rig.grow("data", &id, LARGER);
    assert!(failed(&rig, "publish") > 0);
    // It runs, and what it writes is on its volume.
    assert_eq!(rig.exec(&pod, "echo kept >/data/file; cat /data/file"), "kept\n");
    assert!(rig.is_ready(&pod.name) && device_of(&rig, &pod, "main").starts_with("/dev/loop"));
    rig.restart_driver(true);
    wait_for("kubelet's word of it", || rig.capacity("data") == Some(LARGER.to_string()));
    rig.gone(&pod, &[]);
    let again = rig.run_opted("second");
    assert_eq!(rig.exec(&again, "cat /data/file"), "kept\n");
    rig.gone(&again, &[]);
    rig.wait_until_detached(&id);
    watch.saw_nothing();
}

#[test]
#[ignore = "full tier"]
fn a_pod_that_begins_at_a_downgrade_is_told_why_and_runs_after_the_upgrade() {
    let Some(cluster) = shared() else { return };
    let Some(mut rig) = Rig::new(cluster) else { return };
    rig.restart_driver(false);
    let id = rig.claim("data", SIZE);
    let volume = rig.inline("data", json!({ "volumeAttributes": { "size": "64Mi" } }));
    let demanding = demanding(&rig.class, "data");
    let inline = rig.opted("inline", "data", &[volume], &demanding);
    let claim = rig.opted("claim", "data", &[rig.claimed("data")], &demanding);
    for pod in [&inline, &claim] {
        rig.told_by(PROXY, "FailedMount", pod, &["data", CAPABILITY]);
        rig.told_by("kubelet", "FailedMount", pod, &["FailedPrecondition", CAPABILITY]);
        assert!(!rig.is_ready(&pod.name));
    }
    assert!(!rig.is_on_the_host(&rig.target(&inline, "data")));
    assert!(!rig.is_on_the_host(&rig.target_of_claim(&claim, "data")));
    assert_eq!((rig.handed_over(), rig.proxy.remembered().len()), (0, 0));
    rig.restart_driver(true);
    for pod in [&inline, &claim] {
        rig.wait_until_ready(pod);
    }
    assert_eq!(rig.host_mounts(), Vec::<String>::new(), "what was staged has been taken away");
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
