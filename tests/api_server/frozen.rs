//! Connections to the API server that break without a sign: existing ones deliver nothing and never
//! end, new ones work. Every role that watches notices within the documented time.

use std::time::{Duration, Instant};

use csi_loopback::kubernetes::client::MAX_STALENESS;
use csi_loopback::kubernetes::driver_discovery::DriverDiscovery;
use csi_loopback::kubernetes::session::SessionState;
use csi_loopback::proto::csi::v1 as csi;
use k8s_openapi::ByteString;
use serde_json::json;
use support::cluster::aggregated::Aggregated;
use support::cluster::node_proxy::{Rig as NodeProxy, node_proxy_rules};
use support::cluster::recorder::{DEFERRING, Recorder};
use support::cluster::session::{allocated, random_token};
use support::cluster::shared;

use crate::admission::rig::{Rig as Webhooks, With, pod};
use crate::session::rig::{Options as ManagerOptions, Rig as Manager};
use crate::session_api::rig::{Options as SidecarOptions, Rig as Sidecar};

/// Time of the test's own calls.
const SLACK: Duration = Duration::from_secs(3);

/// Polls until a condition holds; fails once `frozen` is longer ago than the bound.
fn in_time(what: &str, frozen: Instant, mut condition: impl FnMut() -> bool) {
    while !condition() {
        assert!(frozen.elapsed() < MAX_STALENESS + SLACK, "{what}: stale for too long");
        std::thread::sleep(Duration::from_millis(250));
    }
    println!("report: {what} {:.1?} after its connections froze", frozen.elapsed());
}

#[test]
#[ignore = "full tier"]
fn a_frozen_connection_delays_no_role_by_30_s() {
    let Some(cluster) = shared() else { return };
    let proxy = cluster.proxy();
    let server = proxy.server();
    // A manager, which will get a request.
    let manager = Manager::with(
        cluster,
        ManagerOptions { server: Some(server.clone()), ..Default::default() },
    );
    manager.snapshot("monday");
    manager.session("first", &["monday"]);
    // A policy, which will change.
    let webhooks = Webhooks::new(
        cluster,
        With { policy: Some("default: {allowed: true}"), server: Some(&server), ..With::default() },
    );
    let volume = pod(&webhooks.volume(json!({ "size": "1Mi" })));
    webhooks.dry(&webhooks.apps, &volume).unwrap();
    // A pod, which will opt in.
    let recorder = Recorder::start(cluster, &DEFERRING);
    let mut node = NodeProxy::prepare(cluster, recorder, &node_proxy_rules());
    node.kubeconfig = cluster.kubeconfig_through(&proxy, &node.account);
    node.start_proxy();
    let claim = node.claim("data");
    let late = node.pod("late", &[&claim], None);
    // A controller, which will get an object.
    let _aggregated = Aggregated::start_at(cluster, &server, &[]);
    std::thread::sleep(Duration::from_secs(1));

    proxy.freeze();
    let frozen = Instant::now();
    manager.request("second", &["monday"]);
    webhooks.policy("default: {allowed: false}");
    node.opt_in(&late, "data");
    let discovery = cluster.unique("driver");
    let config =
        json!({ "url": "https://localhost:1/none", "caBundle": ByteString(b"none".to_vec()) });
    let spec = json!({ "driverName": discovery, "clientConfig": config });
    let discoveries = cluster.api::<DriverDiscovery>();
    let object = json!({ "metadata": { "name": discovery }, "spec": spec });
    cluster.create(&discoveries, object);

    in_time("the webhooks apply a policy", frozen, || {
        webhooks.dry(&webhooks.apps, &volume).is_err()
    });
    in_time("the manager establishes a session", frozen, || {
        manager.get("second").is_some_and(|request| request.state() == SessionState::Ready)
    });
    in_time("the aggregated API server probes an endpoint", frozen, || {
        let found = cluster.get(&discoveries, &discovery);
        found.and_then(|found| found.status).is_some_and(|status| !status.conditions.is_empty())
    });
    // The volume is published once.
    std::thread::sleep((MAX_STALENESS + SLACK).saturating_sub(frozen.elapsed()));
    node.mount(&late, &claim).unwrap();
    assert!(node.driver.last::<csi::NodePublishVolumeRequest>().defer_fs_ops, "{}", node.log());
    cluster.delete(&discoveries, &discovery);
}

#[test]
#[ignore = "full tier"]
fn a_frozen_connection_accepts_no_revoked_session_for_30_s() {
    let Some(cluster) = shared() else { return };
    let proxy = cluster.proxy();
    let server = proxy.server();
    let sidecar = Sidecar::with(
        cluster,
        SidecarOptions { server: Some(server.clone()), ..Default::default() },
    );
    let token = sidecar.session(&[&sidecar.snapshot("first")]);
    sidecar.ok(allocated(&token, "first"));
    proxy.freeze();
    let frozen = Instant::now();
    cluster.revoke(&sidecar.home, &token);
    in_time("the sidecar refuses a revoked session", frozen, || {
        sidecar.ask(allocated(&token, "first")).is_err()
    });
}

#[test]
#[ignore = "full tier"]
fn calls_on_frozen_pooled_connections_fail_for_at_most_30_s() {
    let Some(cluster) = shared() else { return };
    let proxy = cluster.proxy();
    let sidecar = Sidecar::with(
        cluster,
        SidecarOptions { server: Some(proxy.server()), ..Default::default() },
    );
    let snapshot = sidecar.snapshot("first");
    let unknown = random_token;
    // Concurrent lookups fill the pool of connections.
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| sidecar.ask(allocated(&unknown(), "first")).unwrap_err());
        }
    });
    proxy.freeze();
    let frozen = Instant::now();
    let mut failed = 0;
    in_time("a lookup is answered", frozen, || {
        let status = sidecar.ask(allocated(&unknown(), "first")).unwrap_err();
        failed += usize::from(status.code() != tonic::Code::Unauthenticated);
        status.code() == tonic::Code::Unauthenticated
    });
    println!("report: {failed} lookups failed before");
    // From now on, none fails.
    for _ in 0..20 {
        let status = sidecar.ask(allocated(&unknown(), "first")).unwrap_err();
        assert_eq!(status.code(), tonic::Code::Unauthenticated, "{status:?}");
    }
    sidecar.ok(allocated(&sidecar.session(&[&snapshot]), "first"));
}
