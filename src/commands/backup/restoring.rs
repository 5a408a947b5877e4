//! The command `restore`: where a backup is restored to, and what must not be overwritten there.

use std::fs::File;
use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use super::args::RestoreArgs;
use super::manifest::Manifest;
use super::mover::{self, Mover};
use super::repository::{Inventory, Repository};
use super::restore::{self, Restore, Restored};
use super::target::Target;
use super::{Access, connect, group, in_place, open, print_all, volume};
use crate::client::format;
use crate::client::progress;
use crate::client::stop::Stop;
use common::quantity;

/// As a target: standard output.
const STREAM: &str = "-";

pub async fn run(args: RestoreArgs) -> Result<ExitCode> {
    let RestoreArgs { options, backup, repository, to, group, .. } = &args;
    let print = |restored: &[Done], start: Instant| {
        let texts = restored.iter().map(|one| one.text(start.elapsed()));
        print_all(options.print.output, restored, *group, texts.collect())
    };
    let start = Instant::now();
    let stop = Stop::listen(&options.per_call())?;
    let shown = progress::start("restoring", options.print.quiet);
    if repository.mover.namespace.is_some() {
        let claim = args.to_claim.as_deref();
        let claim =
            claim.context("--namespace requires --to-claim NAME, the claim to restore to")?;
        let (mode, resume) = (args.volume_mode, args.resume);
        let target = mover::Target { claim, mode, resume, is_group: *group };
        let mover = Mover::new(options, &stop, repository).await?;
        let restored = mover.restore(backup, &target).await?;
        drop(shown);
        print(&restored, start)?;
        return Ok(ExitCode::SUCCESS);
    }
    let repository = open(repository, Access::Read, &stop).await?;
    let inventory = stop.wait(repository.inventory()).await?;
    let from = Restorer {
        repository: &repository,
        inventory: &inventory,
        stop: &stop,
        resume: args.resume,
        overwrite: args.overwrite,
    };
    let restored = if let Some(name) = &args.to_volume {
        let connection = connect(options, &stop).await?;
        vec![volume::restore(&from, &connection, backup, name).await?]
    } else if let (Some(held), Some(to)) = (&args.from, to) {
        let (backup, held) = (inventory.find(backup)?, inventory.find(held).context("--from")?);
        let connection = connect(options, &stop).await?;
        vec![in_place::restore(&from, &connection, backup, held, to).await?]
    } else {
        let to = to.as_deref().context("--to is missing")?;
        match group {
            _ if to == Path::new(STREAM) => {
                ensure!(!group && !args.resume, "--to -: only one backup, from its beginning");
                from.stream(inventory.find(backup)?).await?;
                return Ok(ExitCode::SUCCESS);
            }
            true => group::restore(&from, backup, to).await?,
            false => {
                let backup = inventory.find(backup)?;
                from.check_file(to)?;
                vec![from.restore(backup, to).await?]
            }
        }
    };
    drop(shown);
    print(&restored, start)?;
    Ok(ExitCode::SUCCESS)
}

/// Where restores come from, and what they may do.
pub struct Restorer<'r> {
    pub repository: &'r Repository,
    pub inventory: &'r Inventory,
    pub stop: &'r Stop,
    /// Keep what the target holds already.
    resume: bool,
    /// Replace existing files.
    overwrite: bool,
}

/// A restore that is done.
#[derive(Serialize, Deserialize)]
pub struct Done {
    backup: String,
    to: String,
    capacity_bytes: u64,
    #[serde(flatten)]
    done: Restored,
}

impl Restorer<'_> {
    /// # Errors
    /// The path is a file with content, and nothing says that it may be replaced. A device always
    /// has content; the kernel and [`Target`] refuse one in use.
    pub fn check_file(&self, path: &Path) -> Result<()> {
        let has_content = path.metadata().is_ok_and(|meta| meta.is_file() && meta.len() > 0);
        if has_content && !self.resume && !self.overwrite {
            bail!(
                "--to {} exists; --overwrite replaces it, --resume continues an interrupted restore",
                path.display()
            );
        }
        Ok(())
    }

    pub async fn restore(&self, backup: &Manifest, to: &Path) -> Result<Done> {
        let chain = self.inventory.chain(backup)?;
        let target = Target::open(to, backup.subject.capacity_bytes)?;
        let restore = Restore::new(self.repository, &chain, target, self.resume)?;
        let done = restore.run(self.stop).await.with_context(|| {
            format!(
                "restore {} to {}, which is incomplete; --resume continues",
                backup.id,
                to.display()
            )
        })?;
        Ok(Done::new(backup, to, done))
    }

    /// Writes a backup, and nothing else, to standard output.
    async fn stream(&self, backup: &Manifest) -> Result<()> {
        let stdout = std::io::stdout();
        ensure!(!stdout.is_terminal(), "--to -: standard output is a terminal; redirect it");
        let out = File::from(stdout.as_fd().try_clone_to_owned().context("open standard output")?);
        let chain = self.inventory.chain(backup)?;
        let written = restore::to_stream(self.repository, &chain, out, self.stop);
        written.await.map(drop).with_context(|| format!("restore {}", backup.id))
    }
}

impl Done {
    pub fn new(backup: &Manifest, to: &Path, done: Restored) -> Self {
        Self {
            backup: backup.id.to_string(),
            to: to.display().to_string(),
            capacity_bytes: backup.subject.capacity_bytes,
            done,
        }
    }

    /// The same, of a target with a name of its own.
    pub fn with_target(self, to: String) -> Self {
        Self { to, ..self }
    }

    fn text(&self, time: Duration) -> String {
        let mut facts = vec![
            ("restored", self.backup.clone()),
            ("to", format!("{} ({})", self.to, quantity::format(self.capacity_bytes))),
            ("written", format::bytes(self.done.written_bytes)),
        ];
        if self.done.kept_bytes > 0 {
            facts.push(("kept", format::bytes(self.done.kept_bytes)));
        }
        facts.push(("time", format::took(time)));
        format::facts(&facts)
    }
}
