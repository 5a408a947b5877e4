//! Processes that are killed at any time: what was whole stays whole, and the same command then
//! completes.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use csi_loopback::backend::PoolKind;
use support::driver::*;
use support::random::Random;
use support::{MIB, path, report, setting};

use super::Rig;

/// Runs a command and kills it after a part of the time that it took before. Returns whether it was
/// killed.
fn killed(rig: &Rig<'_>, arguments: &[&str], after: Duration) -> bool {
    let mut child = rig.spawn(arguments);
    thread::sleep(after);
    let ended = child.try_wait().unwrap().is_some();
    let _ = child.kill();
    child.wait().unwrap();
    !ended
}

/// Removes what killed backups have left in the driver: the temporary volumes.
fn remove_temporary(driver: &Driver) {
    for id in volume_ids(driver).iter().filter(|id| id.starts_with("vol-verify-")) {
        let name = id.strip_prefix("vol-").unwrap().rsplit_once('-').unwrap().0.to_owned();
        for root in fs::read_dir(driver.scratch()).unwrap() {
            let at = root.unwrap().path().join(&name);
            if at.is_dir() {
                driver.unpublish(id, &at.join("device"));
                driver.call_patiently(unstaging(id, path(&at.join("staging")))).unwrap();
            }
        }
        driver.ok(delete_volume(id));
    }
}

fn kills(rounds: u64, bytes: u64) {
    let Some(driver) = driver_with(PoolKind::Image, &[]) else { return };
    let mut random = Random::new(Random::new_seed());
    let mut rig = Rig::new(&driver, "v", bytes);
    let writes = bytes / MIB;
    rig.snapshot("s0", writes);
    let begun = Instant::now();
    rig.create("s0", &[]);
    let mut time = begun.elapsed();
    let (mut hit, mut resumed) = (0, 0);
    for round in 1..=rounds {
        let name = format!("s{round}");
        rig.snapshot(&name, writes / 2);
        let flags =
            ["backup", "create", &name, "--base", if round % 4 == 0 { "s0" } else { "auto" }];
        let part = |random: &mut Random, time: Duration| {
            time * u32::try_from(random.below(100)).unwrap() / 100
        };
        hit += u64::from(killed(&rig, &flags, part(&mut random, time)));
        remove_temporary(&driver);
        // The killed one is either whole or not there.
        rig.verify();
        let listed = rig.list();
        let begun = Instant::now();
        if !listed.iter().any(|one| one["snapshot"] == name.as_str()) {
            let output = rig.run(&flags);
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            resumed += u64::from(String::from_utf8_lossy(&output.stdout).contains("continued"));
            time = begun.elapsed();
        }
        let target = driver.scratch().join("image");
        let restore = ["restore", &name, "--to", path(&target)];
        let mut after = part(&mut random, time);
        let _ = fs::remove_file(&target);
        while !killed(&rig, &restore, after) {
            after /= 2;
            fs::remove_file(&target).unwrap();
        }
        hit += 1;
        rig.json(&[&restore[..], &["--resume"]].concat());
        rig.holds(&target, &name);
        if round % 3 == 0 {
            hit += u64::from(killed(
                &rig,
                &["backup", "prune", "--keep-last", "2"],
                part(&mut random, Duration::from_millis(60)),
            ));
            rig.verify();
            rig.json(&["backup", "prune", "--keep-last", "2"]);
            rig.verify();
            rig.restores(&name);
            // A chain of its own, so that prune has something to remove.
            rig.snapshot(&format!("full{round}"), 1);
            rig.create(&format!("full{round}"), &["--full"]);
        }
    }
    report(&format!("{rounds} rounds, {hit} processes killed, {resumed} backups continued"));
}

#[test]
#[ignore = "full tier"]
fn a_killed_backup_restore_or_prune_is_completed_later() {
    kills(setting("BACKUP_KILLS").unwrap_or(3), 24 * MIB);
}

#[test]
#[ignore = "full tier"]
fn a_prune_leaves_a_backup_in_progress_alone() {
    let stall =
        ["--enable-faults", "--fault", "stream-stall,after=1,for=60s,method=GetMetadataAllocated"];
    let Some(driver) = driver_with(PoolKind::Image, &stall) else { return };
    let mut rig = Rig::new(&driver, "v", 4 * MIB);
    rig.snapshot("a", 30);
    let mut child = rig.spawn(&["backup", "create", "a"]);
    let intents = || rig.files_in("intent").len();
    support::kernel::wait_for("the backup has its intent", || intents() == 1);
    let pruned = rig.json(&["backup", "prune", "--keep-last", "1"]);
    assert_eq!(pruned["unfinished_removed"], serde_json::json!([]));
    assert!(rig.list().is_empty());
    child.kill().unwrap();
    child.wait().unwrap();
    // The clock of this machine does not decide: the attempt is as young as its newest object.
    let pruned = rig.json(&["backup", "prune", "--keep-last", "1"]);
    assert_eq!((pruned["unfinished_removed"].as_array().unwrap().len(), intents()), (0, 1));
    remove_temporary(&driver);
}

/// Kills a command at its `number`th step in the repository. Returns whether it had so many.
#[cfg(feature = "failpoints")]
fn killed_at(rig: &Rig<'_>, arguments: &[&str], number: usize) -> bool {
    let plans = rig.driver.scratch().join("plans");
    fs::create_dir_all(&plans).unwrap();
    fs::write(plans.join("plan"), format!("kill {number} backup.")).unwrap();
    let mut command = rig.command(arguments);
    let output = command.env("CSI_LOOPBACK_FAIL_POINTS", &plans).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() || output.status.code().is_none(), "{error}");
    !output.status.success()
}

/// Kills the creation of a backup, and a prune, at each step in a repository of its own.
#[cfg(feature = "failpoints")]
fn kills_at_every_step(rig: &mut Rig<'_>, place: &dyn Fn(&str) -> String) {
    rig.snapshot("a", 20);
    rig.snapshot("b", 10);
    let (mut kills, mut continued) = (0, 0);
    for number in 1.. {
        rig.repository[1] = place(&format!("create-{number}"));
        let create = ["backup", "create", "a"];
        if !killed_at(rig, &create, number) {
            break;
        }
        kills += 1;
        remove_temporary(rig.driver);
        let created = rig.run(&create);
        assert!(created.status.success(), "{}", String::from_utf8_lossy(&created.stderr));
        continued += usize::from(String::from_utf8_lossy(&created.stdout).contains("continued"));
        let created = rig.list()[0]["id"].as_str().unwrap().to_owned();
        rig.verify();
        let target = rig.driver.scratch().join("image");
        rig.json(&["restore", &created, "--to", path(&target)]);
        rig.holds(&target, "a");
        fs::remove_file(&target).unwrap();
    }
    for number in 1.. {
        rig.repository[1] = place(&format!("prune-{number}"));
        rig.create("a", &[]);
        rig.create("b", &["--full"]);
        let prune = ["backup", "prune", "--keep-last", "1"];
        if !killed_at(rig, &prune, number) {
            break;
        }
        kills += 1;
        rig.restores("b");
        rig.json(&prune);
        rig.verify();
        rig.restores("b");
        let listed = rig.list();
        assert!(listed.len() == 1 && listed[0]["snapshot"] == "b", "{listed:?}");
    }
    report(&format!("{kills} kills, {continued} backups continued"));
    assert!(kills > 20 && continued > 0, "{kills} {continued}");
}

#[test]
#[cfg(feature = "failpoints")]
#[ignore = "full tier"]
fn a_kill_at_any_step_in_a_directory_loses_nothing() {
    for key in [None, Some([7; 32])] {
        with_driver(|driver| {
            let mut rig = Rig::new(driver, "v", MIB);
            rig.encrypt(key);
            let scratch = driver.scratch().to_owned();
            kills_at_every_step(&mut rig, &|name| path(&scratch.join(name)).to_owned());
        });
    }
}

#[test]
#[cfg(feature = "failpoints")]
#[ignore = "full tier"]
fn a_kill_at_any_step_in_a_bucket_loses_nothing() {
    for key in [None, Some([7; 32])] {
        with_driver(|driver| {
            let Some(server) = super::s3::Server::start() else { return };
            let mut rig = Rig::new(driver, "v", MIB);
            rig.encrypt(key);
            rig.environment = server.environment();
            rig.environment.push(("AWS_ACCESS_KEY_ID".to_owned(), "id".to_owned()));
            rig.environment.push(("AWS_SECRET_ACCESS_KEY".to_owned(), "key".to_owned()));
            kills_at_every_step(&mut rig, &|name| format!("s3://bucket/{name}"));
        });
    }
}
