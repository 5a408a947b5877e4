//! `snapshot allocated --api session` as a backup application's ServiceAccount, with only the
//! session manager: the life of its request. Listings are tested where a sidecar exists.

use std::process::{Child, Command, Output, Stdio};
use support::cluster::shared;
use support::driver::binary;

use csi_loopback::kubernetes::session::{SessionState, SnapshotServiceConfiguration};
use k8s_openapi::ByteString;
use kube::ResourceExt;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use super::rig::{Options, Rig, token};
use support::cluster::Cluster;
use support::cluster::access::{Account, rule};
use support::cluster::tls::Authority;
use support::path;

/// Prefix of the names of the command's requests.
const PREFIX: &str = "csi-loopback-";

/// The KEP's permissions. They lack `watch`, so that both ways to wait are tested.
fn backup(rig: &Rig<'_>, more: &[&str]) -> Account {
    let account = rig.cluster.account(&rig.apps, &rig.cluster.unique("backup"));
    let verbs = [&["create", "get", "delete"], more].concat();
    let ours = rule("cbt.storage.k8s.io", &["snapshotsessionrequests"], &verbs);
    let theirs = rule("snapshot.storage.k8s.io", &["volumesnapshots"], &["get"]);
    rig.cluster.grant_in(&rig.apps, &account, &[ours, theirs]);
    account
}

fn start(rig: &Rig<'_>, account: &Account, flags: &[&str]) -> Child {
    let kubeconfig = rig.cluster.kubeconfig_of(account);
    Command::new(binary())
        .args(["snapshot", "allocated", "monday", "--api", "session"])
        .args(["--namespace", &rig.apps, "--kubeconfig", path(&kubeconfig)])
        .args(flags)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// A rig whose driver's configuration has valid certificates, although no sidecar runs.
fn certified(cluster: &Cluster) -> Rig<'_> {
    let rig = Rig::new(cluster);
    let ca = ByteString(Authority::new("of a sidecar").pem().into_bytes());
    let api = cluster.api::<SnapshotServiceConfiguration>();
    cluster.merge(&api, &rig.driver, &json!({ "spec": { "caCert": ca } }));
    rig
}

/// The request of the running command.
fn made(rig: &Rig<'_>) -> Option<String> {
    let api = rig.requests();
    let all = rig.cluster.list(&api);
    all.into_iter().map(|one| one.name_any()).find(|name| name.starts_with(PREFIX))
}

/// The error of a command that must fail and leave no request.
#[track_caller]
fn failure(rig: &Rig<'_>, output: Output) -> String {
    let words = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && output.stdout.is_empty(), "{words}");
    rig.cluster.wait_for("no request is left", || made(rig).is_none().then_some(()));
    words
}

#[test]
fn a_failed_session_is_reported_and_deleted() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, Options { configured: false, ..Options::default() });
    rig.snapshot("monday");
    for more in [&["watch"][..], &[]] {
        let account = backup(&rig, more);
        let words = failure(&rig, start(&rig, &account, &[]).wait_with_output().unwrap());
        assert!(words.contains(PREFIX) && words.contains("is Failed: "), "{words}");
        assert!(words.contains(&rig.driver) && words.contains("--api metadata"), "{words}");
    }
}

#[test]
#[ignore = "full tier"]
fn an_interrupted_command_deletes_its_request() {
    let Some(cluster) = shared() else { return };
    let rig = certified(cluster);
    let content = rig.unready(&rig.driver, "monday");
    let account = backup(&rig, &["watch"]);
    let words =
        failure(&rig, start(&rig, &account, &["--timeout", "8s"]).wait_with_output().unwrap());
    assert!(words.contains("--timeout") && words.contains("is Pending: "), "{words}");

    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        let child = start(&rig, &account, &[]);
        cluster.wait_for("the request is made", || made(&rig));
        kill(Pid::from_raw(child.id().cast_signed()), signal).unwrap();
        let words = failure(&rig, child.wait_with_output().unwrap());
        assert!(words.contains("interrupted"), "{signal}: {words}");
    }

    // With a ready session whose address has no listener.
    rig.make_ready(&content, "monday");
    let child = start(&rig, &account, &["--address", "localhost:1", "--lifetime", "5min"]);
    let name = cluster.wait_for("the request is made", || made(&rig));
    let ready = rig.wait_for(&name, SessionState::Ready);
    assert_eq!(ready.spec.lifetime_seconds, Some(300));
    std::thread::sleep(std::time::Duration::from_secs(1));
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGINT).unwrap();
    let words = failure(&rig, child.wait_with_output().unwrap());
    assert!(words.contains("interrupted") && !words.contains(&token(&ready)), "{words}");
    cluster.wait_for("its data is gone", || rig.data().is_empty().then_some(()));
}

#[test]
fn a_command_does_not_delete_a_given_session() {
    let Some(cluster) = shared() else { return };
    let rig = certified(cluster);
    rig.snapshot("monday");
    let secret = rig.session("given", &["monday"]);
    let account = backup(&rig, &[]);
    let flags = ["--session", "given", "--address", "localhost:1", "--timeout", "8s"];
    let words = failure(&rig, start(&rig, &account, &flags).wait_with_output().unwrap());
    assert!(words.contains("cannot connect to localhost:1") && !words.contains(&secret), "{words}");
    assert_eq!(token(&rig.get("given").unwrap()), secret);
    assert_eq!(rig.data().len(), 1);
}
