//! With a fake driver, for behavior that ours never shows.

use std::time::Duration;
use support::cluster::shared;

use csi_loopback::grpc::fingerprint;
use csi_loopback::proto::csi::v1 as csi;
use csi_loopback::proto::snapshotsession as api;
use prost::Message;
use tonic::{Code, Status};

use support::cluster::Cluster;
use support::cluster::access::sidecar_rules;
use support::cluster::fake_driver::{Fake, Script};
use support::cluster::programs::Served;
use support::cluster::session::{HOUR, allocated, session_rules};
use support::cluster::sidecar::{http, start};
use support::cluster::tls::Authority;
use support::driver::wait_for;
use support::requests::Metadata;

const SECRET: &str = "hunter2-hunter2-hunter2";

/// A fake driver, a snapshot that Kubernetes knows, a session for it, and our sidecar.
struct Stage<'a> {
    cluster: &'a Cluster,
    authority: Authority,
    token: String,
    sidecar: Served,
    driver: Fake,
}

impl<'a> Stage<'a> {
    fn new(cluster: &'a Cluster, secret: bool, script: Script) -> Self {
        let name = cluster.unique("fake");
        let driver =
            cluster.block_on(async { Fake::start(cluster.scratch(), &name, true, script) });
        let namespace = cluster.namespace("apps");
        let class = match secret {
            true => {
                cluster.secret(&namespace, "snapshotter", &[("password", SECRET)]);
                cluster.snapshot_class_with_secret(&name, &namespace, "snapshotter")
            }
            false => cluster.snapshot_class(&name, &[]),
        };
        let first = cluster.snapshot_with_status(&namespace, "first", &name, &class, "handle-1");
        let token = cluster.session(&namespace, &name, &[&first], HOUR);
        let authority = Authority::new("authority");
        let certificate = authority.certify(cluster.scratch(), &name);
        let own = cluster.account(&namespace, "sidecar");
        cluster.grant(&own, &sidecar_rules());
        cluster.grant_in(&namespace, &own, &session_rules(&["get", "list", "watch"]));
        let kubeconfig = cluster.kubeconfig_of(&own);
        let flags = [
            "--session-api",
            "--metadata-api=false",
            "--namespace",
            &namespace,
            "--log-level",
            "trace",
        ];
        let sidecar = start(cluster, &driver.socket, &kubeconfig, &certificate, &flags);
        Self { cluster, authority, token, sidecar, driver }
    }

    fn ask(&self) -> Result<Metadata, Status> {
        let request = allocated(&self.token, "first");
        self.cluster.call_session(&self.sidecar, &self.authority.pem(), request)
    }
}

#[test]
fn secrets_reach_only_the_driver() {
    let Some(cluster) = shared() else { return };
    let repeated = format!("login with {SECRET} failed");
    let stage = Stage::new(cluster, true, Script::Ends(Code::PermissionDenied, repeated));
    let refused = stage.ask().unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert_eq!(refused.message(), "login with [hidden] failed");
    assert!(
        stage.driver.seen_sessions.lock().unwrap().is_empty(),
        "that API has no field for them"
    );
    let seen = stage.driver.seen.lock().unwrap().clone();
    let request = csi::GetMetadataAllocatedRequest::decode(seen[0].clone()).unwrap();
    assert_eq!(request.snapshot_id, "handle-1");
    assert_eq!(request.secrets.get("password").map(String::as_str), Some(SECRET));
    wait_for("the log of the call", || stage.sidecar.process.log().contains("PERMISSION_DENIED"));
    let shown = stage.sidecar.process.log() + &http(&stage.sidecar, "/metrics");
    assert!(!shown.contains(SECRET), "a secret is shown");
    assert!(shown.contains("TRACE"), "the log is at its most verbose");
}

#[test]
fn the_driver_receives_a_fingerprint_of_the_token() {
    let Some(cluster) = shared() else { return };
    let stage = Stage::new(cluster, false, Script::Ends(Code::Ok, String::new()));
    assert_eq!(stage.ask().unwrap().extents(), [(0, 4096)]);
    let seen = stage.driver.seen_sessions.lock().unwrap().clone();
    let request = api::GetAllocatedRequest::decode(seen[0].clone()).unwrap();
    let expected = api::GetAllocatedRequest {
        session_token: fingerprint(&stage.token),
        snapshot: "handle-1".into(),
        ..Default::default()
    };
    assert_eq!(request, expected);
}

#[test]
fn a_message_without_a_style_ends_the_stream() {
    let Some(cluster) = shared() else { return };
    let without = csi::GetMetadataAllocatedResponse {
        block_metadata_type: 0,
        volume_capacity_bytes: 1 << 30,
        block_metadata: vec![csi::BlockMetadata { byte_offset: 0, size_bytes: 4096 }],
    };
    for bytes in [without.encode_to_vec(), vec![0xff; 64]] {
        let stage = Stage::new(cluster, false, Script::Bytes(bytes));
        let refused = stage.ask().unwrap_err();
        assert_eq!(refused.code(), Code::Internal, "{refused:?}");
        assert!(refused.message().contains("block_metadata_type"), "{refused:?}");
        std::thread::sleep(Duration::from_millis(50));
        let counted = "requests_refused_total{reason=\"no_style\"} 1";
        assert!(http(&stage.sidecar, "/metrics").contains(counted));
    }
}
