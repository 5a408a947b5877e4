//! How backups are printed: as rows of `backup list`, as facts of `backup show`, and as JSON.

use std::collections::HashMap;
use std::time::SystemTime;

use anyhow::{Result, ensure};
use serde::Serialize;

use super::manifest::Manifest;
use super::repository::{Inventory, Repository};
use super::{attempt, group};
use crate::client::{Output, format};
use common::quantity;

/// A backup as JSON.
#[derive(Debug, Serialize)]
pub struct Entry {
    pub id: String,
    created: String,
    /// `full` or `incremental`.
    kind: &'static str,
    volume: String,
    volume_id: String,
    snapshot: String,
    snapshot_id: String,
    snapshot_created: Option<String>,
    capacity_bytes: u64,
    data_bytes: u64,
    zero_bytes: u64,
    stored_bytes: u64,
    extents: u64,
    /// The backup that it counts from.
    base: Option<String>,
    base_snapshot_id: Option<String>,
    base_expires: Option<String>,
    full_because: Option<String>,
    group_snapshot: Option<String>,
    group_snapshot_id: Option<String>,
    /// Whether all members of its set exist; a backup outside of a set has no value.
    group_complete: Option<bool>,
    /// Why it cannot be restored, or be a base, as far as a list shows.
    problem: Option<String>,
}

impl Entry {
    pub fn new(backup: &Manifest, inventory: &Inventory) -> Self {
        let Manifest { id, created, subject, totals, .. } = backup;
        let base = subject.base.as_ref();
        let group = subject.group.as_ref();
        Self {
            id: id.to_string(),
            created: created.clone(),
            kind: kind(backup),
            volume: subject.volume.clone(),
            volume_id: subject.volume_id.clone(),
            snapshot: subject.snapshot.clone(),
            snapshot_id: subject.snapshot_id.clone(),
            snapshot_created: subject.snapshot_created.clone(),
            capacity_bytes: subject.capacity_bytes,
            data_bytes: totals.data_bytes,
            zero_bytes: totals.zero_bytes,
            stored_bytes: totals.stored_bytes,
            extents: totals.extents,
            base: base.map(|base| base.backup.to_string()),
            base_snapshot_id: base.map(|base| base.snapshot_id.clone()),
            base_expires: base.and_then(|base| base.expires.clone()),
            full_because: subject.full_because.clone(),
            group_snapshot: group.map(|group| group.group_snapshot.clone()),
            group_snapshot_id: group.map(|group| group.group_snapshot_id.clone()),
            group_complete: group.map(|group| group::is_complete(inventory, group)),
            problem: inventory.problem(backup),
        }
    }

    /// The facts of one backup, and `more`.
    pub fn facts(&self, more: impl IntoIterator<Item = (&'static str, String)>) -> String {
        let mut facts = vec![
            ("backup", self.id.clone()),
            (
                "kind",
                match &self.base {
                    Some(base) => format!("incremental, from {base}"),
                    None => "full".to_owned(),
                },
            ),
        ];
        if let Some(problem) = &self.problem {
            facts.push(("problem", format::cell(problem)));
        }
        if let Some(because) = &self.full_because {
            facts.push(("because", format::cell(because)));
        }
        facts.extend([
            ("created", self.created.clone()),
            (
                "volume",
                format!(
                    "{} ({})",
                    format::cell(&self.volume),
                    quantity::format(self.capacity_bytes)
                ),
            ),
            ("snapshot", format::cell(&self.snapshot_id)),
        ]);
        if let Some(group) = &self.group_snapshot {
            let state = if self.group_complete == Some(true) { "complete" } else { "incomplete" };
            facts.push(("group", format!("{}, {state}", format::cell(group))));
        }
        if let Some(expires) = &self.base_expires {
            facts.push(("base until", expires.clone()));
        }
        facts.push(("data", format::bytes(self.data_bytes)));
        if self.zero_bytes > 0 {
            facts.push(("zeros", format::bytes(self.zero_bytes)));
        }
        facts.push(("stored", format::bytes(self.stored_bytes)));
        facts.extend(more);
        format::facts(&facts)
    }
}

fn kind(backup: &Manifest) -> &'static str {
    if backup.subject.is_full() { "full" } else { "incremental" }
}

/// Prints all backups, oldest first.
pub fn list(inventory: &Inventory, volume: Option<&str>, output: Output) -> Result<()> {
    let wanted = |backup: &&Manifest| {
        let subject = &backup.subject;
        volume.is_none_or(|volume| subject.volume == volume || subject.volume_id == volume)
    };
    let backups = inventory.backups.iter().filter(wanted);
    let entries: Vec<_> = backups.map(|backup| Entry::new(backup, inventory)).collect();
    format::print_rows(output, &entries, |entries| table(entries, inventory, SystemTime::now()))
}

/// Prints the backups of a complete set whose chains exist.
pub async fn set(repository: &Repository, reference: &str, output: Output) -> Result<()> {
    let inventory = repository.inventory().await?;
    let backups = group::find(&inventory, reference)?;
    backups.iter().try_for_each(|backup| inventory.chain(backup).map(drop))?;
    // Others rely on this to know that a set is complete.
    ensure!(
        attempt::exist(repository, &inventory, &backups).await?,
        "a prune removes members of the set {reference:?}, or they are damaged"
    );
    let entries: Vec<_> = backups.iter().map(|backup| Entry::new(backup, &inventory)).collect();
    format::print_rows(output, &entries, |entries| {
        entries.iter().map(|entry| entry.facts([])).collect::<Vec<_>>().join("\n\n")
    })
}

fn table(entries: &[Entry], inventory: &Inventory, now: SystemTime) -> String {
    // Of a chain, the position says more than the id of the base.
    let mut depth: HashMap<&str, usize> = HashMap::new();
    let rows: Vec<_> = entries
        .iter()
        .map(|entry| {
            let base = entry.base.as_deref();
            let position =
                base.map_or(0, |base| depth.get(base).map_or(1, |position| position + 1));
            depth.insert(&entry.id, position);
            let mut kind = match position {
                0 => "full".to_owned(),
                position => format!("incremental {position}"),
            };
            if inventory.broken.keys().any(|id| id.as_str() == entry.id) {
                kind.push_str(", damaged");
            } else if entry.problem.is_some() {
                kind.push_str(", being removed");
            }
            let (created, age) = times(&entry.created, now);
            [
                entry.id.clone(),
                entry.volume.clone(),
                entry.snapshot.clone(),
                kind,
                created,
                age,
                quantity::format(entry.data_bytes),
                quantity::format(entry.stored_bytes),
            ]
        })
        .chain(inventory.damaged.iter().map(|(id, _)| {
            let mut row = [const { String::new() }; 8];
            (row[0], row[3]) = (id.to_string(), "damaged".to_owned());
            row
        }))
        .collect();
    let header = ["ID", "VOLUME", "SNAPSHOT", "KIND", "CREATED", "AGE", "DATA", "STORED"];
    let mut shown = format::table(header, &["AGE", "DATA", "STORED"], &rows);
    if !inventory.unfinished.is_empty() {
        let count = inventory.unfinished.len();
        shown.push_str(&format!(
            "\n{count} unfinished; repeat `backup create` to continue, or `backup prune`"
        ));
    }
    shown
}

/// A time to the second, and how long ago it was, in its largest unit as kubectl prints it.
fn times(created: &str, now: SystemTime) -> (String, String) {
    let Ok(time) = humantime::parse_rfc3339(created) else { return Default::default() };
    let age = now.duration_since(time).unwrap_or_default().as_secs();
    let age = match age {
        0..60 => format!("{age}s"),
        60..3600 => format!("{}m", age / 60),
        3600..86_400 => format!("{}h", age / 3600),
        _ => format!("{}d", age / 86_400),
    };
    (humantime::format_rfc3339_seconds(time).to_string(), age)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backup::manifest::samples;

    #[test]
    fn a_list_shows_the_position_in_each_chain() {
        let backups = [0, 1, 2].map(samples::backup).to_vec();
        let mut inventory = Inventory { backups, ..Inventory::default() };
        inventory.backups[0].created = "2026-01-01T00:00:00.123Z".to_owned();
        inventory.backups[1].created = "2026-01-03T23:00:00Z".to_owned();
        inventory.broken.insert(samples::id(2), "lost".to_owned());
        inventory.damaged.push((samples::id(3), anyhow::anyhow!("unreadable")));
        let entries: Vec<_> =
            inventory.backups.iter().map(|backup| Entry::new(backup, &inventory)).collect();
        let expected = "\
ID                                    VOLUME  SNAPSHOT  KIND                    CREATED               AGE  DATA  STORED
20260101T000000000Z-0000000000000000  v       s0        full                    2026-01-01T00:00:00Z   3d     0       0
20260102T000000000Z-0000000000000000  v       s1        incremental 1           2026-01-03T23:00:00Z   1h     0       0
20260103T000000000Z-0000000000000000  v       s2        incremental 2, damaged                                0       0
20260104T000000000Z-0000000000000000                    damaged";
        let now = humantime::parse_rfc3339("2026-01-04T00:30:00Z").unwrap();
        let shown = table(&entries, &inventory, now);
        let shown: Vec<_> = shown.lines().map(str::trim_end).collect();
        assert_eq!(shown.join("\n"), expected);
    }
}
