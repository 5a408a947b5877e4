//! Installs the aggregated API server from deploy/, uninstalls it by docs/guide/install.md, and
//! installs it again. The cluster is separate, since an APIService exists once.

use support::cluster::shared;
use support::driver::binary;

use std::path::Path;
use std::process::{Command, Output};

use serde_json::json;
use support::cluster::Cluster;
use support::cluster::access::Account;
use support::cluster::aggregated::API_SERVICE;
use support::cluster::everything::everything;
use support::cluster::programs::{Process, free_port, stdout_of};
use support::path;

const NAMESPACE: &str = "csi-loopback-aggregated";
/// Name of all its objects.
const NAME: &str = "csi-loopback-aggregated-api";

fn manifests() -> String {
    path(&Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/aggregated-api")).to_owned()
}

/// The server of the manifests, as a process.
fn start(cluster: &Cluster) -> Process {
    let port = free_port();
    // It is not a pod here: the Service is a name.
    let service = json!({ "spec": { "type": "ExternalName", "externalName": "localhost", "selector": null } });
    let patch = |kind: &str, name: &str, patch: serde_json::Value| {
        let line = ["patch", kind, name, "-n", NAMESPACE, "--type=merge", "-p", &patch.to_string()];
        stdout_of(cluster.kubectl(&line));
    };
    patch("service", NAME, service);
    patch("apiservice", API_SERVICE, json!({ "spec": { "service": { "port": port } } }));
    let account = Account { namespace: NAMESPACE.into(), name: NAME.into() };
    let kubeconfig = cluster.kubeconfig_of(&account);
    let mut command = Command::new(binary());
    command
        .args(["--mode", "aggregated-api", "--kubeconfig", path(&kubeconfig)])
        .args(["--namespace", NAMESPACE, "--port", &port.to_string()])
        .args(["--http-endpoint", &format!("127.0.0.1:{}", free_port())])
        .args(["--self-signed", "--self-signed-secret", "csi-loopback-aggregated-api-ca"])
        .args(["--service-address", &format!("{NAME}.{NAMESPACE}.svc:{port}")]);
    Process::spawn(&cluster.unique(NAME), command, cluster.scratch())
}

/// kubectl's output for a delta of nonexistent snapshots.
fn ask(cluster: &Cluster) -> String {
    let object = json!({
        "apiVersion": "cbt.storage.k8s.io/v1alpha1", "kind": "VolumeSnapshotDelta",
        "metadata": { "name": "delta", "namespace": "default" },
        "spec": { "targetVolumeSnapshotName": "nowhere" },
    });
    let file = cluster.write("delta", &object.to_string());
    let Output { status, stderr, .. } = cluster.kubectl(&["create", "-f", path(&file)]);
    assert!(!status.success());
    String::from_utf8(stderr).unwrap()
}

#[test]
#[ignore = "full tier"]
fn the_aggregated_api_can_be_removed_and_installed_again() {
    let Some(cluster) = shared() else { return };
    let before = cluster.wait_for("all kinds", || everything(cluster));
    for _ in 0..2 {
        stdout_of(cluster.kubectl(&["apply", "--server-side", "-k", &manifests()]));
        let mut server = start(cluster);
        let available =
            ["wait", "--timeout=60s", "--for=condition=Available", "apiservice", API_SERVICE];
        stdout_of(cluster.kubectl(&available));
        cluster.wait_for("an answer", || {
            ask(cluster).contains("VolumeSnapshot default/nowhere does not exist").then_some(())
        });
        // In this order, so that no request waits for an API without a server.
        stdout_of(cluster.kubectl(&["delete", "apiservice", API_SERVICE]));
        server.stop();
        let line = ["delete", "--wait=false", "--ignore-not-found", "-k", &manifests()];
        stdout_of(cluster.kubectl(&line));
        cluster.wait_for("the API to go", || {
            let there = cluster.kubectl(&["get", "--raw", "/apis/cbt.storage.k8s.io/v1alpha1"]);
            (!there.status.success()).then_some(())
        });
        let left = cluster.wait_for("all kinds", || everything(cluster));
        let left: Vec<_> = left.difference(&before).collect();
        assert!(left.is_empty(), "{left:#?}");
        // No namespace controller completes its deletion here.
        super::end_namespace(cluster, NAMESPACE);
    }
}
