//! A disk whose power can be cut any number of times: the pool lies in an image file on an XFS, where
//! a copy of the image is one FICLONE, atomic against whoever writes to it. What such a copy holds is
//! what a disk holds that writes through: everything that was written to the image, and nothing
//! that is still only in the page cache or the log of the filesystem in it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use csi_loopback::backend::PoolKind;
use tempfile::TempDir;

use crate::support::{GIB, MIB, Xfs, kernel::wait_for, path, run};

/// Size of the image of a pool, in bytes.
pub const POOL_BYTES: u64 = 768 * MIB;

/// The filesystem that the images are on.
pub struct Disk {
    pub kind: PoolKind,
    // Dropped in this order.
    outer: Xfs,
    directory: TempDir,
}

impl Disk {
    pub fn new(kind: PoolKind) -> Self {
        let directory = TempDir::with_prefix("csi-loopback-").unwrap();
        Self { kind, outer: Xfs::mount(directory.path(), 64 * GIB), directory }
    }

    fn image(&self, place: &str) -> PathBuf {
        match self.kind {
            PoolKind::Image => self.outer.path().join(place).join("data/pool.img"),
            PoolKind::Reflink | PoolKind::Copy => self.outer.path().join(format!("{place}.img")),
        }
    }

    /// A place for a new pool.
    pub fn make(&self, name: &str) -> Place<'_> {
        let image = self.image(name);
        if self.kind == PoolKind::Image {
            fs::create_dir(self.outer.path().join(name)).unwrap();
        } else {
            File::create(&image).unwrap().set_len(POOL_BYTES).unwrap();
            // Sectors as large as those that a loop device of a cloned file has.
            match self.kind {
                PoolKind::Reflink => run(
                    "mkfs.xfs",
                    &["-q", "-s", "size=4096", "-m", "reflink=1,rmapbt=0", path(&image)],
                ),
                // A small journal is soon replayed; nothing is initialized in the background.
                _ => {
                    let now = "lazy_itable_init=0,lazy_journal_init=0";
                    let options = ["-q", "-F", "-b", "4096", "-J", "size=4", "-E", now];
                    run("mkfs.ext4", &[&options[..], &[path(&image)]].concat());
                }
            }
        }
        self.open(name)
    }

    /// The place as it would be if the power had been cut when `photo` was taken.
    pub fn after_power_cut(&self, name: &str, photo: &Path) -> Place<'_> {
        let image = self.image(name);
        if self.kind == PoolKind::Image {
            let data = image.parent().unwrap();
            fs::create_dir_all(data).unwrap();
            fs::write(data.join("pool.json"), r#"{"version":1,"kind":"image"}"#).unwrap();
        }
        clone(photo, &image);
        self.open(name)
    }

    fn open(&self, name: &str) -> Place<'_> {
        let image = self.image(name);
        let path_of = |parent: &Path| parent.join(name);
        let at = match self.kind {
            PoolKind::Image => path_of(self.outer.path()),
            PoolKind::Reflink | PoolKind::Copy => {
                let at = path_of(self.directory.path());
                fs::create_dir_all(&at).unwrap();
                mount(self.kind, &image, &at);
                at
            }
        };
        Place { disk: self, image, at, mounted: self.kind != PoolKind::Image }
    }

    /// Where copies of images go.
    pub fn photo(&self, number: usize) -> PathBuf {
        self.outer.path().join(format!("photo-{number}"))
    }
}

fn mount(kind: PoolKind, image: &Path, at: &Path) {
    // Direct, or everything would be cached, and written, twice.
    let attach = ["--find", "--show", "--direct-io=on", "--sector-size=4096", path(image)];
    let attached = Command::new("losetup").args(attach).output().unwrap();
    assert!(attached.status.success(), "{attached:?}");
    let device = String::from_utf8(attached.stdout).unwrap();
    // A copy has the identity of what it was copied from.
    let options: &[&str] = if kind == PoolKind::Reflink { &["-o", "nouuid"] } else { &[] };
    let mounted = Command::new("mount").args(options).args([device.trim(), path(at)]).status();
    // From now on it goes with its mount.
    run("losetup", &["--detach", device.trim()]);
    assert!(mounted.unwrap().success(), "{} does not mount", image.display());
}

fn is_attached(image: &Path) -> bool {
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
    mounted: bool,
}

impl Place<'_> {
    pub fn data_dir(&self) -> PathBuf {
        self.at.join("data")
    }

    /// Looks for damage in the filesystem of the image, which nobody may be using any more.
    pub fn check_filesystem(mut self) {
        self.unmount();
        wait_for("the image is let go of", || !is_attached(&self.image));
        match self.disk.kind {
            PoolKind::Copy => run("e2fsck", &["-fn", path(&self.image)]),
            PoolKind::Reflink | PoolKind::Image => run("xfs_repair", &["-n", path(&self.image)]),
        }
    }

    fn unmount(&mut self) {
        if std::mem::take(&mut self.mounted) {
            let _ = Command::new("umount").arg(&self.at).status();
            let _ = fs::remove_dir(&self.at);
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.unmount();
        let _ = fs::remove_file(&self.image);
        if self.disk.kind == PoolKind::Image {
            let _ = fs::remove_dir_all(&self.at);
        }
    }
}
