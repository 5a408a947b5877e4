//! What stops and what goes on when the server, its APIService or the API server is away; and how the API server comes to trust
//! the server.

use std::time::{Duration, Instant};
use support::cluster::shared;

use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use support::cluster::Cluster;
use support::cluster::aggregated::{API_SERVICE, Aggregated};
use support::cluster::programs::said;
use support::driver::PATIENCE;
use support::path;

const APIS: &str = "/apis/cbt.storage.k8s.io/v1alpha1";

/// What somebody else does in the meantime.
fn goes_on(rig: &Aggregated<'_>) {
    said(rig.kubectl(&["get", "namespaces"]));
    said(rig.kubectl(&["get", "volumesnapshots.snapshot.storage.k8s.io", "-A"]));
    // A CustomResourceDefinition of the same group.
    said(rig.kubectl(&["get", "snapshotsessionrequests.cbt.storage.k8s.io", "-A"]));
    let namespace = rig.cluster.namespace("meanwhile");
    said(rig.kubectl(&["create", "configmap", "x", "--namespace", &namespace]));
}

/// Whether the server is asked by way of the API server.
fn answers(rig: &Aggregated<'_>) -> bool {
    let file = rig.delta(&json!({ "targetVolumeSnapshotName": "b", "mode": "file" }));
    let told = rig.kubectl_refused(&["create", "--validate=false", "-f", path(&file)]);
    told.contains("spec.mode")
}

/// Waits until the API server's discovery calls the group version so: Current, Stale, or nothing where it is not in it. It asks
/// those behind it once a minute.
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
fn while_the_server_is_away_only_its_group_version_stops() {
    let Some(cluster) = shared() else { return };
    let mut rig = Aggregated::start(cluster, &[]);
    assert!(answers(&rig));
    rig.served.process.signal(Signal::SIGKILL);
    rig.wait_until_it_says("False");
    let told = rig.kubectl_refused(&["get", "--raw", APIS]);
    assert!(told.contains("ServiceUnavailable") || told.contains("unable to handle"), "{told}");
    assert!(!answers(&rig));
    goes_on(&rig);
    // By this the controller that ends namespaces waits: it has to know of everything that may be in one.
    wait_until_discovery_says(&rig, Some("Stale"));
    rig.start_again();
    rig.wait_until_available();
    assert!(answers(&rig));
    wait_until_discovery_says(&rig, Some("Current"));
}

#[test]
#[ignore = "full tier"]
fn without_the_api_service_discovery_is_whole() {
    let Some(cluster) = shared() else { return };
    let mut rig = Aggregated::start(cluster, &[]);
    rig.served.process.signal(Signal::SIGKILL);
    rig.wait_until_it_says("False");
    rig.unregister();
    wait_until_discovery_says(&rig, None);
    said(rig.kubectl(&["api-resources", "--cached=false"]));
    goes_on(&rig);
    // Installed again, it is there again.
    rig.start_again();
    rig.register();
    rig.wait_until_available();
    assert!(answers(&rig));
}

#[test]
#[ignore = "full tier"]
fn the_server_outlives_the_api_server() {
    let Some(cluster) = shared() else { return };
    let mut rig = Aggregated::start(cluster, &[]);
    assert!(answers(&rig));
    cluster.restart_api_server();
    assert!(rig.served.process.ended().is_none());
    rig.wait_until_available();
    cluster.wait_for("an answer", || answers(&rig).then_some(()));
    goes_on(&rig);
}

#[test]
#[ignore = "full tier"]
fn the_ca_bundle_is_published_and_nothing_else_is_written() {
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
    // What somebody undoes is put right.
    let patch = json!({ "spec": { "caBundle": null, "versionPriority": 16 } });
    cluster.merge(&services, API_SERVICE, &patch);
    cluster.wait_for("the bundle", || (rig.ca_bundle()? == bundle).then_some(()));
    let after = rig.api_service().unwrap().spec.unwrap();
    assert_eq!(after.version_priority, 16);
    // One that checks no certificate is not touched, and told.
    let patch = json!({ "spec": { "caBundle": null, "insecureSkipTLSVerify": true } });
    cluster.merge(&services, API_SERVICE, &patch);
    cluster.wait_for("the warning", || {
        rig.served.process.log().contains("insecureSkipTLSVerify").then_some(())
    });
    // One that is gone is not made.
    rig.unregister();
    cluster.wait_for("the warning", || {
        rig.served.process.log().contains("it does not exist").then_some(())
    });
    assert!(rig.api_service().is_none());
}
