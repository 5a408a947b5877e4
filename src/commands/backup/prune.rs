//! `backup prune`: which backups stay, and the removal of the others. A backup stays if a rule
//! keeps it, or if one that stays needs it: its chain, and the other members of its set. The last
//! backup of a volume that can be restored stays in any case, unless the rules say so.
//!
//! What cannot be restored does not count for a rule, so it never takes the place of what can.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail, ensure};

use super::document::nonce;
use super::manifest::{BackupId, Manifest};
use super::protocol::{self, Family, Outcome, Removal};
use super::repository::names::{PROBE, mark};
use super::repository::{Ended, Inventory, Known, Repository};
use super::retention::Rules;

/// An attempt whose newest object is older, by the clock of the store, is taken for abandoned. If it
/// is not, its writer notices.
const ABANDONED: Duration = Duration::from_secs(86_400);

/// What a prune removes, newest first.
#[derive(Debug, Default, PartialEq)]
pub struct Plan {
    pub remove: Vec<BackupId>,
    /// Kept only because another backup needs them.
    pub needed: Vec<BackupId>,
    /// Interrupted attempts and remains of removed ones.
    pub unfinished: Vec<BackupId>,
}

/// `now`: by the clock of the store.
pub fn plan(inventory: &Inventory, rules: Rules, now: SystemTime) -> Plan {
    let wanted = rules.wanted(inventory);
    let kept = with_needed(inventory, wanted.clone());
    let mut targets: BTreeSet<&BackupId> = inventory.backups.iter().map(|one| &one.id).collect();
    targets.retain(|id| !kept.contains(id));
    let abandoned: Vec<&BackupId> = abandoned(inventory, now).collect();
    targets.extend(&abandoned);
    without_referred(inventory, &mut targets);
    let mut plan = Plan::default();
    for backup in inventory.backups.iter().rev() {
        if targets.contains(&backup.id) {
            plan.remove.push(backup.id.clone());
        } else if !wanted.contains(&backup.id) {
            plan.needed.push(backup.id.clone());
        }
    }
    plan.unfinished = abandoned.into_iter().filter(|id| targets.contains(id)).cloned().collect();
    plan
}

/// The removal of these attempts, whatever they are.
///
/// # Errors
/// One does not exist, others need it, or it is the last backup of its volume and `remove_last` is
/// not set.
pub fn delete(inventory: &Inventory, ids: &[BackupId], remove_last: bool) -> Result<Plan> {
    let mut targets: BTreeSet<&BackupId> = ids.iter().collect();
    for id in ids {
        ensure!(inventory.listing.attempts.contains_key(id), "there is no backup {id}");
    }
    without_referred(inventory, &mut targets);
    for id in ids {
        ensure!(targets.contains(id), "other backups need backup {id}; delete them first");
    }
    let stays = |one: &&Manifest| inventory.is_sound(one) && !targets.contains(&one.id);
    let left: HashSet<&str> =
        inventory.backups.iter().filter(stays).map(|one| one.subject.volume_id.as_str()).collect();
    for backup in inventory.backups.iter().filter(|one| targets.contains(&one.id)) {
        let volume = backup.subject.volume_id.as_str();
        if inventory.is_sound(backup) && !left.contains(volume) && !remove_last {
            bail!(
                "{} is the last backup of volume {volume} that can be restored; set --remove-last",
                backup.id
            );
        }
    }
    let is_backup = |id: &BackupId| inventory.backups.iter().any(|one| one.id == *id);
    let (remove, unfinished) = ids.iter().cloned().partition(is_backup);
    Ok(Plan { remove, needed: Vec::new(), unfinished })
}

/// Attempts without a manifest that nothing was put to for a day, and what removals left.
fn abandoned(inventory: &Inventory, now: SystemTime) -> impl Iterator<Item = &BackupId> {
    inventory.unfinished.iter().map(|(id, _)| id).filter(move |id| {
        let found = inventory.listing.attempts.get(id);
        let age = found.and_then(|found| now.duration_since(found.modified?).ok());
        age.is_some_and(|age| age >= ABANDONED) || inventory.listing.is_marked(id)
    })
}

/// Spares what others need, by the names of their intents.
fn without_referred(inventory: &Inventory, targets: &mut BTreeSet<&BackupId>) {
    loop {
        let before = targets.len();
        for (id, attempt) in &inventory.listing.attempts {
            if !targets.contains(id) {
                let referred = attempt.intents.iter().flat_map(|intent| intent.ids());
                referred.for_each(|needed| {
                    targets.remove(needed);
                });
            }
        }
        if targets.len() == before {
            return;
        }
    }
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
        // A base comes before what counts from it.
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

impl Plan {
    /// The plan of the protocol: also on what the removal relies, and what belongs together.
    fn for_protocol(&self, inventory: &Inventory) -> protocol::Plan<String> {
        let mut plan = protocol::Plan::default();
        plan.targets.extend(self.remove.iter().chain(&self.unfinished).map(ToString::to_string));
        plan.unfinished.extend(self.unfinished.iter().map(ToString::to_string));
        let mut families = BTreeMap::<&str, Family<String>>::new();
        let mut sets = BTreeMap::<&str, BTreeSet<String>>::new();
        for backup in &inventory.backups {
            let id = backup.id.to_string();
            let is_target = plan.targets.contains(&id);
            let none = Family { targets: BTreeSet::new(), keepers: BTreeSet::new() };
            let family = families.entry(&backup.subject.volume_id).or_insert(none);
            if is_target {
                family.targets.insert(id.clone());
                if let Some(group) = &backup.subject.group {
                    sets.entry(&group.group_snapshot_id).or_default().insert(id);
                }
            } else if inventory.is_sound(backup) {
                family.keepers.insert(id);
            }
        }
        plan.families.extend(families.into_values().filter(|family| !family.targets.is_empty()));
        plan.sets.extend(sets.into_values());
        plan
    }
}

/// Plans a removal, and performs it. Returns what was removed.
///
/// # Errors
/// The repository cannot be read or written, or does not list what was written.
pub async fn run(
    repository: &Repository,
    planned: impl FnOnce(&Inventory, SystemTime) -> Result<Plan>,
) -> Result<Plan> {
    let owner = nonce()?;
    let probe = mark(PROBE, &owner);
    repository.put_mark(&probe).await?;
    let inventory = repository.inventory().await?;
    let now = inventory.listing.marks.get(&(PROBE.to_owned(), owner.clone())).copied();
    repository.store.delete(&probe).await?;
    let now = now.with_context(|| {
        format!(
            "{} does not list an object that was just written, so nothing can be removed",
            repository.location()
        )
    })?;
    let plan = planned(&inventory, now)?;
    let mut removal = Removal::new(owner, plan.for_protocol(&inventory));
    let Ended::With(Outcome::Removed(gone)) =
        repository.run(&mut removal, Known::default()).await?
    else {
        bail!("the removal did not end");
    };
    let gone: HashSet<_> = gone.into_iter().collect();
    tidy(repository, &inventory, now).await?;
    repository.update_index(&inventory, &gone).await;
    let Plan { remove, mut needed, mut unfinished } = plan;
    let is_gone = |id: &BackupId| gone.contains(id.as_str());
    unfinished.retain(is_gone);
    let (remove, saved): (Vec<_>, Vec<_>) = remove.into_iter().partition(is_gone);
    needed.extend(saved);
    Ok(Plan { remove, needed, unfinished })
}

/// Removes what killed processes left outside of attempts, and makes the reserve again.
async fn tidy(repository: &Repository, inventory: &Inventory, now: SystemTime) -> Result<()> {
    let before = now - ABANDONED;
    for ((on, by), put) in &inventory.listing.marks {
        if on == PROBE && *put < before {
            repository.store.delete(&mark(on, by)).await?;
        }
    }
    let ids: HashSet<&str> = inventory.listing.attempts.keys().map(BackupId::as_str).collect();
    repository.sweep(before, &ids);
    repository.restore_reserve().await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backup::manifest::samples;

    const DAY: Duration = Duration::from_secs(86_400);

    /// Backups of one volume, one a day, each with the number of its base.
    fn inventory(bases: &[Option<usize>]) -> Inventory {
        let backup = |(number, base): (usize, &Option<usize>)| {
            let created = format!("2026-01-0{}T00:00:00Z", number + 1);
            Manifest { created, ..samples::backup_from(number, *base) }
        };
        Inventory { backups: bases.iter().enumerate().map(backup).collect(), ..Default::default() }
    }

    fn last(count: usize) -> Rules {
        Rules { keep_last: Some(count), ..Rules::default() }
    }

    /// What is removed, and what is only needed.
    fn planned(inventory: &Inventory, rules: Rules) -> [Vec<usize>; 2] {
        // Years later, times still count from the newest backup.
        let now = humantime::parse_rfc3339("2030-01-05T01:00:00Z").unwrap();
        let plan = plan(inventory, rules, now);
        let number = |id: &BackupId| (0..5).find(|number| samples::id(*number) == *id).unwrap();
        [plan.remove, plan.needed].map(|ids| ids.iter().map(number).collect())
    }

    #[test]
    fn what_a_kept_backup_needs_is_kept() {
        let within = |days| Some(DAY * days);
        for (rules, removed, needed) in [
            (last(1), &[1, 0][..], &[3, 2][..]),
            (last(3), &[1, 0], &[]),
            (last(4), &[], &[0]),
            (Rules { keep_within: within(1), ..Rules::default() }, &[1, 0], &[2]),
            (Rules { keep_within: within(90), ..last(1) }, &[], &[]),
            (Rules { remove_last: true, ..last(0) }, &[4, 3, 2, 1, 0], &[]),
        ] {
            let two_chains = inventory(&[None, Some(0), None, Some(2), Some(3)]);
            assert_eq!(planned(&two_chains, rules), [removed, needed], "{rules:?}");
        }
    }

    #[test]
    fn each_volume_keeps_its_own_and_a_set_stays_whole() {
        let mut both = inventory(&[None, None, None, None]);
        for number in [0, 1] {
            both.backups[number].subject.volume_id = "w".to_owned();
        }
        assert_eq!(planned(&both, last(1)), [vec![2, 0], vec![]]);
        for number in [0, 3] {
            both.backups[number].subject.group = Some(samples::group());
        }
        assert_eq!(planned(&both, last(1)), [vec![2], vec![0]]);
    }

    #[test]
    fn the_last_restorable_backup_stays_and_damage_does_not_count() {
        let mut three = inventory(&[None, None, None]);
        let removed = |inventory: &Inventory, rules| {
            let [removed, _] = planned(inventory, rules);
            removed
        };
        assert_eq!(removed(&three, last(0)), [1, 0]);
        assert_eq!(removed(&three, Rules { remove_last: true, ..last(0) }), [2, 1, 0]);
        let within = Rules { keep_within: Some(DAY), ..Rules::default() };
        assert_eq!(removed(&three, within), [0]);
        three.broken.insert(samples::id(2), "lost".to_owned());
        assert_eq!(removed(&three, last(1)), [0]);
        for number in [0, 1] {
            three.broken.insert(samples::id(number), "lost".to_owned());
        }
        // Nothing can be restored, so nothing is removed.
        assert!(removed(&three, last(1)).is_empty());
    }
}
