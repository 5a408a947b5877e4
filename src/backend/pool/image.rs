//! A pool on its own XFS, in an image file in the data directory. The XFS is mounted detached: no
//! mount table shows it, so nobody defragments it, and nothing is left of it when the last user
//! goes, be it this process (however it ends) or the last volume that is attached.
//!
//! An image is allocated: every block of it exists on the filesystem below, so that a pod that fills
//! the pool gets ENOSPC from the pool's XFS and never an I/O error from below. A sparse image takes
//! room below when it is written to and gives it back by discards.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tracing::{info, warn};

use super::super::command;
use super::super::error::{Context, Error, Result};
use super::super::fail_point::reach;
use super::super::loop_device::{Lifetime, LoopDevice};
use super::super::sys;
use super::super::units::BLOCK_SIZE;
use super::{
    ImageChoice, ImageStatus, Room, below, filesystem_room, new_file, remove_and_free,
    sync_directory,
};

/// mkfs.xfs makes none smaller.
const MIN_BYTES: u64 = 300 << 20;

/// The largest image that is made where no size is asked for, if it is allocated.
const DEFAULT_BYTES: u64 = 10 << 30;

/// The largest block of an XFS, in bytes. New images have such blocks where the kernel mounts them: snapshots cost
/// writers least.
pub const MAX_BLOCK_SIZE: u64 = 64 << 10;

/// How long a former user of the image's device may take to let go of it.
const BUSY_DEADLINE: Duration = Duration::from_secs(5);

pub fn path(data_dir: &Path) -> PathBuf {
    data_dir.join("pool.img")
}

/// The image of an open pool.
#[derive(Debug)]
pub struct Image {
    data_dir: PathBuf,
    file: File,
    device: LoopDevice,
    /// The mount lives as long as this descriptor, or any file of it.
    mount: OwnedFd,
    /// Whether the image is meant to be allocated, and its filesystem can do that.
    keeps_room: bool,
    /// Whether it is: no write needs room below.
    is_allocated: bool,
    in_place: bool,
    /// Held while the image grows.
    growing: Mutex<()>,
}

/// How an image is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// For a driver: what is left to do for the image is done.
    Serve,
    /// For `pool check`: nothing is changed.
    Check,
}

impl Image {
    /// Mounts the image of `data_dir`. `allocated`: whether the image is meant to be.
    pub fn open(data_dir: &Path, allocated: bool, purpose: Purpose) -> Result<Self> {
        let path = path(data_dir);
        let file = File::options()
            .read(true)
            .write(true)
            .open(&path)
            .context(|| format!("opening {}", path.display()))?;
        let in_place = below::writes_in_place(data_dir)?;
        let keeps_room = allocated && in_place;
        let mut is_allocated = keeps_room && below::is_allocated(&file)?;
        if purpose == Purpose::Serve {
            if !is_allocated {
                is_allocated = keeps_room && allocate_rest(data_dir, &file)?;
                log_kind(&path, allocated, in_place, is_allocated);
            }
            // Before the mount: replaying the log of the XFS may need room below.
            settle_reserve(data_dir, in_place, is_allocated);
        }
        let (device, handle) = attach(&file)?;
        let mount = mount(&device, keeps_room).map_err(|error| match error {
            error if is_unsupported(&error) => Error::Precondition(format!(
                "{error}: blocks larger than a page of memory need Linux 6.12"
            )),
            error => error,
        })?;
        drop(handle);
        let image = Self {
            data_dir: data_dir.to_owned(),
            file,
            device,
            mount,
            keeps_room,
            is_allocated,
            in_place,
            growing: Mutex::new(()),
        };
        if purpose == Purpose::Serve {
            image.use_whole_file()?;
        }
        Ok(image)
    }

    /// The root of the mount, for this process alone.
    pub fn root(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.mount.as_raw_fd()))
    }

    /// Whether every block of the image has room of its own below.
    pub fn is_allocated(&self) -> bool {
        self.is_allocated
    }

    pub fn status(&self) -> Result<ImageStatus> {
        Ok(ImageStatus {
            size: self.size()?,
            allocated: self.is_allocated,
            available_below: self.room_below()?.available,
        })
    }

    /// Bytes of the image file.
    pub fn size(&self) -> Result<u64> {
        let metadata = self.file.metadata().context(|| "looking at the pool image".to_owned())?;
        Ok(metadata.len())
    }

    /// Room of the filesystem that the image is on.
    pub fn room_below(&self) -> Result<Room> {
        filesystem_room(&self.data_dir)
    }

    /// Makes the reserve of a sparse image whole when there is room. Cheap: to be called about once a second.
    pub fn restore_reserve(&self) -> Result<()> {
        match self.is_allocated {
            true => Ok(()),
            false => below::make_reserve(&self.data_dir, self.in_place),
        }
    }

    /// Releases part of the reserve of a sparse image, for a write that found no room below.
    pub fn release_reserve(&self) -> Result<()> {
        match self.is_allocated {
            true => Ok(()),
            false => below::release(&self.data_dir),
        }
    }

    /// What volumes have to fear of the filesystem below, if anything.
    pub fn danger(&self) -> Result<Option<String>> {
        if self.is_allocated {
            return Ok(None);
        }
        let available = self.room_below()?.available;
        Ok((available < below::DANGER).then(|| {
            format!(
                "the filesystem of {} is nearly full, {available} bytes are left, and the pool image \
                 on it is sparse: writes to volumes fail with I/O errors when it is full; free room \
                 there",
                self.data_dir.display()
            )
        }))
    }

    /// Grows the image and its XFS to `size` bytes, rounded up to whole blocks, while volumes are
    /// attached. Repeated after an interruption it does what is left; so does the next start.
    pub fn grow(&self, size: u64) -> Result<()> {
        let _growing = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        let size = size.div_ceil(BLOCK_SIZE).saturating_mul(BLOCK_SIZE);
        let old = self.size()?;
        if size < old {
            return Err(Error::OutOfRange(format!(
                "size: the pool image has {old} bytes and cannot shrink to {size}; ask for at least {old}"
            )));
        }
        if size > old {
            self.lengthen(old, size)?;
        }
        self.use_whole_file()
    }

    /// Makes the image file longer, with room for all of it where the image keeps room.
    fn lengthen(&self, old: u64, size: u64) -> Result<()> {
        let growing = || format!("growing the pool image to {size} bytes");
        if self.keeps_room {
            check_room(&self.data_dir, size - old)?;
            // Beyond the end first: a file that is longer than what is allocated would be sparse.
            let allocated = below::allocate(&self.file, old, size - old);
            if allocated.as_ref().is_err_and(is_full) {
                self.file.set_len(old).context(growing)?;
                return Err(no_room(&self.data_dir, size - old));
            }
            allocated.context(growing)?;
        }
        self.file.set_len(size).and_then(|()| self.file.sync_all()).context(growing)?;
        reach("image.lengthened")
    }

    /// Grows device and XFS to the file, if an interrupted growth has left them smaller.
    fn use_whole_file(&self) -> Result<()> {
        let growing = || "growing the filesystem of the pool".to_owned();
        if self.device.size()? < self.size()? {
            self.device.grow()?;
        }
        let device_bytes = self.device.size()?;
        let root = File::open(self.root()).context(growing)?;
        let bytes = sys::xfs_bytes(&root).context(growing)?;
        if bytes < device_bytes {
            sys::xfs_grow(&root, device_bytes).context(growing)?;
            reach("image.grown")?;
            info!(from = bytes, to = device_bytes, "the pool has grown");
        }
        Ok(())
    }
}

/// Allocates what is missing of an image that is meant to be allocated: of a pool that is being
/// converted, or whose image was copied. Returns whether nothing is missing afterwards; without room
/// for all of it nothing is taken.
fn allocate_rest(data_dir: &Path, file: &File) -> Result<bool> {
    let allocating = || "allocating the pool image".to_owned();
    let size = file.metadata().context(allocating)?.len();
    // Attached volumes keep the former mount, which may discard.
    if !LoopDevice::find(file)?.is_empty() {
        return Ok(false);
    }
    if below::lacking(file)? > filesystem_room(data_dir)?.available {
        return Ok(false);
    }
    match below::allocate(file, 0, size) {
        Ok(()) => {}
        Err(e) if is_full(&e) || e.raw_os_error() == Some(libc::EOPNOTSUPP) => return Ok(false),
        Err(e) => return Err(Error::io(allocating(), e)),
    }
    below::is_allocated(file)
}

fn log_kind(image: &Path, allocated: bool, in_place: bool, is_allocated: bool) {
    let image = image.display();
    match (allocated, in_place, is_allocated) {
        (_, _, true) => info!("allocated the rest of {image}"),
        (false, _, _) => info!(
            "{image} is sparse: writes to volumes fail with I/O errors when its filesystem is full"
        ),
        (true, false, _) => warn!(
            "{image} is treated as sparse, since its filesystem copies on write: writes to volumes \
             fail with I/O errors when that is full"
        ),
        (true, true, false) => warn!(
            "{image} is not fully allocated, since room is missing, a copy shares its blocks or volumes \
             are attached: writes to volumes fail with I/O errors when its filesystem is full; free room \
             there, unstage the volumes and start again"
        ),
    }
}

/// Keeps the reserve of a sparse image; an allocated one needs none. A start does without it rather than
/// fail.
fn settle_reserve(data_dir: &Path, in_place: bool, is_allocated: bool) {
    let settled = match is_allocated {
        true => remove_and_free(&below::reserve_path(data_dir)),
        false => below::release_for_start(data_dir)
            .and_then(|()| below::make_reserve(data_dir, in_place)),
    };
    if let Err(error) = settled {
        warn!(%error, "could not settle the reserve of the pool image");
    }
}

/// The device of the image, held open. One that is still there serves volumes that stayed attached:
/// XFS then hands out the mount that it already has.
fn attach(backing: &File) -> Result<(LoopDevice, File)> {
    let devices = LoopDevice::of_file(backing)?;
    devices.refuse_foreign()?;
    if let Some(device) = devices.ours.into_iter().next() {
        let handle = device.open(true)?;
        // It may have gone with its last user before it was opened; now it cannot.
        if LoopDevice::find(backing)?.contains(&device) {
            return Ok((device, handle));
        }
    }
    LoopDevice::attach(backing, Lifetime::LastUser)
}

fn mount(device: &LoopDevice, keeps_room: bool) -> Result<OwnedFd> {
    let source = device.path().to_string_lossy();
    // nouuid: a copy of a pool may be looked at beside the pool. discard: what is deleted in the pool
    // becomes free below it, which an allocated image must not allow.
    let options: &[&str] = if keeps_room { &["nouuid"] } else { &["nouuid", "discard"] };
    let mounted =
        retried_while_busy(|| sys::detached_mount(c"xfs", &source, options)).context(|| {
            format!(
                "mounting the pool image on {source} (is XFS in this kernel, and the image whole?)"
            )
        })?;
    reach("image.mounted").map(|()| mounted)
}

/// Whether the kernel does not mount an XFS because of its block size.
fn is_unsupported(error: &Error) -> bool {
    matches!(error, Error::Io { source, .. } if source.raw_os_error() == Some(libc::ENOSYS))
}

/// A process that has just ended may still hold the device: the kernel unmounts what it had a moment later.
fn retried_while_busy<T>(mut mount: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let deadline = Instant::now() + BUSY_DEADLINE;
    loop {
        match mount() {
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) && Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(20));
            }
            result => return result,
        }
    }
}

/// Makes the image under a temporary name. What an interrupted attempt left goes first, and what a
/// failed one leaves goes with it.
pub fn make(data_dir: &Path, choice: &ImageChoice) -> Result<()> {
    let temporary = data_dir.join("pool.img.part");
    let remove = || {
        if let Ok(left_over) = File::options().read(true).write(true).open(&temporary) {
            LoopDevice::detach_all(&left_over)?;
        }
        remove_and_free(&temporary)
    };
    remove()?;
    let keeps_room = !choice.sparse && below::writes_in_place(data_dir)?;
    let size = size(data_dir, choice.size, keeps_room)?;
    let made = fill(&temporary, size, choice.block_size, keeps_room).and_then(|block_size| {
        fs::rename(&temporary, path(data_dir))
            .context(|| "publishing the pool image".to_owned())?;
        reach("image.named").map(|()| block_size)
    });
    let block_size = made.map_err(|error| {
        if let Err(error) = remove() {
            warn!(%error, "could not remove {}", temporary.display());
        }
        match error {
            // Its own words would speak of room in the pool.
            Error::Exhausted(_) => no_room(data_dir, size),
            error => error,
        }
    })?;
    info!(bytes = size, block_size, sparse = !keeps_room, "made the pool image");
    sync_directory(data_dir)
}

/// The size of a new image in bytes.
fn size(data_dir: &Path, asked: Option<u64>, keeps_room: bool) -> Result<u64> {
    let available = filesystem_room(data_dir)?.available;
    let size = match asked {
        Some(size) => size,
        None if keeps_room => (available / 2).clamp(MIN_BYTES, DEFAULT_BYTES),
        None => available / 10 * 9,
    };
    let size = size - size % BLOCK_SIZE;
    if size < MIN_BYTES {
        return Err(Error::invalid(
            "--pool-size",
            format!("an image of {size} bytes is too small for XFS; at least {MIN_BYTES}"),
        ));
    }
    if keeps_room {
        check_room(data_dir, size)?;
    }
    Ok(size)
}

/// Makes an image that is whole and durable when this returns. Returns the bytes in a block of its filesystem.
fn fill(path: &Path, size: u64, block_size: Option<u64>, keeps_room: bool) -> Result<u64> {
    let sizing = || format!("sizing {}", path.display());
    let file = new_file(path)?;
    if keeps_room {
        match below::allocate(&file, 0, size) {
            // A filesystem that cannot allocate; every start says so.
            Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
            allocated => allocated.context(sizing)?,
        }
    }
    file.set_len(size).context(sizing)?;
    reach("image.sized")?;
    let (device, handle) = LoopDevice::attach(&file, Lifetime::LastUser)?;
    let block_size = format(&device, block_size, keeps_room)?;
    reach("image.formatted")?;
    handle.sync_all().context(|| format!("flushing {}", path.display()))?;
    drop(handle);
    file.sync_all().context(|| format!("flushing {}", path.display()))?;
    wait_until_detached(&file)?;
    reach("image.flushed").map(|()| block_size)
}

/// Waits until the kernel has detached the device that the image was mounted with. Meanwhile the device looks like one of
/// another program, and the image cannot be opened.
fn wait_until_detached(image: &File) -> Result<()> {
    let deadline = Instant::now() + BUSY_DEADLINE;
    loop {
        if LoopDevice::of_file(image)?.is_empty() || Instant::now() >= deadline {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// Makes the filesystem, with blocks of the given size or else of the largest that the kernel mounts. Returns the size.
fn format(device: &LoopDevice, block_size: Option<u64>, keeps_room: bool) -> Result<u64> {
    let bytes = block_size.unwrap_or(MAX_BLOCK_SIZE);
    make_filesystem(device, bytes)?;
    if bytes == BLOCK_SIZE {
        return Ok(bytes);
    }
    match mount(device, keeps_room) {
        Ok(_) => Ok(bytes),
        Err(error) if is_unsupported(&error) && block_size.is_none() => {
            info!("this kernel mounts no XFS with larger blocks than {BLOCK_SIZE} bytes");
            make_filesystem(device, BLOCK_SIZE).map(|()| BLOCK_SIZE)
        }
        Err(error) if is_unsupported(&error) => Err(Error::Precondition(format!(
            "--pool-block-size: this kernel does not mount an XFS with blocks of {bytes} bytes; blocks larger than a page \
             of memory need Linux 6.12: use 4Ki, or leave the flag out"
        ))),
        Err(error) => Err(error),
    }
}

fn make_filesystem(device: &LoopDevice, block_size: u64) -> Result<()> {
    // rmapbt doubles to trebles the cost of a clone and can run out of metadata room.
    command::run(
        Command::new("mkfs.xfs")
            .args(["-q", "-f", "-K", "-m", "reflink=1,rmapbt=0", "-L", "csi-loopback"])
            .args(["-b", &format!("size={block_size}")])
            .arg(device.path()),
    )
}

/// Whether the filesystem below has room for so many more bytes of the image.
fn check_room(data_dir: &Path, bytes: u64) -> Result<()> {
    match filesystem_room(data_dir)?.available {
        available if available < bytes => Err(no_room(data_dir, bytes)),
        _ => Ok(()),
    }
}

fn no_room(data_dir: &Path, bytes: u64) -> Error {
    let available = filesystem_room(data_dir).map_or(0, |room| room.available);
    Error::Exhausted(format!(
        "the pool image needs {bytes} more bytes and the filesystem of {} has {available}; ask for \
         less (--pool-size), or free room there",
        data_dir.display()
    ))
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT))
}
