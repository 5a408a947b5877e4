//! Client, sidecar, backup and verify with drivers of other vendors: those that the dialects stand
//! for, and csi-driver-host-path, if CSI_LOOPBACK_HOSTPATH names its binary.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use csi_loopback::kubernetes::metadata_service::DRIVER_LABEL;
use csi_loopback::kubernetes::session::SnapshotServiceConfiguration;
use csi_loopback::kubernetes::snapshot::{VolumeSnapshot, VolumeSnapshotContent};
use k8s_openapi::ByteString;
use serde_json::{Value, json};
use support::cluster::access::{Account, backup_rules, rule, sidecar_rules};
use support::cluster::dialect::{self, Dialect, Driver, Place, VOLUME};
use support::cluster::manager;
use support::cluster::movers::Movers;
use support::cluster::programs::{Served, stdout_of};
use support::cluster::rig::CLAIM;
use support::cluster::session::session_rules;
use support::cluster::sidecar::{AUDIENCE, start};
use support::cluster::tls::Authority;
use support::cluster::{Cluster, shared};
use support::driver::binary;
use support::path;

use super::host_path::HostPath;

/// A driver of another vendor.
pub trait Foreign {
    fn name(&self) -> &str;
    /// The endpoint of SnapshotMetadata.
    fn metadata_endpoint(&self) -> &str;
    /// The CSI handle of its volume.
    fn volume(&self) -> &str;
    /// Bytes of the volume.
    fn size(&self) -> u64;
    fn secret(&self) -> Option<(&str, &str)>;
    /// Changes these blocks of 4 KiB.
    fn write(&self, seed: u64, blocks: &[usize]);
    /// Takes a VolumeSnapshot; returns its handle and a file with its data.
    fn snapshot(&self, stage: &Stage<'_>, name: &str) -> (String, PathBuf);
    /// Deletes the snapshot in the driver.
    fn delete(&self, handle: &str);
    /// Whether a deleted snapshot can be the base of a delta.
    fn keeps_bases(&self) -> bool;
}

/// A driver's sidecar with `--check-streams`, and a backup application.
pub struct Stage<'a> {
    pub cluster: &'a Cluster,
    pub namespace: String,
    pub class: String,
    pub directory: PathBuf,
    backup: Account,
    _sidecar: Served,
}

impl<'a> Stage<'a> {
    pub fn new(cluster: &'a Cluster, driver: &impl Foreign) -> Self {
        let namespace = cluster.namespace("foreign");
        let class = match driver.secret() {
            None => cluster.snapshot_class(driver.name(), &[]),
            Some(entry) => {
                cluster.secret(&namespace, "snapshotter", &[entry]);
                cluster.snapshot_class_with_secret(driver.name(), &namespace, "snapshotter")
            }
        };
        cluster.claim(&namespace, CLAIM, driver.name(), driver.volume(), driver.size());
        let authority = Authority::new("authority of a foreign driver");
        let certificate = authority.certify(cluster.scratch(), driver.name());
        let own = cluster.account(&namespace, "sidecar");
        cluster.grant(&own, &sidecar_rules());
        cluster.grant_in(&namespace, &own, &session_rules(&["get", "list", "watch"]));
        let kubeconfig = cluster.kubeconfig_of(&own);
        let endpoint = Path::new(driver.metadata_endpoint());
        let flags = ["--audience", AUDIENCE, "--check-streams", "--session-api"];
        let flags = [&flags[..], &["--namespace", &namespace]].concat();
        let sidecar = start(cluster, endpoint, &kubeconfig, &certificate, &flags);
        publish(cluster, driver.name(), &namespace, &sidecar.address(), &authority.pem());
        let backup = cluster.account(&namespace, "backup");
        cluster.grant(&backup, &backup_rules());
        let verbs = ["create", "get", "delete"];
        let ours = rule("cbt.storage.k8s.io", &["snapshotsessionrequests"], &verbs);
        // The size of a snapshot without restoreSize is that of its claim.
        let claims = rule("", &["persistentvolumeclaims"], &["get"]);
        cluster.grant_in(&namespace, &backup, &[ours, claims]);
        let directory = cluster.scratch().join(cluster.unique("foreign"));
        fs::create_dir(&directory).unwrap();
        Self { cluster, namespace, class, directory, backup, _sidecar: sidecar }
    }

    /// Writes the status of a VolumeSnapshot as csi-snapshotter does.
    fn set_status(&self, name: &str, handle: &str, restore_size: Option<u64>) {
        let snapshots = self.cluster.api_in::<VolumeSnapshot>(&self.namespace);
        let content = self.cluster.wait_for("the content", || {
            let status = self.cluster.get(&snapshots, name)?.status?;
            status.bound_volume_snapshot_content_name
        });
        let contents = self.cluster.api::<VolumeSnapshotContent>();
        let mut status = json!({ "readyToUse": true, "snapshotHandle": handle });
        status["restoreSize"] = json!(restore_size);
        self.cluster.merge_status(&contents, &content, &status);
        self.cluster.wait_until_ready(&self.namespace, name);
    }

    /// A command through Kubernetes.
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(binary());
        let kubeconfig = self.cluster.kubeconfig_of(&self.backup);
        command.args(arguments).args(["--namespace", &self.namespace]);
        command.args(["--kubeconfig", path(&kubeconfig), "--output", "json"]);
        command.stdin(Stdio::null());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&stdout_of(self.run(arguments))).unwrap()
    }

    fn back_up(&self, name: &str, image: &Path, flags: &[&str]) -> Value {
        let repository = self.directory.join("repository");
        let create = ["backup", "create", name, "--source", path(image)];
        let place = ["--repository", path(&repository)];
        self.json(&[&create[..], &place, flags].concat())
    }

    /// Restores a backup, and compares it with the data of its snapshot.
    fn restores(&self, backup: &Value, image: &Path) {
        let (repository, to) = (self.directory.join("repository"), self.directory.join("to"));
        let id = backup["id"].as_str().unwrap();
        let mut restore = Command::new(binary());
        restore.args(["restore", id, "--repository", path(&repository), "--to", path(&to)]);
        stdout_of(restore.args(["--overwrite", "--output", "json"]).output().unwrap());
        assert!(fs::read(&to).unwrap() == fs::read(image).unwrap(), "{backup}");
    }
}

/// Publishes a sidecar for both APIs.
fn publish(cluster: &Cluster, driver: &str, namespace: &str, address: &str, ca: &str) {
    cluster.metadata_service(driver, address, AUDIENCE, ca);
    let object = json!({
        "metadata": { "name": driver, "labels": { DRIVER_LABEL: driver } },
        "spec": {
            "address": address,
            "caCert": ByteString(ca.as_bytes().to_vec()),
            "driverNamespace": namespace,
        },
    });
    cluster.create(&cluster.api::<SnapshotServiceConfiguration>(), object);
}

#[track_caller]
fn error(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    text
}

/// The whole work of a backup application through Kubernetes.
pub fn proves(cluster: &Cluster, driver: &impl Foreign) {
    let stage = Stage::new(cluster, driver);
    driver.write(1, &[0, 3, 4, 5, 1030]);
    let (first, first_image) = driver.snapshot(&stage, "first");
    driver.write(2, &[4, 900, 2304]);
    let (_, second_image) = driver.snapshot(&stage, "second");
    // Without changes.
    let (_, third_image) = driver.snapshot(&stage, "third");
    lists(&stage, driver);
    verifies(&stage, [&first_image, &second_image, &third_image]);

    let full = stage.back_up("first", &first_image, &[]);
    assert_eq!((&full["kind"], &full["capacity_bytes"]), (&"full".into(), &driver.size().into()));
    let second = stage.back_up("second", &second_image, &[]);
    assert_eq!(second["base"], full["id"], "{second}");
    let third = stage.back_up("third", &third_image, &[]);
    assert_eq!((&third["base"], &third["data_bytes"]), (&second["id"], &0.into()), "{third}");
    for (backup, image) in [(&full, &first_image), (&second, &second_image), (&third, &third_image)]
    {
        stage.restores(backup, image);
    }

    // A base without data: the driver decides.
    driver.delete(&first);
    driver.write(3, &[7]);
    let (_, fourth_image) = driver.snapshot(&stage, "fourth");
    let flags = ["--base", full["id"].as_str().unwrap()];
    if driver.keeps_bases() {
        let fourth = stage.back_up("fourth", &fourth_image, &flags);
        stage.restores(&fourth, &fourth_image);
    } else {
        let repository = stage.directory.join("repository");
        let create = ["backup", "create", "fourth", "--source", path(&fourth_image)];
        let place = ["--repository", path(&repository)];
        let refused = error(&stage.run(&[&create[..], &place, &flags].concat()));
        assert!(refused.contains("NOT_FOUND"), "{refused}");
        let fourth = stage.back_up("fourth", &fourth_image, &[]);
        assert_eq!(fourth["base"], third["id"], "{fourth}");
        stage.restores(&fourth, &fourth_image);
    }
}

fn lists(stage: &Stage<'_>, driver: &impl Foreign) {
    let size: Value = driver.size().into();
    let all = stage.json(&["snapshot", "allocated", "first"]);
    assert!(all["extent_count"].as_u64().unwrap() > 0, "{all}");
    let changed = stage.json(&["snapshot", "delta", "first", "second"]);
    assert!(changed["changed_bytes"].as_u64() >= Some(3 * 4096 - 3584), "{changed}");
    let none = stage.json(&["snapshot", "delta", "second", "third"]);
    assert_eq!((&none["extent_count"], &none["changed_bytes"]), (&0.into(), &0.into()), "{none}");
    assert_eq!(none["volume_capacity_bytes"], size, "{none}");
    let map = stage.json(&["snapshot", "map", "second", "third"]);
    assert_eq!((&map[1]["bytes"], &map[1]["capacity_bytes"]), (&0.into(), &size), "{map}");
    // A name where the driver needs a handle.
    let refused = error(&stage.run(&["snapshot", "delta", "--base-id", "first", "second"]));
    assert!(refused.contains("\"first\" is the name of a VolumeSnapshot"), "{refused}");
}

fn verifies(stage: &Stage<'_>, [first, second, third]: [&PathBuf; 3]) {
    let verified = |snapshots: &[&str], devices: &[&str]| {
        let result = stage.json(&[&["snapshot", "verify"], snapshots, devices].concat());
        assert_eq!(result["proven"], true, "{snapshots:?}: {result}");
        result
    };
    verified(&["first"], &["--target", path(first)]);
    let devices = ["--source", path(first), "--target", path(second)];
    let delta = verified(&["first", "second"], &devices);
    assert_eq!(delta["differing_blocks"], 3, "{delta}");
    let devices = ["--source", path(second), "--target", path(third)];
    assert_eq!(verified(&["second", "third"], &devices)["reported_blocks"], 0);
}

impl Foreign for Driver {
    fn name(&self) -> &str {
        &self.name
    }

    fn metadata_endpoint(&self) -> &str {
        self.metadata_endpoint()
    }

    fn volume(&self) -> &str {
        VOLUME
    }

    fn size(&self) -> u64 {
        // Without restoreSize, the listing or the claim has it.
        dialect::SIZE as u64
    }

    fn secret(&self) -> Option<(&str, &str)> {
        self.dialect.secret
    }

    fn write(&self, seed: u64, blocks: &[usize]) {
        self.write(seed, blocks);
    }

    fn snapshot(&self, stage: &Stage<'_>, name: &str) -> (String, PathBuf) {
        let handle = self.snapshot(name);
        stage.cluster.request_snapshot(&stage.namespace, name, CLAIM, &stage.class);
        let size = if self.dialect.has_sizes { dialect::SIZE as u64 } else { 0 };
        stage.set_status(name, &handle, Some(size));
        if self.dialect.has_change_ids {
            let value = self.change_id(&handle);
            let note = json!({ "csi.vsphere.volume/change-id": value });
            let patch = json!({ "metadata": { "annotations": note } });
            let snapshots = stage.cluster.api_in::<VolumeSnapshot>(&stage.namespace);
            stage.cluster.merge(&snapshots, name, &patch);
        }
        let file = stage.directory.join(name);
        fs::write(&file, self.image(&handle)).unwrap();
        (handle, file)
    }

    fn delete(&self, handle: &str) {
        self.delete(handle);
    }

    fn keeps_bases(&self) -> bool {
        !self.dialect.base_must_exist
    }
}

#[test]
fn every_dialect_is_backed_up_through_kubernetes() {
    let Some(cluster) = shared() else { return };
    for dialect in dialect::ALL {
        println!("dialect {}", dialect.name);
        proves(cluster, &Driver::start(cluster, dialect));
    }
}

#[test]
fn a_mover_pod_needs_no_restore_size() {
    let Some(cluster) = shared() else { return };
    let driver = Driver::start(cluster, dialect::ALL[5]);
    assert!(!driver.dialect.has_sizes);
    let stage = Stage::new(cluster, &driver);
    let own = [
        rule("batch", &["jobs"], &["create", "get", "delete"]),
        rule("", &["pods"], &["list"]),
        rule("", &["pods/log"], &["get"]),
    ];
    cluster.grant(&stage.backup, &own);
    driver.write(1, &[3]);
    let (_, image) = Foreign::snapshot(&driver, &stage, "first");
    let mut movers = Movers::start(cluster, &stage.namespace);
    movers.hold("first", image);
    let create = ["backup", "create", "first", "--repository", "claim:a", "--quiet"];
    let output = movers.run(stage.command(&create), usize::MAX);
    let created: Value = serde_json::from_str(&stdout_of(output)).unwrap();
    assert_eq!(created["capacity_bytes"], dialect::SIZE as u64);
}

#[test]
#[ignore = "full tier"]
fn host_path_is_backed_up_through_kubernetes() {
    let Some(cluster) = shared() else { return };
    for kind in ["FIXED_LENGTH", "VARIABLE_LENGTH"] {
        let Some(driver) = HostPath::start(cluster, kind) else {
            println!("CSI_LOOPBACK_HOSTPATH is not set; only the dialects stand for host-path");
            return;
        };
        proves(cluster, &driver);
    }
}

/// Runs a command over the driver's own endpoints.
fn direct(driver: &Driver, directory: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(binary());
    command.args(arguments).args(["--endpoint", driver.endpoint(), "--output", "json"]);
    if driver.dialect.place == Place::TwoSockets {
        command.args(["--metadata-endpoint", driver.metadata_endpoint()]);
    }
    if let Some((name, value)) = driver.dialect.secret {
        let secrets = directory.join("secrets");
        fs::create_dir_all(&secrets).unwrap();
        fs::write(secrets.join(name), value).unwrap();
        command.args(["--secrets", path(&secrets)]);
    }
    // Temporary volumes are below it.
    command.env("TMPDIR", directory).stdin(Stdio::null()).output().unwrap()
}

fn over_the_endpoint(cluster: &Cluster, dialect: Dialect) {
    let driver = Driver::start(cluster, dialect);
    let directory = cluster.scratch().join(cluster.unique("direct"));
    fs::create_dir(&directory).unwrap();
    let run = |arguments: &[&str]| direct(&driver, &directory, arguments);
    let json =
        |arguments: &[&str]| -> Value { serde_json::from_str(&stdout_of(run(arguments))).unwrap() };
    driver.write(1, &[0, 3]);
    let first = driver.snapshot("first");
    driver.write(2, &[4, 2304]);
    let second = driver.snapshot("second");
    let third = driver.snapshot("third");
    let base = driver.base_id(&second);
    let none = json(&["snapshot", "delta", "--base-id", &base, &third]);
    let size = match (dialect.has_sizes, dialect.lists) {
        (true, true) => json!(dialect::SIZE),
        _ => Value::Null,
    };
    assert_eq!((&none["extent_count"], &none["volume_capacity_bytes"]), (&0.into(), &size));
    assert_eq!(json(&["snapshot", "verify", &third])["proven"], true);
    if !dialect.has_change_ids {
        assert_eq!(json(&["snapshot", "verify", &second, &third])["proven"], true);
    }
    // A deleted base, by its id and by its name.
    let base = driver.base_id(&first);
    driver.delete(&first);
    let delta = run(&["snapshot", "delta", &base, &second]);
    match dialect.base_must_exist {
        false => drop(stdout_of(delta)),
        true => assert!(error(&delta).starts_with("csi-loopback: NOT_FOUND: "), "{delta:?}"),
    }
    let named = error(&run(&["snapshot", "delta", "first", &second]));
    let is_refused = named.contains("NOT_FOUND: ") || named.contains("INVALID_ARGUMENT: ");
    let hint = "lists no snapshot named \"first\", so this was sent as an id";
    assert!(is_refused && named.contains(hint) == dialect.lists, "{named}");

    let repository = directory.join("repository");
    let place = ["--repository", path(&repository)];
    let create = run(&[&["backup", "create", second.as_str()], &place[..]].concat());
    if !dialect.lists {
        assert!(error(&create).contains("cannot list snapshots"), "{create:?}");
        assert_eq!(driver.copies(), 0);
        return;
    }
    stdout_of(create);
    let next = json(&[&["backup", "create", third.as_str()], &place[..]].concat());
    assert_eq!(next["kind"] == "full", dialect.has_change_ids, "{next}");
    assert_eq!(driver.copies(), 0, "no temporary volume remains");
    let to = directory.join("to");
    let mut restore = Command::new(binary());
    restore.args(["restore", &third, "--to", path(&to)]).args(place);
    stdout_of(restore.output().unwrap());
    assert!(fs::read(&to).unwrap()[..dialect::SIZE] == driver.image(&third));
}

#[test]
fn every_dialect_is_backed_up_over_its_endpoint() {
    let Some(cluster) = shared() else { return };
    for dialect in dialect::ALL {
        println!("dialect {}", dialect.name);
        over_the_endpoint(cluster, dialect);
    }
}

#[test]
fn two_drivers_have_sessions_of_one_manager() {
    let Some(cluster) = shared() else { return };
    let _manager = manager::start(cluster);
    let drivers = [dialect::ALL[0], dialect::ALL[3]].map(|one| Driver::start(cluster, one));
    let stages = [&drivers[0], &drivers[1]].map(|driver| Stage::new(cluster, driver));
    for (driver, stage) in drivers.iter().zip(&stages) {
        driver.write(1, &[3]);
        Foreign::snapshot(driver, stage, "first");
        driver.write(2, &[3, 9]);
        Foreign::snapshot(driver, stage, "second");
        Foreign::snapshot(driver, stage, "third");
    }
    for stage in &stages {
        let listed =
            |base, target| stage.json(&["snapshot", "delta", base, target, "--api", "session"]);
        assert_eq!(listed("first", "second")["changed_bytes"], 8192);
        assert_eq!(listed("second", "third")["extent_count"], 0);
    }
}

#[test]
fn a_class_of_another_driver_sends_no_secret() {
    let Some(cluster) = shared() else { return };
    let [own, other] = [dialect::ALL[0], dialect::ALL[1]].map(|one| Driver::start(cluster, one));
    let stage = Stage::new(cluster, &own);
    let secret = "secret-of-the-other-driver";
    cluster.secret(&stage.namespace, "other", &[("password", secret)]);
    let class = cluster.snapshot_class_with_secret(&other.name, &stage.namespace, "other");
    own.write(1, &[3]);
    let handle = own.snapshot("first");
    // The content has no class, as an administrator may write it; the user chooses one.
    let content = cluster.unique("content");
    let spec = json!({
        "driver": own.name, "deletionPolicy": "Retain", "source": { "snapshotHandle": handle },
        "volumeSnapshotRef": { "namespace": stage.namespace, "name": "first" },
    });
    let contents = cluster.api::<VolumeSnapshotContent>();
    cluster.create(&contents, json!({ "metadata": { "name": content }, "spec": spec }));
    let source = json!({ "volumeSnapshotContentName": content });
    let spec = json!({ "source": source, "volumeSnapshotClassName": class });
    let snapshots = cluster.api_in::<VolumeSnapshot>(&stage.namespace);
    cluster.create(&snapshots, json!({ "metadata": { "name": "first" }, "spec": spec }));
    let status = json!({ "readyToUse": true, "snapshotHandle": handle });
    cluster.merge_status(&contents, &content, &status);
    cluster.wait_until_ready(&stage.namespace, "first");

    let refused = error(&stage.run(&["snapshot", "allocated", "first"]));
    let words = format!("belongs to the driver {}", other.name);
    assert!(refused.contains("INVALID_ARGUMENT") && refused.contains(&words), "{refused}");
    assert!(!refused.contains(secret));
    assert_eq!(own.secrets(), [], "the driver was called");
}
