//! Scenarios of snapshots: taking and deleting them, alone and in groups, and the removal of their
//! data and records.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use csi_loopback::proto::csi::v1 as csi;
use tonic::{Code, Status};

use crate::bases::keep;
use crate::harness::{Scenario, Scene};
use support::driver::*;
use support::{BLOCK, MIB, pattern, read_all, write_direct, zero};

/// The blocks of a result.
pub fn blocks(answer: &Metadata) -> BTreeSet<u64> {
    let extents = answer.extents();
    extents.iter().flat_map(|(offset, size)| offset / BLOCK..(offset + size) / BLOCK).collect()
}

/// The only snapshot with this name.
pub fn snapshot_named(on: &Scene, volume_id: &str, name: &str) -> String {
    let of_volume =
        csi::ListSnapshotsRequest { source_volume_id: volume_id.to_owned(), ..Default::default() };
    let mut found = snapshots_where(&on.driver, of_volume);
    found.retain(|one| one.snapshot_id.starts_with(&format!("snap-{name}-")));
    assert_eq!(found.len(), 1, "snapshots named {name}: {found:?}");
    assert!(found[0].ready_to_use);
    found.remove(0).snapshot_id
}

/// A raw volume with a writing pod, and the blocks written since the last snapshot. The first block
/// is written before each snapshot; the pod writes it too.
pub struct Raw {
    pub id: String,
    device: PathBuf,
    content: Vec<u8>,
    written: BTreeSet<u64>,
    base: Option<String>,
}

impl Raw {
    const BYTES: u64 = 8 * MIB;

    pub fn new(on: &Scene, what: &str) -> Self {
        let id = on.driver.volume(&on.name(what, 0), Self::BYTES, block());
        let device = on.driver.publish(&id, &block());
        let content = vec![0; Self::BYTES as usize];
        let mut raw = Self { id, device, content, written: BTreeSet::new(), base: None };
        raw.write(0, 40, u64::MAX);
        // So many extents that clones are made ahead.
        (0..140).for_each(|number| raw.write(1520 + 2 * number, 1, number));
        raw
    }

    fn write(&mut self, first: u64, count: u64, seed: u64) {
        let bytes = pattern(seed, (count * BLOCK) as usize);
        write_direct(&self.device, first * BLOCK, &bytes);
        let at = (first * BLOCK) as usize;
        self.content[at..at + bytes.len()].copy_from_slice(&bytes);
        self.written.extend(first..first + count);
    }

    /// Scattered writes, a discard, and the block that the pod writes.
    pub fn change(&mut self, round: usize) {
        let seed = round as u64;
        self.write(0, 1, seed);
        self.write(100 + seed * 7 % 500, 1 + seed % 5, seed);
        self.write(1000 + seed * 3 % 500, 2, seed);
        // A hole where the last round wrote, and data where the next round makes a hole.
        let (hole, next) = (4 + seed % 30, 4 + (seed + 1) % 30);
        self.write(next, 1, seed);
        zero(&self.device, hole * BLOCK, BLOCK, true);
        self.content[(hole * BLOCK) as usize..((hole + 1) * BLOCK) as usize].fill(0);
        self.written.insert(hole);
    }

    /// Checks that the snapshot has the current content and reports exactly the writes since the
    /// last one.
    pub fn check(&mut self, on: &Scene, snapshot: &str) {
        let allocated = blocks(&on.driver.ok(allocated(snapshot)));
        let holds_data = self.content.chunks(BLOCK as usize).zip(0..);
        for (bytes, number) in holds_data {
            let empty = bytes.iter().all(|byte| *byte == 0);
            assert!(empty || allocated.contains(&number), "block {number} is not allocated");
        }
        if let Some(base) = self.base.replace(snapshot.to_owned()) {
            let delta = blocks(&on.driver.ok(delta(&base, snapshot)));
            let missed: Vec<_> = self.written.difference(&delta).collect();
            assert!(missed.is_empty(), "MISSED BLOCKS {missed:?} in {base} to {snapshot}");
            assert_eq!(delta, self.written, "{base} to {snapshot}");
        }
        self.written.clear();
    }

    /// Reads the snapshot through a volume created from it.
    fn check_content(&self, on: &Scene, snapshot: &str) {
        let copy = on.driver.copy(&on.name("copy", 0), Source::Snapshot(snapshot), block());
        let content = on.driver.with_device(&copy, read_all);
        let pods = BLOCK as usize;
        assert!(content[pods..] == self.content[pods..], "{snapshot} has other content");
        on.driver.ok(delete_volume(&copy));
    }
}

/// CreateSnapshot of a raw volume whose previous snapshot was deleted, so that its hidden data is
/// removed.
#[derive(Default)]
pub struct TakeRaw {
    raw: Option<Raw>,
    name: String,
}

impl Scenario for TakeRaw {
    fn prepare(&mut self, on: &mut Scene, round: usize) {
        let raw = self.raw.get_or_insert_with(|| {
            let mut raw = Raw::new(on, "raw");
            let first = on.driver.snapshot(&on.name("snapshot", 0), &raw.id);
            raw.check(on, &first);
            raw
        });
        on.driver.ok(delete_snapshot(raw.base.as_ref().unwrap()));
        raw.change(round);
        self.name = on.name("snapshot", round);
    }

    fn call(&mut self, on: &mut Scene) -> Result<(), Status> {
        on.driver.call(create_snapshot(&self.name, &self.raw.as_ref().unwrap().id)).map(drop)
    }

    fn check(&mut self, on: &Scene) {
        let raw = self.raw.as_mut().unwrap();
        let snapshot = snapshot_named(on, &raw.id, &self.name);
        raw.check(on, &snapshot);
    }

    fn published(&self) -> Vec<(&str, bool)> {
        self.raw.iter().map(|raw| (&*raw.id, false)).collect()
    }

    fn finish(&mut self, on: &Scene) {
        let raw = self.raw.as_ref().unwrap();
        raw.check_content(on, raw.base.as_ref().unwrap());
        on.driver.take_down(&raw.id);
    }
}

/// A mounted volume with a file that contains a counter of its writes.
pub struct Mounted {
    pub id: String,
    pub target: PathBuf,
}

impl Mounted {
    pub fn new(on: &Scene, what: &str) -> Self {
        let id = on.driver.volume(&on.name(what, 0), 16 * MIB, mounted(""));
        let target = on.driver.publish(&id, &mounted(""));
        Self { id, target }
    }

    /// Not flushed: the snapshot must do that.
    pub fn change(&self, round: usize) {
        fs::write(self.target.join("count"), round.to_string()).unwrap();
    }

    /// Checks that a volume created from the snapshot contains the file of this round.
    pub fn check(&self, on: &Scene, snapshot: &str, round: usize) {
        let copy = on.name(&format!("copy-{round}"), 0);
        let copy = on.driver.copy(&copy, Source::Snapshot(snapshot), mounted(""));
        let target = on.driver.publish(&copy, &mounted(""));
        let count = fs::read_to_string(target.join("count")).unwrap();
        on.driver.take_down(&copy);
        on.driver.ok(delete_volume(&copy));
        assert_eq!(count, round.to_string(), "{snapshot}");
    }
}

/// CreateSnapshot of a mounted volume, which is frozen. The previous snapshot exists.
#[derive(Default)]
pub struct TakeMounted {
    volume: Option<Mounted>,
    name: String,
    round: usize,
    base: Option<String>,
}

impl Scenario for TakeMounted {
    fn prepare(&mut self, on: &mut Scene, round: usize) {
        let volume = self.volume.get_or_insert_with(|| Mounted::new(on, "mounted"));
        if self.base.is_none() {
            self.base = Some(on.driver.snapshot(&on.name("snapshot", 0), &volume.id));
        }
        volume.change(round);
        (self.name, self.round) = (on.name("snapshot", round), round);
    }

    fn call(&mut self, on: &mut Scene) -> Result<(), Status> {
        on.driver.call(create_snapshot(&self.name, &self.volume.as_ref().unwrap().id)).map(drop)
    }

    fn check(&mut self, on: &Scene) {
        let volume = self.volume.as_ref().unwrap();
        let snapshot = snapshot_named(on, &volume.id, &self.name);
        let base = self.base.replace(snapshot.clone()).unwrap();
        assert!(!on.driver.ok(delta(&base, &snapshot)).extents().is_empty());
        // Journal and blocks of the file, which are only in the page cache without the freeze.
        if self.round % 4 == 1 {
            volume.check(on, &snapshot, self.round);
        }
    }

    fn published(&self) -> Vec<(&str, bool)> {
        self.volume.iter().map(|volume| (&*volume.id, true)).collect()
    }
}

/// CreateVolumeGroupSnapshot of two mounted volumes and a raw one.
#[derive(Default)]
pub struct TakeGroup {
    mounted: Vec<Mounted>,
    raw: Option<Raw>,
    name: String,
    round: usize,
}

impl TakeGroup {
    fn ids(&self) -> Vec<&str> {
        self.published().into_iter().map(|(id, _)| id).collect()
    }
}

impl Scenario for TakeGroup {
    fn prepare(&mut self, on: &mut Scene, round: usize) {
        if self.raw.is_none() {
            self.mounted = ["a", "b"].map(|what| Mounted::new(on, what)).into();
            let mut raw = Raw::new(on, "raw");
            let base = on.driver.snapshot(&on.name("base", 0), &raw.id);
            raw.check(on, &base);
            self.raw = Some(raw);
            // So that every round has a previous snapshot.
            let group = create_group_snapshot(&on.name("group", 0), &self.ids());
            let made = on.driver.ok(group).group_snapshot.unwrap();
            let raw = self.raw.as_mut().unwrap();
            let member = made.snapshots.iter().find(|one| one.source_volume_id == raw.id);
            raw.check(on, &member.unwrap().snapshot_id);
        }
        self.mounted.iter().for_each(|volume| volume.change(round));
        self.raw.as_mut().unwrap().change(round);
        (self.name, self.round) = (on.name("group", round), round);
    }

    fn call(&mut self, on: &mut Scene) -> Result<(), Status> {
        on.driver.call(create_group_snapshot(&self.name, &self.ids())).map(drop)
    }

    fn check(&mut self, on: &Scene) {
        // Another repetition returns the existing group.
        let made =
            on.driver.ok(create_group_snapshot(&self.name, &self.ids())).group_snapshot.unwrap();
        assert_eq!((made.snapshots.len(), made.ready_to_use), (3, true));
        for member in &made.snapshots {
            let number = self.ids().iter().position(|id| *id == member.source_volume_id).unwrap();
            let name = format!("{}-{number}", self.name);
            let id = snapshot_named(on, &member.source_volume_id, &name);
            assert_eq!(id, member.snapshot_id, "one member of each volume");
            if let Some(raw) = self.raw.as_mut().filter(|raw| raw.id == member.source_volume_id) {
                raw.check(on, &id);
            } else if self.round % 8 == 1 {
                self.mounted[number].check(on, &id, self.round);
            }
        }
    }

    fn published(&self) -> Vec<(&str, bool)> {
        let raw = self.raw.iter().map(|raw| (&*raw.id, false));
        self.mounted.iter().map(|volume| (&*volume.id, true)).chain(raw).collect()
    }
}

/// DeleteSnapshot of one that is not the newest: its data is removed, its record is kept.
#[derive(Default)]
pub struct DeleteSnapshot {
    volume: String,
    older: String,
    newer: String,
}

impl Scenario for DeleteSnapshot {
    fn prepare(&mut self, on: &mut Scene, round: usize) {
        if self.volume.is_empty() {
            self.volume = on.driver.volume(&on.name("v", 0), MIB, block());
            self.newer = on.driver.snapshot(&on.name("snapshot", 0), &self.volume);
        }
        let newest = on.driver.snapshot(&on.name("snapshot", round), &self.volume);
        self.older = std::mem::replace(&mut self.newer, newest);
    }

    fn call(&mut self, on: &mut Scene) -> Result<(), Status> {
        on.driver.call(delete_snapshot(&self.older)).map(drop)
    }

    fn check(&mut self, on: &Scene) {
        let ids: Vec<String> =
            all_snapshots(&on.driver).into_iter().map(|one| one.snapshot_id).collect();
        assert_eq!(ids, std::slice::from_ref(&self.newer));
        assert!(on.driver.ok(delta(&self.older, &self.newer)).extents().is_empty());
    }
}

/// DeleteSnapshot of the last snapshot of a deleted volume: all files of both are removed.
#[derive(Default)]
pub struct DeleteLastSnapshot {
    snapshot: String,
}

impl Scenario for DeleteLastSnapshot {
    fn prepare(&mut self, on: &mut Scene, round: usize) {
        let volume = on.driver.volume(&on.name("v", round), MIB, block());
        let older = on.driver.snapshot(&on.name("older", round), &volume);
        self.snapshot = on.driver.snapshot(&on.name("last", round), &volume);
        on.driver.ok(delete_snapshot(&older));
        on.driver.ok(delete_volume(&volume));
    }

    fn call(&mut self, on: &mut Scene) -> Result<(), Status> {
        on.driver.call(delete_snapshot(&self.snapshot)).map(drop)
    }

    fn check(&mut self, on: &Scene) {
        assert_eq!(all_snapshots(&on.driver), []);
        on.driver.refused(allocated(&self.snapshot), Code::NotFound, "does not exist");
    }
}

/// DeleteVolumeGroupSnapshot, with newer snapshots of its volumes.
#[derive(Default)]
pub struct DeleteGroup {
    volumes: Vec<String>,
    group: Option<csi::VolumeGroupSnapshot>,
}

impl Scenario for DeleteGroup {
    fn prepare(&mut self, on: &mut Scene, round: usize) {
        if self.volumes.is_empty() {
            self.volumes =
                ["a", "b"].map(|one| on.driver.volume(&on.name(one, 0), MIB, block())).into();
        }
        let ids: Vec<&str> = self.volumes.iter().map(String::as_str).collect();
        self.group =
            on.driver.ok(create_group_snapshot(&on.name("group", round), &ids)).group_snapshot;
        for volume in ids {
            on.driver.snapshot(&on.name(&format!("snapshot-{}", &volume[4..]), round), volume);
        }
    }

    fn call(&mut self, on: &mut Scene) -> Result<(), Status> {
        let group_snapshot_id = self.group.as_ref().unwrap().group_snapshot_id.clone();
        let request =
            csi::DeleteVolumeGroupSnapshotRequest { group_snapshot_id, ..Default::default() };
        on.driver.call(request).map(drop)
    }

    fn check(&mut self, on: &Scene) {
        let group = self.group.as_ref().unwrap();
        let there = all_snapshots(&on.driver);
        for member in &group.snapshots {
            assert!(there.iter().all(|one| one.snapshot_id != member.snapshot_id));
        }
        assert!(there.iter().all(|one| one.group_snapshot_id.is_empty()));
    }
}

/// A nearly full pool drops the hidden baseline at the driver's next poll.
#[derive(Default)]
pub struct Pressure {
    volume: String,
    device: PathBuf,
    filler: String,
    filler_device: PathBuf,
    hidden: String,
    filled: bool,
    round: usize,
}

impl Pressure {
    pub const FLAGS: [&str; 4] = ["--pool-size", "400Mi", "--overcommit", "1000"];
    const DATA: u64 = 48 * MIB;

    fn is_full(&self, on: &Scene) -> Result<bool, Status> {
        let status = on.driver.call(get_volume(&self.volume))?.status.unwrap();
        Ok(status.volume_condition.unwrap().abnormal)
    }
}

impl Scenario for Pressure {
    fn prepare(&mut self, on: &mut Scene, round: usize) {
        if self.volume.is_empty() {
            self.volume = on.driver.volume(&on.name("v", 0), 128 * MIB, block());
            self.device = on.driver.publish(&self.volume, &block());
            self.filler = on.driver.volume(&on.name("filler", 0), 1024 * MIB, block());
            self.filler_device = on.driver.publish(&self.filler, &block());
        }
        zero(&self.filler_device, 0, 512 * MIB, true);
        wait_for("space is available", || !self.is_full(on).unwrap());
        (self.round, self.filled) = (round, false);
        write_direct(&self.device, 0, &pattern(1, Self::DATA as usize));
        self.hidden = on.driver.snapshot(&on.name("hidden", round), &self.volume);
        on.driver.ok(delete_snapshot(&self.hidden));
        // Now the snapshot shares no blocks, so that dropping its data frees space.
        write_direct(&self.device, 0, &pattern(2, Self::DATA as usize));
    }

    /// Fills the pool beyond the reserve, and waits until space is freed.
    fn call(&mut self, on: &mut Scene) -> Result<(), Status> {
        let mut filled = 0;
        while !self.filled {
            zero(&self.filler_device, filled, 4 * MIB, false);
            filled += 4 * MIB;
            // A driver that dies has detected the full pool.
            self.filled = self.is_full(on).unwrap_or(true);
        }
        let until = Instant::now() + PATIENCE;
        while self.is_full(on)? {
            assert!(Instant::now() < until, "no relief");
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    fn check(&mut self, on: &Scene) {
        let next = on.driver.snapshot(&on.name("next", self.round), &self.volume);
        let words = "the hidden baseline was dropped";
        on.driver.refused(delta(&self.hidden, &next), Code::FailedPrecondition, words);
        on.driver.ok(delete_snapshot(&next));
    }

    fn published(&self) -> Vec<(&str, bool)> {
        [&self.volume, &self.filler].map(|id| (id.as_str(), false)).into()
    }

    /// Without the filler, which takes the last space.
    fn in_use(&self, _on: &Scene) -> Vec<PathBuf> {
        vec![self.device.clone()]
    }
}

/// A starting driver merges expired records into their successors, and drops the ids of records
/// dropped one retention period ago.
pub struct Forget {
    what: Dropped,
    raw: Option<Raw>,
    older: String,
    forgotten: String,
    newer: String,
    written: BTreeSet<u64>,
}

/// The data of a deleted snapshot that a start drops.
#[derive(Clone, Copy, PartialEq)]
pub enum Dropped {
    Record,
    /// The record of a snapshot whose own retention ended before the driver's.
    Released,
    Id,
}

impl Forget {
    pub const FLAGS: [&str; 2] = ["--change-record-retention", "0s"];

    pub fn new(what: Dropped) -> Self {
        let [older, forgotten, newer] = Default::default();
        Self { what, raw: None, older, forgotten, newer, written: BTreeSet::new() }
    }

    /// Restarts the driver and waits until it has dropped this, which it does when it serves.
    fn start(&self, on: &mut Scene, what: Dropped) -> Result<(), Status> {
        on.restart(|| {})?;
        let until = Instant::now() + PATIENCE;
        loop {
            match on.driver.call(delta(&self.forgotten, &self.newer)) {
                Err(status) if status.code() == Code::NotFound => break,
                Err(status) if status.code() == Code::FailedPrecondition => {
                    if what != Dropped::Id {
                        break;
                    }
                }
                Err(status) => return Err(status),
                Ok(_) => {}
            }
            assert!(Instant::now() < until, "not dropped");
            thread::sleep(Duration::from_millis(5));
        }
        // Waits until the volume is not locked, and changes nothing.
        on.driver.call_patiently(expand(&self.raw.as_ref().unwrap().id, Raw::BYTES)).map(drop)
    }
}

/// Deletion times are whole seconds, and a record exactly as old as the retention is kept.
fn next_second() {
    let into_second = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().subsec_millis();
    thread::sleep(Duration::from_millis(u64::from(1020 - into_second)));
}

impl Scenario for Forget {
    fn prepare(&mut self, on: &mut Scene, round: usize) {
        if self.what == Dropped::Record && round > 1 {
            // Otherwise the next start would also drop the previous round's id.
            next_second();
            self.start(on, Dropped::Id).unwrap();
        }
        let raw = self.raw.get_or_insert_with(|| Raw::new(on, "raw"));
        let ids = [(0, "older"), (1, "forgotten"), (2, "newer")].map(|(number, what)| {
            raw.change(round * 3 + number);
            if number == 0 {
                self.written.clear();
            } else {
                self.written.extend(&raw.written);
            }
            // The records of the previous round may not be dropped yet.
            let response =
                on.driver.call_patiently(create_snapshot(&on.name(what, round), &raw.id)).unwrap();
            let id = response.snapshot.unwrap().snapshot_id;
            raw.check(on, &id);
            id
        });
        [self.older, self.forgotten, self.newer] = ids;
        on.driver.ok(delete_snapshot(&self.forgotten));
        if self.what == Dropped::Released {
            on.driver.ok(keep(&self.forgotten, 0));
        }
        next_second();
        if self.what == Dropped::Id {
            self.start(on, Dropped::Record).unwrap();
            next_second();
        }
    }

    fn call(&mut self, on: &mut Scene) -> Result<(), Status> {
        self.start(on, self.what)
    }

    fn check(&mut self, on: &Scene) {
        let delta = blocks(&on.driver.ok(delta(&self.older, &self.newer)));
        assert_eq!(delta, self.written, "across a record that was folded");
    }

    fn begins_after(&self) -> Option<&'static str> {
        Some("socket.named")
    }

    fn published(&self) -> Vec<(&str, bool)> {
        self.raw.iter().map(|raw| (&*raw.id, false)).collect()
    }
}
