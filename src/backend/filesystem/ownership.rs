//! Gives a mounted tree to a group, as kubelet does for fsGroup (CSI volume_mount_group).

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, lchown};
use std::path::Path;

use super::super::error::{Context, Result};

const SETGID: u32 = 0o2000;
const DIRECTORY_BITS: u32 = SETGID | 0o770;
const FILE_BITS: u32 = 0o660;

/// Makes `group` own everything below `root` and gives it the owner's rights, with setgid on
/// directories so that new files follow. Does nothing when the root is already so: the tree was
/// done before. Symbolic links are not followed.
pub fn give_to_group(root: &Path, group: u32) -> Result<()> {
    let metadata =
        fs::symlink_metadata(root).context(|| format!("looking at {}", root.display()))?;
    if metadata.gid() == group && metadata.mode() & DIRECTORY_BITS == DIRECTORY_BITS {
        return Ok(());
    }
    // The root comes last: while it is not done, nothing is.
    give_children(root, group)
        .and_then(|()| give(root, &metadata, group))
        .context(|| format!("giving {} to group {group} (volume_mount_group)", root.display()))
}

fn give_children(directory: &Path, group: u32) -> io::Result<()> {
    let mut pending = vec![directory.to_owned()];
    while let Some(directory) = pending.pop() {
        for entry in fs::read_dir(&directory)? {
            let path = entry?.path();
            let metadata = fs::symlink_metadata(&path)?;
            give(&path, &metadata, group)?;
            if metadata.is_dir() {
                pending.push(path);
            }
        }
    }
    Ok(())
}

fn give(path: &Path, metadata: &Metadata, group: u32) -> io::Result<()> {
    lchown(path, None, Some(group))?;
    let bits = match metadata.file_type() {
        kind if kind.is_symlink() => return Ok(()),
        kind if kind.is_dir() => DIRECTORY_BITS,
        _ => FILE_BITS,
    };
    fs::set_permissions(path, fs::Permissions::from_mode(metadata.mode() | bits))
}
