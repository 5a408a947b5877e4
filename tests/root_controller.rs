//! Volumes, snapshots and groups over the wire: what a repeated, impossible, malformed or hostile
//! request gets, and what stays answerable while a volume is busy.

mod support;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use csi_loopback::backend::PoolKind;
use csi_loopback::proto::csi::v1 as csi;
use nix::sys::statvfs::statvfs;
use support::driver::*;
use support::{
    BLOCK, GIB, MIB, have_root, path, pattern, read_all, run, write_buffered, write_direct, zero,
};
use tonic::{Code, Status};

use csi::volume_capability::access_mode::Mode;

const NO_VOLUME: &str = "vol-none-0123456789abcdef";
const NO_SNAPSHOT: &str = "snap-none-0123456789abcdef";

fn limited(name: &str, required: i64, limit: i64) -> csi::CreateVolumeRequest {
    csi::CreateVolumeRequest {
        capacity_range: Some(range(required, limit)),
        ..create(name, 0, block())
    }
}

fn from_source(name: &str, source: Source<'_>, bytes: u64) -> csi::CreateVolumeRequest {
    csi::CreateVolumeRequest {
        volume_content_source: Some(source.into()),
        ..create(name, bytes, block())
    }
}

fn tracking(name: &str, value: &str) -> csi::CreateVolumeRequest {
    csi::CreateVolumeRequest {
        parameters: map(&[("changeTracking", value)]),
        ..create(name, MIB, block())
    }
}

fn capacity_of(answer: csi::CreateVolumeResponse) -> u64 {
    answer.volume.unwrap().capacity_bytes as u64
}

fn volume_ids(driver: &Driver) -> Vec<String> {
    let entries = driver.ok(csi::ListVolumesRequest::default()).entries;
    entries.into_iter().map(|entry| entry.volume.unwrap().volume_id).collect()
}

fn snapshots_where(driver: &Driver, request: csi::ListSnapshotsRequest) -> Vec<csi::Snapshot> {
    let entries = driver.ok(request).entries;
    entries.into_iter().map(|entry| entry.snapshot.unwrap()).collect()
}

fn all_snapshots(driver: &Driver) -> Vec<csi::Snapshot> {
    snapshots_where(driver, csi::ListSnapshotsRequest::default())
}

fn condition(driver: &Driver, volume_id: &str) -> csi::VolumeCondition {
    let answer = driver.ok(get_volume(volume_id));
    answer.status.unwrap().volume_condition.unwrap()
}

#[test]
fn a_repeated_request_is_the_same_volume_and_another_one_is_refused() {
    with_driver("a_repeated_request_is_the_same_volume_and_another_one_is_refused", |driver| {
        let source = driver.volume("source", MIB, block());
        let snapshot = driver.snapshot("snapshot", &source);
        let of_volume = from_source("c", Source::Volume(&source), 0);
        let of_snapshot = from_source("d", Source::Snapshot(&snapshot), 0);
        for request in [
            create("a", MIB, block()),
            create("b", 32 * MIB, mounted("")),
            of_volume.clone(),
            of_snapshot.clone(),
            tracking("e", "false"),
        ] {
            let made = driver.ok(request.clone()).volume.unwrap();
            assert_eq!(made.content_source, request.volume_content_source);
            assert_eq!(driver.ok(request.clone()).volume.unwrap(), made);
            assert_eq!(driver.ok(get_volume(&made.volume_id)).volume.unwrap(), made);
            // The order of compatible things does not matter, nor what only Kubernetes looks at.
            let labelled = csi::CreateVolumeRequest {
                parameters: {
                    let mut parameters = request.parameters.clone();
                    parameters.extend(map(&[("csi.storage.k8s.io/pvc/name", "claim")]));
                    parameters
                },
                ..request
            };
            assert_eq!(driver.ok(labelled).volume.unwrap(), made);
        }
        let renamed = |request: &csi::CreateVolumeRequest, name: &str| csi::CreateVolumeRequest {
            name: name.to_owned(),
            ..request.clone()
        };
        for request in [
            create("a", 2 * MIB, block()),
            limited("a", 0, BLOCK as i64 * 2),
            create("a", MIB, mounted("")),
            renamed(&of_volume, "a"),
            tracking("a", "false"),
            create("b", 32 * MIB, mounted("btrfs")),
            create("b", 32 * MIB, block()),
            create("c", MIB, block()),
            renamed(&of_snapshot, "c"),
            renamed(&of_volume, "d"),
            tracking("e", "true"),
        ] {
            driver.refused(request, Code::AlreadyExists, "name");
        }
        assert_eq!(volume_ids(driver).len(), 6);
        // A name that is free again makes another volume.
        driver.ok(delete_volume(&source));
        assert_ne!(driver.volume("source", MIB, block()), source);
    });
}

#[test]
fn a_request_made_many_times_at_once_makes_one_volume_and_one_snapshot() {
    with_driver("a_request_made_many_times_at_once_makes_one_volume_and_one_snapshot", |driver| {
        for round in 0..10 {
            let at_once = |make: &(dyn Fn() -> Result<String, Status> + Sync)| {
                let made: BTreeSet<String> = std::thread::scope(|scope| {
                    let calls: Vec<_> = (0..8).map(|_| scope.spawn(make)).collect();
                    calls.into_iter().map(|call| call.join().unwrap().unwrap()).collect()
                });
                assert_eq!(made.len(), 1, "{made:?}");
                made.into_iter().next().unwrap()
            };
            let name = format!("v{round}");
            let volume = at_once(&|| {
                let made = driver.call_patiently(create(&name, MIB, block()))?;
                Ok(made.volume.unwrap().volume_id)
            });
            at_once(&|| {
                let made = driver.call_patiently(cut(&name, &volume))?;
                Ok(made.snapshot.unwrap().snapshot_id)
            });
        }
        assert_eq!((volume_ids(driver).len(), all_snapshots(driver).len()), (10, 10));
    });
}

#[test]
fn a_volume_that_has_grown_still_answers_the_request_that_made_it() {
    with_driver("a_volume_that_has_grown_still_answers_the_request_that_made_it", |driver| {
        let volume = driver.volume("v", MIB, block());
        driver.ok(expand(&volume, 2 * MIB));
        let again = driver.ok(create("v", MIB, block())).volume.unwrap();
        assert_eq!((again.volume_id, again.capacity_bytes as u64), (volume, 2 * MIB));
    });
}

#[test]
fn a_new_volume_has_the_capacity_that_was_asked_for_in_whole_blocks() {
    with_driver("a_new_volume_has_the_capacity_that_was_asked_for_in_whole_blocks", |driver| {
        let capacity = |request: csi::CreateVolumeRequest| {
            let id = driver.ok(request).volume.unwrap();
            driver.ok(delete_volume(&id.volume_id));
            id.capacity_bytes as u64
        };
        assert_eq!(capacity(create("v", 0, block())), GIB);
        assert_eq!(capacity(limited("v", 0, 5 << 20)), 5 * MIB);
        assert_eq!(capacity(limited("v", 0, 5 << 30)), GIB);
        assert_eq!(capacity(create("v", 1, block())), MIB);
        assert_eq!(capacity(create("v", 5 * MIB + 1, block())), 5 * MIB + BLOCK);
        assert_eq!(capacity(limited("v", (5 << 20) + 1, (5 << 20) + 4096)), 5 * MIB + BLOCK);
        assert_eq!(capacity(create("v", 1, mounted("xfs"))), 300 * MIB);
        assert_eq!(capacity(create("v", 1, mounted("btrfs"))), 128 * MIB);

        let over = "capacity_range";
        driver.refused(limited("v", (5 << 20) + 1, (5 << 20) + 1), Code::OutOfRange, over);
        driver.refused(limited("v", 0, 4096), Code::OutOfRange, over);
        let mut xfs = limited("v", 1, 200 << 20);
        xfs.volume_capabilities = vec![mounted("xfs")];
        driver.refused(xfs, Code::OutOfRange, over);
        for bytes in [(64 << 40) + 1, i64::MAX] {
            driver.refused(limited("v", bytes, 0), Code::OutOfRange, over);
        }
        for (required, limit) in [(-1, 0), (i64::MIN, 0), (0, -1), (2 << 20, 1 << 20)] {
            driver.refused(limited("v", required, limit), Code::InvalidArgument, over);
        }
        assert!(volume_ids(driver).is_empty());
    });
}

#[test]
fn a_copy_is_as_large_as_its_source_or_larger_and_never_smaller() {
    with_driver("a_copy_is_as_large_as_its_source_or_larger_and_never_smaller", |driver| {
        let source = driver.volume("source", 2 * MIB, block());
        let content = pattern(1, 2 << 20);
        driver.with_device(&source, |device| write_direct(device, 0, &content));
        let snapshot = driver.snapshot("s", &source);
        for (kind, source) in [("s", Source::Snapshot(&snapshot)), ("v", Source::Volume(&source))] {
            assert_eq!(capacity_of(driver.ok(from_source(kind, source, 0))), 2 * MIB);
            let larger = driver.ok(from_source(&format!("{kind}+"), source, 4 * MIB));
            let larger = larger.volume.unwrap();
            assert_eq!(larger.capacity_bytes as u64, 4 * MIB);
            let read = driver.with_device(&larger.volume_id, read_all);
            assert!(read[..2 << 20] == content && read[2 << 20..].iter().all(|byte| *byte == 0));
            let smaller = from_source("smaller", source, MIB);
            driver.refused(smaller, Code::OutOfRange, "source");
            let mut limited = from_source("limited", source, 0);
            limited.capacity_range = Some(range(0, 1 << 20));
            driver.refused(limited, Code::OutOfRange, "capacity_range");
        }
        for source in [Source::Snapshot(NO_SNAPSHOT), Source::Volume(NO_VOLUME)] {
            driver.refused(from_source("none", source, 0), Code::NotFound, "none");
        }
    });
}

/// A volume restored to twice its source's size has a filesystem as large when it is staged.
fn grows_at_stage(driver: &Driver, fs_type: &str, mib: u64) {
    let wanted = mounted(fs_type);
    let source = driver.volume(&format!("source-{fs_type}"), mib * MIB, wanted.clone());
    let target = driver.publish(&source, &wanted);
    fs::write(target.join("file"), pattern(1, 100_000)).unwrap();
    let before = statvfs(&target).unwrap().blocks();
    let snapshot = driver.snapshot(&format!("s-{fs_type}"), &source);
    for from in [Source::Snapshot(&snapshot), Source::Volume(&source)] {
        let request = csi::CreateVolumeRequest {
            volume_content_source: Some(from.into()),
            ..create(&format!("larger-{fs_type}"), 2 * mib * MIB, wanted.clone())
        };
        let larger = driver.ok(request).volume.unwrap().volume_id;
        let target = driver.publish(&larger, &wanted);
        let after = statvfs(&target).unwrap().blocks();
        assert!(after >= before * 19 / 10, "{fs_type}: {before} {after}");
        assert!(fs::read(target.join("file")).unwrap() == pattern(1, 100_000));
        driver.take_down(&larger);
        driver.ok(delete_volume(&larger));
    }
    driver.take_down(&source);
}

#[test]
fn a_filesystem_restored_to_a_larger_volume_is_grown_when_it_is_staged() {
    with_driver("a_filesystem_restored_to_a_larger_volume_is_grown_when_it_is_staged", |driver| {
        for (fs_type, mib) in [("ext4", 32), ("xfs", 300), ("btrfs", 128)] {
            grows_at_stage(driver, fs_type, mib);
        }
    });
}

#[test]
fn a_filesystem_can_be_restored_as_a_block_volume_and_back() {
    with_driver("a_filesystem_can_be_restored_as_a_block_volume_and_back", |driver| {
        let source = driver.volume("source", 32 * MIB, mounted(""));
        let target = driver.publish(&source, &mounted(""));
        fs::write(target.join("file"), pattern(1, 100_000)).unwrap();
        let snapshot = driver.snapshot("s", &source);
        let raw = driver.copy("raw", Source::Snapshot(&snapshot), block());
        driver.with_device(&raw, |device| {
            let content = read_all(device);
            assert_eq!(content.len() as u64, 32 * MIB);
            assert_eq!(content[1024 + 56..1024 + 58], [0x53, 0xef], "an ext4");
            run("e2fsck", &["-fy", path(device)]);
        });
        let back = driver.copy("back", Source::Volume(&raw), mounted(""));
        let target = driver.publish(&back, &mounted(""));
        assert!(fs::read(target.join("file")).unwrap() == pattern(1, 100_000));
    });
}

#[test]
fn a_clone_of_a_volume_in_use_is_consistent_and_its_source_goes_on() {
    for_each_driver("a_clone_of_a_volume_in_use_is_consistent_and_its_source_goes_on", |driver| {
        let source = driver.volume("source", 64 * MIB, mounted(""));
        let target = driver.publish(&source, &mounted(""));
        let stop = AtomicBool::new(false);
        let clones: Vec<Result<String, Status>> = std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut number = 0u64;
                while !stop.load(Ordering::Relaxed) {
                    number += 1;
                    let name = target.join(format!("file-{}", number % 20));
                    fs::write(name, pattern(number, 20_000)).unwrap();
                }
            });
            let clone = |number: u32| {
                std::thread::sleep(Duration::from_millis(50));
                let request = csi::CreateVolumeRequest {
                    volume_content_source: Some(Source::Volume(&source).into()),
                    ..create(&format!("clone-{number}"), 0, mounted(""))
                };
                driver.call(request).map(|answer| answer.volume.unwrap().volume_id)
            };
            let clones = (0..2).map(clone).collect();
            stop.store(true, Ordering::Relaxed);
            clones
        });
        for clone in clones {
            let clone = clone.unwrap();
            // Mounting replays the journal; then there is nothing to repair.
            let mounted_at = driver.publish(&clone, &mounted(""));
            assert!(fs::read_dir(&mounted_at).unwrap().count() > 1);
            fs::write(mounted_at.join("own"), "x").unwrap();
            driver.take_down(&clone);
            driver.with_device(&clone, |device| run("e2fsck", &["-fn", path(device)]));
        }
        assert!(!target.join("own").exists());
        driver.take_down(&source);
    });
}

#[test]
fn volumes_are_made_on_this_node_and_nowhere_else() {
    with_driver("volumes_are_made_on_this_node_and_nowhere_else", |driver| {
        let at = |node: &str| csi::Topology {
            segments: map(&[("topology.loopback.csi.local/node", node)]),
        };
        let request = |requisite: Vec<csi::Topology>| csi::CreateVolumeRequest {
            accessibility_requirements: Some(csi::TopologyRequirement {
                preferred: requisite.clone(),
                requisite,
            }),
            ..create("v", MIB, block())
        };
        let elsewhere = request(vec![at("node-2")]);
        driver.refused(elsewhere, Code::ResourceExhausted, "accessibility_requirements");
        let made = driver.ok(request(vec![at("node-2"), at("node-1")])).volume.unwrap();
        assert_eq!(made.accessible_topology, [at("node-1")]);
        let room = |place: csi::Topology| {
            let accessible_topology = Some(place);
            driver.ok(csi::GetCapacityRequest { accessible_topology, ..Default::default() })
        };
        assert!(room(at("node-1")).available_capacity > 0);
        assert_eq!(room(at("node-2")).available_capacity, 0);
        assert_eq!(room(at("node-2")).maximum_volume_size, Some(0));
    });
}

#[test]
fn an_unknown_parameter_is_refused_by_name_and_those_of_kubernetes_are_accepted() {
    const TEST: &str =
        "an_unknown_parameter_is_refused_by_name_and_those_of_kubernetes_are_accepted";
    with_driver(TEST, |driver| {
        let volume = driver.volume("v", MIB, block());
        let kubernetes = map(&[
            ("csi.storage.k8s.io/pvc/name", "claim"),
            ("csi.storage.k8s.io/volumesnapshot/name", "s"),
            ("storage.kubernetes.io/csiProvisionerIdentity", "1"),
        ]);
        let unknown = map(&[("csi.storage.k8s.io/pvc/name", "claim"), ("colour", "red")]);
        for (parameters, known) in [(kubernetes, true), (unknown, false)] {
            let name = format!("p-{known}");
            let check = |answer: Result<(), Status>, field: &str| match (answer, known) {
                (Ok(()), true) => {}
                (Err(status), false) => {
                    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
                    let says = status.message();
                    assert!(says.contains(field) && says.contains("colour"), "{says}");
                }
                other => panic!("{field}: {other:?}"),
            };
            let parameters = || parameters.clone();
            let request = create(&name, MIB, block());
            let request = csi::CreateVolumeRequest { parameters: parameters(), ..request };
            check(driver.call(request).map(drop), "parameters");
            let request = create(&name, MIB, block());
            let request = csi::CreateVolumeRequest { mutable_parameters: parameters(), ..request };
            check(driver.call(request).map(drop), "mutable_parameters");
            let request = cut(&name, &volume);
            let request = csi::CreateSnapshotRequest { parameters: parameters(), ..request };
            check(driver.call(request).map(drop), "parameters");
            let request = cut_group(&name, &[&volume]);
            let request =
                csi::CreateVolumeGroupSnapshotRequest { parameters: parameters(), ..request };
            check(driver.call(request).map(drop), "parameters");
            let request =
                csi::GetCapacityRequest { parameters: parameters(), ..Default::default() };
            check(driver.call(request).map(drop), "parameters");
            let request = csi::ControllerModifyVolumeRequest {
                mutable_parameters: parameters(),
                ..modify(&volume, &[])
            };
            check(driver.call(request).map(drop), "mutable_parameters");
        }
    });
}

#[test]
fn change_tracking_is_a_parameter_and_can_be_modified() {
    with_driver("change_tracking_is_a_parameter_and_can_be_modified", |driver| {
        let tracked = |volume: &str, name: &str| {
            let a = driver.snapshot(&format!("{name}-a"), volume);
            let b = driver.snapshot(&format!("{name}-b"), volume);
            match driver.call(delta(&a, &b)) {
                Ok(_) => true,
                Err(status) if status.code() == Code::FailedPrecondition => false,
                Err(status) => panic!("{status:?}"),
            }
        };
        let on = driver.volume("on", MIB, block());
        let off = driver.ok(tracking("off", "false")).volume.unwrap().volume_id;
        let both = csi::CreateVolumeRequest {
            mutable_parameters: map(&[("changeTracking", "true")]),
            ..tracking("both", "false")
        };
        let both = driver.ok(both).volume.unwrap().volume_id;
        assert!(tracked(&on, "1") && !tracked(&off, "2") && tracked(&both, "3"));
        for (volume, value) in [(&on, "false"), (&off, "true")] {
            for _ in 0..2 {
                driver.ok(modify(volume, &[("changeTracking", value)]));
            }
            driver.ok(modify(volume, &[]));
            driver.ok(modify(volume, &[("csi.storage.k8s.io/pvc/name", "claim")]));
        }
        assert!(!tracked(&on, "4") && tracked(&off, "5"));
        let yes = modify(&on, &[("changeTracking", "yes")]);
        driver.refused(yes, Code::InvalidArgument, "changeTracking");
        driver.refused(tracking("x", "1"), Code::InvalidArgument, "changeTracking");
        for parameters in [&[][..], &[("changeTracking", "true")]] {
            driver.refused(modify(NO_VOLUME, parameters), Code::NotFound, NO_VOLUME);
        }
    });
}

#[test]
fn a_volume_is_deleted_with_snapshots_but_not_in_use() {
    with_driver("a_volume_is_deleted_with_snapshots_but_not_in_use", |driver| {
        driver.ok(delete_volume(NO_VOLUME));
        for (name, wanted) in [("f", mounted("")), ("r", block())] {
            let volume = driver.volume(name, 32 * MIB, wanted.clone());
            let snapshot = driver.snapshot(name, &volume);
            driver.publish(&volume, &wanted);
            driver.refused(delete_volume(&volume), Code::FailedPrecondition, "unpublish");
            driver.unpublish(&volume, &driver.target(&volume));
            driver.refused(delete_volume(&volume), Code::FailedPrecondition, "unstage");
            driver.unstage(&volume);
            for _ in 0..2 {
                driver.ok(delete_volume(&volume));
            }
            driver.refused(get_volume(&volume), Code::NotFound, &volume);
            driver.refused(expand(&volume, GIB), Code::NotFound, &volume);
            driver.refused(cut("x", &volume), Code::NotFound, &volume);
            let request = driver.staging_of(&volume, &wanted);
            driver.refused(request, Code::NotFound, &volume);
            driver.copy(&format!("back-{name}"), Source::Snapshot(&snapshot), wanted);
        }
    });
}

#[test]
fn expanding_to_less_changes_nothing_and_limits_hold() {
    with_driver("expanding_to_less_changes_nothing_and_limits_hold", |driver| {
        let volume = driver.volume("v", 4 * MIB, block());
        for bytes in [0, 1, MIB, 4 * MIB] {
            assert_eq!(driver.ok(expand(&volume, bytes)).capacity_bytes as u64, 4 * MIB);
        }
        assert_eq!(driver.ok(expand(&volume, 5 * MIB + 1)).capacity_bytes as u64, 5 * MIB + BLOCK);
        let request = |required, limit| csi::ControllerExpandVolumeRequest {
            capacity_range: Some(range(required, limit)),
            ..expand(&volume, 0)
        };
        driver.refused(request((8 << 20) + 1, (8 << 20) + 1), Code::OutOfRange, "capacity_range");
        driver.refused(request((64 << 40) + 1, 0), Code::OutOfRange, "capacity_range");
        for (required, limit) in [(-1, 0), (0, -1), (8 << 20, 7 << 20)] {
            driver.refused(request(required, limit), Code::InvalidArgument, "capacity_range");
        }
        let none =
            csi::ControllerExpandVolumeRequest { capacity_range: None, ..expand(&volume, 0) };
        driver.refused(none, Code::InvalidArgument, "capacity_range");
        driver.refused(expand(NO_VOLUME, GIB), Code::NotFound, NO_VOLUME);
        let found = driver.ok(get_volume(&volume)).volume.unwrap();
        assert_eq!(found.capacity_bytes as u64, 5 * MIB + BLOCK);
    });
}

#[test]
fn capabilities_that_are_not_supported_are_answered_and_not_confirmed() {
    with_driver("capabilities_that_are_not_supported_are_answered_and_not_confirmed", |driver| {
        let volume = driver.volume("v", 300 * MIB, mounted("xfs"));
        let request = |wanted: &[csi::VolumeCapability]| csi::ValidateVolumeCapabilitiesRequest {
            volume_id: volume.clone(),
            volume_capabilities: wanted.to_vec(),
            ..Default::default()
        };
        for wanted in
            [&[mounted("xfs")][..], &[mounted("")], &[block()], &[block(), mounted("xfs")]]
        {
            let answer = driver.ok(request(wanted));
            assert_eq!(answer.confirmed.unwrap().volume_capabilities, wanted);
            assert_eq!(answer.message, "");
        }
        for wanted in [
            &[mounted("vfat")][..],
            &[mounted("ext4")],
            &[mounted("xfs"), mounted("btrfs")],
            &[mounted_as("xfs", Mode::MultiNodeMultiWriter)],
            &[block(), block_as(Mode::MultiNodeReaderOnly)],
        ] {
            let answer = driver.ok(request(wanted));
            assert!(answer.confirmed.is_none() && !answer.message.is_empty(), "{wanted:?}");
        }
        let parameters = csi::ValidateVolumeCapabilitiesRequest {
            parameters: map(&[("colour", "red")]),
            ..request(&[block()])
        };
        let answer = driver.ok(parameters);
        assert!(answer.confirmed.is_none() && answer.message.contains("colour"), "{answer:?}");
        // What CreateVolume does not support it refuses.
        for wanted in [mounted("vfat"), mounted_as("", Mode::MultiNodeMultiWriter)] {
            let unsupported = create("x", GIB, wanted);
            driver.refused(unsupported, Code::InvalidArgument, "volume_capabilities");
        }
        let unknown = csi::ValidateVolumeCapabilitiesRequest {
            volume_id: NO_VOLUME.to_owned(),
            ..request(&[block()])
        };
        driver.refused(unknown, Code::NotFound, NO_VOLUME);
    });
}

#[test]
fn lists_are_paged_and_no_page_is_lost_when_something_is_deleted_in_between() {
    const TEST: &str = "lists_are_paged_and_no_page_is_lost_when_something_is_deleted_in_between";
    with_driver(TEST, |driver| {
        let volumes: Vec<_> =
            (0..7).map(|number| driver.volume(&format!("v{number}"), MIB, block())).collect();
        let snapshots: Vec<_> = volumes.iter().map(|id| driver.snapshot(id, id)).collect();
        let volume_page = |starting_token: &str| {
            let starting_token = starting_token.to_owned();
            let page = driver.ok(csi::ListVolumesRequest { max_entries: 2, starting_token });
            let ids = page.entries.into_iter().map(|entry| {
                assert!(!entry.status.unwrap().volume_condition.unwrap().abnormal);
                entry.volume.unwrap().volume_id
            });
            (ids.collect::<Vec<_>>(), page.next_token)
        };
        let snapshot_page = |starting_token: &str| {
            let starting_token = starting_token.to_owned();
            let request =
                csi::ListSnapshotsRequest { max_entries: 2, starting_token, ..Default::default() };
            let page = driver.ok(request);
            let ids = page.entries.into_iter().map(|entry| entry.snapshot.unwrap().snapshot_id);
            (ids.collect::<Vec<_>>(), page.next_token)
        };
        let walk = |page: &dyn Fn(&str) -> (Vec<String>, String), delete: &dyn Fn(&str)| {
            let (mut seen, mut token, mut pages) = (Vec::new(), String::new(), 0);
            loop {
                let (ids, next) = page(&token);
                assert!(!ids.is_empty() && ids.len() <= 2);
                // The one that the token stands for, and the one before it.
                ids.iter().for_each(|id| delete(id));
                seen.extend(ids);
                pages += 1;
                if next.is_empty() {
                    return (seen, pages);
                }
                token = next;
            }
        };
        let (seen, pages) = walk(&volume_page, &|_| {});
        assert_eq!((seen, pages), (volumes.clone(), 4));
        let (seen, pages) =
            walk(&snapshot_page, &|id| assert!(driver.call(delete_snapshot(id)).is_ok()));
        assert_eq!((seen, pages), (snapshots, 4));
        let (seen, pages) =
            walk(&volume_page, &|id| assert!(driver.call(delete_volume(id)).is_ok()));
        assert_eq!((seen, pages), (volumes, 4));
        assert!(volume_ids(driver).is_empty() && all_snapshots(driver).is_empty());
        let long = "x".repeat(100_000);
        for token in ["x", "0", "-1", "vol-", "../../x", "a\0b", &long] {
            let starting_token = token.to_owned();
            let request = csi::ListVolumesRequest { max_entries: 1, starting_token };
            driver.refused(request, Code::Aborted, "starting_token");
            let starting_token = token.to_owned();
            let request = csi::ListSnapshotsRequest { starting_token, ..Default::default() };
            driver.refused(request, Code::Aborted, "starting_token");
        }
        let request = csi::ListVolumesRequest { max_entries: -1, ..Default::default() };
        driver.refused(request, Code::InvalidArgument, "max_entries");
        let request = csi::ListSnapshotsRequest { max_entries: -1, ..Default::default() };
        driver.refused(request, Code::InvalidArgument, "max_entries");
    });
}

#[test]
fn snapshots_are_found_by_id_and_by_volume() {
    with_driver("snapshots_are_found_by_id_and_by_volume", |driver| {
        let (v, w) = (driver.volume("v", MIB, block()), driver.volume("w", 2 * MIB, block()));
        let (a, b) = (driver.snapshot("a", &v), driver.snapshot("b", &v));
        let c = driver.snapshot("c", &w);
        let find = |snapshot_id: &str, source_volume_id: &str| {
            let request = csi::ListSnapshotsRequest {
                snapshot_id: snapshot_id.to_owned(),
                source_volume_id: source_volume_id.to_owned(),
                ..Default::default()
            };
            let found = snapshots_where(driver, request);
            found.into_iter().map(|snapshot| snapshot.snapshot_id).collect::<Vec<_>>()
        };
        assert_eq!(find("", ""), [a.clone(), b.clone(), c.clone()]);
        assert_eq!(find("", &v), [a.clone(), b.clone()]);
        assert_eq!(find("", &w), [c.as_str()]);
        assert_eq!(find(&b, ""), [b.as_str()]);
        assert_eq!(find(&b, &v), [b.as_str()]);
        for (snapshot, volume) in [(&b, w.as_str()), (&b, NO_VOLUME)] {
            assert!(find(snapshot, volume).is_empty());
        }
        assert!(find(NO_SNAPSHOT, "").is_empty() && find("", NO_VOLUME).is_empty());

        let get =
            |id: &str| csi::GetSnapshotRequest { snapshot_id: id.to_owned(), ..Default::default() };
        let found = driver.ok(get(&c)).snapshot.unwrap();
        assert_eq!((found.source_volume_id.as_str(), found.size_bytes as u64), (&*w, 2 * MIB));
        assert!(found.ready_to_use && found.creation_time.is_some());
        assert!(found.group_snapshot_id.is_empty());
        assert_eq!(driver.ok(cut("c", &w)).snapshot.unwrap(), found);
        driver.refused(cut("c", &v), Code::AlreadyExists, "name");
        driver.refused(get(NO_SNAPSHOT), Code::NotFound, NO_SNAPSHOT);
        driver.ok(delete_volume(&w));
        assert_eq!(find("", &w), [c.as_str()]);
        driver.ok(cut("a", &v));
        for _ in 0..2 {
            driver.ok(delete_snapshot(&a));
            driver.refused(get(&a), Code::NotFound, &a);
        }
        assert_eq!(find("", &v), [b.as_str()]);
        driver.ok(delete_snapshot(NO_SNAPSHOT));
        // The name is free again, for another snapshot.
        assert_ne!(driver.snapshot("a", &v), a);
    });
}

fn room(driver: &Driver) -> (u64, u64) {
    let answer = driver.ok(csi::GetCapacityRequest::default());
    assert_eq!(answer.minimum_volume_size, Some(MIB as i64));
    (answer.available_capacity as u64, answer.maximum_volume_size.unwrap() as u64)
}

#[test]
fn capacity_is_the_room_of_the_pool_and_overcommit_bounds_what_is_promised() {
    const TEST: &str = "capacity_is_the_room_of_the_pool_and_overcommit_bounds_what_is_promised";
    if !have_root(TEST) {
        return;
    }
    let flags = ["--pool-size", "1Gi", "--overcommit", "3"];
    let driver = Driver::with(PoolKind::Image, &flags);
    let (available, maximum) = room(&driver);
    assert!((GIB * 3 / 4..GIB).contains(&available), "{available}");
    assert!((GIB * 5 / 2..=3 * GIB).contains(&maximum), "{maximum}");
    driver.refused(create("v", maximum + BLOCK, block()), Code::ResourceExhausted, "overcommit");
    let volume = driver.volume("v", maximum, block());
    assert_eq!(room(&driver).1, 0);
    driver.refused(create("w", MIB, block()), Code::ResourceExhausted, "overcommit");
    driver.refused(expand(&volume, maximum + BLOCK), Code::ResourceExhausted, "capacity_range");
    driver.with_device(&volume, |device| zero(device, 0, 200 * MIB, false));
    let (left, _) = room(&driver);
    // A little is freed and taken by the catalog and by the pool's filesystem itself.
    assert!((199 * MIB..220 * MIB).contains(&(available - left)), "{available} {left}");
    driver.ok(delete_volume(&volume));
    assert_eq!(room(&driver).1, maximum);
    let with = |wanted| {
        let volume_capabilities = vec![wanted];
        driver.ok(csi::GetCapacityRequest { volume_capabilities, ..Default::default() })
    };
    assert!(with(mounted("btrfs")).available_capacity > 0);
    assert_eq!(with(mounted("vfat")).available_capacity, 0);
    assert_eq!(with(block_as(Mode::MultiNodeSingleWriter)).maximum_volume_size, Some(0));
}

#[test]
fn a_pool_that_is_nearly_full_is_told_and_takes_no_new_volumes() {
    if !have_root("a_pool_that_is_nearly_full_is_told_and_takes_no_new_volumes") {
        return;
    }
    let driver = Driver::with(PoolKind::Image, &["--pool-size", "512Mi"]);
    let (volume, idle) = (driver.volume("v", GIB, block()), driver.volume("idle", MIB, block()));
    assert!(!condition(&driver, &idle).abnormal);
    let device = driver.publish(&volume, &block());
    let mut filled = 0;
    while room(&driver).0 > 0 {
        zero(&device, filled, 4 * MIB, false);
        filled += 4 * MIB;
    }
    zero(&device, filled, 4 * MIB, false);
    for id in [&volume, &idle] {
        let found = condition(&driver, id);
        assert!(found.abnormal && found.message.contains("nearly full"), "{found:?}");
    }
    assert_eq!(room(&driver), (0, 0));
    driver.refused(create("w", MIB, block()), Code::ResourceExhausted, "capacity_range");
    driver.refused(expand(&idle, 2 * MIB), Code::ResourceExhausted, "capacity_range");
    let answer = driver.ok(stats(&volume, path(&device)));
    assert!(answer.volume_condition.unwrap().abnormal);
    // Deleting is what helps, and works.
    driver.take_down(&volume);
    driver.ok(delete_volume(&volume));
    wait_for("there is room again", || room(&driver).0 > 200 * MIB);
    assert!(!condition(&driver, &idle).abnormal);
    driver.volume("w", MIB, block());
}

#[test]
fn a_volume_whose_file_is_gone_or_too_short_is_abnormal_and_nobody_else() {
    if !have_root("a_volume_whose_file_is_gone_or_too_short_is_abnormal_and_nobody_else") {
        return;
    }
    for kind in [PoolKind::Reflink, PoolKind::Copy] {
        let driver = Driver::start(kind);
        let [gone, short, whole] =
            ["gone", "short", "whole"].map(|name| driver.volume(name, 2 * MIB, block()));
        let device = driver.publish(&short, &block());
        fs::remove_file(driver.backing_file(&gone)).unwrap();
        let file = File::options().write(true).open(driver.backing_file(&short)).unwrap();
        file.set_len(MIB).unwrap();
        for (id, word) in [(&gone, "gone"), (&short, "instead of")] {
            let found = condition(&driver, id);
            assert!(found.abnormal && found.message.contains(word), "{found:?}");
        }
        assert!(!condition(&driver, &whole).abnormal);
        for entry in driver.ok(csi::ListVolumesRequest::default()).entries {
            let found = entry.status.unwrap().volume_condition.unwrap();
            let id = entry.volume.unwrap().volume_id;
            assert_eq!(found.abnormal, id != whole, "{id}: {found:?}");
        }
        let answer = driver.ok(stats(&short, path(&device)));
        assert!(answer.volume_condition.unwrap().abnormal);
        driver.refused(cut("s", &gone), Code::DataLoss, "gone");
        driver.refused(driver.staging_of(&gone, &block()), Code::DataLoss, "gone");
        file.set_len(2 * MIB).unwrap();
        assert!(!condition(&driver, &short).abnormal);
        driver.take_down(&short);
        driver.ok(delete_volume(&gone));
    }
}

#[test]
fn a_staged_volume_whose_file_is_gone_tells_so_and_can_be_unstaged_for_good() {
    if !have_root("a_staged_volume_whose_file_is_gone_tells_so_and_can_be_unstaged_for_good") {
        return;
    }
    let driver = Driver::start(PoolKind::Copy);
    for (name, wanted) in [("f", mounted("")), ("r", block())] {
        let volume = driver.volume(name, 32 * MIB, wanted.clone());
        let target = driver.publish(&volume, &wanted);
        fs::remove_file(driver.backing_file(&volume)).unwrap();
        let answer = driver.ok(stats(&volume, path(&target)));
        let found = answer.volume_condition.unwrap();
        assert!(found.abnormal && found.message.contains("gone"), "{found:?}");
        driver.take_down(&volume);
        assert!(mounts_at(&target).is_empty() && mounts_at(&driver.staging(&volume)).is_empty());
        let left = loops_named(&volume);
        left.iter().for_each(|device| run("losetup", &["-d", device]));
        assert!(left.is_empty(), "{name}: {left:?} is still attached");
        driver.ok(delete_volume(&volume));
    }
}

#[test]
fn a_loop_device_that_was_taken_away_makes_its_volume_abnormal() {
    with_driver("a_loop_device_that_was_taken_away_makes_its_volume_abnormal", |driver| {
        let volume = driver.volume("v", MIB, block());
        driver.stage(&volume, &block());
        assert!(!condition(driver, &volume).abnormal);
        loops_named(&volume).iter().for_each(|device| run("losetup", &["-d", device]));
        wait_for("the device is gone", || loops_named(&volume).is_empty());
        let found = condition(driver, &volume);
        assert!(found.abnormal && found.message.contains("stage it again"), "{found:?}");
        driver.stage(&volume, &block());
        assert!(!condition(driver, &volume).abnormal);
    });
}

#[test]
fn operations_on_one_volume_exclude_each_other_while_everything_else_is_answered() {
    const TEST: &str =
        "operations_on_one_volume_exclude_each_other_while_everything_else_is_answered";
    with_driver(TEST, |driver| {
        let volume = driver.volume("v", 32 * MIB, mounted(""));
        let other = driver.volume("w", MIB, block());
        let staging = driver.stage(&volume, &mounted(""));
        let target = driver.target(&volume);
        fs::write(staging.join("file"), "x").unwrap();
        let a = driver.snapshot("a", &volume);
        let b = driver.snapshot("b", &volume);
        let frozen = Freeze::new(&staging);
        let slow = driver.publishing(&volume, &target, &in_group("4242"));
        std::thread::scope(|scope| {
            // It waits for the frozen filesystem to give the tree to the group.
            let slow = scope.spawn(|| driver.call_patiently(slow));
            wait_for("the slow call holds the volume", || {
                driver.call(expand(&volume, 1)).is_err_and(|e| e.code() == Code::Aborted)
            });
            let busy: Vec<Result<(), Status>> = vec![
                driver.call(cut("c", &volume)).map(drop),
                driver.call(delete_snapshot(&a)).map(drop),
                driver.call(cut_group("g", &[&other, &volume])).map(drop),
                driver.call(delete_volume(&volume)).map(drop),
                driver.call(expand(&volume, GIB)).map(drop),
                driver.call(modify(&volume, &[("changeTracking", "false")])).map(drop),
                driver.call(from_source("clone", Source::Volume(&volume), 0)).map(drop),
                driver.call(driver.staging_of(&volume, &mounted(""))).map(drop),
                driver.call(driver.publishing(&volume, &target, &mounted(""))).map(drop),
                driver.call(unpublishing(&volume, path(&target))).map(drop),
                driver.call(unstaging(&volume, path(&staging))).map(drop),
                driver.call(expand_on_node(&volume, &staging)).map(drop),
            ];
            let free: Vec<Result<(), Status>> = vec![
                driver.call(stats(&volume, path(&staging))).map(drop),
                driver.call(get_volume(&volume)).map(drop),
                driver.call(csi::ListVolumesRequest::default()).map(drop),
                driver.call(csi::ListSnapshotsRequest::default()).map(drop),
                driver.call(csi::GetCapacityRequest::default()).map(drop),
                driver.call(csi::ProbeRequest {}).map(drop),
                driver.call(allocated(&a)).map(drop),
                driver.call(delta(&a, &b)).map(drop),
                driver.call(cut("of-other", &other)).map(drop),
                driver.call(from_source("restored", Source::Snapshot(&a), 0)).map(drop),
                driver.call(create("new", MIB, block())).map(drop),
            ];
            let still = driver.call(expand(&volume, 1));
            // Before anything is asserted: a panic here would leave the slow call waiting.
            drop(frozen);
            slow.join().unwrap().unwrap();
            for (number, answer) in busy.into_iter().enumerate() {
                assert_refused(answer, Code::Aborted, "under way", &format!("busy {number}"));
            }
            for (number, answer) in free.into_iter().enumerate() {
                assert!(answer.is_ok(), "free {number}: {answer:?}");
            }
            assert_refused(still, Code::Aborted, "under way", "it held on until the end");
        });
        // Nothing of the refused was done, and each of them works now.
        assert_eq!(all_snapshots(driver).len(), 3);
        driver.snapshot("c", &volume);
        driver.copy("clone", Source::Volume(&volume), block());
    });
}

#[test]
fn a_filesystem_that_somebody_else_froze_is_neither_cut_nor_thawed() {
    with_driver("a_filesystem_that_somebody_else_froze_is_neither_cut_nor_thawed", |driver| {
        let volume = driver.volume("v", 32 * MIB, mounted(""));
        let staging = driver.stage(&volume, &mounted(""));
        let frozen = Freeze::new(&staging);
        driver.refused(cut("a", &volume), Code::Aborted, "frozen");
        // It still is: a second freeze fails.
        let again = std::process::Command::new("fsfreeze").arg("-f").arg(&staging).output();
        assert!(!again.unwrap().status.success());
        drop(frozen);
        assert!(all_snapshots(driver).is_empty());
        driver.snapshot("a", &volume);
        fs::write(staging.join("file"), "x").unwrap();
    });
}

/// Writes a number into the file, again and again the same place.
fn count(file: &mut File, number: u64) {
    file.seek(SeekFrom::Start(0)).unwrap();
    file.write_all(&number.to_le_bytes()).unwrap();
}

fn counted(directory: &Path) -> u64 {
    u64::from_le_bytes(fs::read(directory.join("counter")).unwrap().try_into().unwrap())
}

#[test]
fn a_group_snapshot_holds_one_moment_of_all_of_its_volumes() {
    for_each_driver("a_group_snapshot_holds_one_moment_of_all_of_its_volumes", |driver| {
        let ids = ["a", "b"].map(|name| driver.volume(name, 32 * MIB, mounted("")));
        let targets = [0, 1].map(|number| driver.publish(&ids[number], &mounted("")));
        let stop = AtomicBool::new(false);
        let groups = std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut files =
                    [0, 1].map(|number| File::create(targets[number].join("counter")).unwrap());
                let mut number = 0;
                while !stop.load(Ordering::Relaxed) {
                    number += 1;
                    // First A, then B: at every moment, B is as far as A or one behind.
                    files.iter_mut().for_each(|file| count(file, number));
                }
            });
            let cut = |round: usize| {
                std::thread::sleep(Duration::from_millis(30));
                let order = [&*ids[round % 2], &*ids[(round + 1) % 2]];
                driver.call(cut_group(&format!("g{round}"), &order))
            };
            let groups: Vec<_> = (0..6).map(cut).collect();
            stop.store(true, Ordering::Relaxed);
            groups
        });
        let mut last = 0;
        for (round, group) in groups.into_iter().enumerate() {
            let group = group.unwrap().group_snapshot.unwrap();
            let numbers = [0, 1].map(|number| {
                let mut members = group.snapshots.iter();
                let member = members.find(|one| one.source_volume_id == ids[number]).unwrap();
                let source = Source::Snapshot(&member.snapshot_id);
                let copy = driver.copy(&format!("copy-{round}-{number}"), source, mounted(""));
                let found = counted(&driver.publish(&copy, &mounted("")));
                driver.take_down(&copy);
                driver.ok(delete_volume(&copy));
                found
            });
            let [a, b] = numbers;
            assert!(b == a || b + 1 == a, "round {round}: {a} {b}");
            assert!(a > last, "the pod did not write between {last} and {a}");
            last = a;
        }
    });
}

#[test]
fn of_a_group_that_fails_nothing_remains() {
    if !have_root("of_a_group_that_fails_nothing_remains") {
        return;
    }
    let driver = Driver::start(PoolKind::Reflink);
    let ids = ["a", "b", "c"].map(|name| driver.volume(name, 32 * MIB, mounted("")));
    let stagings = [0, 1].map(|number| driver.stage(&ids[number], &mounted("")));
    let files = |directory: &str| fs::read_dir(driver.data_dir().join(directory)).unwrap().count();
    let request = cut_group("g", &[&ids[0], &ids[1], &ids[2]]);
    let nothing_remains = || {
        assert!(all_snapshots(&driver).is_empty());
        assert_eq!((files("snapshots"), files("records")), (0, 0));
        fs::write(stagings[0].join("file"), "not frozen").unwrap();
        // The members' locks are free.
        ids.iter().for_each(|id| assert!(driver.call(expand(id, 1)).is_ok()));
    };
    let frozen = Freeze::new(&stagings[1]);
    driver.refused(request.clone(), Code::Aborted, "frozen");
    drop(frozen);
    nothing_remains();
    let backing = driver.backing_file(&ids[2]);
    fs::rename(&backing, driver.scratch().join("xfs/away")).unwrap();
    driver.refused(request.clone(), Code::DataLoss, "gone");
    fs::rename(driver.scratch().join("xfs/away"), &backing).unwrap();
    nothing_remains();
    let unknown = cut_group("g", &[&ids[0], NO_VOLUME]);
    driver.refused(unknown, Code::NotFound, NO_VOLUME);
    nothing_remains();
    // The same name again, and now it works.
    assert_eq!(driver.ok(request).group_snapshot.unwrap().snapshots.len(), 3);
}

#[test]
fn at_most_one_raw_member_of_a_group_may_be_written_to() {
    with_driver("at_most_one_raw_member_of_a_group_may_be_written_to", |driver| {
        let [a, b] = ["a", "b"].map(|name| driver.volume(name, MIB, block()));
        let mounted_one = driver.volume("f", 32 * MIB, mounted(""));
        let all = |name: &str| cut_group(name, &[&mounted_one, &a, &b]);
        driver.ok(all("idle"));
        driver.stage(&mounted_one, &mounted(""));
        let device = driver.publish(&a, &block());
        write_buffered(&device, 0, &pattern(1, BLOCK as usize));
        let group = driver.ok(all("one")).group_snapshot.unwrap();
        assert_eq!(group.snapshots.len(), 3);
        assert_eq!(driver.ok(allocated(&group.snapshots[1].snapshot_id)).extents(), [(0, BLOCK)]);
        driver.publish(&b, &block());
        driver.refused(all("two"), Code::FailedPrecondition, "unpublish");
        driver.take_down(&b);
        driver.ok(all("two"));
        let reader = block_as(Mode::SingleNodeReaderOnly);
        driver.publish(&b, &reader);
        driver.ok(all("three"));
        // One by one they can be cut as ever.
        driver.snapshot("alone", &b);
    });
}

#[test]
fn a_group_is_made_found_and_deleted_as_a_whole() {
    with_driver("a_group_is_made_found_and_deleted_as_a_whole", |driver| {
        let ids = ["a", "b", "c"].map(|name| driver.volume(name, MIB, block()));
        let [a, b, c] = ids.each_ref().map(String::as_str);
        let group = driver.ok(cut_group("g", &[a, b])).group_snapshot.unwrap();
        assert!(group.ready_to_use && group.creation_time.is_some());
        let members: Vec<String> =
            group.snapshots.iter().map(|one| one.snapshot_id.clone()).collect();
        for (member, source) in group.snapshots.iter().zip([a, b]) {
            assert_eq!(member.source_volume_id, source);
            assert_eq!(member.group_snapshot_id, group.group_snapshot_id);
            assert_eq!(member.creation_time, group.creation_time);
        }
        // The volumes are a set: their order does not matter.
        for order in [[a, b], [b, a]] {
            assert_eq!(driver.ok(cut_group("g", &order)).group_snapshot.unwrap(), group);
        }
        for other in [&[a][..], &[a, b, c], &[a, c]] {
            driver.refused(cut_group("g", other), Code::AlreadyExists, "name");
        }
        let id = &group.group_snapshot_id;
        let ids = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect::<Vec<_>>();
        let get = |snapshot_ids: Vec<String>| csi::GetVolumeGroupSnapshotRequest {
            group_snapshot_id: id.clone(),
            snapshot_ids,
            ..Default::default()
        };
        let delete = |snapshot_ids: Vec<String>| csi::DeleteVolumeGroupSnapshotRequest {
            group_snapshot_id: id.clone(),
            snapshot_ids,
            ..Default::default()
        };
        for right in [vec![], members.clone(), members.iter().rev().cloned().collect()] {
            assert_eq!(driver.ok(get(right)).group_snapshot.unwrap(), group);
        }
        for wrong in [ids(&[NO_SNAPSHOT]), ids(&[&members[0]]), {
            let mut more = members.clone();
            more.push(NO_SNAPSHOT.to_owned());
            more
        }] {
            driver.refused(get(wrong.clone()), Code::InvalidArgument, "snapshot_ids");
            driver.refused(delete(wrong), Code::InvalidArgument, "snapshot_ids");
        }
        for member in &members {
            driver.refused(delete_snapshot(member), Code::InvalidArgument, "group");
        }
        assert_eq!(all_snapshots(driver), group.snapshots);
        let restored = driver.copy("restored", Source::Snapshot(&members[1]), block());
        let b_now = driver.snapshot("later", b);
        assert!(driver.ok(delta(&members[1], &b_now)).extents().is_empty());

        for _ in 0..2 {
            driver.ok(delete(members.clone()));
        }
        driver.refused(get(vec![]), Code::NotFound, id);
        assert_eq!(all_snapshots(driver).len(), 1);
        assert!(driver.ok(delta(&members[1], &b_now)).extents().is_empty());
        driver.ok(get_volume(&restored));
        let again = driver.ok(cut_group("g", &[a, c])).group_snapshot.unwrap();
        assert_ne!(&again.group_snapshot_id, id);
    });
}

type Case = (&'static str, Box<dyn Fn(&Driver) -> Result<(), Status>>);

fn case<R: Rpc + Clone>(field: &'static str, request: R) -> Case {
    (field, Box::new(move |driver| driver.call(request.clone()).map(drop)))
}

/// Requests of every RPC that takes something, each with one field missing or malformed.
fn malformed(volume: &str) -> Vec<Case> {
    let long = "x".repeat(129);
    let stage = csi::NodeStageVolumeRequest {
        volume_id: volume.to_owned(),
        staging_target_path: "/nowhere/staging".to_owned(),
        volume_capability: Some(mounted("")),
        ..Default::default()
    };
    let publish = csi::NodePublishVolumeRequest {
        volume_id: volume.to_owned(),
        staging_target_path: "/nowhere/staging".to_owned(),
        target_path: "/nowhere/target".to_owned(),
        volume_capability: Some(mounted("")),
        ..Default::default()
    };
    let validate = csi::ValidateVolumeCapabilitiesRequest {
        volume_id: volume.to_owned(),
        volume_capabilities: vec![block()],
        ..Default::default()
    };
    let mut cases = vec![
        case("volume_id", get_volume("")),
        case(
            "capacity_range",
            csi::ControllerExpandVolumeRequest { capacity_range: None, ..expand(volume, 1) },
        ),
        case(
            "volume_capabilities",
            csi::CreateVolumeRequest { volume_capabilities: vec![], ..create("x", MIB, block()) },
        ),
        case(
            "volume_content_source",
            csi::CreateVolumeRequest {
                volume_content_source: Some(csi::VolumeContentSource { r#type: None }),
                ..create("x", MIB, block())
            },
        ),
        case("snapshot_id", from_source("x", Source::Snapshot(""), 0)),
        case("volume_id", from_source("x", Source::Volume(""), 0)),
        case(
            "volume_capabilities",
            csi::ValidateVolumeCapabilitiesRequest {
                volume_capabilities: vec![],
                ..validate.clone()
            },
        ),
        case("source_volume_ids", cut_group("x", &[])),
        case("source_volume_ids", cut_group("x", &[""])),
        case("source_volume_ids", cut_group("x", &[volume, volume])),
        case("staging_target_path", unstaging(volume, "")),
        case("target_path", unpublishing(volume, "")),
        case("volume_path", stats(volume, "")),
        case("volume_path", expand_on_node(volume, Path::new(""))),
    ];
    for id in ["", &long] {
        let group = |id: &str| id.to_owned();
        cases.extend([
            case("name", create(id, MIB, block())),
            case("name", cut(id, volume)),
            case("name", cut_group(id, &[volume])),
            case("volume_id", delete_volume(id)),
            case("volume_id", get_volume(id)),
            case("volume_id", expand(id, 1)),
            case("volume_id", modify(id, &[])),
            case(
                "volume_id",
                csi::ValidateVolumeCapabilitiesRequest { volume_id: group(id), ..validate.clone() },
            ),
            case("source_volume_id", cut("x", id)),
            case("snapshot_id", delete_snapshot(id)),
            case(
                "snapshot_id",
                csi::GetSnapshotRequest { snapshot_id: group(id), ..Default::default() },
            ),
            case(
                "group_snapshot_id",
                csi::GetVolumeGroupSnapshotRequest {
                    group_snapshot_id: group(id),
                    ..Default::default()
                },
            ),
            case(
                "group_snapshot_id",
                csi::DeleteVolumeGroupSnapshotRequest {
                    group_snapshot_id: group(id),
                    ..Default::default()
                },
            ),
            case("snapshot_id", allocated(id)),
            case("base_snapshot_id", delta(id, "snap")),
            case("target_snapshot_id", delta("snap", id)),
            case(
                "volume_id",
                csi::NodeStageVolumeRequest { volume_id: group(id), ..stage.clone() },
            ),
            case(
                "volume_id",
                csi::NodePublishVolumeRequest { volume_id: group(id), ..publish.clone() },
            ),
            case("volume_id", unstaging(id, "/nowhere")),
            case("volume_id", unpublishing(id, "/nowhere")),
            case("volume_id", stats(id, "/nowhere")),
            case("volume_id", expand_on_node(id, Path::new("/nowhere"))),
        ]);
    }
    for name in ["a\nb", "a\0", "\u{1b}[2J"] {
        cases.extend([
            case("name", create(name, MIB, block())),
            case("name", cut(name, volume)),
            case("name", cut_group(name, &[volume])),
        ]);
    }
    let no_mode = csi::VolumeCapability { access_mode: None, ..block() };
    let no_type = csi::VolumeCapability { access_type: None, ..block() };
    let unknown_mode = csi::VolumeCapability {
        access_mode: Some(csi::volume_capability::AccessMode { mode: 99 }),
        ..block()
    };
    let zero_flag = with_flags("", Mode::SingleNodeWriter, &["a\0b"]);
    let many_flags = with_flags("", Mode::SingleNodeWriter, &[&"x".repeat(5000)]);
    let bad = [no_mode, no_type, unknown_mode, zero_flag, many_flags, in_group("wheel")];
    for wanted in bad.into_iter().map(Some).chain([None]) {
        cases.extend([
            case(
                "volume_capability",
                csi::NodeStageVolumeRequest { volume_capability: wanted.clone(), ..stage.clone() },
            ),
            case(
                "volume_capability",
                csi::NodePublishVolumeRequest {
                    volume_capability: wanted.clone(),
                    ..publish.clone()
                },
            ),
        ]);
        if let Some(wanted) = wanted {
            cases.extend([
                case("volume_capabilities", create("x", MIB, wanted.clone())),
                case(
                    "volume_capability",
                    csi::ControllerExpandVolumeRequest {
                        volume_capability: Some(wanted.clone()),
                        ..expand(volume, 1)
                    },
                ),
                case(
                    "volume_capability",
                    csi::NodeExpandVolumeRequest {
                        volume_capability: Some(wanted),
                        ..expand_on_node(volume, Path::new("/nowhere"))
                    },
                ),
            ]);
        }
    }
    let deep = format!("/{}", "x/".repeat(2500));
    for place in ["relative", "/a/../b", "/a\0b", &deep] {
        cases.extend([
            case(
                "staging_target_path",
                csi::NodeStageVolumeRequest {
                    staging_target_path: place.to_owned(),
                    ..stage.clone()
                },
            ),
            case(
                "target_path",
                csi::NodePublishVolumeRequest { target_path: place.to_owned(), ..publish.clone() },
            ),
            case(
                "staging_target_path",
                csi::NodePublishVolumeRequest {
                    staging_target_path: place.to_owned(),
                    ..publish.clone()
                },
            ),
            case("staging_target_path", unstaging(volume, place)),
            case("target_path", unpublishing(volume, place)),
        ]);
    }
    cases.push(case(
        "staging_target_path",
        csi::NodeStageVolumeRequest { staging_target_path: String::new(), ..stage },
    ));
    cases.push(case(
        "target_path",
        csi::NodePublishVolumeRequest { target_path: String::new(), ..publish },
    ));
    cases
}

#[test]
fn a_missing_or_malformed_field_is_refused_by_its_name() {
    with_driver("a_missing_or_malformed_field_is_refused_by_its_name", |driver| {
        let volume = driver.volume("v", 32 * MIB, mounted(""));
        for (number, (field, call)) in malformed(&volume).into_iter().enumerate() {
            assert_refused(call(driver), Code::InvalidArgument, field, &format!("case {number}"));
        }
        assert_eq!(volume_ids(driver), [volume]);
        assert!(all_snapshots(driver).is_empty());
    });
}

/// Every path below a directory, with its content if it is a file.
fn tree(root: &Path) -> BTreeSet<(String, Vec<u8>)> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(root).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(tree(&path));
        }
        found.insert((path.display().to_string(), fs::read(&path).unwrap_or_default()));
    }
    found
}

#[test]
fn a_hostile_id_or_name_is_answered_and_touches_nothing() {
    if !have_root("a_hostile_id_or_name_is_answered_and_touches_nothing") {
        return;
    }
    let driver = Driver::start(PoolKind::Copy);
    let volume = driver.volume("v", MIB, block());
    let precious = driver.scratch().join("precious");
    fs::create_dir_all(precious.join("directory")).unwrap();
    fs::write(precious.join("file"), "precious").unwrap();
    let before = tree(&precious);
    let longest = "x".repeat(128);
    let hostile = [
        "../../../precious/file",
        "../../precious",
        "/etc/passwd",
        "..",
        ".",
        "/",
        "a/b",
        "vol-../../x-0123456789abcdef",
        "\u{202e}txt",
        "%s%n{}$(reboot)`reboot`",
        "'; DROP TABLE volumes; --",
        "--help",
        "ä\u{1F4A9}",
        " ",
        &longest,
    ];
    let known = [
        Code::Ok,
        Code::NotFound,
        Code::InvalidArgument,
        Code::FailedPrecondition,
        Code::AlreadyExists,
    ];
    let mut made = vec![volume.clone()];
    for word in hostile {
        let place = precious.join("file").display().to_string();
        let group = |id: &str| csi::DeleteVolumeGroupSnapshotRequest {
            group_snapshot_id: id.to_owned(),
            ..Default::default()
        };
        let answers: Vec<Result<(), Status>> = vec![
            driver.call(get_volume(word)).map(drop),
            driver.call(delete_volume(word)).map(drop),
            driver.call(expand(word, MIB)).map(drop),
            driver.call(modify(word, &[(word, word)])).map(drop),
            driver.call(modify(word, &[("changeTracking", "true")])).map(drop),
            driver.call(cut("x", word)).map(drop),
            driver.call(delete_snapshot(word)).map(drop),
            driver.call(cut_group("x", &[word])).map(drop),
            driver.call(group(word)).map(drop),
            driver.call(allocated(word)).map(drop),
            driver.call(delta(word, word)).map(drop),
            driver.call(from_source("x", Source::Volume(word), 0)).map(drop),
            driver.call(from_source("x", Source::Snapshot(word), 0)).map(drop),
            driver.call(driver.staging_of("x", &mounted(word))).map(drop),
            driver.call(stats(word, &place)).map(drop),
            driver.call(stats(&volume, &place)).map(drop),
            driver.call(expand_on_node(word, Path::new(&place))).map(drop),
            driver.call(unstaging(word, &place)).map(drop),
            driver.call(unpublishing(word, &place)).map(drop),
        ];
        for (number, answer) in answers.into_iter().enumerate() {
            let code = answer.as_ref().map_or_else(Status::code, |()| Code::Ok);
            assert!(known.contains(&code), "{word:?} {number}: {answer:?}");
        }
        // As a name it is as good as any, and found again.
        let id = driver.volume(word, MIB, block());
        assert_eq!(driver.volume(word, MIB, block()), id);
        assert!(id.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/'), "{id}");
        let snapshot = driver.snapshot(word, &id);
        assert_eq!(driver.snapshot(word, &id), snapshot);
        driver.ok(cut_group(word, &[&id]));
        made.push(id);
    }
    assert_eq!(tree(&precious), before);
    let files: BTreeSet<String> = fs::read_dir(driver.data_dir().join("volumes"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(files, made.into_iter().collect());
    assert!(!driver.log().contains("panic"));
}
