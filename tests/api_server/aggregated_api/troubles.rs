//! Errors as clients see them.

use nix::sys::signal::Signal;
use serde_json::json;
use support::cluster::shared;

use super::rig::{FAST, Whole, listed};
use support::cluster::access::rule;
use support::cluster::aggregated::Aggregated;
use support::cluster::programs::free_port;
use support::cluster::proxy::Way;
use support::path;

#[test]
fn kubectl_reports_a_missing_permission() {
    let Some(cluster) = shared() else { return };
    let whole = Whole::new(cluster, &[]);
    whole.snapshot("monday");
    let stranger = cluster.account(&whole.namespace, "stranger");
    let file = whole.aggregated.delta(&json!({ "targetVolumeSnapshotName": "monday" }));
    let user = stranger.user();
    // Without this permission kubectl looks among CustomResourceDefinitions, as for all types
    // without patch.
    let ignore = "--validate=ignore";
    let line = ["-n", &whole.namespace, "create", ignore, "--as", &user, "-f", path(&file)];
    // The API server's error.
    let error = whole.aggregated.kubectl_rejected(&line);
    assert!(error.contains("cannot create resource \"volumesnapshotdeltas\""), "{error}");
    let create = rule("cbt.storage.k8s.io", &["volumesnapshotdeltas"], &["create"]);
    cluster.grant_in(&whole.namespace, &stranger, &[create]);
    // The aggregated API server's error.
    let error = whole.aggregated.kubectl_rejected(&line);
    assert!(error.contains("Forbidden") && error.contains("volumesnapshots"), "{error}");
    assert!(error.contains("monday") && error.contains(&user), "{error}");
    let get = rule("snapshot.storage.k8s.io", &["volumesnapshots"], &["get"]);
    cluster.grant_in(&whole.namespace, &stranger, &[get]);
    cluster
        .wait_for("the answer", || whole.aggregated.kubectl(&line).status.success().then_some(()));
}

#[test]
fn a_rate_limited_user_learns_when_to_retry() {
    let Some(cluster) = shared() else { return };
    let slow = ["--user-qps", "0.01", "--user-burst", "2", "--qps", "1000", "--burst", "1000"];
    let whole = Whole::with(cluster, &[], &slow);
    whole.snapshot("monday");
    let spec = json!({ "targetVolumeSnapshotName": "monday" });
    let backup = whole.client(&whole.backup);
    for _ in 0..2 {
        whole.ask(&backup, &spec).unwrap();
    }
    let refused = whole.ask(&backup, &spec).unwrap_err();
    let kube::Error::Api(status) = refused else { panic!("{refused}") };
    assert_eq!((status.code, status.reason.as_str()), (429, "TooManyRequests"), "{status:?}");
    let wait = status.details.unwrap().retry_after_seconds;
    assert!((1..=100).contains(&wait), "{wait}");
    // Another user is not limited.
    whole.ask(&cluster.client(), &spec).unwrap();
}

/// A listing of many pages that is in progress.
fn under_way(whole: &Whole<'_>) -> std::process::Child {
    whole.write(1, (0..4096).step_by(8));
    whole.snapshot("monday");
    let line = ["allocated", "monday", "--api", "aggregated", "--page-size", "1"];
    let child = whole.command(&line).spawn().unwrap();
    whole.cluster.wait_for("some pages", || (whole.pages() > 20).then_some(()));
    child
}

/// Checks that it continues and lists everything.
fn lists_everything(whole: &Whole<'_>, child: std::process::Child) {
    let output = child.wait_with_output().unwrap();
    let all = listed(output);
    let again = whole.listed(&["allocated", "monday"]);
    assert_eq!(all["extents"], again["extents"]);
    assert_eq!(all["extent_count"], 512);
}

#[test]
#[ignore = "full tier"]
fn a_listing_survives_a_killed_aggregated_server() {
    let Some(cluster) = shared() else { return };
    let aggregated = Aggregated::start(cluster, &FAST);
    let other = aggregated.another();
    let service = cluster.balancer(&[aggregated.served.port, other.port]);
    aggregated.found_at(service.port);
    let mut whole = Whole::of(cluster, &[], aggregated, None);
    let child = under_way(&whole);
    let first = &mut whole.aggregated.served.process;
    first.signal(Signal::SIGKILL);
    first.stop();
    lists_everything(&whole, child);
}

#[test]
#[ignore = "full tier"]
fn a_listing_survives_a_killed_leading_sidecar() {
    let Some(cluster) = shared() else { return };
    let ports = (free_port(), free_port());
    let service = cluster.balancer(&[ports.0, ports.1]);
    let aggregated = Aggregated::start(cluster, &FAST);
    let found_at = format!("localhost:{}", service.port);
    let mut whole = Whole::of(cluster, &[], aggregated, Some((ports.0, &found_at)));
    let _standby = whole.another_sidecar(ports.1, &found_at);
    let child = under_way(&whole);
    whole.sidecar.process.signal(Signal::SIGKILL);
    whole.sidecar.process.stop();
    lists_everything(&whole, child);
}

#[test]
fn an_api_server_that_is_away_for_a_while_is_waited_for() {
    let Some(cluster) = shared() else { return };
    let proxy = cluster.proxy();
    let aggregated = Aggregated::start_at(cluster, &proxy.server(), &FAST);
    let whole = Whole::of(cluster, &[], aggregated, None);
    whole.snapshot("monday");
    let spec = json!({ "targetVolumeSnapshotName": "monday" });
    let backup = whole.client(&whole.backup);
    whole.ask(&backup, &spec).unwrap();
    cluster.turn(&proxy, Way::Refused);
    // The server cannot query the API server, and does not guess.
    let stranger = cluster.account(&whole.namespace, "stranger");
    let create = rule("cbt.storage.k8s.io", &["volumesnapshotdeltas"], &["create"]);
    cluster.grant_in(&whole.namespace, &stranger, &[create]);
    let refused = whole.ask(&whole.client(&stranger), &spec).unwrap_err();
    let kube::Error::Api(status) = refused else { panic!("{refused}") };
    assert_eq!(status.code, 503, "{status:?}");
    cluster.turn(&proxy, Way::Open);
    cluster.wait_for("an answer", || whole.ask(&backup, &spec).ok());
}
