//! What is answered: the driver's extents, under the names of Kubernetes.

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
fn changed_blocks_are_found_from_a_handle_and_from_a_name() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::new(cluster);
    rig.write(1, [0, 7]);
    let first = rig.snapshot("first");
    rig.write(2, [7, 9]);
    rig.snapshot("second");
    // A handle, unless a flag allows more.
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
fn a_name_never_wins_over_a_handle() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::new(cluster);
    rig.write(1, [0]);
    let first = rig.snapshot("first");
    rig.write(2, [1]);
    let second = rig.snapshot("second");
    rig.write(3, [5]);
    rig.snapshot("third");
    // A VolumeSnapshot whose name is the first one's handle, and which is the second.
    cluster.adopt_snapshot(&rig.namespace, &first.handle, &rig.driver_name, &second.handle, None);
    assert_eq!(rig.extents(rig.delta_from(&first.handle, "third")), blocks(&[1, 5]));
    rig.restart_sidecar(&["--base-reference", "either"]);
    let asked = rig.delta_from(&first.handle, "third");
    rig.refused(asked, Code::InvalidArgument, "base_snapshot_id");
}

#[test]
fn an_empty_volume_and_no_change_still_tell_style_and_capacity() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.snapshot("first");
    rig.snapshot("second");
    for asked in [
        rig.allocated("first").into(),
        support::cluster::sidecar_rig::Asked::from(rig.delta("first", "second")),
    ] {
        let answer = rig.ask(asked).unwrap();
        assert_eq!(answer.extents(), []);
        assert_eq!(answer.messages.len(), 1);
        assert_eq!((answer.messages[0].kind, answer.messages[0].capacity), (2, CAPACITY as i64));
    }
    assert_eq!(rig.extents(rig.delta("second", "second")), [], "base and target may be the same");
}

#[test]
fn an_answer_starts_where_it_is_asked_to_and_comes_in_the_portions_asked_for() {
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
    let mut asked = rig.allocated("first");
    asked.starting_offset = (20 * BLOCK) as i64;
    asked.max_results = 3;
    let answer = rig.ask(asked).unwrap();
    assert_eq!(answer.extents(), blocks(&(20..30).collect::<Vec<_>>()));
    assert!(answer.messages.iter().all(|message| message.kind == 1 && message.extents.len() <= 3));
    let mut past = rig.allocated("first");
    past.starting_offset = CAPACITY as i64 + 1;
    rig.refused(past, Code::OutOfRange, "starting_offset");
}

#[test]
fn a_base_may_be_deleted_or_on_its_way_out() {
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
    // Else its content would be gone before it.
    let contents = cluster.api::<csi_loopback::kubernetes::snapshot::VolumeSnapshotContent>();
    let retain = serde_json::json!({ "spec": { "deletionPolicy": "Retain" } });
    cluster.merge(&contents, &first.content, &retain);
    cluster.delete(&snapshots, "first");
    // As a base it is good, as a target it is gone.
    assert_eq!(rig.extents(rig.delta("first", "second")), blocks(&[5]));
    cluster.wait_for("the sidecar hears of the deletion", || {
        rig.ask(rig.allocated("first")).err().filter(|status| status.code() == Code::NotFound)
    });
    rig.refused(rig.allocated("first"), Code::NotFound, "being deleted");
    let release = serde_json::json!({ "metadata": { "finalizers": null } });
    cluster.merge(&snapshots, "first", &release);
    cluster.wait_until_gone(&snapshots, "first");
    // Its handle outlives it.
    assert_eq!(rig.extents(rig.delta(&first.handle, "second")), blocks(&[5]));
}
