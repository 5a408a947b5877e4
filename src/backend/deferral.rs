//! Volumes in the hands of a container runtime (KEP-2857), inline or not: handing over, taking back, growing, and how
//! they are. While a volume is handed over this host does not mount it at any path, and what has to be done on its
//! filesystem is done on a superblock of this kernel that is live already, or not at all: it may be mounted in a
//! virtual machine.

use std::ffi::CString;
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, openat};
use nix::sys::stat::{Mode, fstat};
use nix::unistd::{UnlinkatFlags, unlinkat};
use tracing::warn;

use super::error::{Context, Error, Result};
use super::fail_point::{meet, reach};
use super::filesystem::{self, Mount};
use super::format::{self, Formatted};
use super::loop_device::LoopDevice;
use super::model::{Access, AccessMode, Condition, FsType, HealthProblem, Publication, Stats};
use super::runtime::{DeferredMount, Runtime};
use super::store::Store;
use super::target::present;

/// How long a container's mount may take to go, where a call waits for that.
pub const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(5);
/// How deep directories are looked into that may be strays.
const MAX_DEPTH: usize = 40;

/// The way to the runtimes.
pub fn runtime(store: &Store) -> Result<&dyn Runtime> {
    store.config.runtime.as_deref().ok_or_else(|| {
        Error::Precondition(
            "defer_fs_ops: this driver leaves no filesystem to a container runtime; start it with --enable-defer-fs-ops"
                .to_owned(),
        )
    })
}

/// CSI's modes say how many may write on one node. A filesystem that several kernels had mounted would be lost, so one
/// that is left to a runtime has one writer, who is one pod, or none.
pub fn check_capability(wanted: &Publication) -> Result<()> {
    let Access::Mount { flags, .. } = &wanted.capability.access else {
        return Err(Error::invalid(
            "volume_capability.access_type",
            "a raw block volume has no filesystem that could be left to a container runtime; leave defer_fs_ops out",
        ));
    };
    filesystem::check_options(flags)?;
    let has_one_writer = wanted.capability.mode == AccessMode::SingleNodeSingleWriter;
    if has_one_writer || wanted.is_read_only() {
        return Ok(());
    }
    Err(Error::invalid(
        "volume_capability.access_mode",
        "a filesystem that is left to a container runtime may be written to by one pod; use SINGLE_NODE_SINGLE_WRITER \
         (ReadWriteOncePod), or publish it read-only",
    ))
}

/// The options of a mount that a runtime makes.
pub fn mount_flags(flags: &[String], fs_type: FsType, read_only: bool) -> Vec<String> {
    let mut flags: Vec<String> = flags.to_vec();
    let mut add = |wanted: &str| {
        if !flags.iter().flat_map(|flags| flags.split(',')).any(|flag| flag == wanted) {
            flags.push(wanted.to_owned());
        }
    };
    if read_only {
        add("ro");
    }
    // A restored volume has the identity of its source, which may be mounted too.
    if fs_type == FsType::Xfs {
        add("nouuid");
    }
    flags
}

/// Leaves a volume to the runtime. It can be repeated, whatever the runtime has done meanwhile.
pub fn hand_over(store: &Store, mount: &DeferredMount<'_>) -> Result<()> {
    let runtime = runtime(store)?;
    let target = mount.target;
    fs::create_dir_all(target).context(|| format!("making {}", target.display()))?;
    reach("deferral.directory_made")?;
    runtime.stage(mount)?;
    reach("deferral.staged")
}

/// Takes a volume back: waits until this kernel has it mounted nowhere, and then takes the runtime's word and what
/// kubelet has made below the target away. `Precondition` where files are left there. A driver that no longer knows any runtime leaves the word where it is.
pub fn take_back(
    store: &Store,
    target: &Path,
    device: Option<&LoopDevice>,
    patience: Duration,
) -> Result<()> {
    if let Some(device) = device {
        wait_until_free(device, patience)?;
    }
    match &store.config.runtime {
        Some(runtime) => runtime.unstage(target)?,
        None => warn!(
            target = %target.display(),
            "taken back from a container runtime without a word to it: this driver was started without --enable-defer-fs-ops"
        ),
    }
    reach("deferral.unstaged")?;
    match remove_strays(target)? {
        0 => Ok(()),
        // Kubelet cannot remove the directory either, and the pod would end no sooner if this said that all is well.
        kept => Err(Error::Precondition(format!(
            "target_path: {} holds {kept} files on the disk of this node, written by a container whose runtime does not mount \
             deferred volumes; move them away, and the pod can end; then make it with a RuntimeClass that does",
            target.display()
        ))),
    }
}

/// `Precondition` when this kernel still has the filesystem mounted, in whatever mount namespace, after `patience`.
pub fn wait_until_free(device: &LoopDevice, patience: Duration) -> Result<()> {
    let deadline = Instant::now() + patience;
    while filesystem::live(device)?.is_some() {
        if Instant::now() >= deadline {
            let seen = filesystem::mounts_of(device)?;
            let place = seen.first().map_or_else(
                || "in a container, or another mount namespace; end what runs there".to_owned(),
                |mount| format!("at {}; unmount it there", mount.target.display()),
            );
            return Err(Error::Precondition(format!(
                "volume_id: the filesystem on {} is still mounted {place}",
                device.path().display()
            )));
        }
        sleep(PAUSE);
    }
    Ok(())
}

/// Has the runtime grow the filesystem to the volume's capacity, which the device has.
pub fn grow<R: Formatted>(
    store: &Store,
    row: &mut R,
    target: &Path,
    device: &LoopDevice,
) -> Result<()> {
    let runtime = runtime(store)?;
    format::grow_by(store, row, || {
        runtime.expand(target, device.size()?)?;
        reach("deferral.expanded")
    })
}

/// How a volume is that a runtime has. What is wrong with it here counts for more than what the runtime says.
pub fn stats(
    store: &Store,
    target: &Path,
    defect: impl FnOnce() -> Result<Option<Condition>>,
) -> Result<Stats> {
    let stats = runtime(store)?.stats(target)?;
    Ok(match defect()? {
        Some(condition) => Stats { condition, ..stats },
        None => stats,
    })
}

/// What is wrong with where a volume is that a runtime has, if anything.
pub fn defect(device: &LoopDevice, mounts: &[Mount]) -> Option<Condition> {
    let mount = mounts.iter().find(|mount| mount.shows(device))?;
    let message = format!(
        "{} is left to a container runtime and yet mounted on this host, at {}; unmount it there, and check the filesystem",
        device.path().display(),
        mount.target.display()
    );
    Some(Condition::abnormal(HealthProblem::MountedOnHost, message))
}

/// Removes the empty directories below the target of a volume that was not mounted there: kubelet makes them for
/// sub-paths. What else is there was written past the volume, and stays. Says how much that is.
fn remove_strays(target: &Path) -> Result<usize> {
    if !present(target)?.is_some_and(|found| found.is_dir()) {
        return Ok(0);
    }
    let doing = || format!("removing empty directories from {}", target.display());
    let top = open_directory(AT_FDCWD, target).context(doing)?;
    let device = fstat(&top).context(doing)?.st_dev;
    remove_empty(top, device, MAX_DEPTH).context(doing)
}

fn open_directory<P: ?Sized + nix::NixPath>(at: impl AsFd, path: &P) -> nix::Result<OwnedFd> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    openat(at, path, flags, Mode::empty())
}

/// Removes the directories below this one that hold nothing but such. Says how much stays. No link is followed, and no
/// other filesystem entered.
fn remove_empty(directory: OwnedFd, device: libc::dev_t, depth: usize) -> nix::Result<usize> {
    let mut kept = 0;
    let mut directory = Dir::from_fd(directory)?;
    let mut names: Vec<CString> = Vec::new();
    for entry in directory.iter() {
        let name = entry?.file_name().to_owned();
        if !matches!(name.to_bytes(), b"." | b"..") {
            names.push(name);
        }
    }
    for name in names {
        let below = match open_directory(&directory, name.as_c_str()) {
            Ok(below) if depth > 0 && fstat(&below)?.st_dev == device => below,
            // Not a directory, or gone.
            Ok(_) | Err(Errno::ENOTDIR | Errno::ELOOP | Errno::ENOENT) => {
                kept += 1;
                continue;
            }
            Err(e) => return Err(e),
        };
        kept += remove_empty(below, device, depth - 1)?;
        match unlinkat(&directory, name.as_c_str(), UnlinkatFlags::RemoveDir) {
            Ok(()) => meet("deferral.stray_removed").map_err(|_| Errno::EIO)?,
            Err(Errno::ENOTEMPTY | Errno::EEXIST | Errno::EBUSY | Errno::ENOENT) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(kept)
}
