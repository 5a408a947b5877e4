//! The fuzz targets of fuzz/targets, without libFuzzer: each replays its seeds, and then runs a
//! fixed number of mutations of them. hack/soak.sh explores further with libFuzzer.
//!
//! FUZZ_INPUTS  mutated inputs per target
//! FUZZ_SEED    seed of the mutations (random)
//! FUZZ_INPUT   file with the only input to run

use std::any::Any;
use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::thread;
use std::time::Duration;

use csi_loopback_fuzz_targets::{TARGETS, each_target};
use support::random::Random;
use support::{panic_text, setting};

use crate::tree::root;

/// The limits of hack/soak.sh.
const MAX_BYTES: usize = 8192;
const LIMIT: Duration = Duration::from_secs(20);

/// About 3 s per target.
const INPUTS: u64 = 50_000;

macro_rules! tests {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            explore(stringify!($name), csi_loopback_fuzz_targets::$name);
        })*
    };
}

each_target!(tests);

#[test]
fn each_target_has_seeds_and_a_binary_of_libfuzzer() {
    let targets: BTreeSet<String> = TARGETS.iter().map(|(name, _)| name.to_string()).collect();
    assert_eq!(names_in("fuzz/seeds"), targets);
    assert_eq!(names_in("fuzz/fuzz_targets"), targets);
}

/// The files and directories of a directory, without their extensions.
fn names_in(directory: &str) -> BTreeSet<String> {
    let stem = |path: &PathBuf| path.file_stem().unwrap().to_str().unwrap().to_owned();
    files_of(&root().join(directory)).iter().map(stem).collect()
}

fn explore(name: &str, target: fn(&[u8])) {
    let runner = Runner::new(target);
    let replay = |file: &Path| {
        let input = fs::read(file).unwrap();
        runner.run(&input).unwrap_or_else(|failure| fail(name, file, &failure));
        input
    };
    if let Some(file) = env::var_os("FUZZ_INPUT") {
        replay(file.as_ref());
        return;
    }
    let seeds: Vec<Vec<u8>> =
        files_of(&root().join("fuzz/seeds").join(name)).iter().map(|f| replay(f)).collect();
    let inputs = setting("FUZZ_INPUTS").unwrap_or(INPUTS) / share(name);
    let seed = setting("FUZZ_SEED").unwrap_or_else(Random::new_seed);
    support::report(&format!("{} seeds, {inputs} inputs from seed {seed}", seeds.len()));
    let mut random = Random::new(seed);
    for number in 0..inputs {
        let input = input(&mut random, &seeds);
        if let Err(failure) = runner.run(&input) {
            let file = save(&format!("{name}-{seed}-{number}"), &input);
            fail(name, &file, &format!("input {number} from seed {seed}: {failure}"));
        }
    }
}

fn fail(name: &str, file: &Path, failure: &str) -> ! {
    let file = file.display();
    panic!(
        "{failure}\nThe input is in {file}. To replay it:\n\
         FUZZ_INPUT={file} cargo test --locked --all-features --test no_root fuzz::{name} -- --exact"
    );
}

/// Divisor of a target's number of inputs, so that all targets take a similar time: an input of
/// `catalog` takes 2 ms, because the target reads a whole database, and an input of `rows` 30 µs.
fn share(name: &str) -> u64 {
    match name {
        "catalog" => 40,
        "paging" | "record_damage" => 20,
        "text" => 5,
        _ => 1,
    }
}

fn files_of(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// Saves the input with the logs of hack/test.sh.
fn save(name: &str, input: &[u8]) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("test-logs").join("fuzz");
    let written = fs::create_dir_all(&directory)
        .and_then(|()| fs::write(directory.join(name), input).map(|()| directory.join(name)));
    written.unwrap_or_else(|_| {
        // The directory can belong to another user.
        let file = env::temp_dir().join(name);
        fs::write(&file, input).unwrap();
        file
    })
}

/// Runs a target on a separate thread, which is abandoned when an input exceeds the time limit.
struct Runner {
    inputs: SyncSender<Vec<u8>>,
    results: Receiver<Result<(), Box<dyn Any + Send>>>,
}

impl Runner {
    fn new(target: fn(&[u8])) -> Self {
        let (inputs, received) = sync_channel::<Vec<u8>>(0);
        let (reported, results) = channel();
        thread::spawn(move || {
            for input in received {
                let _ = reported.send(catch_unwind(|| target(&input)));
            }
        });
        Self { inputs, results }
    }

    /// Returns the panic message of the target as error.
    fn run(&self, input: &[u8]) -> Result<(), String> {
        self.inputs.send(input.to_vec()).unwrap();
        match self.results.recv_timeout(LIMIT) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(panic)) => Err(panic_text(&*panic)),
            Err(_) => Err(format!("the input took longer than {LIMIT:?}")),
        }
    }
}

/// A seed with up to six mutations. The same random numbers give the same input.
fn input(random: &mut Random, seeds: &[Vec<u8>]) -> Vec<u8> {
    let seed = |random: &mut Random| random.pick(seeds).expect("a target has a seed").clone();
    let mut bytes = seed(random);
    for _ in 0..=random.below(6) {
        // An offset in the bytes, or their length.
        let at = random.below(bytes.len() as u64 + 1) as usize;
        let run = at..(at + 1 + random.below(16) as usize).min(bytes.len());
        match random.below(6) {
            0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            1 if at < bytes.len() => bytes[at] = random.next_u64() as u8,
            2 => drop(bytes.splice(at..at, random.next_u64().to_le_bytes())),
            3 => drop(bytes.drain(run)),
            4 => {
                let other = seed(random);
                let from = random.below(other.len() as u64 + 1) as usize;
                bytes.splice(at.., other[from..].iter().copied());
            }
            _ if random.one_in(4) => bytes.truncate(at),
            _ => bytes.extend_from_within(run),
        }
    }
    bytes.truncate(MAX_BYTES);
    bytes
}
