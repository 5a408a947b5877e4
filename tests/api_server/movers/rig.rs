//! A namespace with VolumeSnapshots, and a user who runs commands in it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use csi_loopback::kubernetes::snapshot::VolumeSnapshotContent;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use support::cluster::Cluster;
use support::cluster::access::{Account, backup_rules, rule};
use support::cluster::movers::Movers;
use support::cluster::tls::Authority;
use support::driver::{PATIENCE, binary};
use support::path;

pub const BYTES: u64 = 1 << 20;

pub struct Stage<'a> {
    pub cluster: &'a Cluster,
    pub namespace: String,
    pub user: Account,
    pub movers: Movers<'a>,
    driver: String,
}

impl<'a> Stage<'a> {
    pub fn new(cluster: &'a Cluster) -> Self {
        let namespace = cluster.namespace("movers");
        let movers = Movers::start(cluster, &namespace);
        let user = cluster.account(&namespace, "user");
        let own = [
            rule("batch", &["jobs"], &["create", "get", "delete"]),
            rule("", &["pods", "events"], &["list"]),
            rule("", &["pods/log"], &["get"]),
            rule("", &["persistentvolumeclaims"], &["get", "create", "delete"]),
            rule("snapshot.storage.k8s.io", &["volumesnapshots"], &["create", "delete"]),
            rule("", &["persistentvolumes"], &["get", "create", "patch", "delete"]),
            rule("snapshot.storage.k8s.io", &["volumesnapshotcontents"], &["patch"]),
        ];
        cluster.grant(&user, &[&backup_rules()[..], &own].concat());
        let driver = format!("{namespace}.csi.example");
        let authority = Authority::new("movers").pem();
        cluster.metadata_service(&driver, "localhost:1", "audience", &authority);
        Self { cluster, namespace, user, movers, driver }
    }

    /// Takes a snapshot of a new claim in filesystem mode; returns the name of its content.
    pub fn snapshot(&self, name: &str) -> String {
        let (cluster, namespace) = (self.cluster, &self.namespace);
        let claim = format!("data-{name}");
        cluster.claim_as("Filesystem", namespace, &claim, &self.driver, &claim, BYTES);
        let class = cluster.snapshot_class(&self.driver, &[]);
        cluster.request_snapshot(namespace, name, &claim, &class);
        self.make_ready(&self.content_of(name));
        cluster.wait_until_ready(namespace, name).content
    }

    /// The content that the snapshot-controller makes for a snapshot.
    pub fn content_of(&self, snapshot: &str) -> String {
        let contents = self.cluster.api::<VolumeSnapshotContent>();
        self.cluster.wait_for("the content", || {
            let all = self.cluster.list(&contents);
            let of_snapshot = |one: &VolumeSnapshotContent| {
                let back = &one.spec.volume_snapshot_ref;
                let namespace = back.namespace.as_ref();
                back.name.as_deref() == Some(snapshot) && namespace == Some(&self.namespace)
            };
            all.into_iter().find(of_snapshot)?.metadata.name
        })
    }

    /// As csi-snapshotter does.
    pub fn make_ready(&self, content: &str) {
        let status = json!({
            "readyToUse": true, "snapshotHandle": content, "restoreSize": BYTES, "creationTime": 1,
        });
        self.cluster.merge_status(&self.cluster.api::<VolumeSnapshotContent>(), content, &status);
    }

    pub fn driver(&self) -> &str {
        &self.driver
    }

    pub fn kubeconfig(&self) -> PathBuf {
        self.cluster.kubeconfig_of(&self.user)
    }

    /// A command, with a repository.
    pub fn command(&self, kubeconfig: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new(binary());
        command
            .args(arguments)
            .args(["--namespace", &self.namespace, "--kubeconfig", path(kubeconfig)])
            .args(["--repository", "claim:a", "--storage-class", "none", "--output", "json"]);
        command
    }

    pub fn start(&self, arguments: &[&str]) -> Run<'_> {
        self.spawn(self.command(&self.kubeconfig(), arguments))
    }

    pub fn spawn(&self, mut command: Command) -> Run<'_> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Run { stage: self, child: Some(command.spawn().unwrap()) }
    }

    pub fn back_up(&self, snapshot: &str) -> Run<'_> {
        self.start(&["backup", "create", snapshot])
    }

    /// The next Job that is not one of these.
    pub fn job(&self, others: &[&Job]) -> Job {
        self.cluster.wait_for("a Job", || {
            let is_new = |job: &Job| others.iter().all(|one| one.metadata.uid != job.metadata.uid);
            self.movers.jobs().into_iter().find(is_new)
        })
    }

    /// Sets the states of a pod's containers.
    pub fn set(&self, pod: &str, phase: &str, states: &[(&str, Value)]) {
        let statuses: Vec<Value> =
            states.iter().map(|(name, state)| container(name, state)).collect();
        let status = json!({ "phase": phase, "containerStatuses": statuses });
        self.cluster.merge_status(&self.cluster.api_in::<Pod>(&self.namespace), pod, &status);
    }

    /// Creates the claim of a mover's pod, bound, as controllers do.
    pub fn bind(&self, pod: &str) {
        let claims = self.cluster.api_in::<PersistentVolumeClaim>(&self.namespace);
        let name = format!("{pod}-data");
        let spec = json!({
            "accessModes": ["ReadWriteOnce"], "volumeMode": "Block", "volumeName": name,
            "resources": { "requests": { "storage": BYTES.to_string() } },
        });
        self.cluster.create(&claims, json!({ "metadata": { "name": name }, "spec": spec }));
        self.cluster.merge_status(&claims, &name, &json!({ "phase": "Bound" }));
    }

    /// Whether nothing of a mover remains.
    pub fn assert_clean(&self) {
        self.movers.collect_garbage();
        assert!(self.movers.jobs().is_empty() && self.movers.pods().is_empty());
    }
}

pub fn running() -> Value {
    json!({ "running": {} })
}

pub fn ended(code: i32) -> Value {
    json!({ "terminated": { "exitCode": code } })
}

pub fn container(name: &str, state: &Value) -> Value {
    json!({
        "name": name, "image": "", "imageID": "", "ready": false, "restartCount": 0,
        "state": state,
    })
}

/// A running command, which ends with the test.
pub struct Run<'s> {
    stage: &'s Stage<'s>,
    child: Option<Child>,
}

impl Run<'_> {
    fn pid(&self) -> Pid {
        Pid::from_raw(self.child.as_ref().unwrap().id().cast_signed())
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.as_mut().unwrap().try_wait().unwrap().is_some()
    }

    pub fn kill(mut self) {
        kill(self.pid(), Signal::SIGKILL).unwrap();
        self.child.take().unwrap().wait().unwrap();
    }

    /// Its output, after it has ended by itself.
    pub fn wait(mut self) -> Output {
        let until = Instant::now() + PATIENCE;
        while !self.has_ended() {
            assert!(Instant::now() < until, "the command does not end");
            self.stage.movers.collect_garbage();
            sleep(Duration::from_millis(50));
        }
        self.child.take().unwrap().wait_with_output().unwrap()
    }

    /// The error of the command, which must fail.
    #[track_caller]
    pub fn refused(self, words: &[&str]) -> String {
        let output = self.wait();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{error}");
        assert!(words.iter().all(|word| error.contains(word)), "{words:?}: {error}");
        error
    }
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let output = child.wait_with_output();
            if std::thread::panicking() {
                println!("--- the command ---\n{output:?}");
            }
        }
    }
}
