//! A pool on an XFS with reflink. A clone shares all blocks and costs time per extent, not per
//! byte; copy-on-write makes physical addresses show changes. The XFS contains the data directory,
//! or is in an image of the pool ([`super::image`]).

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use linux_raw_sys::general::{FS_XFLAG_NODEFRAG, FS_XFLAG_REALTIME, FS_XFLAG_RTINHERIT};
use nix::sys::statfs::statfs;

use super::super::error::{Context, Error, Result};
use super::super::extents::{self, Finding};
use super::super::fail_point::reach;
use super::super::model::Precision;
use super::super::sys;
use super::super::units::BLOCK_SIZE;
use super::image::Image;
use super::{
    Directory, Pool, PoolKind, Room, exact, filesystem_block_size, filesystem_room, new_file,
};

/// Size of one step of the pre-clone: the kernel blocks the writers of the file during a step
/// (about 10 µs per extent).
const STEP_EXTENTS: usize = 128;
const STEP_BYTES: u64 = 1 << 30;

#[derive(Debug)]
pub struct ReflinkPool {
    root: PathBuf,
    image: Option<Image>,
    /// The block size of the filesystem in bytes: the amount that a first write after a snapshot
    /// copies.
    block_size: u64,
}

impl ReflinkPool {
    /// Uses the directory `root`, which is in the image if there is one. An error if its filesystem
    /// does not support reflink.
    pub fn open(root: PathBuf, image: Option<Image>) -> Result<Self> {
        probe(&root)?;
        let block_size = filesystem_block_size(&root)?;
        Ok(Self { root, image, block_size })
    }
}

/// Tries a clone in `root`, and rejects filesystems whose extent maps are ambiguous.
fn probe(root: &Path) -> Result<()> {
    let stat =
        statfs(root).context(|| format!("reading the filesystem type of {}", root.display()))?;
    if stat.filesystem_type() != sys::XFS_SUPER_MAGIC {
        return Err(Error::Precondition(format!("{} is not on XFS", root.display())));
    }
    let directory = File::open(root).context(|| format!("opening {}", root.display()))?;
    let flags = sys::extended_flags(&directory)
        .context(|| format!("reading the flags of {}", root.display()))?;
    if flags & FS_XFLAG_RTINHERIT != 0 {
        return Err(realtime(root));
    }
    // An existing pool was probed when it was created. Opening a full pool must not need space.
    if Directory::Volumes.path(root).exists() {
        return Ok(());
    }
    let paths = [root.join(".probe-a"), root.join(".probe-b")];
    let result = probe_files(root, &paths);
    for path in &paths {
        // If this fails, the next probe overwrites the file.
        let _ = fs::remove_file(path);
    }
    result
}

fn probe_files(root: &Path, [a, b]: &[PathBuf; 2]) -> Result<()> {
    use std::io::Write;
    let mut source = new_file(a)?;
    let target = new_file(b)?;
    source
        .write_all(&[1; 4096])
        .and_then(|()| source.sync_all())
        .context(|| format!("writing to {}", root.display()))?;
    let flags =
        sys::extended_flags(&source).context(|| format!("reading the flags of {}", a.display()))?;
    if flags & FS_XFLAG_REALTIME != 0 {
        return Err(realtime(root));
    }
    sys::clone_file(&target, &source).map_err(|e| match e.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => Error::io(cloning(), e),
        _ => Error::Precondition(format!("{} is on an XFS without reflink: {e}", root.display())),
    })
}

/// FIEMAP does not report the device, so equal addresses on two devices look like the same block.
fn realtime(root: &Path) -> Error {
    Error::Precondition(format!(
        "{} stores files on an XFS realtime device, whose addresses cannot be distinguished from \
         those of the data device; use another directory",
        root.display()
    ))
}

fn cloning() -> String {
    "cloning a backing file".to_owned()
}

impl Pool for ReflinkPool {
    fn kind(&self) -> PoolKind {
        if self.image.is_some() { PoolKind::Image } else { PoolKind::Reflink }
    }

    fn root(&self) -> &Path {
        &self.root
    }

    fn image(&self) -> Option<&Image> {
        self.image.as_ref()
    }

    /// For an image that needs more space below, limited by that space.
    fn room(&self) -> Result<Room> {
        let room = filesystem_room(&self.root)?;
        let Some(image) = self.image.as_ref().filter(|image| !image.is_allocated()) else {
            return Ok(room);
        };
        let below = image.host_room()?.available;
        if !image.may_need_more_than(below) {
            return Ok(room);
        }
        Ok(Room { available: room.available.min(below), ..room })
    }

    /// The flag keeps xfs_fsr from moving blocks. By default, XFS reserves 32 blocks around each
    /// copied block for minutes: 2 MiB for a write of 4 KiB with the largest block size.
    fn adopt(&self, file: &File) -> Result<()> {
        let copy_bytes = (self.block_size > BLOCK_SIZE).then_some(self.block_size as u32);
        sys::add_extended_flags(file, FS_XFLAG_NODEFRAG, copy_bytes)
            .context(|| "setting the flags of a pool file".to_owned())?;
        reach("file.adopted")
    }

    /// Shares the current blocks of `source` in steps.
    fn pre_clone(
        &self,
        source: &File,
        target: &File,
        after_step: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        let size = source.metadata().context(cloning)?.len();
        extents::data_ranges(source, size, STEP_EXTENTS, STEP_BYTES, |range| {
            sys::clone_range(target, source, range.start, range.end - range.start)
                .context(cloning)?;
            reach("copy.part_shared")?;
            after_step()
        })
    }

    /// One atomic FICLONE. The kernel skips shared blocks. On ENOSPC it can be partial, and the
    /// caller drops the target.
    fn clone(
        &self,
        source: &File,
        target: &File,
        _after_step: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        sys::clone_file(target, source).context(cloning)
    }

    fn clones_atomically(&self) -> bool {
        true
    }

    fn compare(
        &self,
        old: Option<(&File, u64)>,
        new: (&File, u64),
        precision: Precision,
        report: &mut dyn FnMut(Finding) -> Result<()>,
    ) -> Result<()> {
        match old {
            Some(old) if precision == Precision::Exact && self.block_size > BLOCK_SIZE => {
                exact::compare(old, new, report)
            }
            _ => extents::compare(old, new, report),
        }
    }
}
