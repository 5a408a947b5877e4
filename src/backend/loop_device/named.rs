//! Finds loop devices by the name of their backing file. When the XFS of that file has shut down,
//! the kernel reports neither device nor inode, only the name, which is a unique id of this driver.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::sys::stat::{major, minor};

use super::super::error::Result;
use super::super::{ids, sys};
use super::{DETACH_DEADLINE, Identity, LoopDevice};

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
        let path = format!("/sys/block/loop{}/loop/backing_file", self.number);
        let file = fs::read_to_string(path).ok()?;
        let file = file.trim_end_matches('\n').trim_end_matches(" (deleted)");
        let (_, name) = file.rsplit_once('/')?;
        ids::name_of(name).map(|_| name.to_owned())
    }

    /// Detaches the device from the backing file named `id`, and waits until that is done.
    pub fn release_named(&self, id: &str) -> Result<()> {
        self.release_while(DETACH_DEADLINE, |_| Ok(self.name().as_deref() == Some(id)))
    }
}
