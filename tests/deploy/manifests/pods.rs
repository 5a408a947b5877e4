//! How the containers run, as the API server has them.

use std::collections::BTreeSet;
use std::process::Command;
use std::sync::OnceLock;
use support::cluster::shared;
use support::driver::binary;

use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::PostParams;
use serde_json::{Value, json};

use super::{DRIVER, NAMESPACE, admission, aggregated, apply, deploy, directories, objects};
use support::cluster::Cluster;
use support::cluster::programs::stdout_of;

/// (object, container, pod's spec) of everything that runs, as the API server has it, of all directories.
fn containers(cluster: &Cluster) -> &'static [(String, Value, Value)] {
    static CONTAINERS: OnceLock<Vec<(String, Value, Value)>> = OnceLock::new();
    CONTAINERS.get_or_init(|| apply_and_read(cluster))
}

fn apply_and_read(cluster: &Cluster) -> Vec<(String, Value, Value)> {
    let mut found = Vec::new();
    for directory in directories() {
        stdout_of(apply(cluster, &deploy(&directory)));
        let all = objects(cluster, &directory);
        // Before other directories' pods with inline volumes are made.
        admission::without_webhooks(cluster);
        for object in all {
            let spec = match object["kind"].as_str().unwrap() {
                "Pod" => &object["spec"],
                "StatefulSet" | "Deployment" | "DaemonSet" => &object["spec"]["template"]["spec"],
                _ => continue,
            };
            for container in spec["containers"].as_array().unwrap() {
                let what =
                    format!("{directory}: {} {}", object["metadata"]["name"], container["name"]);
                found.push((what, container.clone(), spec.clone()));
            }
        }
    }
    aggregated::without_api_service(cluster);
    // Eight of the base, four times, the session manager's, the aggregated API server's, the webhooks', and those of the examples.
    assert!(found.len() >= 36, "{}", found.len());
    found
}

#[test]
#[ignore = "full tier"]
fn all_but_driver_and_crust_ops_run_confined() {
    let Some(cluster) = shared() else { return };
    let mut privileged = BTreeSet::new();
    for (what, container, pod) in containers(cluster) {
        let name = container["name"].as_str().unwrap();
        let own = &container["securityContext"];
        // What a container does not say its pod says.
        let either = |field: &str| match &own[field] {
            Value::Null => pod["securityContext"][field].clone(),
            said => said.clone(),
        };
        if name == "writer" {
            // An application like any other.
            continue;
        }
        assert_eq!(own["readOnlyRootFilesystem"], json!(true), "{what}");
        if own["privileged"] == json!(true) {
            privileged.insert(name.to_owned());
            continue;
        }
        // Thawing asks for it, and a holder of it could escalate anyway (PodSpec, allowPrivilegeEscalation).
        let is_guard = name == "freeze-guard";
        let capabilities = match is_guard {
            true => json!({ "drop": ["ALL"], "add": ["SYS_ADMIN"] }),
            false => json!({ "drop": ["ALL"] }),
        };
        assert_eq!(own["capabilities"], capabilities, "{what}");
        assert_eq!(own["allowPrivilegeEscalation"] == json!(false), !is_guard, "{what}");
        assert_eq!(either("seccompProfile"), json!({ "type": "RuntimeDefault" }), "{what}");
        let is_root = either("runAsUser") == json!(0);
        let has_to_be = ["node-driver-registrar", "node-proxy", "freeze-guard"].contains(&name);
        assert_eq!(is_root, has_to_be, "{what}");
        if !is_root {
            assert_eq!(either("runAsNonRoot"), json!(true), "{what}");
            // With the group that the driver gives to its socket.
            assert_eq!(either("runAsGroup"), json!(65532), "{what}");
        }
        for mount in container["volumeMounts"].as_array().into_iter().flatten() {
            // Where it makes its socket, and its memory.
            let its_own = is_guard && mount["name"] == "freeze-guard"
                || name == "node-proxy" && (mount["name"] == "socket" || mount["name"] == "state");
            let read_only =
                mount["readOnly"] == json!(true) || mount["name"] == "registration" || its_own;
            // Or one of the pod's own.
            let mut volumes = pod["volumes"].as_array().unwrap().iter();
            let volume = volumes.find(|volume| volume["name"] == mount["name"]).unwrap();
            assert!(read_only || volume["csi"]["driver"] == DRIVER, "{what}: {mount}");
        }
    }
    assert_eq!(privileged, ["driver", "runtime-ops"].map(str::to_owned).into());
}

#[test]
fn only_the_sidecar_of_the_drivers_pod_has_a_token() {
    let Some(cluster) = shared() else { return };
    for (what, container, pod) in containers(cluster) {
        if pod["serviceAccountName"] != json!("csi-loopback-metadata") {
            continue;
        }
        assert_eq!(pod["automountServiceAccountToken"], json!(false), "{what}");
        let volumes = pod["volumes"].as_array().unwrap();
        let has_token = container["volumeMounts"].as_array().unwrap().iter().any(|mount| {
            let volume = volumes.iter().find(|volume| volume["name"] == mount["name"]).unwrap();
            volume["projected"]["sources"].to_string().contains("serviceAccountToken")
                || !volume["secret"].is_null()
        });
        assert_eq!(has_token, container["name"] == "metadata", "{what}");
    }
}

#[test]
fn driver_and_freeze_guard_meet_at_a_socket_and_are_not_killed_together() {
    let Some(cluster) = shared() else { return };
    let found = containers(cluster);
    let guards: Vec<_> =
        found.iter().filter(|(_, container, _)| container["name"] == "freeze-guard").collect();
    assert_eq!(guards.len(), 4);
    for (what, guard, pod) in guards {
        let all = pod["containers"].as_array().unwrap();
        let driver = all.iter().find(|container| container["name"] == "driver").unwrap();
        assert_eq!(guard["image"], driver["image"], "{what}");
        let socket = "unix:///freeze-guard/guard.sock";
        for (container, flag) in [(guard, "--endpoint"), (driver, "--freeze-guard")] {
            let arguments = container["args"].as_array().unwrap();
            assert!(
                arguments.contains(&json!(format!("{flag}={socket}"))),
                "{what}: {arguments:?}"
            );
            let mounts = container["volumeMounts"].as_array().unwrap();
            let place = json!({ "name": "freeze-guard", "mountPath": "/freeze-guard" });
            assert!(mounts.contains(&place), "{what}: {mounts:?}");
        }
    }
}

#[test]
fn no_image_names_a_registry() {
    let Some(cluster) = shared() else { return };
    for (what, container, _) in containers(cluster) {
        let image = container["image"].as_str().unwrap();
        let (name, tag) = image.split_once(':').unwrap_or((image, ""));
        assert!(!image.contains('/') && !name.contains('.') && !tag.is_empty(), "{what}: {image}");
        if name == "csi-loopback" {
            assert_eq!(tag, env!("CARGO_PKG_VERSION"), "{what}");
        }
    }
}

/// That the binary knows a container's arguments: `--help` behind them is reached only where it knows them all.
pub fn are_known(what: &str, container: &Value) {
    let arguments = container["args"].as_array().unwrap().iter();
    // As kubelet fills them in.
    let arguments =
        arguments.map(|argument| argument.as_str().unwrap().replace("$(POD_NAMESPACE)", NAMESPACE));
    let mut command = Command::new(binary());
    let output = command.args(arguments).arg("--help").output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{what}: {text}");
}

#[test]
fn the_arguments_of_the_manifests_are_known_to_the_binary() {
    let Some(cluster) = shared() else { return };
    let mut seen = 0;
    for (what, container, _) in containers(cluster) {
        let ours = container["image"].as_str().unwrap().starts_with("csi-loopback:");
        if ours && !container["args"].is_null() {
            are_known(what, container);
            seen += 1;
        }
    }
    // The driver of inline volumes; driver, its freeze guard and sidecar, four times; crust_ops, twice; the node proxy, twice, and twice for another's driver; session manager,
    // aggregated API server and webhooks; a full and an incremental backup, twice.
    assert_eq!(seen, 26);
}

/// The one object of a kind.
pub fn only<'a>(all: &'a [Value], kind: &str) -> &'a Value {
    let mut found = all.iter().filter(|object| object["kind"] == kind);
    let one = found.next().unwrap_or_else(|| panic!("no {kind}"));
    assert!(found.next().is_none(), "more than one {kind}");
    one
}

/// Pods as the Deployment among these objects would make them: the policy of their namespace admits them; Service,
/// NetworkPolicy and budget mean them, and the port that they serve; and they are told these flags, and to be where the
/// Service is.
pub fn of_deployment(cluster: &Cluster, namespace: &str, all: &[Value], flags: &[String]) {
    let template = &only(all, "Deployment")["spec"]["template"];
    admitted_as_restricted(cluster, namespace, &template["spec"]);
    let labels = &template["metadata"]["labels"];
    for (kind, pointer) in [
        ("Service", "/spec/selector"),
        ("NetworkPolicy", "/spec/podSelector/matchLabels"),
        ("PodDisruptionBudget", "/spec/selector/matchLabels"),
        ("Deployment", "/spec/selector/matchLabels"),
    ] {
        assert_eq!(only(all, kind).pointer(pointer), Some(labels), "{kind}");
    }
    let service = only(all, "Service");
    let port = &service["spec"]["ports"][0];
    let container = &template["spec"]["containers"][0];
    let ports = container["ports"].as_array().unwrap();
    assert!(ports.iter().any(|one| one["name"] == port["targetPort"]));
    let arguments = container["args"].to_string();
    let name = service["metadata"]["name"].as_str().unwrap();
    let address = format!("--service-address={name}.$(POD_NAMESPACE).svc:{}", port["port"]);
    for flag in flags.iter().chain([&address]) {
        assert!(arguments.contains(&format!("\"{flag}\"")), "{flag}");
    }
}

/// A pod of this spec is admitted in the namespace, and a privileged one is not: the namespace's policy is enforced.
fn admitted_as_restricted(cluster: &Cluster, namespace: &str, spec: &Value) {
    let pods: Api<Pod> = cluster.api_in(namespace);
    let admit = |spec: &Value| {
        let pod = json!({ "metadata": { "name": "x" }, "spec": spec });
        let pod: Pod = serde_json::from_value(pod).unwrap();
        let params = PostParams { dry_run: true, ..PostParams::default() };
        cluster.block_on(pods.create(&params, &pod)).map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(admit(spec), Ok(()));
    let mut privileged = spec.clone();
    privileged["containers"][0]["securityContext"]["privileged"] = json!(true);
    privileged["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = json!(true);
    assert!(admit(&privileged).is_err_and(|told| told.contains("PodSecurity")), "it is enforced");
}
