//! Ways to fill a pool, and what a refusal for want of room looks like.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use csi_loopback::backend::Error;

use super::kernel::unmount;
use super::{BLOCK, MIB, path, pattern, run};

/// What a pod does that writes until it cannot: chunks, then single blocks. Returns the first block
/// that was not written.
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

/// The refusal is of the kind that a caller may wait out, and says what would help.
#[track_caller]
pub fn exhausted<T: std::fmt::Debug>(result: Result<T, Error>, what: &str) {
    match result {
        Err(Error::Exhausted(message)) => {
            assert!(message.contains("pool"), "{what}: {message}");
        }
        other => panic!("{what}: {other:?}"),
    }
}

/// A small ext4 of its own, in the directory `small`.
pub struct Small(PathBuf);

impl Small {
    pub fn mount(directory: &Path, bytes: u64) -> Self {
        let (image, at) = (directory.join("small.img"), directory.join("small"));
        File::create(&image).unwrap().set_len(bytes).unwrap();
        std::fs::create_dir(&at).unwrap();
        run("mkfs.ext4", &["-q", "-m", "0", path(&image)]);
        run("mount", &["-o", "loop", path(&image), path(&at)]);
        Self(at)
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        unmount(&self.0);
    }
}
