//! Direct access to the files of a pool, and kinds of damage.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use csi_loopback::backend::check::{self, FindingKind, Report};
use csi_loopback::backend::tracker::{Bitmap, Header, RecordWriter};
use csi_loopback::backend::{Block, BlockRange, PoolKind, Snapshot, Volume, attached_loop_devices};
use redb::{ReadableTable, TableDefinition};
use serde_json::{Value, json};

use support::{self, *};

/// The files of a closed pool.
pub struct Files {
    pub root: PathBuf,
    /// The pool image that is mounted.
    image: Option<PathBuf>,
}

impl Files {
    pub fn of(pool: &Pool, kind: PoolKind) -> Self {
        if kind != PoolKind::Image {
            return Self { root: pool.data_dir().to_owned(), image: None };
        }
        let root = pool.scratch().join("files");
        fs::create_dir_all(&root).unwrap();
        let image = pool.data_dir().join("pool.img");
        run("mount", &["-o", "loop,nouuid", path(&image), path(&root)]);
        Self { root, image: Some(image) }
    }

    pub fn volume(&self, volume: &Volume) -> PathBuf {
        self.root.join("volumes").join(&volume.id)
    }

    pub fn data(&self, snapshot: &Snapshot) -> PathBuf {
        self.root.join("snapshots").join(&snapshot.id)
    }

    pub fn record(&self, snapshot: &Snapshot) -> PathBuf {
        self.root.join("records").join(format!("{}.0", snapshot.id))
    }

    pub fn catalog(&self) -> PathBuf {
        self.root.join("catalog.redb")
    }

    /// Applies `change` to a snapshot's data, and makes it immutable again.
    pub fn change_data(&self, snapshot: &Snapshot, change: impl FnOnce(&File)) {
        let data = self.data(snapshot);
        run("chattr", &["-i", path(&data)]);
        change(&File::options().write(true).open(&data).unwrap());
        run("chattr", &["+i", path(&data)]);
    }

    /// Edits or removes a row of the catalog.
    pub fn edit(&self, table: &'static str, id: &str, edit: impl FnOnce(Value) -> Option<Value>) {
        let table: TableDefinition<&str, &[u8]> = TableDefinition::new(table);
        let catalog = redb::Database::open(self.catalog()).unwrap();
        let tx = catalog.begin_write().unwrap();
        {
            let mut rows = tx.open_table(table).unwrap();
            let row = serde_json::from_slice(rows.get(id).unwrap().unwrap().value()).unwrap();
            match edit(row) {
                Some(row) => drop(rows.insert(id, &*row.to_string().into_bytes()).unwrap()),
                None => drop(rows.remove(id).unwrap()),
            }
        }
        tx.commit().unwrap();
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let Some(image) = &self.image else { return };
        support::kernel::unmount(&self.root);
        // Another process that reads the state of all loop devices can keep it for a moment.
        let image = File::open(image).unwrap();
        support::kernel::wait_for("the loop device of the mount is gone", || {
            attached_loop_devices(&image).unwrap().is_empty()
        });
    }
}

pub fn set(field: &'static str, value: Value) -> impl FnOnce(Value) -> Option<Value> {
    move |mut row| {
        row[field] = value;
        Some(row)
    }
}

/// A volume with three snapshots, each with one more block than the previous one.
pub struct History {
    pub volume: Volume,
    pub snapshots: [Snapshot; 3],
}

impl History {
    pub fn of(pool: &mut Pool, name: &str) -> Self {
        let volume = pool.volume(name, 4 * MIB);
        let attached = pool.attach(&volume.id);
        let snapshots = [0, 1, 2].map(|number| {
            let at = number * 10 * BLOCK;
            write_direct(&attached.target, at, &pattern(number, BLOCK as usize));
            pool.snapshot(&format!("{name}-{number}"), &volume)
        });
        pool.detach(&attached);
        Self { volume, snapshots }
    }
}

pub fn checked(pool: &Pool) -> Report {
    check::check(pool.data_dir()).unwrap()
}

pub fn findings(report: &Report) -> BTreeSet<(String, String)> {
    for finding in &report.findings {
        assert!(!finding.message.is_empty(), "{finding:?}");
    }
    let found = report.findings.iter();
    found.map(|finding| (finding.kind.to_string(), finding.object.clone())).collect()
}

pub fn overwrite(path: &Path, at: u64, bytes: &[u8]) {
    File::options().write(true).open(path).unwrap().write_all_at(bytes, at).unwrap();
}

pub fn truncate(path: &Path) {
    let file = File::options().write(true).open(path).unwrap();
    file.set_len(file.metadata().unwrap().len() - BLOCK.min(40)).unwrap();
}

/// Rewrites the record of the second snapshot: valid, with these blocks.
pub fn forge(files: &Files, history: &History, since: &str, allocated: &[u64], changed: &[u64]) {
    let snapshot = &history.snapshots[1];
    let header = Header::new(
        &snapshot.id,
        &snapshot.volume_id,
        Some(since),
        snapshot.sequence,
        snapshot.capacity_bytes,
    );
    let file = File::create(files.record(snapshot)).unwrap();
    let mut writer = RecordWriter::new(file, &header).unwrap();
    for (bitmap, blocks) in [(Bitmap::Allocated, allocated), (Bitmap::Changed, changed)] {
        for block in blocks {
            let range = BlockRange::new(Block(*block), Block(block + 1));
            writer.set(bitmap, range).unwrap();
        }
    }
    writer.finish().unwrap();
}

/// A kind of damage to a volume with its own history: the change and the expected findings.
pub type Damage = fn(&Files, &History) -> Vec<(FindingKind, String)>;

pub const DAMAGES: &[(&str, Damage)] = &[
    ("volume-gone", |files, history| {
        fs::remove_file(files.volume(&history.volume)).unwrap();
        vec![(FindingKind::MissingFile, history.volume.id.clone())]
    }),
    ("volume-truncated", |files, history| {
        truncate(&files.volume(&history.volume));
        vec![(FindingKind::TruncatedFile, history.volume.id.clone())]
    }),
    ("data-gone", |files, history| {
        let data = files.data(&history.snapshots[1]);
        run("chattr", &["-i", path(&data)]);
        fs::remove_file(data).unwrap();
        vec![(FindingKind::MissingFile, history.snapshots[1].id.clone())]
    }),
    ("data-truncated", |files, history| {
        let snapshot = &history.snapshots[1];
        files.change_data(snapshot, |data| data.set_len(BLOCK).unwrap());
        vec![(FindingKind::TruncatedFile, snapshot.id.clone())]
    }),
    ("record-gone", |files, history| {
        fs::remove_file(files.record(&history.snapshots[1])).unwrap();
        vec![(FindingKind::MissingFile, history.snapshots[1].id.clone())]
    }),
    ("record-truncated", |files, history| {
        truncate(&files.record(&history.snapshots[1]));
        vec![(FindingKind::DamagedRecord, history.snapshots[1].id.clone())]
    }),
    ("record-empty", |files, history| {
        File::create(files.record(&history.snapshots[1])).unwrap();
        vec![(FindingKind::DamagedRecord, history.snapshots[1].id.clone())]
    }),
    ("record-with-a-flipped-bit", |files, history| {
        let record = files.record(&history.snapshots[1]);
        let bytes = fs::read(&record).unwrap();
        // The end of the last segment, before two index entries and the trailer: only its own
        // checksum covers it.
        let at = bytes.len() - 3 * 32 - 1;
        overwrite(&record, at as u64, &[bytes[at] ^ 0x10]);
        vec![(FindingKind::DamagedRecord, history.snapshots[1].id.clone())]
    }),
    ("records-swapped", |files, history| {
        let [a, b, _] = &history.snapshots;
        let (record_a, record_b) = (files.record(a), files.record(b));
        let between = files.root.join("records/between");
        fs::rename(&record_a, &between).unwrap();
        fs::rename(&record_b, &record_a).unwrap();
        fs::rename(&between, &record_b).unwrap();
        [a, b].map(|snapshot| (FindingKind::DamagedRecord, snapshot.id.clone())).into()
    }),
    ("record-lacks-a-block-that-holds-data", |files, history| {
        let since = history.snapshots[0].id.as_str();
        forge(files, history, since, &[10], &[10]);
        vec![(FindingKind::BitmapDisagrees, history.snapshots[1].id.clone())]
    }),
    ("record-lacks-a-block-that-changed", |files, history| {
        let since = history.snapshots[0].id.as_str();
        forge(files, history, since, &[0, 10], &[]);
        vec![(FindingKind::BitmapDisagrees, history.snapshots[1].id.clone())]
    }),
    ("record-with-blocks-too-many", |files, history| {
        // Reporting too many blocks is allowed.
        let since = history.snapshots[0].id.as_str();
        let allocated: Vec<u64> = (0..32).collect();
        forge(files, history, since, &allocated, &[5, 10, 20]);
        vec![]
    }),
    ("record-counts-from-elsewhere", |files, history| {
        let since = history.snapshots[2].id.as_str();
        forge(files, history, since, &[0, 10], &[10]);
        vec![(FindingKind::BrokenChain, history.snapshots[1].id.clone())]
    }),
    ("data-not-immutable", |files, history| {
        run("chattr", &["-i", path(&files.data(&history.snapshots[1]))]);
        vec![(FindingKind::NotImmutable, history.snapshots[1].id.clone())]
    }),
    ("data-changed", |files, history| {
        let [_, b, c] = &history.snapshots;
        let other = pattern(99, BLOCK as usize);
        files.change_data(b, |data| data.write_all_at(&other, 300 * BLOCK).unwrap());
        [b, c].map(|snapshot| (FindingKind::BitmapDisagrees, snapshot.id.clone())).into()
    }),
    ("orphans", |files, _| {
        let names = ["volumes/vol-x", "snapshots/snap-x", "records/snap-x.0"];
        names
            .map(|name| {
                File::create(files.root.join(name)).unwrap();
                (FindingKind::Orphan, name.to_owned())
            })
            .into()
    }),
    ("record-of-another-generation", |files, history| {
        let record = files.record(&history.snapshots[1]);
        let other = record.with_extension("7");
        fs::copy(record, &other).unwrap();
        let name = other.file_name().unwrap().to_str().unwrap();
        vec![(FindingKind::Orphan, format!("records/{name}"))]
    }),
    ("row-gone", |files, history| {
        let [_, b, c] = &history.snapshots;
        files.edit("snapshots", &b.id, |_| None);
        vec![
            (FindingKind::BrokenChain, c.id.clone()),
            (FindingKind::Orphan, format!("snapshots/{}", b.id)),
            (FindingKind::Orphan, format!("records/{}.0", b.id)),
        ]
    }),
    ("predecessor-of-another-volume", |files, history| {
        let [a, _, c] = &history.snapshots;
        files.edit("snapshots", &a.id, set("volume_id", json!("vol-other")));
        files.edit("snapshots", &c.id, set("predecessor", json!({ "snapshot": a.id })));
        vec![
            (FindingKind::DamagedRecord, a.id.clone()),
            (FindingKind::BrokenChain, history.snapshots[1].id.clone()),
            (FindingKind::BrokenChain, c.id.clone()),
        ]
    }),
    ("predecessor-not-older", |files, history| {
        let [_, b, c] = &history.snapshots;
        files.edit("snapshots", &b.id, set("predecessor", json!({ "snapshot": c.id })));
        vec![(FindingKind::BrokenChain, b.id.clone())]
    }),
    ("predecessor-forgotten", |files, history| {
        files.edit(
            "snapshots",
            &history.snapshots[0].id,
            set("phase", json!({ "forgotten": { "at": 1 } })),
        );
        vec![(FindingKind::BrokenChain, history.snapshots[1].id.clone())]
    }),
    ("baseline-unknown", |files, history| {
        files.edit("volumes", &history.volume.id, set("baseline", json!("snap-x")));
        vec![(FindingKind::BrokenChain, history.volume.id.clone())]
    }),
    ("volume-unfinished", |files, history| {
        files.edit("volumes", &history.volume.id, set("phase", json!("creating")));
        vec![(FindingKind::Unfinished, history.volume.id.clone())]
    }),
    ("volume-half-deleted", |files, history| {
        files.edit("volumes", &history.volume.id, set("phase", json!("deleting")));
        fs::remove_file(files.volume(&history.volume)).unwrap();
        vec![(FindingKind::Unfinished, history.volume.id.clone())]
    }),
    ("snapshot-unfinished", |files, history| {
        files.edit("snapshots", &history.snapshots[2].id, set("phase", json!("taking")));
        vec![(FindingKind::Unfinished, history.snapshots[2].id.clone())]
    }),
];
