//! Clients that harm the webhook: garbage, slow requests, floods of valid reviews, and requests whose
//! small elements take much memory.

use serde_json::{Value, json};
use support::abuse::{Protocol, assert_revoked, while_abused};
use support::cluster::manager::manager_rules;
use support::cluster::shared;
use support::cluster::sidecar::http;
use support::cluster::tls::{post, send};

use super::{OURS, PATH, Rig};

#[test]
fn garbage_is_refused_with_its_code() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let (port, pem) = (rig.manager.port, rig.ca_bundle().unwrap());
    let request = r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{}}"#;
    for (body, code) in [("nonsense", 400), (request, 400), (&" ".repeat(4 << 20), 413)] {
        let answer = cluster.block_on(post(port, &pem, PATH, body));
        assert!(answer.starts_with(&format!("HTTP/1.1 {code}")), "{body:.60}: {answer}");
    }
    let rest = "HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
    for (text, code) in [
        (format!("GET {PATH} {rest}"), 405),
        (format!("POST /other {rest}"), 404),
        (format!("GET / HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(64 << 10)), 431),
    ] {
        let answer = cluster.block_on(send(port, &pem, &text));
        assert!(answer.starts_with(&format!("HTTP/1.1 {code}")), "{text:.60}: {answer}");
    }
    assert!(!rig.manager.process.log().contains("panic"));
}

#[test]
#[ignore = "full tier"]
fn abuse_of_the_webhook_delays_no_request() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let protocol = Protocol::Https { path: PATH.into(), headers: String::new(), body: 3 << 20 };
    let client = cluster.client();
    while_abused("webhook", rig.manager.port, rig.manager.process.pid(), protocol, || {
        rig.ask(&client, &["monday"], true).unwrap();
    });
    let metrics = http(&rig.manager, "/metrics");
    assert_revoked(&metrics, "webhook", "handshake");
    assert_revoked(&metrics, "webhook", "body");
}

/// A complete review of 64 names, which no other review has, by a user without rights.
fn valid_review(number: u64) -> String {
    let names: Vec<_> = (0..64).map(|name| format!("s{number}-{name}")).collect();
    let kind = json!({ "group": OURS, "version": "v1alpha2", "kind": "SnapshotSessionRequest" });
    let resource =
        json!({ "group": OURS, "version": "v1alpha2", "resource": "snapshotsessionrequests" });
    json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": format!("u{number}"), "kind": kind, "resource": resource, "name": "r",
            "namespace": "default", "operation": "CREATE", "oldObject": null, "dryRun": false,
            "userInfo": { "username": "eve", "groups": ["system:authenticated"] },
            "object": {
                "apiVersion": "cbt.storage.k8s.io/v1alpha2", "kind": "SnapshotSessionRequest",
                "metadata": { "name": "r", "namespace": "default" },
                "spec": { "snapshots": names },
            },
        },
    })
    .to_string()
}

#[test]
#[ignore = "full tier"]
fn a_flood_of_valid_reviews_delays_no_request() {
    let Some(cluster) = shared() else { return };
    let rate = ["--kube-api-qps", "50", "--kube-api-burst", "100"];
    let rig = Rig::with(cluster, manager_rules(), &rate);
    rig.configure("Fail");
    rig.wait_until_judging();
    let flood = Protocol::Valid { path: PATH, body: valid_review, addresses: 8 };
    let client = cluster.client();
    while_abused("webhook, valid", rig.manager.port, rig.manager.process.pid(), flood, || {
        rig.ask(&client, &["monday"], true).unwrap();
    });
}

#[test]
fn a_request_of_small_elements_takes_little_memory() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let (port, pem) = (rig.manager.port, rig.ca_bundle().unwrap());
    let review: Value = serde_json::from_str(&valid_review(0)).unwrap();
    for (field, element, code) in [
        ("/request/object/spec/snapshots", "\"\"", "422"),
        ("/request/object/metadata", "{}", "403"),
        ("/request/userInfo/groups", "\"\"", "422"),
        ("/request/userInfo/extra", "[\"\"]", "422"),
        ("/request/options", "{}", "403"),
    ] {
        let mut review = review.clone();
        let name = field.rsplit('/').next().unwrap();
        let parent = &field[..field.len() - name.len() - 1];
        review.pointer_mut(parent).unwrap()[name] = "@".into();
        let elements = vec![element; (2 << 20) / (element.len() + 1)].join(",");
        let elements = match name {
            "extra" => format!("{{\"a\":[{elements}]}}"),
            _ => format!("[{elements}]"),
        };
        let body = review.to_string().replace("\"@\"", &elements);
        let answer = cluster.block_on(post(port, &pem, PATH, &body));
        assert!(answer.contains(&format!("\"code\":{code}")), "{field}: {answer}");
    }
    let peak = support::abuse::peak(rig.manager.process.pid());
    println!("report: session webhook: peak of {} MiB with small elements", peak >> 20);
    assert!(peak < 200 << 20, "{peak} bytes");
}
