//! `crust attach`: the hook that attaches the volumes in a container. Runtimes call it (createRuntime)
//! after they have made the container's mounts, with a placeholder for each volume, and before the
//! container gets its root directory. The mounts are detached and belong to the process that creates
//! the container. This process enters the container's mount namespace and replaces the placeholders.

use std::ffi::{CString, OsStr, OsString};
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail, ensure};
use nix::mount::{MntFlags, umount2};
use serde::{Deserialize, Serialize};

use super::process::Process;
use super::sub_path;
use storage::filesystem::{self, Mount};
use storage::sys;

/// Maximum bytes of a container's state.
const MAX_STATE: u64 = 1 << 20;

/// What the hook does. Descriptors are those of the creating process.
#[derive(Debug, Serialize, Deserialize)]
pub struct Job {
    /// The creating process ([`Process::unique`]).
    pub creator: String,
    /// A pipe, to which one byte is written in the end.
    pub report: RawFd,
    /// A directory of the creating process, to which a placeholder is moved for a moment.
    pub aside: PathBuf,
    /// In the order of the container's mounts.
    pub volumes: Vec<VolumeMount>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct VolumeMount {
    /// The detached mount.
    pub mount: RawFd,
    /// The last components of the placeholder's path.
    pub placeholder: PathBuf,
}

impl Job {
    /// The arguments of the hook, with the name of the program.
    pub fn arguments(&self) -> Result<Vec<String>> {
        let job = serde_json::to_string(self).context("the job of the hook")?;
        Ok([super::PROGRAM, "crust", "attach", &job].map(str::to_owned).to_vec())
    }
}

/// Runs the hook. `None`: the arguments are others.
pub fn run(arguments: &[OsString]) -> Option<ExitCode> {
    match arguments {
        [crust, attach, job] if crust == "crust" && attach == "attach" => {
            Some(match attach_all(job) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => {
                    eprintln!("{}: {error:#}", super::PROGRAM);
                    ExitCode::FAILURE
                }
            })
        }
        _ => None,
    }
}

/// The state of the container (OCI runtime specification), on standard input.
#[derive(Debug, Deserialize)]
struct State {
    pid: u32,
}

fn attach_all(job: &OsStr) -> Result<()> {
    let job: Job = serde_json::from_slice(job.as_bytes()).context("the job of the hook")?;
    let mut state = Vec::new();
    std::io::stdin().take(MAX_STATE).read_to_end(&mut state).context("reading the state")?;
    let State { pid } = serde_json::from_slice(&state).context("the container's state")?;
    let creator = Process::of_unique(&job.creator).context("the job of the hook")?;
    let creator = creator.living().context("reading /proc")?;
    let creator = creator.context("the process that creates the container has ended")?;
    let path = |fd: RawFd| format!("/proc/{creator}/fd/{fd}");
    let mut volumes = Vec::new();
    for VolumeMount { mount, placeholder } in &job.volumes {
        volumes.push((open_path(Path::new(&path(*mount)))?, placeholder));
    }
    let report = File::options().write(true).open(path(job.report));
    let mut report = report.context("opening the creating process's pipe")?;
    let namespace = format!("/proc/{pid}/ns/mnt");
    let namespace = File::open(&namespace).with_context(|| namespace.clone())?;
    let inode = |file: &File| Ok::<_, std::io::Error>(file.metadata()?.ino());
    let own = File::open("/proc/self/ns/mnt").context("/proc/self/ns/mnt")?;
    ensure!(inode(&own)? != inode(&namespace)?, "the container has no mount namespace of its own");
    // The container's /proc may not be usable.
    let table = format!("/proc/{pid}/mountinfo");
    let mut table = File::open(&table).with_context(|| table.clone())?;
    sys::enter_mount_namespace(&namespace).context("entering the container's mount namespace")?;
    for (volume, placeholder) in &volumes {
        attach(&mut table, volume, placeholder, &job.aside)
            .with_context(|| format!("attaching a volume at {}", placeholder.display()))?;
    }
    report.write_all(b"1").context("reporting the end")
}

fn open_path(path: &Path) -> Result<File> {
    let opened = File::options().read(true).custom_flags(libc::O_PATH).open(path);
    opened.with_context(|| format!("opening {}", path.display()))
}

/// Opens a mount of this namespace, or its mount point if `id` is the mount that contains it.
fn open_mount(path: &Path, id: u64) -> Result<File> {
    let what = || format!("opening {}", path.display());
    let root = open_path(Path::new("/"))?;
    let name = CString::new(path.as_os_str().as_bytes())?;
    let opened = sys::open_without_links(&root, &name, libc::O_PATH).with_context(what)?;
    let opened = File::from(opened);
    ensure!(sys::mount_id(&opened)? == id, "{}: another mount covers it", what());
    Ok(opened)
}

/// Replaces a placeholder. Mounts that the runtime has made within it are moved to the volume.
fn attach(table: &mut File, volume: &File, placeholder: &Path, aside: &Path) -> Result<()> {
    let mounts = read(table)?;
    let mut all: Vec<&Mount> =
        mounts.iter().filter(|mount| mount.root.ends_with(placeholder)).collect();
    // A mount of a directory of the host that contains the container's root has copies further down.
    all.sort_by_key(|mount| depth(mount));
    let Some((found, copies)) = all.split_first() else {
        bail!("the runtime has not mounted the placeholder")
    };
    for copy in copies {
        ensure!(depth(copy) > depth(found), "the runtime has mounted the placeholder twice");
        // A covered copy cannot be reached, not even by the container.
        if open_mount(&copy.target, copy.id).is_ok() {
            unmount(&copy.target)
                .with_context(|| format!("unmounting the copy at {}", copy.target.display()))?;
        }
    }
    let held = open_mount(&found.target, found.id)?;
    let mut within = Vec::new();
    for child in mounts.iter().filter(|mount| mount.parent == found.id) {
        let path = child.target.strip_prefix(&found.target)?;
        within.push((path, open_mount(&child.target, child.id)?));
    }
    if within.is_empty() {
        unmount(&found.target).context("unmounting the placeholder")?;
        let point = open_mount(&found.target, found.parent)?;
        return attach_volume(volume, &point);
    }
    // The mounts within it are moved and not copied: crun makes them read-only after this hook.
    sys::attach(&held, &open_path(aside)?).context("moving the placeholder")?;
    let point = open_mount(&found.target, found.parent)?;
    attach_volume(volume, &point)?;
    for (path, mount) in within {
        attach_within(volume, path, &mount)
            .with_context(|| format!("the mount at {} of the volume", path.display()))?;
    }
    unmount(aside).context("unmounting the placeholder")
}

fn attach_volume(volume: &File, point: &File) -> Result<()> {
    sys::attach(volume, point).map_err(|e| {
        // The kernel mounts no removed directory, nor on one.
        let was_removed = volume.metadata().is_ok_and(|metadata| metadata.nlink() == 0);
        match e.raw_os_error() {
            Some(libc::ENOENT) if was_removed => {
                anyhow!("its sub-path of the volume was removed meanwhile")
            }
            _ => anyhow::Error::new(e).context("attaching the volume"),
        }
    })
}

fn attach_within(volume: &File, path: &Path, mount: &File) -> Result<()> {
    let point = sub_path::mount_point(volume, path, mount.metadata()?.is_dir())?;
    Ok(sys::attach(mount, &point)?)
}

fn unmount(path: &Path) -> nix::Result<()> {
    umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW)
}

fn depth(mount: &Mount) -> usize {
    mount.target.components().count()
}

fn read(table: &mut File) -> Result<Vec<Mount>> {
    let mut text = Vec::new();
    table.rewind().context("reading the mount table")?;
    table.read_to_end(&mut text).context("reading the mount table")?;
    Ok(filesystem::parse_mounts(&text))
}
