//! Backups through Kubernetes: the work of a mover pod, and the commands that start one. Without a
//! kubelet, the Job of a mover never gets a pod; hack/e2e.sh runs them.

use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use k8s_openapi::api::batch::v1::Job;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use support::cluster::access::{backup_rules, rule};
use support::cluster::programs::stdout_of;
use support::cluster::shared;
use support::cluster::sidecar_rig::{AUDIENCE, Options, Rig};
use support::driver::{Source, binary, block};
use support::{path, read_all};

/// A backup application and its repository.
pub struct Application<'r> {
    pub rig: &'r Rig<'r>,
    pub repository: String,
}

impl<'r> Application<'r> {
    pub fn new(rig: &'r Rig<'_>) -> Self {
        rig.cluster.grant(&rig.backup, &backup_rules());
        Self { rig, repository: path(&rig.driver.scratch().join("repository")).to_owned() }
    }

    pub fn command(&self, arguments: &[&str], repository: &str) -> Command {
        let mut command = Command::new(binary());
        command
            .args(arguments)
            .args(["--repository", repository, "--output", "json"])
            .stdin(Stdio::null());
        command
    }

    fn in_cluster(&self, arguments: &[&str], repository: &str) -> Command {
        let mut command = self.command(arguments, repository);
        let kubeconfig = self.rig.cluster.kubeconfig_of(&self.rig.backup);
        command.args(["--namespace", &self.rig.namespace, "--kubeconfig", path(&kubeconfig)]);
        command
    }

    /// As in a mover pod: `source` has the data of the VolumeSnapshot.
    pub fn back_up(&self, snapshot: &str, source: &str, flags: &[&str]) -> Output {
        let arguments = ["backup", "create", snapshot, "--source", source];
        self.in_cluster(&[&arguments, flags].concat(), &self.repository).output().unwrap()
    }

    /// A file with the data of a snapshot, in the place of a device.
    pub fn image(&self, handle: &str, name: &str) -> PathBuf {
        let driver = &self.rig.driver;
        let copy = driver.copy(name, Source::Snapshot(handle), block());
        let file = driver.scratch().join(name);
        std::fs::write(&file, driver.with_device(&copy, read_all)).unwrap();
        file
    }
}

pub fn result(output: Output) -> Value {
    serde_json::from_str(&stdout_of(output)).unwrap()
}

fn refused(output: &Output, words: &str) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && stderr.contains(words), "{stderr}");
}

#[test]
fn a_backup_from_a_deleted_base_restores_every_byte() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let application = Application::new(&rig);
    rig.write(1, [3, 4, 5]);
    let first = rig.snapshot("first");
    let source = application.image(&first.handle, "source-1");
    let full = result(application.back_up("first", path(&source), &[]));
    assert_eq!((&full["kind"], &full["snapshot"]), (&"full".into(), &"first".into()));
    assert_eq!(
        (&full["data_bytes"], &full["volume_id"]),
        (&12288.into(), &rig.volume.clone().into())
    );
    cluster.delete_snapshot(&first);
    rig.write(2, [4, 9]);
    let second = rig.snapshot("second");
    let source = application.image(&second.handle, "source-2");
    let token = cluster.write("token", &cluster.token(&rig.backup, Some(AUDIENCE)));
    let flags = ["--base", "auto", "--token-file", path(&token)];
    let next = result(application.back_up("second", path(&source), &flags));
    assert_eq!((&next["base"], &next["data_bytes"]), (&full["id"], &8192.into()));

    let to = rig.driver.scratch().join("restored");
    let restore = ["restore", "second", "--to", path(&to)];
    result(application.command(&restore, &application.repository).output().unwrap());
    assert!(std::fs::read(&to).unwrap() == std::fs::read(&source).unwrap());
}

#[test]
fn a_lost_base_is_refused_and_auto_takes_a_full_backup() {
    let Some(cluster) = shared() else { return };
    let faults = ["--enable-faults", "--fault", "tracking-lost"];
    let rig = Rig::with(cluster, Options { driver: &faults, ..Options::default() });
    let application = Application::new(&rig);
    rig.write(1, [3]);
    let first = rig.snapshot("first");
    let source = application.image(&first.handle, "source-1");
    result(application.back_up("first", path(&source), &[]));
    rig.write(2, [4]);
    let second = rig.snapshot("second");
    let source = application.image(&second.handle, "source-2");
    let output = application.back_up("second", path(&source), &["--base", "first"]);
    refused(&output, "--base auto takes a full backup");
    let full = result(application.back_up("second", path(&source), &["--base", "auto"]));
    let because = full["full_because"].as_str().unwrap_or_default();
    assert!(full["kind"] == "full" && because.contains("FAILED_PRECONDITION"), "{full}");
    // Nothing of the attempt from the base remains.
    let list = ["backup", "list"];
    let list = result(application.command(&list, &application.repository).output().unwrap());
    assert_eq!(list.as_array().unwrap().len(), 2);
}

#[test]
fn an_unusable_source_is_refused_and_leaves_no_backup() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let application = Application::new(&rig);
    rig.write(1, [3]);
    rig.snapshot("first");
    let none = rig.driver.scratch().join("none");
    refused(&application.back_up("first", path(&none), &[]), "none");
    refused(&application.back_up("missing", path(&none), &[]), "missing");
    let short = rig.driver.scratch().join("short");
    std::fs::write(&short, [0; 4096]).unwrap();
    refused(&application.back_up("first", path(&short), &[]), "read");
    let list = ["backup", "list"];
    let list = result(application.command(&list, &application.repository).output().unwrap());
    assert_eq!(list.as_array().unwrap().len(), 0);
}

#[test]
fn an_interrupted_mover_leaves_no_job() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let application = Application::new(&rig);
    let rules =
        [rule("batch", &["jobs"], &["create", "get", "delete"]), rule("", &["pods"], &["list"])];
    cluster.grant(&rig.backup, &rules);
    let list = ["backup", "list"];
    for (repository, flags, words) in [
        ("/backups", &[][..], "cannot reach a directory"),
        ("claim:backups", &["--key-file", "/key"], "set --key-secret"),
    ] {
        let mut command = application.in_cluster(&list, repository);
        refused(&command.args(flags).output().unwrap(), words);
    }
    let jobs = cluster.api_in::<Job>(&rig.namespace);
    let all = || cluster.list(&jobs);
    let mut command = application.in_cluster(&list, "claim:backups");
    let child: Child = command.stderr(Stdio::piped()).spawn().unwrap();
    let job = cluster.wait_for("the Job", || all().pop());
    let pod = job.spec.unwrap().template.spec.unwrap();
    assert_eq!(pod.service_account_name.as_deref(), Some("csi-loopback-mover"));
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGINT).unwrap();
    refused(&child.wait_with_output().unwrap(), "interrupted");
    assert!(all().is_empty());
}
