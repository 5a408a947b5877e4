//! The conditions of DriverDiscovery objects.

use std::sync::Arc;
use std::time::{Duration, SystemTime};
use support::cluster::shared;

use csi_loopback::aggregated_api::discovery::{
    self, CAPABLE, CERTIFICATE, Context, MANAGER, Metrics, REACHABLE,
};
use csi_loopback::aggregated_api::endpoint::Endpoints;
use csi_loopback::kubernetes::cbt_http::PATH;
use csi_loopback::kubernetes::driver_discovery::DriverDiscovery;
use csi_loopback::kubernetes::leader::Election;
use csi_loopback::telemetry::shutdown::{Phase, Shutdown};
use k8s_openapi::ByteString;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::Api;
use kube::api::{Patch, PatchParams};
use prometheus_client::registry::Registry;
use serde_json::json;
use tokio::sync::watch;

use super::endpoint::{Endpoint, Reply, info};
use super::rig::{number, server_rules};
use support::cluster::Cluster;
use support::cluster::access::{Account, rule};
use support::cluster::tls::Authority;

const HOUR: Duration = Duration::from_secs(3600);

struct Controller {
    phase: watch::Sender<Phase>,
    registry: Registry,
}

impl Controller {
    /// A leader, or one of several candidates.
    fn start(cluster: &Cluster, account: &Account, every: Duration, lease: Option<&str>) -> Self {
        let client = cluster.client_as(account);
        let endpoints = Endpoints::new(client.clone(), &account.namespace, &account.name);
        let mut registry = Registry::default();
        let context = Context::new(client, endpoints, every, Metrics::new(&mut registry));
        let (phase, shutdown) = Shutdown::manual();
        let leases = cluster.api_in(&account.namespace);
        let election = lease.map(|name| Election {
            leases,
            name: name.into(),
            identity: cluster.unique("replica"),
            duration: Duration::from_secs(15),
        });
        cluster.spawn_task(async move {
            let (_always, leads) = watch::channel(true);
            let leads = match election {
                Some(election) => election.start(shutdown.clone()),
                None => leads,
            };
            discovery::run(leads, Arc::new(context), &shutdown).await;
        });
        Self { phase, registry }
    }

    fn probes(&self) -> u64 {
        number(&self.registry, "discovery_looks_total")
    }

    fn leads(&self) -> bool {
        number(&self.registry, "discovery_leading") == 1
    }
}

fn account(cluster: &Cluster) -> Account {
    let account = cluster.account(&cluster.namespace("discovery"), "aggregated-api");
    cluster.grant(&account, &server_rules());
    account
}

fn objects(cluster: &Cluster) -> Api<DriverDiscovery> {
    cluster.api()
}

fn driver_name(cluster: &Cluster) -> String {
    format!("{}.csi.local", cluster.unique("discovered"))
}

/// Creates the DriverDiscovery of a driver. The controller may probe at once, so set the
/// endpoint's replies first.
fn discover(cluster: &Cluster, driver: &str, url: &str, ca: &[u8]) {
    let config = json!({ "url": url, "caBundle": ByteString(ca.into()) });
    let spec = json!({ "driverName": driver, "clientConfig": config });
    cluster.create(&objects(cluster), json!({ "metadata": { "name": driver }, "spec": spec }));
}

/// One whose endpoint reports this capability; returns the driver's name.
fn discovered(cluster: &Cluster, at: &Endpoint, authority: &Authority, capability: &str) -> String {
    let driver = driver_name(cluster);
    at.reports(info(&driver, capability));
    discover(cluster, &driver, &at.url(), authority.pem().as_bytes());
    driver
}

fn condition(cluster: &Cluster, driver: &str, kind: &str) -> Option<Condition> {
    let status = cluster.get(&objects(cluster), driver)?.status?;
    status.conditions.into_iter().find(|one| one.type_ == kind)
}

/// A patch for server-side apply: one condition that has been True since then.
fn condition_by(driver: &str, kind: &str, since: &str) -> serde_json::Value {
    json!({
        "apiVersion": "cbt.storage.k8s.io/v1alpha2", "kind": "DriverDiscovery",
        "metadata": { "name": driver },
        "status": { "conditions": [{
            "type": kind, "status": "True", "reason": "ByHand", "message": "",
            "lastTransitionTime": since,
        }] },
    })
}

/// Waits until the condition has this state.
fn becomes(cluster: &Cluster, driver: &str, kind: &str, status: &str, reason: &str) -> Condition {
    let what = format!("{kind} of {driver} is {status}, {reason}");
    let mut last = None;
    let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        cluster.wait_for(&what, || {
            last = condition(cluster, driver, kind);
            last.clone().filter(|one| one.status == status && one.reason == reason)
        })
    }));
    found.unwrap_or_else(|_| panic!("{what}: it is {last:?}"))
}

fn endpoint(cluster: &Cluster, authority: &Authority) -> Endpoint {
    let certificate = authority.certify_for(cluster.scratch(), &cluster.unique("cert"), 48 * HOUR);
    Endpoint::start(cluster, &certificate)
}

#[test]
fn a_working_driver_has_three_conditions() {
    let Some(cluster) = shared() else { return };
    let authority = Authority::new("cbt-http");
    let endpoint = endpoint(cluster, &authority);
    let driver = discovered(cluster, &endpoint, &authority, "ListSnapshotDeltas");
    let other = condition_by(&driver, "Audited", "2024-01-01T00:00:00Z");
    let params = PatchParams::apply("auditor");
    let objects = objects(cluster);
    cluster.block_on(objects.patch_status(&driver, &params, &Patch::Apply(&other))).unwrap();
    let _controller =
        Controller::start(cluster, &account(cluster), discovery::PROBE_INTERVAL, None);
    becomes(cluster, &driver, REACHABLE, "True", "Reached");
    becomes(cluster, &driver, CAPABLE, "True", "ListSnapshotDeltas");
    let valid = becomes(cluster, &driver, CERTIFICATE, "True", "CertificateValid");
    assert!(valid.message.contains("until 20"), "{valid:?}");
    let found = cluster.get(&objects, &driver).unwrap();
    let status = found.status.unwrap();
    assert_eq!(status.conditions.len(), 4);
    assert_eq!(status.conditions.iter().filter(|one| one.reason == "ByHand").count(), 1);
    assert!(status.conditions.iter().all(|one| {
        one.reason == "ByHand" || one.observed_generation == found.metadata.generation
    }));
    // It manages only its three conditions.
    let fields = found.metadata.managed_fields.unwrap();
    let own: Vec<_> = fields.iter().filter(|one| one.manager.as_deref() == Some(MANAGER)).collect();
    assert_eq!(own.len(), 1);
    assert_eq!(own[0].subresource.as_deref(), Some("status"));
    let own = serde_json::to_value(&own[0].fields_v1).unwrap();
    assert_eq!(own.as_object().unwrap().keys().collect::<Vec<_>>(), ["f:status"]);
    assert_eq!(own["f:status"]["f:conditions"].as_object().unwrap().len(), 3);
    let audited = fields.iter().any(|one| one.manager.as_deref() == Some("auditor"));
    assert!(audited, "the other's condition is still the other's");
}

#[test]
fn only_changes_of_the_spec_cause_a_probe() {
    let Some(cluster) = shared() else { return };
    let authority = Authority::new("cbt-http");
    let (first, second) = (endpoint(cluster, &authority), endpoint(cluster, &authority));
    let driver = discovered(cluster, &first, &authority, "ListSnapshotDeltas");
    second.reports(info(&driver, "None"));
    // An unchanged condition keeps its transition time.
    let since = "2024-01-01T00:00:00Z";
    let before = condition_by(&driver, REACHABLE, since);
    let (objects, params) = (objects(cluster), PatchParams::apply(MANAGER));
    cluster.block_on(objects.patch_status(&driver, &params, &Patch::Apply(&before))).unwrap();
    // The interval never elapses: only a change causes a probe.
    let _controller = Controller::start(cluster, &account(cluster), 1000 * HOUR, None);
    let reached = becomes(cluster, &driver, REACHABLE, "True", "Reached");
    let corrected = json!({ "spec": { "clientConfig": { "url": second.url() } } });
    cluster.merge(&objects, &driver, &corrected);
    let capable = becomes(cluster, &driver, CAPABLE, "False", "NoCapability");
    assert_eq!(capable.observed_generation, Some(2));
    let still = condition(cluster, &driver, REACHABLE).unwrap();
    assert_eq!(still.last_transition_time, reached.last_transition_time);
    assert_eq!(still.last_transition_time.0.to_string(), since);
    assert_eq!(still.observed_generation, Some(2));
    assert_eq!((first.probes(), second.probes()), (1, 1));
}

#[test]
fn a_changed_endpoint_is_seen_at_the_next_probe() {
    let Some(cluster) = shared() else { return };
    let authority = Authority::new("cbt-http");
    let endpoint = endpoint(cluster, &authority);
    let driver = discovered(cluster, &endpoint, &authority, "SnapshotMetadata");
    let every = Duration::from_millis(300);
    let controller = Controller::start(cluster, &account(cluster), every, None);
    let before = becomes(cluster, &driver, CAPABLE, "True", "SnapshotMetadata");
    // Without a change nothing is written.
    let version = || cluster.get(&objects(cluster), &driver).unwrap().metadata.resource_version;
    let (written, probes) = (version(), controller.probes());
    cluster.wait_for("more probes", || (controller.probes() > probes + 3).then_some(()));
    assert_eq!(version(), written);
    endpoint.reports(info("other.csi.local", "SnapshotMetadata"));
    let other = becomes(cluster, &driver, CAPABLE, "False", "OtherDriver");
    assert!(other.message.contains("other.csi.local"), "{other:?}");
    assert!(other.last_transition_time >= before.last_transition_time);
    let forbidden = json!({ "kind": "NotAllowed", "message": "may not" }).to_string();
    endpoint.reports(Reply::Raw(403, forbidden, &[]));
    becomes(cluster, &driver, REACHABLE, "False", "Refused");
    becomes(cluster, &driver, CAPABLE, "Unknown", "NotReached");
    becomes(cluster, &driver, CERTIFICATE, "True", "CertificateValid");
    endpoint.stop();
    becomes(cluster, &driver, REACHABLE, "False", "Unreachable");
    becomes(cluster, &driver, CERTIFICATE, "Unknown", "NotReached");
}

#[test]
#[ignore = "full tier"]
fn an_unreachable_endpoint_is_probed_again_soon() {
    let Some(cluster) = shared() else { return };
    let authority = Authority::new("cbt-http");
    let endpoint = endpoint(cluster, &authority);
    let driver = driver_name(cluster);
    let late = json!({ "kind": "Unavailable", "message": "not yet" }).to_string();
    endpoint.reports(Reply::Raw(503, late, &[]));
    discover(cluster, &driver, &endpoint.url(), authority.pem().as_bytes());
    // The interval never elapses for working endpoints.
    let _controller = Controller::start(cluster, &account(cluster), 1000 * HOUR, None);
    becomes(cluster, &driver, REACHABLE, "False", "Refused");
    endpoint.reports(info(&driver, "ListSnapshotDeltas"));
    becomes(cluster, &driver, REACHABLE, "True", "Reached");
    assert_eq!(endpoint.probes(), 2);
}

#[test]
fn an_invalid_or_expiring_certificate_is_reported() {
    let Some(cluster) = shared() else { return };
    let _controller =
        Controller::start(cluster, &account(cluster), discovery::PROBE_INTERVAL, None);
    let authority = Authority::new("cbt-http");
    let now = SystemTime::now();
    for (host, span, trusted, reason) in [
        ("localhost", now - HOUR..now + 23 * HOUR, true, "CertificateExpiring"),
        ("localhost", now - 2 * HOUR..now - HOUR, true, "CertificateExpired"),
        ("localhost", now + HOUR..now + 48 * HOUR, true, "CertificateNotYetValid"),
        ("elsewhere", now - HOUR..now + 48 * HOUR, true, "OtherName"),
        ("localhost", now - HOUR..now + 48 * HOUR, false, "UnknownAuthority"),
    ] {
        let name = cluster.unique("cert");
        let certificate = authority.certify_span(cluster.scratch(), &name, host, span);
        let endpoint = Endpoint::start(cluster, &certificate);
        let other = Authority::new("another");
        let known = if trusted { &authority } else { &other };
        let driver = discovered(cluster, &endpoint, known, "ListSnapshotDeltas");
        becomes(cluster, &driver, CERTIFICATE, "False", reason);
        let reached = condition(cluster, &driver, REACHABLE).unwrap();
        let expected = if reason == "CertificateExpiring" { "Reached" } else { "Unreachable" };
        assert_eq!(reached.reason, expected, "{reached:?}");
        assert_eq!(endpoint.probes() > 0, reason == "CertificateExpiring", "no token is shown");
    }
}

#[test]
fn an_unusable_discovery_is_reported_alone() {
    let Some(cluster) = shared() else { return };
    let _controller =
        Controller::start(cluster, &account(cluster), discovery::PROBE_INTERVAL, None);
    let driver = driver_name(cluster);
    discover(cluster, &driver, &format!("https://localhost:1{PATH}"), b"nothing");
    let condition = becomes(cluster, &driver, REACHABLE, "False", "DiscoveryUnusable");
    assert!(condition.message.contains("caBundle"), "{condition:?}");
    for kind in [CAPABLE, CERTIFICATE] {
        becomes(cluster, &driver, kind, "Unknown", "DiscoveryUnusable");
    }
    // An endpoint that never responds does not block the others.
    let authority = Authority::new("cbt-http");
    let (slow, quick) = (endpoint(cluster, &authority), endpoint(cluster, &authority));
    discover(cluster, &driver_name(cluster), &slow.url(), authority.pem().as_bytes());
    let driver = discovered(cluster, &quick, &authority, "ListSnapshotDeltas");
    becomes(cluster, &driver, REACHABLE, "True", "Reached");
}

#[test]
#[ignore = "full tier"]
fn only_the_leader_probes_and_a_standby_takes_over() {
    let Some(cluster) = shared() else { return };
    let authority = Authority::new("cbt-http");
    let endpoint = endpoint(cluster, &authority);
    let driver = discovered(cluster, &endpoint, &authority, "ListSnapshotDeltas");
    let account = account(cluster);
    let all = ["get", "create", "update"];
    cluster.grant_in(
        &account.namespace,
        &account,
        &[rule("coordination.k8s.io", &["leases"], &all)],
    );
    let every = Duration::from_millis(300);
    let first = Controller::start(cluster, &account, every, Some("discovery"));
    cluster.wait_for("the first leads", || first.leads().then_some(()));
    let second = Controller::start(cluster, &account, every, Some("discovery"));
    let probes = first.probes();
    cluster.wait_for("more probes", || (first.probes() > probes + 5).then_some(()));
    assert_eq!((second.probes(), second.leads()), (0, false));
    first.phase.send_replace(Phase::Draining);
    cluster.wait_for("the second leads", || (second.leads() && second.probes() > 0).then_some(()));
    let ended = first.probes();
    let probes = second.probes();
    cluster.wait_for("more probes", || (second.probes() > probes + 5).then_some(()));
    assert_eq!(first.probes(), ended);
    becomes(cluster, &driver, REACHABLE, "True", "Reached");
}
