//! Requests and responses; permissions, tokens, the cache and the rate limits.

use support::cluster::shared;

use csi_loopback::aggregated_api::failure::Cause;
use csi_loopback::kubernetes::cbt_http::{ProblemKind, audience};
use csi_loopback::kubernetes::client::Rate;
use csi_loopback::kubernetes::snapshot_delta::{
    SecretReference, VolumeSnapshotDeltaSpec, VolumeSnapshotDeltaState,
};
use k8s_openapi::api::rbac::v1::{PolicyRule, Role};

use super::endpoint::{page, problem};
use super::rig::{GROUP, Options, Rig, SNAPSHOT_GROUP, spec, user_rules, without};
use support::cluster::access::{Account, rule};

fn with_secret(name: &str) -> VolumeSnapshotDeltaSpec {
    let secret_ref = Some(SecretReference { name: name.into(), namespace: None });
    VolumeSnapshotDeltaSpec { secret_ref, ..spec("", "monday") }
}

#[test]
fn a_page_has_the_drivers_blocks_and_the_request() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, Options { max_limit: 300, ..Options::default() });
    rig.snapshot("monday");
    rig.snapshot("tuesday");
    rig.endpoint.says(page(&[7, 9], Some(10)));
    let first = rig.answer(VolumeSnapshotDeltaSpec { offset: 5, ..spec("monday", "tuesday") });
    assert_eq!((first.limit, first.offset, first.next), (256, 5, 10));
    assert_eq!(first.state, VolumeSnapshotDeltaState::Continue);
    assert_eq!(first.volume_size_bytes, Some(1 << 30));
    let blocks: Vec<_> = first.changed_blocks.iter().map(|block| block.offset).collect();
    assert_eq!(blocks, [7, 9]);
    rig.endpoint.says(page(&[], None));
    let delta = rig.ask(VolumeSnapshotDeltaSpec { limit: 5000, ..spec("", "tuesday") }).unwrap();
    assert_eq!(delta.spec.limit, 5000, "the requested limit is returned");
    let last = delta.status.unwrap();
    assert_eq!((last.limit, last.next), (300, 0));
    assert_eq!(last.state, VolumeSnapshotDeltaState::Completed);
    let requests: Vec<_> =
        rig.endpoint.pages().into_iter().map(|seen| seen.request.unwrap()).collect();
    assert_eq!(requests.len(), 2, "one call for each page");
    assert_eq!((requests[0].offset, requests[0].limit), (5, 256));
    assert_eq!(requests[0].base_snapshot_id, "handle-monday");
    assert_eq!(requests[0].target_snapshot_id, "handle-tuesday");
    assert_eq!(requests[0].driver, rig.driver);
    assert_eq!((requests[1].base_snapshot_id.as_str(), requests[1].limit), ("", 300));
}

#[test]
fn a_drivers_error_is_a_status_without_secrets() {
    let Some(cluster) = shared() else { return };
    let mut rules = user_rules();
    rules.push(rule("", &["secrets"], &["get"]));
    let rig = Rig::with(cluster, Options { user_rules: rules, ..Options::default() });
    rig.snapshot("monday");
    cluster.secret(&rig.apps, "login", &[("user", "joe"), ("password", "hunter22")]);
    let said = "no such snapshot\nfor hunter22";
    rig.endpoint.says(problem(ProblemKind::Driver, said, Some("NOT_FOUND")));
    let status = rig.answer(with_secret("login"));
    assert_eq!(status.state, VolumeSnapshotDeltaState::Failed);
    assert_eq!(status.error, "NOT_FOUND: no such snapshot for [hidden]");
    assert_eq!((status.limit, status.changed_blocks.len()), (256, 0));
    let request = rig.endpoint.pages().pop().unwrap().request.unwrap();
    assert_eq!(request.secrets.reveal()["password"], "hunter22");
    assert_eq!(request.secrets.reveal().len(), 2);
}

fn create_rule() -> PolicyRule {
    rule(GROUP, &["volumesnapshotdeltas"], &["create"])
}

/// An account that may get the objects of these names, and create VolumeSnapshotDeltas.
fn user(rig: &Rig, name: &str, group: &str, resource: &str, objects: &[&str]) -> Account {
    let account = rig.cluster.account(&rig.apps, name);
    let names = Some(objects.iter().map(|name| (*name).to_owned()).collect());
    let named = PolicyRule { resource_names: names, ..rule(group, &[resource], &["get"]) };
    let role = rig.cluster.grant_in(&rig.apps, &account, &[create_rule()]);
    let rules = serde_json::json!({ "rules": [create_rule(), named] });
    rig.cluster.merge(&rig.cluster.api_in::<Role>(&rig.apps), &role, &rules);
    account
}

#[test]
fn not_allowed_without_the_permission_to_create() {
    let Some(cluster) = shared() else { return };
    let rules = without(user_rules(), "volumesnapshotdeltas");
    let rig = Rig::with(cluster, Options { user_rules: rules, ..Options::default() });
    rig.snapshot("monday");
    let failure = rig.refused(Cause::NotAllowed, spec("", "monday"));
    assert!(failure.message.contains("create volumesnapshotdeltas.cbt"), "{failure}");
    assert!(rig.endpoint.pages().is_empty());
}

#[test]
fn not_allowed_does_not_reveal_a_snapshot() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.snapshot("monday");
    rig.snapshot("tuesday");
    let one = user(&rig, "one", SNAPSHOT_GROUP, "volumesnapshots", &["tuesday"]);
    let own =
        cluster.wait_for("the right to get one", || rig.ask_as(&one, spec("", "tuesday")).ok());
    assert!(own.status.is_some());
    let said = |spec: VolumeSnapshotDeltaSpec| {
        let failure = rig.ask_as(&one, spec).unwrap_err();
        assert_eq!(failure.cause, Cause::NotAllowed, "{failure}");
        failure.message
    };
    // The base and the target, existing and missing ones, also after they are cached.
    rig.answer(spec("monday", "tuesday"));
    let base = said(spec("monday", "tuesday"));
    assert!(base.contains("get volumesnapshots") && base.contains("\"monday\""), "{base}");
    assert_eq!(base, said(spec("monday", "monday")));
    assert_eq!(base.replace("monday", "friday"), said(spec("friday", "tuesday")));
    assert_eq!(base.replace("monday", "friday"), said(spec("", "friday")));
}

#[test]
fn not_allowed_does_not_reveal_a_secret() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.snapshot("monday");
    cluster.secret(&rig.apps, "login", &[("key", "value")]);
    let [there, missing] = ["login", "nothing"].map(|name| {
        let failure = rig.refused(Cause::NotAllowed, with_secret(name));
        failure.message
    });
    assert_eq!(there.replace("login", "nothing"), missing);
    assert!(rig.endpoint.pages().is_empty());
}

#[test]
fn a_token_is_reused_for_its_driver_only() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.snapshot("monday");
    for offset in [0, 1] {
        rig.answer(VolumeSnapshotDeltaSpec { offset, ..spec("", "monday") });
    }
    let seen = rig.endpoint.pages();
    assert_eq!(seen[0].token, seen[1].token);
    let review = cluster.review(&seen[0].token, &audience(&rig.driver));
    assert_eq!(review.authenticated, Some(true));
    assert_eq!(review.user.unwrap().username, Some(rig.server.user()));
    for other in [audience("other.csi.local"), "https://kubernetes.default.svc".into()] {
        assert_ne!(cluster.review(&seen[0].token, &other).authenticated, Some(true), "{other}");
    }
}

#[test]
fn a_refused_token_is_renewed_once() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.snapshot("monday");
    rig.answer(spec("", "monday"));
    let token = rig.endpoint.pages()[0].token.clone();
    rig.endpoint.refuse(&token);
    rig.answer(VolumeSnapshotDeltaSpec { offset: 1, ..spec("", "monday") });
    let seen: Vec<_> = rig.endpoint.pages().into_iter().map(|seen| seen.token).collect();
    assert!(seen.len() == 3 && seen[1] == token && seen[2] != token);
    // An endpoint that accepts no token is not called forever.
    rig.endpoint.refuse("*");
    let failure = rig.refused(
        Cause::EndpointUnavailable,
        VolumeSnapshotDeltaSpec { offset: 2, ..spec("", "monday") },
    );
    assert!(!failure.message.contains(&token), "{failure}");
    assert_eq!(rig.endpoint.pages().len(), 5);
}

#[test]
#[ignore = "full tier"]
fn too_many_requests_of_a_user_have_a_retry_delay() {
    let Some(cluster) = shared() else { return };
    let user_rate = Rate { per_second: 0.05, burst: 2 };
    let rig = Rig::with(cluster, Options { user_rate, ..Options::default() });
    rig.snapshot("monday");
    rig.answer(spec("", "monday"));
    rig.answer(spec("", "monday"));
    let before = cluster.requests_by(&rig.server.user());
    let failure = rig.refused(Cause::TooMany, spec("", "monday"));
    let seconds = super::rig::details(&failure)["retryAfterSeconds"].as_u64().unwrap();
    assert!((1..=20).contains(&seconds), "{seconds}");
    let reviewed = cluster.requests_by(&rig.server.user()) - before;
    assert_eq!(reviewed, 0, "no review was needed");
    // Other users do not wait.
    let other = cluster.account(&rig.apps, "other");
    cluster.grant_in(&rig.apps, &other, &user_rules());
    rig.ask_as(&other, spec("", "monday")).unwrap();
}

#[test]
fn too_many_requests_of_all_users_are_limited() {
    let Some(cluster) = shared() else { return };
    let rate = Rate { per_second: 0.05, burst: 1 };
    let rig = Rig::with(cluster, Options { rate, ..Options::default() });
    rig.snapshot("monday");
    rig.answer(spec("", "monday"));
    let other = cluster.account(&rig.apps, "other");
    let failure = rig.ask_as(&other, spec("", "monday")).unwrap_err();
    assert!(failure.cause == Cause::TooMany && failure.message.contains("in all"), "{failure}");
}
