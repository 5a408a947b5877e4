//! The test harness: pools of each kind in a private directory, volumes attached as raw devices,
//! and a cleanup that also runs after a panic and removes only what the test has created.
//! `NO_TEST_CLEAN_UP=1` keeps everything for inspection.

pub mod abuse;
pub mod clock;
pub mod cluster;
pub mod container;
pub mod delta;
pub mod driver;
pub mod examples;
pub mod exerciser;
pub mod fsck;
pub mod full;
pub mod http;
pub mod inline;
pub mod kernel;
pub mod load;
pub mod mutants;
pub mod ops;
pub mod points;
pub mod process;
pub mod random;
pub mod requests;
pub mod runtime;

use std::any::Any;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use csi_loopback::backend::{
    Access, AccessMode, Backend, BlockMap, Capability, Config, CreateVolume, FsType, ModifyVolume,
    PoolChoice, PoolKind, Publication, Snapshot, Style, Volume, VolumeRequest, check,
};
use nix::fcntl::{FallocateFlags, fallocate};
use tempfile::TempDir;

/// The repository under test.
pub const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;
pub const BLOCK: u64 = 4096;

pub const ALL_KINDS: [PoolKind; 3] = [PoolKind::Reflink, PoolKind::Image, PoolKind::Copy];

/// Reports that the machine does not meet a requirement of the running test. hack/test.sh counts
/// these lines.
pub fn skip(why: &str) {
    println!("SKIPPED: {}: {why}", test_name());
}

/// The path that a function of hack/lib.sh prints, or the reason why there is none.
pub fn tool(function: &str) -> Result<PathBuf, String> {
    let script = format!("source {REPOSITORY}/hack/lib.sh && {function}");
    let output = Command::new("bash").args(["-c", &script]).output().unwrap();
    let last = |bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes).into_owned();
        text.lines().last().unwrap_or_default().to_owned()
    };
    match output.status.success() {
        true => Ok(last(&output.stdout).into()),
        false => Err(last(&output.stderr)),
    }
}

/// The message of a caught panic.
pub fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref().cloned())
        .unwrap_or_else(|| "a panic without text".to_owned())
}

/// All files below a directory, in order.
pub fn files_below(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(files_below(&path)) } else { found.push(path) }
    }
    found.sort();
    found
}

/// The path of a program of hack/tools. Reports a skip if the machine cannot build it.
pub fn go_tool(name: &str) -> Option<PathBuf> {
    tool(&format!("go_tool {name}")).map_err(|why| skip(&format!("needs {name}: {why}"))).ok()
}

/// Reports a figure of the running test. hack/test.sh prints these lines.
pub fn report(text: &str) {
    println!("report: {}: {text}", test_name());
}

/// The name of the running test with its modules, from the name of its thread.
pub fn test_name() -> String {
    thread::current().name().unwrap_or("a thread of a test").to_owned()
}

/// Whether the machine can run a test that needs root; otherwise reports a skip. No other such test
/// of this process runs until this one ends.
pub fn have_root() -> bool {
    lock_for_thread();
    let is_root = nix::unistd::geteuid().is_root();
    if !is_root {
        skip("needs root, for loop devices and mounts");
    }
    is_root
}

/// Serializes tests that need root: they share the machine's loop devices and mounts, and some a
/// cluster. The thread of the test holds the lock until it ends. Threads that a test starts have no
/// name and do not take the lock.
fn lock_for_thread() {
    static LOCK: Mutex<()> = Mutex::new(());
    thread_local! {
        static HELD: RefCell<Option<MutexGuard<'static, ()>>> = const { RefCell::new(None) };
    }
    HELD.with_borrow_mut(|held| {
        if held.is_none() && thread::current().name().is_some() {
            *held = Some(LOCK.lock().unwrap_or_else(PoisonError::into_inner));
        }
    });
}

/// Turns change tracking on or off.
pub fn tracking(on: bool) -> ModifyVolume {
    ModifyVolume { change_tracking: Some(on), change_precision: None }
}

/// Runs a test against a fresh pool of each kind.
pub fn for_each_pool(run: impl Fn(&mut Pool)) {
    if !have_root() {
        return;
    }
    for kind in ALL_KINDS {
        println!("with a pool of kind {kind}");
        run(&mut Pool::new(kind));
    }
}

/// Runs a test against a fresh pool of one kind.
pub fn with_pool(kind: PoolKind, run: impl FnOnce(&mut Pool)) {
    if have_root() {
        run(&mut Pool::new(kind));
    }
}

/// A fresh pool with this configuration. Reports a skip if the machine cannot run it.
pub fn pool_with(kind: PoolKind, configure: impl FnOnce(&mut Config)) -> Option<Pool> {
    have_root().then(|| Pool::with(kind, configure))
}

/// A private directory, removed when it is dropped.
pub fn directory() -> TempDir {
    TempDir::with_prefix("csi-loopback-").unwrap()
}

/// A number from the environment: the size of a test.
pub fn setting(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is not a number: {text:?}")))
}

/// The block size of pool filesystems from POOL_BLOCK_SIZE, in bytes: 4096 or 65536.
pub fn pool_block_size() -> Option<u64> {
    setting("POOL_BLOCK_SIZE")
}

/// The block size of the filesystem of a pool of this kind, in bytes.
pub fn block_size_of(kind: PoolKind) -> u64 {
    match kind {
        PoolKind::Copy => BLOCK,
        PoolKind::Reflink | PoolKind::Image => pool_block_size().unwrap_or(BLOCK),
    }
}

/// The 4 KiB blocks that are allocated after writes to these 4 KiB blocks: whole blocks of the
/// pool's filesystem.
pub fn whole_blocks(kind: PoolKind, written: impl IntoIterator<Item = u64>) -> Vec<u64> {
    let unit = block_size_of(kind) / BLOCK;
    let units: BTreeSet<u64> = written.into_iter().map(|block| block / unit).collect();
    units.into_iter().flat_map(|number| number * unit..(number + 1) * unit).collect()
}

/// Whether the kernel mounts filesystems with blocks larger than a memory page; otherwise reports a
/// skip.
pub fn have_large_blocks() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map_while(|number| number.parse::<u32>().ok());
    let have = (numbers.next(), numbers.next()) >= (Some(6), Some(12));
    if !have {
        skip("needs Linux 6.12 or later, for blocks of 64 KiB");
    }
    have
}

/// A filesystem in a sparse image file, mounted in a directory next to it.
pub struct ImageFs(PathBuf);

impl ImageFs {
    /// Mounts an XFS that shares blocks.
    pub fn xfs(directory: &Path, bytes: u64) -> Self {
        let block_size = format!("size={}", pool_block_size().unwrap_or(BLOCK));
        let options = ["-q", "-m", "reflink=1,rmapbt=0", "-b", &block_size];
        Self::mount(directory, "xfs", bytes, &options)
    }

    pub fn ext4(directory: &Path, bytes: u64) -> Self {
        Self::mount(directory, "ext4", bytes, &["-q", "-m", "0"])
    }

    pub fn btrfs(directory: &Path, bytes: u64) -> Self {
        Self::mount(directory, "btrfs", bytes, &["-q", "-f"])
    }

    fn mount(directory: &Path, fs_type: &str, bytes: u64, options: &[&str]) -> Self {
        let made = Self(directory.join(fs_type));
        File::create(made.image()).unwrap().set_len(bytes).unwrap();
        fs::create_dir(&made.0).unwrap();
        run(&format!("mkfs.{fs_type}"), &[options, &[path(&made.image())]].concat());
        made.attach();
        made
    }

    fn image(&self) -> PathBuf {
        self.0.with_extension("img")
    }

    fn attach(&self) {
        run("mount", &["-o", "loop", path(&self.image()), path(&self.0)]);
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Unmounts and mounts it, as an administrator does after an error.
    fn remount(&self) {
        kernel::unmount(&self.0);
        self.attach();
    }
}

impl Drop for ImageFs {
    fn drop(&mut self) {
        if !keep() {
            // The kernel detaches the loop device at the unmount.
            kernel::unmount(&self.0);
        }
    }
}

pub fn keep() -> bool {
    std::env::var_os("NO_TEST_CLEAN_UP").is_some()
}

/// A pool with an open backend.
pub struct Pool {
    backend: Option<Backend>,
    config: Config,
    attached: Vec<Attached>,
    // Dropped in this order: the filesystem before its directory.
    below: Option<ImageFs>,
    directory: TempDir,
}

/// A staged and published volume.
#[derive(Debug, Clone)]
pub struct Attached {
    pub volume_id: String,
    pub staging: PathBuf,
    /// The device node, or the directory.
    pub target: PathBuf,
}

impl Pool {
    pub fn new(kind: PoolKind) -> Self {
        Self::with(kind, |_| {})
    }

    pub fn with(kind: PoolKind, configure: impl FnOnce(&mut Config)) -> Self {
        let directory = directory();
        let below = (kind == PoolKind::Reflink).then(|| ImageFs::xfs(directory.path(), 16 * GIB));
        Self::on(directory, below, kind, configure)
    }

    /// On a filesystem of this size: an XFS for a reflink pool, else an ext4.
    pub fn on_small(kind: PoolKind, bytes: u64, configure: impl FnOnce(&mut Config)) -> Self {
        let directory = directory();
        let make = if kind == PoolKind::Reflink { ImageFs::xfs } else { ImageFs::ext4 };
        let below = make(directory.path(), bytes);
        Self::on(directory, Some(below), kind, configure)
    }

    /// On the filesystem `below`, which is in the directory, or else in the directory.
    pub fn on(
        directory: TempDir,
        below: Option<ImageFs>,
        kind: PoolKind,
        configure: impl FnOnce(&mut Config),
    ) -> Self {
        let place = below.as_ref().map_or(directory.path(), ImageFs::path);
        let mut config = Config {
            data_dir: place.join("data"),
            pool: PoolChoice::Kind(kind),
            pool_size: Some(16 * GIB),
            // Larger than the free space of test machines.
            pool_sparse: true,
            pool_block_size: pool_block_size(),
            retention: std::time::Duration::from_secs(3600),
            overcommit: 1e6,
            inline: Default::default(),
            runtime: None,
            freeze_guard: Default::default(),
        };
        configure(&mut config);
        let backend = Backend::open(config.clone()).unwrap();
        Self { backend: Some(backend), config, attached: Vec::new(), below, directory }
    }

    pub fn backend(&self) -> &Backend {
        self.backend.as_ref().unwrap()
    }

    pub fn kind(&self) -> PoolKind {
        self.backend().pool_kind()
    }

    pub fn data_dir(&self) -> &Path {
        &self.config.data_dir
    }

    /// A private directory for the test, outside of the pool.
    pub fn scratch(&self) -> &Path {
        self.directory.path()
    }

    pub fn is_open(&self) -> bool {
        self.backend.is_some()
    }

    /// Closes the backend. Volumes stay attached.
    pub fn stop(&mut self) {
        self.backend = None;
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Changes the configuration for the next start.
    pub fn configure(&mut self, configure: impl FnOnce(&mut Config)) {
        configure(&mut self.config);
    }

    pub fn start(&mut self) {
        self.try_start().unwrap();
    }

    pub fn try_start(&mut self) -> csi_loopback::backend::Result<()> {
        self.backend = Some(Backend::open(self.config.clone())?);
        Ok(())
    }

    /// Remounts the filesystem that contains the data directory, if the pool has one of its own. The
    /// backend must be closed.
    pub fn remount(&self) {
        assert!(!self.is_open());
        self.below.iter().for_each(ImageFs::remount);
    }

    /// Closes the backend. The pool check must find nothing.
    #[track_caller]
    pub fn stop_sound(&mut self) {
        self.stop();
        assert_eq!(check::check(self.data_dir()).unwrap().findings, []);
    }

    /// Restarts the backend. Meanwhile the pool check must find nothing.
    #[track_caller]
    pub fn restart_sound(&mut self) {
        self.stop_sound();
        self.start();
    }

    /// Closes and opens the backend, like a restart of the driver.
    pub fn restart(&mut self) {
        self.stop();
        self.start();
    }

    pub fn volume(&self, name: &str, bytes: u64) -> Volume {
        self.create(name, VolumeRequest { required_bytes: bytes, ..request() })
    }

    pub fn create(&self, name: &str, request: VolumeRequest) -> Volume {
        self.backend().create_volume(&CreateVolume { name: name.to_owned(), request }).unwrap()
    }

    pub fn snapshot(&self, name: &str, volume: &Volume) -> Snapshot {
        self.backend().create_snapshot(name, &volume.id).unwrap()
    }

    /// Stages and publishes a volume as a raw device.
    pub fn attach(&mut self, volume_id: &str) -> Attached {
        self.attach_as(volume_id, &raw())
    }

    /// Stages and publishes a volume.
    pub fn attach_as(&mut self, volume_id: &str, capability: &Capability) -> Attached {
        let attached = Attached {
            volume_id: volume_id.to_owned(),
            staging: self.scratch().join(format!("stage-{volume_id}")),
            target: self.scratch().join(format!("device-{volume_id}")),
        };
        self.attached.push(attached.clone());
        let backend = self.backend();
        backend.stage(volume_id, &attached.staging, capability).unwrap();
        backend
            .publish(
                volume_id,
                &attached.staging,
                &attached.target,
                &Publication::on_host(capability.clone(), false),
            )
            .unwrap();
        attached
    }

    /// Undoes [`Pool::attach`].
    pub fn detach(&mut self, attached: &Attached) {
        let backend = self.backend();
        backend.unpublish(&attached.volume_id, &attached.target).unwrap();
        backend.unstage(&attached.volume_id, &attached.staging).unwrap();
        self.attached.retain(|other| other.volume_id != attached.volume_id);
    }

    /// The content of a snapshot, read through a volume created from it.
    pub fn read_snapshot(&mut self, snapshot: &Snapshot) -> Vec<u8> {
        let source = csi_loopback::backend::Source::Snapshot(snapshot.id.clone());
        let name = format!("read-{}", snapshot.id);
        let volume = self.create(&name, VolumeRequest { source: Some(source), ..request() });
        let attached = self.attach(&volume.id);
        let content = read_all(&attached.target);
        self.detach(&attached);
        self.backend().delete_volume(&volume.id).unwrap();
        content
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if keep() {
            println!("kept: {}", self.directory.path().display());
            std::mem::forget(self.backend.take());
            self.directory.disable_cleanup(true);
            return;
        }
        if self.backend.is_none() {
            self.backend = Backend::open(self.config.clone()).ok();
        }
        for Attached { volume_id, staging, target } in self.attached.drain(..) {
            if let Some(backend) = &self.backend {
                let _ = backend.unpublish(&volume_id, &target);
                let _ = backend.unstage(&volume_id, &staging);
            }
            // If the backend could not detach it.
            if !kernel::loops_named(&volume_id).is_empty() {
                [&target, &staging].into_iter().for_each(|place| kernel::unmount(place));
                kernel::request_detach_named(&volume_id);
            }
        }
        self.backend = None;
        // The directory can only be removed without immutable files.
        let _ = Command::new("chattr").args(["-R", "-i"]).arg(&self.config.data_dir).output();
    }
}

/// Sets the flag when dropped, also after a panic, to end threads that wait for it.
pub struct SetOnDrop<'a>(pub &'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A request for a raw block volume with change tracking.
pub fn request() -> VolumeRequest {
    VolumeRequest { change_tracking: true, ..VolumeRequest::default() }
}

pub fn raw() -> Capability {
    Capability { access: Access::Block, mode: AccessMode::SingleNodeWriter }
}

pub fn mounted(fs_type: FsType) -> Capability {
    let access = Access::Mount { fs_type: Some(fs_type), flags: Vec::new(), group: None };
    Capability { access, mode: AccessMode::SingleNodeMultiWriter }
}

/// The blocks of a block map, ascending.
pub fn blocks(map: BlockMap) -> Vec<u64> {
    let extents = map.extents(Style::Variable, 0).unwrap();
    extents
        .flat_map(|extent| {
            let extent = extent.unwrap();
            assert_eq!((extent.offset % BLOCK, extent.length % BLOCK), (0, 0), "{extent:?}");
            extent.offset / BLOCK..extent.end() / BLOCK
        })
        .collect()
}

/// Writes to a device with direct I/O. Offset and length are multiples of the block size.
pub fn write_direct(device: &Path, offset: u64, data: &[u8]) {
    let file = File::options().write(true).custom_flags(libc::O_DIRECT).open(device).unwrap();
    // Direct I/O requires aligned memory.
    let mut buffer = vec![0; data.len() + BLOCK as usize];
    let start = buffer.as_ptr().align_offset(BLOCK as usize);
    buffer[start..start + data.len()].copy_from_slice(data);
    file.write_all_at(&buffer[start..start + data.len()], offset).unwrap();
}

/// Writes to a device through the page cache, at any offset.
pub fn write_buffered(device: &Path, offset: u64, data: &[u8]) {
    let mut file = File::options().write(true).open(device).unwrap();
    file.seek(SeekFrom::Start(offset)).unwrap();
    file.write_all(data).unwrap();
    file.sync_data().unwrap();
}

/// Discards a range of a device.
pub fn discard(device: &Path, offset: u64, length: u64) {
    let (offset, length) = (offset.to_string(), length.to_string());
    run("blkdiscard", &["-f", "-o", &offset, "-l", &length, path(device)]);
}

/// Zeroes a range of a device. `unmap` also deallocates its blocks.
pub fn zero(device: &Path, offset: u64, length: u64, unmap: bool) {
    let file = File::options().write(true).open(device).unwrap();
    let mode = match unmap {
        true => FallocateFlags::FALLOC_FL_PUNCH_HOLE,
        false => FallocateFlags::FALLOC_FL_ZERO_RANGE,
    };
    let mode = mode | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(&file, mode, offset as i64, length as i64).unwrap();
}

pub fn read_all(device: &Path) -> Vec<u8> {
    let mut content = Vec::new();
    File::open(device).unwrap().read_to_end(&mut content).unwrap();
    content
}

/// Runs a tool and panics if it fails.
pub fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output();
    let output = output.unwrap_or_else(|e: io::Error| panic!("{program}: {e}"));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {stderr}");
}

pub fn owned(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

pub fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Pseudorandom bytes, different for each seed.
pub fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        // xorshift64*
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        bytes.extend(state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}
