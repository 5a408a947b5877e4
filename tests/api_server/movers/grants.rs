//! The annotation by which a snapshot of a filesystem is read as a block device.

use std::collections::BTreeMap;

use csi_loopback::kubernetes::snapshot::VolumeSnapshotContent;
use serde_json::{Value, json};
use support::cluster::programs::stdout_of;
use support::cluster::shared;

use super::rig::{Stage, ended, running};

const ALLOWED: &str = "snapshot.storage.kubernetes.io/allow-volume-mode-change";
const OURS: &str = "backup.loopback.csi.local/";

/// The annotations and labels of a content that matter.
fn marks(stage: &Stage<'_>, content: &str) -> BTreeMap<String, String> {
    let contents = stage.cluster.api::<VolumeSnapshotContent>();
    let found = stage.cluster.get(&contents, content).unwrap().metadata;
    let all = [found.annotations, found.labels].into_iter().flatten().flatten();
    all.filter(|(key, _)| key == ALLOWED || key.starts_with(OURS)).collect()
}

fn is_allowed(stage: &Stage<'_>, content: &str) -> bool {
    marks(stage, content).get(ALLOWED).is_some_and(|value| value == "true")
}

fn wait_until(stage: &Stage<'_>, content: &str, allowed: bool) {
    stage.cluster.wait_for(&format!("mode change allowed: {allowed}"), || {
        (is_allowed(stage, content) == allowed).then_some(())
    });
}

#[test]
fn a_mode_change_is_allowed_until_all_claims_are_bound() {
    let Some(cluster) = shared() else { return };
    let stage = Stage::new(cluster);
    let content = stage.snapshot("nightly");
    // Two commands for one content.
    let first = stage.back_up("nightly");
    let first_job = stage.job(&[]);
    let second = stage.back_up("nightly");
    let second_job = stage.job(&[&first_job]);
    let pods = [&first_job, &second_job].map(|job| stage.movers.pod(job, 0, "{}"));
    wait_until(&stage, &content, true);
    let listed = format!("{OURS}mode-change-jobs");
    let count = || marks(&stage, &content).get(&listed).map_or(0, |jobs| jobs.split(',').count());
    cluster.wait_for("both Jobs", || (count() == 2).then_some(()));
    stage.bind(&pods[0]);
    cluster.wait_for("one Job", || (count() == 1).then_some(()));
    assert!(is_allowed(&stage, &content));
    stage.bind(&pods[1]);
    wait_until(&stage, &content, false);
    assert!(marks(&stage, &content).is_empty(), "{:?}", marks(&stage, &content));
    // Both movers still run. A pod that replaces one needs the annotation for its own claim.
    stage.set(&pods[0], "Failed", &[("mover", ended(137))]);
    std::thread::sleep(std::time::Duration::from_millis(1100));
    let replaced = stage.movers.pod(&first_job, 1, "{}");
    wait_until(&stage, &content, true);
    stage.bind(&replaced);
    wait_until(&stage, &content, false);
    for pod in [&replaced, &pods[1]] {
        stage.set(pod, "Succeeded", &[("mover", ended(0))]);
    }
    for run in [first, second] {
        assert_eq!(stdout_of(run.wait()).trim(), "{}");
    }
    assert!(marks(&stage, &content).is_empty());
}

#[test]
fn a_mode_change_of_a_user_stays() {
    let Some(cluster) = shared() else { return };
    let stage = Stage::new(cluster);
    let content = stage.snapshot("nightly");
    let patch = json!({ "metadata": { "annotations": { ALLOWED: "true" } } });
    cluster.merge(&cluster.api::<VolumeSnapshotContent>(), &content, &patch);
    let run = stage.back_up("nightly");
    let pod = stage.movers.pod(&stage.job(&[]), 0, "{}");
    // Not before the command has looked for its claim, and so for the annotation.
    let claim = format!("{pod}-data");
    let looks = |request: &Value| request["requestURI"].as_str().unwrap().contains(&claim);
    cluster.wait_for("two looks at the claim", || {
        (cluster.requests().iter().filter(|request| looks(request)).count() > 1).then_some(())
    });
    stage.bind(&pod);
    stage.set(&pod, "Succeeded", &[("mover", ended(0))]);
    stdout_of(run.wait());
    assert_eq!(marks(&stage, &content).len(), 1);
    assert!(is_allowed(&stage, &content));
}

#[test]
fn a_later_run_takes_back_what_a_killed_one_has_left() {
    let Some(cluster) = shared() else { return };
    let stage = Stage::new(cluster);
    let (content, other) = (stage.snapshot("nightly"), stage.snapshot("other"));
    let killed = stage.back_up("nightly");
    let job = stage.job(&[]);
    wait_until(&stage, &content, true);
    killed.kill();
    // Its mover still waits for the claim, and later has it.
    let pod = stage.movers.pod(&job, 0, "{}");
    let later = stage.back_up("other");
    let later_job = stage.job(&[&job]);
    wait_until(&stage, &other, true);
    assert!(is_allowed(&stage, &content));
    stage.bind(&pod);
    stage.set(&pod, "Running", &[("mover", running())]);
    // A failed command takes its own back, too.
    let later_pod = stage.movers.pod(&later_job, 0, "csi-loopback: no room");
    stage.set(&later_pod, "Failed", &[("mover", ended(1))]);
    later.refused(&["mover pod: no room"]);
    assert!(marks(&stage, &other).is_empty());
    // Of the other snapshot: the killed command's content has a bound claim.
    let third = stage.back_up("other");
    wait_until(&stage, &content, false);
    assert!(marks(&stage, &content).is_empty());
    drop(third);
}
