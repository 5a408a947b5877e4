//! What a repository and a driver may do wrong: changed bytes, missing objects, streams that end, a
//! lost base.

use std::fs;

use csi_loopback::backend::PoolKind;
use support::driver::*;
use support::random::Random;
use support::{MIB, path};

use super::bad_days::Mounted;
use super::{Rig, files, two_backups};

/// Every file, and bytes of it: all of the small ones.
fn any_flipped_byte_is_found(rig: &Rig<'_>, random: &mut Random, of_each: usize) {
    for file in files(&rig.directory()) {
        let original = fs::read(&file).unwrap();
        // Empty objects say all by their names, and the reserve is only there to be removed.
        if original.is_empty() || file.ends_with("reserve") {
            continue;
        }
        let mut places: Vec<usize> = (0..of_each)
            .map(|_| random.below(original.len() as u64) as usize)
            .chain([0, original.len() - 1])
            .collect();
        places.dedup();
        for at in places {
            let mut changed = original.clone();
            changed[at] ^= 1 << random.below(8);
            fs::write(&file, &changed).unwrap();
            let output = rig.run(&["backup", "verify"]);
            assert_eq!(output.status.code(), Some(3), "byte {at} of {}", file.display());
        }
        // Missing, and truncated.
        fs::write(&file, &original[..original.len() / 2]).unwrap();
        assert_eq!(rig.run(&["backup", "verify"]).status.code(), Some(3), "{}", file.display());
        fs::write(&file, &original).unwrap();
    }
    rig.verify();
}

#[test]
#[ignore = "full tier"]
fn a_flipped_byte_is_found_and_not_restored() {
    with_driver(|driver| {
        let rig = two_backups(driver, "v");
        any_flipped_byte_is_found(&rig, &mut Random::new(1), 1);
        let pack = &rig.files_in("packs")[0];
        let mut bytes = fs::read(pack).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(pack, &bytes).unwrap();
        let target = driver.scratch().join("image");
        rig.fails(3, &["restore", "b", "--to", path(&target)], "damaged");
        // What cannot be trusted is no base, and a prune does not rely on it.
        let manifest = pack.parent().unwrap().with_file_name("manifest");
        fs::write(&manifest, b"{}").unwrap();
        let pruned = rig.json(&["backup", "prune", "--keep-last", "1"]);
        assert_eq!(pruned["removed"], serde_json::json!([]));
        rig.fails(3, &["backup", "list"], "damaged");
        fs::remove_file(&manifest).unwrap();
        assert_eq!(rig.run(&["backup", "verify"]).status.code(), Some(3));
    });
}

#[test]
#[ignore = "full tier"]
fn many_flipped_bytes_are_each_found_also_when_encrypted() {
    with_driver(|driver| {
        let rig = two_backups(driver, "v");
        any_flipped_byte_is_found(&rig, &mut Random::new(Random::new_seed()), 12);
        let key = driver.scratch().join("key");
        fs::write(&key, [9; 40]).unwrap();
        let mut sealed = Rig::new(driver, "w", 4 * MIB);
        sealed.repository.extend(["--key-file".to_owned(), path(&key).to_owned()]);
        sealed.snapshot("c", 30);
        sealed.create("c", &[]);
        any_flipped_byte_is_found(&sealed, &mut Random::new(Random::new_seed()), 12);
        sealed.restores("c");
    });
}

#[test]
fn a_place_with_other_files_is_no_repository() {
    with_driver(|driver| {
        let mut rig = Rig::new(driver, "v", MIB);
        rig.snapshot("a", 1);
        rig.fails(10, &["backup", "list"], "no such directory");
        fs::create_dir(rig.directory()).unwrap();
        rig.fails(10, &["backup", "list"], "there is no repository");
        fs::write(rig.directory().join("other"), b"x").unwrap();
        rig.refused(&["backup", "create", "a"], "other files");
        let short = driver.scratch().join("key");
        fs::write(&short, b"short").unwrap();
        rig.refused(&["backup", "create", "a", "--key-file", path(&short)], "32 at least");
    });
}

#[test]
fn a_backup_outlives_a_stream_that_ends_and_a_lost_base() {
    let faults = [
        "--enable-faults",
        "--fault",
        "stream-abort,after=3,times=2,code=UNAVAILABLE,method=GetMetadataDelta",
    ];
    let Some(mut driver) = driver_with(PoolKind::Image, &faults) else { return };
    let mut rig = two_backups(&driver, "v");
    rig.restores("b");
    rig.snapshot("c", 10);
    let Rig { volume, repository, images, content, .. } = rig;
    driver.restart_with(&["--enable-faults", "--fault", "tracking-lost"]);
    let mut rig = Rig { volume, repository, images, content, ..Rig::new(&driver, "other", MIB) };
    rig.refused(&["backup", "create", "c", "--base", "b"], "--base auto takes a full backup");
    let full = rig.create("c", &["--base", "auto"]);
    assert_eq!(full["kind"], "full");
    let because = full["full_because"].as_str().unwrap();
    assert!(because.contains("tracking-lost"), "{because}");
    rig.snapshot("d", 1);
    for snapshot in ["b", "c"] {
        rig.restores(snapshot);
    }
    let intents = rig.files_in("intent");
    assert_eq!(intents.len(), rig.list().len(), "a refusal leaves no attempt");
}

#[test]
#[ignore = "full tier"]
fn a_full_target_and_a_full_repository_are_errors() {
    with_driver(|driver| {
        let mut rig = two_backups(driver, "v");
        let small = driver.scratch().join("small");
        fs::create_dir(&small).unwrap();
        support::run("mount", &["-t", "tmpfs", "-o", "size=2m", "tmpfs", path(&small)]);
        let mounted = Mounted(&small);
        rig.refused(&["restore", "b", "--to", path(&small.join("image"))], "No space left");
        fs::remove_file(small.join("image")).unwrap();
        let place = std::mem::replace(&mut rig.repository[1], path(&small).to_owned());
        rig.refused(&["backup", "create", "b"], "No space left");
        assert!(rig.list().is_empty(), "half a backup is none");
        rig.repository[1] = place;
        drop(mounted);
        rig.restores("b");
    });
}
