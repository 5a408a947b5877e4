//! `node forget`: the objects of a node that is gone. The test writes the objects that the
//! controllers of nodes write, because no kubelet runs.

use std::process::{Command, Output};

use csi_loopback::kubernetes::snapshot::{MANAGED_BY, VolumeSnapshotContent};
use k8s_openapi::api::core::v1::{Node, PersistentVolume};
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use support::cluster::access::{Account, rule};
use support::cluster::{Cluster, shared};
use support::driver::binary;
use support::path;

const PROVISIONER: &str = "external-provisioner.volume.kubernetes.io/finalizer";
const SNAPSHOTTER: &str = "snapshot.storage.kubernetes.io/volumesnapshotcontent-bound-protection";
/// Ends with the claim.
const CLAIM: &str = "kubernetes.io/pv-protection";

struct Rig<'a> {
    cluster: &'a Cluster,
    driver: String,
    gone: String,
    account: Account,
}

impl<'a> Rig<'a> {
    fn new(cluster: &'a Cluster) -> Self {
        let namespace = cluster.namespace("forget");
        let account = cluster.account(&namespace, "admin");
        let change = ["list", "get", "delete", "patch"];
        // As docs/guide/many-nodes.md has them.
        let rules = [
            rule("", &["nodes"], &["get"]),
            rule("", &["persistentvolumes"], &change),
            rule("snapshot.storage.k8s.io", &["volumesnapshotcontents"], &change),
        ];
        cluster.grant(&account, &rules);
        let gone = cluster.unique("gone");
        Self { cluster, driver: format!("{gone}.csi.local"), gone, account }
    }

    /// A volume at these nodes, used by the claim `shop/data`.
    fn volume(&self, name: &str, driver: &str, nodes: &[&str]) -> String {
        let name = format!("{}-{name}", self.gone);
        let term = json!({ "matchExpressions": [
            { "key": format!("topology.{driver}/node"), "operator": "In", "values": nodes },
        ]});
        let object = json!({
            "metadata": { "name": name, "finalizers": [PROVISIONER, "external-attacher/x", CLAIM] },
            "spec": {
                "capacity": { "storage": "1Mi" },
                "accessModes": ["ReadWriteOnce"],
                "csi": { "driver": driver, "volumeHandle": name },
                "claimRef": { "namespace": "shop", "name": "data" },
                "nodeAffinity": { "required": { "nodeSelectorTerms": [term] } },
            },
        });
        self.cluster.create(&self.cluster.api::<PersistentVolume>(), object);
        name
    }

    fn content(&self, name: &str, driver: &str, node: &str) -> String {
        let name = format!("{}-{name}", self.gone);
        let object = json!({
            "metadata": { "name": name, "labels": { MANAGED_BY: node }, "finalizers": [SNAPSHOTTER] },
            "spec": {
                "driver": driver,
                "deletionPolicy": "Delete",
                "source": { "snapshotHandle": name },
                "volumeSnapshotRef": { "namespace": "shop", "name": "monday" },
            },
        });
        self.cluster.create(&self.cluster.api::<VolumeSnapshotContent>(), object);
        name
    }

    fn forget(&self, flags: &[&str]) -> Output {
        let kubeconfig = self.cluster.kubeconfig_of(&self.account);
        Command::new(binary())
            .args(["node", "forget", &self.gone, "--driver-name", &self.driver, "--output", "json"])
            .args(["--kubeconfig", path(&kubeconfig)])
            .args(flags)
            .output()
            .unwrap()
    }

    /// Kind, name, user and state of each object in the result.
    fn forgotten(&self, flags: &[&str]) -> Vec<[String; 4]> {
        let output = self.forget(flags);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{errors}");
        let rows: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
        let text = |row: &Value, key: &str| row[key].as_str().unwrap_or_default().to_owned();
        rows.iter()
            .map(|row| ["kind", "name", "used_by", "state"].map(|key| text(row, key)))
            .collect()
    }

    /// The finalizers of a volume, and whether its deletion was requested.
    fn state(&self, volume: &str) -> Option<(Vec<String>, bool)> {
        let found = self.cluster.get(&self.cluster.api::<PersistentVolume>(), volume)?;
        Some((found.finalizers().to_vec(), found.metadata.deletion_timestamp.is_some()))
    }
}

#[test]
fn only_objects_of_the_gone_node_are_removed() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let (gone, driver) = (rig.gone.clone(), rig.driver.clone());
    let volume = rig.volume("volume", &driver, &[&gone]);
    let others = [
        rig.volume("at-another", &driver, &["another"]),
        rig.volume("at-two", &driver, &[&gone, "another"]),
        rig.volume("of-another-driver", "other.csi.local", &[&gone]),
    ];
    let content = rig.content("content", &driver, &gone);
    let other_contents = [
        rig.content("content-at-another", &driver, "another"),
        rig.content("content-of-another-driver", "other.csi.local", &gone),
    ];
    let (contents, nodes) = (cluster.api::<VolumeSnapshotContent>(), cluster.api::<Node>());
    let before = others.each_ref().map(|name| rig.state(name).unwrap());
    let rows = |state: [&str; 2]| {
        [
            ["VolumeSnapshotContent", &content, "shop/monday", state[0]].map(str::to_owned),
            ["PersistentVolume", &volume, "shop/data", state[1]].map(str::to_owned),
        ]
    };

    // While its Node exists, nothing is done.
    cluster.create(&nodes, json!({ "metadata": { "name": gone } }));
    for flags in [&[][..], &["--confirm"]] {
        let output = rig.forget(flags);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && errors.contains("kubectl delete node"), "{errors}");
        assert!(output.stdout.is_empty());
    }
    cluster.delete(&nodes, &gone);

    // Without --confirm it only shows.
    assert_eq!(rig.forgotten(&[]), rows(["found", "found"]));
    let all = [PROVISIONER, "external-attacher/x", CLAIM].map(str::to_owned);
    assert_eq!(rig.state(&volume), Some((all.to_vec(), false)));
    assert!(cluster.get(&contents, &content).unwrap().metadata.deletion_timestamp.is_none());

    // A volume in use goes with its claim.
    assert_eq!(rig.forgotten(&["--confirm"]), rows(["removed", "deleting"]));
    assert!(cluster.get(&contents, &content).is_none());
    assert_eq!(rig.forgotten(&["--confirm"]), rows(["", "deleting"])[1..]);
    assert_eq!(rig.state(&volume), Some((vec![CLAIM.to_owned()], true)));
    let patch = Patch::Merge(json!({ "metadata": { "finalizers": [] } }));
    let volumes = cluster.api::<PersistentVolume>();
    cluster.block_on(volumes.patch(&volume, &PatchParams::default(), &patch)).unwrap();
    assert_eq!(rig.state(&volume), None);
    assert!(rig.forgotten(&["--confirm"]).is_empty());

    assert_eq!(others.each_ref().map(|name| rig.state(name).unwrap()), before);
    for name in &other_contents {
        let found = cluster.get(&contents, name).unwrap();
        assert!(found.metadata.deletion_timestamp.is_none() && !found.finalizers().is_empty());
    }
}
