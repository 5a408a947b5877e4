//! How long sessions last.

use csi_loopback::kubernetes::session::{SessionState, SnapshotSessionData};
use serde_json::json;

use crate::cluster::Cluster;
use crate::cluster::manager::faketime;
use crate::cluster::suite::skip;
use crate::rig::{Options, Rig, a_while, lifetime, token};

pub fn an_expired_request_is_deleted_with_its_data(cluster: &Cluster) {
    let rig = Rig::new(cluster);
    rig.snapshot("monday");
    rig.ask("short", json!({ "snapshots": ["monday"], "lifetimeSeconds": 3 }));
    let short = token(&rig.wait_for("short", SessionState::Ready));
    rig.ask("failed", json!({ "snapshots": ["nothing"], "lifetimeSeconds": 3 }));
    rig.fails("failed", "SnapshotMissing");
    rig.unready(&rig.driver, "never");
    rig.ask("pending", json!({ "snapshots": ["never"], "lifetimeSeconds": 3 }));
    let long = rig.session("long", &["monday"]);
    for name in ["short", "failed", "pending"] {
        rig.wait_until_gone(name);
    }
    assert!(rig.data_of(&short).is_none());
    assert!(rig.data_of(&long).is_some() && rig.get("long").is_some());
}

pub fn a_manager_whose_clock_was_moved_ends_what_has_expired_by_it(cluster: &Cluster) {
    if faketime().is_none() {
        skip("a_manager_whose_clock_was_moved_ends_what_has_expired_by_it", "no libfaketime");
        return;
    }
    let mut rig = Rig::new(cluster);
    rig.snapshot("monday");
    let token = rig.session("hour", &["monday"]);
    rig.ask("day", json!({ "snapshots": ["monday"], "lifetimeSeconds": 86_400 }));
    rig.wait_for("day", SessionState::Ready);
    rig.manager.process.stop();
    let kubeconfig = cluster.kubeconfig_of(&rig.account);
    rig.manager = crate::cluster::manager::spawn(
        cluster,
        &crate::cluster::manager::Start {
            kubeconfig: &kubeconfig,
            namespace: &rig.home,
            flags: &[],
            ahead: Some("+2h"),
        },
    );
    rig.wait_until_gone("hour");
    cluster.wait_until_gone(&cluster.api_in::<SnapshotSessionData>(&rig.driver_home), &token);
    assert_eq!(rig.get("day").unwrap().state(), SessionState::Ready);
    // By the same clock a new one lasts as long as it should.
    rig.request("new", &["monday"]);
    let new = rig.wait_for("new", SessionState::Ready);
    assert!((10_790..=10_810).contains(&lifetime(&new)), "{}", lifetime(&new));
}

pub fn lifetimes_are_those_of_the_config_map_and_follow_it(cluster: &Cluster) {
    let rig = Rig::new(cluster);
    rig.snapshot("monday");
    let asked = |name: &str, seconds: Option<u64>| {
        rig.ask(name, json!({ "snapshots": ["monday"], "lifetimeSeconds": seconds }));
        lifetime(&rig.wait_for(name, SessionState::Ready))
    };
    let about = |found: i64, expected: i64| {
        assert!((found - expected).abs() <= 5, "{found} for {expected}")
    };
    about(asked("built-in", None), 3600);
    about(asked("built-in-maximum", Some(1_000_000)), 86_400);
    rig.lifetimes(json!({ "defaultLifetime": "10m", "maximumLifetime": "20m" }));
    cluster.wait_for("it has taken the ConfigMap", || {
        let found = asked(&cluster.unique("probe"), None);
        ((found - 600).abs() <= 5).then_some(())
    });
    about(asked("asked", Some(900)), 900);
    about(asked("too-much", Some(9000)), 1200);
    rig.lifetimes(json!({ "defaultLifetime": "soon" }));
    a_while();
    about(asked("nonsense", None), 600);
    assert!(rig.manager.process.log().contains("defaultLifetime"));
    // A session that there is keeps its time.
    about(lifetime(&rig.get("built-in").unwrap()), 3600);
}

pub fn data_that_has_expired_goes_even_if_its_request_cannot(cluster: &Cluster) {
    let rig = Rig::with(cluster, Options::default());
    rig.snapshot("monday");
    rig.ask("held", json!({ "snapshots": ["monday"], "lifetimeSeconds": 4 }));
    let token = token(&rig.wait_for("held", SessionState::Ready));
    let own = json!({ "metadata": { "finalizers": ["cbt.storage.k8s.io/session-data", "example.com/stays"] } });
    cluster.merge(&rig.requests(), "held", &own);
    cluster.wait_until_gone(&cluster.api_in::<SnapshotSessionData>(&rig.driver_home), &token);
    assert!(rig.get("held").is_some());
    cluster.merge(&rig.requests(), "held", &json!({ "metadata": { "finalizers": null } }));
}
