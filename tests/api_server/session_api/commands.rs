//! `snapshot allocated` and `delta --api session`, as a backup application's ServiceAccount, with
//! the session manager: all parts are real.

use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;
use support::cluster::shared;
use support::driver::binary;

use csi_loopback::kubernetes::metadata_service::DRIVER_LABEL;
use csi_loopback::kubernetes::session::{
    SnapshotServiceConfiguration, SnapshotSessionData, SnapshotSessionRequest,
};
use k8s_openapi::ByteString;
use nix::sys::signal::Signal;
use serde_json::json;

use super::rig::{Options, Rig};
use crate::aggregated_api::rig::listed;
use support::cluster::Cluster;
use support::cluster::access::{Account, backup_rules, rule};
use support::cluster::manager;
use support::cluster::programs::Served;
use support::cluster::sidecar::{AUDIENCE, spawn_at};
use support::driver::wait_for;
use support::path;

/// A rig with both APIs published, a manager and a backup application.
struct Whole<'a> {
    rig: Rig<'a>,
    _manager: Served,
    backup: Account,
}

impl<'a> Whole<'a> {
    fn with(cluster: &'a Cluster, driver: &[&str]) -> Self {
        let rig = Rig::with(cluster, Options { driver, ..Options::default() });
        let (address, ca) = (rig.sidecar.address(), rig.authority.pem());
        cluster.metadata_service(&rig.driver_name, &address, AUDIENCE, &ca);
        let object = json!({
            "metadata": { "name": rig.driver_name, "labels": { DRIVER_LABEL: rig.driver_name } },
            "spec": {
                "address": address,
                "caCert": ByteString(ca.into_bytes()),
                "driverNamespace": rig.home,
            },
        });
        cluster.create(&cluster.api::<SnapshotServiceConfiguration>(), object);
        let manager = manager::start(cluster);
        let backup = rig.backup();
        cluster.grant(&backup, &backup_rules());
        let ours =
            rule("cbt.storage.k8s.io", &["snapshotsessionrequests"], &["create", "get", "delete"]);
        cluster.grant_in(&rig.namespace, &backup, &[ours]);
        Self { rig, _manager: manager, backup }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(binary());
        let kubeconfig = self.rig.cluster.kubeconfig_of(&self.backup);
        command
            .arg("snapshot")
            .args(arguments)
            .args(["--namespace", &self.rig.namespace, "--kubeconfig", path(&kubeconfig)])
            .args(["--output", "json"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Waits until no request and no data exists.
    #[track_caller]
    fn nothing_left(&self) {
        let cluster = self.rig.cluster;
        let requests = cluster.api_in::<SnapshotSessionRequest>(&self.rig.namespace);
        let data = cluster.api_in::<SnapshotSessionData>(&self.rig.home);
        cluster.wait_for("nothing is left of the session", || {
            (cluster.list(&requests).is_empty() && cluster.list(&data).is_empty()).then_some(())
        });
    }
}

#[test]
#[ignore = "full tier"]
fn a_session_listing_survives_a_killed_sidecar() {
    let Some(cluster) = shared() else { return };
    // The stall keeps the listing in progress while the sidecar is killed.
    let stall = "stream-stall,after=2,for=30s,method=GetAllocated,times=1";
    let mut whole = Whole::with(cluster, &["--enable-faults", "--fault", stall]);
    whole.rig.write(1, [0, 7, 100, 200, 300]);
    whole.rig.snapshot("first");
    let question = ["allocated", "first", "--api", "session", "--max-results", "1"];
    let child = whole.command(&question).spawn().unwrap();
    wait_for("the answer is under way", || {
        whole.rig.metrics().contains("\ncsi_loopback_sidecar_streams_open 1\n")
    });
    // The extents before the stall must arrive.
    sleep(Duration::from_secs(3));
    let rig = &mut whole.rig;
    rig.sidecar.process.signal(Signal::SIGKILL);
    rig.sidecar.process.stop();
    rig.sidecar = spawn_at(
        (rig.sidecar.port, rig.sidecar.http_port),
        cluster,
        &rig.driver.socket(),
        &cluster.kubeconfig_of(&rig.own),
        &rig.certificate,
        &["--session-api", "--namespace", &rig.home, "--audience", AUDIENCE],
    );
    let output = child.wait_with_output().unwrap();
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    // The driver holds back one of the two extents before the stall.
    assert!(words.contains("resuming from byte 4096"), "{words}");
    let all = listed(output);
    let again = listed(whole.command(&["allocated", "first"]).output().unwrap());
    assert_eq!(all, again);
    assert_eq!(all["extent_count"], 5);
    whole.nothing_left();
}
