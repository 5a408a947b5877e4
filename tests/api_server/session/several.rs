//! Several managers, killed managers, and many requests.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use csi_loopback::kubernetes::session::{SessionState, SnapshotSessionRequest};
use kube::api::PostParams;
use kube::{Api, ResourceExt};
use nix::sys::signal::Signal;

use support::cluster::manager::leads;
use support::cluster::proxy::Way;
use support::cluster::{Cluster, shared};
use tokio::task::JoinSet;

use super::rig::{Options, Rig, a_while, token};

const SHORT_LEASE: &[&str] = &["--lease-duration", "6s"];

#[test]
#[ignore = "full tier"]
fn a_standby_takes_over_when_the_leader_is_killed() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::with(cluster, Options { flags: SHORT_LEASE, ..Options::default() });
    rig.snapshot("monday");
    rig.session("first", &["monday"]);
    let standby = rig.another(SHORT_LEASE);
    a_while();
    assert!(leads(&rig.manager) && !leads(&standby));
    rig.manager.process.signal(Signal::SIGKILL);
    rig.request("second", &["monday"]);
    rig.wait_for("second", SessionState::Ready);
    assert!(leads(&standby));
    cluster.delete(&rig.requests(), "first");
    rig.wait_until_gone("first");
    assert_eq!(rig.data().len(), 1);
    rig.manager = standby;
}

#[test]
fn a_terminated_leader_hands_over_at_once() {
    let Some(cluster) = shared() else { return };
    let mut rig =
        Rig::with(cluster, Options { flags: &["--lease-duration", "60s"], ..Options::default() });
    rig.snapshot("monday");
    rig.session("first", &["monday"]);
    let standby = rig.another(&["--lease-duration", "60s"]);
    a_while();
    assert!(!leads(&standby));
    let begun = Instant::now();
    rig.manager.process.stop();
    rig.request("second", &["monday"]);
    rig.wait_for("second", SessionState::Ready);
    assert!(begun.elapsed() < Duration::from_secs(40), "it did not wait for the lease's end");
    rig.manager = standby;
}

#[test]
#[ignore = "full tier"]
fn a_leader_that_cannot_renew_stops_before_another_begins() {
    let Some(cluster) = shared() else { return };
    let proxy = cluster.proxy();
    let options =
        Options { flags: SHORT_LEASE, server: Some(proxy.server()), ..Options::default() };
    let rig = Rig::with(cluster, options);
    rig.snapshot("monday");
    rig.session("first", &["monday"]);
    let standby = rig.another(SHORT_LEASE);
    cluster.turn(&proxy, Way::Hanging);
    cluster.wait_for("the standby leads", || {
        // In this order: a former leader that still acted would overlap with the new one.
        let (new, old) = (leads(&standby), leads(&rig.manager));
        assert!(!(old && new), "two lead at once");
        new.then_some(())
    });
    rig.request("second", &["monday"]);
    rig.wait_for("second", SessionState::Ready);
    cluster.turn(&proxy, Way::Open);
    a_while();
    assert!(leads(&standby) && !leads(&rig.manager));
    assert_eq!(rig.data().len(), 2);
}

#[test]
#[ignore = "full tier"]
fn repeated_kills_create_one_data_per_request() {
    let Some(cluster) = shared() else { return };
    let mut rig =
        Rig::with(cluster, Options { flags: &["--lease-duration", "1s"], ..Options::default() });
    rig.snapshot("monday");
    let names: Vec<String> = (0..60).map(|n| format!("backup-{n}")).collect();
    for (round, some) in names.chunks(10).enumerate() {
        for name in some {
            rig.request(name, &["monday"]);
        }
        // During the work, at another step each time.
        thread::sleep(Duration::from_millis(700 + 90 * round as u64));
        rig.manager.process.signal(Signal::SIGKILL);
        rig.manager = rig.another(&["--lease-duration", "1s"]);
    }
    let mut expected = BTreeMap::new();
    for name in &names {
        let ready = rig.wait_for(name, SessionState::Ready);
        expected.insert(token(&ready), name.clone());
    }
    let found: BTreeMap<_, _> =
        rig.data().into_iter().map(|data| (data.name_any(), data.spec.request.name)).collect();
    assert_eq!(found, expected);
}

/// The manager's calls so far, by kind.
fn calls(rig: &Rig<'_>) -> BTreeMap<String, usize> {
    let user = rig.account.user();
    let mut counted = BTreeMap::new();
    for request in rig.cluster.requests() {
        if request["user"]["username"] == user {
            let object = &request["objectRef"];
            let word = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
            let what = [&request["verb"], &object["resource"], &object["subresource"]].map(word);
            let code = &request["responseStatus"]["code"];
            *counted.entry(format!("{} {code}", what.join(" "))).or_insert(0) += 1;
        }
    }
    counted
}

#[test]
fn ending_a_session_lists_no_data_of_others() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.snapshot("monday");
    let ending = ["first", "second", "third"].map(|name| {
        rig.session(name, &["monday"]);
        name
    });
    let kept = rig.session("kept", &["monday"]);
    let lists = || {
        let calls = calls(&rig).into_iter();
        let lists = calls.filter(|(what, _)| what.starts_with("list snapshotsessiondata"));
        lists.map(|(_, count)| count).sum::<usize>()
    };
    let before = lists();
    for name in ending {
        cluster.delete(&rig.requests(), name);
        rig.wait_until_gone(name);
    }
    assert_eq!(lists(), before);
    let left: Vec<_> = rig.data().iter().map(|data| data.name_any()).collect();
    assert_eq!(left, [kept]);
}

/// The manager's calls for one request: finalizer, token, data, Ready, event.
const CALLS: usize = 5;

#[test]
#[ignore = "full tier"]
fn a_thousand_concurrent_requests_cost_few_calls() {
    let Some(cluster) = shared() else { return };
    const REQUESTS: usize = 1000;
    let rig = Rig::new(cluster);
    rig.snapshot("monday");
    rig.snapshot("tuesday");
    rig.session("warm", &["monday"]);
    // The event may be recorded after the request is ready.
    a_while();
    let before = calls(&rig);
    let begun = Instant::now();
    let names: Vec<_> = (0..REQUESTS).map(|n| format!("backup-{n}")).collect();
    let api = rig.requests();
    for_each(cluster, &api, &names, REQUESTS, |api, name| async move {
        let mut request = SnapshotSessionRequest::new(&name, Default::default());
        request.spec.snapshots = vec!["monday".into(), "tuesday".into()];
        api.create(&PostParams::default(), &request).await.map(drop)
    });
    let all = loop {
        let all = cluster.list(&api);
        if all.iter().all(|one| one.state() == SessionState::Ready) {
            break all;
        }
        assert!(begun.elapsed() < Duration::from_secs(300), "not all requests become ready");
        thread::sleep(Duration::from_secs(1));
    };
    let took = begun.elapsed();
    let expected: BTreeMap<_, _> = all.iter().map(|one| (token(one), one.name_any())).collect();
    assert_eq!(expected.len(), REQUESTS + 1, "no two have the same token");
    let found: BTreeMap<_, _> =
        rig.data().into_iter().map(|data| (data.name_any(), data.spec.request.name)).collect();
    assert_eq!(found, expected);
    a_while();
    let after = calls(&rig);
    let made = |what: &String| after[what] - before.get(what).unwrap_or(&0);
    let made: BTreeMap<&String, usize> = after.keys().map(|what| (what, made(what))).collect();
    let sum: usize = made.values().sum();
    println!(
        "report: {REQUESTS} sessions in {:.1} s, {:.2} calls of the manager for each",
        took.as_secs_f64(),
        sum as f64 / REQUESTS as f64
    );
    let count = |is: &dyn Fn(&str) -> bool| -> usize {
        made.iter().filter(|(what, _)| is(what)).map(|(_, made)| made).sum()
    };
    let written = count(&|what| {
        let writes = ["create snap", "create events", "patch snap"];
        what.contains(" 20") && writes.iter().any(|verb| what.starts_with(verb))
    });
    assert!(written <= CALLS * REQUESTS, "{made:?}");
    // A call that the overloaded API server refused costs another reconciliation.
    let busy = count(&|what| what.contains(" 5") || what.contains(" 409"));
    let lists = count(&|what| what.starts_with("list snapshotsessiondata"));
    assert!(lists <= 2 * busy, "{made:?}");
    assert!(sum <= CALLS * REQUESTS + 3 * busy + REQUESTS / 10, "{made:?}");
    for_each(cluster, &api, &names, 100, |api, name| async move {
        api.delete(&name, &Default::default()).await.map(drop)
    });
    cluster.delete(&api, "warm");
    let begun = Instant::now();
    while !cluster.list(&api).is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(300), "not all requests go");
        thread::sleep(Duration::from_secs(1));
    }
    assert!(rig.data().is_empty());
}

/// Calls the API server for each name, with at most `concurrent` calls at once. A call without an
/// answer is repeated, as clients do: it may have had its effect.
fn for_each<F: Future<Output = kube::Result<()>> + Send + 'static>(
    cluster: &Cluster,
    api: &Api<SnapshotSessionRequest>,
    names: &[String],
    concurrent: usize,
    call: impl Fn(Api<SnapshotSessionRequest>, String) -> F + Copy + Send + 'static,
) {
    let until = Instant::now() + Duration::from_secs(300);
    cluster.block_on(async {
        let mut calls = JoinSet::new();
        for name in names {
            if calls.len() == concurrent {
                calls.join_next().await.unwrap().unwrap();
            }
            let (api, name) = (api.clone(), name.clone());
            calls.spawn(async move {
                let mut repeated = false;
                loop {
                    match call(api.clone(), name.clone()).await {
                        Ok(()) => break,
                        Err(kube::Error::Api(status))
                            if repeated && [404, 409].contains(&status.code) =>
                        {
                            break;
                        }
                        Err(kube::Error::Service(error)) if Instant::now() < until => {
                            println!("report: {name}: a call without an answer: {error}");
                            repeated = true;
                        }
                        Err(error) => panic!("{name}: {error}"),
                    }
                }
            });
        }
        calls.join_all().await;
    });
}
