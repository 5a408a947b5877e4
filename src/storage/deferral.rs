//! Deferred volumes (KEP-2857), inline or not: handing them to a container runtime, taking them
//! back, growth and condition.
//!
//! This host never mounts a deferred volume at a path. Work on its filesystem uses a superblock
//! that this kernel already has; otherwise it is not done, because a virtual machine may have
//! mounted the filesystem.

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
use super::fail_point::{hit, reach};
use super::filesystem::{self, Mount};
use super::growth;
use super::loop_device::LoopDevice;
use super::model::{
    Access, AccessMode, Condition, FsType, HealthProblem, Publication, Stats, Volume,
};
use super::runtime::{DeferredMount, Runtime};
use super::store::Store;
use super::target::present;

/// How long a publication waits until the mount of the previous container is gone.
pub const PREVIOUS_MOUNT_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a call waits until a container's mount is gone.
pub const UNMOUNT_TIMEOUT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The configured access to container runtimes, or `Precondition`.
pub fn runtime(store: &Store) -> Result<&dyn Runtime> {
    store.config.runtime.as_deref().ok_or_else(|| {
        Error::Precondition(
            "defer_fs_ops: this driver does not support deferred mounts; start it with --enable-defer-fs-ops"
                .to_owned(),
        )
    })
}

/// Checks that a deferred volume has at most one writing pod. CSI's access modes count writers on a
/// node, but two kernels that mount one filesystem for writing destroy it.
pub fn check_capability(requested: &Publication) -> Result<()> {
    let Access::Mount { flags, .. } = &requested.capability.access else {
        return Err(Error::invalid(
            "volume_capability.access_type",
            "a raw block volume has no filesystem to mount; omit defer_fs_ops",
        ));
    };
    filesystem::check_options(flags)?;
    let has_one_writer = requested.capability.mode == AccessMode::SingleNodeSingleWriter;
    if has_one_writer || requested.is_read_only() {
        return Ok(());
    }
    Err(Error::invalid(
        "volume_capability.access_mode",
        "only one pod may write to a deferred volume; use SINGLE_NODE_SINGLE_WRITER \
         (ReadWriteOncePod), or publish it read-only",
    ))
}

/// The mount options for the runtime.
pub fn mount_flags(flags: &[String], fs_type: FsType, read_only: bool) -> Vec<String> {
    let mut flags: Vec<String> = flags.to_vec();
    let mut add = |option: &str| {
        if !flags.iter().flat_map(|flags| flags.split(',')).any(|flag| flag == option) {
            flags.push(option.to_owned());
        }
    };
    if read_only {
        add("ro");
    }
    // A restored volume has the UUID of its source, which may also be mounted.
    if fs_type == FsType::Xfs {
        add("nouuid");
    }
    flags
}

/// Hands a volume to the runtime, after the target has its guard. Idempotent in any state of the
/// runtime.
pub fn hand_over(store: &Store, mount: &DeferredMount<'_>) -> Result<()> {
    let runtime = runtime(store)?;
    let target = mount.target;
    fs::create_dir_all(target).context(|| format!("creating {}", target.display()))?;
    reach("deferral.directory_made")?;
    filesystem::mount_guard(target)?;
    runtime.stage(mount)?;
    reach("deferral.staged")
}

/// Takes a volume back from the runtime: waits until this kernel has no mount of it, removes the
/// file for the runtime and the guard, and removes empty directories below the target, where
/// earlier versions mounted no guard.
/// `Precondition` if files remain there. Without a configured runtime the runtime's file is not
/// removed.
pub fn take_back(
    store: &Store,
    target: &Path,
    device: Option<&LoopDevice>,
    timeout: Duration,
) -> Result<()> {
    if let Some(device) = device {
        wait_until_unmounted(device, timeout)?;
    }
    match &store.config.runtime {
        Some(runtime) => runtime.unstage(target)?,
        None => warn!(
            target = %target.display(),
            "unpublished a deferred volume without notifying its container runtime: this driver runs without --enable-defer-fs-ops"
        ),
    }
    reach("deferral.unstaged")?;
    filesystem::unmount_guard(target)?;
    match remove_empty_directories(target)? {
        0 => Ok(()),
        // kubelet cannot remove a directory with files either, so success here would not end the
        // pod.
        kept => Err(Error::Precondition(format!(
            "target_path: {} contains {kept} files on the disk of this node, written by a container whose runtime does not \
             mount deferred volumes; move the files away so that the pod can terminate, and use a RuntimeClass that does",
            target.display()
        ))),
    }
}

/// Waits until this kernel has no mount of the filesystem in any mount namespace. `Precondition`
/// after `timeout`.
pub fn wait_until_unmounted(device: &LoopDevice, timeout: Duration) -> Result<()> {
    let deadline = Instant::now() + timeout;
    // A frozen superblock would outlive its mounts. No pod uses it.
    if filesystem::mounted_type(device)?.is_some() && filesystem::mounts_of(device)?.is_empty() {
        let thawed = filesystem::thaw_unused(device);
        if let Err(error) = thawed {
            warn!(device = %device.path().display(), %error, "failed to thaw a filesystem");
        }
    }
    while filesystem::mounted_type(device)?.is_some() {
        if Instant::now() >= deadline {
            let seen = filesystem::mounts_of(device)?;
            let place = seen.first().map_or_else(
                || "in a container or another mount namespace; stop its processes".to_owned(),
                |mount| format!("at {}; unmount it there", mount.target.display()),
            );
            return Err(Error::Precondition(format!(
                "volume_id: the filesystem on {} is still mounted {place}",
                device.path().display()
            )));
        }
        sleep(POLL_INTERVAL);
    }
    Ok(())
}

/// Requests the runtime to grow the filesystem to the size of the device.
pub fn grow(store: &Store, volume: &mut Volume, target: &Path, device: &LoopDevice) -> Result<()> {
    let runtime = runtime(store)?;
    growth::by_runtime(store, volume, device, || {
        runtime.expand(target, device.size()?)?;
        reach("deferral.expanded")
    })
}

/// The statistics of a deferred volume. A problem on this host takes precedence over the runtime's
/// condition.
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

/// Reports a deferred volume that is mounted on this host.
pub fn defect(device: &LoopDevice, mounts: &[Mount]) -> Option<Condition> {
    let mount = mounts.iter().find(|mount| mount.is_filesystem_of(device))?;
    let message = format!(
        "{} belongs to a deferred volume but is mounted on this host at {}; unmount it there and check the filesystem",
        device.path().display(),
        mount.target.display()
    );
    Some(Condition::abnormal(HealthProblem::MountedOnHost, message))
}

/// Removes the empty directories below a target where nothing was mounted. Files there were written
/// outside the volume, and remain. Returns their number.
fn remove_empty_directories(target: &Path) -> Result<usize> {
    if !present(target)?.is_some_and(|found| found.is_dir()) {
        return Ok(0);
    }
    let doing = || format!("removing empty directories from {}", target.display());
    remove_empty(open_directory(AT_FDCWD, target).context(doing)?).context(doing)
}

fn open_directory<P: ?Sized + nix::NixPath>(at: impl AsFd, path: &P) -> nix::Result<OwnedFd> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    openat(at, path, flags, Mode::empty())
}

/// A directory on the way down: what identifies it, its name in the one above, and the entries that
/// were not visited yet.
struct Level {
    identity: (libc::dev_t, libc::ino_t),
    name: CString,
    names: Vec<CString>,
}

impl Level {
    fn open(directory: OwnedFd, name: CString) -> nix::Result<(Self, OwnedFd)> {
        let status = fstat(&directory)?;
        let mut names = Vec::new();
        // Dir closes its descriptor.
        let listed = openat(&directory, ".", OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty())?;
        for entry in Dir::from_fd(listed)?.iter() {
            let name = entry?.file_name().to_owned();
            if !matches!(name.to_bytes(), b"." | b"..") {
                names.push(name);
            }
        }
        Ok((Self { identity: (status.st_dev, status.st_ino), name, names }, directory))
    }
}

/// Removes empty directories below `top` and returns the number of other entries. Follows no link
/// and enters no other filesystem. Any depth needs the same number of open files.
fn remove_empty(top: OwnedFd) -> nix::Result<usize> {
    let (level, mut directory) = Level::open(top, CString::default())?;
    let (mut levels, mut kept) = (vec![level], 0);
    while let Some(level) = levels.last_mut() {
        let device = level.identity.0;
        if let Some(name) = level.names.pop() {
            match open_directory(&directory, name.as_c_str()) {
                Ok(below) if fstat(&below)?.st_dev == device => {
                    let (level, opened) = Level::open(below, name)?;
                    levels.push(level);
                    directory = opened;
                }
                // Another filesystem, or not a directory.
                Ok(_) | Err(Errno::ENOTDIR | Errno::ELOOP) => kept += 1,
                // Removed meanwhile.
                Err(Errno::ENOENT) => {}
                Err(e) => return Err(e),
            }
            continue;
        }
        let Some(Level { name, .. }) = levels.pop() else { break };
        let Some(above) = levels.last() else { break };
        let parent = open_directory(&directory, c"..")?;
        let status = fstat(&parent)?;
        if (status.st_dev, status.st_ino) != above.identity {
            // Moved to another directory meanwhile.
            return Err(Errno::EBUSY);
        }
        directory = parent;
        match unlinkat(&directory, name.as_c_str(), UnlinkatFlags::RemoveDir) {
            Ok(()) => hit("deferral.stray_removed").map_err(|_| Errno::EIO)?,
            Err(Errno::ENOTEMPTY | Errno::EEXIST | Errno::EBUSY | Errno::ENOENT) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_directories_of_any_depth_are_removed() {
        let scratch = tempfile::tempdir().unwrap();
        // A path of this depth is longer than PATH_MAX.
        let deep = "d/".repeat(1000);
        let mut at = open_directory(AT_FDCWD, scratch.path()).unwrap();
        for _ in 0..5 {
            let made = std::path::PathBuf::from(format!("/proc/self/fd/{}", {
                use std::os::fd::AsRawFd;
                at.as_raw_fd()
            }));
            fs::create_dir_all(made.join(&deep)).unwrap();
            at = open_directory(AT_FDCWD, &made.join(&deep)).unwrap();
        }
        drop(at);
        fs::create_dir_all(scratch.path().join("a/b")).unwrap();
        fs::write(scratch.path().join("a/file"), "").unwrap();
        std::os::unix::fs::symlink("/", scratch.path().join("a/b/link")).unwrap();
        assert_eq!(remove_empty_directories(scratch.path()).unwrap(), 2);
        assert!(scratch.path().join("a/b").exists() && !scratch.path().join("d").exists());
    }
}
