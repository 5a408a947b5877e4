//! Containers of the manifests, as the API server returns them.

use std::collections::BTreeSet;
use std::process::Command;
use std::sync::OnceLock;
use support::cluster::shared;
use support::driver::binary;

use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::PostParams;
use serde_json::{Value, json};

use super::runtime::argument;
use super::{DRIVER, NAMESPACE, admission, aggregated, apply, deploy, directories, objects};
use support::cluster::Cluster;
use support::cluster::programs::stdout_of;

/// (object, container, pod spec) of all containers of all directories, as the API server returns
/// them.
pub fn containers(cluster: &Cluster) -> &'static [(String, Value, Value)] {
    static CONTAINERS: OnceLock<Vec<(String, Value, Value)>> = OnceLock::new();
    CONTAINERS.get_or_init(|| apply_and_read(cluster))
}

fn apply_and_read(cluster: &Cluster) -> Vec<(String, Value, Value)> {
    let mut found = Vec::new();
    for directory in directories() {
        stdout_of(apply(cluster, &deploy(&directory)));
        let all = objects(cluster, &directory);
        // Before pods with inline volumes of other directories are created.
        admission::without_webhooks(cluster);
        for object in all {
            let spec = match object["kind"].as_str().unwrap() {
                "Pod" => &object["spec"],
                "StatefulSet" | "Deployment" | "DaemonSet" => &object["spec"]["template"]["spec"],
                "CronJob" => &object["spec"]["jobTemplate"]["spec"]["template"]["spec"],
                _ => continue,
            };
            let of = |kind: &str| spec[kind].as_array().into_iter().flatten();
            for container in of("initContainers").chain(of("containers")) {
                let what =
                    format!("{directory}: {} {}", object["metadata"]["name"], container["name"]);
                found.push((what, container.clone(), spec.clone()));
            }
        }
    }
    aggregated::without_api_service(cluster);
    // Four times eight of the base; session manager, aggregated API server, webhooks, and the
    // examples.
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
        // The pod's setting applies where the container has none.
        let either = |field: &str| match &own[field] {
            Value::Null => pod["securityContext"][field].clone(),
            said => said.clone(),
        };
        if name == "writer" {
            // An ordinary application.
            continue;
        }
        assert_eq!(own["readOnlyRootFilesystem"], json!(true), "{what}");
        if own["privileged"] == json!(true) {
            privileged.insert(name.to_owned());
            continue;
        }
        // Thawing needs it, and a holder could escalate in any case (PodSpec,
        // allowPrivilegeEscalation).
        let is_guard = name == "freeze-guard";
        let capabilities = match is_guard {
            true => json!({ "drop": ["ALL"], "add": ["SYS_ADMIN"] }),
            false => json!({ "drop": ["ALL"] }),
        };
        assert_eq!(own["capabilities"], capabilities, "{what}");
        assert_eq!(own["allowPrivilegeEscalation"] == json!(false), !is_guard, "{what}");
        assert_eq!(either("seccompProfile"), json!({ "type": "RuntimeDefault" }), "{what}");
        let is_root = either("runAsUser") == json!(0);
        // The last one connects to the socket of another provider's driver.
        let needs_root =
            ["node-driver-registrar", "node-proxy", "freeze-guard", "csi-snapshot-metadata"]
                .contains(&name);
        assert_eq!(is_root, needs_root, "{what}");
        if !is_root {
            assert_eq!(either("runAsNonRoot"), json!(true), "{what}");
            // With the group of the driver's socket.
            let group = if name == "metadata" { 65533 } else { 65532 };
            assert_eq!(either("runAsGroup"), json!(group), "{what}");
        }
        for mount in container["volumeMounts"].as_array().into_iter().flatten() {
            // The directory of its socket, in memory.
            let its_own = is_guard && mount["name"] == "freeze-guard"
                || name == "node-proxy" && (mount["name"] == "socket" || mount["name"] == "state");
            let read_only =
                mount["readOnly"] == json!(true) || mount["name"] == "registration" || its_own;
            // Or a volume of the pod.
            let mut volumes = pod["volumes"].as_array().unwrap().iter();
            let volume = volumes.find(|volume| volume["name"] == mount["name"]).unwrap();
            assert!(read_only || volume["csi"]["driver"] == DRIVER, "{what}: {mount}");
        }
    }
    assert_eq!(privileged, ["driver", "runtime-ops"].map(str::to_owned).into());
}

#[test]
fn in_the_drivers_pod_only_sidecars_have_a_token() {
    let Some(cluster) = shared() else { return };
    for (what, container, pod) in containers(cluster) {
        let with_token: &[&str] = match pod["serviceAccountName"].as_str() {
            Some("csi-loopback-metadata") => &["metadata"],
            // Of deploy/overlays/distributed.
            Some("csi-loopback-node-controller") => {
                &["csi-provisioner", "csi-snapshotter", "csi-resizer"]
            }
            _ => continue,
        };
        assert_eq!(pod["automountServiceAccountToken"], json!(false), "{what}");
        let volumes = pod["volumes"].as_array().unwrap();
        let has_token = container["volumeMounts"].as_array().unwrap().iter().any(|mount| {
            let volume = volumes.iter().find(|volume| volume["name"] == mount["name"]).unwrap();
            volume["projected"]["sources"].to_string().contains("serviceAccountToken")
                || !volume["secret"].is_null()
        });
        assert_eq!(has_token, with_token.contains(&container["name"].as_str().unwrap()), "{what}");
    }
}

#[test]
fn the_sidecar_has_only_the_socket_for_metadata() {
    let Some(cluster) = shared() else { return };
    let mut sidecars = 0;
    for (what, sidecar, pod) in containers(cluster) {
        if sidecar["name"] != "metadata" {
            continue;
        }
        let mut all = pod["containers"].as_array().unwrap().iter();
        // Those of deploy/overlays/distributed are other pods.
        let Some(driver) = all.find(|container| container["name"] == "driver") else { continue };
        sidecars += 1;
        let socket = argument(driver, "--metadata-endpoint").strip_prefix("unix://").unwrap();
        assert_eq!(argument(sidecar, "--csi-address"), socket, "{what}");
        let group = argument(driver, "--metadata-socket-group");
        assert_ne!(group, argument(driver, "--socket-group"), "{what}");
        assert_eq!(sidecar["securityContext"]["runAsGroup"].to_string(), group, "{what}");
        assert_eq!(argument(driver, "--target-root"), "/var/lib/kubelet", "{what}");
        let mounts = |container: &Value| -> BTreeSet<String> {
            let mounts = container["volumeMounts"].as_array().unwrap().iter();
            mounts.map(|mount| mount["name"].as_str().unwrap().to_owned()).collect()
        };
        let shared: Vec<_> = mounts(driver).intersection(&mounts(sidecar)).cloned().collect();
        assert_eq!(shared, ["metadata-socket"], "{what}");
    }
    assert_eq!(sidecars, 4);
}

#[test]
fn driver_and_freeze_guard_share_a_socket_not_a_container() {
    let Some(cluster) = shared() else { return };
    let found = containers(cluster);
    let guards: Vec<_> =
        found.iter().filter(|(_, container, _)| container["name"] == "freeze-guard").collect();
    assert_eq!(guards.len(), 5);
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
fn images_are_ours_or_have_a_public_registry() {
    let Some(cluster) = shared() else { return };
    for (what, container, _) in containers(cluster) {
        let image = container["image"].as_str().unwrap();
        let (name, tag) = image.rsplit_once(':').unwrap_or((image, ""));
        match name {
            "csi-loopback" => assert_eq!(tag, env!("CARGO_PKG_VERSION"), "{what}"),
            // Represents the driver of another provider.
            "block-csi" => {}
            _ => {
                let sidecar = name.strip_prefix("registry.k8s.io/sig-storage/");
                let known = sidecar.is_some_and(|sidecar| !sidecar.contains('/'));
                assert!(known && tag.starts_with('v'), "{what}: {image}");
            }
        }
    }
}

/// Asserts that the binary accepts a container's arguments: it handles `--help` after them only if
/// all are known.
pub fn are_known(what: &str, container: &Value) {
    let arguments = container["args"].as_array().unwrap().iter();
    // As kubelet expands them.
    let arguments = arguments.map(|argument| {
        let argument = argument.as_str().unwrap().replace("$(POD_NAMESPACE)", NAMESPACE);
        argument.replace("$(NODE_NAME)", "node-1")
    });
    let mut command = Command::new(binary());
    let output = command.args(arguments).arg("--help").output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{what}: {text}");
}

#[test]
fn the_binary_accepts_the_arguments_of_the_manifests() {
    let Some(cluster) = shared() else { return };
    let mut seen = 0;
    for (what, container, _) in containers(cluster) {
        let ours = container["image"].as_str().unwrap().starts_with("csi-loopback:");
        if ours && !container["args"].is_null() {
            are_known(what, container);
            seen += 1;
        }
    }
    // Driver of inline volumes; driver, freeze guard and sidecar, four times each, and on many nodes
    // with two kinds of sidecars; crust_ops, twice; node proxy, twice for this driver and twice for
    // another; session manager, aggregated API server and webhooks; full and incremental backup,
    // twice each; backup and prune of a CronJob; the sidecar of another driver.
    assert_eq!(seen, 33);
}

/// The only object of a kind.
pub fn only<'a>(all: &'a [Value], kind: &str) -> &'a Value {
    let mut found = all.iter().filter(|object| object["kind"] == kind);
    let one = found.next().unwrap_or_else(|| panic!("no {kind}"));
    assert!(found.next().is_none(), "more than one {kind}");
    one
}

/// Asserts that the namespace's policy admits pods of the Deployment among these objects; that
/// Service, NetworkPolicy and budget select them and name the port that they serve; and that their
/// arguments contain these flags and the Service's address.
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
    let policy = &only(all, "NetworkPolicy")["spec"];
    assert_eq!(policy["policyTypes"], json!(["Ingress", "Egress"]));
    let egress = policy["egress"].as_array().unwrap();
    let ports = [0, 1].map(|rule| &egress[rule]["ports"][0]["port"]);
    assert_eq!(ports, [53, 5353], "{policy}");
    assert_eq!(egress[2]["ports"][0]["port"], 443, "{policy}");
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

/// Asserts that the namespace admits a pod with this spec, and rejects a privileged pod.
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
    assert!(
        admit(&privileged).is_err_and(|message| message.contains("PodSecurity")),
        "it is enforced"
    );
}
