//! `create` and `run` of a container with volumes that were left to this runtime. They are mounted in a mount namespace of this
//! process, which the runtime behind starts the container from: it clones the namespace, keeps what it binds into the container,
//! and the rest goes with this process. On the host nothing is ever mounted, and the bundle is never changed: the config.json
//! with the new sources lies over it in that namespace.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use nix::mount::{MsFlags, mount};

use super::behind::{self, Behind};
use super::bundle::Spec;
use super::claim::{self, Claim, Claims, Container};
use super::command_line::{Create, Invocation};
use super::config::Config;
use super::deferred::{self, Deferred};
use super::sub_path;
use super::volume::Volume;
use crate::backend::fail_point::reach;
use crate::backend::{filesystem, sys};
use crate::crust::{Directory, Target, trust};

const NONE: Option<&str> = None;

/// What is to be done before the container is made. None: nothing.
///
/// # Errors
/// Whether a volume was left to this runtime cannot be found out. The container does not start: it would have the host's empty
/// directory in the volume's place.
pub fn deferred(config: &Config, create: &Create) -> Result<Option<(Spec, Vec<Deferred>)>> {
    // Most nodes have none, most of the time: all is the other runtime's then.
    if !config.crust_dir.exists() || Directory::new(&config.crust_dir).entries()?.is_empty() {
        return Ok(None);
    }
    let file = create.config_file();
    let read = Spec::read(&file).with_context(|| {
        format!(
            "{} cannot be read, and volumes on this node are left to this runtime ({}): the container may have one of them",
            file.display(),
            config.crust_dir.display()
        )
    });
    // Without a file the other runtime makes no container.
    let Some(spec) = read? else { return Ok(None) };
    let found = deferred::find(config, &spec.binds())?;
    Ok(if found.is_empty() { None } else { Some((spec, found)) })
}

/// Makes the container with its volumes.
pub fn create(
    config: &Config,
    behind: &Behind<'_>,
    invocation: &Invocation,
    create: &Create,
    mut spec: Spec,
    found: &[Deferred],
) -> Result<ExitCode> {
    ensure!(nix::unistd::geteuid().is_root(), "mounting a volume needs root");
    spec.check()?;
    let runtime_cli = super::own_program()?;
    let container = claim::container(invocation.root.as_deref(), &create.container)?;
    let mut making = Making {
        program: behind.program,
        sandbox: spec.sandbox(&container.id),
        label: spec.mount_label().map(str::to_owned),
        container,
        claims: Vec::new(),
    };
    let config_file = create.config_file().canonicalize().context("config.json")?;
    let volumes = volumes(&spec, found)?;
    enter_private_namespace(&config.work_dir)?;
    let mut roots = BTreeMap::new();
    for (number, (target, (deferred, volume))) in volumes.iter().enumerate() {
        let at = config.work_dir.join(format!("volume-{number}"));
        let root = making
            .mount(deferred, volume, &at, &runtime_cli)
            .with_context(|| format!("the volume of {target}"))?;
        roots.insert(*target, (at, root));
    }
    for deferred in found {
        let Some((at, root)) = roots.get(&deferred.target) else { continue };
        let source = match deferred.sub_path.as_os_str().is_empty() {
            true => at.clone(),
            false => {
                let at = config.work_dir.join(format!("sub-path-{}", deferred.index));
                bind_sub_path(root, &deferred.sub_path, &at)
                    .with_context(|| format!("the volume of {}", deferred.target))?;
                at
            }
        };
        spec.set_source(deferred.index, &source);
    }
    drop(roots);
    cover(&config_file, &config.work_dir.join("config.json"), &spec)?;
    let status = behind.run()?;
    if status.success() && !create.attached {
        making.complete(create)?;
    }
    Ok(behind::exit_code(status))
}

/// The volumes, each once, in the order in which they are locked by everybody.
fn volumes<'a>(
    spec: &Spec,
    found: &'a [Deferred],
) -> Result<BTreeMap<&'a Target, (&'a Deferred, Volume)>> {
    let mut volumes = BTreeMap::new();
    for deferred in found {
        if !volumes.contains_key(&deferred.target) {
            let volume = Volume::new(&deferred.info, spec.mount_label())
                .with_context(|| format!("the volume of {}", deferred.target))?;
            volumes.insert(&deferred.target, (deferred, volume));
        }
    }
    Ok(volumes)
}

/// From here on nothing that this process mounts is seen by any other. What the host mounts and unmounts is followed.
pub fn enter_private_namespace(work_dir: &Path) -> Result<()> {
    let what = || format!("{} (workDir)", work_dir.display());
    DirBuilder::new().recursive(true).mode(0o700).create(work_dir).with_context(what)?;
    trust::directory(work_dir).with_context(what)?;
    sys::new_mount_namespace().context("making a mount namespace")?;
    mount(NONE, "/", NONE, MsFlags::MS_REC | MsFlags::MS_SLAVE, NONE)
        .context("parting the mount namespace from the host's")?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("tmpfs"), work_dir, Some("tmpfs"), flags, Some("mode=0700,size=64m"))
        .with_context(what)?;
    Ok(reach("oci_runtime.namespace_entered")?)
}

/// Shows what is at a sub-path of a volume at `at` as well.
fn bind_sub_path(root: &File, sub_path: &Path, at: &Path) -> Result<()> {
    let opened = sub_path::open(root, sub_path)?;
    reach("oci_runtime.sub_path_opened")?;
    match opened.metadata().context("sub-path")?.is_dir() {
        true => fs::create_dir(at),
        false => OpenOptions::new().write(true).create_new(true).mode(0o600).open(at).map(drop),
    }
    .with_context(|| format!("making {}", at.display()))?;
    // What was opened, whatever has its name by now.
    let opened = PathBuf::from(format!("/proc/self/fd/{}", opened.as_raw_fd()));
    filesystem::bind(&opened, at)?;
    Ok(())
}

/// Lays the changed config.json over the bundle's, in this namespace.
fn cover(config_file: &Path, own: &Path, spec: &Spec) -> Result<()> {
    fs::write(own, spec.to_json()).context("writing config.json")?;
    filesystem::bind(own, config_file)?;
    Ok(())
}

/// A container in the making. Where it does not come to be its claims go.
struct Making<'a> {
    program: &'a Path,
    container: Container,
    sandbox: String,
    label: Option<String>,
    claims: Vec<(&'a Deferred, Claim)>,
}

impl<'a> Making<'a> {
    /// Claims a volume, mounts it at `at` and gives its files to its group. Returns its root directory.
    fn mount(
        &mut self,
        deferred: &'a Deferred,
        volume: &Volume,
        at: &Path,
        runtime_cli: &Path,
    ) -> Result<File> {
        fs::create_dir(at).with_context(|| format!("making {}", at.display()))?;
        let claims = Claims::lock(&deferred.entry, self.program)?
            .context("has just been taken back by crust_ops")?;
        // What was read before it was locked may have been replaced.
        ensure!(
            deferred.entry.mount_info()?.as_ref() == Some(&deferred.info),
            "has just been handed over anew by crust_ops; try again"
        );
        let label = self.label.as_deref();
        let claim = Claim::intended(&self.container, &self.sandbox, &deferred.info, label)?;
        let first = claims.allow(&claim)?;
        self.claims.push((deferred, claim.clone()));
        claims.add(&claim, runtime_cli)?;
        volume.mount(at)?;
        reach("oci_runtime.mounted")?;
        if first {
            volume.give_to_group(at)?;
        }
        reach("oci_runtime.given_to_group")?;
        File::open(at).with_context(|| format!("opening {}", at.display()))
    }

    /// From now on the container lives by its own first process. Where that cannot be told the claims say still whose container
    /// it is, and the runtime is asked.
    fn complete(&mut self, create: &Create) -> Result<()> {
        let made = std::mem::take(&mut self.claims);
        reach("oci_runtime.created")?;
        let written = create.pid_file.as_ref().and_then(|file| fs::read_to_string(file).ok());
        let pid = written.and_then(|pid| pid.trim().parse().ok()).or_else(|| {
            let root = self.container.root.as_deref();
            behind::process_of(self.program, root, &self.container.id).ok().flatten()
        });
        for (deferred, claim) in made {
            let Some(completed) = pid.and_then(|pid| claim.completed(pid)) else { continue };
            if let Ok(Some(claims)) = Claims::lock(&deferred.entry, self.program)
                && claim::has(&deferred.entry, &self.container)
            {
                let _ = claims.put(&completed);
            }
        }
        Ok(reach("oci_runtime.completed")?)
    }
}

impl Drop for Making<'_> {
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

    #[test]
    fn a_container_whose_config_cannot_be_read_does_not_start_while_volumes_are_left_to_the_runtime()
     {
        let scratch = tempfile::tempdir().unwrap();
        let crust_dir = scratch.path().join("crust");
        let config = Config { crust_dir: crust_dir.clone(), ..Config::default() };
        let bundle = scratch.path().to_owned();
        let asked = Create { bundle, config: "config.json".into(), ..Create::default() };
        let file = asked.config_file();
        let unreadable = [&b"{"[..], b"[]", &[b' '; (16 << 20) + 1]];
        for text in unreadable {
            fs::write(&file, text).unwrap();
            assert_eq!(deferred(&config, &asked).unwrap(), None, "there is no entry");
        }
        let target = Target::new("target", "/pods/u/volumes/kubernetes.io~csi/v/mount").unwrap();
        Directory::new(&crust_dir).entry(&target).make(&target).unwrap();
        for text in unreadable {
            fs::write(&file, text).unwrap();
            let refused = deferred(&config, &asked).unwrap_err().to_string();
            assert!(refused.contains("config.json cannot be read"), "{refused}");
        }
        fs::write(&file, "{}").unwrap();
        assert_eq!(deferred(&config, &asked).unwrap(), None);
        fs::remove_file(&file).unwrap();
        assert_eq!(deferred(&config, &asked).unwrap(), None, "the other runtime refuses");
    }
}
