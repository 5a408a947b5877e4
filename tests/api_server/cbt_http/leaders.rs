//! Several replicas: one serves pages, and the others fail their readiness probe.

use csi_loopback::kubernetes::cbt_http::ProblemKind;
use support::cluster::shared;

use super::rig::{Replica, Rig};

/// So long that no test waits for its end.
const LONG: [&str; 2] = ["--cbt-http-lease-duration", "10m"];

/// A second replica, which is healthy but does not lead.
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
fn only_the_leader_serves_and_is_ready() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster, &[]);
    let (first, second) = rig.sample();
    let standby = standby(&rig, &[]);
    let request = rig.desk.page_request(&first, &second, 0, 1);
    assert_eq!(rig.desk.ask(&rig.replica, &request).status, 200);
    let reply = rig.desk.ask(&standby, &request);
    assert_eq!((reply.status, reply.problem().kind), (503, ProblemKind::Unavailable));
    assert!(reply.headers.contains_key("retry-after"));
    assert!(reply.problem().message.contains("another replica leads"), "{:?}", reply.problem());
    assert_eq!(rig.desk.metric(&standby, "csi_loopback_sidecar_cbt_http_leading "), 0.0);
    // Only authorized callers learn that another replica leads.
    let refused = rig.desk.post(&standby, "x", &request);
    assert_eq!(refused.status, 401);
}

#[test]
fn a_terminated_leader_hands_over() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::with(cluster, &[], &LONG);
    let (first, second) = rig.sample();
    let standby = standby(&rig, &LONG);
    rig.replica.served.process.stop();
    cluster.wait_for("the standby leads", || standby.leads().then_some(()));
    assert_eq!(rig.desk.all(&standby, (&first, &second), 0, 9).len(), 15);
}
