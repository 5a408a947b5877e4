//! A damaged pool is refused, reports the damage, or works correctly. A result about blocks is
//! always correct or an error, and nothing panics.
//!
//! Out of scope (docs/design/limitations.md): the data of volumes and snapshots has no checksum.
//!
//!     CORRUPTION_CASES  damaged pools per kind of pool (90; a third of that for image pools)
//!     ORACLE_SEED       seed of the random numbers (1)

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use csi_loopback::backend::check::{self, Report};
use csi_loopback::backend::{
    Backend, BlockMap, Config, Error, PoolChoice, PoolKind, SnapshotFilter, Style, pool,
};
use support::random::Random;
use support::*;

/// Timeout for checking a damaged pool on a busy machine.
const LONGEST: Duration = Duration::from_secs(30);

/// A pool with a history and its correct results, on a filesystem where a copy of it is cheap.
struct Template {
    pool: Pool,
    config: Config,
    /// The same pool at an earlier time.
    older: PathBuf,
    answers: Answers,
    findings: usize,
}

impl Template {
    fn of(kind: PoolKind) -> Self {
        let mut config = None;
        let mut pool = Pool::with(PoolKind::Reflink, |wanted| {
            wanted.pool = PoolChoice::Kind(kind);
            wanted.pool_size = Some(320 * MIB);
            wanted.retention = Duration::ZERO;
            config = Some(wanted.clone());
        });
        let config = config.unwrap();
        let older = config.data_dir.with_file_name("older");
        begin(&mut pool);
        pool.stop();
        copy(&config.data_dir, &older);
        pool.start();
        go_on(&mut pool);
        pool.stop();
        let findings = check::check(&config.data_dir).unwrap().findings.len();
        let answers = Answers::of(&Backend::open(config.clone()).unwrap());
        assert!(answers.allocated.values().filter(|answer| answer.is_ok()).count() >= 6);
        assert!(answers.delta.values().filter(|answer| answer.is_ok()).count() >= 12);
        Self { pool, config, older, answers, findings }
    }
}

/// Writes some blocks and takes a snapshot, several times.
fn take_snapshots(pool: &mut Pool, volume_id: &str, names: &[&str], seed: u64) -> Vec<String> {
    let attached = pool.attach(volume_id);
    let mut ids = Vec::new();
    for (number, name) in names.iter().enumerate() {
        for at in 0..3 + number as u64 {
            let block = (seed * 37 + at * at * 11 + number as u64 * 5) % 1000;
            write_direct(&attached.target, block * BLOCK, &pattern(seed + at, BLOCK as usize));
        }
        ids.push(pool.backend().create_snapshot(name, volume_id).unwrap().id);
    }
    pool.detach(&attached);
    ids
}

/// A history with a dropped change record, and a volume with only one snapshot.
fn begin(pool: &mut Pool) {
    let v = pool.volume("v", 4 * MIB).id;
    let w = pool.volume("w", 4 * MIB).id;
    let ids = take_snapshots(pool, &v, &["v0", "v1", "v2"], 1);
    take_snapshots(pool, &w, &["w0"], 2);
    pool.backend().delete_snapshot(&ids[1]).unwrap();
    // The retention ends one second later.
    std::thread::sleep(Duration::from_millis(1100));
    pool.backend().forget_expired().unwrap();
}

/// Adds deleted bases, a hidden baseline, a group, and a snapshot of a deleted volume.
fn go_on(pool: &mut Pool) {
    let id = |name: &str| {
        let volumes = pool.backend().volumes(None, 0).unwrap().items;
        volumes.into_iter().find(|volume| volume.name == name).unwrap().id
    };
    let (v, w) = (id("v"), id("w"));
    let more = take_snapshots(pool, &v, &["v3", "v4", "v5"], 3);
    pool.backend().create_group("g", &[v.clone(), w.clone()]).unwrap();
    let last = take_snapshots(pool, &w, &["w1", "w2"], 4);
    pool.backend().delete_snapshot(&more[0]).unwrap();
    pool.backend().delete_snapshot(&last[1]).unwrap();
    let gone = pool.volume("gone", 2 * MIB).id;
    take_snapshots(pool, &gone, &["kept"], 5);
    pool.backend().delete_volume(&gone).unwrap();
}

/// The results of a pool, with errors as text.
#[derive(Debug, PartialEq)]
struct Answers {
    lists: Result<Vec<String>, String>,
    allocated: BTreeMap<String, Result<Vec<u64>, String>>,
    delta: BTreeMap<(String, String), Result<Vec<u64>, String>>,
}

impl Answers {
    /// Queries every object of the pool.
    fn of(backend: &Backend) -> Self {
        let snapshots = backend.snapshots(&SnapshotFilter::default(), None, 0).unwrap().items;
        let ids: Vec<String> = snapshots.into_iter().map(|row| row.id).collect();
        Self::about(backend, &ids)
    }

    fn about(backend: &Backend, snapshot_ids: &[String]) -> Self {
        let allocated = |id: &String| (id.clone(), answer(backend.allocated(id)));
        let mut delta = BTreeMap::new();
        for base in snapshot_ids {
            for target in snapshot_ids {
                let found = answer(backend.delta(base, target));
                delta.insert((base.clone(), target.clone()), found);
            }
        }
        let lists = lists(backend).map_err(|error| error.to_string());
        Self { lists, allocated: snapshot_ids.iter().map(allocated).collect(), delta }
    }

    fn ids(&self) -> Vec<String> {
        self.allocated.keys().cloned().collect()
    }

    /// Every successful result must be correct.
    fn assert_none_wrong(&self, found: &Self) {
        for (id, answer) in &found.allocated {
            assert!(answer.is_err() || *answer == self.allocated[id], "allocated of {id}");
        }
        for (pair, answer) in &found.delta {
            assert!(answer.is_err() || *answer == self.delta[pair], "delta of {pair:?}");
        }
    }
}

fn answer(map: Result<BlockMap, Error>) -> Result<Vec<u64>, String> {
    let extents = map.and_then(|map| map.extents(Style::Variable, 0));
    let extents = extents.map_err(|error| error.to_string())?;
    let mut found = Vec::new();
    for extent in extents {
        let extent = extent.map_err(|error| error.to_string())?;
        found.extend(extent.offset / BLOCK..extent.end() / BLOCK);
    }
    Ok(found)
}

fn lists(backend: &Backend) -> Result<Vec<String>, Error> {
    let volumes = backend.volumes(None, 0)?.items;
    for volume in &volumes {
        backend.volume_condition(&volume.id)?;
    }
    let snapshots = backend.snapshots(&SnapshotFilter::default(), None, 0)?.items;
    let groups = snapshots.iter().filter_map(|row| row.group_id.as_deref());
    let groups = groups.map(|id| backend.group(id, &[])).collect::<Result<Vec<_>, _>>()?;
    let mut rows: Vec<String> = volumes.iter().map(|row| format!("{row:?}")).collect();
    rows.extend(snapshots.iter().map(|row| format!("{row:?}")));
    rows.extend(groups.iter().map(|row| format!("{row:?}")));
    Ok(rows)
}

/// The kinds of damage. `Replace` gives the first file the content of the second, `Older` a file
/// its earlier content.
#[derive(Debug, Clone)]
enum Damage {
    Flip { file: PathBuf, bit: u64 },
    ZeroSector { file: PathBuf, at: u64 },
    Truncate { file: PathBuf, to: u64 },
    Swap(PathBuf, PathBuf),
    Replace(PathBuf, PathBuf),
    Remove(PathBuf),
    Older(PathBuf),
    Directory(PathBuf),
}

/// Copies a pool, sharing all blocks.
fn copy(from: &Path, to: &Path) {
    run("cp", &["-a", "--reflink=always", path(from), path(to)]);
}

/// Sets or clears the immutable flag of snapshots. A copy lacks it.
fn set_immutable(pool: &Path, on: bool) {
    let Ok(entries) = fs::read_dir(pool.join("snapshots")) else { return };
    for entry in entries.map(Result::unwrap).filter(|entry| entry.file_type().unwrap().is_file()) {
        pool::set_immutable(&File::open(entry.path()).unwrap(), on).unwrap();
    }
}

impl Damage {
    /// Random damage to a random file that is verified when it is read.
    fn random(random: &mut Random, pool: &Path) -> Self {
        let any = |random: &mut Random, directory: &str| {
            let entries = fs::read_dir(pool.join(directory)).unwrap();
            let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            Path::new(directory).join(random.pick(&names).unwrap())
        };
        // In an image pool, the other files are in the image.
        let image = pool.join("pool.img").exists();
        let (file, has_checksum) = match random.below(10) {
            0 | 1 => ("pool.json".into(), true),
            _ if image => ("pool.img".into(), true),
            2 | 3 => (any(random, "snapshots"), false),
            4 => (any(random, "volumes"), false),
            5 | 6 => ("catalog.redb".into(), true),
            _ => (any(random, "records"), true),
        };
        let length = fs::metadata(pool.join(&file)).unwrap().len();
        // The metadata of an image.
        let whole = if image { length.min(64 << 10) } else { length };
        let directory = file.parent().and_then(Path::to_str).unwrap_or_default().to_owned();
        // Bit flips are most frequent. Data has no checksum.
        let kinds = if has_checksum { 0..12 } else { 2..8 };
        match kinds.start + random.below(kinds.end - kinds.start) {
            0 | 8.. => Self::Flip { file, bit: random.below(whole * 8) },
            1 => Self::ZeroSector { file, at: random.below(whole.div_ceil(512)) * 512 },
            2 => Self::Truncate { file, to: random.below(length) },
            3 if !directory.is_empty() => Self::Swap(file, any(random, &directory)),
            4 if !directory.is_empty() => Self::Replace(file, any(random, &directory)),
            5 => Self::Remove(file),
            // A whole pool with its earlier content is valid.
            6 if !image => Self::Older(file),
            _ => Self::Directory(file),
        }
    }

    fn apply(&self, pool: &Path, older: &Path) {
        let open = |file| File::options().write(true).read(true).open(pool.join(file)).unwrap();
        match self {
            Self::Flip { file, bit } => {
                let file = open(file);
                let mut byte = [0];
                file.read_exact_at(&mut byte, bit / 8).unwrap();
                file.write_all_at(&[byte[0] ^ 1 << (bit % 8)], bit / 8).unwrap();
            }
            Self::ZeroSector { file, at } => {
                let file = open(file);
                let length = file.metadata().unwrap().len() - at;
                file.write_all_at(&vec![0; length.min(512) as usize], *at).unwrap();
            }
            Self::Truncate { file, to } => open(file).set_len(*to).unwrap(),
            Self::Swap(a, b) => {
                let between = pool.join("between");
                fs::rename(pool.join(a), &between).unwrap();
                let _ = fs::rename(pool.join(b), pool.join(a));
                fs::rename(between, pool.join(b)).unwrap();
            }
            Self::Replace(file, other) => {
                let content = fs::read(pool.join(other)).unwrap();
                fs::write(pool.join(file), content).unwrap();
            }
            Self::Remove(file) => fs::remove_file(pool.join(file)).unwrap(),
            Self::Older(file) => {
                fs::remove_file(pool.join(file)).unwrap();
                if older.join(file).exists() {
                    copy(&older.join(file), &pool.join(file));
                }
            }
            Self::Directory(file) => {
                fs::remove_file(pool.join(file)).unwrap();
                fs::create_dir(pool.join(file)).unwrap();
            }
        }
    }
}

#[derive(Debug, Default)]
struct Tally {
    found: u64,
    refused: u64,
    right: u64,
}

/// Examines a damaged copy by an offline check and by a starting driver.
fn look(template: &Template, damaged: &Path, tally: &mut Tally) {
    let (data_dir, pool) = (damaged.to_owned(), PoolChoice::Auto);
    let config = Config { data_dir, pool, ..template.config.clone() };
    let checked = check::check(damaged);
    let has_findings = |report: &Report| report.findings.len() > template.findings;
    let opened = Backend::open(config);
    if let Ok(backend) = &opened {
        let found = Answers::about(backend, &template.answers.ids());
        template.answers.assert_none_wrong(&found);
        match &checked {
            Ok(report) if !has_findings(report) => {
                assert!(found == template.answers, "no finding, and not what it was");
                tally.right += 1;
            }
            _ => tally.found += 1,
        }
    } else {
        let damage = matches!(&checked, Ok(report) if !has_findings(report));
        assert!(!damage, "no finding, but the driver does not start: {opened:?}");
        tally.refused += 1;
    }
    // A start on a damaged pool must not hide the damage.
    let kind = |pool: &Path| fs::read_to_string(pool.join("pool.json"));
    if let (Ok(now), Ok(before)) = (kind(damaged), kind(&template.config.data_dir)) {
        assert!(opened.is_err() || now == before, "it became another kind of pool: {now}");
    }
    for error in [checked.err(), opened.err()].into_iter().flatten() {
        assert!(error.to_string().len() > 20, "{error}");
    }
}

fn damaged_pools(kind: PoolKind, share: u64) {
    if !have_root() {
        return;
    }
    let template = Template::of(kind);
    let mut random = Random::new(setting("ORACLE_SEED").unwrap_or(1));
    let mut tally = Tally::default();
    let begun = Instant::now();
    for case in 0..setting("CORRUPTION_CASES").unwrap_or(90) / share {
        let damaged = template.config.data_dir.with_file_name(format!("case-{case}"));
        copy(&template.config.data_dir, &damaged);
        let damage = Damage::random(&mut random, &damaged);
        damage.apply(&damaged, &template.older);
        set_immutable(&damaged, true);
        let looked = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(|| look(&template, &damaged, &mut tally)));
        set_immutable(&damaged, false);
        if let Err(panic) = result {
            println!("the {case}th damage to a pool of kind {kind}: {damage:?}");
            resume_unwind(panic);
        }
        assert!(looked.elapsed() < LONGEST, "{damage:?} took {:?}", looked.elapsed());
        fs::remove_dir_all(&damaged).unwrap();
    }
    set_immutable(&template.older, false);
    assert!(!template.pool.data_dir().join("between").exists());
    println!("report: damaged pools of kind {kind}: {tally:?}, {:.1?}", begun.elapsed());
    assert!(tally.found + tally.refused > tally.right, "{tally:?}");
}

#[test]
#[ignore = "full tier"]
fn a_damaged_reflink_pool_returns_correct_results_or_errors() {
    damaged_pools(PoolKind::Reflink, 1);
}

#[test]
#[ignore = "full tier"]
fn a_damaged_copy_pool_returns_correct_results_or_errors() {
    damaged_pools(PoolKind::Copy, 1);
}

#[test]
fn a_damaged_image_pool_returns_correct_results_or_errors() {
    damaged_pools(PoolKind::Image, 3);
}
