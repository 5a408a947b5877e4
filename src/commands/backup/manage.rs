//! The commands that look at a repository and tidy it: `backup list`, `show`, `verify`, `prune`,
//! `delete`, `copy` and `key`.

use std::collections::HashSet;
use std::process::ExitCode;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Result, ensure};
use serde_json::json;

use super::args::{KeyCommand, NewKey, RepositoryArgs};
use super::failure::Kind;
use super::manifest::{BackupId, Manifest};
use super::prune::{self, Plan};
use super::repository::{Inventory, Repository};
use super::retention::Rules;
use super::show::Entry;
use super::{Access, copy, open, settings, show, verify};
use crate::client::format::{self, print_one, print_rows};
use crate::client::stop::Stop;
use crate::client::{Options, progress};

/// The exit code of damage that a command has found.
fn damaged() -> ExitCode {
    ExitCode::from(Kind::Damaged.code())
}

pub async fn list(
    options: &Options,
    stop: &Stop,
    repository: &Repository,
    volume: Option<&str>,
) -> Result<ExitCode> {
    let inventory = stop.wait(repository.inventory()).await?;
    show::list(&inventory, volume, options.print.output)?;
    let problems = damage(&inventory);
    for problem in &problems {
        eprintln!("csi-loopback: {}", format::printable(problem));
    }
    Ok(if problems.is_empty() { ExitCode::SUCCESS } else { damaged() })
}

/// What a list and the manifests show: each backup that cannot be restored as it is, and why.
fn damage(inventory: &Inventory) -> Vec<String> {
    let unreadable = inventory.damaged.iter().map(|(id, error)| format!("backup {id}: {error:#}"));
    let mut broken: Vec<_> = inventory.broken.iter().collect();
    broken.sort();
    let broken = broken.into_iter().map(|(id, problem)| format!("backup {id}: {problem}"));
    unreadable.chain(broken).collect()
}

pub async fn show(
    options: &Options,
    stop: &Stop,
    repository: &Repository,
    backup: &str,
) -> Result<()> {
    let inventory = stop.wait(repository.inventory()).await?;
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

pub async fn verify(
    options: &Options,
    stop: &Stop,
    repository: &Repository,
    references: &[String],
) -> Result<ExitCode> {
    let start = Instant::now();
    let shown = progress::start("verifying", options.print.quiet);
    let inventory = stop.wait(repository.unindexed_inventory()).await?;
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
    Ok(if problems.is_empty() { ExitCode::SUCCESS } else { damaged() })
}

pub async fn prune(
    options: &Options,
    stop: &Stop,
    repository: &Repository,
    rules: &Rules,
    dry_run: bool,
) -> Result<ExitCode> {
    let planned = |inventory: &Inventory, now| Ok(prune::plan(inventory, *rules, now));
    let plan = remove(stop, repository, dry_run, planned).await?;
    print_removed(options, &plan, dry_run)?;
    Ok(ExitCode::SUCCESS)
}

pub async fn delete(
    options: &Options,
    stop: &Stop,
    repository: &Repository,
    references: &[String],
    remove_last: bool,
    dry_run: bool,
) -> Result<ExitCode> {
    let planned = |inventory: &Inventory, _| {
        let ids = references.iter().map(|reference| attempt(inventory, reference));
        let mut ids = ids.collect::<Result<Vec<_>>>()?;
        ids.sort();
        ids.dedup();
        prune::delete(inventory, &ids, remove_last)
    };
    let plan = remove(stop, repository, dry_run, planned).await?;
    print_removed(options, &plan, dry_run)?;
    let stays = plan.needed.is_empty();
    ensure!(stays, "not all were removed: other backups have come to need them");
    Ok(ExitCode::SUCCESS)
}

/// The attempt that a reference names, also one that is damaged or unfinished.
fn attempt(inventory: &Inventory, reference: &str) -> Result<BackupId> {
    if let Ok(id) = BackupId::try_from(reference.to_owned())
        && inventory.listing.attempts.contains_key(&id)
    {
        return Ok(id);
    }
    Ok(inventory.find(reference)?.id.clone())
}

/// Removes what is planned, or only plans it.
async fn remove(
    stop: &Stop,
    repository: &Repository,
    dry_run: bool,
    planned: impl FnOnce(&Inventory, SystemTime) -> Result<Plan>,
) -> Result<Plan> {
    if dry_run {
        let inventory = stop.wait(repository.inventory()).await?;
        // Nothing is written, so the newest object stands for the present.
        let now = inventory.listing.newest.unwrap_or(UNIX_EPOCH);
        return planned(&inventory, now);
    }
    stop.whole(prune::run(repository, planned)).await
}

fn print_removed(options: &Options, plan: &Plan, dry_run: bool) -> Result<()> {
    let ids = |ids: &[BackupId]| ids.iter().map(ToString::to_string).collect::<Vec<_>>();
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
    Ok(())
}

pub async fn copy(
    options: &Options,
    stop: &Stop,
    from: &Repository,
    to: &Repository,
    references: &[String],
) -> Result<ExitCode> {
    let shown = progress::start("copying", options.print.quiet);
    let inventory = stop.wait(from.inventory()).await?;
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

pub async fn key(options: &Options, stop: &Stop, command: &KeyCommand) -> Result<ExitCode> {
    let change = async |args: &RepositoryArgs| open(args, Access::Change, stop).await;
    match command {
        KeyCommand::List { repository } => {
            list_keys(options, stop, &open(repository, Access::Read, stop).await?).await?;
        }
        KeyCommand::Add { repository, new } => {
            let repository = change(repository).await?;
            let id = add_key(stop, &repository, new).await?;
            print_key(options, &id, "added")?;
        }
        KeyCommand::Remove { key, repository } => {
            let repository = change(repository).await?;
            stop.whole(repository.remove_key(key)).await?;
            print_key(options, key, "removed")?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn list_keys(options: &Options, stop: &Stop, repository: &Repository) -> Result<()> {
    let own = repository.key_id()?;
    let keys = stop.wait(repository.keys()).await?;
    let is_own = |id: &String| own.as_ref() == Some(id);
    let values: Vec<_> = keys
        .iter()
        .map(|(id, created)| json!({ "id": id, "created": created, "current": is_own(id) }))
        .collect();
    print_rows(options.print.output, &values, |_| {
        if keys.is_empty() {
            return format!("{} is not encrypted", repository.location());
        }
        let current = |id| if is_own(id) { "yes" } else { "" };
        let rows: Vec<_> = keys
            .iter()
            .map(|(id, created)| [id.clone(), created.clone(), current(id).to_owned()])
            .collect();
        format::table(["ID", "CREATED", "CURRENT"], &[], &rows)
    })?;
    Ok(())
}

async fn add_key(stop: &Stop, repository: &Repository, new: &NewKey) -> Result<String> {
    let source = new.key();
    let Some(key) = settings::read(source, stop).await? else {
        anyhow::bail!("--new-key-secret: only a mover pod can read it; set --namespace")
    };
    stop.whole(repository.add_key(&key)).await
}

fn print_key(options: &Options, id: &str, change: &str) -> Result<()> {
    let value = json!({ "id": id, "state": change, "changed": true });
    print_one(options.print.output, &value, |_| format!("key {id} {change}"))?;
    Ok(())
}
