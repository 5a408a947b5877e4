//! Tests of the manifests on an API server: every manifest applies, and a second time without a
//! change; the definition of SnapshotMetadataService accepts valid objects only (for snapshot
//! sessions see tests/api_server/session_definitions.rs); and each account has the rights that its
//! calls need and no more.

use support::cluster::shared;

mod admission;
mod aggregated;
mod api_server_ip_block;
mod cert_manager;
mod dns;
mod inline;
mod node_proxy;
mod pinned;
mod pods;
mod rights;
mod runtime;
mod session_access;
mod sessions;
mod whole;

use std::path::{Path, PathBuf};
use std::process::Output;

use csi_loopback::kubernetes::metadata_service::SnapshotMetadataService;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use support::cluster::Cluster;
use support::cluster::access::Account;
use support::cluster::programs::stdout_of;
use support::path;

/// Namespace of the installation, and name of the driver.
const NAMESPACE: &str = "csi-loopback";
const DRIVER: &str = "loopback.csi.local";

/// Directories for `kubectl apply -k`: all that are not components.
fn directories() -> Vec<String> {
    let mut found = Vec::new();
    let mut open = vec![deploy("")];
    while let Some(directory) = open.pop() {
        for entry in std::fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else if path.ends_with("kustomization.yaml")
                && std::fs::read_to_string(&path).unwrap().contains("\nkind: Kustomization\n")
            {
                let relative = directory.strip_prefix(deploy("")).unwrap();
                found.push(support::path(relative).to_owned());
            }
        }
    }
    found.sort();
    assert!(found.len() >= 8, "{found:?}");
    found
}

fn deploy(directory: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(directory)
}

fn apply(cluster: &Cluster, directory: &Path) -> Output {
    cluster.kubectl(&["apply", "--server-side", "--validate=strict", "-k", path(directory)])
}

fn apply_base(cluster: &Cluster) {
    stdout_of(apply(cluster, &deploy("base")));
}

/// Applies the base without anything that a sidecar has written.
fn apply_fresh_base(cluster: &Cluster) {
    let secret = "secret/csi-loopback-metadata-tls";
    stdout_of(cluster.kubectl(&["delete", "--ignore-not-found", "-n", NAMESPACE, secret]));
    stdout_of(cluster.kubectl(&[
        "delete",
        "--ignore-not-found",
        "snapshotmetadataservice",
        DRIVER,
    ]));
    apply_base(cluster);
}

/// A directory with a component, as in an overlay. Kustomize requires relative paths. A component
/// outside of deploy/ has an absolute path.
fn overlay(cluster: &Cluster, directory: &str, component: &str) -> PathBuf {
    let overlay = cluster.scratch().join(format!("with-{component}")).join("overlay");
    std::fs::create_dir_all(&overlay).unwrap();
    let overlay = overlay.canonicalize().unwrap();
    let up = "../".repeat(overlay.components().count() - 1);
    let at = |target: PathBuf| format!("{up}{}", path(&target).trim_start_matches('/'));
    let text = json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization",
        "resources": [at(deploy(directory))], "components": [at(deploy("components").join(component))],
    });
    std::fs::write(overlay.join("kustomization.yaml"), text.to_string()).unwrap();
    overlay
}

/// The objects of a directory, as the API server returns them.
fn objects(cluster: &Cluster, directory: &str) -> Vec<Value> {
    let list = stdout_of(cluster.kubectl(&["get", "-o", "json", "-k", path(&deploy(directory))]));
    let mut list: Value = serde_json::from_str(&list).unwrap();
    match list["items"].take() {
        Value::Array(items) => items,
        // kubectl prints a single object without a list.
        _ => {
            list.as_object_mut().unwrap().remove("items");
            vec![list]
        }
    }
}

fn account(namespace: &str, name: &str) -> Account {
    Account { namespace: namespace.to_owned(), name: name.to_owned() }
}

fn sidecar() -> Account {
    account(NAMESPACE, "csi-loopback-metadata")
}

#[test]
#[ignore = "full tier"]
fn every_manifest_applies_and_reapplies_without_a_change() {
    let Some(cluster) = shared() else { return };
    for directory in directories() {
        let applied = || {
            stdout_of(apply(cluster, &deploy(&directory)));
            let mut found = objects(cluster, &directory);
            for object in &mut found {
                // The generation counts writes, including those that only change the owner of a
                // field.
                object["metadata"].as_object_mut().unwrap().remove("resourceVersion");
            }
            found
        };
        let first = applied();
        assert!(!first.is_empty(), "{directory}");
        // Controllers update objects with a status at any time.
        let spec = |objects: Vec<Value>| -> Vec<Value> {
            let without = |mut object: Value| {
                if object["kind"] == "APIService" {
                    object.as_object_mut().unwrap().remove("status");
                    object["metadata"].as_object_mut().unwrap().remove("managedFields");
                }
                object
            };
            objects.into_iter().map(without).collect()
        };
        assert_eq!(spec(applied()), spec(first), "{directory}");
        aggregated::without_api_service(cluster);
        admission::without_webhooks(cluster);
    }
}

// --- The definition -------------------------------------------------------------------------------

fn service(name: &str, change: impl FnOnce(&mut Value)) -> Value {
    let mut object = json!({
        "apiVersion": "cbt.storage.k8s.io/v1beta1", "kind": "SnapshotMetadataService",
        "metadata": { "name": name },
        "spec": { "address": "metadata.csi.svc:6443", "audience": "backup", "caCert": "YQ==" },
    });
    change(&mut object["spec"]);
    object
}

/// The API server's response to a SnapshotMetadataService, by a dry run.
fn verdict(cluster: &Cluster, change: impl FnOnce(&mut Value)) -> Result<(), String> {
    let object = service("d.example", change);
    let api: Api<kube::api::DynamicObject> = Api::all_with(
        cluster.client(),
        &kube::api::ApiResource::erase::<SnapshotMetadataService>(&()),
    );
    let params = PatchParams { dry_run: true, ..PatchParams::apply("test").validation_strict() };
    let answer = cluster.block_on(api.patch("d.example", &params, &Patch::Apply(&object)));
    answer.map(|_| ()).map_err(|error| error.to_string())
}

#[test]
fn the_definition_accepts_valid_services_only() {
    let Some(cluster) = shared() else { return };
    let long_host = "h".repeat(253);
    for address in [
        // As in the examples of the released sidecar.
        "external-snapshot-metadata.csi-driver:6443",
        "csi-snapshot-metadata.default:6443",
        "host:1",
        "10.0.0.1:65535",
        "[fd00::1]:6443",
        &format!("{long_host}:60000"),
    ] {
        assert_eq!(verdict(cluster, |spec| spec["address"] = json!(address)), Ok(()), "{address}");
    }
    for address in [
        "",
        "host",
        "host:",
        ":6443",
        "host:0",
        "host:65536",
        "host:99999",
        "host:06443",
        "host:six",
        "https://host:6443",
        "host:6443/path",
        "ho st:6443",
        "fd00::1:6443",
        "[]:1",
        "host:6443\n",
        &format!("{long_host}hhhh:60000"),
    ] {
        let refused = verdict(cluster, |spec| spec["address"] = json!(address));
        assert!(refused.is_err_and(|why| why.contains("spec.address")), "{address:?}");
    }
    let message =
        verdict(cluster, |spec| spec["address"] = json!("https://host:6443")).unwrap_err();
    assert!(message.contains("must be host:port with no scheme"), "{message}");

    for (field, good, bad) in [
        ("audience", json!("x".repeat(1024)), json!("")),
        ("audience", json!("d1f84679-cf5b-42f0-bad7-5567e86e268b"), json!("x".repeat(1025))),
        ("caCert", json!("dGhpcyBpcyB0ZXh0IGNhIGNlcnQK"), json!("")),
        ("caCert", json!("A".repeat(400_000)), json!("A".repeat(524_292))),
        ("caCert", json!("YQ=="), json!("no base64!")),
        ("requireBaseSnapshotForDelta", json!(false), json!("no")),
    ] {
        assert_eq!(verdict(cluster, |spec| spec[field] = good.clone()), Ok(()), "{field}");
        let refused = verdict(cluster, |spec| spec[field] = bad.clone());
        assert!(refused.is_err_and(|why| why.contains(field)), "{field}: {bad}");
    }
    for field in ["address", "audience", "caCert"] {
        let refused = verdict(cluster, |spec| drop(spec.as_object_mut().unwrap().remove(field)));
        assert!(refused.is_err_and(|why| why.contains(field)), "{field}");
    }
    assert!(verdict(cluster, |spec| spec["adress"] = json!("a misspelt field")).is_err());

    let definition = stdout_of(cluster.kubectl(&["get", "crd", "snapshotmetadataservices.cbt.storage.k8s.io",
        "-o", "jsonpath={.spec.scope} {.spec.names.shortNames[*]} {.metadata.annotations.api-approved\\.kubernetes\\.io}"]));
    let approved = "https://github.com/kubernetes-csi/external-snapshot-metadata/pull/2";
    assert_eq!(definition, format!("Cluster sms {approved}"));
}
