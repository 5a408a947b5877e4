//! Loop devices, the size and read-only flag of block devices, and the growth of mounted
//! filesystems.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::raw::{c_int, c_void};

use linux_raw_sys::ioctl as nr;
use linux_raw_sys::loop_device::{
    LOOP_CLR_FD, LOOP_CONFIGURE, LOOP_CTL_GET_FREE, LOOP_GET_STATUS64, LOOP_SET_CAPACITY,
    LOOP_SET_STATUS64,
};
pub use linux_raw_sys::loop_device::{loop_config, loop_info64};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};

use super::{check_fd, ioctl_struct, ioctl_value};

/// The number of a free loop device. Another process may take it first.
pub fn loop_free_number(control: &File) -> io::Result<u32> {
    ioctl_value(control, LOOP_CTL_GET_FREE, 0).map(|number| number as u32)
}

pub fn loop_config(backing: &File, block_size: u32, flags: u32) -> loop_config {
    // SAFETY: loop_config is a plain C structure of integers; all zeros is a value of it.
    let mut config: loop_config = unsafe { std::mem::zeroed() };
    config.fd = backing.as_raw_fd() as u32;
    config.block_size = block_size;
    config.info.lo_flags = flags;
    config
}

pub fn loop_configure(device: &File, config: &mut loop_config) -> io::Result<()> {
    ioctl_struct(device, LOOP_CONFIGURE, config).map(drop)
}

/// ENXIO when the device has no backing file.
pub fn loop_status(device: &File) -> io::Result<loop_info64> {
    // SAFETY: loop_info64 is a plain C structure of integers; all zeros is a value of it.
    let mut info: loop_info64 = unsafe { std::mem::zeroed() };
    ioctl_struct(device, LOOP_GET_STATUS64, &mut info)?;
    Ok(info)
}

/// Sets the flags that LOOP_SET_STATUS64 may change (autoclear among them).
pub fn loop_set_status(device: &File, info: &mut loop_info64) -> io::Result<()> {
    ioctl_struct(device, LOOP_SET_STATUS64, info).map(drop)
}

pub fn loop_clear(device: &File) -> io::Result<()> {
    ioctl_value(device, LOOP_CLR_FD, 0).map(drop)
}

/// Updates the size of the device to that of its backing file.
pub fn loop_set_capacity(device: &File) -> io::Result<()> {
    ioctl_value(device, LOOP_SET_CAPACITY, 0).map(drop)
}

/// Sets or clears the read-only flag of a block device.
pub fn set_block_read_only(device: &File, read_only: bool) -> io::Result<()> {
    let mut value = c_int::from(read_only);
    ioctl_struct(device, nr::BLKROSET, &mut value).map(drop)
}

pub fn block_is_read_only(device: &File) -> io::Result<bool> {
    let mut value: c_int = 0;
    ioctl_struct(device, nr::BLKROGET, &mut value)?;
    Ok(value != 0)
}

/// Size of a block device in bytes.
pub fn block_size_bytes(device: &File) -> io::Result<u64> {
    let mut size: u64 = 0;
    ioctl_struct(device, nr::BLKGETSIZE64, &mut size)?;
    Ok(size)
}

/// From linux/xfs_fs.h (xfsprogs): what XFS_IOC_FSGEOMETRY_V1 returns.
#[repr(C)]
#[derive(Default)]
struct XfsGeometry {
    block_size: u32,
    between: [u32; 6],
    imax_percent: u32,
    data_blocks: u64,
    rest: [u64; 9],
}

fn xfs_geometry(file: &File) -> io::Result<XfsGeometry> {
    const GEOMETRY: u32 = 0x8070_5864;
    const { assert!(size_of::<XfsGeometry>() == 112) };
    let mut geometry = XfsGeometry::default();
    ioctl_struct(file, GEOMETRY, &mut geometry)?;
    Ok(geometry)
}

/// The size of the XFS of a file, in bytes.
pub fn xfs_bytes(file: &File) -> io::Result<u64> {
    let geometry = xfs_geometry(file)?;
    Ok(geometry.data_blocks.saturating_mul(geometry.block_size.into()))
}

/// Grows the XFS of a file to `device_bytes`, the size of its device.
pub fn xfs_grow(file: &File, device_bytes: u64) -> io::Result<()> {
    // From linux/xfs_fs.h (xfsprogs): XFS_IOC_FSGROWFSDATA and its argument.
    const GROW_DATA: u32 = 0x4010_586e;
    #[repr(C)]
    struct Grow {
        blocks: u64,
        imax_percent: u32,
        padding: u32,
    }
    const { assert!(size_of::<Grow>() == 16) };
    let geometry = xfs_geometry(file)?;
    let blocks = device_bytes / u64::from(geometry.block_size.max(1));
    let mut grow = Grow { blocks, imax_percent: geometry.imax_percent, padding: 0 };
    ioctl_struct(file, GROW_DATA, &mut grow).map(drop)
}

/// Opens a file of an XFS once more, for reading and writing: writes through the result do not
/// change its times. `directory` is any one of the same mount. Requires CAP_SYS_ADMIN.
pub fn xfs_open_timeless(file: &File, directory: &File) -> io::Result<File> {
    // From linux/xfs_fs.h (xfsprogs): _IOWR('X', 106 and 107, struct xfs_fsop_handlereq). The kernel
    // sets FMODE_NOCMTIME on descriptors from the second.
    #[repr(C)]
    struct HandleRequest {
        fd: u32,
        path: *const c_void,
        open_flags: u32,
        handle: *const c_void,
        handle_bytes: u32,
        out: *mut c_void,
        out_bytes: *mut u32,
    }
    const FD_TO_HANDLE: u32 = 0xc000_586a | (size_of::<HandleRequest>() as u32) << 16;
    const OPEN_BY_HANDLE: u32 = 0xc000_586b | (size_of::<HandleRequest>() as u32) << 16;
    // A handle has 24 bytes.
    let (mut handle, mut bytes) = ([0_u64; 8], 0_u32);
    let mut request = HandleRequest {
        fd: file.as_raw_fd() as u32,
        path: std::ptr::null(),
        open_flags: libc::O_RDWR as u32,
        handle: std::ptr::null(),
        handle_bytes: 0,
        out: (&raw mut handle).cast(),
        out_bytes: &raw mut bytes,
    };
    ioctl_struct(file, FD_TO_HANDLE, &mut request)?;
    request.handle = (&raw const handle).cast();
    request.handle_bytes = bytes;
    let opened = check_fd(ioctl_struct(directory, OPEN_BY_HANDLE, &mut request)?.into())?;
    // The kernel does not support O_CLOEXEC here.
    fcntl(&opened, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    Ok(opened.into())
}

/// Grows the ext4 of a file to `blocks` of its own blocks.
pub fn ext4_grow(file: &File, blocks: u64) -> io::Result<()> {
    // From the kernel's fs/ext4/ext4.h: EXT4_IOC_RESIZE_FS.
    const RESIZE: u32 = 0x4008_6610;
    let mut blocks = blocks;
    ioctl_struct(file, RESIZE, &mut blocks).map(drop)
}

/// Grows the btrfs of a file to the size of its device.
pub fn btrfs_grow(file: &File) -> io::Result<()> {
    // From linux/btrfs.h: BTRFS_IOC_RESIZE with btrfs_ioctl_vol_args.
    const RESIZE: u32 = 0x5000_9403;
    #[repr(C)]
    struct VolumeArguments {
        fd: i64,
        name: [u8; 4088],
    }
    const { assert!(size_of::<VolumeArguments>() == 4096) };
    let mut arguments = VolumeArguments { fd: 0, name: [0; 4088] };
    arguments.name[..3].copy_from_slice(b"max");
    ioctl_struct(file, RESIZE, &mut arguments).map(drop)
}
