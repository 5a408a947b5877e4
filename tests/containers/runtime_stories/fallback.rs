//! The driver mounts because the policy has no sufficient entry (stories 2 to 4): the same pod with
//! the same claim, with one policy entry changed each time.

use std::fs;
use support::cluster::shared;

use csi_loopback::kubernetes::defer_annotation;
use serde_json::{Value, json};

use crate::node_proxy_kubelet::rig::{Rig, SIZE};
use support::cluster::admission::Webhooks;
use support::cluster::kubelet::CreatedPod;
use support::cluster::runtime::{assert_served, change_policy, demanding};

fn run(rig: &Rig<'_>, name: &str, claim: &str) -> CreatedPod {
    rig.run(name, &[rig.claimed(claim)], &demanding(&rig.class, claim))
}

/// Whether the webhooks defer the claim of such a pod.
fn is_deferred(rig: &Rig<'_>) -> bool {
    let tried = rig.dry_run_with("tried", &[rig.claimed("data")], &demanding(&rig.class, "data"));
    let tried = serde_json::to_value(tried.unwrap()).unwrap();
    defer_annotation::names(&serde_json::from_value(tried).unwrap()).contains("data")
}

fn change(rig: &Rig<'_>, webhooks: &Webhooks, entries: &[Value], deferred: bool) {
    change_policy(rig, webhooks, entries, || is_deferred(rig) == deferred);
}

/// Runs a pod whose volume the driver mounts on the host.
fn by_the_driver(rig: &Rig<'_>, name: &str) {
    let pod = run(rig, name, "data");
    assert_eq!(rig.opt_in(&pod), None);
    is_on_the_host(rig, &pod);
    rig.delete_and_wait(&pod, &[]);
}

fn is_on_the_host(rig: &Rig<'_>, pod: &CreatedPod) {
    assert_served(rig, pod);
    let target = rig.target_of_claim(pod, "data");
    assert!(rig.is_on_the_host(&target));
    assert_eq!(fs::read_to_string(target.join("shared")).unwrap(), "shared\n");
    assert_eq!(rig.handed_over(), 0);
    rig.proxy.wait_for_stored(0);
}

/// Runs the same pod, whose runtime mounts the volume.
fn by_the_runtime(rig: &Rig<'_>, name: &str) {
    let watch = rig.watch();
    let pod = run(rig, name, "data");
    assert_eq!(rig.opt_in(&pod).as_deref(), Some("data"));
    assert_served(rig, &pod);
    rig.delete_and_wait(&pod, &[]);
    watch.assert_no_mounts();
}

fn entry(rig: &Rig<'_>) -> Value {
    rig.entry(&rig.storage_class)
}

#[test]
#[ignore = "full tier"]
fn story_2_the_driver_mounts_what_the_runtime_lacks() {
    let Some(rig) = shared().and_then(Rig::new) else { return };
    let id = rig.claim("data", SIZE);
    let webhooks = rig.webhooks_for_claims();
    by_the_runtime(&rig, "all");
    let mut lacking = entry(&rig);
    lacking["subPath"] = false.into();
    rig.wait_until_detached(&id);
    change(&rig, &webhooks, &[lacking], false);
    by_the_driver(&rig, "without-sub-path");
    let mut lacking = entry(&rig);
    lacking["fsGroupChangePolicies"] = json!(["Always"]);
    change(&rig, &webhooks, &[entry(&rig)], true);
    change(&rig, &webhooks, &[lacking], false);
    by_the_driver(&rig, "without-policy");
    rig.wait_until_detached(&id);
}

#[test]
#[ignore = "full tier"]
fn story_3_the_driver_mounts_what_it_does_not_defer() {
    let Some(rig) = shared().and_then(Rig::new) else { return };
    let id = rig.claim("data", SIZE);
    // No entry for this StorageClass.
    let webhooks = rig.webhooks(&[rig.entry("of-another-driver"), rig.entry("")]);
    by_the_driver(&rig, "not-entered");
    rig.wait_until_detached(&id);
    change(&rig, &webhooks, &[entry(&rig)], true);
    by_the_runtime(&rig, "entered");
    rig.wait_until_detached(&id);
}

#[test]
#[ignore = "full tier"]
fn story_4_volumes_are_deferred_after_an_upgrade_only() {
    let Some(mut rig) = shared().and_then(Rig::new) else { return };
    rig.restart_driver(false);
    let ids = [rig.claim("data", SIZE), rig.claim("later", SIZE)];
    let webhooks = rig.webhooks(&[]);
    let old = run(&rig, "old", "data");
    is_on_the_host(&rig, &old);
    rig.restart_driver(true);
    change(&rig, &webhooks, &[entry(&rig)], true);
    let new = run(&rig, "new", "later");
    assert_eq!(rig.opt_in(&new).as_deref(), Some("later"));
    assert_served(&rig, &new);
    assert!(!rig.is_on_the_host(&rig.target_of_claim(&new, "later")));
    // The existing pod is unchanged.
    assert!(rig.is_on_the_host(&rig.target_of_claim(&old, "data")));
    assert_eq!(rig.exec(&old, "cat /data/shared"), "shared\n");
    rig.delete(&new);
    rig.wait_until_cleaned_up(&new, &[]);
    rig.delete_and_wait(&old, &[]);
    for id in &ids {
        rig.wait_until_detached(id);
    }
}
