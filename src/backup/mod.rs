//! Backups of snapshots: `backup` and `restore`. A backup is the data of a snapshot (full), or what
//! changed since the snapshot of an earlier backup (incremental), in a repository that needs
//! neither driver nor cluster to be read.
//!
//! Promises: a backup is visible only when it is whole; a restore yields the bytes of the snapshot,
//! each verified; memory does not grow with the volume; a process that stops at any point, for good
//! or for a year, harms no backup that was acknowledged ([`protocol`]).
//!
//! For other programs: [`listing`] lists the blocks of a snapshot and outlives interruptions,
//! [`target`] takes extents.
//! `examples/backup.rs` shows both.

mod args;
mod attempt;
mod chunk;
mod copy;
mod copying;
mod create;
mod document;
mod group;
pub mod listing;
mod manifest;
mod merge;
mod mover;
mod origin;
mod protocol;
mod prune;
mod repository;
mod restore;
mod show;
pub mod target;
#[cfg(test)]
mod tests;
mod verify;
mod volume;
mod writer;

use std::collections::HashSet;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Subcommand;
use serde::{Deserialize, Serialize};
use serde_json::json;

use args::{BackupArgs, BackupCommand, CopyTo, CreateArgs, RepositoryArgs, RestoreArgs};
use create::{BaseChoice, Created, Job};
use manifest::{Manifest, Subject};
use mover::Mover;
use origin::Origin;
use repository::{Inventory, Location, Repository};
use restore::{Restore, Restored};
use show::Entry;
use target::Target;

use crate::client::cluster::{self, ClusterArgs};
use crate::client::connection::Connection;
use crate::client::format::{self, print_one, print_rows};
use crate::client::stop::Stop;
use crate::client::{self, Options, Output, progress};
use crate::quantity;

/// The commands, flattened into the binary's command line.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Back up snapshots to a directory or a bucket, and manage the backups
    Backup(BackupArgs),
    /// Restore a backup to a device, a file or a new volume
    Restore(RestoreArgs),
}

/// Runs one command. Exit codes: 0 done; 1 an error, or damage that `verify` or `list` found.
///
/// # Errors
/// The reason, for a user.
pub fn run(command: Command) -> Result<ExitCode> {
    // Files and directories that hold content of volumes are for their owner alone.
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
    #[cfg(feature = "failpoints")]
    if let Some(directory) = std::env::var_os("CSI_LOOPBACK_FAIL_POINTS") {
        crate::fail_point::watch(directory.into());
    }
    let outcome = match command {
        Command::Backup(args) => client::on_runtime(backup(args)),
        Command::Restore(args) => client::on_runtime(restore_command(args)),
    };
    match outcome {
        Err(error) if client::reader_gone(&error) => Ok(ExitCode::from(client::READER_GONE)),
        outcome => outcome,
    }
}

async fn backup(args: BackupArgs) -> Result<ExitCode> {
    let BackupArgs { options, command } = args;
    let stop = Stop::listen(&options.per_call())?;
    if let Some(command) = command.for_pod()
        && command.repository.mover.namespace.is_some()
    {
        let shown = progress::start("waiting for the mover pod", options.print.quiet);
        let mover = Mover::new(&options, &stop, command.repository).await?;
        let result = mover.manage(command.args, command.copy_to).await?;
        drop(shown);
        return print_result(&result);
    }
    match command {
        BackupCommand::Create(args) => create_command(&options, &stop, &args).await,
        BackupCommand::List { repository, volume } => {
            let inventory = open(&repository, false).await?.inventory().await?;
            show::list(&inventory, volume.as_deref(), options.print.output)?;
            Ok(warn_of_damage(&inventory))
        }
        BackupCommand::Show { backup, repository, group } => {
            let repository = open(&repository, false).await?;
            match group {
                true => show::set(&repository, &backup, options.print.output).await?,
                false => show_command(&options, &repository, &backup).await?,
            }
            Ok(ExitCode::SUCCESS)
        }
        BackupCommand::Verify { backups, repository } => {
            verify_command(&options, &stop, &open(&repository, false).await?, &backups).await
        }
        BackupCommand::Prune { repository, keep_last, keep_within, remove_last, dry_run } => {
            let rules = prune::Rules { keep_last, keep_within, remove_last };
            repository.repository.check_lists(repository.one_machine || dry_run)?;
            prune_command(&options, &stop, &open(&repository, false).await?, rules, dry_run).await
        }
        BackupCommand::Copy { backups, repository, to } => {
            let (from, to) = open_both(&repository, &to).await?;
            copy_command(&options, &stop, &from, &to, &backups).await
        }
    }
}

async fn open(args: &RepositoryArgs, create: bool) -> Result<Repository> {
    let RepositoryArgs { repository, key_file, s3_credentials, one_machine, .. } = args;
    if create {
        repository.check_lists(*one_machine)?;
    }
    Repository::open(repository, create, key_file.as_deref(), s3_credentials.as_deref()).await
}

/// The repositories of a copy. Credentials are for whichever of them is a bucket.
async fn open_both(from: &RepositoryArgs, to: &CopyTo) -> Result<(Repository, Repository)> {
    let credentials = |own: &Location, other: &Location| {
        let is_for_other = !own.is_bucket() && other.is_bucket();
        from.s3_credentials.as_deref().filter(|_| !is_for_other)
    };
    let key = from.key_file.as_deref();
    let source = credentials(&from.repository, &to.to);
    let source = Repository::open(&from.repository, false, key, source).await?;
    let key = to.to_key_file.as_deref();
    to.to.check_lists(from.one_machine)?;
    let target = credentials(&to.to, &from.repository);
    let target = Repository::open(&to.to, true, key, target).await?;
    Ok((source, target))
}

/// Connects to the driver; calls over the connection may take `--timeout` each.
async fn connect(options: &Options, stop: &Stop) -> Result<Connection> {
    let deadline = tokio::time::Instant::now() + options.timeout;
    let connection = stop.wait(Connection::open(&options.endpoint()?, deadline)).await?;
    Ok(connection.until(stop.deadline()))
}

fn warn_of_damage(inventory: &Inventory) -> ExitCode {
    let damaged = damage(inventory);
    for problem in &damaged {
        eprintln!("csi-loopback: {}", format::printable(problem));
    }
    if damaged.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// What a list and the manifests show: each backup that cannot be restored as it is, and why.
fn damage(inventory: &Inventory) -> Vec<String> {
    let unreadable = inventory.damaged.iter().map(|(id, error)| format!("backup {id}: {error:#}"));
    let mut broken: Vec<_> = inventory.broken.iter().collect();
    broken.sort();
    let broken = broken.into_iter().map(|(id, problem)| format!("backup {id}: {problem}"));
    unreadable.chain(broken).collect()
}

async fn create_command(options: &Options, stop: &Stop, args: &CreateArgs) -> Result<ExitCode> {
    let CreateArgs { snapshot, repository, base, group, source, token_file, set } = args;
    let base = base.as_ref().unwrap_or(&BaseChoice::None);
    let shown = progress::start("backing up", options.print.quiet);
    let Some(namespace) = &repository.mover.namespace else {
        return create_by_driver(options, stop, args, base, *group, shown).await;
    };
    let Some(device) = source else {
        let mover = Mover::new(options, stop, repository).await?;
        let result = match group {
            true => mover.back_up_group(snapshot, base).await?,
            false => mover.back_up(snapshot, base).await?,
        };
        drop(shown);
        return print_result(&result);
    };
    let kubeconfig = repository.mover.kubeconfig.clone();
    let client = stop.wait(cluster::connect(kubeconfig.as_deref())).await?;
    let found = stop.wait(cluster::snapshot(&client, namespace, snapshot)).await?;
    let origin = Origin::Kubernetes {
        options: &options.per_call(),
        cluster: &ClusterArgs::metadata(namespace.clone(), kubeconfig, token_file.clone()),
        snapshot: &found.name,
        device,
    };
    let sources = [(origin, origin::subject_in_cluster(&found, set.clone())?)];
    create_all(options, stop, repository, &sources, base, false, shown).await
}

async fn create_by_driver(
    options: &Options,
    stop: &Stop,
    args: &CreateArgs,
    base: &BaseChoice,
    is_group: bool,
    shown: progress::Shown,
) -> Result<ExitCode> {
    let connection = connect(options, stop).await?;
    let snapshots = match is_group {
        true => stop.wait(group::snapshots(&connection, &args.snapshot)).await?,
        false => vec![stop.wait(origin::snapshot(&connection, &args.snapshot)).await?],
    };
    let set = if is_group { group::set(&snapshots)? } else { None };
    let sources = snapshots.iter().map(|snapshot| {
        let subject = origin::subject(snapshot, set.clone())?;
        Ok((Origin::Driver { connection: &connection, snapshot }, subject))
    });
    let sources = sources.collect::<Result<Vec<_>>>()?;
    create_all(options, stop, &args.repository, &sources, base, is_group, shown).await
}

/// Backs up snapshots, and prints the results: several if they are a set.
async fn create_all(
    options: &Options,
    stop: &Stop,
    repository: &RepositoryArgs,
    sources: &[(Origin<'_>, Subject)],
    base: &BaseChoice,
    is_group: bool,
    shown: progress::Shown,
) -> Result<ExitCode> {
    let start = Instant::now();
    let repository = open(repository, true).await?;
    let mut created: Vec<Created> = Vec::with_capacity(sources.len());
    for (origin, subject) in sources {
        // Each looks at the repository again: a backup may be the base of the next.
        created.push(Job { repository: &repository, stop }.create(origin, subject, base).await?);
    }
    let all: Vec<_> = created.iter().map(|one| &one.manifest).collect();
    drop(shown);
    let inventory = repository.inventory().await?;
    // Of a set, all must exist at one time.
    if is_group && !attempt::exist(&repository, &inventory, &all).await? {
        bail!("a prune removes members of the set; repeat the command");
    }
    let time = start.elapsed();
    let entry = |one: &Created| Entry::new(&one.manifest, &inventory);
    let entries: Vec<Entry> = created.iter().map(entry).collect();
    let texts = created.iter().zip(&entries).map(|(one, entry)| created_text(one, entry, time));
    print_all(options.print.output, &entries, is_group, texts.collect())?;
    created.into_iter().try_for_each(|one| one.cleaned)?;
    Ok(ExitCode::SUCCESS)
}

/// Prints what a mover pod printed.
fn print_result(result: &str) -> Result<ExitCode> {
    format::print(result)?;
    Ok(ExitCode::SUCCESS)
}

/// Prints the results of a command: several where it is about a set, else the only one.
fn print_all<T: Serialize>(
    output: Output,
    values: &[T],
    is_group: bool,
    texts: Vec<String>,
) -> Result<()> {
    match values {
        [only] if !is_group => print_one(output, only, |_| texts.concat()),
        all => print_rows(output, all, |_| texts.join("\n\n")),
    }
}

fn created_text(created: &Created, entry: &Entry, time: Duration) -> String {
    let state = match created {
        Created { existed: true, .. } => "exists already",
        Created { resumed: true, .. } => "continued and complete",
        _ => "complete",
    };
    entry.facts([("result", state.to_owned()), ("time", format::took(time))])
}

async fn show_command(options: &Options, repository: &Repository, backup: &str) -> Result<()> {
    let inventory = repository.inventory().await?;
    let found = inventory.find(backup)?;
    let chain = inventory.chain(found);
    let entry = Entry::new(found, &inventory);
    let chain_ids =
        chain.as_ref().map(|chain| chain.iter().map(|one| one.id.to_string()).collect::<Vec<_>>());
    let mut value = serde_json::to_value(&entry)?;
    if let (Some(fields), Ok(ids)) = (value.as_object_mut(), &chain_ids) {
        fields.insert("chain".to_owned(), json!(ids));
    }
    print_one(options.print.output, &value, |_| match &chain_ids {
        Ok(ids) => entry.facts([("chain", ids.join(", "))]),
        Err(_) => entry.facts([]),
    })?;
    chain.map(drop)
}

/// The backups that `references` name; all without any.
fn selected(inventory: &Inventory, references: &[String]) -> Result<Vec<Manifest>> {
    if references.is_empty() {
        return Ok(inventory.backups.clone());
    }
    references.iter().map(|reference| inventory.find(reference).cloned()).collect()
}

async fn verify_command(
    options: &Options,
    stop: &Stop,
    repository: &Repository,
    references: &[String],
) -> Result<ExitCode> {
    let start = Instant::now();
    let shown = progress::start("verifying", options.print.quiet);
    let inventory = repository.inventory().await?;
    let backups = selected(&inventory, references)?;
    let mut report = verify::verify(repository, &inventory, &backups, stop).await?;
    report.problems.extend(damage(&inventory));
    drop(shown);
    report.problems.dedup();
    let verify::Report { backups, chunks, stored_bytes, problems } = &report;
    let value = json!({
        "backups": backups, "chunks": chunks, "stored_bytes": stored_bytes, "problems": problems,
    });
    print_one(options.print.output, &value, |_| {
        let result = match problems.len() {
            0 => "no damage found".to_owned(),
            count => format!("{count} problems:\n{}", format::printable(&problems.join("\n"))),
        };
        format::facts(&[
            ("backups", backups.to_string()),
            ("read", format::bytes(*stored_bytes)),
            ("time", format::took(start.elapsed())),
            ("result", result),
        ])
    })?;
    Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn prune_command(
    options: &Options,
    stop: &Stop,
    repository: &Repository,
    rules: prune::Rules,
    dry_run: bool,
) -> Result<ExitCode> {
    let plan = if dry_run {
        let inventory = repository.inventory().await?;
        // Nothing is written, so the newest object stands for the present.
        let now = inventory.listing.newest.unwrap_or(std::time::UNIX_EPOCH);
        prune::plan(&inventory, rules, now)
    } else {
        let removal =
            prune::run(repository, |inventory, now| Ok(prune::plan(inventory, rules, now)));
        stop.whole(removal).await?
    };
    let ids = |ids: &[manifest::BackupId]| ids.iter().map(ToString::to_string).collect::<Vec<_>>();
    let (removed, needed, unfinished) =
        (ids(&plan.remove), ids(&plan.needed), ids(&plan.unfinished));
    let value = json!({
        "removed": removed, "kept_for_others": needed, "unfinished_removed": unfinished, "dry_run": dry_run,
    });
    print_one(options.print.output, &value, |_| {
        let verb = if dry_run { "would remove" } else { "removed" };
        let mut lines: Vec<_> = removed.iter().map(|id| format!("{verb} {id}")).collect();
        lines.extend(unfinished.iter().map(|id| format!("{verb} {id}, unfinished")));
        lines.extend(needed.iter().map(|id| format!("kept {id}, which others need")));
        if lines.is_empty() { "nothing to remove".to_owned() } else { lines.join("\n") }
    })?;
    Ok(ExitCode::SUCCESS)
}

async fn copy_command(
    options: &Options,
    stop: &Stop,
    from: &Repository,
    to: &Repository,
    references: &[String],
) -> Result<ExitCode> {
    let shown = progress::start("copying", options.print.quiet);
    let inventory = from.inventory().await?;
    let mut wanted = HashSet::new();
    for backup in selected(&inventory, references)? {
        wanted.extend(inventory.chain(&backup)?.into_iter().map(|one| one.id));
    }
    let mut copied = Vec::new();
    // Bases come first.
    for backup in inventory.backups.iter().filter(|one| wanted.contains(&one.id)) {
        if copy::copy(from, to, backup, stop).await? {
            copied.push(backup.id.to_string());
        }
    }
    drop(shown);
    print_one(options.print.output, &json!({ "copied": copied }), |_| match copied.len() {
        0 => format!("{} has them already", to.location()),
        _ => copied.iter().map(|id| format!("copied {id}")).collect::<Vec<_>>().join("\n"),
    })?;
    Ok(ExitCode::SUCCESS)
}

async fn restore_command(args: RestoreArgs) -> Result<ExitCode> {
    let RestoreArgs { options, backup, repository, to, group, resume, .. } = &args;
    let print = |restored: &[Done], start: Instant| {
        let texts = restored.iter().map(|one| one.text(start.elapsed()));
        print_all(options.print.output, restored, *group, texts.collect())
    };
    let start = Instant::now();
    let stop = Stop::listen(&options.per_call())?;
    let shown = progress::start("restoring", options.print.quiet);
    if repository.mover.namespace.is_some() {
        let claim = args.to_claim.as_deref().context("--to-claim is missing")?;
        let mode = args.volume_mode;
        let target = mover::Target { claim, mode, resume: *resume, is_group: *group };
        let mover = Mover::new(options, &stop, repository).await?;
        let restored = mover.restore(backup, &target).await?;
        drop(shown);
        print(&restored, start)?;
        return Ok(ExitCode::SUCCESS);
    }
    let repository = open(repository, false).await?;
    let inventory = repository.inventory().await?;
    let from = Restorer { repository: &repository, inventory: &inventory, stop: &stop };
    let restored = if let Some(name) = &args.to_volume {
        let connection = connect(options, &stop).await?;
        vec![volume::restore(&from, &connection, backup, name).await?]
    } else {
        let to = to.as_deref().context("--to is missing")?;
        match group {
            true => group::restore(&from, backup, to, *resume).await?,
            false => vec![from.restore(inventory.find(backup)?, to, *resume).await?],
        }
    };
    drop(shown);
    print(&restored, start)?;
    Ok(ExitCode::SUCCESS)
}

/// Where restores come from.
struct Restorer<'r> {
    repository: &'r Repository,
    inventory: &'r Inventory,
    stop: &'r Stop,
}

/// A restore that is done.
#[derive(Serialize, Deserialize)]
struct Done {
    backup: String,
    to: String,
    capacity_bytes: u64,
    #[serde(flatten)]
    done: Restored,
}

impl Restorer<'_> {
    async fn restore(&self, backup: &Manifest, to: &Path, resume: bool) -> Result<Done> {
        let chain = self.inventory.chain(backup)?;
        let capacity = backup.subject.capacity_bytes;
        let target = Target::open(to, capacity)?;
        let restore = Restore::new(self.repository, &chain, target, resume)?;
        let done = restore.run(self.stop).await.with_context(|| {
            format!(
                "restore {} to {}, which is incomplete; --resume continues",
                backup.id,
                to.display()
            )
        })?;
        Ok(Done {
            backup: backup.id.to_string(),
            to: to.display().to_string(),
            capacity_bytes: capacity,
            done,
        })
    }
}

impl Done {
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
