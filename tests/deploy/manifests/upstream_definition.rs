//! deploy/crds-upstream: the definition of SnapshotMetadataService, which belongs to
//! external-snapshot-metadata. Clusters may have the released one, with objects of other drivers.

use std::fs;

use serde_json::{Value, json};
use support::cluster::programs::stdout_of;
use support::cluster::{Cluster, shared};
use support::path;

use super::deploy;

const FILE: &str = "cbt.storage.k8s.io_snapshotmetadataservices.yaml";

fn read(file: &std::path::Path) -> Value {
    serde_saphyr::from_str(&fs::read_to_string(file).unwrap()).unwrap()
}

/// Fails if `ours` rejects what `theirs` accepts.
fn accepts(ours: &Value, theirs: &Value, at: &str) {
    for (key, value) in ours.as_object().unwrap() {
        match key.as_str() {
            "description" | "title" => {}
            "required" => {
                let required = theirs[key].as_array().unwrap();
                for name in value.as_array().unwrap() {
                    assert!(required.contains(name), "{at} requires {name}");
                }
            }
            // The released definition drops other fields, without a look at them.
            "properties" => {
                for (name, theirs) in theirs[key].as_object().unwrap() {
                    // The API server knows those of every object.
                    if !(at.is_empty()
                        && ["apiVersion", "kind", "metadata"].contains(&name.as_str()))
                    {
                        accepts(&value[name], theirs, &format!("{at}.{name}"));
                    }
                }
            }
            _ => assert_eq!(value, &theirs[key], "{at}: {key}"),
        }
    }
}

#[test]
fn the_definition_accepts_what_the_released_one_accepts() {
    let Some(cluster) = shared() else { return };
    let ours = read(&deploy("crds-upstream").join(FILE));
    let released = cluster.tool("crds/external-snapshot-metadata").join(FILE);
    let theirs = read(&released);
    assert_eq!(ours["metadata"]["name"], theirs["metadata"]["name"]);
    for field in ["group", "scope"] {
        assert_eq!(ours["spec"][field], theirs["spec"][field]);
    }
    for field in ["kind", "plural", "singular", "shortNames"] {
        assert_eq!(ours["spec"]["names"][field], theirs["spec"]["names"][field]);
    }
    let ours = ours["spec"]["versions"].as_array().unwrap();
    for theirs in theirs["spec"]["versions"].as_array().unwrap() {
        let ours = ours.iter().find(|one| one["name"] == theirs["name"]).unwrap();
        assert_eq!((&ours["served"], &ours["storage"]), (&theirs["served"], &theirs["storage"]));
        let schema = |version: &Value| version["schema"]["openAPIV3Schema"].clone();
        accepts(&schema(ours), &schema(theirs), "");
    }

    // Values that only a client can judge.
    let mut service = json!({
        "apiVersion": "cbt.storage.k8s.io/v1beta1", "kind": "SnapshotMetadataService",
        "metadata": { "name": cluster.unique("other-driver") },
        "spec": { "address": "dns:///metadata.csi.svc:6443", "audience": "", "caCert": "YQ==" },
    });
    let mut apply = || {
        let file = cluster.write("service", &service.to_string());
        service["spec"]["caCert"] = json!("no base64!");
        cluster.kubectl(&["apply", "--server-side", "--dry-run=server", "-f", path(&file)])
    };
    stdout_of(apply());
    assert!(!apply().status.success(), "caCert is not base64");
}

/// Replaces the definition by that of this tree, with which the cluster was started.
struct Restored<'c>(&'c Cluster);

impl Drop for Restored<'_> {
    fn drop(&mut self) {
        let restored = self.0.kubectl(&["replace", "-f", path(&deploy("crds-upstream"))]);
        println!("{}", String::from_utf8_lossy(&restored.stderr));
    }
}

/// Installation and removal of this project's definitions, in a cluster that has the released one.
#[test]
fn our_definitions_leave_the_released_one_alone() {
    let Some(cluster) = shared() else { return };
    let released = cluster.tool("crds/external-snapshot-metadata").join(FILE);
    let _restored = Restored(cluster);
    let other = ["apply", "--server-side", "--force-conflicts", "--field-manager=other-driver"];
    stdout_of(cluster.kubectl(&[&other[..], &["-f", path(&released)]].concat()));
    let definition = || {
        let name = "crd/snapshotmetadataservices.cbt.storage.k8s.io";
        stdout_of(cluster.kubectl(&["get", name, "-o", "jsonpath={.metadata.uid} {.spec}"]))
    };
    let before = definition();
    let crds = deploy("crds");
    stdout_of(cluster.kubectl(&["apply", "--server-side", "-f", path(&crds)]));
    assert_eq!(definition(), before);
    let deleted = cluster.kubectl(&["delete", "--dry-run=server", "-o", "name", "-f", path(&crds)]);
    let deleted = stdout_of(deleted);
    assert!(deleted.contains("snapshotsessionrequests"), "{deleted}");
    assert!(!deleted.contains("snapshotmetadataservices"), "{deleted}");
    // The command of docs/guide/install.md installs it only if it is absent.
    let again = cluster.kubectl(&["create", "-f", path(&deploy("crds-upstream"))]);
    assert!(String::from_utf8_lossy(&again.stderr).contains("AlreadyExists"), "{again:?}");
    assert_eq!(definition(), before);
}
