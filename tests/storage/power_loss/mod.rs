//! Power loss: a pool lies in an image file, and at random moments under load the image is copied, as
//! if the power had been cut there. On each copy the driver starts, and every snapshot that was
//! acknowledged before is there with its content, and its deltas miss nothing.
//!
//! A third of the copies is taken while a CreateSnapshot has not returned; a third right after some
//! call was answered, with nothing else under way that could flush what it has left unflushed; a
//! third at any moment.
//!
//! Two kinds are looked at a second time on a disk with a cache that does not survive: there a copy has
//! all that was flushed and, of the rest, what chance decides. (An image pool is a reflink pool on a
//! loop device of its own.) And a copy pool is looked at on btrfs too: on XFS and ext4 any fsync makes
//! all names durable, on btrfs that of one file does nothing for the others.
//!
//! `POWER_LOSS_IMAGES`  copies per kind of pool (100); a fourth of it on btrfs and with a cache
//! `POWER_LOSS_KEEP`    a directory for the copies on which something does not hold, before anything
//!                      has touched them (`power-loss` in cargo's directory for tests)

pub mod cache;
pub mod disk;
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
use ledger::{Books, Certainty, Moment};
use load::{Load, MOUNTED, RAW, Stop};
use operator::Operator;
use support::driver::*;
use support::random::Random;
use support::*;
use verify::{Counts, Look};

const IMAGES: usize = 100;
const REFLINK: Setup = Setup { kind: PoolKind::Reflink, filesystem: FsType::Xfs, cached: false };
const COPY: Setup = Setup { kind: PoolKind::Copy, filesystem: FsType::Ext4, cached: false };

/// Copies of one pool. Then there is a new one.
const ROUND: usize = 20;
/// Failing copies that are kept at most: they are large.
const KEPT: usize = 5;
/// Copies that are looked at side by side.
const LOOKERS: usize = 2;

/// What is under way when the power fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    DuringACut,
    AfterAnAnswer,
    Any,
}

/// When a copy was made, and how many blocks of the disk's cache it lacks.
#[derive(Debug, Clone, Copy)]
struct Taken {
    moment: Moment,
    lost: u64,
}

/// A copy of a pool's image.
struct Photo {
    path: PathBuf,
    taken: Taken,
    when: When,
    number: usize,
}

/// Takes copies of the image of a pool under load.
struct Photographer<'a> {
    disk: &'a Disk,
    place: &'a Place<'a>,
    load: &'a Load,
    operator: Operator<'a>,
    /// How long a cut takes, about.
    cut_takes: Duration,
}

impl Photographer<'_> {
    fn shoot(&mut self, number: usize) -> Photo {
        let when = [When::DuringACut, When::AfterAnAnswer, When::Any][number % 3];
        let path = self.disk.photo(number);
        let taken = match when {
            When::DuringACut => self.during_a_cut(&path),
            When::AfterAnAnswer => self.after_an_answer(number / 3, &path),
            When::Any => self.any_time(number / 3, &path),
        };
        Photo { path, taken, when, number }
    }

    /// Tries until the call has not returned when the copy is complete.
    fn during_a_cut(&mut self, to: &Path) -> Taken {
        let until = Instant::now() + PATIENCE;
        loop {
            assert!(Instant::now() < until, "no copy falls into a cut of {:?}", self.cut_takes);
            self.operator.make_room();
            let volume = if self.operator.random.one_in(4) { MOUNTED } else { RAW };
            let name = self.operator.name();
            let wait =
                Duration::from_nanos(self.operator.random.below(self.cut_takes.as_nanos() as u64));
            let taken = thread::scope(|scope| {
                scope.spawn(|| self.load.cut(&name, &[volume], false));
                thread::sleep(wait);
                copy(self.load, self.place, to)
            });
            let made = self.load.ledger.books().snapshot(&name).unwrap().life.made;
            if made.encloses(taken.moment) {
                self.cut_takes = self.cut_takes * 21 / 20;
                return taken;
            }
            self.cut_takes = self.cut_takes * 9 / 10;
            fs::remove_file(to).unwrap();
        }
    }

    fn after_an_answer(&mut self, turn: usize, to: &Path) -> Taken {
        let _quiet = self.load.quiet();
        self.operator.step(turn);
        copy(self.load, self.place, to)
    }

    fn any_time(&mut self, turn: usize, to: &Path) -> Taken {
        let wait = Duration::from_micros(self.operator.random.below(60_000));
        let (load, place) = (self.load, self.place);
        thread::scope(|scope| {
            let photo = scope.spawn(move || {
                thread::sleep(wait);
                copy(load, place, to)
            });
            self.operator.step(turn);
            photo.join().unwrap()
        })
    }
}

fn copy(load: &Load, place: &Place<'_>, to: &Path) -> Taken {
    let after = load.ledger.now();
    let lost = place.copy(to);
    Taken { moment: Moment { after, before: load.ledger.now() }, lost }
}

/// Puts a new pool under load and takes copies of it.
fn take_photos(disk: &Disk, numbers: Range<usize>, seed: u64) -> (Vec<Photo>, Books) {
    let place = disk.make("live");
    let size = disk::POOL_BYTES.to_string();
    let flags = ["--pool-size", &size, "--overcommit", "1000"];
    let load = Load::start(Driver::in_place(disk.setup.kind, &place.at, &flags));
    let mut random = Random::new(seed);
    let seeds = [(); 4].map(|()| random.next_u64());
    let begun = Instant::now();
    load.cut("first", &[RAW], false);
    let mut photographer = Photographer {
        disk,
        place: &place,
        load: &load,
        operator: Operator::new(&load, "photographed", seeds[0]),
        cut_takes: begun.elapsed(),
    };
    let photos = thread::scope(|scope| {
        let _stop = Stop(&load);
        scope.spawn(|| load.write_raw(seeds[1]));
        scope.spawn(|| load.write_files(seeds[2]));
        scope.spawn(|| Operator::new(&load, "aside", seeds[3]).work());
        numbers.map(|number| photographer.shoot(number)).collect()
    });
    (photos, load.end())
}

/// Where failing copies go.
fn kept() -> PathBuf {
    let default = || Path::new(env!("CARGO_TARGET_TMPDIR")).join("power-loss");
    std::env::var_os("POWER_LOSS_KEEP").map_or_else(default, PathBuf::from)
}

/// Looks at a copy; what does not hold on it, if anything.
fn look_at(disk: &Disk, photo: &Photo, books: &Books) -> Result<Counts, String> {
    let name = format!("look-{}", photo.number);
    let looked = catch_unwind(AssertUnwindSafe(|| {
        let first = photo.number.is_multiple_of(ROUND);
        if first {
            let place = disk.after_power_cut(&name, &photo.path);
            serve(disk.setup.kind, &place, books, photo.taken.moment);
        }
        let place = disk.after_power_cut(&name, &photo.path);
        let look = Look::new(
            disk.setup.kind,
            &place.data_dir(),
            books,
            photo.taken.moment,
            photo.number as u64,
        );
        let counts = look.verify();
        if first {
            place.check_filesystem();
        }
        counts
    }));
    looked.map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
            .unwrap_or_default()
    })
}

/// The process itself starts on a copy and serves what had been acknowledged.
fn serve(kind: PoolKind, place: &Place<'_>, books: &Books, moment: Moment) {
    let driver = Driver::in_place(kind, &place.at, &[]);
    let listed: Vec<String> =
        all_snapshots(&driver).into_iter().map(|snapshot| snapshot.snapshot_id).collect();
    let certain = |snapshot: &&ledger::Snapshot| snapshot.life.exists(moment) == Certainty::Yes;
    for snapshot in books.snapshots.iter().filter(certain) {
        assert!(listed.contains(&snapshot.id), "{} is not served", snapshot.name);
    }
    if let Some(raw) = books.volume(RAW) {
        let next = driver.snapshot("served", &raw.id);
        let of_raw = |snapshot: &&ledger::Snapshot| {
            snapshot.volume == RAW && snapshot.life.made.at(moment) == Certainty::Yes
        };
        books.snapshots.iter().filter(of_raw).for_each(|base| {
            driver.ok(delta(&base.id, &next));
        });
    }
}

/// Keeps a failing copy.
fn keep_photo(disk: &Disk, photo: &Photo, why: &str) {
    let directory = kept();
    fs::create_dir_all(&directory).unwrap();
    let stem =
        directory.join(format!("{}-{}-{}", disk.setup.kind, std::process::id(), photo.number));
    run("cp", &["--sparse=always", path(&photo.path), path(&stem.with_extension("img"))]);
    let text = format!("{:?}, {:?}: {why}\n", photo.when, photo.taken);
    fs::write(stem.with_extension("txt"), text).unwrap();
    println!("kept {}.img", stem.display());
}

/// Looks at the copies, several at a time. Returns what does not hold.
fn look_at_all(disk: &Disk, photos: Vec<Photo>, books: &Books) -> (Counts, Vec<String>) {
    let (queue, results) = (Mutex::new(photos), Mutex::new((Counts::default(), Vec::new())));
    let next = || queue.lock().unwrap().pop();
    thread::scope(|scope| {
        let look = || {
            while let Some(photo) = next() {
                let looked = look_at(disk, &photo, books);
                let mut results = results.lock().unwrap();
                match looked {
                    Ok(counts) => results.0 += counts,
                    Err(why) => {
                        if results.1.len() < KEPT {
                            keep_photo(disk, &photo, &why);
                        }
                        results.1.push(format!("{} ({:?}): {why}", photo.number, photo.when));
                    }
                }
                fs::remove_file(&photo.path).unwrap();
            }
        };
        (0..LOOKERS).for_each(|_| drop(scope.spawn(look)));
    });
    results.into_inner().unwrap()
}

fn images() -> usize {
    std::env::var("POWER_LOSS_IMAGES")
        .map_or(IMAGES, |text| text.parse().expect("POWER_LOSS_IMAGES is a number"))
}

/// What was seen on all copies.
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
        let (photos, books) = take_photos(disk, numbers, Random::new_seed());
        seen.during += photos.iter().filter(|photo| photo.when == When::DuringACut).count();
        seen.lost += photos.iter().map(|photo| photo.taken.lost).sum::<u64>();
        let (counts, failures) = look_at_all(disk, photos, &books);
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
        "report: {setup}: {images} images after a power cut, {during} of them during CreateSnapshot: \
         {snapshots} acknowledged snapshots with their content, {deltas} deltas, {blocks} blocks \
         differ, 0 missed; {} blocks of the disk's cache were lost; {seconds} s",
        seen.lost
    );
    assert!(seen.during * 3 >= images, "too few during CreateSnapshot");
}

/// Whether a disk can be served; says so when not.
fn have_fuse() -> bool {
    let there = Path::new("/dev/fuse").exists();
    if !there {
        support::skip("needs /dev/fuse");
    }
    there
}

#[test]
fn a_reflink_pool_keeps_what_was_acknowledged_through_a_power_cut() {
    if have_root() {
        power_loss(REFLINK, images());
    }
}

#[test]
fn an_image_pool_keeps_what_was_acknowledged_through_a_power_cut() {
    if have_root() {
        power_loss(Setup { kind: PoolKind::Image, ..REFLINK }, images());
    }
}

#[test]
fn a_copy_pool_keeps_what_was_acknowledged_through_a_power_cut() {
    if have_root() {
        power_loss(COPY, images());
    }
}

#[test]
#[ignore = "full tier"]
fn a_copy_pool_on_btrfs_keeps_what_was_acknowledged_through_a_power_cut() {
    if have_root() {
        power_loss(Setup { filesystem: FsType::Btrfs, ..COPY }, images().div_ceil(4));
    }
}

#[test]
fn a_reflink_pool_keeps_what_was_acknowledged_when_the_disk_loses_its_cache() {
    if have_root() && have_fuse() {
        power_loss(Setup { cached: true, ..REFLINK }, images().div_ceil(4));
    }
}

#[test]
fn a_copy_pool_keeps_what_was_acknowledged_when_the_disk_loses_its_cache() {
    if have_root() && have_fuse() {
        power_loss(Setup { cached: true, ..COPY }, images().div_ceil(4));
    }
}
