//! The effect of outages of the server, its APIService or the API server, and how the API server
//! comes to trust the server.

use std::time::{Duration, Instant};
use support::cluster::shared;

use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use support::cluster::Cluster;
use support::cluster::aggregated::{API_SERVICE, Aggregated};
use support::cluster::programs::stdout_of;
use support::driver::PATIENCE;
use support::path;

const APIS: &str = "/apis/cbt.storage.k8s.io/v1alpha1";

/// Requests that must still work during an outage.
fn other_requests_work(rig: &Aggregated<'_>) {
    stdout_of(rig.kubectl(&["get", "namespaces"]));
    stdout_of(rig.kubectl(&["get", "volumesnapshots.snapshot.storage.k8s.io", "-A"]));
    // A CustomResourceDefinition of the same group.
    stdout_of(rig.kubectl(&["get", "snapshotsessionrequests.cbt.storage.k8s.io", "-A"]));
    let namespace = rig.cluster.namespace("meanwhile");
    stdout_of(rig.kubectl(&["create", "configmap", "x", "--namespace", &namespace]));
}

/// Whether the server is reachable through the API server.
fn answers(rig: &Aggregated<'_>) -> bool {
    let file = rig.delta(&json!({ "targetVolumeSnapshotName": "b", "mode": "file" }));
    let error = rig.kubectl_rejected(&["create", "--validate=false", "-f", path(&file)]);
    error.contains("spec.mode")
}

/// The API server discovers kinds a moment after it reaches the server.
fn wait_for_answers(rig: &Aggregated<'_>) {
    rig.cluster.wait_for("an answer", || answers(rig).then_some(()));
}

/// Waits until the API server's discovery reports this freshness of the group version: Current,
/// Stale, or nothing if it is missing. The API server polls once a minute.
fn wait_until_discovery_says(rig: &Aggregated<'_>, expected: Option<&str>) {
    let until = Instant::now() + 3 * PATIENCE;
    loop {
        let found = freshness(rig.cluster);
        if found.as_deref() == expected {
            return;
        }
        assert!(Instant::now() < until, "discovery says {found:?} and not {expected:?}");
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn freshness(cluster: &Cluster) -> Option<String> {
    let form = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
    let request = http::Request::get("/apis").header("Accept", form).body(Vec::new()).unwrap();
    let all: Value = cluster.block_on(cluster.client().request(request)).unwrap();
    let mut groups = all["items"].as_array()?.iter();
    let group = groups.find(|group| group["metadata"]["name"] == "cbt.storage.k8s.io")?;
    let mut versions = group["versions"].as_array()?.iter();
    let version = versions.find(|version| version["version"] == "v1alpha1")?;
    version["freshness"].as_str().map(str::to_owned)
}

#[test]
#[ignore = "full tier"]
fn an_outage_affects_only_its_group_version() {
    let Some(cluster) = shared() else { return };
    let mut rig = Aggregated::start(cluster, &[]);
    wait_for_answers(&rig);
    rig.served.process.signal(Signal::SIGKILL);
    rig.wait_for_available("False");
    let error = rig.kubectl_rejected(&["get", "--raw", APIS]);
    assert!(error.contains("ServiceUnavailable") || error.contains("unable to handle"), "{error}");
    assert!(!answers(&rig));
    other_requests_work(&rig);
    // The namespace controller waits for discovery: it must know all types in a namespace.
    wait_until_discovery_says(&rig, Some("Stale"));
    rig.start_again();
    rig.wait_until_available();
    wait_for_answers(&rig);
    wait_until_discovery_says(&rig, Some("Current"));
}

#[test]
#[ignore = "full tier"]
fn discovery_is_complete_without_the_api_service() {
    let Some(cluster) = shared() else { return };
    let mut rig = Aggregated::start(cluster, &[]);
    rig.served.process.signal(Signal::SIGKILL);
    rig.wait_for_available("False");
    rig.unregister();
    wait_until_discovery_says(&rig, None);
    stdout_of(rig.kubectl(&["api-resources", "--cached=false"]));
    other_requests_work(&rig);
    // Installed again, it is served again.
    rig.start_again();
    rig.register();
    rig.wait_until_available();
    wait_for_answers(&rig);
}

#[test]
#[ignore = "full tier"]
fn the_server_survives_an_api_server_restart() {
    let Some(cluster) = shared() else { return };
    let mut rig = Aggregated::start(cluster, &[]);
    wait_for_answers(&rig);
    cluster.restart_api_server();
    assert!(rig.served.process.ended().is_none());
    rig.wait_until_available();
    wait_for_answers(&rig);
    other_requests_work(&rig);
}

#[test]
#[ignore = "full tier"]
fn only_the_ca_bundle_is_written() {
    let Some(cluster) = shared() else { return };
    let rig = Aggregated::start(cluster, &[]);
    let services = cluster.api::<APIService>();
    let before = rig.api_service().unwrap();
    let bundle = rig.ca_bundle().unwrap();
    assert!(bundle.starts_with("-----BEGIN CERTIFICATE-----"), "{bundle}");
    let spec = before.spec.unwrap();
    assert_eq!((spec.group_priority_minimum, spec.version_priority), (1000, 15));
    let owned: Vec<String> = before
        .metadata
        .managed_fields
        .unwrap()
        .into_iter()
        .filter(|entry| entry.manager.as_deref() == Some("csi-loopback-aggregated-api"))
        .map(|entry| serde_json::to_string(&entry.fields_v1).unwrap())
        .collect();
    assert_eq!(owned, [r#"{"f:spec":{"f:caBundle":{}}}"#]);
    // A foreign change is reverted.
    let patch = json!({ "spec": { "caBundle": null, "versionPriority": 16 } });
    cluster.merge(&services, API_SERVICE, &patch);
    cluster.wait_for("the bundle", || (rig.ca_bundle()? == bundle).then_some(()));
    let after = rig.api_service().unwrap().spec.unwrap();
    assert_eq!(after.version_priority, 16);
    // An APIService without certificate checks is not changed, but reported.
    let patch = json!({ "spec": { "caBundle": null, "insecureSkipTLSVerify": true } });
    cluster.merge(&services, API_SERVICE, &patch);
    cluster.wait_for("the warning", || {
        rig.served.process.log().contains("insecureSkipTLSVerify").then_some(())
    });
    // A deleted APIService is not created.
    let warnings = || rig.served.process.log().matches("the object does not exist").count();
    let before = warnings();
    rig.unregister();
    cluster.wait_for("the warning", || (warnings() > before).then_some(()));
    assert!(rig.api_service().is_none());
}
