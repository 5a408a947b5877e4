//! VolumeSnapshotDeltas end to end, against an API server in this process with an aggregated one:
//! requests, resumption after interruptions, and refusals. No process, no socket.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Result;
use kube::client::Body;
use proptest::prelude::*;
use serde_json::{Value, json};
use tokio::time::Instant;
use tonic::codegen::http;

use super::super::block_map::{BlockMap, Query, Source, Window};
use super::aggregated::{Aggregated, Paging};
use super::resume::Resuming;
use super::tests::{MINUTE, allocated, delta, error_text, limits};
use grpc::proto::csi::v1::BlockMetadataType;
use storage::Extent;

const PATH: &str = "/apis/cbt.storage.k8s.io/v1alpha1/namespaces/shop/volumesnapshotdeltas";
const LIMIT: u64 = 256;

/// The response to one request, instead of a page.
type Other = (u16, Value);

#[derive(Clone, Default)]
struct Server(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    block_size: u64,
    capacity: Option<u64>,
    /// Numbers of blocks, ascending.
    blocks: Vec<u64>,
    /// Whether `continue` is the next possible block instead of the next block.
    vague: bool,
    /// Replace the next responses; `None` is a valid page.
    others: VecDeque<Option<Other>>,
    requests: Vec<Value>,
}

impl Server {
    fn new(block_size: u64, blocks: &[u64]) -> Self {
        let blocks = blocks.to_vec();
        let capacity = Some(block_size << 20);
        Self(Arc::new(Mutex::new(State { block_size, capacity, blocks, ..State::default() })))
    }

    /// Returns these responses first, one after the other.
    fn first(self, others: impl IntoIterator<Item = Option<Other>>) -> Self {
        self.with(|state| state.others = others.into_iter().collect())
    }

    fn with(self, change: impl FnOnce(&mut State)) -> Self {
        change(&mut self.0.lock().unwrap());
        self
    }

    /// Requested offsets and limits.
    fn requests(&self) -> Vec<(u64, u64)> {
        let requests = self.0.lock().unwrap().requests.clone();
        let number = |spec: &Value, field: &str| spec[field].as_u64().unwrap();
        requests.iter().map(|spec| (number(spec, "offset"), number(spec, "limit"))).collect()
    }

    fn client(&self) -> kube::Client {
        let server = self.clone();
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let server = server.clone();
            async move {
                assert_eq!((request.method().as_str(), request.uri().path()), ("POST", PATH));
                let body = request.into_body().collect_bytes().await.unwrap();
                let (code, body) = server.answer(serde_json::from_slice(&body).unwrap());
                let Some(code) = code else { return Err(std::io::Error::other("broken")) };
                let body =
                    Body::from(body.as_str().map_or(body.to_string(), str::to_owned).into_bytes());
                Ok(http::Response::builder().status(code).body(body).unwrap())
            }
        });
        kube::Client::new(service, "shop")
    }

    fn answer(&self, request: Value) -> (Option<u16>, Value) {
        assert_eq!((&request["apiVersion"], &request["kind"]), (&json!(API_VERSION), &json!(KIND)));
        assert_eq!(request["metadata"], json!({ "name": "b", "namespace": "shop" }));
        let mut state = self.0.lock().unwrap();
        let spec = request["spec"].clone();
        state.requests.push(spec.clone());
        if let Some(Some((code, body))) = state.others.pop_front() {
            return ((code > 0).then_some(code), body);
        }
        let offset = spec["offset"].as_u64().unwrap();
        let limit = match spec["limit"].as_u64().unwrap() {
            0 => LIMIT,
            limit => limit,
        };
        let mut left = state.blocks.iter().filter(|block| **block >= offset).copied();
        let blocks: Vec<_> = left.by_ref().take(limit as usize).collect();
        let next = match (left.next(), blocks.last()) {
            (Some(_), Some(last)) if state.vague => Some(last + 1),
            (next, _) => next,
        };
        (Some(201), page(state.block_size, &blocks, next, state.capacity))
    }
}

const API_VERSION: &str = "cbt.storage.k8s.io/v1alpha1";
const KIND: &str = "VolumeSnapshotDelta";

fn page(block_size: u64, blocks: &[u64], next: Option<u64>, capacity: Option<u64>) -> Value {
    let block = |offset: &u64| json!({ "offset": offset, "blockSizeBytes": block_size });
    let mut status = json!({
        "state": if next.is_some() { "Continue" } else { "Completed" },
        "limit": LIMIT,
        "offset": 0,
        "continue": next.unwrap_or(0),
        "changedBlocks": blocks.iter().map(block).collect::<Vec<_>>(),
    });
    if let Some(capacity) = capacity {
        status["volumeSizeBytes"] = json!(capacity);
    }
    object(status)
}

fn object(status: Value) -> Value {
    json!({
        "apiVersion": API_VERSION, "kind": KIND, "metadata": { "name": "b" },
        "spec": { "targetVolumeSnapshotName": "b" }, "status": status,
    })
}

/// A Status of the aggregated server.
fn refusal(code: u16, message: &str, retry_after: u32) -> Option<Other> {
    // The kind of the object that the message names.
    let kind = message.split(' ').next().filter(|word| word.ends_with('s'));
    let details = json!({ "group": "cbt.storage.k8s.io", "kind": kind.unwrap_or("volumesnapshotdeltas"),
        "retryAfterSeconds": retry_after });
    Some((
        code,
        json!({ "kind": "Status", "status": "Failure", "code": code, "message": message, "details": details }),
    ))
}

/// The connection breaks.
fn broken() -> Option<Other> {
    Some((0, Value::Null))
}

struct Request {
    query: Query,
    window: Window,
    paging: Paging,
    timeout: Duration,
}

impl Default for Request {
    fn default() -> Self {
        let (window, paging) = (Window::default(), Paging::default());
        Self { query: delta("a"), window, paging, timeout: MINUTE }
    }
}

fn source(server: &Server, listing: Request) -> Result<Resuming<Aggregated>> {
    let Request { query, window, paging, timeout } = listing;
    let aggregated = Aggregated::new(server.client(), "shop", &query, window, paging)?;
    Ok(Resuming::new(aggregated, limits(timeout)))
}

/// A complete listing: offsets and lengths in bytes, and its shape.
async fn whole(source: impl Source) -> Result<(Vec<(u64, u64)>, BlockMetadataType, Option<u64>)> {
    let mut map = BlockMap::new(source);
    let mut all = Vec::new();
    while let Some(extents) = map.next().await? {
        all.extend(extents.into_iter().map(|Extent { offset, length }| (offset, length)));
    }
    let shape = map.shape().unwrap();
    Ok((all, shape.block_metadata_type, shape.capacity_bytes))
}

async fn read(server: &Server, listing: Request) -> Result<Vec<(u64, u64)>> {
    Ok(whole(source(server, listing)?).await?.0)
}

async fn refused(server: &Server, listing: Request) -> String {
    error_text(read(server, listing).await.map(|_| Vec::new()))
}

const K: u64 = 4096;

fn pages_of(size: u64) -> Request {
    Request { paging: Paging { size, secret: None }, ..Request::default() }
}

#[tokio::test]
async fn pages_are_requested_until_none_follows() {
    let server = Server::new(K, &[0, 4, 5, 9]);
    let (extents, style, capacity) = whole(source(&server, pages_of(2)).unwrap()).await.unwrap();
    assert_eq!(extents, [(0, K), (4 * K, 2 * K), (9 * K, K)]);
    assert_eq!((style, capacity), (BlockMetadataType::VariableLength, Some(K << 20)));
    assert_eq!(server.requests(), [(0, 2), (5, 2)]);
}

#[tokio::test]
async fn a_request_names_snapshots_and_secret_but_no_limit() {
    let server = Server::new(K, &[1]);
    for (query, base) in [(delta("a"), Some("a")), (allocated(), None)] {
        let paging = Paging { secret: Some("key".to_owned()), ..Paging::default() };
        read(&server, Request { query, paging, ..Request::default() }).await.unwrap();
        let request = server.0.lock().unwrap().requests.pop().unwrap();
        assert_eq!(request["targetVolumeSnapshotName"], "b");
        assert_eq!(request.get("baseVolumeSnapshotName").and_then(Value::as_str), base);
        assert_eq!(request["secretRef"], json!({ "name": "key" }));
        assert_eq!((&request["limit"], &request["offset"]), (&json!(0), &json!(0)));
    }
}

#[tokio::test]
async fn the_smaller_of_two_limits_applies() {
    for (size, max_results, limit) in [(0, 7, 7), (3, 0, 3), (3, 7, 3), (7, 3, 3)] {
        let server = Server::new(K, &[1]);
        let window = Window { max_results, ..Window::default() };
        read(&server, Request { window, ..pages_of(size) }).await.unwrap();
        assert_eq!(server.requests(), [(0, limit)]);
    }
}

#[tokio::test]
async fn an_interrupted_listing_resumes_with_the_missing_page() {
    let blocks: Vec<u64> = (0..10).map(|n| n * 2).collect();
    let later = |code| refusal(code, "later", 0);
    let unavailable = Some((503, json!("service unavailable\n")));
    let server = Server::new(K, &blocks).first([
        later(503),
        None,
        broken(),
        broken(),
        None,
        later(429),
        later(504),
        None,
        unavailable,
        later(500),
        refusal(409, "not ready yet", 1),
        None,
    ]);
    let answer = read(&server, pages_of(3)).await.unwrap();
    assert_eq!(answer, blocks.iter().map(|block| (block * K, K)).collect::<Vec<_>>());
    let offsets: Vec<_> = server.requests().iter().map(|request| request.0).collect();
    assert_eq!(offsets, [0, 0, 6, 6, 6, 12, 12, 12, 18, 18, 18, 18]);
}

#[tokio::test]
async fn a_retry_waits_as_long_as_the_server_requires() {
    let server = Server::new(K, &[1]).first([refusal(429, "too many", 1)]);
    let begin = Instant::now();
    read(&server, Request::default()).await.unwrap();
    assert!(begin.elapsed() >= Duration::from_secs(1), "{:?}", begin.elapsed());
    let server = Server::new(K, &[1]).first([refusal(429, "too many", 40)]);
    let listing = Request { timeout: Duration::from_secs(30), ..Request::default() };
    let error_text = refused(&server, listing).await;
    assert!(error_text.contains("--timeout") && error_text.contains("too many"), "{error_text}");
    assert_eq!(server.requests().len(), 1);
}

#[tokio::test]
async fn a_refusal_has_a_next_step_and_is_not_retried() {
    let missing = Some((404, json!("404 page not found\n")));
    let failed = |error: &str| Some((201, object(json!({ "state": "Failed", "error": error }))));
    for (answer, words) in [
        (refusal(404, "volumesnapshots \"b\" is gone", 0), &["\"b\" is gone", "-n shop"][..]),
        (refusal(404, "driverdiscoveries \"d\" is gone", 0), &["\"d\" is gone"]),
        (missing, &["404 page not found", "docs/reference/aggregated-api.md", "--api metadata"]),
        (refusal(403, "no", 0), &["no; ", "`create` on `volumesnapshotdeltas`", "\"shop\""]),
        (refusal(401, "who?", 0), &["credentials"]),
        (refusal(422, "spec.limit: too much", 0), &["spec.limit: too much"]),
        (refusal(409, "is being deleted", 0), &["is being deleted"]),
        (refusal(501, "d.example lists no blocks", 0), &["lists no blocks", "full backups"]),
        // Unreachable at first.
        (broken(), &["VolumeSnapshotDelta of shop/a and b"]),
        // Of the driver.
        (failed("FAILED_PRECONDITION: base_snapshot_id: no record"), &["no record", "full backup"]),
        (failed("NOT_FOUND: no such snapshot"), &["is Failed: NOT_FOUND: no such snapshot"]),
        (failed("something else"), &["is Failed: something else"]),
        (failed(""), &["gave no reason"]),
    ] {
        let server = Server::new(K, &[1]).first([answer]);
        let error_text = refused(&server, Request::default()).await;
        assert!(words.iter().all(|word| error_text.contains(word)), "{error_text}");
        assert_eq!(server.requests().len(), 1, "{error_text}");
    }
}

#[tokio::test]
async fn an_invalid_page_is_an_error_of_the_server() {
    let capacity = Some(1 << 40);
    let block = |offset: u64, size: u64| json!({ "offset": offset, "blockSizeBytes": size });
    let blocks =
        |blocks: &[Value]| object(json!({ "state": "Completed", "changedBlocks": blocks }));
    let mut without = page(K, &[1], None, capacity);
    without.as_object_mut().unwrap().remove("status");
    for (answer, words) in [
        (page(K, &[2, 1], None, capacity), "block 1 is out of order"),
        (page(K, &[2, 2], None, capacity), "block 2 is out of order"),
        (page(0, &[2], None, capacity), "0 bytes"),
        (blocks(&[block(1, K), block(2, 2 * K)]), "several sizes"),
        (blocks(&[block(u64::MAX, K)]), "no volume has a block"),
        (blocks(&[block(1 << 60, 1 << 60)]), "no volume has a block"),
        (page(K, &[1, 2], Some(2), capacity), "does not advance: the minimum is 3"),
        (page(K, &[], Some(0), capacity), "does not advance: the minimum is 1"),
        (page(K, &[1, 2, 3, 4], None, capacity), "4 blocks, but 3"),
        (without, "no status"),
    ] {
        let server = Server::new(K, &[1]).first([Some((201, answer))]);
        let error_text = refused(&server, pages_of(3)).await;
        assert!(error_text.contains("response of the aggregated API server"), "{error_text}");
        assert!(error_text.contains(words), "{error_text}");
    }
    // Past the end, as in every API.
    let beyond = page(K, &[(1 << 20) + 1], None, Some(K << 20));
    let server = Server::new(K, &[]).first([Some((201, beyond))]);
    assert!(refused(&server, Request::default()).await.contains("past the end of the volume"));
}

#[tokio::test]
async fn a_later_page_is_checked_against_earlier_ones() {
    let first = page(K, &[5, 6], Some(9), Some(K << 20));
    for (second, words) in [
        (page(K, &[8], None, Some(K << 20)), "block 8 is out of order: the minimum is 9"),
        (page(2 * K, &[9], None, Some(K << 20)), "several sizes"),
        (page(K, &[9], None, Some(K << 21)), "changed the block metadata type or the capacity"),
        (page(K, &[9], None, None), "changed the block metadata type or the capacity"),
    ] {
        let answers = [first.clone(), second].map(|page| Some((201, page)));
        let error_text = refused(&Server::new(K, &[]).first(answers), Request::default()).await;
        assert!(error_text.contains(words), "{error_text}");
    }
}

#[tokio::test]
async fn an_empty_page_may_be_followed_by_another() {
    let empty = page(8 * K, &[], Some(700), Some(K << 30));
    let server = Server::new(8 * K, &[800]).with(|state| state.capacity = Some(K << 30));
    let server = server.first([Some((201, empty))]);
    assert_eq!(read(&server, Request::default()).await.unwrap(), [(800 * 8 * K, 8 * K)]);
    assert_eq!(server.requests(), [(0, 0), (700, 0)]);
}

#[tokio::test]
async fn a_listing_may_be_empty_and_the_size_unknown() {
    for (blocks, capacity) in [(&[][..], Some(K << 20)), (&[], None), (&[1, 1 << 40], None)] {
        let server = Server::new(K, blocks).with(|state| state.capacity = capacity);
        let whole = whole(source(&server, Request::default()).unwrap()).await.unwrap();
        let extents: Vec<_> = blocks.iter().map(|block| (block * K, K)).collect();
        assert_eq!(whole, (extents, BlockMetadataType::VariableLength, capacity));
    }
}

#[tokio::test]
async fn the_last_block_ends_with_the_volume() {
    let server = Server::new(4 * K, &[0, 2]).with(|state| state.capacity = Some(9 * K));
    assert_eq!(read(&server, Request::default()).await.unwrap(), [(0, 4 * K), (8 * K, K)]);
}

#[tokio::test]
async fn an_invalid_window_is_refused_by_name() {
    let server = Server::new(K, &[1]);
    for (starting_offset, max_results, flag) in
        [(-1, 0, "--starting-offset"), (0, -1, "--max-results")]
    {
        let window = Window { starting_offset, max_results };
        assert!(refused(&server, Request { window, ..Request::default() }).await.contains(flag));
    }
    assert!(server.requests().is_empty());
    let window = Window { starting_offset: (K << 20) as i64 + 1, max_results: 0 };
    let error_text = refused(&server, Request { window, ..Request::default() }).await;
    assert!(error_text.contains("--starting-offset must lie within"), "{error_text}");
    let handle = Request { query: delta("Handle/7"), ..Request::default() };
    let error_text = refused(&server, handle).await;
    assert!(error_text.contains("--api metadata --base-id accepts the CSI handle"));
}

/// The listing of the streaming API (docs/reference/driver.md): from the block that contains the
/// offset.
fn expected(blocks: &[u64], size: u64, from: u64) -> Vec<(u64, u64)> {
    let mut all: Vec<(u64, u64)> = Vec::new();
    for block in blocks.iter().filter(|block| (**block + 1) * size > from) {
        let offset = block * size;
        match all.last_mut() {
            Some((last, length)) if size == K && *last + *length == offset => *length += size,
            _ => all.push((offset, size)),
        }
    }
    all
}

fn on_runtime<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

proptest! {
    #[test]
    fn pages_from_any_offset_equal_one_stream(
        blocks in prop::collection::btree_set(0..60u64, 0..40),
        size in prop::sample::select(vec![K, 4 * K]),
        limit in 0..9u64,
        vague in any::<bool>(),
        from in 0..64 * 4 * K,
    ) {
        let blocks: Vec<u64> = blocks.into_iter().collect();
        let capacity = 64 * size;
        let from = from.min(capacity);
        let server = Server::new(size, &blocks).with(|state| {
            (state.vague, state.capacity) = (vague, Some(capacity));
        });
        let window = Window { starting_offset: from as i64, max_results: 0 };
        let listing = Request { window, ..pages_of(limit) };
        let listed = on_runtime(async { whole(source(&server, listing).unwrap()).await });
        let (answer, style, _) = listed.unwrap();
        // Adjacent blocks of 4 KiB are one extent, also across pages.
        if size > K && !answer.is_empty() {
            prop_assert_eq!(style, BlockMetadataType::FixedLength);
        }
        prop_assert_eq!(answer, expected(&blocks, size, from));
    }
}
