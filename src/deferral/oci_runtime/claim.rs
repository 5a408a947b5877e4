//! Records which containers use a volume: one file per container in the volume's entry, written
//! before any mount and removed when the container is deleted. The file names a process whose life
//! shows that the container lives. A claim of a dead container is ignored, and removed by the next
//! process that finds it.

use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::next_runtime;
use super::process::Process;
use crate::crust::{Entry, MountInfo};
use storage::fail_point::reach;

/// Prefix of the file names.
const PREFIX: &str = "container-";
/// Maximum number of claims; a pod has fewer containers.
const MAX_CLAIMS: usize = 1024;
/// How long to wait while another container of the volume is created: changing the group of many
/// files takes time.
const LOCK_TIMEOUT: Duration = Duration::from_secs(110);
const LOCK_INTERVAL: Duration = Duration::from_millis(10);

/// Identifies a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Container {
    /// The runtime's state directory. `None`: its default.
    pub root: Option<String>,
    pub id: String,
}

impl Container {
    /// File name of the container's claims.
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
    /// The process is the instance of this program that creates the container.
    Creating,
    /// The process is the first one of the container.
    Created,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    container: Container,
    sandbox: String,
    phase: Phase,
    process: Process,
    /// Hash of the mount options, which may be confidential.
    mount: String,
    /// SELinux label of the mount; another mount of the volume must use the same.
    #[serde(default)]
    label: Option<String>,
}

impl Claim {
    /// The claim of a container that this process is about to create.
    pub fn creating(
        container: &Container,
        sandbox: &str,
        info: &MountInfo,
        label: Option<&str>,
    ) -> Result<Self> {
        let process = Process::of(std::process::id()).context("reading /proc")?;
        let process = process.context("this process has no /proc entry")?;
        let options = format!("{:?}", (&info.device, &info.fs_type, &info.options, label));
        let mount = Sha256::digest(options).iter().map(|byte| format!("{byte:02x}")).collect();
        let (container, sandbox) = (container.clone(), sandbox.to_owned());
        let label = label.map(str::to_owned);
        Ok(Self { container, sandbox, phase: Phase::Creating, process, mount, label })
    }

    /// The claim after the container was created, with its first process. `None`: that process has
    /// ended, or is unknown.
    pub fn created(&self, pid: u32) -> Option<Self> {
        let process = Process::of(pid).ok().flatten()?;
        Some(Self { phase: Phase::Created, process, ..self.clone() })
    }

    /// The id of a process that has the volume mounted, while the container lives. (The process
    /// that creates the container mounts the volume shortly after claiming it.) `None`: the
    /// container certainly does not live.
    pub fn process(&self, program: &Path) -> Result<Option<u32>> {
        let living = self.process.living();
        let living = living.with_context(|| format!("container {:?}", self.container.id))?;
        if living.is_some() || self.phase == Phase::Created {
            return Ok(living);
        }
        // The creating process was killed, before or after the container was created.
        state(&self.container, program)
    }
}

/// The first process of a container, as reported by the runtime. `None`: it does not live.
fn state(container: &Container, program: &Path) -> Result<Option<u32>> {
    next_runtime::container_process(program, container.root.as_deref(), &container.id).with_context(
        || {
            format!(
                "it is unknown whether the container {:?}, which has claimed the volume, lives; try again",
                container.id
            )
        },
    )
}

/// The claims of one volume, locked for as long as this value lives.
#[derive(Debug)]
pub struct Claims<'a> {
    entry: &'a Entry,
    program: &'a Path,
    _lock: Flock<File>,
}

impl<'a> Claims<'a> {
    /// Locks the claims. `None`: the entry does not exist, or was removed meanwhile. `program` is
    /// the runtime that reports unknown containers.
    pub fn lock(entry: &'a Entry, program: &'a Path) -> Result<Option<Self>> {
        let what = || format!("locking {}", entry.path().display());
        let until = Instant::now() + LOCK_TIMEOUT;
        let mut directory = match File::open(entry.path()) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.with_context(what)?,
        };
        let lock = loop {
            match Flock::lock(directory, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => break lock,
                Err((back, nix::Error::EWOULDBLOCK)) if Instant::now() < until => {
                    directory = back;
                    sleep(LOCK_INTERVAL);
                }
                Err((_, nix::Error::EWOULDBLOCK)) => {
                    bail!("another container of the volume is still being created; try again")
                }
                Err((_, error)) => return Err(error).with_context(what),
            }
        };
        // The entry may have been removed and created again during the wait.
        let same = |found: &fs::Metadata, opened: &fs::Metadata| {
            (found.dev(), found.ino()) == (opened.dev(), opened.ino())
        };
        let opened = lock.metadata().with_context(what)?;
        let found = match fs::symlink_metadata(entry.path()) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            found => found.with_context(what)?,
        };
        Ok(same(&found, &opened).then_some(Self { entry, program, _lock: lock }))
    }

    /// Checks that a container may claim the volume: no other pod uses it, this container does not
    /// use it yet, and the mount options are the same. Removes claims of dead containers. Returns
    /// whether this is the first living container.
    pub fn check(&self, claim: &Claim) -> Result<bool> {
        let mut first = true;
        for (name, other) in self.all()? {
            let other = other.with_context(|| {
                format!(
                    "{}: is unreadable; remove it if no container uses the volume",
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
                "the container {:?} already uses the volume; delete it first",
                other.container.id
            );
            ensure!(
                other.sandbox == claim.sandbox,
                "another pod (sandbox {:?}, container {:?}) uses the volume; only one pod can use it at a time",
                other.sandbox,
                other.container.id
            );
            ensure!(
                other.mount == claim.mount,
                "the container {:?} has mounted the volume with other options, which cannot change while it runs",
                other.container.id
            );
            first = false;
        }
        Ok(first)
    }

    /// Writes the container's claim, and the path of this program for crust_ops.
    pub fn add(&self, claim: &Claim, runtime_cli: &Path) -> Result<()> {
        self.put(claim)?;
        reach("oci_runtime.claimed")?;
        self.entry.write_runtime_cli(runtime_cli)?;
        Ok(reach("oci_runtime.cli_written")?)
    }

    pub fn put(&self, claim: &Claim) -> Result<()> {
        Ok(self.entry.write(&claim.container.file(), &serde_json::to_vec(claim)?)?)
    }

    /// Removes a container's claim, and with the last one the path of this program. The claim is
    /// removed last: as long as it exists, a repeated deletion of the container calls this again.
    pub fn remove(&self, container: &Container) -> Result<()> {
        let own = container.file();
        if !self.has_other_claims(&own)? {
            self.entry.remove_runtime_cli()?;
            reach("oci_runtime.cli_removed")?;
        }
        self.entry.remove(&own)?;
        Ok(reach("oci_runtime.claim_removed")?)
    }

    /// Whether another container uses the volume or may use it. Removes claims of dead containers.
    fn has_other_claims(&self, own: &str) -> Result<bool> {
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
        ensure!(
            claims.len() < MAX_CLAIMS,
            "{}: has more than {MAX_CLAIMS} containers",
            entry.path().display()
        );
        let Some(bytes) = entry.read(name).transpose() else { continue };
        let claim = bytes
            .map_err(anyhow::Error::from)
            .and_then(|bytes| Ok(serde_json::from_slice::<Claim>(&bytes)?))
            .and_then(|claim| {
                ensure!(claim.container.file() == name, "the claim belongs to another container");
                Ok(claim)
            });
        claims.push((name.to_owned(), claim));
    }
    Ok(claims)
}

/// Whether a container has claimed the volume of an entry.
pub fn has(entry: &Entry, container: &Container) -> Result<bool> {
    let path = entry.path().join(container.file());
    match fs::symlink_metadata(&path) {
        Ok(_) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e).with_context(|| format!("reading {}", path.display())),
    }
}

/// Whether a container with a claim certainly does not live, and is not being created by a living
/// process.
pub fn has_ended(entry: &Entry, container: &Container, program: &Path) -> bool {
    let claim = entry.read(&container.file()).map_err(anyhow::Error::from).and_then(|bytes| {
        bytes.map(|bytes| Ok(serde_json::from_slice::<Claim>(&bytes)?)).transpose()
    });
    let process = match claim {
        Ok(Some(claim)) => claim.process(program),
        Ok(None) => Ok(None),
        // The name of the file identifies the container.
        Err(_) => state(container, program),
    };
    process.is_ok_and(|process| process.is_none())
}

/// The process ids of the containers that use the volume, and the label of each mount.
///
/// # Errors
/// It is unknown whether a container uses it.
pub fn processes(entry: &Entry, program: &Path) -> Result<Vec<(u32, Option<String>)>> {
    let mut processes = Vec::new();
    for (name, claim) in all(entry)? {
        let claim = claim.with_context(|| {
            format!("{}: is an unreadable claim", entry.path().join(&name).display())
        })?;
        let process = claim.process(program)?;
        processes.extend(process.map(|process| (process, claim.label)));
    }
    Ok(processes)
}

/// Converts the root and the id of a container to text, as claims store them.
pub fn container(root: Option<&std::ffi::OsStr>, id: &std::ffi::OsStr) -> Result<Container> {
    let text = |field: &str, value: &std::ffi::OsStr| {
        let text = std::str::from_utf8(value.as_bytes());
        text.map(str::to_owned).with_context(|| format!("{field}: is not UTF-8"))
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
    use std::process::Command;

    fn entry(at: &Path) -> Entry {
        let target = Target::new("target", "/t/mount").unwrap();
        let entry = Directory::new(at).entry(&target);
        entry.stage(&target, &info()).unwrap();
        entry
    }

    fn info() -> MountInfo {
        MountInfo::new("/dev/loop1".into(), "ext4".into(), Vec::new())
    }

    fn named(id: &str) -> Container {
        Container { root: None, id: id.to_owned() }
    }

    /// Claims the volume. Returns whether this is the first container.
    fn claimed(claims: &Claims<'_>, claim: &Claim) -> Result<bool> {
        let first = claims.check(claim)?;
        claims.add(claim, Path::new("/cli"))?;
        Ok(first)
    }

    /// A runtime that is not called, because all claims name living or dead processes.
    const NONE: &str = "/bin/false";

    /// A runtime with these words on standard error for `state`.
    fn runtime(at: &Path, words: &str) -> std::path::PathBuf {
        use std::os::unix::fs::PermissionsExt;
        let program = at.join("runtime");
        fs::write(&program, format!("#!/bin/sh\necho '{words}' >&2\nexit 1\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        program
    }

    #[test]
    fn a_claim_ends_only_if_the_runtime_reports_absence() {
        let scratch = tempfile::tempdir().unwrap();
        let entry = entry(&scratch.path().join("crust"));
        let mut creator = Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process::of(creator.id()).unwrap().unwrap();
        let own = Claim::creating(&named("own"), "pod", &info(), None).unwrap();
        let claim = Claim { container: named("c"), process, ..own.clone() };
        entry.write(&claim.container.file(), &serde_json::to_vec(&claim).unwrap()).unwrap();
        let absent = runtime(scratch.path(), "container does not exist");
        assert!(!has_ended(&entry, &claim.container, &absent), "its creator lives");
        creator.kill().unwrap();
        creator.wait().unwrap();
        for words in ["too many open files in system", ""] {
            let unknown = runtime(scratch.path(), words);
            assert!(!has_ended(&entry, &claim.container, &unknown), "{words}");
            let claims = Claims::lock(&entry, &unknown).unwrap().unwrap();
            let other = Claim { sandbox: "another".into(), ..own.clone() };
            let refused = format!("{:#}", claims.check(&other).unwrap_err());
            assert!(refused.contains("it is unknown whether"), "{refused}");
            assert!(has(&entry, &claim.container).unwrap());
        }
        let absent = runtime(scratch.path(), "container does not exist");
        assert!(has_ended(&entry, &claim.container, &absent));
        let claims = Claims::lock(&entry, &absent).unwrap().unwrap();
        assert!(claims.check(&own).unwrap());
        assert!(!has(&entry, &claim.container).unwrap());
    }

    #[test]
    fn an_invalid_claim_is_an_error() {
        let scratch = tempfile::tempdir().unwrap();
        let entry = entry(scratch.path());
        let claims = Claims::lock(&entry, Path::new(NONE)).unwrap().unwrap();
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let own = Claim::creating(&named("own"), "pod", &info(), None).unwrap();
        let own = own.created(child.id()).unwrap();
        let name = named("bad").file();
        entry.write(&name, b"{").unwrap();
        let refused = format!("{:#}", claimed(&claims, &own).unwrap_err());
        assert!(refused.contains(&name), "{refused}");
        assert!(processes(&entry, Path::new(NONE)).is_err());
        // The deletion of the container removes its claim, whatever the file contains.
        claims.remove(&named("bad")).unwrap();
        assert!(claimed(&claims, &own).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_removed_entry_has_no_claims() {
        let scratch = tempfile::tempdir().unwrap();
        let entry = entry(scratch.path());
        entry.unstage().unwrap();
        assert!(Claims::lock(&entry, Path::new(NONE)).unwrap().is_none());
    }
}
