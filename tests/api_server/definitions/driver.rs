//! DriverDiscovery objects.

use support::cluster::shared;

use csi_loopback::kubernetes::driver_discovery::DriverDiscovery;
use serde_json::{Value, json};
use support::cluster::Cluster;

use super::{SOON, explains, is_error, table, verdict};

fn by_service() -> Value {
    json!({ "service": { "namespace": "csi", "name": "cbt-http" }, "caBundle": "YQ==" })
}

fn by_url(url: &str) -> Value {
    json!({ "url": url, "caBundle": "YQ==" })
}

fn discovery(name: &str, client_config: Value) -> Value {
    json!({
        "metadata": { "name": name },
        "spec": { "driverName": name, "clientConfig": client_config },
    })
}

/// The response to a DriverDiscovery with this endpoint.
fn endpoint(cluster: &Cluster, client_config: Value) -> Result<(), String> {
    verdict::<DriverDiscovery>(cluster, None, discovery("d.example", client_config))
}

#[track_caller]
fn refused(cluster: &Cluster, client_config: Value, words: &str) {
    is_error(endpoint(cluster, client_config.clone()), &client_config, words);
}

#[test]
fn an_endpoint_is_either_a_url_or_a_service() {
    let Some(cluster) = shared() else { return };
    assert_eq!(endpoint(cluster, by_service()), Ok(()));
    assert_eq!(endpoint(cluster, by_url("https://host.example/path")), Ok(()));
    let why = "exactly one of url and service must be set";
    refused(cluster, json!({ "caBundle": "YQ==" }), why);
    let mut both = by_service();
    both["url"] = json!("https://host.example/path");
    refused(cluster, both, why);
    for field in ["driverName", "clientConfig"] {
        let mut without = discovery("d.example", by_service());
        without["spec"].as_object_mut().unwrap().remove(field);
        super::refused::<DriverDiscovery>(cluster, None, without, field);
    }
    let mut misspelt = by_service();
    misspelt["servcie"] = json!({});
    refused(cluster, misspelt, "servcie");
}

#[test]
fn a_url_has_only_https_host_and_path() {
    let Some(cluster) = shared() else { return };
    let longest = format!("https://host.example/{}", "p".repeat(1003));
    for url in [
        "https://host.example",
        "https://host.example/",
        "https://host.example:8443/v1alpha1/snapshot-deltas",
        "https://10.0.0.1:8443/x",
        "https://[fd00::1]:8443/x",
        &longest,
    ] {
        assert_eq!(endpoint(cluster, by_url(url)), Ok(()), "{url}");
    }
    for url in [
        "",
        "host.example/path",
        "http://host.example/path",
        "HTTPS://host.example/path",
        "unix:///run/cbt.sock",
        "https://",
        "https:///path",
        "https://user@host.example/path",
        "https://user:password@host.example/path",
        "https://host.example/path?a=b",
        "https://host.example/path#part",
        "https://ho st.example/path",
        &format!("{longest}p"),
    ] {
        refused(cluster, by_url(url), "spec.clientConfig.url");
    }
    refused(cluster, by_url("http://host.example/path"), "must be https://host:port/path");
}

#[test]
fn a_service_has_valid_name_port_and_path() {
    let Some(cluster) = shared() else { return };
    let with = |field: &str, value: Value| {
        let mut config = by_service();
        config["service"][field] = value;
        config
    };
    for (field, good) in [
        ("name", json!("n".repeat(63))),
        ("namespace", json!("0-9")),
        ("path", json!("/")),
        ("path", json!("/v1alpha1/snapshot-deltas_~.X")),
        ("path", json!(format!("/{}", "p".repeat(511)))),
        ("port", json!(1)),
        ("port", json!(65_535)),
    ] {
        assert_eq!(endpoint(cluster, with(field, good.clone())), Ok(()), "{field}: {good}");
    }
    for (field, bad) in [
        ("name", json!("")),
        ("name", json!("n".repeat(64))),
        ("name", json!("a.b")),
        ("name", json!("-a")),
        ("namespace", json!("Csi")),
        ("namespace", json!("n".repeat(64))),
        ("path", json!("")),
        ("path", json!("path")),
        ("path", json!("/path?a=b")),
        ("path", json!("/a b")),
        ("path", json!("/a%2e")),
        ("path", json!(format!("/{}", "p".repeat(512)))),
        ("port", json!(0)),
        ("port", json!(65_536)),
        ("port", json!("https")),
    ] {
        refused(cluster, with(field, bad), &format!("spec.clientConfig.service.{field}"));
    }
    for field in ["namespace", "name"] {
        let mut config = by_service();
        config["service"].as_object_mut().unwrap().remove(field);
        refused(cluster, config, &format!("spec.clientConfig.service.{field}"));
    }
}

#[test]
fn a_ca_bundle_is_required_in_base64() {
    let Some(cluster) = shared() else { return };
    let with = |bundle: Value| {
        let mut config = by_service();
        config["caBundle"] = bundle;
        config
    };
    assert_eq!(endpoint(cluster, with(json!("A".repeat(400_000)))), Ok(()));
    for bad in [json!(""), json!("no base64!"), json!("A".repeat(524_292))] {
        refused(cluster, with(bad), "caBundle");
    }
    let mut without = by_service();
    without.as_object_mut().unwrap().remove("caBundle");
    refused(cluster, without, "caBundle");
}

#[test]
fn the_object_has_the_drivers_name() {
    let Some(cluster) = shared() else { return };
    let long = ["d".repeat(63), "d".repeat(63), "d".repeat(63), "d".repeat(61)].join(".");
    assert_eq!(verdict::<DriverDiscovery>(cluster, None, discovery(&long, by_service())), Ok(()));
    for (other, words) in [
        ("another.example", "metadata.name: must be spec.driverName"),
        ("D.example", "driverName"),
        ("", "driverName"),
    ] {
        let mut object = discovery("d.example", by_service());
        object["spec"]["driverName"] = json!(other);
        super::refused::<DriverDiscovery>(cluster, None, object, words);
    }
    // It cannot become another driver's later.
    let name = cluster.unique("renamed");
    let all = cluster.api::<DriverDiscovery>();
    let made: DriverDiscovery = cluster.create(&all, discovery(&name, by_service()));
    let patch = json!({ "spec": { "driverName": "another.example" } });
    is_error(cluster.try_merge(&all, &name, &patch), &patch, "must be spec.driverName");
    assert_eq!(made.spec.driver_name, name);
    cluster.delete(&all, &name);
}

fn condition(kind: &str) -> Value {
    json!({
        "type": kind, "status": "True", "reason": "Reached", "message": "",
        "lastTransitionTime": SOON, "observedGeneration": 1,
    })
}

#[test]
fn a_creator_cannot_set_the_status() {
    let Some(cluster) = shared() else { return };
    let name = cluster.unique("forged");
    let all = cluster.api::<DriverDiscovery>();
    let mut object = discovery(&name, by_service());
    object["status"] = json!({ "conditions": [condition("EndpointReachable")] });
    let made: DriverDiscovery = cluster.create(&all, object);
    assert_eq!(made.status, None, "what the creator sends is dropped");
    let status = json!({ "status": { "conditions": [condition("EndpointReachable")] } });
    assert_eq!(
        cluster.merge(&all, &name, &status).status,
        None,
        "nor a user who changes the object"
    );
    // The controller writes it through the subresource, which changes nothing else.
    let mut both = status;
    both["spec"] = json!({ "clientConfig": { "service": { "name": "elsewhere" } } });
    let written = cluster.merge_at_status(&all, &name, &both).unwrap();
    assert_eq!(written.status.unwrap().conditions[0].type_, "EndpointReachable");
    assert_eq!(written.spec.client_config.service.unwrap().name, "cbt-http");
    cluster.delete(&all, &name);
}

#[test]
fn conditions_are_complete_and_unique_by_type() {
    let Some(cluster) = shared() else { return };
    let name = cluster.unique("conditions");
    let all = cluster.api::<DriverDiscovery>();
    let _: DriverDiscovery = cluster.create(&all, discovery(&name, by_service()));
    let kinds = ["EndpointReachable", "CapabilityPresent", "CertificateValid"];
    cluster.merge_status(&all, &name, &json!({ "conditions": kinds.map(condition) }));
    let refused = |conditions: Value, words: &str| {
        let patch = json!({ "status": { "conditions": conditions } });
        is_error(cluster.merge_at_status(&all, &name, &patch), &patch, words);
    };
    refused(json!([condition(kinds[0]), condition(kinds[0])]), "Duplicate value");
    for (field, bad) in [
        ("status", json!("Perhaps")),
        ("reason", json!("")),
        ("reason", json!("not a word")),
        ("lastTransitionTime", json!("yesterday")),
        ("lastTransitionTime", Value::Null),
        ("reason", Value::Null),
        ("message", Value::Null),
    ] {
        let mut wrong = condition("EndpointReachable");
        match bad.is_null() {
            true => drop(wrong.as_object_mut().unwrap().remove(field)),
            false => wrong[field] = bad,
        }
        refused(json!([wrong]), &format!("conditions[0].{field}"));
    }
    cluster.delete(&all, &name);
}

#[test]
fn kubectl_shows_short_name_columns_and_fields() {
    let Some(cluster) = shared() else { return };
    let name = cluster.unique("shown");
    let all = cluster.api::<DriverDiscovery>();
    cluster.create(&all, discovery(&name, by_service()));
    let table = || table(cluster, &["dd", &name]);
    let rows = table();
    assert_eq!(rows[0], ["NAME", "REACHABLE", "CAPABLE", "AGE"]);
    assert_eq!(rows[1].len(), 2, "{rows:?}");
    let mut capable = condition("CapabilityPresent");
    capable["status"] = json!("Unknown");
    let status = json!({ "conditions": [condition("EndpointReachable"), capable] });
    cluster.merge_status(&all, &name, &status);
    assert_eq!(table()[1][..3], [name.as_str(), "True", "Unknown"]);

    let fields = [
        ("driverdiscovery", "endpoint from which the aggregated API server reads"),
        ("dd.spec.driverName", "Name of the CSI driver"),
        ("dd.spec.clientConfig", "Endpoint for requests for the driver's changed blocks"),
        ("dd.spec.clientConfig.url", "https://host:port/path"),
        ("dd.spec.clientConfig.caBundle", "CA certificates (PEM) that sign"),
        ("dd.spec.clientConfig.service.path", "Defaults to /"),
        ("dd.spec.clientConfig.service.port", "Defaults to 443"),
        ("dd.status.conditions", "EndpointReachable"),
    ];
    explains(cluster, &fields);
    cluster.delete(&all, &name);
}
