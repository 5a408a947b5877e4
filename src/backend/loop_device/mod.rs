//! Loop devices: attaching a backing file, finding the devices of a file again after a restart, and
//! letting go of them. Devices are told by the inode behind them, never by a name, and only devices
//! of files that the caller names are ever touched. A device of such a file that this driver cannot have
//! made (it has an offset, a size limit, other sectors, or was attached read-only) is never used and never
//! detached.

mod named;

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use linux_raw_sys::loop_device::{LO_FLAGS_AUTOCLEAR, LO_FLAGS_DIRECT_IO, LO_FLAGS_READ_ONLY};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};

use tracing::warn;

use super::error::{Context, Error, Result};
use super::fail_point::{meet, reach};
use super::sys;
use super::units::BLOCK_SIZE;

const CONTROL: &str = "/dev/loop-control";
const LOOP_MAJOR: u64 = 7;

/// Held while a free device is taken: of many threads that ask at once all get the same number.
static TAKING: Mutex<()> = Mutex::new(());

/// How often another process may take a free device from under us.
const ATTACH_ATTEMPTS: usize = 64;

/// How long a device may take to let go of its file, where somebody waits for that.
const DETACH_DEADLINE: Duration = Duration::from_secs(10);

/// A loop device that had a backing file when it was looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoopDevice {
    number: u32,
    path: PathBuf,
}

/// What tells a backing file: device and inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Identity {
    device: (u64, u64),
    inode: u64,
}

impl Identity {
    fn of(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        let device = metadata.dev();
        let split = (nix::sys::stat::major(device), nix::sys::stat::minor(device));
        Ok(Self { device: split, inode: metadata.ino() })
    }

    /// From the kernel's own encoding of device numbers.
    fn of_status(info: &sys::loop_info64) -> Self {
        let device = info.lo_device;
        let minor = (device & 0xff) | ((device >> 12) & 0xf_ff00);
        Self { device: ((device & 0xf_ff00) >> 8, minor), inode: info.lo_inode }
    }
}

/// One attachment of a device, told from the next one: filesystems in memory have the same device and inode numbers
/// again as soon as a former one is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Incarnation {
    backing: Identity,
    /// As [`configure`] has made it up.
    name: Vec<u8>,
}

impl Incarnation {
    fn of_status(info: &sys::loop_info64) -> Self {
        Self { backing: Identity::of_status(info), name: info.lo_file_name.to_vec() }
    }
}

/// How a device shows its backing file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    /// In bytes, as the next two.
    offset: u64,
    /// 0: none.
    size_limit: u64,
    sector: u64,
    /// Attached so. Not whether the device refuses writes, which a publication decides (BLKROSET).
    read_only: bool,
}

impl Shape {
    /// That of every device that this driver has ever made.
    const OURS: Self = Self { offset: 0, size_limit: 0, sector: BLOCK_SIZE, read_only: false };
}

/// The devices of one backing file, lowest numbers first.
#[derive(Debug, Default)]
pub struct Devices {
    pub ours: Vec<LoopDevice>,
    foreign: Vec<(LoopDevice, Shape)>,
}

impl Devices {
    pub fn is_empty(&self) -> bool {
        self.ours.is_empty() && self.foreign.is_empty()
    }

    /// Refuses a file that has a writable device of somebody else's: each device has a page cache of its own, so two of
    /// them overwrite each other's blocks. A read-only one does no harm.
    pub fn refuse_foreign(&self) -> Result<()> {
        let Some((device, shape)) = self.foreign.iter().find(|(_, shape)| !shape.read_only) else {
            return Ok(());
        };
        let path = device.path.display();
        Err(Error::Precondition(format!(
            "{path} was attached to the same backing file by somebody else (offset {}, size limit {}, sectors of {} \
             bytes), and writes through two devices destroy data; detach it (losetup -d {path}) and try again",
            shape.offset, shape.size_limit, shape.sector
        )))
    }
}

/// The devices of all files, at one moment.
#[derive(Debug, Default)]
pub struct AttachedFiles(HashMap<Identity, Vec<(LoopDevice, sys::loop_info64)>>);

impl AttachedFiles {
    /// Opens every device that has a file, once.
    pub fn read() -> Result<Self> {
        let mut files: HashMap<_, Vec<_>> = HashMap::new();
        for device in LoopDevice::all()?.into_iter().filter(LoopDevice::has_file) {
            let Some(info) = device.status() else { continue };
            files.entry(Identity::of_status(&info)).or_default().push((device, info));
        }
        Ok(Self(files))
    }

    pub fn of_file(&self, backing: &File) -> Result<Devices> {
        let wanted = Identity::of(backing).context(|| "reading a backing file".to_owned())?;
        let mut devices = Devices::default();
        for (device, info) in self.0.get(&wanted).into_iter().flatten() {
            match device.shape(info) {
                None => {}
                Some(Shape::OURS) => devices.ours.push(device.clone()),
                Some(shape) => devices.foreign.push((device.clone(), shape)),
            }
        }
        Ok(devices)
    }
}

/// Who lets go of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lifetime {
    /// [`LoopDevice::release`]: the device outlives this process, and with it a pod's I/O.
    Explicit,
    /// The kernel, as soon as nobody has the device open or mounted.
    LastUser,
}

impl LoopDevice {
    /// Attaches `backing` (open for reading and writing) with 4096-byte sectors and, where its
    /// filesystem allows, direct I/O. The returned handle keeps the device open. `Precondition` while somebody else has the
    /// file attached for writing.
    pub fn attach(backing: &File, lifetime: Lifetime) -> Result<(Self, File)> {
        Self::of_file(backing)?.refuse_foreign()?;
        Self::take(backing, lifetime)
    }

    fn take(backing: &File, lifetime: Lifetime) -> Result<(Self, File)> {
        let control = File::options().read(true).write(true).open(CONTROL).context(|| {
            format!("opening {CONTROL} (loop devices need root and the loop module)")
        })?;
        let _taking = TAKING.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..ATTACH_ATTEMPTS {
            let number = sys::loop_free_number(&control)
                .context(|| "asking for a free loop device".to_owned())?;
            let device = Self::numbered(number);
            device.ensure_node()?;
            let file = device.open(true)?;
            match configure(&file, backing, lifetime) {
                Ok(()) => {
                    // A former user may have left it read-only: the kernel keeps that.
                    device.set_read_only(false)?;
                    return Ok((device, file));
                }
                // Somebody else was faster.
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) => continue,
                Err(e) => return Err(Error::io(format!("attaching {}", device.path.display()), e)),
            }
        }
        Err(Error::Busy("no free loop device: others take them as fast as they appear".to_owned()))
    }

    /// Our devices of `backing`, lowest number first.
    pub fn find(backing: &File) -> Result<Vec<Self>> {
        Self::of_file(backing).map(|devices| devices.ours)
    }

    /// All devices of `backing`.
    pub fn of_file(backing: &File) -> Result<Devices> {
        AttachedFiles::read()?.of_file(backing)
    }

    /// The device of `backing`: the one it has, or a new one. `Precondition` while somebody else has the file attached for
    /// writing.
    pub fn ensure(backing: &File) -> Result<Self> {
        let devices = Self::of_file(backing)?;
        devices.refuse_foreign()?;
        match devices.ours.into_iter().next() {
            Some(device) => device.keep().map(|()| device),
            None => Self::take(backing, Lifetime::Explicit).map(|(device, _)| device),
        }
    }

    /// A detach that met a busy device leaves it to go with its last user: not while it is wanted.
    fn keep(&self) -> Result<()> {
        let doing = || format!("keeping {}", self.path.display());
        let file = self.open(true)?;
        let mut info = sys::loop_status(&file).context(doing)?;
        if info.lo_flags & LO_FLAGS_AUTOCLEAR as u32 == 0 {
            return Ok(());
        }
        info.lo_flags &= !(LO_FLAGS_AUTOCLEAR as u32);
        sys::loop_set_status(&file, &mut info).context(doing)?;
        reach("loop.kept")
    }

    /// The device whose backing file is deleted and had this name, which must be unique for ever.
    pub fn find_deleted(name: &str) -> Result<Option<Self>> {
        let ending = format!("/{name} (deleted)");
        for device in Self::all()? {
            let path = format!("/sys/block/loop{}/loop/backing_file", device.number);
            let named = fs::read_to_string(path);
            if named.is_ok_and(|file| file.trim_end_matches('\n').ends_with(&ending))
                && device.status().and_then(|info| device.shape(&info)) == Some(Shape::OURS)
            {
                return Ok(Some(device));
            }
        }
        Ok(None)
    }

    /// The devices that there are, with a backing file or without.
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
        Self { number, path: PathBuf::from(format!("/dev/loop{number}")) }
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

    /// Whether a filesystem of it is mounted anywhere, in whatever mount namespace, or somebody else has it to himself.
    pub fn is_held(&self) -> Result<bool> {
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
        // Of 512 bytes, whatever the device has (Documentation/ABI/stable/sysfs-block).
        Ok(sectors * 512)
    }

    /// Takes over the size that the backing file has grown to.
    pub fn grow(&self) -> Result<()> {
        sys::loop_set_capacity(&self.open(true)?)
            .context(|| format!("growing {}", self.path.display()))?;
        reach("loop.grown")
    }

    /// Writes what the device's own page cache holds to the backing file.
    pub fn flush(&self) -> Result<()> {
        let file = self.open(true).or_else(|_| self.open(false))?;
        file.sync_all().context(|| format!("flushing {}", self.path.display()))
    }

    pub fn is_read_only(&self) -> Result<bool> {
        sys::block_is_read_only(&self.open(false)?)
            .context(|| format!("reading the mode of {}", self.path.display()))
    }

    /// Makes the device refuse writes, or accept them again.
    pub fn set_read_only(&self, read_only: bool) -> Result<()> {
        sys::set_block_read_only(&self.open(false)?, read_only)
            .context(|| format!("setting the mode of {}", self.path.display()))?;
        reach("loop.mode_set")
    }

    /// A number that is the same twice only if nothing was written or discarded in between, and
    /// nothing is under way; `None` while something is.
    pub fn write_mark(&self) -> Result<Option<[u64; 2]>> {
        let read = |name: &str| {
            let path = format!("/sys/block/loop{}/{name}", self.number);
            fs::read_to_string(&path).context(|| format!("reading {path}"))
        };
        if read("queue/iostats")?.trim() == "0" {
            return Err(Error::Precondition(format!(
                "{} does not count its writes (queue/iostats is 0), which a copy of a raw volume \
                 rests on; switch it on",
                self.path.display()
            )));
        }
        // In this order: what was under way at the first look has ended and is counted at the second.
        let busy = read("inflight")?;
        let text = read("stat")?;
        let field = |text: &str, at: usize| {
            text.split_whitespace().nth(at).and_then(|field| field.parse::<u64>().ok())
        };
        // Documentation/block/stat.rst: 4 is writes done, 11 is discards done; inflight: 1 is writes.
        let (Some(writes), Some(discards), Some(under_way)) =
            (field(&text, 4), field(&text, 11), field(&busy, 1))
        else {
            return Err(Error::Failed(format!(
                "the counters of {} are not readable",
                self.path.display()
            )));
        };
        Ok((under_way == 0).then_some([writes, discards]))
    }

    /// Lets go of the backing file that the device has now, and waits until it is done.
    pub fn release(&self) -> Result<()> {
        self.release_within(DETACH_DEADLINE)
    }

    /// Like [`Self::release`]; `Busy` when it takes longer than this.
    pub fn release_within(&self, patience: Duration) -> Result<()> {
        let Some(attached) = self.status().map(|info| Incarnation::of_status(&info)) else {
            return Ok(());
        };
        self.release_while(patience, |file| match sys::loop_status(file) {
            Ok(info) => Ok(Incarnation::of_status(&info) == attached),
            Err(e) if is_gone(&e) => Ok(false),
            Err(e) => Err(Error::io(self.detaching(), e)),
        })
    }

    /// Detaches the device for as long as `is_attached` says that it has the file that is meant, and waits until it has
    /// not. `Busy` when that takes longer than `patience`.
    fn release_while(
        &self,
        patience: Duration,
        is_attached: impl Fn(&File) -> Result<bool>,
    ) -> Result<()> {
        let deadline = Instant::now() + patience;
        while self.detach(&is_attached)? {
            if Instant::now() > deadline {
                return Err(Error::Busy(format!(
                    "{} is still in use; unmount it or close what has it open",
                    self.path.display()
                )));
            }
            thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Detaches our devices of `backing`, which is about to be removed.
    pub fn detach_all(backing: &File) -> Result<()> {
        let devices = Self::of_file(backing)?;
        for (device, _) in &devices.foreign {
            let path = device.path.display();
            warn!(%path, "left attached by somebody else; the room of the file is free when it is detached");
        }
        devices.ours.iter().try_for_each(Self::release)
    }

    /// Asks the kernel to end this attachment; false once it is another, or none. The file is
    /// checked and let go of through one descriptor: as long as that is open the device cannot
    /// pass to somebody else, whose file would be let go of in its stead.
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
        // The next user of the device would find it read-only.
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

    /// sysfs shows the directory `loop` only while the device has a backing file.
    fn has_file(&self) -> bool {
        Path::new(&format!("/sys/block/loop{}/loop", self.number)).exists()
    }

    /// `None` when it was let go of meanwhile.
    fn shape(&self, info: &sys::loop_info64) -> Option<Shape> {
        let path = format!("/sys/block/loop{}/queue/logical_block_size", self.number);
        Some(Shape {
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

    /// In a container /dev may lack the nodes that the kernel adds later.
    fn ensure_node(&self) -> Result<()> {
        if self.path.exists() {
            return Ok(());
        }
        let device = makedev(LOOP_MAJOR, u64::from(self.number));
        match mknod(&self.path, SFlag::S_IFBLK, Mode::from_bits_truncate(0o660), device) {
            Ok(()) | Err(nix::Error::EEXIST) => Ok(()),
            Err(e) => Err(e).context(|| format!("making {}", self.path.display())),
        }
    }
}

/// Whether a device cannot be used at this moment since it is being detached.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENXIO | libc::EBUSY))
}

/// Direct I/O where possible and of use. The sector size is always given: the kernel's own choice changes after
/// the first clone of the backing file, and a filesystem made on 512 would not mount on 4096.
fn configure(device: &File, backing: &File, lifetime: Lifetime) -> io::Result<()> {
    let mut name = [0; 32];
    getrandom::fill(&mut name).map_err(io::Error::other)?;
    // Text, for whoever prints it.
    name.iter_mut().for_each(|byte| *byte = b'a' + *byte % 26);
    let attempt = |flags| {
        let mut config = sys::loop_config(backing, BLOCK_SIZE as u32, flags);
        config.info.lo_file_name[..name.len()].copy_from_slice(&name);
        sys::loop_configure(device, &mut config)
    };
    let flags = match lifetime {
        Lifetime::Explicit => 0,
        Lifetime::LastUser => LO_FLAGS_AUTOCLEAR as u32,
    };
    if is_better_cached(backing, lifetime)? {
        attempt(flags)?;
        return meet("loop.attached");
    }
    match attempt(flags | LO_FLAGS_DIRECT_IO as u32) {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => attempt(flags)?,
        result => result?,
    }
    meet("loop.attached")?;
    // The kernel may turn it off without a word.
    if sys::loop_status(device)?.lo_flags & LO_FLAGS_DIRECT_IO as u32 == 0 {
        warn!("no direct I/O on this filesystem: data is cached twice");
    }
    Ok(())
}

/// Whether the page cache is to stand between a device and its backing file. What is in memory has no other way. On an XFS
/// whose blocks are larger than the device's sectors the kernel does not write a part of a block directly once a snapshot
/// has shared the file, and a direct first write into a hole holds up all others until the rest of its block is zeroed.
/// The image of a pool is never shared, and its catalog is checked by what the disk holds: it stays direct.
fn is_better_cached(backing: &File, lifetime: Lifetime) -> io::Result<bool> {
    let filesystem = fstatfs(backing)?;
    Ok(match filesystem.filesystem_type() {
        TMPFS_MAGIC => true,
        sys::XFS_SUPER_MAGIC => {
            lifetime == Lifetime::Explicit && filesystem.block_size() as u64 > BLOCK_SIZE
        }
        _ => false,
    })
}
