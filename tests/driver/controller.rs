//! Volumes, snapshots and groups over the wire: responses to repeated, impossible, malformed and
//! hostile requests, and calls that work while a volume is busy.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use csi_loopback::proto::csi::v1 as csi;
use nix::sys::statvfs::statvfs;
use support::driver::*;
use support::{BLOCK, GIB, MIB, SetOnDrop, path, pattern, read_all, run, write_direct};
use tonic::{Code, Status};

use csi::volume_capability::access_mode::Mode;

fn limited(name: &str, required: i64, limit: i64) -> csi::CreateVolumeRequest {
    csi::CreateVolumeRequest {
        capacity_range: Some(range(required, limit)),
        ..create(name, 0, block())
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

/// A volume restored to twice its source's size has a filesystem of that size after staging.
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
fn a_repeated_create_returns_the_volume_or_already_exists() {
    with_driver(|driver| {
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
            // The order of capabilities does not matter, nor do keys that only Kubernetes reads.
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
        // A released name creates another volume.
        driver.ok(delete_volume(&source));
        assert_ne!(driver.volume("source", MIB, block()), source);
    });
}

#[test]
fn concurrent_equal_requests_create_one_object() {
    with_driver(|driver| {
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
                let made = driver.call_patiently(create_snapshot(&name, &volume))?;
                Ok(made.snapshot.unwrap().snapshot_id)
            });
        }
        assert_eq!((volume_ids(driver).len(), all_snapshots(driver).len()), (10, 10));
    });
}

#[test]
fn create_is_idempotent_after_an_expansion() {
    with_driver(|driver| {
        let volume = driver.volume("v", MIB, block());
        driver.ok(expand(&volume, 2 * MIB));
        let again = driver.ok(create("v", MIB, block())).volume.unwrap();
        assert_eq!((again.volume_id, again.capacity_bytes as u64), (volume, 2 * MIB));
    });
}

#[test]
fn a_new_volume_has_the_requested_capacity_in_blocks() {
    with_driver(|driver| {
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
fn a_copy_is_never_smaller_than_its_source() {
    with_driver(|driver| {
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

#[test]
fn a_restore_to_a_larger_volume_grows_at_stage() {
    with_driver(|driver| {
        for (fs_type, mib) in [("ext4", 32), ("xfs", 300), ("btrfs", 128)] {
            grows_at_stage(driver, fs_type, mib);
        }
    });
}

#[test]
fn a_filesystem_can_be_restored_as_a_block_volume_and_back() {
    with_driver(|driver| {
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
fn a_clone_of_a_volume_in_use_is_consistent() {
    for_each_driver(|driver| {
        let source = driver.volume("source", 64 * MIB, mounted(""));
        let target = driver.publish(&source, &mounted(""));
        let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
        let clones: Vec<Result<String, Status>> = std::thread::scope(|scope| {
            let _stop = SetOnDrop(&stop);
            scope.spawn(|| {
                let mut number = 0u64;
                while !stop.load(Ordering::Relaxed) {
                    number += 1;
                    let name = target.join(format!("file-{}", number % 20));
                    fs::write(name, pattern(number, 20_000)).unwrap();
                    written.store(number, Ordering::Relaxed);
                }
            });
            let clone = |number: u32| {
                let before = written.load(Ordering::Relaxed);
                wait_for("the pod writes", || written.load(Ordering::Relaxed) > before);
                let request = csi::CreateVolumeRequest {
                    volume_content_source: Some(Source::Volume(&source).into()),
                    ..create(&format!("clone-{number}"), 0, mounted(""))
                };
                driver.call(request).map(|answer| answer.volume.unwrap().volume_id)
            };
            (0..2).map(clone).collect()
        });
        for clone in clones {
            let clone = clone.unwrap();
            // Mounting replays the journal; then nothing needs repair.
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
fn volumes_and_snapshots_are_created_on_this_node_only() {
    with_driver(|driver| {
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
        let snapshot = |name: &str, requisite: Vec<csi::Topology>| csi::CreateSnapshotRequest {
            accessibility_requirements: Some(csi::TopologyRequirement {
                requisite,
                preferred: Vec::new(),
            }),
            ..create_snapshot(name, &made.volume_id)
        };
        let elsewhere = snapshot("elsewhere", vec![at("node-2")]);
        driver.refused(elsewhere, Code::ResourceExhausted, "accessibility_requirements");
        let taken = driver.ok(snapshot("here", vec![at("node-2"), at("node-1")])).snapshot.unwrap();
        assert_eq!(taken.accessible_topology, [at("node-1")]);
        assert_eq!(all_snapshots(driver), [taken]);
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
fn only_unknown_parameters_are_refused() {
    with_driver(|driver| {
        let volume = driver.volume("v", MIB, block());
        let kubernetes = map(&[
            ("csi.storage.k8s.io/pvc/name", "claim"),
            ("csi.storage.k8s.io/volumesnapshot/name", "s"),
            ("storage.kubernetes.io/csiProvisionerIdentity", "1"),
        ]);
        let unknown = map(&[("csi.storage.k8s.io/pvc/name", "claim"), ("colour", "red")]);
        let calls = |name: &str, values: &HashMap<String, String>| {
            macro_rules! call {
                ($field:ident, $request:expr) => {{
                    let mut request = $request;
                    request.$field.clone_from(values);
                    (stringify!($field), driver.call(request).map(drop))
                }};
            }
            [
                call!(parameters, create(name, MIB, block())),
                call!(mutable_parameters, create(name, MIB, block())),
                call!(parameters, create_snapshot(name, &volume)),
                call!(parameters, create_group_snapshot(name, &[&volume])),
                call!(parameters, csi::GetCapacityRequest::default()),
                call!(mutable_parameters, modify(&volume, &[])),
            ]
        };
        for (field, answer) in calls("known", &kubernetes) {
            assert!(answer.is_ok(), "{field}: {answer:?}");
        }
        for (field, answer) in calls("unknown", &unknown) {
            let words = format!("{field}: unknown key \"colour\"");
            assert_refused(answer, Code::InvalidArgument, &words, field);
        }
    });
}

#[test]
fn change_tracking_is_a_parameter_and_can_be_modified() {
    with_driver(|driver| {
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
            driver.ok(modify(volume, &[("changePrecision", "block")]));
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
    with_driver(|driver| {
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
            driver.refused(create_snapshot("x", &volume), Code::NotFound, &volume);
            let request = driver.staging_of(&volume, &wanted);
            driver.refused(request, Code::NotFound, &volume);
            driver.copy(&format!("back-{name}"), Source::Snapshot(&snapshot), wanted);
        }
    });
}

#[test]
fn expansion_never_shrinks_and_respects_limits() {
    with_driver(|driver| {
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
        driver.refused(expand(NO_VOLUME, GIB), Code::NotFound, NO_VOLUME);
        let found = driver.ok(get_volume(&volume)).volume.unwrap();
        assert_eq!(found.capacity_bytes as u64, 5 * MIB + BLOCK);
    });
}

#[test]
fn unsupported_capabilities_are_not_confirmed() {
    with_driver(|driver| {
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
            &[block(), block_as(Mode::MultiNodeSingleWriter)],
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
        // CreateVolume refuses unsupported capabilities.
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
