//! Target paths: checking them before a mount and removing them afterwards.

use std::fs::{self, Metadata};
use std::io;
use std::path::Path;

use super::error::{Context, Error, Result};
use super::fail_point::reach;
use super::filesystem;

/// The metadata of `path`, without following links. `None` if it does not exist.
pub fn present(path: &Path) -> Result<Option<Metadata>> {
    match fs::symlink_metadata(path) {
        Ok(metadata) => Ok(Some(metadata)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io(format!("reading the metadata of {}", path.display()), e)),
    }
}

/// Checks that `path` is missing or a directory without a mount other than the guard of a deferred
/// volume that no record knows any more.
pub fn check_directory(field: &'static str, path: &Path) -> Result<()> {
    let fits = present(path)?.is_none_or(|found| found.is_dir());
    let is_free =
        || Ok::<_, Error>(filesystem::mount_at(path)?.is_none_or(|mount| mount.is_guard()));
    if fits && is_free()? { Ok(()) } else { Err(occupied(field, path)) }
}

/// Checks that `path` is missing or an empty file without a mount.
pub fn check_file(field: &'static str, path: &Path) -> Result<()> {
    let fits = present(path)?.is_none_or(|found| found.is_file() && found.len() == 0);
    if fits && filesystem::mount_at(path)?.is_none() { Ok(()) } else { Err(occupied(field, path)) }
}

fn occupied(field: &'static str, path: &Path) -> Error {
    Error::Precondition(format!(
        "{field}: another mount or file exists at {}; remove it",
        path.display()
    ))
}

/// Removes a target and its guard. Keeps a directory or file that is not empty or in use.
pub fn remove_target(target: &Path) -> Result<()> {
    filesystem::unmount_guard(target)?;
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
