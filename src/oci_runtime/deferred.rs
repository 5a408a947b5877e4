//! Which mounts of a container are volumes that were left to this runtime: those whose source is the target of an entry or
//! lies below one, by its path or, for the bind mounts that kubelet makes of sub-paths, by what the kernel says is mounted there.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::bundle::Bind;
use super::config::Config;
use crate::backend::filesystem::{self, Mount};
use crate::crust::{Directory, Entry, MountInfo, Target};

/// A mount of a container whose source is on a volume that is not mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Deferred {
    /// Which of the container's mounts it is.
    pub index: usize,
    pub target: Target,
    pub entry: Entry,
    pub info: MountInfo,
    /// What of the volume is shown; empty for all of it.
    pub sub_path: PathBuf,
}

/// Those among `binds`.
///
/// # Errors
/// One seems to be, and cannot be handed over; why.
pub fn find(config: &Config, binds: &[Bind]) -> Result<Vec<Deferred>> {
    let directory = Directory::new(&config.crust_dir);
    let entries = directory.entries()?;
    let mut found = Vec::new();
    if entries.is_empty() {
        return Ok(found);
    }
    let mut places = None;
    for bind in binds {
        let deferred = match by_path(&directory, bind)? {
            None if by_kernel_counts(config, &bind.source) => {
                if places.is_none() {
                    places = Some(Places::new(&entries)?);
                }
                match &places {
                    Some(places) => places.deferred(bind)?,
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
    // As the kernel would read it, but for links.
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
            bail!("{}: the sub-path has .. in it", bind.source.display());
        }
        return Ok(Some(Deferred { index: bind.index, target, entry, info, sub_path }));
    }
    Ok(None)
}

/// What is to be mounted. The entry is there, so a container must not start without it.
fn info(entry: &Entry, target: &Target) -> Result<MountInfo> {
    let read =
        entry.mount_info().with_context(|| format!("the entry of {target} cannot be used"))?;
    read.with_context(|| {
        format!("{target} is just being handed over by crust_ops, or taken back; try again")
    })
}

/// Whether what is mounted at a source can be anything of an entry: kubelet's own, or what is reached by links.
fn by_kernel_counts(config: &Config, source: &Path) -> bool {
    source.starts_with(&config.kubelet_dir)
        || source.components().any(|part| part.as_os_str() == "volume-subpaths")
        || source.canonicalize().is_ok_and(|real| real != source)
}

/// Where a path leads: a filesystem, and a place in it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    /// `major:minor`.
    device: String,
    path: PathBuf,
    /// It was there, and is mounted still.
    removed: bool,
}

/// So the kernel ends the root of a mount whose directory is gone.
const REMOVED: &[u8] = b"//deleted";

/// What the kernel says of mounts and of the targets of entries.
struct Places {
    mounts: Vec<Mount>,
    targets: Vec<(Target, Entry, Place)>,
}

impl Places {
    fn new(entries: &[Entry]) -> Result<Self> {
        let mut places = Self { mounts: filesystem::all_mounts()?, targets: Vec::new() };
        for entry in entries {
            // One that says nothing of use is not found by its path either.
            let Ok(Some(target)) = entry.target() else { continue };
            if let Some(place) = places.of(target.as_path()) {
                places.targets.push((target, entry.clone(), place));
            }
        }
        Ok(places)
    }

    /// Of what is not there, where it would be.
    fn of(&self, path: &Path) -> Option<Place> {
        let there = |above: &Path| Some((above.canonicalize().ok()?, above.to_owned()));
        let (real, above) = path.ancestors().find_map(there)?;
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
        // Joining nothing leaves a slash at the end.
        let path = root.join(below).components().collect();
        Some(Place { device: mount.device.clone(), path, removed })
    }

    fn deferred(&self, bind: &Bind) -> Result<Option<Deferred>> {
        let Some(place) = self.of(&bind.source) else { return Ok(None) };
        for (target, entry, targets) in &self.targets {
            if place.device != targets.device {
                continue;
            }
            let Ok(sub_path) = place.path.strip_prefix(&targets.path) else { continue };
            if place.removed {
                bail!(
                    "{}: the directory below {target} that is mounted there has been removed",
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
    fn a_target_and_what_is_below_it_are_found_and_nothing_else_is() {
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
    fn a_link_to_a_target_is_found_by_where_it_leads() {
        let scratch = tempfile::tempdir().unwrap();
        let config = config(scratch.path());
        let real = scratch.path().join("real/mount/sub");
        std::fs::create_dir_all(&real).unwrap();
        std::os::unix::fs::symlink("real", scratch.path().join("link")).unwrap();
        let target = staged(&Directory::new(&config.crust_dir), &scratch.path().join("link/mount"));
        let found = find(&config, &[Bind { index: 0, source: real }]).unwrap();
        assert!(found.is_empty(), "nobody looks at what is not kubelet's and no link");
        let config = Config { kubelet_dir: scratch.path().join("real"), ..config };
        let source = scratch.path().join("real/mount/sub");
        let found = find(&config, &[Bind { index: 0, source }]).unwrap();
        assert_eq!((&found[0].target, found[0].sub_path.as_path()), (&target, Path::new("sub")));
    }

    #[test]
    fn a_container_does_not_start_without_a_volume_that_cannot_be_made_out() {
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
