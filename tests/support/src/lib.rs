//! What the tests stand on: pools of each kind in a private directory, volumes attached as raw devices,
//! and a clean-up that runs whatever happens, also when a test panics, and that touches only what
//! the test has made. `NO_TEST_CLEAN_UP=1` leaves everything in place for a look.

pub mod cluster;
pub mod container;
pub mod delta;
pub mod driver;
pub mod exerciser;
pub mod fsck;
pub mod full;
pub mod http;
pub mod inline;
pub mod kernel;
pub mod load;
pub mod ops;
pub mod random;
pub mod requests;
pub mod runtime;

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
    PoolChoice, PoolKind, Publication, Snapshot, Style, Volume, VolumeRequest,
};
use nix::fcntl::{FallocateFlags, fallocate};
use tempfile::TempDir;

/// The tree under test.
pub const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;
pub const BLOCK: u64 = 4096;

pub const ALL_KINDS: [PoolKind; 3] = [PoolKind::Reflink, PoolKind::Image, PoolKind::Copy];

/// Why the machine cannot run a test that needs root, if it cannot.
pub fn why_no_root() -> Option<&'static str> {
    let root = nix::unistd::geteuid().is_root();
    (!root).then_some("needs root, for loop devices and mounts")
}

/// Reports that the machine lacks what the running test needs. hack/test.sh counts these lines.
pub fn skip(why: &str) {
    println!("SKIPPED: {}: {why}", test_name());
}

/// Reports a figure of the running test, which hack/test.sh shows.
pub fn report(text: &str) {
    println!("report: {}: {text}", test_name());
}

/// The name of the running test with its modules: libtest gives it to the thread of the test.
pub fn test_name() -> String {
    thread::current().name().unwrap_or("a thread of a test").to_owned()
}

/// Whether the machine can run a test that needs root, which is reported if not. From here on no other such test of
/// this process runs until this one has ended.
pub fn have_root() -> bool {
    take_turn();
    let lacking = why_no_root();
    if let Some(why) = lacking {
        skip(why);
    }
    lacking.is_none()
}

/// Tests that need root share the machine's loop devices and mounts, and some of them a cluster. The turn ends with
/// the thread of the test; threads that a test starts have no name, and take none.
fn take_turn() {
    static TURN: Mutex<()> = Mutex::new(());
    thread_local! {
        static HELD: RefCell<Option<MutexGuard<'static, ()>>> = const { RefCell::new(None) };
    }
    HELD.with_borrow_mut(|held| {
        if held.is_none() && thread::current().name().is_some() {
            *held = Some(TURN.lock().unwrap_or_else(PoisonError::into_inner));
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

/// Bytes in a block of the filesystems that pools are made on, if the variable says so: 4096 or 65536.
pub fn pool_block_size() -> Option<u64> {
    let asked = std::env::var("POOL_BLOCK_SIZE").ok();
    asked.map(|bytes| bytes.parse().expect("POOL_BLOCK_SIZE is a number"))
}

/// Bytes in a block of the filesystem that a pool of this kind is on.
pub fn block_size_of(kind: PoolKind) -> u64 {
    match kind {
        PoolKind::Copy => BLOCK,
        PoolKind::Image if kernel_mounts_large_blocks() => pool_block_size().unwrap_or(64 << 10),
        _ => pool_block_size().unwrap_or(BLOCK),
    }
}

/// What is allocated when these blocks of 4 KiB are written: whole blocks of the filesystem that the pool is on.
pub fn whole_blocks(kind: PoolKind, written: impl IntoIterator<Item = u64>) -> Vec<u64> {
    let unit = block_size_of(kind) / BLOCK;
    let units: BTreeSet<u64> = written.into_iter().map(|block| block / unit).collect();
    units.into_iter().flat_map(|number| number * unit..(number + 1) * unit).collect()
}

pub fn kernel_mounts_large_blocks() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map_while(|number| number.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(12))
}

/// Whether the kernel mounts filesystems whose blocks are larger than a page of memory.
pub fn have_large_blocks() -> bool {
    let have = kernel_mounts_large_blocks();
    if !have {
        skip("needs Linux 6.12, for blocks of 64 KiB");
    }
    have
}

/// An XFS with reflink in an image, mounted in a directory.
pub struct Xfs {
    mounted_at: PathBuf,
}

impl Xfs {
    /// The image is sparse, `size` bytes.
    pub fn mount(directory: &Path, size: u64) -> Self {
        let image = directory.join("xfs.img");
        File::create(&image).unwrap().set_len(size).unwrap();
        let block_size = format!("size={}", pool_block_size().unwrap_or(BLOCK));
        run("mkfs.xfs", &["-q", "-m", "reflink=1,rmapbt=0", "-b", &block_size, path(&image)]);
        let mounted_at = directory.join("xfs");
        fs::create_dir(&mounted_at).unwrap();
        run("mount", &["-o", "loop", path(&image), path(&mounted_at)]);
        Self { mounted_at }
    }

    pub fn path(&self) -> &Path {
        &self.mounted_at
    }

    /// Unmounts it and mounts it again, as an administrator does after an error.
    fn remount(&self) {
        kernel::unmount(&self.mounted_at);
        let image = self.mounted_at.with_file_name("xfs.img");
        run("mount", &["-o", "loop", path(&image), path(&self.mounted_at)]);
    }
}

impl Drop for Xfs {
    fn drop(&mut self) {
        if !keep() {
            // The loop device goes with the mount.
            kernel::unmount(&self.mounted_at);
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
    xfs: Option<Xfs>,
    directory: TempDir,
}

/// A volume that is staged and published.
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
        let directory = TempDir::with_prefix("csi-loopback-").unwrap();
        let xfs = (kind == PoolKind::Reflink).then(|| Xfs::mount(directory.path(), 16 * GIB));
        let place = xfs.as_ref().map_or(directory.path(), Xfs::path);
        let mut config = Config {
            data_dir: place.join("data"),
            pool: PoolChoice::Kind(kind),
            pool_size: Some(16 * GIB),
            // No machine of the tests has room for all of that.
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
        Self { backend: Some(backend), config, attached: Vec::new(), xfs, directory }
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

    /// A private directory beside the pool.
    pub fn scratch(&self) -> &Path {
        self.directory.path()
    }

    pub fn is_open(&self) -> bool {
        self.backend.is_some()
    }

    /// Closes the backend; what is attached stays so.
    pub fn stop(&mut self) {
        self.backend = None;
    }

    /// What the backend is opened with the next time.
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

    /// Mounts the filesystem of a reflink pool again. The backend is closed.
    pub fn remount(&self) {
        assert!(!self.is_open());
        self.xfs.iter().for_each(Xfs::remount);
    }

    /// Closes the backend and opens it again, as a driver that is restarted.
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

    /// The content of a snapshot, read through a volume that is made from it.
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
            println!("left in place: {}", self.directory.path().display());
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
            // What no backend can undo.
            for device in kernel::loops_named(&volume_id) {
                [&target, &staging].into_iter().for_each(|place| kernel::unmount(place));
                let _ = Command::new("losetup").args(["-d", &device]).output();
            }
        }
        self.backend = None;
        // Immutable files keep the directory from going.
        let _ = Command::new("chattr").args(["-R", "-i"]).arg(&self.config.data_dir).output();
    }
}

/// Ends what waits for the flag, also when something panics before.
pub struct SetOnDrop<'a>(pub &'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A request for a raw volume with tracking.
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

/// The blocks that an answer reports, ascending.
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

/// Writes to a device past the page cache; offset and length in whole blocks.
pub fn write_direct(device: &Path, offset: u64, data: &[u8]) {
    let file = File::options().write(true).custom_flags(libc::O_DIRECT).open(device).unwrap();
    // Direct I/O wants memory at an address of the same alignment.
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

/// Zeroes a range of a device, with or without giving its blocks back.
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

/// Runs a tool that has to succeed.
pub fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output();
    let output = output.unwrap_or_else(|e: io::Error| panic!("{program}: {e}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {said}");
}

pub fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Bytes that differ from those of every other seed.
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
