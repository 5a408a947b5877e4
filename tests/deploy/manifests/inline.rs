//! What KEP-596 requires of the API server: the fields of an inline volume, and the lifecycle modes
//! of a CSIDriver object.

use serde_json::{Value, json};
use support::cluster::shared;

use super::admission::{inline, namespace_for_pods, pod, without_webhooks};
use super::pods::{are_known, only};
use super::{DRIVER, apply, deploy, objects};
use support::cluster::Cluster;
use support::cluster::programs::stdout_of;
use support::path;

/// The API server's response to an object with strict field validation, by a dry run.
fn strictly(cluster: &Cluster, namespace: &str, object: &Value) -> Result<(), String> {
    let file = cluster.write("object.json", &object.to_string());
    let create = ["create", "--validate=strict", "--dry-run=server", "-n", namespace, "-f"];
    let output = cluster.kubectl(&[&create[..], &[path(&file)]].concat());
    let message = String::from_utf8(output.stderr).unwrap();
    if output.status.success() { Ok(()) } else { Err(message) }
}

/// A change of a volume's `csi`.
type Change<'c> = &'c dyn Fn(&mut Value);

#[test]
fn an_inline_volume_has_the_proposals_fields_and_no_handle() {
    let Some(cluster) = shared() else { return };
    without_webhooks(cluster);
    let here = namespace_for_pods(cluster);
    let with = |change: Change| {
        let mut object = pod(&inline(DRIVER));
        change(&mut object["spec"]["volumes"][1]["csi"]);
        strictly(cluster, &here, &object)
    };
    assert_eq!(with(&|_| ()), Ok(()));
    let all = |csi: &mut Value| {
        csi["readOnly"] = json!(true);
        csi["fsType"] = json!("xfs");
        csi["volumeAttributes"] = json!({ "size": "1Gi", "content/a": "" });
        csi["nodePublishSecretRef"] = json!({ "name": "identity" });
    };
    assert_eq!(with(&all), Ok(()));
    assert_eq!(with(&|csi| drop(csi.as_object_mut().unwrap().remove("volumeAttributes"))), Ok(()));
    let refused: [(&str, Change); 4] = [
        ("csi.driver", &|csi| csi["driver"] = json!("")),
        // kubelet chooses the handle; a pod cannot.
        ("volumeHandle", &|csi| csi["volumeHandle"] = json!("csi-0")),
        ("nodePublishSecretRef.name", &|csi| csi["nodePublishSecretRef"] = json!({ "name": "" })),
        // A secret of the pod's namespace.
        ("namespace", &|csi| {
            csi["nodePublishSecretRef"] = json!({ "name": "identity", "namespace": "default" });
        }),
    ];
    for (named, change) in refused {
        let message = with(change);
        assert!(
            message.as_ref().is_err_and(|message| message.contains(named)),
            "{named}: {message:?}"
        );
    }
}

#[test]
fn lifecycle_modes_of_a_driver_are_validated_and_immutable() {
    let Some(cluster) = shared() else { return };
    let driver = |modes: &Value| {
        let mut object = json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver",
            "metadata": { "name": "modes.example" }, "spec": { "podInfoOnMount": true },
        });
        if !modes.is_null() {
            object["spec"]["volumeLifecycleModes"] = modes.clone();
        }
        object
    };
    for modes in [
        Value::Null,
        json!([]),
        json!(["Persistent"]),
        json!(["Ephemeral"]),
        json!(["Persistent", "Ephemeral"]),
    ] {
        assert_eq!(strictly(cluster, "default", &driver(&modes)), Ok(()), "{modes}");
    }
    let message = strictly(cluster, "default", &driver(&json!(["Ephemeral", "ephemeral"])));
    assert!(
        message.as_ref().is_err_and(|message| message.contains("Unsupported value: \"ephemeral\"")),
        "{message:?}"
    );

    // The field is immutable, hence the step in docs/guide/upgrade.md.
    let file = cluster.write("driver.json", &driver(&json!(["Persistent"])).to_string());
    super::stdout_of(cluster.kubectl(&["create", "-f", path(&file)]));
    let wider = json!({ "spec": { "volumeLifecycleModes": ["Persistent", "Ephemeral"] } });
    let wider = wider.to_string();
    let patch = ["patch", "csidriver", "modes.example", "--type=merge", "-p", &wider];
    let output = cluster.kubectl(&patch);
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && message.contains("immutable"), "{message}");
    super::stdout_of(cluster.kubectl(&["delete", "csidriver", "modes.example"]));
}

#[test]
fn inline_volumes_are_served_on_every_node_without_controllers() {
    let Some(cluster) = shared() else { return };
    stdout_of(apply(cluster, &deploy("inline")));
    let all = objects(cluster, "inline");
    let kinds: Vec<&str> = all.iter().map(|object| object["kind"].as_str().unwrap()).collect();
    for kind in &kinds {
        let expected = ["Namespace", "CSIDriver", "DaemonSet", "NetworkPolicy"];
        assert!(expected.contains(kind), "{kinds:?}: no controller, class or right");
    }
    let driver = only(&all, "CSIDriver");
    let name = driver["metadata"]["name"].as_str().unwrap();
    assert_eq!(driver["spec"]["volumeLifecycleModes"], json!(["Ephemeral"]));
    assert_eq!(driver["spec"]["podInfoOnMount"], json!(true));
    let pod = &only(&all, "DaemonSet")["spec"]["template"]["spec"];
    assert!(pod["nodeSelector"].is_null(), "every node");
    assert_eq!(pod["tolerations"], json!([{ "operator": "Exists" }]));
    let containers = pod["containers"].as_array().unwrap();
    let names: Vec<_> = containers.iter().map(|one| one["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["driver", "node-driver-registrar"]);
    are_known("inline: driver", &containers[0]);
    let arguments = containers[0]["args"].to_string();
    assert!(arguments.contains(&format!("--driver-name={name}")), "{arguments}");
    let registered = format!("/var/lib/kubelet/plugins/{name}/csi.sock");
    assert!(containers[1]["args"].to_string().contains(&registered));
}
