//! Creating filesystems with one fixed set of features, whatever the version and the configuration
//! of the tools: those that the oldest supported kernel, Linux 5.10, mounts for writing. A snapshot
//! or a pool that was made on a new node is then usable on an old one.
//!
//! Features that a tool does not know are neither requested nor declined: such a tool cannot
//! produce them.

use std::path::Path;
use std::process::Command;

use super::super::command;
use super::super::error::Result;
use super::super::model::FsType;
use super::{await_tools, tool};

/// Creates a filesystem on a device of `bytes` bytes whose content is not needed. Nothing is
/// discarded first: the device is new, or contains the remains of an interrupted attempt.
pub fn make(fs_type: FsType, device: &Path, bytes: u64) -> Result<()> {
    let mut command = match fs_type {
        FsType::Ext4 => mkfs_ext4(bytes),
        FsType::Xfs => mkfs_xfs()?,
        FsType::Btrfs => mkfs_btrfs()?,
    };
    await_tools(device)?;
    command::run(command.arg(device))
}

/// All features of an ext4. `none` clears those of mke2fs.conf.
const EXT4: &str = "none,has_journal,ext_attr,dir_index,filetype,extent,64bit,flex_bg,sparse_super,large_file,\
                    huge_file,dir_nlink,extra_isize,metadata_csum";

fn mkfs_ext4(bytes: u64) -> Command {
    // A larger ext4 grows without reserved space for descriptors.
    let resize = if bytes < 16 << 40 { ",resize_inode" } else { "" };
    let features = format!("{EXT4}{resize}");
    let per_inode = bytes_per_inode(bytes).to_string();
    let mut command = tool("mkfs.ext4", &["-q", "-F", "-m", "0", "-b", "4096", "-I", "256"]);
    command.args(["-i", &per_inode, "-e", "continue", "-O", &features, "-E", "nodiscard"]);
    command
}

/// As in the mke2fs.conf that e2fsprogs installs, by the size of the volume.
const fn bytes_per_inode(bytes: u64) -> u64 {
    match bytes >> 20 {
        ..3 => 8192,
        3..512 => 4096,
        512..0x40_0000 => 16_384,
        0x40_0000..0x100_0000 => 32_768,
        _ => 65_536,
    }
}

/// Options of mkfs.xfs: flag, feature, value, and whether every supported version (4.9) knows it.
const XFS: [(&str, &str, bool, bool); 11] = [
    ("-m", "crc", true, true),
    ("-m", "finobt", true, true),
    ("-m", "reflink", true, true),
    // It makes a clone of a pool file two to three times as expensive and can run out of space.
    ("-m", "rmapbt", false, true),
    // Linux 5.10, where it is experimental.
    ("-m", "inobtcount", false, false),
    // Linux 5.10, where it is experimental. Without it, timestamps end in 2038.
    ("-m", "bigtime", true, false),
    ("-m", "metadir", false, false),
    ("-i", "sparse", true, true),
    // Linux 5.19.
    ("-i", "nrext64", false, false),
    // Linux 6.10, like the next.
    ("-i", "exchange", false, false),
    ("-n", "parent", false, false),
];

/// mkfs.xfs with the features of [`XFS`].
pub fn mkfs_xfs() -> Result<Command> {
    let usage = command::output(&mut tool("mkfs.xfs", &[]))?;
    let knows = |name: &str| usage.contains(&format!("{name}=0|1"));
    let mut command = tool("mkfs.xfs", &["-q", "-f", "-K"]);
    for (flag, name, on, always) in XFS {
        if always || knows(name) {
            command.arg(flag).arg(format!("{name}={}", u8::from(on)));
        }
    }
    Ok(command)
}

/// Features of a btrfs, on or off.
const BTRFS: [(&str, bool); 7] = [
    ("extref", true),
    ("skinny-metadata", true),
    ("no-holes", true),
    (FREE_SPACE_TREE, true),
    ("mixed-bg", false),
    // Linux 6.1.
    ("block-group-tree", false),
    ("quota", false),
];
const FREE_SPACE_TREE: &str = "free-space-tree";

fn mkfs_btrfs() -> Result<Command> {
    let mut command = tool("mkfs.btrfs", &["-q", "-f", "-K", "-d", "single", "-m", "dup"]);
    command.args(["-s", "4096", "-n", "16384"]);
    let features = known_to_btrfs("-O")?;
    for (name, on) in BTRFS {
        if features.iter().any(|known| known == name) {
            command.arg("-O").arg(format!("{}{name}", if on { "" } else { "^" }));
        } else if name == FREE_SPACE_TREE && known_to_btrfs("-R")?.iter().any(|known| known == name)
        {
            // Before btrfs-progs 6.3.
            command.args(["-R", name]);
        }
    }
    Ok(command)
}

/// The features that mkfs.btrfs lists for an option.
fn known_to_btrfs(option: &str) -> Result<Vec<String>> {
    let list = command::output(&mut tool("mkfs.btrfs", &[option, "list-all"]))?;
    let names = list.lines().filter_map(|line| line.split_whitespace().next());
    Ok(names.map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_inodes_depends_on_the_size_only() {
        let ratios = [1, 3, 511, 512, 4 << 20, 16 << 20].map(|mib| bytes_per_inode(mib << 20));
        assert_eq!(ratios, [8192, 4096, 4096, 16_384, 32_768, 65_536]);
    }
}
