//! Tests of the manifests on an API server: every manifest applies, and a second time without a
//! change; the chart and the kustomizations are equal; and each account has the rights that its
//! calls need and no more.

use support::cluster::shared;

mod admission;
mod aggregated;
mod api_server_ip_block;
mod cert_manager;
mod chart;
mod distributed;
mod dns;
mod inline;
mod node_proxy;
mod other_driver;
mod pinned;
mod pods;
mod rights;
mod runtime;
mod session_access;
mod sessions;
mod upstream_definition;

use std::path::{Path, PathBuf};
use std::process::Output;

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

/// The objects that an apply writes.
fn dry_run(cluster: &Cluster, directory: &Path) -> Vec<Value> {
    let apply = ["apply", "--server-side", "--validate=strict", "--dry-run=server", "-o", "json"];
    let list = stdout_of(cluster.kubectl(&[&apply[..], &["-k", path(directory)]].concat()));
    let mut list: Value = serde_json::from_str(&list).unwrap();
    serde_json::from_value(list["items"].take()).unwrap()
}

/// The objects that kustomize makes of a directory.
fn kustomized(cluster: &Cluster, directory: &Path) -> Vec<Value> {
    let text = stdout_of(cluster.kubectl(&["kustomize", path(directory)]));
    text.split("\n---\n").map(|one| serde_saphyr::from_str(one).unwrap()).collect()
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

/// A directory with a component, as in an overlay. A component outside of deploy/ has an absolute
/// path.
fn overlay(cluster: &Cluster, directory: &str, component: &str) -> PathBuf {
    overlay_of(cluster, "with", directory, &[component])
}

/// A directory with components, as in an overlay. Kustomize requires relative paths.
fn overlay_of(cluster: &Cluster, name: &str, directory: &str, components: &[&str]) -> PathBuf {
    let name = [&[name, directory], components].concat().join("-").replace('/', "_");
    let overlay = cluster.scratch().join(name).join("overlay");
    std::fs::create_dir_all(&overlay).unwrap();
    let overlay = overlay.canonicalize().unwrap();
    let up = "../".repeat(overlay.components().count() - 1);
    let at = |target: PathBuf| format!("{up}{}", path(&target).trim_start_matches('/'));
    let components = components.iter().map(|one| at(deploy("components").join(one)));
    let text = json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization",
        "resources": [at(deploy(directory))], "components": components.collect::<Vec<_>>(),
    });
    std::fs::write(overlay.join("kustomization.yaml"), text.to_string()).unwrap();
    overlay
}

/// What `kubectl get` returns.
fn shown(cluster: &Cluster, what: &[&str]) -> Value {
    let text = stdout_of(cluster.kubectl(&[&["get", "-o", "json"], what].concat()));
    serde_json::from_str(&text).unwrap()
}

/// The objects of a directory, as the API server returns them.
fn objects(cluster: &Cluster, directory: &str) -> Vec<Value> {
    let mut list = shown(cluster, &["-k", path(&deploy(directory))]);
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
