//! The cost of tokens for the API server, and their handling during its outage.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};
use support::SetOnDrop;
use support::cluster::shared;

use csi_loopback::proto::snapshotmetadata as released;
use k8s_openapi::api::rbac::v1::RoleBinding;
use tonic::Code;

use super::rig::{Options, Rig};
use support::cluster::proxy::Way;
use support::cluster::session::{allocated, call_through, delta, random_token};
use support::cluster::sidecar::{AUDIENCE, channel, client_at, collect};
use support::driver::wait_for;

#[test]
#[ignore = "full tier"]
fn a_known_token_costs_the_api_server_nothing() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let (first, second) = (rig.snapshot("first"), rig.snapshot("second"));
    let token = rig.session(&[&first, &second]);
    let all = |times| {
        for _ in 0..times {
            rig.ok(allocated(&token, "first"));
            rig.ok(delta(&token, "first", "second"));
        }
    };
    all(1);
    let before = cluster.requests_by(&rig.own.user());
    assert!(before > 0);
    all(50);
    assert_eq!(cluster.requests_by(&rig.own.user()), before);
    // An unknown token costs one call each time.
    let lookups = rig.session_requests("get");
    for _ in 0..3 {
        rig.refused(allocated(&random_token(), "first"), Code::Unauthenticated, "");
    }
    assert_eq!(rig.session_requests("get"), lookups + 3);
}

/// Makes this many concurrent calls over one connection.
fn at_once(rig: &Rig<'_>, tokens: Vec<String>) -> Vec<Code> {
    rig.cluster.block_on(async {
        let channel = channel(rig.sidecar.port, &rig.authority.pem());
        let mut all = tokio::task::JoinSet::new();
        for token in tokens {
            all.spawn(call_through(channel.clone(), allocated(&token, "first")));
        }
        let code = |answer: Result<_, tonic::Status>| answer.err().map_or(Code::Ok, |it| it.code());
        all.join_all().await.into_iter().map(code).collect()
    })
}

#[test]
#[ignore = "full tier"]
fn concurrent_requests_for_a_token_cost_one_call() {
    let Some(cluster) = shared() else { return };
    // Without a watch, so that valid tokens are looked up, too, and with a low rate limit, so that
    // lookups queue.
    let options = Options {
        verbs: &["get"],
        sidecar: &["--kube-api-qps", "2", "--kube-api-burst", "20"],
        ..Options::default()
    };
    let rig = Rig::with(cluster, options);
    let first = rig.snapshot("first");
    let token = rig.session(&[&first]);
    rig.ok(allocated(&token, "first"));
    sleep(Duration::from_secs(2));
    let before = rig.session_requests("get");
    let begun = Instant::now();
    let codes = at_once(&rig, vec![token.clone(); 100]);
    // A lookup is cached for a second: a later call costs another one.
    let calls = 1 + begun.elapsed().as_secs() as usize;
    assert_eq!(codes, vec![Code::Ok; 100]);
    let lookups = rig.session_requests("get") - before;
    assert!((1..=calls).contains(&lookups), "{lookups} calls for all of them");
}

#[test]
#[ignore = "full tier"]
fn the_permission_to_get_is_enough() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, Options { verbs: &["get"], ..Options::default() });
    let (first, second) = (rig.snapshot("first"), rig.snapshot("second"));
    let token = rig.session(&[&first, &second]);
    rig.ok(allocated(&token, "first"));
    rig.ok(delta(&token, "first", "second"));
    rig.refused(allocated(&random_token(), "first"), Code::Unauthenticated, "session_token");
    // A lookup is cached for a second.
    cluster.revoke(&rig.home, &token);
    let revoked = Instant::now();
    wait_for("the refusal", || {
        let elapsed = revoked.elapsed();
        let refused = rig.ask(allocated(&token, "first")).is_err();
        assert!(refused || elapsed < Duration::from_millis(1100), "requested after {elapsed:?}");
        refused
    });
    rig.refused(allocated(&token, "first"), Code::Unauthenticated, "session_token");
    // But not longer than the session lasts.
    let short = rig.session_for(&[&first], Duration::from_secs(2));
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(1900) {
        let _ = rig.ask(allocated(&short, "first"));
    }
    sleep(Duration::from_millis(110));
    rig.refused(allocated(&short, "first"), Code::Unauthenticated, "session_token");
}

#[test]
fn a_missing_permission_to_read_sessions_is_reported() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let token = rig.session(&[&rig.snapshot("first")]);
    rig.ok(allocated(&token, "first"));
    let bindings = cluster.api_in::<RoleBinding>(&rig.home);
    for binding in cluster.list(&bindings) {
        cluster.delete(&bindings, binding.metadata.name.as_deref().unwrap());
    }
    let refused = cluster.wait_for("the right is gone", || {
        let refused = rig.ask(allocated(&random_token(), "first")).unwrap_err();
        (refused.code() == Code::Internal).then_some(refused)
    });
    assert!(refused.message().contains("SnapshotSessionData"), "{refused:?}");
}

#[test]
fn without_the_api_server_calls_fail_until_it_returns() {
    let Some(cluster) = shared() else { return };
    let proxy = cluster.proxy();
    let rig = Rig::with(cluster, Options { server: Some(proxy.server()), ..Options::default() });
    let token = rig.session(&[&rig.snapshot("first")]);
    rig.ok(allocated(&token, "first"));
    cluster.turn(&proxy, Way::Refused);
    wait_for("the watch has ended", || rig.sidecar.process.log().contains("the watch broke"));
    sleep(Duration::from_millis(1100));
    rig.refused(allocated(&token, "first"), Code::Unavailable, "API server");
    rig.refused(allocated(&random_token(), "first"), Code::Unavailable, "API server");
    cluster.turn(&proxy, Way::Open);
    cluster.wait_for("the API server is back", || rig.ask(allocated(&token, "first")).ok());
    rig.refused(allocated(&random_token(), "first"), Code::Unauthenticated, "session_token");
}

#[test]
#[ignore = "full tier"]
fn guessed_tokens_do_not_block_valid_ones() {
    let Some(cluster) = shared() else { return };
    // A call in the queue of the flood takes 10 s.
    const LONGEST: Duration = Duration::from_secs(8);
    let rate = ["--kube-api-qps", "5", "--kube-api-burst", "5"];
    let rig = Rig::with(cluster, Options { sidecar: &rate, ..Options::default() });
    let first = rig.snapshot("first");
    let token = rig.session(&[&first]);
    rig.ok(allocated(&token, "first"));
    let backup = rig.backup();
    let quiet = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let end_of_the_flood = SetOnDrop(&quiet);
        // Each flood ends by itself after about 10 s.
        let flood = scope.spawn(|| {
            let mut codes = Vec::new();
            while !quiet.load(Ordering::Relaxed) {
                codes.extend(at_once(&rig, (0..500).map(|_| random_token()).collect()));
            }
            codes
        });
        sleep(Duration::from_millis(500));
        // Meanwhile: a known token, a new token, and a user of the released API.
        for _ in 0..20 {
            let begun = Instant::now();
            rig.ok(allocated(&token, "first"));
            assert!(begun.elapsed() < LONGEST, "{:?}", begun.elapsed());
        }
        let new = rig.session(&[&first]);
        sleep(Duration::from_millis(500));
        rig.ok(allocated(&new, "first"));
        let request = released::GetMetadataAllocatedRequest {
            security_token: cluster.token(&backup, Some(AUDIENCE)),
            namespace: rig.namespace.clone(),
            snapshot_name: "first".into(),
            ..Default::default()
        };
        let begun = Instant::now();
        let client = client_at(cluster, &rig.sidecar, &rig.authority.pem());
        rig.cluster.block_on(collect(client, request.into())).unwrap();
        assert!(begun.elapsed() < LONGEST, "{:?}", begun.elapsed());
        drop(end_of_the_flood);
        let codes = flood.join().unwrap();
        assert!(codes.contains(&Code::Unauthenticated) && codes.contains(&Code::Unavailable));
        assert!(!codes.contains(&Code::Ok));
    });
}
