//! `pool check` finds and names each kind of damage and the affected object, and finds nothing in a
//! healthy pool. It changes nothing on disk.

mod damage;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::driver::binary;

use csi_loopback::backend::check::FindingKind;
use csi_loopback::backend::{FsType, PoolKind, Source, Style, VolumeRequest};
use damage::*;
use serde_json::{Value, json};
use support::*;

#[test]
fn every_kind_of_damage_is_found_and_named() {
    for_each_pool(|pool| {
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
        // A second check has the same result.
        assert_eq!(findings(&checked(pool)), found);
    });
}

#[test]
fn a_missing_directory_of_the_pool_is_a_finding() {
    with_pool(PoolKind::Copy, |pool| {
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
fn a_healthy_pool_has_no_findings_after_any_operations() {
    if !have_root() {
        return;
    }
    for kind in ALL_KINDS {
        let mut pool = Pool::with(kind, |config| config.retention = std::time::Duration::ZERO);
        let a = History::of(&mut pool, "a");
        let b = History::of(&mut pool, "b");
        let gone = History::of(&mut pool, "gone");
        let emptied = History::of(&mut pool, "emptied");
        let stays = pool.volume("kept", 16 * MIB);
        let device = pool.attach(&stays.id).target;
        for number in 0..8u64 {
            write_direct(&device, number * MIB, &pattern(number, 3 * BLOCK as usize));
            discard(&device, number / 2 * MIB, BLOCK);
            pool.snapshot(&format!("kept-{number}"), &stays);
            if number == 3 {
                pool.backend().expand_volume(&stays.id, 32 * MIB, 0).unwrap();
            }
        }
        let backend = pool.backend();
        let group = backend.create_group("g", &[a.volume.id.clone(), b.volume.id.clone()]).unwrap();
        backend.create_group("h", &[stays.id.clone(), b.volume.id.clone()]).unwrap();
        backend.delete_group(&group.group.id, &[]).unwrap();
        // The middle, the newest (a hidden baseline), all, and a deleted volume with snapshots.
        backend.delete_snapshot(&a.snapshots[1].id).unwrap();
        backend.delete_snapshot(&b.snapshots[2].id).unwrap();
        for snapshot in &emptied.snapshots {
            backend.delete_snapshot(&snapshot.id).unwrap();
        }
        backend.delete_volume(&emptied.volume.id).unwrap();
        backend.delete_volume(&gone.volume.id).unwrap();
        backend.modify_volume(&b.volume.id, tracking(false)).unwrap();
        pool.snapshot("untracked", &b.volume);
        backend.modify_volume(&b.volume.id, tracking(true)).unwrap();
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
        // With an attached volume, as after a stop of the driver.
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
    with_pool(PoolKind::Copy, |pool| {
        let history = History::of(pool, "v");
        // As after a crash: not closed, so that a normal open would repair it.
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

fn command(data_dir: &Path, more: &[&str]) -> (i32, String, String) {
    let output = Command::new(binary())
        .args(["pool", "check", "--data-dir", path(data_dir)])
        .args(more)
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[test]
fn the_exit_code_of_the_command_shows_the_result() {
    for_each_pool(|pool| {
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
fn a_directory_without_a_pool_is_reported_and_unchanged() {
    if !have_root() {
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
    assert_eq!(fs::read_dir(&other).unwrap().count(), 0, "an object was created");
    for marker in ["", "{", r#"{"version":1,"kind":"tape"}"#] {
        fs::write(other.join("pool.json"), marker).unwrap();
        let (code, _, said) = command(&other, &[]);
        assert_eq!(code, 2, "{marker}: {said}");
        assert!(said.contains("pool.json"), "{marker}: {said}");
        assert_eq!(fs::read_dir(&other).unwrap().count(), 1, "{marker}: an object was created");
    }
    fs::write(other.join("pool.json"), r#"{"version":1,"kind":"image"}"#).unwrap();
    let (code, _, said) = command(&other, &[]);
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("pool.img"), "{said}");
    assert!(!missing.exists() && !other.join("pool.img").exists());
}

#[test]
fn a_pool_of_another_version_is_refused_unchanged() {
    if !have_root() {
        return;
    }
    let directory = tempfile::TempDir::with_prefix("csi-loopback-").unwrap();
    for version in [0, 9] {
        let marker = format!(r#"{{"version":{version},"kind":"copy"}}"#);
        fs::write(directory.path().join("pool.json"), &marker).unwrap();
        let (code, _, said) = command(directory.path(), &[]);
        assert_eq!(code, 2, "{said}");
        let words = format!("pool.json has version {version}, but this version of csi-loopback");
        assert!(said.contains(&words) && said.contains("supports only 1"), "{said}");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "an object was created");
    }
}

/// A truncated or overwritten pool image is reported.
#[test]
fn a_damaged_pool_image_is_reported() {
    with_pool(PoolKind::Image, |pool| {
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

/// A query of a damaged record is an error.
#[test]
fn a_damaged_record_is_never_used() {
    with_pool(PoolKind::Copy, |pool| {
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
