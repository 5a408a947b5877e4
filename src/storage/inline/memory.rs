//! Inline volumes in memory: each is a tmpfs mounted at its target. Only the mount keeps it, so it
//! survives this process and ends with the pod or at a reboot. With the mount option `noswap` it is
//! never written to disk.

use std::fs;
use std::path::Path;

use nix::errno::Errno;
use nix::mount::{MsFlags, mount};

use super::super::error::{Context, Error, Result};
use super::super::fail_point::reach;
use super::super::filesystem::{self, Mount};
use super::super::model::{Access, Inline};
use super::super::target::check_directory;
use super::CONTENT_FLAGS;

/// Minimum bytes of a volume per file: each file also needs kernel memory.
const BYTES_PER_FILE: u64 = 2048;

/// Whether a mount belongs to the volume. Its source is the unique id of the volume.
pub fn is_of(row: &Inline, mount: &Mount) -> bool {
    mount.source == Path::new(&row.id)
}

pub fn is_mounted(row: &Inline) -> Result<bool> {
    Ok(filesystem::mount_at(&row.target)?.is_some_and(|mount| is_of(row, &mount)))
}

/// Mounts the volume at its target, unless it is mounted.
pub fn mount_at_target(row: &Inline) -> Result<()> {
    let target = &row.target;
    fs::create_dir_all(target).context(|| format!("creating {}", target.display()))?;
    reach("inline.directory_made")?;
    if is_mounted(row)? {
        return Ok(());
    }
    check_directory("target_path", target)?;
    let flags = flags(row)?;
    let (bytes, files) = (row.capacity_bytes, row.capacity_bytes / BYTES_PER_FILE);
    let options = format!("size={bytes},nr_inodes={files},mode=0755");
    let make =
        |options: &str| mount(Some(row.id.as_str()), target, Some("tmpfs"), flags, Some(options));
    match make(&format!("{options},noswap")) {
        // Linux before 6.4, or a container in a user namespace.
        Err(Errno::EINVAL | Errno::EPERM) => {
            tracing::warn!(
                "this kernel's tmpfs does not support noswap: an inline volume in memory may be swapped out"
            );
            make(&options)
        }
        made => made,
    }
    .context(|| format!("mounting a tmpfs at {}", target.display()))?;
    reach("memory.mounted")
}

/// Parses the generic mount flags. Options of tmpfs are rejected, because they could remove its
/// limits.
fn flags(row: &Inline) -> Result<MsFlags> {
    let Access::Mount { flags, .. } = &row.request.capability.access else {
        return Ok(MsFlags::empty());
    };
    let own = row.request.read_only_content.then_some(CONTENT_FLAGS);
    let all: Vec<String> = flags.iter().map(String::as_str).chain(own).map(str::to_owned).collect();
    match filesystem::parse_options(&all)? {
        (flags, data) if data.is_empty() => Ok(flags),
        _ => Err(Error::invalid(
            "mount_flags",
            "contains filesystem options, which a volume in memory does not support; remove them",
        )),
    }
}

pub fn unmount(row: &Inline) -> Result<()> {
    filesystem::unmount(&row.target, |mount| is_of(row, mount))
}
