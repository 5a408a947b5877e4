//! `backup copy`: backups and their chains, chunk by chunk, to another repository, which may have
//! another key. A copy has an id of its own and records where it comes from; an interrupted copy
//! continues.

use anyhow::{Context, Result, ensure};

use super::attempt::{self, Attempt};
use super::chunk::{Coded, Coder};
use super::manifest::{Base, Manifest, Page};
use super::merge::Pages;
use super::repository::{Inventory, Repository};
use crate::client::progress;
use crate::client::stop::Stop;

/// The sound backup of a repository that is a copy of this one, or that this is a copy of.
fn same<'i>(inventory: &'i Inventory, backup: &Manifest) -> Option<&'i Manifest> {
    let same = |one: &&Manifest| one.origin() == backup.origin() && inventory.is_sound(one);
    inventory.backups.iter().find(same)
}

/// Copies one backup, unless the other repository has it. Returns whether it was copied.
///
/// # Errors
/// It is damaged, or its base is not in the other repository.
pub async fn copy(
    from: &Repository,
    to: &Repository,
    backup: &Manifest,
    stop: &Stop,
) -> Result<bool> {
    let id = &backup.id;
    let inventory = to.inventory().await?;
    if let Some(existing) = same(&inventory, backup) {
        let what = [&existing.subject, &backup.subject].map(|subject| &subject.snapshot_id);
        ensure!(what[0] == what[1], "{} has another backup {}", to.location(), existing.id);
        if attempt::exist(to, &inventory, &[existing]).await? {
            return Ok(false);
        }
    }
    let mut subject = backup.subject.clone();
    if let Some(base) = &subject.base {
        // The copy of the base was looked up or made before.
        let bases = inventory.backups.iter().filter(|one| inventory.is_sound(one));
        let mut copied = bases.filter(|one| one.subject.snapshot_id == base.snapshot_id);
        let wanted = from.manifest(&base.backup).await?;
        let wanted = wanted.with_context(|| format!("backup {} is missing", base.backup))?;
        let copied = copied.rfind(|one| one.origin() == wanted.origin());
        let copied = copied.with_context(|| {
            format!("{} does not have the base of backup {id}; repeat the command", to.location())
        })?;
        subject.base = Some(Base { backup: copied.id.clone(), ..base.clone() });
    }
    let origin = Some(backup.origin().clone());
    let mut attempt = Attempt::new(to, &inventory, subject, origin).await?;
    attempt.begin().await?;
    let begin = attempt.writer.end();
    let mut pages = Pages::new(from, backup);
    let mut copied = 0;
    while let Some(page) = stop.wait(pages.next()).await? {
        copied += page.chunks.iter().map(|chunk| chunk.bytes).sum::<u64>();
        progress::report_data(copied, page.end, backup.subject.capacity_bytes);
        // The end of the last chunk is not always that of its page.
        if page.chunks.last().is_none_or(|last| last.end() <= begin) {
            continue;
        }
        let coders = [from.coder(&page.backup)?, to.coder(&attempt.intent.id)?];
        let pack = if page.pack_bytes > 0 { from.pack(&page).await? } else { Vec::new() };
        for coded in recode(coders, page, pack).await? {
            let end = coded.chunk.end();
            if end > begin {
                attempt.writer.push(coded, end).await?;
            }
        }
    }
    let is_same = |manifest: &Manifest| {
        let sums =
            [&manifest.totals, &backup.totals].map(|totals| (totals.data_bytes, totals.zero_bytes));
        ensure!(sums[0] == sums[1], "the copy of backup {id} has other sums; it is not visible");
        Ok(())
    };
    attempt.publish_if(backup.created.clone(), is_same).await?;
    Ok(true)
}

/// The chunks of a page as the other repository stores them, each verified.
async fn recode(coders: [Coder; 2], page: Page, pack: Vec<u8>) -> Result<Vec<Coded>> {
    let [from, to] = coders;
    let work = move || {
        let mut recoded = Vec::with_capacity(page.chunks.len());
        for chunk in page.chunks {
            let bytes = from.decode_within(&chunk, &pack)?;
            recoded.push(to.encode(&bytes, chunk.data, chunk.zeros)?);
        }
        Ok(recoded)
    };
    super::blocking(work).await
}
