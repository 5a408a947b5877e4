//! Commands end, whatever happens to the pods of movers.

use k8s_openapi::api::core::v1::{Event, Namespace, Pod};
use kube::api::PostParams;
use serde_json::{Value, json};
use support::cluster::programs::stdout_of;
use support::cluster::shared;

use super::faulty::{Fault, Faulty};
use super::rig::{Stage, container, ended, running};

const LIST: [&str; 2] = ["backup", "list"];
/// With a short time limit.
const SOON: [&str; 4] = ["backup", "list", "--timeout", "8s"];

impl Stage<'_> {
    /// Records a warning about an object, as controllers do.
    fn warn(&self, kind: &str, name: &str, reason: &str, message: &str) {
        let events = self.cluster.api_in::<Event>(&self.namespace);
        let now = k8s_openapi::jiff::Timestamp::now().to_string();
        self.cluster.create(
            &events,
            json!({
                "metadata": { "name": self.cluster.unique("event") },
                "involvedObject": { "kind": kind, "name": name, "namespace": self.namespace },
                "type": "Warning", "reason": reason, "message": message, "lastTimestamp": now,
            }),
        );
    }

    fn enforce(&self, level: &str) {
        let label = json!({ "pod-security.kubernetes.io/enforce": level });
        let namespaces = self.cluster.api::<Namespace>();
        let patch = json!({ "metadata": { "labels": label } });
        self.cluster.merge(&namespaces, &self.namespace, &patch);
    }

    /// Why the API server refuses a pod of a Job; it takes a moment to notice a new level.
    fn refusal(&self, pod: &Value) -> Option<String> {
        let pod: Pod = serde_json::from_value(pod.clone()).unwrap();
        let params = PostParams { dry_run: true, ..PostParams::default() };
        let pods = self.cluster.api_in::<Pod>(&self.namespace);
        self.cluster.block_on(pods.create(&params, &pod)).err().map(|error| error.to_string())
    }
}

#[test]
#[ignore = "full tier"]
fn a_container_that_never_ends_does_not_hold_the_command() {
    let Some(cluster) = shared() else { return };
    let stage = Stage::new(cluster);
    let proxy = ("istio-proxy", running());
    let run = stage.start(&LIST);
    let pod = stage.movers.pod(&stage.job(&[]), 0, "[]");
    stage.set(&pod, "Running", &[proxy.clone(), ("mover", ended(0))]);
    assert_eq!(stdout_of(run.wait()).trim(), "[]");
    stage.assert_clean();
    // Its exit code is known, too.
    let run = stage.start(&LIST);
    let pod = stage.movers.pod(&stage.job(&[]), 0, "csi-loopback: no repository");
    stage.set(&pod, "Running", &[proxy.clone(), ("mover", ended(10))]);
    let output = run.wait();
    assert_eq!(output.status.code(), Some(10), "{output:?}");
    // A killed mover cannot be replaced.
    let run = stage.start(&LIST);
    let pod = stage.movers.pod(&stage.job(&[]), 0, "");
    stage.set(&pod, "Running", &[proxy, ("mover", ended(137))]);
    run.refused(&["exit code 137", "container istio-proxy runs", "--pod-template"]);
    stage.assert_clean();
}

#[test]
#[ignore = "full tier"]
fn a_mover_that_does_not_start_ends_with_the_reason() {
    let Some(cluster) = shared() else { return };
    let stage = Stage::new(cluster);
    let unschedulable = json!({ "phase": "Pending", "conditions": [{
        "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
        "message": "0/1 nodes are available",
    }]});
    let mover = container("mover", &json!({ "waiting": { "reason": "PodInitializing" } }));
    let init = json!({ "phase": "Pending", "containerStatuses": [mover],
        "initContainerStatuses": [container("istio-init", &running())] });
    for (status, words) in [
        (unschedulable, ["Unschedulable: 0/1 nodes are available", "--timeout"]),
        (init, ["init container istio-init has not ended", "--timeout"]),
    ] {
        let run = stage.start(&SOON);
        let pod = stage.movers.pod(&stage.job(&[]), 0, "");
        cluster.merge_status(&cluster.api_in::<Pod>(&stage.namespace), &pod, &status);
        run.refused(&words);
        stage.assert_clean();
    }
    // The claim of the snapshot is not provisioned.
    stage.snapshot("nightly");
    let run = stage.start(&["backup", "create", "nightly", "--timeout", "8s"]);
    let pod = stage.movers.pod(&stage.job(&[]), 0, "");
    let claim = format!("{pod}-data");
    stage.warn("PersistentVolumeClaim", &claim, "ProvisioningFailed", "no room");
    run.refused(&["ProvisioningFailed: no room", "--timeout"]);
    stage.assert_clean();
}

#[test]
fn a_pod_that_is_not_admitted_ends_with_the_refusal() {
    let Some(cluster) = shared() else { return };
    let stage = Stage::new(cluster);
    stage.enforce("restricted");
    let run = stage.start(&["backup", "list", "--timeout", "8s"]);
    let job = stage.job(&[]);
    let name = job.metadata.name.clone().unwrap();
    let pod = stage.movers.pod_of(&job, &format!("{name}-0"));
    let refusal = cluster.wait_for("a refusal", || stage.refusal(&pod));
    stage.warn("Job", &name, "FailedCreate", &format!("Error creating: {refusal}"));
    run.refused(&["FailedCreate", "violates PodSecurity", "has no pod yet", "--timeout"]);
    stage.assert_clean();
}

#[test]
fn movers_fit_baseline_and_by_a_template_restricted() {
    let Some(cluster) = shared() else { return };
    let stage = Stage::new(cluster);
    stage.enforce("baseline");
    stage.snapshot("nightly");
    let run = stage.back_up("nightly");
    let job = stage.job(&[]);
    let pod = stage.movers.pod_of(&job, "p");
    assert_eq!(stage.refusal(&pod), None);
    drop(run);
    // The template of docs/reference/backup.md.
    stage.enforce("restricted");
    cluster.wait_for("a refusal", || stage.refusal(&pod));
    let page = include_str!("../../../docs/reference/backup.md");
    let template = page.split("```yaml\n").nth(1).unwrap().split("```").next().unwrap();
    let template = cluster.write("template.yaml", template);
    let run =
        stage.start(&["backup", "create", "nightly", "--pod-template", support::path(&template)]);
    let pod = stage.movers.pod_of(&stage.job(&[&job]), "p");
    assert_eq!(stage.refusal(&pod), None);
    drop(run);
}

#[test]
fn reads_that_fail_end_the_command_which_cleans_up() {
    let Some(cluster) = shared() else { return };
    let stage = Stage::new(cluster);
    let faulty = Faulty::start(&stage, [("GET", "/jobs/", Fault::Instead(500), usize::MAX)]);
    let run = stage.spawn(stage.command(&faulty.kubeconfig, &SOON));
    stage.job(&[]);
    run.refused(&["Job", "--timeout"]);
    stage.assert_clean();
}

#[test]
fn a_mover_has_a_time_limit() {
    let Some(cluster) = shared() else { return };
    let stage = Stage::new(cluster);
    let run = stage.start(&["backup", "list", "--mover-timeout", "2s"]);
    let pod = stage.movers.pod(&stage.job(&[]), 0, "");
    stage.set(&pod, "Running", &[("mover", running())]);
    run.refused(&["not done within 2s", "--mover-timeout"]);
    stage.assert_clean();
}
