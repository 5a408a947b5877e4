//! Why there is no answer, cause by cause: each as src/aggregated_api/failure.rs calls it.

use std::sync::Arc;
use std::time::Duration;
use support::cluster::shared;

use axum::http::header;
use csi_loopback::aggregated_api::failure::Cause;
use csi_loopback::kubernetes::cbt_http::ProblemKind;
use csi_loopback::kubernetes::driver_discovery::DriverDiscovery;
use csi_loopback::kubernetes::snapshot::{VolumeSnapshot, VolumeSnapshotContent};
use csi_loopback::kubernetes::snapshot_delta::{SecretReference, VolumeSnapshotDeltaSpec};
use csi_loopback::telemetry::shutdown::Phase;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use serde_json::json;
use tokio::sync::Semaphore;

use super::endpoint::{Reply, page, problem};
use super::rig::{
    GROUP, Options, Rig, SNAPSHOT_GROUP, details, server_rules, spec, user_rules, without,
};
use support::cluster::access::rule;
use support::cluster::tls::Authority;

fn secret_of(name: &str, namespace: Option<&str>) -> VolumeSnapshotDeltaSpec {
    let secret_ref =
        Some(SecretReference { name: name.into(), namespace: namespace.map(Into::into) });
    VolumeSnapshotDeltaSpec { secret_ref, ..spec("", "monday") }
}

fn with_secrets() -> Options {
    let mut user_rules = user_rules();
    user_rules.push(rule("", &["secrets"], &["get"]));
    Options { user_rules, ..Options::default() }
}

#[test]
fn invalid_a_name_that_is_none_and_a_secret_of_elsewhere_are_refused() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, with_secrets());
    rig.snapshot("monday");
    for (asked, field) in [
        (spec("", "../monday"), "spec.targetVolumeSnapshotName"),
        (spec("MONDAY", "monday"), "spec.baseVolumeSnapshotName"),
        (secret_of("login", Some("kube-system")), "spec.secretRef.namespace"),
    ] {
        let failure = rig.ask(asked).unwrap_err();
        assert_eq!(failure.cause, Cause::Invalid);
        assert!(failure.message.starts_with(field), "{failure}");
    }
    // And a Secret that is no text.
    let object = json!({
        "metadata": { "name": "binary" }, "data": { "key": ByteString(vec![0xff, 0xfe]) },
    });
    cluster.create(&cluster.api_in::<Secret>(&rig.apps), object);
    let failure = rig.ask(secret_of("binary", Some(&rig.apps))).unwrap_err();
    assert!(failure.cause == Cause::Invalid && failure.message.contains("UTF-8"), "{failure}");
}

#[test]
fn snapshot_missing_one_that_does_not_exist_is_named() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.snapshot("monday");
    for asked in [spec("", "friday"), spec("friday", "monday")] {
        let failure = rig.ask(asked).unwrap_err();
        assert_eq!(failure.cause, Cause::SnapshotMissing);
        assert!(failure.message.contains("friday does not exist"), "{failure}");
        let about = json!({ "group": SNAPSHOT_GROUP, "kind": "volumesnapshots", "name": "friday" });
        assert_eq!(details(&failure), about);
    }
}

#[test]
fn snapshot_not_ready_one_that_may_be_later_is_told_so() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let ready = rig.snapshot("monday");
    rig.answer(spec("", "monday"));
    let contents = cluster.api::<VolumeSnapshotContent>();
    let paused = cluster.pause("snapshot-controller");
    cluster.merge_status(&contents, &ready.content, &json!({ "readyToUse": false }));
    let failure = rig.fails(Cause::SnapshotNotReady, &spec("", "monday"));
    assert!(failure.message.contains("not ready to use yet"), "{failure}");
    cluster.merge_status(&contents, &ready.content, &json!({ "readyToUse": true }));
    // What is not ready is looked at anew, whatever the watch says.
    rig.answer(spec("", "monday"));
    drop(paused);
}

#[test]
fn snapshot_deleting_a_target_on_its_way_out_is_refused_and_a_base_is_not() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.snapshot("monday");
    rig.snapshot("tuesday");
    let snapshots = cluster.api_in::<VolumeSnapshot>(&rig.apps);
    let finalizers = |them| json!({ "metadata": { "finalizers": them } });
    cluster.merge(&snapshots, "monday", &finalizers(json!(["example.com/stays"])));
    cluster.delete(&snapshots, "monday");
    let failure = rig.fails(Cause::SnapshotDeleting, &spec("", "monday"));
    assert!(failure.message.contains("is being deleted"), "{failure}");
    rig.answer(spec("monday", "tuesday"));
    cluster.merge(&snapshots, "monday", &finalizers(json!(null)));
}

#[test]
fn content_missing_a_content_that_is_gone_is_named() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let ready = rig.snapshot("monday");
    let paused = cluster.pause("snapshot-controller");
    let contents = cluster.api::<VolumeSnapshotContent>();
    cluster.merge(&contents, &ready.content, &json!({ "metadata": { "finalizers": null } }));
    cluster.delete(&contents, &ready.content);
    let failure = rig.fails(Cause::ContentMissing, &spec("", "monday"));
    assert!(failure.message.contains(&ready.content), "{failure}");
    drop(paused);
}

#[test]
fn base_unfit_one_that_is_newer_or_of_another_driver_is_refused() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    cluster.claim(&rig.apps, "data", &rig.driver, "volume-1", 1 << 30);
    rig.taken("monday", 1);
    rig.taken("tuesday", 2);
    let failure = rig.fails(Cause::BaseUnfit, &spec("tuesday", "monday"));
    assert!(failure.message.starts_with("spec.baseVolumeSnapshotName: is newer"), "{failure}");
    rig.answer(spec("monday", "tuesday"));
    let class = cluster.snapshot_class("other.csi.local", &[]);
    cluster.believed_snapshot(&rig.apps, "other", "other.csi.local", &class, "h");
    let failure = rig.ask(spec("other", "monday")).unwrap_err();
    assert_eq!(failure.cause, Cause::BaseUnfit);
    assert!(failure.message.contains("other.csi.local"), "{failure}");
}

#[test]
fn secret_missing_one_that_does_not_exist_is_named() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, with_secrets());
    rig.snapshot("monday");
    let failure = rig.ask(secret_of("login", None)).unwrap_err();
    assert_eq!(failure.cause, Cause::SecretMissing);
    assert_eq!(details(&failure)["name"], "login");
}

#[test]
fn discovery_missing_a_driver_without_an_endpoint_is_named() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, Options { discovered: false, ..Options::default() });
    rig.snapshot("monday");
    let failure = rig.ask(spec("", "monday")).unwrap_err();
    assert_eq!(failure.cause, Cause::DiscoveryMissing);
    assert_eq!(
        (&details(&failure)["name"], &details(&failure)["group"]),
        (&json!(rig.driver), &json!(GROUP))
    );
    // It is there as soon as it is.
    rig.discover(&rig.endpoint.url(), &rig.authority.pem());
    rig.answer(spec("", "monday"));
}

#[test]
fn discovery_unusable_without_certificates_or_with_another_driver_behind_it() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, Options { discovered: false, ..Options::default() });
    rig.snapshot("monday");
    rig.discover(&rig.endpoint.url(), "no certificate");
    let failure = rig.ask(spec("", "monday")).unwrap_err();
    assert_eq!(failure.cause, Cause::DiscoveryUnusable);
    assert!(failure.message.contains("caBundle"), "{failure}");
    assert!(rig.endpoint.pages().is_empty());
    let authorities = ByteString(rig.authority.pem().into());
    let mended = json!({ "spec": { "clientConfig": { "caBundle": authorities } } });
    cluster.merge(&cluster.api::<DriverDiscovery>(), &rig.driver, &mended);
    rig.endpoint.says(problem(ProblemKind::OtherDriver, "here is x.csi.local", None));
    cluster.wait_for("the mended object", || {
        let failure = rig.ask(spec("", "monday")).unwrap_err();
        assert_eq!(failure.cause, Cause::DiscoveryUnusable);
        failure.message.contains("here is x.csi.local").then_some(())
    });
}

#[test]
fn endpoint_unavailable_one_that_is_away_or_not_the_one_to_be_trusted() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, Options { discovered: false, ..Options::default() });
    rig.snapshot("monday");
    rig.discover(&rig.endpoint.url(), &Authority::new("another").pem());
    let failure = rig.ask(spec("", "monday")).unwrap_err();
    assert_eq!(failure.cause, Cause::EndpointUnavailable);
    assert!(failure.message.contains("certificate"), "{failure}");
    assert!(rig.endpoint.pages().is_empty(), "it is shown no token");
    // A port where nobody is.
    let mended = json!({ "spec": { "clientConfig": {
        "url": "https://localhost:1/x", "caBundle": ByteString(rig.authority.pem().into()),
    } } });
    cluster.merge(&cluster.api::<DriverDiscovery>(), &rig.driver, &mended);
    cluster.wait_for("the mended object", || {
        let failure = rig.ask(spec("", "monday")).unwrap_err();
        assert_eq!(failure.cause, Cause::EndpointUnavailable);
        failure.message.contains("refused").then_some(())
    });
}

#[test]
fn endpoint_unavailable_one_that_lies_is_named() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.snapshot("monday");
    let block = |offset: u64, size: u64| json!({ "offset": offset, "blockSizeBytes": size });
    let said = |blocks: &[serde_json::Value], next: Option<u64>| {
        Reply::Say(json!({ "changedBlocks": blocks, "continue": next }))
    };
    let lies = [
        page(&[3, 2], None),
        page(&[2, 2], None),
        page(&[], Some(0)),
        page(&[4], Some(4)),
        page(&(0..257).collect::<Vec<_>>(), None),
        said(&[block(1, 4096), block(2, 8192)], None),
        said(&[block(1, 0)], None),
        said(&[block(u64::MAX, 4096)], None),
        Reply::Say(json!({ "changedBlocks": "none" })),
        Reply::Raw(200, "<html>".into(), &[]),
        Reply::Raw(500, "<html>".into(), &[]),
        Reply::Raw(302, String::new(), &[(header::LOCATION, "/elsewhere")]),
        Reply::Raw(200, " ".repeat(2 << 20) + "{}", &[]),
    ];
    for (at, lie) in lies.into_iter().enumerate() {
        rig.endpoint.says(lie);
        let failure = rig.ask(spec("", "monday")).unwrap_err();
        assert_eq!(failure.cause, Cause::EndpointUnavailable, "{at}: {failure}");
        assert!(failure.message.contains(&rig.driver), "{at}: {failure}");
        assert_eq!(rig.endpoint.pages().len(), at + 1, "{at}: asked once");
    }
    rig.endpoint.says(page(&[1], None));
    rig.answer(spec("", "monday"));
}

#[test]
fn each_kind_of_problem_of_an_endpoint_has_its_cause() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.snapshot("monday");
    for (kind, cause) in [
        (ProblemKind::Unsupported, Cause::Unsupported),
        (ProblemKind::OtherDriver, Cause::DiscoveryUnusable),
        (ProblemKind::Unavailable, Cause::EndpointUnavailable),
        (ProblemKind::NotAllowed, Cause::EndpointUnavailable),
        (ProblemKind::Invalid, Cause::EndpointUnavailable),
        (ProblemKind::Unauthenticated, Cause::EndpointUnavailable),
        (ProblemKind::Busy, Cause::TooMany),
        (ProblemKind::TimedOut, Cause::TimedOut),
    ] {
        rig.endpoint.says(problem(kind, "these are its words", None));
        let failure = rig.ask(spec("", "monday")).unwrap_err();
        assert_eq!(failure.cause, cause, "{kind:?}: {failure}");
        assert!(failure.message.contains("these are its words"), "{failure}");
    }
    let busy = json!({ "kind": "Busy", "message": "x" }).to_string();
    rig.endpoint.says(Reply::Raw(429, busy, &[(header::RETRY_AFTER, "7")]));
    let failure = rig.ask(spec("", "monday")).unwrap_err();
    assert_eq!(details(&failure)["retryAfterSeconds"], 7, "it says when");
}

#[test]
fn unsupported_a_driver_that_cannot_tell_is_said_so() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.snapshot("monday");
    rig.endpoint.says(problem(ProblemKind::Unsupported, "no call", None));
    let failure = rig.ask(spec("", "monday")).unwrap_err();
    assert_eq!(failure.cause.code().as_u16(), 501);
    assert!(failure.message.contains(&rig.driver), "{failure}");
}

#[test]
fn api_server_a_right_that_the_server_lacks_is_named() {
    let Some(cluster) = shared() else { return };
    for (resource, named) in [
        ("subjectaccessreviews", "SubjectAccessReviews"),
        ("serviceaccounts/token", "serviceaccounts/token"),
        ("volumesnapshots", "read VolumeSnapshots"),
        ("driverdiscoveries", "read DriverDiscoveries"),
        ("secrets", "get Secrets"),
    ] {
        let rules = without(server_rules(), resource);
        let rig = Rig::with(cluster, Options { rules, ..with_secrets() });
        rig.snapshot("monday");
        cluster.secret(&rig.apps, "login", &[("key", "value")]);
        let failure = rig.ask(secret_of("login", None)).unwrap_err();
        assert_eq!(failure.cause, Cause::ApiServer, "{failure}");
        assert!(failure.message.contains(named), "{failure}");
        assert!(failure.message.contains("own ServiceAccount may not"), "{failure}");
    }
}

#[test]
fn timed_out_there_is_a_deadline_for_all_of_it() {
    let Some(cluster) = shared() else { return };
    let timeout = Duration::from_millis(1500);
    let rig = Rig::with(cluster, Options { timeout, ..Options::default() });
    rig.snapshot("monday");
    rig.endpoint.says(Reply::Hang);
    let failure = rig.ask(spec("", "monday")).unwrap_err();
    assert_eq!(failure.cause, Cause::TimedOut, "{failure}");
    // Who hangs holds nothing for ever.
    rig.endpoint.says(page(&[1], None));
    rig.answer(spec("", "monday"));
}

#[test]
fn too_many_a_driver_that_is_slow_holds_up_itself_alone() {
    let Some(cluster) = shared() else { return };
    let timeout = Duration::from_secs(20);
    let rig = Rig::with(cluster, Options { timeout, ..Options::default() });
    rig.snapshot("monday");
    rig.endpoint.says(Reply::Hang);
    let asked = |offset| VolumeSnapshotDeltaSpec { offset, ..spec("", "monday") };
    let hanging: Vec<_> = (0..8).map(|offset| rig.begin(asked(offset))).collect();
    cluster.wait_for("the calls", || (rig.endpoint.pages().len() == 8).then_some(()));
    rig.endpoint.says(page(&[100], None));
    let failure = rig.ask(asked(99)).unwrap_err();
    assert_eq!(failure.cause, Cause::TooMany, "{failure}");
    assert!(details(&failure)["retryAfterSeconds"].is_u64());
    hanging.iter().for_each(|one| one.abort());
    cluster.wait_for("a place", || rig.ask(asked(99)).ok());
}

#[test]
fn exiting_what_still_runs_when_all_ends_is_told_so() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.snapshot("monday");
    rig.snapshot("tuesday");
    let gate = Arc::new(Semaphore::new(0));
    rig.endpoint.says(Reply::Gated(Arc::clone(&gate), Box::new(page(&[1], None))));
    let called = |calls| {
        cluster.wait_for("the call", || (rig.endpoint.pages().len() == calls).then_some(()));
    };
    let quick = rig.begin(spec("", "monday"));
    called(1);
    rig.endpoint.says(Reply::Hang);
    let slow = rig.begin(spec("", "tuesday"));
    called(2);
    rig.phase.send_replace(Phase::Draining);
    // By the time that another is answered, all have heard of it.
    rig.fails(Cause::SnapshotMissing, &spec("", "friday"));
    gate.add_permits(1);
    cluster.block_on(quick).unwrap().expect("what runs may finish");
    rig.phase.send_replace(Phase::Ending);
    let failure = cluster.block_on(slow).unwrap().unwrap_err();
    assert_eq!(failure.cause, Cause::Exiting);
}
