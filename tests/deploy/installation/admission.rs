//! Installs the webhooks for inline volumes from deploy/admission, stops them, uninstalls them by
//! docs/guide/install.md ("Uninstall"), and installs them again, with the rights and the Service of
//! the manifests. The cluster is separate and otherwise empty.

use support::cluster::shared;
use support::driver::binary;

use std::path::Path;
use std::process::Command;

use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::PostParams;
use serde_json::{Value, json};
use support::cluster::Cluster;
use support::cluster::access::Account;
use support::cluster::everything::everything;
use support::cluster::programs::{Process, free_port, stdout_of};
use support::path;

/// Namespace of the webhooks, and name of all their objects.
const NAME: &str = "csi-loopback-admission";
const CONFIGURATIONS: &str = "mutatingwebhookconfiguration,validatingwebhookconfiguration";

fn manifests(directory: &str) -> String {
    path(&Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(directory)).to_owned()
}

/// The webhooks of the manifests, as a process.
fn start(cluster: &Cluster) -> Process {
    let port = free_port();
    // They are not pods here: the Service is a name.
    let service = json!({ "spec": {
        "type": "ExternalName", "externalName": "localhost", "selector": null, "clusterIP": null, "clusterIPs": null,
    } });
    let service = service.to_string();
    let patch = ["patch", "service", NAME, "-n", NAME, "--type=merge", "-p", &service];
    stdout_of(cluster.kubectl(&patch));
    for (kind, webhooks) in
        [("mutatingwebhookconfiguration", 1), ("validatingwebhookconfiguration", 2)]
    {
        let each = (0..webhooks).map(|at| {
            let path = format!("/webhooks/{at}/clientConfig/service/port");
            json!({ "op": "replace", "path": path, "value": port })
        });
        let each = Value::from_iter(each).to_string();
        stdout_of(cluster.kubectl(&["patch", kind, NAME, "--type=json", "-p", &each]));
    }
    let account = Account { namespace: NAME.into(), name: NAME.into() };
    let kubeconfig = cluster.kubeconfig_of(&account);
    let mut command = Command::new(binary());
    command
        .args(["--mode", "admission", "--kubeconfig", path(&kubeconfig)])
        .args(["--namespace", NAME, "--port", &port.to_string()])
        .args(["--http-endpoint", &format!("127.0.0.1:{}", free_port())])
        .args(["--self-signed", "--self-signed-secret", "csi-loopback-admission-tls"])
        .args(["--service-address", &format!("{NAME}.{NAME}.svc:{port}")]);
    Process::spawn(&cluster.unique(NAME), command, cluster.scratch())
}

/// The response to a pod with this volume, by a dry run.
fn pod(cluster: &Cluster, volume: &Value) -> Result<Pod, String> {
    let pod = json!({
        "metadata": { "name": "p" },
        "spec": {
            "automountServiceAccountToken": false,
            "containers": [{ "name": "c", "image": "i", "volumeMounts": [{ "name": "v", "mountPath": "/v" }] }],
            "volumes": [volume],
        },
    });
    let pod = serde_json::from_value(pod).unwrap();
    let params = PostParams { dry_run: true, ..PostParams::default() };
    let pods: Api<Pod> = cluster.api_in("default");
    cluster.block_on(pods.create(&params, &pod)).map_err(|error| error.to_string())
}

/// A volume with a file that only the driver writes.
fn content() -> Value {
    let attributes = json!({ "content/a": "text" });
    json!({ "name": "v", "csi": { "driver": "loopback.csi.local", "volumeAttributes": attributes } })
}

fn is_read_only(pod: &Pod) -> bool {
    let spec = pod.spec.as_ref().unwrap();
    let mount = &spec.containers[0].volume_mounts.as_ref().unwrap()[0];
    let volume = spec.volumes.as_ref().unwrap()[0].csi.as_ref().unwrap();
    mount.read_only == Some(true) && volume.read_only == Some(true)
}

#[test]
#[ignore = "full tier"]
fn uninstalled_webhooks_leave_nothing_and_block_no_pod() {
    let Some(cluster) = shared() else { return };
    let account = json!({ "metadata": { "name": "default" } });
    cluster
        .create(&cluster.api_in::<k8s_openapi::api::core::v1::ServiceAccount>("default"), account);
    let before = cluster.wait_for("all kinds", || everything(cluster));
    // The driver's object, which has the level that its volumes need.
    let driver = Path::new(&manifests("base")).join("csi-driver.yaml");
    let secret = json!({ "name": "v", "secret": { "secretName": "s" } });
    for _ in 0..2 {
        stdout_of(cluster.kubectl(&["apply", "--server-side", "-f", path(&driver)]));
        stdout_of(cluster.kubectl(&["apply", "--server-side", "-k", &manifests("admission")]));
        let mut webhooks = start(cluster);
        cluster.wait_for("the webhooks answer", || {
            pod(cluster, &content()).is_ok_and(|pod| is_read_only(&pod)).then_some(())
        });
        let unknown = json!({ "name": "v", "csi": {
            "driver": "loopback.csi.local", "volumeAttributes": { "colour": "red" },
        }});
        cluster.wait_for("the other webhook answers", || {
            let message = pod(cluster, &unknown).err()?;
            message.contains("colour").then_some(())
        });

        webhooks.stop();
        let message = pod(cluster, &content()).unwrap_err();
        assert!(message.contains("failed calling webhook"), "{message}");
        assert!(pod(cluster, &secret).is_ok(), "a pod without inline volumes is accepted");

        stdout_of(cluster.kubectl(&["delete", CONFIGURATIONS, NAME]));
        cluster.wait_for("pods without webhooks", || {
            pod(cluster, &content()).is_ok_and(|pod| !is_read_only(&pod)).then_some(())
        });
        let delete = ["delete", "--wait=false", "--ignore-not-found"];
        stdout_of(cluster.kubectl(&[&delete[..], &["-k", &manifests("admission")]].concat()));
        stdout_of(cluster.kubectl(&[&delete[..], &["-f", path(&driver)]].concat()));
        let left = cluster.wait_for("all kinds", || everything(cluster));
        let left: Vec<_> = left.difference(&before).collect();
        assert!(left.is_empty(), "{left:#?}");
        // No namespace controller completes its deletion here.
        super::end_namespace(cluster, NAME);
    }
}
