//! The causes of refusals, one by one, with the names in src/cbt/aggregated_api/failure.rs.

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
fn invalid_names_and_foreign_secrets_are_refused() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, with_secrets());
    rig.snapshot("monday");
    for (request, field) in [
        (spec("", ""), "spec.targetVolumeSnapshotName: is required"),
        (spec("", "../monday"), "spec.targetVolumeSnapshotName: "),
        (spec("MONDAY", "monday"), "spec.baseVolumeSnapshotName: "),
        (secret_of("", None), "spec.secretRef.name: is required"),
        (secret_of("a/b", None), "spec.secretRef.name: "),
        (secret_of("login", Some("kube-system")), "spec.secretRef.namespace: "),
    ] {
        let failure = rig.refused(Cause::Invalid, request);
        assert!(failure.message.starts_with(field), "{failure}");
    }
    // And a Secret that is not text.
    let object = json!({
        "metadata": { "name": "binary" }, "data": { "key": ByteString(vec![0xff, 0xfe]) },
    });
    cluster.create(&cluster.api_in::<Secret>(&rig.apps), object);
    for namespace in [Some(rig.apps.as_str()), Some("")] {
        let failure = rig.refused(Cause::Invalid, secret_of("binary", namespace));
        assert!(failure.message.contains("UTF-8"), "{failure}");
    }
}

#[test]
fn snapshot_missing_names_the_snapshot() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.snapshot("monday");
    for request in [spec("", "friday"), spec("friday", "monday")] {
        let failure = rig.refused(Cause::SnapshotMissing, request);
        assert!(failure.message.contains("friday does not exist"), "{failure}");
        let about = json!({ "group": SNAPSHOT_GROUP, "kind": "volumesnapshots", "name": "friday" });
        assert_eq!(details(&failure), about);
    }
}

#[test]
fn snapshot_not_ready_has_a_retry_delay() {
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
    // An object that is not ready is read again, whatever the watch reports.
    rig.answer(spec("", "monday"));
    drop(paused);
}

#[test]
fn snapshot_deleting_refuses_a_target_but_not_a_base() {
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
fn content_missing_names_the_content() {
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
fn base_unfit_refuses_foreign_bases_and_no_order_of_times() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    cluster.claim(&rig.apps, "data", &rig.driver, "volume-1", 1 << 30);
    rig.taken("monday", 1);
    rig.taken("tuesday", 2);
    // The clock may have been set back: only the driver knows the order.
    rig.answer(spec("tuesday", "monday"));
    rig.answer(spec("monday", "tuesday"));
    let class = cluster.snapshot_class("other.csi.local", &[]);
    cluster.snapshot_with_status(&rig.apps, "other", "other.csi.local", &class, "h");
    let failure = rig.refused(Cause::BaseUnfit, spec("other", "monday"));
    assert!(failure.message.contains("other.csi.local"), "{failure}");
}

#[test]
fn secret_missing_names_the_secret() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, with_secrets());
    rig.snapshot("monday");
    let failure = rig.refused(Cause::SecretMissing, secret_of("login", None));
    assert_eq!(details(&failure)["name"], "login");
}

#[test]
fn discovery_missing_names_the_driver() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, Options { discovered: false, ..Options::default() });
    rig.snapshot("monday");
    let failure = rig.refused(Cause::DiscoveryMissing, spec("", "monday"));
    assert_eq!(
        (&details(&failure)["name"], &details(&failure)["group"]),
        (&json!(rig.driver), &json!(GROUP))
    );
    // It is found as soon as it exists.
    rig.discover(&rig.endpoint.url(), &rig.authority.pem());
    rig.answer(spec("", "monday"));
}

#[test]
fn discovery_unusable_without_ca_or_for_another_driver() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, Options { discovered: false, ..Options::default() });
    rig.snapshot("monday");
    rig.discover(&rig.endpoint.url(), "no certificate");
    let failure = rig.refused(Cause::DiscoveryUnusable, spec("", "monday"));
    assert!(failure.message.contains("caBundle"), "{failure}");
    assert!(rig.endpoint.pages().is_empty());
    let authorities = ByteString(rig.authority.pem().into());
    let corrected = json!({ "spec": { "clientConfig": { "caBundle": authorities } } });
    cluster.merge(&cluster.api::<DriverDiscovery>(), &rig.driver, &corrected);
    rig.endpoint.says(problem(ProblemKind::OtherDriver, "here is x.csi.local", None));
    cluster.wait_for("the corrected object", || {
        let failure = rig.refused(Cause::DiscoveryUnusable, spec("", "monday"));
        failure.message.contains("here is x.csi.local").then_some(())
    });
}

#[test]
fn endpoint_unavailable_unreachable_or_untrusted() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, Options { discovered: false, ..Options::default() });
    rig.snapshot("monday");
    rig.discover(&rig.endpoint.url(), &Authority::new("another").pem());
    let failure = rig.refused(Cause::EndpointUnavailable, spec("", "monday"));
    assert!(failure.message.contains("certificate"), "{failure}");
    assert!(rig.endpoint.pages().is_empty(), "the token was sent");
    // A port without a listener.
    let corrected = json!({ "spec": { "clientConfig": {
        "url": "https://localhost:1/x", "caBundle": ByteString(rig.authority.pem().into()),
    } } });
    cluster.merge(&cluster.api::<DriverDiscovery>(), &rig.driver, &corrected);
    cluster.wait_for("the corrected object", || {
        let failure = rig.refused(Cause::EndpointUnavailable, spec("", "monday"));
        failure.message.contains("refused").then_some(())
    });
}

#[test]
fn endpoint_unavailable_for_an_invalid_response() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.snapshot("monday");
    let request = || VolumeSnapshotDeltaSpec { offset: 10, limit: 3, ..spec("", "monday") };
    let said = |blocks: &[(u64, u64)]| {
        let block =
            |(offset, size): &(u64, u64)| json!({ "offset": offset, "blockSizeBytes": size });
        Reply::Say(json!({ "changedBlocks": blocks.iter().map(block).collect::<Vec<_>>() }))
    };
    let lies = [
        (page(&[9], None), "not ascending"),
        (page(&[12, 11], None), "not ascending"),
        (page(&[11, 11], None), "not ascending"),
        (page(&[], Some(10)), "before the end"),
        (page(&[11], Some(11)), "before the end"),
        (page(&[10, 11, 12, 13], None), "3 were requested"),
        (said(&[(10, 4096), (11, 8192)]), "one size"),
        (said(&[(10, 0)]), "one size"),
        (said(&[(u64::MAX, 1)]), "past the end"),
        (said(&[(u64::MAX / 4096, 4096)]), "past the end"),
        (Reply::Say(json!({ "changedBlocks": "none" })), "cannot be decoded"),
        (Reply::Raw(200, "<html>".into(), &[]), "cannot be decoded"),
        (Reply::Raw(500, "<html>".into(), &[]), "HTTP 500"),
        (Reply::Raw(302, String::new(), &[(header::LOCATION, "/elsewhere")]), "HTTP 302"),
        (Reply::Raw(200, " ".repeat(2 << 20) + "{}", &[]), "cannot be reached"),
    ];
    for (at, (lie, why)) in lies.into_iter().enumerate() {
        rig.endpoint.says(lie);
        let failure = rig.refused(Cause::EndpointUnavailable, request());
        assert!(failure.message.contains(&rig.driver), "{why}: {failure}");
        assert!(failure.message.contains(why), "{why}: {failure}");
        assert_eq!(rig.endpoint.pages().len(), at + 1, "{why}: one request");
    }
    for truth in [page(&[], Some(11)), page(&[10, 11, 900], Some(901))] {
        rig.endpoint.says(truth);
        rig.answer(request());
    }
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
        let failure = rig.refused(cause, spec("", "monday"));
        let message = &failure.message;
        assert!(
            message.contains("these are its words") && message.contains(&rig.driver),
            "{kind:?}"
        );
    }
    let busy = json!({ "kind": "Busy", "message": "x" }).to_string();
    rig.endpoint.says(Reply::Raw(429, busy, &[(header::RETRY_AFTER, "7")]));
    let failure = rig.ask(spec("", "monday")).unwrap_err();
    assert_eq!(details(&failure)["retryAfterSeconds"], 7, "it says when");
}

#[test]
fn api_server_names_the_missing_permission() {
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
        let failure = rig.refused(Cause::ApiServer, secret_of("login", None));
        assert!(failure.message.contains(named), "{failure}");
        assert!(failure.message.contains("the ServiceAccount of the"), "{failure}");
        assert!(failure.message.contains("may not"), "{failure}");
    }
}

#[test]
fn timed_out_after_the_deadline_of_all_steps() {
    let Some(cluster) = shared() else { return };
    let timeout = Duration::from_secs(5);
    let rig = Rig::with(cluster, Options { timeout, ..Options::default() });
    rig.snapshot("monday");
    rig.endpoint.says(Reply::Hang);
    rig.refused(Cause::TimedOut, spec("", "monday"));
    // A hanging call does not hold a permit forever.
    rig.endpoint.says(page(&[1], None));
    rig.answer(spec("", "monday"));
}

#[test]
fn too_many_for_a_slow_driver_does_not_block_others() {
    let Some(cluster) = shared() else { return };
    let timeout = Duration::from_secs(20);
    let rig = Rig::with(cluster, Options { timeout, ..Options::default() });
    rig.snapshot("monday");
    rig.endpoint.says(Reply::Hang);
    let request = |offset| VolumeSnapshotDeltaSpec { offset, ..spec("", "monday") };
    let hanging: Vec<_> = (0..8).map(|offset| rig.begin(request(offset))).collect();
    cluster.wait_for("the calls", || (rig.endpoint.pages().len() == 8).then_some(()));
    rig.endpoint.says(page(&[100], None));
    let failure = rig.refused(Cause::TooMany, request(99));
    assert!(details(&failure)["retryAfterSeconds"].is_u64());
    hanging.iter().for_each(|one| one.abort());
    cluster.wait_for("a place", || rig.ask(request(99)).ok());
}

#[test]
fn exiting_ends_running_requests() {
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
    // When one more request is answered, all have seen the shutdown.
    rig.fails(Cause::SnapshotMissing, &spec("", "friday"));
    gate.add_permits(1);
    cluster.block_on(quick).unwrap().expect("what runs may finish");
    rig.phase.send_replace(Phase::Ending);
    let failure = cluster.block_on(slow).unwrap().unwrap_err();
    assert_eq!(failure.cause, Cause::Exiting);
}
