//! Refuses to overwrite a file or block device that another program uses: a loop device, a virtual
//! machine, or a driver's pool. There is no flag to do it anyway.

use std::fs::File;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::backend::{self, sys};

/// Checks a path before a file is opened or made there.
pub fn check_path(path: &Path) -> Result<()> {
    let Some(data_dir) = backend::data_dir_of(path) else { return Ok(()) };
    bail!(
        "{} belongs to the pool in {}; name a path outside of it",
        path.display(),
        data_dir.display()
    )
}

/// Checks an existing regular file or block device that is opened for writing. (The kernel itself
/// refuses an exclusive open of a device that is mounted, or part of one.)
pub fn check_open(path: &Path, file: &File) -> Result<()> {
    let shown = path.display();
    let devices = backend::attached_loop_devices(file)
        .with_context(|| format!("{shown}: find its loop devices"))?;
    if let Some(device) = devices.first() {
        let device = device.display();
        bail!(
            "{shown} is attached to {device}; unmount it, detach it (losetup -d {device}) and try again"
        );
    }
    // An error means that the filesystem, or the user's rights, do not allow the question.
    if sys::has_other_writer(file).unwrap_or(false) {
        bail!("{shown} is open for writing in another program; stop that program and try again");
    }
    Ok(())
}
