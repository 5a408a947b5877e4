//! The image of an image pool: an XFS in a file in the data directory. It is mounted detached: no
//! mount table shows it, so no tool defragments it, and mount and device end with the last user,
//! which is this process or an attached volume.
//!
//! An image is allocated: every block exists on the filesystem that contains it, so a full pool
//! returns ENOSPC and never an I/O error. A sparse image takes space on writes and frees it by
//! discards.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use tracing::{info, warn};

use super::super::command;
use super::super::error::{Context, Error, Result};
use super::super::fail_point::reach;
use super::super::filesystem;
use super::super::loop_device::{Lifetime, LoopDevice};
use super::super::sector::SectorSize;
use super::super::sys;
use super::super::units::BLOCK_SIZE;
use super::host_filesystem::Lacking;
use super::{
    ImageChoice, ImageStatus, Room, filesystem_room, host_filesystem, new_file, remove_and_free,
    sync_directory,
};

/// The minimum size for mkfs.xfs.
const MIN_BYTES: u64 = 300 << 20;

/// The maximum default size of an allocated image, in bytes.
const DEFAULT_BYTES: u64 = 10 << 30;

/// The largest block size of XFS, in bytes.
pub const MAX_BLOCK_SIZE: u64 = 64 << 10;

/// Maximum time of a call that copies shared blocks.
const UNSHARE_TIME: Duration = Duration::from_secs(1);

/// How long to wait until a previous user has released the image's device.
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
    /// The mount exists as long as this descriptor or any file on it is open.
    mount: OwnedFd,
    /// Whether the image should be allocated and its filesystem supports that.
    preallocates: bool,
    /// What an image that should be allocated lacks.
    known: Mutex<Known>,
    in_place: bool,
    /// Held during growth.
    growing: Mutex<()>,
}

/// What an image lacked when its extent map was last read.
#[derive(Debug, Clone, Copy)]
struct Known {
    lacking: Lacking,
    /// When to read it again.
    due: Instant,
}

/// The purpose of opening an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// For a driver: unfinished changes of the image are completed.
    Serve,
    /// For `pool check`: nothing is changed.
    Check,
}

impl Image {
    /// Mounts the image of `data_dir`. `allocated`: whether the image should be allocated.
    pub fn open(data_dir: &Path, allocated: bool, purpose: Purpose) -> Result<Self> {
        let path = path(data_dir);
        let file = File::options()
            .read(true)
            .write(true)
            .open(&path)
            .context(|| format!("opening {}", path.display()))?;
        let in_place = host_filesystem::writes_in_place(data_dir)?;
        let preallocates = allocated && in_place;
        let read =
            || if preallocates { host_filesystem::lacking(&file) } else { Ok(Lacking::default()) };
        let mut lacking = read()?;
        if purpose == Purpose::Serve {
            if !preallocates || !lacking.is_nothing() {
                if preallocates {
                    allocate_rest(data_dir, &file)?;
                    lacking = read()?;
                }
                log_kind(&path, allocated, in_place, preallocates && lacking.is_nothing());
            }
            // Before the mount: replaying the log of the XFS may need space.
            update_reserve(data_dir, in_place, preallocates && lacking.is_nothing());
        }
        let (device, handle) = attach(&file)?;
        let mount = mount(&device, preallocates).map_err(|error| match error {
            error if is_unsupported(&error) => Error::Precondition(format!(
                "{error}: blocks larger than a memory page require Linux 6.12"
            )),
            error => error,
        })?;
        drop(handle);
        let image = Self {
            data_dir: data_dir.to_owned(),
            file,
            device,
            mount,
            preallocates,
            known: Mutex::new(Known { lacking, due: Instant::now() }),
            in_place,
            growing: Mutex::new(()),
        };
        if purpose == Purpose::Serve {
            image.use_whole_file()?;
        }
        Ok(image)
    }

    /// The root of the mount, valid only in this process.
    pub fn root(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.mount.as_raw_fd()))
    }

    /// Whether every block of the image is allocated on its filesystem, and its own.
    pub fn is_allocated(&self) -> bool {
        self.preallocates && self.known().lacking.is_nothing()
    }

    pub fn status(&self) -> Result<ImageStatus> {
        if self.preallocates {
            self.read_map()?;
        }
        Ok(ImageStatus {
            size: self.size()?,
            allocated: self.is_allocated(),
            shared: self.shared(),
            available_below: self.host_room()?.available,
        })
    }

    /// Bytes in blocks that another file shares, of an image that should be allocated.
    pub fn shared(&self) -> u64 {
        self.known().lacking.shared
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read_map(&self) -> Result<Lacking> {
        let begun = thread_cpu_time();
        let lacking = host_filesystem::lacking(&self.file)?;
        // At most a hundredth of a CPU reads maps of many extents. Waiting for a busy disk, to which
        // the kernel first writes the image's dirty pages, does not count.
        let used = thread_cpu_time().saturating_sub(begun);
        *self.known() = Known { lacking, due: Instant::now() + 100 * used };
        Ok(lacking)
    }

    /// Finds blocks that a copy of the image shares, and gives the image its own. Call this about
    /// once a second: `cp` shares blocks by default.
    pub fn unshare(&self) -> Result<()> {
        if !self.preallocates || Instant::now() < self.known().due {
            return Ok(());
        }
        let was_allocated = self.is_allocated();
        let lacking = self.read_map()?;
        if lacking.shared > 0 {
            if was_allocated {
                warn!(
                    bytes = lacking.shared,
                    "another file shares blocks of the pool image, such as a copy of it: copying the blocks"
                );
            }
            host_filesystem::unshare(&self.data_dir, &self.file, Instant::now() + UNSHARE_TIME)?;
            if self.read_map()?.shared < lacking.shared {
                self.known().due = Instant::now();
            }
        }
        if !was_allocated && self.is_allocated() {
            info!("every block of the pool image is its own again");
            remove_and_free(&host_filesystem::reserve_path(&self.data_dir))?;
        }
        Ok(())
    }

    /// The size of the image file, in bytes.
    pub fn size(&self) -> Result<u64> {
        let metadata =
            self.file.metadata().context(|| "reading the size of the pool image".to_owned())?;
        Ok(metadata.len())
    }

    /// Space on the filesystem that contains the image.
    pub fn host_room(&self) -> Result<Room> {
        filesystem_room(&self.data_dir)
    }

    /// Completes the reserve of a sparse image if space is available. Cheap: called about once a
    /// second.
    pub fn restore_reserve(&self) -> Result<()> {
        match self.is_allocated() {
            true => Ok(()),
            false => host_filesystem::make_reserve(&self.data_dir, self.in_place),
        }
    }

    /// Releases part of the reserve of a sparse image after a write failed for lack of space.
    pub fn release_reserve(&self) -> Result<()> {
        match self.is_allocated() {
            true => Ok(()),
            false => host_filesystem::release(&self.data_dir),
        }
    }

    /// Whether writes to the image can need more than the given bytes below it.
    pub fn may_need_more_than(&self, available: u64) -> bool {
        !self.preallocates || self.known().lacking.bytes() > available
    }

    /// A warning if the filesystem of the image may not have the space that writes need.
    pub fn space_warning(&self) -> Result<Option<String>> {
        if self.is_allocated() {
            return Ok(None);
        }
        let available = self.host_room()?.available;
        if self.preallocates {
            let Lacking { holes, shared } = self.known().lacking;
            let needed = holes.saturating_add(shared).saturating_add(host_filesystem::LOW_SPACE);
            return Ok((available < needed).then(|| {
                format!(
                    "the pool image in {} is not its own: another file shares {shared} bytes of it, such as a copy \
                     made by cp, and {holes} bytes are not allocated, but the filesystem there has only {available} \
                     bytes free: writes to volumes fail with I/O errors when it is full; remove the copy, or free \
                     space there",
                    self.data_dir.display()
                )
            }));
        }
        Ok((available < host_filesystem::LOW_SPACE).then(|| {
            format!(
                "the filesystem of {} is nearly full ({available} bytes are free) and the pool image \
                 on it is sparse: writes to volumes fail with I/O errors when it is full; free space \
                 there",
                self.data_dir.display()
            )
        }))
    }

    /// Grows the image and its XFS to `size` bytes, rounded up to whole blocks, while volumes are
    /// attached. A repeated call, or the next start, completes an interrupted growth.
    pub fn grow(&self, size: u64) -> Result<()> {
        let _growing = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        let size = size.div_ceil(BLOCK_SIZE).saturating_mul(BLOCK_SIZE);
        let old = self.size()?;
        if size < old {
            return Err(Error::OutOfRange(format!(
                "size: the pool image has {old} bytes and cannot shrink to {size}; request at least {old}"
            )));
        }
        if size > old {
            self.lengthen(old, size)?;
        }
        self.use_whole_file()
    }

    /// Extends the image file, and allocates the new part if the image is allocated.
    fn lengthen(&self, old: u64, size: u64) -> Result<()> {
        let growing = || format!("growing the pool image to {size} bytes");
        if self.preallocates {
            check_room(&self.data_dir, size - old)?;
            // Allocate beyond the end first: otherwise the file would be sparse for a while.
            let allocated = host_filesystem::allocate(&self.file, old, size - old);
            if allocated.as_ref().is_err_and(is_full) {
                self.file.set_len(old).context(growing)?;
                return Err(no_room(&self.data_dir, size - old));
            }
            allocated.context(growing)?;
        }
        self.file.set_len(size).and_then(|()| self.file.sync_all()).context(growing)?;
        reach("image.lengthened")
    }

    /// Grows device and XFS to the size of the file.
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
            info!(from = bytes, to = device_bytes, "grew the pool");
        }
        Ok(())
    }
}

/// Allocates the missing blocks of an image that should be allocated: of a pool being converted, or
/// of a copied image. Allocates nothing if there is not enough space.
fn allocate_rest(data_dir: &Path, file: &File) -> Result<()> {
    let allocating = || "allocating the pool image".to_owned();
    let size = file.metadata().context(allocating)?.len();
    // Attached volumes keep the previous mount, which may discard blocks.
    if !LoopDevice::find(file)?.is_empty() {
        return Ok(());
    }
    if host_filesystem::unallocated(file)? > filesystem_room(data_dir)?.available {
        return Ok(());
    }
    match host_filesystem::allocate(file, 0, size) {
        Err(e) if is_full(&e) || e.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(()),
        allocated => allocated.context(allocating),
    }
}

fn log_kind(image: &Path, allocated: bool, in_place: bool, is_allocated: bool) {
    let image = image.display();
    match (allocated, in_place, is_allocated) {
        (_, _, true) => info!("allocated the rest of {image}"),
        (false, _, _) => info!(
            "{image} is sparse: writes to volumes fail with I/O errors when its filesystem is full"
        ),
        (true, false, _) => warn!(
            "{image} is treated as sparse, because its filesystem is copy-on-write: writes to volumes \
             fail with I/O errors when that filesystem is full"
        ),
        (true, true, false) => warn!(
            "{image} is not fully allocated, because its filesystem has too little free space, a copy \
             shares its blocks, or volumes are attached: writes to volumes fail with I/O errors when its \
             filesystem is full; free space there, unstage the volumes and restart the driver"
        ),
    }
}

/// The CPU time of this thread.
fn thread_cpu_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// Creates the reserve of a sparse image, or removes that of an allocated one. An error does not
/// fail the start.
fn update_reserve(data_dir: &Path, in_place: bool, is_allocated: bool) {
    let settled = match is_allocated {
        true => remove_and_free(&host_filesystem::reserve_path(data_dir)),
        false => host_filesystem::release_for_start(data_dir)
            .and_then(|()| host_filesystem::make_reserve(data_dir, in_place)),
    };
    if let Err(error) = settled {
        warn!(%error, "failed to update the reserve of the pool image");
    }
}

/// Opens the device of the image. An existing device serves volumes that remained attached: XFS
/// then returns the existing mount.
fn attach(backing: &File) -> Result<(LoopDevice, File)> {
    let devices = LoopDevice::of_file(backing)?;
    devices.refuse_foreign()?;
    if let Some(device) = devices.ours.into_iter().next() {
        let handle = device.open(true)?;
        // It may have been detached before it was opened. From now on it cannot.
        if LoopDevice::find(backing)?.contains(&device) {
            return Ok((device, handle));
        }
    }
    let lifetime = Lifetime::LastUser { shares_blocks: false };
    LoopDevice::attach(backing, lifetime, SectorSize::default())
}

fn mount(device: &LoopDevice, preallocates: bool) -> Result<OwnedFd> {
    let source = device.path().to_string_lossy();
    // nouuid: a copy of the pool may be mounted at the same time. discard: blocks deleted in the
    // pool are freed outside it, which an allocated image must not allow. logbsize: a flush of a
    // volume after a snapshot then fits into one log buffer, and flushes the device twice instead of
    // three times.
    let options = ["nouuid", "logbsize=256k", "discard"];
    let options = &options[..if preallocates { 2 } else { 3 }];
    let mounted =
        retry_while_busy(|| sys::detached_mount(c"xfs", &source, options)).context(|| {
            format!(
                "mounting the pool image on {source} (check that this kernel supports XFS and the image is intact)"
            )
        })?;
    reach("image.mounted").map(|()| mounted)
}

/// Whether the kernel does not support the block size of an XFS.
fn is_unsupported(error: &Error) -> bool {
    matches!(error, Error::Io { source, .. } if source.raw_os_error() == Some(libc::ENOSYS))
}

/// Retries on EBUSY: the kernel may still be unmounting the filesystem of an ended process.
fn retry_while_busy<T>(mut mount: impl FnMut() -> io::Result<T>) -> io::Result<T> {
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

/// Creates the image under a temporary name. Removes the remains of an interrupted or failed
/// attempt.
pub fn make(data_dir: &Path, choice: &ImageChoice) -> Result<()> {
    let temporary = data_dir.join("pool.img.part");
    let remove = || {
        if let Ok(remains) = File::options().read(true).write(true).open(&temporary) {
            LoopDevice::detach_all(&remains)?;
        }
        remove_and_free(&temporary)
    };
    remove()?;
    let preallocates = !choice.sparse && host_filesystem::writes_in_place(data_dir)?;
    let size = size(data_dir, choice.size, preallocates)?;
    // The unit of the reported changes and of direct I/O: larger blocks need the page cache.
    let block_size = choice.block_size.unwrap_or(BLOCK_SIZE);
    let made = fill(&temporary, size, block_size, preallocates).and_then(|()| {
        fs::rename(&temporary, path(data_dir)).context(|| "renaming the pool image".to_owned())?;
        reach("image.named")
    });
    made.map_err(|error| {
        if let Err(error) = remove() {
            warn!(%error, "failed to remove {}", temporary.display());
        }
        match error {
            // The original message refers to space in the pool.
            Error::Exhausted(_) => no_room(data_dir, size),
            error => error,
        }
    })?;
    info!(bytes = size, block_size, sparse = !preallocates, "created the pool image");
    sync_directory(data_dir)
}

/// The size of a new image in bytes.
fn size(data_dir: &Path, requested: Option<u64>, preallocates: bool) -> Result<u64> {
    let available = filesystem_room(data_dir)?.available;
    let size = match requested {
        Some(size) => size,
        None if preallocates => (available / 2).clamp(MIN_BYTES, DEFAULT_BYTES),
        None => available / 10 * 9,
    };
    let size = size - size % BLOCK_SIZE;
    if size < MIN_BYTES {
        return Err(Error::invalid(
            "--pool-size",
            format!("an image of {size} bytes is too small for XFS; use at least {MIN_BYTES}"),
        ));
    }
    if preallocates {
        check_room(data_dir, size)?;
    }
    Ok(size)
}

/// Creates a complete and durable image.
fn fill(path: &Path, size: u64, block_size: u64, preallocates: bool) -> Result<()> {
    let sizing = || format!("sizing {}", path.display());
    let file = new_file(path)?;
    if preallocates {
        match host_filesystem::allocate(&file, 0, size) {
            // The filesystem does not support allocation. Every start logs that.
            Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
            allocated => allocated.context(sizing)?,
        }
    }
    file.set_len(size).context(sizing)?;
    reach("image.sized")?;
    let lifetime = Lifetime::LastUser { shares_blocks: false };
    let (device, handle) = LoopDevice::attach(&file, lifetime, SectorSize::default())?;
    format(&device, block_size, preallocates)?;
    reach("image.formatted")?;
    handle.sync_all().context(|| format!("flushing {}", path.display()))?;
    drop(handle);
    file.sync_all().context(|| format!("flushing {}", path.display()))?;
    wait_until_detached(&file)?;
    reach("image.flushed")
}

/// Waits until the kernel has detached the device of the new image. Until then the device looks
/// like one of another program, and the image cannot be opened.
fn wait_until_detached(image: &File) -> Result<()> {
    let deadline = Instant::now() + BUSY_DEADLINE;
    loop {
        if LoopDevice::of_file(image)?.is_empty() || Instant::now() >= deadline {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// Creates the filesystem. Refuses a block size that the kernel does not mount.
fn format(device: &LoopDevice, block_size: u64, preallocates: bool) -> Result<()> {
    let mut command = filesystem::mkfs_xfs()?;
    command.args(["-L", "csi-loopback", "-b", &format!("size={block_size}")]);
    command::run(command.arg(device.path()))?;
    if block_size == BLOCK_SIZE {
        return Ok(());
    }
    match mount(device, preallocates) {
        Err(error) if is_unsupported(&error) => Err(Error::Precondition(format!(
            "--pool-block-size: this kernel does not support XFS blocks of {block_size} bytes; blocks larger than a \
             memory page require Linux 6.12: use 4Ki, or omit the flag"
        ))),
        mounted => mounted.map(drop),
    }
}

/// Checks that the filesystem of the image has `bytes` bytes available.
fn check_room(data_dir: &Path, bytes: u64) -> Result<()> {
    match filesystem_room(data_dir)?.available {
        available if available < bytes => Err(no_room(data_dir, bytes)),
        _ => Ok(()),
    }
}

fn no_room(data_dir: &Path, bytes: u64) -> Error {
    let available = filesystem_room(data_dir).map_or(0, |room| room.available);
    Error::Exhausted(format!(
        "the pool image needs {bytes} more bytes, but the filesystem of {} has {available}; request \
         less (--pool-size), or free space there",
        data_dir.display()
    ))
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_no_part_of_the_cost_of_a_look() {
        let begun = thread_cpu_time();
        std::thread::sleep(Duration::from_millis(300));
        let used = thread_cpu_time().saturating_sub(begun);
        assert!(used < Duration::from_millis(150), "{used:?}");
        assert!((0..10_000_000).any(|_| thread_cpu_time().saturating_sub(begun) > used));
    }
}
