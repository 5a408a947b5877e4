//! The server as kubectl sees it.

use serde_json::{Value, json};
use support::cluster::shared;

use support::cluster::aggregated::{Aggregated, path_in};
use support::cluster::programs::stdout_of;
use support::path;

/// A spec that the server refuses before any lookup.
fn refused_by_the_server() -> Value {
    json!({ "targetVolumeSnapshotName": "b", "mode": "file" })
}

#[test]
fn kubectl_create_reports_errors_by_field() {
    let Some(cluster) = shared() else { return };
    let rig = Aggregated::start(cluster, &[]);
    let file = rig.delta(&refused_by_the_server());
    let error = cluster.wait_for("discovery of the kind", || {
        let error = rig.kubectl_rejected(&["create", "-f", path(&file), "-o", "json"]);
        (!error.contains("no matches for kind")).then_some(error)
    });
    assert!(error.contains("spec.mode: must be \"block\""), "{error}");
    assert!(error.contains("The VolumeSnapshotDelta \"delta\" is invalid"), "{error}");
    // The API server's own user appears in the error.
    let metrics = support::cluster::sidecar::http(&rig.served, "/metrics");
    let counted = "csi_loopback_aggregated_api_requests_total{verb=\"create\",outcome=\"invalid\"}";
    assert!(metrics.contains(counted), "{metrics}");
}

#[test]
fn kubectl_finds_and_explains_the_resource() {
    let Some(cluster) = shared() else { return };
    let rig = Aggregated::start(cluster, &[]);
    let listed = ["api-resources", "--api-group", "cbt.storage.k8s.io", "-o", "wide"];
    let row = cluster.wait_for("the resource in what kubectl finds", || {
        let table = stdout_of(rig.kubectl(&listed));
        table.lines().find(|row| row.starts_with("volumesnapshotdeltas")).map(str::to_owned)
    });
    let words: Vec<&str> = row.split_whitespace().collect();
    let expected = ["vsd", "cbt.storage.k8s.io/v1alpha1", "true", "VolumeSnapshotDelta", "create"];
    assert_eq!(words[1..], expected, "{row}");
    // The group's other versions are listed, too.
    assert!(stdout_of(rig.kubectl(&listed)).contains("cbt.storage.k8s.io/v1alpha2"));
    let legacy = stdout_of(rig.kubectl(&["get", "--raw", "/apis/cbt.storage.k8s.io/v1alpha1"]));
    assert!(legacy.contains("\"APIResourceList\""), "{legacy}");
    let group = stdout_of(rig.kubectl(&["get", "--raw", "/apis/cbt.storage.k8s.io"]));
    assert!(group.contains("v1alpha1") && group.contains("v1alpha2"), "{group}");
    for (what, words) in [
        ("vsd", "never stored"),
        ("vsd.spec", "targetVolumeSnapshotName"),
        ("vsd.spec.secretRef", "Secret in this namespace"),
        ("vsd.status.changedBlocks", "blockSizeBytes"),
        ("vsd.metadata.labels", "Labels"),
    ] {
        let explained = cluster.wait_for("the description", || {
            let output = rig.kubectl(&["explain", what]);
            output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
        });
        assert!(explained.contains(words), "{what}: {explained}");
        assert!(explained.contains("cbt.storage.k8s.io"), "{what}: {explained}");
    }
    cluster.wait_for("the description in OpenAPI v2", || {
        let whole = stdout_of(rig.kubectl(&["get", "--raw", "/openapi/v2"]));
        whole.contains("io.k8s.storage.cbt.v1alpha1.VolumeSnapshotDelta").then_some(())
    });
}

#[test]
fn unknown_fields_are_found_by_client_and_server() {
    let Some(cluster) = shared() else { return };
    let rig = Aggregated::start(cluster, &[]);
    let spec = json!({ "targetVolumeSnapshotName": "b", "mode": "file", "limits": 7 });
    let file = rig.delta(&spec);
    let file = path(&file);
    // The server has the schema once the API server has fetched it.
    let error = cluster.wait_for("kubectl to find the unknown field", || {
        let error = rig.kubectl_rejected(&["create", "-f", file]);
        error.contains("limits").then_some(error)
    });
    assert!(error.contains("unknown field"), "{error}");
    let raw = |query: &str| {
        let path = format!("{}?{query}", path_in(&rig.namespace));
        rig.kubectl_rejected(&["create", "--raw", &path, "-f", file])
    };
    let error = raw("fieldValidation=Strict");
    assert!(error.contains("strict decoding error: unknown field \"spec.limits\""), "{error}");
    let error = raw("fieldValidation=Ignore");
    assert!(error.contains("spec.mode") && !error.contains("limits"), "{error}");
}

#[test]
fn other_formats_and_large_bodies_get_a_status() {
    let Some(cluster) = shared() else { return };
    let rig = Aggregated::start(cluster, &[]);
    let large = json!({ "targetVolumeSnapshotName": "x".repeat(65 << 10) });
    let file = rig.delta(&large);
    let error = rig.kubectl_rejected(&["create", "--validate=false", "-f", path(&file)]);
    assert!(
        error.contains("RequestEntityTooLarge") || error.contains("larger than 65536"),
        "{error}"
    );
    let front_proxy = rig.front_proxy();
    let post = |headers: &str, body: &str| {
        let (path, length) = (path_in("apps"), body.len());
        rig.send_directly(
            Some(&front_proxy),
            &format!(
                "POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Remote-User: alice\r\n\
                 Content-Length: {length}\r\n{headers}\r\n{body}"
            ),
        )
    };
    let json = "Content-Type: application/json\r\n";
    let partial =
        format!("{json}Accept: application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1\r\n");
    for (headers, body, code) in [
        ("Content-Type: application/yaml\r\n", "kind: x".to_owned(), 415),
        ("", "{}".to_owned(), 400),
        (json, "{}".to_owned(), 400),
        (json, "[".repeat(60_000), 400),
        (json, " ".repeat(70_000), 413),
        (&partial, "{}".to_owned(), 406),
    ] {
        let answer = post(headers, &body);
        assert!(answer.starts_with(&format!("HTTP/1.1 {code}")), "{headers}: {answer}");
        assert!(answer.contains("\"kind\":\"Status\""), "{headers}: {answer}");
    }
}
