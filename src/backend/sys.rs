//! System calls that neither std nor nix wraps: reflink and FIEMAP, freeze, inode flags, loop
//! devices, detached mounts, mount namespaces, restricted path resolution. All `unsafe` code of the
//! project is here. The rest of the code uses safe functions on files that return `io::Result`.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::raw::{c_char, c_int, c_long, c_ulong};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command;

use linux_raw_sys::general::{
    __NR_cachestat, F_SETSIG, FS_XFLAG_COWEXTSIZE, cachestat, cachestat_range, file_clone_range,
    fsxattr,
};
use linux_raw_sys::ioctl as nr;
use linux_raw_sys::loop_device::{
    LOOP_CLR_FD, LOOP_CONFIGURE, LOOP_CTL_GET_FREE, LOOP_GET_STATUS64, LOOP_SET_CAPACITY,
    LOOP_SET_STATUS64,
};
pub use linux_raw_sys::loop_device::{loop_config, loop_info64};
use nix::cmsg_space;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use nix::sys::statfs::FsType;

fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn check_fd(result: c_long) -> io::Result<OwnedFd> {
    let fd = check(result as c_int)?;
    // SAFETY: the kernel has just returned this descriptor and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// An ioctl whose argument is an integer.
fn ioctl_value(fd: impl AsFd, request: u32, value: c_ulong) -> io::Result<c_int> {
    // SAFETY: `request` is one whose argument is not a pointer.
    check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), request as libc::Ioctl, value) })
}

/// An ioctl that reads or writes `T`.
fn ioctl_struct<T>(fd: impl AsFd, request: u32, value: &mut T) -> io::Result<c_int> {
    // SAFETY: every caller passes the structure that `request` is defined for, alive for the call.
    check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), request as libc::Ioctl, value as *mut T) })
}

/// Limits glibc to two malloc arenas. By default it creates an arena for each thread that blocks,
/// up to eight per core, and each keeps the memory of the largest record segment read in it: during
/// a long stream, whose parts are read by different threads, memory would grow by some megabytes
/// per arena. Call this before threads are started. Does nothing with other C libraries.
pub fn limit_malloc_arenas() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: sets a parameter of malloc, and is called while the process has one thread.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 2);
    }
}

/// Shares all blocks of `source` with `target`, atomically with regard to writers of `source`
/// (FICLONE).
pub fn clone_file(target: &File, source: &File) -> io::Result<()> {
    ioctl_value(target, nr::FICLONE, source.as_raw_fd() as c_ulong).map(drop)
}

/// Shares `length` bytes at `offset` of `source` with `target` at the same offset.
pub fn clone_range(target: &File, source: &File, offset: u64, length: u64) -> io::Result<()> {
    let mut range = file_clone_range {
        src_fd: i64::from(source.as_raw_fd()),
        src_offset: offset,
        src_length: length,
        dest_offset: offset,
    };
    ioctl_struct(target, nr::FICLONERANGE, &mut range).map(drop)
}

/// From statfs(2). nix has it for glibc only.
pub const XFS_SUPER_MAGIC: FsType = FsType(0x5846_5342);

/// Maximum number of extents per FIEMAP call.
const FIEMAP_BATCH: usize = 2048;

/// The kernel's `struct fiemap_extent`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct FiemapExtent {
    /// All in bytes.
    pub logical: u64,
    pub physical: u64,
    pub length: u64,
    reserved64: [u64; 2],
    pub flags: u32,
    reserved: [u32; 3],
}

impl FiemapExtent {
    pub fn new(logical: u64, physical: u64, length: u64, flags: u32) -> Self {
        Self { logical, physical, length, flags, ..Self::default() }
    }
}

/// The kernel's `struct fiemap`, with room for a batch.
#[repr(C)]
struct Fiemap {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
    extents: [FiemapExtent; FIEMAP_BATCH],
}

/// Reads one batch of extents of `file` from byte `start` up to `end`, after dirty data is written
/// out. Empty if there is none.
pub fn fiemap(file: &File, start: u64, end: u64) -> io::Result<Vec<FiemapExtent>> {
    let mut map = Box::new(Fiemap {
        start,
        length: end.saturating_sub(start),
        flags: nr::FIEMAP_FLAG_SYNC,
        mapped_extents: 0,
        extent_count: FIEMAP_BATCH as u32,
        reserved: 0,
        extents: [FiemapExtent::default(); FIEMAP_BATCH],
    });
    ioctl_struct(file, nr::FS_IOC_FIEMAP, map.as_mut())?;
    let mapped = map.mapped_extents as usize;
    if mapped > FIEMAP_BATCH {
        return Err(io::Error::other("FIEMAP returned more extents than requested"));
    }
    Ok(map.extents[..mapped].to_vec())
}

/// Freezes the filesystem of `dir`. EBUSY if it is already frozen.
pub fn freeze(dir: &File) -> io::Result<()> {
    ioctl_value(dir, nr::FIFREEZE, 0).map(drop)
}

/// Thaws the filesystem of `dir`. EINVAL if it is not frozen.
pub fn thaw(dir: &File) -> io::Result<()> {
    ioctl_value(dir, nr::FITHAW, 0).map(drop)
}

/// Reconfigures the filesystem whose root is `root` without an option. This changes nothing, and
/// Linux refuses it with EBUSY while the filesystem is frozen, without waiting. It also removes the
/// read-only flag of the filesystem, so the caller passes a writable one.
pub fn reconfigure_unchanged(root: &File) -> io::Result<()> {
    // The flags of fspick and a number of enum fsconfig_command, from linux/mount.h.
    const FSPICK_CLOEXEC: c_int = 1;
    const FSPICK_EMPTY_PATH: c_int = 8;
    const CMD_RECONFIGURE: c_int = 7;
    let flags = FSPICK_CLOEXEC | FSPICK_EMPTY_PATH;
    // SAFETY: the path is an empty C string.
    let context = check_fd(unsafe {
        libc::syscall(libc::SYS_fspick, root.as_raw_fd(), c"".as_ptr(), flags)
    })?;
    let none: *const c_char = std::ptr::null();
    // SAFETY: the command takes neither key nor value.
    check(unsafe {
        libc::syscall(libc::SYS_fsconfig, context.as_raw_fd(), CMD_RECONFIGURE, none, none, 0)
    } as c_int)
    .map(drop)
}

/// Whether a regular file, which is open for writing, is also open for writing elsewhere: in any
/// process, as the backing file of a loop device, or as swap space. Linux grants a write lease only
/// if it is not. An error if the filesystem or the caller's rights allow no lease.
pub fn has_other_writer(file: &File) -> io::Result<bool> {
    /// From linux/fcntl.h.
    const F_SETSIG: c_int = 10;
    let set = |what: c_int, value: c_int| {
        // SAFETY: takes integers.
        check(unsafe { libc::fcntl(file.as_raw_fd(), what, value) })
    };
    // If another process opens the file meanwhile, this one gets a signal, by default a fatal one.
    set(F_SETSIG, libc::SIGURG)?;
    match set(libc::F_SETLEASE, libc::F_WRLCK) {
        Ok(_) => set(libc::F_SETLEASE, libc::F_UNLCK).map(|_| false),
        Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => Ok(true),
        Err(e) => Err(e),
    }
}

/// The inode flags of chattr(1).
pub fn inode_flags(file: &File) -> io::Result<u32> {
    let mut flags: c_long = 0;
    ioctl_struct(file, nr::FS_IOC_GETFLAGS, &mut flags)?;
    Ok(flags as u32)
}

pub fn set_inode_flags(file: &File, flags: u32) -> io::Result<()> {
    let mut flags = c_long::from(flags);
    ioctl_struct(file, nr::FS_IOC_SETFLAGS, &mut flags).map(drop)
}

/// Takes a write lease on a file, which lasts until it is closed. EAGAIN if any other descriptor, in
/// any process or of a loop device, has the file open (fcntl(2); exact since Linux 5.3). Meanwhile
/// another open waits.
pub fn lease(file: &File) -> io::Result<()> {
    let fd = file.as_raw_fd();
    // By default an open that waits sends SIGIO, which would end this process. SIGURG is ignored.
    // SAFETY: both commands take an integer.
    check(unsafe { libc::fcntl(fd, F_SETSIG as c_int, libc::SIGURG) })?;
    // SAFETY: as above.
    check(unsafe { libc::fcntl(fd, libc::F_SETLEASE, c_int::from(libc::F_WRLCK)) }).map(drop)
}

/// The extended inode flags (`FS_XFLAG_…`).
pub fn extended_flags(file: &File) -> io::Result<u32> {
    let mut attributes = empty_fsxattr();
    ioctl_struct(file, nr::FS_IOC_FSGETXATTR, &mut attributes)?;
    Ok(attributes.fsx_xflags)
}

/// Adds extended inode flags. `copy_bytes` sets the allocation unit of XFS copy-on-write.
pub fn add_extended_flags(file: &File, flags: u32, copy_bytes: Option<u32>) -> io::Result<()> {
    let mut attributes = empty_fsxattr();
    ioctl_struct(file, nr::FS_IOC_FSGETXATTR, &mut attributes)?;
    attributes.fsx_xflags |= flags;
    if let Some(bytes) = copy_bytes {
        attributes.fsx_xflags |= FS_XFLAG_COWEXTSIZE;
        attributes.fsx_cowextsize = bytes;
    }
    ioctl_struct(file, nr::FS_IOC_FSSETXATTR, &mut attributes).map(drop)
}

fn empty_fsxattr() -> fsxattr {
    // SAFETY: fsxattr is a plain C structure of integers; all zeros is a value of it.
    unsafe { std::mem::zeroed() }
}

/// The number of pages of a file in the page cache. Requires Linux 6.5.
pub fn cached_pages(file: &File) -> io::Result<u64> {
    let range = cachestat_range { off: 0, len: 0 };
    // SAFETY: cachestat is a plain C structure of integers; all zeros is a value of it.
    let mut found: cachestat = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel reads the one structure and writes the other, and both outlive the call.
    let result = unsafe {
        libc::syscall(
            __NR_cachestat as c_long,
            file.as_raw_fd(),
            &raw const range,
            &raw mut found,
            0,
        )
    };
    check(result as c_int)?;
    Ok(found.nr_cache)
}

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

/// The id of the mount through which a file was opened, as in mountinfo.
pub fn mount_id(file: &File) -> io::Result<u64> {
    // SAFETY: statx is a plain C structure of integers; all zeros is a value of it.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the path is an empty C string and `stat` is alive for the call.
    check(unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_MNT_ID,
            &raw mut stat,
        )
    })?;
    if stat.stx_mask & libc::STATX_MNT_ID == 0 {
        return Err(io::ErrorKind::Unsupported.into());
    }
    Ok(stat.stx_mnt_id)
}

/// Mounts `source` without a path: no mount table shows it, and it ends when the last descriptor of
/// the mount and its files is closed. Options are `name` or `name=value`.
pub fn detached_mount(fs_type: &CStr, source: &str, options: &[&str]) -> io::Result<OwnedFd> {
    // The numbers of enum fsconfig_command and of the flags, from linux/mount.h.
    const FSOPEN_CLOEXEC: c_int = 1;
    const FSMOUNT_CLOEXEC: c_int = 1;
    const SET_FLAG: c_int = 0;
    const SET_STRING: c_int = 1;
    const CMD_CREATE: c_int = 6;
    const NOSUID_NODEV_NOEXEC_NOATIME: c_int = 0x2 | 0x4 | 0x8 | 0x10;

    // SAFETY: the name is a C string alive for the call.
    let context =
        check_fd(unsafe { libc::syscall(libc::SYS_fsopen, fs_type.as_ptr(), FSOPEN_CLOEXEC) })?;
    let configure = |command: c_int, key: Option<&CStr>, value: Option<&CStr>| {
        let pointer = |s: Option<&CStr>| s.map_or(std::ptr::null(), CStr::as_ptr);
        // SAFETY: both strings are alive for the call, or null where the command takes none.
        check(unsafe {
            libc::syscall(
                libc::SYS_fsconfig,
                context.as_raw_fd(),
                command,
                pointer(key),
                pointer(value),
                0,
            )
        } as c_int)
    };
    configure(SET_STRING, Some(c"source"), Some(&CString::new(source)?))?;
    for option in options {
        match option.split_once('=') {
            Some((name, value)) => {
                configure(SET_STRING, Some(&CString::new(name)?), Some(&CString::new(value)?))?
            }
            None => configure(SET_FLAG, Some(&CString::new(*option)?), None)?,
        };
    }
    configure(CMD_CREATE, None, None)?;
    // SAFETY: the context is a descriptor that fsopen returned.
    check_fd(unsafe {
        libc::syscall(
            libc::SYS_fsmount,
            context.as_raw_fd(),
            FSMOUNT_CLOEXEC,
            NOSUID_NODEV_NOEXEC_NOATIME,
        )
    })
}

/// Clones the mount at `source` without attaching it, with the read-only attribute set or cleared.
/// Other mounts of the filesystem are not affected. The clone lasts as long as the descriptor,
/// unless it is attached. ENOSYS before Linux 5.12.
pub fn clone_mount(source: &CStr, read_only: bool) -> io::Result<OwnedFd> {
    const OPEN_TREE_CLONE: u32 = 1;
    const MOUNT_ATTR_RDONLY: u64 = 1;
    let flags = OPEN_TREE_CLONE | libc::O_CLOEXEC as u32;
    // SAFETY: the path is a C string alive for the call.
    let tree = check_fd(unsafe {
        libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, source.as_ptr(), flags)
    })?;
    let (attr_set, attr_clr) =
        if read_only { (MOUNT_ATTR_RDONLY, 0) } else { (0, MOUNT_ATTR_RDONLY) };
    let attributes = libc::mount_attr { attr_set, attr_clr, propagation: 0, userns_fd: 0 };
    // SAFETY: path and structure are alive for the call, and the size is the structure's.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    } as c_int)?;
    Ok(tree)
}

/// Copies a mount, of which only the opened directory or file is visible, without a path and without
/// the mounts below it.
pub fn detached_copy(opened: impl AsFd) -> io::Result<OwnedFd> {
    // From linux/mount.h: OPEN_TREE_CLONE, OPEN_TREE_CLOEXEC.
    let flags = 1 | libc::O_CLOEXEC | libc::AT_EMPTY_PATH;
    // SAFETY: the path is an empty C string.
    check_fd(unsafe {
        libc::syscall(libc::SYS_open_tree, opened.as_fd().as_raw_fd(), c"".as_ptr(), flags)
    })
}

/// Moves the calling thread to another mount namespace, whose root becomes its root and current
/// directory. The process must have no other thread.
pub fn enter_mount_namespace(namespace: &File) -> io::Result<()> {
    // SAFETY: takes a descriptor and an integer.
    check(unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNS) }).map(drop)
}

/// Opens `path`, in which no component is a link, with `root` as the root directory.
pub fn open_without_links(root: impl AsFd, path: &CStr, flags: c_int) -> io::Result<OwnedFd> {
    let resolve = libc::RESOLVE_IN_ROOT | libc::RESOLVE_NO_MAGICLINKS | libc::RESOLVE_NO_SYMLINKS;
    open_resolved(root, path, flags, resolve)
}

/// Attaches a detached mount to an opened directory or file, and in the mount namespaces that receive
/// mounts there, or moves a mount there.
pub fn attach(mount: impl AsFd, at: impl AsFd) -> io::Result<()> {
    // From linux/mount.h: MOVE_MOUNT_F_EMPTY_PATH and MOVE_MOUNT_T_EMPTY_PATH.
    const EMPTY_PATHS: c_int = 0x4 | 0x40;
    // SAFETY: both paths are empty C strings.
    check(unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            mount.as_fd().as_raw_fd(),
            c"".as_ptr(),
            at.as_fd().as_raw_fd(),
            c"".as_ptr(),
            EMPTY_PATHS,
        )
    } as c_int)
    .map(drop)
}

/// Opens `path` below `directory` without leaving the directory or its mount, by links or `..`.
/// EXDEV if the path would.
pub fn open_beneath(directory: impl AsFd, path: &CStr, flags: c_int) -> io::Result<OwnedFd> {
    let resolve = libc::RESOLVE_BENEATH | libc::RESOLVE_NO_MAGICLINKS | libc::RESOLVE_NO_XDEV;
    open_resolved(directory, path, flags, resolve)
}

/// Opens `path` with `root` as the root directory, without following links and without calling a
/// filesystem: one on the path may be served by a container, which may never answer. EAGAIN if the
/// kernel does not know the path. (It knows the paths of all mounts. Requires Linux 5.12.)
pub fn open_in_root(root: impl AsFd, path: &CStr, flags: c_int) -> io::Result<OwnedFd> {
    const RESOLVE_CACHED: u64 = 0x20;
    let resolve = libc::RESOLVE_IN_ROOT | libc::RESOLVE_NO_MAGICLINKS | libc::RESOLVE_NO_SYMLINKS;
    open_resolved(root, path, flags, resolve | RESOLVE_CACHED)
}

fn open_resolved(
    directory: impl AsFd,
    path: &CStr,
    flags: c_int,
    resolve: u64,
) -> io::Result<OwnedFd> {
    // SAFETY: open_how is a plain C structure of integers; all zeros is a value of it.
    let mut how: libc::open_how = unsafe { std::mem::zeroed() };
    how.flags = (flags | libc::O_CLOEXEC) as u64;
    how.resolve = resolve;
    // SAFETY: path and structure are alive for the call, and the size is the structure's.
    check_fd(unsafe {
        libc::syscall(
            libc::SYS_openat2,
            directory.as_fd().as_raw_fd(),
            path.as_ptr(),
            &raw const how,
            size_of::<libc::open_how>(),
        )
    })
}

/// Sends bytes and optionally a descriptor (unix(7), SCM_RIGHTS). Returns the number of bytes sent.
pub fn send_with_descriptor(
    socket: &UnixStream,
    bytes: &[u8],
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<usize> {
    let descriptors: Vec<RawFd> = descriptor.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&descriptors)];
    let rights = if descriptors.is_empty() { &[][..] } else { &rights[..] };
    loop {
        let parts = [IoSlice::new(bytes)];
        match sendmsg::<()>(socket.as_raw_fd(), &parts, rights, MsgFlags::MSG_NOSIGNAL, None) {
            Err(nix::Error::EINTR) => {}
            sent => return Ok(sent?),
        }
    }
}

/// Receives bytes (0 at the end) and at most one descriptor; no descriptor if this process has too
/// many open.
pub fn receive_with_descriptors(
    socket: &UnixStream,
    bytes: &mut [u8],
) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut parts = [IoSliceMut::new(bytes)];
    let mut room = cmsg_space!(RawFd);
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let received = recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut room), flags)?;
    let mut descriptors = Vec::new();
    // An error means that a descriptor was dropped.
    for control in received.cmsgs().into_iter().flatten() {
        if let ControlMessageOwned::ScmRights(owned) = control {
            // SAFETY: the kernel has just created these descriptors and nothing else owns them.
            descriptors.extend(owned.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    Ok((received.bytes, descriptors))
}

/// Moves the calling thread to a copy of its mount namespace. Other threads remain in the old
/// namespace. (`/proc/self` describes the first thread.)
pub fn new_mount_namespace() -> io::Result<()> {
    // SAFETY: takes an integer.
    check(unsafe { libc::unshare(libc::CLONE_NEWNS) }).map(drop)
}

/// Makes the kernel kill the process of `command` when the calling thread ends. The process starts
/// with no signal blocked.
pub fn kill_with_parent(command: &mut Command) {
    let parent = std::process::id();
    let prepare = move || {
        // SAFETY: all three are safe to call after a fork, and the set is alive for the calls.
        unsafe {
            let mut none: libc::sigset_t = std::mem::zeroed();
            check(libc::sigemptyset(&raw mut none))?;
            check(libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut()))?;
            check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as c_ulong))?;
            // If the parent ended before prctl, no signal is sent.
            if libc::getppid() as u32 != parent {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
        }
        Ok(())
    };
    // SAFETY: the closure only makes the calls above and does not allocate.
    unsafe {
        command.pre_exec(prepare);
    }
}
