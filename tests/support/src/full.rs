//! Full pools and filesystems, and the error of calls that need space.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use csi_loopback::backend::Error;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::statvfs::statvfs;

use super::{BLOCK, MIB, pattern};

/// Writes until the device is full: chunks, then single blocks. Returns the first block that was
/// not written.
pub fn fill(device: &Path, from: u64) -> u64 {
    let file = File::options().write(true).custom_flags(libc::O_DIRECT).open(device).unwrap();
    let data = pattern(from, (MIB + BLOCK) as usize);
    let start = data.as_ptr().align_offset(BLOCK as usize);
    let mut block = from;
    for size in [MIB, 16 * BLOCK, BLOCK] {
        let chunk = &data[start..start + size as usize];
        while file.write_all_at(chunk, block * BLOCK).is_ok() {
            block += size / BLOCK;
        }
    }
    block
}

/// Asserts a retryable error that names the pool.
#[track_caller]
pub fn exhausted<T: std::fmt::Debug>(result: Result<T, Error>, what: &str) {
    match result {
        Err(Error::Exhausted(message)) => {
            assert!(message.contains("pool"), "{what}: {message}");
        }
        other => panic!("{what}: {other:?}"),
    }
}

/// A file that fills the filesystem below an image, except for some space.
pub struct HostFiller(PathBuf);

impl HostFiller {
    pub fn new(host: &Path, leave_bytes: u64) -> Self {
        let path = host.join("filler");
        let file = File::create(&path).unwrap();
        let stat = statvfs(host).unwrap();
        let free = stat.blocks_available() * stat.fragment_size();
        // Metadata makes the usable space differ from the reported space.
        let size = free.saturating_sub(leave_bytes) as i64;
        let _ = fallocate(&file, FallocateFlags::empty(), 0, size.max(1));
        Self(path)
    }

    /// Fills the filesystem to the last block.
    pub fn all_of(host: &Path) -> Self {
        let filler = Self::new(host, 0);
        let file = File::options().write(true).open(&filler.0).unwrap();
        for size in [MIB as i64, BLOCK as i64] {
            let end = || file.metadata().unwrap().len() as i64;
            while fallocate(&file, FallocateFlags::empty(), end(), size).is_ok() {}
        }
        filler
    }
}

impl Drop for HostFiller {
    /// Always deletes the file: the unmount of the pool's filesystem waits for space.
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}
