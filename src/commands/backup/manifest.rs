//! What a repository says of a backup: the [`Manifest`], whose existence makes the backup visible;
//! the [`Page`]s that list its chunks, one for each pack; and the [`Intent`] of an attempt to write
//! one.
//!
//! A manifest has the same size for every volume: it holds the numbers and sizes of the pages and
//! packs, and one hash of the hashes of the pages.

use std::time::{Duration, SystemTime};

use anyhow::{Result, anyhow, bail, ensure};
use serde::{Deserialize, Serialize};

use super::document::{Hash, VERSION, nonce};
use storage::{Extent, MAX_VOLUME_BYTES};

/// Volume bytes in a chunk, at most.
pub const CHUNK_BYTES: u64 = 1 << 20;
/// Bytes that a chunk takes in a pack, at most: what zstd and the seal add is far less.
const MAX_STORED: u64 = CHUNK_BYTES + (64 << 10);
/// Extents in a chunk, at most.
pub const CHUNK_EXTENTS: usize = 1024;
/// A pack is closed when it has this many bytes, so it has less than this and one chunk more.
pub const PACK_BYTES: usize = 16 << 20;
/// A page is closed when it has this many chunks or extents.
pub const PAGE_CHUNKS: usize = 512;
pub const PAGE_EXTENTS: usize = 16 << 10;

/// How often a backup may be interrupted and continued.
pub const MAX_PARTS: usize = 64;

/// The id of an attempt to write a backup, and of the backup: when it was begun by the clock of the
/// writer, and a random part. Nothing relies on the time.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct BackupId(String);

impl BackupId {
    pub fn generate(now: SystemTime) -> Result<Self> {
        let time = humantime::format_rfc3339_millis(now).to_string();
        let time: String =
            time.chars().filter(|letter| !matches!(letter, '-' | ':' | '.')).collect();
        Self::try_from(format!("{time}-{}", nonce()?)).map_err(|error| anyhow!(error))
    }

    /// An id that is later than the base's, also after the clock of this machine was set back: ids
    /// are in the order of time everywhere, and prune relies on it.
    pub fn after(base: Option<&Self>, now: SystemTime) -> Result<Self> {
        let next = base.map(Self::next_time).transpose()?;
        Self::generate(next.map_or(now, |next| next.max(now)))
    }

    /// The millisecond after its time.
    fn next_time(&self) -> Result<SystemTime> {
        let id = &self.0;
        let text = format!(
            "{}-{}-{}:{}:{}.{}Z",
            &id[..4],
            &id[4..6],
            &id[6..11],
            &id[11..13],
            &id[13..15],
            &id[15..18]
        );
        let next = humantime::parse_rfc3339(&text).map(|time| time + Duration::from_millis(1));
        // The year 10000 has no id.
        next.ok()
            .filter(|_| !self.0.starts_with("99991231"))
            .ok_or_else(|| anyhow!("backup {self} cannot be a base: its id has no valid time"))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for BackupId {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.0)
    }
}

impl From<BackupId> for String {
    fn from(id: BackupId) -> Self {
        id.0
    }
}

impl TryFrom<String> for BackupId {
    type Error = String;

    /// An id is part of paths, so nothing else is accepted.
    fn try_from(text: String) -> Result<Self, String> {
        let pattern = b"00000000T000000000Z-0000000000000000";
        let fits = |(letter, like): (u8, &u8)| match like {
            b'0' => matches!(letter, b'0'..=b'9' | b'a'..=b'f'),
            other => letter == *other,
        };
        if text.len() == pattern.len() && text.bytes().zip(pattern).all(fits) {
            Ok(Self(text))
        } else {
            Err(format!("{text:?} is not the id of a backup"))
        }
    }
}

/// A whole backup.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    pub version: u32,
    pub id: BackupId,
    /// When it was complete, in UTC.
    pub created: String,
    #[serde(flatten)]
    pub subject: Subject,
    /// Of a copy: the backup of another repository.
    pub origin: Option<BackupId>,
    /// Where the pages and packs are, in their order.
    pub parts: Vec<Part>,
    /// Of the hashes of the pages, in their order.
    pub pages_hash: Hash,
    pub totals: Totals,
}

/// What a backup uses of one attempt. The last is its own; the others were interrupted, and
/// continued.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    pub attempt: BackupId,
    pub pages: u32,
    /// Of the page objects.
    pub page_bytes: u64,
    pub packs: u32,
    pub pack_bytes: u64,
}

/// Of what a backup is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Subject {
    pub volume_id: String,
    pub volume: String,
    pub snapshot_id: String,
    pub snapshot: String,
    /// What the driver takes as the base of a later backup, if not the snapshot's handle.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change_id: Option<String>,
    /// When the snapshot was taken, in UTC; the driver may not report it.
    pub snapshot_created: Option<String>,
    pub capacity_bytes: u64,
    /// What an incremental backup counts from; a full one has none.
    pub base: Option<Base>,
    /// Why a backup is full that should have been incremental.
    pub full_because: Option<String>,
    /// The set that it belongs to.
    pub group: Option<Group>,
}

impl Subject {
    /// What the driver takes as the base of a listing.
    pub fn base_id(&self) -> &str {
        self.change_id.as_ref().unwrap_or(&self.snapshot_id)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Base {
    /// The backup that holds what did not change since.
    pub backup: BackupId,
    /// Its snapshot, by CSI handle.
    pub snapshot_id: String,
    /// When the handle ceases to be a base; a snapshot that exists has no such time, and other
    /// drivers report none.
    pub expires: Option<String>,
}

/// Backups of the snapshots of one group snapshot. The set is whole when it has as many backups as
/// members.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    pub group_snapshot_id: String,
    pub group_snapshot: String,
    pub members: u32,
}

/// Sums of a backup.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Totals {
    /// Bytes of the volume that it holds.
    pub data_bytes: u64,
    /// Bytes of the volume that it says are zeros.
    pub zero_bytes: u64,
    /// Bytes of its packs.
    pub stored_bytes: u64,
    pub extents: u64,
    pub chunks: u64,
}

impl Totals {
    pub fn add(&mut self, chunk: &Chunk) {
        self.data_bytes += chunk.bytes;
        self.zero_bytes += chunk.zeros.iter().map(|extent| extent.1).sum::<u64>();
        self.stored_bytes += chunk.stored;
        self.extents += (chunk.data.len() + chunk.zeros.len()) as u64;
        self.chunks += 1;
    }
}

/// An attempt to write a backup.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Intent {
    pub version: u32,
    pub id: BackupId,
    pub begun: String,
    #[serde(flatten)]
    pub subject: Subject,
    pub origin: Option<BackupId>,
    /// What it uses of interrupted attempts.
    pub parts: Vec<Part>,
}

/// The chunks of one pack.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Page {
    pub version: u32,
    pub backup: BackupId,
    pub number: u32,
    /// What is before this byte of the volume is in this page or an earlier one.
    pub end: u64,
    /// Bytes of the pack; without chunks that have data there is none.
    pub pack_bytes: u64,
    /// CRC-32C of the pack. Each chunk has a hash of its content.
    pub pack_crc: u32,
    pub chunks: Vec<Chunk>,
}

/// Up to 1 MiB of a volume: the bytes of some extents, one after the other, as one compressed piece
/// of a pack.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chunk {
    /// Where it is in the pack, in bytes.
    pub at: u64,
    /// Bytes in the pack; 0 without data.
    pub stored: u64,
    /// Bytes of the volume.
    pub bytes: u64,
    /// Of those bytes.
    pub hash: Hash,
    /// Offset and length of its extents, ascending.
    pub data: Vec<(u64, u64)>,
    /// Extents of zeros, which take no room in the pack.
    pub zeros: Vec<(u64, u64)>,
}

impl Chunk {
    /// The first byte after its last extent.
    pub fn end(&self) -> u64 {
        let end = |extents: &[(u64, u64)]| extents.last().map_or(0, |extent| extent.0 + extent.1);
        end(&self.data).max(end(&self.zeros))
    }
}

impl Subject {
    pub fn is_full(&self) -> bool {
        self.base.is_none()
    }

    /// # Errors
    /// What no writer writes.
    fn check(&self) -> Result<()> {
        ensure!(
            (1..=MAX_VOLUME_BYTES).contains(&self.capacity_bytes),
            "its capacity is {} bytes",
            self.capacity_bytes
        );
        ensure!(!self.volume_id.is_empty() && !self.snapshot_id.is_empty(), "it has an empty id");
        Ok(())
    }
}

impl Manifest {
    /// # Errors
    /// The document is that of another backup, or is not possible.
    pub fn check(&self, id: &BackupId) -> Result<()> {
        ensure!(self.id == *id, "it is the manifest of {}", self.id);
        ensure!(self.parts.len() <= MAX_PARTS, "it has {} parts", self.parts.len());
        let pages = self.parts.iter().try_fold(0u32, |sum, part| sum.checked_add(part.pages));
        ensure!(pages.is_some(), "it has too many pages");
        self.subject.check()
    }

    pub fn pages(&self) -> u32 {
        self.parts.iter().map(|part| part.pages).sum()
    }

    /// The attempt that wrote a page and its pack.
    pub fn attempt_of(&self, page: u32) -> &BackupId {
        let mut end = 0;
        let found = self.parts.iter().find(|part| {
            end += part.pages;
            page < end
        });
        found.map_or(&self.id, |part| &part.attempt)
    }

    /// What two repositories agree on: the backup that was copied first.
    pub fn origin(&self) -> &BackupId {
        self.origin.as_ref().unwrap_or(&self.id)
    }
}

impl Page {
    /// The extents of a page, which a reader need not doubt after this.
    ///
    /// # Errors
    /// It is another page, or one that no writer writes: overlapping extents, sums that do not fit.
    pub fn check(&self, backup: &BackupId, number: u32, begin: u64, capacity: u64) -> Result<()> {
        ensure!(self.version == VERSION && self.backup == *backup, "it belongs to {}", self.backup);
        ensure!(self.number == number, "it is page {}", self.number);
        ensure!(self.chunks.len() <= PAGE_CHUNKS, "it has {} chunks", self.chunks.len());
        let (mut at, mut end) = (0, begin);
        for chunk in &self.chunks {
            ensure!(chunk.at == at, "a chunk is not where the previous one ends");
            at = at.checked_add(chunk.stored).ok_or_else(|| anyhow!("a chunk is too large"))?;
            ensure!((chunk.stored == 0) == chunk.data.is_empty(), "a chunk has no extents");
            ensure!(chunk.stored <= MAX_STORED, "a chunk has {} stored bytes", chunk.stored);
            let bytes = chunk.data.iter().try_fold(0u64, |sum, one| sum.checked_add(one.1));
            ensure!(bytes == Some(chunk.bytes), "a chunk does not have the bytes of its extents");
            ensure!(chunk.bytes <= CHUNK_BYTES, "a chunk has {} bytes", chunk.bytes);
            let in_order = |extents: &[(u64, u64)]| extents.is_sorted_by(|a, b| a.0 < b.0);
            ensure!(in_order(&chunk.data) && in_order(&chunk.zeros), "extents are out of order");
            for piece in pieces(chunk) {
                let next = piece.offset.checked_add(piece.length);
                let Some(next) = next.filter(|next| piece.length > 0 && *next <= capacity) else {
                    bail!("an extent is outside of the volume: {}", piece.offset);
                };
                ensure!(piece.offset >= end, "an extent is out of order: {}", piece.offset);
                end = next;
            }
        }
        ensure!(at == self.pack_bytes, "its chunks do not fill the pack");
        ensure!(self.end >= end && self.end <= capacity, "it ends at {}", self.end);
        Ok(())
    }
}

/// The extents of a chunk, data and zeros, ascending.
fn pieces(chunk: &Chunk) -> Vec<Extent> {
    let all = chunk.data.iter().chain(&chunk.zeros);
    let mut pieces: Vec<_> = all.map(|&(offset, length)| Extent { offset, length }).collect();
    pieces.sort_by_key(|piece| piece.offset);
    pieces
}

/// The order from base to target: whether `newer` can count from `older`.
///
/// # Errors
/// It is of another volume, or does not count from it.
pub fn check_pair(newer: &Manifest, older: &Manifest) -> Result<()> {
    let wrong = |what: &str| anyhow!("backup {} cannot count from {}: {what}", newer.id, older.id);
    let Some(base) = &newer.subject.base else { return Err(wrong("it is full")) };
    ensure!(
        newer.subject.volume_id == older.subject.volume_id,
        wrong("they are of different volumes")
    );
    ensure!(base.snapshot_id == older.subject.snapshot_id, wrong("that is of another snapshot"));
    ensure!(
        newer.subject.capacity_bytes >= older.subject.capacity_bytes,
        wrong("the volume was larger then")
    );
    Ok(())
}

/// Whether `backups`, newest first, are the chain of the first of them.
///
/// # Errors
/// One does not count from the next one, or the last is not full.
pub fn check_chain(backups: &[Manifest]) -> Result<()> {
    for pair in backups.windows(2) {
        let [newer, older] = pair else { continue };
        check_pair(newer, older)?;
    }
    match backups.last() {
        Some(oldest) if oldest.subject.is_full() => Ok(()),
        _ => bail!("the chain does not begin with a full backup"),
    }
}

#[cfg(test)]
pub mod samples {
    use super::*;

    pub fn id(number: usize) -> BackupId {
        BackupId::try_from(format!("2026010{}T000000000Z-0000000000000000", number + 1)).unwrap()
    }

    /// The set of two snapshots.
    pub fn group() -> Group {
        let [group_snapshot_id, group_snapshot] = ["g-id", "g"].map(str::to_owned);
        Group { group_snapshot_id, group_snapshot, members: 2 }
    }

    /// The backup of snapshot `number`, from the previous one.
    pub fn backup(number: usize) -> Manifest {
        backup_from(number, number.checked_sub(1))
    }

    /// The same from another one, or a full one.
    pub fn backup_from(number: usize, base: Option<usize>) -> Manifest {
        Manifest {
            version: VERSION,
            id: id(number),
            created: String::new(),
            subject: Subject {
                volume_id: "v".to_owned(),
                volume: "v".to_owned(),
                snapshot_id: format!("s{number}"),
                snapshot: format!("s{number}"),
                change_id: None,
                snapshot_created: Some(format!("2026-01-0{number}")),
                capacity_bytes: 1 << 20,
                base: base.map(|older| Base {
                    backup: id(older),
                    snapshot_id: format!("s{older}"),
                    expires: None,
                }),
                full_because: None,
                group: None,
            },
            origin: None,
            parts: Vec::new(),
            pages_hash: Hash::of(b""),
            totals: Totals::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::samples::{backup, id};
    use super::*;

    #[test]
    fn only_ids_that_are_safe_in_a_path_are_accepted() {
        let generated = BackupId::generate(SystemTime::now()).unwrap();
        assert_eq!(BackupId::try_from(generated.to_string()).unwrap(), generated);
        for wrong in
            ["", "..", "20260101T000000000Z-000000000000000/", "20260101T000000000Z-00000000"]
        {
            assert!(BackupId::try_from(wrong.to_owned()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_id_is_later_than_its_base_whatever_the_clock() {
        let base = BackupId::try_from("20261231T235959999Z-ffffffffffffffff".to_owned()).unwrap();
        let id = BackupId::after(Some(&base), std::time::UNIX_EPOCH).unwrap();
        assert!(id.as_str().starts_with("20270101T000000000Z-"), "{id}");
        let now = SystemTime::now();
        let id = BackupId::after(Some(&super::samples::id(0)), now).unwrap();
        assert!(id > BackupId::generate(now - Duration::from_secs(1)).unwrap(), "{id}");
        // Ids that only another program writes.
        for wrong in
            ["99991231T235959999Z-0000000000000000", "20269999T000000000Z-0000000000000000"]
        {
            let wrong = BackupId::try_from(wrong.to_owned()).unwrap();
            assert!(BackupId::after(Some(&wrong), now).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_chain_is_of_one_volume_and_in_order() {
        let chain = || vec![backup(2), backup(1), backup(0)];
        check_chain(&chain()).unwrap();
        let refused = |change: fn(&mut Vec<Manifest>), words: &str| {
            let mut chain = chain();
            change(&mut chain);
            let error = check_chain(&chain).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        };
        refused(|chain| chain[1].subject.volume_id = "w".to_owned(), "different volumes");
        refused(|chain| chain[1].subject.snapshot_id = "x".to_owned(), "another snapshot");
        refused(|chain| chain[1].subject.capacity_bytes *= 2, "larger");
        refused(|chain| chain[0].subject.base = None, "full");
        refused(|chain| drop(chain.pop()), "full backup");
        assert!(backup(1).check(&id(2)).is_err());
    }

    fn page(chunks: Vec<Chunk>) -> Page {
        Page {
            version: VERSION,
            backup: id(0),
            number: 3,
            end: 1 << 20,
            pack_bytes: chunks.iter().map(|chunk| chunk.stored).sum(),
            pack_crc: 0,
            chunks,
        }
    }

    fn chunk(at: u64, stored: u64, data: &[(u64, u64)], zeros: &[(u64, u64)]) -> Chunk {
        Chunk {
            at,
            stored,
            bytes: data.iter().map(|extent| extent.1).sum(),
            hash: Hash::of(b""),
            data: data.to_vec(),
            zeros: zeros.to_vec(),
        }
    }

    #[test]
    fn a_page_that_cannot_be_true_is_refused() {
        let check = |page: &Page| page.check(&id(0), 3, 4096, 1 << 20);
        let good = page(vec![
            chunk(0, 10, &[(4096, 4096), (16384, 4096)], &[(8192, 4096)]),
            chunk(10, 0, &[], &[(20480, 4096)]),
            chunk(10, 5, &[(24576, 4096)], &[]),
        ]);
        check(&good).unwrap();
        assert!(good.check(&id(1), 3, 4096, 1 << 20).is_err());
        assert!(good.check(&id(0), 2, 4096, 1 << 20).is_err());
        assert!(good.check(&id(0), 3, 8192, 1 << 20).is_err());
        assert!(good.check(&id(0), 3, 4096, 24576).is_err());
        for wrong in [
            chunk(1, 10, &[(4096, 4096)], &[]),
            chunk(0, 0, &[(4096, 4096)], &[]),
            chunk(0, 10, &[], &[(4096, 4096)]),
            chunk(0, 10, &[(4096, 0)], &[]),
            chunk(0, 10, &[(4096, 8192)], &[(8192, 4096)]),
            chunk(0, 10, &[(8192, 4096), (4096, 4096)], &[]),
            chunk(0, 10, &[(u64::MAX, 4096)], &[]),
            chunk(0, 1 << 40, &[(4096, 4096)], &[]),
        ] {
            assert!(check(&page(vec![wrong.clone()])).is_err(), "{wrong:?}");
        }
        let mut short = good;
        short.pack_bytes = 16;
        assert!(check(&short).is_err());
    }
}
