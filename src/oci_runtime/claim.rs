//! Which containers have a volume: a file for each in the volume's entry, written before anything is mounted and removed
//! when the container is deleted. It says by which process the container is known to live, so one that was left behind by
//! whatever was killed counts for nothing; whoever comes next collects it.

use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::behind;
use super::process::Process;
use crate::backend::fail_point::reach;
use crate::crust::{Entry, MountInfo};

/// How the files are named.
const PREFIX: &str = "container-";
/// A pod has fewer containers.
const MAX_CLAIMS: usize = 1024;
/// How long another container of the volume may be in the making: giving many files to a group takes its time.
const PATIENCE: Duration = Duration::from_secs(110);
const PAUSE: Duration = Duration::from_millis(10);

/// A container by its names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Container {
    /// Where the runtime keeps it. None: where it does by default.
    pub root: Option<String>,
    pub id: String,
}

impl Container {
    /// Name of its claims.
    fn file(&self) -> String {
        let mut digest = Sha256::new();
        digest.update(self.root.as_deref().unwrap_or_default());
        digest.update([0]);
        digest.update(&self.id);
        let digest = digest.finalize();
        let digits: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{PREFIX}{digits}")
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Phase {
    /// The process is the one of this program that makes it.
    Creating,
    /// The process is the container's first one.
    Created,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    container: Container,
    sandbox: String,
    phase: Phase,
    process: Process,
    /// Hash of how the volume is mounted: options may be nobody else's business.
    mount: String,
    /// With which label of SELinux's, which whoever mounts it too has to name as well.
    #[serde(default)]
    label: Option<String>,
}

impl Claim {
    /// Of a container that this process is about to make.
    pub fn intended(
        container: &Container,
        sandbox: &str,
        info: &MountInfo,
        label: Option<&str>,
    ) -> Result<Self> {
        let process = Process::of(std::process::id()).context("this process has no /proc entry")?;
        let said = format!("{:?}", (&info.device, &info.fs_type, &info.options, label));
        let mount = Sha256::digest(said).iter().map(|byte| format!("{byte:02x}")).collect();
        let (container, sandbox) = (container.clone(), sandbox.to_owned());
        let label = label.map(str::to_owned);
        Ok(Self { container, sandbox, phase: Phase::Creating, process, mount, label })
    }

    /// The same once the container is there, by its first process.
    pub fn completed(&self, pid: u32) -> Option<Self> {
        let process = Process::of(pid)?;
        Some(Self { phase: Phase::Created, process, ..self.clone() })
    }

    /// A process that has the volume mounted, by its number here, as long as the container lives. (The one that makes it has
    /// it a little later than it claims it.)
    pub fn process(&self, program: &Path) -> Result<Option<u32>> {
        let living = self.process.living();
        if living.is_some() || self.phase == Phase::Created {
            return Ok(living);
        }
        // Whoever made it was killed: before the container was there, or after.
        behind::process_of(program, self.container.root.as_deref(), &self.container.id)
    }
}

/// The claims of one volume, which nobody else changes while this lives.
#[derive(Debug)]
pub struct Claims<'a> {
    entry: &'a Entry,
    program: &'a Path,
    _lock: Flock<File>,
}

impl<'a> Claims<'a> {
    /// None: the entry is not there, or not any more. `program` is asked for containers of which nothing else is known.
    pub fn lock(entry: &'a Entry, program: &'a Path) -> Result<Option<Self>> {
        let what = || format!("locking {}", entry.path().display());
        let until = Instant::now() + PATIENCE;
        let Ok(mut directory) = File::open(entry.path()) else { return Ok(None) };
        let lock = loop {
            match Flock::lock(directory, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => break lock,
                Err((back, nix::Error::EWOULDBLOCK)) if Instant::now() < until => {
                    directory = back;
                    sleep(PAUSE);
                }
                Err((_, nix::Error::EWOULDBLOCK)) => {
                    bail!(
                        "another container of the volume is in the making for too long; try again"
                    )
                }
                Err((_, error)) => return Err(error).with_context(what),
            }
        };
        // It may have been removed, and made anew, while this waited.
        let same = |found: &fs::Metadata, opened: &fs::Metadata| {
            (found.dev(), found.ino()) == (opened.dev(), opened.ino())
        };
        let opened = lock.metadata().with_context(what)?;
        let found = fs::symlink_metadata(entry.path());
        let current = found.is_ok_and(|found| same(&found, &opened));
        Ok(current.then_some(Self { entry, program, _lock: lock }))
    }

    /// That a container may claim the volume: no other pod has it, nor this container itself, and nobody otherwise.
    /// Says whether it is the first one that lives.
    pub fn allow(&self, claim: &Claim) -> Result<bool> {
        let mut first = true;
        for (name, other) in self.all()? {
            let other = other.with_context(|| {
                format!(
                    "{}: cannot be read; if no container has the volume, remove it",
                    self.entry.path().join(&name).display()
                )
            })?;
            let process = other.process(self.program)?;
            if process.is_none() {
                self.entry.remove(&name)?;
                reach("oci_runtime.claim_collected")?;
                continue;
            }
            ensure!(
                other.container != claim.container,
                "container {:?} has the volume already: delete it first",
                other.container.id
            );
            ensure!(
                other.sandbox == claim.sandbox,
                "another pod (sandbox {:?}, container {:?}) has the volume: it can be had by one at a time",
                other.sandbox,
                other.container.id
            );
            ensure!(
                other.mount == claim.mount,
                "container {:?} has the volume mounted with other options; they cannot be changed while it runs",
                other.container.id
            );
            first = false;
        }
        Ok(first)
    }

    /// Claims the volume, for a container and for this program.
    pub fn add(&self, claim: &Claim, runtime_cli: &Path) -> Result<()> {
        self.put(claim)?;
        reach("oci_runtime.claimed")?;
        self.entry.write_runtime_cli(runtime_cli)?;
        Ok(reach("oci_runtime.cli_written")?)
    }

    pub fn put(&self, claim: &Claim) -> Result<()> {
        Ok(self.entry.write(&claim.container.file(), &serde_json::to_vec(claim)?)?)
    }

    /// Takes a container's claim away, and with the last one what says that a runtime has the volume. The claim goes last: as long as
    /// it is there whoever is asked to delete the container comes here again.
    pub fn remove(&self, container: &Container) -> Result<()> {
        let own = container.file();
        if !self.others_live(&own)? {
            self.entry.remove_runtime_cli()?;
            reach("oci_runtime.cli_removed")?;
        }
        self.entry.remove(&own)?;
        Ok(reach("oci_runtime.claim_removed")?)
    }

    /// Whether another container has the volume, or may have. What the dead have left is collected.
    fn others_live(&self, own: &str) -> Result<bool> {
        for (name, other) in self.all()? {
            if name == own {
                continue;
            }
            let Ok(None) = other.and_then(|other| other.process(self.program)) else {
                return Ok(true);
            };
            self.entry.remove(&name)?;
            reach("oci_runtime.claim_collected")?;
        }
        Ok(false)
    }

    fn all(&self) -> Result<Vec<(String, Result<Claim>)>> {
        all(self.entry)
    }
}

/// The claims of an entry, by the names of their files.
fn all(entry: &Entry) -> Result<Vec<(String, Result<Claim>)>> {
    let what = || format!("listing {}", entry.path().display());
    let mut claims = Vec::new();
    for found in fs::read_dir(entry.path()).with_context(what)? {
        let name = found.with_context(what)?.file_name();
        let Some(name) = name.to_str().filter(|name| name.starts_with(PREFIX)) else { continue };
        ensure!(claims.len() < MAX_CLAIMS, "{}: has too many containers", entry.path().display());
        let Some(bytes) = entry.read(name).transpose() else { continue };
        let claim = bytes
            .map_err(anyhow::Error::from)
            .and_then(|bytes| Ok(serde_json::from_slice::<Claim>(&bytes)?))
            .and_then(|claim| {
                ensure!(claim.container.file() == name, "is the claim of another container");
                Ok(claim)
            });
        claims.push((name.to_owned(), claim));
    }
    Ok(claims)
}

/// Whether a container has claimed the volume of an entry.
pub fn has(entry: &Entry, container: &Container) -> bool {
    fs::symlink_metadata(entry.path().join(container.file())).is_ok()
}

/// Whether a container whose claim is there lives. One that cannot be told may.
pub fn lives(entry: &Entry, container: &Container, program: &Path) -> bool {
    let claim = entry.read(&container.file()).ok().flatten();
    let claim = claim.and_then(|bytes| serde_json::from_slice::<Claim>(&bytes).ok());
    claim.is_some_and(|claim| claim.process(program).is_ok_and(|process| process.is_some()))
}

/// Processes of the containers that have the volume, by their numbers here, and with which label each has it.
pub fn processes(entry: &Entry, program: &Path) -> Result<Vec<(u32, Option<String>)>> {
    let mut processes = Vec::new();
    for (_, claim) in all(entry)? {
        // What is no claim says of no container that it lives.
        let Ok(claim) = claim else { continue };
        let process = claim.process(program)?;
        processes.extend(process.map(|process| (process, claim.label)));
    }
    Ok(processes)
}

/// The root and the id of a container as claims keep them: as texts.
pub fn container(root: Option<&std::ffi::OsStr>, id: &std::ffi::OsStr) -> Result<Container> {
    let text = |field: &str, value: &std::ffi::OsStr| {
        let text = std::str::from_utf8(value.as_bytes());
        text.map(str::to_owned).with_context(|| format!("{field}: is no text"))
    };
    let root = root.map(|root| text("--root", root)).transpose()?;
    let id = text("container id", id)?;
    ensure!(!id.is_empty(), "container id: is required");
    Ok(Container { root, id })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crust::{Directory, Target};
    use std::process::{Child, Command};

    fn entry(at: &Path) -> Entry {
        let target = Target::new("target", "/t/mount").unwrap();
        let entry = Directory::new(at).entry(&target);
        entry.stage(&target, &info(&[])).unwrap();
        entry
    }

    fn info(options: &[&str]) -> MountInfo {
        let options = options.iter().map(|option| (*option).to_owned()).collect();
        MountInfo::new("/dev/loop1".into(), "ext4".into(), options)
    }

    fn named(id: &str) -> Container {
        Container { root: None, id: id.to_owned() }
    }

    /// A container that lives by a process of its own.
    fn living(id: &str, sandbox: &str) -> (Claim, Child) {
        let child = Command::new("sleep").arg("60").spawn().unwrap();
        let claim = Claim::intended(&named(id), sandbox, &info(&[]), None).unwrap();
        (claim.completed(child.id()).unwrap(), child)
    }

    /// Whether it is the first one, if it may have the volume.
    fn claimed(claims: &Claims<'_>, claim: &Claim) -> Result<bool> {
        let first = claims.allow(claim)?;
        claims.add(claim, Path::new("/cli"))?;
        Ok(first)
    }

    /// A runtime that knows of no container.
    const NONE: &str = "/bin/false";

    #[test]
    fn the_last_container_takes_the_claim_of_the_runtime_with_it() {
        let scratch = tempfile::tempdir().unwrap();
        let entry = entry(scratch.path());
        let claims = Claims::lock(&entry, Path::new(NONE)).unwrap().unwrap();
        let (one, mut first) = living("one", "pod");
        let (two, mut second) = living("two", "pod");
        assert!(claimed(&claims, &one).unwrap());
        assert!(!claimed(&claims, &two).unwrap());
        assert_eq!(processes(&entry, Path::new(NONE)).unwrap().len(), 2);
        claims.remove(&named("one")).unwrap();
        assert_eq!(entry.runtime_cli().unwrap(), Some("/cli".into()));
        claims.remove(&named("two")).unwrap();
        assert_eq!(entry.runtime_cli().unwrap(), None);
        for child in [&mut first, &mut second] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    #[test]
    fn what_a_dead_container_has_left_counts_for_nothing() {
        let scratch = tempfile::tempdir().unwrap();
        let entry = entry(scratch.path());
        let claims = Claims::lock(&entry, Path::new(NONE)).unwrap().unwrap();
        let (dead, mut child) = living("dead", "another pod");
        let (own, mut second) = living("own", "pod");
        claimed(&claims, &dead).unwrap();
        let refused = claimed(&claims, &own).unwrap_err().to_string();
        assert!(refused.contains("another pod"), "{refused}");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(claimed(&claims, &own).unwrap(), "the first one that lives");
        assert!(!has(&entry, &named("dead")) && has(&entry, &named("own")));
        let other = Claim::intended(&named("other"), "pod", &info(&["noatime"]), None).unwrap();
        assert!(claimed(&claims, &other).unwrap_err().to_string().contains("options"));
        assert!(claimed(&claims, &own).unwrap_err().to_string().contains("already"));
        second.kill().unwrap();
        second.wait().unwrap();
    }

    #[test]
    fn what_is_no_claim_is_not_passed_over() {
        let scratch = tempfile::tempdir().unwrap();
        let entry = entry(scratch.path());
        let claims = Claims::lock(&entry, Path::new(NONE)).unwrap().unwrap();
        let (own, mut child) = living("own", "pod");
        let name = named("bad").file();
        entry.write(&name, b"{").unwrap();
        let refused = format!("{:#}", claimed(&claims, &own).unwrap_err());
        assert!(refused.contains(&name), "{refused}");
        assert!(processes(&entry, Path::new(NONE)).unwrap().is_empty());
        // Its own deletion takes it away, whatever is in it.
        claims.remove(&named("bad")).unwrap();
        assert!(claimed(&claims, &own).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn an_entry_that_is_gone_has_no_claims() {
        let scratch = tempfile::tempdir().unwrap();
        let entry = entry(scratch.path());
        entry.unstage().unwrap();
        assert!(Claims::lock(&entry, Path::new(NONE)).unwrap().is_none());
    }
}
