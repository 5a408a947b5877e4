//! Hands detached mounts to the hook ([`super::attach`]) while the next runtime creates a container.
//! The runtime gets a changed config.json, in which each volume is a placeholder: an empty directory
//! or file in the work directory. The bundle has the changed file only until the hook has run. If
//! this process is killed, the next creation restores the original; until then the hook fails, and
//! with it every creation.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

use anyhow::{Context, Result, bail};

use super::attach::{Job, VolumeMount};
use super::bundle::Spec;
use super::next_runtime::NextRuntime;
use super::process::Process;
use storage::fail_point::reach;

/// Prefix of the directories with placeholders; a process's unique text follows.
const PLACEHOLDERS: &str = "creation-";
/// Follows the name of config.json in that of the original; a process's unique text follows.
const ORIGINAL: &str = ".csi-loopback-";

/// A volume that is ready to be attached.
#[derive(Debug)]
pub struct Prepared {
    /// Index of the container's mount.
    pub index: usize,
    /// The detached mount.
    pub mount: OwnedFd,
    pub is_directory: bool,
    /// Existing mount points in it for other mounts of the container; `true` for directories. The
    /// placeholder has them too, because the runtime cannot create them in a read-only one.
    pub points: Vec<(PathBuf, bool)>,
}

/// Runs the next runtime with a changed config. Returns its status, and whether the hook has
/// attached all volumes.
pub fn run(
    next: &NextRuntime<'_>,
    work_dir: &Path,
    config_file: &Path,
    mut spec: Spec,
    volumes: &[Prepared],
    program: &Path,
) -> Result<(ExitStatus, bool)> {
    let own = Process::of(std::process::id()).context("reading /proc")?;
    let own = own.context("this process has no /proc entry")?;
    let work_dir = work_dir.canonicalize().context("workDir")?;
    let placeholders = Placeholders::make(&work_dir, &own)?;
    // Close-on-exec, so that only the hook writes to it.
    let (reader, writer) = io::pipe().context("creating a pipe")?;
    let mut job = Job {
        creator: own.unique(),
        report: writer.as_raw_fd(),
        aside: placeholders.directory.clone(),
        volumes: Vec::new(),
    };
    for volume in volumes {
        spec.set_source(volume.index, &placeholders.add(volume)?);
        let mount = volume.mount.as_raw_fd();
        job.volumes.push(VolumeMount { mount, placeholder: placeholders.name(volume.index) });
    }
    spec.add_hook(program, &job.arguments()?)?;
    let config = ReplacedConfig::replace(config_file, &spec.to_json(), &own)?;
    let mut reported = false;
    let reader = File::from(OwnedFd::from(reader));
    let report = || {
        reported = true;
        // Repeated on drop, and then by the next creation: the container must not fail.
        let _ = config.restore();
    };
    let status = next.run_with(Some((&reader, Box::new(report))))?;
    // The hook may have written after the runtime's last signal.
    let reported = reported || has_data(&reader)?;
    drop(writer);
    Ok((status, reported))
}

fn has_data(pipe: &File) -> Result<bool> {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use std::os::fd::AsFd;
    let mut polled = [PollFd::new(pipe.as_fd(), PollFlags::POLLIN)];
    poll(&mut polled, PollTimeout::ZERO).context("reading the hook's report")?;
    Ok(polled[0].revents().is_some_and(|events| events.contains(PollFlags::POLLIN)))
}

/// Removes the placeholders of killed processes. If this fails, the next call tries again.
pub fn remove_abandoned(work_dir: &Path) {
    for found in fs::read_dir(work_dir).into_iter().flatten().flatten() {
        let name = found.file_name();
        let unique = name.to_str().and_then(|name| name.strip_prefix(PLACEHOLDERS));
        let creator = unique.and_then(Process::of_unique);
        if creator.is_some_and(|creator| creator.living().is_ok_and(|living| living.is_none())) {
            let _ = fs::remove_dir_all(found.path());
        }
    }
}

/// The placeholders of a container that is being created; removed on drop.
struct Placeholders {
    directory: PathBuf,
    name: String,
}

impl Placeholders {
    fn make(work_dir: &Path, own: &Process) -> Result<Self> {
        let what = || format!("{} (workDir)", work_dir.display());
        let name = format!("{PLACEHOLDERS}{}", own.unique());
        let directory = work_dir.join(&name);
        DirBuilder::new().mode(0o700).create(&directory).with_context(what)?;
        Ok(Self { directory, name })
    }

    /// The last components of a placeholder's path, which no other path has.
    fn name(&self, index: usize) -> PathBuf {
        Path::new(&self.name).join(index.to_string())
    }

    fn add(&self, volume: &Prepared) -> Result<PathBuf> {
        let path = self.directory.join(volume.index.to_string());
        let all = std::iter::once((path.clone(), volume.is_directory));
        let points = volume.points.iter().map(|(point, kind)| (path.join(point), *kind));
        for (path, is_directory) in all.chain(points) {
            let what = || format!("creating {}", path.display());
            let directory = if is_directory { Some(path.as_path()) } else { path.parent() };
            if let Some(directory) = directory {
                DirBuilder::new()
                    .recursive(true)
                    .mode(0o755)
                    .create(directory)
                    .with_context(what)?;
            }
            if !is_directory && !path.exists() {
                let file = OpenOptions::new().write(true).create_new(true).mode(0o444).open(&path);
                file.with_context(what)?;
            }
        }
        Ok(path)
    }
}

impl Drop for Placeholders {
    fn drop(&mut self) {
        // If this fails, the next creation tries again.
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// A config.json that was replaced; restored on drop.
struct ReplacedConfig {
    file: PathBuf,
    original: PathBuf,
}

impl ReplacedConfig {
    fn replace(file: &Path, bytes: &[u8], own: &Process) -> Result<Self> {
        let sibling = |suffix: String| {
            let mut name = file.as_os_str().to_owned();
            name.push(suffix);
            PathBuf::from(name)
        };
        let what = || format!("replacing {}", file.display());
        let new = sibling(format!(".new-{}", own.unique()));
        let original = sibling(format!("{ORIGINAL}{}", own.unique()));
        let mode = fs::metadata(file).with_context(what)?.permissions().mode();
        let written = fs::write(&new, bytes)
            .and_then(|()| fs::set_permissions(&new, Permissions::from_mode(mode)))
            .and_then(|()| fs::hard_link(file, &original));
        let config = Self { file: file.to_owned(), original };
        if let Err(error) = written.and_then(|()| fs::rename(&new, file)) {
            let _ = fs::remove_file(&new);
            return Err(error).with_context(what);
        }
        reach("oci_runtime.config_replaced")?;
        Ok(config)
    }

    fn restore(&self) -> Result<()> {
        restore(&self.original, &self.file)?;
        Ok(reach("oci_runtime.config_restored")?)
    }
}

impl Drop for ReplacedConfig {
    fn drop(&mut self) {
        if let Err(error) = restore(&self.original, &self.file) {
            eprintln!("{}: {error:#}", super::PROGRAM);
        }
    }
}

/// Succeeds if the original is missing: it was restored before.
fn restore(original: &Path, file: &Path) -> Result<()> {
    match fs::rename(original, file) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        // Two links to the same file, before the replacement, are not renamed.
        renamed => match renamed.and_then(|()| fs::remove_file(original)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed.with_context(|| format!("restoring {}", file.display())),
        },
    }
}

/// Restores the config.json of a bundle that a killed process has replaced.
///
/// # Errors
/// Another process is creating the container.
pub fn restore_interrupted(file: &Path) -> Result<()> {
    let what = || format!("listing the directory of {}", file.display());
    let (Some(bundle), Some(name)) = (file.parent(), file.file_name().and_then(|n| n.to_str()))
    else {
        return Ok(());
    };
    let bundle = if bundle.as_os_str().is_empty() { Path::new(".") } else { bundle };
    let listed = match fs::read_dir(bundle) {
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => return Ok(()),
        listed => listed.with_context(what)?,
    };
    for found in listed {
        let found = found.with_context(what)?;
        let other = found.file_name();
        let unique =
            other.to_str().and_then(|other| other.strip_prefix(name)?.strip_prefix(ORIGINAL));
        let Some(creator) = unique.and_then(Process::of_unique) else { continue };
        if creator.living().with_context(what)?.is_some() {
            bail!("another process is creating a container from {}", file.display());
        }
        restore(&found.path(), file)?;
        reach("oci_runtime.config_recovered")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replaced_config_is_restored_also_after_a_kill() {
        let scratch = tempfile::tempdir().unwrap();
        let file = scratch.path().join("config.json");
        let text = || fs::read_to_string(&file).unwrap();
        let files = || fs::read_dir(scratch.path()).unwrap().count();
        fs::write(&file, "original").unwrap();
        let own = Process::of(std::process::id()).unwrap().unwrap();
        let replaced = ReplacedConfig::replace(&file, b"changed", &own).unwrap();
        assert_eq!((text().as_str(), files()), ("changed", 2));
        assert!(restore_interrupted(&file).unwrap_err().to_string().contains("another process"));
        drop(replaced);
        assert_eq!((text().as_str(), files()), ("original", 1));
        let dead = Process::of_unique("4194304-1").unwrap();
        std::mem::forget(ReplacedConfig::replace(&file, b"changed", &dead).unwrap());
        for _ in 0..2 {
            restore_interrupted(&file).unwrap();
            assert_eq!((text().as_str(), files()), ("original", 1));
        }
        restore_interrupted(&scratch.path().join("none/config.json")).unwrap();
    }
}
