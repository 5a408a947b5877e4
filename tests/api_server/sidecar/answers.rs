//! Responses: the driver's extents, under Kubernetes names.

use support::cluster::shared;
use tonic::Code;

use support::BLOCK;
use support::cluster::sidecar_rig::{CAPACITY, Options, Rig};

/// Offsets and sizes of single blocks.
fn blocks(numbers: &[u64]) -> Vec<(u64, u64)> {
    numbers.iter().map(|number| (number * BLOCK, BLOCK)).collect()
}

#[test]
fn allocated_blocks_are_those_that_the_driver_reports() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.write(1, [0, 7, 100]);
    rig.snapshot("first");
    let answer = rig.ask(rig.allocated("first")).unwrap();
    assert_eq!(answer.extents(), blocks(&[0, 7, 100]));
    for message in &answer.messages {
        assert_eq!((message.kind, message.capacity), (2, CAPACITY as i64), "VARIABLE_LENGTH");
    }
    assert_eq!(rig.metric("csi_loopback_sidecar_relayed_extents_total "), 3.0);
    let booked = format!(
        "snapshot_metadata_controller_operations_seconds_count{{driver_name=\"{}\",method_name=\"MetadataAllocated\",grpc_status_code=\"OK\"}} ",
        rig.driver_name
    );
    assert_eq!(rig.metric(&booked), 1.0);
}

#[test]
fn a_base_may_be_a_handle_or_a_name() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::new(cluster);
    rig.write(1, [0, 7]);
    let first = rig.snapshot("first");
    rig.write(2, [7, 9]);
    rig.snapshot("second");
    // A handle, unless a flag allows names.
    assert_eq!(rig.extents(rig.delta(&first.handle, "second")), blocks(&[7, 9]));
    rig.refused(rig.delta_from("first", "second"), Code::NotFound, "first");
    rig.restart_sidecar(&["--base-reference", "either"]);
    for base in ["first", &first.handle] {
        assert_eq!(rig.extents(rig.delta_from(base, "second")), blocks(&[7, 9]), "{base}");
    }
    rig.restart_sidecar(&["--base-reference", "name"]);
    assert_eq!(rig.extents(rig.delta_from("first", "second")), blocks(&[7, 9]));
    rig.refused(rig.delta_from(&first.handle, "second"), Code::NotFound, "does not exist");
}

#[test]
fn empty_results_still_report_style_and_capacity() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.snapshot("first");
    rig.snapshot("second");
    for request in [
        rig.allocated("first").into(),
        support::cluster::sidecar_rig::MetadataRequest::from(rig.delta("first", "second")),
    ] {
        let answer = rig.ask(request).unwrap();
        assert_eq!(answer.extents(), []);
        assert_eq!(answer.messages.len(), 1);
        assert_eq!((answer.messages[0].kind, answer.messages[0].capacity), (2, CAPACITY as i64));
    }
    assert_eq!(rig.extents(rig.delta("second", "second")), [], "base and target may be the same");
}

#[test]
fn a_response_honors_offset_and_max_results() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(
        cluster,
        Options {
            driver: &["--block-metadata-type", "fixed", "--block-size", "4Ki"],
            ..Options::default()
        },
    );
    rig.write(1, 10..30);
    rig.snapshot("first");
    let mut request = rig.allocated("first");
    request.starting_offset = (20 * BLOCK) as i64;
    request.max_results = 3;
    let answer = rig.ask(request).unwrap();
    assert_eq!(answer.extents(), blocks(&(20..30).collect::<Vec<_>>()));
    assert!(answer.messages.iter().all(|message| message.kind == 1 && message.extents.len() <= 3));
    let mut past = rig.allocated("first");
    past.starting_offset = CAPACITY as i64 + 1;
    rig.refused(past, Code::OutOfRange, "starting_offset");
}

#[test]
fn a_base_may_be_deleted_or_in_deletion() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.write(1, [0]);
    let first = rig.snapshot("first");
    rig.write(2, [5]);
    rig.snapshot("second");
    let snapshots =
        cluster.api_in::<csi_loopback::kubernetes::snapshot::VolumeSnapshot>(&rig.namespace);
    let hold = serde_json::json!({ "metadata": { "finalizers": ["example.com/hold"] } });
    cluster.merge(&snapshots, "first", &hold);
    // Otherwise its content would be deleted first.
    let contents = cluster.api::<csi_loopback::kubernetes::snapshot::VolumeSnapshotContent>();
    let retain = serde_json::json!({ "spec": { "deletionPolicy": "Retain" } });
    cluster.merge(&contents, &first.content, &retain);
    cluster.delete(&snapshots, "first");
    // It is usable as a base, but not as a target.
    assert_eq!(rig.extents(rig.delta("first", "second")), blocks(&[5]));
    cluster.wait_for("the sidecar hears of the deletion", || {
        rig.ask(rig.allocated("first")).err().filter(|status| status.code() == Code::NotFound)
    });
    rig.refused(rig.allocated("first"), Code::NotFound, "being deleted");
    let release = serde_json::json!({ "metadata": { "finalizers": null } });
    cluster.merge(&snapshots, "first", &release);
    cluster.wait_until_gone(&snapshots, "first");
    // Its handle remains valid after its deletion.
    assert_eq!(rig.extents(rig.delta(&first.handle, "second")), blocks(&[5]));
}
