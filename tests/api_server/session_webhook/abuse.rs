//! Clients that harm the webhook: garbage, slow requests, floods of valid reviews, and requests whose
//! small elements take much memory.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::abuse::{Protocol, assert_revoked, while_abused};
use support::cluster::manager::manager_rules;
use support::cluster::shared;
use support::cluster::sidecar::http;
use support::cluster::tls::connect;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{OURS, Rig};

#[test]
#[ignore = "full tier"]
fn garbage_and_slow_clients_block_no_other_client() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::new(cluster);
    let (port, pem) = (rig.manager.port, rig.ca_bundle().unwrap());
    let answer = |sent: String| {
        cluster.block_on(async {
            let mut stream = connect(port, &pem).await;
            // The request may be refused before it is sent completely.
            let _ = stream.write_all(sent.as_bytes()).await;
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer).await;
            String::from_utf8_lossy(&answer).into_owned()
        })
    };
    let post = |body: &str| {
        let length = body.len();
        format!(
            "POST /validate-snapshotsessionrequest HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
        )
    };
    let deep = "[".repeat(1 << 20);
    for (sent, code) in [
        (post(""), 400),
        (post("nonsense"), 400),
        (post("\u{0}\u{1}"), 400),
        (post(&deep), 400),
        (
            post(r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{}}"#),
            400,
        ),
        (post(&" ".repeat(4 << 20)), 413),
        (
            "GET /validate-snapshotsessionrequest HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
                .into(),
            405,
        ),
        (
            "POST /other HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
                .into(),
            404,
        ),
        (format!("GET / HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(64 << 10)), 431),
        ("nonsense\r\n\r\n".into(), 400),
    ] {
        let begin: String = sent.chars().take(60).collect();
        let answer = answer(sent);
        assert!(answer.starts_with(&format!("HTTP/1.1 {code}")), "{begin:?}: {answer:?}");
    }
    // Silent clients, and clients that send half a head or half a body.
    let whole = post(&"x".repeat(1000));
    let mut slow = Vec::new();
    for sent in ["", &whole[..40], &whole[..whole.len() - 500]].repeat(40) {
        slow.push(cluster.block_on(async {
            let mut stream = connect(port, &pem).await;
            stream.write_all(sent.as_bytes()).await.unwrap();
            stream
        }));
    }
    let started = Instant::now();
    rig.ask(&cluster.client(), &["monday"], false).unwrap();
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
    // Their connections are closed.
    let mut ends = Vec::new();
    for mut stream in slow {
        let mut answer = Vec::new();
        let gone = cluster.block_on(async {
            tokio::time::timeout(Duration::from_secs(30), stream.read_to_end(&mut answer)).await
        });
        assert!(gone.is_ok(), "a slow client is kept for ever");
        ends.push(String::from_utf8_lossy(&answer).chars().take(12).collect::<String>());
    }
    assert!(ends.iter().any(|end| end == "HTTP/1.1 408"), "{ends:?}");
    assert!(rig.manager.process.ended().is_none());
    let log = rig.manager.process.log();
    assert!(!log.contains("panic"), "{log}");
}

#[test]
#[ignore = "full tier"]
fn abuse_of_the_webhook_delays_no_request() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let protocol = Protocol::Https {
        path: "/validate-snapshotsessionrequest".into(),
        headers: String::new(),
        body: 3 << 20,
    };
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
    let flood = Protocol::Valid {
        path: "/validate-snapshotsessionrequest",
        body: valid_review,
        addresses: 8,
    };
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
        let answer = cluster.block_on(async {
            let mut stream = connect(port, &pem).await;
            let head = format!(
                "POST /validate-snapshotsessionrequest HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\
                 Content-Type: application/json\r\nContent-Length: {}\r\n\r\n",
                body.len()
            );
            stream.write_all(head.as_bytes()).await.unwrap();
            stream.write_all(body.as_bytes()).await.unwrap();
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer).await;
            String::from_utf8_lossy(&answer).into_owned()
        });
        assert!(answer.contains(&format!("\"code\":{code}")), "{field}: {answer}");
    }
    let peak = support::abuse::peak(rig.manager.process.pid());
    println!("report: session webhook: peak of {} MiB with small elements", peak >> 20);
    assert!(peak < 200 << 20, "{peak} bytes");
}
