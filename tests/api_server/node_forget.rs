//! `node forget`: the objects of a node that is gone. The test writes the objects that the
//! controllers of nodes write, because no kubelet runs.

use std::process::{Command, Output};

use csi_loopback::kubernetes::snapshot::{MANAGED_BY, VolumeSnapshot, VolumeSnapshotContent};
use k8s_openapi::api::core::v1::{Node, PersistentVolume};
use kube::ResourceExt;
use serde_json::{Value, json};
use support::cluster::access::{Account, rule};
use support::cluster::{Cluster, shared};
use support::driver::binary;
use support::path;

const PROVISIONER: &str = "external-provisioner.volume.kubernetes.io/finalizer";
const SNAPSHOTTER: &str = "snapshot.storage.kubernetes.io/volumesnapshotcontent-bound-protection";
/// Kubernetes removes it when the volume is unused.
const CLAIM: &str = "kubernetes.io/pv-protection";

struct Rig<'a> {
    cluster: &'a Cluster,
    driver: String,
    gone: String,
    namespace: String,
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
            rule("snapshot.storage.k8s.io", &["volumesnapshots"], &["get"]),
        ];
        cluster.grant(&account, &rules);
        let gone = cluster.unique("gone");
        Self { cluster, driver: format!("{gone}.csi.local"), gone, namespace, account }
    }

    /// A volume at these nodes, used by the claim `data`.
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
                "claimRef": { "namespace": self.namespace, "name": "data" },
                "nodeAffinity": { "required": { "nodeSelectorTerms": [term] } },
            },
        });
        self.cluster.create(&self.cluster.api::<PersistentVolume>(), object);
        self.set_phase(&name, "Bound");
        name
    }

    fn set_phase(&self, volume: &str, phase: &str) {
        let volumes = self.cluster.api::<PersistentVolume>();
        self.cluster.merge_status(&volumes, volume, &json!({ "phase": phase }));
    }

    /// A content for the VolumeSnapshot with this name.
    fn content(&self, name: &str, driver: &str, node: Option<&str>, source: Value) -> String {
        let content = format!("{}-{name}", self.gone);
        let labels = node.map(|node| json!({ MANAGED_BY: node }));
        let object = json!({
            "metadata": { "name": content, "labels": labels, "finalizers": [SNAPSHOTTER] },
            "spec": {
                "driver": driver,
                "deletionPolicy": "Delete",
                "source": source,
                "volumeSnapshotRef": { "namespace": self.namespace, "name": name },
            },
        });
        self.cluster.create(&self.cluster.api::<VolumeSnapshotContent>(), object);
        content
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

    /// Kind, name, user and state of each object in the result, and the notes.
    fn forgotten(&self, flags: &[&str], code: i32) -> (Vec<[String; 4]>, String) {
        let output = self.forget(flags);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{errors}");
        let rows: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
        let text = |row: &Value, key: &str| row[key].as_str().unwrap_or_default().to_owned();
        let cells = |row| ["kind", "name", "used_by", "state"].map(|key| text(row, key));
        let mut rows: Vec<_> = rows.iter().map(cells).collect();
        rows.sort();
        (rows, errors)
    }

    /// The finalizers of a volume, and whether its deletion was requested.
    fn state(&self, volume: &str) -> Option<(Vec<String>, bool)> {
        let found = self.cluster.get(&self.cluster.api::<PersistentVolume>(), volume)?;
        Some((found.finalizers().to_vec(), found.metadata.deletion_timestamp.is_some()))
    }
}

#[test]
fn only_unused_objects_of_the_gone_node_are_removed() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let (gone, driver) = (rig.gone.as_str(), rig.driver.as_str());
    let volume = rig.volume("volume", driver, &[gone]);
    let others = [
        rig.volume("at-another", driver, &["another"]),
        rig.volume("at-two", driver, &[gone, "another"]),
        rig.volume("of-another-driver", "other.csi.local", &[gone]),
    ];
    let existing = || json!({ "snapshotHandle": "s" });
    let labelled = rig.content("monday", driver, Some(gone), existing());
    // Taken after the node had gone.
    let unlabelled = rig.content("tuesday", driver, None, json!({ "volumeHandle": volume }));
    let other_contents = [
        rig.content("at-another", driver, Some("another"), existing()),
        rig.content("of-another-driver", "other.csi.local", Some(gone), existing()),
        rig.content("without-a-label", driver, None, json!({ "volumeHandle": others[0] })),
    ];
    let (contents, nodes) = (cluster.api::<VolumeSnapshotContent>(), cluster.api::<Node>());
    let snapshots = cluster.api_in::<VolumeSnapshot>(&rig.namespace);
    let spec = json!({ "source": { "volumeSnapshotContentName": labelled } });
    cluster.create(&snapshots, json!({ "metadata": { "name": "monday" }, "spec": spec }));
    let before = others.each_ref().map(|name| rig.state(name).unwrap());
    let row = |kind: &str, name: &str, user: &str, state: &str| {
        [kind.to_owned(), name.to_owned(), format!("{}/{user}", rig.namespace), state.to_owned()]
    };
    let rows = |[of_volume, of_labelled, of_unlabelled]: [&str; 3]| {
        let snapshot = "VolumeSnapshotContent";
        [
            row("PersistentVolume", &volume, "data", of_volume),
            row(snapshot, &labelled, "monday", of_labelled),
            row(snapshot, &unlabelled, "tuesday", of_unlabelled),
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
    cluster.delete(&nodes, gone);

    // Without --confirm it only shows.
    let (shown, note) = rig.forgotten(&[], 0);
    assert_eq!(shown, rows(["in_use", "in_use", "unused"]));
    assert!(note.contains("2 objects are in use"), "{note}");
    assert!(cluster.get(&contents, &unlabelled).unwrap().metadata.deletion_timestamp.is_none());

    // What is in use stays.
    let all = [PROVISIONER, "external-attacher/x", CLAIM].map(str::to_owned).to_vec();
    let (removed, _) = rig.forgotten(&["--confirm"], 1);
    assert_eq!(removed, rows(["in_use", "in_use", "removed"]));
    assert_eq!(rig.state(&volume), Some((all.clone(), false)));
    assert!(cluster.get(&contents, &labelled).unwrap().metadata.deletion_timestamp.is_none());
    rig.set_phase(&volume, "Released");
    cluster.delete(&snapshots, "monday");
    cluster.wait_for("the snapshot-controller deletes the content", || {
        cluster.get(&contents, &labelled)?.metadata.deletion_timestamp
    });
    assert_eq!(rig.forgotten(&[], 0).0, rows(["unused", "unused", ""])[..2]);
    assert_eq!(rig.state(&volume), Some((all, false)));

    // Finalizers of others are kept.
    assert_eq!(rig.forgotten(&["--confirm"], 0).0, rows(["deleting", "removed", ""])[..2]);
    assert_eq!(rig.state(&volume), Some((vec![CLAIM.to_owned()], true)));
    cluster.wait_until_gone(&snapshots, "monday");
    assert_eq!(rig.forgotten(&["--confirm"], 0).0, rows(["deleting", "", ""])[..1]);
    let patch = json!({ "metadata": { "finalizers": [] } });
    cluster.merge(&cluster.api::<PersistentVolume>(), &volume, &patch);
    assert_eq!(rig.state(&volume), None);
    assert!(rig.forgotten(&["--confirm"], 0).0.is_empty());

    assert_eq!(others.each_ref().map(|name| rig.state(name).unwrap()), before);
    for name in &other_contents {
        let found = cluster.get(&contents, name).unwrap();
        assert!(found.metadata.deletion_timestamp.is_none() && !found.finalizers().is_empty());
    }
}
