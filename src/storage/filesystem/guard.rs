//! The guard on the target of a deferred volume: a tmpfs without free space. A container whose
//! runtime does not mount the volume, or does not find it, gets this filesystem instead of the
//! host's directory: a write fails, and no data is lost. kubelet can still create directories for
//! sub-paths in it. A guard is recognized by its source, also through bind mounts.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::mount::{MntFlags, umount2};
use nix::sys::stat::Mode;

use super::super::error::{Context, Error, Result};
use super::super::fail_point::{hit, reach};
use super::super::sys;
use super::mounts::{Mount, mount_at};

const SOURCE: &str = "csi-loopback-deferred-volume";
/// Contains the only block of the filesystem. Root can create empty files and directories.
const NOTE: &str = "THIS-IS-NOT-THE-VOLUME";
const TEXT: &str = "A container runtime mounts the volume of this directory for the containers of the pod.\n\
    A container that sees this file runs without the volume: check its RuntimeClass.\n";
/// Limits the kernel memory of files and directories. kubelet creates a directory for each component
/// of a sub-path.
const FILES: &str = "nr_inodes=16384";

impl Mount {
    /// Whether this is the guard of a deferred volume, or a bind mount of its directories.
    pub fn is_guard(&self) -> bool {
        self.source == Path::new(SOURCE)
    }
}

/// Mounts a guard at `target`, an existing directory, unless it has one.
pub fn mount_guard(target: &Path) -> Result<()> {
    match mount_at(target)? {
        Some(mount) if mount.is_guard() => return Ok(()),
        Some(_) => {
            return Err(Error::Precondition(format!(
                "target_path: another mount exists at {}; unmount it",
                target.display()
            )));
        }
        None => {}
    }
    let doing = || format!("mounting a guard at {}", target.display());
    // It is full before it is visible.
    let guard = sys::detached_mount(c"tmpfs", SOURCE, &["nr_blocks=1", FILES, "mode=0755"])
        .context(doing)?;
    fill(&guard).context(doing)?;
    let at = File::open(target).context(doing)?;
    sys::attach(&guard, &at).context(doing)?;
    reach("guard.mounted")
}

fn fill(guard: impl AsFd) -> io::Result<()> {
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
    let mut note = File::from(openat(&guard, NOTE, flags, Mode::from_bits_truncate(0o444))?);
    note.write_all(TEXT.as_bytes())?;
    // One block is a page. After this line nothing can be written.
    let blanks = [b'\n'; 1024];
    loop {
        match note.write(&blanks) {
            Ok(_) => {}
            Err(e) if e.raw_os_error() == Some(libc::ENOSPC) => return hit("guard.filled"),
            Err(e) => return Err(e),
        }
    }
}

/// Unmounts the guards at `target`, also while they are in use: they contain no data.
pub fn unmount_guard(target: &Path) -> Result<()> {
    while mount_at(target)?.is_some_and(|mount| mount.is_guard()) {
        match umount2(target, MntFlags::UMOUNT_NOFOLLOW | MntFlags::MNT_DETACH) {
            Ok(()) => reach("guard.unmounted")?,
            // Removed meanwhile.
            Err(Errno::ENOENT) => {}
            Err(e) => {
                return Err(e).context(|| format!("unmounting the guard at {}", target.display()));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::super::testing::have_root;
    use super::super::all_mounts;
    use super::*;

    #[test]
    fn root_a_guard_stores_no_data() {
        if !have_root() {
            return;
        }
        let scratch = tempfile::tempdir().unwrap();
        let target = scratch.path().join("target");
        fs::create_dir(&target).unwrap();
        mount_guard(&target).unwrap();
        mount_guard(&target).unwrap();
        let guards = || {
            let all = all_mounts().unwrap();
            all.iter().filter(|mount| mount.target.starts_with(scratch.path())).count()
        };
        assert_eq!(guards(), 1, "mounting is idempotent");
        // kubelet creates directories for sub-paths.
        let deep = (0..200).fold(target.clone(), |path, _| path.join("a"));
        fs::create_dir_all(&deep).unwrap();
        for place in [&target, &deep] {
            let written = fs::write(place.join("file"), "data").unwrap_err();
            assert_eq!(written.raw_os_error(), Some(libc::ENOSPC), "{written}");
            assert_eq!(fs::metadata(place.join("file")).unwrap().len(), 0);
        }
        assert!(fs::read_to_string(target.join(NOTE)).unwrap().starts_with(TEXT));
        let open = File::open(&target).unwrap();
        unmount_guard(&target).unwrap();
        unmount_guard(&target).unwrap();
        assert_eq!((guards(), fs::read_dir(&target).unwrap().count()), (0, 0));
        drop(open);
    }
}
