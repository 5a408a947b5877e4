//! Responses.

use csi_loopback::kubernetes::driver_discovery::DriverDiscovery;
use csi_loopback::kubernetes::snapshot_delta::VolumeSnapshotDeltaState as State;
use serde_json::{Value, json};
use support::cluster::shared;

use super::rig::{FAST, Whole, listed};
use support::cluster::aggregated::Aggregated;
use support::cluster::programs::{free_port, stdout_of};
use support::driver::{block, mounted};
use support::{BLOCK, MIB, path, pattern, write_direct};

#[test]
fn kubectl_create_prints_the_response() {
    let Some(cluster) = shared() else { return };
    let whole = Whole::new(cluster, &[]);
    whole.write(1, [0, 7, 8]);
    whole.snapshot("monday");
    whole.write(2, [7, 300]);
    whole.snapshot("tuesday");
    let create = |spec: Value| -> Value {
        let file = whole.aggregated.delta(&spec);
        let line = ["-n", &whole.namespace, "create", "-f", path(&file), "-o", "json"];
        serde_json::from_str(&stdout_of(whole.aggregated.kubectl(&line))).unwrap()
    };
    let names =
        json!({ "baseVolumeSnapshotName": "monday", "targetVolumeSnapshotName": "tuesday" });
    let answer = create(names.clone());
    let block = |number: u64| json!({ "offset": number, "blockSizeBytes": BLOCK });
    assert_eq!(
        answer["status"],
        json!({
            "changedBlocks": [block(7), block(300)], "state": "Completed",
            "limit": 256, "offset": 0, "continue": 0, "volumeSizeBytes": 16 * MIB,
        })
    );
    assert_eq!(answer["metadata"]["name"], "delta");
    assert_eq!(answer["metadata"]["namespace"], whole.namespace);

    let page = |more: Value| {
        let mut spec = names.clone();
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        create(spec)["status"].take()
    };
    let first = page(json!({ "limit": 1 }));
    assert_eq!(
        (&first["changedBlocks"], &first["state"]),
        (&json!([block(7)]), &json!("Continue"))
    );
    let second = page(json!({ "limit": 1, "offset": first["continue"], "mode": "block" }));
    assert_eq!(second["changedBlocks"], json!([block(300)]));
    assert_eq!(second["state"], "Completed");
    let allocated = create(json!({ "targetVolumeSnapshotName": "monday" }));
    assert_eq!(allocated["status"]["changedBlocks"], json!([block(0), block(7), block(8)]));
}

#[test]
#[ignore = "full tier"]
fn all_three_apis_report_the_same_extents() {
    let Some(cluster) = shared() else { return };
    let fixed = ["--block-metadata-type", "fixed", "--block-size", "8Ki"];
    for (driver, style) in [(&[][..], "VARIABLE_LENGTH"), (&fixed, "FIXED_LENGTH")] {
        let whole = Whole::new(cluster, driver);
        whole.write(1, [0, 7, 8, 9, 100]);
        whole.snapshot("first");
        whole.write(2, (300..700).chain([7, 1000, 4095]));
        whole.snapshot("second");
        for question in [
            &["allocated", "second"][..],
            &["delta", "first", "second"],
            &["delta", "second", "second"],
            &["allocated", "second", "--starting-offset", "40960"],
        ] {
            let [released, session, paged] = [
                &["--api", "metadata"][..],
                &["--api", "session"],
                &["--api", "aggregated", "--page-size", "3"],
            ]
            .map(|api| whole.listed(&[question, api].concat()));
            assert_eq!(session, released, "{question:?}");
            assert_eq!(released["block_metadata_type"], style);
            for field in ["extents", "extent_count", "volume_capacity_bytes"] {
                assert_eq!(paged[field], released[field], "{question:?}: {field}");
            }
        }
    }
}

#[test]
fn a_filesystem_volume_is_supported() {
    let Some(cluster) = shared() else { return };
    let whole = Whole::new(cluster, &[]);
    let volume = whole.driver.volume("files", 64 * MIB, mounted("ext4"));
    cluster.claim(&whole.namespace, "files", &whole.driver_name, &volume, 64 * MIB);
    let target = whole.driver.publish(&volume, &mounted("ext4"));
    let take = |name: &str| cluster.snapshot(&whole.namespace, name, "files", &whole.class);
    std::fs::write(target.join("a"), pattern(1, 3 * MIB as usize)).unwrap();
    take("before");
    std::fs::write(target.join("b"), pattern(2, MIB as usize)).unwrap();
    take("after");
    whole.driver.take_down(&volume);
    let question = ["delta", "before", "after"];
    let released = whole.listed(&question);
    let paged = whole.listed(&[&question[..], &["--api", "aggregated"]].concat());
    assert_eq!(paged["extents"], released["extents"]);
    assert!(paged["changed_bytes"].as_u64().unwrap() >= MIB, "{paged}");
}

/// Blocks that the large test writes: one run, and single blocks after it.
const WHOLE: u64 = 100_000;
const SINGLE: u64 = 2_000;

#[test]
#[ignore = "full tier"]
fn a_delta_of_over_100_000_blocks_is_paged_completely() {
    let Some(cluster) = shared() else { return };
    let whole = Whole::new(cluster, &[]);
    let bytes = (WHOLE + 2 * SINGLE) * BLOCK;
    let volume = whole.driver.volume("large", bytes, block());
    cluster.claim(&whole.namespace, "large", &whole.driver_name, &volume, bytes);
    let take = |name: &str| cluster.snapshot(&whole.namespace, name, "large", &whole.class);
    take("empty");
    whole.driver.with_device(&volume, |device| {
        let piece = pattern(1, 4 * MIB as usize);
        let pieces = (WHOLE * BLOCK).div_ceil(4 * MIB);
        for at in 0..pieces {
            let rest = (WHOLE * BLOCK - at * 4 * MIB).min(4 * MIB);
            write_direct(device, at * 4 * MIB, &piece[..rest as usize]);
        }
        for at in 0..SINGLE {
            write_direct(device, (WHOLE + 2 * at + 1) * BLOCK, &pattern(at, BLOCK as usize));
        }
    });
    take("full");
    let backup = cluster.client_as(&whole.backup);
    let (mut offset, mut blocks, mut pages) = (0, Vec::new(), 0);
    loop {
        let spec = json!({
            "baseVolumeSnapshotName": "empty", "targetVolumeSnapshotName": "full",
            "limit": 4096, "offset": offset,
        });
        let status = whole.ask(&backup, &spec).unwrap().status.unwrap();
        assert!(status.changed_blocks.iter().all(|block| block.block_size_bytes == BLOCK));
        blocks.extend(status.changed_blocks.iter().map(|block| block.offset));
        pages += 1;
        match status.state {
            State::Continue => offset = status.next,
            State::Completed => break,
            State::Failed => panic!("{}", status.error),
        }
    }
    let expected: Vec<u64> = (0..WHOLE).chain((0..SINGLE).map(|at| WHOLE + 2 * at + 1)).collect();
    assert!(blocks == expected, "{} blocks in {pages} pages", blocks.len());
    assert_eq!(pages, expected.len().div_ceil(4096));
    // In pages of the default size, like the command.
    let paged =
        listed(whole.command(&["delta", "empty", "full", "--api", "aggregated"]).output().unwrap());
    let released = whole.listed(&["delta", "empty", "full"]);
    assert_eq!(paged["extents"], released["extents"]);
}

/// The published DriverDiscovery names a Service; the aggregated API server resolves it and checks
/// the certificate for it. In a cluster DNS resolves the name; here the process has its own
/// /etc/hosts.
#[test]
fn the_endpoint_is_called_by_its_service_name() {
    let Some(cluster) = shared() else { return };
    let (host, port) = ("cbt-http.csi-loopback.svc", free_port());
    let aggregated = Aggregated::start_with_hosts(cluster, &format!("127.0.0.1 {host}\n"), &FAST);
    let found_at = format!("{host}:{port}");
    let whole = Whole::of(cluster, &[], aggregated, Some((port, &found_at)));
    let discoveries = cluster.api::<DriverDiscovery>();
    let config = cluster.get(&discoveries, &whole.driver_name).unwrap().spec.client_config;
    let service = config.service.expect("a Service, and no address");
    assert_eq!((config.url, service.port), (None, Some(i32::from(port))));
    assert_eq!(format!("{}.{}.svc", service.name, service.namespace), host);
    whole.snapshot("monday");
    let backup = whole.client(&whole.backup);
    let delta = whole.ask(&backup, &json!({ "targetVolumeSnapshotName": "monday" })).unwrap();
    assert!(delta.status.is_some() && whole.pages() > 0);
}
