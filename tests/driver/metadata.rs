//! Snapshot metadata over the wire: the content of a stream, its division into messages, and its
//! end.

use std::time::Duration;

use csi_loopback::backend::PoolKind;
use csi_loopback::proto::csi::v1 as csi;
use nix::sys::signal::Signal;
use support::driver::*;
use support::{BLOCK, GIB, MIB, path, pattern, run, write_direct, zero};
use tonic::{Code, Request, Status};

use csi::BlockMetadataType::{FixedLength, VariableLength};

const FIXED: [&str; 4] = ["--block-metadata-type", "fixed", "--block-size", "64Ki"];
const SMALLEST: [&str; 4] = ["--block-metadata-type", "fixed", "--block-size", "4Ki"];

fn from(snapshot_id: &str, offset: i64, max_results: i32) -> csi::GetMetadataAllocatedRequest {
    csi::GetMetadataAllocatedRequest {
        starting_offset: offset,
        max_results,
        ..allocated(snapshot_id)
    }
}

/// A raw volume with blocks 1, 2 and 9 written, and a snapshot of it.
fn sample(driver: &Driver) -> (String, String) {
    let volume = driver.volume("v", 64 * MIB, block());
    let device = driver.publish(&volume, &block());
    write_direct(&device, BLOCK, &pattern(1, 2 * BLOCK as usize));
    write_direct(&device, 9 * BLOCK, &pattern(2, BLOCK as usize));
    let snapshot = driver.snapshot("a", &volume);
    (volume, snapshot)
}

#[test]
fn extents_have_any_length_or_one_block_size() {
    with_driver(|driver| {
        let (volume, a) = sample(driver);
        let device = driver.target(&volume);
        write_direct(&device, 2 * BLOCK, &pattern(3, BLOCK as usize));
        write_direct(&device, 40 * BLOCK, &pattern(4, BLOCK as usize));
        let b = driver.snapshot("b", &volume);
        let odd = driver.volume("odd", MIB + BLOCK, block());
        driver.with_device(&odd, |device| write_direct(device, MIB, &pattern(5, BLOCK as usize)));
        let odd = driver.snapshot("odd", &odd);

        let answer = driver.ok(allocated(&a));
        assert_eq!((answer.kind, answer.capacity), (VariableLength, 64 * MIB));
        assert_eq!(answer.extents(), [(BLOCK, 2 * BLOCK), (9 * BLOCK, BLOCK)]);
        let answer = driver.ok(delta(&a, &b));
        assert_eq!((answer.kind, answer.capacity), (VariableLength, 64 * MIB));
        assert_eq!(answer.extents(), [(2 * BLOCK, BLOCK), (40 * BLOCK, BLOCK)]);

        driver.restart_with(&FIXED);
        let size = 64 << 10;
        let answer = driver.ok(allocated(&b));
        assert_eq!((answer.kind, answer.capacity), (FixedLength, 64 * MIB));
        assert_eq!(answer.extents(), [(0, size), (2 * size, size)]);
        let answer = driver.ok(delta(&a, &b));
        assert_eq!((answer.kind, answer.capacity), (FixedLength, 64 * MIB));
        assert_eq!(answer.extents(), [(0, size), (2 * size, size)]);
        // The size of a block divides the capacity.
        assert_eq!(driver.ok(allocated(&odd)).extents(), [(MIB, BLOCK)]);
    });
}

#[test]
fn a_stream_starts_at_the_requested_offset() {
    with_driver(|driver| {
        let (volume, a) = sample(driver);
        let (first, last) = ((BLOCK, 2 * BLOCK), (9 * BLOCK, BLOCK));
        let rest = (2 * BLOCK, BLOCK);
        let cases = [
            (0, vec![first, last]),
            (BLOCK - 1, vec![first, last]),
            (BLOCK, vec![first, last]),
            (BLOCK + 1, vec![first, last]),
            (2 * BLOCK, vec![rest, last]),
            (3 * BLOCK - 1, vec![rest, last]),
            (3 * BLOCK, vec![last]),
            (10 * BLOCK - 1, vec![last]),
            (10 * BLOCK, vec![]),
            (64 * MIB - 1, vec![]),
            (64 * MIB, vec![]),
        ];
        for (offset, expected) in cases {
            let answer = driver.ok(from(&a, offset as i64, 0));
            assert_eq!(answer.extents(), expected, "from {offset}");
            assert_eq!((answer.messages.len(), answer.capacity), (1, 64 * MIB), "from {offset}");
        }
        for offset in [-1, i64::MIN, 64 * MIB as i64 + 1, i64::MAX] {
            driver.refused(from(&a, offset, 0), Code::OutOfRange, "starting_offset");
            let request = csi::GetMetadataDeltaRequest { starting_offset: offset, ..delta(&a, &a) };
            driver.refused(request, Code::OutOfRange, "starting_offset");
        }

        write_direct(&driver.target(&volume), 16 * BLOCK, &pattern(1, BLOCK as usize));
        let b = driver.snapshot("b", &volume);
        driver.restart_with(&FIXED);
        let size = 64 << 10;
        for (offset, expected) in [
            (0, vec![(0, size), (size, size)]),
            (size - 1, vec![(0, size), (size, size)]),
            (size, vec![(size, size)]),
            (size + 5000, vec![(size, size)]),
            (2 * size, vec![]),
        ] {
            assert_eq!(driver.ok(from(&b, offset as i64, 0)).extents(), expected, "from {offset}");
        }
    });
}

#[test]
fn an_impossible_delta_is_refused_with_its_code() {
    with_driver(|driver| {
        let (volume, a) = sample(driver);
        let b = driver.snapshot("b", &volume);
        let other = driver.volume("w", MIB, block());
        let foreign = driver.snapshot("foreign", &other);
        let unknown = "snap-x-0123456789abcdef";
        driver.refused(delta(&b, &a), Code::InvalidArgument, "base_snapshot_id");
        driver.refused(delta(&foreign, &b), Code::InvalidArgument, "base_snapshot_id");
        driver.refused(delta(unknown, &b), Code::NotFound, unknown);
        driver.refused(delta(&a, unknown), Code::NotFound, unknown);
        driver.refused(allocated(unknown), Code::NotFound, unknown);
        for max_results in [-1, i32::MIN] {
            driver.refused(from(&a, 0, max_results), Code::InvalidArgument, "max_results");
            let request = csi::GetMetadataDeltaRequest { max_results, ..delta(&a, &b) };
            driver.refused(request, Code::InvalidArgument, "max_results");
        }

        // A deleted snapshot remains a base, but cannot be a target.
        driver.ok(delete_snapshot(&a));
        assert!(driver.ok(delta(&a, &b)).extents().is_empty());
        driver.refused(delta(&a, &a), Code::NotFound, &a);
        driver.refused(allocated(&a), Code::NotFound, &a);

        driver.ok(modify(&volume, &[("changeTracking", "false")]));
        let untracked = driver.snapshot("c", &volume);
        driver.refused(delta(&b, &untracked), Code::FailedPrecondition, "full backup");
        assert_eq!(driver.ok(allocated(&untracked)).extents().len(), 2);
    });
}

#[test]
fn an_empty_stream_is_one_message_with_type_and_capacity() {
    with_driver(|driver| {
        let (volume, a) = sample(driver);
        let empty = driver.volume("empty", 5 * MIB, block());
        let empty = driver.snapshot("empty", &empty);
        let b = driver.snapshot("b", &volume);
        for flags in [&[][..], &FIXED] {
            driver.restart_with(flags);
            let kind = if flags.is_empty() { VariableLength } else { FixedLength };
            let answer = |capacity| Metadata {
                kind,
                capacity,
                messages: vec![vec![]],
                largest: prost::Message::encoded_len(&csi::GetMetadataDeltaResponse {
                    block_metadata_type: kind.into(),
                    volume_capacity_bytes: capacity as i64,
                    block_metadata: Vec::new(),
                }),
            };
            assert_eq!(driver.ok(delta(&a, &a)), answer(64 * MIB));
            assert_eq!(driver.ok(delta(&a, &b)), answer(64 * MIB));
            assert_eq!(driver.ok(allocated(&empty)), answer(5 * MIB));
        }
    });
}

#[test]
fn a_message_has_at_most_the_requested_extents() {
    with_driver(|driver| {
        let volume = driver.volume("v", 64 * MIB, block());
        let device = driver.publish(&volume, &block());
        let count = 5000;
        write_direct(&device, 0, &pattern(1, 2 * count * BLOCK as usize));
        let a = driver.snapshot("a", &volume);
        (0..count as u64).for_each(|number| zero(&device, (2 * number + 1) * BLOCK, BLOCK, true));
        let b = driver.snapshot("b", &volume);
        let even: Vec<_> = (0..count as u64).map(|number| (2 * number * BLOCK, BLOCK)).collect();
        let odd: Vec<_> = even.iter().map(|(offset, length)| (offset + BLOCK, *length)).collect();
        for max_results in [0, 1, 7, 4096, count as i32, i32::MAX] {
            let request = csi::GetMetadataDeltaRequest { max_results, ..delta(&a, &b) };
            let (all, changed) = (driver.ok(from(&b, 0, max_results)), driver.ok(request));
            assert_eq!((all.extents(), changed.extents()), (even.clone(), odd.clone()));
            let most = if max_results == 0 { count } else { max_results as usize };
            let sizes: Vec<_> = all.messages.iter().map(Vec::len).collect();
            assert!(sizes.iter().all(|size| (1..=most).contains(size)), "{max_results}: {sizes:?}");
            if most < count {
                // All except the last are full: a client that requests many gets them in one
                // message.
                assert_eq!(sizes.len(), count.div_ceil(most));
            }
        }
        // Interrupted anywhere and resumed after the last extent, the parts equal the whole.
        let (mut parts, mut offset) = (Vec::new(), 0);
        while parts.len() < count {
            let answer = driver.ok(from(&b, offset as i64, 1024));
            parts.extend(answer.messages[0].iter().copied());
            offset = parts.last().map(|(offset, length)| offset + length).unwrap();
        }
        assert_eq!(parts, even);
    });
}

#[test]
fn no_message_of_a_large_stream_exceeds_the_grpc_limit() {
    let Some(driver) = driver_with(PoolKind::Reflink, &SMALLEST) else { return };
    let bytes = 2 * GIB;
    let volume = driver.volume("v", bytes, block());
    // The same 64 MiB repeatedly: as many blocks as would fill more than 4 MiB of message.
    let source = driver.data_dir().join("source");
    std::fs::write(&source, pattern(1, 64 << 20)).unwrap();
    let backing = driver.backing_file(&volume);
    for at in (0..bytes).step_by(64 << 20) {
        let reflink = format!("reflink {} 0 {at} {}", path(&source), 64 << 20);
        run("xfs_io", &["-c", &reflink, path(&backing)]);
    }
    let snapshot = driver.snapshot("a", &volume);
    let answer = driver.ok(from(&snapshot, 0, i32::MAX));
    let extents = answer.extents();
    assert_eq!(extents.len() as u64, bytes / BLOCK);
    assert!(extents.iter().enumerate().all(|(n, e)| *e == (n as u64 * BLOCK, BLOCK)));
    assert!(answer.largest < 4 << 20, "{} bytes in a message", answer.largest);
    assert!(answer.messages.len() < 20, "{} messages", answer.messages.len());
}

/// A snapshot whose stream has 16384 extents: far more than an HTTP/2 window fits, one by one.
fn long_answer(driver: &Driver) -> (String, String) {
    let volume = driver.volume("v", 64 * MIB, block());
    let content = pattern(1, 64 << 20);
    driver.with_device(&volume, |device| write_direct(device, 0, &content));
    let snapshot = driver.snapshot("a", &volume);
    (volume, snapshot)
}

/// Reads the first message, waits for `pause`, and reads on: the number of extents, and the end.
fn read_slowly(
    driver: &Driver,
    timeout: Option<Duration>,
    snapshot_id: &str,
    pause: impl AsyncFnOnce(),
) -> (usize, Result<(), Status>) {
    let mut request = Request::new(from(snapshot_id, 0, 1));
    if let Some(timeout) = timeout {
        request.set_timeout(timeout);
    }
    driver.block_on(async {
        let mut stream =
            driver.metadata().get_metadata_allocated(request).await.unwrap().into_inner();
        let mut extents = stream.message().await.unwrap().unwrap().block_metadata.len();
        pause().await;
        loop {
            match stream.message().await {
                Ok(Some(message)) => extents += message.block_metadata.len(),
                Ok(None) => return (extents, Ok(())),
                Err(status) => return (extents, Err(status)),
            }
        }
    })
}

#[test]
fn a_stream_that_exceeds_its_deadline_ends_with_an_error() {
    let Some(driver) = driver_with(PoolKind::Image, &SMALLEST) else { return };
    let (_, snapshot) = long_answer(&driver);
    let timeout = Duration::from_secs(3);
    let pause = async || tokio::time::sleep(timeout + Duration::from_millis(500)).await;
    let (extents, end) = read_slowly(&driver, Some(timeout), &snapshot, pause);
    assert!((1..16384).contains(&extents), "{extents}");
    assert_eq!(end.unwrap_err().code(), Code::DeadlineExceeded);
    // A slow client alone is not an error.
    let (extents, end) = read_slowly(&driver, None, &snapshot, pause);
    assert_eq!((extents, end.is_ok()), (16384, true), "{end:?}");
}

#[test]
fn a_stream_aborted_by_a_shutdown_ends_with_an_error() {
    let flags = [&SMALLEST[..], &["--drain-timeout", "300ms"]].concat();
    let Some(mut driver) = driver_with(PoolKind::Image, &flags) else { return };
    let (_, snapshot) = long_answer(&driver);
    let (extents, end) = read_slowly(&driver, None, &snapshot, async || {
        driver.signal(Signal::SIGTERM);
        // The drain timeout starts when the driver receives the signal.
        while !driver.log().contains("draining") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        tokio::time::sleep(Duration::from_millis(600)).await;
    });
    assert!((1..16384).contains(&extents), "{extents}");
    let code = end.expect_err("an aborted stream looks complete").code();
    assert!(matches!(code, Code::Unavailable | Code::Unknown | Code::Cancelled), "{code:?}");
    assert!(driver.wait().success());

    // Also if no error could be sent to the client.
    driver.start_again();
    let (extents, end) =
        read_slowly(&driver, None, &snapshot, async || driver.signal(Signal::SIGKILL));
    assert!((1..16384).contains(&extents), "{extents}");
    end.expect_err("an aborted stream looks complete");
    driver.wait();
}

#[test]
fn a_stream_continues_while_its_volume_changes() {
    for kind in support::ALL_KINDS {
        let Some(driver) = driver_with(kind, &SMALLEST) else { return };
        let (volume, a) = long_answer(&driver);
        let (extents, end) = read_slowly(&driver, None, &a, async || {
            // Not on the runtime of the stream.
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let b = driver.snapshot("b", &volume);
                    assert!(driver.ok(delta(&a, &b)).extents().is_empty());
                    driver.copy("restored", Source::Snapshot(&a), block());
                    driver.ok(delete_volume(&volume));
                    driver.ok(delete_snapshot(&a));
                });
            });
        });
        assert_eq!((extents, end.is_ok()), (16384, true), "{end:?}");
    }
}

#[test]
fn clients_that_do_not_read_block_no_other_client() {
    let Some(driver) = driver_with(PoolKind::Image, &SMALLEST) else { return };
    let (_, snapshot) = long_answer(&driver);
    let streams: Vec<_> = (0..70)
        .map(|_| {
            let request = from(&snapshot, 0, 1);
            driver.block_on(async {
                driver.metadata().get_metadata_allocated(request).await.unwrap().into_inner()
            })
        })
        .collect();
    driver.ok(csi::ProbeRequest {});
    driver.snapshot("b", &driver.volume("w", MIB, block()));
    drop(streams);
    wait_for("the log reports streams whose client disconnected", || {
        driver.log().matches("CANCELLED").count() >= 70
    });
}
