//! `pool check` finds each kind of damage, names it and what it is of, and finds nothing where
//! nothing is wrong. It changes nothing on disk.

mod support;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::process::Command;

use csi_loopback::backend::check::{self, FindingKind, Report};
use csi_loopback::backend::tracker::{Bitmap, Header, RecordWriter};
use csi_loopback::backend::{
    Block, BlockRange, Error, FsType, PoolKind, Snapshot, Source, Style, Volume, VolumeRequest,
};
use redb::{ReadableTable, TableDefinition};
use serde_json::{Value, json};
use support::*;

/// A pool's files while no backend is open, reached as anybody could.
struct Files {
    root: PathBuf,
    mounted: bool,
}

impl Files {
    fn of(pool: &Pool, kind: PoolKind) -> Self {
        if kind != PoolKind::Image {
            return Self { root: pool.data_dir().to_owned(), mounted: false };
        }
        let root = pool.scratch().join("files");
        fs::create_dir_all(&root).unwrap();
        let image = pool.data_dir().join("pool.img");
        run("mount", &["-o", "loop,nouuid", path(&image), path(&root)]);
        Self { root, mounted: true }
    }

    fn volume(&self, volume: &Volume) -> PathBuf {
        self.root.join("volumes").join(&volume.id)
    }

    fn data(&self, snapshot: &Snapshot) -> PathBuf {
        self.root.join("snapshots").join(&snapshot.id)
    }

    fn record(&self, snapshot: &Snapshot) -> PathBuf {
        self.root.join("records").join(format!("{}.0", snapshot.id))
    }

    fn catalog(&self) -> PathBuf {
        self.root.join("catalog.redb")
    }

    /// Lets `change` have at a snapshot's data, and makes it immutable again.
    fn change_data(&self, snapshot: &Snapshot, change: impl FnOnce(&File)) {
        let data = self.data(snapshot);
        run("chattr", &["-i", path(&data)]);
        change(&File::options().write(true).open(&data).unwrap());
        run("chattr", &["+i", path(&data)]);
    }

    /// Edits a row of the catalog, or removes it.
    fn edit(&self, table: &'static str, id: &str, edit: impl FnOnce(Value) -> Option<Value>) {
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
        if self.mounted {
            support::kernel::unmount(&self.root);
        }
    }
}

fn set(field: &'static str, value: Value) -> impl FnOnce(Value) -> Option<Value> {
    move |mut row| {
        row[field] = value;
        Some(row)
    }
}

/// A volume with three snapshots, each with one more block than the one before.
struct History {
    volume: Volume,
    snapshots: [Snapshot; 3],
}

impl History {
    fn of(pool: &mut Pool, name: &str) -> Self {
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

fn checked(pool: &Pool) -> Report {
    check::check(pool.data_dir()).unwrap()
}

fn findings(report: &Report) -> BTreeSet<(String, String)> {
    for finding in &report.findings {
        assert!(!finding.message.is_empty(), "{finding:?}");
    }
    let found = report.findings.iter();
    found.map(|finding| (finding.kind.to_string(), finding.object.clone())).collect()
}

fn overwrite(path: &Path, at: u64, bytes: &[u8]) {
    File::options().write(true).open(path).unwrap().write_all_at(bytes, at).unwrap();
}

fn truncate(path: &Path) {
    let file = File::options().write(true).open(path).unwrap();
    file.set_len(file.metadata().unwrap().len() - BLOCK.min(40)).unwrap();
}

/// Writes the record of the second snapshot of a history anew: valid, with these blocks.
fn forge(files: &Files, history: &History, since: &str, allocated: &[u64], changed: &[u64]) {
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

/// One kind of damage to a volume with its own history: what it does, and what has to be found.
type Damage = fn(&Files, &History) -> Vec<(FindingKind, String)>;

const DAMAGES: &[(&str, Damage)] = &[
    ("volume-gone", |files, history| {
        fs::remove_file(files.volume(&history.volume)).unwrap();
        vec![(FindingKind::MissingFile, history.volume.id.clone())]
    }),
    ("volume-cut-off", |files, history| {
        truncate(&files.volume(&history.volume));
        vec![(FindingKind::TruncatedFile, history.volume.id.clone())]
    }),
    ("data-gone", |files, history| {
        let data = files.data(&history.snapshots[1]);
        run("chattr", &["-i", path(&data)]);
        fs::remove_file(data).unwrap();
        vec![(FindingKind::MissingFile, history.snapshots[1].id.clone())]
    }),
    ("data-cut-off", |files, history| {
        let snapshot = &history.snapshots[1];
        files.change_data(snapshot, |data| data.set_len(BLOCK).unwrap());
        vec![(FindingKind::TruncatedFile, snapshot.id.clone())]
    }),
    ("record-gone", |files, history| {
        fs::remove_file(files.record(&history.snapshots[1])).unwrap();
        vec![(FindingKind::MissingFile, history.snapshots[1].id.clone())]
    }),
    ("record-cut-off", |files, history| {
        truncate(&files.record(&history.snapshots[1]));
        vec![(FindingKind::DamagedRecord, history.snapshots[1].id.clone())]
    }),
    ("record-empty", |files, history| {
        File::create(files.record(&history.snapshots[1])).unwrap();
        vec![(FindingKind::DamagedRecord, history.snapshots[1].id.clone())]
    }),
    ("record-with-a-flipped-bit", |files, history| {
        let record = files.record(&history.snapshots[1]);
        let middle = fs::metadata(&record).unwrap().len() / 2;
        let byte = fs::read(&record).unwrap()[middle as usize];
        overwrite(&record, middle, &[byte ^ 0x10]);
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
        // Over-reporting is allowed.
        let since = history.snapshots[0].id.as_str();
        forge(files, history, since, &[0, 1, 10], &[5, 10, 20]);
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
        files.edit("snapshots", &history.snapshots[0].id, set("phase", json!("forgotten")));
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
        files.edit("snapshots", &history.snapshots[2].id, set("phase", json!("cutting")));
        vec![(FindingKind::Unfinished, history.snapshots[2].id.clone())]
    }),
];

#[test]
fn every_kind_of_damage_is_found_and_named() {
    for_each_pool("every_kind_of_damage_is_found_and_named", |pool| {
        let kind = pool.kind();
        let histories: Vec<_> = DAMAGES.iter().map(|(name, _)| History::of(pool, name)).collect();
        let whole = History::of(pool, "whole");
        pool.stop();
        assert_eq!(findings(&checked(pool)), BTreeSet::new());
        let mut expected = BTreeSet::new();
        let files = Files::of(pool, kind);
        for ((_, damage), history) in DAMAGES.iter().zip(&histories) {
            for (kind, object) in damage(&files, history) {
                expected.insert((kind.to_string(), object));
            }
        }
        drop(files);
        let report = checked(pool);
        let found = findings(&report);
        let missed: Vec<_> = expected.difference(&found).collect();
        let wrong: Vec<_> = found.difference(&expected).collect();
        assert!(
            missed.is_empty() && wrong.is_empty(),
            "{kind}: missed {missed:?}, wrong {wrong:?}"
        );
        assert!(report.findings.iter().all(|finding| !finding.object.contains(&whole.volume.id)));
        // And again: looking has changed nothing.
        assert_eq!(findings(&checked(pool)), found);
    });
}

#[test]
fn a_directory_of_the_pool_that_is_gone_is_a_finding() {
    with_pool("a_directory_of_the_pool_that_is_gone", PoolKind::Copy, |pool| {
        let volume = pool.volume("v", 4 * MIB);
        let snapshot = pool.snapshot("a", &volume);
        pool.stop();
        fs::remove_dir_all(pool.data_dir().join("records")).unwrap();
        let missing = |object: &str| (FindingKind::MissingFile.to_string(), object.to_owned());
        let expected = [missing("records"), missing(&snapshot.id)];
        assert_eq!(findings(&checked(pool)), BTreeSet::from(expected));
    });
}

#[test]
fn any_flipped_bit_of_a_record_in_the_pool_is_found() {
    with_pool("any_flipped_bit_of_a_record_in_the_pool_is_found", PoolKind::Copy, |pool| {
        let history = History::of(pool, "v");
        pool.stop();
        let files = Files::of(pool, PoolKind::Copy);
        let record = files.record(&history.snapshots[1]);
        let whole = fs::read(&record).unwrap();
        let expected = (FindingKind::DamagedRecord.to_string(), history.snapshots[1].id.clone());
        for (at, byte) in whole.iter().enumerate() {
            overwrite(&record, at as u64, &[byte ^ (1 << (at % 8))]);
            assert_eq!(findings(&checked(pool)), BTreeSet::from([expected.clone()]), "byte {at}");
            overwrite(&record, at as u64, &[*byte]);
        }
        assert_eq!(findings(&checked(pool)), BTreeSet::new());
    });
}

#[test]
fn a_healthy_pool_has_no_findings_whatever_has_happened_in_it() {
    if !have_root("a_healthy_pool_has_no_findings") {
        return;
    }
    for kind in ALL_KINDS {
        let mut pool = Pool::with(kind, |config| config.retention = std::time::Duration::ZERO);
        let a = History::of(&mut pool, "a");
        let b = History::of(&mut pool, "b");
        let gone = History::of(&mut pool, "gone");
        let emptied = History::of(&mut pool, "emptied");
        let stays = pool.volume("stays", 16 * MIB);
        let device = pool.attach(&stays.id).target;
        for number in 0..8u64 {
            write_direct(&device, number * MIB, &pattern(number, 3 * BLOCK as usize));
            discard(&device, number / 2 * MIB, BLOCK);
            pool.snapshot(&format!("stays-{number}"), &stays);
            if number == 3 {
                pool.backend().expand_volume(&stays.id, 32 * MIB, 0).unwrap();
            }
        }
        let backend = pool.backend();
        let group = backend.create_group("g", &[a.volume.id.clone(), b.volume.id.clone()]).unwrap();
        backend.create_group("h", &[stays.id.clone(), b.volume.id.clone()]).unwrap();
        backend.delete_group(&group.group.id, &[]).unwrap();
        // The middle, the newest (a hidden baseline), all, and a volume that its snapshots outlive.
        backend.delete_snapshot(&a.snapshots[1].id).unwrap();
        backend.delete_snapshot(&b.snapshots[2].id).unwrap();
        for snapshot in &emptied.snapshots {
            backend.delete_snapshot(&snapshot.id).unwrap();
        }
        backend.delete_volume(&emptied.volume.id).unwrap();
        backend.delete_volume(&gone.volume.id).unwrap();
        backend.set_change_tracking(&b.volume.id, false).unwrap();
        pool.snapshot("untracked", &b.volume);
        backend.set_change_tracking(&b.volume.id, true).unwrap();
        pool.snapshot("tracked", &b.volume);
        let sources = [
            Source::Snapshot(a.snapshots[0].id.clone()),
            Source::Snapshot(gone.snapshots[1].id.clone()),
            Source::Volume(stays.id.clone()),
        ];
        for (number, source) in sources.into_iter().enumerate() {
            let request = VolumeRequest { source: Some(source), ..request() };
            let copy = pool.create(&format!("copy-{number}"), request);
            pool.snapshot(&format!("of-copy-{number}"), &copy);
        }
        let mounted_volume = pool.create(
            "fs",
            VolumeRequest { required_bytes: 64 * MIB, fs_type: Some(FsType::Ext4), ..request() },
        );
        let staging = pool.scratch().join("fs");
        backend.stage(&mounted_volume.id, &staging, &mounted(FsType::Ext4)).unwrap();
        for number in 0..3 {
            fs::write(staging.join("file"), pattern(number, 100_000)).unwrap();
            pool.snapshot(&format!("fs-{number}"), &mounted_volume);
        }
        backend.unstage(&mounted_volume.id, &staging).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(1100));
        backend.forget_expired().unwrap();
        let volumes = backend.volumes(None, 0).unwrap().items.len() as u64;
        // With a volume that stays attached, as under a driver that was stopped.
        for _ in 0..2 {
            pool.stop();
            let report = checked(&pool);
            assert_eq!(findings(&report), BTreeSet::new(), "{kind}: {:?}", report.findings);
            assert_eq!(report.volumes, volumes);
            assert!(report.records > 20, "{report:?}");
            assert!(report.description.starts_with(&format!("{kind} pool in ")), "{report:?}");
            pool.start();
            write_direct(&device, 0, &pattern(77, BLOCK as usize));
        }
    }
}

#[test]
fn a_check_writes_nothing_to_the_pool() {
    with_pool("a_check_writes_nothing_to_the_pool", PoolKind::Copy, |pool| {
        let history = History::of(pool, "v");
        // As a crash leaves it: not closed, so that opening it for use would repair it.
        let crashed = fs::read(pool.data_dir().join("catalog.redb")).unwrap();
        pool.stop();
        fs::write(pool.data_dir().join("catalog.redb"), &crashed).unwrap();
        let all = || {
            let mut all = Vec::new();
            for place in [".", "volumes", "snapshots", "records"] {
                for entry in fs::read_dir(pool.data_dir().join(place)).unwrap() {
                    let entry = entry.unwrap();
                    let metadata = entry.metadata().unwrap();
                    all.push((entry.path(), metadata.modified().unwrap(), metadata.len()));
                }
            }
            all.sort();
            all
        };
        let before = all();
        assert_eq!(checked(pool).snapshots, history.snapshots.len() as u64);
        assert_eq!(fs::read(pool.data_dir().join("catalog.redb")).unwrap(), crashed);
        let kept = |(name, ..): &(PathBuf, _, _)| !name.ends_with("lock");
        let (before, after) = (before.into_iter(), all().into_iter());
        assert!(before.filter(kept).eq(after.filter(kept)));
    });
}

/// The store itself does not notice a changed row after an orderly end.
#[test]
fn a_damaged_catalog_is_not_served() {
    with_pool("a_damaged_catalog_is_not_served", PoolKind::Copy, |pool| {
        let volume = pool.volume("v", MIB);
        pool.stop();
        let catalog = pool.data_dir().join("catalog.redb");
        let whole = fs::read(&catalog).unwrap();
        let row = format!("\"id\":\"{}\"", volume.id);
        let rows = whole.windows(row.len()).enumerate();
        let found = rows.filter(|(_, bytes)| *bytes == row.as_bytes()).map(|(at, _)| at);
        let mut damaged = whole.clone();
        found.for_each(|at| damaged[at + 8] ^= 1);
        assert_ne!(damaged, whole);
        fs::write(&catalog, &damaged).unwrap();
        let refused = pool.try_start().unwrap_err();
        assert!(matches!(refused, Error::Damaged(_)), "{refused}");
        assert_eq!(fs::read(&catalog).unwrap(), damaged, "what is damaged stays as evidence");
        fs::write(&catalog, &whole).unwrap();
        pool.start();
        assert_eq!(pool.backend().volume(&volume.id).unwrap(), volume);
    });
}

#[test]
fn a_damaged_catalog_is_told_and_never_a_panic() {
    with_pool("a_damaged_catalog_is_told_and_never_a_panic", PoolKind::Copy, |pool| {
        let histories: Vec<_> =
            (0..4).map(|number| History::of(pool, &format!("v{number}"))).collect();
        pool.stop();
        let catalog = pool.data_dir().join("catalog.redb");
        let whole = fs::read(&catalog).unwrap();
        let clean = checked(pool);
        assert_eq!(clean.volumes, histories.len() as u64);
        let told = |bytes: &[u8], what: &str| -> bool {
            fs::write(&catalog, bytes).unwrap();
            let data_dir = pool.data_dir().to_owned();
            match catch_unwind(move || check::check(&data_dir)) {
                Err(_) => panic!("{what}: the check panicked"),
                Ok(Err(Error::Damaged(message))) => {
                    assert!(message.contains("catalog"), "{what}: {message}");
                    true
                }
                Ok(Err(other)) => panic!("{what}: {other}"),
                // Where nothing is kept; then everything is as it was.
                Ok(Ok(report)) => {
                    assert_eq!(report.findings, clean.findings, "{what}");
                    assert_eq!(report.volumes, clean.volumes, "{what}");
                    assert_eq!(report.snapshots, clean.snapshots, "{what}");
                    false
                }
            }
        };
        let seed = std::time::SystemTime::now();
        let seed = seed.duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64;
        println!("report: flips in the catalog with seed {seed}");
        let used: Vec<usize> = (0..whole.len()).filter(|at| whole[*at] != 0).collect();
        let numbers = pattern(seed, 8 * 400);
        let mut found = 0;
        for (number, random) in numbers.chunks(8).enumerate() {
            let random = u64::from_le_bytes(random.try_into().unwrap());
            // The header, the text of the rows, and everywhere else.
            let at = if number < 100 { number * 3 } else { used[random as usize % used.len()] };
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << (random >> 61);
            found += u32::from(told(&bytes, &format!("seed {seed}: byte {at}")));
        }
        assert!(found > 50, "{found}");
        // Every bit of a row counts.
        let name = histories[0].snapshots[0].id.as_bytes();
        let rows = whole.windows(name.len()).enumerate().filter(|(_, bytes)| *bytes == name);
        let flips = rows.map(|(at, _)| {
            let mut bytes = whole.clone();
            bytes[at + 6] ^= 1;
            told(&bytes, &format!("id at {at}"))
        });
        assert!(flips.filter(|told| *told).count() > 0);
        for length in [0, 1, 100, 4096, whole.len() / 2, whole.len() - 1] {
            assert!(told(&whole[..length], &format!("cut off at {length}")));
        }
        fs::remove_file(&catalog).unwrap();
        assert!(matches!(check::check(pool.data_dir()), Err(Error::Damaged(_))));
        assert!(!catalog.exists());
        fs::write(&catalog, &whole).unwrap();
        assert_eq!(findings(&checked(pool)), BTreeSet::new());
    });
}

fn command(data_dir: &Path, more: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_csi-loopback"))
        .args(["pool", "check", "--data-dir", path(data_dir)])
        .args(more)
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[test]
fn the_command_says_with_its_exit_code_what_it_found() {
    for_each_pool("the_command_says_with_its_exit_code_what_it_found", |pool| {
        let kind = pool.kind();
        let history = History::of(pool, "v");
        let (code, out, said) = command(pool.data_dir(), &[]);
        assert_eq!((code, out.as_str()), (2, ""), "{said}");
        assert!(said.contains("in use by another csi-loopback"), "{said}");
        pool.stop();
        let (code, out, said) = command(pool.data_dir(), &[]);
        assert_eq!((code, said.as_str()), (0, ""), "{out}");
        assert!(out.contains("none") && out.contains(&format!("{kind} pool")), "{out}");
        let files = Files::of(pool, kind);
        fs::remove_file(files.record(&history.snapshots[0])).unwrap();
        drop(files);
        let (code, out, said) = command(pool.data_dir(), &["--output", "json"]);
        assert_eq!((code, said.as_str()), (1, ""), "{out}");
        let answer: Value = serde_json::from_str(&out).unwrap();
        assert_eq!((&answer["snapshots"], &answer["change_records"]), (&json!(3), &json!(2)));
        let finding = &answer["findings"][0];
        assert_eq!(finding["kind"], "missing file");
        assert_eq!(finding["object"], json!(history.snapshots[0].id));
        let (code, out, _) = command(pool.data_dir(), &[]);
        assert_eq!(code, 1);
        assert!(out.contains("missing file") && out.contains(&history.snapshots[0].id), "{out}");
        pool.start();
    });
}

#[test]
fn what_is_no_pool_is_said_so_and_left_as_it_is() {
    if !have_root("what_is_no_pool_is_said_so_and_left_as_it_is") {
        return;
    }
    let directory = tempfile::TempDir::with_prefix("csi-loopback-").unwrap();
    let missing = directory.path().join("missing");
    let (code, _, said) = command(&missing, &[]);
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("no such directory"), "{said}");
    let a_file = directory.path().join("file");
    File::create(&a_file).unwrap().write_all(b"x").unwrap();
    assert_eq!(command(&a_file, &[]).0, 2);
    let other = directory.path().join("other");
    fs::create_dir(&other).unwrap();
    let (code, _, said) = command(&other, &[]);
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("no pool here"), "{said}");
    assert_eq!(fs::read_dir(&other).unwrap().count(), 0, "something was made");
    for marker in ["", "{", r#"{"version":9,"kind":"copy"}"#, r#"{"version":1,"kind":"tape"}"#] {
        fs::write(other.join("pool.json"), marker).unwrap();
        let (code, _, said) = command(&other, &[]);
        assert_eq!(code, 2, "{marker}: {said}");
        assert!(said.contains("pool.json"), "{marker}: {said}");
        assert_eq!(fs::read_dir(&other).unwrap().count(), 1, "{marker}: something was made");
    }
    fs::write(other.join("pool.json"), r#"{"version":1,"kind":"image"}"#).unwrap();
    let (code, _, said) = command(&other, &[]);
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("pool.img"), "{said}");
    assert!(!missing.exists() && !other.join("pool.img").exists());
}

/// A pool image that was cut off or overwritten is told by the command, in whatever words.
#[test]
fn a_damaged_pool_image_is_told() {
    with_pool("a_damaged_pool_image_is_told", PoolKind::Image, |pool| {
        History::of(pool, "v");
        pool.stop();
        let image = pool.data_dir().join("pool.img");
        let mut start = vec![0; 8192];
        File::open(&image).unwrap().read_exact_at(&mut start, 0).unwrap();
        overwrite(&image, 0, &[0; 8192]);
        let (code, _, said) = command(pool.data_dir(), &[]);
        assert_eq!(code, 2, "{said}");
        assert!(said.contains("mounting the pool image"), "{said}");
        overwrite(&image, 0, &start);
        assert_eq!(command(pool.data_dir(), &[]).0, 0);
    });
}

/// What a finding protects from: an answer from a damaged record is an error, never a map.
#[test]
fn a_damaged_record_is_never_answered_from() {
    with_pool("a_damaged_record_is_never_answered_from", PoolKind::Copy, |pool| {
        let history = History::of(pool, "v");
        let record = pool.data_dir().join("records").join(format!("{}.0", history.snapshots[1].id));
        let whole = fs::read(&record).unwrap();
        let [a, b, c] = &history.snapshots;
        for at in (0..whole.len()).step_by(7) {
            overwrite(&record, at as u64, &[whole[at] ^ 4]);
            let backend = pool.backend();
            let maps = [backend.allocated(&b.id), backend.delta(&a.id, &b.id)];
            let maps = maps.into_iter().chain([backend.delta(&a.id, &c.id)]);
            let refused = maps.filter(|map| map.is_err()).count();
            let walked = [backend.allocated(&b.id), backend.delta(&a.id, &c.id)];
            let broken =
                walked.into_iter().filter_map(Result::ok).filter(|_| refused == 0).map(|map| {
                    map.extents(Style::Variable, 0).unwrap().any(|extent| extent.is_err())
                });
            assert!(refused == 3 || broken.into_iter().any(|broken| broken), "byte {at}");
            overwrite(&record, at as u64, &[whole[at]]);
        }
        assert_eq!(blocks(pool.backend().delta(&a.id, &c.id).unwrap()), [10, 20]);
    });
}
