//! Responses: the driver's extents, under Kubernetes names, with the session API's numbers.

use std::process::Command;
use std::sync::atomic::Ordering;
use support::cluster::shared;
use support::driver::binary;

use csi_loopback::grpc::fingerprint;
use csi_loopback::proto::csi::v1::BlockMetadataType::{FixedLength, VariableLength};
use csi_loopback::proto::snapshotmetadata as released;
use csi_loopback::proto::snapshotsession as api;
use tonic::Code;

use super::older_driver::Older;
use super::rig::{CAPACITY, Options, Rig};
use support::BLOCK;
use support::cluster::session::{allocated, delta};
use support::cluster::sidecar::{AUDIENCE, client_at, collect};
use support::driver::wait_for;
use support::requests::{self, Metadata};

/// Flags of the driver: its default style, and blocks of one size.
const STYLES: [&[&str]; 2] = [&[], &["--block-metadata-type", "fixed", "--block-size", "8Ki"]];

fn facts(answer: &Metadata) -> (i32, u64, Vec<(u64, u64)>) {
    (answer.kind.into(), answer.capacity, answer.extents())
}

/// Two snapshots, and a session for both.
fn sample(rig: &Rig<'_>) -> (String, String, String) {
    rig.write(1, [0, 7, 8, 9, 100]);
    let first = rig.snapshot("first");
    rig.write(2, [7, 300, 301]);
    let second = rig.snapshot("second");
    (rig.session(&[&first, &second]), first.handle, second.handle)
}

#[test]
fn a_session_reports_the_drivers_extents() {
    let Some(cluster) = shared() else { return };
    for (flags, kind) in STYLES.iter().zip([VariableLength, FixedLength]) {
        let rig = Rig::with(cluster, Options { driver: flags, ..Options::default() });
        let (token, first, second) = sample(&rig);
        let of_driver = [
            rig.driver.ok(requests::allocated(&second)),
            rig.driver.ok(requests::delta(&first, &second)),
        ];
        let answers =
            [rig.ok(allocated(&token, "second")), rig.ok(delta(&token, "first", "second"))];
        let backup = rig.backup();
        let security_token = cluster.token(&backup, Some(AUDIENCE));
        let full = released::GetMetadataAllocatedRequest {
            security_token: security_token.clone(),
            namespace: rig.namespace.clone(),
            snapshot_name: "second".into(),
            ..Default::default()
        };
        let changed = released::GetMetadataDeltaRequest {
            security_token,
            namespace: rig.namespace.clone(),
            base_snapshot_id: first.clone(),
            target_snapshot_name: "second".into(),
            ..Default::default()
        };
        let client = || client_at(cluster, &rig.sidecar, &rig.authority.pem());
        let released = [
            cluster.block_on(collect(client(), full.into())).unwrap(),
            cluster.block_on(collect(client(), changed.into())).unwrap(),
        ];
        for ((answer, of_driver), released) in answers.iter().zip(&of_driver).zip(released) {
            assert_eq!((answer.kind, answer.capacity), (kind, CAPACITY));
            assert_eq!(facts(answer), facts(of_driver));
            assert_eq!(answer.extents(), released.extents());
            assert!(!answer.extents().is_empty());
        }
        // An empty delta still reports style and size.
        let none = rig.ok(delta(&token, "second", "second"));
        assert_eq!(facts(&none), (kind.into(), CAPACITY, Vec::new()));
        // The driver's own session API was called, and both logs name the session in the same way.
        let session = format!("session=\"{}\"", fingerprint(&token));
        for (log, rpc) in
            [(rig.driver.log(), "GetAllocated"), (rig.sidecar.process.log(), "GetDelta")]
        {
            let line =
                |line: &&str| line.contains(&format!("rpc=\"{rpc}\"")) && line.contains(&session);
            assert!(log.lines().any(|one| line(&one)), "{rpc}, {session}: {log}");
        }
        let booked = "method_name=\"SessionDelta\",grpc_status_code=\"OK\"} 2";
        assert!(rig.metrics().contains(booked), "{}", rig.metrics());
    }
}

#[test]
fn csis_api_is_used_without_the_drivers_session_api() {
    let Some(cluster) = shared() else { return };
    for flags in STYLES {
        let mut rig = Rig::with(cluster, Options { driver: flags, ..Options::default() });
        let (token, _, _) = sample(&rig);
        let expected =
            [rig.ok(allocated(&token, "second")), rig.ok(delta(&token, "first", "second"))];
        let (scratch, socket) = (rig.driver.scratch().to_owned(), rig.driver.socket());
        let older = cluster.block_on(async { Older::start(&scratch, &socket) });
        rig.restart_sidecar_at(&older.socket, &[]);
        let both = |rig: &Rig<'_>| {
            let answers =
                [rig.ok(allocated(&token, "second")), rig.ok(delta(&token, "first", "second"))];
            for (answer, expected) in answers.iter().zip(&expected) {
                assert_eq!(facts(answer), facts(expected));
            }
            older.unimplemented.load(Ordering::SeqCst)
        };
        assert_eq!(both(&rig), 1, "it is remembered");
        assert_eq!(both(&rig), 1);
        assert_eq!(facts(&rig.ok(delta(&token, "second", "second"))).2, []);
        // A restarted driver may be another version.
        rig.driver.restart();
        wait_for("the driver is found again", || rig.ask(allocated(&token, "second")).is_ok());
        assert!(both(&rig) > 1);
    }
}

#[test]
fn a_response_honors_offset_and_max_results() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.write(1, (10..50).map(|number| number * 2));
    let first = rig.snapshot("first");
    let token = rig.session(&[&first]);
    let from = |starting_offset, max_results| api::GetAllocatedRequest {
        starting_offset,
        max_results,
        ..allocated(&token, "first")
    };
    let answer = rig.ok(from(60 * BLOCK, 3));
    let blocks: Vec<_> = (30..50).map(|number| (number * 2 * BLOCK, BLOCK)).collect();
    assert_eq!(answer.extents(), blocks);
    assert!(answer.messages.iter().all(|message| (1..=3).contains(&message.len())));
    // A max_results above CSI's limit is clamped.
    for max_results in [i32::MAX as u32, i32::MAX as u32 + 1, u32::MAX] {
        assert_eq!(rig.ok(from(0, max_results)).extents().len(), 40);
    }
    assert_eq!(rig.ok(from(CAPACITY, 0)).extents(), []);
    // An offset that CSI cannot express is refused without a call to the driver.
    for past in [CAPACITY + 1, i64::MAX as u64, i64::MAX as u64 + 1, u64::MAX] {
        rig.refused(from(past, 0), Code::OutOfRange, "starting_offset: ");
        let request =
            api::GetDeltaRequest { starting_byte_offset: past, ..delta(&token, "first", "first") };
        rig.refused(request, Code::OutOfRange, "starting_byte_offset: ");
    }
    assert_eq!(rig.driver.log().matches("OUT_OF_RANGE").count(), 4);
}

#[test]
fn each_api_can_be_disabled() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::new(cluster);
    let (token, _, _) = sample(&rig);
    let ask_released = |rig: &Rig<'_>| {
        let client = client_at(cluster, &rig.sidecar, &rig.authority.pem());
        let request = released::GetMetadataAllocatedRequest {
            security_token: "x".into(),
            ..Default::default()
        };
        cluster.block_on(collect(client, request.into())).unwrap_err().code()
    };
    assert_eq!(ask_released(&rig), Code::InvalidArgument);
    rig.restart_sidecar(&["--metadata-api=false"]);
    assert_eq!(ask_released(&rig), Code::Unimplemented);
    assert!(!rig.ok(allocated(&token, "first")).extents().is_empty());
    rig.restart_sidecar(&["--session-api=false"]);
    assert_eq!(ask_released(&rig), Code::InvalidArgument);
    rig.refused(allocated(&token, "first"), Code::Unimplemented, "");
    let neither = Command::new(binary())
        .args(["sidecar", "--metadata-api=false", "--csi-address", "/nowhere/socket"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&neither.stderr);
    assert!(!neither.status.success() && said.contains("--session-api"), "{said}");
}
