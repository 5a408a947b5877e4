//! The state of mounts and loop devices in the kernel, and ways to change it.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use csi_loopback::backend::sys::fiemap;

use super::driver::PATIENCE;
use super::{BLOCK, path, run};

/// A mount of this machine.
#[derive(Debug, Clone)]
pub struct Mount {
    pub target: PathBuf,
    /// Options per mount, such as `rw` and `noatime`.
    pub options: Vec<String>,
    pub fs_type: String,
    pub source: String,
}

impl Mount {
    pub fn has(&self, option: &str) -> bool {
        self.options.iter().any(|one| one == option)
    }
}

pub fn mounts() -> Vec<Mount> {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let parse = |line: &str| {
        let (head, tail) = line.split_once(" - ")?;
        let head: Vec<&str> = head.split(' ').collect();
        let mut tail = tail.split(' ');
        Some(Mount {
            target: PathBuf::from(head.get(4)?.replace("\\040", " ")),
            options: head.get(5)?.split(',').map(str::to_owned).collect(),
            fs_type: tail.next()?.to_owned(),
            source: tail.next()?.to_owned(),
        })
    };
    text.lines().filter_map(parse).collect()
}

/// The mounts at `target`, lowest first.
pub fn mounts_at(target: &Path) -> Vec<Mount> {
    mounts().into_iter().filter(|mount| mount.target == target).collect()
}

/// The names of the backing files of all loop devices.
pub fn backing_names() -> Vec<String> {
    let name = |device: fs::DirEntry| {
        let file = fs::read_to_string(device.path().join("loop/backing_file")).ok()?;
        Some(file.trim_end().rsplit_once('/')?.1.to_owned())
    };
    fs::read_dir("/sys/block").unwrap().flatten().filter_map(name).collect()
}

/// The loop devices whose backing file has this name, also if the file is deleted.
pub fn loops_named(name: &str) -> Vec<String> {
    let listed = Command::new("losetup").args(["-a", "-n", "-O", "NAME,BACK-FILE"]).output();
    let listed = listed.map(|output| output.stdout).unwrap_or_default();
    let devices = String::from_utf8_lossy(&listed);
    let of_file = |line: &str| {
        let (device, file) = line.split_once(char::is_whitespace)?;
        names(file.trim(), name).then(|| device.to_owned())
    };
    // An invalid id can be empty.
    if name.is_empty() { Vec::new() } else { devices.lines().filter_map(of_file).collect() }
}

/// The attached files on the filesystem of a loop device whose own file is in this directory: the
/// volumes of an image pool, which is mounted only in the driver's namespace.
pub fn attached_of_pool(directory: &Path) -> Vec<PathBuf> {
    let columns = "MAJ:MIN,BACK-MAJ:MIN,BACK-FILE";
    let listed = Command::new("losetup").args(["-a", "-n", "-O", columns]).output();
    let listed = listed.map(|output| output.stdout).unwrap_or_default();
    let text = String::from_utf8_lossy(&listed);
    let devices: Vec<[&str; 3]> = text
        .lines()
        .filter_map(|line| line.split_whitespace().collect::<Vec<_>>().get(..3)?.try_into().ok())
        .collect();
    let pools = devices.iter().filter(|[.., file]| Path::new(file).starts_with(directory));
    let numbers: Vec<&str> = pools.map(|[number, ..]| *number).collect();
    let volumes = devices.iter().filter(|[_, within, _]| numbers.contains(within));
    volumes.map(|[.., file]| PathBuf::from(file)).collect()
}

/// Whether this is the path of a backing file, deleted or not, with this name.
fn names(file: &str, name: &str) -> bool {
    file.trim_end_matches(" (deleted)").rsplit_once('/').is_some_and(|(_, last)| last == name)
}

/// The path of a device's backing file.
fn file_of(device: &str) -> Option<String> {
    let number = device.trim_start_matches("/dev/");
    let file = fs::read_to_string(format!("/sys/block/{number}/loop/backing_file")).ok()?;
    Some(file.trim_end_matches('\n').to_owned())
}

/// Detaches an unused loop device as an administrator does. Waits until it has let its file go:
/// while any program has the device open, and one that lists devices has for a moment, the kernel
/// puts the detach off.
#[track_caller]
pub fn detach_loop(device: &str) {
    let attached = file_of(device);
    run("losetup", &["-d", device]);
    // Another test can have attached it since.
    wait_for("the device is detached", || {
        file_of(device).is_none_or(|file| Some(file) != attached)
    });
}

/// Detaches the unused loop devices whose backing file has this name, and waits until they have let
/// it go.
#[track_caller]
pub fn detach_loops_named(name: &str) {
    request_detach_named(name);
    wait_for("the devices are detached", || loops_named(name).is_empty());
}

/// Requests a detach of the loop devices whose backing file has this name. A device that has let
/// the file go since it was listed is not touched: a test in parallel can have it.
pub fn request_detach_named(name: &str) {
    for device in loops_named(name) {
        // An open device cannot get another file.
        let Ok(_open) = File::open(&device) else { continue };
        if file_of(&device).as_deref().is_some_and(|file| names(file, name)) {
            let _ = Command::new("losetup").args(["-d", &device]).output();
        }
    }
}

/// Polls for mounts that must not exist until it is dropped.
pub struct Watch {
    ends: Arc<AtomicBool>,
    poller: Option<JoinHandle<(usize, Vec<String>)>>,
}

impl Watch {
    pub fn start(pause: Duration, poll: impl Fn() -> Vec<String> + Send + 'static) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&ends);
        let poller = thread::spawn(move || {
            let (mut count, mut seen) = (0, Vec::new());
            while !until.load(Ordering::Relaxed) {
                seen.extend(poll());
                count += 1;
                thread::sleep(pause);
            }
            (count, seen)
        });
        Self { ends, poller: Some(poller) }
    }

    /// Stops, and asserts that none was seen.
    #[track_caller]
    pub fn assert_no_mounts(mut self) {
        self.ends.store(true, Ordering::Relaxed);
        let (count, seen) = self.poller.take().unwrap().join().unwrap();
        assert!(count > 10, "only {count} polls");
        assert_eq!(seen, Vec::<String>::new());
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
    }
}

/// Keeps a filesystem frozen until it is dropped, so that writers wait.
pub struct Freeze(PathBuf);

impl Freeze {
    pub fn new(mounted_at: &Path) -> Self {
        run("fsfreeze", &["-f", path(mounted_at)]);
        Self(mounted_at.to_owned())
    }
}

impl Drop for Freeze {
    fn drop(&mut self) {
        let _ = Command::new("fsfreeze").arg("-u").arg(&self.0).status();
    }
}

/// Shuts down the pool filesystem of a driver process, as an error does (XFS_IOC_GOINGDOWN,
/// EXT4_IOC_SHUTDOWN).
pub fn shut_down_pool(pid: u32) {
    let mut open =
        fs::read_dir(format!("/proc/{pid}/fd")).unwrap().map(|file| file.unwrap().path());
    let is_catalog =
        |file: &PathBuf| fs::read_link(file).is_ok_and(|name| name.ends_with("catalog.redb"));
    let catalog = open.find(is_catalog).expect("the catalog is open");
    run("xfs_io", &["-x", "-c", "shutdown", path(&catalog)]);
}

/// Unmounts a filesystem at the end of a test. Retries while it is busy: the kernel releases the
/// filesystem of a loop device's backing file a moment after the last user.
pub fn unmount(at: &Path) {
    let until = Instant::now() + PATIENCE;
    loop {
        let output = Command::new("umount").arg(at).output();
        let busy = output.is_ok_and(|output| {
            !output.status.success() && String::from_utf8_lossy(&output.stderr).contains("busy")
        });
        if !busy || Instant::now() > until {
            return;
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Waits until `done` returns true.
#[track_caller]
pub fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < until, "timeout: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Drops the page cache of the machine, so that later reads come from the disk, as after a reboot.
/// Waits while a test needs it ([`keep_page_cache`]).
pub fn drop_page_cache() {
    nix::unistd::sync();
    let mut drop_caches = open_drop_caches();
    drop_caches.lock().unwrap();
    drop_caches.write_all(b"1").unwrap();
}

/// No test drops the page cache until the result is dropped.
pub fn keep_page_cache() -> File {
    let drop_caches = open_drop_caches();
    drop_caches.lock_shared().unwrap();
    drop_caches
}

/// All processes of the machine can lock it.
fn open_drop_caches() -> File {
    File::options().write(true).open("/proc/sys/vm/drop_caches").unwrap()
}

/// Overwrites part of a file in the disk image but not in the page cache, like a write that failed.
/// Keeps the first block.
pub fn damage_below_page_cache(file: &Path, disk: &Path) {
    let content = fs::read(file).unwrap();
    let place = fiemap(&File::open(file).unwrap(), 0, BLOCK).unwrap()[0].physical;
    let disk = File::options().write(true).open(disk).unwrap();
    disk.write_all_at(&[0xa5; 16 * BLOCK as usize], place + BLOCK).unwrap();
    disk.sync_all().unwrap();
    assert_eq!(fs::read(file).unwrap(), content, "the page cache has dropped the file");
}

/// The number of guards of deferred volumes that are mounted at `path`.
pub fn guards_at(path: &Path) -> usize {
    let is_guard = |mount: &&Mount| mount.source == "csi-loopback-deferred-volume";
    mounts_at(path).iter().filter(is_guard).count()
}
