//! `snapshot allocated` and `delta --api session`, as a backup application's ServiceAccount, with
//! the session manager: all parts are real.

use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::Duration;
use support::cluster::shared;
use support::driver::binary;

use csi_loopback::kubernetes::metadata_service::DRIVER_LABEL;
use csi_loopback::kubernetes::session::{
    SnapshotServiceConfiguration, SnapshotSessionData, SnapshotSessionRequest,
};
use k8s_openapi::ByteString;
use kube::Api;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::rig::{Options, Rig};
use support::cluster::Cluster;
use support::cluster::access::{Account, backup_rules, rule};
use support::cluster::manager::{self, Start, manager_rules};
use support::cluster::programs::{Served, stdout_of};
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
        let home = cluster.namespace("manager");
        let account = cluster.account(&home, "manager");
        cluster.grant(&account, &manager_rules());
        let kubeconfig = cluster.kubeconfig_of(&account);
        let start = Start { kubeconfig: &kubeconfig, namespace: &home, flags: &[], ahead: None };
        let manager = manager::spawn(cluster, &start);
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
        let requests: Api<SnapshotSessionRequest> = cluster.api_in(&self.rig.namespace);
        let data: Api<SnapshotSessionData> = cluster.api_in(&self.rig.home);
        cluster.wait_for("nothing is left of the session", || {
            let requests = cluster.block_on(requests.list(&Default::default())).unwrap();
            let data = cluster.block_on(data.list(&Default::default())).unwrap();
            (requests.items.is_empty() && data.items.is_empty()).then_some(())
        });
    }
}

/// The listing without its duration.
fn listed(output: Output) -> Value {
    let mut json: Value = serde_json::from_str(&stdout_of(output)).unwrap();
    for time in ["first_message_seconds", "seconds"] {
        json.as_object_mut().unwrap().remove(time).unwrap();
    }
    json
}

#[test]
#[ignore = "full tier"]
fn a_session_listing_equals_the_released_apis() {
    let Some(cluster) = shared() else { return };
    let fixed = ["--block-metadata-type", "fixed", "--block-size", "8Ki"];
    for (driver, style) in [(&[][..], "VARIABLE_LENGTH"), (&fixed, "FIXED_LENGTH")] {
        let whole = Whole::with(cluster, driver);
        whole.rig.write(1, [0, 7, 8, 9, 100]);
        whole.rig.snapshot("first");
        whole.rig.write(2, [7, 300, 301]);
        whole.rig.snapshot("second");
        for question in [
            &["allocated", "second"][..],
            &["delta", "first", "second"],
            &["delta", "second", "second"],
            &["allocated", "second", "--starting-offset", "40960", "--max-results", "1"],
        ] {
            let released = listed(whole.command(question).output().unwrap());
            let session = [question, &["--api", "session"]].concat();
            let session = listed(whole.command(&session).output().unwrap());
            assert_eq!(session, released, "{question:?}");
            assert_eq!(session["block_metadata_type"], style);
            whole.nothing_left();
        }
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
    sleep(Duration::from_secs(1));
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
