//! Checks that only root can change a file: every directory and link of its path is checked.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

use super::{Problem, Result};

/// The kernel's limit.
const MAX_LINKS: usize = 40;
const STICKY: u32 = 0o1000;
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Returns the path, with links resolved, of a directory that only root can write to.
pub fn directory(path: &Path) -> Result<PathBuf> {
    let (real, found) = walk(path)?;
    if !found.is_dir() || found.mode() & WRITABLE_BY_OTHERS != 0 {
        return Err(unsafe_at(path, "is not a directory that only its owner may write to"));
    }
    Ok(real)
}

/// Checks for an executable file that only root can have created.
pub fn program(path: &Path) -> Result<()> {
    let (_, found) = walk(path)?;
    if !found.is_file() || found.permissions().mode() & 0o111 == 0 {
        return Err(unsafe_at(path, "is not an executable file"));
    }
    Ok(())
}

fn unsafe_at(path: &Path, reason: &str) -> Problem {
    Problem::Unsafe(format!("{}: {reason}", path.display()))
}

/// Resolves `path` as the kernel does, including links. Returns the path without links and its
/// metadata.
fn walk(path: &Path) -> Result<(PathBuf, Metadata)> {
    if !path.is_absolute() {
        return Err(unsafe_at(path, "is not an absolute path"));
    }
    let mut links = 0;
    let mut remaining = names(path);
    let mut at = PathBuf::from("/");
    let mut found = trusted_metadata(&at)?;
    while let Some(name) = remaining.pop_front() {
        if !found.is_dir() {
            return Err(unsafe_at(&at, "is not a directory"));
        }
        if name == ".." {
            at.pop();
            found = trusted_metadata(&at)?;
            continue;
        }
        let next = at.join(name);
        let metadata = trusted_metadata(&next)?;
        if !metadata.is_symlink() {
            (at, found) = (next, metadata);
            continue;
        }
        links += 1;
        if links > MAX_LINKS {
            return Err(unsafe_at(path, "has too many links"));
        }
        let target = fs::read_link(&next)
            .map_err(|e| Problem::io(format!("reading {}", next.display()), e))?;
        if target.is_absolute() {
            at = PathBuf::from("/");
            found = trusted_metadata(&at)?;
        }
        for name in names(&target).into_iter().rev() {
            remaining.push_front(name);
        }
    }
    Ok((at, found))
}

fn names(path: &Path) -> VecDeque<OsString> {
    let name = |component: Component<'_>| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    };
    path.components().filter_map(name).collect()
}

/// Returns the metadata of a path that only root can have created and can change.
fn trusted_metadata(path: &Path) -> Result<Metadata> {
    let found = fs::symlink_metadata(path)
        .map_err(|e| Problem::io(format!("reading {}", path.display()), e))?;
    // Unit tests run without root.
    if found.uid() != 0 && found.uid() != nix::unistd::geteuid().as_raw() {
        return Err(unsafe_at(path, "is not owned by root"));
    }
    // The mode of a link has no meaning, and in a sticky directory only the owner of a file can
    // replace it.
    let open_to_others = found.mode() & WRITABLE_BY_OTHERS != 0
        && !found.is_symlink()
        && !(found.is_dir() && found.mode() & STICKY != 0);
    if open_to_others {
        return Err(unsafe_at(path, "is writable by its group or by others"));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, symlink};

    use super::*;

    fn make(path: &Path, mode: u32) {
        fs::OpenOptions::new().create_new(true).write(true).mode(mode).open(path).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_program_that_others_can_change_is_not_trusted() {
        let scratch = tempfile::tempdir().unwrap();
        let at = |name: &str| scratch.path().join(name);
        make(&at("good"), 0o755);
        program(&at("good")).unwrap();
        symlink(at("good"), at("link")).unwrap();
        symlink("link", at("link-to-link")).unwrap();
        program(&at("link-to-link")).unwrap();
        for mode in [0o775, 0o757] {
            make(&at(&format!("{mode:o}")), mode);
            assert!(matches!(program(&at(&format!("{mode:o}"))), Err(Problem::Unsafe(_))));
        }
        make(&at("data"), 0o644);
        assert!(program(&at("data")).is_err());
        assert!(program(scratch.path()).is_err());
        assert!(program(Path::new("good")).is_err());
        assert!(matches!(program(&at("none")), Err(Problem::Io { .. })));
        // A directory in the path, or in the target of a link.
        fs::DirBuilder::new().mode(0o755).create(at("open")).unwrap();
        make(&at("open/program"), 0o755);
        symlink(at("open/program"), at("into-open")).unwrap();
        program(&at("into-open")).unwrap();
        fs::set_permissions(at("open"), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(program(&at("open/program")).is_err() && program(&at("into-open")).is_err());
        fs::set_permissions(at("open"), fs::Permissions::from_mode(0o1777)).unwrap();
        program(&at("open/program")).unwrap();
        symlink("loop", at("loop")).unwrap();
        assert!(program(&at("loop")).is_err());
    }
}
