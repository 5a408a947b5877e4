//! `restore --from`: what the device holds is proven, and only what differs is written.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use support::driver::*;
use support::ops::Device;
use support::{BLOCK, MIB, path};

use super::{Rig, two_backups};

/// Bytes of data that a restore must write where the device holds `old`.
fn differing(old: &[u8], new: &[u8]) -> u64 {
    let block = BLOCK as usize;
    let pairs = old.chunks(block).zip(new.chunks(block));
    pairs.filter(|(old, new)| old != new && new.iter().any(|byte| *byte != 0)).count() as u64
        * BLOCK
}

/// No snapshot of a restore remains.
#[track_caller]
fn assert_no_snapshot(driver: &Driver) {
    let all = all_snapshots(driver);
    assert!(all.iter().all(|one| !one.snapshot_id.contains("restore")), "{all:?}");
}

/// Writes a few blocks to the device of the volume, as a program does that no snapshot follows.
fn scribble(rig: &mut Rig<'_>, device: &Path) {
    let file = File::options().write(true).open(device).unwrap();
    for _ in 0..5 {
        let at = rig.random.below(rig.content.len() as u64 / BLOCK) * BLOCK;
        file.write_all_at(&[0xab; BLOCK as usize], at).unwrap();
        let from = usize::try_from(at).unwrap();
        rig.content[from..from + BLOCK as usize].fill(0xab);
    }
}

#[test]
fn a_restore_in_place_writes_only_what_differs() {
    with_driver(|driver| {
        let mut rig = two_backups(driver, "v");
        rig.snapshot("other", 10);
        for snapshot in all_snapshots(driver) {
            driver.ok(delete_snapshot(&snapshot.snapshot_id));
        }
        let device = driver.publish(&rig.volume, &block());
        scribble(&mut rig, &device);
        // Back and forth: the device holds what was restored and what changed since.
        let mut written = 0;
        for (wanted, held) in [("a", "b"), ("b", "b"), ("b", "a"), ("a", "a")] {
            let restore = ["restore", wanted, "--to", path(&device), "--from", held];
            let done = rig.json(&restore);
            rig.holds(&device, wanted);
            let expected = differing(&rig.content, &rig.images[wanted]);
            assert_eq!(done["written_bytes"], expected, "{wanted} from {held}");
            written += expected;
            assert_eq!(rig.json(&restore)["written_bytes"], 0, "again");
            rig.content.clone_from(&rig.images[wanted]);
            scribble(&mut rig, &device);
        }
        assert!((1..4 * MIB).contains(&written), "{written}");
        assert_no_snapshot(driver);
        // The changes are tracked: an incremental backup has what the restore wrote.
        driver.take_down(&rig.volume);
        rig.snapshot("later", 0);
        assert_eq!(rig.create("later", &[])["kind"], "incremental");
        rig.restores("later");
    });
}

#[test]
#[ignore = "full tier"]
fn a_restore_in_place_of_a_grown_volume_is_exact() {
    for_each_driver(|driver| {
        let mut rig = Rig::new(driver, "v", 8 * MIB);
        rig.encrypt(Some([3; 32]));
        rig.snapshot("a", 60);
        rig.create("a", &[]);
        driver.ok(expand(&rig.volume, 12 * MIB));
        rig.content.resize(12 * MIB as usize, 0);
        rig.snapshot("b", 60);
        rig.create("b", &["--full"]);
        rig.snapshot("c", 20);
        let device = driver.publish(&rig.volume, &block());
        for (wanted, held) in [("a", "b"), ("b", "a"), ("a", "a")] {
            rig.json(&["restore", wanted, "--to", path(&device), "--from", held]);
            let mut image = rig.images[wanted].clone();
            image.resize(12 * MIB as usize, 0);
            assert!(fs::read(&device).unwrap() == image, "{wanted} from {held}");
        }
        assert_no_snapshot(driver);
        driver.take_down(&rig.volume);
    });
}

#[test]
#[ignore = "full tier"]
fn a_restore_in_place_refuses_what_it_cannot_prove() {
    with_driver(|driver| {
        let rig = two_backups(driver, "v");
        let device = driver.publish(&rig.volume, &block());
        let place = path(&device).to_owned();
        let restore = |to: &str, from: &str, words: &str| {
            rig.refused(&["restore", "a", "--to", to, "--from", from], words);
            rig.holds(&device, "b");
            assert_no_snapshot(driver);
        };
        let file = driver.scratch().join("file");
        fs::write(&file, b"precious").unwrap();
        restore(path(&file), "b", "is no block device; restore the whole volume");
        restore("-", "b", "is no block device");
        restore(&place, "nothing", "--from: no backup");
        let command = ["restore", "a", "--to", &place, "--from", "b", "--resume"];
        rig.fails(2, &command, "cannot be used with");
        // The device of another volume.
        let other = driver.volume("other", 8 * MIB, block());
        let second = driver.publish(&other, &block());
        restore(path(&second), "b", "is not the device of its volume");
        driver.take_down(&other);
        // Another program writes to it, without a mount.
        let writer = File::options().write(true).open(&device).unwrap();
        restore(&place, "b", "is open for writing in process");
        drop(writer);
        // A second device has a page cache of its own.
        let third = Device::attach(&device, &[]);
        restore(&place, "b", "is attached to");
        drop(third);
        // The driver does not know the changes since.
        driver.ok(modify(&rig.volume, &[("changeTracking", "false")]));
        restore(&place, "b", "does not know what changed since; restore the whole volume");
        // The whole restore is the next step.
        rig.json(&["restore", "a", "--to", &place]);
        rig.holds(&device, "a");
        driver.take_down(&rig.volume);
        // Without a device, and without the volume.
        let gone = ["restore", "a", "--to", "/dev/loop-control", "--from", "b"];
        rig.refused(&gone, "is no block device");
        driver.ok(delete_volume(&rig.volume));
        let other = driver.publish(&other, &block());
        rig.refused(&["restore", "a", "--to", path(&other), "--from", "b"], "nothing proves");
    });
}

#[cfg(feature = "failpoints")]
#[test]
#[ignore = "full tier"]
fn a_killed_restore_in_place_converges() {
    with_driver(|driver| {
        let mut rig = Rig::new(driver, "v", 24 * MIB);
        rig.snapshot("a", 100);
        rig.create("a", &[]);
        rig.snapshot("b", 100);
        rig.create("b", &[]);
        rig.snapshot("c", 30);
        let device = driver.publish(&rig.volume, &block());
        let restore = ["restore", "a", "--to", path(&device), "--from", "b"];
        let plans = driver.scratch().join("plans");
        fs::create_dir(&plans).unwrap();
        let mut kills = 0;
        for number in 1.. {
            fs::write(plans.join("plan"), format!("kill {number} restore.")).unwrap();
            let mut command = rig.command(&restore);
            let output = command.env("CSI_LOOPBACK_FAIL_POINTS", &plans).output().unwrap();
            if output.status.success() {
                break;
            }
            let error = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), None, "{error}");
            kills += 1;
            // Another program writes before the command is repeated.
            scribble(&mut rig, &device);
        }
        rig.holds(&device, "a");
        assert_no_snapshot(driver);
        assert!(kills > 3, "{kills}");
        driver.take_down(&rig.volume);
    });
}
