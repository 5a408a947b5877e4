//! Generates the calls to the driver. Two operators work in parallel, each on its own volumes. The
//! observed operator also has the volumes with writers.

use std::thread;
use std::time::Duration;

use super::load::{Load, MOUNTED, RAW};
use support::driver::Source;
use support::random::Random;
use support::{BLOCK, MIB};

/// Maximum number of snapshots of one volume.
const MOST_SNAPSHOTS: usize = 4;
/// Maximum number of volumes without a writer, per operator.
const MOST_STILL: usize = 3;

pub struct Operator<'a> {
    load: &'a Load,
    /// The prefix of its names.
    stem: &'static str,
    given: u64,
    pub random: Random,
}

impl<'a> Operator<'a> {
    pub fn new(load: &'a Load, stem: &'static str, seed: u64) -> Self {
        Self { load, stem, given: 0, random: Random::new(seed) }
    }

    /// A new name.
    pub fn name(&mut self) -> String {
        self.given += 1;
        format!("{}{}", self.stem, self.given)
    }

    /// Works until the load ends.
    pub fn work(&mut self) {
        while self.load.running() {
            let pass = self.load.gate.pass();
            self.work_once();
            drop(pass);
            thread::sleep(Duration::from_millis(self.random.below(20)));
        }
    }

    fn work_once(&mut self) {
        let still = self.load.still(self.stem);
        let volume = self.random.pick(&still).cloned();
        match (self.random.below(10), volume) {
            (0..4, Some(volume)) if self.load.usable(&volume).len() < MOST_SNAPSHOTS => {
                let name = self.name();
                self.load.take_snapshots(&name, &[&volume], false);
            }
            (4..6, Some(volume)) => self.load.expand(&volume, self.random.below(64) * BLOCK),
            (6..8, Some(volume)) => {
                self.load.delete_volume(&volume);
                if self.random.one_in(2) {
                    let left = self.load.usable(&volume);
                    left.iter().for_each(|name| self.load.delete_snapshot(name));
                }
            }
            _ if still.len() < MOST_STILL => self.make_some(),
            _ => {
                let orphaned = self.load.orphaned(self.stem);
                let picked = self.random.pick(&orphaned);
                picked.into_iter().for_each(|name| self.load.delete_snapshot(name));
            }
        }
    }

    /// Creates a volume without a writer, from a snapshot or empty.
    fn make_some(&mut self) {
        let volumes = [RAW, MOUNTED];
        let from = self.load.usable(self.random.pick(&volumes).unwrap());
        let name = self.name();
        match self.random.pick(&from).cloned() {
            Some(snapshot) if !self.random.one_in(3) => self.load.restore(&name, &snapshot),
            _ => self.load.make_empty(&name, (1 + self.random.below(4)) * MIB),
        }
    }

    /// Deletes objects above the limits.
    pub fn make_room(&mut self) {
        for volume in [RAW, MOUNTED] {
            let usable = self.load.usable(volume);
            if usable.len() >= MOST_SNAPSHOTS {
                self.delete_one(&usable);
            }
        }
        let still = self.load.still(self.stem);
        if still.len() >= MOST_STILL {
            self.load.delete_volume(&still[0]);
        }
    }

    /// One operation of each kind in turn; the given kind is last.
    pub fn step(&mut self, turn: usize) {
        self.make_room();
        let volume = if self.random.one_in(3) { MOUNTED } else { RAW };
        let name = self.name();
        match turn % 8 {
            0 => self.load.take_snapshots(&name, &[volume], false),
            1 => self.load.take_snapshots(&name, &[RAW, MOUNTED], true),
            2 => self.delete_some(volume),
            3 => self.delete_volume(),
            4 => self.delete_last_snapshot(),
            5 => self.make_some(),
            6 => self.load.make_from(&name, Source::Volume(volume)),
            _ => self.load.expand(volume, (1 + self.random.below(256)) * BLOCK),
        }
    }

    /// A snapshot or a group.
    fn delete_some(&mut self, volume: &str) {
        let usable = self.load.usable(volume);
        match self.load.oldest_group() {
            Some(member) if self.random.one_in(2) || usable.is_empty() => {
                self.load.delete_snapshot(&member);
            }
            _ if usable.is_empty() => {
                let name = self.name();
                self.load.take_snapshots(&name, &[volume], false);
                self.load.delete_snapshot(&name);
            }
            _ => self.delete_one(&usable),
        }
    }

    /// Often the newest: its data must be kept until the next snapshot.
    fn delete_one(&mut self, usable: &[String]) {
        let newest = usable.last().filter(|_| self.random.one_in(2));
        let name = newest.or_else(|| self.random.pick(usable)).unwrap();
        self.load.delete_snapshot(name);
    }

    fn delete_volume(&mut self) {
        if self.load.still(self.stem).is_empty() {
            self.make_some();
        }
        let still = self.load.still(self.stem);
        self.load.delete_volume(self.random.pick(&still).unwrap());
    }

    /// Deletes the last snapshot of a deleted volume.
    fn delete_last_snapshot(&mut self) {
        let (volume, snapshot) = (self.name(), self.name());
        self.load.make_empty(&volume, MIB);
        self.load.take_snapshots(&snapshot, &[&volume], false);
        self.load.delete_volume(&volume);
        self.load.delete_snapshot(&snapshot);
    }
}
