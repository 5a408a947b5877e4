//! Fault injection: each rule works as in docs/reference/driver.md, through the real socket, and no
//! rule has an effect without `--enable-faults`.

use std::time::{Duration, Instant};

use csi_loopback::backend::PoolKind;
use csi_loopback::proto::csi::v1 as csi;
use support::driver::*;
use support::requests::from_source;
use support::{BLOCK, MIB, have_root, pattern, write_direct};
use tonic::Code;

/// Extents in the delta of `two_snapshots`.
const EXTENTS: u64 = 10;

/// A driver with these rules; skipped without root.
fn with_faults(rules: &[&str], run: impl FnOnce(&mut Driver)) {
    if !have_root() {
        return;
    }
    let mut flags = vec!["--enable-faults"];
    flags.extend(rules.iter().flat_map(|rule| ["--fault", rule]));
    run(&mut Driver::with(PoolKind::Image, &flags));
}

/// Two snapshots of a volume, with this number of extents between them.
fn two_snapshots(driver: &Driver) -> (String, String) {
    let volume = driver.volume("v", 16 * MIB, block());
    let first = driver.snapshot("first", &volume);
    driver.with_device(&volume, |device| {
        for extent in 0..EXTENTS {
            write_direct(device, extent * 2 * BLOCK, &pattern(extent, BLOCK as usize));
        }
    });
    (first, driver.snapshot("second", &volume))
}

/// The received extents of a delta, and the code at its end.
fn receive(driver: &Driver, base: &str, target: &str, from: u64) -> (Vec<u64>, Option<Code>) {
    let request = csi::GetMetadataDeltaRequest {
        starting_offset: from as i64,
        max_results: 4,
        ..delta(base, target)
    };
    driver.block_on(async {
        let mut offsets = Vec::new();
        let mut stream = match driver.metadata().get_metadata_delta(request).await {
            Ok(answer) => answer.into_inner(),
            Err(status) => return (offsets, Some(status.code())),
        };
        loop {
            match stream.message().await {
                Ok(Some(message)) => offsets
                    .extend(message.block_metadata.iter().map(|block| block.byte_offset as u64)),
                Ok(None) => return (offsets, None),
                Err(status) => return (offsets, Some(status.code())),
            }
        }
    })
}

#[test]
fn an_aborted_stream_can_be_resumed() {
    with_faults(&["stream-abort,after=6,times=1,code=ABORTED"], |driver| {
        let (first, second) = two_snapshots(driver);
        let (mut offsets, code) = receive(driver, &first, &second, 0);
        assert_eq!((offsets.len(), code), (6, Some(Code::Aborted)));
        let (rest, code) = receive(driver, &first, &second, offsets[5] + BLOCK);
        assert_eq!(code, None);
        offsets.extend(rest);
        let whole: Vec<u64> = (0..EXTENTS).map(|extent| extent * 2 * BLOCK).collect();
        assert_eq!(offsets, whole);
        assert!(driver.log().contains("stream-abort"), "the log reports the injected fault");
    });
}

#[test]
fn a_stalled_stream_is_complete() {
    with_faults(&["stream-stall,after=5,for=300ms,method=GetMetadataDelta"], |driver| {
        let (first, second) = two_snapshots(driver);
        let begun = Instant::now();
        let (offsets, code) = receive(driver, &first, &second, 0);
        assert_eq!((offsets.len() as u64, code), (EXTENTS, None));
        assert!(begun.elapsed() >= Duration::from_millis(300));
    });
}

#[test]
fn a_slow_snapshot_is_complete() {
    with_faults(&["slow-snapshot,for=300ms,match=second"], |driver| {
        let begun = Instant::now();
        let (first, second) = two_snapshots(driver);
        assert!(begun.elapsed() >= Duration::from_millis(300));
        assert_eq!(receive(driver, &first, &second, 0).0.len() as u64, EXTENTS);
    });
}

#[test]
fn a_snapshot_becomes_ready_after_the_delay() {
    with_faults(&["not-ready,for=8s,match=late"], |driver| {
        let volume = driver.volume("v", 16 * MIB, block());
        let request = create_snapshot("late", &volume);
        let made = driver.ok(request.clone()).snapshot.unwrap();
        assert!(!made.ready_to_use);
        let id = made.snapshot_id.as_str();
        driver.refused(allocated(id), Code::Unavailable, "not ready");
        let restore = from_source("r", Source::Snapshot(id), 0);
        driver.refused(restore.clone(), Code::Unavailable, "not ready");
        wait_for("it is ready", || driver.ok(request.clone()).snapshot.unwrap().ready_to_use);
        driver.ok(allocated(id));
        driver.ok(restore);
    });
}

#[test]
fn an_io_error_fault_fails_only_matching_calls() {
    with_faults(
        &["io-error,method=CreateSnapshot,times=1", "io-error,method=GetMetadataDelta,after=3"],
        |driver| {
            let volume = driver.volume("first", 16 * MIB, block());
            driver.refused(create_snapshot("s", &volume), Code::Internal, "io-error");
            let (first, second) = two_snapshots(driver);
            let (offsets, code) = receive(driver, &first, &second, 0);
            assert_eq!((offsets.len(), code), (3, Some(Code::Internal)));
        },
    );
}

#[test]
fn a_tracking_lost_fault_requires_a_full_backup() {
    with_faults(&["tracking-lost"], |driver| {
        let (first, second) = two_snapshots(driver);
        driver.refused(delta(&first, &second), Code::FailedPrecondition, "full backup");
        driver.ok(allocated(&second));
        let manifest = driver.ok(csi::GetPluginInfoRequest {}).manifest;
        assert_eq!(manifest.get("faults").map(String::as_str), Some("tracking-lost"));
    });
}

#[test]
fn faults_require_the_enabling_flag() {
    with_driver(|driver| {
        let output = driver.run_another(&["--fault", "io-error"]);
        assert_eq!(output.status.code(), Some(2));
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(words.contains("--enable-faults"), "{words}");
        assert!(driver.ok(csi::GetPluginInfoRequest {}).manifest.is_empty());
    });
}
