//! A disk whose power can be cut repeatedly: the pool is in an image file on an XFS, where one
//! FICLONE copies the image atomically. A copy contains all data that was written to the image, as
//! on a write-through disk, but nothing from the page cache or the log of its filesystem.
//! [`super::cache`] is a disk with its own cache.

use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use csi_loopback::backend::{FsType, PoolKind};
use tempfile::TempDir;

use super::cache::Cache;
use support::{
    GIB, ImageFs, MIB,
    kernel::{unmount, wait_for},
    path, run,
};

/// Size of the image of a pool, in bytes.
pub const POOL_BYTES: u64 = 1536 * MIB;

/// A pool and its disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setup {
    pub kind: PoolKind,
    pub filesystem: FsType,
    /// Whether the pool under load is on a disk that loses its cache ([`Cache`]).
    pub cached: bool,
}

impl fmt::Display for Setup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cached = if self.cached { " on a disk that loses its cache" } else { "" };
        write!(f, "{} ({}){cached}", self.kind, self.filesystem)
    }
}

/// The filesystem of the images.
pub struct Disk {
    pub setup: Setup,
    // Dropped in this order.
    outer: ImageFs,
    directory: TempDir,
}

impl Disk {
    pub fn new(setup: Setup) -> Self {
        let image = setup.kind == PoolKind::Image;
        assert!(!setup.cached || !image, "an image pool opens its image itself");
        let directory = TempDir::with_prefix("csi-loopback-").unwrap();
        Self { setup, outer: ImageFs::xfs(directory.path(), 64 * GIB), directory }
    }

    fn image(&self, place: &str) -> PathBuf {
        match self.setup.kind {
            PoolKind::Image => self.outer.path().join(place).join("data/pool.img"),
            PoolKind::Reflink | PoolKind::Copy => self.outer.path().join(format!("{place}.img")),
        }
    }

    /// Creates a new disk.
    pub fn make(&self, name: &str) -> Place<'_> {
        let image = self.image(name);
        if self.setup.kind == PoolKind::Image {
            fs::create_dir(self.outer.path().join(name)).unwrap();
        } else {
            File::create(&image).unwrap().set_len(POOL_BYTES).unwrap();
            make_filesystem(self.setup.filesystem, &image);
        }
        let cache = self.setup.cached.then(|| {
            let at = self.directory.path().join(format!("{name}-disk"));
            Cache::serve(&image, &at)
        });
        self.open(name, cache)
    }

    /// The disk as after a power loss at the time of `capture`.
    pub fn after_power_loss(&self, name: &str, capture: &Path) -> Place<'_> {
        let image = self.image(name);
        if self.setup.kind == PoolKind::Image {
            let data = image.parent().unwrap();
            fs::create_dir_all(data).unwrap();
            fs::write(data.join("pool.json"), r#"{"version":1,"kind":"image"}"#).unwrap();
        }
        clone(capture, &image);
        self.open(name, None)
    }

    fn open(&self, name: &str, cache: Option<Cache>) -> Place<'_> {
        let image = self.image(name);
        let path_of = |parent: &Path| parent.join(name);
        let at = match self.setup.kind {
            PoolKind::Image => path_of(self.outer.path()),
            PoolKind::Reflink | PoolKind::Copy => {
                let at = path_of(self.directory.path());
                fs::create_dir_all(&at).unwrap();
                let device = cache.as_ref().map_or(image.clone(), Cache::image);
                mount(self.setup.filesystem, &device, &at);
                at
            }
        };
        Place { disk: self, image, at, cache, mounted: self.setup.kind != PoolKind::Image }
    }

    /// The path for a copy of an image.
    pub fn capture(&self, number: usize) -> PathBuf {
        self.outer.path().join(format!("capture-{number}"))
    }
}

pub fn make_filesystem(filesystem: FsType, image: &Path) {
    let (program, options): (_, &[&str]) = match filesystem {
        // The sector size of a loop device with a cloned file.
        FsType::Xfs => ("mkfs.xfs", &["-q", "-s", "size=4096", "-m", "reflink=1,rmapbt=0"]),
        // A small journal is replayed quickly; no background initialization.
        FsType::Ext4 => {
            let now = "lazy_itable_init=0,lazy_journal_init=0";
            ("mkfs.ext4", &["-q", "-F", "-b", "4096", "-J", "size=4", "-E", now])
        }
        FsType::Btrfs => ("mkfs.btrfs", &["-q", "-f"]),
    };
    run(program, &[options, &[path(image)]].concat());
}

pub fn mount(filesystem: FsType, image: &Path, at: &Path) {
    mount_after(filesystem, image, at, |_| true);
}

/// Repairs, then mounts. An ext4 with an error can be mounted without a repair, but has lost the
/// space of files whose deletion was not committed. XFS repairs itself at the mount.
pub fn repair_and_mount(filesystem: FsType, image: &Path, at: &Path) {
    mount_after(filesystem, image, at, |device| {
        if filesystem != FsType::Ext4 {
            return true;
        }
        let repaired = Command::new("e2fsck").args(["-y", device]).output();
        // 1: there was something to repair.
        matches!(repaired.unwrap().status.code(), Some(0 | 1))
    });
}

/// Mounts if `prepare` returns true for the device.
fn mount_after(filesystem: FsType, image: &Path, at: &Path, prepare: impl FnOnce(&str) -> bool) {
    // Direct I/O, because otherwise data would be cached and written twice.
    let attach = ["--find", "--show", "--direct-io=on", "--sector-size=4096", path(image)];
    let attached = Command::new("losetup").args(attach).output().unwrap();
    assert!(attached.status.success(), "{attached:?}");
    let device = String::from_utf8(attached.stdout).unwrap();
    let device = device.trim();
    // A copy has the UUID of its source.
    let options: &[&str] = if filesystem == FsType::Xfs { &["-o", "nouuid"] } else { &[] };
    let mut mount = Command::new("mount");
    mount.args(options).args([device, path(at)]);
    let is_mounted = prepare(device) && mount.status().unwrap().success();
    // From now on the device is detached with its mount.
    run("losetup", &["--detach", device]);
    assert!(is_mounted, "{} does not mount", image.display());
}

pub fn is_attached(image: &Path) -> bool {
    let listed = Command::new("losetup").arg("-j").arg(image).output().unwrap();
    !listed.stdout.is_empty()
}

/// A point-in-time copy on the same filesystem.
pub fn clone(from: &Path, to: &Path) {
    run("cp", &["--reflink=always", path(from), path(to)]);
}

/// A disk: the mount path of the data directory, and the image.
pub struct Place<'a> {
    disk: &'a Disk,
    pub image: PathBuf,
    pub at: PathBuf,
    cache: Option<Cache>,
    mounted: bool,
}

impl Place<'_> {
    pub fn data_dir(&self) -> PathBuf {
        self.at.join("data")
    }

    /// Copies the image as after a power loss now. Returns the number of lost blocks of the disk's
    /// cache.
    pub fn copy(&self, to: &Path) -> u64 {
        match &self.cache {
            Some(cache) => cache.copy(to),
            None => {
                clone(&self.image, to);
                0
            }
        }
    }

    /// Checks the filesystem of the unused image for damage.
    pub fn check_filesystem(mut self) {
        self.unmount();
        wait_for("the image is detached", || !is_attached(&self.image));
        let image = path(&self.image);
        match self.disk.setup.filesystem {
            FsType::Ext4 => run("e2fsck", &["-fn", image]),
            FsType::Xfs => run("xfs_repair", &["-n", image]),
            FsType::Btrfs => run("btrfs", &["check", "--readonly", image]),
        }
    }

    fn unmount(&mut self) {
        if std::mem::take(&mut self.mounted) {
            unmount(&self.at);
            let _ = fs::remove_dir(&self.at);
        }
        if let Some(cache) = self.cache.take() {
            wait_for("the disk is detached", || !is_attached(&cache.image()));
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.unmount();
        let _ = fs::remove_file(&self.image);
        if self.disk.setup.kind == PoolKind::Image {
            let _ = fs::remove_dir_all(&self.at);
        }
    }
}
