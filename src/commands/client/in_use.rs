//! Refuses to overwrite a file or block device that another program uses: a loop device, a virtual
//! machine, or a driver's pool. There is no flag to do it anyway.

use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use anyhow::{Context, Result, bail};

use storage::sys;

/// Checks a path before a file is opened or made there.
pub fn check_path(path: &Path) -> Result<()> {
    let Some(data_dir) = storage::data_dir_of(path) else { return Ok(()) };
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
    let devices = storage::attached_loop_devices(file)
        .with_context(|| format!("{shown}: find its loop devices"))?;
    if let Some(device) = devices.first() {
        let device = device.display();
        bail!(
            "{shown} is attached to {device}; unmount it, detach it (losetup -d {device}) and try again"
        );
    }
    if let Some(twin) = storage::twins_of_loop_device(file)?.first() {
        let twin = twin.display();
        bail!("{twin} has the same file as {shown}; detach it (losetup -d {twin}) and try again");
    }
    // An error means that the filesystem, or the user's rights, do not allow the question.
    if sys::has_other_writer(file).unwrap_or(false) {
        bail!("{shown} is open for writing in another program; stop that program and try again");
    }
    if let Some(process) = writer_of_device(file) {
        bail!("{shown} is open for writing in process {process}; stop it and try again");
    }
    Ok(())
}

/// Another process that has a block device open for writing without claiming it, such as a virtual
/// machine. The kernel counts no such users, so the processes that this one may inspect are
/// searched: what is found is in use, and nothing else is shown by it.
fn writer_of_device(file: &File) -> Option<String> {
    let device = file.metadata().ok().filter(|meta| meta.file_type().is_block_device())?.rdev();
    let is_device = |path: &Path| {
        path.metadata()
            .is_ok_and(|meta| meta.file_type().is_block_device() && meta.rdev() == device)
    };
    let entries = fs::read_dir("/proc").ok()?.flatten();
    let processes = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let mut others = processes.filter(|process| *process != std::process::id());
    let found = others.find(|process| {
        let infos = fs::read_dir(format!("/proc/{process}/fdinfo")).into_iter().flatten().flatten();
        // The flags first: a look at a file of a dead server may hang.
        infos.filter(|info| is_for_writing(&info.path())).any(|info| {
            is_device(&Path::new(&format!("/proc/{process}/fd")).join(info.file_name()))
        })
    })?;
    let name = fs::read_to_string(format!("/proc/{found}/comm")).unwrap_or_default();
    Some(format!("{found} ({})", name.trim_end().escape_debug()))
}

/// Whether a file of /proc/PID/fdinfo is that of an open for writing.
fn is_for_writing(info: &Path) -> bool {
    let text = fs::read_to_string(info).unwrap_or_default();
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok());
    flags.is_some_and(|flags| matches!(flags & libc::O_ACCMODE, libc::O_WRONLY | libc::O_RDWR))
}
