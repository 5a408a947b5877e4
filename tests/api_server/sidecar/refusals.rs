//! Refusals, with code and next step; the table is in docs/reference/sidecar.md.

use std::time::{Duration, Instant, SystemTime};
use support::cluster::shared;

use csi_loopback::kubernetes::snapshot::{VolumeSnapshot, VolumeSnapshotContent};
use csi_loopback::proto::snapshotmetadata as api;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, RoleBinding};
use serde_json::json;
use tonic::Code;
use tonic_types::StatusExt;

use support::cluster::access::rule;
use support::cluster::proxy::Way;
use support::cluster::sidecar_rig::{AUDIENCE, CAPACITY, Options, Rig, collect};
use support::driver::block;

/// A sidecar that also accepts the name of a VolumeSnapshot as a base.
fn by_name_too() -> Options<'static> {
    Options { sidecar: &["--base-reference", "either"], ..Options::default() }
}

type Change = fn(&mut api::GetMetadataDeltaRequest);

#[test]
fn a_missing_or_invalid_argument_is_refused() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let cases: [(&str, Change); 11] = [
        ("security_token: is required", |it| it.security_token.clear()),
        ("namespace: is required", |it| it.namespace.clear()),
        ("base_snapshot_id: is required", |it| it.base_snapshot_id.clear()),
        ("target_snapshot_name: is required", |it| it.target_snapshot_name.clear()),
        ("security_token: is not", |it| it.security_token = "a b".into()),
        ("security_token: is not", |it| it.security_token = "x".repeat(16_385)),
        ("namespace: is not", |it| it.namespace = "a.b".into()),
        ("base_snapshot_id: is not", |it| it.base_snapshot_id = "a\nb".into()),
        ("base_snapshot_id: is not", |it| it.base_snapshot_id = "x".repeat(1025)),
        ("target_snapshot_name: is not", |it| it.target_snapshot_name = "../first".into()),
        ("max_results: is negative", |it| it.max_results = -1),
    ];
    for (words, change) in cases {
        let mut request = rig.delta("first", "second");
        change(&mut request);
        rig.refused(request, Code::InvalidArgument, words);
    }
    rig.refused(rig.allocated(""), Code::InvalidArgument, "snapshot_name: is required");
    let counted = "csi_loopback_sidecar_requests_refused_total{reason=\"missing_argument\"} ";
    assert_eq!(rig.metric(counted), 5.0);
    let negative =
        api::GetMetadataDeltaRequest { starting_offset: -1, ..rig.delta("first", "second") };
    rig.refused(negative, Code::OutOfRange, "starting_offset: is negative");
}

#[test]
fn only_a_valid_token_for_the_audience_is_accepted() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.snapshot("first");
    let good = rig.token();
    let bad = [
        ("another audience", cluster.token(&rig.backup, Some("another"))),
        ("the API server's own audience", cluster.token(&rig.backup, None)),
        ("expired", cluster.expired_token(&rig.backup, Some(AUDIENCE))),
        ("forged", format!("{}AAAA", &good[..good.len() - 4])),
        ("no token at all", "nonsense".into()),
    ];
    for (what, token) in bad {
        let mut request = rig.allocated("first");
        request.security_token = token;
        println!("{what}");
        rig.refused(request, Code::Unauthenticated, "TokenRequest");
    }
    assert_eq!(rig.extents(rig.allocated("first")), []);
}

#[test]
fn a_user_without_namespace_permission_is_denied() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::new(cluster);
    rig.snapshot("first");
    let stranger = cluster.account(&rig.namespace, "stranger");
    let request = |rig: &Rig<'_>| {
        let mut request = rig.allocated("first");
        request.security_token = cluster.token(&stranger, Some(AUDIENCE));
        request
    };
    rig.refused(request(&rig), Code::PermissionDenied, "may not get volumesnapshots");
    // The refusal does not reveal whether the snapshot exists.
    let mut none = request(&rig);
    none.snapshot_name = "none".into();
    rig.refused(none, Code::PermissionDenied, "may not get volumesnapshots");
    // Permissions in one namespace do not apply to another.
    let mut elsewhere = rig.allocated("first");
    elsewhere.namespace = "default".into();
    rig.refused(elsewhere, Code::PermissionDenied, "in the namespace default");
    rig.restart_sidecar(&["--denied-as", "unauthenticated"]);
    rig.refused(request(&rig), Code::Unauthenticated, "may not get volumesnapshots");
}

#[test]
fn an_unusable_snapshot_is_refused_with_the_reason() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, by_name_too());
    let first = rig.snapshot("first");
    rig.refused(rig.allocated("none"), Code::NotFound, "does not exist");
    rig.refused(rig.delta("first", "none"), Code::NotFound, "does not exist");
    // It never becomes ready: its claim does not exist.
    cluster.request_snapshot(&rig.namespace, "waiting", "no-claim", &rig.class);
    rig.refused(rig.allocated("waiting"), Code::Unavailable, "not ready to use");
    rig.refused(rig.delta_from("waiting", "first"), Code::Unavailable, "not ready to use");
    // Bound to a missing content, and to one without a back reference, which the
    // snapshot-controller would add.
    let _still = cluster.pause("snapshot-controller");
    let snapshots = cluster.api_in::<VolumeSnapshot>(&rig.namespace);
    for (name, content, code, words) in [
        ("astray", "nowhere", Code::NotFound, "VolumeSnapshotContent nowhere"),
        ("thief", first.content.as_str(), Code::Unavailable, "is not bound to VolumeSnapshot"),
    ] {
        let object = json!({ "metadata": { "name": name }, "spec": {
            "source": { "persistentVolumeClaimName": "no-claim" }, "volumeSnapshotClassName": rig.class,
        }});
        cluster.create(&snapshots, object);
        rig.refused(rig.allocated(name), Code::Unavailable, "not ready to use");
        let status = json!({ "readyToUse": true, "boundVolumeSnapshotContentName": content });
        cluster.merge_status(&snapshots, name, &status);
        rig.refused(rig.allocated(name), code, words);
    }
}

#[test]
fn a_refusal_has_details_for_programs() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    // It never becomes ready: its claim does not exist.
    cluster.request_snapshot(&rig.namespace, "waiting", "no-claim", &rig.class);
    for (name, reason, waits) in
        [("waiting", "SNAPSHOT_NOT_READY", true), ("none", "SNAPSHOT_MISSING", false)]
    {
        let details = rig.ask(rig.allocated(name)).unwrap_err().get_error_details();
        let info = details.error_info().unwrap();
        assert_eq!((info.reason.as_str(), info.domain.as_str()), (reason, "csi-loopback"));
        assert_eq!(details.retry_info().is_some(), waits, "{name}");
    }
}

#[test]
fn a_content_that_is_not_ready_is_refused() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let first = rig.snapshot("first");
    let contents = cluster.api::<VolumeSnapshotContent>();
    // csi-snapshotter may restore it at any time.
    let words = "is not ready to use yet";
    cluster.wait_for(words, || {
        cluster.merge_status(&contents, &first.content, &json!({ "readyToUse": false }));
        let status = rig.ask(rig.allocated("first")).err()?;
        (status.code() == Code::Unavailable && status.message().contains(words)).then_some(())
    });
}

#[test]
fn another_drivers_snapshot_is_refused() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let other = Rig::with(cluster, Options { service: false, ..Options::default() });
    let snapshot = other.snapshot("first");
    cluster.adopt_snapshot(&rig.namespace, "adopted", &other.driver_name, &snapshot.handle, None);
    rig.refused(rig.allocated("adopted"), Code::InvalidArgument, &rig.driver_name);
}

#[test]
fn a_base_must_be_older_and_of_the_same_volume() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, by_name_too());
    let first = rig.snapshot("first");
    let second = rig.snapshot("second");
    let volume = rig.driver.volume("other", CAPACITY, block());
    cluster.claim(&rig.namespace, "other", &rig.driver_name, &volume, CAPACITY);
    let other = cluster.snapshot(&rig.namespace, "other", "other", &rig.class);
    for base in ["other", &other.handle] {
        rig.refused(rig.delta_from(base, "second"), Code::InvalidArgument, "another volume");
    }
    for base in ["second", &second.handle] {
        rig.refused(rig.delta_from(base, "first"), Code::InvalidArgument, "newer");
    }
    // Only the driver knows: a handle without any object in Kubernetes.
    cluster.delete_snapshot(&other);
    rig.refused(rig.delta(&other.handle, "second"), Code::InvalidArgument, "");
    rig.refused(rig.delta("no-such-handle", "second"), Code::NotFound, "");
    assert_eq!(rig.extents(rig.delta(&first.handle, "first")), []);
}

#[test]
fn a_foreign_base_needs_the_permission_to_get_it() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let first = rig.snapshot("first");
    rig.write(1, [3]);
    rig.snapshot("second");
    let neighbours = cluster.namespace("neighbours");
    // The same snapshot may be used where it was imported on purpose ...
    let foreign = rig.driver.volume("foreign", CAPACITY, block());
    cluster.claim(&neighbours, "foreign", &rig.driver_name, &foreign, CAPACITY);
    let foreign = cluster.snapshot(&neighbours, "foreign", "foreign", &rig.class);
    rig.refused(rig.delta(&foreign.handle, "second"), Code::PermissionDenied, "another namespace");
    // ... and the error did not name the neighbors' namespace.
    let said = rig.ask(rig.delta(&foreign.handle, "second")).unwrap_err();
    assert!(!said.message().contains(&neighbours), "{said:?}");
    cluster.adopt_snapshot(&neighbours, "shared", &rig.driver_name, &first.handle, None);
    assert_eq!(rig.extents(rig.delta(&first.handle, "second")).len(), 1);
    // Imported only into the neighbors' namespace, it requires the permission to get it there.
    let (snapshots, contents) =
        (cluster.api_in::<VolumeSnapshot>(&rig.namespace), cluster.api::<VolumeSnapshotContent>());
    let retain = json!({ "spec": { "deletionPolicy": "Retain" } });
    cluster.merge(&contents, &first.content, &retain);
    cluster.delete(&snapshots, "first");
    cluster.wait_until_gone(&snapshots, "first");
    cluster.delete(&contents, &first.content);
    cluster.wait_until_gone(&contents, &first.content);
    cluster.wait_for("the sidecar sees the neighbours' content alone", || {
        let status = rig.ask(rig.delta(&first.handle, "second")).err()?;
        (status.code() == Code::PermissionDenied).then_some(())
    });
    let mut readable = rule("snapshot.storage.k8s.io", &["volumesnapshots"], &["get"]);
    readable.resource_names = Some(vec!["shared".to_owned()]);
    cluster.grant_in(&neighbours, &rig.backup, &[readable]);
    assert_eq!(rig.extents(rig.delta(&first.handle, "second")).len(), 1);
}

#[test]
fn a_broken_chain_recommends_a_full_backup() {
    let Some(cluster) = shared() else { return };
    let faults = ["--enable-faults", "--fault", "tracking-lost"];
    let rig = Rig::with(cluster, Options { driver: &faults, ..Options::default() });
    for name in ["first", "second"] {
        rig.snapshot(name);
    }
    rig.refused(rig.delta("first", "second"), Code::FailedPrecondition, "full backup");
    assert_eq!(rig.extents(rig.allocated("second")), []);
}

#[test]
#[ignore = "full tier"]
fn revocations_take_effect_within_the_cache_ttl() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::new(cluster);
    rig.restart_sidecar(&["--review-cache-ttl", "2s"]);
    rig.snapshot("first");
    let request = rig.allocated("first");
    assert_eq!(rig.extents(request.clone()), []);
    // The Role's binding is deleted ...
    let bindings = cluster.api_in::<RoleBinding>(&rig.namespace);
    let own = cluster.list(&bindings);
    let readers = |binding: &&RoleBinding| {
        let mut subjects = binding.subjects.iter().flatten();
        subjects.any(|subject| subject.name == rig.backup.name)
    };
    let revoked = Instant::now();
    for binding in own.iter().filter(readers) {
        cluster.delete(&bindings, binding.metadata.name.as_deref().unwrap());
    }
    let refused = cluster.wait_for("the right is gone", || rig.ask(request.clone()).err());
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused:?}");
    // In addition to the cache, the API server's own authorizer has a delay.
    assert!(revoked.elapsed() < Duration::from_secs(6), "{:?}", revoked.elapsed());
    // ... and then the account, and with it all its tokens.
    let accounts = cluster.api_in::<k8s_openapi::api::core::v1::ServiceAccount>(&rig.namespace);
    cluster.delete(&accounts, &rig.backup.name);
    let refused = cluster.wait_for("the token is gone", || {
        rig.ask(request.clone()).err().filter(|status| status.code() == Code::Unauthenticated)
    });
    assert!(refused.message().contains("security_token"), "{refused:?}");
}

#[test]
#[ignore = "full tier"]
fn an_expired_token_is_refused() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::new(cluster);
    rig.restart_sidecar(&["--review-cache-ttl", "60s"]);
    rig.snapshot("first");
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    let mut request = rig.allocated("first");
    request.security_token =
        cluster.resigned(&request.security_token, |claims| claims["exp"] = (now + 10).into());
    assert_eq!(rig.extents(request.clone()), []);
    // The cache's TTL is longer than the token's validity.
    std::thread::sleep(Duration::from_secs(11));
    rig.refused(request, Code::Unauthenticated, "security_token");
}

#[test]
fn without_an_audience_calls_are_refused() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::with(cluster, Options { service: false, ..Options::default() });
    rig.snapshot("first");
    rig.refused(rig.allocated("first"), Code::Unavailable, "does not exist");
    // After it is created, it is found.
    cluster.metadata_service(
        &rig.driver_name,
        &rig.sidecar.address(),
        AUDIENCE,
        &rig.authority.pem(),
    );
    cluster.wait_for("the audience", || rig.ask(rig.allocated("first")).ok());
    rig.restart_sidecar(&["--audience", "another"]);
    rig.refused(rig.allocated("first"), Code::Unauthenticated, "audience");
    // Like a flag that is not set.
    rig.restart_sidecar(&["--audience="]);
    assert_eq!(rig.extents(rig.allocated("first")), []);
}

#[test]
#[ignore = "full tier"]
fn without_the_api_server_calls_fail_until_it_returns() {
    let Some(cluster) = shared() else { return };
    let proxy = cluster.proxy();
    let rig = Rig::with(cluster, Options { server: Some(proxy.server()), ..Options::default() });
    rig.snapshot("first");
    let request = || rig.allocated("first");
    assert_eq!(rig.extents(request()), []);
    cluster.turn(&proxy, Way::Refused);
    // A new token each time, because a cached review may still pass.
    rig.refused(request(), Code::Unavailable, "API server");
    cluster.turn(&proxy, Way::Hanging);
    let begun = Instant::now();
    rig.refused(request(), Code::Unavailable, "API server");
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    cluster.turn(&proxy, Way::Open);
    cluster.wait_for("the API server is back", || rig.ask(request()).ok());
    assert!(rig.sidecar.process.log().contains("the watch broke"));
}

#[test]
#[ignore = "full tier"]
fn a_flood_of_invalid_tokens_has_no_lasting_effect() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::new(cluster);
    rig.restart_sidecar(&["--kube-api-qps", "5", "--kube-api-burst", "5", "--audience", AUDIENCE]);
    rig.snapshot("first");
    let client = rig.client();
    let request = rig.allocated("first");
    let codes = cluster.block_on(async {
        let mut all = tokio::task::JoinSet::new();
        for number in 0..500 {
            let mut bad = request.clone();
            bad.security_token = format!("bad-{number}");
            all.spawn(collect(client.clone(), bad.into()));
        }
        all.join_all().await.into_iter().map(|one| one.unwrap_err().code()).collect::<Vec<_>>()
    });
    assert!(codes.contains(&Code::Unauthenticated) && codes.contains(&Code::Unavailable));
    // A later call does not queue after all of them.
    let begun = Instant::now();
    rig.extents(request);
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}

#[test]
fn the_released_cluster_role_is_enough() {
    let Some(cluster) = shared() else { return };
    // As released: no watch, no classes, no secrets.
    let rules = vec![
        rule("authentication.k8s.io", &["tokenreviews"], &["create", "get"]),
        rule("authorization.k8s.io", &["subjectaccessreviews"], &["create", "get"]),
        rule(
            "snapshot.storage.k8s.io",
            &["volumesnapshots", "volumesnapshotcontents"],
            &["get", "list"],
        ),
        rule("cbt.storage.k8s.io", &["snapshotmetadataservices"], &["get", "list", "watch"]),
    ];
    let rig = Rig::with(cluster, Options { rules, ..Options::default() });
    rig.write(1, [1]);
    let first = rig.snapshot("first");
    rig.write(2, [2]);
    rig.snapshot("second");
    assert_eq!(rig.extents(rig.allocated("second")).len(), 1);
    assert_eq!(rig.extents(rig.delta(&first.handle, "second")).len(), 1);
    let neighbours = cluster.namespace("neighbours");
    let foreign = rig.driver.volume("foreign", CAPACITY, block());
    cluster.claim(&neighbours, "foreign", &rig.driver_name, &foreign, CAPACITY);
    let foreign = cluster.snapshot(&neighbours, "foreign", "foreign", &rig.class);
    rig.refused(rig.delta(&foreign.handle, "second"), Code::PermissionDenied, "another namespace");
}

#[test]
fn a_missing_permission_of_the_sidecar_is_named() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.snapshot("first");
    let bindings = cluster.api::<ClusterRoleBinding>();
    let roles = cluster.api::<ClusterRole>();
    let all = cluster.list(&bindings);
    let own = all.iter().find(|binding| {
        let mut subjects = binding.subjects.iter().flatten();
        subjects.any(|it| it.name == "sidecar" && it.namespace.as_deref() == Some(&rig.namespace))
    });
    let role = own.unwrap().role_ref.name.clone();
    let without =
        json!({ "rules": [rule("authentication.k8s.io", &["tokenreviews"], &["create"])] });
    cluster.merge(&roles, &role, &without);
    let refused = cluster.wait_for("the right is gone", || rig.ask(rig.allocated("first")).err());
    assert_eq!(refused.code(), Code::Internal, "{refused:?}");
    assert!(refused.message().contains("SubjectAccessReviews"), "{refused:?}");
}
