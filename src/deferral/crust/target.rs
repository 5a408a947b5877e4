//! The target path that names an entry: where the host would mount the volume.

use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use super::{Problem, Result};

/// PATH_MAX without the terminating zero.
const MAX_PATH: usize = 4095;

/// A normalized absolute path: no `.`, `..`, double or trailing slashes. Equal paths have equal
/// bytes and therefore equal hashes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Target(PathBuf);

impl Target {
    pub fn new(field: &'static str, path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if path.as_os_str().is_empty() {
            return Err(Problem::invalid(field, "is required"));
        }
        let mut normal = PathBuf::new();
        for component in path.components() {
            match component {
                Component::RootDir | Component::Normal(_) => normal.push(component),
                Component::CurDir | Component::ParentDir | Component::Prefix(_) => {
                    return Err(Problem::invalid(
                        field,
                        "must be an absolute path without . and ..",
                    ));
                }
            }
        }
        let bytes = path.as_os_str().as_bytes();
        if !path.is_absolute() || normal.as_os_str() != path.as_os_str() || path.parent().is_none()
        {
            return Err(Problem::invalid(
                field,
                "must be an absolute path other than /, without ., .., double and trailing slashes",
            ));
        }
        if bytes.len() > MAX_PATH || bytes.contains(&0) {
            return Err(Problem::invalid(
                field,
                format!("must have at most {MAX_PATH} bytes, none of them zero"),
            ));
        }
        Ok(Self(normal))
    }

    pub fn as_path(&self) -> &Path {
        &self.0
    }

    pub fn into_path(self) -> PathBuf {
        self.0
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.display().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_normalized_target_paths_are_accepted() {
        for good in ["/a", "/var/lib/kubelet/pods/1/volumes/kubernetes.io~csi/pv/mount", "/a b"] {
            assert!(Target::new("path", good).is_ok(), "{good}");
        }
        let long = format!("/{}", "x".repeat(MAX_PATH));
        for bad in ["", "/", "a", "./a", "/a/", "//a", "/a//b", "/a/./b", "/a/../b", "/a\0b", &long]
        {
            assert!(Target::new("path", bad).is_err(), "{bad:?}");
        }
    }
}
