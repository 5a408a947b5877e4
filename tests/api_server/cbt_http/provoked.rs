//! With a fake driver, for responses that ours never gives.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use support::cluster::shared;

use csi_loopback::kubernetes::cbt_http::ProblemKind;
use csi_loopback::proto::csi::v1 as csi;
use prost::Message;
use tonic::Code;

use super::rig::Stage;
use csi::controller_service_capability::rpc::Type as Rpc;
use support::cluster::cbt_http::with_secrets;
use support::cluster::fake_driver::Answers;

const SECRET: &str = "hunter2-hunter2-hunter2";

type Request = csi::ListSnapshotDeltasRequest;
type Answer = Result<csi::ListSnapshotDeltasResponse, (Code, String)>;
/// The received requests, in order.
type Seen = Arc<Mutex<Vec<Request>>>;

/// A driver with ListSnapshotDeltas.
fn listing(list: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> (Answers, Seen) {
    let seen = Seen::default();
    let noted = seen.clone();
    let answers: Answers = Arc::new(move |method, body| match method {
        "ControllerGetCapabilities" => Some(Ok(vec![able()])),
        "ListSnapshotDeltas" => {
            let request = Request::decode(body).unwrap();
            noted.lock().unwrap().push(request.clone());
            Some(list(&request).map(|answer| vec![answer.encode_to_vec()]))
        }
        _ => None,
    });
    (answers, seen)
}

fn able() -> Vec<u8> {
    let rpc =
        csi::controller_service_capability::Rpc { r#type: Rpc::ListBlockSnapshotDeltas.into() };
    let r#type = Some(csi::controller_service_capability::Type::Rpc(rpc));
    let capabilities = vec![csi::ControllerServiceCapability { r#type }];
    csi::ControllerGetCapabilitiesResponse { capabilities }.encode_to_vec()
}

fn block(offset: u64, block_size_bytes: u64) -> csi::BlockSnapshotChangedBlock {
    csi::BlockSnapshotChangedBlock { offset, block_size_bytes, token: None }
}

fn answer(blocks: Vec<csi::BlockSnapshotChangedBlock>, next_token: &str) -> Answer {
    Ok(csi::ListSnapshotDeltasResponse {
        volume_size_bytes: 1 << 40,
        next_token: next_token.into(),
        changed_blocks: blocks,
    })
}

/// A driver with its own paging: at most `portion` blocks per page, with opaque tokens.
fn paging(blocks: Vec<(u64, u64)>, portion: usize) -> impl Fn(&Request) -> Answer + Send + Sync {
    move |request: &Request| {
        let begin = match request.starting_token.as_str() {
            "" => 0,
            token => token.strip_prefix("place/").and_then(|at| at.parse().ok()).unwrap(),
        };
        let count = portion.min(request.max_entries as usize).min(blocks.len() - begin);
        let end = begin + count;
        let page = blocks[begin..end].iter().map(|(at, size)| block(*at, *size)).collect();
        let next = if end < blocks.len() { format!("place/{end}") } else { String::new() };
        answer(page, &next)
    }
}

fn many(count: u64) -> Vec<(u64, u64)> {
    (0..count).map(|n| (n * 3, 8192)).collect()
}

#[test]
fn a_list_is_read_from_its_start_for_each_page() {
    let Some(cluster) = shared() else { return };
    let blocks = many(100);
    let (answers, seen) = listing(paging(blocks.clone(), 40));
    let stage = Stage::new(cluster, false, answers, &[]);
    let calls = || std::mem::take(&mut *seen.lock().unwrap());
    assert_eq!(stage.desk.all(&stage.replica, ("b", "t"), 0, 4096), blocks);
    // One page of the driver, then two, then three.
    assert_eq!(calls().len(), 1 + 2 + 3);
    let from = |at: u64| blocks.iter().copied().filter(|(n, _)| *n >= at).collect::<Vec<_>>();
    for at in [200, 201, 1] {
        assert_eq!(stage.desk.all(&stage.replica, ("b", "t"), at, 7), from(at));
    }
    let request = calls();
    assert!(request[0].starting_token.is_empty() && request[0].max_entries == 4096);
    let page = stage.desk.page(&stage.replica, &stage.desk.page_request("b", "t", 0, 7));
    assert_eq!((page.changed_blocks.len(), page.next), (7, Some(19)));
    let request = calls();
    assert_eq!((request.len(), request[0].max_entries), (1, 7), "no more than is on the page");
    let behind = stage.desk.page(&stage.replica, &stage.desk.page_request("b", "t", 5000, 9));
    assert_eq!((behind.changed_blocks.len(), behind.next), (0, None));
}

#[test]
fn streams_are_preferred_over_the_list() {
    let Some(cluster) = shared() else { return };
    let (answers, seen) = listing(|_| panic!("the list is read"));
    let stage = Stage::new(cluster, true, answers, &[]);
    let page = stage.desk.page(&stage.replica, &stage.desk.page_request("b", "t", 0, 9));
    assert_eq!((page.changed_blocks.len(), page.next), (0, None));
    assert!(seen.lock().unwrap().is_empty());
}

/// A driver that reports fixed blocks of this size, and records each call's starting_offset.
fn fixed(size: i64, numbers: &'static [i64]) -> (Answers, Arc<Mutex<Vec<i64>>>) {
    let begun = Arc::<Mutex<Vec<i64>>>::default();
    let noted = begun.clone();
    let answers: Answers = Arc::new(move |method, body| {
        if method != "GetMetadataDelta" {
            return None;
        }
        let request = csi::GetMetadataDeltaRequest::decode(body).unwrap();
        noted.lock().unwrap().push(request.starting_offset);
        let rest = numbers.iter().filter(|number| (**number + 1) * size > request.starting_offset);
        let extent =
            |number: &i64| csi::BlockMetadata { byte_offset: number * size, size_bytes: size };
        let message = csi::GetMetadataDeltaResponse {
            block_metadata_type: csi::BlockMetadataType::FixedLength.into(),
            volume_capacity_bytes: 100 * size,
            block_metadata: rest.map(extent).collect(),
        };
        Some(Ok(vec![message.encode_to_vec()]))
    });
    (answers, begun)
}

#[test]
fn pages_of_large_blocks_cost_at_most_two_calls() {
    let Some(cluster) = shared() else { return };
    let (answers, begun) = fixed(65536, &[1, 5, 6, 50, 99]);
    let stage = Stage::new(cluster, true, answers, &[]);
    let page = |offset| {
        let page = stage.desk.page(&stage.replica, &stage.desk.page_request("b", "t", offset, 2));
        let blocks = page.changed_blocks.iter().map(|one| one.offset).collect::<Vec<_>>();
        (blocks, page.next, std::mem::take(&mut *begun.lock().unwrap()))
    };
    assert_eq!(page(0), (vec![1, 5], Some(6), vec![0]));
    assert_eq!(page(6), (vec![6, 50], Some(99), vec![6 * 4096, 6 * 65536]));
    assert_eq!(page(99), (vec![99], None, vec![99 * 4096, 99 * 65536]));
}

#[test]
fn an_offset_past_any_volume_is_refused_without_a_call() {
    let Some(cluster) = shared() else { return };
    let (answers, begun) = fixed(65536, &[1]);
    let stage = Stage::new(cluster, true, answers, &[]);
    for offset in [u64::MAX, 1 << 52, (1 << 51)] {
        let problem =
            stage.desk.problem(&stage.replica, &stage.desk.page_request("b", "t", offset, 2));
        assert_eq!(problem.code.as_deref(), Some("OUT_OF_RANGE"), "{problem:?}");
    }
    assert!(begun.lock().unwrap().is_empty());
}

#[test]
fn a_page_ends_before_blocks_of_another_size() {
    let Some(cluster) = shared() else { return };
    let blocks = vec![(0, 4096), (1, 4096), (7, 8192), (8, 8192), (9, 512), (20, 4096)];
    let (answers, _) = listing(paging(blocks.clone(), 100));
    let stage = Stage::new(cluster, false, answers, &[]);
    for limit in [1, 2, 3, 100] {
        assert_eq!(stage.desk.all(&stage.replica, ("b", "t"), 0, limit), blocks);
    }
    let page = stage.desk.page(&stage.replica, &stage.desk.page_request("b", "t", 0, 100));
    assert_eq!((page.changed_blocks.len(), page.next), (2, Some(7)));
}

#[test]
fn data_tokens_are_relayed() {
    let Some(cluster) = shared() else { return };
    let (answers, _) = listing(|_| {
        let issuance_time = prost_types::Timestamp { seconds: 1_657_682_370, nanos: 0 };
        let token = csi::BlockSnapshotChangedBlockToken {
            token: "ieEEQ9Bj7E6XR".into(),
            issuance_time: Some(issuance_time),
            ttl_seconds: 10_800,
        };
        let block = csi::BlockSnapshotChangedBlock { token: Some(token), ..block(0, 524_288) };
        answer(vec![block], "")
    });
    let stage = Stage::new(cluster, false, answers, &[]);
    let reply = stage.desk.ask(&stage.replica, &stage.desk.page_request("b", "t", 0, 1));
    assert_eq!(
        reply.json::<serde_json::Value>()["changedBlocks"][0],
        serde_json::json!({
            "offset": 0,
            "blockSizeBytes": 524_288,
            "dataToken": {
                "token": "ieEEQ9Bj7E6XR", "issuanceTime": "2022-07-13T03:19:30Z", "ttl": "3h0m0s",
            },
        })
    );
}

#[test]
fn a_repeated_page_token_is_an_error() {
    let Some(cluster) = shared() else { return };
    let check = |list: fn(&Request) -> Answer, words: &str| {
        let (answers, seen) = listing(list);
        let stage = Stage::new(cluster, false, answers, &[]);
        let problem =
            stage.desk.problem(&stage.replica, &stage.desk.page_request("b", "t", 1 << 20, 9));
        assert_eq!(problem.kind, ProblemKind::Driver, "{problem:?}");
        assert!(problem.message.contains(words), "{problem:?}");
        let calls = seen.lock().unwrap().len();
        assert!(calls < 50, "{calls} calls");
    };
    check(|_| answer(vec![block(1, 512)], "again"), "token of the same page");
    check(|_| answer(Vec::new(), "again"), "token of the same page");
    check(
        |request| answer(Vec::new(), if request.starting_token == "a" { "b" } else { "a" }),
        "have no block",
    );
    check(
        |request| {
            answer(vec![block(1, 512)], if request.starting_token == "a" { "b" } else { "a" })
        },
        "must be ascending",
    );
}

#[test]
fn an_endless_list_is_ended_by_the_timeout() {
    let Some(cluster) = shared() else { return };
    // Each page is valid, but their number is practically unlimited.
    let (answers, _) = listing(|request| {
        let at: u64 = request.starting_token.parse().unwrap_or_default();
        answer(vec![block(at, 512)], &(at + 1).to_string())
    });
    let stage = Stage::new(cluster, false, answers, &["--timeout", "2s"]);
    let reply = stage.desk.ask(&stage.replica, &stage.desk.page_request("b", "t", 1 << 40, 9));
    assert_eq!((reply.status, reply.problem().kind), (504, ProblemKind::TimedOut));
    // The driver's work ends with the response.
    let page = stage.desk.page(&stage.replica, &stage.desk.page_request("b", "t", 0, 1));
    assert_eq!((page.changed_blocks.len(), page.next), (1, Some(1)));
}

#[test]
fn an_invalid_page_of_a_driver_is_an_error() {
    let Some(cluster) = shared() else { return };
    let case = Arc::new(Mutex::new((Vec::new(), String::new())));
    let given = case.clone();
    let (answers, _) = listing(move |_| {
        let (blocks, token) = given.lock().unwrap().clone();
        answer(blocks, &token)
    });
    let stage = Stage::new(cluster, false, answers, &[]);
    for (blocks, token, words) in [
        (vec![block(0, 512), block(1, 512), block(2, 512)], "", "max_entries was 2"),
        (vec![block(3, 0)], "", "0 bytes"),
        (vec![block(3, 512), block(2, 512)], "", "must be ascending"),
        (vec![block(3, 512), block(3, 512)], "", "must be ascending"),
        (vec![block(u64::MAX, 512)], "", "past the end"),
        (vec![block(1 << 62, 2)], "", "past the end"),
        (vec![block(3, 512)], "x".repeat(5000).as_str(), "4096 bytes"),
    ] {
        *case.lock().unwrap() = (blocks, token.to_owned());
        let reply = stage.desk.ask(&stage.replica, &stage.desk.page_request("b", "t", 0, 2));
        let problem = reply.problem();
        assert_eq!((reply.status, problem.kind), (502, ProblemKind::Driver), "{problem:?}");
        assert!(problem.message.contains(words), "{problem:?}");
        assert_eq!(problem.code.as_deref(), Some("INTERNAL"));
    }
}

#[test]
fn extents_are_widened_and_read_only_as_needed() {
    let Some(cluster) = shared() else { return };
    let seen = Arc::new(Mutex::new(Vec::new()));
    let noted = seen.clone();
    // More extents than requested, one per message; the second one spans a million blocks.
    let extents = [(100, 50), (5000, 4096 << 20), (6 << 40, 1), (7 << 40, 4096)];
    let answers: Answers = Arc::new(move |method, body| {
        if method != "GetMetadataDelta" {
            return None;
        }
        let request = csi::GetMetadataDeltaRequest::decode(body).unwrap();
        let begin = request.starting_offset;
        noted.lock().unwrap().push(request);
        let rest = extents.iter().filter(|(at, length)| at + length > begin);
        let message = |(byte_offset, size_bytes): &(i64, i64)| {
            let extent = csi::BlockMetadata { byte_offset: *byte_offset, size_bytes: *size_bytes };
            csi::GetMetadataDeltaResponse {
                block_metadata_type: csi::BlockMetadataType::VariableLength.into(),
                volume_capacity_bytes: 8 << 40,
                block_metadata: vec![extent],
            }
            .encode_to_vec()
        };
        Some(Ok(rest.map(message).collect()))
    });
    let stage = Stage::new(cluster, true, answers, &[]);
    let page = |offset, limit| {
        let page =
            stage.desk.page(&stage.replica, &stage.desk.page_request("b", "t", offset, limit));
        let numbers: Vec<_> = page.changed_blocks.iter().map(|one| one.offset).collect();
        (numbers, page.next)
    };
    assert_eq!(page(0, 3), (vec![0, 1, 2], Some(3)));
    assert_eq!(page(3, 2), (vec![3, 4], Some(5)));
    let last = (5000 + (4096_u64 << 20) - 1) / 4096;
    assert_eq!(page(last, 1), (vec![last], Some((6_u64 << 40) / 4096)));
    assert_eq!(page(last + 1, 9), (vec![(6_u64 << 40) / 4096, (7_u64 << 40) / 4096], None));
    let request = seen.lock().unwrap();
    assert_eq!(request[1].starting_offset, 3 * 4096);
    assert_eq!(request[1].max_results, 3);
}

#[test]
fn a_driver_with_neither_call_is_unsupported() {
    let Some(cluster) = shared() else { return };
    let stage = Stage::new(cluster, false, Arc::new(|_, _| None), &[]);
    let reply = stage.desk.ask(&stage.replica, &stage.desk.page_request("b", "t", 0, 1));
    assert_eq!((reply.status, reply.problem().kind), (501, ProblemKind::Unsupported));
    assert!(reply.problem().message.contains("ListSnapshotDeltas"));
}

#[test]
fn secrets_reach_only_the_driver() {
    let Some(cluster) = shared() else { return };
    let repeated = format!("login with {SECRET} failed");
    let (answers, seen) = listing(move |_| Err((Code::PermissionDenied, repeated.clone())));
    let stage = Stage::new(cluster, false, answers, &[]);
    let request = with_secrets(stage.desk.page_request("b", "t", 0, 1), &[("password", SECRET)]);
    let problem = stage.desk.problem(&stage.replica, &request);
    assert_eq!(problem.code.as_deref(), Some("PERMISSION_DENIED"));
    assert_eq!(problem.message, "login with [hidden] failed");
    let seen = seen.lock().unwrap();
    assert_eq!(seen[0].secrets["password"], SECRET);
    assert_eq!((seen[0].from_snapshot_id.as_str(), seen[0].to_snapshot_id.as_str()), ("b", "t"));
    let log = stage.replica.served.process.log();
    assert!(log.contains("TRACE") && !log.contains(SECRET), "a secret is shown");
}

#[test]
fn requests_over_the_limit_are_refused() {
    let Some(cluster) = shared() else { return };
    // A first request waits in the driver until it is released.
    let (held, go) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (is_held, may_go) = (held.clone(), go.clone());
    let (answers, _) = listing(move |_| {
        is_held.store(true, Ordering::SeqCst);
        while !may_go.load(Ordering::SeqCst) {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        answer(vec![block(0, 512)], "")
    });
    let stage = Stage::new(cluster, false, answers, &["--max-streams", "1"]);
    let request = stage.desk.page_request("b", "t", 0, 1);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| stage.desk.ask(&stage.replica, &request));
        cluster.wait_for("the first one is with the driver", || {
            held.load(Ordering::SeqCst).then_some(())
        });
        let reply = stage.desk.ask(&stage.replica, &request);
        assert_eq!((reply.status, reply.problem().kind), (429, ProblemKind::Busy));
        assert!(reply.headers.contains_key("retry-after"));
        go.store(true, Ordering::SeqCst);
        assert_eq!(first.join().unwrap().status, 200);
    });
    assert_eq!(stage.desk.ask(&stage.replica, &request).status, 200);
}

#[test]
fn a_page_of_tiny_elements_takes_little_memory() {
    let Some(cluster) = shared() else { return };
    // 16 MiB of elements of two bytes, field 3 in both responses.
    let tiny = || [3 << 3 | 2, 0].repeat(8 << 20);
    let style = csi::GetMetadataDeltaResponse {
        block_metadata_type: csi::BlockMetadataType::VariableLength.into(),
        ..Default::default()
    };
    let stream = [style.encode_to_vec(), tiny()].concat();
    let answers = |method: &'static str, message: Vec<u8>| -> Answers {
        Arc::new(move |called, _| match called {
            "ControllerGetCapabilities" => Some(Ok(vec![able()])),
            _ => (called == method).then(|| Ok(vec![message.clone()])),
        })
    };
    for (streams, answers, words) in [
        (true, answers("GetMetadataDelta", stream), "no size"),
        (false, answers("ListSnapshotDeltas", tiny()), "max_entries was 9"),
    ] {
        let stage = Stage::new(cluster, streams, answers, &[]);
        let problem = stage.desk.problem(&stage.replica, &stage.desk.page_request("b", "t", 0, 9));
        assert!(problem.message.contains(words), "{problem:?}");
        let peak = support::abuse::peak(stage.replica.served.process.pid());
        println!("report: cbt-http: peak of {} MiB with a page of {words}", peak >> 20);
        assert!(peak < 128 << 20, "{peak} bytes");
    }
}
