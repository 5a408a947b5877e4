//! VolumeSnapshotDelta: what the aggregated API server, a driver's sidecar with cbt-http and a user of the API may do, and what
//! deploy/aggregated-api sees to. Nobody serves the API here, so its APIService is there only while a test needs it.

use std::process::Command;
use support::cluster::shared;
use support::driver::binary;

use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use serde_json::{Value, json};

use super::rights::{Right, exactly, holds};
use super::{
    DRIVER, NAMESPACE, account, apply, apply_base, deploy, objects, overlay, pods, sidecar,
};
use support::cluster::Cluster;
use support::cluster::access::Account;
use support::cluster::programs::{finish, stdout_of};
use support::path;

/// Where the aggregated API server is installed.
const SERVERS: &str = "csi-loopback-aggregated";
/// Name of all that belongs to it.
const SERVER: &str = "csi-loopback-aggregated-api";
const SECRET: &str = "csi-loopback-aggregated-api-ca";
const API_SERVICE: &str = "v1alpha1.cbt.storage.k8s.io";
/// Name of what is added for the driver's sidecar.
const ENDPOINT: &str = "csi-loopback-cbt-http";
const KUBE_SYSTEM: &str = "kube-system";
const FRONT_PROXY: &str = "extension-apiserver-authentication";

const CBT: &str = "cbt.storage.k8s.io";
const SNAPSHOTS: &str = "snapshot.storage.k8s.io";

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

/// What the component adds to the rights of the sidecar.
const RIGHTS_OF_ENDPOINT: &[&str] = &[
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

/// While nobody answers, discovery of the group is not whole, which is not what the other tests are about.
pub fn without_api_service(cluster: &Cluster) {
    take_away(cluster, "apiservice", API_SERVICE);
}

fn take_away(cluster: &Cluster, kind: &str, name: &str) {
    stdout_of(cluster.kubectl(&["delete", "--ignore-not-found", kind, name]));
}

/// A user of the API in a namespace of its own, by the ClusterRole for such.
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
fn the_aggregated_server_and_its_users_have_the_rights_of_this_list_and_no_more() {
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
fn what_would_give_server_user_or_driver_more_of_deltas_is_refused_to_them() {
    let Some(cluster) = shared() else { return };
    apply_base(cluster);
    apply_server(cluster);
    let deltas = "volumesnapshotdeltas";
    let discoveries = "driverdiscoveries";
    let services = "apiservices";
    let of_server: &[Right] = &[
        (true, SERVERS, "get", "", "secrets", SECRET),
        (true, SERVERS, "update", "", "secrets", SECRET),
        (false, SERVERS, "get", "", "secrets", "another"),
        (false, SERVERS, "list", "", "secrets", ""),
        (false, SERVERS, "create", "", "secrets", ""),
        // Nobody's Secret, unless the component says so.
        (false, "default", "get", "", "secrets", "any"),
        (false, NAMESPACE, "get", "", "secrets", "csi-loopback-metadata-tls"),
        // A token of itself and of nobody else.
        (true, SERVERS, "create", "", "serviceaccounts/token", SERVER),
        (false, SERVERS, "create", "", "serviceaccounts/token", "default"),
        (false, NAMESPACE, "create", "", "serviceaccounts/token", "csi-loopback-metadata"),
        (false, KUBE_SYSTEM, "create", "", "serviceaccounts/token", "any"),
        (true, KUBE_SYSTEM, "watch", "", "configmaps", FRONT_PROXY),
        (false, KUBE_SYSTEM, "watch", "", "configmaps", ""),
        (false, KUBE_SYSTEM, "get", "", "configmaps", "another"),
        (false, KUBE_SYSTEM, "update", "", "configmaps", FRONT_PROXY),
        (false, SERVERS, "update", "coordination.k8s.io", "leases", "another"),
        (false, SERVERS, "create", "", "pods", ""),
        (true, "", "patch", "apiregistration.k8s.io", services, API_SERVICE),
        // Who could write another would answer for it.
        (false, "", "patch", "apiregistration.k8s.io", services, "v1.apps"),
        (false, "", "create", "apiregistration.k8s.io", services, API_SERVICE),
        (false, "", "delete", "apiregistration.k8s.io", services, API_SERVICE),
        (true, "", "patch", CBT, "driverdiscoveries/status", "any"),
        (true, "", "create", CBT, "driverdiscoveries/deltas", "any"),
        (false, "", "patch", CBT, discoveries, "any"),
        (false, "", "create", CBT, discoveries, ""),
        (false, "", "delete", CBT, discoveries, "any"),
        (true, "default", "get", SNAPSHOTS, "volumesnapshots", "any"),
        (false, "default", "patch", SNAPSHOTS, "volumesnapshots", "any"),
        (false, "", "patch", SNAPSHOTS, "volumesnapshotcontents", "any"),
        (true, "", "create", "authorization.k8s.io", "subjectaccessreviews", ""),
        // Callers' tokens never reach it.
        (false, "", "create", "authentication.k8s.io", "tokenreviews", ""),
        (false, "default", "create", CBT, deltas, ""),
        (false, "", "impersonate", "", "users", "admin"),
    ];
    holds(cluster, &server(), of_server);

    let user = user(cluster);
    let at_home = user.namespace.as_str();
    let of_user: &[Right] = &[
        (true, at_home, "create", CBT, deltas, ""),
        (true, at_home, "get", SNAPSHOTS, "volumesnapshots", "any"),
        (false, "default", "create", CBT, deltas, ""),
        (false, "default", "get", SNAPSHOTS, "volumesnapshots", "any"),
        (false, at_home, "list", SNAPSHOTS, "volumesnapshots", ""),
        (false, at_home, "get", "", "secrets", "any"),
        // Else it could ask drivers itself.
        (false, "", "create", CBT, "driverdiscoveries/deltas", DRIVER),
        (false, "", "get", CBT, discoveries, DRIVER),
    ];
    holds(cluster, &user, of_user);
    // Nor does the sidecar without the component, or the one with the name of another driver.
    let of_sidecar: &[Right] = &[
        (true, NAMESPACE, "get", "", "secrets", "csi-loopback-metadata-tls"),
        (false, "", "create", CBT, "driverdiscoveries/deltas", DRIVER),
        (false, "", "patch", CBT, "driverdiscoveries/status", DRIVER),
        (false, "", "patch", CBT, discoveries, "another.example"),
        (false, "", "patch", CBT, discoveries, DRIVER),
    ];
    holds(cluster, &sidecar(), of_sidecar);
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
    // The other tests expect it without.
    for kind in ["clusterrolebinding", "clusterrole"] {
        take_away(cluster, kind, "csi-loopback-aggregated-api-secrets");
    }
}

#[test]
fn a_driver_takes_part_in_deltas_with_the_component() {
    let Some(cluster) = shared() else { return };
    apply_base(cluster);
    let with = overlay(cluster, "base", "cbt-http");
    let built: Vec<Value> = {
        let list = stdout_of(cluster.kubectl(&[
            "apply",
            "--server-side",
            "--validate=strict",
            "--dry-run=server",
            "-o",
            "json",
            "-k",
            path(&with),
        ]));
        let mut list: Value = serde_json::from_str(&list).unwrap();
        serde_json::from_value(list["items"].take()).unwrap()
    };
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
    // Whom Service and policy mean, and by which port.
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
    // The other tests expect it without. (A namespace that is deleted never ends here: nothing of it may go.)
    for kind in ["clusterrolebinding", "clusterrole"] {
        take_away(cluster, kind, ENDPOINT);
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
fn pages_have_the_priority_level_of_work_that_can_wait() {
    let Some(cluster) = shared() else { return };
    apply_server(cluster);
    let get = |what: &[&str]| -> Value {
        let said = stdout_of(cluster.kubectl(&[&["get", "-o", "json"], what].concat()));
        serde_json::from_str(&said).unwrap()
    };
    let schema = get(&["flowschema", "csi-loopback-snapshot-deltas"]);
    let level = schema["spec"]["priorityLevelConfiguration"]["name"].as_str().unwrap();
    assert_eq!(level, "workload-low");
    assert_eq!(get(&["prioritylevelconfiguration", level])["spec"]["type"], "Limited");
    let dangling = schema["status"]["conditions"].as_array().into_iter().flatten();
    for condition in dangling.filter(|one| one["type"] == "Dangling") {
        assert_eq!(condition["status"], "False", "{condition}");
    }
    // It comes before those that take in everybody, so that it takes effect.
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

    // And it does: the API server says to which of them a request belongs. (It is refused further on: nobody serves it here.)
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
fn what_the_aggregated_server_has_written_survives_an_apply() {
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
    let shown = stdout_of(cluster.kubectl(&["get", "apiservice", API_SERVICE, "-o", "json"]));
    let shown: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(shown["spec"]["caBundle"], bundle);
    assert_eq!(shown["spec"]["service"]["name"], SERVER);
    assert_eq!(cluster.get(&secrets, SECRET).unwrap().data.unwrap()["tls.crt"].0, b"kept");
    without_api_service(cluster);
}

/// With nobody behind the APIService, and without it.
#[test]
fn a_command_without_an_aggregated_server_says_what_is_missing() {
    let Some(cluster) = shared() else { return };
    stdout_of(apply(cluster, &deploy("aggregated-api")));
    let user = user(cluster);
    let kubeconfig = cluster.kubeconfig_of(&user);
    let told = || {
        let mut command = Command::new(binary());
        command.args(["snapshot", "delta", "monday", "tuesday", "--api=aggregated"]);
        command.args(["--timeout=2s", "--namespace", &user.namespace, "--kubeconfig"]);
        command.arg(&kubeconfig);
        let output = finish(command);
        assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    cluster.wait_for("the APIService counts, and nobody answers", || {
        let told = told();
        let step = told.contains(&format!("`kubectl get apiservice {API_SERVICE}` shows"));
        (step && told.contains("not done within 2s")).then_some(())
    });
    // What is not this version's goes on.
    stdout_of(cluster.kubectl(&["get", "driverdiscoveries"]));
    without_api_service(cluster);
    cluster.wait_for("the APIService is gone", || {
        let told = told();
        (told.contains("there is no aggregated API server") && !told.contains("going on"))
            .then_some(())
    });
}
