//! Authentication, authorization and validation.

use csi_loopback::kubernetes::cbt_http::{
    Capability, Info, PATH, PageRequest, ProblemKind, audience,
};
use http::Method;
use k8s_openapi::api::rbac::v1::PolicyRule;
use support::abuse::{Protocol, while_abused};
use support::cluster::shared;

use super::rig::{Desk, Rig, page_of};
use support::cluster::access::rule;
use support::cluster::cbt_http::{caller_rules, with_secrets};
use support::cluster::proxy::Way;
use support::driver::delete_snapshot;

const SECRET: &str = "hunter2-hunter2-hunter2";
const POST: (Method, &str) = (Method::POST, PATH);

#[test]
fn only_a_valid_token_for_this_driver_is_accepted() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster, &[]);
    let desk = &rig.desk;
    let (first, second) = rig.sample();
    let request = desk.page_request(&first, &second, 0, 1);
    let own = audience(&desk.driver_name);
    let another = audience("another.csi.local");
    let good = desk.token();
    let bad = [
        cluster.token(&desk.caller, Some(&another)),
        cluster.token(&desk.caller, Some(&desk.driver_name)),
        cluster.token(&desk.caller, None),
        cluster.expired_token(&desk.caller, Some(&own)),
        format!("{good}x"),
        "x".to_owned(),
    ];
    for token in &bad {
        let problem = desk.post(&rig.replica, token, &request).problem();
        assert_eq!(problem.kind, ProblemKind::Unauthenticated, "{problem:?}");
        assert!(problem.message.contains("bearer token"), "{problem:?}");
    }
    let body = serde_json::to_vec(&request).unwrap();
    let (bearer, basic) = (format!("Bearer {good}"), format!("Basic {good}"));
    let bearer = ("authorization", bearer.as_str());
    for headers in [
        &[][..],
        &[("authorization", "Bearer")],
        &[("authorization", &basic)],
        &[("authorization", &good)],
        &[bearer, bearer],
    ] {
        let reply = desk.send(&rig.replica, POST, headers, body.clone());
        assert_eq!((reply.status, reply.problem().kind), (401, ProblemKind::Unauthenticated));
        let info = desk.send(&rig.replica, (Method::GET, PATH), headers, "");
        assert_eq!(info.status, 401);
    }
    for scheme in ["Bearer", "bearer", "BEARER "] {
        let value = format!("{scheme} {good}");
        let reply = desk.send(&rig.replica, POST, &[("authorization", &value)], body.clone());
        assert_eq!(reply.status, 200, "{scheme}");
    }
}

#[test]
fn a_permission_for_one_driver_is_enough() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster, &[]);
    let desk = &rig.desk;
    let (first, second) = rig.sample();
    let request = desk.page_request(&first, &second, 0, 1);
    let user = |name: &str, rules: &[PolicyRule]| {
        let account = cluster.account(&desk.namespace, name);
        if !rules.is_empty() {
            cluster.grant(&account, rules);
        }
        cluster.token(&account, Some(&audience(&desk.driver_name)))
    };
    let named = |name: &str| PolicyRule {
        resource_names: Some(vec![name.to_owned()]),
        ..caller_rules().remove(0)
    };
    for (name, rules) in [
        ("anyone", vec![]),
        ("reader", vec![of("driverdiscoveries", "get")]),
        ("maker", vec![of("driverdiscoveries", "create")]),
        ("getter", vec![of("driverdiscoveries/deltas", "get")]),
        ("of-another", vec![named("another.csi.local")]),
    ] {
        let reply = desk.post(&rig.replica, &user(name, &rules), &request);
        let problem = reply.problem();
        assert_eq!((reply.status, problem.kind), (403, ProblemKind::NotAllowed), "{name}");
        assert!(problem.message.contains("driverdiscoveries/deltas"), "{problem:?}");
        assert!(problem.message.contains(name), "{problem:?}");
    }
    let token = user("of-this", &[named(&desk.driver_name)]);
    assert_eq!(desk.post(&rig.replica, &token, &request).status, 200);
}

fn of(resource: &str, verb: &str) -> PolicyRule {
    rule("cbt.storage.k8s.io", &[resource], &[verb])
}

#[test]
fn a_request_for_another_driver_is_refused() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster, &[]);
    let (first, second) = rig.sample();
    let request = PageRequest {
        driver: "another.csi.local".into(),
        ..rig.desk.page_request(&first, &second, 0, 1)
    };
    let reply = rig.desk.ask(&rig.replica, &request);
    assert_eq!((reply.status, reply.problem().kind), (421, ProblemKind::OtherDriver));
    assert!(reply.problem().message.contains(&rig.desk.driver_name));
}

#[test]
fn invalid_limits_and_handles_are_named() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster, &[]);
    let (first, second) = rig.sample();
    let long = "x".repeat(129);
    for (base, target, limit, field) in [
        (first.as_str(), second.as_str(), 0, "limit: "),
        (&first, &second, 4097, "limit: "),
        (&first, &second, u32::MAX, "limit: "),
        (&first, "", 1, "targetSnapshotId: "),
        (&first, &long, 1, "targetSnapshotId: "),
        (&long, &second, 1, "baseSnapshotId: "),
    ] {
        let reply = rig.desk.ask(&rig.replica, &rig.desk.page_request(base, target, 0, limit));
        let problem = reply.problem();
        assert_eq!((reply.status, problem.kind), (400, ProblemKind::Invalid));
        assert!(problem.message.starts_with(field), "{problem:?}");
    }
    for limit in [1, 4096] {
        rig.desk.page(&rig.replica, &rig.desk.page_request(&first, &second, 0, limit));
    }
}

#[test]
fn invalid_bodies_are_refused_without_their_content() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster, &[]);
    let bearer = format!("Bearer {}", rig.desk.token());
    let send =
        |body: Vec<u8>| rig.desk.send(&rig.replica, POST, &[("authorization", &bearer)], body);
    let deep = "[".repeat(1 << 20);
    let page = r#"{"driver":"d","targetSnapshotId":"t","limit":"#;
    for body in [
        "",
        "null",
        "{",
        "[]",
        "\u{0}",
        &deep,
        r#""SECRET""#,
        r#"{"secrets":"SECRET"}"#,
        r#"{"SECRET":1}"#,
        r#"{"driver":"SECRET","driver":"x"}"#,
        &format!("{page}\"SECRET\"}}"),
        &format!("{page}-1}}"),
        &format!("{page}1,\"offset\":18446744073709551616}}"),
    ] {
        let reply = send(body.replace("SECRET", SECRET).into());
        let problem = reply.problem();
        assert_eq!((reply.status, problem.kind), (400, ProblemKind::Invalid), "{problem:?}");
        assert!(!problem.message.contains(SECRET), "{problem:?}");
    }
    assert_eq!(send(vec![b'x'; (3 << 20) + 1]).status, 413);
    let log = rig.replica.served.process.log();
    assert!(log.contains("TRACE") && !log.contains(SECRET));
}

#[test]
fn other_verbs_and_paths_are_refused() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster, &[]);
    let bearer = format!("Bearer {}", rig.desk.token());
    let send = |method: Method, path: &str| {
        rig.desk.send(&rig.replica, (method, path), &[("authorization", &bearer)], "")
    };
    for method in [Method::PUT, Method::DELETE, Method::PATCH, Method::OPTIONS] {
        let reply = send(method, PATH);
        assert_eq!((reply.status, reply.problem().kind), (405, ProblemKind::Invalid));
        assert!(reply.headers["allow"].to_str().unwrap().contains("POST"));
    }
    for path in ["/", "/health", "/metrics", "/v1alpha1/snapshot-deltas/", "/v1alpha1"] {
        let reply = send(Method::POST, path);
        assert_eq!((reply.status, reply.problem().kind), (404, ProblemKind::Invalid), "{path}");
    }
}

#[test]
fn the_drivers_capability_is_reported() {
    let Some(cluster) = shared() else { return };
    // Streams are preferred even if the driver has the list.
    for flags in [&["--enable-snapshot-deltas"][..], &[]] {
        let rig = Rig::new(cluster, flags);
        let bearer = format!("Bearer {}", rig.desk.token());
        let headers = [("authorization", bearer.as_str())];
        let reply = rig.desk.send(&rig.replica, (Method::GET, PATH), &headers, "");
        assert_eq!(reply.status, 200);
        let driver = rig.desk.driver_name.clone();
        let capability = Capability::SnapshotMetadata;
        assert_eq!(reply.json::<Info>(), Info { driver, capability });
    }
}

#[test]
fn without_the_api_server_requests_are_unavailable() {
    let Some(cluster) = shared() else { return };
    let proxy = cluster.proxy();
    let rig = Rig::new(cluster, &[]);
    let (first, second) = rig.sample();
    let driver = &rig.desk.driver_name;
    let desk = Desk::at(cluster, driver, rig.driver.socket(), proxy.server());
    let replica = desk.start(&["--review-cache-ttl", "0s"]);
    let request = desk.page_request(&first, &second, 0, 1);
    let token = desk.token();
    assert_eq!(desk.post(&replica, &token, &request).status, 200);
    cluster.turn(&proxy, Way::Refused);
    let reply = desk.post(&replica, &token, &request);
    assert_eq!((reply.status, reply.problem().kind), (503, ProblemKind::Unavailable));
    assert!(reply.headers.contains_key("retry-after"));
    cluster.turn(&proxy, Way::Open);
    cluster.wait_for("the API server is found again", || {
        (desk.post(&replica, &token, &request).status == 200).then_some(())
    });
}

#[test]
fn tokens_and_secrets_are_never_logged() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster, &[]);
    let desk = &rig.desk;
    let (first, second) = rig.sample();
    let standby = desk.spawn(&[]);
    cluster.wait_for("the standby knows the leader", || {
        page_of(&standby, "/cbt-http/leader").contains("another replica leads").then_some(())
    });
    let good = with_secrets(desk.page_request(&first, &second, 0, 1), &[("password", SECRET)]);
    let gone = PageRequest { target_snapshot_id: "none".into(), ..good.clone() };
    let tokens = [
        desk.token(),
        cluster.token(&desk.caller, Some("another")),
        "forged-forged-forged".to_owned(),
    ];
    rig.driver.ok(delete_snapshot(&first));
    let mut shown = String::new();
    for token in &tokens {
        for request in [&good, &gone] {
            for replica in [&rig.replica, &standby] {
                let reply = desk.post(replica, token, request);
                shown += &String::from_utf8_lossy(&reply.body);
            }
        }
    }
    for replica in [&rig.replica, &standby] {
        let log = replica.served.process.log();
        assert!(log.contains("TRACE"), "the log is at its most verbose");
        assert!(log.contains("cbt_http=\"page\""), "{log}");
        shown += &log;
        shown += &page_of(replica, "/metrics");
    }
    assert!(shown.contains("unauthenticated") && shown.contains("another replica leads"));
    for word in tokens.iter().map(String::as_str).chain([SECRET]) {
        assert!(!shown.contains(word), "{word} is shown");
    }
}

#[test]
#[ignore = "full tier"]
fn abuse_of_the_port_delays_no_page_and_no_lease() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, &[], &["--kube-api-qps", "20", "--kube-api-burst", "20"]);
    let (first, second) = rig.sample();
    let protocol = Protocol::Https {
        path: PATH.into(),
        headers: "Authorization: Bearer junk\r\n".into(),
        body: 3 << 20,
    };
    let served = &rig.replica.served;
    while_abused("cbt-http", rig.replica.port, served.process.pid(), protocol, || {
        // A page is served only by the replica that has the lease.
        rig.desk.page(&rig.replica, &rig.desk.page_request(&first, &second, 0, 256));
    });
}
