//! The published DriverDiscovery, and certificates that are valid for it.

use axum::body::Body;
use csi_loopback::kubernetes::cbt_http::PATH;
use csi_loopback::kubernetes::driver_discovery::DriverDiscovery;
use csi_loopback::kubernetes::metadata_service::DRIVER_LABEL;
use http::Request;
use k8s_openapi::ByteString;
use serde_json::json;
use support::cluster::shared;

use super::rig::{Desk, Replica, Rig};
use support::cluster::Cluster;
use support::cluster::access::rule;
use support::cluster::cbt_http::send;

/// Permissions to publish.
fn allow(cluster: &Cluster, desk: &Desk<'_>) {
    let verbs = ["get", "list", "watch", "create", "patch"];
    let discoveries = rule("cbt.storage.k8s.io", &["driverdiscoveries"], &verbs);
    let secrets = rule("", &["secrets"], &["get", "create", "update"]);
    cluster.grant(&desk.own, &[discoveries, secrets]);
}

fn found(cluster: &Cluster, driver: &str) -> Option<DriverDiscovery> {
    cluster.get(&cluster.api::<DriverDiscovery>(), driver)
}

fn bundle(found: &DriverDiscovery) -> String {
    String::from_utf8(found.spec.client_config.ca_bundle.0.clone()).unwrap()
}

/// A replica that publishes `address`, with certificates from files.
fn publishing(rig: &Rig<'_>, address: &str) -> Replica {
    allow(rig.desk.cluster, &rig.desk);
    let ca = rig.desk.certificate.file.with_file_name("ca.crt");
    rig.desk.spawn(&[
        "--manage-service",
        "--service-address",
        "localhost:1",
        "--service-ca",
        ca.to_str().unwrap(),
        "--cbt-http-service-address",
        address,
    ])
}

#[test]
#[ignore = "full tier"]
fn the_discovery_is_published_and_maintained() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster, &[]);
    let driver = &rig.desk.driver_name;
    let replica = publishing(&rig, "cbt.example.org:443");
    let made = cluster.wait_for("the discovery", || found(cluster, driver));
    let config = &made.spec.client_config;
    assert_eq!(made.spec.driver_name, *driver);
    assert_eq!(config.url.as_deref(), Some("https://cbt.example.org:443/v1alpha1/snapshot-deltas"));
    assert_eq!(config.service, None);
    assert_eq!(bundle(&made), rig.desk.authority.pem());
    assert_eq!(made.metadata.labels.as_ref().unwrap()[DRIVER_LABEL], *driver);
    let discoveries = cluster.api::<DriverDiscovery>();
    // The status belongs to the controller.
    let condition = json!({ "conditions": [{
        "type": "EndpointReachable", "status": "True", "reason": "Reached", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }]});
    cluster.merge_status(&discoveries, driver, &condition);
    let other = ByteString(b"other".to_vec());
    for change in [
        json!({ "spec": { "clientConfig": { "caBundle": other } } }),
        json!({ "spec": { "clientConfig": { "url": "https://elsewhere.example/x" } } }),
        json!({ "spec": { "clientConfig": {
            "url": null, "service": { "namespace": "a", "name": "b" },
        } } }),
        json!({ "metadata": { "labels": { DRIVER_LABEL: "other" } } }),
    ] {
        let changed = cluster.merge(&discoveries, driver, &change);
        assert_ne!((&changed.spec, &changed.metadata.labels), (&made.spec, &made.metadata.labels));
        let right = cluster.wait_for(&format!("{change} is put right"), || {
            found(cluster, driver).filter(|found| {
                found.spec == made.spec && found.metadata.labels == made.metadata.labels
            })
        });
        assert_eq!(right.status.unwrap().conditions.len(), 1, "the status is another's");
    }
    cluster.delete(&discoveries, driver);
    cluster.wait_for("it is created again", || found(cluster, driver));
    drop(replica);
    assert!(found(cluster, driver).is_some(), "another replica may go on");
}

#[test]
#[ignore = "full tier"]
fn certificates_are_valid_for_both_hosts() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster, &[]);
    allow(cluster, &rig.desk);
    let driver = &rig.desk.driver_name;
    let replica = rig.desk.spawn(&[
        "--self-signed",
        "--manage-service",
        "--service-address",
        "metadata.drivers.svc:1",
        "--cbt-http-service-address",
        "cbt.drivers.svc:1",
    ]);
    let reached = |pem: &str, host: &str| {
        let request = Request::get(format!("https://{host}{PATH}")).body(Body::empty()).unwrap();
        cluster.block_on(send(replica.port, pem, host, request)).map(|reply| reply.status)
    };
    let first = cluster.wait_for("the discovery", || found(cluster, driver).map(|it| bundle(&it)));
    cluster.wait_for("the replica serves", || {
        reached(&first, "cbt.drivers.svc").is_ok().then_some(())
    });
    for host in ["cbt.drivers.svc", "metadata.drivers.svc"] {
        assert_eq!(reached(&first, host), Ok(401), "{host}");
    }
    assert!(reached(&first, "localhost").is_err(), "it is for no other");
}
