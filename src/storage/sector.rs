//! Sectors of volumes. Devices have sectors of 4096 bytes, unless the volume was created for
//! software or a filesystem that needs 512. Smaller sectors exclude direct I/O to the backing file.
//! A filesystem mounts on smaller sectors than those it was made on, never on larger ones.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::error::{Context, Error, Result};
use super::model::{FsType, Volume};

/// The sector size of a volume's device. It never changes, and copies of the volume inherit it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub enum SectorSize {
    #[default]
    Bytes4096,
    Bytes512,
}

impl SectorSize {
    pub const fn bytes(self) -> u32 {
        match self {
            Self::Bytes4096 => 4096,
            Self::Bytes512 => 512,
        }
    }

    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl From<SectorSize> for u32 {
    fn from(size: SectorSize) -> Self {
        size.bytes()
    }
}

impl TryFrom<u32> for SectorSize {
    type Error = &'static str;

    fn try_from(bytes: u32) -> Result<Self, &'static str> {
        match bytes {
            4096 => Ok(Self::Bytes4096),
            512 => Ok(Self::Bytes512),
            _ => Err("is neither 512 nor 4096"),
        }
    }
}

impl FromStr for SectorSize {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, &'static str> {
        match text {
            "4096" => Ok(Self::Bytes4096),
            "512" => Ok(Self::Bytes512),
            _ => Err("is neither 512 nor 4096"),
        }
    }
}

/// `Precondition` if the filesystem on the device needs smaller sectors: the kernel's error of the
/// mount does not say so.
pub fn check(volume: &Volume, fs_type: FsType, device: &File) -> Result<()> {
    let needed = smallest_unit(fs_type, device);
    let needed = needed.context(|| format!("reading the {fs_type} of {:?}", volume.id))?;
    let sector = volume.sector_size.bytes();
    if needed.is_none_or(|needed| needed >= u64::from(sector)) {
        return Ok(());
    }
    let needed = needed.unwrap_or_default();
    Err(Error::Precondition(format!(
        "volume_capability: {:?} contains {fs_type} in units of {needed} bytes, which does not mount on sectors of \
         {sector} bytes; take a snapshot, and restore it to a volume with the StorageClass parameter sectorSize: \"512\"",
        volume.id
    )))
}

/// The smallest unit in bytes that the filesystem reads and writes: the block size of ext4, the
/// sector size of XFS. `None` if it cannot be below 4096, or the superblock is not valid.
fn smallest_unit(fs_type: FsType, device: &File) -> io::Result<Option<u64>> {
    Ok(match fs_type {
        FsType::Ext4 => {
            // s_log_block_size of the superblock at 1024.
            let mut log = [0; 4];
            device.read_exact_at(&mut log, 1024 + 24)?;
            Some(u32::from_le_bytes(log)).filter(|log| *log <= 6).map(|log| 1024 << log)
        }
        FsType::Xfs => {
            // sb_sectsize
            let mut sector = [0; 2];
            device.read_exact_at(&mut sector, 102)?;
            Some(u64::from(u16::from_be_bytes(sector))).filter(|sector| sector.is_power_of_two())
        }
        FsType::Btrfs => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_two_sizes_are_sectors() {
        for (text, bytes) in [("512", 512), ("4096", 4096)] {
            let size: SectorSize = text.parse().unwrap();
            assert_eq!((size.bytes(), SectorSize::try_from(bytes)), (bytes, Ok(size)));
            assert_eq!(serde_json::to_string(&size).unwrap(), text);
            assert_eq!(serde_json::from_str::<SectorSize>(text).unwrap(), size);
        }
        for wrong in ["", "0", "1024", "512B", "0512", " 512", "8192", "-512"] {
            assert!(wrong.parse::<SectorSize>().is_err(), "{wrong}");
        }
        assert!(serde_json::from_str::<SectorSize>("1024").is_err());
    }
}
