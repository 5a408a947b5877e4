//! Blocks in memory: a file on a tmpfs of its own, mounted nowhere, that the loop device alone keeps. It outlives this
//! process like any other device, nobody else finds a way to it, and all of it is gone when the device lets go, or at a
//! reboot.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;

use super::super::error::{Context, Result};
use super::super::fail_point::{meet, reach};
use super::super::loop_device::{Lifetime, LoopDevice};
use super::super::sys;

/// What a tmpfs has room for beside the blocks, in bytes.
const SLACK: u64 = 64 << 10;

/// The device over the blocks of this name.
pub fn find(name: &str) -> Result<Option<LoopDevice>> {
    LoopDevice::find_detached(name)
}

/// Makes blocks of this name, which is unique for ever, behind a device that alone keeps them. Whatever fails, nothing is
/// left.
pub fn make(name: &str, bytes: u64) -> Result<LoopDevice> {
    let root = mount(bytes).context(|| "mounting a tmpfs".to_owned())?;
    let file = new_file(&root, name).context(|| "making a file in memory".to_owned())?;
    reach("memory.file_made")?;
    file.set_len(bytes).context(|| "sizing a file in memory".to_owned())?;
    reach("memory.sized")?;
    LoopDevice::attach(&file, Lifetime::Explicit).map(|(device, _)| device)
}

fn new_file(root: &OwnedFd, name: &str) -> io::Result<File> {
    let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
    Ok(openat(root, name, flags, Mode::S_IRUSR | Mode::S_IWUSR)?.into())
}

/// A tmpfs for so many bytes. Secrets may be in it: they are not to be swapped out, where the kernel can promise that.
fn mount(bytes: u64) -> io::Result<OwnedFd> {
    let size = format!("size={}", bytes.saturating_add(SLACK));
    let options = [size.as_str(), "mode=0700", "noswap"];
    let mounted = match sys::detached_mount(c"tmpfs", "csi-loopback", &options) {
        // Linux before 6.4, or a container that is not of the first user namespace.
        Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EPERM)) => {
            tracing::warn!(
                "this kernel's tmpfs knows no noswap: an inline volume in memory may be swapped out"
            );
            sys::detached_mount(c"tmpfs", "csi-loopback", &options[..2])?
        }
        mounted => mounted?,
    };
    meet("memory.mounted").map(|()| mounted)
}
