//! deploy/node-proxy: rights of the proxy, and the connections of kubelet, registrar, proxy and
//! driver; also for the driver of another provider.

use std::collections::BTreeSet;
use support::cluster::shared;

use csi_loopback::kubernetes::defer_annotation;
use csi_loopback::kubernetes::pod::Pod;
use serde_json::{Value, json};

use super::pods::{are_known, only};
use super::rights::{Right, SIDECAR, SIDECAR_AT_HOME, exactly, holds};
use super::runtime::{argument, container, on_node, socket};
use super::{NAMESPACE, account, apply, deploy, objects, overlay, shown, sidecar};
use support::cluster::Cluster;
use support::cluster::access::Account;
use support::cluster::programs::stdout_of;
use support::path;

/// Name of the proxy's ServiceAccount, DaemonSet and ClusterRole.
const NAME: &str = "csi-loopback-node-proxy";
const CLAIMS: &str = "csi-loopback-node-proxy-claims";
/// The overlay for another provider's driver, and its namespace.
const OTHER: &str = "examples/node-proxy-other-driver";
const OTHERS: &str = "block-csi";

const RIGHTS: &[&str] = &["/events create", "/pods get list watch"];

fn proxy() -> Account {
    account(NAMESPACE, NAME)
}

fn others_proxy() -> Account {
    account(OTHERS, "csi-loopback-node-proxy-block")
}

fn applied(cluster: &Cluster, directory: &str) -> Vec<Value> {
    stdout_of(apply(cluster, &deploy(directory)));
    objects(cluster, directory)
}

#[test]
fn the_node_proxy_has_exactly_the_rights_of_the_list() {
    let Some(cluster) = shared() else { return };
    without_claims(cluster);
    applied(cluster, "node-proxy");
    applied(cluster, OTHER);
    exactly(
        cluster,
        &[
            (&proxy(), NAMESPACE, RIGHTS, &[]),
            (&proxy(), "default", RIGHTS, &[]),
            // Every pod of the cluster can connect to it, so it has none of the proxy's rights.
            (&sidecar(), NAMESPACE, SIDECAR, SIDECAR_AT_HOME),
            (&others_proxy(), OTHERS, RIGHTS, &[]),
            (&others_proxy(), NAMESPACE, RIGHTS, &[]),
            (&account(OTHERS, "block-csi-node"), OTHERS, &[], &[]),
        ],
    );
}

/// Other tests expect the state without the component.
fn without_claims(cluster: &Cluster) {
    for kind in ["clusterrolebinding", "clusterrole"] {
        stdout_of(cluster.kubectl(&["delete", "--ignore-not-found", kind, CLAIMS]));
    }
}

#[test]
fn the_node_proxy_reads_claims_only_with_the_component() {
    let Some(cluster) = shared() else { return };
    // For another provider's driver the account differs.
    for (directory, who) in [("node-proxy", proxy()), (OTHER, others_proxy())] {
        stdout_of(apply(cluster, &overlay(cluster, directory, "node-proxy-claims")));
        let table: &[Right] = &[
            (true, "default", "get", "", "persistentvolumeclaims", "any"),
            (false, "", "list", "", "persistentvolumeclaims", ""),
            (false, "default", "patch", "", "persistentvolumeclaims", "any"),
            (false, "default", "patch", "", "persistentvolumeclaims/status", "any"),
        ];
        holds(cluster, &who, table);
        without_claims(cluster);
    }
}

/// The object of a kind and name.
fn named<'a>(all: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let mut found = all.iter().filter(|one| one["kind"] == kind && one["metadata"]["name"] == name);
    found.next().unwrap_or_else(|| panic!("no {kind} {name}"))
}

fn spec(object: &Value) -> &Value {
    &object["spec"]["template"]["spec"]
}

/// Asserts the connections for any driver. The pods of `driver` contain driver and registrar.
fn assert_connected(driver: &Value, proxy: &Value) {
    let (of_driver, of_proxy) = (container(driver, "driver"), container(proxy, "node-proxy"));
    are_known("node-proxy", of_proxy);
    let at_proxy = |flag: &str| on_node(proxy, of_proxy, socket(argument(of_proxy, flag)));
    let (endpoint, mount) = at_proxy("--endpoint");
    assert!(mount["readOnly"].is_null(), "it makes its socket there");

    // The registrar calls the proxy and reports its socket to kubelet. No other container uses it.
    let registrar = container(driver, "node-driver-registrar");
    assert_eq!(argument(registrar, "--kubelet-registration-path"), endpoint);
    assert_eq!(on_node(driver, registrar, argument(registrar, "--csi-address")).0, endpoint);
    // The driver's socket is unchanged, and all others and the proxy use it.
    let own = on_node(driver, of_driver, socket(argument(of_driver, "--endpoint"))).0;
    assert_ne!(own, endpoint);
    assert_eq!(at_proxy("--driver-endpoint").0, own);
    let others = spec(driver)["containers"].as_array().unwrap().iter();
    let has_own = ["node-driver-registrar", "metadata"];
    for other in others.filter(|one| !has_own.contains(&one["name"].as_str().unwrap())) {
        let text = other["args"].to_string();
        assert!(!text.contains("proxy.sock"), "{other}");
        if text.contains("--csi-address") {
            assert_eq!(on_node(driver, other, argument(other, "--csi-address")).0, own, "{other}");
        }
    }

    // Same nodes as the driver.
    for field in ["nodeSelector", "tolerations", "priorityClassName"] {
        assert_eq!(spec(driver)[field], spec(proxy)[field], "{field}");
    }
    // Targets at kubelet's paths, and later mounts there.
    let (pods, mount) = on_node(proxy, of_proxy, "/var/lib/kubelet/pods");
    assert_eq!(pods, "/var/lib/kubelet/pods");
    assert_eq!(
        (&mount["readOnly"], &mount["mountPropagation"]),
        (&json!(true), &json!("HostToContainer"))
    );
    // The state is on the node, and outlives pod and node. (No other volume of the pod does.)
    let (state, mount) = on_node(proxy, of_proxy, argument(of_proxy, "--state-dir"));
    assert!(state.starts_with("/var/lib/csi-loopback-node-proxy/") && mount["readOnly"].is_null());
    let volumes = spec(proxy)["volumes"].as_array().unwrap();
    assert!(volumes.iter().all(|volume| volume["hostPath"]["path"].is_string()), "{volumes:?}");
    // Root owns all of these and the driver's socket. The container has no other right of root.
    let own = &of_proxy["securityContext"];
    assert_eq!((&own["runAsUser"], &own["runAsGroup"]), (&json!(0), &json!(0)));
    assert_eq!(own["capabilities"], json!({ "drop": ["ALL"] }));
    assert_eq!(own["allowPrivilegeEscalation"], json!(false));
    assert_eq!(spec(proxy)["hostPID"], Value::Null);
    assert_eq!(spec(proxy)["hostNetwork"], Value::Null);
    // Pods of the same node.
    let node = json!([{ "name": "NODE_NAME", "valueFrom": { "fieldRef": { "apiVersion": "v1", "fieldPath": "spec.nodeName" } } }]);
    assert_eq!(of_proxy["env"], node);
    assert_eq!(of_proxy["livenessProbe"]["httpGet"]["path"], "/healthz");
    assert_eq!(of_proxy["readinessProbe"]["httpGet"]["path"], "/readyz");
}

#[test]
fn kubelet_calls_the_node_proxy_and_all_others_the_driver() {
    let Some(cluster) = shared() else { return };
    let all = applied(cluster, "node-proxy");
    let driver = named(&all, "StatefulSet", NAMESPACE);
    let proxy = named(&all, "DaemonSet", NAME);
    assert_connected(driver, proxy);
    assert_eq!(spec(proxy)["serviceAccountName"], NAME);
    // The controllers' pods call the driver, too.
    for one in spec(named(&all, "StatefulSet", "csi-loopback-controller"))["containers"]
        .as_array()
        .unwrap()
    {
        assert_eq!(argument(one, "--csi-address"), "/csi/csi.sock");
    }
    let flags = container(driver, "driver")["args"].as_array().unwrap();
    assert!(flags.contains(&json!("--enable-defer-fs-ops")), "there is something to opt in to");

    // Everything else is as without the proxy.
    let mut without = applied(cluster, "runtime");
    let registrar = |object: &Value| container(object, "node-driver-registrar")["args"].clone();
    let before = without
        .iter_mut()
        .find(|one| one["kind"] == "StatefulSet" && one["metadata"]["name"] == NAMESPACE);
    let before = before.unwrap();
    assert_ne!(registrar(before), registrar(driver));
    before["spec"]["template"]["spec"]["containers"][1]["args"] = registrar(driver);
    assert_eq!(before["spec"], driver["spec"]);
}

#[test]
fn the_node_proxy_serves_the_driver_of_another_provider() {
    let Some(cluster) = shared() else { return };
    let ours = applied(cluster, "node-proxy");
    let all = applied(cluster, OTHER);
    let driver = named(&all, "DaemonSet", "block-csi-node");
    let proxy = named(&all, "DaemonSet", "csi-loopback-node-proxy-block");
    assert_connected(driver, proxy);
    assert_eq!(spec(proxy)["serviceAccountName"], others_proxy().name);
    // Next to the proxy of our driver on the same node: only kubelet's directory is shared.
    let our = named(&ours, "DaemonSet", NAME);
    let paths = |object: &Value| -> BTreeSet<String> {
        let volumes = spec(object)["volumes"].as_array().unwrap().iter();
        volumes.map(|volume| volume["hostPath"]["path"].as_str().unwrap().to_owned()).collect()
    };
    let shared: Vec<_> = paths(our).intersection(&paths(proxy)).cloned().collect();
    assert_eq!(shared, ["/var/lib/kubelet/pods"]);
    let policy = only(&all, "NetworkPolicy");
    let labels = &proxy["spec"]["template"]["metadata"]["labels"];
    assert_eq!(&policy["spec"]["podSelector"]["matchLabels"], labels);
    assert_eq!(policy["spec"]["ingress"], Value::Null, "it accepts no network connections");

    // The provider's manifests are unchanged, except for the registrar's sockets.
    let file = path(&deploy(OTHER)).to_owned() + "/driver.yaml";
    stdout_of(cluster.kubectl(&["apply", "--server-side", "-f", &file]));
    let mut given = shown(cluster, &["-n", OTHERS, "daemonset", "block-csi-node"]);
    given["spec"]["template"]["spec"]["containers"][1]["args"] =
        container(driver, "node-driver-registrar")["args"].clone();
    assert_eq!(given["spec"], driver["spec"]);
}

#[test]
fn the_pod_of_examples_node_proxy_opts_in_by_its_annotation() {
    let Some(cluster) = shared() else { return };
    let all = applied(cluster, "examples/node-proxy");
    let pod: Pod = serde_json::from_value(only(&all, "Pod").clone()).unwrap();
    assert_eq!(defer_annotation::problem(&pod, None), None);
    let (names, spec) = (defer_annotation::names(&pod), pod.spec.clone().unwrap());
    let volumes: BTreeSet<_> = spec.volumes.iter().map(|volume| volume.name.as_str()).collect();
    assert_eq!(names, volumes, "a claim, a generic ephemeral and an inline volume");
    assert_eq!(
        spec.runtime_class_name.as_deref(),
        only(&all, "RuntimeClass")["metadata"]["name"].as_str()
    );
    let base = applied(cluster, "base");
    let class = named(&base, "StorageClass", "csi-loopback");
    let claim = only(&all, "PersistentVolumeClaim");
    assert_eq!(claim["spec"]["storageClassName"], class["metadata"]["name"]);
    let template =
        spec.volumes.iter().find_map(|volume| volume.ephemeral.clone()?.volume_claim_template);
    assert_eq!(template.unwrap().spec.storage_class_name.as_deref(), Some("csi-loopback"));
}
