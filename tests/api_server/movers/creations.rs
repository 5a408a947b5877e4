//! Creations that the client repeats, or whose response is lost.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use serde_json::json;
use support::cluster::programs::stdout_of;
use support::cluster::shared;

use super::faulty::{Fault, Faulty};
use super::rig::{BYTES, Stage, ended};

const RESTORE: [&str; 4] = ["restore", "b", "--to-claim", "restored"];

impl Stage<'_> {
    fn claims(&self) -> Vec<String> {
        let claims = self.cluster.api_in::<PersistentVolumeClaim>(&self.namespace);
        let all = self.cluster.list(&claims);
        all.into_iter().filter_map(|claim| claim.metadata.name).collect()
    }

    /// Completes the Job of `backup show`.
    fn show(&self) {
        let shown = json!({ "id": "b", "volume": "v", "capacity_bytes": BYTES }).to_string();
        let job = self.job(&[]);
        let pod = self.movers.pod(&job, 0, &shown);
        self.set(&pod, "Succeeded", &[("mover", ended(0))]);
        self.cluster.wait_for("the end of the Job", || {
            self.movers.collect_garbage();
            (self.movers.jobs().is_empty() && self.movers.pods().is_empty()).then_some(())
        });
    }
}

#[test]
fn a_job_is_created_once_if_its_creation_is_repeated() {
    let Some(cluster) = shared() else { return };
    let stage = Stage::new(cluster);
    for status in [429, 503, 504] {
        let faulty = Faulty::start(&stage, [("POST", "/jobs", Fault::After(status), 1)]);
        let run = stage.spawn(stage.command(&faulty.kubeconfig, &["backup", "list"]));
        let pod = stage.movers.pod(&stage.job(&[]), 0, "[]");
        stage.set(&pod, "Succeeded", &[("mover", ended(0))]);
        assert_eq!(stdout_of(run.wait()).trim(), "[]", "{status}");
        stage.assert_clean();
    }
}

#[test]
fn a_claim_is_created_once_if_its_creation_is_repeated() {
    let Some(cluster) = shared() else { return };
    let stage = Stage::new(cluster);
    let faulty = Faulty::start(&stage, [("POST", "/persistentvolumeclaims", Fault::After(503), 1)]);
    let run = stage.spawn(stage.command(&faulty.kubeconfig, &RESTORE));
    stage.show();
    let done = json!({
        "backup": "b", "to": "d", "capacity_bytes": BYTES, "written_bytes": 0, "kept_bytes": 0,
    });
    let pod = stage.movers.pod(&stage.job(&[]), 0, &done.to_string());
    stage.set(&pod, "Succeeded", &[("mover", ended(0))]);
    stdout_of(run.wait());
    assert_eq!(stage.claims(), ["restored"]);
}

#[test]
#[ignore = "full tier"]
fn a_creation_without_a_response_leaves_nothing() {
    let Some(cluster) = shared() else { return };
    let stage = Stage::new(cluster);
    let rules = [("POST", "/persistentvolumeclaims", Fault::After(500), 1)];
    let faulty = Faulty::start(&stage, rules);
    let run = stage.spawn(stage.command(&faulty.kubeconfig, &RESTORE));
    stage.show();
    run.refused(&["PersistentVolumeClaim", "restored"]);
    assert!(stage.claims().is_empty(), "{:?}", stage.claims());
    let faulty = Faulty::start(&stage, [("POST", "/jobs", Fault::After(500), 1)]);
    let run = stage.spawn(stage.command(&faulty.kubeconfig, &["backup", "list"]));
    run.refused(&["Job"]);
    stage.assert_clean();
}

#[test]
fn a_claim_of_another_user_is_never_taken_nor_deleted() {
    let Some(cluster) = shared() else { return };
    let stage = Stage::new(cluster);
    let rules = [("POST", "/persistentvolumeclaims", Fault::Instead(503), 1)];
    let faulty = Faulty::start(&stage, rules);
    let run = stage.spawn(stage.command(&faulty.kubeconfig, &RESTORE));
    stage.show();
    // Between the two attempts of the command, which has seen no claim.
    cluster.wait_for("the first attempt", || faulty.is_over().then_some(()));
    let claims = cluster.api_in::<PersistentVolumeClaim>(&stage.namespace);
    let spec = json!({
        "accessModes": ["ReadWriteOnce"], "volumeMode": "Block",
        "resources": { "requests": { "storage": "1Mi" } },
    });
    cluster.create(&claims, json!({ "metadata": { "name": "restored" }, "spec": spec }));
    run.refused(&["already exists"]);
    assert_eq!(stage.claims(), ["restored"]);
}
