//! What no mover can do is refused before there is one.

use csi_loopback::kubernetes::snapshot::{VolumeSnapshot, VolumeSnapshotContent};
use serde_json::json;
use support::cluster::shared;

use super::rig::Stage;

#[test]
fn an_imported_snapshot_is_refused_before_a_pod_starts() {
    let Some(cluster) = shared() else { return };
    let stage = Stage::new(cluster);
    let content = cluster.unique("imported");
    let spec = json!({
        "driver": stage.driver(), "deletionPolicy": "Retain", "sourceVolumeMode": "Filesystem",
        "source": { "snapshotHandle": "handle" },
        "volumeSnapshotRef": { "namespace": stage.namespace, "name": "imported" },
    });
    let object = json!({ "metadata": { "name": content }, "spec": spec });
    cluster.create(&cluster.api::<VolumeSnapshotContent>(), object);
    let source = json!({ "volumeSnapshotContentName": content });
    let object = json!({ "metadata": { "name": "imported" }, "spec": { "source": source } });
    cluster.create(&cluster.api_in::<VolumeSnapshot>(&stage.namespace), object);
    stage.make_ready(&content);
    cluster.wait_until_ready(&stage.namespace, "imported");
    stage.back_up("imported").refused(&["VolumeSnapshot", "was imported", "a snapshot of a claim"]);
    let name = format!("/namespaces/{}/jobs", stage.namespace);
    let jobs = cluster.requests().into_iter();
    let mut jobs = jobs.filter(|request| request["requestURI"].as_str().unwrap().contains(&name));
    assert!(jobs.all(|request| request["verb"] != "create"));
}
