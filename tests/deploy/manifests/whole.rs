//! Driver, csi-snapshotter, sidecar and backup application together, each with the rights of
//! deploy/ only. The sidecar creates its certificate and its SnapshotMetadataService.

use std::process::Command;
use support::cluster::shared;
use support::driver::binary;

use csi_loopback::backend::PoolKind;
use csi_loopback::kubernetes::metadata_service::SnapshotMetadataService;
use csi_loopback::kubernetes::session::SnapshotServiceConfiguration;
use csi_loopback::proto::snapshotmetadata as api;
use serde_json::{Value, json};

use super::sessions;
use super::{DRIVER, NAMESPACE, account, apply, apply_fresh_base, deploy, objects, sidecar};
use support::cluster::Cluster;
use support::cluster::manager::{self, Start};
use support::cluster::programs::{Process, Served, finish, free_port, stdout_of};
use support::cluster::sidecar::spawn_at;
use support::cluster::sidecar_rig::{CAPACITY, client_at, collect};
use support::cluster::storage::Ready;
use support::cluster::tls::Authority;
use support::driver::{Driver, block};
use support::requests::{all_snapshots, delta};
use support::{BLOCK, path, pattern, write_direct};

/// The namespace whose snapshots examples/backup-app may read, and the class of the base.
const DEMO: &str = "backup-demo";
const CLASS: &str = "csi-loopback";

/// The audience in the sidecar's arguments.
fn audience(cluster: &Cluster) -> String {
    let all = objects(cluster, "base").into_iter();
    let containers = all.flat_map(|object| {
        object["spec"]["template"]["spec"]["containers"].as_array().cloned().unwrap_or_default()
    });
    let arguments = containers.flat_map(|one| one["args"].as_array().cloned().unwrap_or_default());
    let mut audiences = arguments.filter_map(|argument| {
        argument.as_str().unwrap().strip_prefix("--audience=").map(str::to_owned)
    });
    audiences.next().expect("the sidecar has an audience")
}

/// Driver and csi-snapshotter, with two snapshots: of one block, and of a second block next to it.
struct Stage {
    /// The claim's volume.
    volume: String,
    claim: String,
    first: Ready,
    second: Ready,
    // Dropped in this order.
    snapshotter: Process,
    driver: Driver,
}

impl Stage {
    fn set(cluster: &Cluster) -> Self {
        let driver = Driver::with(PoolKind::Image, &["--driver-name", DRIVER]);
        let volume = driver.volume("data", CAPACITY, block());
        let claim = cluster.unique("bound");
        cluster.claim(DEMO, &claim, DRIVER, &volume, CAPACITY);
        let controller = cluster.kubeconfig_of(&account(NAMESPACE, "csi-loopback-controller"));
        let snapshotter = cluster.snapshotter_as(&controller, &driver.socket());
        let write = |at: u64| {
            driver.with_device(&volume, |device| {
                write_direct(device, at * BLOCK, &pattern(at, BLOCK as usize));
            });
        };
        write(3);
        let first = cluster.snapshot(DEMO, "first", &claim, CLASS);
        write(700);
        let second = cluster.snapshot(DEMO, "second", &claim, CLASS);
        Self { volume, claim, first, second, snapshotter, driver }
    }

    /// The sidecar with the arguments of its container, and its real address.
    fn sidecar(&self, cluster: &Cluster, more: &[&str]) -> Served {
        let ports = (free_port(), free_port());
        let address = format!("localhost:{}", ports.0);
        let certificate = Authority::new("unused").certify(self.driver.scratch(), "sidecar");
        let audience = audience(cluster);
        let own = cluster.kubeconfig_of(&sidecar());
        let flags = [
            &[
                "--audience",
                audience.as_str(),
                "--self-signed",
                "--self-signed-secret",
                "csi-loopback-metadata-tls",
                "--namespace",
                NAMESPACE,
                "--manage-service",
                "--service-address",
                &address,
            ],
            more,
        ]
        .concat();
        let socket = self.driver.socket();
        let mut served = spawn_at(ports, cluster, &socket, &own, &certificate, &flags);
        served.process.wait_for("the sidecar is ready", |_| {
            std::net::TcpStream::connect(("127.0.0.1", served.http_port)).ok()
        });
        served
    }

    /// Deletes the snapshots, and asserts that the API server rejected no request.
    fn strike(self, cluster: &Cluster, others: &[(&str, &Process)]) {
        for snapshot in [&self.first, &self.second] {
            cluster.delete_snapshot(snapshot);
        }
        for (what, process) in others.iter().chain(&[("csi-snapshotter", &self.snapshotter)]) {
            let log = process.log();
            let refused: Vec<_> = log.lines().filter(|line| line.contains("forbidden")).collect();
            assert!(refused.is_empty(), "{what}: {refused:#?}");
        }
    }
}

#[test]
fn the_rights_of_deploy_suffice_for_snapshot_metadata() {
    let Some(cluster) = shared() else { return };
    apply_fresh_base(cluster);
    stdout_of(apply(cluster, &deploy("examples/backup-app")));
    let stage = Stage::set(cluster);
    let mut served = stage.sidecar(cluster, &[]);
    // The sidecar publishes its authority.
    let services = cluster.api::<SnapshotMetadataService>();
    let authority = served.process.wait_for("the SnapshotMetadataService", |_| {
        let service = cluster.get(&services, DRIVER)?;
        String::from_utf8(service.spec.ca_cert.0).ok().filter(|pem| pem.contains("BEGIN"))
    });
    let backup = account("backup-app", "backup-app");
    let security_token = cluster.token(&backup, Some(&audience(cluster)));
    let ask = |request: support::cluster::sidecar_rig::MetadataRequest| {
        let answer = collect(client_at(cluster, &served, &authority), request);
        match cluster.block_on(answer) {
            Ok(answer) => answer.extents(),
            Err(status) => panic!("{status:?}\n{}", served.process.log()),
        }
    };
    let allocated = api::GetMetadataAllocatedRequest {
        security_token: security_token.clone(),
        namespace: DEMO.to_owned(),
        snapshot_name: "first".to_owned(),
        ..Default::default()
    };
    assert_eq!(ask(allocated.into()), [(3 * BLOCK, BLOCK)]);
    let delta = api::GetMetadataDeltaRequest {
        security_token: security_token.clone(),
        namespace: DEMO.to_owned(),
        base_snapshot_id: stage.first.handle.clone(),
        target_snapshot_name: "second".to_owned(),
        ..Default::default()
    };
    assert_eq!(ask(delta.into()), [(700 * BLOCK, BLOCK)]);
    stage.strike(cluster, &[("sidecar", &served.process)]);
}

#[test]
fn the_rights_of_deploy_suffice_for_group_snapshots() {
    let Some(cluster) = shared() else { return };
    apply_fresh_base(cluster);
    stdout_of(apply(cluster, &deploy("examples/backup-app")));
    let stage = Stage::set(cluster);
    let (other, other_claim) =
        (stage.driver.volume("other", CAPACITY, block()), cluster.unique("other"));
    cluster.claim(DEMO, &other_claim, DRIVER, &other, CAPACITY);
    stage.driver.with_device(&stage.volume, |device| {
        write_direct(device, 900 * BLOCK, &pattern(900, BLOCK as usize));
    });
    let kubectl =
        |arguments: &[&str]| stdout_of(cluster.kubectl(&[&["-n", DEMO], arguments].concat()));
    for claim in [&stage.claim, &other_claim] {
        kubectl(&["label", "persistentvolumeclaim", claim, "part-of=database"]);
    }
    let class = json!({
        "apiVersion": "groupsnapshot.storage.k8s.io/v1", "kind": "VolumeGroupSnapshotClass",
        "metadata": { "name": cluster.unique("group-class") }, "driver": DRIVER, "deletionPolicy": "Delete",
    });
    let group = json!({
        "apiVersion": "groupsnapshot.storage.k8s.io/v1", "kind": "VolumeGroupSnapshot",
        "metadata": { "name": "group", "namespace": DEMO },
        "spec": {
            "source": { "selector": { "matchLabels": { "part-of": "database" } } },
            "volumeGroupSnapshotClassName": class["metadata"]["name"],
        },
    });
    for object in [class, group] {
        let file = stage.driver.scratch().join("object.json");
        std::fs::write(&file, object.to_string()).unwrap();
        kubectl(&["create", "-f", path(&file)]);
    }
    kubectl(&[
        "wait",
        "volumegroupsnapshot/group",
        "--timeout=60s",
        "--for=jsonpath={.status.readyToUse}=true",
    ]);

    // One VolumeSnapshot for each claim. The first one contains what was written since the previous
    // snapshot.
    let list: Value =
        serde_json::from_str(&kubectl(&["get", "volumesnapshots", "-o", "json"])).unwrap();
    let handles = [&stage.claim, &other_claim].map(|claim| {
        let of_claim = |snapshot: &&Value| {
            snapshot["status"]["volumeGroupSnapshotName"] == "group"
                && snapshot["spec"]["source"]["persistentVolumeClaimName"] == claim.as_str()
        };
        let snapshot =
            list["items"].as_array().unwrap().iter().find(of_claim).expect("one for each claim");
        cluster.wait_until_ready(DEMO, snapshot["metadata"]["name"].as_str().unwrap()).handle
    });
    let changed = stage.driver.ok(delta(&stage.second.handle, &handles[0])).extents();
    assert_eq!(changed, [(900 * BLOCK, BLOCK)]);
    kubectl(&["delete", "volumegroupsnapshot/group", "--timeout=60s"]);
    cluster.wait_for("the driver has deleted the snapshots of the group", || {
        let left = all_snapshots(&stage.driver);
        left.iter().all(|one| !handles.contains(&one.snapshot_id)).then_some(())
    });
    stage.strike(cluster, &[]);
}

#[test]
#[ignore = "full tier"]
fn the_rights_of_deploy_suffice_for_snapshot_sessions() {
    let Some(cluster) = shared() else { return };
    apply_fresh_base(cluster);
    sessions::apply_fresh(cluster);
    let stage = Stage::set(cluster);
    let mut served = stage.sidecar(cluster, &["--session-api"]);
    let configurations = cluster.api::<SnapshotServiceConfiguration>();
    served
        .process
        .wait_for("the SnapshotServiceConfiguration", |_| cluster.get(&configurations, DRIVER));

    // The arguments of its Deployment, except for the address.
    let kubeconfig = cluster.kubeconfig_of(&sessions::manager());
    let flags = ["--self-signed-secret", "csi-loopback-session-manager-tls"];
    let start = Start {
        kubeconfig: &kubeconfig,
        namespace: sessions::MANAGERS,
        flags: &flags,
        ahead: None,
    };
    let mut manager = manager::spawn(cluster, &start);
    sessions::call_webhook_at(cluster, manager.port);
    manager.process.wait_for("the webhook", |_| sessions::is_served(cluster).then_some(()));

    // As the application's pods do.
    let application = cluster.kubeconfig_of(&sessions::session_backup());
    let list = |snapshots: &[&str]| {
        let mut command = Command::new(binary());
        command.arg("snapshot").args(snapshots).args(["--api=session", "--namespace", DEMO]);
        command.args(["--output", "json", "--timeout", "60s", "--kubeconfig"]).arg(&application);
        let output = finish(command);
        let logs = (manager.process.log(), served.process.log());
        assert!(output.status.success(), "{output:?}\n{}\n{}", logs.0, logs.1);
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        let extents = answer["extents"].as_array().unwrap().iter();
        let number = |one: &Value, field: &str| one[field].as_u64().unwrap();
        extents.map(|one| (number(one, "offset"), number(one, "length"))).collect::<Vec<_>>()
    };
    assert_eq!(list(&["allocated", "first"]), [(3 * BLOCK, BLOCK)]);
    assert_eq!(list(&["delta", "first", "second"]), [(700 * BLOCK, BLOCK)]);

    // By hand, as in the example.
    let request = deploy("examples/backup-app-session/request.yaml");
    let made = stdout_of(cluster.kubectl(&["create", "-o", "name", "-f", support::path(&request)]));
    let ready = "--for=jsonpath={.status.state}=Ready";
    stdout_of(cluster.kubectl(&["-n", DEMO, "wait", "--timeout=60s", ready, made.trim()]));
    let name = made.trim().rsplit('/').next().unwrap().to_owned();
    cluster.wait_for("the event on the request", || {
        let about = format!("--field-selector=regarding.name={name}");
        let message = stdout_of(cluster.kubectl(&[
            "-n",
            DEMO,
            "get",
            "events.events.k8s.io",
            &about,
            "-o",
            "name",
        ]));
        (!message.is_empty()).then_some(())
    });
    stdout_of(cluster.kubectl(&["-n", DEMO, "delete", made.trim()]));
    assert_eq!(
        stdout_of(cluster.kubectl(&["get", "ssr,ssd", "-A", "-o", "name"])),
        "",
        "nothing is left"
    );

    stage.strike(cluster, &[("sidecar", &served.process), ("session manager", &manager.process)]);
    // Ends them first: they would write again what is deleted here.
    drop((manager, served));
    sessions::apply_fresh(cluster);
}
