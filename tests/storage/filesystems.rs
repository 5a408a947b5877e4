//! Real filesystems under load, through the socket of the real binary: fio, stress-ng and a writer
//! that records its writes work on a volume while snapshots are taken at random times. Every
//! snapshot passes the filesystem's own check without repair, mounts, and contains one point in
//! time of the writer's file. A snapshot plus the delta to another equals the other in every byte,
//! also if the base is deleted.
//!
//! `FILESYSTEMS_SECONDS` sets the load time for each filesystem on each kind of pool (1).

use std::fs::{self, File};
use std::ops::RangeInclusive;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use csi_loopback::backend::PoolKind;
use csi_loopback::proto::csi::v1 as csi;
use support::delta::apply_and_compare;
use support::driver::*;
use support::exerciser::{Exerciser, History, read_tree};
use support::load::{Load, have_load};
use support::random::Random;
use support::{ALL_KINDS, BLOCK, MIB, SetOnDrop, fsck, have_root, path, run, setting};

use csi::volume_capability::access_mode::Mode;

/// Number of snapshots per load phase. More time means more phases.
const MAX_SETS: usize = 5;
const PIECE: Duration = Duration::from_secs(6);
/// Milliseconds between two snapshots.
const LONGEST_PAUSE: u64 = 600;

fn seconds() -> u64 {
    setting("FILESYSTEMS_SECONDS").unwrap_or(1)
}

/// Instead of a filesystem name: a raw block volume.
const RAW: &str = "raw";
/// Offset of the test's counter. fio uses the space before it.
const COUNTER: u64 = 56 * MIB;

/// The minimum volume size for the load.
fn size_for(fs_type: &str) -> u64 {
    match fs_type {
        RAW => 64 * MIB,
        "ext4" => 256 * MIB,
        "xfs" => 300 * MIB,
        _ => 224 * MIB,
    }
}

fn read_only(fs_type: &str) -> csi::VolumeCapability {
    mounted_as(fs_type, Mode::SingleNodeReaderOnly)
}

/// A volume under load.
struct Member {
    fs_type: &'static str,
    volume: String,
    target: PathBuf,
}

impl Member {
    fn new(driver: &Driver, fs_type: &'static str) -> Self {
        let wanted = if fs_type == RAW { block() } else { mounted(fs_type) };
        let volume = driver.volume(&format!("busy-{fs_type}"), size_for(fs_type), wanted.clone());
        let target = driver.publish(&volume, &wanted);
        Self { fs_type, volume, target }
    }

    fn size(&self) -> u64 {
        size_for(self.fs_type)
    }
}

/// Snapshots of all members at the same time.
struct SnapshotSet {
    parts: Vec<Part>,
    /// Set for several members.
    group: Option<String>,
    /// The counter of the writer before and after.
    steps: RangeInclusive<usize>,
    deleted: bool,
}

/// A snapshot of one member, and a volume created from it immediately.
struct Part {
    snapshot: String,
    restored: String,
}

/// Statistics for the report.
#[derive(Default)]
struct Counts {
    snapshots: usize,
    deleted: usize,
    pairs: usize,
    extents: usize,
    reported: u64,
    differing: u64,
}

impl Counts {
    fn report(&self, what: &str) {
        let Self { snapshots, deleted, pairs, extents, reported, differing } = self;
        println!(
            "report: {what}: {snapshots} snapshots taken under load, {deleted} of them deleted under load, \
             {pairs} pairs compared, {extents} extents, reported/differing {:.2}",
            *reported as f64 / (*differing).max(1) as f64
        );
        assert!(*pairs > 0 && *differing > 0, "{what}: nothing was compared");
    }
}

/// Volumes under load: one, or several as a group.
struct Busy<'a> {
    driver: &'a Driver,
    members: Vec<Member>,
    random: Random,
    counts: Counts,
    names: usize,
}

impl<'a> Busy<'a> {
    fn new(driver: &'a Driver, fs_types: &[&'static str]) -> Self {
        let members = fs_types.iter().map(|fs_type| Member::new(driver, fs_type)).collect();
        let random = Random::new(Random::new_seed());
        Self { driver, members, random, counts: Counts::default(), names: 0 }
    }

    fn name(&mut self, what: &str) -> String {
        self.names += 1;
        format!("{what}-{}", self.names)
    }

    /// Runs load, snapshots and checks for the given load time.
    fn run(mut self, load: Duration) -> Counts {
        let mut kept = None;
        let pieces = load.as_secs_f64() / PIECE.as_secs_f64();
        let pieces = pieces.ceil().max(1.0) as u32;
        for _ in 0..pieces {
            let history = History::default();
            let mut all: Vec<SnapshotSet> = kept.take().into_iter().collect();
            let old = all.len();
            all.extend(self.piece(load / pieces, &history));
            kept = Some(self.compare_all(&mut all));
            all[old..].iter().for_each(|set| self.check_set(set, &history));
            all.iter().for_each(|set| self.remove(set));
        }
        for member in &self.members {
            self.driver.take_down(&member.volume);
            self.driver.with_device(&member.volume, |device| fsck::check(member.fs_type, device));
        }
        self.counts
    }

    fn piece(&mut self, time: Duration, history: &History) -> Vec<SnapshotSet> {
        let scratch = self.driver.scratch();
        let on = |member: &Member| {
            let logs = scratch.join(format!("logs-{}", member.fs_type));
            fs::create_dir_all(&logs).unwrap();
            Load::on_filesystem(&member.target, &logs)
        };
        let loads: Vec<Load> = self.members.iter().map(on).collect();
        let files: Vec<PathBuf> = self.members.iter().map(|m| m.target.join("exercised")).collect();
        let mut writer = Exerciser::new(&files, self.random.next_u64(), history);
        let stop = AtomicBool::new(false);
        let sets = thread::scope(|scope| {
            let _stop = SetOnDrop(&stop);
            scope.spawn(|| writer.run(&stop));
            self.snapshot_for(time, || history.now())
        });
        loads.into_iter().for_each(Load::stop);
        sets
    }

    /// Takes snapshots at random times, at least enough for a pair that is not adjacent.
    fn snapshot_for(&mut self, time: Duration, progress: impl Fn() -> usize) -> Vec<SnapshotSet> {
        let until = Instant::now() + time;
        let mut sets = Vec::new();
        while sets.len() < 3 || (Instant::now() < until && sets.len() < MAX_SETS) {
            thread::sleep(Duration::from_millis(self.random.below(LONGEST_PAUSE)));
            let mounts = self.members.iter().filter(|member| member.fs_type != RAW);
            if self.random.one_in(3) {
                mounts.for_each(|member| run("fstrim", &[path(&member.target)]));
            }
            sets.push(self.take_snapshots(&progress));
            let last = sets.len() >= 3 && (Instant::now() >= until || sets.len() == MAX_SETS);
            // If it is the newest, the next snapshot is compared with its hidden copy.
            let number = self.random.below(sets.len() as u64) as usize;
            if !last && !sets[number].deleted && self.random.one_in(2) {
                self.delete(&mut sets[number]);
                self.counts.deleted += 1;
            }
        }
        sets
    }

    fn take_snapshots(&mut self, progress: impl Fn() -> usize) -> SnapshotSet {
        let name = self.name("snapshot");
        let first = progress();
        let (snapshots, group) = match &*self.members {
            // A writer of a raw volume is not frozen; a copy pool waits for a pause.
            [raw] if raw.fs_type == RAW => {
                let response = self.driver.call_patiently(create_snapshot(&name, &raw.volume));
                (vec![response.unwrap().snapshot.unwrap()], None)
            }
            [one] => {
                (vec![self.driver.ok(create_snapshot(&name, &one.volume)).snapshot.unwrap()], None)
            }
            several => {
                let ids: Vec<&str> = several.iter().map(|one| &*one.volume).collect();
                let group =
                    self.driver.ok(create_group_snapshot(&name, &ids)).group_snapshot.unwrap();
                (group.snapshots, Some(group.group_snapshot_id))
            }
        };
        let steps = first..=progress();
        self.counts.snapshots += 1;
        let of = |member: &Member| {
            let mut all = snapshots.iter();
            let snapshot = all.find(|one| one.source_volume_id == member.volume).unwrap();
            let snapshot = snapshot.snapshot_id.clone();
            let name = format!("{name}-{}", member.fs_type);
            let restored = self.driver.copy(&name, Source::Snapshot(&snapshot), block());
            Part { snapshot, restored }
        };
        SnapshotSet { parts: self.members.iter().map(of).collect(), group, steps, deleted: false }
    }

    fn delete(&self, set: &mut SnapshotSet) {
        let mut ids = set.parts.iter().map(|part| part.snapshot.clone());
        if let Some(group_snapshot_id) = set.group.clone() {
            self.driver.ok(csi::DeleteVolumeGroupSnapshotRequest {
                group_snapshot_id,
                snapshot_ids: ids.collect(),
                ..Default::default()
            });
        } else {
            self.driver.ok(delete_snapshot(&ids.next().unwrap()));
        }
        set.deleted = true;
    }

    /// Compares every snapshot with its allocated blocks and its deltas. Deletes all but the last,
    /// which is returned with new volumes.
    fn compare_all(&mut self, all: &mut [SnapshotSet]) -> SnapshotSet {
        let members = 0..self.members.len();
        for member in members.clone() {
            self.compare_member(member, all);
        }
        // A deleted base gives the same delta.
        let last = all.len() - 1;
        let deltas = |all: &[SnapshotSet]| -> Vec<Vec<(u64, u64)>> {
            let bases = all[..last].iter();
            let one = |base, member| self.delta(base, &all[last], member);
            bases.flat_map(|base| members.clone().map(move |member| one(base, member))).collect()
        };
        let before = deltas(all);
        all[..last].iter_mut().filter(|set| !set.deleted).for_each(|set| self.delete(set));
        assert!(deltas(all) == before, "a deleted base changes the delta");
        let again = |part: &Part| {
            let (name, source) =
                (format!("{}-again", part.snapshot), Source::Volume(&part.restored));
            let restored = self.driver.copy(&name, source, block());
            Part { snapshot: part.snapshot.clone(), restored }
        };
        let SnapshotSet { parts, group, steps, deleted } = &all[last];
        let parts = parts.iter().map(again).collect();
        SnapshotSet { parts, group: group.clone(), steps: steps.clone(), deleted: *deleted }
    }

    fn delta(&self, base: &SnapshotSet, target: &SnapshotSet, member: usize) -> Vec<(u64, u64)> {
        let [base, target] = [base, target].map(|set| &*set.parts[member].snapshot);
        self.driver.ok(delta(base, target)).extents()
    }

    /// Adjacent pairs, and others up to the last. Deleted snapshots are only bases.
    fn pairs(&mut self, all: &[SnapshotSet]) -> Vec<(usize, usize)> {
        let last = all.len() - 1;
        let mut pairs: Vec<(usize, usize)> = (0..last).map(|base| (base, base + 1)).collect();
        pairs.push((0, last));
        pairs.push((self.random.below(last as u64) as usize, last));
        pairs.retain(|(_, target)| !all[*target].deleted);
        pairs.sort_unstable();
        pairs.dedup();
        pairs
    }

    fn compare_member(&mut self, member: usize, all: &[SnapshotSet]) {
        let size = self.members[member].size();
        let part = |number: usize| &all[number].parts[member];
        let open =
            |number| File::open(self.driver.publish(&part(number).restored, &block())).unwrap();
        let devices: Vec<File> = (0..all.len()).map(open).collect();
        for (base, target) in self.pairs(all) {
            let what = format!("delta from {} to {}", part(base).snapshot, part(target).snapshot);
            let extents = self.delta(&all[base], &all[target], member);
            let (from, to) = (Some(&devices[base]), &devices[target]);
            let differing = apply_and_compare(&what, from, to, &extents, size);
            self.counts.pairs += 1;
            self.counts.extents += extents.len();
            self.counts.reported += extents.iter().map(|(_, length)| length / BLOCK).sum::<u64>();
            self.counts.differing += differing;
        }
        for number in (0..all.len()).filter(|number| !all[*number].deleted) {
            let snapshot = &part(number).snapshot;
            let extents = self.driver.ok(allocated(snapshot)).extents();
            let what = format!("what {snapshot} has allocated");
            apply_and_compare(&what, None, &devices[number], &extents, size);
        }
        drop(devices);
        (0..all.len()).for_each(|number| self.driver.take_down(&part(number).restored));
    }

    /// Checks a snapshot with the filesystem's tool and the writer's counter.
    fn check_set(&self, set: &SnapshotSet, history: &History) {
        let parts: Vec<(&Member, &str)> = self
            .members
            .iter()
            .zip(&set.parts)
            .map(|(member, part)| (member, &*part.restored))
            .collect();
        let mut files = Vec::new();
        for (member, restored) in &parts {
            self.driver
                .with_device(restored, |device| fsck::check_frozen_copy(member.fs_type, device));
            let target = self.driver.publish(restored, &read_only(member.fs_type));
            assert!(read_tree(&target) > 0);
            files.push(target.join("exercised"));
        }
        history.holds(&files, set.steps.clone());
        for (member, restored) in &parts {
            self.driver.take_down(restored);
            self.driver.with_device(restored, |device| fsck::check(member.fs_type, device));
        }
    }

    fn remove(&self, set: &SnapshotSet) {
        for part in &set.parts {
            self.driver.ok(delete_volume(&part.restored));
        }
    }
}

impl Busy<'_> {
    /// A snapshot of a raw block volume is as after a power loss: it contains every acknowledged
    /// write.
    fn run_raw(mut self, load: Duration) -> Counts {
        let pause = (self.driver.kind() == PoolKind::Copy).then_some(Duration::from_millis(300));
        let target = self.members[0].target.clone();
        let tools = Load::on_device(&target, COUNTER, pause, self.driver.scratch());
        let (stop, counted) = (AtomicBool::new(false), AtomicUsize::new(0));
        let mut sets = thread::scope(|scope| {
            let _stop = SetOnDrop(&stop);
            scope.spawn(|| {
                let device = File::options().write(true).open(&target).unwrap();
                for number in 1_u64.. {
                    device.write_all_at(&number.to_ne_bytes(), COUNTER).unwrap();
                    counted.store(number as usize, Ordering::SeqCst);
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
            self.snapshot_for(load, || counted.load(Ordering::SeqCst))
        });
        tools.stop();
        self.compare_all(&mut sets);
        for set in sets {
            self.driver.with_device(&set.parts[0].restored, |device| {
                let mut found = [0; 8];
                File::open(device).unwrap().read_exact_at(&mut found, COUNTER).unwrap();
                let (found, steps) = (u64::from_ne_bytes(found) as usize, &set.steps);
                assert!((*steps.start()..=steps.end() + 1).contains(&found), "{found} {steps:?}");
            });
        }
        self.counts
    }
}

/// Runs one filesystem on each kind of pool.
fn on_each_pool(fs_type: &'static str) {
    if !have_root() || !have_load() {
        return;
    }
    for kind in ALL_KINDS {
        println!("{fs_type} on a pool of kind {kind}");
        let driver = Driver::start(kind);
        let counts = Busy::new(&driver, &[fs_type]).run(Duration::from_secs(seconds()));
        counts.report(&format!("{fs_type} on {kind}"));
    }
}

#[test]
#[ignore = "full tier"]
fn snapshots_of_a_busy_ext4_are_clean_with_complete_deltas() {
    on_each_pool("ext4");
}

#[test]
#[ignore = "full tier"]
fn snapshots_of_a_busy_xfs_are_clean_with_complete_deltas() {
    on_each_pool("xfs");
}

#[test]
#[ignore = "full tier"]
fn snapshots_of_a_busy_btrfs_are_clean_with_complete_deltas() {
    on_each_pool("btrfs");
}

/// The writer alternates between the filesystems, so a group must contain the same step of both.
#[test]
#[ignore = "full tier"]
fn a_group_of_busy_filesystems_has_one_point_in_time() {
    if !have_root() || !have_load() {
        return;
    }
    let driver = Driver::start(PoolKind::Image);
    let counts = Busy::new(&driver, &["ext4", "xfs"]).run(Duration::from_secs(seconds()));
    counts.report("a group of ext4 and xfs on image");
}

#[test]
fn snapshots_of_a_busy_raw_volume_have_complete_deltas() {
    if !have_root() || !have_load() {
        return;
    }
    for kind in ALL_KINDS {
        println!("a raw volume on a pool of kind {kind}");
        let driver = Driver::start(kind);
        let counts = Busy::new(&driver, &[RAW]).run_raw(Duration::from_secs(seconds()));
        counts.report(&format!("a raw volume on {kind}"));
    }
}
