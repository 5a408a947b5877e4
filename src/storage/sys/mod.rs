//! System calls that neither std nor nix wraps: reflink and FIEMAP, freeze, inode flags; block
//! devices and the growth of filesystems (`block`); mounts and restricted path resolution
//! (`mount`). All `unsafe` code of the project is here. The rest of the code uses safe functions on
//! files that return `io::Result`.
#![allow(unsafe_code)]

mod block;
mod mount;

pub use block::*;
pub use mount::*;

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::raw::{c_int, c_long, c_ulong};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command;

use linux_raw_sys::general::{
    __NR_cachestat, F_SETSIG, FS_XFLAG_COWEXTSIZE, cachestat, cachestat_range, file_clone_range,
    fsxattr,
};
use linux_raw_sys::ioctl as nr;
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

/// A command of fcntl(2) whose argument is an integer.
fn fcntl_value(file: &File, command: c_int, value: c_int) -> io::Result<()> {
    // SAFETY: `command` is one whose argument is not a pointer.
    check(unsafe { libc::fcntl(file.as_raw_fd(), command, value) }).map(drop)
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

/// Whether a regular file, which is open for writing, is also open for writing elsewhere: in any
/// process, as the backing file of a loop device, or as swap space. Linux grants a write lease only
/// if it is not. An error if the filesystem or the caller's rights allow no lease.
pub fn has_other_writer(file: &File) -> io::Result<bool> {
    match lease(file) {
        Ok(()) => fcntl_value(file, libc::F_SETLEASE, libc::F_UNLCK).map(|()| false),
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
    // By default an open that waits sends SIGIO, which would end this process. SIGURG is ignored.
    fcntl_value(file, F_SETSIG as c_int, libc::SIGURG)?;
    fcntl_value(file, libc::F_SETLEASE, libc::F_WRLCK)
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
