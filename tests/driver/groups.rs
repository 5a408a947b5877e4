//! Group snapshots: one point in time for all members, all or none.

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use csi_loopback::backend::PoolKind;
use csi_loopback::proto::csi::v1 as csi;
use support::driver::*;
use support::{BLOCK, MIB, SetOnDrop, pattern, write_buffered};
use tonic::Code;

use csi::volume_capability::access_mode::Mode;

fn counted(directory: &Path) -> u64 {
    u64::from_le_bytes(fs::read(directory.join("counter")).unwrap().try_into().unwrap())
}

/// Writes a number to the file, always at the same position.
fn count(file: &mut File, number: u64) {
    file.seek(SeekFrom::Start(0)).unwrap();
    file.write_all(&number.to_le_bytes()).unwrap();
}

#[test]
fn a_group_snapshot_has_one_point_in_time() {
    for_each_driver(|driver| {
        let ids = ["a", "b"].map(|name| driver.volume(name, 32 * MIB, mounted("")));
        let targets = [0, 1].map(|number| driver.publish(&ids[number], &mounted("")));
        let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
        let groups = std::thread::scope(|scope| {
            let _stop = SetOnDrop(&stop);
            scope.spawn(|| {
                let mut files =
                    [0, 1].map(|number| File::create(targets[number].join("counter")).unwrap());
                let mut number = 0;
                while !stop.load(Ordering::Relaxed) {
                    number += 1;
                    // First A, then B: at any time, B equals A or is one less.
                    files.iter_mut().for_each(|file| count(file, number));
                    written.store(number, Ordering::Relaxed);
                }
            });
            let take = |round: usize| {
                // Greater than in the previous snapshot, however late the writer is scheduled.
                let before = written.load(Ordering::Relaxed);
                wait_for("the pod continues to write", || {
                    written.load(Ordering::Relaxed) > before + 1
                });
                let order = [&*ids[round % 2], &*ids[(round + 1) % 2]];
                driver.call(create_group_snapshot(&format!("g{round}"), &order))
            };
            (0..6).map(take).collect::<Vec<_>>()
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
fn a_failed_group_snapshot_leaves_nothing() {
    let Some(driver) = driver_with(PoolKind::Reflink, &[]) else { return };
    let ids = ["a", "b", "c"].map(|name| driver.volume(name, 32 * MIB, mounted("")));
    let stagings = [0, 1].map(|number| driver.stage(&ids[number], &mounted("")));
    let files = |directory: &str| fs::read_dir(driver.data_dir().join(directory)).unwrap().count();
    let request = create_group_snapshot("g", &[&ids[0], &ids[1], &ids[2]]);
    let nothing_remains = || {
        assert!(all_snapshots(&driver).is_empty());
        assert_eq!((files("snapshots"), files("records")), (0, 0));
        fs::write(stagings[0].join("file"), "not frozen").unwrap();
        // The locks of the members are released.
        ids.iter().for_each(|id| assert!(driver.call(expand(id, 1)).is_ok()));
    };
    let frozen = Freeze::new(&stagings[1]);
    driver.refused(request.clone(), Code::Aborted, "frozen");
    drop(frozen);
    nothing_remains();
    let backing = driver.backing_file(&ids[2]);
    fs::rename(&backing, driver.scratch().join("xfs/away")).unwrap();
    driver.refused(request.clone(), Code::DataLoss, "is missing");
    fs::rename(driver.scratch().join("xfs/away"), &backing).unwrap();
    nothing_remains();
    let unknown = create_group_snapshot("g", &[&ids[0], NO_VOLUME]);
    driver.refused(unknown, Code::NotFound, NO_VOLUME);
    nothing_remains();
    // The same name again, which succeeds now.
    assert_eq!(driver.ok(request).group_snapshot.unwrap().snapshots.len(), 3);
}

#[test]
fn a_group_has_at_most_one_writable_raw_member() {
    with_driver(|driver| {
        let [a, b] = ["a", "b"].map(|name| driver.volume(name, MIB, block()));
        let mounted_one = driver.volume("f", 32 * MIB, mounted(""));
        let all = |name: &str| create_group_snapshot(name, &[&mounted_one, &a, &b]);
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
        // They can still be snapshotted individually.
        driver.snapshot("alone", &b);
    });
}

#[test]
fn a_group_is_created_found_and_deleted_as_a_whole() {
    with_driver(|driver| {
        let ids = ["a", "b", "c"].map(|name| driver.volume(name, MIB, block()));
        let [a, b, c] = ids.each_ref().map(String::as_str);
        let group = driver.ok(create_group_snapshot("g", &[a, b])).group_snapshot.unwrap();
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
            assert_eq!(
                driver.ok(create_group_snapshot("g", &order)).group_snapshot.unwrap(),
                group
            );
        }
        for other in [&[a][..], &[a, b, c], &[a, c]] {
            driver.refused(create_group_snapshot("g", other), Code::AlreadyExists, "name");
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
        let again = driver.ok(create_group_snapshot("g", &[a, c])).group_snapshot.unwrap();
        assert_ne!(&again.group_snapshot_id, id);
    });
}
