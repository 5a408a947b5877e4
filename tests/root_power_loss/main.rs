//! Power loss: a pool lies in an image file, and at random moments under load the image is copied, as
//! if the power had been cut there. On each copy the driver starts, and every snapshot that was
//! acknowledged before is there with its content, and its deltas miss nothing.
//!
//! A third of the copies is taken while a CreateSnapshot has not returned; a third right after some
//! call was answered, with nothing else under way that could flush what it has left unflushed; a
//! third at any moment.
//!
//! `POWER_LOSS_IMAGES`  copies per kind of pool (100)
//! `POWER_LOSS_KEEP`    a directory for the copies on which something does not hold, before anything
//!                      has touched them (`power-loss` in cargo's directory for tests)

#[path = "../support/mod.rs"]
mod support;

mod disk;
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

use csi_loopback::backend::PoolKind;
use disk::{Disk, Place};
use ledger::{Books, Certainty, Moment};
use load::{Load, MOUNTED, RAW, Stop};
use operator::Operator;
use support::driver::*;
use support::random::Random;
use support::*;
use verify::{Counts, Look};

const IMAGES: usize = 100;
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

/// A copy of a pool's image.
struct Photo {
    path: PathBuf,
    moment: Moment,
    when: When,
    number: usize,
}

/// Takes copies of the image of a pool under load.
struct Photographer<'a> {
    disk: &'a Disk,
    image: &'a Path,
    load: &'a Load,
    operator: Operator<'a>,
    /// How long a cut takes, about.
    cut_takes: Duration,
}

impl Photographer<'_> {
    fn shoot(&mut self, number: usize) -> Photo {
        let when = [When::DuringACut, When::AfterAnAnswer, When::Any][number % 3];
        let path = self.disk.photo(number);
        let moment = match when {
            When::DuringACut => self.during_a_cut(&path),
            When::AfterAnAnswer => self.after_an_answer(number / 3, &path),
            When::Any => self.any_time(number / 3, &path),
        };
        Photo { path, moment, when, number }
    }

    /// Tries until the call has not returned when the copy is complete.
    fn during_a_cut(&mut self, to: &Path) -> Moment {
        let until = Instant::now() + PATIENCE;
        loop {
            assert!(Instant::now() < until, "no copy falls into a cut of {:?}", self.cut_takes);
            self.operator.make_room();
            let volume = if self.operator.random.one_in(4) { MOUNTED } else { RAW };
            let name = self.operator.name();
            let wait =
                Duration::from_nanos(self.operator.random.below(self.cut_takes.as_nanos() as u64));
            let moment = thread::scope(|scope| {
                scope.spawn(|| self.load.cut(&name, &[volume], false));
                thread::sleep(wait);
                copy(self.load, self.image, to)
            });
            let made = self.load.ledger.books().snapshot(&name).unwrap().life.made;
            if made.encloses(moment) {
                self.cut_takes = self.cut_takes * 21 / 20;
                return moment;
            }
            self.cut_takes = self.cut_takes * 9 / 10;
            fs::remove_file(to).unwrap();
        }
    }

    fn after_an_answer(&mut self, turn: usize, to: &Path) -> Moment {
        let _quiet = self.load.quiet();
        self.operator.step(turn);
        copy(self.load, self.image, to)
    }

    fn any_time(&mut self, turn: usize, to: &Path) -> Moment {
        let wait = Duration::from_micros(self.operator.random.below(60_000));
        let (load, image) = (self.load, self.image);
        thread::scope(|scope| {
            let photo = scope.spawn(move || {
                thread::sleep(wait);
                copy(load, image, to)
            });
            self.operator.step(turn);
            photo.join().unwrap()
        })
    }
}

fn copy(load: &Load, image: &Path, to: &Path) -> Moment {
    let after = load.ledger.now();
    disk::clone(image, to);
    Moment { after, before: load.ledger.now() }
}

/// Puts a new pool under load and takes copies of it.
fn take_photos(disk: &Disk, numbers: Range<usize>, seed: u64) -> (Vec<Photo>, Books) {
    let place = disk.make("live");
    let size = disk::POOL_BYTES.to_string();
    let flags = ["--pool-size", &size, "--overcommit", "1000"];
    let load = Load::start(Driver::in_place(disk.kind, &place.at, &flags));
    let mut random = Random::new(seed);
    let seeds = [(); 4].map(|()| random.next());
    let begun = Instant::now();
    load.cut("first", &[RAW], false);
    let mut photographer = Photographer {
        disk,
        image: &place.image,
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
            serve(disk.kind, &place, books, photo.moment);
        }
        let place = disk.after_power_cut(&name, &photo.path);
        let look =
            Look::new(disk.kind, &place.data_dir(), books, photo.moment, photo.number as u64);
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
    let stem = directory.join(format!("{}-{}-{}", disk.kind, std::process::id(), photo.number));
    run("cp", &["--sparse=always", path(&photo.path), path(&stem.with_extension("img"))]);
    let text = format!("{:?}, {:?}: {why}\n", photo.when, photo.moment);
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

fn power_loss(test: &str, kind: PoolKind) {
    if !have_root(test) {
        return;
    }
    let images = std::env::var("POWER_LOSS_IMAGES")
        .map_or(IMAGES, |text| text.parse().expect("POWER_LOSS_IMAGES is a number"));
    let disk = Disk::new(kind);
    let (mut counts, mut failures, mut during) = (Counts::default(), Vec::new(), 0);
    let begun = Instant::now();
    for from in (0..images).step_by(ROUND) {
        let seed = Random::new_seed();
        let started = Instant::now();
        let (photos, books) = take_photos(&disk, from..images.min(from + ROUND), seed);
        let taken = started.elapsed();
        during += photos.iter().filter(|photo| photo.when == When::DuringACut).count();
        let (looked, wrong) = look_at_all(&disk, photos, &books);
        println!("{kind}: taken in {taken:?}, looked at after {:?}: {looked:?}", started.elapsed());
        counts += looked;
        failures.extend(wrong);
        if failures.len() >= KEPT {
            break;
        }
    }
    assert!(
        failures.is_empty(),
        "{kind}: {} images fail:\n{}",
        failures.len(),
        failures.join("\n")
    );
    println!(
        "report: {kind}: {images} images after a power cut, {during} of them during CreateSnapshot: \
         {} acknowledged snapshots with their content, {} deltas, {} blocks differ, 0 missed; {} s",
        counts.snapshots,
        counts.deltas,
        counts.blocks,
        begun.elapsed().as_secs(),
    );
    assert!(during * 3 >= images);
}

#[test]
fn a_reflink_pool_keeps_what_was_acknowledged_through_a_power_cut() {
    const TEST: &str = "a_reflink_pool_keeps_what_was_acknowledged_through_a_power_cut";
    power_loss(TEST, PoolKind::Reflink);
}

#[test]
fn an_image_pool_keeps_what_was_acknowledged_through_a_power_cut() {
    const TEST: &str = "an_image_pool_keeps_what_was_acknowledged_through_a_power_cut";
    power_loss(TEST, PoolKind::Image);
}

#[test]
fn a_copy_pool_keeps_what_was_acknowledged_through_a_power_cut() {
    const TEST: &str = "a_copy_pool_keeps_what_was_acknowledged_through_a_power_cut";
    power_loss(TEST, PoolKind::Copy);
}
