//! The filesystem that contains a pool image: whether it keeps space for every block of the image,
//! and the reserve file of an image for which it does not.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use linux_raw_sys::ioctl::FIEMAP_EXTENT_SHARED;
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::statfs::{FsType, statfs};
use nix::unistd::truncate;
use tracing::{info, warn};

use super::super::error::{Context, Error, Result};
use super::super::fail_point::{hit, reach};
use super::super::sys;
use super::{filesystem_room, new_file, sync_directory};

/// Filesystems that write every block to a new place (statfs(2), sources of ZFS and bcachefs).
/// There `fallocate` does not reserve space for a later write. (nix has some of these for glibc
/// only.)
const COPY_ON_WRITE: [FsType; 3] = [
    FsType(0x9123_683e), // btrfs
    FsType(0x2fc1_2fc1), // ZFS
    FsType(0xca45_1a4e), // bcachefs
];

/// Size of the reserve file, in bytes.
const RESERVE: u64 = 64 << 20;
/// Size of one release, in bytes. Small, because the program that fills the filesystem takes the
/// rest of the released space.
const STEP: u64 = 16 << 20;
/// A start releases one step if less than this is available, in bytes: replaying a log may need
/// space.
const LOW: u64 = 8 << 20;
/// The reserve is created if at least this is available, in bytes. More than a release frees, so
/// that it is not created again at once.
const PLENTY: u64 = 4 * RESERVE;
/// A sparse image has too little space if less than this is available, in bytes.
pub const LOW_SPACE: u64 = 96 << 20;

/// Size of a single copy of shared blocks, in bytes.
const UNSHARE_STEP: u64 = 16 << 20;

/// Size of a single write, in bytes.
const CHUNK: usize = 1 << 20;

/// Whether the filesystem overwrites blocks in place.
pub fn writes_in_place(data_dir: &Path) -> Result<bool> {
    let stat = statfs(data_dir)
        .context(|| format!("reading the filesystem type of {}", data_dir.display()))?;
    Ok(!COPY_ON_WRITE.contains(&stat.filesystem_type()))
}

/// The parts of an image to which a write needs space below, in bytes. Valid only if
/// [`writes_in_place`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Lacking {
    /// Not allocated.
    pub holes: u64,
    /// In blocks that another file shares, such as a copy of the image.
    pub shared: u64,
}

impl Lacking {
    pub fn is_nothing(self) -> bool {
        self == Self::default()
    }

    pub fn bytes(self) -> u64 {
        self.holes.saturating_add(self.shared)
    }
}

/// Reads the extent map of an image.
pub fn lacking(file: &File) -> Result<Lacking> {
    let length = length(file)?;
    let mut lacking = Lacking::default();
    let mut position = 0;
    let is_supported = each_extent(file, 0, |extent| {
        lacking.holes += extent.start.saturating_sub(position);
        if extent.is_shared {
            lacking.shared += extent.end - extent.start.max(position);
        }
        position = extent.end;
        true
    })?;
    match is_supported {
        true => lacking.holes += length.saturating_sub(position),
        // A filesystem without extent maps (tmpfs): use its block count.
        false => lacking.holes = unallocated(file)?,
    }
    Ok(lacking)
}

struct Extent {
    start: u64,
    end: u64,
    is_shared: bool,
}

/// Visits the extents from byte `position` on, in order, until `visit` returns false. Returns
/// whether the filesystem has extent maps.
fn each_extent(
    file: &File,
    mut position: u64,
    mut visit: impl FnMut(Extent) -> bool,
) -> Result<bool> {
    let length = length(file)?;
    while position < length {
        let extents = match sys::fiemap(file, position, length) {
            Ok(extents) => extents,
            Err(e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOTTY)) => {
                return Ok(false);
            }
            Err(e) => {
                return Err(Error::io("reading the extent map of the pool image".to_owned(), e));
            }
        };
        let before = position;
        for extent in extents {
            let end = extent.logical.saturating_add(extent.length).min(length);
            let start = extent.logical.max(position);
            let is_shared = extent.flags & FIEMAP_EXTENT_SHARED != 0;
            if end <= start {
                continue;
            }
            position = end;
            if !visit(Extent { start, end, is_shared }) {
                return Ok(true);
            }
        }
        if position == before {
            break;
        }
    }
    Ok(true)
}

/// Copies blocks of the image that another file shares, in steps, until `until` or while enough
/// space is available. Writers of the image wait for one step at a time.
pub fn unshare(data_dir: &Path, file: &File, until: Instant) -> Result<()> {
    let mut position = 0;
    while Instant::now() < until {
        let mut next = None;
        each_extent(file, position, |extent| {
            next = extent.is_shared.then_some(extent);
            next.is_none()
        })?;
        let Some(Extent { start, end, .. }) = next else { break };
        let length = (end - start).min(UNSHARE_STEP);
        if filesystem_room(data_dir)?.available < length + LOW_SPACE {
            break;
        }
        let unshare = FallocateFlags::FALLOC_FL_UNSHARE_RANGE;
        match fallocate(file, unshare, start as i64, length as i64) {
            Ok(()) => {}
            // The condition of the pool reports what remains shared.
            Err(Errno::ENOSPC | Errno::EDQUOT | Errno::EOPNOTSUPP) => break,
            Err(e) => return Err(Error::io("unsharing the pool image".to_owned(), e.into())),
        }
        reach("image.unshared")?;
        position = start + length;
    }
    Ok(())
}

fn length(file: &File) -> Result<u64> {
    Ok(file.metadata().context(|| "reading the size of the pool image".to_owned())?.len())
}

/// The unallocated bytes of the file, by its block count.
pub fn unallocated(file: &File) -> Result<u64> {
    let metadata = file.metadata().context(|| "reading the size of the pool image".to_owned())?;
    Ok(metadata.len().saturating_sub(metadata.blocks().saturating_mul(512)))
}

/// Allocates the missing blocks of a range of the file, which may end beyond the file; the length
/// does not change. Durable.
pub fn allocate(file: &File, start: u64, length: u64) -> io::Result<()> {
    fallocate(file, FallocateFlags::FALLOC_FL_KEEP_SIZE, start as i64, length as i64)?;
    file.sync_all()?;
    hit("image.allocated")
}

/// The reserve of a sparse image: a file on the same filesystem. It is released in steps when the
/// catalog cannot grow, so that volumes can still be unpublished, unstaged and deleted.
pub fn reserve_path(data_dir: &Path) -> PathBuf {
    data_dir.join("pool.reserve")
}

/// The size of the reserve in bytes, if it exists.
fn reserve_length(path: &Path) -> Result<Option<u64>> {
    match fs::metadata(path) {
        Ok(metadata) => Ok(Some(metadata.len())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io(format!("reading the size of {}", path.display()), e)),
    }
}

/// Creates or completes the reserve if enough space is available.
pub fn make_reserve(data_dir: &Path, in_place: bool) -> Result<()> {
    let path = reserve_path(data_dir);
    let is_whole = reserve_length(&path)? == Some(RESERVE);
    if is_whole || filesystem_room(data_dir)?.available < PLENTY {
        return Ok(());
    }
    write_reserve(&path, in_place)?;
    sync_directory(data_dir)?;
    info!(bytes = RESERVE, "created the reserve {}", path.display());
    Ok(())
}

/// Releases one step of the reserve if a start may need it.
pub fn release_for_start(data_dir: &Path) -> Result<()> {
    if filesystem_room(data_dir)?.available < LOW { release(data_dir) } else { Ok(()) }
}

/// Releases one step of the reserve. Does nothing if none is left.
pub fn release(data_dir: &Path) -> Result<()> {
    let path = reserve_path(data_dir);
    let left = match reserve_length(&path)? {
        None | Some(0) => return Ok(()),
        Some(length) => length.saturating_sub(STEP),
    };
    let releasing = || format!("releasing part of {}", path.display());
    // By path: the space is needed also when the process cannot open more files.
    truncate(&path, left as i64).context(releasing)?;
    warn!(left, "the filesystem of the pool image is full; released part of {}", path.display());
    // Without it, the filesystem may take longer to make the space available.
    File::open(&path).and_then(|file| file.sync_all()).context(releasing)
}

fn write_reserve(path: &Path, in_place: bool) -> Result<()> {
    let creating = || format!("creating {}", path.display());
    let mut file = new_file(path)?;
    if in_place {
        fallocate(&file, FallocateFlags::empty(), 0, RESERVE as i64).context(creating)?;
    } else {
        // Random data: compressible or repeated data may take no space.
        let mut chunk = vec![0; CHUNK];
        for _ in 0..RESERVE / CHUNK as u64 {
            getrandom::fill(&mut chunk).map_err(io::Error::other).context(creating)?;
            file.write_all(&chunk).context(creating)?;
        }
    }
    file.sync_all().context(creating)?;
    reach("reserve.made")
}
