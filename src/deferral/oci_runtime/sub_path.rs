//! Opens sub-paths of a volume. Processes that write to the volume can replace components by links
//! at any time. Therefore the opened file itself is mounted, and the kernel opens it without
//! leaving the volume (openat2, RESOLVE_BENEATH).

use std::ffi::CString;
use std::fs::{File, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::{Mode, mkdirat};

use storage::sys;

/// Maximum number of components (PATH_MAX).
const MAX_COMPONENTS: usize = 2048;
/// The kernel returns EAGAIN after a concurrent rename; the call can be repeated.
const ATTEMPTS: usize = 100;

/// Opens (O_PATH) the directory or file at `sub_path` of the volume with the root directory `root`.
/// Missing directories are created as kubelet does, with the root's mode.
pub fn open(root: &File, sub_path: &Path) -> Result<File> {
    let parts: Vec<_> = sub_path.components().collect();
    ensure!(parts.len() <= MAX_COMPONENTS, "the sub-path is too long");
    let found = match open_beneath(root, sub_path) {
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => {
            let mode = root.metadata().context("reading the volume's mode")?.mode() & 0o7777;
            create(root, sub_path, mode)?
        }
        opened => opened.map_err(explain).with_context(|| describe(sub_path))?,
    };
    let kind = found.metadata().with_context(|| describe(sub_path))?.file_type();
    ensure!(
        kind.is_dir() || kind.is_file(),
        "{}: is {}, not a directory or a file",
        describe(sub_path),
        if kind.is_socket() { "a socket" } else { "a special file" }
    );
    Ok(found)
}

/// Opens (O_PATH) a mount point in the volume, for another mount of the container. A missing one is
/// created as runtimes do.
pub fn mount_point(root: &File, path: &Path, is_directory: bool) -> Result<File> {
    if let Some(found) = find(root, path)? {
        return Ok(found);
    }
    if is_directory {
        return create(root, path, 0o755);
    }
    let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
        bail!("{}: is not the path of a file", describe(path))
    };
    let above = match above.as_os_str().is_empty() {
        true => root.try_clone().context("duplicating the volume's descriptor")?,
        false => create(root, above, 0o755)?,
    };
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
    openat(&above, name, flags, Mode::from_bits_truncate(0o644))
        .map_err(|e| explain(e.into()))
        .with_context(|| describe(path))?;
    find(root, path)?.with_context(|| format!("{}: was removed meanwhile", describe(path)))
}

/// Opens (O_PATH) what a path of the volume names. `None`: it does not exist.
pub fn find(root: &File, path: &Path) -> Result<Option<File>> {
    match open_beneath(root, path) {
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        opened => opened.map(Some).map_err(explain).with_context(|| describe(path)),
    }
}

fn describe(sub_path: &Path) -> String {
    format!("sub-path {:?}", sub_path.display().to_string())
}

fn explain(error: io::Error) -> anyhow::Error {
    match error.raw_os_error() {
        Some(libc::EXDEV) => anyhow::anyhow!("a link leads out of the volume"),
        Some(libc::ELOOP) => anyhow::anyhow!("has too many links"),
        Some(libc::EROFS) => {
            anyhow::anyhow!("does not exist and cannot be created, because the volume is read-only")
        }
        _ => error.into(),
    }
}

fn open_beneath(root: &File, path: &Path) -> io::Result<File> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    for _ in 1..ATTEMPTS {
        match sys::open_beneath(root, &path, libc::O_PATH) {
            Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => {}
            opened => return opened.map(OwnedFd::into),
        }
    }
    sys::open_beneath(root, &path, libc::O_PATH).map(OwnedFd::into)
}

/// Creates the missing components of `path` from the top down.
fn create(root: &File, path: &Path, mode: u32) -> Result<File> {
    let mut above = root.try_clone().context("duplicating the volume's descriptor")?;
    let mut walked = PathBuf::new();
    for part in path.components() {
        walked.push(part);
        above = match open_beneath(root, &walked) {
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => {
                let made = mkdirat(&above, part.as_os_str(), Mode::from_bits_truncate(mode));
                match made {
                    Ok(()) => {}
                    // Another process created it; if it is a dangling link, the next step fails.
                    Err(Errno::EEXIST) => {}
                    Err(e) => return Err(explain(e.into())).with_context(|| describe(path)),
                }
                let new = open_beneath(root, &walked).map_err(|e| match e.raw_os_error() {
                    Some(libc::ENOENT) => anyhow::anyhow!("is a dangling link"),
                    _ => explain(e),
                });
                let new = new.with_context(|| describe(path))?;
                if made.is_ok() {
                    set_mode(&new, mode).with_context(|| describe(path))?;
                }
                new
            }
            opened => opened.map_err(explain).with_context(|| describe(path))?,
        };
    }
    if walked.as_os_str().is_empty() {
        bail!("{}: is empty", describe(path));
    }
    Ok(above)
}

/// Restores the mode bits that the umask removed.
fn set_mode(directory: &File, mode: u32) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    let found = directory.metadata()?;
    if !found.is_dir() {
        return Ok(());
    }
    // An O_PATH descriptor can be chmodded only through /proc.
    let path = format!("/proc/self/fd/{}", directory.as_raw_fd());
    std::fs::set_permissions(path, Permissions::from_mode(mode))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn volume() -> (tempfile::TempDir, File) {
        let scratch = tempfile::tempdir().unwrap();
        let root = scratch.path().join("volume");
        fs::create_dir(&root).unwrap();
        fs::create_dir(scratch.path().join("outside")).unwrap();
        let opened = File::open(&root).unwrap();
        (scratch, opened)
    }

    #[test]
    fn no_sub_path_leads_out_of_the_volume() {
        let (scratch, root) = volume();
        let at = scratch.path().join("volume");
        symlink("../outside", at.join("out")).unwrap();
        symlink(scratch.path().join("outside"), at.join("absolute")).unwrap();
        symlink("../outside/new", at.join("new")).unwrap();
        symlink("nothing", at.join("nothing-there")).unwrap();
        symlink("loop", at.join("loop")).unwrap();
        symlink("/proc/self/cwd", at.join("magic")).unwrap();
        fs::write(at.join("file"), "").unwrap();
        for path in [
            "out",
            "absolute",
            "new",
            "nothing-there",
            "loop",
            "magic",
            "out/x",
            "new/x",
            "file/x",
            "../outside",
            "nothing-there/x",
        ] {
            let message = format!("{:#}", open(&root, Path::new(path)).unwrap_err());
            assert!(message.contains(path), "{message}");
        }
        assert_eq!(fs::read_dir(scratch.path().join("outside")).unwrap().count(), 0);
        assert!(!at.join("nothing").exists());
    }
}
