//! The rules of change tracking, one test each, on every kind of pool.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use csi_loopback::backend::{Error, Source, Style, VolumeRequest, check};
use support::*;

#[test]
fn a_delta_reports_exactly_the_written_blocks() {
    for_each_pool(|pool| {
        let volume = pool.volume("v", 64 * MIB);
        let device = pool.attach(&volume.id).target;
        write_direct(&device, 0, &pattern(1, 10 * BLOCK as usize));
        let a = pool.snapshot("a", &volume);
        write_direct(&device, 3 * BLOCK, &pattern(2, BLOCK as usize));
        write_direct(&device, 1000 * BLOCK, &pattern(3, 2 * BLOCK as usize));
        let b = pool.snapshot("b", &volume);
        assert_eq!(blocks(pool.backend().delta(&a.id, &b.id).unwrap()), [3, 1000, 1001]);
        let allocated = whole_blocks(pool.kind(), (0..10).chain([1000, 1001]));
        assert_eq!(blocks(pool.backend().allocated(&b.id).unwrap()), allocated);
        assert!(blocks(pool.backend().delta(&b.id, &b.id).unwrap()).is_empty());
    });
}

#[test]
fn discarded_and_zeroed_blocks_are_changed_not_allocated() {
    for_each_pool(|pool| {
        let volume = pool.volume("v", 64 * MIB);
        let device = pool.attach(&volume.id).target;
        // A partially erased block of the pool remains allocated.
        let unit = block_size_of(pool.kind());
        write_direct(&device, 0, &pattern(1, 64 * unit as usize));
        let a = pool.snapshot("a", &volume);
        discard(&device, 0, 4 * unit);
        zero(&device, 8 * unit, 4 * unit, true);
        zero(&device, 16 * unit, 4 * unit, false);
        let b = pool.snapshot("b", &volume);
        let gone = whole_blocks(
            pool.kind(),
            [0..4, 8..12, 16..20].into_iter().flatten().map(|n| n * unit / BLOCK),
        );
        assert_eq!(blocks(pool.backend().delta(&a.id, &b.id).unwrap()), gone);
        let written = 0..64 * unit / BLOCK;
        let left: Vec<u64> = written.filter(|block| !gone.contains(block)).collect();
        assert_eq!(blocks(pool.backend().allocated(&b.id).unwrap()), left);
    });
}

#[test]
fn written_zeros_are_allocated() {
    for_each_pool(|pool| {
        let volume = pool.volume("v", 64 * MIB);
        let device = pool.attach(&volume.id).target;
        write_direct(&device, BLOCK, &vec![0; BLOCK as usize]);
        let a = pool.snapshot("a", &volume);
        let allocated = blocks(pool.backend().allocated(&a.id).unwrap());
        assert_eq!(allocated, whole_blocks(pool.kind(), [1]));
    });
}

#[test]
fn growth_is_changed_where_it_has_data() {
    for_each_pool(|pool| {
        let volume = pool.volume("v", 64 * MIB);
        let device = pool.attach(&volume.id).target;
        write_direct(&device, 0, &pattern(1, BLOCK as usize));
        let a = pool.snapshot("a", &volume);
        let grown = pool.backend().expand_volume(&volume.id, 128 * MIB, 0).unwrap();
        assert_eq!(grown.capacity_bytes, 128 * MIB);
        write_direct(&device, 100 * MIB, &pattern(2, BLOCK as usize));
        let b = pool.snapshot("b", &volume);
        let delta = pool.backend().delta(&a.id, &b.id).unwrap();
        assert_eq!(delta.capacity_bytes(), 128 * MIB);
        assert_eq!(blocks(delta), [100 * MIB / BLOCK]);
        assert_eq!(pool.backend().allocated(&a.id).unwrap().capacity_bytes(), 64 * MIB);
    });
}

#[test]
fn a_delta_from_a_deleted_base_is_exact() {
    for_each_pool(|pool| {
        let volume = pool.volume("v", 64 * MIB);
        let device = pool.attach(&volume.id).target;
        let mut last: Option<String> = None;
        // Blocks are overwritten directly after the deletion of the snapshot that contains them.
        // Without the hidden baseline they would be overwritten in place, and the change would be
        // missed.
        for round in 0..12 {
            write_direct(&device, round % 3 * BLOCK, &pattern(round, BLOCK as usize));
            let snapshot = pool.snapshot(&format!("s{round}"), &volume);
            if let Some(base) = last {
                let delta = pool.backend().delta(&base, &snapshot.id).unwrap();
                assert_eq!(blocks(delta), [round % 3], "round {round}");
            }
            pool.backend().delete_snapshot(&snapshot.id).unwrap();
            assert!(matches!(pool.backend().snapshot(&snapshot.id), Err(Error::NotFound { .. })));
            if round % 4 == 3 {
                pool.restart();
            }
            last = Some(snapshot.id);
        }
    });
}

#[test]
fn a_delta_across_deleted_snapshots_is_their_union() {
    for_each_pool(|pool| {
        let volume = pool.volume("v", 64 * MIB);
        let device = pool.attach(&volume.id).target;
        let snapshots: Vec<_> = (0..6)
            .map(|number| {
                write_direct(&device, number * 2 * BLOCK, &pattern(number, BLOCK as usize));
                pool.snapshot(&format!("s{number}"), &volume)
            })
            .collect();
        for middle in [1, 3, 4] {
            pool.backend().delete_snapshot(&snapshots[middle].id).unwrap();
        }
        pool.restart();
        let delta = |from: usize, to: usize| {
            blocks(pool.backend().delta(&snapshots[from].id, &snapshots[to].id).unwrap())
        };
        assert_eq!(delta(0, 5), [2, 4, 6, 8, 10]);
        assert_eq!(delta(1, 5), [4, 6, 8, 10]);
        assert_eq!(delta(4, 5), [10]);
        assert_eq!(delta(0, 2), [2, 4]);
        let to_deleted = pool.backend().delta(&snapshots[0].id, &snapshots[4].id);
        assert!(matches!(to_deleted, Err(Error::NotFound { .. })));
    });
}

#[test]
fn a_snapshot_outlives_its_volume() {
    for_each_pool(|pool| {
        let volume = pool.volume("v", 64 * MIB);
        let attached = pool.attach(&volume.id);
        let content = pattern(7, 3 * BLOCK as usize);
        write_direct(&attached.target, 0, &content);
        let a = pool.snapshot("a", &volume);
        write_direct(&attached.target, BLOCK, &pattern(8, BLOCK as usize));
        let b = pool.snapshot("b", &volume);
        pool.detach(&attached);
        pool.backend().delete_volume(&volume.id).unwrap();
        assert_eq!(blocks(pool.backend().delta(&a.id, &b.id).unwrap()), [1]);
        assert!(pool.read_snapshot(&a).starts_with(&content));
        // The last snapshot removes all rows of the volume.
        pool.backend().delete_snapshot(&a.id).unwrap();
        assert_eq!(blocks(pool.backend().delta(&a.id, &b.id).unwrap()), [1]);
        pool.backend().delete_snapshot(&b.id).unwrap();
        assert!(matches!(pool.backend().delta(&a.id, &b.id), Err(Error::NotFound { .. })));
    });
}

#[test]
fn an_unknown_delta_is_refused_with_its_reason() {
    for_each_pool(|pool| {
        let volume = pool.volume("v", 64 * MIB);
        let other = pool.volume("w", 64 * MIB);
        let device = pool.attach(&volume.id).target;
        write_direct(&device, 0, &pattern(1, BLOCK as usize));
        let a = pool.snapshot("a", &volume);
        let b = pool.snapshot("b", &volume);
        let foreign = pool.snapshot("f", &other);
        let backend = pool.backend();
        let newer = backend.delta(&b.id, &a.id).unwrap_err();
        assert!(matches!(newer, Error::Invalid { field: "base_snapshot_id", .. }), "{newer}");
        let alien = backend.delta(&foreign.id, &b.id).unwrap_err();
        assert!(matches!(alien, Error::Invalid { field: "base_snapshot_id", .. }), "{alien}");
        let unknown = backend.delta("snap-x-0123456789abcdef", &b.id).unwrap_err();
        assert!(matches!(unknown, Error::NotFound { .. }), "{unknown}");

        backend.modify_volume(&volume.id, tracking(false)).unwrap();
        let untracked = pool.snapshot("c", &volume);
        backend.modify_volume(&volume.id, tracking(true)).unwrap();
        let tracked = pool.snapshot("d", &volume);
        let again = pool.snapshot("e", &volume);
        for (base, target) in [(&b, &untracked), (&b, &tracked), (&untracked, &tracked)] {
            let refused = backend.delta(&base.id, &target.id).unwrap_err();
            assert!(matches!(refused, Error::Precondition(_)), "{refused}");
            assert!(refused.to_string().contains("full backup"), "{refused}");
        }
        // Queries that do not need the missing records still work.
        let allocated = blocks(backend.allocated(&untracked.id).unwrap());
        assert_eq!(allocated, whole_blocks(pool.kind(), [0]));
        assert!(blocks(backend.delta(&tracked.id, &again.id).unwrap()).is_empty());
        assert!(blocks(backend.delta(&a.id, &b.id).unwrap()).is_empty());
    });
}

#[test]
fn a_restored_volume_and_a_clone_start_a_new_chain() {
    for_each_pool(|pool| {
        let volume = pool.volume("v", 64 * MIB);
        let device = pool.attach(&volume.id).target;
        write_direct(&device, 0, &pattern(1, 4 * BLOCK as usize));
        let a = pool.snapshot("a", &volume);
        let sources = [Source::Snapshot(a.id.clone()), Source::Volume(volume.id.clone())];
        for (number, source) in sources.into_iter().enumerate() {
            let name = format!("copy-{number}");
            let copy = pool.create(&name, VolumeRequest { source: Some(source), ..request() });
            assert_eq!(copy.capacity_bytes, volume.capacity_bytes);
            let attached = pool.attach(&copy.id);
            let first = pool.snapshot(&format!("{name}-1"), &copy);
            write_direct(&attached.target, 2 * BLOCK, &pattern(9, BLOCK as usize));
            let second = pool.snapshot(&format!("{name}-2"), &copy);
            let backend = pool.backend();
            assert_eq!(blocks(backend.delta(&first.id, &second.id).unwrap()), [2]);
            let allocated = blocks(backend.allocated(&first.id).unwrap());
            assert_eq!(allocated, whole_blocks(pool.kind(), 0..4));
            assert!(matches!(backend.delta(&a.id, &second.id), Err(Error::Invalid { .. })));
        }
        // The source is unchanged.
        assert_eq!(pool.read_snapshot(&a)[..], read_all(&device)[..]);
    });
}

#[test]
fn an_interrupted_and_resumed_stream_is_complete() {
    with_pool(ALL_KINDS[1], |pool| {
        let volume = pool.volume("v", 64 * MIB);
        let device = pool.attach(&volume.id).target;
        for number in [0, 1, 2, 7, 9, 10, 100, 16383] {
            write_direct(&device, number * BLOCK, &pattern(number, BLOCK as usize));
        }
        let a = pool.snapshot("a", &volume);
        let extents = |style, from| -> Vec<_> {
            let map = pool.backend().allocated(&a.id).unwrap();
            map.extents(style, from).unwrap().map(|extent| extent.unwrap()).collect()
        };
        for style in [Style::Variable, Style::Fixed(BLOCK), Style::Fixed(4 * BLOCK)] {
            let unit = if let Style::Fixed(size) = style { size } else { BLOCK };
            let whole = extents(style, 0);
            for from in (0..=12 * BLOCK).step_by(1000).chain([64 * MIB - 1, 64 * MIB]) {
                let rest = extents(style, from);
                let start = from / unit * unit;
                let expected: Vec<_> = whole
                    .iter()
                    .filter(|extent| extent.end() > start)
                    .map(|extent| {
                        let skipped = start.saturating_sub(extent.offset);
                        (extent.offset + skipped, extent.length - skipped)
                    })
                    .collect();
                let got: Vec<_> = rest.iter().map(|e| (e.offset, e.length)).collect();
                assert_eq!(got, expected, "{style:?} from {from}");
            }
        }
        let fixed = extents(Style::Fixed(4 * BLOCK), 0);
        assert!(
            fixed
                .iter()
                .all(|extent| extent.length == 4 * BLOCK && extent.offset % (4 * BLOCK) == 0)
        );
        let past = pool.backend().allocated(&a.id).unwrap().extents(Style::Variable, 64 * MIB + 1);
        assert!(matches!(past, Err(Error::OutOfRange(_))));
    });
}

#[test]
fn the_largest_volume_is_tracked_to_its_last_block() {
    if !have_root() {
        return;
    }
    for kind in &ALL_KINDS[..2] {
        let mut pool = Pool::new(*kind);
        let bytes = 64 << 40;
        let volume = pool.volume("v", bytes);
        let device = pool.attach(&volume.id).target;
        let places = [0, (16 << 40) - BLOCK, 16 << 40, (32 << 40) + BLOCK, bytes - BLOCK];
        let a = pool.snapshot("a", &volume);
        for (seed, at) in places.into_iter().enumerate() {
            write_direct(&device, at, &pattern(seed as u64, BLOCK as usize));
        }
        let b = pool.snapshot("b", &volume);
        let expected = places.map(|at| at / BLOCK);
        assert_eq!(blocks(pool.backend().delta(&a.id, &b.id).unwrap()), expected);
        let last = pool.backend().delta(&a.id, &b.id).unwrap();
        let from = last.extents(Style::Variable, bytes - 1).unwrap();
        assert_eq!(from.count(), 1);
        let over = pool.backend().expand_volume(&volume.id, bytes + BLOCK, 0);
        assert!(matches!(over, Err(Error::OutOfRange(_))));
    }
}

#[test]
fn no_tool_can_change_the_blocks_of_a_snapshot() {
    with_pool(ALL_KINDS[0], |pool| {
        let volume = pool.volume("v", 64 * MIB);
        let device = pool.attach(&volume.id).target;
        write_direct(&device, 0, &pattern(1, BLOCK as usize));
        let a = pool.snapshot("a", &volume);
        let flags = |file: &Path| {
            let output =
                Command::new("xfs_io").args(["-r", "-c", "lsattr", path(file)]).output().unwrap();
            String::from_utf8(output.stdout).unwrap().split_once(' ').unwrap().0.to_owned()
        };
        let volume_flags = flags(&pool.data_dir().join("volumes").join(&volume.id));
        assert!(volume_flags.contains('f') && !volume_flags.contains('i'), "{volume_flags}");
        let file = pool.data_dir().join("snapshots").join(&a.id);
        let snapshot_flags = flags(&file);
        assert!(snapshot_flags.contains('f') && snapshot_flags.contains('i'), "{snapshot_flags}");
        assert!(std::fs::File::options().write(true).open(&file).is_err());
        assert!(std::fs::remove_file(&file).is_err());
    });
}

/// Whether the device uses direct I/O after each stage of a volume, before and after a snapshot.
/// Its sectors have 4096 bytes.
fn direct_io_of_stages(pool: &mut Pool) -> [bool; 2] {
    use std::os::unix::fs::MetadataExt;
    let volume = pool.volume("v", 64 * MIB);
    [0, 1].map(|round| {
        let attached = pool.attach(&volume.id);
        // The device number, from the bind-mounted node.
        let rdev = std::fs::metadata(&attached.target).unwrap().rdev();
        let sys = format!("/sys/block/loop{}", nix::sys::stat::minor(rdev));
        let value = |name: &str| std::fs::read_to_string(format!("{sys}/{name}")).unwrap();
        assert_eq!(value("queue/logical_block_size").trim(), "4096", "round {round}");
        write_direct(&attached.target, 0, &pattern(round, 64 << 10));
        pool.snapshot(&format!("s{round}"), &volume);
        let is_direct = value("loop/dio").trim() == "1";
        pool.detach(&attached);
        is_direct
    })
}

#[test]
fn a_device_has_4096_byte_sectors_and_direct_io() {
    for_each_pool(|pool| {
        let is_large = block_size_of(pool.kind()) > BLOCK;
        assert_eq!(direct_io_of_stages(pool), [!is_large; 2]);
    });
}

/// Each flush would otherwise write the log of the pool's filesystem.
#[test]
fn writes_do_not_change_the_times_of_a_backing_file() {
    with_pool(ALL_KINDS[0], |pool| {
        let volume = pool.volume("v", 64 * MIB);
        let file = pool.data_dir().join("volumes").join(&volume.id);
        let modified = || std::fs::metadata(&file).unwrap().modified().unwrap();
        for round in 0..2 {
            let attached = pool.attach(&volume.id);
            write_direct(&attached.target, 0, &pattern(round, BLOCK as usize));
            let before = modified();
            // Times have the granularity of the kernel's timer.
            std::thread::sleep(Duration::from_millis(50));
            write_direct(&attached.target, BLOCK, &pattern(round, BLOCK as usize));
            assert_eq!(modified(), before, "round {round}");
            pool.detach(&attached);
        }
    });
}

#[test]
fn a_device_on_larger_blocks_uses_the_page_cache() {
    if have_root() && have_large_blocks() {
        let pool = &mut Pool::with(ALL_KINDS[1], |config| config.pool_block_size = Some(64 << 10));
        assert_eq!(direct_io_of_stages(pool), [false; 2]);
    }
}

#[test]
fn the_mount_of_an_image_pool_is_not_visible() {
    with_pool(ALL_KINDS[1], |pool| {
        let image = pool.data_dir().join("pool.img");
        let devices = |image: &Path| {
            let output = Command::new("losetup").args(["-j", path(image)]).output().unwrap();
            String::from_utf8(output.stdout).unwrap()
        };
        let device = devices(&image).split(':').next().unwrap().to_owned();
        assert!(device.starts_with("/dev/loop"), "{device}");
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!mounts.contains(&format!(" {device} ")), "{mounts}");
        pool.stop();
        // The kernel writes the filesystem's log before it detaches the device, asynchronously.
        kernel::wait_for("the image is detached", || devices(&image).is_empty());
    });
}

#[test]
fn retention_continues_after_a_dropped_record() {
    let pool = pool_with(ALL_KINDS[1], |config| config.retention = Duration::ZERO);
    let Some(mut pool) = pool else { return };
    let volume = pool.volume("v", 64 * MIB);
    let attached = pool.attach(&volume.id);
    let snapshots: Vec<_> = (0..4)
        .map(|number| {
            write_direct(&attached.target, number * 2 * BLOCK, &pattern(number, BLOCK as usize));
            pool.snapshot(&format!("s{number}"), &volume)
        })
        .collect();
    // The newer one first: its record is dropped, and its row still has the older one as
    // predecessor.
    for number in [2, 1] {
        pool.backend().delete_snapshot(&snapshots[number].id).unwrap();
        std::thread::sleep(Duration::from_millis(1100));
        pool.backend().forget_expired().unwrap();
        let refused = pool.backend().delta(&snapshots[number].id, &snapshots[3].id);
        assert!(matches!(refused, Err(Error::Precondition(_))), "{number}");
        let delta = pool.backend().delta(&snapshots[0].id, &snapshots[3].id).unwrap();
        assert_eq!(blocks(delta), [2, 4, 6]);
    }
    // After another retention period their rows are removed.
    std::thread::sleep(Duration::from_millis(1100));
    pool.backend().forget_expired().unwrap();
    for number in [1, 2] {
        let refused = pool.backend().delta(&snapshots[number].id, &snapshots[3].id);
        assert!(matches!(refused, Err(Error::NotFound { .. })), "{number}: {refused:?}");
    }
    let delta = pool.backend().delta(&snapshots[0].id, &snapshots[3].id).unwrap();
    assert_eq!(blocks(delta), [2, 4, 6]);
    pool.detach(&attached);
    pool.stop();
    let report = check::check(pool.data_dir()).unwrap();
    assert_eq!((report.snapshots, report.findings.as_slice()), (2, &[][..]));
}

#[test]
fn a_pool_without_image_or_catalog_is_damaged_not_new() {
    if !have_root() {
        return;
    }
    for (kind, lost) in [(ALL_KINDS[1], "pool.img"), (ALL_KINDS[2], "catalog.redb")] {
        let mut pool = Pool::new(kind);
        pool.volume("v", 64 * MIB);
        pool.stop();
        let (file, aside) = (pool.data_dir().join(lost), pool.scratch().join(lost));
        std::fs::rename(&file, &aside).unwrap();
        let refused = pool.try_start().unwrap_err();
        assert!(matches!(refused, Error::Damaged(_)), "{refused}");
        assert!(refused.to_string().contains("missing"), "{refused}");
        std::fs::rename(&aside, &file).unwrap();
        pool.start();
        assert_eq!(pool.backend().volumes(None, 0).unwrap().items.len(), 1);
    }
}
