//! The filesystem of a sparse pool image is full, and the driver is stopped or killed and
//! restarted. In any order, acknowledged snapshots remain, and lists and deletions work.

use std::fs::File;
use std::io::Write;

use csi_loopback::backend::PoolKind;
use support::driver::*;
use support::full::HostFiller;
use support::{ImageFs, MIB, directory, have_root, pattern};
use tempfile::TempDir;

/// How a driver ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Stopped,
    Killed,
}

impl End {
    fn of(self, driver: &mut Driver) {
        match self {
            Self::Stopped => drop(driver.stop()),
            Self::Killed => driver.kill(),
        }
    }
}

/// A driver with a sparse image pool on a small ext4, with a mounted volume and two acknowledged
/// snapshots.
struct Rig {
    // Dropped in this order: the cleanup of a failed test needs space.
    filler: Option<HostFiller>,
    driver: Driver,
    below: ImageFs,
    _directory: TempDir,
    volume: String,
    snapshots: Vec<String>,
}

impl Rig {
    fn new() -> Self {
        let directory = directory();
        let below = ImageFs::ext4(directory.path(), 700 * MIB);
        let flags = ["--pool-size", "2Gi", "--pool-sparse"];
        let driver = Driver::in_place(PoolKind::Image, below.path(), &flags);
        let volume = driver.volume("v", 256 * MIB, mounted("ext4"));
        driver.publish(&volume, &mounted("ext4"));
        let (filler, snapshots) = (None, Vec::new());
        let mut rig = Self { filler, driver, below, _directory: directory, volume, snapshots };
        for number in 0..2 {
            rig.write(number).unwrap();
            let name = format!("acknowledged-{number}");
            rig.snapshots.push(rig.driver.snapshot(&name, &rig.volume));
        }
        rig
    }

    /// Writes and flushes 1 MiB in the pod's filesystem.
    fn write(&self, number: u64) -> std::io::Result<()> {
        let mut file = File::create(self.driver.target(&self.volume).join(number.to_string()))?;
        file.write_all(&pattern(number, MIB as usize))?;
        file.sync_all()
    }

    /// Every acknowledged snapshot is listed.
    #[track_caller]
    fn assert_listed(&self, when: &str) {
        let listed: Vec<String> =
            all_snapshots(&self.driver).into_iter().map(|one| one.snapshot_id).collect();
        for snapshot in &self.snapshots {
            assert!(listed.contains(snapshot), "{when}: {snapshot} is not among {listed:?}");
        }
        assert!(volume_ids(&self.driver).contains(&self.volume), "{when}: the volume is missing");
    }

    /// Retries like a pod and csi-snapshotter on a full disk.
    fn try_for_a_while(&mut self) {
        for number in 10..22 {
            let _ = self.write(number);
            if let Ok(made) = self.driver.call(create_snapshot(&format!("s{number}"), &self.volume))
            {
                self.snapshots.push(made.snapshot.unwrap().snapshot_id);
            }
            self.assert_listed("on a full disk");
        }
    }
}

fn a_full_disk_and_restarts(first: End, second: End) {
    let mut rig = Rig::new();
    rig.filler = Some(HostFiller::all_of(rig.below.path()));
    rig.try_for_a_while();
    first.of(&mut rig.driver);
    rig.driver.start_again();
    rig.assert_listed("after a start on a full disk");
    // Objects deleted on the full disk remain deleted.
    let deleted = rig.snapshots.remove(1);
    rig.driver.ok(delete_snapshot(&deleted));
    rig.try_for_a_while();
    second.of(&mut rig.driver);
    rig.filler = None;
    drop_page_cache();
    rig.driver.start_again();
    rig.assert_listed("with room again");
    assert!(all_snapshots(&rig.driver).iter().all(|one| one.snapshot_id != deleted));
    drop_page_cache();
    rig.driver.restart();
    rig.assert_listed("after another start");
    // Everything works again, at the latest after the volume is staged again.
    rig.driver.take_down(&rig.volume);
    rig.driver.publish(&rig.volume, &mounted("ext4"));
    rig.write(100).unwrap();
    let last = rig.driver.snapshot("last", &rig.volume);
    assert!(!rig.driver.ok(delta(&rig.snapshots[0], &last)).extents().is_empty());
    rig.driver.take_down(&rig.volume);
}

#[test]
#[ignore = "full tier"]
fn a_full_disk_then_stop_then_kill_loses_no_snapshot() {
    if have_root() {
        a_full_disk_and_restarts(End::Stopped, End::Killed);
    }
}

#[test]
fn a_full_disk_then_kill_then_stop_loses_no_snapshot() {
    if have_root() {
        a_full_disk_and_restarts(End::Killed, End::Stopped);
    }
}
