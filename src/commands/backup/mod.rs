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
mod failure;
mod group;
mod in_place;
pub mod listing;
mod manage;
mod manifest;
mod merge;
mod mount;
mod mover;
mod origin;
mod protocol;
mod prune;
mod repository;
mod restore;
mod restoring;
mod retention;
mod settings;
mod show;
pub mod target;
#[cfg(test)]
mod tests;
mod verify;
mod volume;
mod writer;

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Subcommand;
use serde::Serialize;

use args::{BackupArgs, BackupCommand, CopyTo, CreateArgs, RepositoryArgs, RestoreArgs};
use create::{Created, Job};
use failure::Kind;
use manifest::Subject;
use mover::Mover;
use origin::Origin;
use repository::seal::KeyFile;
use repository::{Location, Repository};
use show::Entry;

use crate::client::cluster::{self, ClusterArgs};
use crate::client::connection::Connection;
use crate::client::format::{self, print_one, print_rows};
use crate::client::stop::Stop;
use crate::client::{self, Options, Output, progress};
use telemetry::on_demand::OnDemand;
use telemetry::task;

/// The commands, flattened into the binary's command line.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Back up snapshots to a directory or a bucket, and manage the backups
    Backup(OnDemand<BackupArgs>),
    /// Restore a backup to a device, a file or a new volume
    Restore(OnDemand<RestoreArgs>),
}

/// Runs one command. The exit codes are those of docs/reference/backup.md.
///
/// # Errors
/// The reason, for a user.
pub fn run(command: Command) -> Result<ExitCode> {
    // Files and directories that hold content of volumes are for their owner alone.
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
    #[cfg(feature = "failpoints")]
    if let Some(directory) = std::env::var_os("CSI_LOOPBACK_FAIL_POINTS") {
        common::fail_point::watch(directory.into());
    }
    let outcome = match command {
        Command::Backup(args) => client::on_runtime(backup(*args.0)),
        Command::Restore(args) => client::on_runtime(restoring::run(*args.0)),
    };
    match outcome {
        Err(error) if client::reader_gone(&error) => Ok(ExitCode::from(client::READER_GONE)),
        Err(error) => match Kind::of(&error) {
            Some(kind) => {
                eprintln!("csi-loopback: {}", client::describe(&error));
                Ok(ExitCode::from(kind.code()))
            }
            None => Err(error),
        },
        outcome => outcome,
    }
}

async fn backup(args: BackupArgs) -> Result<ExitCode> {
    let BackupArgs { options, command } = args;
    let stop = Stop::listen(&options.per_call())?;
    if let BackupCommand::Prune { rules, .. } = &command {
        rules.check()?;
    }
    if let Some(command) = command.for_pod()
        && command.repository.mover.namespace.is_some()
    {
        let shown = progress::start("waiting for the mover pod", options.print.quiet);
        let mover = Mover::new(&options, &stop, command.repository).await?;
        let result = mover.manage(&command).await?;
        drop(shown);
        return print_result(&result);
    }
    let read = async |repository: &RepositoryArgs| open(repository, Access::Read, &stop).await;
    let change = |dry_run: bool| if dry_run { Access::Read } else { Access::Change };
    match command {
        BackupCommand::Create(args) => create_command(&options, &stop, &args).await,
        BackupCommand::List { repository, volume } => {
            manage::list(&options, &stop, &read(&repository).await?, volume.as_deref()).await
        }
        BackupCommand::Show { backup, repository, group } => {
            let repository = read(&repository).await?;
            match group {
                true => show::set(&repository, &backup, options.print.output).await?,
                false => manage::show(&options, &stop, &repository, &backup).await?,
            }
            Ok(ExitCode::SUCCESS)
        }
        BackupCommand::Verify { backups, repository } => {
            manage::verify(&options, &stop, &read(&repository).await?, &backups).await
        }
        BackupCommand::Mount { backup, directory, repository } => {
            mount::run(&options, &stop, &read(&repository).await?, &backup, &directory).await
        }
        BackupCommand::Prune { repository, rules, dry_run } => {
            let repository = open(&repository, change(dry_run), &stop).await?;
            manage::prune(&options, &stop, &repository, &rules, dry_run).await
        }
        BackupCommand::Delete { backups, repository, remove_last, dry_run } => {
            let repository = open(&repository, change(dry_run), &stop).await?;
            manage::delete(&options, &stop, &repository, &backups, remove_last, dry_run).await
        }
        BackupCommand::Copy { backups, repository, to } => {
            let (from, to) = open_both(&repository, &to, &stop).await?;
            manage::copy(&options, &stop, &from, &to, &backups).await
        }
        BackupCommand::Key { command } => manage::key(&options, &stop, &command).await,
    }
}

/// What a command does with a repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    /// It must exist.
    Change,
    /// It is made if it is missing.
    Create,
}

async fn open(args: &RepositoryArgs, access: Access, stop: &Stop) -> Result<Repository> {
    let location = args.location()?;
    report_progress(args);
    if access != Access::Read {
        location.check_lists(args.one_machine)?;
    }
    let key = settings::read(args.key()?, stop).await?;
    open_at(&location, access, key, args.s3_credentials.as_deref(), stop).await
}

fn report_progress(args: &RepositoryArgs) {
    if args.report_progress {
        progress::report_lines();
    }
}

async fn open_at(
    location: &Location,
    access: Access,
    key: Option<KeyFile>,
    credentials: Option<&Path>,
    stop: &Stop,
) -> Result<Repository> {
    let create = access == Access::Create;
    let opened = stop.wait(Repository::open(location, create, key, credentials)).await;
    match opened {
        Err(error) if location.is_bucket() && Kind::of(&error).is_none() => {
            Err(error.context(settings::bucket(location, credentials)))
        }
        opened => opened,
    }
}

/// The repositories of a copy. Credentials are for whichever of them is a bucket.
async fn open_both(
    from: &RepositoryArgs,
    to: &CopyTo,
    stop: &Stop,
) -> Result<(Repository, Repository)> {
    let credentials = |own: &Location, other: &Location| {
        let is_for_other = !own.is_bucket() && other.is_bucket();
        from.s3_credentials.as_deref().filter(|_| !is_for_other)
    };
    report_progress(from);
    let location = from.location()?;
    let key = settings::read(from.key()?, stop).await?;
    let source = credentials(&location, &to.to);
    let source = open_at(&location, Access::Read, key, source, stop).await?;
    to.to.check_lists(from.one_machine)?;
    let key = settings::read(to.key(), stop).await?;
    let target = credentials(&to.to, &location);
    let target = open_at(&to.to, Access::Create, key, target, stop).await?;
    Ok((source, target))
}

/// Connects to the driver; calls over the connection may take `--timeout` each.
async fn connect(options: &Options, stop: &Stop) -> Result<Connection> {
    let deadline = tokio::time::Instant::now() + options.timeout;
    let connection = stop.wait(options.connect(deadline)).await?;
    Ok(connection.until(stop.deadline()))
}

async fn create_command(options: &Options, stop: &Stop, args: &CreateArgs) -> Result<ExitCode> {
    let CreateArgs { repository, group, source, token_file, set, claim, .. } = args;
    let snapshot = args.snapshot();
    let shown = progress::start("backing up", options.print.quiet);
    let Some(namespace) = &repository.mover.namespace else {
        return create_by_driver(options, stop, args, shown).await;
    };
    let Some(device) = source else {
        let (mover, flags) = (Mover::new(options, stop, repository).await?, args.flags_for_pod());
        let result = match claim {
            Some(claim) => {
                mover.back_up_claim(claim, args.snapshot_class.as_deref(), &flags).await?
            }
            None if *group => mover.back_up_group(snapshot, &flags).await?,
            None => mover.back_up(snapshot, &flags).await?,
        };
        drop(shown);
        return print_result(&result);
    };
    let kubeconfig = repository.mover.kubeconfig.clone();
    let client = stop.wait(cluster::connect(kubeconfig.as_deref())).await?;
    let found = stop.wait(cluster::snapshot(&client, namespace, snapshot)).await?;
    let cluster = ClusterArgs::metadata(namespace.clone(), kubeconfig, token_file.clone());
    let per_call = options.per_call();
    let bytes = match found.bytes {
        Some(bytes) => bytes,
        None => {
            stop.wait(origin::size_in_cluster(&per_call, &cluster, &found.name, device)).await?
        }
    };
    let subject = origin::subject_in_cluster(&found, bytes, set.clone())?;
    let (options_of_origin, snapshot) = (&per_call, &found.name);
    let origin =
        Origin::Kubernetes { options: options_of_origin, cluster: &cluster, snapshot, device };
    let sources = [(origin, subject)];
    create_all(options, stop, args, &sources, shown).await
}

async fn create_by_driver(
    options: &Options,
    stop: &Stop,
    args: &CreateArgs,
    shown: progress::Shown,
) -> Result<ExitCode> {
    let connection = connect(options, stop).await?;
    let mut snapshots = match args.group {
        true => stop.wait(group::snapshots(&connection, args.snapshot())).await?,
        false => vec![stop.wait(origin::snapshot(&connection, args.snapshot())).await?],
    };
    for snapshot in &mut snapshots {
        stop.wait(origin::find_size(&connection, snapshot)).await?;
    }
    let set = if args.group { group::set(&snapshots)? } else { None };
    let sources = snapshots.iter().map(|snapshot| {
        let subject = origin::subject(snapshot, set.clone())?;
        Ok((Origin::Driver { connection: &connection, snapshot }, subject))
    });
    let sources = sources.collect::<Result<Vec<_>>>()?;
    create_all(options, stop, args, &sources, shown).await
}

/// Backs up snapshots, and prints the results: several if they are a set.
async fn create_all(
    options: &Options,
    stop: &Stop,
    args: &CreateArgs,
    sources: &[(Origin<'_>, Subject)],
    shown: progress::Shown,
) -> Result<ExitCode> {
    let start = Instant::now();
    let CreateArgs { repository, group: is_group, .. } = args;
    if args.replace_format_1 {
        let location = repository.location()?;
        let credentials = repository.s3_credentials.as_deref();
        stop.wait(repository::format_1::replace(&location, credentials)).await?;
    }
    let repository = open(repository, Access::Create, stop).await?;
    let mut created: Vec<Created> = Vec::with_capacity(sources.len());
    for (origin, subject) in sources {
        // Each looks at the repository again: a backup may be the base of the next.
        created.push(
            Job { repository: &repository, stop }.create(origin, subject, args.base()).await?,
        );
    }
    let all: Vec<_> = created.iter().map(|one| &one.manifest).collect();
    drop(shown);
    let inventory = repository.inventory().await?;
    // Of a set, all must exist at one time.
    if *is_group && !attempt::exist(&repository, &inventory, &all).await? {
        bail!("a prune removes members of the set; repeat the command");
    }
    let time = start.elapsed();
    let entry = |one: &Created| Entry::new(&one.manifest, &inventory);
    let entries: Vec<Entry> = created.iter().map(entry).collect();
    let texts = created.iter().zip(&entries).map(|(one, entry)| created_text(one, entry, time));
    print_all(options.print.output, &entries, *is_group, texts.collect())?;
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

/// The result of work on a thread where it may block.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    task::blocking(work).await.context("the task panicked")?
}
