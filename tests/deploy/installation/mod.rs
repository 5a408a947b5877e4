//! Installs parts of deploy/ and uninstalls them by docs/guide/install.md: no object remains.
//! libtest runs tests in the order of their names: these run before those of `manifests`, whose
//! objects remain.

mod admission;
mod aggregated;
mod sessions;

use serde_json::{Value, json};
use support::cluster::Cluster;
use support::cluster::programs::stdout_of;
use support::path;

/// Completes the deletion of a namespace, in place of the controller that does not run here.
fn end_namespace(cluster: &Cluster, name: &str) {
    let found = stdout_of(cluster.kubectl(&["get", "namespace", name, "-o", "json"]));
    let mut namespace: Value = serde_json::from_str(&found).unwrap();
    namespace["spec"]["finalizers"] = json!([]);
    let file = cluster.write("namespace", &namespace.to_string());
    let finalize = format!("/api/v1/namespaces/{name}/finalize");
    stdout_of(cluster.kubectl(&["replace", "--raw", &finalize, "-f", path(&file)]));
}
