//! Power cuts while a filesystem grows at stage: at each fail point the driver waits, and the disk
//! is copied as after a power loss. On each copy the volume is staged with its file and grows.

use std::fs;
use std::path::Path;
use std::thread;

use csi_loopback::backend::{FsType, PoolKind, check};
use csi_loopback::proto::csi::v1 as csi;
use nix::sys::statvfs::statvfs;
use support::driver::*;
use support::kernel::wait_for;
use support::points::Points;
use support::{ALL_KINDS, MIB, fsck, have_root, path, pattern, setting};

use super::disk::{Disk, POOL_BYTES, Place, Setup};
use super::have_fuse;

const CONTENT_BYTES: usize = 300_000;

/// The size of the volume before and after the growth, in bytes.
const fn sizes(fs_type: FsType) -> (u64, u64) {
    match fs_type {
        // By more than a factor of 1,024, so that resize2fs works in two steps.
        FsType::Ext4 => (16 * MIB, 20 * 1024 * MIB),
        FsType::Xfs | FsType::Btrfs => (300 * MIB, 900 * MIB),
    }
}

/// All fail points except those within a commit of the catalog.
const STEPS: &str = "!page.";

/// A disk with a volume that can grow, and its driver.
struct Growing<'a> {
    disk: &'a Disk,
    place: &'a Place<'a>,
    driver: &'a Driver,
    points: &'a Points,
    fs_type: FsType,
    snapshot: String,
}

impl Growing<'_> {
    /// A new volume that is larger than its filesystem.
    fn volume(&self, number: usize) -> String {
        let request = csi::CreateVolumeRequest {
            volume_content_source: Some(Source::Snapshot(&self.snapshot).into()),
            ..create(&format!("v{number}"), sizes(self.fs_type).1, mounted(self.fs_type.name()))
        };
        self.driver.ok(request).volume.unwrap().volume_id
    }

    /// The fail points of the growth.
    fn learn(&self) -> Vec<String> {
        let id = self.volume(0);
        self.points.plan("hang", 0, STEPS);
        self.driver.stage(&id, &mounted(self.fs_type.name()));
        let met = self.points.met();
        self.points.clear();
        self.driver.unstage(&id);
        self.driver.ok(delete_volume(&id));
        met
    }

    fn cut_at(&self, at: usize, name: &str) {
        let (id, capture) = (self.volume(at), self.disk.capture(at));
        self.points.plan("hang", at, STEPS);
        thread::scope(|scope| {
            let staged = scope.spawn(|| self.driver.stage(&id, &mounted(self.fs_type.name())));
            wait_for(name, || self.points.met().len() >= at);
            self.place.copy(&capture);
            self.points.clear();
            staged.join().unwrap();
        });
        self.driver.unstage(&id);
        self.driver.ok(delete_volume(&id));
        self.look(&format!("cut-{at}"), &capture, &id, &format!("cut at {at}, {name}"));
        fs::remove_file(&capture).unwrap();
    }

    /// Starts a driver on the copy.
    fn look(&self, place: &str, capture: &Path, id: &str, what: &str) {
        let place = self.disk.after_power_loss(place, capture);
        let fs_type = self.fs_type.name();
        let mut driver = Driver::in_place(self.disk.setup.kind, &place.at, &[]);
        let staging = driver.stage(id, &mounted(fs_type));
        assert!(fs::read(staging.join("file")).unwrap() == pattern(1, CONTENT_BYTES), "{what}");
        let stat = statvfs(&staging).unwrap();
        let (old, new) = sizes(self.fs_type);
        assert!(stat.blocks() * stat.fragment_size() > (old + new) / 2, "{what}: it did not grow");
        driver.unstage(id);
        driver.with_device(id, |device| fsck::check(fs_type, device));
        assert!(driver.stop().success());
        assert_eq!(check::check(&place.data_dir()).unwrap().findings, [], "{what}");
    }
}

/// Cuts the power at one in `every` fail points.
fn cut(setup: Setup, fs_type: FsType, every: usize) {
    println!("{fs_type} on {setup}");
    let (disk, points) = (&Disk::new(setup), &Points::new());
    let place = &disk.make("live");
    let size = POOL_BYTES.to_string();
    let watched = path(points.path());
    let flags = ["--pool-size", &size, "--overcommit", "1000", "--fail-points", watched];
    let driver = &Driver::in_place(setup.kind, &place.at, &flags);
    let wanted = mounted(fs_type.name());
    let small = driver.volume("small", sizes(fs_type).0, wanted.clone());
    let staging = driver.stage(&small, &wanted);
    fs::write(staging.join("file"), pattern(1, CONTENT_BYTES)).unwrap();
    driver.unstage(&small);
    let snapshot = driver.snapshot("s", &small);
    let growing = Growing { disk, place, driver, points, fs_type, snapshot };
    let met = growing.learn();
    let cuts: Vec<usize> = (1..=met.len()).step_by(every).collect();
    cuts.iter().for_each(|at| growing.cut_at(*at, &met[at - 1]));
    println!(
        "report: {fs_type} on {setup}: {} power cuts at {} steps of a growth",
        cuts.len(),
        met.len()
    );
}

fn setup(kind: PoolKind) -> Setup {
    let filesystem = if kind == PoolKind::Copy { FsType::Ext4 } else { FsType::Xfs };
    Setup { kind, filesystem, cached: kind != PoolKind::Image }
}

#[test]
fn a_power_cut_during_a_growth_costs_nothing() {
    if have_root() {
        cut(setup(PoolKind::Image), FsType::Ext4, 9);
    }
}

#[test]
#[ignore = "full tier"]
fn a_power_cut_at_any_step_of_a_growth_costs_nothing() {
    if have_root() && have_fuse() {
        // Each step in hack/soak.sh.
        let every = setting("GROWTH_EVERY").unwrap_or(9) as usize;
        for kind in ALL_KINDS {
            FsType::ALL.into_iter().for_each(|fs_type| cut(setup(kind), fs_type, every));
        }
    }
}
