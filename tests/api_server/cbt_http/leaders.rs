//! Several replicas: one asks the driver, whoever is asked.

use csi_loopback::kubernetes::cbt_http::{PATH, ProblemKind};
use http::Method;
use k8s_openapi::api::coordination::v1::Lease;
use nix::sys::signal::Signal;
use serde_json::json;
use support::cluster::shared;

use super::rig::{Desk, Replica, Rig};
use support::cluster::tls::Authority;

const SHORT: [&str; 2] = ["--cbt-http-lease-duration", "2s"];
/// So long that nobody waits for its end, nor takes it back from whom a test has written into it.
const LONG: [&str; 2] = ["--cbt-http-lease-duration", "10m"];

fn lease(desk: &Desk<'_>) -> Lease {
    let name = format!("csi-loopback-cbt-http-{}", desk.driver_name);
    desk.cluster.get(&desk.cluster.api_in::<Lease>(&desk.namespace), &name).unwrap()
}

/// A second replica, which is well, does not lead and knows who does.
fn standby(rig: &Rig<'_>, flags: &[&str]) -> Replica {
    let standby = rig.desk.spawn(flags);
    rig.desk.cluster.wait_for("the standby is well", || standby.is_well().then_some(()));
    let said = |page: &str| super::rig::page_of(&standby, page);
    rig.desk.cluster.wait_for("the standby knows that it is one", || {
        said("/cbt-http/leader").contains("another replica leads").then_some(())
    });
    assert!(said("/cbt-http/leader").starts_with("HTTP/1.1 503"));
    standby
}

#[test]
fn one_replica_leads_and_the_others_pass_requests_on() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster, &[]);
    let (first, second) = rig.sample();
    let standby = standby(&rig, &[]);
    let whole = rig.desk.all(&rig.replica, (&first, &second), 0, 4096);
    let answered = || {
        rig.desk
            .metric(&rig.replica, "csi_loopback_sidecar_cbt_http_requests_total{outcome=\"ok\"} ")
    };
    let before = answered();
    cluster.wait_for("the standby knows the leader", || {
        let asked = rig.desk.asked(&first, &second, 0, 1);
        (rig.desk.ask(&standby, &asked).status == 200).then_some(())
    });
    assert_eq!(rig.desk.all(&standby, (&first, &second), 0, 4), whole);
    assert!(answered() >= before + 4.0, "the leader has answered");
    let forwarded = "csi_loopback_sidecar_cbt_http_requests_total{outcome=\"forwarded\"} ";
    assert!(rig.desk.metric(&standby, forwarded) >= 4.0);
    assert_eq!(rig.desk.metric(&standby, "csi_loopback_sidecar_cbt_http_leading "), 0.0);
    // What the leader refuses is refused so.
    let problem = rig.desk.problem(&standby, &rig.desk.asked(&second, &first, 0, 4));
    assert_eq!(
        (problem.kind, problem.code.as_deref()),
        (ProblemKind::Driver, Some("INVALID_ARGUMENT"))
    );
    // Passed on once, and not again.
    let bearer = format!("Bearer {}", rig.desk.token());
    let headers = [("authorization", bearer.as_str()), ("x-cbt-http-forwarded", "1")];
    let body = serde_json::to_vec(&rig.desk.asked(&first, &second, 0, 1)).unwrap();
    let reply = rig.desk.send(&standby, (Method::POST, PATH), &headers, body.clone());
    assert_eq!((reply.status, reply.problem().kind), (503, ProblemKind::Unavailable));
    assert!(reply.headers.contains_key("retry-after"));
    assert_eq!(rig.desk.send(&rig.replica, (Method::POST, PATH), &headers, body).status, 200);
    // Nobody gets past the standby who would not get past the leader.
    let refused = rig.desk.post(&standby, "x", &rig.desk.asked(&first, &second, 0, 1));
    assert_eq!(refused.status, 401);
}

#[test]
fn a_standby_takes_over_when_the_leader_is_killed() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, &[], &SHORT);
    let (first, second) = rig.sample();
    let standby = standby(&rig, &SHORT);
    let page = rig.desk.page(&rig.replica, &rig.desk.asked(&first, &second, 0, 3));
    rig.replica.served.process.signal(Signal::SIGKILL);
    let next = rig.desk.asked(&first, &second, page.next.unwrap(), 4096);
    // Until then whoever asks is told to come again.
    let rest = cluster.wait_for("the standby answers", || {
        let reply = rig.desk.ask(&standby, &next);
        match reply.status {
            200 => Some(reply.page()),
            _ => {
                assert_eq!(reply.problem().kind, ProblemKind::Unavailable);
                assert!(standby.is_well());
                None
            }
        }
    });
    assert!(standby.leads());
    let all = page.changed_blocks.len() + rest.changed_blocks.len();
    assert_eq!(all, rig.desk.all(&standby, (&first, &second), 0, 4096).len());
}

#[test]
fn a_leader_that_is_told_to_end_hands_over() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::with(cluster, &[], &LONG);
    let (first, second) = rig.sample();
    let standby = standby(&rig, &LONG);
    rig.replica.served.process.stop();
    cluster.wait_for("the standby leads", || standby.leads().then_some(()));
    assert_eq!(rig.desk.all(&standby, (&first, &second), 0, 9).len(), 15);
}

#[test]
#[ignore = "full tier"]
fn a_standby_that_cannot_reach_the_leader_says_so() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, &[], &LONG);
    let (first, second) = rig.sample();
    let standby = standby(&rig, &LONG);
    let asked = rig.desk.asked(&first, &second, 0, 1);
    let leases = cluster.api_in::<Lease>(&rig.desk.namespace);
    let name = lease(&rig.desk).metadata.name.unwrap();
    let own = lease(&rig.desk).spec.unwrap().holder_identity.unwrap();
    assert!(own.starts_with(&format!("127.0.0.1:{}_", rig.replica.port)), "{own}");
    for (holder, words) in
        [("127.0.0.1:1_nobody", "cannot be reached"), ("somebody", "does not say where it is")]
    {
        cluster.merge(&leases, &name, &json!({ "spec": { "holderIdentity": holder } }));
        let reply = cluster.wait_for("the standby has seen it", || {
            let reply = rig.desk.ask(&standby, &asked);
            (reply.status == 503 && reply.problem().message.contains(words)).then_some(reply)
        });
        assert_eq!(reply.problem().kind, ProblemKind::Unavailable);
        assert!(reply.headers.contains_key("retry-after"));
        assert!(standby.is_well());
    }
}

#[test]
#[ignore = "full tier"]
fn a_request_is_passed_on_to_nobody_whom_the_authority_does_not_vouch_for() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, &[], &LONG);
    let (first, second) = rig.sample();
    let standby = standby(&rig, &LONG);
    // It serves what the leader would, with a certificate of its own, and has written itself into the lease.
    let mut other = Desk::new(cluster, &rig.desk.driver_name, rig.driver.socket());
    other.authority = Authority::new("another authority");
    other.certificate = other.authority.certify(cluster.scratch(), &cluster.unique("other"));
    let impostor = other.start(&[]);
    let leases = cluster.api_in::<Lease>(&rig.desk.namespace);
    let name = lease(&rig.desk).metadata.name.unwrap();
    let holder = format!("127.0.0.1:{}_x", impostor.port);
    cluster.merge(&leases, &name, &json!({ "spec": { "holderIdentity": holder } }));
    let asked = rig.desk.asked(&first, &second, 0, 1);
    let reply = cluster.wait_for("the standby has seen it", || {
        let reply = rig.desk.ask(&standby, &asked);
        let is_it = reply.status == 503 && reply.problem().message.contains("cannot be reached");
        assert_ne!(reply.status, 401, "it is none that another authority's replica has answered");
        is_it.then_some(reply)
    });
    assert_eq!(reply.problem().kind, ProblemKind::Unavailable);
    assert!(!impostor.served.process.log().contains("cbt_http=\"page\""), "it has seen a token");
}
