//! Growing a filesystem to the size of its device: by the kernel while it is mounted, or, for an
//! ext4 that the kernel cannot or must not grow, by resize2fs on an unmounted device. The kernel
//! logs every step of a growth. resize2fs does not: an interrupted run destroys the filesystem, so
//! it runs on copies only.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::super::command;
use super::super::error::{Context, Error, Result};
use super::super::fail_point::reach;
use super::super::model::FsType;
use super::super::sys;
use super::tool;

/// How a filesystem grows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// By the kernel, while it is mounted.
    Mounted,
    /// By resize2fs, on an unmounted copy.
    Unmounted,
}

/// How the filesystem on `device` grows to `bytes`. The kernel needs CAP_SYS_RESOURCE for ext4. It
/// also changes the layout of an ext4 that has no reserved space for its group descriptors, which
/// is left to resize2fs.
pub fn growth_method(fs_type: FsType, device: &File, bytes: u64) -> Result<Method> {
    if fs_type != FsType::Ext4 {
        return Ok(Method::Mounted);
    }
    let layout = Ext4Layout::read(device)?;
    Ok(match grows_mounted(fs_type) && layout.has_descriptors_for(bytes) {
        true => Method::Mounted,
        false => Method::Unmounted,
    })
}

/// Whether a filesystem of this type can grow to `bytes`. btrfs does not resize to less than 256
/// MiB (btrfs_ioctl_resize).
pub fn grows_to(fs_type: FsType, bytes: u64) -> bool {
    fs_type != FsType::Btrfs || bytes >= 256 << 20
}

/// Whether this process may grow a mounted filesystem of this type. For ext4 the kernel requires
/// CAP_SYS_RESOURCE, which containers often lack.
fn grows_mounted(fs_type: FsType) -> bool {
    const SYS_RESOURCE: u64 = 1 << 24;
    if fs_type != FsType::Ext4 {
        return true;
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    effective
        .and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok())
        .is_some_and(|capabilities| capabilities & SYS_RESOURCE != 0)
}

/// `Precondition` if the kernel must not grow the filesystem, mounted on `device`, to `bytes`.
pub fn check_growth_mounted(fs_type: FsType, device: &File, bytes: u64) -> Result<()> {
    let reason = match growth_method(fs_type, device, bytes)? {
        Method::Mounted => return Ok(()),
        Method::Unmounted if grows_mounted(fs_type) => {
            "growing an ext4 by more than a factor of 1,024 is only possible while it is not mounted:"
        }
        Method::Unmounted => {
            "growing a mounted ext4 requires CAP_SYS_RESOURCE, which this process lacks: grant it, or"
        }
    };
    Err(Error::Precondition(format!("{reason} unstage and stage the volume to grow it")))
}

/// Grows the filesystem that is mounted at `root` to `bytes`, the size of its device.
pub fn grow_mounted(fs_type: FsType, root: &File, device: &Path, bytes: u64) -> Result<()> {
    let doing = || format!("growing a filesystem ({fs_type}) to {bytes} bytes");
    match fs_type {
        FsType::Ext4 => {
            let device = File::open(device).context(doing)?;
            let blocks = Ext4Layout::read(&device)?.blocks_in(bytes);
            sys::ext4_grow(root, blocks).context(doing)?;
        }
        FsType::Xfs => sys::xfs_grow(root, bytes).context(doing)?,
        FsType::Btrfs => sys::btrfs_grow(root).context(doing)?,
    }
    reach("filesystem.grown")
}

/// Below this size, resize2fs 1.47 may destroy an ext4 of one block group that it grows by more
/// than a factor of 1,024.
const FIRST_STEP_BYTES: u64 = 1 << 30;

/// Grows an unmounted ext4 to the size of its device, `bytes`, and checks it. The tool requires a
/// check before, which also replays the journal. If this fails, the filesystem is destroyed.
pub fn grow_unmounted(device: &Path, bytes: u64) -> Result<()> {
    let check = |mode, success: &[i32]| {
        command::run_with(tool("e2fsck", &["-f", mode]).arg(device), success)
    };
    // 1: errors were corrected.
    check("-p", &[0, 1])?;
    let before = File::open(device).context(|| format!("opening {}", device.display()))?;
    if Ext4Layout::read(&before)?.bytes() < FIRST_STEP_BYTES && bytes > FIRST_STEP_BYTES {
        let first = format!("{}K", FIRST_STEP_BYTES >> 10);
        command::run(tool("resize2fs", &[]).arg(device).arg(first))?;
        reach("filesystem.grown_in_part")?;
    }
    drop(before);
    command::run(tool("resize2fs", &[]).arg(device))?;
    reach("filesystem.grown")?;
    check("-n", &[0])
}

/// The fields of an ext4 superblock that limit its growth, and whether it needs a repair first.
#[derive(Debug)]
pub(super) struct Ext4Layout {
    block_bytes: u64,
    blocks: u64,
    first_block: u64,
    blocks_per_group: u64,
    inode_table_blocks: u64,
    descriptor_bytes: u64,
    reserved_descriptor_blocks: u64,
    /// The kernel has found errors since the last check.
    pub(super) has_errors: bool,
}

impl Ext4Layout {
    /// Reads the superblock of a mounted or unmounted ext4 (Documentation/filesystems/ext4).
    pub(super) fn read(device: &File) -> Result<Self> {
        const HAS_64_BIT: u32 = 0x80;
        const HAS_ERRORS: u64 = 0x2;
        let mut bytes = [0; 1024];
        device.read_exact_at(&mut bytes, 1024).context(|| "reading a superblock".to_owned())?;
        let short = |at: usize| u64::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
        let word = |at: usize| short(at) | short(at + 2) << 16;
        let is_64_bit = word(0x60) as u32 & HAS_64_BIT != 0;
        let (logarithm, blocks_per_group, inode_bytes) = (word(0x18), word(0x20), short(0x58));
        if short(0x38) != 0xef53 || logarithm > 6 || blocks_per_group == 0 {
            return Err(Error::Failed("the superblock of an ext4 is damaged".to_owned()));
        }
        let block_bytes = 1024 << logarithm;
        Ok(Self {
            block_bytes,
            blocks: word(0x4) | if is_64_bit { word(0x150) << 32 } else { 0 },
            first_block: word(0x14),
            blocks_per_group,
            inode_table_blocks: (word(0x28) * inode_bytes).div_ceil(block_bytes),
            descriptor_bytes: if is_64_bit { short(0xfe).max(32) } else { 32 },
            reserved_descriptor_blocks: short(0xce),
            has_errors: short(0x3a) & HAS_ERRORS != 0,
        })
    }

    fn bytes(&self) -> u64 {
        self.blocks.saturating_mul(self.block_bytes)
    }

    fn groups(&self, blocks: u64) -> u64 {
        blocks.saturating_sub(self.first_block).div_ceil(self.blocks_per_group)
    }

    fn descriptor_blocks(&self, blocks: u64) -> u64 {
        self.groups(blocks).saturating_mul(self.descriptor_bytes).div_ceil(self.block_bytes)
    }

    /// Whether the descriptors of all groups fit the space reserved for them.
    fn has_descriptors_for(&self, bytes: u64) -> bool {
        let reserved = self.descriptor_blocks(self.blocks) + self.reserved_descriptor_blocks;
        self.descriptor_blocks(bytes / self.block_bytes) <= reserved
    }

    /// The blocks of a filesystem on a device of `bytes`. A last group that cannot hold its own
    /// metadata is left out, as resize2fs does.
    fn blocks_in(&self, bytes: u64) -> u64 {
        const LEAST_USEFUL_BLOCKS: u64 = 50;
        let blocks = bytes / self.block_bytes;
        let last_group = blocks.saturating_sub(self.first_block) % self.blocks_per_group;
        // Superblock, two bitmaps.
        let metadata = 3
            + self.inode_table_blocks
            + self.descriptor_blocks(blocks)
            + self.reserved_descriptor_blocks;
        let is_new = self.groups(blocks) > self.groups(self.blocks);
        match last_group > 0 && is_new && last_group < metadata + LEAST_USEFUL_BLOCKS {
            true => blocks - last_group,
            false => blocks,
        }
    }
}

/// The groups of an ext4 on a device of `bytes`, with 4 KiB blocks.
const EXT4_GROUP_BYTES: u64 = 128 << 20;

/// The maximum number of allocation groups of an XFS. Each costs a mount about 0.15 ms, memory, and
/// a growth some writes.
const MAX_XFS_GROUPS: u64 = 16_384;

/// The size of an XFS and of its allocation groups in bytes. `device` is its device or backing
/// file.
fn xfs_layout(device: &File) -> Result<(u64, u64)> {
    let mut bytes = [0; 88];
    device.read_exact_at(&mut bytes, 0).context(|| "reading a superblock".to_owned())?;
    let word = |at: usize| {
        u64::from(u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]))
    };
    let (block_bytes, blocks, group_blocks) = (word(4), word(8) << 32 | word(12), word(84));
    if !bytes.starts_with(b"XFSB") || block_bytes == 0 || group_blocks == 0 {
        return Err(Error::Failed("the superblock of an XFS is damaged".to_owned()));
    }
    Ok((blocks.saturating_mul(block_bytes), group_blocks * block_bytes))
}

/// The largest size in bytes to which the filesystem on a device, or in a backing file, can grow.
/// The size of the groups of an XFS is fixed when it is created.
pub fn largest_growth(fs_type: FsType, device: &File) -> Result<u64> {
    match fs_type {
        FsType::Xfs => Ok(xfs_layout(device)?.1.saturating_mul(MAX_XFS_GROUPS)),
        FsType::Ext4 | FsType::Btrfs => Ok(u64::MAX),
    }
}

/// An upper estimate of the bytes that a growth to `bytes` writes to a backing file in units of
/// `unit` bytes.
pub fn growth_cost(fs_type: FsType, device: &File, bytes: u64, unit: u64) -> Result<u64> {
    // Superblocks and their copies, the log, bitmaps and inode tables that move.
    let fixed = (2 << 20) + 128 * unit;
    let by_size = match fs_type {
        // About 30 copies of all group descriptors.
        FsType::Ext4 => bytes.div_ceil(EXT4_GROUP_BYTES).saturating_mul(64 * 30),
        FsType::Xfs => {
            let (size, group) = xfs_layout(device)?;
            // The headers of a group and the roots of its trees, which may begin within a unit.
            let headers = (11_u64 * 4096).next_multiple_of(unit) + unit;
            bytes.saturating_sub(size).div_ceil(group).saturating_mul(headers)
        }
        // It creates block groups when they are needed.
        FsType::Btrfs => 0,
    };
    Ok(fixed.saturating_add(by_size))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An ext4 of one group of 16 MiB, with 64 bytes per descriptor.
    fn small() -> Ext4Layout {
        Ext4Layout {
            block_bytes: 4096,
            blocks: 4096,
            first_block: 0,
            blocks_per_group: 32_768,
            inode_table_blocks: 256,
            descriptor_bytes: 64,
            reserved_descriptor_blocks: 1,
            has_errors: false,
        }
    }

    #[test]
    fn a_last_group_without_room_for_its_metadata_is_left_out() {
        const GROUP: u64 = 32_768 * 4096;
        assert_eq!(small().blocks_in(3 * GROUP), 3 * 32_768);
        assert_eq!(small().blocks_in(3 * GROUP + 300 * 4096), 3 * 32_768);
        assert_eq!(small().blocks_in(3 * GROUP + 400 * 4096), 3 * 32_768 + 400);
        // Its only group is never left out.
        assert_eq!(small().blocks_in(4100 * 4096), 4100);
    }

    #[test]
    fn a_growth_beyond_the_reserved_descriptors_needs_resize2fs() {
        // Two blocks of descriptors, for 128 groups of 128 MiB.
        assert!(small().has_descriptors_for(16 << 30));
        assert!(!small().has_descriptors_for(17 << 30));
    }
}
