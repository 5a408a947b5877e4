//! The lifetime of sessions.

use csi_loopback::kubernetes::session::{SessionState, SnapshotSessionData};
use serde_json::json;
use support::cluster::shared;

use super::rig::{Options, Rig, a_while, lifetime, token};
use support::clock::faketime;
use support::skip;

#[test]
#[ignore = "full tier"]
fn an_expired_request_is_deleted_with_its_data() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.snapshot("monday");
    rig.ask("short", json!({ "snapshots": ["monday"], "lifetimeSeconds": 8 }));
    let short = token(&rig.wait_for("short", SessionState::Ready));
    rig.ask("failed", json!({ "snapshots": ["nothing"], "lifetimeSeconds": 8 }));
    rig.fails("failed", "SnapshotMissing");
    rig.unready(&rig.driver, "never");
    rig.ask("pending", json!({ "snapshots": ["never"], "lifetimeSeconds": 8 }));
    let long = rig.session("long", &["monday"]);
    for name in ["short", "failed", "pending"] {
        rig.wait_until_gone(name);
    }
    assert!(rig.data_of(&short).is_none());
    assert!(rig.data_of(&long).is_some() && rig.get("long").is_some());
}

#[test]
fn sessions_expire_by_the_managers_clock() {
    let Some(cluster) = shared() else { return };
    if faketime().is_none() {
        skip("no libfaketime");
        return;
    }
    let mut rig = Rig::new(cluster);
    rig.snapshot("monday");
    let token = rig.session("hour", &["monday"]);
    rig.ask("day", json!({ "snapshots": ["monday"], "lifetimeSeconds": 86_400 }));
    rig.wait_for("day", SessionState::Ready);
    rig.manager.process.stop();
    let kubeconfig = cluster.kubeconfig_of(&rig.account);
    rig.manager = support::cluster::manager::spawn(
        cluster,
        &support::cluster::manager::Start {
            kubeconfig: &kubeconfig,
            namespace: &rig.home,
            flags: &[],
            ahead: Some("+2h"),
        },
    );
    rig.wait_until_gone("hour");
    cluster.wait_until_gone(&cluster.api_in::<SnapshotSessionData>(&rig.driver_home), &token);
    assert_eq!(rig.get("day").unwrap().state(), SessionState::Ready);
    // By the same clock a new session has its full lifetime.
    rig.request("new", &["monday"]);
    let new = rig.wait_for("new", SessionState::Ready);
    assert!((10_790..=10_810).contains(&lifetime(&new)), "{}", lifetime(&new));
}

#[test]
#[ignore = "full tier"]
fn lifetimes_follow_the_config_map() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.snapshot("monday");
    let create = |name: &str, seconds: Option<u64>| {
        rig.ask(name, json!({ "snapshots": ["monday"], "lifetimeSeconds": seconds }));
        lifetime(&rig.wait_for(name, SessionState::Ready))
    };
    let about = |found: i64, expected: i64| {
        assert!((found - expected).abs() <= 5, "{found} for {expected}")
    };
    about(create("built-in", None), 3600);
    about(create("built-in-maximum", Some(1_000_000)), 86_400);
    rig.lifetimes(json!({ "defaultLifetime": "10m", "maximumLifetime": "20m" }));
    cluster.wait_for("it has taken the ConfigMap", || {
        let found = create(&cluster.unique("probe"), None);
        ((found - 600).abs() <= 5).then_some(())
    });
    about(create("requested", Some(900)), 900);
    about(create("too-much", Some(9000)), 1200);
    rig.lifetimes(json!({ "defaultLifetime": "soon" }));
    a_while();
    about(create("invalid", None), 600);
    assert!(rig.manager.process.log().contains("defaultLifetime"));
    // An existing session keeps its expiration time.
    about(lifetime(&rig.get("built-in").unwrap()), 3600);
}

#[test]
#[ignore = "full tier"]
fn expired_data_is_deleted_even_if_its_request_stays() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, Options::default());
    rig.snapshot("monday");
    rig.ask("held", json!({ "snapshots": ["monday"], "lifetimeSeconds": 10 }));
    let token = token(&rig.wait_for("held", SessionState::Ready));
    let own = json!({ "metadata": { "finalizers": ["cbt.storage.k8s.io/session-data", "example.com/stays"] } });
    cluster.merge(&rig.requests(), "held", &own);
    cluster.wait_until_gone(&cluster.api_in::<SnapshotSessionData>(&rig.driver_home), &token);
    assert!(rig.get("held").is_some());
    cluster.merge(&rig.requests(), "held", &json!({ "metadata": { "finalizers": null } }));
}
