//! Filesystems on volumes: creating, detecting, repairing, mounting, growing and measuring them, and
//! freezing them for a consistent snapshot. This module knows no volumes and no catalog.

mod detached;
mod freeze;
mod grow;
mod guard;
mod make;
mod mounts;
mod ownership;
mod repair;

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::statvfs::{FsFlags, statvfs};

use super::error::{Context, Error, Result};
use super::fail_point::reach;
use super::model::{FsType, Usage};
use super::sys;

pub use detached::{is_mounted, join, mount_detached, mounted_type, writable_clone};
pub use freeze::{Frozen, refuse_frozen, thaw_leftover, thaw_unused};
pub use grow::{
    Method, check_growth_mounted, grow_mounted, grow_unmounted, grows_to, growth_cost,
    growth_method, largest_growth,
};
pub use guard::{mount_guard, unmount_guard};
pub use make::{make, mkfs_xfs};
pub use mounts::{
    Mount, all_mounts, is_mounted_only_at, mount_among, mount_at, mounts_of, mounts_of_process,
    open_mounted, parse_mounts,
};
pub use ownership::{give_all_to_group, give_to_group};
pub use repair::repair_recorded_errors;

/// How long to wait for a tool that a killed process started.
const TOOL_TIMEOUT: Duration = Duration::from_secs(10);

/// Waits until no tool has the device open exclusively: a tool outlives a killed driver, and the
/// next tool would fail.
fn await_tools(device: &Path) -> Result<()> {
    let deadline = Instant::now() + TOOL_TIMEOUT;
    loop {
        match File::options().read(true).custom_flags(libc::O_EXCL).open(device) {
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {}
            // The tool reports any other error.
            _ => return Ok(()),
        }
        if Instant::now() >= deadline {
            return Err(Error::Busy(format!(
                "{} is in use; stop the processes that have it open",
                device.display()
            )));
        }
        sleep(POLL_INTERVAL);
    }
}

/// A tool that depends on no configuration of this machine.
fn tool(name: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(name);
    command.args(arguments).env_clear().env("LC_ALL", "C");
    command.env("MKE2FS_CONFIG", "/dev/null").env("E2FSCK_CONFIG", "/dev/null");
    if let Some(path) = std::env::var_os("PATH") {
        command.env("PATH", path);
    }
    command
}

/// The type of the filesystem whose superblock is on `device`. `None` if it has no supported
/// filesystem.
pub fn detect(device: &File) -> Result<Option<FsType>> {
    let has = |offset: u64, magic: &[u8]| -> Result<bool> {
        let mut bytes = vec![0; magic.len()];
        match device.read_exact_at(&mut bytes, offset) {
            Ok(()) => Ok(bytes == magic),
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(e) => Err(Error::io("detecting a filesystem", e)),
        }
    };
    if has(1024 + 56, &[0x53, 0xef])? {
        Ok(Some(FsType::Ext4))
    } else if has(0, b"XFSB")? {
        Ok(Some(FsType::Xfs))
    } else if has(65536 + 64, b"_BHRfS_M")? {
        Ok(Some(FsType::Btrfs))
    } else {
        Ok(None)
    }
}

/// Mounts `device` at `target`. Options are those of mount(8). They may contain secrets and must
/// not appear in messages.
pub fn mount_device(
    device: &Path,
    target: &Path,
    fs_type: FsType,
    options: &[String],
    read_only: bool,
) -> Result<()> {
    let (mut flags, mut data) = parse_options(options)?;
    if read_only {
        flags |= MsFlags::MS_RDONLY;
    }
    // A restored volume has the UUID of its source, which may also be mounted. (btrfs uses a
    // temporary one from Linux 6.7 on.)
    if fs_type == FsType::Xfs && !data.iter().any(|option| option == "nouuid") {
        data.push("nouuid".to_owned());
    }
    let data = data.join(",");
    mount(Some(device), target, Some(fs_type.name()), flags, Some(data.as_str())).context(
        || {
            format!(
                "mounting {} ({fs_type}) at {}: check mount_flags and the kernel log",
                device.display(),
                target.display()
            )
        },
    )?;
    reach("filesystem.mounted")
}

/// Checks that the options are valid for mounting a device.
pub fn check_options(options: &[String]) -> Result<()> {
    parse_options(options).map(drop)
}

/// Splits mount(8) options into flags and the options of the filesystem.
pub fn parse_options(options: &[String]) -> Result<(MsFlags, Vec<String>)> {
    let mut flags = MsFlags::empty();
    let mut data = Vec::new();
    for option in options.iter().flat_map(|option| option.split(',')) {
        match option {
            "" | "defaults" | "rw" | "async" | "suid" | "dev" | "exec" | "atime" | "diratime" => {}
            "ro" => flags |= MsFlags::MS_RDONLY,
            "sync" => flags |= MsFlags::MS_SYNCHRONOUS,
            "dirsync" => flags |= MsFlags::MS_DIRSYNC,
            "nosuid" => flags |= MsFlags::MS_NOSUID,
            "nodev" => flags |= MsFlags::MS_NODEV,
            "noexec" => flags |= MsFlags::MS_NOEXEC,
            "noatime" => flags |= MsFlags::MS_NOATIME,
            "nodiratime" => flags |= MsFlags::MS_NODIRATIME,
            "relatime" => flags |= MsFlags::MS_RELATIME,
            "strictatime" => flags |= MsFlags::MS_STRICTATIME,
            "lazytime" => flags |= MsFlags::MS_LAZYTIME,
            "bind" | "rbind" | "remount" | "move" | "loop" => {
                return Err(Error::invalid(
                    "mount_flags",
                    format!("{option:?} is not allowed; remove it"),
                ));
            }
            other => data.push(other.to_owned()),
        }
    }
    Ok((flags, data))
}

/// Bind-mounts `source` (a directory or device node) at `target`.
pub fn bind(source: &Path, target: &Path) -> Result<()> {
    let none: Option<&str> = None;
    mount(Some(source), target, none, MsFlags::MS_BIND, none)
        .context(|| format!("bind-mounting {}", target.display()))?;
    reach("filesystem.bound")
}

/// Bind-mounts the directory `source` read-only at `target`, which may be `source` itself. Other
/// mounts of the filesystem are not affected, and the other flags of `source` are kept. The mount
/// is read-only before it is attached: other mount namespaces, such as the host's, receive a new
/// mount, but no later change of its flags.
pub fn bind_read_only(source: &Path, target: &Path) -> Result<()> {
    let attached = clone_mount(source, true).and_then(|mount| attach(&mount, target));
    attached.context(|| format!("bind-mounting {} read-only", target.display()))?;
    reach("filesystem.bound_read_only")
}

/// Replaces the mount at `target`, which no pod uses yet, by a read-only one ([`bind_read_only`]).
pub fn replace_by_read_only(target: &Path, matches: impl Fn(&Mount) -> bool) -> Result<()> {
    let doing = || format!("mounting {} read-only", target.display());
    let mount = clone_mount(target, true).context(doing)?;
    unmount(target, matches)?;
    attach(&mount, target).context(doing)?;
    reach("filesystem.bound_read_only")
}

fn attach(mount: &OwnedFd, target: &Path) -> io::Result<()> {
    let at = File::options().read(true).custom_flags(libc::O_PATH).open(target)?;
    sys::attach(mount, &at)
}

fn clone_mount(source: &Path, read_only: bool) -> io::Result<OwnedFd> {
    sys::clone_mount(&CString::new(source.as_os_str().as_bytes())?, read_only)
}

/// Adds flags, such as read-only, to a bind mount.
pub fn add_mount_flags(target: &Path, flags: MsFlags) -> Result<()> {
    let none: Option<&str> = None;
    // A remount clears the flags that it does not repeat.
    let flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | flags | mount_flags(target)?;
    mount(none, target, none, flags, none)
        .context(|| format!("setting the mount flags of {}", target.display()))
}

fn mount_flags(path: &Path) -> Result<MsFlags> {
    let current =
        statvfs(path).context(|| format!("reading the mount flags of {}", path.display()))?.flags();
    // relatime is missing because musl does not define it; the kernel sets it by default.
    let pairs = [
        (FsFlags::ST_RDONLY, MsFlags::MS_RDONLY),
        (FsFlags::ST_NOSUID, MsFlags::MS_NOSUID),
        (FsFlags::ST_NODEV, MsFlags::MS_NODEV),
        (FsFlags::ST_NOEXEC, MsFlags::MS_NOEXEC),
        (FsFlags::ST_NOATIME, MsFlags::MS_NOATIME),
        (FsFlags::ST_NODIRATIME, MsFlags::MS_NODIRATIME),
    ];
    Ok(pairs
        .into_iter()
        .filter(|(flag, _)| current.contains(*flag))
        .fold(MsFlags::empty(), |flags, (_, flag)| flags | flag))
}

/// Whether the mount at `path` is read-only.
pub fn is_read_only(path: &Path) -> Result<bool> {
    Ok(mount_flags(path)?.contains(MsFlags::MS_RDONLY))
}

/// How long to retry an unmount of a busy mount: until a tool that another call starts has
/// executed, it holds all open files of this process.
const BUSY_TIMEOUT: Duration = Duration::from_millis(200);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Unmounts all mounts at `path` for which `matches` holds. Other mounts remain.
pub fn unmount(path: &Path, matches: impl Fn(&Mount) -> bool) -> Result<()> {
    let deadline = Instant::now() + BUSY_TIMEOUT;
    while mount_at(path)?.is_some_and(|mount| matches(&mount)) {
        match umount2(path, MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) => reach("filesystem.unmounted")?,
            Err(nix::Error::EBUSY) if Instant::now() < deadline => sleep(POLL_INTERVAL),
            Err(nix::Error::EBUSY) => {
                return Err(Error::Busy(format!(
                    "{} is in use; stop the processes that have files open there",
                    path.display()
                )));
            }
            Err(e) => return Err(e).context(|| format!("unmounting {}", path.display())),
        }
    }
    Ok(())
}

/// The usage of the filesystem at `path`.
pub fn usage(path: &Path) -> Result<Usage> {
    let stat = statvfs(path).context(|| format!("reading the usage of {}", path.display()))?;
    let unit = stat.fragment_size();
    let total = unit.saturating_mul(stat.blocks());
    Ok(Usage::Mount {
        total_bytes: total,
        used_bytes: total.saturating_sub(unit.saturating_mul(stat.blocks_free())),
        available_bytes: unit.saturating_mul(stat.blocks_available()),
        total_inodes: stat.files(),
        used_inodes: stat.files().saturating_sub(stat.files_free()),
        free_inodes: stat.files_free(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_options_are_split_into_flags_and_data() {
        let options = ["noatime,ro".to_owned(), "data=journal".to_owned(), "".to_owned()];
        let (flags, data) = parse_options(&options).unwrap();
        assert_eq!(flags, MsFlags::MS_NOATIME | MsFlags::MS_RDONLY);
        assert_eq!(data, ["data=journal"]);
    }

    #[test]
    fn options_that_change_the_kind_of_mount_are_rejected() {
        for option in ["bind", "rbind", "remount", "move", "noatime,bind"] {
            assert!(parse_options(&[option.to_owned()]).is_err(), "{option}");
        }
    }
}
