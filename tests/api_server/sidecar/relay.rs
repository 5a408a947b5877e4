//! Streams: long ones, many concurrent ones, slow readers, and early ends.
//!
//! SIDECAR_STALL_SECONDS  seconds for which the client that stops reading does so (5)

use std::fs::{self, File};
use std::time::{Duration, Instant};
use support::cluster::shared;

use csi_loopback::backend::tracker::{Bitmap, RecordReader, RecordWriter};
use csi_loopback::backend::{Block, BlockRange, PoolKind};
use csi_loopback::proto::snapshotmetadata as api;
use nix::sys::signal::Signal;
use tonic::transport::Channel;
use tonic::{Code, Request, Status, Streaming};
use tonic_health::pb::health_check_response::ServingStatus;

use api::snapshot_metadata_client::SnapshotMetadataClient;
use support::abuse::resident;
use support::cluster::Cluster;
use support::cluster::sidecar::{channel, spawn};
use support::cluster::sidecar_rig::{MetadataRequest, Options, Rig, client_at, collect};
use support::driver::{PATIENCE, block, wait_for};
use support::{BLOCK, MIB};

/// Extents of the volume `large`: every second block.
pub fn extent(number: u64) -> (u64, u64) {
    (number * 2 * BLOCK, BLOCK)
}

/// A rig with snapshots `first` and `second` of a large, empty volume, whose delta has `extents`
/// extents: the product's own writer rewrites the second one's record while the driver is stopped.
pub fn with_long_delta<'a>(cluster: &'a Cluster, extents: u64, sidecar: &[&str]) -> Rig<'a> {
    let options = Options { pool: PoolKind::Reflink, sidecar, ..Options::default() };
    let mut rig = Rig::with(cluster, options);
    let bytes = (extents * 2 * BLOCK).next_multiple_of(1 << 30);
    let volume = rig.driver.volume("large", bytes, block());
    cluster.claim(&rig.namespace, "large", &rig.driver_name, &volume, bytes);
    let mut handle = String::new();
    for name in ["first", "second"] {
        handle = cluster.snapshot(&rig.namespace, name, "large", &rig.class).handle;
    }
    assert!(rig.driver.stop().success());
    let path = rig.driver.data_dir().join("records").join(format!("{handle}.0"));
    let header = RecordReader::open(File::open(&path).unwrap()).unwrap().header().clone();
    let made = path.with_extension("part");
    let mut writer = RecordWriter::new(File::create_new(&made).unwrap(), &header).unwrap();
    for number in 0..extents {
        writer
            .set(Bitmap::Changed, BlockRange::new(Block(number * 2), Block(number * 2 + 1)))
            .unwrap();
    }
    writer.finish().unwrap();
    fs::rename(&made, &path).unwrap();
    rig.driver.start_again();
    cluster.wait_for("the driver is found again", || rig.ask(rig.allocated("first")).ok());
    rig
}

/// A stream that the test reads message by message.
fn open(
    rig: &Rig<'_>,
    request: impl tonic::IntoRequest<api::GetMetadataDeltaRequest>,
) -> Streaming<api::GetMetadataDeltaResponse> {
    let mut client = rig.client();
    rig.cluster.block_on(client.get_metadata_delta(request)).unwrap().into_inner()
}

/// The next message, with a timeout.
fn next(
    rig: &Rig<'_>,
    stream: &mut Streaming<api::GetMetadataDeltaResponse>,
) -> Result<Option<Vec<(u64, u64)>>, Status> {
    let message =
        rig.cluster.block_on(async { tokio::time::timeout(PATIENCE, stream.message()).await });
    let message = message.expect("the next message, or an error, in time")?;
    Ok(message.map(|message| {
        let blocks = message.block_metadata.iter();
        blocks.map(|block| (block.byte_offset as u64, block.size_bytes as u64)).collect()
    }))
}

/// Reads to the end: the extents, and the final status.
fn drain(
    rig: &Rig<'_>,
    stream: &mut Streaming<api::GetMetadataDeltaResponse>,
) -> (Vec<(u64, u64)>, Result<(), Status>) {
    let mut extents = Vec::new();
    loop {
        match next(rig, stream) {
            Ok(Some(more)) => extents.extend(more),
            Ok(None) => return (extents, Ok(())),
            Err(status) => return (extents, Err(status)),
        }
    }
}

#[test]
fn a_stream_of_a_killed_driver_can_be_resumed() {
    let Some(cluster) = shared() else { return };
    let count = 1_000_000;
    let mut rig = with_long_delta(cluster, count, &[]);
    let mut stream = open(&rig, rig.delta("first", "second"));
    let mut found = next(&rig, &mut stream).unwrap().unwrap();
    rig.driver.kill();
    let (more, end) = drain(&rig, &mut stream);
    found.extend(more);
    let status = end.expect_err("a driver that was killed has not come to an end");
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    assert!(status.message().contains("starting_offset"), "{status:?}");
    assert!((found.len() as u64) < count, "all was sent before the driver was killed");
    rig.refused(rig.delta("first", "second"), Code::Unavailable, "");
    // The same sidecar finds the new driver.
    rig.driver.start_again();
    cluster.wait_for("the new driver", || rig.ask(rig.allocated("first")).ok());
    let mut rest = rig.delta("first", "second");
    let (offset, length) = *found.last().unwrap();
    rest.starting_offset = (offset + length) as i64;
    found.extend(rig.extents(rest));
    assert!(
        found.iter().copied().eq((0..count).map(extent)),
        "{} extents, with a seam",
        found.len()
    );
}

#[test]
#[ignore = "full tier"]
fn a_client_that_stops_reading_costs_little_memory() {
    let Some(cluster) = shared() else { return };
    let seconds = support::setting("SIDECAR_STALL_SECONDS");
    let count = 10_000_000;
    let rig = with_long_delta(cluster, count, &["--stall-timeout", "0s"]);
    // The first stream creates threads and buffers that remain, so measure afterwards.
    let mut request = rig.delta("first", "second");
    request.starting_offset = (extent(count - 100_000).0) as i64;
    assert_eq!(rig.extents(request).len(), 100_000);
    let pids = [rig.driver.pid(), rig.sidecar.process.pid()];
    let idle = pids.map(resident);
    let mut stream = open(&rig, rig.delta("first", "second"));
    next(&rig, &mut stream).unwrap().unwrap();
    let begun = Instant::now();
    let mut most = idle;
    while begun.elapsed() < Duration::from_secs(seconds.unwrap_or(5)) {
        std::thread::sleep(Duration::from_millis(100));
        for (most, pid) in most.iter_mut().zip(pids) {
            *most = (*most).max(resident(pid));
        }
    }
    for (name, (most, idle)) in ["driver", "sidecar"].iter().zip(most.into_iter().zip(idle)) {
        let above = most.saturating_sub(idle);
        println!(
            "report: {name}: {} KiB above idle ({} KiB) while the client does not read",
            above >> 10,
            idle >> 10
        );
        assert!(above <= 16 * MIB, "{name}: {most} bytes, {idle} when idle");
    }
    assert_eq!(rig.metric("csi_loopback_sidecar_streams_open "), 1.0);
}

#[test]
fn the_clients_deadline_reaches_the_driver() {
    let Some(cluster) = shared() else { return };
    let rig = with_long_delta(cluster, 2_000_000, &[]);
    let mut request = Request::new(rig.delta("first", "second"));
    request.set_timeout(Duration::from_secs(6));
    let mut stream = open(&rig, request);
    next(&rig, &mut stream).unwrap().unwrap();
    // The stream is not read until it has ended.
    let ended = |log: String| {
        let line =
            log.lines().rfind(|line| line.contains("rpc=\"GetMetadataDelta\"")).map(str::to_owned);
        line.is_some_and(|line| line.contains("DEADLINE_EXCEEDED") || line.contains("CANCELLED"))
    };
    wait_for("the driver's end of the call", || ended(rig.driver.log()));
    let (found, end) = drain(&rig, &mut stream);
    assert_eq!(
        end.expect_err("an answer cut short is no whole one").code(),
        Code::DeadlineExceeded
    );
    assert!(found.len() < 2_000_000);
}

#[test]
fn a_disconnected_client_ends_the_drivers_work() {
    let Some(cluster) = shared() else { return };
    let rig = with_long_delta(cluster, 2_000_000, &[]);
    let mut stream = open(&rig, rig.delta("first", "second"));
    next(&rig, &mut stream).unwrap().unwrap();
    drop(stream);
    let cancelled = |log: String| {
        log.lines()
            .any(|line| line.contains("rpc=\"GetMetadataDelta\"") && line.contains("CANCELLED"))
    };
    wait_for("the sidecar's end of the call", || cancelled(rig.sidecar.process.log()));
    wait_for("the driver's end of the call", || cancelled(rig.driver.log()));
    wait_for("no stream is open", || rig.metric("csi_loopback_sidecar_streams_open ") == 0.0);
}

#[test]
fn streams_over_the_limit_are_refused() {
    let Some(cluster) = shared() else { return };
    let rig = with_long_delta(cluster, 2_000_000, &["--max-streams", "2"]);
    let mut streams: Vec<_> = (0..2).map(|_| open(&rig, rig.delta("first", "second"))).collect();
    rig.refused(rig.delta("first", "second"), Code::ResourceExhausted, "--max-streams");
    drop(streams.pop());
    cluster.wait_for("room for another", || rig.ask(rig.allocated("first")).ok());
    let (found, end) = drain(&rig, &mut streams[0]);
    assert!(end.is_ok() && found.len() == 2_000_000);
}

#[test]
fn a_stream_that_is_not_read_ends_and_can_be_resumed() {
    let Some(cluster) = shared() else { return };
    let count = 1_000_000;
    let rig = with_long_delta(cluster, count, &["--stall-timeout", "3s"]);
    let mut stream = open(&rig, rig.delta("first", "second"));
    let first = next(&rig, &mut stream).unwrap().unwrap();
    wait_for("the stream has ended", || rig.metric("csi_loopback_sidecar_streams_open ") == 0.0);
    let (more, end) = drain(&rig, &mut stream);
    let end = end.expect_err("the stream is incomplete");
    assert_eq!(end.code(), Code::DeadlineExceeded, "{end:?}");
    assert!(end.message().contains("--stall-timeout"), "{end:?}");
    let received = [first, more].concat();
    let (offset, size) = *received.last().unwrap();
    let mut rest = rig.delta("first", "second");
    rest.starting_offset = (offset + size) as i64;
    assert_eq!(rig.extents(rest).len() + received.len(), count as usize);
}

/// Reads a whole stream; returns its duration.
async fn timed(
    client: SnapshotMetadataClient<Channel>,
    request: MetadataRequest,
) -> Result<(usize, Duration), Status> {
    let begun = Instant::now();
    let answer = collect(client, request).await?;
    Ok((answer.extents().len(), begun.elapsed()))
}

#[test]
fn many_streams_share_fairly() {
    let Some(cluster) = shared() else { return };
    let count = 200_000;
    let rig = with_long_delta(cluster, count, &[]);
    // Two connections with eight streams each, all started before the first one ends.
    let clients = [rig.client(), rig.client()];
    let request = MetadataRequest::from(rig.delta("first", "second"));
    let took = cluster.block_on(async {
        let mut all = tokio::task::JoinSet::new();
        for number in 0..16 {
            all.spawn(timed(clients[number % 2].clone(), request.clone()));
        }
        all.join_all().await
    });
    let mut times = Vec::new();
    for one in took {
        let (extents, time) = one.unwrap();
        assert_eq!(extents as u64, count);
        times.push(time);
    }
    let (least, most) = (times.iter().min().unwrap(), times.iter().max().unwrap());
    println!("report: 16 answers at once took {least:?} to {most:?} each");
    assert!(*most < *least * 4, "{times:?}");
}

#[test]
fn a_stalled_client_does_not_block_others() {
    let Some(cluster) = shared() else { return };
    let count = 1_000_000;
    let rig = with_long_delta(cluster, count, &[]);
    // More streams than the usual windows of an HTTP/2 connection allow.
    let idle: Vec<_> = (0..40)
        .map(|_| {
            let mut stream = open(&rig, rig.delta("first", "second"));
            next(&rig, &mut stream).unwrap().unwrap();
            stream
        })
        .collect();
    assert_eq!(rig.extents(rig.delta("first", "second")).len() as u64, count);
    assert_eq!(rig.metric("csi_loopback_sidecar_streams_open "), idle.len() as f64);
}

#[test]
fn termination_drains_streams_until_the_timeout() {
    let Some(cluster) = shared() else { return };
    let count = 1_000_000;
    let mut rig = with_long_delta(cluster, count, &["--drain-timeout", "20s"]);
    let mut reading = open(&rig, rig.delta("first", "second"));
    let mut slow = open(&rig, rig.delta("first", "second"));
    for stream in [&mut reading, &mut slow] {
        next(&rig, stream).unwrap().unwrap();
    }
    let client = rig.client();
    let request = MetadataRequest::from(rig.allocated("first"));
    rig.sidecar.process.signal(Signal::SIGTERM);
    wait_for("it is no longer ready", || rig.http("/health").starts_with("HTTP/1.1 503"));
    // A call that crosses the server's GOAWAY may still begin (RFC 9113, section 6.8).
    let refused = cluster.wait_for("a new call is refused", || {
        cluster.block_on(collect(client.clone(), request.clone())).err()
    });
    assert_eq!(refused.code(), Code::Unavailable, "{refused:?}");
    let (found, end) = drain(&rig, &mut reading);
    assert!(end.is_ok(), "{end:?}");
    assert!(found.len() as u64 > count / 2);
    // Resumes reading, but too slowly.
    let end = loop {
        match next(&rig, &mut slow) {
            Ok(Some(_)) => std::thread::sleep(Duration::from_millis(250)),
            Ok(None) => panic!("a slow answer became whole in the grace period"),
            Err(status) => break status,
        }
    };
    assert_eq!(end.code(), Code::Unavailable, "{end:?}");
    assert!(end.message().contains("starting_offset"), "{end:?}");
    let status = rig.sidecar.process.wait(PATIENCE).expect("it ends");
    assert!(status.success(), "{status:?}");
}

#[test]
fn a_new_certificate_interrupts_no_stream() {
    let Some(cluster) = shared() else { return };
    let count = 1_000_000;
    let rig = with_long_delta(cluster, count, &[]);
    let mut stream = open(&rig, rig.delta("first", "second"));
    next(&rig, &mut stream).unwrap().unwrap();
    let next_authority = support::cluster::tls::Authority::new("the next authority");
    // The same files with other content.
    next_authority.certify(rig.driver.scratch(), "sidecar");
    cluster.wait_for("the new certificate", || {
        let client = client_at(cluster, &rig.sidecar, &next_authority.pem());
        cluster.block_on(collect(client, rig.allocated("first").into())).ok()
    });
    let old = client_at(cluster, &rig.sidecar, &rig.authority.pem());
    assert!(cluster.block_on(collect(old, rig.allocated("first").into())).is_err());
    let (found, end) = drain(&rig, &mut stream);
    assert!(end.is_ok() && found.len() as u64 > count / 2, "{end:?}");
    assert_eq!(rig.metric("csi_loopback_sidecar_certificate_reload_failures_total "), 0.0);
}

/// The status of the whole server from the gRPC health service.
fn health(rig: &Rig<'_>) -> i32 {
    use tonic_health::pb::HealthCheckRequest;
    use tonic_health::pb::health_client::HealthClient;
    let channel = rig.cluster.block_on(async { channel(rig.sidecar.port, &rig.authority.pem()) });
    let request = HealthCheckRequest::default();
    let answer = rig.cluster.block_on(HealthClient::new(channel).check(request)).unwrap();
    answer.into_inner().status
}

#[test]
#[ignore = "full tier"]
fn a_late_or_restarted_driver_is_found() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::new(cluster);
    rig.snapshot("first");
    assert!(rig.driver.stop().success());
    rig.sidecar.process.stop();
    let kubeconfig = cluster.kubeconfig_of(&rig.own);
    rig.sidecar =
        spawn(cluster, &rig.driver.socket(), &kubeconfig, &rig.certificate, &["--timeout", "2s"]);
    wait_for("the HTTP endpoint", || {
        std::net::TcpStream::connect(("127.0.0.1", rig.sidecar.http_port)).is_ok()
    });
    assert!(rig.http("/health").starts_with("HTTP/1.1 503"));
    rig.refused(rig.allocated("first"), Code::Unavailable, "driver is not ready");
    let (serving, not_serving) = (ServingStatus::Serving as i32, ServingStatus::NotServing as i32);
    assert_eq!(health(&rig), not_serving);
    rig.driver.start_again();
    wait_for("it is ready", || rig.http("/health").starts_with("HTTP/1.1 200"));
    assert_eq!(rig.extents(rig.allocated("first")), []);
    rig.driver.kill();
    wait_for("it notices", || rig.http("/health").starts_with("HTTP/1.1 503"));
    assert_eq!(rig.metric("csi_loopback_sidecar_driver_ready "), 0.0);
    assert_eq!(health(&rig), not_serving);
    rig.driver.start_again();
    wait_for("it is ready again", || rig.http("/health").starts_with("HTTP/1.1 200"));
    wait_for("gRPC's health says so, too", || health(&rig) == serving);
    assert_eq!(rig.extents(rig.allocated("first")), []);
}

#[test]
fn repeated_requests_cost_no_api_server_calls() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::new(cluster);
    rig.restart_sidecar(&["--review-cache-ttl", "60s", "--base-reference", "either"]);
    let first = rig.snapshot("first");
    rig.snapshot("second");
    let request = [
        MetadataRequest::from(rig.allocated("first")),
        MetadataRequest::from(rig.delta_from("first", "second")),
        MetadataRequest::from(rig.delta_from(&first.handle, "second")),
    ];
    let all = |times: usize| {
        for request in std::iter::repeat_n(&request, times).flatten() {
            rig.ask(request.clone()).unwrap();
        }
    };
    // All tokens are new.
    all(1);
    let before = cluster.requests_by(&rig.own.user());
    assert!(before > 0);
    all(50);
    assert_eq!(cluster.requests_by(&rig.own.user()), before);
}
