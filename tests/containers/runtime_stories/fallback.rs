//! The driver mounts, for the policy says that runtime or driver cannot leave it to the other (stories 2 to 4): the same pod each
//! time, with one entry of the policy changed.

use std::fs;
use support::cluster::shared;

use serde_json::{Value, json};

use support::cluster::admission::Webhooks;
use support::cluster::kubelet::Made;
use support::cluster::runtime::{Rig, assert_served, change_policy, demanding};

fn volume(rig: &Rig<'_>) -> Value {
    rig.inline("data", json!({ "volumeAttributes": { "size": "64Mi" } }))
}

fn run(rig: &Rig<'_>, name: &str) -> Made {
    rig.run(name, &[volume(rig)], &demanding(&rig.class, "data"))
}

/// Whether the webhooks leave such a pod's volume to its runtime.
fn is_deferred(rig: &Rig<'_>) -> bool {
    let tried = rig.try_with("tried", &[volume(rig)], &demanding(&rig.class, "data")).unwrap();
    let csi = tried.spec.unwrap().volumes.unwrap().remove(0).csi.unwrap();
    csi.volume_attributes.unwrap().contains_key("deferFSMount")
}

fn change(rig: &Rig<'_>, webhooks: &Webhooks, entries: &[Value], deferred: bool) {
    change_policy(rig, webhooks, entries, || is_deferred(rig) == deferred);
}

/// A pod that the driver has mounted for, on the host.
fn by_the_driver(rig: &Rig<'_>, name: &str) {
    let pod = run(rig, name);
    assert_eq!(rig.opt_in(&pod), None);
    is_on_the_host(rig, &pod);
    rig.gone(&pod, &["data"]);
}

fn is_on_the_host(rig: &Rig<'_>, pod: &Made) {
    assert_served(rig, pod);
    let target = rig.target(pod, "data");
    let at_target = format!(" {} ", target.display());
    assert!(rig.host_mounts().iter().any(|line| line.contains(&at_target)));
    assert_eq!(fs::read_to_string(target.join("shared")).unwrap(), "shared\n");
    assert_eq!(rig.handed_over(), 0);
}

/// The same pod, whose runtime has mounted it.
fn by_the_runtime(rig: &Rig<'_>, name: &str) {
    let watch = rig.watch();
    let pod = run(rig, name);
    assert_eq!(rig.opt_in(&pod).as_deref(), Some("true"));
    assert_served(rig, &pod);
    rig.gone(&pod, &["data"]);
    watch.saw_nothing();
}

#[test]
#[ignore = "full tier"]
fn story_2_what_the_runtime_does_not_do_the_driver_mounts() {
    let Some(cluster) = shared() else { return };
    let Some(rig) = Rig::new(cluster) else { return };
    let webhooks = rig.webhooks(&[rig.entry()]);
    by_the_runtime(&rig, "all");
    let mut lacking = rig.entry();
    lacking["subPath"] = false.into();
    change(&rig, &webhooks, &[lacking], false);
    by_the_driver(&rig, "without-sub-path");
    let mut lacking = rig.entry();
    lacking["fsGroupChangePolicies"] = json!(["Always"]);
    change(&rig, &webhooks, &[rig.entry()], true);
    change(&rig, &webhooks, &[lacking], false);
    by_the_driver(&rig, "without-policy");
}

#[test]
#[ignore = "full tier"]
fn story_3_what_the_driver_does_not_defer_it_mounts() {
    let Some(cluster) = shared() else { return };
    let Some(rig) = Rig::new(cluster) else { return };
    let mut of_others = rig.entry();
    of_others["storageClass"] = "of-another-driver".into();
    let webhooks = rig.webhooks(&[of_others]);
    by_the_driver(&rig, "not-inline");
    change(&rig, &webhooks, &[rig.entry()], true);
    by_the_runtime(&rig, "inline");
}

#[test]
#[ignore = "full tier"]
fn story_4_before_an_upgrade_the_driver_mounts_and_after_it_the_runtime() {
    let Some(cluster) = shared() else { return };
    let Some(mut rig) = Rig::new(cluster) else { return };
    rig.restart_driver(false);
    let webhooks = rig.webhooks(&[]);
    let old = run(&rig, "old");
    is_on_the_host(&rig, &old);
    rig.restart_driver(true);
    change(&rig, &webhooks, &[rig.entry()], true);
    let watched = rig.run("new", &[volume(&rig)], &demanding(&rig.class, "data"));
    assert_eq!(rig.opt_in(&watched).as_deref(), Some("true"));
    assert_served(&rig, &watched);
    let target = rig.target(&watched, "data");
    let at_target = format!(" {} ", target.display());
    assert!(!rig.host_mounts().iter().any(|line| line.contains(&at_target)));
    // Who was there before is served as before.
    let target = format!(" {} ", rig.target(&old, "data").display());
    assert!(rig.host_mounts().iter().any(|line| line.contains(&target)));
    assert_eq!(rig.exec(&old, "cat /data/shared"), "shared\n");
    rig.delete(&watched);
    rig.wait_until_nothing_is_left(&watched, &["data"]);
    rig.gone(&old, &["data"]);
}
