//! The filesystem that a pool image is a file of: whether it keeps room for every block of the
//! image, and the reserve file of an image for which it does not.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use linux_raw_sys::ioctl::FIEMAP_EXTENT_SHARED;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::statfs::{FsType, statfs};
use tracing::{info, warn};

use super::super::error::{Context, Error, Result};
use super::super::fail_point::{meet, reach};
use super::super::sys;
use super::{filesystem_room, new_file, remove_and_free, sync_directory};

/// statfs(2) and the sources of ZFS and bcachefs: filesystems that write every block to a new place.
/// There `fallocate` promises nothing about a later write. (nix has some of them for glibc only.)
const COPY_ON_WRITE: [FsType; 3] = [
    FsType(0x9123_683e), // btrfs
    FsType(0x2fc1_2fc1), // ZFS
    FsType(0xca45_1a4e), // bcachefs
];

/// Bytes of the reserve file.
const RESERVE: u64 = 64 << 20;
/// Bytes of it that are released at a time: whatever fills the filesystem below takes the rest of what is released.
const STEP: u64 = 16 << 20;
/// A start releases a step when less than this is available: replaying a log may need room.
const LOW: u64 = 8 << 20;
/// The reserve is made when at least this is available: more than its release gives back, so that it
/// does not come and go.
const PLENTY: u64 = 4 * RESERVE;
/// A sparse image is in danger when less than this is available.
pub const DANGER: u64 = 96 << 20;

/// Bytes written at a time.
const CHUNK: usize = 1 << 20;

/// Whether a block that a file of this directory has stays its own when it is written again.
pub fn writes_in_place(data_dir: &Path) -> Result<bool> {
    let stat = statfs(data_dir).context(|| format!("looking at {}", data_dir.display()))?;
    Ok(!COPY_ON_WRITE.contains(&stat.filesystem_type()))
}

/// Whether every block of the file is allocated and belongs to this file alone, so that no write to it
/// needs room. To be asked only where [`writes_in_place`].
pub fn is_allocated(file: &File) -> Result<bool> {
    let doing = || "reading the extent map of the pool image".to_owned();
    let metadata = file.metadata().context(doing)?;
    let mut position = 0;
    while position < metadata.len() {
        let extents = match sys::fiemap(file, position, metadata.len()) {
            Ok(extents) => extents,
            // A filesystem without extent maps (tmpfs): its count of blocks is all there is.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOTTY)) => {
                return Ok(lacking(file)? == 0);
            }
            Err(e) => return Err(Error::io(doing(), e)),
        };
        let before = position;
        for extent in extents {
            if extent.logical > position || extent.flags & FIEMAP_EXTENT_SHARED != 0 {
                return Ok(false);
            }
            position = position.max(extent.logical.saturating_add(extent.length));
        }
        if position == before {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Bytes of the file that have no block, by its count of blocks.
pub fn lacking(file: &File) -> Result<u64> {
    let metadata = file.metadata().context(|| "looking at the pool image".to_owned())?;
    Ok(metadata.len().saturating_sub(metadata.blocks().saturating_mul(512)))
}

/// Allocates what is missing in a range of the file, which may end beyond the file; its length stays as
/// it is. Durable.
pub fn allocate(file: &File, start: u64, length: u64) -> io::Result<()> {
    fallocate(file, FallocateFlags::FALLOC_FL_KEEP_SIZE, start as i64, length as i64)?;
    file.sync_all()?;
    meet("image.allocated")
}

/// The reserve of a sparse image: room on the filesystem below that nothing else has. It is released in steps when the
/// catalog has no room, so that volumes can still be taken out of use and deleted.
pub fn reserve_path(data_dir: &Path) -> PathBuf {
    data_dir.join("pool.reserve")
}

/// Bytes of the reserve, if there is one.
fn reserve_length(path: &Path) -> Result<Option<u64>> {
    match fs::metadata(path) {
        Ok(metadata) => Ok(Some(metadata.len())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io(format!("looking at {}", path.display()), e)),
    }
}

/// Makes the reserve whole if there is plenty of room.
pub fn make_reserve(data_dir: &Path, in_place: bool) -> Result<()> {
    let path = reserve_path(data_dir);
    let is_whole = reserve_length(&path)? == Some(RESERVE);
    if is_whole || filesystem_room(data_dir)?.available < PLENTY {
        return Ok(());
    }
    write_reserve(&path, in_place)?;
    sync_directory(data_dir)?;
    info!(bytes = RESERVE, "made the reserve {}", path.display());
    Ok(())
}

/// Releases a step of the reserve if a start may need it.
pub fn release_for_start(data_dir: &Path) -> Result<()> {
    if filesystem_room(data_dir)?.available < LOW { release(data_dir) } else { Ok(()) }
}

/// Releases a step of the reserve. OK when there is none left.
pub fn release(data_dir: &Path) -> Result<()> {
    let path = reserve_path(data_dir);
    let left = match reserve_length(&path)? {
        None => return Ok(()),
        Some(length) => length.saturating_sub(STEP),
    };
    if left == 0 {
        remove_and_free(&path)?;
    } else {
        let releasing = || format!("releasing part of {}", path.display());
        let file = File::options().write(true).open(&path).context(releasing)?;
        file.set_len(left).and_then(|()| file.sync_all()).context(releasing)?;
    }
    warn!(left, "the filesystem below the pool image is full; released part of {}", path.display());
    Ok(())
}

fn write_reserve(path: &Path, in_place: bool) -> Result<()> {
    let making = || format!("making {}", path.display());
    let mut file = new_file(path)?;
    if in_place {
        fallocate(&file, FallocateFlags::empty(), 0, RESERVE as i64).context(making)?;
    } else {
        // Random: what compresses, or repeats, may take no room.
        let mut chunk = vec![0; CHUNK];
        for _ in 0..RESERVE / CHUNK as u64 {
            getrandom::fill(&mut chunk).map_err(io::Error::other).context(making)?;
            file.write_all(&chunk).context(making)?;
        }
    }
    file.sync_all().context(making)?;
    reach("reserve.made")
}
