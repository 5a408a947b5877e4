//! Finds loop devices by their backing file, also those of other programs, or by its name. When the
//! XFS of that file has shut down, the kernel reports neither device nor inode, only the name, which
//! is a unique id of this driver.

use std::fs::{self, File, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use linux_raw_sys::loop_device::LO_FLAGS_READ_ONLY;
use nix::sys::stat::{major, minor};

use super::super::error::{Context, Result};
use super::super::{ids, sys};
use super::{DETACH_DEADLINE, Identity, LoopDevice};

/// The paths of the loop devices that are attached to a file or block device.
pub fn attached_loop_devices(backing: &File) -> Result<Vec<PathBuf>> {
    let doing = || "reading a file's attributes".to_owned();
    let wanted = backing.metadata().context(doing)?;
    let is_same = |found: &Metadata| match wanted.file_type().is_block_device() {
        true => found.file_type().is_block_device() && found.rdev() == wanted.rdev(),
        false => (found.dev(), found.ino()) == (wanted.dev(), wanted.ino()),
    };
    let identity = Identity::of(backing).context(doing)?;
    let mut devices = LoopDevice::all()?;
    devices.retain(|device| {
        // The path is relative to another mount namespace. The status needs the right to open the
        // device.
        let by_path = device.backing_path().and_then(|path| fs::metadata(path).ok());
        by_path.is_some_and(|found| is_same(&found))
            || device.status().is_some_and(|info| Identity::of_status(&info) == identity)
    });
    Ok(devices.into_iter().map(|device| device.path).collect())
}

/// The paths of the other writable loop devices with the backing file of this one. Each has a page
/// cache of its own. Empty if it is no loop device.
pub fn twins_of_loop_device(device: &File) -> Result<Vec<PathBuf>> {
    let Ok(own) = sys::loop_status(device) else { return Ok(Vec::new()) };
    let mut twins = LoopDevice::all()?;
    twins.retain(|twin| {
        twin.number != own.lo_number
            && twin.status().is_some_and(|info| {
                Identity::of_status(&info) == Identity::of_status(&own)
                    && info.lo_flags & LO_FLAGS_READ_ONLY as u32 == 0
            })
    });
    Ok(twins.into_iter().map(|twin| twin.path).collect())
}

/// A device and the id in the name of its backing file.
pub type Named = (LoopDevice, String);

impl LoopDevice {
    /// The devices whose backing file has an id as its name.
    pub fn named() -> Result<Vec<Named>> {
        let devices = Self::all()?.into_iter();
        Ok(devices.filter_map(|device| device.name().map(|name| (device, name))).collect())
    }

    /// The named devices whose backing file is on a shut-down filesystem: one that no longer
    /// reports file attributes, as XFS, or the filesystem of `lost`.
    pub fn named_and_lost(lost: Option<&Path>) -> Result<Vec<Named>> {
        let lost = lost.and_then(|path| path.metadata().ok()).map(|metadata| metadata.dev());
        let lost = lost.map(|device| (major(device), minor(device)));
        let mut devices = Self::named()?;
        devices.retain(|(device, _)| {
            let Ok(file) = device.open(false) else { return false };
            match sys::loop_status(&file) {
                Ok(info) => Some(Identity::of_status(&info).device) == lost,
                Err(error) => error.raw_os_error() == Some(libc::EIO),
            }
        });
        Ok(devices)
    }

    /// The id in the name of the backing file, deleted or not.
    fn name(&self) -> Option<String> {
        let file = self.backing_path()?;
        let name = file.trim_end_matches(" (deleted)").rsplit_once('/')?.1;
        ids::name_of(name).map(|_| name.to_owned())
    }

    /// The path of the backing file as the kernel reports it.
    fn backing_path(&self) -> Option<String> {
        let path = format!("/sys/block/loop{}/loop/backing_file", self.number);
        Some(fs::read_to_string(path).ok()?.trim_end_matches('\n').to_owned())
    }

    /// Detaches the device from the backing file named `id`, and waits until that is done.
    pub fn release_named(&self, id: &str) -> Result<()> {
        self.release_while(DETACH_DEADLINE, |_| Ok(self.name().as_deref() == Some(id)))
    }
}
