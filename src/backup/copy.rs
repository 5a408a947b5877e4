//! `backup copy`: backups and their chains, chunk by chunk, to another repository, which may have
//! another key. An interrupted copy continues.

use anyhow::{Context, Result, ensure};

use super::chunk::{Coded, Coder};
use super::document::VERSION;
use super::manifest::{Intent, Manifest};
use super::merge::Pages;
use super::repository::Repository;
use super::repository::lock::Lock;
use super::writer::Writer;
use crate::client::progress;
use crate::client::stop::Stop;

/// Copies one backup, unless the other repository has it. Returns whether it was copied.
///
/// # Errors
/// It is damaged, or its base is not in the other repository.
pub async fn copy(
    from: &Repository,
    to: &Repository,
    backup: &Manifest,
    stop: &Stop,
    lock: &mut Lock,
) -> Result<bool> {
    let id = &backup.id;
    if let Some(existing) = to.manifest(id).await? {
        ensure!(existing.subject == backup.subject, "{} has another backup {id}", to.location());
        return Ok(false);
    }
    lock.claim(id).await?;
    let intent = Intent {
        version: VERSION,
        id: id.clone(),
        begun: humantime::format_rfc3339_millis(std::time::SystemTime::now()).to_string(),
        subject: backup.subject.clone(),
    };
    to.put_intent(&intent).await?;
    let mut writer = Writer::resume(to, &intent).await?;
    let coders = [from.coder(id)?, to.coder(id)?];
    let mut pages = Pages::new(from, backup);
    let begin = writer.end();
    while let Some(page) = stop.wait(pages.next()).await? {
        lock.check()?;
        progress::report(page.end, backup.subject.capacity_bytes);
        // The end of the last chunk is not always that of its page.
        if page.chunks.last().is_none_or(|last| last.end() <= begin) {
            continue;
        }
        let pack = if page.pack_bytes > 0 { from.pack(&page).await? } else { Vec::new() };
        for coded in recode(&coders, page, pack).await? {
            let end = coded.chunk.end();
            if end > begin {
                writer.push(coded, end).await?;
            }
        }
    }
    lock.check()?;
    let manifest = writer.finish(&intent, backup.created.clone()).await?;
    let same =
        [&manifest.totals, &backup.totals].map(|totals| (totals.data_bytes, totals.zero_bytes));
    ensure!(same[0] == same[1], "the copy of backup {id} has other sums; it was not made visible");
    to.publish(&manifest).await?;
    Ok(true)
}

/// The chunks of a page as the other repository stores them, each verified.
async fn recode(
    coders: &[Coder; 2],
    page: super::manifest::Page,
    pack: Vec<u8>,
) -> Result<Vec<Coded>> {
    let [from, to] = coders.clone();
    let work = move || {
        let mut recoded = Vec::with_capacity(page.chunks.len());
        for chunk in page.chunks {
            let at = usize::try_from(chunk.at)?;
            let stored = pack.get(at..at + usize::try_from(chunk.stored)?);
            let stored = stored.context("a chunk is outside of its pack")?.to_vec();
            let bytes = from.decode(&chunk, stored)?;
            recoded.push(to.encode(&bytes, chunk.data, chunk.zeros)?);
        }
        Ok(recoded)
    };
    tokio::task::spawn_blocking(work).await.context("the task panicked")?
}
