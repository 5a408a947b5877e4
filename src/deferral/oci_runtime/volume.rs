//! Mounts a volume. The entry is validated again: crust_ops has validated it, but others may have
//! written to its directory.

use std::io;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::crust::{GroupChangePolicy, MountInfo, check};
use storage::filesystem;
use storage::{Error, FsType};

/// How long to retry a busy device: the kernel releases a filesystem asynchronously.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);
const BUSY_INTERVAL: Duration = Duration::from_millis(20);

/// The filesystem of a volume, ready to be mounted.
#[derive(Debug)]
pub struct Volume {
    pub device: PathBuf,
    pub fs_type: FsType,
    options: Vec<String>,
    group: Option<(u32, GroupChangePolicy)>,
}

impl Volume {
    /// With a label, SELinux uses it for the whole filesystem.
    pub fn new(info: &MountInfo, label: Option<&str>) -> Result<Self> {
        let device = check::block_device("mountInfo.json: device", &info.device)?;
        check::fs_type("mountInfo.json: fstype", &info.fs_type)?;
        let fs_type: FsType = info.fs_type.parse().map_err(|_| {
            anyhow::anyhow!("mountInfo.json: fstype: {:?} is not supported", info.fs_type)
        })?;
        let mut options = check::options("mountInfo.json: options", &info.options)?;
        // The reason names at most an option from a fixed list, which is no secret.
        filesystem::check_options(&options).map_err(|error| match error {
            Error::Invalid { reason, .. } => anyhow::anyhow!("mountInfo.json: options: {reason}"),
            error => error.into(),
        })?;
        if let Some(label) = label {
            ensure!(
                Path::new("/sys/fs/selinux/status").exists(),
                "linux.mountLabel: SELinux is disabled on this node, so the volume cannot be labelled"
            );
            ensure!(
                !label.contains(['"', '\n', '\0']),
                "linux.mountLabel: {label:?} is not a valid label"
            );
            options.push(format!("context=\"{label}\""));
        }
        Ok(Self { device, fs_type, options, group: info.group()? })
    }

    pub fn is_read_only(&self) -> bool {
        self.options.iter().flat_map(|option| option.split(',')).any(|option| option == "ro")
    }

    /// Waits until this kernel has no mount of the filesystem: without a claim, nothing may have one.
    ///
    /// # Errors
    /// A process that no claim names uses it, as after the loss of the entries' directory.
    pub fn wait_until_free(&self) -> Result<()> {
        let until = Instant::now() + BUSY_TIMEOUT;
        while filesystem::is_mounted(&self.device)? {
            ensure!(
                Instant::now() < until,
                "{} is mounted by a process that has not claimed the volume; stop the containers that use it",
                self.device.display()
            );
            sleep(BUSY_INTERVAL);
        }
        Ok(())
    }

    /// Mounts the volume at `path`, which only this mount namespace shows.
    pub fn mount(&self, path: &Path) -> Result<()> {
        let until = Instant::now() + BUSY_TIMEOUT;
        loop {
            let mounted =
                filesystem::mount_device(&self.device, path, self.fs_type, &self.options, false);
            match mounted {
                Err(Error::Io { source, .. }) if source.raw_os_error() == Some(libc::EBUSY) => {
                    if Instant::now() > until {
                        bail!(
                            "{} is in use, or mounted with other options (read-only or writable); stop the process that uses it",
                            self.device.display()
                        );
                    }
                }
                mounted => {
                    return mounted.with_context(|| {
                        format!(
                            "{} contains no mountable {} filesystem",
                            self.device.display(),
                            self.fs_type
                        )
                    });
                }
            }
            sleep(BUSY_INTERVAL);
        }
    }

    /// Mounts at `path` a filesystem that is already mounted elsewhere. EBUSY: it is mounted
    /// read-only there, and would be writable here.
    pub fn join(&self, path: &Path) -> io::Result<()> {
        self.join_as(path, false)
    }

    pub fn join_read_only(&self, path: &Path) -> io::Result<()> {
        self.join_as(path, true)
    }

    fn join_as(&self, path: &Path, read_only: bool) -> io::Result<()> {
        match filesystem::mount_device(&self.device, path, self.fs_type, &self.options, read_only) {
            Err(Error::Io { source, .. }) => Err(source),
            joined => joined.map_err(io::Error::other),
        }
    }

    /// Changes the group of the files as the entry requests, as kubelet would. Does nothing for a
    /// read-only volume.
    pub fn apply_group(&self, root: &Path) -> Result<()> {
        let Some((group, policy)) = self.group.filter(|_| !self.is_read_only()) else {
            return Ok(());
        };
        match policy {
            GroupChangePolicy::Always => filesystem::give_all_to_group(root, group),
            GroupChangePolicy::OnRootMismatch => filesystem::give_to_group(root, group),
        }
        .context("fsGroup")
    }
}
