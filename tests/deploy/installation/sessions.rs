//! Uninstalls session manager and driver by docs/guide/install.md ("Uninstall"): no object remains.
//! The cluster is separate, since the definitions are deleted, too.

use support::cluster::shared;
use support::driver::binary;

use std::path::Path;
use std::process::Command;

use csi_loopback::kubernetes::metadata_service::{DRIVER_LABEL, SnapshotMetadataService};
use csi_loopback::kubernetes::session::{
    FINALIZER, REQUEST_LABEL, SnapshotServiceConfiguration, SnapshotSessionData,
    SnapshotSessionRequest,
};
use kube::Api;
use serde_json::json;
use support::cluster::access::Account;
use support::cluster::everything::everything;
use support::cluster::manager::{self, Start};
use support::cluster::programs::{finish, stdout_of};
use support::path;

const DRIVER: &str = "loopback.csi.local";
const MANAGERS: &str = "csi-loopback-sessions";
/// Name of all objects of the manager.
const MANAGER: &str = "csi-loopback-session-manager";
/// The driver's namespace.
const NAMESPACE: &str = "csi-loopback";
const TOKEN: &str = "abcdefghijklmnopqrstuvwxyz234567abcdefghijklmnopqrst";

fn deploy(directory: &str) -> String {
    path(&Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(directory)).to_owned()
}

#[test]
#[ignore = "full tier"]
fn uninstalling_by_the_documentation_leaves_no_object() {
    let Some(cluster) = shared() else { return };
    let before = cluster.wait_for("all kinds", || everything(cluster));
    let crds = deploy("crds");
    // The cluster has the definitions; installing them here lets the test delete them.
    stdout_of(cluster.kubectl(&["apply", "--server-side", "-f", &crds]));
    for directory in ["base", "session-manager"] {
        stdout_of(cluster.kubectl(&["apply", "--server-side", "-k", &deploy(directory)]));
    }
    let account = Account { namespace: MANAGERS.into(), name: MANAGER.into() };
    let kubeconfig = cluster.kubeconfig_of(&account);
    let flags = ["--self-signed-secret", "csi-loopback-session-manager-tls"];
    let start = Start { kubeconfig: &kubeconfig, namespace: MANAGERS, flags: &flags, ahead: None };
    let manager = manager::spawn(cluster, &start);
    cluster.wait_for("a leading manager", || manager::leads(&manager).then_some(()));

    // What a sidecar stores, and two sessions: one ends while the manager runs, one after it has
    // ended.
    cluster.create(
        &cluster.api::<SnapshotMetadataService>(),
        json!({
            "metadata": { "name": DRIVER },
            "spec": { "address": "a:1", "audience": "a", "caCert": "YQ==" },
        }),
    );
    cluster.create(
        &cluster.api::<SnapshotServiceConfiguration>(),
        json!({
            "metadata": { "name": DRIVER, "labels": { DRIVER_LABEL: DRIVER } },
            "spec": { "address": "a:1", "driverNamespace": NAMESPACE, "caCert": "YQ==" },
        }),
    );
    let apps = "default";
    let requests: Api<SnapshotSessionRequest> = cluster.api_in(apps);
    let webhook = ["patch", "validatingwebhookconfiguration", MANAGER, "--type=json", "-p"];
    let url = format!("https://localhost:{}/validate-snapshotsessionrequest", manager.port);
    let there = json!([
        { "op": "remove", "path": "/webhooks/0/clientConfig/service" },
        { "op": "add", "path": "/webhooks/0/clientConfig/url", "value": url },
    ]);
    stdout_of(cluster.kubectl(&[&webhook[..], &[&there.to_string()]].concat()));
    let all: Api<SnapshotSessionData> = cluster.api_in(NAMESPACE);
    let session = |name: &str, token: &str| {
        let request: SnapshotSessionRequest = serde_json::from_value(json!({
            "apiVersion": "cbt.storage.k8s.io/v1alpha2", "kind": "SnapshotSessionRequest",
            "metadata": { "name": name, "finalizers": [FINALIZER] },
            "spec": { "snapshots": ["monday"] },
        }))
        .unwrap();
        let made = cluster.wait_for("the webhook", || {
            cluster.block_on(requests.create(&Default::default(), &request)).ok()
        });
        let uid = made.metadata.uid;
        let data = json!({
            "metadata": { "name": token, "labels": { REQUEST_LABEL: uid } },
            "spec": {
                "driver": DRIVER, "expirationTime": "2030-01-01T00:00:00Z",
                "request": { "namespace": apps, "name": name, "uid": uid },
                "snapshots": [{ "namespace": apps, "name": "monday", "uid": "u", "handle": "h" }],
            },
        });
        cluster.create(&all, data);
    };
    session("ends", &TOKEN.replace('a', "c"));

    let delete =
        |what: &[&str]| stdout_of(cluster.kubectl(&[&["delete", "--wait=false"], what].concat()));
    delete(&["snapshotsessionrequests", "--all", "--all-namespaces"]);
    cluster.wait_until_gone(&requests, "ends");
    session("left", TOKEN);
    drop(manager);
    let mut clean_up = Command::new(binary());
    clean_up.args(["--mode", "session-manager", "--clean-up", "--kubeconfig"]);
    clean_up.arg(cluster.kubeconfig());
    stdout_of(finish(clean_up));
    delete(&["-k", &deploy("session-manager")]);
    delete(&["-k", &deploy("base")]);
    delete(&["snapshotmetadataservice,snapshotserviceconfiguration", DRIVER]);
    assert!(cluster.get(&cluster.api::<SnapshotServiceConfiguration>(), DRIVER).is_none());
    delete(&["-f", &crds]);
    let left = cluster.wait_for("the definitions to go", || {
        let now = everything(cluster)?;
        let definitions = now.iter().any(|one| one.contains(".cbt.storage.k8s.io"));
        (!definitions).then_some(now)
    });
    let left: Vec<_> = left.difference(&before).collect();
    assert!(left.is_empty(), "{left:#?}");

    // Restores the state that other tests expect.
    for namespace in [NAMESPACE, MANAGERS] {
        super::end_namespace(cluster, namespace);
    }
    stdout_of(cluster.kubectl(&["apply", "--server-side", "-f", &crds]));
    stdout_of(cluster.kubectl(&["wait", "--for=condition=Established", "-f", &crds]));
}
