//! The files of a pool: created, opened and removed.
//!
//! A file belongs to its name and to everything that has it open: descriptors, loop devices and
//! other processes. A removal takes the name. The blocks are freed by the kernel when the last user
//! closes the file, or at once by [`remove_and_free`] if the kernel confirms that no other user
//! exists. So nothing is emptied while it is read, and readers need no lock.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use super::super::error::{Context, Error, Result};
use super::super::fail_point::reach;
use super::super::store::length;
use super::super::sys;
use super::super::units::{BLOCK_SIZE, MAX_VOLUME_BYTES, MIN_VOLUME_BYTES};
use super::{Pool, PoolKind};

/// Creates an empty file that only root can read. An existing file loses its name, not its content:
/// it may be open.
pub fn new_file(path: &Path) -> Result<File> {
    let creating = || format!("creating {}", path.display());
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        removed => removed.context(creating)?,
    }
    let mut options = File::options();
    options.read(true).write(true).create_new(true).mode(0o600);
    let file = options.open(path).context(creating)?;
    reach("file.made").map(|()| file)
}

/// The largest volume whose backing file the pool's filesystem can hold, in bytes. If this is
/// unknown, the largest volume that the driver supports: a file that grows too large then fails
/// with `OutOfRange`.
pub fn largest_file(pool: &dyn Pool) -> u64 {
    // XFS holds larger files. Opening a full pool must not need space.
    if pool.kind() != PoolKind::Copy {
        return MAX_VOLUME_BYTES;
    }
    let path = pool.root().join(".probe-size");
    let Ok(file) = new_file(&path) else { return MAX_VOLUME_BYTES };
    let mut bytes = MAX_VOLUME_BYTES;
    while file.set_len(bytes).is_err() && bytes > MIN_VOLUME_BYTES {
        // The limit of ext4 is one block below 16 TiB.
        bytes = if bytes.is_power_of_two() { bytes - BLOCK_SIZE } else { (bytes + BLOCK_SIZE) / 2 };
    }
    // If this fails, the next start overwrites the file.
    let _ = fs::remove_file(&path);
    bytes
}

/// Opens a file. `None` if it does not exist, or was removed while it was opened.
pub fn open(path: &Path, write: bool) -> Result<Option<File>> {
    let opening = || format!("opening {}", path.display());
    let file = match File::options().read(true).write(write).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened.context(opening)?,
    };
    let links = file.metadata().context(opening)?.nlink();
    Ok((links > 0).then_some(file))
}

/// `Damaged` if a file has less than `bytes` bytes, the size in the catalog. Reads of the missing
/// part may succeed: an extent map, a clone and a loop device show zeros. Therefore the length is
/// checked before a file is used, and after it was read and before the result is committed. (The
/// kernel changes the length before it frees blocks.)
pub fn check_length(file: &File, what: impl fmt::Display, bytes: u64) -> Result<()> {
    match length(file)? {
        found if found < bytes => Err(Error::Damaged(format!(
            "{what} has {found} bytes, expected {bytes}: it was truncated; run `pool check`, and restore the volume from \
             a backup"
        ))),
        _ => Ok(()),
    }
}

/// Makes the entries of a directory durable.
pub fn sync_directory(path: &Path) -> Result<()> {
    File::open(path)
        .and_then(|directory| directory.sync_all())
        .context(|| format!("flushing {}", path.display()))?;
    reach("directory.flushed")
}

const IMMUTABLE: u32 = linux_raw_sys::general::FS_IMMUTABLE_FL;

/// Sets or clears the immutable flag, which prevents even root from writing, defragmenting or
/// exchanging extents. Does nothing on a filesystem that does not support it.
pub fn set_immutable(file: &File, on: bool) -> Result<()> {
    let change = sys::inode_flags(file).and_then(|flags| {
        let wanted = if on { flags | IMMUTABLE } else { flags & !IMMUTABLE };
        if wanted == flags { Ok(()) } else { sys::set_inode_flags(file, wanted) }
    });
    match change.as_ref().map_err(io::Error::raw_os_error) {
        Err(Some(libc::ENOTTY | libc::EOPNOTSUPP)) => Ok(()),
        _ => change.context(|| "setting the immutable flag".to_owned()),
    }?;
    reach("file.flag_set")
}

pub fn is_immutable(file: &File) -> Result<bool> {
    let flags = sys::inode_flags(file).context(|| "reading inode flags".to_owned())?;
    Ok(flags & IMMUTABLE != 0)
}

/// Whether anything has a file open, in this process or another. False if it does not exist, or if
/// its filesystem cannot tell.
pub fn has_users(path: &Path) -> Result<bool> {
    let Some(file) = open(path, false)? else { return Ok(false) };
    let refused = sys::lease(&file).err().and_then(|error| error.raw_os_error());
    Ok(refused == Some(libc::EAGAIN))
}

/// Removes a file, immutable or not, durably: otherwise its blocks could be reused before a power
/// loss restores the file. Succeeds if the file does not exist. The filesystem may free the blocks
/// later.
pub fn remove(path: &Path) -> Result<()> {
    unlink(path).map(drop)
}

/// Like [`remove`], but waits until the blocks are free, unless the file is in use. Then they are
/// freed when its last user closes it.
pub fn remove_and_free(path: &Path) -> Result<()> {
    let Some(file) = unlink(path)? else { return Ok(()) };
    let freeing = || "freeing a removed file".to_owned();
    let again = format!("/proc/self/fd/{}", file.as_raw_fd());
    let writable = File::options().write(true).open(again).context(freeing)?;
    drop(file);
    let has_name = writable.metadata().context(freeing)?.nlink() > 0;
    // If the filesystem does not support leases, closing the file must be enough.
    if has_name || sys::lease(&writable).is_err() {
        return Ok(());
    }
    writable.set_len(0).context(freeing)?;
    reach("file.emptied")
}

/// Returns the removed file. Its blocks are not free while it is open.
fn unlink(path: &Path) -> Result<Option<File>> {
    let Some(file) = open(path, false)? else { return Ok(None) };
    set_immutable(&file, false)?;
    fs::remove_file(path).context(|| format!("removing {}", path.display()))?;
    reach("file.removed")?;
    path.parent().map_or(Ok(()), sync_directory)?;
    Ok(Some(file))
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::os::unix::fs::FileExt;

    use tempfile::TempDir;

    use super::*;

    const CONTENT: &[u8] = b"content of a snapshot";

    fn a_file(directory: &TempDir) -> std::path::PathBuf {
        let path = directory.path().join("file");
        fs::write(&path, CONTENT).unwrap();
        path
    }

    fn read(file: &File) -> Vec<u8> {
        let mut bytes = vec![0; CONTENT.len()];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    #[test]
    fn a_removed_file_keeps_its_content_for_its_readers() {
        let directory = TempDir::with_prefix("csi-loopback-").unwrap();
        for write in [false, true] {
            for end in [remove, remove_and_free, |path: &Path| new_file(path).map(drop)] {
                let path = a_file(&directory);
                let reader = OpenOptions::new().read(true).write(write).open(&path).unwrap();
                assert!(has_users(&path).unwrap());
                end(&path).unwrap();
                assert_eq!(read(&reader), CONTENT);
                check_length(&reader, "it", CONTENT.len() as u64).unwrap();
            }
        }
    }

    #[test]
    fn a_removed_file_without_readers_is_freed() {
        let directory = TempDir::with_prefix("csi-loopback-").unwrap();
        let is_freed = || {
            let path = a_file(&directory);
            // A path does not count as a user.
            let inode = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(&path);
            remove_and_free(&path).unwrap();
            assert!(open(&path, false).unwrap().is_none());
            inode.unwrap().metadata().unwrap().len() == 0
        };
        // A process that another test starts holds all open files for a moment.
        assert!((0..20).any(|_| is_freed()));
        remove_and_free(&directory.path().join("file")).unwrap();
    }

    #[test]
    fn a_file_with_another_name_is_not_emptied() {
        let directory = TempDir::with_prefix("csi-loopback-").unwrap();
        let path = a_file(&directory);
        let other = directory.path().join("other");
        fs::hard_link(&path, &other).unwrap();
        remove_and_free(&path).unwrap();
        assert_eq!(fs::read(&other).unwrap(), CONTENT);
    }
}
