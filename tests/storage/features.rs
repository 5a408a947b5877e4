//! What mkfs writes, every supported kernel mounts (Linux 5.10): filesystems of volumes and pool
//! images have one set of features, whatever the tools and their configuration. The superblocks are
//! read directly, because a tool may not know a new feature.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;

use csi_loopback::backend::{Error, PoolChoice, PoolKind};
use support::driver::*;
use support::{MIB, Pool, directory, have_root};

/// A mke2fs.conf with features and sizes that no volume may have.
const HOSTILE: &str = "[defaults]
base_features = sparse_super,large_file,filetype,dir_index,ext_attr,inline_data
default_mntopts = journal_data
errors = panic
blocksize = 1024
inode_size = 128
inode_ratio = 1048576
enable_periodic_fsck = 1
[fs_types]
ext4 = {
features = has_journal,extent,huge_file,flex_bg,metadata_csum,metadata_csum_seed,orphan_file,64bit
}
";

fn bytes_at<const N: usize>(device: &Path, offset: u64) -> [u8; N] {
    let mut bytes = [0; N];
    File::open(device).unwrap().read_exact_at(&mut bytes, offset).unwrap();
    bytes
}

fn word(device: &Path, offset: u64) -> u32 {
    u32::from_le_bytes(bytes_at(device, offset))
}

fn check_ext4(device: &Path) {
    let features = [0x5c, 0x60, 0x64].map(|field| word(device, 1024 + field));
    // has_journal, ext_attr, resize_inode, dir_index.
    let compatible = 0x4 | 0x8 | 0x10 | 0x20;
    // filetype, extent, 64bit, flex_bg.
    let incompatible = 0x2 | 0x40 | 0x80 | 0x200;
    // sparse_super, large_file, huge_file, dir_nlink, extra_isize, metadata_csum.
    let read_only = 0x1 | 0x2 | 0x8 | 0x20 | 0x40 | 0x400;
    assert_eq!(features, [compatible, incompatible, read_only], "{features:x?}");
    let short = |field: u64| u16::from_le_bytes(bytes_at(device, 1024 + field));
    // Blocks of 4 KiB; inodes of 256 bytes; on an error, continue.
    assert_eq!((word(device, 1024 + 0x18), short(0x58), short(0x3c)), (2, 256, 1));
    // A check after any number of mounts or any time.
    assert_eq!((short(0x36) as i16, word(device, 1024 + 0x44)), (-1, 0));
    // An inode per 4 KiB.
    assert_eq!(word(device, 1024), word(device, 1024 + 4));
}

fn check_xfs(device: &Path) {
    let features = [208, 212, 216].map(|at| u32::from_be_bytes(bytes_at(device, at)));
    // finobt, reflink.
    let read_only = 0x1 | 0x4;
    // ftype, sparse inodes, bigtime.
    let incompatible = 0x1 | 0x2 | 0x8;
    assert_eq!(features, [0, read_only, incompatible], "{features:x?}");
}

fn check_btrfs(device: &Path) {
    let long = |field: u64| u64::from_le_bytes(bytes_at(device, 0x1_0000 + field));
    let features = [0xac, 0xb4, 0xbc].map(long);
    // free-space-tree and its validity.
    let read_only = 0x1 | 0x2;
    // mixed-backref, extref, skinny-metadata, no-holes; some tools and kernels record that nodes are
    // larger than a page.
    let (incompatible, large_nodes) = (0x1 | 0x40 | 0x100 | 0x200, 0x20);
    assert_eq!(features, [0, read_only, features[2] & large_nodes | incompatible], "{features:x?}");
}

type Check = fn(&Path);
const CHECKS: [(&str, u64, Check); 3] = [
    ("ext4", 64 * MIB, check_ext4),
    ("xfs", 300 * MIB, check_xfs),
    ("btrfs", 128 * MIB, check_btrfs),
];

/// Makes a volume and reads its superblock.
fn check_volume(driver: &Driver, fs_type: &str, bytes: u64, check: Check) {
    let volume = driver.volume(fs_type, bytes, mounted(fs_type));
    driver.stage(&volume, &mounted(fs_type));
    driver.unstage(&volume);
    driver.with_device(&volume, check);
}

#[test]
fn filesystems_have_only_the_features_of_the_oldest_kernel() {
    if !have_root() {
        return;
    }
    let directory = directory();
    let hostile = directory.path().join("mke2fs.conf");
    fs::write(&hostile, HOSTILE).unwrap();
    let variable = format!("MKE2FS_CONFIG={}", hostile.display());
    for program in [vec![], vec!["env", variable.as_str()]] {
        let driver = Driver::run_by(&program, PoolKind::Image, &[]);
        check_xfs(&driver.data_dir().join("pool.img"));
        for (fs_type, bytes, check) in CHECKS {
            check_volume(&driver, fs_type, bytes, check);
        }
    }
}

/// A mkfs.xfs from before Linux 5.10.
const OLD_XFS: &str = r#"#!/bin/sh
new='bigtime|inobtcount|nrext64|exchange|parent|metadir'
if [ $# = 0 ]; then
    PATH=REAL mkfs.xfs 2>&1 | grep -vE "$new" >&2
    exit 1
fi
for argument in "$@"; do
    if echo "$argument" | grep -qE "$new"; then echo "unknown option $argument" >&2; exit 1; fi
done
PATH=REAL exec mkfs.xfs "$@"
"#;

/// A mkfs.btrfs that knows no optional feature.
const OLD_BTRFS: &str = r#"#!/bin/sh
case "$*" in
*list-all*) echo "Filesystem features available:"; exit 0 ;;
*" -O "* | *" -R "*) echo "unrecognized feature" >&2; exit 1 ;;
esac
PATH=REAL exec mkfs.btrfs "$@"
"#;

#[test]
fn a_tool_that_knows_no_new_feature_makes_volumes() {
    if !have_root() {
        return;
    }
    let directory = directory();
    let real = std::env::var("PATH").unwrap();
    for (name, script) in [("mkfs.xfs", OLD_XFS), ("mkfs.btrfs", OLD_BTRFS)] {
        let tool = directory.path().join(name);
        fs::write(&tool, script.replace("REAL", &real)).unwrap();
        fs::set_permissions(&tool, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let search = format!("PATH={}:{real}", directory.path().display());
    let driver = Driver::run_by(&["env", &search], PoolKind::Image, &[]);
    for (fs_type, bytes, _) in &CHECKS[1..] {
        check_volume(&driver, fs_type, *bytes, |_| {});
    }
}

/// A copy pool costs time and space for all data, and the kind of a pool never changes.
#[test]
fn auto_never_becomes_a_copy_pool() {
    if !have_root() {
        return;
    }
    // Too small for an image.
    let mut pool = Pool::on_small(PoolKind::Copy, 200 * MIB, |config| {
        (config.pool_size, config.pool_sparse) = (None, false);
    });
    pool.stop();
    // The kind of an existing pool.
    pool.configure(|config| config.pool = PoolChoice::Auto);
    pool.start();
    assert_eq!(pool.kind(), PoolKind::Copy);
    pool.stop();
    fs::remove_dir_all(pool.data_dir()).unwrap();
    let refused = pool.try_start();
    let Err(Error::Precondition(message)) = refused else { panic!("{refused:?}") };
    for words in ["reflink: ", "image: ", "--pool copy"] {
        assert!(message.contains(words), "{message}");
    }
    assert!(!pool.data_dir().join("pool.json").exists());
}
