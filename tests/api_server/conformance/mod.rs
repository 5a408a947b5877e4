//! `conformance --kubernetes` with a real API server, the released snapshot-controller and
//! csi-snapshotter, this project's driver and sidecar. The tests act as provisioner, resizer and
//! kubelet; hack/e2e.sh has these.

mod controllers;
mod lenient;

use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use csi_loopback::conformance;
use csi_loopback::kubernetes::metadata_service::SnapshotMetadataService;
use csi_loopback::kubernetes::snapshot::{VolumeSnapshot, VolumeSnapshotContent};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod, ServiceAccount};
use k8s_openapi::api::storage::v1::StorageClass;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use support::cluster::access::Account;
use support::cluster::sidecar_rig::{AUDIENCE, Rig};
use support::cluster::tls::Authority;
use support::cluster::{Cluster, shared};
use support::driver::{PATIENCE, binary};
use support::mutants::{assert_fails_only, is_due};
use support::path;

use controllers::Controllers;
use lenient::{Fault, Lenient};

/// The CSI handle of a VolumeSnapshot.
fn handle(cluster: &Cluster, namespace: &str, snapshot: &str) -> String {
    let snapshot = cluster.get(&cluster.api_in::<VolumeSnapshot>(namespace), snapshot).unwrap();
    let content = snapshot.ready_content().unwrap().to_owned();
    let content = cluster.get(&cluster.api::<VolumeSnapshotContent>(), &content).unwrap();
    content.ready_handle().unwrap().to_owned()
}

/// A driver with its sidecar and a class, and the account of deploy/conformance.
struct Judged<'a> {
    rig: Rig<'a>,
    class: String,
    account: Account,
    kubeconfig: PathBuf,
}

impl<'a> Judged<'a> {
    fn new(cluster: &'a Cluster) -> Self {
        let rig = Rig::new(cluster);
        let class = cluster.unique("class");
        let object = json!({
            "metadata": { "name": class }, "provisioner": rig.driver_name,
            "reclaimPolicy": "Delete", "allowVolumeExpansion": true,
        });
        cluster.create(&cluster.api::<StorageClass>(), object);
        // Of the pods. No controller creates it.
        let default = json!({ "metadata": { "name": "default" } });
        cluster.create(&cluster.api_in::<ServiceAccount>(&rig.namespace), default);
        let account = cluster.account(&rig.namespace, "csi-loopback-conformance");
        cluster.grant_shipped(&rig.namespace, &account, "deploy/conformance/rbac.yaml");
        let kubeconfig = cluster.kubeconfig_of(&account);
        Self { rig, class, account, kubeconfig }
    }

    fn flags(&self) -> Vec<&str> {
        [
            ["--kubernetes", "--storage-class"],
            [self.class.as_str(), "--snapshot-class"],
            [self.rig.class.as_str(), "--namespace"],
            [self.rig.namespace.as_str(), "--kubeconfig"],
            [path(&self.kubeconfig), "--testvolumesize"],
            ["32Mi", "--call-timeout"],
            ["10s", "--seed=7"],
            // Of all mutants together.
            ["--timeout", "1h"],
        ]
        .concat()
    }

    /// Runs `work` while controllers act.
    fn acting<T>(&self, work: impl FnOnce() -> T) -> T {
        let is_done = AtomicBool::new(false);
        thread::scope(|scope| {
            let controllers = Controllers::new(&self.rig, &self.class);
            let acting = scope.spawn(|| controllers.run_until(&is_done));
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            is_done.store(true, Ordering::Relaxed);
            acting.join().unwrap();
            result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Publishes another sidecar.
    fn publish(&self, port: u16, authority: &Authority) {
        let services = self.rig.cluster.api::<SnapshotMetadataService>();
        let spec = json!({
            "address": format!("localhost:{port}"),
            "caCert": ByteString(authority.pem().into_bytes()),
        });
        self.rig.cluster.merge(&services, &self.rig.driver_name, &json!({ "spec": spec }));
    }

    fn command(&self, flags: &[&str]) -> Command {
        let mut command = Command::new(binary());
        command.arg("conformance").args(self.flags()).args(flags);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Nothing of a run remains, neither in the cluster nor in the driver.
    fn assert_nothing_remains(&self) {
        let (cluster, namespace) = (self.rig.cluster, &self.rig.namespace);
        let claims = cluster.list(&cluster.api_in::<PersistentVolumeClaim>(namespace));
        assert_eq!(claims.len(), 1, "{claims:#?}");
        assert!(cluster.list(&cluster.api_in::<Pod>(namespace)).is_empty());
        assert!(cluster.list(&cluster.api_in::<VolumeSnapshot>(namespace)).is_empty());
        let accounts = cluster.list(&cluster.api_in::<ServiceAccount>(namespace));
        assert_eq!(accounts.len(), 4, "{accounts:#?}");
        let volumes = cluster.list(&cluster.api::<PersistentVolume>());
        let is_own = |volume: &&PersistentVolume| {
            let source = volume.spec.as_ref().and_then(|spec| spec.csi.as_ref());
            source.is_some_and(|source| source.driver == self.rig.driver_name)
        };
        assert_eq!(volumes.iter().filter(is_own).count(), 1);
        assert_eq!(self.rig.driver.cli_json(&["volume", "list"]).as_array().unwrap().len(), 1);
        let snapshots = self.rig.driver.cli_json(&["snapshot", "list"]);
        assert!(snapshots.as_array().unwrap().is_empty(), "{snapshots}");
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A faulty sidecar: the rule that must fail, its fault, and the other rules that then fail.
const MUTANTS: &[(&str, Fault, &[&str])] = &[
    ("sidecar-no-token", Fault::AcceptsNoToken, &[]),
    ("sidecar-invalid-token", Fault::AcceptsInvalidToken, &[]),
    ("sidecar-audience", Fault::AcceptsOtherAudience, &[]),
    ("sidecar-rights", Fault::AcceptsNoRights, &[]),
    ("sidecar-no-namespace", Fault::AcceptsNoNamespace, &[]),
    ("sidecar-hides-token", Fault::RepeatsToken, &[]),
    ("sidecar-not-found", Fault::NotFoundIsUnavailable, &[]),
];

/// Parts of the ids of the rules that may fail for a faulty sidecar.
const NEIGHBOURS: [&str; 5] = ["sidecar-", "-missing", "-unknown", "offset-", "status-"];

/// What this driver cannot be judged by through a sidecar.
const SKIPPED: [&str; 3] = ["deadline", "snapshot-deleted", "status-details"];

#[test]
#[ignore = "full tier"]
fn each_rule_of_a_sidecar_fails_for_its_mutant_and_no_other() {
    let Some(cluster) = shared() else { return };
    let judged = Judged::new(cluster);
    let token = cluster.token(&judged.account, Some(AUDIENCE));
    let lenient = Lenient::start(&judged.rig, token, judged.account.user());
    // By the rules of refusals; one by all rules, and the others on the next days.
    judged.publish(lenient.port, &judged.rig.authority);
    let remaining = judged.acting(|| {
        conformance::repeatedly(&judged.flags(), |judge| {
            let start = Instant::now();
            let found = judge(&|_| true);
            println!("this driver: {:.1} s", start.elapsed().as_secs_f64());
            let not_passed = found.iter().filter(|(_, result)| result.is_err());
            let not_passed: Vec<_> =
                not_passed.filter(|(rule, _)| !SKIPPED.contains(rule)).collect();
            assert!(not_passed.is_empty(), "this driver: {not_passed:#?}");
            for (number, (rule, fault, others)) in MUTANTS.iter().enumerate() {
                let start = Instant::now();
                lenient.set(*fault);
                let is_whole = is_due(number, MUTANTS.len() as u64);
                let found = judge(&|id| is_whole || NEIGHBOURS.iter().any(|one| id.contains(one)));
                println!("{rule}: {:.1} s", start.elapsed().as_secs_f64());
                assert_fails_only(&found, rule, others);
            }
        })
    });
    assert!(remaining.as_ref().unwrap().is_empty(), "{remaining:?}");
    judged.assert_nothing_remains();
    let listed = Command::new(binary()).args(["conformance", "--list"]).output().unwrap();
    let listed = text(&listed.stdout);
    let rules = listed.lines().filter(|line| line.starts_with("sidecar-")).count();
    assert_eq!(rules, MUTANTS.len() + 1, "each rule has a mutant; sidecar-tls has its own test");
}

#[test]
fn a_sidecar_with_another_authority_is_a_violation() {
    let Some(cluster) = shared() else { return };
    let judged = Judged::new(cluster);
    let run = |focus: &str| judged.command(&["--focus", focus]).output().unwrap();
    let passed = run("sidecar-tls");
    assert_eq!(passed.status.code(), Some(0), "{}", text(&passed.stderr));
    judged.publish(judged.rig.sidecar.port, &Authority::new("another"));
    let Output { status, stdout, stderr } = run("sidecar-tls");
    let shown = text(&stdout);
    assert_eq!(status.code(), Some(1), "{shown}{}", text(&stderr));
    for expected in ["FAIL sidecar-tls (MUST)", "types.go:31-36", "--kubernetes --storage-class"] {
        assert!(shown.contains(expected), "{expected}: {shown}");
    }
    judged.assert_nothing_remains();
}

#[test]
fn an_interrupted_run_removes_what_it_created() {
    let Some(cluster) = shared() else { return };
    let judged = Judged::new(cluster);
    let output = judged.acting(|| {
        let mut child = judged.command(&["--focus", "allocated-sparse"]).spawn().unwrap();
        let snapshots = cluster.api_in::<VolumeSnapshot>(&judged.rig.namespace);
        let pods = cluster.api_in::<Pod>(&judged.rig.namespace);
        cluster.wait_for("a snapshot and a pod", || {
            let (snapshots, pods) = (cluster.list(&snapshots), cluster.list(&pods));
            (!snapshots.is_empty() && !pods.is_empty()).then_some(())
        });
        kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGINT).unwrap();
        let until = Instant::now() + PATIENCE;
        while child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < until, "the command does not end");
            thread::sleep(Duration::from_millis(50));
        }
        let mut shown = String::new();
        child.stderr.take().unwrap().read_to_string(&mut shown).unwrap();
        (child.wait().unwrap().code(), shown)
    });
    assert_eq!(output, (Some(130), String::new()));
    judged.assert_nothing_remains();
}

#[test]
fn classes_that_would_keep_volumes_are_refused() {
    let Some(cluster) = shared() else { return };
    let judged = Judged::new(cluster);
    let retaining = cluster.unique("retaining");
    let object = json!({
        "metadata": { "name": retaining }, "provisioner": judged.rig.driver_name,
        "reclaimPolicy": "Retain",
    });
    cluster.create(&cluster.api::<StorageClass>(), object);
    let class = cluster.snapshot_class("other.example", &[]);
    for (flag, name, words) in [
        ("--storage-class", &retaining, "reclaimPolicy is Retain"),
        ("--snapshot-class", &class, "name classes of one driver"),
    ] {
        let mut flags = judged.flags();
        let at = flags.iter().position(|one| *one == flag).unwrap();
        flags[at + 1] = name;
        let output = Command::new(binary()).arg("conformance").args(flags).output().unwrap();
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(words), "{error}");
    }
    judged.assert_nothing_remains();
}
