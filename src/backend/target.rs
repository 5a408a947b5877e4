//! The place where a pod finds its volume: what may be there before, and taking it away afterwards.

use std::fs::{self, Metadata};
use std::io;
use std::path::Path;

use super::error::{Context, Error, Result};
use super::fail_point::reach;
use super::filesystem;

/// What stands at `path` itself, links not followed.
pub fn present(path: &Path) -> Result<Option<Metadata>> {
    match fs::symlink_metadata(path) {
        Ok(metadata) => Ok(Some(metadata)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io(format!("looking at {}", path.display()), e)),
    }
}

/// That a filesystem can be mounted at `path`, if anything is there.
pub fn check_directory(field: &'static str, path: &Path) -> Result<()> {
    let fits = present(path)?.is_none_or(|found| found.is_dir());
    if fits && filesystem::mount_at(path)?.is_none() { Ok(()) } else { Err(taken(field, path)) }
}

/// That a device can be bound to `path`, if anything is there: an empty file.
pub fn check_file(field: &'static str, path: &Path) -> Result<()> {
    let fits = present(path)?.is_none_or(|found| found.is_file() && found.len() == 0);
    if fits && filesystem::mount_at(path)?.is_none() { Ok(()) } else { Err(taken(field, path)) }
}

fn taken(field: &'static str, path: &Path) -> Error {
    Error::Precondition(format!("{field}: something else is at {}", path.display()))
}

/// Removes the directory or file that a volume was shown at. What is not empty, or is in use by
/// somebody else, is not touched.
pub fn remove_target(target: &Path) -> Result<()> {
    let removed = match present(target)? {
        Some(found) if found.is_dir() => fs::remove_dir(target),
        Some(found) if found.is_file() && found.len() == 0 => fs::remove_file(target),
        Some(_) | None => return Ok(()),
    };
    let harmless = [libc::ENOTEMPTY, libc::EBUSY, libc::ENOENT];
    match removed {
        Err(e) if e.raw_os_error().is_some_and(|code| harmless.contains(&code)) => Ok(()),
        result => {
            result.context(|| format!("removing {}", target.display()))?;
            reach("publish.target_removed")
        }
    }
}
