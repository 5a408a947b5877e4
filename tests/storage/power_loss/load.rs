//! A driver under load: writers on a raw and on a mounted volume, and the calls of operators, all
//! recorded in the ledger.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread;
use std::time::Duration;

use csi::volume_capability::access_mode::Mode;
use csi_loopback::backend::PoolKind;
use csi_loopback::proto::csi::v1 as csi;
use nix::sys::stat;
use tonic::{Code, Status};

use super::ledger::{Ledger, Print, Records};
use support::driver::*;
use support::random::Random;
use support::*;

pub const RAW: &str = "raw";
pub const MOUNTED: &str = "mounted";
const RAW_BYTES: u64 = 16 * MIB;
const MOST_BYTES: u64 = 24 * MIB;
const MOUNTED_BYTES: u64 = 24 * MIB;

/// Blocks writers, so that only one call is in progress. Each works under a read lock.
#[derive(Debug, Default)]
pub struct Gate(RwLock<()>);

impl Gate {
    pub fn pass(&self) -> RwLockReadGuard<'_, ()> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self) -> RwLockWriteGuard<'_, ()> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// As long as this exists, only the observed operator works.
pub struct Quiet<'a> {
    load: &'a Load,
    _gates: [RwLockWriteGuard<'a, ()>; 2],
}

impl Drop for Quiet<'_> {
    fn drop(&mut self) {
        self.load.quiet.store(false, Ordering::Relaxed);
    }
}

/// A driver under load, and its ledger.
pub struct Load {
    driver: Driver,
    pub ledger: Ledger,
    device: PathBuf,
    mounted_at: PathBuf,
    /// Before the writer of the raw volume.
    raw_gate: Gate,
    /// Before the others.
    pub gate: Gate,
    quiet: AtomicBool,
    stop: AtomicBool,
    /// The directory of the pool's files for this process.
    root: PathBuf,
}

/// Ends the load when dropped.
pub struct Stop<'a>(pub &'a Load);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Relaxed);
    }
}

impl Load {
    pub fn start(driver: Driver) -> Self {
        let ledger = Ledger::default();
        let made = |name: &str, bytes: u64, wanted: csi::VolumeCapability| {
            ledger.make_volume(name, || Some((driver.volume(name, bytes, wanted), bytes)));
            ledger.records().volume(name).unwrap().id.clone()
        };
        let raw = made(RAW, RAW_BYTES, block());
        let mounted_id = made(MOUNTED, MOUNTED_BYTES, mounted_as("", Mode::SingleNodeMultiWriter));
        let device = driver.publish(&raw, &block());
        let flags = with_flags("ext4", Mode::SingleNodeMultiWriter, &["discard"]);
        let mounted_at = driver.publish(&mounted_id, &flags);
        let process = driver.pid().to_string();
        let root = pool_root(driver.kind(), &driver.data_dir(), &process);
        let (raw_gate, gate, quiet, stop) = Default::default();
        let load = Self { driver, ledger, device, mounted_at, raw_gate, gate, quiet, stop, root };
        load.fill();
        load
    }

    /// Enough that the power can fail while a snapshot is taken: a clone takes time per extent, a
    /// copy per byte.
    fn fill(&self) {
        let fresh = pattern(1, RAW_BYTES as usize);
        if self.driver.kind() == PoolKind::Copy {
            return write_direct(&self.device, 0, &fresh);
        }
        let file =
            File::options().write(true).custom_flags(libc::O_DIRECT).open(&self.device).unwrap();
        let start = fresh.as_ptr().align_offset(BLOCK as usize);
        for block in (0..RAW_BYTES / BLOCK).step_by(2) {
            file.write_all_at(&fresh[start..start + BLOCK as usize], block * BLOCK).unwrap();
        }
    }

    /// Ends the driver, and returns the ledger.
    pub fn end(self) -> Records {
        let Self { driver, ledger, .. } = self;
        drop(driver);
        ledger.close()
    }

    pub fn running(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    /// Writes to the raw volume until the end.
    pub fn write_raw(&self, seed: u64) {
        let mut random = Random::new(seed);
        // Kept open, because the last close flushes a device.
        let buffered = File::options().read(true).write(true).open(&self.device).unwrap();
        while self.running() {
            let pass = self.raw_gate.pass();
            self.write_raw_once(&mut random, &buffered);
            drop(pass);
            thread::sleep(Duration::from_micros(random.below(2000)));
        }
    }

    fn write_raw_once(&self, random: &mut Random, buffered: &File) {
        let blocks = RAW_BYTES / BLOCK - 32;
        let (at, length) = (random.below(blocks) * BLOCK, (1 + random.below(8)) * BLOCK);
        let fresh = pattern(random.next_u64(), length as usize);
        match random.below(100) {
            0..60 => write_direct(&self.device, at, &fresh),
            60..80 => buffered.write_all_at(&fresh, at + random.below(BLOCK)).unwrap(),
            80..84 => buffered.sync_data().unwrap(),
            84..92 => zero(&self.device, at, 2 * length, true),
            92..95 => zero(&self.device, at, length, false),
            _ => {
                let mut same = vec![0; length as usize];
                buffered.read_exact_at(&mut same, at).unwrap();
                write_direct(&self.device, at, &same);
            }
        }
    }

    /// Works with files on the mounted volume until the end.
    pub fn write_files(&self, seed: u64) {
        let mut random = Random::new(seed);
        while self.running() {
            let pass = self.gate.pass();
            write_file_once(&self.mounted_at, &mut random);
            drop(pass);
            thread::sleep(Duration::from_micros(random.below(3000)));
        }
    }

    /// The volumes without a writer whose names have this prefix.
    pub fn still(&self, stem: &str) -> Vec<String> {
        let records = self.ledger.records();
        let still = records.volumes.iter().filter(|volume| {
            let usable = volume.life.is_usable() && volume.content.is_some();
            usable && volume.name.starts_with(stem)
        });
        still.map(|volume| volume.name.clone()).collect()
    }

    /// The existing snapshots of a volume without a group, oldest first.
    pub fn usable(&self, volume: &str) -> Vec<String> {
        let records = self.ledger.records();
        let usable = records.snapshots.iter().filter(|snapshot| {
            let usable = snapshot.life.is_usable() && snapshot.content.is_some();
            snapshot.volume == volume && snapshot.group.is_none() && usable
        });
        usable.map(|snapshot| snapshot.name.clone()).collect()
    }

    /// The snapshots of deleted volumes whose names have this prefix.
    pub fn orphaned(&self, stem: &str) -> Vec<String> {
        let records = self.ledger.records();
        let orphaned = records.snapshots.iter().filter(|snapshot| {
            let volume = records.volume(&snapshot.volume).unwrap();
            let gone = volume.name.starts_with(stem) && !volume.life.is_usable();
            gone && snapshot.life.is_usable()
        });
        orphaned.map(|snapshot| snapshot.name.clone()).collect()
    }

    pub fn make_empty(&self, name: &str, bytes: u64) {
        self.ledger.make_volume(name, || Some((self.driver.volume(name, bytes, block()), bytes)));
        self.ledger.hold_volume(name, vec![print_of_zeros(); (bytes / BLOCK) as usize]);
    }

    pub fn restore(&self, name: &str, snapshot: &str) {
        self.make_from(name, Source::Snapshot(snapshot));
        let records = self.ledger.records();
        let (made, from) = (records.volume(name).unwrap(), records.snapshot(snapshot).unwrap());
        assert!(made.id.is_empty() || made.content == from.content, "{name} is not {snapshot}");
    }

    /// Creates a volume from a source with this name. Fails if another operator deletes the source.
    pub fn make_from(&self, name: &str, source: Source<'_>) {
        let _quiet = matches!(source, Source::Volume(RAW)).then(|| self.quiet_for_copies());
        let records = self.ledger.records();
        let id = match source {
            Source::Volume(volume) => records.volume(volume).unwrap().id.clone(),
            Source::Snapshot(snapshot) => records.snapshot(snapshot).unwrap().id.clone(),
        };
        drop(records);
        let source = match source {
            Source::Volume(_) => Source::Volume(&id),
            Source::Snapshot(_) => Source::Snapshot(&id),
        };
        let request = csi::CreateVolumeRequest {
            volume_content_source: Some(source.into()),
            ..create(name, 0, block())
        };
        let made = self.ledger.make_volume(name, || match self.driver.call_patiently(request) {
            Ok(answer) => answer.volume.map(|v| (v.volume_id, v.capacity_bytes as u64)),
            Err(status) if status.code() == Code::NotFound => None,
            Err(status) => panic!("{name}: {status:?}"),
        });
        if made {
            let id = self.ledger.records().volume(name).unwrap().id.clone();
            self.ledger.hold_volume(name, prints(&self.root.join("volumes").join(id)));
        }
    }

    /// A copy pool needs a pause in the writes to raw volumes.
    fn quiet_for_copies(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        let wanted = self.driver.kind() == PoolKind::Copy && !self.quiet.load(Ordering::Relaxed);
        wanted.then(|| self.raw_gate.close())
    }

    /// Takes snapshots of the volumes and reads them back.
    pub fn take_snapshots(&self, name: &str, volumes: &[&str], group: bool) {
        let quiet = volumes.contains(&RAW).then(|| self.quiet_for_copies()).flatten();
        let ids: Vec<String> = {
            let records = self.ledger.records();
            volumes.iter().map(|volume| records.volume(volume).unwrap().id.clone()).collect()
        };
        let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
        let made = self.ledger.take_snapshots(name, volumes, group, || {
            if group {
                let answer = ok(self.driver.call_patiently(create_group_snapshot(name, &ids)));
                let group = answer.group_snapshot.unwrap();
                let members = group.snapshots.into_iter().map(|member| member.snapshot_id);
                return Some((members.collect(), group.group_snapshot_id));
            }
            let answer = ok(self.driver.call_patiently(create_snapshot(name, ids[0])));
            Some((vec![answer.snapshot.unwrap().snapshot_id], String::new()))
        });
        drop(quiet);
        for name in made.unwrap_or_default() {
            let id = self.ledger.records().snapshot(&name).unwrap().id.clone();
            self.ledger.hold(&name, prints(&self.root.join("snapshots").join(id)));
        }
    }

    pub fn delete_snapshot(&self, name: &str) {
        let snapshot = self.ledger.records().snapshot(name).unwrap().clone();
        let Some(group) = snapshot.group else {
            let request = delete_snapshot(&snapshot.id);
            return self.ledger.delete_snapshots(&[snapshot.name], || {
                ok(self.driver.call_patiently(request));
            });
        };
        let records = self.ledger.records();
        let members = records.snapshots.iter().filter(|other| {
            other.group.as_ref().is_some_and(|other_group| other_group.name == group.name)
        });
        let members: Vec<String> = members.map(|member| member.name.clone()).collect();
        drop(records);
        let request = csi::DeleteVolumeGroupSnapshotRequest {
            group_snapshot_id: group.id,
            ..Default::default()
        };
        self.ledger.delete_snapshots(&members, || {
            ok(self.driver.call_patiently(request));
        });
    }

    /// Any member of the oldest group that exists.
    pub fn oldest_group(&self) -> Option<String> {
        let records = self.ledger.records();
        let mut groups =
            records.snapshots.iter().filter(|s| s.group.is_some() && s.life.is_usable());
        groups.next().map(|snapshot| snapshot.name.clone())
    }

    pub fn expand(&self, volume: &str, more: u64) {
        let records = self.ledger.records();
        let found = records.volume(volume).unwrap();
        let (id, bytes) = (found.id.clone(), found.sizes.last().unwrap().1);
        drop(records);
        let size = (bytes + more).min(MOST_BYTES.max(bytes));
        self.ledger.expand_volume(volume, size, || {
            ok(self.driver.call_patiently(expand(&id, size)));
        });
    }

    pub fn delete_volume(&self, volume: &str) {
        let id = self.ledger.records().volume(volume).unwrap().id.clone();
        self.ledger.delete_volume(volume, || {
            ok(self.driver.call_patiently(delete_volume(&id)));
        });
    }

    pub fn quiet(&self) -> Quiet<'_> {
        let gates = [self.gate.close(), self.raw_gate.close()];
        self.quiet.store(true, Ordering::Relaxed);
        Quiet { load: self, _gates: gates }
    }
}

fn ok<T>(answer: Result<T, Status>) -> T {
    answer.unwrap_or_else(|status| panic!("{status:?}"))
}

fn write_file_once(directory: &Path, random: &mut Random) {
    let file = directory.join(format!("file{}", random.below(16)));
    let open = || File::options().create(true).truncate(false).write(true).open(&file).unwrap();
    let length = 1 + random.below(20_000);
    let fresh = pattern(random.next_u64(), length as usize);
    match random.below(20) {
        0..12 => open().write_all_at(&fresh, random.below(200_000)).unwrap(),
        12..14 => open().sync_all().unwrap(),
        14..16 => open().set_len(random.below(200_000)).unwrap(),
        16..18 => {
            drop(open());
            zero(&file, random.below(100_000), length, true);
        }
        _ => {
            let _ = fs::remove_file(&file);
        }
    }
}

/// The checksums of a file's blocks.
pub fn prints(file: &Path) -> Vec<Print> {
    let content = fs::read(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    content.chunks(BLOCK as usize).map(crc32c::crc32c).collect()
}

/// The different blocks. The shorter list is padded with zeros.
pub fn differing(old: &[Print], new: &[Print]) -> Vec<u64> {
    let zero = print_of_zeros();
    let at = |prints: &[Print], block: usize| prints.get(block).copied().unwrap_or(zero);
    let differs = |block: &usize| at(old, *block) != at(new, *block);
    (0..old.len().max(new.len())).filter(differs).map(|block| block as u64).collect()
}

pub fn print_of_zeros() -> Print {
    crc32c::crc32c(&[0; BLOCK as usize])
}

/// The directory of a pool's files. An image pool is reachable only through a mount descriptor of
/// the driver.
pub fn pool_root(kind: PoolKind, data_dir: &Path, process: &str) -> PathBuf {
    if kind != PoolKind::Image {
        return data_dir.to_owned();
    }
    let image = data_dir.join("pool.img").canonicalize().unwrap();
    let is_root = |path: &PathBuf| {
        let Ok(metadata) = fs::metadata(path) else { return false };
        let (major, minor) = (stat::major(metadata.dev()), stat::minor(metadata.dev()));
        let below = fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/loop/backing_file"));
        metadata.is_dir()
            && below.is_ok_and(|file| Path::new(file.trim_end()) == image)
            && path.join("snapshots").is_dir()
    };
    let descriptors = fs::read_dir(format!("/proc/{process}/fd")).unwrap();
    let mut paths = descriptors.filter_map(|entry| Some(entry.ok()?.path()));
    paths.find(is_root).expect("the pool's mount is held open")
}
