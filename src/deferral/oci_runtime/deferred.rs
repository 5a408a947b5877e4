//! Finds the mounts of a container that are deferred volumes: those whose source is an entry's
//! target or below one, by its path or, through bind mounts and links, by the mount table. What
//! cannot be decided is an error: the container would see the host's directory.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Component, Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::bundle::Bind;
use super::config::Config;
use crate::crust::{Directory, Entry, MountInfo, Target};
use storage::filesystem::{self, Mount};
use storage::sys;

/// How long to wait for crust_ops, which creates an entry and then writes its target.
const STAGE_TIMEOUT: Duration = Duration::from_secs(2);
const STAGE_INTERVAL: Duration = Duration::from_millis(10);

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

/// Whether this node certainly has no deferred volume: neither an entry nor a guarded target in
/// kubelet's directory.
///
/// # Errors
/// The directory of the entries, kubelet's, or the mount table is unreadable.
pub fn none_exist(config: &Config) -> Result<bool> {
    if !Directory::new(&config.crust_dir).entries()?.is_empty() {
        return Ok(false);
    }
    let kubelet = match config.kubelet_dir.canonicalize() {
        Err(e) if is_missing(&e) => return Ok(true),
        real => real.with_context(|| format!("{} (kubeletDir)", config.kubelet_dir.display()))?,
    };
    let is_guard = |mount: &Mount| mount.is_guard() && mount.target.starts_with(&kubelet);
    Ok(!filesystem::all_mounts()?.iter().any(is_guard))
}

/// Finds the deferred volumes among `binds`.
///
/// # Errors
/// A bind mount refers to a deferred volume that cannot be mounted, or may refer to one.
pub fn find(config: &Config, binds: &[Bind]) -> Result<Vec<Deferred>> {
    let directory = Directory::new(&config.crust_dir);
    let mut found = Vec::new();
    let mut table = None;
    for bind in binds {
        let deferred = match by_path(&directory, bind)? {
            None => {
                if table.is_none() {
                    table = Some(MountTable::new(&directory)?);
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
        if !entry.exists()? {
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

/// Reads the target of an entry. Without it, every mount may belong to the entry. `None`: the entry
/// was removed meanwhile.
fn target_of(directory: &Directory, entry: &Entry) -> Result<Option<Target>> {
    let what = || {
        format!(
            "{}: the entry of a deferred volume is invalid, and the container may use that volume; delete the pod of the \
             volume, or remove this directory if no pod uses it",
            entry.path().display()
        )
    };
    let until = Instant::now() + STAGE_TIMEOUT;
    loop {
        match entry.target().with_context(what)? {
            Some(target) => {
                let own = directory.entry(&target);
                ensure!(own == *entry, "{}: its target {target} names another entry", what());
                return Ok(Some(target));
            }
            None if !entry.exists()? => return Ok(None),
            None if Instant::now() < until => sleep(STAGE_INTERVAL),
            None => bail!("{}: the file target is missing", what()),
        }
    }
}

/// The filesystem of a path, and the path within it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Location {
    /// `major:minor`.
    device: String,
    path: PathBuf,
    /// The directory was removed and is still mounted.
    removed: bool,
    /// On the guard of a deferred volume.
    guarded: bool,
}

impl Location {
    /// The location of a path below the mount point of `mount`.
    fn on(mount: &Mount, path: &Path) -> Result<Self> {
        let below = path.strip_prefix(&mount.target)?;
        let root = mount.root.as_os_str().as_bytes();
        let removed = root.ends_with(REMOVED);
        let root = Path::new(OsStr::from_bytes(root.strip_suffix(REMOVED).unwrap_or(root)));
        // Joining an empty path adds a trailing slash.
        let path = root.join(below).components().collect();
        let guarded = mount.is_guard();
        Ok(Self { device: mount.device.clone(), path, removed, guarded })
    }
}

/// Suffix that the kernel adds to the root of a mount whose directory was removed.
const REMOVED: &[u8] = b"//deleted";

/// The mount table, and the locations of the entries' targets.
struct MountTable {
    mounts: Vec<Mount>,
    targets: Vec<(Target, Entry, Location)>,
}

impl MountTable {
    fn new(directory: &Directory) -> Result<Self> {
        let mut table = Self { mounts: filesystem::all_mounts()?, targets: Vec::new() };
        for entry in directory.entries()? {
            let Some(target) = target_of(directory, &entry)? else { continue };
            for location in table.locations(target.as_path())? {
                table.targets.push((target.clone(), entry.clone(), location));
            }
        }
        Ok(table)
    }

    /// The locations of a target: of the directory on the host, and of what is mounted there.
    fn locations(&self, target: &Path) -> Result<Vec<Location>> {
        let Some((real, _)) = existing(target)? else { return Ok(Vec::new()) };
        let mut found = vec![self.locate(&real)?];
        let beneath = self
            .mounts
            .iter()
            .enumerate()
            .filter(|(_, mount)| real.starts_with(&mount.target) && mount.target != real);
        // Of the mounts above the target, the deepest and latest contains its directory.
        let deepest =
            beneath.max_by_key(|(order, mount)| (mount.target.components().count(), *order));
        if let Some((_, mount)) = deepest {
            found.push(Location::on(mount, &real)?);
        }
        found.dedup();
        Ok(found)
    }

    /// The location of a real path. Of a missing path, where it would be.
    fn locate(&self, real: &Path) -> Result<Location> {
        for existing in real.ancestors() {
            let what = || format!("reading the mount of {}", existing.display());
            // Not read, and not opened by a driver if it is a device.
            let opened = File::options().read(true).custom_flags(libc::O_PATH).open(existing);
            let opened = match opened {
                Err(e) if is_missing(&e) => continue,
                opened => opened.with_context(what)?,
            };
            let id = sys::mount_id(&opened).with_context(what)?;
            let mount = self.mounts.iter().find(|mount| mount.id == id);
            let mount =
                mount.with_context(|| format!("{}: it has just changed; try again", what()))?;
            return Location::on(mount, real);
        }
        bail!("{}: is not an absolute path", real.display())
    }

    fn deferred(&self, bind: &Bind) -> Result<Option<Deferred>> {
        // The runtime rejects a source whose parents are missing or that contains a dangling link.
        let Some((real, is_link)) = existing(&bind.source)? else { return Ok(None) };
        ensure!(!is_link, "{}: is a dangling link", bind.source.display());
        let location = self.locate(&real)?;
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
        ensure!(
            !location.guarded,
            "{}: is the directory of a deferred volume that has no entry, as after the loss of the entries' directory; delete the \
             pod, so that the volume is published again",
            bind.source.display()
        );
        Ok(None)
    }
}

fn is_missing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR))
}

/// A path without links. Of a missing path, the part that exists has none; the flag reports a
/// dangling link. `None`: the missing part contains `..`.
fn existing(path: &Path) -> Result<Option<(PathBuf, bool)>> {
    for above in path.ancestors() {
        let real = match above.canonicalize() {
            Err(e) if is_missing(&e) => continue,
            real => real.with_context(|| format!("resolving {}", above.display()))?,
        };
        let missing = path.strip_prefix(above)?;
        let Some(first) = missing.components().next() else { return Ok(Some((real, false))) };
        if missing.components().any(|part| part == Component::ParentDir) {
            return Ok(None);
        }
        let is_link = real.join(first).symlink_metadata().is_ok_and(|found| found.is_symlink());
        return Ok(Some((real.join(missing), is_link)));
    }
    bail!("{}: is not an absolute path", path.display())
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
        assert_eq!((&found[0].target, found[0].sub_path.as_path()), (&target, Path::new("sub")));
    }

    #[test]
    fn an_entry_with_an_unreadable_target_blocks_every_bind_mount() {
        let scratch = tempfile::tempdir().unwrap();
        let config = config(scratch.path());
        let directory = Directory::new(&config.crust_dir);
        let target = staged(&directory, &scratch.path().join("mount"));
        let source = scratch.path().join("other");
        std::fs::create_dir(&source).unwrap();
        let other = [Bind { index: 0, source }];
        let entry = directory.entry(&target);
        assert_eq!(find(&config, &other).unwrap(), []);
        let file = entry.path().join("target");
        let refused = || format!("{:#}", find(&config, &other).unwrap_err());
        for bad in ["", "relative", "/another/target"] {
            entry.write("target", bad.as_bytes()).unwrap();
            assert!(refused().contains("is invalid"), "{bad}");
        }
        std::fs::remove_file(&file).unwrap();
        assert!(refused().contains("the file target is missing"));
        std::fs::create_dir(&file).unwrap();
        assert!(refused().contains("is invalid"));
        std::fs::remove_dir(&file).unwrap();
        std::os::unix::fs::symlink("/etc/hostname", &file).unwrap();
        assert!(refused().contains("is invalid"));
        // A container without bind mounts has no volume.
        assert_eq!(find(&config, &[]).unwrap(), []);
        std::fs::remove_file(&file).unwrap();
        std::fs::remove_file(entry.path().join("mountInfo.json")).unwrap();
        std::fs::remove_dir(entry.path()).unwrap();
        assert_eq!(find(&config, &other).unwrap(), []);
        // What is no directory is no missing entry.
        std::os::unix::fs::symlink("/nowhere", entry.path()).unwrap();
        assert!(refused().contains("is invalid"));
    }

    #[test]
    fn an_unreadable_entry_directory_is_not_an_empty_one() {
        let scratch = tempfile::tempdir().unwrap();
        let config = config(scratch.path());
        let binds = [Bind { index: 0, source: scratch.path().to_owned() }];
        assert_eq!(find(&config, &binds).unwrap(), []);
        std::os::unix::fs::symlink("gone", &config.crust_dir).unwrap();
        assert!(none_exist(&config).is_err() && find(&config, &binds).is_err());
        std::fs::remove_file(&config.crust_dir).unwrap();
        std::fs::write(&config.crust_dir, "").unwrap();
        assert!(none_exist(&config).is_err() && find(&config, &binds).is_err());
    }
}
