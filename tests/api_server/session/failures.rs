//! The causes of failed sessions, one by one (KEP-3314, session design, "The Snapshot Session
//! Manager").

use csi_loopback::kubernetes::session::{SessionState, SnapshotServiceConfiguration};
use csi_loopback::kubernetes::snapshot::VolumeSnapshotContent;
use serde_json::json;
use support::cluster::shared;

use super::rig::{Options, Rig};

#[test]
fn snapshot_missing_fails_the_request() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.snapshot("monday");
    rig.request("backup", &["monday", "tuesday"]);
    let error = rig.fails("backup", "SnapshotMissing");
    assert!(error.contains("tuesday") && error.contains("does not exist"), "{error}");
    assert!(rig.data().is_empty());
}

#[test]
fn snapshot_deleting_fails_the_request() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.snapshot("monday");
    let finalizers = json!({ "metadata": { "finalizers": ["example.com/stays"] } });
    cluster.merge(&rig.snapshots(), "monday", &finalizers);
    cluster.delete(&rig.snapshots(), "monday");
    rig.request("backup", &["monday"]);
    let error = rig.fails("backup", "SnapshotDeleting");
    assert!(error.contains("monday"), "{error}");
    cluster.merge(&rig.snapshots(), "monday", &json!({ "metadata": { "finalizers": null } }));
}

#[test]
fn content_missing_fails_the_request() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let snapshot = rig.snapshot("monday");
    let paused = cluster.pause("snapshot-controller");
    let content = snapshot.ready_content().unwrap();
    let contents = cluster.api::<VolumeSnapshotContent>();
    cluster.merge(&contents, content, &json!({ "metadata": { "finalizers": null } }));
    cluster.delete(&contents, content);
    rig.request("backup", &["monday"]);
    let error = rig.fails("backup", "ContentMissing");
    assert!(error.contains(content), "{error}");
    drop(paused);
}

#[test]
fn several_drivers_fail_the_request() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.snapshot("monday");
    rig.snapshot_of("other.csi.local", "tuesday");
    rig.request("backup", &["monday", "tuesday"]);
    let error = rig.fails("backup", "SeveralDrivers");
    assert!(error.contains(&rig.driver) && error.contains("other.csi.local"), "{error}");
}

#[test]
fn no_configuration_fails_the_request() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, Options { configured: false, ..Options::default() });
    rig.snapshot("monday");
    rig.request("backup", &["monday"]);
    let error = rig.fails("backup", "NoConfiguration");
    assert!(error.contains(&rig.driver), "{error}");
    // The name alone is not enough: the configuration is found by its label.
    rig.configure(&rig.driver, "other.csi.local", &rig.driver_home);
    rig.request("again", &["monday"]);
    rig.fails("again", "NoConfiguration");
}

#[test]
fn several_configurations_fail_the_request() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.snapshot("monday");
    let other = cluster.unique("other");
    rig.configure(&other, &rig.driver, "default");
    rig.request("backup", &["monday"]);
    let error = rig.fails("backup", "SeveralConfigurations");
    assert!(error.contains(&other), "{error}");
    cluster.delete(&cluster.api::<SnapshotServiceConfiguration>(), &other);
}

#[test]
fn configuration_misnamed_fails_the_request() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, Options { configured: false, ..Options::default() });
    rig.snapshot("monday");
    let other = cluster.unique("rogue");
    rig.configure(&other, &rig.driver, "default");
    rig.request("backup", &["monday"]);
    let error = rig.fails("backup", "ConfigurationMisnamed");
    assert!(error.contains(&other), "{error}");
    assert!(rig.data().is_empty());
}

#[test]
fn namespace_missing_fails_the_request() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, Options { configured: false, ..Options::default() });
    rig.configure(&rig.driver, &rig.driver, "no-such-namespace");
    rig.snapshot("monday");
    rig.request("backup", &["monday"]);
    let error = rig.fails("backup", "NamespaceMissing");
    assert!(error.contains("no-such-namespace"), "{error}");
}

#[test]
fn data_refused_a_long_handle_fails_the_request() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let content = rig.unready(&rig.driver, "monday");
    let status = json!({ "snapshotHandle": "h".repeat(1025), "readyToUse": true });
    cluster.merge_status(&cluster.api::<VolumeSnapshotContent>(), &content, &status);
    rig.request("backup", &["monday"]);
    rig.fails("backup", "DataRefused");
    assert!(rig.data().is_empty());
}

#[test]
fn a_permanent_obstacle_precedes_a_temporary_one() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.unready(&rig.driver, "monday");
    rig.request("backup", &["monday", "nothing"]);
    rig.fails("backup", "SnapshotMissing");
    // A deleted and recreated snapshot is another snapshot, but not an obstacle.
    rig.snapshot("tuesday");
    rig.request("other", &["tuesday"]);
    rig.wait_for("other", SessionState::Ready);
}

#[test]
fn data_refused_a_foreign_token_fails_the_request() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::new(cluster);
    rig.snapshot("monday");
    rig.manager.process.stop();
    rig.request("backup", &["monday"]);
    cluster.merge_status(&rig.requests(), "backup", &json!({ "sessionToken": "guessable" }));
    rig.manager = rig.another(&[]);
    rig.fails("backup", "DataRefused");
    assert!(rig.data().is_empty());
}
