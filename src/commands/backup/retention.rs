//! The rules of `backup prune`: which backups of a volume stay. A rule counts from the newest
//! backup, so an old repository loses nothing, and only backups that can be restored.
//!
//! Newest means: by the time of the snapshot, and later than the base. The time when a backup was
//! made has no part in it: a copy, or a backup of an old snapshot, is as old as its data.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Result, ensure};
use clap::Args;

use super::manifest::{BackupId, Manifest};
use super::repository::Inventory;

const DAY: u64 = 86_400;

/// What to keep, of each volume. A backup stays if one of the rules keeps it.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct Rules {
    /// Keep the newest N backups of each volume
    #[arg(long, value_name = "N", required_unless_present_any = ["keep_within", "keep_daily", "keep_weekly", "keep_monthly", "keep_yearly"])]
    pub keep_last: Option<usize>,
    /// Keep backups whose snapshot is not older than this before the newest one
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub keep_within: Option<Duration>,
    /// Keep the newest backup of each of the last N days (UTC) that have one
    #[arg(long, value_name = "N")]
    pub keep_daily: Option<usize>,
    /// The same for weeks, which begin on Monday
    #[arg(long, value_name = "N")]
    pub keep_weekly: Option<usize>,
    /// The same for months
    #[arg(long, value_name = "N")]
    pub keep_monthly: Option<usize>,
    /// The same for years
    #[arg(long, value_name = "N")]
    pub keep_yearly: Option<usize>,
    /// Also remove the last restorable backup of a volume, if no rule keeps it
    #[arg(long)]
    pub remove_last: bool,
}

/// A rule that keeps the newest backup of each of some periods.
struct Periodic {
    left: usize,
    /// The number of the period that has a time.
    number: fn(SystemTime) -> u64,
    /// The period of which a backup is kept.
    last: Option<u64>,
}

impl Rules {
    /// # Errors
    /// They keep nothing, and the last backups may not go.
    pub fn check(&self) -> Result<()> {
        let keeps = self.counts().iter().any(|(_, count)| count.is_some_and(|count| count > 0));
        ensure!(
            keeps || self.keep_within.is_some() || self.remove_last,
            "the rules keep no backup; set --remove-last to remove all of them"
        );
        Ok(())
    }

    /// The same rules as arguments.
    pub fn flags(&self) -> Vec<String> {
        let counts = self.counts().into_iter();
        let counts = counts.filter_map(|(flag, count)| Some(format!("--{flag}={}", count?)));
        let within = self.keep_within.map(humantime::format_duration);
        let within = within.map(|time| format!("--keep-within={time}"));
        counts.chain(within).chain(self.remove_last.then(|| "--remove-last".to_owned())).collect()
    }

    fn counts(&self) -> [(&'static str, Option<usize>); 5] {
        [
            ("keep-last", self.keep_last),
            ("keep-daily", self.keep_daily),
            ("keep-weekly", self.keep_weekly),
            ("keep-monthly", self.keep_monthly),
            ("keep-yearly", self.keep_yearly),
        ]
    }

    /// The backups that the rules keep.
    pub fn wanted(&self, inventory: &Inventory) -> HashSet<BackupId> {
        let mut wanted = HashSet::new();
        for backups in newest_first(inventory).values() {
            self.add_wanted(inventory, backups, &mut wanted);
        }
        wanted
    }

    /// Of one volume.
    fn add_wanted(
        &self,
        inventory: &Inventory,
        backups: &[Dated<'_>],
        wanted: &mut HashSet<BackupId>,
    ) {
        let mut periodic = [
            (self.keep_daily, day as fn(SystemTime) -> u64),
            (self.keep_weekly, week),
            (self.keep_monthly, month),
            (self.keep_yearly, year),
        ]
        .map(|(count, number)| Periodic { left: count.unwrap_or(0), number, last: None });
        let newest = backups.iter().find_map(|one| one.time);
        let mut met = 0;
        for Dated { backup, time, .. } in backups {
            // A time that cannot be read is not old.
            let age = newest.zip(*time).and_then(|(newest, time)| newest.duration_since(time).ok());
            let is_recent =
                self.keep_within.is_some_and(|within| age.is_none_or(|age| age <= within));
            let mut is_wanted = is_recent || self.keep_last.is_some_and(|keep| met < keep);
            if inventory.is_sound(backup) {
                is_wanted |= met == 0 && !self.remove_last;
                met += 1;
                for rule in &mut periodic {
                    is_wanted |= time.is_some_and(|time| rule.keeps(time));
                }
            }
            if is_wanted {
                wanted.insert(backup.id.clone());
            }
        }
    }
}

impl Periodic {
    fn keeps(&mut self, time: SystemTime) -> bool {
        let number = Some((self.number)(time));
        let keeps = self.left > 0 && self.last != number;
        if keeps {
            self.left -= 1;
            self.last = number;
        }
        keeps
    }
}

fn day(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() / DAY)
}

fn week(time: SystemTime) -> u64 {
    // The epoch was a Thursday.
    (day(time) + 3) / 7
}

fn month(time: SystemTime) -> u64 {
    let text = humantime::format_rfc3339_seconds(time).to_string();
    year(time) * 12 + text.get(5..7).and_then(|month| month.parse().ok()).unwrap_or(0)
}

fn year(time: SystemTime) -> u64 {
    let text = humantime::format_rfc3339_seconds(time).to_string();
    text.get(..4).and_then(|year| year.parse().ok()).unwrap_or(0)
}

/// A backup with its place in time.
#[derive(Clone, Copy)]
struct Dated<'i> {
    backup: &'i Manifest,
    /// Of its snapshot, and not before that of its base.
    time: Option<SystemTime>,
    /// How many backups are before it in its chain.
    depth: usize,
}

/// The backups of each volume, newest first.
fn newest_first(inventory: &Inventory) -> BTreeMap<&str, Vec<Dated<'_>>> {
    let mut known = HashMap::<&BackupId, Dated<'_>>::new();
    let mut volumes = BTreeMap::<&str, Vec<Dated<'_>>>::new();
    // An inventory has bases before what counts from them.
    for backup in &inventory.backups {
        let base = backup.subject.base.as_ref().and_then(|base| known.get(&base.backup));
        let dated = Dated {
            backup,
            time: taken(backup).max(base.and_then(|base| base.time)),
            depth: base.map_or(0, |base| base.depth + 1),
        };
        known.insert(&backup.id, dated);
        volumes.entry(&backup.subject.volume_id).or_default().push(dated);
    }
    for backups in volumes.values_mut() {
        backups.sort_by_key(|one| std::cmp::Reverse((one.time, one.depth, &one.backup.id)));
    }
    volumes
}

/// When the snapshot was taken; if the driver does not report it, when the backup was made.
fn taken(backup: &Manifest) -> Option<SystemTime> {
    let parsed = |text: &str| humantime::parse_rfc3339(text).ok();
    backup.subject.snapshot_created.as_deref().and_then(parsed).or_else(|| parsed(&backup.created))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backup::manifest::samples;

    /// Backups of one volume, each with the time of its snapshot and the number of its base.
    fn inventory(backups: &[(&str, Option<usize>)]) -> Inventory {
        let backup = |(number, (taken, base)): (usize, &(&str, Option<usize>))| {
            let mut backup = samples::backup_from(number, *base);
            backup.created = "2030-01-01T00:00:00Z".to_owned();
            backup.subject.snapshot_created = Some((*taken).to_owned());
            backup
        };
        Inventory {
            backups: backups.iter().enumerate().map(backup).collect(),
            ..Default::default()
        }
    }

    fn kept(inventory: &Inventory, rules: Rules) -> Vec<usize> {
        let wanted = rules.wanted(inventory);
        (0..inventory.backups.len()).filter(|one| wanted.contains(&samples::id(*one))).collect()
    }

    #[test]
    fn the_newest_of_each_day_week_month_and_year_stays() {
        let times = [
            "2024-12-31T23:59:59Z",
            "2025-12-31T12:00:00Z",
            "2026-01-04T10:00:00Z", // a Sunday
            "2026-01-05T00:00:00Z",
            "2026-01-05T23:00:00Z",
            "2026-02-01T00:00:00Z",
        ];
        let all = inventory(&times.map(|time| (time, None)));
        let some = Some(2);
        assert_eq!(kept(&all, Rules { keep_daily: some, ..Rules::default() }), [4, 5]);
        assert_eq!(kept(&all, Rules { keep_daily: Some(3), ..Rules::default() }), [2, 4, 5]);
        assert_eq!(kept(&all, Rules { keep_weekly: Some(3), ..Rules::default() }), [2, 4, 5]);
        assert_eq!(kept(&all, Rules { keep_monthly: Some(3), ..Rules::default() }), [1, 4, 5]);
        assert_eq!(kept(&all, Rules { keep_yearly: some, ..Rules::default() }), [1, 5]);
        assert_eq!(kept(&all, Rules { keep_yearly: Some(9), ..Rules::default() }), [0, 1, 5]);
        let both = Rules { keep_last: Some(1), keep_yearly: Some(3), ..Rules::default() };
        assert_eq!(kept(&all, both), [0, 1, 5]);
    }

    #[test]
    fn the_snapshot_and_not_the_backup_decides_what_is_newest() {
        // The second one is a backup of an older snapshot, or a copy that was made later.
        let late = inventory(&[("2026-01-03T00:00:00Z", None), ("2026-01-01T00:00:00Z", None)]);
        let one = Rules { keep_last: Some(1), ..Rules::default() };
        assert_eq!(kept(&late, one), [0]);
        // An incremental is newer than its base, even if the clock of the driver went back.
        let back = inventory(&[
            ("2026-01-03T00:00:00Z", None),
            ("2026-01-02T00:00:00Z", None),
            ("2026-01-01T00:00:00Z", Some(0)),
        ]);
        assert_eq!(kept(&back, one), [2]);
        let within = Rules { keep_within: Some(Duration::from_secs(DAY)), ..Rules::default() };
        assert_eq!(kept(&back, within), [0, 1, 2]);
        assert_eq!(kept(&inventory(&[("2026", None), ("2026-01-01T00:00:00Z", None)]), one), [0]);
    }

    #[test]
    fn rules_that_keep_nothing_need_a_flag() {
        let none = Rules { keep_last: Some(0), keep_daily: Some(0), ..Rules::default() };
        assert!(none.check().unwrap_err().to_string().contains("--remove-last"));
        Rules { remove_last: true, ..none }.check().unwrap();
        Rules { keep_weekly: Some(1), ..none }.check().unwrap();
        Rules { keep_within: Some(Duration::ZERO), ..none }.check().unwrap();
        let all = Rules { keep_within: Some(Duration::from_secs(DAY)), remove_last: true, ..none };
        let flags = ["--keep-last=0", "--keep-daily=0", "--keep-within=1day", "--remove-last"];
        assert_eq!(all.flags(), flags);
    }
}
