//! Sub-paths of a volume. Whoever writes to the volume may put links in the way at any time, so what is mounted is what was
//! opened, and it is opened by the kernel's own rules for not leaving a tree.

use std::ffi::CString;
use std::fs::{File, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use nix::errno::Errno;
use nix::sys::stat::{Mode, mkdirat};

use crate::backend::sys;

/// More is no path (PATH_MAX).
const MAX_COMPONENTS: usize = 2048;
/// The kernel gives up where something was renamed meanwhile, and may be asked again.
const ATTEMPTS: usize = 100;

/// Opens (O_PATH) what is at `sub_path` of the volume whose root directory is `root`: a directory or a file. What is missing is made as kubelet
/// makes it: directories with the root's mode.
pub fn open(root: &File, sub_path: &Path) -> Result<File> {
    let parts: Vec<_> = sub_path.components().collect();
    ensure!(parts.len() <= MAX_COMPONENTS, "the sub-path is too long");
    let found = match open_beneath(root, sub_path) {
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => make(root, sub_path)?,
        opened => opened.map_err(told).with_context(|| told_of(sub_path))?,
    };
    let kind = found.metadata().with_context(|| told_of(sub_path))?.file_type();
    ensure!(
        kind.is_dir() || kind.is_file(),
        "{}: is {}, not a directory or a file",
        told_of(sub_path),
        if kind.is_socket() { "a socket" } else { "a special file" }
    );
    Ok(found)
}

fn told_of(sub_path: &Path) -> String {
    format!("sub-path {:?}", sub_path.display().to_string())
}

fn told(error: io::Error) -> anyhow::Error {
    match error.raw_os_error() {
        Some(libc::EXDEV) => anyhow::anyhow!("leads out of the volume by a link"),
        Some(libc::ELOOP) => anyhow::anyhow!("is a link of too many links"),
        Some(libc::EROFS) => anyhow::anyhow!("does not exist, and the volume is read-only"),
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

/// Makes what is missing of `path`, from above downwards.
fn make(root: &File, path: &Path) -> Result<File> {
    let mode = root.metadata().context("looking at the volume")?.mode() & 0o7777;
    let mut above = root.try_clone().context("the volume")?;
    let mut walked = PathBuf::new();
    for part in path.components() {
        walked.push(part);
        above = match open_beneath(root, &walked) {
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => {
                let made = mkdirat(&above, part.as_os_str(), Mode::from_bits_truncate(mode));
                match made {
                    Ok(()) => {}
                    // Somebody else was faster; if it is a link to nothing, what follows fails.
                    Err(Errno::EEXIST) => {}
                    Err(e) => return Err(told(e.into())).with_context(|| told_of(path)),
                }
                let new = open_beneath(root, &walked).map_err(|e| match e.raw_os_error() {
                    Some(libc::ENOENT) => anyhow::anyhow!("is a link to nothing"),
                    _ => told(e),
                });
                let new = new.with_context(|| told_of(path))?;
                if made.is_ok() {
                    open_up(&new, mode).with_context(|| told_of(path))?;
                }
                new
            }
            opened => opened.map_err(told).with_context(|| told_of(path))?,
        };
    }
    if walked.as_os_str().is_empty() {
        bail!("{}: is empty", told_of(path));
    }
    Ok(above)
}

/// What the umask has taken of a new directory's mode.
fn open_up(directory: &File, mode: u32) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    let found = directory.metadata()?;
    if !found.is_dir() {
        return Ok(());
    }
    // The way to chmod what was opened by O_PATH.
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
    fn what_is_missing_is_made_with_the_mode_of_the_volumes_root() {
        let (scratch, root) = volume();
        let at = scratch.path().join("volume");
        fs::set_permissions(&at, Permissions::from_mode(0o2775)).unwrap();
        let made = open(&root, Path::new("a/b")).unwrap();
        for path in [at.join("a"), at.join("a/b")] {
            assert_eq!(fs::metadata(path).unwrap().mode() & 0o7777, 0o2775);
        }
        assert_eq!(made.metadata().unwrap().ino(), fs::metadata(at.join("a/b")).unwrap().ino());
    }

    #[test]
    fn a_file_and_a_link_within_are_found() {
        let (scratch, root) = volume();
        let at = scratch.path().join("volume");
        fs::create_dir(at.join("d")).unwrap();
        fs::write(at.join("d/f"), "x").unwrap();
        symlink("d", at.join("in")).unwrap();
        symlink("../volume/d", at.join("d/round")).unwrap();
        let inode = fs::metadata(at.join("d/f")).unwrap().ino();
        for path in ["d/f", "in/f"] {
            let found = open(&root, Path::new(path)).unwrap().metadata().unwrap();
            assert_eq!((found.ino(), found.is_file()), (inode, true));
        }
    }

    #[test]
    fn nothing_leads_out_of_the_volume() {
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
            let told = format!("{:#}", open(&root, Path::new(path)).unwrap_err());
            assert!(told.contains(path), "{told}");
        }
        assert_eq!(fs::read_dir(scratch.path().join("outside")).unwrap().count(), 0);
        assert!(!at.join("nothing").exists());
    }
}
