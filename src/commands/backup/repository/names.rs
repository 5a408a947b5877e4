//! The names of objects, and what a list of them says:
//!
//! - `repository.json`: the format
//! - `keys/MASTER.KEY.N`: a master key, sealed with a key file; `keys/none`: there is no encryption
//! - `backups/ID/intent/key=K,base=ID,after=ID`: an attempt and all that it refers to; put first,
//!   removed last
//! - `backups/ID/pages/N`, `backups/ID/packs/N`: its data
//! - `backups/ID/manifest`: makes it a backup
//! - `backups/ID/complete`: it was acknowledged
//! - `marks/ID.OWNER`: a prune wants it gone
//! - `index/NONCE`: copies of manifests
//! - `reserve`: space for a prune of a full repository

use std::collections::{BTreeMap, BTreeSet};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::store::Listed;
use crate::backup::manifest::{BackupId, Manifest, Part};

pub const DESCRIPTION: &str = "repository.json";
pub const RESERVE: &str = "reserve";
pub const BACKUPS: &str = "backups";
pub const INDEX: &str = "index";
pub const KEYS: &str = "keys";
pub const MARKS: &str = "marks";

pub fn directory(id: &BackupId) -> String {
    format!("{BACKUPS}/{id}")
}

pub fn object(id: &BackupId, name: &str) -> String {
    format!("{BACKUPS}/{id}/{name}")
}

pub fn page(id: &BackupId, number: u32) -> String {
    format!("{BACKUPS}/{id}/pages/{number:08}")
}

pub fn pack(id: &BackupId, number: u32) -> String {
    format!("{BACKUPS}/{id}/packs/{number:08}")
}

/// In place of an id: no mark, but an object by which a prune learns the time of the store.
pub const PROBE: &str = "probe";

pub fn mark(on: &str, by: &str) -> String {
    format!("{MARKS}/{on}.{by}")
}

/// What a mark is on, and whose it is.
pub fn parse_mark(path: &str) -> Option<(String, String)> {
    let (on, by) = path.strip_prefix(MARKS)?.strip_prefix('/')?.rsplit_once('.')?;
    Some((on.to_owned(), by.to_owned()))
}

/// What an attempt refers to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct References {
    /// The master key, or `none`.
    pub key: String,
    pub base: Option<BackupId>,
    /// The attempt whose pages it uses.
    pub after: Option<BackupId>,
}

impl References {
    pub fn path(&self, id: &BackupId) -> String {
        let mut name = format!("{BACKUPS}/{id}/intent/key={}", self.key);
        for (field, id) in [("base", &self.base), ("after", &self.after)] {
            if let Some(id) = id {
                name.push_str(&format!(",{field}={id}"));
            }
        }
        name
    }

    fn parse(name: &str) -> Self {
        let mut references = Self::default();
        for part in name.split(',') {
            let (field, value) = part.split_once('=').unwrap_or((part, ""));
            let id = || BackupId::try_from(value.to_owned()).ok();
            match field {
                "key" => references.key = value.to_owned(),
                "base" => references.base = id(),
                "after" => references.after = id(),
                _ => {}
            }
        }
        references
    }

    pub fn ids(&self) -> impl Iterator<Item = &BackupId> {
        self.base.iter().chain(&self.after)
    }
}

/// Size and time of an object: another object that was put at the same path differs in them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stamp {
    size: u64,
    /// Nanoseconds since 1970 by the clock of the store.
    modified: u64,
}

impl Stamp {
    fn of(object: &Listed) -> Self {
        let since = object.modified.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self { size: object.size, modified: u64::try_from(since.as_nanos()).unwrap_or(u64::MAX) }
    }
}

/// The objects of an attempt.
#[derive(Debug, Clone, Default)]
pub struct Attempt {
    /// One, unless the process was copied.
    pub intents: Vec<References>,
    pub manifest: Option<Stamp>,
    /// It was acknowledged as a backup once.
    pub was_complete: bool,
    /// Sizes by number.
    pages: BTreeMap<u32, u64>,
    packs: BTreeMap<u32, u64>,
    /// Of the newest object.
    pub modified: Option<SystemTime>,
}

impl Attempt {
    /// Pages that exist from this number on, without a gap.
    pub fn pages_from(&self, first: u32) -> u32 {
        let numbers = (first..).zip(self.pages.range(first..));
        let count = numbers.take_while(|(number, (found, _))| number == *found).count();
        u32::try_from(count).unwrap_or(u32::MAX)
    }

    /// The size of a pack; 0 without one.
    pub fn pack_bytes(&self, number: u32) -> u64 {
        self.packs.get(&number).copied().unwrap_or_default()
    }

    /// What a backup uses of this attempt, if it uses these pages.
    pub fn part(&self, attempt: &BackupId, pages: std::ops::Range<u32>) -> Part {
        let sum = |sizes: &BTreeMap<u32, u64>| {
            let found = sizes.range(pages.clone());
            found.fold((0u32, 0u64), |(count, sum), (_, size)| {
                (count + 1, sum.saturating_add(*size))
            })
        };
        let ((count, page_bytes), (packs, pack_bytes)) = (sum(&self.pages), sum(&self.packs));
        Part { attempt: attempt.clone(), pages: count, page_bytes, packs, pack_bytes }
    }
}

/// What a list of a repository shows.
#[derive(Debug, Default)]
pub struct Listing {
    pub attempts: BTreeMap<BackupId, Attempt>,
    /// On what, and whose; when each was put, by the clock of the store.
    pub marks: BTreeMap<(String, String), SystemTime>,
    /// Paths of indexes, and when each was put.
    pub indexes: BTreeSet<(SystemTime, String)>,
    /// The time of the newest object, by the clock of the store.
    pub newest: Option<SystemTime>,
}

impl Listing {
    pub fn new(objects: impl IntoIterator<Item = Listed>) -> Self {
        let mut listing = Self::default();
        objects.into_iter().for_each(|object| listing.add(&object));
        listing
    }

    fn add(&mut self, object: &Listed) {
        self.newest = self.newest.max(Some(object.modified));
        if let Some(mark) = parse_mark(&object.path) {
            self.marks.insert(mark, object.modified);
            return;
        }
        if object.path.strip_prefix(INDEX).is_some_and(|rest| rest.starts_with('/')) {
            self.indexes.insert((object.modified, object.path.clone()));
            return;
        }
        let path = object.path.strip_prefix(BACKUPS).and_then(|path| path.strip_prefix('/'));
        let Some((id, name)) = path.and_then(|path| path.split_once('/')) else { return };
        // Another name is not this program's.
        let Ok(id) = BackupId::try_from(id.to_owned()) else { return };
        let attempt = self.attempts.entry(id).or_default();
        attempt.modified = attempt.modified.max(Some(object.modified));
        match name.split_once('/') {
            None if name == "manifest" => attempt.manifest = Some(Stamp::of(object)),
            None if name == "complete" => attempt.was_complete = true,
            Some(("intent", name)) => attempt.intents.push(References::parse(name)),
            Some((kind @ ("pages" | "packs"), number)) => {
                if let Ok(number) = number.parse() {
                    let of_kind =
                        if kind == "pages" { &mut attempt.pages } else { &mut attempt.packs };
                    of_kind.insert(number, object.size);
                }
            }
            _ => {}
        }
    }

    pub fn is_marked(&self, id: &BackupId) -> bool {
        self.marks.keys().any(|(on, _)| on == id.as_str())
    }

    /// Whether all objects of a backup exist with their sizes, without those of its base.
    pub fn is_whole(&self, backup: &Manifest) -> bool {
        let mut begin = 0;
        let has_part = |part: &Part| {
            let pages = begin..begin + part.pages;
            begin = pages.end;
            self.attempts.get(&part.attempt).is_some_and(|found| {
                !found.intents.is_empty() && found.part(&part.attempt, pages) == *part
            })
        };
        let own = self.attempts.get(&backup.id);
        own.is_some_and(|own| own.manifest.is_some() && !own.intents.is_empty())
            && backup.parts.iter().all(has_part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backup::manifest::samples::{backup, id};

    fn listed((path, size): (String, u64)) -> Listed {
        Listed { path, size, modified: SystemTime::UNIX_EPOCH }
    }

    #[test]
    fn the_name_of_an_intent_says_what_it_refers_to() {
        for (base, after) in [(None, None), (Some(id(0)), None), (Some(id(0)), Some(id(1)))] {
            let references = References { key: "none".to_owned(), base, after };
            let listing = Listing::new([listed((references.path(&id(2)), 1))]);
            assert_eq!(listing.attempts[&id(2)].intents, [references]);
        }
    }

    #[test]
    fn a_lost_or_truncated_object_is_noticed() {
        let mut whole = backup(0);
        let part = |attempt, pages, packs| Part {
            attempt,
            pages,
            page_bytes: 10 * u64::from(pages),
            packs,
            pack_bytes: 100 * u64::from(packs),
        };
        whole.parts = vec![part(id(1), 2, 1), part(id(0), 1, 1)];
        let objects = || {
            let intent = |of| References::default().path(&id(of));
            vec![
                (intent(0), 1),
                (intent(1), 1),
                (object(&id(0), "manifest"), 1),
                (page(&id(1), 0), 10),
                (page(&id(1), 1), 10),
                // Which another backup may use.
                (page(&id(1), 2), 7),
                (pack(&id(1), 0), 100),
                (page(&id(0), 2), 10),
                (pack(&id(0), 2), 100),
            ]
        };
        let is_whole = |all: Vec<_>| Listing::new(all.into_iter().map(listed)).is_whole(&whole);
        assert!(is_whole(objects()));
        for lost in (0..objects().len()).filter(|lost| *lost != 5) {
            let mut objects = objects();
            objects.remove(lost);
            assert!(!is_whole(objects), "{lost}");
        }
        for truncated in [3, 6, 8] {
            let mut objects = objects();
            objects[truncated].1 -= 1;
            assert!(!is_whole(objects), "{truncated}");
        }
    }
}
