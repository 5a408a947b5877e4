//! VolumeSnapshotDelta: rights of the aggregated API server, of a driver's sidecar with cbt-http
//! and of an API user, and the objects of deploy/aggregated-api. No server runs here, so the
//! APIService exists only while a test needs it.

use std::process::Command;
use support::cluster::shared;
use support::driver::binary;

use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use serde_json::json;

use super::rights::{Right, exactly, holds};
use super::{
    NAMESPACE, account, apply, apply_base, deploy, dry_run, objects, overlay, pods, shown, sidecar,
};
use support::cluster::Cluster;
use support::cluster::access::Account;
use support::cluster::programs::{finish, stdout_of};
use support::path;

/// Namespace of the aggregated API server.
const SERVERS: &str = "csi-loopback-aggregated";
/// Name of all its objects.
const SERVER: &str = "csi-loopback-aggregated-api";
const SECRET: &str = "csi-loopback-aggregated-api-ca";
const API_SERVICE: &str = "v1alpha1.cbt.storage.k8s.io";
/// Name of the objects that the component adds for the driver's sidecar.
const ENDPOINT: &str = "csi-loopback-cbt-http";
const KUBE_SYSTEM: &str = "kube-system";

const CBT: &str = "cbt.storage.k8s.io";

pub const RIGHTS: &[&str] = &[
    "apiregistration.k8s.io/apiservices[v1alpha1.cbt.storage.k8s.io] get list watch patch",
    "authorization.k8s.io/subjectaccessreviews create",
    "cbt.storage.k8s.io/driverdiscoveries get list watch",
    "cbt.storage.k8s.io/driverdiscoveries/deltas create",
    "cbt.storage.k8s.io/driverdiscoveries/status patch",
    "snapshot.storage.k8s.io/volumesnapshotcontents get list watch",
    "snapshot.storage.k8s.io/volumesnapshots get list watch",
];

const RIGHTS_AT_HOME: &[&str] = &[
    "/secrets[csi-loopback-aggregated-api-ca] get update",
    "/serviceaccounts/token[csi-loopback-aggregated-api] create",
    "coordination.k8s.io/leases[csi-loopback-aggregated-api] get update",
];

const RIGHTS_IN_KUBE_SYSTEM: &[&str] =
    &["/configmaps[extension-apiserver-authentication] get list watch"];

/// Rights that the component adds to the sidecar's.
pub const RIGHTS_OF_ENDPOINT: &[&str] = &[
    "cbt.storage.k8s.io/driverdiscoveries get list watch",
    "cbt.storage.k8s.io/driverdiscoveries[loopback.csi.local] create patch",
];
const RIGHTS_OF_ENDPOINT_AT_HOME: &[&str] =
    &["coordination.k8s.io/leases[csi-loopback-cbt-http] get update"];

const RIGHTS_OF_USER: &[&str] = &[
    "cbt.storage.k8s.io/volumesnapshotdeltas create",
    "snapshot.storage.k8s.io/volumesnapshots get",
];

fn server() -> Account {
    account(SERVERS, SERVER)
}

fn apply_server(cluster: &Cluster) {
    stdout_of(apply(cluster, &deploy("aggregated-api")));
    without_api_service(cluster);
}

/// Without a server, discovery of the group is incomplete, which would affect other tests.
pub fn without_api_service(cluster: &Cluster) {
    delete(cluster, "apiservice", API_SERVICE);
}

pub fn delete(cluster: &Cluster, kind: &str, name: &str) {
    stdout_of(cluster.kubectl(&["delete", "--ignore-not-found", kind, name]));
}

/// An API user in a separate namespace, with the ClusterRole for users.
fn user(cluster: &Cluster) -> Account {
    let who = cluster.account(&cluster.namespace("deltas"), "user");
    let bind = [
        "create",
        "rolebinding",
        "deltas",
        "-n",
        &who.namespace,
        "--clusterrole=csi-loopback-snapshot-delta-user",
        &format!("--serviceaccount={}:{}", who.namespace, who.name),
    ];
    stdout_of(cluster.kubectl(&bind));
    who
}

#[test]
fn aggregated_server_and_users_have_exactly_the_listed_rights() {
    let Some(cluster) = shared() else { return };
    apply_base(cluster);
    apply_server(cluster);
    let user = user(cluster);
    exactly(
        cluster,
        &[
            (&server(), SERVERS, RIGHTS, RIGHTS_AT_HOME),
            (&server(), KUBE_SYSTEM, RIGHTS, RIGHTS_IN_KUBE_SYSTEM),
            (&server(), NAMESPACE, RIGHTS, &[]),
            (&server(), "default", RIGHTS, &[]),
            (&user, &user.namespace, RIGHTS_OF_USER, &[]),
            (&user, "default", &[], &[]),
        ],
    );
}

#[test]
fn the_aggregated_server_gets_secrets_only_with_the_component() {
    let Some(cluster) = shared() else { return };
    apply_server(cluster);
    let with = overlay(cluster, "aggregated-api", "aggregated-api-secrets");
    stdout_of(apply(cluster, &with));
    without_api_service(cluster);
    let table: &[Right] = &[
        (true, "default", "get", "", "secrets", "any"),
        (false, "default", "list", "", "secrets", ""),
        (false, "default", "watch", "", "secrets", ""),
        (false, "default", "update", "", "secrets", "any"),
        (false, "default", "create", "", "secrets", ""),
    ];
    holds(cluster, &server(), table);
    // Other tests expect the state without it.
    for kind in ["clusterrolebinding", "clusterrole"] {
        delete(cluster, kind, "csi-loopback-aggregated-api-secrets");
    }
}

#[test]
fn the_component_cbt_http_enables_deltas_for_a_driver() {
    let Some(cluster) = shared() else { return };
    apply_base(cluster);
    let with = overlay(cluster, "base", "cbt-http");
    let built = dry_run(cluster, &with);
    let kind = |kind: &str, name: &str| {
        let mut all = built.iter();
        all.find(|one| one["kind"] == kind && one["metadata"]["name"] == name)
            .unwrap_or_else(|| panic!("{kind} {name}"))
    };
    let pod = &kind("StatefulSet", "csi-loopback")["spec"]["template"];
    let container = |name: &str| {
        let mut all = pod["spec"]["containers"].as_array().unwrap().iter();
        all.find(|one| one["name"] == name).unwrap()
    };
    let arguments = |name: &str| container(name)["args"].to_string();
    for name in ["driver", "metadata"] {
        pods::are_known(name, container(name));
    }
    let port = &kind("Service", ENDPOINT)["spec"]["ports"][0];
    let address =
        format!("--cbt-http-service-address={ENDPOINT}.$(POD_NAMESPACE).svc:{}", port["port"]);
    for flag in
        ["--cbt-http", "--manage-service", &address, &format!("--cbt-http-lease={ENDPOINT}")]
    {
        assert!(arguments("metadata").contains(&format!("\"{flag}\"")), "{flag}");
    }
    let ready = &container("metadata")["readinessProbe"]["httpGet"]["path"];
    assert_eq!(ready, "/cbt-http/leader", "replicas that do not lead get no requests");
    // Service and policy select the pods and name the port.
    let ports = container("metadata")["ports"].as_array().unwrap();
    let served = ports.iter().find(|one| one["name"] == port["targetPort"]).unwrap();
    let flag = format!("\"--cbt-http-port={}\"", served["containerPort"]);
    assert!(arguments("metadata").contains(&flag), "{flag}");
    let policy = kind("NetworkPolicy", ENDPOINT);
    assert_eq!(policy["spec"]["ingress"][0]["ports"][0]["port"], port["targetPort"]);
    let labels = pod["metadata"]["labels"].as_object().unwrap();
    for selector in [
        &kind("Service", ENDPOINT)["spec"]["selector"],
        &policy["spec"]["podSelector"]["matchLabels"],
    ] {
        let selector = selector.as_object().unwrap();
        assert!(selector.iter().all(|(key, value)| labels.get(key) == Some(value)), "{selector:?}");
    }

    stdout_of(apply(cluster, &with));
    let everywhere = &[super::rights::SIDECAR, RIGHTS_OF_ENDPOINT].concat();
    let there = [super::rights::SIDECAR_AT_HOME, RIGHTS_OF_ENDPOINT_AT_HOME].concat();
    exactly(
        cluster,
        &[(&sidecar(), NAMESPACE, everywhere, &there), (&sidecar(), "default", everywhere, &[])],
    );
    // Other tests expect the state without it. (Deletion of a namespace never completes here, so
    // its objects are deleted singly.)
    for kind in ["clusterrolebinding", "clusterrole"] {
        delete(cluster, kind, ENDPOINT);
    }
    for kind in ["rolebinding", "role", "lease", "service", "networkpolicy"] {
        stdout_of(cluster.kubectl(&["delete", "-n", NAMESPACE, kind, ENDPOINT]));
    }
    apply_base(cluster);
}

#[test]
fn the_aggregated_servers_pods_are_admitted_as_restricted() {
    let Some(cluster) = shared() else { return };
    stdout_of(apply(cluster, &deploy("aggregated-api")));
    let all = objects(cluster, "aggregated-api");
    without_api_service(cluster);
    let flags = [
        format!("--api-service={API_SERVICE}"),
        format!("--self-signed-secret={SECRET}"),
        format!("--lease={SERVER}"),
    ];
    pods::of_deployment(cluster, SERVERS, &all, &flags);
    let deployment = &pods::only(&all, "Deployment")["spec"];
    assert_eq!(deployment["replicas"], json!(2));
    let template = &deployment["template"];
    let spread = &template["spec"]["topologySpreadConstraints"][0]["labelSelector"];
    assert_eq!(spread["matchLabels"], template["metadata"]["labels"]);
    let port = &pods::only(&all, "Service")["spec"]["ports"][0]["port"];
    let expected = json!({ "namespace": SERVERS, "name": SERVER, "port": port });
    assert_eq!(pods::only(&all, "APIService")["spec"]["service"], expected);
}

#[test]
fn pages_have_the_priority_level_workload_low() {
    let Some(cluster) = shared() else { return };
    apply_server(cluster);
    let get = |what: &[&str]| shown(cluster, what);
    let schema = get(&["flowschema", "csi-loopback-snapshot-deltas"]);
    let level = schema["spec"]["priorityLevelConfiguration"]["name"].as_str().unwrap();
    assert_eq!(level, "workload-low");
    assert_eq!(get(&["prioritylevelconfiguration", level])["spec"]["type"], "Limited");
    let dangling = schema["status"]["conditions"].as_array().into_iter().flatten();
    for condition in dangling.filter(|one| one["type"] == "Dangling") {
        assert_eq!(condition["status"], "False", "{condition}");
    }
    // It precedes the catch-all schemas, so that it takes effect.
    let all = get(&["flowschemas"]);
    let precedence = |name: &str| {
        let one =
            all["items"].as_array().unwrap().iter().find(|one| one["metadata"]["name"] == name);
        one.unwrap()["spec"]["matchingPrecedence"].as_u64().unwrap()
    };
    for everybodys in ["service-accounts", "global-default", "catch-all"] {
        assert!(
            precedence("csi-loopback-snapshot-deltas") < precedence(everybodys),
            "{everybodys}"
        );
    }
    assert!(precedence("csi-loopback-snapshot-deltas") > precedence("system-leader-election"));

    // The API server reports which schema a request matched. (The request fails later, since no
    // server runs.)
    let user = user(cluster);
    let path = format!("/apis/{CBT}/v1alpha1/namespaces/{}/volumesnapshotdeltas", user.namespace);
    let client = cluster.client_as(&user);
    let uid = schema["metadata"]["uid"].as_str().unwrap();
    cluster.wait_for("the FlowSchema is in effect", || {
        let request = http::Request::post(&path)
            .header("content-type", "application/json")
            .body(kube::client::Body::from(b"{}".to_vec()))
            .unwrap();
        let answer = cluster.block_on(client.send(request)).unwrap();
        let said = answer.headers().get("x-kubernetes-pf-flowschema-uid").cloned();
        (said.as_ref().and_then(|said| said.to_str().ok()) == Some(uid)).then_some(())
    });
}

#[test]
fn an_apply_keeps_what_the_aggregated_server_has_written() {
    let Some(cluster) = shared() else { return };
    stdout_of(apply(cluster, &deploy("aggregated-api")));
    let bundle = std::fs::read(cluster.directory().join("pki/ca.crt")).unwrap();
    let bundle = json!(k8s_openapi::ByteString(bundle));
    // As the server writes it.
    let own = json!({
        "apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
        "metadata": { "name": API_SERVICE },
        "spec": {
            "group": CBT, "version": "v1alpha1", "groupPriorityMinimum": 1000,
            "versionPriority": 10, "caBundle": bundle,
        },
    });
    let file = cluster.write("api-service.json", &own.to_string());
    let written = ["apply", "--server-side", "--field-manager=server", "-f", path(&file)];
    stdout_of(cluster.kubectl(&written));
    let secrets: Api<Secret> = cluster.api_in(SERVERS);
    let kept = json!({ "stringData": { "tls.crt": "kept" } });
    cluster.merge(&secrets, SECRET, &kept);

    stdout_of(apply(cluster, &deploy("aggregated-api")));
    let shown = shown(cluster, &["apiservice", API_SERVICE]);
    assert_eq!(shown["spec"]["caBundle"], bundle);
    assert_eq!(shown["spec"]["service"]["name"], SERVER);
    assert_eq!(cluster.get(&secrets, SECRET).unwrap().data.unwrap()["tls.crt"].0, b"kept");
    without_api_service(cluster);
}

/// Without a server behind the APIService, and without an APIService.
#[test]
fn a_command_without_an_aggregated_server_names_the_cause() {
    let Some(cluster) = shared() else { return };
    stdout_of(apply(cluster, &deploy("aggregated-api")));
    let user = user(cluster);
    let kubeconfig = cluster.kubeconfig_of(&user);
    let message = || {
        let mut command = Command::new(binary());
        command.args(["snapshot", "delta", "monday", "tuesday", "--api=aggregated"]);
        command.args(["--timeout=2s", "--namespace", &user.namespace, "--kubeconfig"]);
        command.arg(&kubeconfig);
        let output = finish(command);
        assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    cluster.wait_for("the APIService without a server", || {
        let message = message();
        let step = message.contains(&format!("`kubectl get apiservice {API_SERVICE}` shows"));
        (step && message.contains("not done within 2s")).then_some(())
    });
    // Other versions of the group work.
    stdout_of(cluster.kubectl(&["get", "driverdiscoveries"]));
    without_api_service(cluster);
    cluster.wait_for("the APIService is gone", || {
        let message = message();
        (message.contains("no aggregated API server is installed") && !message.contains("resuming"))
            .then_some(())
    });
}
