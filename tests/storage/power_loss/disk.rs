//! A disk whose power can be cut any number of times: the pool lies in an image file on an XFS, where
//! a copy of the image is one FICLONE, atomic against whoever writes to it. What such a copy holds is
//! what a disk holds that writes through: everything that was written to the image, and nothing
//! that is still only in the page cache or the log of the filesystem in it. A disk with a cache of its
//! own is in [`super::cache`].

use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use csi_loopback::backend::{FsType, PoolKind};
use tempfile::TempDir;

use super::cache::Cache;
use support::{
    GIB, MIB, Xfs,
    kernel::{unmount, wait_for},
    path, run,
};

/// Size of the image of a pool, in bytes.
pub const POOL_BYTES: u64 = 1536 * MIB;

/// A pool and what it lies on.
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

/// The filesystem that the images are on.
pub struct Disk {
    pub setup: Setup,
    // Dropped in this order.
    outer: Xfs,
    directory: TempDir,
}

impl Disk {
    pub fn new(setup: Setup) -> Self {
        let image = setup.kind == PoolKind::Image;
        assert!(!setup.cached || !image, "an image pool opens its image itself");
        let directory = TempDir::with_prefix("csi-loopback-").unwrap();
        Self { setup, outer: Xfs::mount(directory.path(), 64 * GIB), directory }
    }

    fn image(&self, place: &str) -> PathBuf {
        match self.setup.kind {
            PoolKind::Image => self.outer.path().join(place).join("data/pool.img"),
            PoolKind::Reflink | PoolKind::Copy => self.outer.path().join(format!("{place}.img")),
        }
    }

    /// A place for a new pool.
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

    /// The place as it would be if the power had been cut when `photo` was taken.
    pub fn after_power_cut(&self, name: &str, photo: &Path) -> Place<'_> {
        let image = self.image(name);
        if self.setup.kind == PoolKind::Image {
            let data = image.parent().unwrap();
            fs::create_dir_all(data).unwrap();
            fs::write(data.join("pool.json"), r#"{"version":1,"kind":"image"}"#).unwrap();
        }
        clone(photo, &image);
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

    /// Where copies of images go.
    pub fn photo(&self, number: usize) -> PathBuf {
        self.outer.path().join(format!("photo-{number}"))
    }
}

pub fn make_filesystem(filesystem: FsType, image: &Path) {
    let (program, options): (_, &[&str]) = match filesystem {
        // Sectors as large as those that a loop device of a cloned file has.
        FsType::Xfs => ("mkfs.xfs", &["-q", "-s", "size=4096", "-m", "reflink=1,rmapbt=0"]),
        // A small journal is soon replayed; nothing is initialized in the background.
        FsType::Ext4 => {
            let now = "lazy_itable_init=0,lazy_journal_init=0";
            ("mkfs.ext4", &["-q", "-F", "-b", "4096", "-J", "size=4", "-E", now])
        }
        FsType::Btrfs => ("mkfs.btrfs", &["-q", "-f"]),
    };
    run(program, &[options, &[path(image)]].concat());
}

pub fn mount(filesystem: FsType, image: &Path, at: &Path) {
    // Direct, or everything would be cached, and written, twice.
    let attach = ["--find", "--show", "--direct-io=on", "--sector-size=4096", path(image)];
    let attached = Command::new("losetup").args(attach).output().unwrap();
    assert!(attached.status.success(), "{attached:?}");
    let device = String::from_utf8(attached.stdout).unwrap();
    // A copy has the identity of what it was copied from.
    let options: &[&str] = if filesystem == FsType::Xfs { &["-o", "nouuid"] } else { &[] };
    let mounted = Command::new("mount").args(options).args([device.trim(), path(at)]).status();
    // From now on it goes with its mount.
    run("losetup", &["--detach", device.trim()]);
    assert!(mounted.unwrap().success(), "{} does not mount", image.display());
}

pub fn is_attached(image: &Path) -> bool {
    let listed = Command::new("losetup").arg("-j").arg(image).output().unwrap();
    !listed.stdout.is_empty()
}

/// A point-in-time copy on the same filesystem.
pub fn clone(from: &Path, to: &Path) {
    run("cp", &["--reflink=always", path(from), path(to)]);
}

/// A pool's surroundings: the directory that its data directory is in, and the image below.
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

    /// Copies the image as it would be if the power were cut now. Returns how many blocks of the disk's
    /// cache are lost.
    pub fn copy(&self, to: &Path) -> u64 {
        match &self.cache {
            Some(cache) => cache.copy(to),
            None => {
                clone(&self.image, to);
                0
            }
        }
    }

    /// Looks for damage in the filesystem of the image, which nobody may be using any more.
    pub fn check_filesystem(mut self) {
        self.unmount();
        wait_for("the image is let go of", || !is_attached(&self.image));
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
            wait_for("the disk is let go of", || !is_attached(&cache.image()));
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
