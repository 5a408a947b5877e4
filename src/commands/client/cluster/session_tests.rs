//! Listings in sessions end to end, against [`fake_sidecar`] and its session manager: requests,
//! resumption after interruptions, and that no request remains.

use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};
use tokio::sync::watch;
use tonic::Code;

use super::super::block_map::{Query, Window};
use super::super::stop::Stop;
use super::fake_sidecar::{Cluster, End, Fate, Script, SidecarRequest, WATCH, request_path};
use super::request::{NAME_PREFIX, Requests, Which};
use super::resume::Resuming;
use super::session::{Portion, Session, snapshots};
use super::tests::{K, MINUTE, allocated, delta, error_text, limits, read, script};
use super::{Limits, within};
use grpc::proto::snapshotmetadata::BlockMetadataType;
use kubernetes::session::SnapshotSessionRequestSpec;

type Extents = Vec<(i64, i64)>;

const UNAVAILABLE: End = End::Code(Code::Unavailable);
const EXPIRED: End = End::Code(Code::Unauthenticated);

fn requests(cluster: &Cluster, which: Which) -> Requests {
    Requests::new(cluster.client(), "shop", which, None, limits(MINUTE))
}

fn own(query: &Query) -> Which {
    let snapshots = snapshots(query).unwrap();
    Which::Own(SnapshotSessionRequestSpec { snapshots, lifetime_seconds: Some(60) })
}

/// A listing in a session, which has ended when this returns.
async fn list(cluster: &Cluster, which: Which, query: Query, stop: &Stop) -> Result<Extents> {
    let limits = Limits { deadline: stop.deadline(), timeout: MINUTE };
    let requests = Requests::new(cluster.client(), "shop", which, None, limits);
    within(stop, requests, async |requests: &mut Requests| {
        let portion = Portion::try_from(Window::default())?;
        read(Resuming::new(Session::new(requests, query, portion), limits)).await
    })
    .await
}

/// The same in a session of its own, of which nothing may remain.
async fn in_session(cluster: &Cluster, query: Query) -> Result<Extents> {
    let outcome = list(cluster, own(&query), query, &Stop::unsignalled(MINUTE)).await;
    assert_eq!(cluster.requests().len(), 0, "{:?}", cluster.calls());
    outcome
}

async fn played(scripts: Vec<Script>, fates: &[Fate]) -> (Result<Extents>, Vec<SidecarRequest>) {
    let cluster = Cluster::with_sessions(scripts, fates).await;
    let outcome = in_session(&cluster, allocated()).await;
    (outcome, cluster.sidecar_requests())
}

/// Number of calls of the API server with this prefix.
fn count(cluster: &Cluster, begin: &str) -> usize {
    cluster.calls().iter().filter(|call| call.starts_with(begin)).count()
}

#[tokio::test]
async fn a_session_is_created_used_by_name_and_deleted() {
    for style in [BlockMetadataType::FixedLength, BlockMetadataType::VariableLength] {
        let whole = Script { style, ..script(&[&[(0, 1), (4, 1)], &[(9, 1)]], End::Whole) };
        let cluster = Cluster::with_sessions(vec![whole], &[Fate::Ready("secret")]).await;
        assert_eq!(in_session(&cluster, delta("a")).await.unwrap(), [(0, 1), (4, 1), (9, 1)]);
        let expected = SidecarRequest {
            token: "secret".to_owned(),
            base: "a".to_owned(),
            snapshot: "b".to_owned(),
            offset: 0,
        };
        assert_eq!(cluster.sidecar_requests(), [expected]);
        assert_eq!(count(&cluster, "POST"), 1);
        let deleted = format!("DELETE {}/{NAME_PREFIX}", request_path(""));
        assert_eq!(count(&cluster, &deleted), 1);
    }
}

#[tokio::test]
async fn an_interrupted_listing_resumes_in_its_session() {
    for end in [UNAVAILABLE, End::Break] {
        let (extents, requests) = played(
            vec![
                script(&[], end),
                script(&[&[(0, 1), (4, 2)]], end),
                script(&[], end),
                script(&[&[(9, 1)]], End::Whole),
            ],
            &[Fate::Ready("only")],
        )
        .await;
        assert_eq!(extents.unwrap(), [(0, 1), (4, 2), (9, 1)]);
        let offsets: Vec<_> = requests.iter().map(|request| request.offset / K).collect();
        assert_eq!(offsets, [0, 0, 6, 6]);
        assert!(requests.iter().all(|request| request.token == "only"));
    }
}

#[tokio::test]
async fn a_session_that_expires_during_a_listing_is_replaced() {
    let (extents, requests) = played(
        vec![script(&[&[(0, 1)]], EXPIRED), script(&[&[(1, 1)]], End::Whole)],
        &[Fate::Ready("first"), Fate::Ready("second")],
    )
    .await;
    assert_eq!(extents.unwrap(), [(0, 1), (1, 1)]);
    let tokens: Vec<_> = requests.iter().map(|request| &*request.token).collect();
    assert_eq!(tokens, ["first", "second"]);

    // Neither at the start nor after a failure without progress does another session help.
    let (extents, requests) = played(vec![script(&[], EXPIRED)], &[Fate::Ready("first")]).await;
    let refused = error_text(extents);
    assert!(refused.starts_with("UNAUTHENTICATED") && refused.contains("--lifetime"), "{refused}");
    assert_eq!(requests.len(), 1);
    let (extents, requests) = played(
        vec![script(&[&[(0, 1)]], EXPIRED), script(&[], EXPIRED)],
        &[Fate::Ready("first"), Fate::Ready("second")],
    )
    .await;
    assert!(error_text(extents).starts_with("UNAUTHENTICATED"));
    assert_eq!(requests.len(), 2);
}

#[tokio::test]
async fn an_existing_session_is_neither_replaced_nor_deleted() {
    for (end, whole) in [(End::Whole, true), (EXPIRED, false)] {
        let cluster = Cluster::new(vec![script(&[&[(0, 1)]], end)]).await;
        let path = request_path("given");
        cluster.put(&path, json!({ "spec": { "snapshots": ["b"] }, "status": cluster.ready("t") }));
        let given = Which::Existing("given".to_owned());
        let stop = Stop::unsignalled(MINUTE);
        let extents = list(&cluster, given, allocated(), &stop).await;
        match whole {
            true => assert_eq!(extents.unwrap(), [(0, 1)]),
            false => assert!(error_text(extents).contains("shop/given has ended")),
        }
        assert!(cluster.requests().contains_key(&path));
        assert_eq!((count(&cluster, "POST"), count(&cluster, "DELETE")), (0, 0));
    }
}

#[tokio::test]
async fn a_failed_or_incomplete_session_is_reported_and_deleted() {
    let ready = |without: &'static str| async move {
        let mut status = Cluster::new(Vec::new()).await.ready("secret");
        status.as_object_mut().unwrap().remove(without);
        status
    };
    let cases: Vec<(Value, &str)> = vec![
        (json!({ "state": "Failed", "error": "two drivers" }), "is Failed: two drivers"),
        (json!({ "state": "Failed" }), "gave no reason"),
        (ready("address").await, "no status.address"),
        (ready("caCert").await, "no status.caCert"),
        (ready("sessionToken").await, "no status.sessionToken"),
    ];
    for (status, why) in cases {
        let (extents, requests) = played(Vec::new(), &[Fate::Status(status)]).await;
        let error_text = error_text(extents);
        assert!(error_text.contains(why) && error_text.contains(NAME_PREFIX), "{error_text}");
        assert!(!error_text.contains("secret") && requests.is_empty(), "{error_text}");
    }
}

#[tokio::test]
async fn without_the_right_to_watch_a_request_is_polled() {
    let cluster =
        Cluster::with_sessions(vec![script(&[&[(0, 1)]], End::Whole)], &[Fate::Ready("t")]).await;
    cluster.fail(WATCH, 403);
    assert_eq!(in_session(&cluster, allocated()).await.unwrap(), [(0, 1)]);
    assert_eq!(count(&cluster, &format!("GET {}/{NAME_PREFIX}", request_path(""))), 1);
}

#[tokio::test]
async fn a_timeout_error_names_what_the_request_waits_for() {
    let pending = |conditions: Value| json!({ "state": "Pending", "conditions": conditions });
    let waiting = json!([{
        "type": "Ready", "status": "False", "reason": "SnapshotNotReady", "message": "b is being taken",
        "lastTransitionTime": "2030-01-01T00:00:00Z",
    }]);
    for (fate, why) in [
        (Fate::Ignored, "check that a session manager runs"),
        (Fate::Status(pending(json!([]))), "is Pending"),
        (Fate::Status(pending(waiting)), "is Pending: b is being taken"),
    ] {
        let cluster = Cluster::with_sessions(Vec::new(), &[fate]).await;
        let stop = Stop::unsignalled(Duration::from_millis(600));
        let error_text = error_text(list(&cluster, own(&allocated()), allocated(), &stop).await);
        assert!(error_text.contains("--timeout") && error_text.contains(why), "{error_text}");
        assert!(cluster.requests().is_empty());
    }
}

#[tokio::test]
async fn an_interrupt_at_any_time_leaves_no_request() {
    /// The moment of the interrupt.
    type Reached = fn(&Cluster) -> bool;
    let stages: [(Fate, Reached); 3] = [
        // During creation: the response comes too late.
        (Fate::Ready("t"), |cluster| cluster.calls().iter().any(|call| call.starts_with("POST"))),
        (Fate::Ignored, |cluster| cluster.calls().iter().any(|call| call.contains("watch=true"))),
        (Fate::Ready("t"), |cluster| !cluster.sidecar_requests().is_empty()),
    ];
    for (fate, reached) in stages {
        let scripts = vec![script(&[&[(0, 1)]], UNAVAILABLE); 9];
        let cluster = Cluster::with_sessions(scripts, &[fate]).await;
        let (signal, stop) = Stop::by_hand(MINUTE);
        tokio::spawn(interrupt(cluster.clone(), reached, signal));
        let error = list(&cluster, own(&allocated()), allocated(), &stop).await.unwrap_err();
        assert_eq!(error.to_string(), "interrupted");
        assert!(cluster.requests().is_empty(), "{:?}", cluster.calls());
    }
}

async fn interrupt(cluster: Cluster, reached: fn(&Cluster) -> bool, signal: watch::Sender<bool>) {
    while !reached(&cluster) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    signal.send_replace(true);
    // Without the sender the receiver expects no signals.
    tokio::time::sleep(MINUTE).await;
}

#[tokio::test]
async fn a_request_with_a_late_or_lost_response_is_deleted() {
    // Late: the creation runs when the command ends.
    let cluster = Cluster::with_sessions(Vec::new(), &[Fate::Ready("t")]).await;
    cluster.delay(Duration::from_millis(200));
    let mut late = requests(&cluster, own(&allocated()));
    let cancelled = tokio::time::timeout(Duration::from_millis(50), late.open()).await;
    assert!(cancelled.is_err() && cluster.requests().is_empty());
    late.end().await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!((count(&cluster, "POST"), count(&cluster, "DELETE")), (1, 1));
    assert!(cluster.requests().is_empty());

    // Lost: the request exists and the response is an error. The next attempt finds it.
    let cluster = Cluster::with_sessions(Vec::new(), &[Fate::Ready("t")]).await;
    cluster.lose_next_response();
    let mut lost = requests(&cluster, own(&delta("a")));
    assert!(lost.open().await.is_err());
    let made = cluster.requests().into_values().next().unwrap();
    assert_eq!(made["spec"], json!({ "snapshots": ["a", "b"], "lifetimeSeconds": 60 }));
    let Ok(granted) = lost.open().await else { panic!("no session") };
    assert_eq!(granted.token, "t");
    assert_eq!((cluster.requests().len(), count(&cluster, "POST")), (1, 2));
    lost.end().await.unwrap();
    assert!(cluster.requests().is_empty());
}

#[tokio::test]
async fn a_refused_request_is_reported_and_not_deleted() {
    for (code, why) in [(403, "RBAC"), (422, "fails"), (404, "CRDs of snapshot sessions")] {
        let cluster = Cluster::with_sessions(Vec::new(), &[]).await;
        cluster.fail(&request_path(""), code);
        let error_text = error_text(in_session(&cluster, allocated()).await);
        assert!(error_text.starts_with("SnapshotSessionRequest shop/"), "{error_text}");
        assert!(error_text.contains(why), "{error_text}");
        assert_eq!(count(&cluster, "DELETE"), 0);
    }
}

#[tokio::test]
async fn a_deletion_is_retried_and_a_refusal_names_the_request() {
    for (code, remains) in [(503, false), (403, true)] {
        let cluster = Cluster::with_sessions(Vec::new(), &[Fate::Ready("secret")]).await;
        let mut requests = requests(&cluster, own(&allocated()));
        assert!(requests.open().await.is_ok());
        let path = cluster.requests().into_keys().next().unwrap();
        cluster.fail(&path, code);
        let outcome = requests.end().await;
        assert_eq!(cluster.requests().len(), usize::from(remains));
        match outcome {
            Ok(()) => assert!(!remains),
            Err(error) => {
                let (error, name) = (error.to_string(), path.rsplit('/').next().unwrap());
                assert!(remains && error.contains(name) && error.contains("expires"), "{error}");
                assert!(!error.contains("secret"), "{error}");
            }
        }
    }
}

#[tokio::test]
async fn only_the_authorities_of_the_session_are_trusted() {
    let cluster = Cluster::with_sessions(Vec::new(), &[]).await;
    let mut status = cluster.ready("secret");
    status["caCert"] = Cluster::new(Vec::new()).await.ready("")["caCert"].clone();
    cluster
        .put(&request_path("given"), json!({ "spec": { "snapshots": ["b"] }, "status": status }));
    let stop = Stop::unsignalled(MINUTE);
    let given = Which::Existing("given".to_owned());
    let error_text = error_text(list(&cluster, given, allocated(), &stop).await);
    assert!(error_text.contains("TLS with"), "{error_text}");
    assert!(error_text.contains("SnapshotSessionRequest shop/given"), "{error_text}");
    assert!(!error_text.contains("secret") && cluster.sidecar_requests().is_empty());
}
