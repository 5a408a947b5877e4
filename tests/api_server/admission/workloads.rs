//! Templates whose pods will be refused.

use serde_json::{Value, json};
use support::cluster::shared;

use super::rig::{Rig, With, pod};

/// Every kind that has a template, with this pod.
fn workloads(template: &Value) -> Vec<Value> {
    let labels = json!({ "app": "a" });
    let mut template = template.clone();
    template["metadata"] = json!({ "labels": labels });
    let selector = json!({ "matchLabels": labels });
    let chosen = json!({ "selector": selector, "template": template });
    let mut stateful = chosen.clone();
    stateful["serviceName"] = "s".into();
    let mut once = template.clone();
    once["spec"]["restartPolicy"] = "Never".into();
    let job = json!({ "template": once });
    let of = |version: &str, kind: &str, spec: Value| {
        let name = kind.to_lowercase();
        json!({ "apiVersion": version, "kind": kind, "metadata": { "name": name }, "spec": spec })
    };
    let mut all = vec![
        of("apps/v1", "Deployment", chosen.clone()),
        of("apps/v1", "StatefulSet", stateful),
        of("apps/v1", "DaemonSet", chosen.clone()),
        of("apps/v1", "ReplicaSet", chosen),
        of("v1", "ReplicationController", json!({ "selector": labels, "template": template })),
        of("batch/v1", "Job", job.clone()),
        of("batch/v1", "CronJob", json!({ "schedule": "@daily", "jobTemplate": { "spec": job } })),
    ];
    all.push(json!({
        "apiVersion": "v1", "kind": "PodTemplate", "metadata": { "name": "t" }, "template": template,
    }));
    all
}

#[test]
fn every_kind_of_template_is_warned_of_and_taken() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster, With { flags: &["--max-size", "1Gi"], ..With::default() });
    let volume = rig.volume(json!({ "size": "2Gi" }));
    for workload in workloads(&pod(&volume)) {
        let (taken, told) = rig.apply(&workload);
        let warning = "Warning: pods will be refused: spec.volumes[0].csi.volumeAttributes[size]";
        assert!(taken && told.contains(warning), "{}: {told}", workload["kind"]);
    }
}

#[test]
fn a_template_whose_pods_are_mended_or_good_is_not_warned_of() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster, With::default());
    let mended = rig.volume(json!({ "content/a": "x" }));
    for workload in workloads(&pod(&mended)) {
        let (taken, told) = rig.apply(&workload);
        assert!(taken && !told.contains("Warning"), "{}: {told}", workload["kind"]);
    }
}
