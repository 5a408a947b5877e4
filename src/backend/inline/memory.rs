//! Volumes in memory: a tmpfs of its own, mounted at the target. The mount alone keeps it, so that it outlives this process and
//! goes with the pod, or at a reboot. Nothing of it is ever on a disk, where the kernel knows `noswap`.

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

/// Bytes of a volume for each of its files, at least: a file costs memory of the kernel beside what it holds.
const BYTES_PER_FILE: u64 = 2048;

/// Whether a mount is that of the volume. Its source is the id, which is unique for ever.
pub fn is_of(row: &Inline, mount: &Mount) -> bool {
    mount.source == Path::new(&row.id)
}

pub fn is_shown(row: &Inline) -> Result<bool> {
    Ok(filesystem::mount_at(&row.target)?.is_some_and(|mount| is_of(row, &mount)))
}

/// Mounts the volume at its target, unless it is there.
pub fn show(row: &Inline) -> Result<()> {
    let target = &row.target;
    fs::create_dir_all(target).context(|| format!("making {}", target.display()))?;
    reach("inline.directory_made")?;
    if is_shown(row)? {
        return Ok(());
    }
    check_directory("target_path", target)?;
    let flags = flags(row)?;
    let (bytes, files) = (row.capacity_bytes, row.capacity_bytes / BYTES_PER_FILE);
    let options = format!("size={bytes},nr_inodes={files},mode=0755");
    let make =
        |options: &str| mount(Some(row.id.as_str()), target, Some("tmpfs"), flags, Some(options));
    match make(&format!("{options},noswap")) {
        // Linux before 6.4, or a container that is not of the first user namespace.
        Err(Errno::EINVAL | Errno::EPERM) => {
            tracing::warn!(
                "this kernel's tmpfs knows no noswap: an inline volume in memory may be swapped out"
            );
            make(&options)
        }
        made => made,
    }
    .context(|| format!("mounting a tmpfs at {}", target.display()))?;
    reach("memory.mounted")
}

/// What any filesystem knows. Other options would be tmpfs's own, and could take its bounds away.
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
            "has options of a filesystem, and a volume in memory has none; leave them out",
        )),
    }
}

pub fn unmount(row: &Inline) -> Result<()> {
    filesystem::unmount(&row.target, |mount| is_of(row, mount))
}
