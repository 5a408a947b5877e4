//! `create` and `run` of a container with deferred volumes. A thread mounts the volumes in its own
//! mount namespace and copies each mount, detached: no namespace shows it. The next runtime runs in
//! the original namespace, with placeholders in place of the volumes, and calls a hook that attaches
//! the detached mounts in the container ([`super::attach`]). Nothing is mounted on the host, and the
//! container sees a volume only by its mounts.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use nix::mount::{MsFlags, mount};

use super::bundle::Spec;
use super::claim::{self, Claim, Claims, Container};
use super::command_line::{Create, Invocation};
use super::config::Config;
use super::deferred::{self, Deferred};
use super::handover::{self, Prepared};
use super::next_runtime::{self, NextRuntime};
use super::sub_path;
use super::volume::Volume;
use crate::crust::{Target, trust};
use storage::fail_point::reach;
use storage::{filesystem, sys};

const NONE: Option<&str> = None;

/// Finds the container's deferred volumes. `None`: it has none.
///
/// # Errors
/// It is unknown whether the container has deferred volumes. The container must not start, because
/// it would see an empty directory of the host.
pub fn find_deferred(config: &Config, create: &Create) -> Result<Option<(Spec, Vec<Deferred>)>> {
    // The common case: the next runtime does everything.
    if deferred::none_exist(config)? {
        return Ok(None);
    }
    let file = create.config_file()?;
    handover::restore_interrupted(&file)?;
    let read = Spec::read(&file).with_context(|| {
        format!(
            "{} is unreadable, and the container may use one of the deferred volumes of this node ({})",
            file.display(),
            config.crust_dir.display()
        )
    });
    // Without this file the next runtime rejects the container.
    let Some(spec) = read? else { return Ok(None) };
    let found = deferred::find(config, &spec.binds(&create.bundle()?))?;
    Ok(if found.is_empty() { None } else { Some((spec, found)) })
}

/// Creates the container with its volumes.
pub fn create(
    config: &Config,
    next: &NextRuntime<'_>,
    invocation: &Invocation,
    create: &Create,
    spec: Spec,
    found: &[Deferred],
) -> Result<ExitCode> {
    ensure!(nix::unistd::geteuid().is_root(), "mounting a volume requires root");
    spec.check()?;
    let runtime_cli = super::own_program()?;
    let container = claim::container(invocation.root.as_deref(), &create.container)?;
    let mut creation = ContainerCreation {
        program: next.program,
        sandbox: spec.sandbox(&container.id),
        label: spec.mount_label().map(str::to_owned),
        container,
        claims: Vec::new(),
    };
    let config_file = create.config_file()?.canonicalize().context("config.json")?;
    let volumes = volumes(&spec, found)?;
    prepare_work_dir(&config.work_dir)?;
    let work_dir = &config.work_dir;
    let prepared = std::thread::scope(|scope| {
        let thread =
            scope.spawn(|| creation.prepare(work_dir, &spec, found, &volumes, &runtime_cli));
        thread.join().map_err(|_| anyhow::anyhow!("the thread that mounts volumes has panicked"))
    })??;
    reach("oci_runtime.prepared")?;
    let (status, attached) =
        handover::run(next, work_dir, &config_file, spec, &prepared, &runtime_cli)?;
    if status.success() && !attached {
        let root = creation.container.root.as_deref();
        next_runtime::delete_container(next.program, root, &creation.container.id)?;
        bail!(
            "{} has created the container without running its hooks (createRuntime), so that its volumes are missing",
            next.program.display()
        );
    }
    if status.success() && !create.attached {
        creation.complete(create)?;
    }
    Ok(next_runtime::exit_code(status))
}

/// The volumes without duplicates, in the order in which every process locks them.
fn volumes<'a>(
    spec: &Spec,
    found: &'a [Deferred],
) -> Result<BTreeMap<&'a Target, (&'a Deferred, Volume)>> {
    let mut volumes = BTreeMap::new();
    for deferred in found {
        if !volumes.contains_key(&deferred.target) {
            let volume = Volume::new(&deferred.info, spec.mount_label())
                .with_context(|| format!("volume of {}", deferred.target))?;
            volumes.insert(&deferred.target, (deferred, volume));
        }
    }
    Ok(volumes)
}

/// Creates the work directory. Only root may write to it.
fn prepare_work_dir(work_dir: &Path) -> Result<()> {
    let what = || format!("{} (workDir)", work_dir.display());
    DirBuilder::new().recursive(true).mode(0o700).create(work_dir).with_context(what)?;
    trust::directory(work_dir).with_context(what)?;
    handover::remove_abandoned(work_dir);
    Ok(())
}

/// Moves this thread to a private mount namespace. Its mounts are invisible to other processes;
/// mounts and unmounts on the host propagate into it.
pub fn enter_private_namespace(work_dir: &Path) -> Result<()> {
    prepare_work_dir(work_dir)?;
    let what = || format!("{} (workDir)", work_dir.display());
    sys::new_mount_namespace().context("creating a mount namespace")?;
    mount(NONE, "/", NONE, MsFlags::MS_REC | MsFlags::MS_SLAVE, NONE)
        .context("making the mount namespace private")?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("tmpfs"), work_dir, Some("tmpfs"), flags, Some("mode=0700,size=64m"))
        .with_context(what)?;
    Ok(reach("oci_runtime.namespace_entered")?)
}

/// Bind mounts an opened file or directory at `at`, with these flags in addition.
fn bind_opened(opened: &File, at: &Path, flags: MsFlags) -> Result<()> {
    match opened.metadata().context("sub-path")?.is_dir() {
        true => fs::create_dir(at),
        false => OpenOptions::new().write(true).create_new(true).mode(0o600).open(at).map(drop),
    }
    .with_context(|| format!("creating {}", at.display()))?;
    // Bind the opened file, because another file may have its name now.
    let opened = PathBuf::from(format!("/proc/self/fd/{}", opened.as_raw_fd()));
    filesystem::bind(&opened, at)?;
    if flags.is_empty() { Ok(()) } else { Ok(filesystem::add_mount_flags(at, flags)?) }
}

/// A detached mount of a volume, or of a sub-path of it.
fn prepare_one(root: &File, spec: &Spec, deferred: &Deferred, at: &Path) -> Result<Prepared> {
    let opened = match deferred.sub_path.as_os_str().is_empty() {
        true => root.try_clone().context("duplicating the volume's descriptor")?,
        false => sub_path::open(root, &deferred.sub_path)?,
    };
    reach("oci_runtime.sub_path_opened")?;
    let is_directory = opened.metadata().context("sub-path")?.is_dir();
    bind_opened(&opened, at, spec.flags(deferred.index)?)?;
    let bound = File::options().read(true).custom_flags(libc::O_PATH).open(at)?;
    let mut points = Vec::new();
    for point in spec.mount_points_below(deferred.index)?.into_iter().filter(|_| is_directory) {
        let found = sub_path::find(&bound, &point)?;
        let Some(found) = found else { continue };
        let is_directory = found.metadata().context("mount point")?.is_dir();
        points.push((point, is_directory));
    }
    let mount = sys::detached_copy(&bound).context("copying the mount")?;
    Ok(Prepared { index: deferred.index, mount, is_directory, points })
}

/// A container that is being created. Its claims are removed on drop unless it was completed.
struct ContainerCreation<'a> {
    program: &'a Path,
    container: Container,
    sandbox: String,
    label: Option<String>,
    claims: Vec<(&'a Deferred, Claim)>,
}

impl<'a> ContainerCreation<'a> {
    /// Claims and mounts the volumes in a private mount namespace of this thread. Returns a detached
    /// mount for each of the container's mounts.
    fn prepare(
        &mut self,
        work_dir: &Path,
        spec: &Spec,
        found: &'a [Deferred],
        volumes: &BTreeMap<&'a Target, (&'a Deferred, Volume)>,
        runtime_cli: &Path,
    ) -> Result<Vec<Prepared>> {
        enter_private_namespace(work_dir)?;
        let mut roots = BTreeMap::new();
        for (number, (target, (deferred, volume))) in volumes.iter().enumerate() {
            let at = work_dir.join(format!("volume-{number}"));
            let root = self
                .mount(deferred, volume, &at, runtime_cli)
                .with_context(|| format!("volume of {target}"))?;
            roots.insert(*target, root);
        }
        let mut prepared = Vec::new();
        for deferred in found {
            let Some(root) = roots.get(&deferred.target) else { continue };
            let at = work_dir.join(format!("bind-{}", deferred.index));
            let one = prepare_one(root, spec, deferred, &at);
            prepared.push(one.with_context(|| format!("volume of {}", deferred.target))?);
        }
        Ok(prepared)
    }

    /// Claims a volume, mounts it at `at` and changes the group of its files. Returns its root
    /// directory.
    fn mount(
        &mut self,
        deferred: &'a Deferred,
        volume: &Volume,
        at: &Path,
        runtime_cli: &Path,
    ) -> Result<File> {
        fs::create_dir(at).with_context(|| format!("creating {}", at.display()))?;
        let claims = Claims::lock(&deferred.entry, self.program)?
            .context("crust_ops has just unstaged it; try again")?;
        // The entry may have changed before it was locked.
        ensure!(
            deferred.entry.mount_info()?.as_ref() == Some(&deferred.info),
            "crust_ops has just staged it again; try again"
        );
        let label = self.label.as_deref();
        let claim = Claim::creating(&self.container, &self.sandbox, &deferred.info, label)?;
        let is_first = claims.check(&claim)?;
        if is_first {
            volume.wait_until_free()?;
        }
        self.claims.push((deferred, claim.clone()));
        claims.add(&claim, runtime_cli)?;
        volume.mount(at)?;
        reach("oci_runtime.mounted")?;
        if is_first {
            volume.apply_group(at)?;
        }
        reach("oci_runtime.given_to_group")?;
        File::open(at).with_context(|| format!("opening {}", at.display()))
    }

    /// Replaces this process in the claims by the container's first process. If that process is
    /// unknown, the claims still name the container, whose state the next runtime reports.
    fn complete(&mut self, create: &Create) -> Result<()> {
        let claims = std::mem::take(&mut self.claims);
        reach("oci_runtime.created")?;
        let pid = create.pid_file.as_ref().and_then(|file| fs::read_to_string(file).ok());
        let pid = pid.and_then(|pid| pid.trim().parse().ok()).or_else(|| {
            let root = self.container.root.as_deref();
            next_runtime::container_process(self.program, root, &self.container.id).ok().flatten()
        });
        for (deferred, claim) in claims {
            let Some(created) = pid.and_then(|pid| claim.created(pid)) else { continue };
            if let Ok(Some(claims)) = Claims::lock(&deferred.entry, self.program)
                && claim::has(&deferred.entry, &self.container)?
            {
                let _ = claims.put(&created);
            }
        }
        Ok(reach("oci_runtime.completed")?)
    }
}

impl Drop for ContainerCreation<'_> {
    fn drop(&mut self) {
        for (deferred, _) in &self.claims {
            if let Ok(Some(claims)) = Claims::lock(&deferred.entry, self.program)
                && let Err(error) = claims.remove(&self.container)
            {
                eprintln!("{}: {error:#}", super::PROGRAM);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crust::Directory;

    #[test]
    fn an_unreadable_config_is_refused_while_entries_exist() {
        let scratch = tempfile::tempdir().unwrap();
        let crust_dir = scratch.path().join("crust");
        let config = Config { crust_dir: crust_dir.clone(), ..Config::default() };
        let bundle = scratch.path().to_owned();
        let request = Create { bundle, ..Create::default() };
        let file = request.config_file().unwrap();
        let unreadable = [&b"{"[..], b"[]", &[b' '; (16 << 20) + 1]];
        for text in unreadable {
            fs::write(&file, text).unwrap();
            assert_eq!(find_deferred(&config, &request).unwrap(), None, "no entry exists");
        }
        let target = Target::new("target", "/pods/u/volumes/kubernetes.io~csi/v/mount").unwrap();
        Directory::new(&crust_dir).entry(&target).make(&target).unwrap();
        for text in unreadable {
            fs::write(&file, text).unwrap();
            let refused = find_deferred(&config, &request).unwrap_err().to_string();
            assert!(refused.contains("config.json is unreadable"), "{refused}");
        }
        fs::write(&file, "{}").unwrap();
        assert_eq!(find_deferred(&config, &request).unwrap(), None);
        fs::remove_file(&file).unwrap();
        assert_eq!(find_deferred(&config, &request).unwrap(), None, "the next runtime rejects it");
    }
}
