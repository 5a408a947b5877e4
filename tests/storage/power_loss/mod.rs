//! Power loss: a pool is in an image file, which is copied at random times under load, as if the
//! power had been cut. On each copy the driver must start, every acknowledged snapshot must exist
//! with its content, and its deltas must be complete.
//!
//! A third of the copies is taken during a CreateSnapshot; a third directly after a response, with
//! no other call in progress that could flush its data; a third at any time.
//!
//! Two kinds are tested again on a disk with a volatile cache, where a copy contains all flushed
//! data and a random part of the rest. (An image pool is a reflink pool on its own loop device.) A
//! copy pool is also tested on btrfs: on XFS and ext4 any fsync makes all names durable, on btrfs
//! only those of its file.
//!
//!     POWER_LOSS_IMAGES  copies per kind of pool (32); a quarter on btrfs and with a cache
//!     POWER_LOSS_KEEP    directory for the unmodified failing copies (`power-loss` in cargo's
//!                        directory for tests)

pub mod cache;
pub mod disk;
mod growth;
mod ledger;
mod load;
mod operator;
mod verify;

use std::fs;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use csi_loopback::backend::{FsType, PoolKind};
use disk::{Disk, Place, Setup};
use ledger::{Certainty, Moment, Records};
use load::{Load, MOUNTED, RAW, Stop};
use operator::Operator;
use support::driver::*;
use support::random::Random;
use support::*;
use verify::{Counts, Look};

const IMAGES: usize = 32;
const REFLINK: Setup = Setup { kind: PoolKind::Reflink, filesystem: FsType::Xfs, cached: false };
const COPY: Setup = Setup { kind: PoolKind::Copy, filesystem: FsType::Ext4, cached: false };

/// Number of copies of one pool.
const ROUND: usize = 20;
/// Maximum number of failing copies to keep: they are large.
const KEPT: usize = 5;
/// Number of copies that are verified in parallel.
const LOOKERS: usize = 2;

/// The activity at the power loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    DuringASnapshot,
    AfterAResponse,
    Any,
}

/// The time of a copy, and the number of lost blocks of the disk's cache.
#[derive(Debug, Clone, Copy)]
struct Taken {
    moment: Moment,
    lost: u64,
}

/// A copy of a pool's image.
struct Capture {
    path: PathBuf,
    taken: Taken,
    when: When,
    number: usize,
}

/// Takes copies of the image of a pool under load.
struct Capturer<'a> {
    disk: &'a Disk,
    place: &'a Place<'a>,
    load: &'a Load,
    operator: Operator<'a>,
    /// The approximate duration of a CreateSnapshot.
    snapshot_duration: Duration,
}

impl Capturer<'_> {
    fn shoot(&mut self, number: usize) -> Capture {
        let when = [When::DuringASnapshot, When::AfterAResponse, When::Any][number % 3];
        let path = self.disk.capture(number);
        let taken = match when {
            When::DuringASnapshot => self.during_a_snapshot(&path),
            When::AfterAResponse => self.after_a_response(number / 3, &path),
            When::Any => self.any_time(number / 3, &path),
        };
        Capture { path, taken, when, number }
    }

    /// Repeats until the copy is complete before the call returns.
    fn during_a_snapshot(&mut self, to: &Path) -> Taken {
        let until = Instant::now() + PATIENCE;
        loop {
            assert!(
                Instant::now() < until,
                "no copy completes within a snapshot of {:?}",
                self.snapshot_duration
            );
            self.operator.make_room();
            let volume = if self.operator.random.one_in(4) { MOUNTED } else { RAW };
            let name = self.operator.name();
            let wait = Duration::from_nanos(
                self.operator.random.below(self.snapshot_duration.as_nanos() as u64),
            );
            let taken = thread::scope(|scope| {
                scope.spawn(|| self.load.take_snapshots(&name, &[volume], false));
                thread::sleep(wait);
                copy(self.load, self.place, to)
            });
            let made = self.load.ledger.records().snapshot(&name).unwrap().life.made;
            if made.encloses(taken.moment) {
                self.snapshot_duration = self.snapshot_duration * 21 / 20;
                return taken;
            }
            self.snapshot_duration = self.snapshot_duration * 9 / 10;
            fs::remove_file(to).unwrap();
        }
    }

    fn after_a_response(&mut self, turn: usize, to: &Path) -> Taken {
        let _quiet = self.load.quiet();
        self.operator.step(turn);
        copy(self.load, self.place, to)
    }

    fn any_time(&mut self, turn: usize, to: &Path) -> Taken {
        let wait = Duration::from_micros(self.operator.random.below(60_000));
        let (load, place) = (self.load, self.place);
        thread::scope(|scope| {
            let capture = scope.spawn(move || {
                thread::sleep(wait);
                copy(load, place, to)
            });
            self.operator.step(turn);
            capture.join().unwrap()
        })
    }
}

fn copy(load: &Load, place: &Place<'_>, to: &Path) -> Taken {
    let after = load.ledger.now();
    let lost = place.copy(to);
    Taken { moment: Moment { after, before: load.ledger.now() }, lost }
}

/// Runs load on a new pool and takes copies of it.
fn take_captures(disk: &Disk, numbers: Range<usize>, seed: u64) -> (Vec<Capture>, Records) {
    let place = disk.make("live");
    let size = disk::POOL_BYTES.to_string();
    let flags = ["--pool-size", &size, "--overcommit", "1000"];
    let load = Load::start(Driver::in_place(disk.setup.kind, &place.at, &flags));
    let mut random = Random::new(seed);
    let seeds = [(); 4].map(|()| random.next_u64());
    let begun = Instant::now();
    load.take_snapshots("first", &[RAW], false);
    let mut photographer = Capturer {
        disk,
        place: &place,
        load: &load,
        operator: Operator::new(&load, "observed", seeds[0]),
        snapshot_duration: begun.elapsed(),
    };
    let captures = thread::scope(|scope| {
        let _stop = Stop(&load);
        scope.spawn(|| load.write_raw(seeds[1]));
        scope.spawn(|| load.write_files(seeds[2]));
        scope.spawn(|| Operator::new(&load, "aside", seeds[3]).work());
        numbers.map(|number| photographer.shoot(number)).collect()
    });
    (captures, load.end())
}

/// The directory for failing copies.
fn kept() -> PathBuf {
    let default = || Path::new(env!("CARGO_TARGET_TMPDIR")).join("power-loss");
    std::env::var_os("POWER_LOSS_KEEP").map_or_else(default, PathBuf::from)
}

/// Verifies a copy. Returns the failure, if any.
fn verify_one(disk: &Disk, capture: &Capture, records: &Records) -> Result<Counts, String> {
    let name = format!("verify-{}", capture.number);
    let looked = catch_unwind(AssertUnwindSafe(|| {
        let first = capture.number.is_multiple_of(ROUND);
        if first {
            let place = disk.after_power_loss(&name, &capture.path);
            serve(disk.setup.kind, &place, records, capture.taken.moment);
        }
        let place = disk.after_power_loss(&name, &capture.path);
        let look = Look::new(
            disk.setup.kind,
            &place.data_dir(),
            records,
            capture.taken.moment,
            capture.number as u64,
        );
        let counts = look.verify();
        if first {
            place.check_filesystem();
        }
        counts
    }));
    looked.map_err(|panic| panic_text(&*panic))
}

/// Starts the driver on a copy and checks that it serves the acknowledged objects.
fn serve(kind: PoolKind, place: &Place<'_>, records: &Records, moment: Moment) {
    let driver = Driver::in_place(kind, &place.at, &[]);
    let listed: Vec<String> =
        all_snapshots(&driver).into_iter().map(|snapshot| snapshot.snapshot_id).collect();
    let certain = |snapshot: &&ledger::Snapshot| snapshot.life.exists(moment) == Certainty::Yes;
    for snapshot in records.snapshots.iter().filter(certain) {
        assert!(listed.contains(&snapshot.id), "{} is not served", snapshot.name);
    }
    if let Some(raw) = records.volume(RAW) {
        let next = driver.snapshot("served", &raw.id);
        let of_raw = |snapshot: &&ledger::Snapshot| {
            snapshot.volume == RAW && snapshot.life.made.at(moment) == Certainty::Yes
        };
        records.snapshots.iter().filter(of_raw).for_each(|base| {
            driver.ok(delta(&base.id, &next));
        });
    }
}

/// Keeps a failing copy.
fn keep_capture(disk: &Disk, capture: &Capture, why: &str) {
    let directory = kept();
    fs::create_dir_all(&directory).unwrap();
    let stem =
        directory.join(format!("{}-{}-{}", disk.setup.kind, std::process::id(), capture.number));
    run("cp", &["--sparse=always", path(&capture.path), path(&stem.with_extension("img"))]);
    let text = format!("{:?}, {:?}: {why}\n", capture.when, capture.taken);
    fs::write(stem.with_extension("txt"), text).unwrap();
    println!("kept {}.img", stem.display());
}

/// Verifies the copies in parallel. Returns the failures.
fn verify_all(disk: &Disk, captures: Vec<Capture>, records: &Records) -> (Counts, Vec<String>) {
    let (queue, results) = (Mutex::new(captures), Mutex::new((Counts::default(), Vec::new())));
    let next = || queue.lock().unwrap().pop();
    thread::scope(|scope| {
        let look = || {
            while let Some(capture) = next() {
                let looked = verify_one(disk, &capture, records);
                let mut results = results.lock().unwrap();
                match looked {
                    Ok(counts) => results.0 += counts,
                    Err(why) => {
                        if results.1.len() < KEPT {
                            keep_capture(disk, &capture, &why);
                        }
                        results.1.push(format!("{} ({:?}): {why}", capture.number, capture.when));
                    }
                }
                fs::remove_file(&capture.path).unwrap();
            }
        };
        (0..LOOKERS).for_each(|_| drop(scope.spawn(look)));
    });
    results.into_inner().unwrap()
}

fn images() -> usize {
    setting("POWER_LOSS_IMAGES").map_or(IMAGES, |images| images as usize)
}

/// Statistics of all copies.
#[derive(Debug, Default)]
struct Seen {
    counts: Counts,
    during: usize,
    lost: u64,
    failures: Vec<String>,
}

fn power_loss(setup: Setup, images: usize) {
    let disk = &Disk::new(setup);
    let begun = Instant::now();
    let mut seen = Seen::default();
    for from in (0..images).step_by(ROUND) {
        let numbers = from..images.min(from + ROUND);
        let (captures, records) = take_captures(disk, numbers, Random::new_seed());
        seen.during +=
            captures.iter().filter(|capture| capture.when == When::DuringASnapshot).count();
        seen.lost += captures.iter().map(|capture| capture.taken.lost).sum::<u64>();
        let (counts, failures) = verify_all(disk, captures, &records);
        seen.counts += counts;
        seen.failures.extend(failures);
        if seen.failures.len() >= KEPT {
            break;
        }
    }
    let failed = seen.failures.len();
    assert!(failed == 0, "{setup}: {failed} images fail:\n{}", seen.failures.join("\n"));
    let Counts { snapshots, deltas, blocks } = seen.counts;
    let (during, seconds) = (seen.during, begun.elapsed().as_secs());
    println!(
        "report: {setup}: {images} images after a power loss, {during} of them during CreateSnapshot: \
         {snapshots} acknowledged snapshots with their content, {deltas} deltas, {blocks} blocks \
         differ, 0 missed; {} blocks of the disk's cache were lost; {seconds} s",
        seen.lost
    );
    assert!(seen.during * 3 >= images, "too few during CreateSnapshot");
}

/// Whether FUSE is available. Prints a message if not.
fn have_fuse() -> bool {
    let there = Path::new("/dev/fuse").exists();
    if !there {
        support::skip("needs /dev/fuse");
    }
    there
}

#[test]
fn a_reflink_pool_keeps_acknowledged_data_after_power_loss() {
    if have_root() {
        power_loss(REFLINK, images());
    }
}

#[test]
fn an_image_pool_keeps_acknowledged_data_after_power_loss() {
    if have_root() {
        power_loss(Setup { kind: PoolKind::Image, ..REFLINK }, images());
    }
}

#[test]
fn a_copy_pool_keeps_acknowledged_data_after_power_loss() {
    if have_root() {
        power_loss(COPY, images());
    }
}

#[test]
#[ignore = "full tier"]
fn a_copy_pool_on_btrfs_keeps_data_after_power_loss() {
    if have_root() {
        power_loss(Setup { filesystem: FsType::Btrfs, ..COPY }, images().div_ceil(4));
    }
}

#[test]
fn a_reflink_pool_keeps_data_when_the_disk_loses_its_cache() {
    if have_root() && have_fuse() {
        power_loss(Setup { cached: true, ..REFLINK }, images().div_ceil(4));
    }
}

#[test]
fn a_copy_pool_keeps_data_when_the_disk_loses_its_cache() {
    if have_root() && have_fuse() {
        power_loss(Setup { cached: true, ..COPY }, images().div_ceil(4));
    }
}
