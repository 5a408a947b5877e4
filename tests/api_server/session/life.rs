//! The life of a session: Pending, Ready, end.

use std::collections::BTreeSet;
use support::cluster::shared;
use support::driver::binary;

use csi_loopback::kubernetes::metadata_service::DRIVER_LABEL;
use csi_loopback::kubernetes::session::{
    FINALIZER, REQUEST_LABEL, SessionState, SnapshotSessionData,
};
use k8s_openapi::api::events::v1::Event;
use kube::ResourceExt;
use serde_json::json;

use super::rig::{ADDRESS, CA, Options, Rig, a_while, lifetime, reason_of, token};
use support::cluster::proxy::Way;

#[test]
fn a_request_becomes_ready_with_address_ca_and_token() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.snapshot("monday");
    rig.request("backup", &["monday"]);
    let ready = rig.wait_for("backup", SessionState::Ready);
    assert_eq!(reason_of(&ready), "SessionReady");
    assert_eq!(ready.finalizers(), [FINALIZER]);
    assert!((3590..=3610).contains(&lifetime(&ready)), "an hour: {}", lifetime(&ready));
    let status = ready.status.unwrap();
    assert_eq!(status.address.as_deref(), Some(ADDRESS));
    assert_eq!(status.ca_cert.unwrap().0, CA.as_bytes());
    assert_eq!(status.driver.as_deref(), Some(&*rig.driver));
    assert_eq!(status.error, None);
    let token = status.session_token.unwrap();
    assert!(token.len() == 52, "{} characters", token.len());
}

#[test]
fn the_data_holds_the_tokens_snapshots() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let snapshots = [rig.snapshot("monday"), rig.snapshot("tuesday")];
    let token = rig.session("backup", &["monday", "tuesday"]);
    let request = rig.get("backup").unwrap();
    let data = rig.data_of(&token).unwrap();
    assert_eq!(data.spec.driver, rig.driver);
    assert_eq!(
        Some(&data.spec.expiration_time),
        request.status.as_ref().unwrap().expiration_time.as_ref()
    );
    let reference = &data.spec.request;
    assert_eq!((&reference.namespace, reference.name.as_str()), (&rig.apps, "backup"));
    assert_eq!(Some(&reference.uid), request.metadata.uid.as_ref());
    assert_eq!(data.labels()[REQUEST_LABEL], reference.uid);
    assert_eq!(data.labels()[DRIVER_LABEL], rig.driver);
    for (found, snapshot) in data.spec.snapshots.iter().zip(&snapshots) {
        assert_eq!((&found.namespace, &found.name), (&rig.apps, &snapshot.name_any()));
        assert_eq!(Some(&found.uid), snapshot.metadata.uid.as_ref());
        assert_eq!(found.handle, format!("handle-{}", found.name));
    }
    assert_eq!(data.spec.snapshots.len(), 2);
    assert_eq!(rig.data().len(), 1);
}

#[test]
fn a_snapshot_that_is_not_ready_keeps_the_request_pending() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.snapshot("monday");
    let content = rig.unready(&rig.driver, "tuesday");
    rig.request("backup", &["monday", "tuesday"]);
    let pending = rig.wait_for("backup", SessionState::Pending);
    assert_eq!(reason_of(&pending), "SnapshotNotReady");
    assert!(pending.status.as_ref().unwrap().expiration_time.is_some());
    let message = &pending.status.as_ref().unwrap().conditions[0].message;
    assert!(message.contains("tuesday"), "{message}");
    a_while();
    assert_eq!(rig.get("backup").unwrap().state(), SessionState::Pending);
    assert!(rig.data().is_empty());
    rig.make_ready(&content, "tuesday");
    rig.wait_for("backup", SessionState::Ready);
    assert_eq!(rig.data().len(), 1);
}

#[test]
fn a_request_fails_after_the_ready_timeout() {
    let Some(cluster) = shared() else { return };
    let rig =
        Rig::with(cluster, Options { flags: &["--ready-timeout", "8s"], ..Options::default() });
    rig.unready(&rig.driver, "monday");
    rig.request("backup", &["monday"]);
    assert_eq!(reason_of(&rig.wait_for("backup", SessionState::Pending)), "SnapshotNotReady");
    let error = rig.fails("backup", "NotReadyInTime");
    assert!(error.contains("8s") && error.contains("monday"), "{error}");
}

#[test]
fn ready_and_failed_are_final() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, Options { configured: false, ..Options::default() });
    rig.snapshot("monday");
    rig.request("early", &["monday"]);
    rig.fails("early", "NoConfiguration");
    rig.configure(&rig.driver, &rig.driver, &rig.driver_home);
    let first = rig.session("late", &["monday"]);
    // The session's snapshots may be deleted.
    cluster.delete(&rig.snapshots(), "monday");
    a_while();
    assert_eq!(rig.get("early").unwrap().state(), SessionState::Failed);
    let ready = rig.get("late").unwrap();
    assert_eq!((ready.state(), token(&ready)), (SessionState::Ready, first));
}

#[test]
fn deleting_a_request_deletes_its_data_first() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::new(cluster);
    rig.snapshot("monday");
    let token = rig.session("backup", &["monday"]);
    rig.manager.process.stop();
    cluster.delete(&rig.requests(), "backup");
    a_while();
    assert!(rig.get("backup").is_some(), "its data is not deleted yet");
    assert!(rig.data_of(&token).is_some());
    rig.manager = rig.another(&[]);
    rig.wait_until_gone("backup");
    assert!(rig.data_of(&token).is_none());
}

#[test]
fn every_state_change_records_an_event() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.snapshot("monday");
    rig.session("good", &["monday"]);
    rig.request("bad", &["nothing"]);
    rig.fails("bad", "SnapshotMissing");
    let events = cluster.api_in::<Event>(&rig.apps);
    for (name, kind, reason) in
        [("good", "Normal", "SessionReady"), ("bad", "Warning", "SnapshotMissing")]
    {
        let found = cluster.wait_for(&format!("the event on {name}"), || {
            let all = cluster.list(&events);
            all.into_iter().find(|event| {
                event.regarding.as_ref().and_then(|it| it.name.as_deref()) == Some(name)
                    && event.reason.as_deref() == Some(reason)
            })
        });
        assert_eq!(found.type_.as_deref(), Some(kind));
        assert!(found.note.is_some_and(|note| !note.is_empty()));
    }
}

#[test]
#[ignore = "full tier"]
fn deleted_data_is_reported_on_the_request() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, Options { flags: &["--resync", "1s"], ..Options::default() });
    rig.snapshot("monday");
    let token = rig.session("backup", &["monday"]);
    cluster.delete(&cluster.api_in::<SnapshotSessionData>(&rig.driver_home), &token);
    let revoked = cluster.wait_for("the error on the request", || {
        rig.get("backup").filter(|found| reason_of(found) == "SessionRevoked")
    });
    assert_eq!(revoked.state(), SessionState::Ready, "states are final");
    assert_eq!(revoked.status.unwrap().conditions[0].status, "False");
    assert!(rig.data().is_empty(), "it is not made again");
}

#[test]
#[ignore = "full tier"]
fn orphaned_data_is_deleted() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.snapshot("monday");
    let token = rig.session("backup", &["monday"]);
    // The finalizer is removed and the request deleted.
    let mut stray = rig.data_of(&token).unwrap();
    cluster.merge(&rig.requests(), "backup", &json!({ "metadata": { "finalizers": null } }));
    let kept = rig.session("other", &["monday"]);
    cluster.delete(&rig.requests(), "backup");
    rig.wait_until_gone("backup");
    let data = cluster.api_in::<SnapshotSessionData>(&rig.driver_home);
    cluster.wait_until_gone(&data, &token);
    // A second data object for a request that has another one.
    stray.spec.request.name = "other".into();
    stray.spec.request.uid = rig.get("other").unwrap().metadata.uid.unwrap();
    let name = "z".repeat(52);
    let object = json!({ "metadata": { "name": name }, "spec": stray.spec });
    cluster.create(&data, object);
    cluster.wait_until_gone(&data, &name);
    let left: BTreeSet<_> = rig.data().iter().map(|data| data.name_any()).collect();
    assert_eq!(left, [kept].into());
}

#[test]
#[ignore = "full tier"]
fn an_unavailable_api_server_is_waited_for() {
    let Some(cluster) = shared() else { return };
    let proxy = cluster.proxy();
    let rig = Rig::with(cluster, Options { server: Some(proxy.server()), ..Options::default() });
    rig.snapshot("monday");
    rig.session("before", &["monday"]);
    cluster.turn(&proxy, Way::Refused);
    rig.request("during", &["monday"]);
    a_while();
    assert_eq!(rig.get("during").unwrap().state(), SessionState::Pending);
    cluster.turn(&proxy, Way::Open);
    rig.wait_for("during", SessionState::Ready);
    assert_eq!(rig.data().len(), 2);
}

#[test]
fn a_missing_permission_is_reported_on_the_request() {
    let Some(cluster) = shared() else { return };
    let mut rules = support::cluster::manager::manager_rules();
    for rule in &mut rules {
        if rule.resources.as_ref().unwrap()[0] == "snapshotsessiondata" {
            rule.verbs.retain(|verb| verb != "create");
        }
    }
    let rig = Rig::with(cluster, Options { rules, ..Options::default() });
    rig.snapshot("monday");
    rig.request("backup", &["monday"]);
    let found = cluster.wait_for("the error on the request", || {
        rig.get("backup").filter(|it| it.status.is_some() && reason_of(it) == "ManagerNotAllowed")
    });
    let message = &found.status.as_ref().unwrap().conditions[0].message;
    assert!(message.contains("create SnapshotSessionData"), "{message}");
    assert_eq!(found.state(), SessionState::Pending, "it can be corrected");
    let create =
        support::cluster::access::rule("cbt.storage.k8s.io", &["snapshotsessiondata"], &["create"]);
    cluster.grant(&rig.account, &[create]);
    rig.wait_for("backup", SessionState::Ready);
    assert_eq!(rig.data().len(), 1);
}

#[test]
fn tokens_are_never_logged() {
    let Some(cluster) = shared() else { return };
    let flags = &["--log-level", "trace,h2=info,rustls=info,hyper_util=info"];
    let rig = Rig::with(cluster, Options { flags, ..Options::default() });
    rig.snapshot("monday");
    let token = rig.session("backup", &["monday"]);
    cluster.delete(&rig.requests(), "backup");
    rig.wait_until_gone("backup");
    // Logged after the request is deleted.
    let log = cluster.wait_for("the log line about the session's end", || {
        let log = rig.manager.process.log();
        log.contains("a session has ended").then_some(log)
    });
    assert!(log.contains("a session is ready"), "{log}");
    assert!(!log.contains(&token));
    assert!(!support::cluster::sidecar::http(&rig.manager, "/metrics").contains(&token));
}

#[test]
fn cleaning_up_leaves_no_session_with_or_without_a_manager() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::new(cluster);
    rig.snapshot("monday");
    rig.session("one", &["monday"]);
    rig.session("two", &["monday"]);
    rig.manager.process.stop();
    let mut command = std::process::Command::new(binary());
    command.args(["--mode", "session-manager", "--clean-up", "--kubeconfig"]);
    command.arg(cluster.kubeconfig());
    let said = support::cluster::programs::stdout_of(support::cluster::programs::finish(command));
    assert!(said.contains("SnapshotSessionRequests"), "{said}");
    assert!(rig.get("one").is_none() && rig.get("two").is_none() && rig.data().is_empty());
}
