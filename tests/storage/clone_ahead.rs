//! Clones made ahead, in the background after a snapshot with many extents, for the next snapshot.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::time::Duration;

use csi_loopback::backend::{PoolKind, Snapshot, Source, Volume, VolumeRequest};
use support::kernel::wait_for;
use support::*;

/// Every second block is written, so that each is an extent.
const WRITTEN: u64 = 400;

struct Fragmented {
    volume: Volume,
    attached: Attached,
    content: Vec<u8>,
    first: Snapshot,
}

impl Fragmented {
    /// A volume with many extents and a snapshot of it.
    fn new(pool: &mut Pool) -> Self {
        Self::with(pool, 8 * MIB, WRITTEN)
    }

    fn with(pool: &mut Pool, bytes: u64, written: u64) -> Self {
        let volume = pool.volume("v", bytes);
        let attached = pool.attach(&volume.id);
        let content = vec![0; bytes as usize];
        let first = pool.snapshot("empty", &volume);
        let mut made = Self { volume, attached, content, first };
        made.write_all((0..written).map(|number| 2 * number), 1);
        let empty = std::mem::replace(&mut made.first, pool.snapshot("first", &made.volume));
        pool.backend().delete_snapshot(&empty.id).unwrap();
        made
    }

    fn write(&mut self, block: u64, seed: u64) {
        self.write_all([block], seed);
    }

    fn write_all(&mut self, blocks: impl IntoIterator<Item = u64>, seed: u64) {
        let device = File::options().write(true).open(&self.attached.target).unwrap();
        for block in blocks {
            let bytes = pattern(seed + block, BLOCK as usize);
            device.write_all_at(&bytes, block * BLOCK).unwrap();
            let start = (block * BLOCK) as usize;
            self.content[start..start + bytes.len()].copy_from_slice(&bytes);
        }
        device.sync_all().unwrap();
    }

    /// Overwrites a block, fills a hole and makes one. Returns the blocks.
    fn change(&mut self, seed: u64) -> [u64; 3] {
        let [over, fill, hole] = [seed * 2, seed * 2 + 101, seed * 2 + 200];
        self.write(over, 1000 + seed);
        self.write(fill, 2000 + seed);
        zero(&self.attached.target, hole * BLOCK, BLOCK, true);
        let start = (hole * BLOCK) as usize;
        self.content[start..start + BLOCK as usize].fill(0);
        [over, fill, hole]
    }

    /// Takes a snapshot and checks its content and that it reports these changes.
    fn check_next(
        &self,
        pool: &mut Pool,
        base: &Snapshot,
        name: &str,
        changed: &[u64],
    ) -> Snapshot {
        let next = pool.snapshot(name, &self.volume);
        assert_eq!(blocks(pool.backend().delta(&base.id, &next.id).unwrap()), changed, "{name}");
        assert!(pool.read_snapshot(&next) == self.content, "{name} has other content");
        next
    }
}

fn data(pool: &Pool, snapshot: &Snapshot) -> PathBuf {
    pool.data_dir().join("snapshots").join(&snapshot.id)
}

fn clone_of(pool: &Pool, snapshot: &Snapshot) -> PathBuf {
    data(pool, snapshot).with_file_name(format!("{}.next", snapshot.id))
}

/// Waits until the clone made ahead from a snapshot is complete.
fn wait_for_clone(pool: &Pool, snapshot: &Snapshot) -> File {
    let expected = fs::read(data(pool, snapshot)).unwrap();
    wait_for("a clone is made", || {
        fs::read(clone_of(pool, snapshot)).is_ok_and(|found| found == expected)
    });
    File::options().write(true).open(clone_of(pool, snapshot)).unwrap()
}

fn clones(pool: &Pool) -> usize {
    let entries = fs::read_dir(pool.data_dir().join("snapshots")).unwrap();
    entries.filter(|entry| entry.as_ref().unwrap().path().extension().is_some()).count()
}

#[test]
fn a_clone_made_ahead_becomes_the_next_snapshot() {
    with_pool(PoolKind::Reflink, |pool| {
        let mut volume = Fragmented::new(pool);
        let clone = wait_for_clone(pool, &volume.first);
        pool.restart_sound();
        let changed = volume.change(1);
        let first = volume.first.clone();
        let second = volume.check_next(pool, &first, "second", &changed);
        let file = fs::metadata(data(pool, &second)).unwrap();
        assert_eq!(file.ino(), clone.metadata().unwrap().ino());
        assert!(!clone_of(pool, &first).exists());
        assert!(File::options().write(true).open(data(pool, &second)).is_err(), "not immutable");
        wait_for_clone(pool, &second);
        assert_eq!(clones(pool), 1);
        pool.restart_sound();
    });
}

/// A clone is not finished when the next snapshot is taken, or was not begun.
#[test]
fn snapshots_in_a_row_are_exact() {
    for_each_pool(|pool| {
        let mut volume = Fragmented::new(pool);
        let mut base = volume.first.clone();
        for round in 1..30 {
            let changed = volume.change(round);
            base = volume.check_next(pool, &base, &format!("s-{round}"), &changed);
            if round % 7 == 0 {
                pool.restart();
            }
        }
        pool.restart_sound();
    });
}

#[test]
fn a_snapshot_stops_the_clone_that_it_takes() {
    with_pool(PoolKind::Reflink, |pool| {
        let mut volume = Fragmented::with(pool, 64 * MIB, 8000);
        let mut base = volume.first.clone();
        for round in 1..6 {
            let changed: Vec<u64> = (0..250).map(|number| 64 * number + 2 * round).collect();
            volume.write_all(changed.iter().copied(), round << 32);
            base = volume.check_next(pool, &base, &format!("s-{round}"), &changed);
        }
    });
}

/// As after a crash or a power loss.
#[test]
fn a_clone_made_ahead_may_have_any_content() {
    with_pool(PoolKind::Reflink, |pool| {
        let mut volume = Fragmented::new(pool);
        let mut base = volume.first.clone();
        for round in 1..4 {
            let clone = wait_for_clone(pool, &base);
            pool.stop();
            match round {
                1 => clone.write_all_at(&pattern(round, (4 * MIB) as usize), MIB).unwrap(),
                2 => clone.set_len(MIB + 1).unwrap(),
                _ => clone.set_len(0).unwrap(),
            }
            drop(clone);
            pool.start();
            pool.restart_sound();
            let changed = volume.change(round);
            base = volume.check_next(pool, &base, &format!("s-{round}"), &changed);
        }
    });
}

#[test]
fn a_volume_grows_after_a_clone_made_ahead() {
    with_pool(PoolKind::Reflink, |pool| {
        let mut volume = Fragmented::new(pool);
        wait_for_clone(pool, &volume.first);
        pool.backend().expand_volume(&volume.volume.id, 16 * MIB, 0).unwrap();
        volume.content.resize((16 * MIB) as usize, 0);
        volume.write(3000, 1);
        let first = volume.first.clone();
        volume.check_next(pool, &first, "second", &[3000]);
    });
}

#[test]
fn a_clone_made_ahead_ends_with_its_baseline() {
    with_pool(PoolKind::Reflink, |pool| {
        let volume = Fragmented::new(pool);
        let id = &volume.volume.id;
        wait_for_clone(pool, &volume.first);
        // The deleted snapshot remains the baseline.
        pool.backend().delete_snapshot(&volume.first.id).unwrap();
        assert_eq!(clones(pool), 1);
        pool.backend().modify_volume(id, tracking(false)).unwrap();
        assert_eq!(clones(pool), 0);
        let untracked = pool.snapshot("untracked", &volume.volume);
        pool.backend().modify_volume(id, tracking(true)).unwrap();
        let kept = pool.snapshot("kept", &volume.volume);
        wait_for_clone(pool, &kept);
        pool.backend().modify_volume(id, tracking(false)).unwrap();
        assert_eq!(clones(pool), 0, "the baseline still exists as a snapshot");
        pool.backend().modify_volume(id, tracking(true)).unwrap();
        let last = pool.snapshot("last", &volume.volume);
        wait_for_clone(pool, &last);
        pool.detach(&volume.attached);
        pool.backend().delete_volume(id).unwrap();
        assert_eq!(clones(pool), 0, "the volume is deleted");
        for snapshot in [untracked, kept, last] {
            pool.backend().delete_snapshot(&snapshot.id).unwrap();
        }
        pool.restart_sound();
        assert_eq!(fs::read_dir(pool.data_dir().join("snapshots")).unwrap().count(), 0);
    });
}

/// As after a snapshot that an earlier version took.
#[test]
fn an_unused_clone_ends_with_its_snapshot() {
    with_pool(PoolKind::Reflink, |pool| {
        let volume = Fragmented::new(pool);
        wait_for_clone(pool, &volume.first);
        pool.snapshot("second", &volume.volume);
        fs::copy(data(pool, &volume.first), clone_of(pool, &volume.first)).unwrap();
        pool.restart_sound();
        pool.backend().delete_snapshot(&volume.first.id).unwrap();
        assert!(!clone_of(pool, &volume.first).exists());
    });
}

/// A deletion stops a clone that waits, or that is being made.
#[test]
fn a_deleted_volume_leaves_no_clone() {
    with_pool(PoolKind::Reflink, |pool| {
        let volume = Fragmented::with(pool, 64 * MIB, 8000);
        for round in 0..20 {
            let source = Some(Source::Snapshot(volume.first.id.clone()));
            let request = VolumeRequest { source, ..request() };
            let copy = pool.create(&format!("copy-{round}"), request);
            let snapshot = pool.snapshot(&format!("of-copy-{round}"), &copy);
            std::thread::sleep(Duration::from_millis(round / 2));
            pool.backend().delete_volume(&copy.id).unwrap();
            pool.backend().delete_snapshot(&snapshot.id).unwrap();
        }
        wait_for_clone(pool, &volume.first);
        std::thread::sleep(Duration::from_millis(100));
        let names: Vec<_> = fs::read_dir(pool.data_dir().join("snapshots")).unwrap().collect();
        assert!(names.len() <= 2, "the first snapshot and its clone: {names:?}");
        pool.restart_sound();
    });
}

#[test]
fn a_nearly_full_pool_gets_no_clone() {
    if !have_root() {
        return;
    }
    let mut pool = Pool::on_small(PoolKind::Reflink, 400 * MIB, |_| {});
    let mut volume = Fragmented::new(&mut pool);
    wait_for_clone(&pool, &volume.first);
    let filler = pool.data_dir().with_file_name("filler");
    let free = pool.backend().pool_room().unwrap().available;
    run("fallocate", &["-l", &(free - 10 * MIB).to_string(), path(&filler)]);
    let changed = volume.change(1);
    let first = volume.first.clone();
    let second = pool.snapshot("second", &volume.volume);
    assert_eq!(blocks(pool.backend().delta(&first.id, &second.id).unwrap()), changed);
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(clones(&pool), 0);
    fs::remove_file(&filler).unwrap();
    let changed = volume.change(2);
    let third = volume.check_next(&mut pool, &second, "third", &changed);
    wait_for_clone(&pool, &third);
}

#[test]
fn few_extents_and_copy_pools_get_no_clone() {
    with_pool(PoolKind::Reflink, |pool| {
        let volume = pool.volume("v", 8 * MIB);
        let attached = pool.attach(&volume.id);
        write_direct(&attached.target, 0, &pattern(1, MIB as usize));
        pool.snapshot("first", &volume);
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(clones(pool), 0);
    });
    with_pool(PoolKind::Copy, |pool| {
        let _volume = Fragmented::new(pool);
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(clones(pool), 0);
    });
}
