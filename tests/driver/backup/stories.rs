//! The two stories: full and incremental backups, and restores that yield the bytes of the
//! snapshot.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use csi_loopback::backend::PoolKind;
use support::driver::*;
use support::exerciser::{Exerciser, History};
use support::ops::Device;
use support::random::Random;
use support::{GIB, MIB, SetOnDrop, path, run};

use super::{Rig, files, text, two_backups};

#[test]
fn a_chain_restores_to_the_bytes_of_each_snapshot() {
    with_driver(|driver| {
        let mut rig = Rig::new(driver, "v", 24 * MIB);
        let first = rig.snapshot("a", 120);
        let full = rig.create("a", &["--base", "auto"]);
        assert_eq!(full["kind"], "full");
        assert!(text(&full["full_because"]).contains("no earlier backup"), "{full}");
        rig.snapshot("b", 40);
        // The handle remains a base after its snapshot was deleted.
        driver.ok(delete_snapshot(&first));
        let second = rig.create("b", &["--base", "auto"]);
        assert_eq!((&second["kind"], &second["base"]), (&"incremental".into(), &full["id"]));
        assert!(second["data_bytes"].as_u64() < full["data_bytes"].as_u64(), "{second}");
        assert!(second["base_expires"].is_string(), "{second}");
        rig.snapshot("c", 40);
        let third = rig.create("c", &["--base", text(&second["id"])]);
        assert_eq!(third["base"], second["id"]);
        let listed: Vec<_> = rig.list().iter().map(|one| one["id"].clone()).collect();
        assert_eq!(listed, [&full["id"], &second["id"], &third["id"]].map(Clone::clone));
        let shown = rig.json(&["backup", "show", "c"]);
        assert_eq!(shown["chain"], serde_json::json!([third["id"], second["id"], full["id"]]));
        rig.verify();
        for snapshot in ["a", "b", "c"] {
            rig.restores(snapshot);
        }
        // Done once, it is not done again.
        assert_eq!(rig.create("c", &["--base", "auto"])["id"], third["id"]);
        assert_eq!(rig.list().len(), 3);
        assert!(volume_ids(driver).iter().all(|id| !id.contains("verify")), "no volume remains");
    });
}

#[test]
fn a_restore_replaces_whatever_the_target_held() {
    with_driver(|driver| {
        let rig = two_backups(driver, "v");
        let target = driver.scratch().join("image");
        // Larger than the volume, and full of something else.
        fs::write(&target, vec![0xee; 9 * MIB as usize]).unwrap();
        rig.json(&["restore", "b", "--to", path(&target), "--overwrite"]);
        let mut expected = rig.images["b"].clone();
        expected.resize(9 * MIB as usize, 0);
        assert!(fs::read(&target).unwrap() == expected);
        // A volume of the driver, as a device.
        let volume = driver.volume("other", 8 * MIB, block());
        driver.with_device(&volume, |device| {
            support::write_direct(device, 0, &vec![0xdd; 8 * MIB as usize]);
            rig.json(&["restore", "b", "--to", path(device)]);
            support::kernel::drop_page_cache();
            rig.holds(device, "b");
        });
        // A new volume.
        rig.json(&["restore", "a", "--to-volume", "new"]);
        rig.refused(&["restore", "a", "--to-volume", "new"], "exists already");
        let ids = volume_ids(driver);
        let id = ids.iter().find(|id| id.starts_with("vol-new-")).unwrap();
        driver.with_device(id, |device| rig.holds(device, "a"));
    });
}

#[test]
fn a_target_that_is_in_use_is_never_overwritten() {
    with_driver(|driver| {
        let rig = two_backups(driver, "v");
        let image = driver.scratch().join("image");
        let content = vec![0xee; 9 * MIB as usize];
        fs::write(&image, &content).unwrap();
        let refuse = |target: &Path, words: &str| {
            for flags in [&["--overwrite"][..], &["--resume"]] {
                let command = ["restore", "b", "--to", path(target)];
                rig.refused(&[&command[..], flags].concat(), words);
            }
        };
        // An attached file, for writing or not, under any of its names.
        for flags in [&[][..], &["--read-only"]] {
            let device = Device::attach(&image, flags);
            let link = driver.scratch().join(format!("link-{}", flags.len()));
            fs::hard_link(&image, &link).unwrap();
            refuse(&image, device.path());
            refuse(&link, device.path());
        }
        // A file that another process writes.
        let open = File::options().write(true).open(&image).unwrap();
        refuse(&image, "open for writing in another program");
        drop(open);
        // A device that is attached as another one.
        let volume = driver.volume("other", 9 * MIB, block());
        driver.with_device(&volume, |device| {
            let upper = Device::attach(device, &[]);
            refuse(device, upper.path());
            drop(upper);
            let open = File::options().write(true).open(device).unwrap();
            refuse(device, "is open for writing in process");
            drop(open);
        });
        // A device whose file is attached twice.
        let twins = [(); 2].map(|()| Device::attach(&image, &[]));
        refuse(Path::new(twins[0].path()), twins[1].path());
        drop(twins);
        // Files of the pool, whether they exist or not.
        let pool = driver.data_dir();
        for file in [pool.join("pool.img"), pool.join("new"), pool.join("a/b")] {
            refuse(&file, "belongs to the pool");
        }
        let map =
            ["snapshot", "map", "b", "--file", path(&pool.join("map.svg"))].map(str::to_owned);
        let drawn = driver.cli(&map.each_ref().map(String::as_str));
        let error = String::from_utf8_lossy(&drawn.stderr);
        assert!(!drawn.status.success() && error.contains("belongs to the pool"), "{error}");
        assert!(fs::read(&image).unwrap() == content);
        rig.json(&["restore", "b", "--to", path(&image), "--overwrite"]);
    });
}

#[test]
#[ignore = "full tier"]
fn holes_stay_holes_and_a_smaller_target_is_refused() {
    with_driver(|driver| {
        let mut rig = Rig::new(driver, "v", GIB / 2);
        rig.snapshot("a", 10);
        rig.create("a", &[]);
        let target = driver.scratch().join("image");
        rig.json(&["restore", "a", "--to", path(&target)]);
        let used = |target: &Path| {
            use std::os::unix::fs::MetadataExt;
            target.metadata().unwrap().blocks() * 512
        };
        assert!(used(&target) < 4 * MIB, "{} bytes are used", used(&target));
        File::options().write(true).open(&target).unwrap().set_len(GIB / 4).unwrap();
        rig.refused(&["restore", "a", "--to", path(&target), "--overwrite"], "larger target");
        rig.refused(&["restore", "a", "--to", "/dev/no-such-disk"], "no such device");
        rig.refused(&["restore", "z", "--to", path(&target)], "no backup");
    });
}

#[test]
#[ignore = "full tier"]
fn a_restore_continues_with_what_is_missing() {
    with_driver(|driver| {
        let rig = two_backups(driver, "v");
        let target = driver.scratch().join("image");
        let whole = rig.json(&["restore", "a", "--to", path(&target)]);
        let file = File::options().write(true).open(&target).unwrap();
        use std::os::unix::fs::FileExt;
        file.write_all_at(&[1; 100], 3 * MIB + 5).unwrap();
        // A target that is open for writing is refused.
        drop(file);
        let again = rig.json(&["restore", "a", "--to", path(&target), "--resume"]);
        rig.holds(&target, "a");
        assert!(again["kept_bytes"].as_u64() > Some(0), "{again}");
        assert!(again["written_bytes"].as_u64() < whole["written_bytes"].as_u64(), "{again}");
    });
}

#[test]
fn a_foreign_base_and_a_wrong_order_are_refused() {
    with_driver(|driver| {
        let mut rig = two_backups(driver, "v");
        let other = driver.volume("w", 8 * MIB, block());
        driver.snapshot("other", &other);
        rig.refused(&["backup", "create", "other", "--base", "a"], "is a backup of volume");
        rig.refused(&["backup", "create", "a", "--base", "b"], "is newer than");
        rig.refused(&["backup", "create", "b", "--base", "b"], "the same snapshot");
        rig.snapshot("c", 3);
        rig.refused(&["backup", "create", "c", "--base", "z"], "no backup");
        rig.refused(&["backup", "create", "nothing"], "no snapshot");
        assert_eq!(rig.list().len(), 2);
        // Another volume begins a chain of its own.
        assert_eq!(rig.create("other", &["--base", "auto"])["kind"], "full");
        assert_eq!(rig.create("c", &["--base", "auto"])["kind"], "incremental");
        rig.verify();
    });
}

#[test]
fn prune_removes_only_what_no_kept_backup_needs() {
    with_driver(|driver| {
        let mut rig = two_backups(driver, "v");
        rig.snapshot("c", 10);
        rig.create("c", &["--full"]);
        rig.snapshot("d", 10);
        rig.create("d", &["--base", "c"]);
        let planned = rig.json(&["backup", "prune", "--keep-last", "1", "--dry-run"]);
        assert_eq!((planned["removed"].as_array().unwrap().len(), rig.list().len()), (2, 4));
        let pruned = rig.json(&["backup", "prune", "--keep-last", "1"]);
        assert_eq!(pruned["removed"], planned["removed"]);
        assert_eq!(pruned["kept_for_others"].as_array().unwrap().len(), 1);
        rig.verify();
        rig.restores("d");
        rig.refused(&["restore", "b", "--to", "/dev/null"], "no backup");
        assert_eq!(
            rig.json(&["backup", "prune", "--keep-within", "1h"])["removed"],
            serde_json::json!([])
        );
        // Nothing of the removed ones remains.
        let backups = fs::read_dir(rig.directory().join("backups")).unwrap().count();
        assert_eq!(backups, 2);
    });
}

#[test]
#[ignore = "full tier"]
fn a_copy_restores_and_may_have_another_key() {
    with_driver(|driver| {
        let rig = two_backups(driver, "v");
        let (key, other_key) = (driver.scratch().join("key"), driver.scratch().join("other-key"));
        fs::write(&key, [3; 32]).unwrap();
        fs::write(&other_key, [4; 32]).unwrap();
        let to = driver.scratch().join("copy");
        let flags = ["--to", path(&to), "--to-key-file", path(&key)];
        let copied = rig.json(&[&["backup", "copy"][..], &flags].concat());
        assert_eq!(copied["copied"].as_array().unwrap().len(), 2);
        let again = rig.json(&[&["backup", "copy", "b"][..], &flags].concat());
        assert_eq!(again["copied"], serde_json::json!([]));
        let listed = rig.list();
        let mut copy = Rig::new(driver, "w", MIB);
        copy.images = rig.images.clone();
        copy.repository[1] = path(&to).to_owned();
        copy.fails(12, &["backup", "list"], "is encrypted");
        copy.repository.extend(["--key-file".to_owned(), path(&other_key).to_owned()]);
        copy.fails(12, &["backup", "list"], "not the key");
        copy.repository[3] = path(&key).to_owned();
        copy.verify();
        copy.restores("b");
        let snapshots = |list: &[serde_json::Value]| {
            list.iter().map(|one| one["snapshot_id"].clone()).collect::<Vec<_>>()
        };
        assert_eq!(snapshots(&copy.list()), snapshots(&listed));
        // Not even names are readable in it.
        for file in files(&to).iter().filter(|file| file.ends_with("manifest")) {
            let bytes = fs::read(file).unwrap();
            assert!(!bytes.windows(8).any(|window| window == b"snapshot"), "{}", file.display());
        }
        rig.fails(12, &["backup", "list", "--key-file", path(&key)], "is not encrypted");
    });
}

#[test]
fn the_library_example_makes_the_same_image() {
    with_driver(|driver| {
        let mut rig = Rig::new(driver, "v", 8 * MIB);
        let image = driver.scratch().join("image");
        let example = Path::new(binary()).with_file_name("examples").join("backup");
        let mut base = Vec::new();
        for name in ["a", "b"] {
            let id = rig.snapshot(name, 40);
            let volume = driver.copy(&format!("copy-{name}"), Source::Snapshot(&id), block());
            driver.with_device(&volume, |device| {
                let mut command = Command::new(&example);
                command.arg(driver.endpoint()).arg(device).arg(&image).arg(&id).args(&base);
                let output = command.output().unwrap();
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            });
            rig.holds(&image, name);
            base = vec![id];
        }
    });
}

#[test]
#[ignore = "full tier"]
fn a_group_is_backed_up_and_restored_as_a_set() {
    with_driver(|driver| {
        let volumes = ["one", "two"].map(|name| driver.volume(name, 4 * MIB, block()));
        for (seed, volume) in volumes.iter().enumerate() {
            driver.with_device(volume, |device| {
                let bytes = support::pattern(seed as u64, MIB as usize);
                support::write_direct(device, MIB, &bytes);
            });
        }
        driver.ok(create_group_snapshot("g", &[&volumes[0], &volumes[1]]));
        let rig = Rig::new(driver, "v", MIB);
        let output = rig.run(&["backup", "create", "g", "--group"]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let listed = rig.list();
        assert_eq!(listed.len(), 2);
        assert!(listed.iter().all(|one| one["group_complete"] == true), "{listed:?}");
        let to = driver.scratch().join("set");
        let output = rig.run(&["restore", "g", "--group", "--to", path(&to)]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        for (seed, name) in ["one", "two"].iter().enumerate() {
            let bytes = fs::read(to.join(format!("{name}.img"))).unwrap();
            let mut expected = vec![0; 4 * MIB as usize];
            expected[MIB as usize..2 * MIB as usize]
                .copy_from_slice(&support::pattern(seed as u64, MIB as usize));
            assert!(bytes == expected, "{name}");
        }
        // With one member missing it is no set any more.
        let id = text(&listed[0]["id"]).to_owned();
        fs::remove_dir_all(rig.directory().join("backups").join(id)).unwrap();
        rig.refused(&["restore", "g", "--group", "--to", path(&to)], "incomplete");
        rig.refused(&["backup", "show", "g", "--group"], "incomplete: 1 of 2");
        // Repeated, the backup completes it.
        let repeated = rig.json(&["backup", "create", "g", "--group"]);
        assert_eq!((rig.list().len(), &repeated[1]["id"]), (2, &listed[1]["id"]), "{repeated}");
        assert_eq!(rig.json(&["backup", "show", "g", "--group"]).as_array().unwrap().len(), 2);
    });
}

/// A filesystem under change: ten incremental backups, snapshots deleted on the way.
#[test]
#[ignore = "full tier"]
fn ten_incrementals_of_a_busy_filesystem_are_exact() {
    let Some(driver) = driver_with(PoolKind::Image, &[]) else { return };
    let volume = driver.volume("busy", 96 * MIB, mounted("ext4"));
    let target = driver.publish(&volume, &mounted("ext4"));
    let mut rig = Rig::new(&driver, "unused", MIB);
    let history = History::default();
    let stop = std::sync::atomic::AtomicBool::new(false);
    let paths: Vec<_> = (0..4).map(|number| target.join(format!("file-{number}"))).collect();
    std::thread::scope(|scope| {
        let _stop = SetOnDrop(&stop);
        scope.spawn(|| Exerciser::new(&paths, Random::new_seed(), &history).run(&stop));
        let mut snapshots = Vec::new();
        for number in 0..11 {
            std::thread::sleep(std::time::Duration::from_millis(400));
            run("fstrim", &[path(&target)]);
            let name = format!("s{number}");
            let id = driver.snapshot(&name, &volume);
            let copy = driver.copy(&format!("copy-{number}"), Source::Snapshot(&id), block());
            driver.with_device(&copy, |device| {
                rig.images.insert(name.clone(), fs::read(device).unwrap());
            });
            driver.ok(delete_volume(&copy));
            let kind = rig.create(&name, &["--base", "auto"])["kind"].clone();
            assert_eq!(kind, if number == 0 { "full" } else { "incremental" });
            snapshots.push(id);
            if number % 3 == 2 {
                driver.ok(delete_snapshot(&snapshots[number - 1]));
            }
        }
    });
    rig.verify();
    for number in 0..11 {
        rig.restores(&format!("s{number}"));
    }
}
