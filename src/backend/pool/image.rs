//! A pool on its own XFS, in an image file in the data directory. The XFS is mounted detached: no
//! mount table shows it, so nobody defragments it, and nothing is left of it when the last user
//! goes, be it this process (however it ends) or the last volume that is attached.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;

use tracing::info;

use super::super::command;
use super::super::error::{Context, Error, Result};
use super::super::fail_point::reach;
use super::super::loop_device::{Lifetime, LoopDevice};
use super::super::sys;
use super::{ReflinkPool, filesystem_room, new_file, sync_directory};

/// mkfs.xfs makes none smaller.
const MIN_BYTES: u64 = 300 << 20;

pub fn path(data_dir: &Path) -> PathBuf {
    data_dir.join("pool.img")
}

/// Mounts the image of `data_dir`; makes it first, of `size` bytes, where there is none.
pub fn open(data_dir: &Path, size: Option<u64>) -> Result<ReflinkPool> {
    let image = path(data_dir);
    if !image.exists() {
        make(data_dir, size)?;
    }
    let backing = File::options()
        .read(true)
        .write(true)
        .open(&image)
        .context(|| format!("opening {}", image.display()))?;
    let (device, handle) = attach(&backing)?;
    let mount = mount(&device)?;
    drop(handle);
    ReflinkPool::on_image(mount, data_dir)
}

/// The device of the image, held open. One that is still there serves volumes that stayed attached:
/// XFS then hands out the mount that it already has.
fn attach(backing: &File) -> Result<(LoopDevice, File)> {
    if let Some(device) = LoopDevice::find(backing)?.into_iter().next() {
        let handle = device.open(true)?;
        // It may have gone with its last user before it was opened; now it cannot.
        if LoopDevice::find(backing)?.contains(&device) {
            return Ok((device, handle));
        }
    }
    LoopDevice::attach(backing, Lifetime::LastUser)
}

fn mount(device: &LoopDevice) -> Result<OwnedFd> {
    let source = device.path().to_string_lossy();
    // nouuid: a copy of a pool may be looked at beside the pool. discard: what is deleted in the pool
    // becomes free below it.
    let mounted = sys::detached_mount(c"xfs", &source, &["nouuid", "discard"]).context(|| {
        format!("mounting the pool image on {source} (is XFS in this kernel, and the image whole?)")
    })?;
    reach("image.mounted").map(|()| mounted)
}

/// Makes the image under a temporary name; what an interrupted attempt left is overwritten.
fn make(data_dir: &Path, size: Option<u64>) -> Result<()> {
    let size = match size {
        Some(size) => size,
        None => filesystem_room(data_dir)?.available / 10 * 9,
    };
    let size = size - size % 4096;
    if size < MIN_BYTES {
        return Err(Error::invalid(
            "pool_size",
            format!("an image of {size} bytes is too small for XFS; at least {MIN_BYTES}"),
        ));
    }
    let temporary = data_dir.join("pool.img.part");
    if let Ok(left_over) = File::options().read(true).write(true).open(&temporary) {
        LoopDevice::detach_all(&left_over)?;
    }
    let file = new_file(&temporary)?;
    file.set_len(size).context(|| format!("sizing {}", temporary.display()))?;
    reach("image.sized")?;
    let (device, handle) = LoopDevice::attach(&file, Lifetime::LastUser)?;
    // rmapbt doubles to trebles the cost of a clone and can run out of metadata room.
    command::run(
        Command::new("mkfs.xfs")
            .args(["-q", "-f", "-K", "-m", "reflink=1,rmapbt=0", "-L", "csi-loopback"])
            .arg(device.path()),
    )?;
    reach("image.formatted")?;
    handle.sync_all().context(|| format!("flushing {}", temporary.display()))?;
    drop(handle);
    file.sync_all().context(|| format!("flushing {}", temporary.display()))?;
    reach("image.flushed")?;
    fs::rename(&temporary, path(data_dir)).context(|| "publishing the pool image".to_owned())?;
    reach("image.named")?;
    info!(bytes = size, "made the pool image");
    sync_directory(data_dir)
}
