//! The webhooks as a service: dry runs, certificates, hostile clients.

use support::cluster::shared;

use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration,
};
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::rig::{Rig, With, assert_refused, pod, posted};
use support::abuse::{Protocol, while_abused};
use support::cluster::tls::Authority;
use support::path;

#[test]
fn dry_runs_are_reviewed_and_store_nothing() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster, With::default());
    let made = rig.dry(&rig.apps, &pod(&rig.volume(json!({ "content/a": "x" })))).unwrap();
    assert!(cluster.get(&rig.pods(&rig.apps), &made.name_any()).is_none());
    let csi = made.spec.unwrap().volumes.unwrap()[0].csi.clone().unwrap();
    assert_eq!(csi.read_only, Some(true));
    let wrong = pod(&rig.volume(json!({ "size": "wrong" })));
    assert_refused(rig.dry(&rig.apps, &wrong), &["422"]);
}

#[test]
fn a_provided_certificate_is_served() {
    let Some(cluster) = shared() else { return };
    let authority = Authority::new("provided");
    let directory = TempDir::with_prefix_in("provided-", cluster.scratch()).unwrap();
    let provided = authority.certify(directory.path(), "webhooks");
    let certificate = ["--tls-cert", path(&provided.file), "--tls-key", path(&provided.key)];
    let rig = Rig::new(cluster, With { certificate: Some(certificate), ..With::default() });
    let volume = rig.volume(json!({}));
    // The administrator who provides the certificate sets the caBundle.
    rig.refused_once(&rig.apps, &volume, "failed calling webhook");
    let bundle = json!(ByteString(authority.pem().into_bytes()));
    let patch =
        json!([{ "op": "add", "path": "/webhooks/0/clientConfig/caBundle", "value": bundle }]);
    let patch = Patch::<()>::Json(serde_json::from_value(patch).unwrap());
    let (name, params) = (&rig.configuration, PatchParams::default());
    let mutating = cluster.api::<MutatingWebhookConfiguration>();
    cluster.block_on(mutating.patch(name, &params, &patch)).unwrap();
    let validating = cluster.api::<ValidatingWebhookConfiguration>();
    cluster.block_on(validating.patch(name, &params, &patch)).unwrap();
    rig.allowed_once(&rig.apps, &volume);
    assert_eq!(rig.ca_bundle(), Some(authority.pem()));
}

#[test]
fn hostile_reviews_are_handled_and_block_no_client() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::new(cluster, With::default());
    let review = |kind: &str, object: Value| {
        let gvk = json!({ "group": "", "version": "v1", "kind": kind });
        let resource = json!({ "group": "", "version": "v1", "resource": "pods" });
        json!({
            "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
            "request": {
                "uid": "u", "kind": gvk, "resource": resource, "operation": "CREATE", "userInfo": {},
                "namespace": rig.apps, "object": object, "oldObject": null,
            },
        })
        .to_string()
    };
    let pod = |spec: Value| json!({ "apiVersion": "v1", "kind": "Pod", "spec": spec });
    let nowhere =
        review("Pod", pod(json!({ "containers": [], "volumes": [rig.volume(json!({}))] })));
    let nowhere = nowhere.replace(&format!("\"{}\"", rig.apps), "\"../x\"");
    let deep = "[".repeat(1 << 20);
    for path in ["/mutate-pod", "/validate-pod", "/validate-deferral"] {
        for (body, code) in [("", 400), ("nonsense", 400), ("null", 400), (&deep, 400)] {
            let answer = posted(&rig, path, body);
            assert!(answer.starts_with(&format!("HTTP/1.1 {code}")), "{path}: {answer}");
        }
        let huge = posted(&rig, path, &" ".repeat(8 << 20));
        assert!(huge.starts_with("HTTP/1.1 413"), "{path}: {huge}");
        let wrong = posted(&rig, path, &review("Secret", json!({})));
        let refused = wrong.contains("\"allowed\":false");
        assert!(refused && wrong.contains("reviews only"), "{path}: {wrong}");
    }
    let wrong = posted(&rig, "/validate-pod", &review("Pod", pod(json!({ "containers": 7 }))));
    assert!(wrong.contains("\"allowed\":false") && wrong.contains("422"), "{wrong}");
    let wrong = posted(&rig, "/validate-pod", &nowhere);
    assert!(wrong.contains("metadata.namespace"), "{wrong}");
    let none = posted(&rig, "/validate-pod", &review("Pod", Value::Null));
    assert!(none.contains("no pod"), "{none}");
    // Many volumes with an invalid attribute, nearly as many as are read.
    let volumes: Vec<_> = (0..2400)
        .map(|number| {
            let mut volume = rig.volume(json!({ "sise": number.to_string() }));
            volume["name"] = format!("v{number}").into();
            volume
        })
        .collect();
    let many = review("Pod", pod(json!({ "containers": [], "volumes": volumes })));
    let refused = posted(&rig, "/validate-pod", &many);
    assert!(refused.contains("sise") && refused.len() < 4096, "{refused}");
    assert!(rig.served.process.ended().is_none());
    let log = rig.served.process.log();
    assert!(!log.contains("panic"), "{log}");
    rig.allowed_once(&rig.apps, &rig.volume(json!({})));
}

#[test]
fn reviews_are_counted_and_pod_content_is_not_logged() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster, With { flags: &["--log-level", "debug"], ..With::default() });
    let secret = "hunter2-in-a-pod";
    rig.make(&rig.apps, &pod(&rig.volume(json!({ "content/a": secret })))).unwrap();
    let both = rig.volume(json!({ "content/a": secret, "size": "much" }));
    assert_refused(rig.make(&rig.apps, &pod(&both)), &["422"]);
    let page = rig.page("/metrics");
    for (webhook, verdict) in
        [("mutate_pod", "changed"), ("validate_pod", "allowed"), ("validate_pod", "refused")]
    {
        let labels = format!("_count{{webhook=\"{webhook}\",verdict=\"{verdict}\"}}");
        assert!(page.contains(&labels), "{labels} is not in\n{page}");
    }
    assert!(page.contains("certificate_expiry_timestamp_seconds"), "{page}");
    assert!(!rig.served.process.log().contains(secret));
}

#[test]
#[ignore = "full tier"]
fn abuse_of_the_webhooks_delays_no_review() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster, With::default());
    let protocol =
        Protocol::Https { path: "/validate-pod".into(), headers: String::new(), body: 7 << 20 };
    while_abused("admission", rig.served.port, rig.served.process.pid(), protocol, || {
        let answer = posted(&rig, "/validate-pod", "null");
        assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    });
}

/// A complete review of a new pod.
fn review(spec: &Value) -> Value {
    let kind = json!({ "group": "", "version": "v1", "kind": "Pod" });
    json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "u", "kind": kind, "name": "p", "namespace": "default", "operation": "CREATE",
            "resource": { "group": "", "version": "v1", "resource": "pods" },
            "userInfo": { "username": "eve" }, "oldObject": null, "dryRun": true,
            "object": {
                "apiVersion": "v1", "kind": "Pod",
                "metadata": { "name": "p", "namespace": "default" }, "spec": spec,
            },
        },
    })
}

#[test]
fn a_pod_of_small_elements_takes_little_memory() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster, With::default());
    let container = |field: &str| json!({ "containers": [{ "name": "c", field: "@" }] });
    let attributes = json!({ "csi": { "driver": "d", "volumeAttributes": "@" } });
    for path in ["/mutate-pod", "/validate-pod", "/mutate-deferral", "/validate-deferral"] {
        for (spec, element, allowed) in [
            (json!({ "volumes": "@" }), "{}", false),
            (json!({ "containers": "@" }), "{}", false),
            (json!({ "initContainers": "@" }), "{}", false),
            (json!({ "ephemeralContainers": "@" }), "{}", false),
            (container("volumeMounts"), "{}", false),
            (container("volumeDevices"), "{}", false),
            (json!({ "volumes": [attributes] }), "\"\":\"\"", false),
            // These are not read.
            (json!({ "tolerations": "@" }), "{}", true),
            (container("env"), "{}", true),
        ] {
            let elements = vec![element; (3 << 20) / (element.len() + 1)].join(",");
            let elements = match element.contains(':') {
                // Keys must differ.
                true => {
                    let entries: Vec<_> =
                        (0..250_000).map(|one| format!("\"{one}\":\"\"")).collect();
                    format!("{{{}}}", entries.join(","))
                }
                false => format!("[{elements}]"),
            };
            let body = review(&spec).to_string().replace("\"@\"", &elements);
            let answer = posted(&rig, path, &body);
            assert!(answer.starts_with("HTTP/1.1 200"), "{path} {spec}: {answer}");
            let expected = format!("\"allowed\":{allowed}");
            assert!(answer.contains(&expected), "{path} {spec}: {answer}");
            let named = spec.to_string().contains("volumeMounts");
            assert!(!named || answer.contains("spec.containers[0].volumeMounts"), "{answer}");
        }
    }
    let peak = support::abuse::peak(rig.served.process.pid());
    println!("report: admission webhooks: peak of {} MiB with small elements", peak >> 20);
    assert!(peak < 200 << 20, "{peak} bytes");
}

/// A complete review of a pod of the namespace `default` with 64 claims, which do not exist.
fn with_claims(number: u64) -> String {
    let volumes: Vec<_> = (0..64)
        .map(|one| json!({ "name": format!("v{one}"), "persistentVolumeClaim": { "claimName": format!("c{number}-{one}") } }))
        .collect();
    let container = json!({ "name": "c", "image": "i" });
    review(&json!({
        "runtimeClassName": "microvm", "volumes": volumes, "containers": [container],
    }))
    .to_string()
}

#[test]
#[ignore = "full tier"]
fn a_flood_of_valid_claims_delays_no_review() {
    let Some(cluster) = shared() else { return };
    let policy = "deferral: [{storageClass: fast, runtimeClass: microvm}]";
    let rate = ["--kube-api-qps", "50", "--kube-api-burst", "100"];
    let rig = Rig::new(cluster, With { policy: Some(policy), flags: &rate, ..With::default() });
    let flood = Protocol::Valid { path: "/mutate-deferral", body: with_claims, addresses: 8 };
    while_abused("admission, valid", rig.served.port, rig.served.process.pid(), flood, || {
        let answer = posted(&rig, "/mutate-deferral", &with_claims(u64::MAX));
        // The first claim is looked up.
        assert!(answer.contains("does not exist in the namespace"), "{answer}");
    });
}
