//! The driver's service for snapshot sessions (KEP-3314, "The SP Snapshot Session Service"): the
//! responses equal those of CSI's service, the volume is verified, and the token is ignored and not
//! logged.

use csi_loopback::backend::PoolKind;
use csi_loopback::grpc::fingerprint;
use csi_loopback::proto::csi::v1 as csi;
use csi_loopback::proto::snapshotsession as session;
use support::driver::*;
use support::requests::{Rpc, session_allocated, session_delta};
use support::{BLOCK, MIB, pattern, write_direct};
use tonic::Code;

use csi::BlockMetadataType::{FixedLength, VariableLength};

const FIXED: [&str; 4] = ["--block-metadata-type", "fixed", "--block-size", "64Ki"];

/// Two snapshots of a raw volume, with a write between them.
fn sample(driver: &Driver) -> (String, String, String) {
    let volume = driver.volume("v", 64 * MIB, block());
    let device = driver.publish(&volume, &block());
    for number in [1, 2, 9, 40, 41, 42, 300] {
        write_direct(&device, number * BLOCK, &pattern(number, BLOCK as usize));
    }
    let first = driver.snapshot("first", &volume);
    write_direct(&device, 100 * BLOCK, &pattern(7, BLOCK as usize));
    write_direct(&device, 200 * BLOCK, &pattern(8, BLOCK as usize));
    let second = driver.snapshot("second", &volume);
    (volume, first, second)
}

/// Checks that both services return the same.
#[track_caller]
fn same<Q: Rpc<Response = Metadata>, S: Rpc<Response = Metadata>>(
    driver: &Driver,
    of_csi: Q,
    req: S,
) -> Metadata {
    let (expected, answer) = (driver.ok(of_csi), driver.ok(req));
    let facts = |it: &Metadata| (it.kind, it.capacity, it.messages.clone());
    assert_eq!(facts(&answer), facts(&expected));
    answer
}

#[test]
fn session_streams_equal_csi_streams_in_both_styles() {
    with_driver(|driver| {
        let (_, first, second) = sample(driver);
        for (flags, kind) in [(&[][..], VariableLength), (&FIXED, FixedLength)] {
            driver.restart_with(flags);
            for (offset, max_results) in
                [(0, 0), (0, 1), (9 * BLOCK + 5, 0), (41 * BLOCK, 2), (64 * MIB, 0)]
            {
                let of_csi = csi::GetMetadataAllocatedRequest {
                    starting_offset: offset as i64,
                    max_results: max_results as i32,
                    ..allocated(&second)
                };
                let req = session::GetAllocatedRequest {
                    starting_offset: offset,
                    max_results,
                    ..session_allocated(&second)
                };
                assert_eq!(same(driver, of_csi, req).kind, kind);
                let of_csi = csi::GetMetadataDeltaRequest {
                    starting_offset: offset as i64,
                    max_results: max_results as i32,
                    ..delta(&first, &second)
                };
                let req = session::GetDeltaRequest {
                    starting_byte_offset: offset,
                    max_results,
                    ..session_delta(&first, &second)
                };
                assert_eq!(same(driver, of_csi, req).kind, kind);
            }
            // No change, and a deleted base: as in CSI.
            same(driver, delta(&second, &second), session_delta(&second, &second));
        }
        driver.ok(delete_snapshot(&first));
        same(driver, delta(&first, &second), session_delta(&first, &second));
    });
}

#[test]
fn the_session_volume_must_match_the_snapshot() {
    with_driver(|driver| {
        let (volume, first, second) = sample(driver);
        let other = driver.volume("w", MIB, block());
        let foreign = driver.snapshot("foreign", &other);
        let of = |volume: &str| session::GetAllocatedRequest {
            volume_id: volume.to_owned(),
            ..session_allocated(&first)
        };
        let between = |volume: &str, base: &str| session::GetDeltaRequest {
            volume_id: volume.to_owned(),
            ..session_delta(base, &second)
        };
        assert_eq!(driver.ok(of(&volume)).extents(), driver.ok(of("")).extents());
        assert_eq!(driver.ok(between(&volume, &first)).extents().len(), 2);
        for wrong in [other.as_str(), "vol-none-0123456789abcdef"] {
            driver.refused(of(wrong), Code::NotFound, "volume_id");
            driver.refused(between(wrong, &first), Code::NotFound, "volume_id");
        }
        driver.refused(of(&"x".repeat(129)), Code::InvalidArgument, "volume_id");
        // A base of another volume is handled as in CSI.
        driver.refused(delta(&foreign, &second), Code::InvalidArgument, "base_snapshot_id");
        driver.refused(between(&volume, &foreign), Code::InvalidArgument, "base_snapshot");
    });
}

#[test]
fn each_session_error_has_its_code_and_field() {
    with_driver(|driver| {
        let (volume, first, second) = sample(driver);
        let unknown = "snap-x-0123456789abcdef";
        driver.refused(session_allocated(""), Code::InvalidArgument, "snapshot");
        driver.refused(session_delta("", &second), Code::InvalidArgument, "base_snapshot:");
        driver.refused(session_delta(&first, ""), Code::InvalidArgument, "target_snapshot:");
        driver.refused(session_delta(&second, &first), Code::InvalidArgument, "base_snapshot");
        driver.refused(session_allocated(unknown), Code::NotFound, unknown);
        driver.refused(session_delta(unknown, &second), Code::NotFound, unknown);
        driver.refused(session_delta(&first, unknown), Code::NotFound, unknown);
        for offset in [64 * MIB + 1, i64::MAX as u64, i64::MAX as u64 + 1, u64::MAX] {
            let req = session::GetAllocatedRequest {
                starting_offset: offset,
                ..session_allocated(&first)
            };
            driver.refused(req, Code::OutOfRange, "starting_offset: ");
            let req = session::GetDeltaRequest {
                starting_byte_offset: offset,
                ..session_delta(&first, &second)
            };
            driver.refused(req, Code::OutOfRange, "starting_byte_offset: ");
        }
        for max_results in [i32::MAX as u32 + 1, u32::MAX] {
            let req = session::GetAllocatedRequest { max_results, ..session_allocated(&second) };
            same(driver, allocated(&second), req);
        }
        driver.ok(modify(&volume, &[("changeTracking", "false")]));
        let untracked = driver.snapshot("third", &volume);
        driver.refused(session_delta(&second, &untracked), Code::FailedPrecondition, "full backup");
    });
}

#[test]
fn the_driver_logs_only_a_fingerprint_of_a_session_token() {
    const TOKEN: &str = "mfrggzdfmztwq2lknnwg23tpobyxe43uov3ho6dzpiqdcmrtgq2q";
    for format in ["text", "json"] {
        let flags = ["--log-level", "trace", "--log-format", format];
        let Some(driver) = driver_with(PoolKind::Copy, &flags) else { return };
        let volume = driver.volume("v", MIB, block());
        let first = driver.snapshot("first", &volume);
        // This project's sidecar sends a fingerprint; another sidecar may send anything.
        for token in [TOKEN, &fingerprint(TOKEN), ""] {
            for snapshot in [first.as_str(), "", "snap-none-0123456789abcdef"] {
                let _ = driver.call(session::GetAllocatedRequest {
                    session_token: token.to_owned(),
                    ..session_allocated(snapshot)
                });
                let _ = driver.call(session::GetDeltaRequest {
                    session_token: token.to_owned(),
                    ..session_delta(&first, snapshot)
                });
            }
        }
        let log = driver.log();
        assert!(!log.contains(&TOKEN[..20]), "the token is shown: {log}");
        let of_session =
            |line: &&str| line.contains("GetAllocated") && line.contains(&fingerprint(TOKEN));
        assert_eq!(log.lines().filter(of_session).count(), 6, "{log}");
        assert!(log.contains("TRACE"), "the log is at its most verbose");
    }
}

#[test]
fn faults_apply_to_session_streams() {
    let rules = ["stream-abort,after=1,code=ABORTED,times=1,method=GetAllocated", "tracking-lost"];
    let mut flags = vec!["--enable-faults"];
    flags.extend(rules.iter().flat_map(|rule| ["--fault", rule]));
    let Some(driver) = driver_with(PoolKind::Image, &flags) else { return };
    let (_, first, second) = sample(&driver);
    assert!(!driver.ok(allocated(&first)).extents().is_empty(), "the rule is for another method");
    driver.refused(session_allocated(&first), Code::Aborted, "the stream was aborted");
    assert!(!driver.ok(session_allocated(&first)).extents().is_empty());
    driver.refused(session_delta(&first, &second), Code::FailedPrecondition, "full backup");
}
