//! With a fake driver, for behavior that ours never shows.

use csi_loopback::proto::csi::v1 as csi;
use csi_loopback::proto::snapshotmetadata as api;
use prost::Message;
use support::cluster::shared;
use tonic::{Code, Status};

use support::cluster::Cluster;
use support::cluster::access::{rule, sidecar_rules};
use support::cluster::fake_driver::{Fake, Script};
use support::cluster::programs::Served;
use support::cluster::sidecar::{http_at, spawn};
use support::cluster::sidecar_rig::{AUDIENCE, Answer, client_at, collect, http};
use support::cluster::tls::Authority;
use support::driver::wait_for;

const SECRET: &str = "hunter2-hunter2-hunter2";

/// A fake driver, a snapshot that Kubernetes knows, and our sidecar.
struct Stage<'a> {
    cluster: &'a Cluster,
    namespace: String,
    backup: support::cluster::access::Account,
    authority: Authority,
    sidecar: Served,
    driver: Fake,
}

impl<'a> Stage<'a> {
    fn new(cluster: &'a Cluster, capable: bool, script: Script) -> Self {
        Self::with(cluster, capable, script, &[])
    }

    /// With additional flags of the sidecar.
    fn with(cluster: &'a Cluster, capable: bool, script: Script, more: &[&str]) -> Self {
        let name = cluster.unique("fake");
        let driver =
            cluster.block_on(async { Fake::start(cluster.scratch(), &name, capable, script) });
        let namespace = cluster.namespace("apps");
        cluster.secret(&namespace, "snapshotter", &[("password", SECRET)]);
        let class = cluster.snapshot_class_with_secret(&name, &namespace, "snapshotter");
        cluster.snapshot_with_status(&namespace, "first", &name, &class, "handle-1");
        let authority = Authority::new("authority");
        let certificate = authority.certify(cluster.scratch(), &name);
        let own = cluster.account(&namespace, "sidecar");
        cluster.grant(&own, &sidecar_rules());
        let kubeconfig = cluster.kubeconfig_of(&own);
        let flags = [&["--audience", AUDIENCE, "--log-level", "trace"], more].concat();
        let sidecar = spawn(cluster, &driver.socket, &kubeconfig, &certificate, &flags);
        let health = || http_at(sidecar.http_port, "/health").unwrap_or_default();
        wait_for("it is ready", || health().starts_with("HTTP/1.1 200"));
        let backup = cluster.account(&namespace, "backup");
        let right = rule("snapshot.storage.k8s.io", &["volumesnapshots"], &["get"]);
        cluster.grant_in(&namespace, &backup, &[right]);
        Self { cluster, namespace, backup, authority, sidecar, driver }
    }

    fn ask(&self) -> Result<Answer, Status> {
        let request = api::GetMetadataAllocatedRequest {
            security_token: self.cluster.token(&self.backup, Some(AUDIENCE)),
            namespace: self.namespace.clone(),
            snapshot_name: "first".into(),
            ..Default::default()
        };
        let client = client_at(self.cluster, &self.sidecar, &self.authority.pem());
        self.cluster.block_on(collect(client, request.into()))
    }
}

#[test]
fn a_driver_without_the_service_is_unimplemented() {
    let Some(cluster) = shared() else { return };
    let stage = Stage::new(cluster, false, Script::Nothing);
    let refused = stage.ask().unwrap_err();
    assert_eq!(refused.code(), Code::Unimplemented, "{refused:?}");
    let metrics = http(&stage.sidecar, "/metrics");
    for line in ["driver_capable 0", "requests_refused_total{reason=\"no_metadata_service\"} 1"] {
        assert!(metrics.contains(line), "{line}: {metrics}");
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
fn each_end_of_the_drivers_stream_has_its_code() {
    let Some(cluster) = shared() else { return };
    let unknown = Script::Ends(Code::Unknown, "oops".into());
    let refused = Stage::new(cluster, true, unknown).ask().unwrap_err();
    assert_eq!((refused.code(), refused.message()), (Code::Internal, "oops"));
    for (script, code, words) in [
        (Script::EndsWithoutStatus, Code::Unavailable, "the response is incomplete"),
        (Script::Large(33 << 20), Code::ResourceExhausted, "max_results"),
    ] {
        let refused = Stage::new(cluster, true, script).ask().unwrap_err();
        assert_eq!(refused.code(), code, "{words}: {refused:?}");
        assert!(refused.message().contains(words), "{words}: {refused:?}");
    }
}

#[test]
fn check_streams_ends_an_invalid_stream() {
    let Some(cluster) = shared() else { return };
    let overlapping = csi::GetMetadataAllocatedResponse {
        block_metadata_type: 2,
        volume_capacity_bytes: 1 << 30,
        block_metadata: vec![csi::BlockMetadata { byte_offset: 0, size_bytes: 4096 }; 2],
    };
    let script = Script::Bytes(overlapping.encode_to_vec());
    let stage = Stage::new(cluster, true, script.clone());
    assert_eq!(stage.ask().unwrap().extents(), [(0, 4096), (0, 4096)], "relayed as it is");
    let stage = Stage::with(cluster, true, script, &["--check-streams"]);
    let refused = stage.ask().unwrap_err();
    assert_eq!(refused.code(), Code::Internal, "{refused:?}");
    assert!(refused.message().contains("overlap"), "{refused:?}");
}

#[test]
fn a_missing_secret_is_named() {
    let Some(cluster) = shared() else { return };
    let stage = Stage::new(cluster, true, Script::Nothing);
    assert_eq!(stage.ask().unwrap(), Answer::default());
    let secrets = cluster.api_in::<k8s_openapi::api::core::v1::Secret>(&stage.namespace);
    cluster.delete(&secrets, "snapshotter");
    let refused = stage.ask().unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable, "{refused:?}");
    assert!(refused.message().contains(&format!("{}/snapshotter", stage.namespace)), "{refused:?}");
}
