//! Finds the mounts of a container that are deferred volumes: those whose source is an entry's
//! target or below one. The source is compared by path or, for the bind mounts that kubelet creates
//! for sub-paths, by the mount table.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::bundle::Bind;
use super::config::Config;
use crate::backend::filesystem::{self, Mount};
use crate::crust::{Directory, Entry, MountInfo, Target};

/// A mount of a container whose source is on a deferred volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Deferred {
    /// Index of the container's mount.
    pub index: usize,
    pub target: Target,
    pub entry: Entry,
    pub info: MountInfo,
    /// Path within the volume; empty for all of it.
    pub sub_path: PathBuf,
}

/// Finds the deferred volumes among `binds`.
///
/// # Errors
/// A bind mount refers to a deferred volume that cannot be mounted.
pub fn find(config: &Config, binds: &[Bind]) -> Result<Vec<Deferred>> {
    let directory = Directory::new(&config.crust_dir);
    let entries = directory.entries()?;
    let mut found = Vec::new();
    if entries.is_empty() {
        return Ok(found);
    }
    let mut table = None;
    for bind in binds {
        let deferred = match by_path(&directory, bind)? {
            None if may_be_indirect(config, &bind.source) => {
                if table.is_none() {
                    table = Some(MountTable::new(&entries)?);
                }
                match &table {
                    Some(table) => table.deferred(bind)?,
                    None => None,
                }
            }
            deferred => deferred,
        };
        found.extend(deferred);
    }
    if !found.is_empty() {
        directory.check()?;
    }
    Ok(found)
}

fn by_path(directory: &Directory, bind: &Bind) -> Result<Option<Deferred>> {
    // Normalized as the kernel does, without resolving links.
    let source: PathBuf = bind.source.components().collect();
    for ancestor in source.ancestors() {
        let Ok(target) = Target::new("source", ancestor) else { continue };
        let entry = directory.entry(&target);
        if !entry.path().exists() {
            continue;
        }
        let info = info(&entry, &target)?;
        let sub_path = source.strip_prefix(ancestor)?.to_owned();
        if sub_path.components().any(|part| !matches!(part, Component::Normal(_))) {
            bail!("{}: the sub-path contains ..", bind.source.display());
        }
        return Ok(Some(Deferred { index: bind.index, target, entry, info, sub_path }));
    }
    Ok(None)
}

/// Reads the entry's mount data. The entry exists, so the container must not start without it.
fn info(entry: &Entry, target: &Target) -> Result<MountInfo> {
    let read = entry.mount_info().with_context(|| format!("the entry of {target} is invalid"))?;
    read.with_context(|| format!("crust_ops is staging or unstaging {target}; try again"))
}

/// Whether a source may refer to an entry through a bind mount of kubelet or a link.
fn may_be_indirect(config: &Config, source: &Path) -> bool {
    source.starts_with(&config.kubelet_dir)
        || source.components().any(|part| part.as_os_str() == "volume-subpaths")
        || source.canonicalize().is_ok_and(|real| real != source)
}

/// The filesystem of a path, and the path within it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Location {
    /// `major:minor`.
    device: String,
    path: PathBuf,
    /// The directory was removed and is still mounted.
    removed: bool,
}

/// Suffix that the kernel adds to the root of a mount whose directory was removed.
const REMOVED: &[u8] = b"//deleted";

/// The mount table, and the locations of the entries' targets.
struct MountTable {
    mounts: Vec<Mount>,
    targets: Vec<(Target, Entry, Location)>,
}

impl MountTable {
    fn new(entries: &[Entry]) -> Result<Self> {
        let mut table = Self { mounts: filesystem::all_mounts()?, targets: Vec::new() };
        for entry in entries {
            // An unreadable entry is not found by its path either.
            let Ok(Some(target)) = entry.target() else { continue };
            if let Some(location) = table.locate(target.as_path()) {
                table.targets.push((target, entry.clone(), location));
            }
        }
        Ok(table)
    }

    /// The location of a path. For a missing path, where it would be.
    fn locate(&self, path: &Path) -> Option<Location> {
        let existing = |above: &Path| Some((above.canonicalize().ok()?, above.to_owned()));
        let (real, above) = path.ancestors().find_map(existing)?;
        let missing = path.strip_prefix(above).ok()?;
        if missing.components().any(|part| part == Component::ParentDir) {
            return None;
        }
        let real = real.join(missing);
        let mount = self
            .mounts
            .iter()
            .enumerate()
            .filter(|(_, mount)| real.starts_with(&mount.target))
            .max_by_key(|(order, mount)| (mount.target.components().count(), *order));
        let (_, mount) = mount?;
        let below = real.strip_prefix(&mount.target).ok()?;
        let root = mount.root.as_os_str().as_bytes();
        let removed = root.ends_with(REMOVED);
        let root = Path::new(OsStr::from_bytes(root.strip_suffix(REMOVED).unwrap_or(root)));
        // Joining an empty path adds a trailing slash.
        let path = root.join(below).components().collect();
        Some(Location { device: mount.device.clone(), path, removed })
    }

    fn deferred(&self, bind: &Bind) -> Result<Option<Deferred>> {
        let Some(location) = self.locate(&bind.source) else { return Ok(None) };
        for (target, entry, target_location) in &self.targets {
            if location.device != target_location.device {
                continue;
            }
            let Ok(sub_path) = location.path.strip_prefix(&target_location.path) else { continue };
            if location.removed {
                bail!(
                    "{}: the mounted directory below {target} was removed; restart the pod",
                    bind.source.display()
                );
            }
            let info = info(entry, target)?;
            return Ok(Some(Deferred {
                index: bind.index,
                target: target.clone(),
                entry: entry.clone(),
                info,
                sub_path: sub_path.to_owned(),
            }));
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn staged(directory: &Directory, path: &Path) -> Target {
        let target = Target::new("target", path).unwrap();
        let info = MountInfo::new("/dev/loop1".into(), "ext4".into(), Vec::new());
        directory.entry(&target).stage(&target, &info).unwrap();
        target
    }

    fn config(at: &Path) -> Config {
        Config { crust_dir: at.join("crust"), ..Config::default() }
    }

    #[test]
    fn only_a_target_and_paths_below_it_are_found() {
        let scratch = tempfile::tempdir().unwrap();
        let config = config(scratch.path());
        let of = |source: &str| {
            let binds = [Bind { index: 3, source: source.into() }];
            find(&config, &binds).map(|found| found.first().cloned())
        };
        assert_eq!(of("/t/mount").unwrap(), None);
        let target = staged(&Directory::new(&config.crust_dir), Path::new("/t/mount"));
        let found = of("/t/mount").unwrap().unwrap();
        assert_eq!((found.index, &found.target, found.sub_path), (3, &target, PathBuf::new()));
        assert_eq!(of("/t/mount/a/b").unwrap().unwrap().sub_path, PathBuf::from("a/b"));
        assert_eq!(of("/t//mount/./a/").unwrap().unwrap().sub_path, PathBuf::from("a"));
        assert!(of("/t/mount/../mount").is_err() && of("/t/mount/a/..").is_err());
        for other in ["/t", "/t/mounts", "/t/moun", "/"] {
            assert_eq!(of(other).unwrap(), None, "{other}");
        }
    }

    #[test]
    fn a_link_to_a_target_is_resolved() {
        let scratch = tempfile::tempdir().unwrap();
        let config = config(scratch.path());
        let real = scratch.path().join("real/mount/sub");
        std::fs::create_dir_all(&real).unwrap();
        std::os::unix::fs::symlink("real", scratch.path().join("link")).unwrap();
        let target = staged(&Directory::new(&config.crust_dir), &scratch.path().join("link/mount"));
        let found = find(&config, &[Bind { index: 0, source: real }]).unwrap();
        assert!(
            found.is_empty(),
            "sources outside kubelet's directory that are no links are not resolved"
        );
        let config = Config { kubelet_dir: scratch.path().join("real"), ..config };
        let source = scratch.path().join("real/mount/sub");
        let found = find(&config, &[Bind { index: 0, source }]).unwrap();
        assert_eq!((&found[0].target, found[0].sub_path.as_path()), (&target, Path::new("sub")));
    }

    #[test]
    fn an_invalid_entry_prevents_the_start_of_its_container() {
        let scratch = tempfile::tempdir().unwrap();
        let config = config(scratch.path());
        let directory = Directory::new(&config.crust_dir);
        let target = staged(&directory, Path::new("/t/mount"));
        let binds = [Bind { index: 0, source: "/t/mount".into() }];
        let entry = directory.entry(&target);
        for bad in ["", "{}", "[1]"] {
            entry.write("mountInfo.json", bad.as_bytes()).unwrap();
            assert!(find(&config, &binds).is_err(), "{bad}");
        }
        entry.remove("mountInfo.json").unwrap();
        assert!(find(&config, &binds).unwrap_err().to_string().contains("try again"));
    }
}
