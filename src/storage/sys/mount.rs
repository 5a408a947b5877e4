//! Detached mounts, mount namespaces, and the restricted resolution of paths.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::raw::{c_char, c_int};

use super::{check, check_fd};

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

/// Moves the calling thread to a copy of its mount namespace. Other threads remain in the old
/// namespace. (`/proc/self` describes the first thread.)
pub fn new_mount_namespace() -> io::Result<()> {
    // SAFETY: takes an integer.
    check(unsafe { libc::unshare(libc::CLONE_NEWNS) }).map(drop)
}
