//! `backup verify`: every byte of the repository, read and held against its hash.

use anyhow::{Context, Result};
use tokio::task::JoinSet;

use super::copying::parallel;
use super::manifest::{Manifest, Page};
use super::merge::Pages;
use super::repository::{Inventory, Repository};
use crate::client::progress;
use crate::client::stop::Stop;

/// What a verification found.
#[derive(Debug, Default)]
pub struct Report {
    pub backups: usize,
    pub chunks: u64,
    pub stored_bytes: u64,
    /// Each names a backup and what is wrong with it.
    pub problems: Vec<String>,
}

/// Verifies `backups`, and that the chain of each is whole.
///
/// # Errors
/// The verification could not be finished. Damage is not an error, but a problem of the report.
pub async fn verify(
    repository: &Repository,
    inventory: &Inventory,
    backups: &[Manifest],
    stop: &Stop,
) -> Result<Report> {
    let mut report = Report { backups: backups.len(), ..Report::default() };
    let total = backups.iter().map(|backup| backup.totals.stored_bytes).sum();
    for backup in backups {
        if let Err(error) = inventory.chain(backup) {
            report.problems.push(format!("{error:#}"));
        }
        if let Err(error) = repository.check_intents(inventory, backup).await {
            report.problems.push(format!("backup {}: {error:#}", backup.id));
        }
        let read = contents(repository, backup, stop, &mut report, total);
        if let Err(error) = read.await {
            stop.check()?;
            report.problems.push(format!("backup {}: {error:#}", backup.id));
        }
    }
    Ok(report)
}

/// The pages, packs and chunks of a backup. Stops at a page that is damaged; reports each damaged
/// pack.
async fn contents(
    repository: &Repository,
    backup: &Manifest,
    stop: &Stop,
    report: &mut Report,
    total: u64,
) -> Result<()> {
    let mut pages = Pages::new(repository, backup);
    let mut jobs = JoinSet::new();
    loop {
        let page = stop.wait(pages.next()).await;
        let is_last = !matches!(page, Ok(Some(_)));
        while jobs.len() >= parallel().min(4) || (is_last && !jobs.is_empty()) {
            let Some(job) = stop.wait(async { Ok(jobs.join_next().await) }).await? else { break };
            let (stored, chunks, outcome): (u64, u64, Result<()>) =
                job.context("the reading task panicked")?;
            report.stored_bytes += stored;
            report.chunks += chunks;
            if let Err(error) = outcome {
                report.problems.push(format!("backup {}: {error:#}", backup.id));
            }
            progress::report(report.stored_bytes, total);
        }
        let Some(page) = page? else { return Ok(()) };
        let (repository, id) = (repository.clone(), page.backup.clone());
        jobs.spawn(async move {
            let (stored, chunks) = (page.pack_bytes, page.chunks.len() as u64);
            let coder = repository.coder(&id);
            (stored, chunks, async { pack(&repository, coder?, page).await }.await)
        });
    }
}

/// A pack: its hash, and those of its chunks.
async fn pack(repository: &Repository, coder: super::chunk::Coder, page: Page) -> Result<()> {
    if page.pack_bytes == 0 {
        return Ok(());
    }
    let pack = repository.pack(&page).await?;
    let work = move || {
        for chunk in &page.chunks {
            coder.decode_within(chunk, &pack).with_context(|| format!("page {}", page.number))?;
        }
        Ok(())
    };
    super::blocking(work).await
}
