//! The causes of failed sessions (KEP-3314, session design, "The Snapshot Session Manager").

use csi_loopback::kubernetes::session::SnapshotServiceConfiguration;
use csi_loopback::kubernetes::snapshot::VolumeSnapshotContent;
use serde_json::json;
use support::cluster::shared;

use super::rig::{Options, Rig, reason_of};

/// A request for these snapshots fails for this reason, with these words in its error.
#[track_caller]
fn fails(rig: &Rig<'_>, snapshots: &[&str], reason: &str, words: &[&str]) {
    let name = rig.cluster.unique("backup");
    rig.request(&name, snapshots);
    let error = rig.fails(&name, reason);
    assert!(words.iter().all(|word| error.contains(word)), "{reason}: {words:?}: {error}");
    assert!(rig.data().is_empty(), "{reason}");
}

/// As [`fails`], once the manager's watches have reported what the test has just changed.
#[track_caller]
fn comes_to_fail(rig: &Rig<'_>, snapshots: &[&str], reason: &str, words: &[&str]) {
    rig.cluster.wait_for(reason, || {
        let name = rig.cluster.unique("probe");
        rig.request(&name, snapshots);
        let found = reason_of(&rig.ended(&name)) == reason;
        rig.cluster.delete(&rig.requests(), &name);
        rig.wait_until_gone(&name);
        found.then_some(())
    });
    fails(rig, snapshots, reason, words);
}

#[test]
fn an_unusable_snapshot_fails_the_request() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.snapshot("monday");
    fails(&rig, &["monday", "nothing"], "SnapshotMissing", &["nothing", "does not exist"]);
    // A permanent obstacle precedes a temporary one.
    rig.unready(&rig.driver, "waiting");
    fails(&rig, &["waiting", "nothing"], "SnapshotMissing", &["nothing"]);
    rig.snapshot_of("other.csi.local", "foreign");
    fails(&rig, &["monday", "foreign"], "SeveralDrivers", &[&rig.driver, "other.csi.local"]);

    let contents = cluster.api::<VolumeSnapshotContent>();
    let content = rig.unready(&rig.driver, "long");
    let status = json!({ "snapshotHandle": "h".repeat(1025), "readyToUse": true });
    cluster.merge_status(&contents, &content, &status);
    fails(&rig, &["long"], "DataRefused", &[]);

    let finalizers = json!({ "metadata": { "finalizers": ["example.com/stays"] } });
    let none = json!({ "metadata": { "finalizers": null } });
    cluster.merge(&rig.snapshots(), "monday", &finalizers);
    cluster.delete(&rig.snapshots(), "monday");
    comes_to_fail(&rig, &["monday"], "SnapshotDeleting", &["monday"]);
    cluster.merge(&rig.snapshots(), "monday", &none);

    let tuesday = rig.snapshot("tuesday");
    let _paused = cluster.pause("snapshot-controller");
    let content = tuesday.ready_content().unwrap();
    cluster.merge(&contents, content, &none);
    cluster.delete(&contents, content);
    comes_to_fail(&rig, &["tuesday"], "ContentMissing", &[content]);
}

#[test]
fn an_unusable_configuration_fails_the_request() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, Options { configured: false, ..Options::default() });
    let configurations = cluster.api::<SnapshotServiceConfiguration>();
    rig.snapshot("monday");
    fails(&rig, &["monday"], "NoConfiguration", &[&rig.driver]);
    // The name alone is not enough: the configuration is found by its label.
    rig.configure(&rig.driver, "other.csi.local", &rig.driver_home);
    fails(&rig, &["monday"], "NoConfiguration", &[&rig.driver]);
    cluster.delete(&configurations, &rig.driver);

    let rogue = cluster.unique("rogue");
    rig.configure(&rogue, &rig.driver, "default");
    fails(&rig, &["monday"], "ConfigurationMisnamed", &[&rogue]);
    rig.configure(&rig.driver, &rig.driver, "no-such-namespace");
    comes_to_fail(&rig, &["monday"], "SeveralConfigurations", &[&rogue]);
    cluster.delete(&configurations, &rogue);
    comes_to_fail(&rig, &["monday"], "NamespaceMissing", &["no-such-namespace"]);
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
