//! `pool check`: verifies a pool offline against docs/design/on-disk-format.md, including every bit
//! of every change record. Each finding names the damage and the remedy.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::{self, File};
use std::path::Path;

use roaring::RoaringBitmap;

use super::catalog::{self, SnapshotFile};
use super::error::{Context, Error, Result};
use super::lost_pool;
use super::model::{Inline, Phase, Precision, Predecessor, Snapshot, SnapshotPhase, Volume};
use super::pool::{self, Directory, Pool};
use super::store::length;
use super::tracker::{Bitmap, RecordReader, SEGMENT_BLOCKS};
use super::units::BlockRange;

/// The kinds of damage that are reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FindingKind {
    MissingFile,
    TruncatedFile,
    /// A change record with a wrong checksum or impossible contents.
    DamagedRecord,
    BrokenChain,
    /// A file without a row in the catalog.
    Orphan,
    /// A bitmap that lacks blocks that the extents of the data show.
    BitmapDisagrees,
    /// A snapshot's data without the immutable flag.
    NotImmutable,
    /// An unfinished operation. The next start of the driver finishes or undoes it.
    Unfinished,
}

impl fmt::Display for FindingKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::MissingFile => "missing file",
            Self::TruncatedFile => "truncated file",
            Self::DamagedRecord => "damaged record",
            Self::BrokenChain => "broken chain",
            Self::Orphan => "orphan",
            Self::BitmapDisagrees => "bitmap disagrees with the extents",
            Self::NotImmutable => "not immutable",
            Self::Unfinished => "unfinished operation",
        })
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub kind: FindingKind,
    /// The affected volume, snapshot or file.
    pub object: String,
    pub message: String,
}

/// The result of a check.
#[derive(Debug)]
pub struct Report {
    /// The kind, directory and free space of the pool.
    pub description: String,
    pub findings: Vec<Finding>,
    pub volumes: u64,
    pub inline_volumes: u64,
    pub snapshots: u64,
    pub records: u64,
}

struct Checker<'a> {
    pool: &'a dyn Pool,
    volumes: Vec<Volume>,
    inline: Vec<Inline>,
    snapshots: BTreeMap<String, Snapshot>,
    removals: Vec<SnapshotFile>,
    findings: Vec<Finding>,
    records: u64,
}

/// Checks the pool of a data directory that no driver uses. An error means that the check failed;
/// damage is in the report.
pub fn check(data_dir: &Path) -> Result<Report> {
    check_pool(data_dir).map_err(|error| lost_pool::explain_start(data_dir, error))
}

fn check_pool(data_dir: &Path) -> Result<Report> {
    if !data_dir.is_dir() {
        return Err(Error::Missing(format!("{}: no such directory", data_dir.display())));
    }
    // A directory without a pool must not get a lock file.
    let existing_lock =
        data_dir.join("lock").exists().then(|| super::lock_instance(data_dir)).transpose()?;
    let pool = pool::open_existing(data_dir)?;
    let _lock = existing_lock.map_or_else(|| super::lock_instance(data_dir), Ok)?;
    let (volumes, inline, snapshots, removals) =
        catalog::read_verified(&super::catalog_path(pool.root()), |rows| {
            let mut snapshots = BTreeMap::new();
            rows.for_each_snapshot(|row| {
                snapshots.insert(row.id.clone(), row);
                Ok(())
            })?;
            let volumes = rows.select(|_: &Volume| true)?;
            Ok((volumes, rows.select(|_: &Inline| true)?, snapshots, rows.removals()?))
        })?;
    let mut checker = Checker {
        pool: pool.as_ref(),
        volumes,
        inline,
        snapshots,
        removals,
        findings: Vec::new(),
        records: 0,
    };
    checker.check_volumes()?;
    checker.check_inline()?;
    checker.check_snapshots()?;
    checker.check_orphans()?;
    let room = pool.room()?;
    Ok(Report {
        description: format!(
            "{} pool in {}: {} of {} bytes are free",
            pool.kind(),
            data_dir.display(),
            room.available,
            room.total
        ),
        volumes: checker.volumes.len() as u64,
        inline_volumes: checker.inline.len() as u64,
        snapshots: checker.snapshots.len() as u64,
        records: checker.records,
        findings: checker.findings,
    })
}

impl Checker<'_> {
    fn find(&mut self, kind: FindingKind, object: &str, message: impl Into<String>) {
        let message = message.into();
        self.findings.push(Finding { kind, object: object.to_owned(), message });
    }

    /// Opens a file of at least `bytes` bytes. Adds a finding and returns `None` if that fails.
    fn open(&mut self, path: &Path, object: &str, bytes: u64) -> Result<Option<File>> {
        let Some(file) = pool::open_file(path, false)? else {
            self.find(
                FindingKind::MissingFile,
                object,
                format!("{} is missing; restore from a backup", name_of(path)),
            );
            return Ok(None);
        };
        let found = length(&file)?;
        if found < bytes {
            self.find(
                FindingKind::TruncatedFile,
                object,
                format!("{} has {found} bytes instead of {bytes}", name_of(path)),
            );
            return Ok(None);
        }
        Ok(Some(file))
    }

    fn check_volumes(&mut self) -> Result<()> {
        for volume in self.volumes.clone() {
            if volume.phase != Phase::Ready {
                self.find(
                    FindingKind::Unfinished,
                    &volume.id,
                    "being created or deleted; start the driver to finish or undo it",
                );
                continue;
            }
            let path = self.pool.volume_path(&volume.id);
            self.open(&path, &volume.id, volume.capacity_bytes)?;
            let Some(baseline) = &volume.baseline else { continue };
            if !self.snapshots.get(baseline).is_some_and(|row| row.has_data) {
                self.find(
                    FindingKind::BrokenChain,
                    &volume.id,
                    format!(
                        "its baseline {baseline:?} is missing; the next backup is a full backup"
                    ),
                );
            }
        }
        Ok(())
    }

    /// A volume in memory has no file.
    fn check_inline(&mut self) -> Result<()> {
        for row in self.inline.clone() {
            if row.phase != Phase::Ready {
                let message = "being created or removed; start the driver to finish or undo it";
                self.find(FindingKind::Unfinished, &row.id, message);
            } else if !row.request.in_memory {
                let path = self.pool.volume_path(&row.id);
                self.open(&path, &row.id, row.capacity_bytes)?;
            }
        }
        Ok(())
    }

    fn check_snapshots(&mut self) -> Result<()> {
        for row in self.snapshots.clone().into_values() {
            if row.phase == SnapshotPhase::Taking {
                self.find(
                    FindingKind::Unfinished,
                    &row.id,
                    "being taken; start the driver to undo it",
                );
                continue;
            }
            let data = if row.has_data { self.check_data(&row)? } else { None };
            if row.is_forgotten() {
                continue;
            }
            let chained = self.check_chain(&row);
            let Some(record) = self.check_record(&row)? else { continue };
            self.records += 1;
            let matches = self.check_header(&row, &record);
            // A record with another predecessor necessarily differs from the data.
            if let Some(data) = data.filter(|_| chained && matches) {
                self.check_bitmaps(&row, &record, &data)?;
            }
        }
        Ok(())
    }

    fn check_data(&mut self, row: &Snapshot) -> Result<Option<File>> {
        let path = self.pool.snapshot_path(&row.id);
        let file = self.open(&path, &row.id, row.capacity_bytes)?;
        if let Some(file) = &file
            && !pool::is_immutable(file).unwrap_or(true)
        {
            self.find(
                FindingKind::NotImmutable,
                &row.id,
                "its data lacks the immutable flag and may have been changed; take a new snapshot",
            );
        }
        Ok(file)
    }

    /// Whether the predecessor is valid.
    fn check_chain(&mut self, row: &Snapshot) -> bool {
        let Predecessor::Snapshot(id) = &row.predecessor else { return true };
        let broken = match self.snapshots.get(id) {
            None => Some(format!("its predecessor {id:?} is unknown")),
            Some(before) if before.volume_id != row.volume_id => {
                Some(format!("its predecessor {id:?} belongs to another volume"))
            }
            Some(before) if before.sequence >= row.sequence => {
                Some(format!("its predecessor {id:?} is not older"))
            }
            Some(before) if before.is_forgotten() => {
                Some(format!("the change record of its predecessor {id:?} was dropped"))
            }
            Some(_) => None,
        };
        if let Some(message) = &broken {
            self.find(FindingKind::BrokenChain, &row.id, format!("{message}; take a full backup"));
        }
        broken.is_none()
    }

    /// Reads every segment of a record and verifies its checksum.
    fn check_record(&mut self, row: &Snapshot) -> Result<Option<RecordReader>> {
        let path = self.pool.record_path(&row.id, row.record_generation);
        let Some(file) = self.open(&path, &row.id, 0)? else { return Ok(None) };
        match RecordReader::open(file).and_then(|record| read_all(&record).map(|()| record)) {
            Ok(record) => Ok(Some(record)),
            Err(Error::Damaged(message)) => {
                self.find(FindingKind::DamagedRecord, &row.id, message);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Whether the record matches the row.
    fn check_header(&mut self, row: &Snapshot, record: &RecordReader) -> bool {
        let header = record.header();
        let since = match &row.predecessor {
            Predecessor::Snapshot(id) => Some(id),
            Predecessor::None(_) => None,
        };
        let same = header.snapshot_id == row.id
            && header.volume_id == row.volume_id
            && header.sequence == row.sequence
            && header.capacity_bytes == row.capacity_bytes;
        if !same {
            let message = "its record belongs to another snapshot; take a full backup";
            self.find(FindingKind::DamagedRecord, &row.id, message);
        } else if header.predecessor.as_ref() != since {
            let message = "its record has another predecessor than the catalog; take a full backup";
            self.find(FindingKind::BrokenChain, &row.id, message);
        } else {
            return true;
        }
        false
    }

    /// Compares the record with the data and, if it exists, with the predecessor's data.
    fn check_bitmaps(&mut self, row: &Snapshot, record: &RecordReader, data: &File) -> Result<()> {
        let predecessor = match &row.predecessor {
            Predecessor::Snapshot(id) => self.snapshots.get(id).filter(|before| before.has_data),
            Predecessor::None(_) => None,
        };
        let old = predecessor.and_then(|before| {
            let path = self.pool.snapshot_path(&before.id);
            let file = pool::open_file(&path, false).ok().flatten()?;
            // A truncated file has its own finding and proves nothing about this snapshot.
            let whole = length(&file).is_ok_and(|bytes| bytes >= before.capacity_bytes);
            whole.then_some((file, before.capacity_bytes))
        });
        let mut allocated = Cover::new(record, Bitmap::Allocated);
        let mut changed = Cover::new(record, Bitmap::Changed);
        let mut missed = None;
        let old_ref = old.as_ref().map(|(file, bytes)| (file, *bytes));
        // A record of any precision must cover exact differences.
        let new = (data, row.capacity_bytes);
        self.pool.compare(old_ref, new, Precision::Exact, &mut |finding| {
            let range = BlockRange::covering(finding.start..finding.end);
            let wrong = (finding.allocated && !allocated.covers(range)?)
                || (finding.changed && old_ref.is_some() && !changed.covers(range)?);
            if wrong && missed.is_none() {
                missed = Some(finding.start);
            }
            Ok(())
        })?;
        if let Some(offset) = missed {
            self.find(
                FindingKind::BitmapDisagrees,
                &row.id,
                format!("the record lacks the block at byte {offset}; take a full backup"),
            );
        }
        Ok(())
    }

    /// Finds files without a row in the catalog.
    fn check_orphans(&mut self) -> Result<()> {
        let in_pool = self.inline.iter().filter(|row| !row.request.in_memory);
        let volumes: BTreeSet<String> = self
            .volumes
            .iter()
            .map(|volume| &volume.id)
            .chain(in_pool.map(|row| &row.id))
            .cloned()
            .collect();
        let data: BTreeSet<String> = self.snapshots.keys().cloned().collect();
        let records: BTreeSet<String> = self
            .snapshots
            .values()
            .map(|row| format!("{}.{}", row.id, row.record_generation))
            .collect();
        let record = |file: &SnapshotFile| match file {
            SnapshotFile::Record { id, generation } => Some(format!("records/{id}.{generation}")),
            SnapshotFile::Data { .. } => None,
        };
        let removals: BTreeSet<String> = self.removals.iter().filter_map(record).collect();
        let places = [
            (Directory::Volumes, volumes),
            (Directory::Snapshots, data),
            (Directory::Records, records),
        ];
        for (directory, known) in places {
            let path = directory.path(self.pool.root());
            let listing = || format!("listing {}", path.display());
            let place = name_of(&path);
            let suffix = match directory {
                Directory::Snapshots => pool::CLONE_AHEAD_SUFFIX,
                Directory::Volumes => pool::GROWING_SUFFIX,
                Directory::Records => "",
            };
            let entries = match fs::read_dir(&path) {
                Ok(entries) => entries,
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                    let message = "the directory is missing; restore from a backup";
                    self.find(FindingKind::MissingFile, &place, message);
                    continue;
                }
                Err(e) => return Err(Error::io(listing(), e)),
            };
            for entry in entries {
                let name = entry.context(listing)?.file_name().to_string_lossy().into_owned();
                let file = format!("{place}/{name}");
                if removals.contains(&file) {
                    let message = "scheduled for removal; start the driver to remove it";
                    self.find(FindingKind::Unfinished, &file, message);
                } else if !known.contains(name.strip_suffix(suffix).unwrap_or(&name)) {
                    self.find(
                        FindingKind::Orphan,
                        &file,
                        "no row of the catalog refers to it; inspect it and move it away",
                    );
                }
            }
        }
        Ok(())
    }
}

/// Checks whether ascending ranges are within a bitmap. Holds one segment in memory.
struct Cover<'a> {
    record: &'a RecordReader,
    bitmap: Bitmap,
    current: Option<(u64, Option<RoaringBitmap>)>,
}

impl<'a> Cover<'a> {
    fn new(record: &'a RecordReader, bitmap: Bitmap) -> Self {
        Self { record, bitmap, current: None }
    }

    fn covers(&mut self, range: BlockRange) -> Result<bool> {
        let mut start = range.start.0;
        while start < range.end.0 {
            let segment = start / SEGMENT_BLOCKS;
            let base = segment * SEGMENT_BLOCKS;
            let end = range.end.0.min(base + SEGMENT_BLOCKS);
            if self.current.as_ref().is_none_or(|(at, _)| *at != segment) {
                self.current = Some((segment, self.record.segment(self.bitmap, segment)?));
            }
            let blocks = self.current.as_ref().and_then(|(_, blocks)| blocks.as_ref());
            let wanted = (start - base) as u32..(end - base) as u32;
            if !blocks.is_some_and(|blocks| blocks.contains_range(wanted)) {
                return Ok(false);
            }
            start = end;
        }
        Ok(true)
    }
}

fn read_all(record: &RecordReader) -> Result<()> {
    for bitmap in [Bitmap::Allocated, Bitmap::Changed] {
        for segment in record.segments(bitmap) {
            record.segment(bitmap, segment)?;
        }
    }
    Ok(())
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}
