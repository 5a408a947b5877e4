//! `backup create --claim`: a snapshot that lasts as long as its backup.

use std::collections::BTreeSet;

use csi_loopback::kubernetes::snapshot::{VolumeSnapshot, VolumeSnapshotContent};
use serde_json::{Value, json};
use support::clock::Clock;
use support::cluster::access::{Account, shipped};
use support::cluster::programs::stdout_of;
use support::cluster::shared;
use support::skip;

use super::rig::{Run, Stage, ended};

const EXAMPLE: &str = "deploy/examples/backup-to-s3/rbac.yaml";
const LABEL: &str = "backup.loopback.csi.local/temporary";
const LIFETIME: &str = "backup.loopback.csi.local/lifetime";
/// The clock of the command is ahead by this time, in seconds.
const AHEAD: i64 = 3 * 86_400;

/// Verb, resource and subresource of each right of the example.
fn granted() -> BTreeSet<String> {
    let mut rights = BTreeSet::new();
    for object in shipped(EXAMPLE) {
        let list = |rule: &Value, key: &str| {
            let words = rule[key].as_array().unwrap().iter();
            words.map(|word| word.as_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        for rule in object["rules"].as_array().into_iter().flatten() {
            for resource in list(rule, "resources") {
                rights.extend(list(rule, "verbs").iter().map(|verb| format!("{verb} {resource}")));
            }
        }
    }
    rights
}

impl Stage<'_> {
    /// A ServiceAccount with the rights of the example.
    fn backup_account(&self) -> Account {
        let account = self.cluster.account(&self.namespace, "csi-loopback-backup");
        self.cluster.grant_shipped(&self.namespace, &account, EXAMPLE);
        account
    }

    fn back_up_claim(&self, account: &Account, claim: &str) -> Run<'_> {
        let class = self.cluster.snapshot_class(self.driver(), &[]);
        let kubeconfig = self.cluster.kubeconfig_of(account);
        let arguments = ["backup", "create", "--claim", claim, "--snapshot-class", &class];
        let mut command = self.command(&kubeconfig, &arguments);
        match Clock::new(kubeconfig.parent().unwrap()) {
            Some(clock) => {
                clock.set(AHEAD);
                command.envs(clock.environment());
            }
            None => skip("no libfaketime"),
        }
        self.spawn(command)
    }

    fn snapshots(&self) -> Vec<VolumeSnapshot> {
        let snapshots = self.cluster.api_in::<VolumeSnapshot>(&self.namespace);
        self.cluster.list(&snapshots)
    }

    /// The snapshot that a command takes of a claim, and its content.
    fn taken(&self, claim: &str) -> (String, String) {
        let prefix = format!("{claim}-2");
        let name = self.cluster.wait_for("a snapshot of the claim", || {
            let names = self.snapshots().into_iter().filter_map(|one| one.metadata.name);
            names.into_iter().find(|name| name.starts_with(&prefix))
        });
        let content = self.content_of(&name);
        (name, content)
    }

    /// Lets a content go, as csi-snapshotter does when the snapshot is deleted.
    fn release(&self, content: &str) {
        let contents = self.cluster.api::<VolumeSnapshotContent>();
        self.cluster.wait_for("the deletion of the content", || {
            let found = self.cluster.get(&contents, content);
            found.is_none_or(|one| one.metadata.deletion_timestamp.is_some()).then_some(())
        });
        if self.cluster.get(&contents, content).is_some() {
            let none = json!({ "metadata": { "finalizers": null } });
            self.cluster.merge(&contents, content, &none);
        }
    }
}

#[test]
fn a_claim_is_backed_up_with_exactly_the_rights_of_the_example() {
    let Some(cluster) = shared() else { return };
    let stage = Stage::new(cluster);
    let account = stage.backup_account();
    // Of a command that was killed, of one that runs, and of a user.
    let left = stage.snapshot("left");
    stage.snapshot("running");
    stage.snapshot("other");
    let snapshots = cluster.api_in::<VolumeSnapshot>(&stage.namespace);
    for (name, lifetime) in [("left", "0s"), ("running", "1h")] {
        let made = json!({ "labels": { LABEL: "true" }, "annotations": { LIFETIME: lifetime } });
        cluster.merge(&snapshots, name, &json!({ "metadata": made }));
    }

    let run = stage.back_up_claim(&account, "data-other");
    stage.release(&left);
    let (name, content) = stage.taken("data-other");
    stage.make_ready(&content);
    let job = stage.job(&[]);
    assert!(job.spec.as_ref().is_some_and(|spec| format!("{spec:?}").contains(&name)));
    let pod = stage.movers.pod(&job, 0, "{}");
    let user = format!("system:serviceaccount:{}:csi-loopback-backup", stage.namespace);
    cluster.wait_for("a look at the claim", || {
        let is_look = |one: &Value| {
            one["user"]["username"] == user
                && one["objectRef"]["resource"] == "persistentvolumeclaims"
        };
        cluster.requests().iter().any(is_look).then_some(())
    });
    stage.bind(&pod);
    stage.set(&pod, "Succeeded", &[("mover", ended(0))]);
    // The Job goes first.
    cluster.wait_for("the end of the Job", || {
        stage.movers.collect_garbage();
        stage.movers.jobs().is_empty().then_some(())
    });
    // It can have gone after the last collection; a pending claim of its keeps the snapshot.
    stage.movers.collect_garbage();
    stage.release(&content);
    assert_eq!(stdout_of(run.wait()).trim(), "{}");
    let names: Vec<_> = stage.snapshots().into_iter().filter_map(|one| one.metadata.name).collect();
    assert_eq!(names, ["other", "running"]);

    let requests = cluster.requests().into_iter().filter(|one| one["user"]["username"] == user);
    let mut used: BTreeSet<String> = requests
        .map(|request| {
            let object = &request["objectRef"];
            let [verb, resource] =
                [&request["verb"], &object["resource"]].map(|word| word.as_str().unwrap());
            let subresource = object["subresource"].as_str();
            let subresource = subresource.map(|name| format!("/{name}")).unwrap_or_default();
            format!("{verb} {resource}{subresource}")
        })
        .collect();
    // Only of a pod that does not start.
    used.insert("list events".to_owned());
    assert_eq!(used, granted());
}

#[test]
fn a_snapshot_that_does_not_become_ready_is_removed() {
    let Some(cluster) = shared() else { return };
    let stage = Stage::new(cluster);
    stage.snapshot("other");
    let class = cluster.snapshot_class(stage.driver(), &[]);
    let arguments = ["backup", "create", "--claim", "data-other", "--snapshot-class", &class];
    let mut command = stage.command(&stage.kubeconfig(), &arguments);
    command.args(["--timeout", "3s"]);
    let run = stage.spawn(command);
    let (name, content) = stage.taken("data-other");
    stage.release(&content);
    run.refused(&[&name, "not ready to use"]);
    assert_eq!(stage.snapshots().len(), 1);
    assert!(stage.movers.jobs().is_empty());
}
