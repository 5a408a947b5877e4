//! A run: operations, including failures, and the invariants.
//!
//! During a failure, calls may return errors. Whenever the driver responds, and at the end, without
//! failures and after a restart of the driver:
//!
//! - an acknowledged snapshot is listed until its deletion is requested, and not after the
//!   deletion is acknowledged;
//! - it has the content of its volume at its creation;
//! - a delta reports every different block, or the driver reports that the changes are unknown;
//! - lists and deletions work as long as the disk can be read;
//! - in the end everything works, the pool check finds nothing, and no loop device remains.

use std::fmt;
use std::fs::File;
use std::ops::AddAssign;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::process::Command;

use csi_loopback::backend::PoolKind;
use support::driver::*;
use support::kernel::{loops_named, wait_for};
use support::{BLOCK, MIB, path, pattern, write_direct};
use tonic::{Code, Status};

use super::operation::Operation;
use super::rig::Rig;

const VOLUME_BYTES: u64 = 4 * MIB;
const MAX_VOLUMES: usize = 4;
const MAX_SNAPSHOTS: usize = 8;

/// Statistics of the runs.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counts {
    operations: u64,
    acknowledged: u64,
    refused: u64,
    refused_starts: u64,
    verified: u64,
    deltas: u64,
    unknown: u64,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, more: Self) {
        self.operations += more.operations;
        self.acknowledged += more.acknowledged;
        self.refused += more.refused;
        self.refused_starts += more.refused_starts;
        self.verified += more.verified;
        self.deltas += more.deltas;
        self.unknown += more.unknown;
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} operations; {} calls acknowledged, {} refused; {} starts refused; {} snapshots verified; {} deltas, 0 \
             blocks missed, and {} where the changes are not known",
            self.operations,
            self.acknowledged,
            self.refused,
            self.refused_starts,
            self.verified,
            self.deltas,
            self.unknown
        )
    }
}

/// Checksums of blocks.
type Content = Vec<u32>;

struct Snapshot {
    id: String,
    volume: usize,
    /// Unknown if the device could not be read.
    content: Option<Content>,
    /// Its deletion was requested and returned an error.
    perhaps_deleted: bool,
}

struct Volume {
    id: String,
    deleted: bool,
    perhaps_deleted: bool,
}

pub struct World {
    rig: Rig,
    volumes: Vec<Volume>,
    snapshots: Vec<Snapshot>,
    deleted: Vec<String>,
    names: u64,
    writes: u64,
    /// Reads of the disk may fail.
    is_unreadable: bool,
    counts: Counts,
}

impl World {
    pub fn run(kind: PoolKind, operations: &[Operation]) -> Counts {
        let mut world = Self {
            rig: Rig::new(kind),
            volumes: Vec::new(),
            snapshots: Vec::new(),
            deleted: Vec::new(),
            names: 0,
            writes: 0,
            is_unreadable: false,
            counts: Counts::default(),
        };
        world.create_volume();
        world.create_volume();
        for operation in operations {
            world.counts.operations += 1;
            world.apply(*operation);
        }
        world.finish();
        world.counts
    }

    fn apply(&mut self, operation: Operation) {
        match operation {
            Operation::Disk(fault) => {
                self.is_unreadable = true;
                self.rig.fail_disk(fault);
            }
            Operation::Fill => self.rig.fill(),
            Operation::ShutDown if self.rig.driver.is_running() => {
                self.is_unreadable = true;
                self.rig.shut_down();
            }
            Operation::Repair => self.rig.repair(),
            Operation::DropPageCache => self.rig.drop_page_cache(),
            Operation::NoDescriptors if self.rig.driver.is_running() => {
                // A call needs an open connection.
                self.list();
                self.rig.limit_descriptors(true);
                self.snapshot(0);
                self.list();
                self.rig.limit_descriptors(false);
            }
            Operation::Kill { starts } => {
                self.rig.kill();
                if starts {
                    self.start();
                }
            }
            Operation::Stop { starts } => {
                self.rig.stop();
                if starts {
                    self.start();
                }
            }
            Operation::Start => self.start(),
            Operation::Reboot => self.reboot(),
            _ if self.rig.driver.is_running() => self.call(operation),
            // A pod continues without the driver.
            Operation::Write { volume, at, blocks, direct } => {
                self.write(volume.of(self.volumes.len()), at, blocks, direct);
            }
            _ => {}
        }
    }

    fn call(&mut self, operation: Operation) {
        let (volumes, snapshots) = (self.volumes.len(), self.snapshots.len());
        match operation {
            Operation::Write { volume, at, blocks, direct } => {
                self.write(volume.of(volumes), at, blocks, direct);
            }
            Operation::CreateVolume if volumes < MAX_VOLUMES => self.create_volume(),
            Operation::DeleteVolume(volume) => self.delete_volume(volume.of(volumes)),
            Operation::Snapshot(volume) if snapshots < MAX_SNAPSHOTS => {
                self.snapshot(volume.of(volumes));
            }
            Operation::DeleteSnapshot(snapshot) if snapshots > 0 => {
                self.delete_snapshot(snapshot.of(snapshots));
            }
            Operation::List => self.list(),
            Operation::Delta { volume, snapshots } => {
                let of_volume = self.snapshots_of(volume.of(volumes));
                if !of_volume.is_empty() {
                    let [a, b] = snapshots.map(|pick| of_volume[pick.of(of_volume.len())]);
                    self.delta(a.min(b), a.max(b));
                }
            }
            Operation::Restage(volume) => {
                let volume = volume.of(volumes);
                self.take_down(volume);
                self.publish(volume);
            }
            _ => {}
        }
    }

    fn name(&mut self) -> String {
        self.names += 1;
        format!("f{}", self.names)
    }

    /// Records the result of a call. Without a failure it must succeed.
    #[track_caller]
    fn note<T>(&mut self, outcome: Result<T, Status>, what: &str) -> Option<T> {
        match outcome {
            Ok(answer) => {
                self.counts.acknowledged += 1;
                Some(answer)
            }
            Err(status) => {
                assert!(!status.message().is_empty(), "{what}: no reason is given: {status:?}");
                self.counts.refused += 1;
                None
            }
        }
    }

    fn create_volume(&mut self) {
        let name = self.name();
        let made = self.rig.driver.call(create(&name, VOLUME_BYTES, block()));
        let Some(made) = self.note(made, "CreateVolume") else { return };
        let id = made.volume.unwrap().volume_id;
        self.volumes.push(Volume { id, deleted: false, perhaps_deleted: false });
        self.publish(self.volumes.len() - 1);
    }

    fn publish(&mut self, volume: usize) {
        let id = self.volumes[volume].id.clone();
        let driver = &self.rig.driver;
        let staged = driver.call(driver.staging_of(&id, &block())).map(drop);
        let target = driver.target(&id);
        let published =
            staged.and_then(|()| driver.call(driver.publishing(&id, &target, &block())).map(drop));
        self.note(published, "NodePublishVolume");
    }

    fn take_down(&mut self, volume: usize) {
        let id = self.volumes[volume].id.clone();
        let driver = &self.rig.driver;
        let target = driver.target(&id);
        let unpublished = driver.call(unpublishing(&id, path(&target))).map(drop);
        let unstaged = unpublished
            .and_then(|()| driver.call(unstaging(&id, path(&driver.staging(&id)))).map(drop));
        self.note(unstaged, "NodeUnstageVolume");
    }

    fn delete_volume(&mut self, volume: usize) {
        if self.volumes[volume].deleted {
            return;
        }
        self.take_down(volume);
        let deleted = self.rig.driver.call(delete_volume(&self.volumes[volume].id));
        match self.note(deleted, "DeleteVolume") {
            Some(_) => self.volumes[volume].deleted = true,
            None => self.volumes[volume].perhaps_deleted = true,
        }
    }

    /// A write by a pod, which may fail.
    fn write(&mut self, volume: usize, at: u16, blocks: u8, direct: bool) {
        self.writes += 1;
        let device = self.rig.driver.target(&self.volumes[volume].id);
        let data = pattern(self.writes, usize::from(blocks) * BLOCK as usize);
        let flags = if direct { libc::O_DIRECT } else { 0 };
        let opened = File::options().write(true).custom_flags(flags).open(device);
        let Some(file) = opened.ok().filter(is_device) else { return };
        let mut buffer = vec![0; data.len() + BLOCK as usize];
        let start = buffer.as_ptr().align_offset(BLOCK as usize);
        buffer[start..start + data.len()].copy_from_slice(&data);
        let _ = file.write_all_at(&buffer[start..start + data.len()], u64::from(at) * BLOCK);
    }

    /// The content of the device.
    fn content(&self, volume: usize) -> Option<Content> {
        let device = File::open(self.rig.driver.target(&self.volumes[volume].id)).ok()?;
        if !is_device(&device) {
            return None;
        }
        let mut bytes = vec![0; VOLUME_BYTES as usize];
        device.read_exact_at(&mut bytes, 0).ok()?;
        Some(prints(&bytes))
    }

    fn snapshot(&mut self, volume: usize) {
        let content = self.content(volume);
        let name = self.name();
        let made = self.rig.driver.call(create_snapshot(&name, &self.volumes[volume].id));
        let Some(made) = self.note(made, "CreateSnapshot") else { return };
        let id = made.snapshot.unwrap().snapshot_id;
        self.snapshots.push(Snapshot { id, volume, content, perhaps_deleted: false });
    }

    fn delete_snapshot(&mut self, snapshot: usize) {
        // The driver may be working on the volume.
        let deleted = self.rig.driver.call_patiently(delete_snapshot(&self.snapshots[snapshot].id));
        if let Err(status) = &deleted {
            assert!(self.is_unreadable, "a snapshot cannot be deleted: {status:?}");
        }
        match self.note(deleted, "DeleteSnapshot") {
            Some(_) => self.deleted.push(self.snapshots.remove(snapshot).id),
            None => self.snapshots[snapshot].perhaps_deleted = true,
        }
    }

    fn snapshots_of(&self, volume: usize) -> Vec<usize> {
        let indexes = 0..self.snapshots.len();
        indexes.filter(|index| self.snapshots[*index].volume == volume).collect()
    }

    /// Lists succeed as long as the disk can be read, and are correct.
    fn list(&mut self) {
        let request = csi_loopback::proto::csi::v1::ListSnapshotsRequest::default();
        let listed = self.rig.driver.call(request);
        let listed = match (listed, self.is_unreadable) {
            (Ok(listed), _) => listed,
            (Err(_), true) => return,
            (Err(status), false) => panic!("lists fail: {status:?}"),
        };
        let listed: Vec<String> =
            listed.entries.into_iter().map(|entry| entry.snapshot.unwrap().snapshot_id).collect();
        for snapshot in &self.snapshots {
            let is_there = snapshot.perhaps_deleted || listed.contains(&snapshot.id);
            assert!(is_there, "{} was acknowledged and is lost", snapshot.id);
        }
        let back = self.deleted.iter().find(|id| listed.contains(id));
        assert_eq!(back, None, "a deleted snapshot is back");
    }

    fn delta(&mut self, base: usize, target: usize) {
        let [base, target] = [&self.snapshots[base], &self.snapshots[target]];
        let answer = self.rig.driver.call(delta(&base.id, &target.id));
        let answer = match answer {
            Ok(answer) => answer,
            Err(status) => {
                assert!(!status.message().is_empty(), "no reason is given: {status:?}");
                self.counts.unknown += u64::from(status.code() == Code::FailedPrecondition);
                return;
            }
        };
        self.counts.deltas += 1;
        let (Some(old), Some(new)) = (&base.content, &target.content) else { return };
        let differing = (0..new.len()).filter(|block| old[*block] != new[*block]);
        for block in differing {
            let at = block as u64 * BLOCK;
            let covers = |(offset, length): &(u64, u64)| (*offset..offset + length).contains(&at);
            let is_reported = answer.extents().iter().any(covers);
            assert!(is_reported, "block {block} from {} to {} is missed", base.id, target.id);
        }
    }

    fn start(&mut self) {
        if let Err(error) = self.rig.start() {
            // A full disk must not prevent a start.
            assert!(self.rig.needs_reboot(), "{error}\n{}", self.rig.driver.log());
            self.counts.refused_starts += 1;
        }
    }

    fn reboot(&mut self) {
        let ids: Vec<String> = self.volumes.iter().map(|volume| volume.id.clone()).collect();
        self.rig.reboot(&ids);
        self.is_unreadable = false;
        self.start();
    }

    /// Ends all failures. After one restart, or a reboot if a filesystem has shut down, everything
    /// must work.
    fn finish(&mut self) {
        self.rig.repair();
        if self.rig.needs_reboot() {
            self.reboot();
        } else {
            self.rig.stop();
            self.start();
        }
        self.list();
        for volume in 0..self.volumes.len() {
            if !self.volumes[volume].deleted && !self.volumes[volume].perhaps_deleted {
                self.must_work(volume);
            }
        }
        self.verify_snapshots();
        self.remove_everything();
    }

    fn must_work(&mut self, volume: usize) {
        let id = self.volumes[volume].id.clone();
        let driver = &self.rig.driver;
        driver.unpublish(&id, &driver.target(&id));
        driver.unstage(&id);
        driver.publish(&id, &block());
        write_direct(&driver.target(&id), 0, &pattern(volume as u64 + 1, BLOCK as usize));
        let content = self.content(volume);
        let name = self.name();
        let id = self.rig.driver.snapshot(&name, &id);
        self.snapshots.push(Snapshot { id, volume, content, perhaps_deleted: false });
    }

    fn verify_snapshots(&mut self) {
        for index in 0..self.snapshots.len() {
            let Snapshot { id, content, perhaps_deleted, .. } = &self.snapshots[index];
            if *perhaps_deleted {
                continue;
            }
            let name = format!("read-{index}");
            let copy = self.rig.driver.copy(&name, Source::Snapshot(id), block());
            let read = self.rig.driver.with_device(&copy, |device| std::fs::read(device).unwrap());
            self.rig.driver.ok(delete_volume(&copy));
            if let Some(content) = content {
                let read = prints(&read);
                let other = (0..read.len()).find(|block| read[*block] != content[*block]);
                assert_eq!(other, None, "a block of {id} is not what it was");
            }
            self.counts.verified += 1;
        }
        for volume in 0..self.volumes.len() {
            let of_volume = self.snapshots_of(volume);
            for (at, base) in of_volume.iter().enumerate() {
                of_volume[at..].iter().for_each(|target| self.delta(*base, *target));
            }
        }
    }

    fn remove_everything(&mut self) {
        for snapshot in std::mem::take(&mut self.snapshots) {
            self.rig.driver.ok(delete_snapshot(&snapshot.id));
        }
        for volume in std::mem::take(&mut self.volumes) {
            let driver = &self.rig.driver;
            driver.unpublish(&volume.id, &driver.target(&volume.id));
            driver.unstage(&volume.id);
            driver.ok(delete_volume(&volume.id));
            wait_for("the loop device is detached", || loops_named(&volume.id).is_empty());
        }
        assert!(self.rig.driver.stop().success());
        let mut check = Command::new(binary());
        check.args(["pool", "check", "--data-dir", path(&self.rig.data_dir())]);
        let output = check.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
}

/// Without a publication, an empty file may remain.
fn is_device(file: &File) -> bool {
    file.metadata().is_ok_and(|metadata| metadata.file_type().is_block_device())
}

fn prints(bytes: &[u8]) -> Content {
    bytes.chunks(BLOCK as usize).map(crc32c::crc32c).collect()
}
