//! Filesystems on volumes: making, recognising, mounting, growing and measuring them, and the
//! freeze that makes a snapshot of one consistent. Nothing here knows a volume or a catalog.

mod detached;
mod freeze;
mod mounts;
mod ownership;

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::statvfs::{FsFlags, statvfs};

use super::command;
use super::error::{Context, Error, Result};
use super::fail_point::reach;
use super::model::{FsType, Usage};

pub use detached::{grow as grow_unseen, join, live, mount_unseen};
pub use freeze::{Frozen, thaw_left_over};
pub use mounts::{
    Mount, all_mounts, mount_among, mount_at, mounts_of, mounts_of_process, open_mounted,
};
pub use ownership::{give_all_to_group, give_to_group};

/// Makes a filesystem on a device whose content nobody needs. Nothing is discarded first: the
/// device is either new or holds the remains of an interrupted attempt, which are overwritten.
pub fn make(fs_type: FsType, device: &Path) -> Result<()> {
    let mut command = match fs_type {
        FsType::Ext4 => {
            tool("mkfs.ext4", &["-q", "-F", "-m", "0", "-b", "4096", "-E", "nodiscard"])
        }
        FsType::Xfs => tool("mkfs.xfs", &["-q", "-f", "-K"]),
        FsType::Btrfs => tool("mkfs.btrfs", &["-q", "-f", "-K"]),
    };
    await_tools(device)?;
    command::run(command.arg(device))
}

/// How long the tool of a process that was killed may go on.
const TOOL_PATIENCE: Duration = Duration::from_secs(10);

/// Waits until no tool has the device for itself: one outlives the process that had started it, and the next one would fail.
fn await_tools(device: &Path) -> Result<()> {
    let patience = Instant::now() + TOOL_PATIENCE;
    loop {
        match File::options().read(true).custom_flags(libc::O_EXCL).open(device) {
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {}
            // Of anything else the tool tells.
            _ => return Ok(()),
        }
        if Instant::now() >= patience {
            return Err(Error::Busy(format!(
                "{} is in use; end what has it open",
                device.display()
            )));
        }
        sleep(BUSY_PAUSE);
    }
}

fn tool(name: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(name);
    command.args(arguments);
    command
}

/// The filesystem whose superblock is on `device`; `None` where it is none of ours.
pub fn recognise(device: &File) -> Result<Option<FsType>> {
    let has = |offset: u64, magic: &[u8]| -> Result<bool> {
        let mut bytes = vec![0; magic.len()];
        match device.read_exact_at(&mut bytes, offset) {
            Ok(()) => Ok(bytes == magic),
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(e) => Err(Error::io("looking for a filesystem", e)),
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

/// Mounts `device` at `target`. Options are those of mount(8); they may carry secrets and appear in
/// no message.
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
    // A restored volume has the identity of its source, which may be mounted too. (btrfs takes a
    // temporary one by itself, from Linux 6.7 on.)
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

/// That these are options of a mount of a device, whoever makes it.
pub fn check_options(options: &[String]) -> Result<()> {
    parse_options(options).map(drop)
}

/// Splits mount(8) options into flags and what the filesystem gets to read.
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
                    format!("{option:?} is for the driver to decide; leave it out"),
                ));
            }
            other => data.push(other.to_owned()),
        }
    }
    Ok((flags, data))
}

/// Shows `source` (a directory, or a device node) at `target` too.
pub fn bind(source: &Path, target: &Path) -> Result<()> {
    let none: Option<&str> = None;
    mount(Some(source), target, none, MsFlags::MS_BIND, none)
        .context(|| format!("bind-mounting {}", target.display()))?;
    reach("filesystem.bound")
}

/// Makes a bind mount refuse writes. Other mounts of the filesystem are not touched.
pub fn make_read_only(target: &Path) -> Result<()> {
    let none: Option<&str> = None;
    // A remount drops the flags that it does not repeat.
    let flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
    mount(none, target, none, flags | mount_flags(target)?, none)
        .context(|| format!("making {} read-only", target.display()))?;
    reach("filesystem.made_read_only")
}

/// Whether the mount at `path` refuses writes.
pub fn is_read_only(path: &Path) -> Result<bool> {
    Ok(mount_flags(path)?.contains(MsFlags::MS_RDONLY))
}

fn mount_flags(path: &Path) -> Result<MsFlags> {
    let present = statvfs(path).context(|| format!("looking at {}", path.display()))?.flags();
    // Not relatime, of which musl does not know: the kernel adds it itself wherever no other word is said.
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
        .filter(|(flag, _)| present.contains(*flag))
        .fold(MsFlags::empty(), |flags, (_, flag)| flags | flag))
}

/// How long a mount may be in use before it is told: a tool that another call is just starting has, until
/// it runs, all files open that this process had.
const BUSY_PATIENCE: Duration = Duration::from_millis(200);
const BUSY_PAUSE: Duration = Duration::from_millis(5);

/// Unmounts what is at `path` for as long as it is `ours`, however many times it is mounted there.
/// What somebody else has mounted stays.
pub fn unmount(path: &Path, ours: impl Fn(&Mount) -> bool) -> Result<()> {
    let patience = Instant::now() + BUSY_PATIENCE;
    while mount_at(path)?.is_some_and(|mount| ours(&mount)) {
        match umount2(path, MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) => reach("filesystem.unmounted")?,
            Err(nix::Error::EBUSY) if Instant::now() < patience => sleep(BUSY_PAUSE),
            Err(nix::Error::EBUSY) => {
                return Err(Error::Busy(format!(
                    "{} is in use; stop what has files open there",
                    path.display()
                )));
            }
            Err(e) => return Err(e).context(|| format!("unmounting {}", path.display())),
        }
    }
    Ok(())
}

/// Grows a mounted filesystem to the size of its device. Nothing happens when it is as large.
pub fn grow(fs_type: FsType, device: &Path, mounted_at: &Path) -> Result<()> {
    let mut command = match fs_type {
        FsType::Ext4 => tool("resize2fs", &[]),
        FsType::Xfs => tool("xfs_growfs", &["-d"]),
        FsType::Btrfs => tool("btrfs", &["filesystem", "resize", "max"]),
    };
    command::run(command.arg(match fs_type {
        FsType::Ext4 => device,
        FsType::Xfs | FsType::Btrfs => mounted_at,
    }))
}

/// Whether a filesystem of this type can be grown to so many bytes: btrfs resizes to no less than 256 MiB (the kernel's
/// btrfs_ioctl_resize), and stays as it is on a device that is smaller.
pub fn grows_to(fs_type: FsType, bytes: u64) -> bool {
    fs_type != FsType::Btrfs || bytes >= 256 << 20
}

/// Whether this process may grow a mounted filesystem of this type: for ext4 the kernel asks for
/// CAP_SYS_RESOURCE, which containers often lack.
pub fn grows_online(fs_type: FsType) -> bool {
    const SYS_RESOURCE: u64 = 1 << 24;
    if fs_type != FsType::Ext4 {
        return true;
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    effective
        .and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok())
        .is_some_and(|capabilities| capabilities & SYS_RESOURCE != 0)
}

/// Grows an ext4 that is not mounted to the size of its device. The tool insists on a check first,
/// which also replays the journal.
pub fn grow_unmounted(fs_type: FsType, device: &Path) -> Result<()> {
    if fs_type != FsType::Ext4 {
        return Err(Error::Failed(format!("{fs_type} grows only while it is mounted")));
    }
    let mut check = tool("e2fsck", &["-f", "-p"]);
    await_tools(device)?;
    // 1: errors were corrected.
    command::run_with(check.arg(device), &[0, 1])?;
    command::run(tool("resize2fs", &[]).arg(device))
}

/// What the filesystem at `path` holds.
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
    fn options_that_would_turn_a_mount_into_another_are_refused() {
        for option in ["bind", "rbind", "remount", "move", "noatime,bind"] {
            assert!(parse_options(&[option.to_owned()]).is_err(), "{option}");
        }
    }
}
