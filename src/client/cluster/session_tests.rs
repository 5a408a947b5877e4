//! A session end to end, against [`fake_sidecar`] and its session manager: what is made, what goes on after which
//! interruption, and that nothing is left behind whatever happens.

use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::Code;

use super::super::block_map::{Query, Window};
use super::super::stop::Stop;
use super::fake_sidecar::{Asked, Cluster, End, Fate, Script, WATCH, request_path};
use super::request::{NAME_PREFIX, Requests, Which};
use super::resume::Resuming;
use super::session::{Portion, Session, snapshots};
use super::tests::{K, allocated, delta, read, script, told};
use super::{Limits, within};
use crate::kubernetes::session::SnapshotSessionRequestSpec;
use crate::proto::snapshotmetadata::BlockMetadataType;

type Extents = Vec<(i64, i64)>;

const UNAVAILABLE: End = End::Code(Code::Unavailable);
const EXPIRED: End = End::Code(Code::Unauthenticated);
const MINUTE: Duration = Duration::from_secs(60);

fn requests(cluster: &Cluster, which: Which, timeout: Duration) -> Requests {
    let limits = Limits { deadline: Instant::now() + timeout, timeout };
    Requests::new(cluster.client(), "shop", which, None, limits)
}

fn ours(query: &Query) -> Which {
    let snapshots = snapshots(query).unwrap();
    Which::Ours(SnapshotSessionRequestSpec { snapshots, lifetime_seconds: Some(60) })
}

/// The answer to a question, with a session that has ended.
async fn ask(cluster: &Cluster, which: Which, query: Query, stop: &Stop) -> Result<Extents> {
    let limits = Limits { deadline: stop.deadline(), timeout: MINUTE };
    let requests = Requests::new(cluster.client(), "shop", which, None, limits);
    within(stop, requests, async |requests: &mut Requests| {
        let portion = Portion::try_from(Window::default())?;
        read(Resuming::new(Session::new(requests, query, portion), limits)).await
    })
    .await
}

/// The same, of a session of its own; nothing may be left of it.
async fn asked(cluster: &Cluster, query: Query) -> Result<Extents> {
    let outcome = ask(cluster, ours(&query), query, &Stop::unsignalled(MINUTE)).await;
    assert_eq!(cluster.requests().len(), 0, "{:?}", cluster.calls());
    outcome
}

async fn played(scripts: Vec<Script>, fates: &[Fate]) -> (Result<Extents>, Vec<Asked>) {
    let cluster = Cluster::with_sessions(scripts, fates).await;
    let outcome = asked(&cluster, allocated()).await;
    (outcome, cluster.asked())
}

/// Calls of the API server that begin so.
fn count(cluster: &Cluster, begin: &str) -> usize {
    cluster.calls().iter().filter(|call| call.starts_with(begin)).count()
}

#[tokio::test]
async fn a_session_is_made_used_by_the_names_of_snapshots_and_ended() {
    for style in [BlockMetadataType::FixedLength, BlockMetadataType::VariableLength] {
        let whole = Script { style, ..script(&[&[(0, 1), (4, 1)], &[(9, 1)]], End::Whole) };
        let cluster = Cluster::with_sessions(vec![whole], &[Fate::Ready("secret")]).await;
        assert_eq!(asked(&cluster, delta("a")).await.unwrap(), [(0, 1), (4, 1), (9, 1)]);
        let expected = Asked {
            token: "secret".to_owned(),
            base: "a".to_owned(),
            snapshot: "b".to_owned(),
            offset: 0,
        };
        assert_eq!(cluster.asked(), [expected]);
        assert_eq!(count(&cluster, "POST"), 1);
        let deleted = format!("DELETE {}/{NAME_PREFIX}", request_path(""));
        assert_eq!(count(&cluster, &deleted), 1);
    }
}

#[tokio::test]
async fn a_request_says_which_snapshots_and_for_how_long() {
    let cluster = Cluster::with_sessions(Vec::new(), &[Fate::Ignored]).await;
    let mut requests = requests(&cluster, ours(&delta("a")), Duration::from_millis(400));
    assert!(requests.open().await.is_err());
    let made = cluster.requests().into_values().next().unwrap();
    assert_eq!(made["spec"], json!({ "snapshots": ["a", "b"], "lifetimeSeconds": 60 }));
    requests.end().await.unwrap();
    assert!(cluster.requests().is_empty());
}

#[tokio::test]
async fn an_interrupted_answer_goes_on_in_the_same_session() {
    for end in [UNAVAILABLE, End::Break] {
        let (answer, asked) = played(
            vec![
                script(&[], end),
                script(&[&[(0, 1), (4, 2)]], end),
                script(&[], end),
                script(&[&[(9, 1)]], End::Whole),
            ],
            &[Fate::Ready("only")],
        )
        .await;
        assert_eq!(answer.unwrap(), [(0, 1), (4, 2), (9, 1)]);
        let offsets: Vec<_> = asked.iter().map(|asked| asked.offset / K).collect();
        assert_eq!(offsets, [0, 0, 6, 6]);
        assert!(asked.iter().all(|asked| asked.token == "only"));
    }
}

#[tokio::test]
async fn a_session_that_expired_under_way_is_replaced_once() {
    let (answer, asked) = played(
        vec![script(&[&[(0, 1)]], EXPIRED), script(&[&[(1, 1)]], End::Whole)],
        &[Fate::Ready("first"), Fate::Ready("second")],
    )
    .await;
    assert_eq!(answer.unwrap(), [(0, 1), (1, 1)]);
    let tokens: Vec<_> = asked.iter().map(|asked| &*asked.token).collect();
    assert_eq!(tokens, ["first", "second"]);

    // Refused at once, and twice in a row: another one would not help.
    let (answer, asked) = played(vec![script(&[], EXPIRED)], &[Fate::Ready("first")]).await;
    let refused = told(answer);
    assert!(refused.starts_with("UNAUTHENTICATED") && refused.contains("--lifetime"), "{refused}");
    assert_eq!(asked.len(), 1);
    let (answer, asked) = played(
        vec![script(&[&[(0, 1)]], EXPIRED), script(&[], EXPIRED)],
        &[Fate::Ready("first"), Fate::Ready("second")],
    )
    .await;
    assert!(told(answer).starts_with("UNAUTHENTICATED"));
    assert_eq!(asked.len(), 2);
}

#[tokio::test]
async fn a_session_that_is_given_is_neither_made_nor_replaced_nor_ended() {
    for (end, whole) in [(End::Whole, true), (EXPIRED, false)] {
        let cluster = Cluster::new(vec![script(&[&[(0, 1)]], end)]).await;
        let path = request_path("given");
        cluster.put(&path, json!({ "spec": { "snapshots": ["b"] }, "status": cluster.ready("t") }));
        let given = Which::Given("given".to_owned());
        let stop = Stop::unsignalled(MINUTE);
        let answer = ask(&cluster, given, allocated(), &stop).await;
        match whole {
            true => assert_eq!(answer.unwrap(), [(0, 1)]),
            false => assert!(told(answer).contains("shop/given has ended")),
        }
        assert!(cluster.requests().contains_key(&path));
        assert_eq!((count(&cluster, "POST"), count(&cluster, "DELETE")), (0, 0));
    }
}

#[tokio::test]
async fn a_session_that_failed_or_is_not_whole_is_told_and_taken_away() {
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
        let (answer, asked) = played(Vec::new(), &[Fate::Status(status)]).await;
        let told = told(answer);
        assert!(told.contains(why) && told.contains(NAME_PREFIX), "{told}");
        assert!(!told.contains("secret") && asked.is_empty(), "{told}");
    }
}

#[tokio::test]
async fn who_may_not_watch_looks_again_and_again() {
    let cluster =
        Cluster::with_sessions(vec![script(&[&[(0, 1)]], End::Whole)], &[Fate::Ready("t")]).await;
    cluster.fail(WATCH, 403);
    assert_eq!(asked(&cluster, allocated()).await.unwrap(), [(0, 1)]);
    assert_eq!(count(&cluster, &format!("GET {}/{NAME_PREFIX}", request_path(""))), 1);
}

#[tokio::test]
async fn what_a_request_waits_for_is_told_when_time_is_up() {
    let pending = |conditions: Value| json!({ "state": "Pending", "conditions": conditions });
    let waiting = json!([{
        "type": "Ready", "status": "False", "reason": "SnapshotNotReady", "message": "b is being cut",
        "lastTransitionTime": "2030-01-01T00:00:00Z",
    }]);
    for (fate, why) in [
        (Fate::Ignored, "is there a session manager?"),
        (Fate::Status(pending(json!([]))), "is Pending"),
        (Fate::Status(pending(waiting)), "is Pending: b is being cut"),
    ] {
        let cluster = Cluster::with_sessions(Vec::new(), &[fate]).await;
        let stop = Stop::unsignalled(Duration::from_millis(600));
        let told = told(ask(&cluster, ours(&allocated()), allocated(), &stop).await);
        assert!(told.contains("--timeout") && told.contains(why), "{told}");
        assert!(cluster.requests().is_empty());
    }
}

#[tokio::test]
async fn an_interrupt_at_any_time_leaves_nothing() {
    /// How far it is to come.
    type Reached = fn(&Cluster) -> bool;
    let stages: [(Fate, Reached); 3] = [
        // Being made: the answer comes too late to be waited for.
        (Fate::Ready("t"), |cluster| cluster.calls().iter().any(|call| call.starts_with("POST"))),
        (Fate::Ignored, |cluster| cluster.calls().iter().any(|call| call.contains("watch=true"))),
        (Fate::Ready("t"), |cluster| !cluster.asked().is_empty()),
    ];
    for (fate, reached) in stages {
        let scripts = vec![script(&[&[(0, 1)]], UNAVAILABLE); 9];
        let cluster = Cluster::with_sessions(scripts, &[fate]).await;
        let (signal, stop) = Stop::by_hand(MINUTE);
        tokio::spawn(interrupt(cluster.clone(), reached, signal));
        let error = ask(&cluster, ours(&allocated()), allocated(), &stop).await.unwrap_err();
        assert_eq!(error.to_string(), "interrupted");
        assert!(cluster.requests().is_empty(), "{:?}", cluster.calls());
    }
}

async fn interrupt(cluster: Cluster, reached: fn(&Cluster) -> bool, signal: watch::Sender<bool>) {
    while !reached(&cluster) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    signal.send_replace(true);
    // The receiver takes a sender that is gone for the end of all signals.
    tokio::time::sleep(MINUTE).await;
}

#[tokio::test]
async fn a_request_whose_answer_is_late_or_lost_is_deleted_all_the_same() {
    // Late: the making is under way when all is over.
    let cluster = Cluster::with_sessions(Vec::new(), &[Fate::Ready("t")]).await;
    cluster.delay(Duration::from_millis(200));
    let mut late = requests(&cluster, ours(&allocated()), MINUTE);
    let cut = tokio::time::timeout(Duration::from_millis(50), late.open()).await;
    assert!(cut.is_err() && cluster.requests().is_empty());
    late.end().await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!((count(&cluster, "POST"), count(&cluster, "DELETE")), (1, 1));
    assert!(cluster.requests().is_empty());

    // Lost: it is made, and the answer is an error. The next attempt finds it.
    let cluster = Cluster::with_sessions(Vec::new(), &[Fate::Ready("t")]).await;
    cluster.lose_next_answer();
    let mut lost = requests(&cluster, ours(&allocated()), MINUTE);
    assert!(lost.open().await.is_err());
    assert_eq!(cluster.requests().len(), 1);
    let Ok(granted) = lost.open().await else { panic!("no session") };
    assert_eq!(granted.token, "t");
    assert_eq!((cluster.requests().len(), count(&cluster, "POST")), (1, 2));
    lost.end().await.unwrap();
    assert!(cluster.requests().is_empty());
}

#[tokio::test]
async fn what_is_refused_is_told_and_leaves_nothing_to_delete() {
    for (code, why) in [(403, "RBAC"), (422, "fails"), (404, "definitions of snapshot sessions")] {
        let cluster = Cluster::with_sessions(Vec::new(), &[]).await;
        cluster.fail(&request_path(""), code);
        let told = told(asked(&cluster, allocated()).await);
        assert!(told.starts_with("SnapshotSessionRequest shop/") && told.contains(why), "{told}");
        assert_eq!(count(&cluster, "DELETE"), 0);
    }
}

#[tokio::test]
async fn a_deletion_is_tried_again_and_one_that_is_refused_is_told_by_name() {
    for (code, left) in [(503, false), (403, true)] {
        let cluster = Cluster::with_sessions(Vec::new(), &[Fate::Ready("secret")]).await;
        let mut requests = requests(&cluster, ours(&allocated()), MINUTE);
        assert!(requests.open().await.is_ok());
        let path = cluster.requests().into_keys().next().unwrap();
        cluster.fail(&path, code);
        let outcome = requests.end().await;
        assert_eq!(cluster.requests().len(), usize::from(left));
        match outcome {
            Ok(()) => assert!(!left),
            Err(error) => {
                let (error, name) = (error.to_string(), path.rsplit('/').next().unwrap());
                assert!(left && error.contains(name) && error.contains("expires"), "{error}");
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
    let given = Which::Given("given".to_owned());
    let told = told(ask(&cluster, given, allocated(), &stop).await);
    assert!(told.contains("TLS with") && told.contains("SnapshotSessionRequest shop/given"));
    assert!(!told.contains("secret") && cluster.asked().is_empty());
}
