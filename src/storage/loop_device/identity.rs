//! What identifies a backing file, one attachment of a device to it, and an attachment by this
//! driver.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

use super::super::sys;
use super::super::units::BLOCK_SIZE;
use super::NAME_BYTES;

/// The identity of a backing file: device and inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Identity {
    pub(super) device: (u64, u64),
    inode: u64,
}

impl Identity {
    pub(super) fn of(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        let device = metadata.dev();
        let numbers = (nix::sys::stat::major(device), nix::sys::stat::minor(device));
        Ok(Self { device: numbers, inode: metadata.ino() })
    }

    /// Decodes the kernel's encoding of device numbers.
    pub(super) fn of_status(info: &sys::loop_info64) -> Self {
        let device = info.lo_device;
        let minor = (device & 0xff) | ((device >> 12) & 0xf_ff00);
        Self { device: ((device & 0xf_ff00) >> 8, minor), inode: info.lo_inode }
    }
}

/// Identifies one attachment of a device. Device and inode are not enough: an in-memory filesystem
/// reuses those numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct AttachmentId {
    pub(super) backing: Identity,
    /// The random name from [`super::configure`].
    name: Vec<u8>,
}

impl AttachmentId {
    pub(super) fn of_status(info: &sys::loop_info64) -> Self {
        Self { backing: Identity::of_status(info), name: info.lo_file_name.to_vec() }
    }
}

/// The parameters of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DeviceParameters {
    /// In bytes, like the next two fields.
    pub(super) offset: u64,
    /// 0: none.
    pub(super) size_limit: u64,
    pub(super) sector: u64,
    /// Attached read-only. A read-only publication sets another flag (BLKROSET).
    pub(super) read_only: bool,
}

impl DeviceParameters {
    /// Whether this driver attached the device. Sectors of 512 bytes are also the default of other
    /// programs, which name the device after the path of its file.
    pub(super) fn are_ours(self, info: &sys::loop_info64) -> bool {
        let Self { offset, size_limit, sector, read_only } = self;
        let is_our_sector = match sector {
            BLOCK_SIZE => true,
            512 => info.lo_file_name[..NAME_BYTES].iter().all(u8::is_ascii_lowercase),
            _ => false,
        };
        offset == 0 && size_limit == 0 && !read_only && is_our_sector
    }
}
