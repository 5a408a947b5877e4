//! Loop devices: attaching a backing file, finding its devices after a restart, and detaching them.
//! A device is identified by the inode of its backing file, never by name. Only devices of files
//! that the caller names are touched. A device of such a file with other parameters (offset, size
//! limit, sector size, read-only) was attached by another program: it is never used and never
//! detached.

mod identity;
mod named;

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use linux_raw_sys::loop_device::{LO_FLAGS_AUTOCLEAR, LO_FLAGS_DIRECT_IO, LO_FLAGS_READ_ONLY};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};

use tracing::{debug, warn};

use super::error::{Context, Error, Result};
use super::fail_point::{hit, reach};
use super::sector::SectorSize;
use super::sys;
use super::units::BLOCK_SIZE;

use identity::{AttachmentId, DeviceParameters, Identity};

pub use named::{attached_loop_devices, twins_of_loop_device};

const CONTROL: &str = "/dev/loop-control";
const LOOP_MAJOR: u64 = 7;
/// Bytes of the random name of a device.
const NAME_BYTES: usize = 32;

/// Held during an attach, because the kernel offers the same free device to concurrent callers.
static ATTACH_LOCK: Mutex<()> = Mutex::new(());

/// Maximum number of attempts when other processes take the free device first.
const ATTACH_ATTEMPTS: usize = 64;

/// How long a call waits until a device is detached.
const DETACH_DEADLINE: Duration = Duration::from_secs(10);

/// A loop device that had a backing file when it was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoopDevice {
    number: u32,
    path: PathBuf,
    /// The attachment that was found. `None`: the device was found by its number or name alone.
    attachment: Option<AttachmentId>,
}

/// The devices of one backing file, lowest numbers first.
#[derive(Debug, Default)]
pub struct Devices {
    pub ours: Vec<LoopDevice>,
    foreign: Vec<(LoopDevice, DeviceParameters)>,
}

impl Devices {
    pub fn is_empty(&self) -> bool {
        self.ours.is_empty() && self.foreign.is_empty()
    }

    /// `Precondition` if another program attached a writable device to the file: each device has
    /// its own page cache, so two devices overwrite each other's blocks. A read-only device is
    /// harmless.
    pub fn refuse_foreign(&self) -> Result<()> {
        let Some((device, parameters)) =
            self.foreign.iter().find(|(_, parameters)| !parameters.read_only)
        else {
            return Ok(());
        };
        let path = device.path.display();
        Err(Error::Precondition(format!(
            "another program attached {path} to the same backing file (offset {}, size limit {}, sectors of {} \
             bytes), and writes through two devices destroy data; detach it (losetup -d {path}) and try again",
            parameters.offset, parameters.size_limit, parameters.sector
        )))
    }
}

/// A snapshot of all loop devices by backing file.
#[derive(Debug, Default)]
pub struct AttachedFiles(HashMap<Identity, Vec<(LoopDevice, sys::loop_info64)>>);

impl AttachedFiles {
    /// Reads the status of every device with a backing file.
    pub fn read() -> Result<Self> {
        let mut files: HashMap<_, Vec<_>> = HashMap::new();
        for device in LoopDevice::all()?.into_iter().filter(LoopDevice::has_file) {
            let Some(info) = device.status() else { continue };
            let files = files.entry(Identity::of_status(&info)).or_default();
            files.push((device.with_attachment(&info), info));
        }
        Ok(Self(files))
    }

    pub fn of_file(&self, backing: &File) -> Result<Devices> {
        let wanted = Identity::of(backing).context(|| "reading a backing file".to_owned())?;
        let mut devices = Devices::default();
        for (device, info) in self.0.get(&wanted).into_iter().flatten() {
            match device.parameters(info) {
                None => {}
                Some(parameters) if parameters.are_ours(info) => devices.ours.push(device.clone()),
                Some(parameters) => devices.foreign.push((device.clone(), parameters)),
            }
        }
        Ok(devices)
    }
}

/// When a device is detached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lifetime {
    /// By [`LoopDevice::release`]: device and I/O of a pod survive this process.
    Explicit,
    /// By the kernel, when the device is no longer open or mounted. `shares_blocks`: the backing
    /// file may share blocks with others.
    LastUser { shares_blocks: bool },
}

impl LoopDevice {
    /// Attaches `backing` (open for reading and writing) with these sectors and, if its filesystem
    /// supports it, direct I/O. The returned file keeps the device open. `Precondition` if another
    /// program has attached the file for writing.
    pub fn attach(backing: &File, lifetime: Lifetime, sector: SectorSize) -> Result<(Self, File)> {
        Self::of_file(backing)?.refuse_foreign()?;
        Self::take(backing, lifetime, sector)
    }

    fn take(backing: &File, lifetime: Lifetime, sector: SectorSize) -> Result<(Self, File)> {
        let control = File::options().read(true).write(true).open(CONTROL).context(|| {
            format!("opening {CONTROL} (loop devices need root and the loop module)")
        })?;
        let _lock = ATTACH_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..ATTACH_ATTEMPTS {
            let number = sys::loop_free_number(&control)
                .context(|| "getting a free loop device".to_owned())?;
            let device = Self::numbered(number);
            device.ensure_node()?;
            let file = device.open(true)?;
            match configure(&file, backing, lifetime, sector) {
                Ok(info) => {
                    let device = device.with_attachment(&info);
                    device.check_sectors(sector, &info)?;
                    // The kernel keeps the read-only flag of a previous user.
                    device.set_read_only(false)?;
                    return Ok((device, file));
                }
                // Another process took it first.
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) => continue,
                Err(e) => return Err(Error::io(format!("attaching {}", device.path.display()), e)),
            }
        }
        Err(Error::Busy(
            "no free loop device: other processes take each free device first; try again"
                .to_owned(),
        ))
    }

    /// Detaches a new device to which the kernel gave other sectors.
    fn check_sectors(&self, wanted: SectorSize, info: &sys::loop_info64) -> Result<()> {
        let actual = self.parameters(info).map_or(0, |parameters| parameters.sector);
        if actual == u64::from(wanted.bytes()) {
            return Ok(());
        }
        self.release()?;
        Err(Error::Precondition(format!(
            "this kernel attached {} with sectors of {actual} bytes instead of {}",
            self.path.display(),
            wanted.bytes()
        )))
    }

    /// Our devices of `backing`, lowest number first.
    pub fn find(backing: &File) -> Result<Vec<Self>> {
        Self::of_file(backing).map(|devices| devices.ours)
    }

    /// All devices of `backing`.
    pub fn of_file(backing: &File) -> Result<Devices> {
        AttachedFiles::read()?.of_file(backing)
    }

    /// Returns the existing device of `backing`, or attaches a new one. `Precondition` if another
    /// program has attached the file for writing.
    pub fn ensure(backing: &File, sector: SectorSize) -> Result<Self> {
        for _ in 0..ATTACH_ATTEMPTS {
            let devices = Self::of_file(backing)?;
            devices.refuse_foreign()?;
            let Some(device) = devices.ours.into_iter().next() else {
                return Self::take(backing, Lifetime::Explicit, sector).map(|(device, _)| device);
            };
            if device.keep()? {
                return Ok(device);
            }
        }
        Err(Error::Busy("the loop device of this file is being detached; try again".to_owned()))
    }

    /// Clears the autoclear flag, which a detach of a busy device sets: the device is in use again.
    /// Returns false if the device was detached since it was found; it can have another file then.
    fn keep(&self) -> Result<bool> {
        let doing = || format!("clearing the autoclear flag of {}", self.path.display());
        // While it is open, it stays attached.
        let opened = File::options().read(true).write(true).open(&self.path);
        let status = opened.and_then(|file| sys::loop_status(&file).map(|info| (file, info)));
        let (file, mut info) = match status {
            Err(e) if e.raw_os_error() == Some(libc::ENXIO) => return Ok(false),
            status => status.context(doing)?,
        };
        if self.attachment != Some(AttachmentId::of_status(&info)) {
            return Ok(false);
        }
        if info.lo_flags & LO_FLAGS_AUTOCLEAR as u32 != 0 {
            info.lo_flags &= !(LO_FLAGS_AUTOCLEAR as u32);
            sys::loop_set_status(&file, &mut info).context(doing)?;
            reach("loop.kept")?;
        }
        Ok(true)
    }

    /// The device of a deleted backing file with this name, which must be unique forever.
    pub fn find_deleted(name: &str) -> Result<Option<Self>> {
        let ending = format!("/{name} (deleted)");
        for device in Self::all()? {
            let path = format!("/sys/block/loop{}/loop/backing_file", device.number);
            let named = fs::read_to_string(path);
            if !named.is_ok_and(|file| file.trim_end_matches('\n').ends_with(&ending)) {
                continue;
            }
            let Some(info) = device.status() else { continue };
            if device.parameters(&info).is_some_and(|parameters| parameters.are_ours(&info)) {
                return Ok(Some(device.with_attachment(&info)));
            }
        }
        Ok(None)
    }

    /// All loop devices, with or without a backing file.
    fn all() -> Result<Vec<Self>> {
        let mut devices = Vec::new();
        let entries = fs::read_dir("/sys/block").context(|| "listing /sys/block".to_owned())?;
        for entry in entries {
            let name = entry.context(|| "listing /sys/block".to_owned())?.file_name();
            let number = name.to_str().and_then(|name| name.strip_prefix("loop")?.parse().ok());
            devices.extend(number.map(Self::numbered));
        }
        devices.sort_unstable_by_key(|device| device.number);
        Ok(devices)
    }

    fn numbered(number: u32) -> Self {
        Self { number, path: PathBuf::from(format!("/dev/loop{number}")), attachment: None }
    }

    fn with_attachment(self, info: &sys::loop_info64) -> Self {
        Self { attachment: Some(AttachmentId::of_status(info)), ..self }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `major:minor`, as in mountinfo.
    pub fn device_number(&self) -> String {
        format!("{LOOP_MAJOR}:{}", self.number)
    }

    pub fn open(&self, write: bool) -> Result<File> {
        File::options()
            .read(true)
            .write(write)
            .open(&self.path)
            .context(|| format!("opening {}", self.path.display()))
    }

    /// Whether the device is mounted in any mount namespace or open exclusively.
    pub fn is_in_use(&self) -> Result<bool> {
        let opened = File::options().read(true).custom_flags(libc::O_EXCL).open(&self.path);
        match opened {
            Ok(_) => Ok(false),
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => Ok(true),
            Err(e) => Err(Error::io(format!("opening {}", self.path.display()), e)),
        }
    }

    /// Size in bytes.
    pub fn size(&self) -> Result<u64> {
        let path = format!("/sys/block/loop{}/size", self.number);
        let sectors = fs::read_to_string(&path).context(|| format!("reading {path}"))?;
        let sectors = sectors.trim().parse::<u64>();
        let sectors = sectors.map_err(|e| Error::Failed(format!("{path} is not a number: {e}")))?;
        // Always in units of 512 bytes (Documentation/ABI/stable/sysfs-block).
        Ok(sectors * 512)
    }

    /// Updates the device to the size of its backing file.
    pub fn grow(&self) -> Result<()> {
        sys::loop_set_capacity(&self.open(true)?)
            .context(|| format!("growing {}", self.path.display()))?;
        reach("loop.grown")
    }

    /// Writes the device's page cache to the backing file.
    pub fn flush(&self) -> Result<()> {
        let file = self.open(true).or_else(|_| self.open(false))?;
        file.sync_all().context(|| format!("flushing {}", self.path.display()))
    }

    pub fn is_read_only(&self) -> Result<bool> {
        sys::block_is_read_only(&self.open(false)?)
            .context(|| format!("reading the mode of {}", self.path.display()))
    }

    /// Sets or clears the read-only flag of the device.
    pub fn set_read_only(&self, read_only: bool) -> Result<()> {
        sys::set_block_read_only(&self.open(false)?, read_only)
            .context(|| format!("setting the mode of {}", self.path.display()))?;
        reach("loop.mode_set")
    }

    /// Counters of completed writes and discards. Equal values mean that nothing was written or
    /// discarded in between. `None` while writes are in progress.
    pub fn write_counters(&self) -> Result<Option<[u64; 2]>> {
        let read = |name: &str| {
            let path = format!("/sys/block/loop{}/{name}", self.number);
            fs::read_to_string(&path).context(|| format!("reading {path}"))
        };
        if read("queue/iostats")?.trim() == "0" {
            return Err(Error::Precondition(format!(
                "{} does not count writes (queue/iostats is 0), which a copy of a raw block volume \
                 requires; set it to 1",
                self.path.display()
            )));
        }
        // Read in this order: a write that is in flight at the first read and then completes is
        // counted in the second.
        let busy = read("inflight")?;
        let text = read("stat")?;
        let field = |text: &str, at: usize| {
            text.split_whitespace().nth(at).and_then(|field| field.parse::<u64>().ok())
        };
        // Documentation/block/stat.rst: 4 is writes done, 11 is discards done; inflight: 1 is
        // writes.
        let (Some(writes), Some(discards), Some(under_way)) =
            (field(&text, 4), field(&text, 11), field(&busy, 1))
        else {
            return Err(Error::Failed(format!(
                "failed to parse the I/O counters of {}",
                self.path.display()
            )));
        };
        Ok((under_way == 0).then_some([writes, discards]))
    }

    /// Detaches the device from the file with which it was found, and waits until that is done. Does
    /// nothing if the kernel has let it go: another volume or program can have the device then.
    pub fn release(&self) -> Result<()> {
        self.release_within(DETACH_DEADLINE)
    }

    /// Like [`Self::release`]; `Busy` after `timeout`.
    pub fn release_within(&self, timeout: Duration) -> Result<()> {
        let Some(current) = self.status().map(|info| AttachmentId::of_status(&info)) else {
            return Ok(());
        };
        let attached = self.attachment.clone().unwrap_or(current);
        self.release_while(timeout, |file| match sys::loop_status(file) {
            Ok(info) => Ok(AttachmentId::of_status(&info) == attached),
            Err(e) if is_gone(&e) => Ok(false),
            Err(e) => Err(Error::io(self.detaching(), e)),
        })
    }

    /// Detaches the device while `is_attached` holds, and waits until it does not. `Busy` after
    /// `timeout`.
    fn release_while(
        &self,
        timeout: Duration,
        is_attached: impl Fn(&File) -> Result<bool>,
    ) -> Result<()> {
        let deadline = Instant::now() + timeout;
        while self.detach(&is_attached)? {
            if Instant::now() > deadline {
                return Err(Error::Busy(format!(
                    "{} is still in use; unmount it or stop the processes that have it open",
                    self.path.display()
                )));
            }
            thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Detaches our devices of `backing` before it is removed.
    pub fn detach_all(backing: &File) -> Result<()> {
        let devices = Self::of_file(backing)?;
        for (device, _) in &devices.foreign {
            let path = device.path.display();
            warn!(%path, "another program has attached this loop device; the space of its file is freed when it is detached");
        }
        devices.ours.iter().try_for_each(Self::release)
    }

    /// Requests a detach. Returns false if the device has no file or another one. The file is
    /// checked and detached through one descriptor: while that is open, the device cannot be
    /// attached to another file.
    fn detach(&self, is_attached: &impl Fn(&File) -> Result<bool>) -> Result<bool> {
        if !self.has_file() {
            return Ok(false);
        }
        let doing = || self.detaching();
        let file = match File::open(&self.path) {
            Ok(file) => file,
            Err(e) if is_gone(&e) => return Ok(true),
            Err(e) => return Err(Error::io(doing(), e)),
        };
        if !is_attached(&file)? {
            return Ok(false);
        }
        // The kernel keeps the flag for the next user of the device.
        if sys::block_is_read_only(&file).context(doing)? {
            sys::set_block_read_only(&file, false).context(doing)?;
            reach("loop.mode_reset")?;
        }
        match sys::loop_clear(&file) {
            Ok(()) => reach("loop.let_go").map(|()| true),
            Err(e) if is_gone(&e) => Ok(true),
            Err(e) => Err(Error::io(doing(), e)),
        }
    }

    fn detaching(&self) -> String {
        format!("detaching {}", self.path.display())
    }

    /// sysfs has the directory `loop` only while the device has a backing file.
    fn has_file(&self) -> bool {
        Path::new(&format!("/sys/block/loop{}/loop", self.number)).exists()
    }

    /// `None` if it was detached meanwhile.
    fn parameters(&self, info: &sys::loop_info64) -> Option<DeviceParameters> {
        let path = format!("/sys/block/loop{}/queue/logical_block_size", self.number);
        Some(DeviceParameters {
            offset: info.lo_offset,
            size_limit: info.lo_sizelimit,
            sector: fs::read_to_string(path).ok()?.trim().parse().ok()?,
            read_only: info.lo_flags & LO_FLAGS_READ_ONLY as u32 != 0,
        })
    }

    fn status(&self) -> Option<sys::loop_info64> {
        self.ensure_node().ok()?;
        let file = self.open(false).ok()?;
        sys::loop_status(&file).ok()
    }

    /// In a container, /dev may lack nodes that the kernel added later.
    fn ensure_node(&self) -> Result<()> {
        if self.path.exists() {
            return Ok(());
        }
        let device = makedev(LOOP_MAJOR, u64::from(self.number));
        match mknod(&self.path, SFlag::S_IFBLK, Mode::from_bits_truncate(0o660), device) {
            Ok(()) | Err(nix::Error::EEXIST) => Ok(()),
            Err(e) => Err(e).context(|| format!("creating {}", self.path.display())),
        }
    }
}

/// Whether the error means that the device is being detached.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENXIO | libc::EBUSY))
}

/// Attaches with direct I/O if possible and useful, and returns the status. The sector size is explicit: the kernel's
/// default changes after the first clone of the backing file, and a filesystem made on 512-byte
/// sectors may not mount on 4096. With 512, the kernel disables direct I/O or refuses it.
fn configure(
    device: &File,
    backing: &File,
    lifetime: Lifetime,
    sector: SectorSize,
) -> io::Result<sys::loop_info64> {
    let mut name = [0; NAME_BYTES];
    getrandom::fill(&mut name).map_err(io::Error::other)?;
    // Printable characters.
    name.iter_mut().for_each(|byte| *byte = b'a' + *byte % 26);
    let configure_with = |flags| {
        let mut config = sys::loop_config(backing, sector.bytes(), flags);
        config.info.lo_file_name[..name.len()].copy_from_slice(&name);
        sys::loop_configure(device, &mut config)
    };
    let flags = match lifetime {
        Lifetime::Explicit => 0,
        Lifetime::LastUser { .. } => LO_FLAGS_AUTOCLEAR as u32,
    };
    if sector == SectorSize::Bytes512 || needs_page_cache(backing, lifetime)? {
        configure_with(flags)?;
        hit("loop.attached")?;
        return sys::loop_status(device);
    }
    match configure_with(flags | LO_FLAGS_DIRECT_IO as u32) {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => configure_with(flags)?,
        result => result?,
    }
    hit("loop.attached")?;
    let info = sys::loop_status(device)?;
    // The kernel may silently disable direct I/O.
    if info.lo_flags & LO_FLAGS_DIRECT_IO as u32 == 0 {
        warn!("this filesystem does not support direct I/O: data is cached twice");
    }
    Ok(info)
}

/// The same file for a loop device, opened so that writes do not change its times, if it is on the
/// XFS of `directory`: each flush of the device would otherwise write the filesystem's log for
/// them, with two flushes of the disk. Nothing reads the times of backing files.
pub fn timeless(file: File, directory: &Path) -> File {
    let opened =
        File::open(directory).and_then(|directory| sys::xfs_open_timeless(&file, &directory));
    match opened {
        Ok(timeless) => timeless,
        Err(error) => {
            debug!(%error, "flushes of this loop device write the times of its backing file");
            file
        }
    }
}

/// Whether a device must use the page cache of its backing file. tmpfs supports nothing else. On an
/// XFS with blocks larger than the device's sectors, the kernel does not write parts of shared
/// blocks directly, and a direct first write into a hole blocks others until the rest of its block
/// is zeroed. A pool image is never shared, and its catalog is verified against the disk, so it
/// uses direct I/O.
fn needs_page_cache(backing: &File, lifetime: Lifetime) -> io::Result<bool> {
    let filesystem = fstatfs(backing)?;
    Ok(match filesystem.filesystem_type() {
        TMPFS_MAGIC => true,
        sys::XFS_SUPER_MAGIC => {
            lifetime != Lifetime::LastUser { shares_blocks: false }
                && filesystem.block_size() as u64 > BLOCK_SIZE
        }
        _ => false,
    })
}

#[cfg(test)]
mod tests;
