//! All of it at work: driver, csi-snapshotter, sidecar and backup application, each with the rights that
//! deploy/ gives it and with nothing else; the sidecar makes its certificate and its SnapshotMetadataService itself.

use csi_loopback::backend::PoolKind;
use csi_loopback::kubernetes::metadata_service::SnapshotMetadataService;
use csi_loopback::proto::snapshotmetadata as api;

use crate::cluster::Cluster;
use crate::cluster::programs::said;
use crate::cluster::tls::Authority;
use crate::rig::{CAPACITY, client_at, collect, spawn};
use crate::support::driver::{Driver, block};
use crate::support::{BLOCK, pattern, write_direct};
use crate::{DRIVER, NAMESPACE, account, apply, apply_base_anew, deploy, objects, sidecar};

/// Where examples/backup-app may read snapshots, and the class of the base.
const DEMO: &str = "backup-demo";
const CLASS: &str = "csi-loopback";

/// The audience that the sidecar's container is given.
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

pub fn the_rights_suffice(cluster: &Cluster) {
    apply_base_anew(cluster);
    said(apply(cluster, &deploy("examples/backup-app")));
    let driver = Driver::with(PoolKind::Image, &["--driver-name", DRIVER]);
    let volume = driver.volume("data", CAPACITY, block());
    cluster.claim(DEMO, "bound", DRIVER, &volume, CAPACITY);

    let controller = cluster.kubeconfig_of(&account(NAMESPACE, "csi-loopback-controller"));
    let snapshotter = cluster.snapshotter_as(&controller, &driver.socket());
    let write = |at: u64| {
        driver.with_device(&volume, |device| {
            write_direct(device, at * BLOCK, &pattern(at, BLOCK as usize));
        });
    };
    write(3);
    let first = cluster.snapshot(DEMO, "first", "bound", CLASS);
    write(700);
    let second = cluster.snapshot(DEMO, "second", "bound", CLASS);

    let authority = Authority::new("backup authority");
    let certificate = authority.certify(driver.scratch(), "sidecar");
    let audience = audience(cluster);
    let own = cluster.kubeconfig_of(&sidecar());
    let flags = [
        "--audience",
        audience.as_str(),
        "--self-signed",
        "--self-signed-secret",
        "csi-loopback-metadata-tls",
        "--namespace",
        NAMESPACE,
        "--manage-service",
        "--service-address",
        "localhost:6443",
    ];
    let mut served = spawn(cluster, &driver.socket(), &own, &certificate, &flags);
    served.process.wait_for("the sidecar is ready", |_| {
        std::net::TcpStream::connect(("127.0.0.1", served.http_port)).ok()
    });
    // Whom to trust, the sidecar says itself.
    let services = cluster.api::<SnapshotMetadataService>();
    let authority = served.process.wait_for("the SnapshotMetadataService", |_| {
        let service = cluster.get(&services, DRIVER)?;
        String::from_utf8(service.spec.ca_cert.0).ok().filter(|pem| pem.contains("BEGIN"))
    });
    let backup = account("backup-app", "backup-app");
    let security_token = cluster.token(&backup, Some(&audience));
    let ask = |asked: crate::rig::Asked| {
        let answer = collect(client_at(cluster, &served, &authority), asked);
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
    for base in ["first", &first.handle] {
        let delta = api::GetMetadataDeltaRequest {
            security_token: security_token.clone(),
            namespace: DEMO.to_owned(),
            base_snapshot_id: base.to_owned(),
            target_snapshot_name: "second".to_owned(),
            ..Default::default()
        };
        assert_eq!(ask(delta.into()), [(700 * BLOCK, BLOCK)], "{base}");
    }
    for snapshot in [&first, &second] {
        cluster.delete_snapshot(snapshot);
    }
    for (what, log) in [("csi-snapshotter", snapshotter.log()), ("sidecar", served.process.log())] {
        let refused: Vec<_> = log.lines().filter(|line| line.contains("forbidden")).collect();
        assert!(refused.is_empty(), "{what}: {refused:#?}");
    }
}
