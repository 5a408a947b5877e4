//! A driver whose pool is on a disk that can fail: an image served through FUSE with a filesystem
//! that contains the pool.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;

use csi_loopback::backend::{FsType, PoolKind};
use support::driver::*;
use support::kernel::{drop_page_cache, mounts, shut_down_pool, unmount, wait_for};
use support::{MIB, run};
use tempfile::TempDir;

use crate::power_loss::cache::{Cache, Fault};
use crate::power_loss::disk::{is_attached, make_filesystem, mount, repair_and_mount};

/// The disk, in bytes. Sparse.
const DISK_BYTES: u64 = 400 * MIB;

pub struct Rig {
    kind: PoolKind,
    // Dropped in this order.
    pub driver: Driver,
    below: Mounted,
    disk: Cache,
    _directory: TempDir,
    /// A failure other than a lack of space or descriptors: the filesystem of the disk may have to
    /// be mounted again.
    needs_reboot: bool,
    is_failing: bool,
}

impl Rig {
    pub fn new(kind: PoolKind) -> Self {
        let directory = TempDir::with_prefix("csi-loopback-").unwrap();
        let image = directory.path().join("disk.img");
        File::create(&image).unwrap().set_len(DISK_BYTES).unwrap();
        make_filesystem(filesystem(kind), &image);
        let disk = Cache::serve(&image, &directory.path().join("disk"));
        let below = directory.path().join("below");
        fs::create_dir(&below).unwrap();
        mount(filesystem(kind), &disk.image(), &below);
        let driver = Driver::in_place(kind, &below, &["--pool-size", "320Mi", "--pool-sparse"]);
        Self {
            kind,
            driver,
            below: Mounted(below),
            disk,
            _directory: directory,
            needs_reboot: false,
            is_failing: false,
        }
    }

    fn filler(&self) -> PathBuf {
        self.below.0.join("filler")
    }

    /// Whether anything fails now, or a filesystem has shut down.
    pub fn is_failing(&self) -> bool {
        self.is_failing || self.needs_reboot
    }

    pub fn needs_reboot(&self) -> bool {
        self.needs_reboot
    }

    pub fn fail_disk(&mut self, fault: Fault) {
        self.disk.fail(Some(fault));
        self.is_failing = true;
        self.needs_reboot = true;
    }

    /// Fills the filesystem of the disk, or that of the pool.
    pub fn fill(&mut self) {
        self.is_failing = true;
        let Ok(file) = File::create(self.filler()) else { return };
        let mut at = 0;
        for size in [16 * MIB, MIB, 4096] {
            let chunk = vec![7; size as usize];
            // If blocks cannot be allocated because the disk fails, XFS accepts any number of
            // writes and drops them later.
            while at < DISK_BYTES && file.write_all_at(&chunk, at).is_ok() {
                at += size;
            }
        }
        let _ = file.sync_all();
    }

    pub fn shut_down(&mut self) {
        // A second shutdown is not possible.
        if !self.needs_reboot {
            shut_down_pool(self.driver.pid().as_raw() as u32);
            self.needs_reboot = true;
        }
    }

    pub fn repair(&mut self) {
        self.disk.fail(None);
        let _ = fs::remove_file(self.filler());
        self.is_failing = false;
    }

    pub fn drop_page_cache(&self) {
        if !self.is_failing() {
            drop_page_cache();
        }
    }

    /// Sets whether the driver can open more files.
    pub fn limit_descriptors(&self, limit: bool) {
        let pid = format!("--pid={}", self.driver.pid());
        let limit = if limit { "--nofile=4:" } else { "--nofile=4096:" };
        run("prlimit", &[&pid, limit]);
    }

    pub fn kill(&mut self) {
        if self.driver.is_running() {
            self.driver.kill();
        }
    }

    pub fn stop(&mut self) {
        if self.driver.is_running() {
            self.driver.stop();
        }
    }

    /// Whether it runs then.
    pub fn start(&mut self) -> Result<(), String> {
        if self.driver.is_running() { Ok(()) } else { self.driver.try_start() }
    }

    /// Discards all state in memory. Failures remain.
    pub fn reboot(&mut self, volumes: &[String]) {
        self.kill();
        // A filesystem that writes at the unmount needs a working disk.
        self.disk.fail(None);
        let own = self.below.0.clone();
        let scratch = self.driver.scratch().to_owned();
        let mounted = mounts().into_iter().map(|mount| mount.target);
        for target in mounted.filter(|target| target.starts_with(&scratch)) {
            let _ = Command::new("umount").arg(&target).output();
        }
        volumes.iter().for_each(|volume| request_detach_named(volume));
        wait_for("the filesystem of the disk is detached", || {
            let _ = Command::new("umount").arg(&own).output();
            mounts().iter().all(|mount| mount.target != own)
        });
        wait_for("the disk is detached", || !is_attached(&self.disk.image()));
        repair_and_mount(filesystem(self.kind), &self.disk.image(), &own);
        let _ = fs::remove_file(self.filler());
        self.is_failing = false;
        self.needs_reboot = false;
    }

    pub fn data_dir(&self) -> PathBuf {
        self.below.0.join("data")
    }
}

/// The one on the disk.
fn filesystem(kind: PoolKind) -> FsType {
    match kind {
        PoolKind::Reflink => FsType::Xfs,
        PoolKind::Image | PoolKind::Copy => FsType::Ext4,
    }
}

/// Stopping the driver after a failed test needs a working disk.
impl Drop for Rig {
    fn drop(&mut self) {
        self.repair();
    }
}

/// The filesystem of the disk.
struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        unmount(&self.0);
    }
}
