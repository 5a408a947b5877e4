//! Loop devices by the name of their backing file. When the XFS of that file has shut down, the kernel reports
//! neither its device nor its inode, and the name is all that remains. It is an id of this driver, unique for ever.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::sys::stat::{major, minor};

use super::super::error::Result;
use super::super::{ids, sys};
use super::{DETACH_DEADLINE, Identity, LoopDevice};

/// A device and the id that names its backing file.
pub type Named = (LoopDevice, String);

impl LoopDevice {
    /// The devices whose backing file is named by an id.
    pub fn named() -> Result<Vec<Named>> {
        let devices = Self::all()?.into_iter();
        Ok(devices.filter_map(|device| device.name().map(|name| (device, name))).collect())
    }

    /// Those of them whose backing file is on a filesystem that has shut down: one that no longer reports on its files, as
    /// XFS, or the one that `lost` is on.
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

    /// The id that names the backing file, deleted or not.
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
