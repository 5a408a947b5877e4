//! Who uses a repository. Writers and readers share it; prune has it alone, because it removes what
//! others may read. A lock is an object that its owner renews; it expires by itself, and at once
//! when its process on this machine is gone.
//!
//! An owner writes its lock, then lists the others: of two that conflict, at least one sees the
//! other.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::{Deserialize, Serialize};
use tokio::task::JoinHandle;

use super::Repository;
use crate::backup::document::{self, VERSION};
use crate::backup::manifest::BackupId;

const LOCKS: &str = "locks";
/// How long a lock is valid after its last renewal.
const LIFETIME: Duration = Duration::from_secs(300);
const RENEWAL: Duration = Duration::from_secs(60);
const MAX_LOCK: u64 = 64 << 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    Shared,
    Exclusive,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    version: u32,
    kind: Kind,
    command: String,
    /// The backup that the owner writes.
    writes: Option<BackupId>,
    host: String,
    process: Process,
    expires: String,
}

/// A process that others on the same machine can look up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Process {
    boot_id: String,
    pid_namespace: String,
    pid: u32,
    /// In clock ticks since boot: a process id is used again.
    start_time: u64,
}

/// A held lock. It must be released; a dropped one is renewed no more, and expires.
pub struct Lock {
    repository: Repository,
    path: String,
    content: Content,
    valid_until: Arc<Mutex<Instant>>,
    renewal: JoinHandle<()>,
}

/// Runs `work` with the lock, and releases it in any case.
///
/// # Errors
/// Another process has a lock that excludes this one, or what `work` returns.
pub async fn locked<T>(
    repository: &Repository,
    kind: Kind,
    command: &str,
    work: impl AsyncFnOnce(&mut Lock) -> Result<T>,
) -> Result<T> {
    let mut lock = Lock::take(repository, kind, command).await?;
    let outcome = work(&mut lock).await;
    // The outcome of the work matters more than a lock that expires by itself.
    let released = lock.release().await;
    let value = outcome?;
    released.map(|()| value)
}

impl Lock {
    async fn take(repository: &Repository, kind: Kind, command: &str) -> Result<Self> {
        let nonce = getrandom::u64().map_err(|error| anyhow!("get random bytes: {error}"))?;
        let path = format!("{LOCKS}/{nonce:016x}");
        let content = Content {
            version: VERSION,
            kind,
            command: command.to_owned(),
            writes: None,
            host: nix::unistd::gethostname().unwrap_or_default().to_string_lossy().into_owned(),
            process: Process::own()?,
            expires: expiry(),
        };
        let valid_until = Arc::new(Mutex::new(Instant::now() + LIFETIME));
        repository.store.put(&path, document::write("lock", &content)?).await?;
        let renewal = renew(repository, &path, &content, &valid_until);
        let lock = Self { repository: repository.clone(), path, content, valid_until, renewal };
        match lock.conflict().await {
            Ok(None) => Ok(lock),
            Ok(Some(problem)) => {
                lock.release().await?;
                bail!(problem)
            }
            Err(error) => {
                lock.release().await?;
                Err(error)
            }
        }
    }

    /// Claims a backup, of which there may be one writer.
    ///
    /// # Errors
    /// Another process writes it.
    pub async fn claim(&mut self, id: &BackupId) -> Result<()> {
        self.renewal.abort();
        self.content.writes = Some(id.clone());
        self.content.expires = expiry();
        let document = document::write("lock", &self.content)?;
        self.repository.store.put(&self.path, document).await?;
        self.renewal = renew(&self.repository, &self.path, &self.content, &self.valid_until);
        match self.conflict().await? {
            None => Ok(()),
            Some(problem) => bail!(problem),
        }
    }

    /// # Errors
    /// The lock could not be renewed in time, so another process may have taken it for expired.
    pub fn check(&self) -> Result<()> {
        let valid_until = *self.valid_until.lock().unwrap_or_else(PoisonError::into_inner);
        ensure!(
            Instant::now() < valid_until,
            "the lock of {} could not be renewed for {}; run the command again",
            self.repository.location(),
            humantime::format_duration(LIFETIME)
        );
        Ok(())
    }

    async fn release(self) -> Result<()> {
        self.renewal.abort();
        self.repository.store.delete(&self.path).await
    }

    /// Why this lock cannot be held. Removes expired ones.
    async fn conflict(&self) -> Result<Option<String>> {
        for other in self.repository.store.list(LOCKS).await? {
            if other.path == self.path {
                continue;
            }
            let Some(document) = self.repository.store.get(&other.path, MAX_LOCK).await? else {
                continue;
            };
            let content = document::read::<Content>("lock", &other.path, &document);
            let is_live = match &content {
                Ok(content) => content.is_live(SystemTime::now()),
                Err(_) => other.modified + LIFETIME > SystemTime::now(),
            };
            if !is_live {
                self.repository.store.delete(&other.path).await?;
                continue;
            }
            match content {
                Ok(content) if self.content.excludes(&content) => {
                    return Ok(Some(content.shown(&self.repository)));
                }
                Ok(_) => {}
                Err(error) => return Err(error.context("read a lock of another process")),
            }
        }
        Ok(None)
    }
}

impl Content {
    fn excludes(&self, other: &Self) -> bool {
        let alone = self.kind == Kind::Exclusive || other.kind == Kind::Exclusive;
        let same = self.writes.is_some() && self.writes == other.writes;
        alone || same
    }

    fn is_live(&self, now: SystemTime) -> bool {
        let expires = humantime::parse_rfc3339(&self.expires);
        expires.is_ok_and(|expires| expires > now) && !self.process.is_gone()
    }

    fn shown(&self, repository: &Repository) -> String {
        let Self { command, host, process, expires, .. } = self;
        format!(
            "the repository {} is in use by `{command}` (process {} on {host}); repeat when that has ended, \
             or after {expires} if it was lost",
            repository.location(),
            process.pid
        )
    }
}

impl Process {
    fn own() -> Result<Self> {
        let pid = std::process::id();
        Ok(Self {
            boot_id: boot_id(),
            pid_namespace: pid_namespace(),
            pid,
            start_time: start_time(pid).context("read /proc/self/stat")?,
        })
    }

    /// Whether it ran on this machine and has ended. Of other machines nothing is known.
    fn is_gone(&self) -> bool {
        let is_here = self.boot_id == boot_id()
            && self.pid_namespace == pid_namespace()
            && !self.boot_id.is_empty()
            && !self.pid_namespace.is_empty();
        is_here && start_time(self.pid) != Some(self.start_time)
    }
}

fn boot_id() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

fn pid_namespace() -> String {
    let link = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    link.to_string_lossy().into_owned()
}

fn start_time(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // After the name, which may hold anything: the state is field 3, the start time field 22.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    // A process that was killed and not yet waited for holds nothing.
    (state != "Z").then(|| fields.nth(18)?.parse().ok())?
}

fn expiry() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now() + LIFETIME).to_string()
}

/// Renews a lock until it is released.
fn renew(
    repository: &Repository,
    path: &str,
    content: &Content,
    valid_until: &Arc<Mutex<Instant>>,
) -> JoinHandle<()> {
    let (store, path) = (repository.store.clone(), path.to_owned());
    let (mut content, valid_until) = (content.clone(), Arc::clone(valid_until));
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(RENEWAL).await;
            let next = Instant::now() + LIFETIME;
            content.expires = expiry();
            let Ok(document) = document::write("lock", &content) else { return };
            // The owner finds out by the time; the next round tries again.
            if store.put(&path, document).await.is_ok() {
                *valid_until.lock().unwrap_or_else(PoisonError::into_inner) = next;
            }
        }
    })
}
