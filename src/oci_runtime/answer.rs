//! `crust stats` and `crust resize`: how a volume is that containers have mounted, and making its filesystem as large as its
//! device. Both through a mount of this process's own of the same filesystem, which is there for as long as a container's
//! mount of it is held open.

use std::ffi::{CString, OsString};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
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
use crate::backend::filesystem::{self, Mount};
use crate::backend::{Error, FsType, Usage, sys};
use crate::crust::{Directory, Entry, Target};

/// Nobody waits longer for figures, nor for a larger filesystem.
const STATS_DEADLINE: Duration = Duration::from_secs(30);
const RESIZE_DEADLINE: Duration = Duration::from_secs(300);

/// No container of the volume runs now.
#[derive(Debug, thiserror::Error)]
#[error("no container that has the volume of {0} mounted runs now")]
pub struct NotRunning(Target);

/// Its exit code.
const NOT_RUNNING: u8 = 3;

pub fn answer(config: &Config, words: &[OsString]) -> ExitCode {
    let answered = match words {
        [what, target] if what == "stats" => stats(config, Path::new(target)),
        [what, target, minimum, maximum] if what == "resize" => {
            bytes("MIN", minimum).and_then(|minimum| {
                let maximum = bytes("MAX", maximum)?;
                resize(config, Path::new(target), minimum, maximum)
            })
        }
        _ => Err(anyhow::anyhow!("usage: crust stats TARGET | crust resize TARGET MIN MAX")),
    };
    match answered {
        Ok(answer) => {
            println!("{answer}");
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

fn bytes(name: &str, word: &OsString) -> Result<u64> {
    let number = word.to_str().filter(|word| word.bytes().all(|byte| byte.is_ascii_digit()));
    number
        .and_then(|word| word.parse().ok())
        .with_context(|| format!("{name}: is no number of bytes"))
}

fn stats(config: &Config, target: &Path) -> Result<serde_json::Value> {
    let joined = Joined::join(config, target, STATS_DEADLINE)?;
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
        Ok(Usage::Block { .. }) => bail!("has no filesystem"),
        // So a filesystem answers that has given up.
        Err(Error::Io { source, .. }) if source.raw_os_error() == Some(libc::EIO) => {
            let message = format!("the filesystem does not answer ({source}); see the kernel log");
            return Ok(json!({"usage": [], "volume_condition": condition(true, message)}));
        }
        Err(error) => return Err(error.into()),
    };
    let condition = match joined.gone_read_only {
        true => condition(
            true,
            "the filesystem has become read-only, as after an error; see the kernel log".to_owned(),
        ),
        false => condition(false, format!("mounted by {containers} container(s)")),
    };
    Ok(json!({"usage": usage, "volume_condition": condition}))
}

fn resize(config: &Config, target: &Path, minimum: u64, maximum: u64) -> Result<serde_json::Value> {
    ensure!(maximum == 0 || minimum <= maximum, "MIN is more than MAX");
    let joined = Joined::join(config, target, RESIZE_DEADLINE)?;
    let volume = &joined.volume;
    let size = File::open(&volume.device)
        .and_then(|device| sys::block_size_bytes(&device))
        .with_context(|| format!("the size of {}", volume.device.display()))?;
    ensure!(
        size >= minimum,
        "the device has {size} bytes, fewer than MIN ({minimum}): it has to grow first"
    );
    ensure!(
        maximum == 0 || size <= maximum,
        "the device has {size} bytes, more than MAX ({maximum})"
    );
    ensure!(!volume.is_read_only(), "the volume is read-only");
    ensure!(!joined.gone_read_only, "the filesystem has become read-only; see the kernel log");
    if !filesystem::grows_online(volume.fs_type) {
        bail!(
            "growing a mounted {} needs CAP_SYS_RESOURCE, which this process lacks; it grows when it is staged again",
            volume.fs_type
        );
    }
    if filesystem::grows_to(volume.fs_type, size) {
        filesystem::grow(volume.fs_type, &volume.device, &config.work_dir.join(MOUNTED))?;
    }
    Ok(json!({"capacity_bytes": size}))
}

/// Where, in the work directory.
const MOUNTED: &str = "volume";

/// A filesystem that containers have mounted, mounted by this process too.
struct Joined {
    volume: Volume,
    /// How many.
    containers: usize,
    /// It was mounted to be written to, and cannot be any more.
    gone_read_only: bool,
    /// A container's mount, which keeps the filesystem alive.
    _held: OwnedFd,
}

impl Joined {
    fn join(config: &Config, target: &Path, deadline: Duration) -> Result<Self> {
        let target = Target::new("TARGET", target)?;
        let entry = Directory::new(&config.crust_dir).entry(&target);
        let info = entry.mount_info()?.with_context(|| format!("{target} has no entry"))?;
        let (containers, held) = hold(config, &entry, &target, &Volume::new(&info, None)?)?;
        let Held { mount: held, label } = held;
        let volume = Volume::new(&info, label.as_deref())?;
        enter_private_namespace(&config.work_dir)?;
        watch(deadline);
        let at = config.work_dir.join(MOUNTED);
        std::fs::create_dir(&at).with_context(|| format!("making {}", at.display()))?;
        let gone_read_only = match volume.join(&at) {
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) && !volume.is_read_only() => {
                volume.join_read_only(&at).context("joining the filesystem, which is read-only")?;
                true
            }
            joined => joined.map(|()| false).context("joining the filesystem")?,
        };
        Ok(Self { volume, containers, gone_read_only, _held: held })
    }
}

/// A container's mount of a volume.
struct Held {
    mount: OwnedFd,
    label: Option<String>,
}

/// How many containers have the volume mounted, and the mount of one of them.
fn hold(config: &Config, entry: &Entry, target: &Target, volume: &Volume) -> Result<(usize, Held)> {
    let device = std::fs::metadata(&volume.device)
        .with_context(|| format!("looking at {}", volume.device.display()))?;
    let number = format!("{}:{}", major(device.rdev()), minor(device.rdev()));
    let mut held = Vec::new();
    for (pid, label) in claim::processes(entry, &config.runtime)? {
        // It may end at any time.
        let Ok(mounts) = filesystem::mounts_of_process(pid) else { continue };
        let of_volume = |mount: &&Mount| {
            // btrfs has device numbers of its own.
            mount.device == number
                || volume.fs_type == FsType::Btrfs && mount.source == volume.device
        };
        let opened = mounts.iter().filter(of_volume).find_map(|mount| open(pid, mount).ok());
        held.extend(opened.map(|mount| Held { mount, label }));
    }
    let containers = held.len();
    match held.pop() {
        Some(one) => Ok((containers, one)),
        None => Err(NotRunning(target.clone()).into()),
    }
}

/// Opens a mount of another process's namespace, without ever looking at what its files say.
fn open(pid: u32, mount: &Mount) -> io::Result<OwnedFd> {
    let root = File::open(format!("/proc/{pid}/root"))?;
    let path = CString::new(mount.target.as_os_str().as_bytes())?;
    let opened = File::from(sys::open_in_root(&root, &path, libc::O_PATH)?);
    // Something may be mounted over it.
    match sys::mount_id(&opened)? == mount.id {
        true => Ok(opened.into()),
        false => Err(io::ErrorKind::NotFound.into()),
    }
}

/// Ends this process when it takes too long: a filesystem that hangs would hold it for good.
fn watch(deadline: Duration) {
    std::thread::spawn(move || {
        std::thread::sleep(deadline);
        eprintln!("{}: the filesystem does not answer within {deadline:?}", super::PROGRAM);
        std::process::exit(1);
    });
}
