//! Whose snapshots a volume may begin with.

use csi_loopback::kubernetes::snapshot::{VolumeSnapshot, VolumeSnapshotContent};
use serde_json::json;
use support::cluster::shared;

use super::rig::{Rig, With, assert_refused, namespace, pod};

const ALLOWED: [&str; 4] =
    ["--allowed-attributes", "content,fromSnapshot", "--from-snapshot", "namespace"];

#[test]
fn a_pod_begins_with_snapshots_of_its_own_namespace_alone() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster, With { flags: &ALLOWED, ..With::default() });
    let other = namespace(cluster, json!({}));
    let class = cluster.snapshot_class(&rig.driver, &[]);
    let own = cluster.unique("snap-own");
    let from = |id: &str| pod(&rig.volume(json!({ "fromSnapshot": id })));
    // Asked for before anything is watched, and at once when it is there.
    let field = "spec.volumes[0].csi.volumeAttributes[fromSnapshot]";
    assert_refused(rig.make(&rig.apps, &from(&own)), &["403", field, "not the handle"]);
    let ready = cluster.believed_snapshot(&rig.apps, "monday", &rig.driver, &class, &own);
    rig.make(&rig.apps, &from(&own)).unwrap();
    assert_refused(rig.make(&other, &from(&own)), &["403", field, "not the handle", &other]);
    // Another driver's handle of the same text is another snapshot.
    let foreign = cluster.unique("snap-foreign");
    let class_of_other = cluster.snapshot_class("other.example", &[]);
    cluster.believed_snapshot(&rig.apps, "foreign", "other.example", &class_of_other, &foreign);
    assert_refused(rig.make(&rig.apps, &from(&foreign)), &["403", "not the handle"]);
    // A content that says whose it is, but to which nobody there is bound.
    let claimed = cluster.unique("snap-claimed");
    let contents = cluster.api::<VolumeSnapshotContent>();
    let content = cluster.unique("content");
    let spec = json!({
        "driver": rig.driver, "deletionPolicy": "Retain",
        "source": { "snapshotHandle": claimed },
        "volumeSnapshotRef": { "namespace": rig.apps, "name": "monday" },
    });
    cluster.create(&contents, json!({ "metadata": { "name": content }, "spec": spec }));
    let status = json!({ "readyToUse": true, "snapshotHandle": claimed });
    cluster.merge_status(&contents, &content, &status);
    assert_refused(rig.make(&rig.apps, &from(&claimed)), &["403", field]);
    // One on its way out.
    let snapshots = cluster.api_in::<VolumeSnapshot>(&rig.apps);
    let keep = json!({ "metadata": { "finalizers": ["example.com/keep"] } });
    cluster.merge(&snapshots, &ready.name, &keep);
    cluster.delete(&snapshots, &ready.name);
    let volume = rig.volume(json!({ "fromSnapshot": own }));
    rig.refused_once(&rig.apps, &volume, "being deleted");
    cluster.merge(&snapshots, &ready.name, &json!({ "metadata": { "finalizers": null } }));
}

#[test]
fn no_snapshot_is_taken_where_none_is_allowed() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster, With::default());
    let volume = rig.volume(json!({ "fromSnapshot": "snap-1" }));
    let field = "spec.volumes[0].csi.volumeAttributes[fromSnapshot]";
    assert_refused(rig.make(&rig.apps, &pod(&volume)), &["403", field, "not allowed"]);
    rig.policy("default: {attributes: [fromSnapshot]}");
    rig.refused_once(&rig.apps, &volume, "no snapshot is allowed");
    rig.policy("default: {attributes: [fromSnapshot], fromSnapshot: any}");
    rig.allowed_once(&rig.apps, &volume);
    let mut both = volume.clone();
    both["csi"]["nodePublishSecretRef"] = json!({ "name": "s" });
    assert_refused(rig.make(&rig.apps, &pod(&both)), &["422", field, "nodePublishSecretRef"]);
}
