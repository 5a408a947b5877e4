//! `--target-root`: confines staging and target paths to kubelet's directory, so that a client of the
//! CSI socket cannot mount volumes over other directories of the host.

use std::path::{Path, PathBuf};

use super::request;
use storage::{Error, Result};

/// The directory that staging and target paths must be in.
#[derive(Debug, Clone)]
pub struct TargetRoot(pub PathBuf);

impl TargetRoot {
    /// A required path in the directory, or, without a directory, any absolute path.
    pub fn path(root: Option<&Self>, field: &'static str, value: &str) -> Result<PathBuf> {
        let path = request::path(field, value)?;
        match root {
            Some(Self(root)) if !is_inside(root, &path) => {
                let root = root.display();
                Err(Error::invalid(
                    field,
                    format!("is not a path in the directory {root} of --target-root"),
                ))
            }
            _ => Ok(path),
        }
    }

    /// Whether this driver may remove a target that no row names.
    pub fn allows(root: Option<&Self>, path: &Path) -> bool {
        root.is_none_or(|Self(root)| is_inside(root, path))
    }
}

/// Whether the existing part of the path is in the directory, and the path is not the directory
/// itself, on which a mount would hide all pods. Symbolic links are resolved: a pod may have made
/// them in its own volumes.
fn is_inside(root: &Path, path: &Path) -> bool {
    let Ok(root) = root.canonicalize() else { return false };
    let existing = path.ancestors().find(|part| part.symlink_metadata().is_ok());
    let Some(Ok(real)) = existing.map(Path::canonicalize) else { return false };
    let is_root = real == root && existing == Some(path);
    real.starts_with(root) && !is_root
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_path_outside_the_root_is_refused_also_through_a_link() {
        let directory = tempfile::tempdir().unwrap();
        let base = directory.path();
        let root = base.join("kubelet");
        fs::create_dir_all(root.join("pods/a")).unwrap();
        fs::create_dir(base.join("kubelet-2")).unwrap();
        symlink(base.join("kubelet-2"), root.join("pods/a/out")).unwrap();
        symlink(base.join("missing"), root.join("pods/a/dangling")).unwrap();
        symlink(&root, base.join("link")).unwrap();
        let refused = |root: &Path, path: &str| {
            let root = TargetRoot(root.to_owned());
            let path = base.join(path);
            TargetRoot::path(Some(&root), "target_path", path.to_str().unwrap()).is_err()
        };
        for inside in ["kubelet/pods/a", "kubelet/pods/b/mount", "link/pods/a/mount"] {
            assert!(!refused(&root, inside), "{inside}");
        }
        assert!(!refused(&base.join("link"), "kubelet/pods/a"));
        symlink(&root, root.join("pods/a/root")).unwrap();
        for outside in [
            "kubelet",
            "kubelet/",
            "link",
            "kubelet/pods/a/root",
            "other",
            "kubelet-2/a",
            "kubelet/pods/a/out",
            "kubelet/pods/a/out/mount",
            "kubelet/pods/a/dangling",
            "kubelet/pods/a/dangling/mount",
        ] {
            assert!(refused(&root, outside), "{outside}");
        }
        assert!(refused(&base.join("missing"), "missing/a"));
        TargetRoot::path(None, "target_path", "/other").unwrap();
        TargetRoot::path(None, "target_path", "other").unwrap_err();
    }
}
