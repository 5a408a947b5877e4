//! `backup prune`: which backups stay, and the removal of the others. A backup stays if a rule
//! keeps it, or if one that stays needs it: its chain, and the other members of its set.

use std::collections::HashSet;
use std::time::{Duration, SystemTime};

use anyhow::{Result, bail};

use super::manifest::{BackupId, Manifest};
use super::repository::lock::Lock;
use super::repository::{Inventory, Repository};
use crate::client::stop::Stop;

/// After this time an interrupted backup is removed, and not continued.
const UNFINISHED: Duration = Duration::from_secs(86_400);

/// What to keep, of each volume.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    pub keep_last: Option<usize>,
    pub keep_within: Option<Duration>,
}

/// What a prune removes, newest first.
#[derive(Debug, Default, PartialEq)]
pub struct Plan {
    pub remove: Vec<BackupId>,
    /// Kept only because another backup needs them.
    pub needed: Vec<BackupId>,
    /// Interrupted backups and remains of removed ones.
    pub unfinished: Vec<BackupId>,
}

/// # Errors
/// A manifest is damaged, so what it needs is not known.
pub fn plan(inventory: &Inventory, rules: Rules, now: SystemTime) -> Result<Plan> {
    if let Some((id, error)) = inventory.damaged.first() {
        bail!("nothing is removed, because what backup {id} needs is not known: {error:#}");
    }
    let wanted = wanted(inventory, rules, now);
    let kept = with_needed(inventory, wanted.clone());
    let mut plan = Plan::default();
    for backup in inventory.backups.iter().rev() {
        if !kept.contains(&backup.id) {
            plan.remove.push(backup.id.clone());
        } else if !wanted.contains(&backup.id) {
            plan.needed.push(backup.id.clone());
        }
    }
    for (id, intent) in &inventory.unfinished {
        let begun = intent.as_ref().and_then(|intent| humantime::parse_rfc3339(&intent.begun).ok());
        if begun.is_none_or(|begun| begun + UNFINISHED < now) {
            plan.unfinished.push(id.clone());
        }
    }
    Ok(plan)
}

/// What the rules keep. The members of a set count as one backup.
fn wanted(inventory: &Inventory, rules: Rules, now: SystemTime) -> HashSet<BackupId> {
    let mut wanted = HashSet::new();
    let mut counts = std::collections::HashMap::<&str, usize>::new();
    for backup in inventory.backups.iter().rev() {
        let count = counts.entry(&backup.subject.volume_id).or_default();
        *count += 1;
        let is_last = rules.keep_last.is_some_and(|keep| *count <= keep);
        let age = humantime::parse_rfc3339(&backup.created)
            .ok()
            .map(|created| now.duration_since(created));
        // A time in the future is recent, and one that cannot be read is not old.
        let is_recent = rules.keep_within.is_some_and(|within| match age {
            Some(Ok(age)) => age <= within,
            Some(Err(_)) | None => true,
        });
        if is_last || is_recent {
            wanted.insert(backup.id.clone());
        }
    }
    wanted
}

/// What is kept, and all that it needs.
fn with_needed(inventory: &Inventory, mut kept: HashSet<BackupId>) -> HashSet<BackupId> {
    let set = |backup: &Manifest| {
        backup.subject.group.as_ref().map(|group| group.group_snapshot_id.clone())
    };
    loop {
        let sets: HashSet<_> =
            inventory.backups.iter().filter(|one| kept.contains(&one.id)).filter_map(set).collect();
        let before = kept.len();
        // A base is older than what counts from it.
        for backup in inventory.backups.iter().rev() {
            if set(backup).is_some_and(|set| sets.contains(&set)) {
                kept.insert(backup.id.clone());
            }
            if kept.contains(&backup.id)
                && let Some(base) = &backup.subject.base
            {
                kept.insert(base.backup.clone());
            }
        }
        if kept.len() == before {
            return kept;
        }
    }
}

/// Removes what the plan names. Newest first, so that an interruption leaves no backup without its
/// base.
pub async fn remove(repository: &Repository, plan: &Plan, stop: &Stop, lock: &Lock) -> Result<()> {
    for id in plan.remove.iter().chain(&plan.unfinished) {
        stop.check()?;
        lock.check()?;
        repository.remove(id).await?;
    }
    repository.sweep()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backup::manifest::{Base, samples};

    const DAY: Duration = Duration::from_secs(86_400);

    /// Backups of one volume, one a day, each with the number of its base.
    fn inventory(bases: &[Option<usize>]) -> Inventory {
        let backup = |(number, base): (usize, &Option<usize>)| {
            let mut backup = samples::backup(number);
            backup.created = format!("2026-01-0{}T00:00:00Z", number + 1);
            backup.subject.base = base.map(|base| Base {
                backup: samples::id(base),
                snapshot_id: format!("s{base}"),
                expires: None,
            });
            backup
        };
        Inventory { backups: bases.iter().enumerate().map(backup).collect(), ..Default::default() }
    }

    fn planned(
        inventory: &Inventory,
        keep_last: Option<usize>,
        days: Option<u32>,
    ) -> [Vec<usize>; 2] {
        let now = humantime::parse_rfc3339("2026-01-05T01:00:00Z").unwrap();
        let rules = Rules { keep_last, keep_within: days.map(|days| DAY * days) };
        let plan = plan(inventory, rules, now).unwrap();
        let number = |id: &BackupId| (0..5).find(|number| samples::id(*number) == *id).unwrap();
        [plan.remove, plan.needed].map(|ids| ids.iter().map(number).collect())
    }

    #[test]
    fn what_a_kept_backup_needs_is_kept() {
        let two_chains = inventory(&[None, Some(0), None, Some(2), Some(3)]);
        assert_eq!(planned(&two_chains, Some(1), None), [vec![1, 0], vec![3, 2]]);
        assert_eq!(planned(&two_chains, Some(3), None), [vec![1, 0], vec![]]);
        assert_eq!(planned(&two_chains, Some(4), None), [vec![], vec![0]]);
        assert_eq!(planned(&two_chains, None, Some(1)), [vec![1, 0], vec![3, 2]]);
        assert_eq!(planned(&two_chains, Some(1), Some(90)), [Vec::<usize>::new(), Vec::new()]);
        assert_eq!(planned(&two_chains, Some(0), None), [vec![4, 3, 2, 1, 0], vec![]]);
    }

    #[test]
    fn each_volume_keeps_its_own_and_a_set_stays_whole() {
        let mut both = inventory(&[None, None, None, None]);
        for number in [0, 1] {
            both.backups[number].subject.volume_id = "w".to_owned();
        }
        assert_eq!(planned(&both, Some(1), None), [vec![2, 0], vec![]]);
        for number in [0, 3] {
            both.backups[number].subject.group = Some(samples::group());
        }
        assert_eq!(planned(&both, Some(1), None), [vec![2], vec![0]]);
    }

    #[test]
    fn a_damaged_manifest_keeps_everything() {
        let mut damaged = inventory(&[None]);
        damaged.damaged.push((samples::id(1), anyhow::anyhow!("x")));
        let rules = Rules { keep_last: Some(1), keep_within: None };
        assert!(plan(&damaged, rules, SystemTime::now()).is_err());
    }
}
