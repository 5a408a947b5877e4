//! Backups and restores by mover pods, whose commands run on this machine: groups, copies, and what
//! remains of interrupted ones. hack/e2e.sh runs the pods.

use std::collections::BTreeMap;
use std::fs;
use std::process::{Command, Output};

use csi_loopback::kubernetes::snapshot::{VolumeSnapshot, VolumeSnapshotContent};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use serde_json::{Value, json};
use support::cluster::access::{backup_rules, rule};
use support::cluster::movers::Movers;
use support::cluster::programs::stdout_of;
use support::cluster::rig::{CLAIM, SIZE};
use support::cluster::shared;
use support::cluster::sidecar_rig::Rig;
use support::driver::{Source, binary, block};
use support::{BLOCK, path, pattern, read_all, write_direct};

/// The claims of two volumes, which the VolumeGroupSnapshot "nightly" has.
const CLAIMS: [&str; 2] = [CLAIM, "wal"];

struct Group<'r> {
    rig: &'r Rig<'r>,
    movers: Movers<'r>,
    /// The data of each volume, by claim.
    images: BTreeMap<String, Vec<u8>>,
}

impl<'r> Group<'r> {
    fn new(rig: &'r Rig<'_>) -> Self {
        let groups = ["volumegroupsnapshots", "volumegroupsnapshotcontents"];
        let own = [
            rule("batch", &["jobs"], &["create", "get", "delete"]),
            rule("", &["pods"], &["list"]),
            rule("", &["pods/log"], &["get"]),
            rule("", &["persistentvolumeclaims"], &["get", "create", "delete"]),
            rule("groupsnapshot.storage.k8s.io", &groups, &["get"]),
        ];
        rig.cluster.grant(&rig.backup, &[&backup_rules()[..], &own].concat());
        let wal = rig.driver.volume("wal", SIZE, block());
        rig.cluster.claim(&rig.namespace, "wal", &rig.driver_name, &wal, SIZE);
        rig.write(1, [3, 4, 5]);
        rig.driver.with_device(&wal, |device| {
            write_direct(device, 7 * BLOCK, &pattern(9, BLOCK as usize));
        });
        let movers = Movers::start(rig.cluster, &rig.namespace);
        let mut group = Self { rig, movers, images: BTreeMap::new() };
        group.take_snapshot();
        group.hold_members();
        group
    }

    fn take_snapshot(&self) {
        let (cluster, namespace) = (self.rig.cluster, &self.rig.namespace);
        let claims = cluster.api_in::<PersistentVolumeClaim>(namespace);
        for name in CLAIMS {
            let label = json!({ "metadata": { "labels": { "set": "nightly" } } });
            cluster.merge(&claims, name, &label);
        }
        let class = cluster.unique("group-class");
        let api = "groupsnapshot.storage.k8s.io/v1";
        let source = json!({ "selector": { "matchLabels": { "set": "nightly" } } });
        for object in [
            json!({
                "apiVersion": api, "kind": "VolumeGroupSnapshotClass", "metadata": { "name": class },
                "driver": self.rig.driver_name, "deletionPolicy": "Delete",
            }),
            json!({
                "apiVersion": api, "kind": "VolumeGroupSnapshot",
                "metadata": { "name": "nightly", "namespace": namespace },
                "spec": { "volumeGroupSnapshotClassName": class, "source": source },
            }),
        ] {
            let file = cluster.write("group", &object.to_string());
            stdout_of(cluster.kubectl(&["create", "-f", path(&file)]));
        }
        let ready = "--for=jsonpath={.status.readyToUse}=true";
        let group = "volumegroupsnapshot/nightly";
        stdout_of(cluster.kubectl(&["wait", "-n", namespace, "--timeout=60s", ready, group]));
    }

    /// Gives the data of the members to the movers.
    fn hold_members(&mut self) {
        let (cluster, driver) = (self.rig.cluster, &self.rig.driver);
        let snapshots = cluster.api_in::<VolumeSnapshot>(&self.rig.namespace);
        let contents = cluster.api::<VolumeSnapshotContent>();
        // The group is ready before its members exist.
        let members = cluster.wait_for("the members", || {
            let all = cluster.list(&snapshots);
            let ready = all.iter().filter(|one| one.ready_content().is_some()).count();
            (ready == CLAIMS.len()).then_some(all)
        });
        for snapshot in members {
            let name = snapshot.metadata.name.clone().unwrap();
            let content = cluster.get(&contents, snapshot.ready_content().unwrap()).unwrap();
            let handle = content.ready_handle().unwrap();
            let copy = driver.copy(&name, Source::Snapshot(handle), block());
            let image = driver.with_device(&copy, read_all);
            let file = driver.scratch().join(&name);
            fs::write(&file, &image).unwrap();
            self.movers.hold(&name, file);
            let claim = snapshot.spec.source.persistent_volume_claim_name.unwrap();
            self.images.insert(claim, image);
        }
        assert_eq!(self.images.len(), CLAIMS.len());
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(binary());
        let kubeconfig = self.rig.cluster.kubeconfig_of(&self.rig.backup);
        command
            .args(arguments)
            .args(["--namespace", &self.rig.namespace, "--kubeconfig", path(&kubeconfig)])
            .args(["--storage-class", "none", "--quiet", "--output", "json"]);
        command
    }

    /// Runs a command with at most this many Jobs. Nothing of its Jobs may remain.
    fn run(&self, arguments: &[&str], jobs: usize) -> Output {
        let output = self.movers.run(self.command(arguments), jobs);
        assert!(self.movers.jobs().is_empty() && self.movers.pods().is_empty());
        output
    }

    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&stdout_of(self.run(arguments, usize::MAX))).unwrap()
    }

    #[track_caller]
    fn refused(&self, arguments: &[&str], jobs: usize, words: &[&str]) {
        let output = self.run(arguments, jobs);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{arguments:?}");
        assert!(words.iter().all(|word| error.contains(word)), "{words:?}: {error}");
    }

    /// The names of all claims.
    fn claims(&self) -> Vec<String> {
        let claims = self.rig.cluster.api_in::<PersistentVolumeClaim>(&self.rig.namespace);
        let all = self.rig.cluster.list(&claims);
        all.into_iter().filter_map(|claim| claim.metadata.name).collect()
    }
}

const CREATE: [&str; 6] = ["backup", "create", "nightly", "--group", "--repository", "claim:a"];
const LIST: [&str; 4] = ["backup", "list", "--repository", "claim:a"];
const RESTORE: [&str; 7] =
    ["restore", "nightly", "--group", "--to-claim", "restored", "--repository", "claim:a"];

fn ids(backups: &Value) -> Vec<Value> {
    backups.as_array().unwrap().iter().map(|one| one["id"].clone()).collect()
}

#[test]
fn mover_pods_back_up_and_restore_a_group_as_a_set() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let group = Group::new(&rig);
    let created = group.json(&CREATE);
    for backup in created.as_array().unwrap() {
        assert_eq!(
            (&backup["group_snapshot"], &backup["kind"]),
            (&"nightly".into(), &"full".into())
        );
        assert_eq!(backup["group_complete"], true, "{backup}");
    }
    let restored = group.json(&RESTORE);
    assert_eq!(restored.as_array().unwrap().len(), 2);
    for (claim, image) in &group.images {
        let to = format!("restored-{claim}");
        assert!(fs::read(group.movers.claim(&to)).unwrap() == *image, "{claim}");
        assert!(group.claims().contains(&to), "{to}");
    }
    // To a claim of its own, and to another path of the same claim.
    for to in ["claim:b", "claim:a/copy"] {
        let copy = ["backup", "copy", "--repository", "claim:a", "--to", to];
        assert_eq!(group.json(&copy)["copied"].as_array().unwrap().len(), 2, "{to}");
        // A copy has another id.
        let snapshots = |backups: &Value| {
            let all = backups.as_array().unwrap().iter();
            all.map(|one| one["snapshot_id"].clone()).collect::<Vec<_>>()
        };
        let listed = group.json(&["backup", "list", "--repository", to]);
        assert_eq!(snapshots(&listed), snapshots(&created), "{to}");
    }
    let copy = ["backup", "copy", "--repository", "claim:a", "--to", "/backups"];
    group.refused(&copy, 0, &["cannot reach a directory"]);
}

#[test]
fn a_killed_mover_pod_is_replaced_and_continues() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let group = Group::new(&rig);
    // SIGKILL before the manifest: after the pages, which are put seventh.
    group.movers.fail_next("kill 7 backup.put");
    let output = group.run(&CREATE, usize::MAX);
    let created: Value = serde_json::from_str(&stdout_of(output)).unwrap();
    assert_eq!(ids(&created).len(), 2);
    let attempts = fs::read_dir(group.movers.claim("a").join("backups/backups")).unwrap();
    let attempts: Vec<_> = attempts.map(|attempt| attempt.unwrap().path()).collect();
    let (whole, killed): (Vec<_>, Vec<_>) =
        attempts.iter().partition(|attempt| attempt.join("manifest").exists());
    assert_eq!((whole.len(), killed.len()), (2, 1), "{attempts:?}");
    // A backup uses the pages of the killed attempt.
    assert!(killed[0].join("pages").exists());
    let id = killed[0].file_name().unwrap().to_str().unwrap();
    let refers = |attempt: &&&std::path::PathBuf| {
        fs::read_to_string(attempt.join("manifest")).unwrap().contains(id)
    };
    assert_eq!(whole.iter().filter(refers).count(), 1);
    assert_eq!(group.json(&RESTORE).as_array().unwrap().len(), 2);
    for (claim, image) in &group.images {
        assert!(fs::read(group.movers.claim(&format!("restored-{claim}"))).unwrap() == *image);
    }
    // An error is final, and its exit code arrives.
    let none = group.run(&["backup", "list", "--repository", "claim:a/none"], usize::MAX);
    assert_eq!(none.status.code(), Some(10), "{}", String::from_utf8_lossy(&none.stderr));
}

#[test]
#[ignore = "full tier"]
fn an_interrupted_group_backup_is_incomplete_and_resumes() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let group = Group::new(&rig);
    let before = group.claims();
    group.refused(&CREATE, 1, &["1 of 2 members", "interrupted"]);
    let half = group.json(&LIST);
    assert_eq!((ids(&half).len(), &half[0]["group_complete"]), (1, &Value::Bool(false)));
    group.refused(&RESTORE, usize::MAX, &["incomplete: 1 of 2"]);
    let whole = group.json(&CREATE);
    assert_eq!((ids(&whole).len(), &whole[0]["id"]), (2, &half[0]["id"]));
    assert_eq!(group.claims(), before);
}

#[test]
#[ignore = "full tier"]
fn a_failed_or_interrupted_group_restore_leaves_no_claim() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let group = Group::new(&rig);
    let before = group.claims();
    let created = group.json(&CREATE);
    // `show`, and the first member.
    group.refused(&RESTORE, 2, &["interrupted"]);
    assert_eq!(group.claims(), before);
    let [first, second] =
        [0, 1].map(|at| format!("restored-{}", created[at]["volume"].as_str().unwrap()));
    // Nothing here removes the volume of a removed claim.
    fs::remove_file(group.movers.claim(&first)).unwrap();
    fs::create_dir(group.movers.claim(&second)).unwrap();
    group.refused(&RESTORE, usize::MAX, &["neither a block device nor a file"]);
    assert_eq!(group.claims(), before);
    rig.cluster.claim_as("Filesystem", &rig.namespace, &first, "other", "handle", SIZE);
    group.refused(&RESTORE, usize::MAX, &["has a filesystem"]);
}
