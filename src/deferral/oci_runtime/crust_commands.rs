//! The commands `crust stats`, which reports usage and condition of a volume that containers have
//! mounted, and `crust resize`, which expands its filesystem to the size of the device. Both mount
//! the same filesystem in this process, while a descriptor of a container's mount keeps it mounted.

use std::ffi::{CString, OsString};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::stat::{major, minor};
use serde_json::json;

use super::claim;
use super::config::Config;
use super::create::enter_private_namespace;
use super::volume::Volume;
use crate::crust::{Directory, Entry, Target};
use storage::filesystem::{self, Mount};
use storage::{Error, FsType, Usage, sys};

/// Timeouts of the commands; callers do not wait longer.
const STATS_TIMEOUT: Duration = Duration::from_secs(30);
const RESIZE_TIMEOUT: Duration = Duration::from_secs(300);

/// No container of the volume is running.
#[derive(Debug, thiserror::Error)]
#[error("no running container has mounted the volume of {0}")]
pub struct NotRunning(Target);

/// Exit code for [`NotRunning`].
const NOT_RUNNING: u8 = 3;

pub fn run(config: &Config, arguments: &[OsString]) -> ExitCode {
    let result = match arguments {
        [command, target] if command == "stats" => stats(config, Path::new(target)),
        [command, target, minimum, maximum] if command == "resize" => bytes("MIN", minimum)
            .and_then(|minimum| {
                let maximum = bytes("MAX", maximum)?;
                resize(config, Path::new(target), minimum, maximum)
            }),
        _ => Err(anyhow::anyhow!("usage: crust stats TARGET | crust resize TARGET MIN MAX")),
    };
    match result {
        Ok(output) => {
            println!("{output}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            let line = format!("{error:#}").replace('\n', " ");
            eprintln!("{}: {line}", super::PROGRAM);
            match error.is::<NotRunning>() {
                true => ExitCode::from(NOT_RUNNING),
                false => ExitCode::FAILURE,
            }
        }
    }
}

fn bytes(name: &str, argument: &OsString) -> Result<u64> {
    let digits = argument.to_str().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    digits
        .and_then(|digits| digits.parse().ok())
        .with_context(|| format!("{name}: is not a number of bytes"))
}

fn stats(config: &Config, target: &Path) -> Result<serde_json::Value> {
    exit_after(STATS_TIMEOUT);
    let joined = JoinedVolume::join(config, target)?;
    let containers = joined.containers;
    let condition =
        |abnormal: bool, message: String| json!({"abnormal": abnormal, "message": message});
    let usage = match filesystem::usage(&config.work_dir.join(MOUNTED)) {
        Ok(Usage::Mount {
            total_bytes,
            used_bytes,
            available_bytes,
            total_inodes,
            used_inodes,
            free_inodes,
        }) => json!([
            {"unit": "BYTES", "total": total_bytes, "used": used_bytes, "available": available_bytes},
            {"unit": "INODES", "total": total_inodes, "used": used_inodes, "available": free_inodes},
        ]),
        Ok(Usage::Block { .. }) => bail!("the volume has no filesystem"),
        // A filesystem that has shut down after an error returns EIO.
        Err(Error::Io { source, .. }) if source.raw_os_error() == Some(libc::EIO) => {
            let message = format!("the filesystem returns errors ({source}); see the kernel log");
            return Ok(json!({"usage": [], "volume_condition": condition(true, message)}));
        }
        Err(error) => return Err(error.into()),
    };
    let condition = match joined.became_read_only {
        true => condition(
            true,
            "the filesystem became read-only, probably after an error; see the kernel log"
                .to_owned(),
        ),
        false => condition(false, format!("mounted by {containers} container(s)")),
    };
    Ok(json!({"usage": usage, "volume_condition": condition}))
}

fn resize(config: &Config, target: &Path, minimum: u64, maximum: u64) -> Result<serde_json::Value> {
    ensure!(maximum == 0 || minimum <= maximum, "MIN exceeds MAX");
    exit_after(RESIZE_TIMEOUT);
    let joined = JoinedVolume::join(config, target)?;
    let volume = &joined.volume;
    let size = File::open(&volume.device)
        .and_then(|device| sys::block_size_bytes(&device))
        .with_context(|| format!("reading the size of {}", volume.device.display()))?;
    ensure!(
        size >= minimum,
        "the device has {size} bytes, less than MIN ({minimum}); expand the device first"
    );
    ensure!(
        maximum == 0 || size <= maximum,
        "the device has {size} bytes, more than MAX ({maximum})"
    );
    ensure!(!volume.is_read_only(), "the volume is read-only");
    ensure!(!joined.became_read_only, "the filesystem became read-only; see the kernel log");
    if filesystem::grows_to(volume.fs_type, size) {
        let device = File::open(&volume.device).context("opening the device")?;
        filesystem::check_growth_mounted(volume.fs_type, &device, size)?;
        let root = File::open(config.work_dir.join(MOUNTED)).context("opening the filesystem")?;
        filesystem::grow_mounted(volume.fs_type, &root, &volume.device, size)?;
    }
    Ok(json!({"capacity_bytes": size}))
}

/// Name of the mount point in the work directory.
const MOUNTED: &str = "volume";

/// A filesystem that containers have mounted, mounted by this process too.
struct JoinedVolume {
    volume: Volume,
    /// Number of running containers with the volume.
    containers: usize,
    /// It was mounted writable and is now read-only.
    became_read_only: bool,
    /// A container's mount, which keeps the filesystem mounted; `None` if no mount can be opened
    /// without a call to a filesystem of the container.
    _mount: Option<OwnedFd>,
}

impl JoinedVolume {
    fn join(config: &Config, target: &Path) -> Result<Self> {
        let target = Target::new("TARGET", target)?;
        let entry = Directory::new(&config.crust_dir).entry(&target);
        let info = entry
            .mount_info()?
            .with_context(|| format!("{target} has no entry; publish the volume again"))?;
        let volume = Volume::new(&info, None)?;
        let Some(found) = find_mounts(config, &entry, &volume)? else {
            return Err(NotRunning(target).into());
        };
        let ContainerMounts { containers, label, opened } = found;
        let volume = Volume::new(&info, label.as_deref())?;
        enter_private_namespace(&config.work_dir)?;
        let at = config.work_dir.join(MOUNTED);
        std::fs::create_dir(&at).with_context(|| format!("creating {}", at.display()))?;
        // The last container may have ended meanwhile.
        if opened.is_none() && !filesystem::is_mounted(&volume.device)? {
            return Err(NotRunning(target).into());
        }
        let became_read_only = match volume.join(&at) {
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) && !volume.is_read_only() => {
                volume.join_read_only(&at).context("mounting the filesystem read-only")?;
                true
            }
            joined => joined.map(|()| false).context("mounting the filesystem")?,
        };
        Ok(Self { volume, containers, became_read_only, _mount: opened })
    }
}

/// The mounts of a volume in running containers.
struct ContainerMounts {
    /// Number of containers.
    containers: usize,
    label: Option<String>,
    opened: Option<OwnedFd>,
}

/// Counts the containers that have mounted the volume, and opens the mount of one of them. `None`:
/// no running container has mounted it.
fn find_mounts(config: &Config, entry: &Entry, volume: &Volume) -> Result<Option<ContainerMounts>> {
    let device = std::fs::metadata(&volume.device)
        .with_context(|| format!("reading {}", volume.device.display()))?;
    let number = format!("{}:{}", major(device.rdev()), minor(device.rdev()));
    let mut found = ContainerMounts { containers: 0, label: None, opened: None };
    for (pid, label) in claim::processes(entry, &config.runtime)? {
        let mounts = match filesystem::mounts_of_process(pid) {
            // The process may end at any time.
            Err(Error::Io { source, .. }) if has_ended(&source) => continue,
            mounts => mounts?,
        };
        let of_volume = |mount: &&Mount| {
            // btrfs filesystems have anonymous device numbers.
            mount.device == number
                || volume.fs_type == FsType::Btrfs && mount.source == volume.device
        };
        let mut mounts = mounts.iter().filter(of_volume).peekable();
        if mounts.peek().is_none() {
            continue;
        }
        found.containers += 1;
        if found.opened.is_none() {
            found.opened = mounts.find_map(|mount| open(pid, mount).ok());
        }
        found.label = found.label.or(label);
    }
    Ok((found.containers > 0).then_some(found))
}

fn has_ended(error: &io::Error) -> bool {
    // EINVAL: the process has no mount namespace any more.
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH | libc::EINVAL))
}

/// Opens a mount in another process's namespace. No filesystem is called: a container may serve one
/// itself (FUSE) and never answer, and this process could not be killed then.
fn open(pid: u32, mount: &Mount) -> io::Result<OwnedFd> {
    let root =
        File::options().read(true).custom_flags(libc::O_PATH).open(format!("/proc/{pid}/root"))?;
    let path = CString::new(mount.target.as_os_str().as_bytes())?;
    let opened = File::from(sys::open_in_root(&root, &path, libc::O_PATH)?);
    // Another filesystem may be mounted over it.
    match sys::mount_id(&opened)? == mount.id {
        true => Ok(opened.into()),
        false => Err(io::ErrorKind::NotFound.into()),
    }
}

/// Exits this process after the timeout: a filesystem that hangs would block it forever.
fn exit_after(timeout: Duration) {
    std::thread::spawn(move || {
        std::thread::sleep(timeout);
        eprintln!("{}: the filesystem did not respond within {timeout:?}", super::PROGRAM);
        std::process::exit(1);
    });
}
