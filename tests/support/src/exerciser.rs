//! A writer that mirrors its files in memory: random writes, stores through mmap, truncations,
//! holes, and zeroed, removed and inserted ranges, with continuous verification. It records the
//! state of all files after each step. A freeze waits for the current step, so a snapshot must have
//! exactly one of the states during its creation.

use std::fs::{self, File};
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::fcntl::{FallocateFlags, fallocate};

use super::pattern;
use super::random::Random;

/// The unit of removed and inserted ranges: the block size of the filesystems.
const UNIT: u64 = 4096;
const MOST_BYTES: u64 = 64 * UNIT;

/// The length and a checksum of a file.
type Fingerprint = (usize, u32);

fn fingerprint(content: &[u8]) -> Fingerprint {
    (content.len(), crc32c::crc32c(content))
}

/// The states of all files after each step.
#[derive(Default)]
pub struct History(Mutex<Vec<Vec<Fingerprint>>>);

impl History {
    fn states(&self) -> MutexGuard<'_, Vec<Vec<Fingerprint>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of the newest state.
    pub fn now(&self) -> usize {
        self.states().len().saturating_sub(1)
    }

    /// Asserts that the files at `paths` have a state of these steps, or of the step that was in
    /// progress at the end.
    #[track_caller]
    pub fn holds(&self, paths: &[PathBuf], steps: RangeInclusive<usize>) {
        let read = |path| fs::read(path).unwrap_or_else(|e| panic!("{path:?}: {e}"));
        let found: Vec<Fingerprint> = paths.iter().map(|path| fingerprint(&read(path))).collect();
        let states = self.states();
        let last = (*steps.end() + 1).min(states.len() - 1);
        if states[*steps.start()..=last].contains(&found) {
            return;
        }
        let elsewhere = states.iter().rposition(|state| *state == found);
        panic!(
            "{paths:?} have no state of the steps {steps:?}, but state {elsewhere:?}: {found:?}"
        );
    }
}

struct Mirrored {
    file: File,
    mirror: Vec<u8>,
}

/// Writes to its files alternately.
pub struct Exerciser<'a> {
    files: Vec<Mirrored>,
    random: Random,
    history: &'a History,
}

impl<'a> Exerciser<'a> {
    /// Creates the files.
    pub fn new(paths: &[PathBuf], seed: u64, history: &'a History) -> Self {
        let open = |path: &PathBuf| {
            let file =
                File::options().read(true).write(true).create(true).truncate(true).open(path);
            Mirrored { file: file.unwrap(), mirror: Vec::new() }
        };
        let files = paths.iter().map(open).collect();
        let exerciser = Self { files, random: Random::new(seed), history };
        exerciser.record();
        exerciser
    }

    fn record(&self) {
        let state = self.files.iter().map(|one| fingerprint(&one.mirror)).collect();
        self.history.states().push(state);
    }

    pub fn run(&mut self, stop: &AtomicBool) {
        let mut number = 0;
        while !stop.load(Ordering::Relaxed) {
            let file = number % self.files.len();
            self.files[file].step(&mut self.random);
            self.record();
            self.files[file].verify(&mut self.random, number % 32 == 0);
            number += 1;
        }
        self.files.iter_mut().for_each(|one| one.verify(&mut self.random, true));
    }
}

impl Mirrored {
    fn length(&self) -> u64 {
        self.mirror.len() as u64
    }

    /// One system call or one store, which a freeze cannot interrupt.
    fn step(&mut self, random: &mut Random) {
        let (offset, length) = (random.below(MOST_BYTES), 1 + random.below(MOST_BYTES / 4));
        let length = length.min(MOST_BYTES - offset);
        match random.below(12) {
            0..=3 => self.write(offset, &pattern(random.next_u64(), length as usize)),
            4..=6 => self.store_mapped(random),
            7 => self.truncate(offset),
            8 => self.zero(FallocateFlags::FALLOC_FL_PUNCH_HOLE, offset, length),
            9 => self.zero(FallocateFlags::FALLOC_FL_ZERO_RANGE, offset, length),
            10 => self.remove_or_insert(random),
            _ if random.one_in(2) => self.file.sync_all().unwrap(),
            _ => self.file.sync_data().unwrap(),
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        self.file.write_all_at(data, offset).unwrap();
        let end = offset as usize + data.len();
        self.mirror.resize(self.mirror.len().max(end), 0);
        self.mirror[offset as usize..end].copy_from_slice(data);
    }

    /// Stores eight bytes through a mapping, which the CPU writes atomically.
    fn store_mapped(&mut self, random: &mut Random) {
        let places = self.length() / 8;
        if places == 0 {
            return;
        }
        let (at, value) = (random.below(places) * 8, random.next_u64());
        map_and_store(&self.file, at, value).unwrap();
        self.mirror[at as usize..at as usize + 8].copy_from_slice(&value.to_ne_bytes());
    }

    fn truncate(&mut self, length: u64) {
        self.file.set_len(length).unwrap();
        self.mirror.resize(length as usize, 0);
    }

    fn zero(&mut self, how: FallocateFlags, offset: u64, length: u64) {
        let mode = how | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        fallocate(&self.file, mode, offset as i64, length as i64).unwrap();
        let end = (offset + length).min(self.length());
        if offset < end {
            self.mirror[offset as usize..end as usize].fill(0);
        }
    }

    /// Removes blocks, which moves later data down, or inserts zeroed blocks. btrfs supports
    /// neither.
    fn remove_or_insert(&mut self, random: &mut Random) {
        let blocks = self.length() / UNIT;
        if blocks < 2 {
            return;
        }
        let at = random.below(blocks - 1) * UNIT;
        let count = 1 + random.below(4);
        let (start, some) = (at as usize, (count * UNIT) as usize);
        let remove = self.length() + count * UNIT > MOST_BYTES || random.one_in(2);
        if remove && at + count * UNIT >= self.length() {
            return;
        }
        let mode = match remove {
            true => FallocateFlags::FALLOC_FL_COLLAPSE_RANGE,
            false => FallocateFlags::FALLOC_FL_INSERT_RANGE,
        };
        match fallocate(&self.file, mode, at as i64, some as i64) {
            Err(nix::Error::EOPNOTSUPP) => {}
            Err(error) => panic!("{error}"),
            Ok(()) if remove => drop(self.mirror.drain(start..start + some)),
            Ok(()) => drop(self.mirror.splice(start..start, vec![0; some])),
        }
    }

    /// Verifies a part, or the whole file.
    fn verify(&self, random: &mut Random, whole: bool) {
        let length = self.mirror.len();
        assert_eq!(self.file.metadata().unwrap().len(), length as u64);
        if length == 0 {
            return;
        }
        let start = if whole { 0 } else { random.below(length as u64) as usize };
        let end = if whole { length } else { length.min(start + 4 * UNIT as usize) };
        let mut found = vec![0; end - start];
        self.file.read_exact_at(&mut found, start as u64).unwrap();
        let first = found.iter().zip(&self.mirror[start..end]).position(|(a, b)| a != b);
        assert_eq!(first.map(|at| at + start), None, "the file differs from the written data");
    }
}

/// Stores a number at `at`, an offset in the file and a multiple of 8.
fn map_and_store(file: &File, at: u64, value: u64) -> io::Result<()> {
    let page = at / UNIT * UNIT;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping of a page that overlaps the file. No other thread truncates the file,
    // and the mapping is not shared before its removal.
    unsafe {
        let mapped = libc::mmap(
            std::ptr::null_mut(),
            UNIT as usize,
            access,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            page as libc::off_t,
        );
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        mapped.cast::<u64>().add((at - page) as usize / 8).write_volatile(value);
        libc::munmap(mapped, UNIT as usize);
    }
    Ok(())
}

/// Reads every file below a directory, so that the filesystem verifies all metadata. Returns the
/// number of files.
pub fn read_tree(directory: &Path) -> usize {
    let mut read = 0;
    for entry in fs::read_dir(directory).unwrap_or_else(|e| panic!("{directory:?}: {e}")) {
        let entry = entry.unwrap();
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            read += read_tree(&entry.path());
        } else if kind.is_file() {
            let content = fs::read(entry.path());
            content.unwrap_or_else(|e| panic!("{:?}: {e}", entry.path()));
            read += 1;
        }
    }
    read
}
