//! How the commands are used: exit codes, settings of the environment, targets that are not
//! overwritten, deletion, and keys.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;

use csi_loopback::backend::PoolKind;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use support::driver::*;
use support::{MIB, path};

use super::{Rig, text, two_backups};

const REPOSITORY: &str = "CSI_LOOPBACK_REPOSITORY";
const KEY_FILE: &str = "CSI_LOOPBACK_KEY_FILE";
const KEY_COMMAND: &str = "CSI_LOOPBACK_KEY_COMMAND";

fn key(driver: &Driver, byte: u8) -> String {
    let file = driver.scratch().join(format!("key-{byte}"));
    fs::write(&file, [byte; 32]).unwrap();
    path(&file).to_owned()
}

#[test]
fn exit_codes_of_backup_tell_failures_apart() {
    with_driver(|driver| {
        let [one, two] = [1, 2].map(|byte| key(driver, byte));
        let mut rig = two_backups(driver, "v");
        let place = rig.repository[1].clone();
        // There is no repository: no directory, an empty one, and another format.
        let other = driver.scratch().join("other");
        rig.repository[1] = path(&other).to_owned();
        let to = driver.scratch().join("image");
        let commands =
            [&["backup", "list"][..], &["backup", "verify"], &["restore", "a", "--to", path(&to)]];
        commands.iter().for_each(|command| rig.fails(10, command, "no such directory"));
        fs::create_dir(&other).unwrap();
        commands.iter().for_each(|command| rig.fails(10, command, "there is no repository"));
        assert!(!to.exists());
        // The key.
        rig.repository[1].clone_from(&place);
        rig.fails(12, &["backup", "list", "--key-file", &one], "is not encrypted");
        rig.repository[1] = path(&other).to_owned();
        rig.create("a", &["--key-file", &one]);
        rig.fails(12, &["backup", "list"], "is encrypted");
        rig.fails(12, &["backup", "list", "--key-file", &two], "not the key");
        // Damage.
        rig.repository[1] = place;
        for pack in rig.files_in("packs") {
            let mut bytes = fs::read(&pack).unwrap();
            bytes.iter_mut().for_each(|byte| *byte ^= 1);
            fs::write(&pack, bytes).unwrap();
        }
        rig.fails(3, &["restore", "b", "--to", path(&to)], "damaged");
        let output = rig.run(&["backup", "verify"]);
        assert_eq!(output.status.code(), Some(3));
        // Anything else, and the command line.
        rig.fails(1, &["restore", "nothing", "--to", path(&to)], "no backup");
        rig.fails(2, &["backup", "prune"], "--keep-last");
        rig.fails(2, &["backup", "create", "a", "--full", "--base", "b"], "cannot be used with");
    });
}

#[test]
fn an_interrupted_backup_has_its_own_exit_code() {
    let stall = [
        "--enable-faults",
        "--fault",
        "stream-stall,after=1,times=1,for=60s,method=GetMetadataAllocated",
    ];
    let Some(driver) = driver_with(PoolKind::Image, &stall) else { return };
    let mut rig = Rig::new(&driver, "v", 4 * MIB);
    rig.snapshot("a", 30);
    let mut command = rig.command(&["backup", "create", "a"]);
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let has_intent = || !rig.files_in("intent").is_empty();
    support::kernel::wait_for("the backup has its intent", has_intent);
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM).unwrap();
    let status = child.wait_with_output().unwrap().status;
    assert_eq!((status.code(), status.signal()), (Some(130), None));
    assert!(volume_ids(&driver).iter().all(|id| !id.contains("verify")), "no volume remains");
    assert!(rig.list().is_empty());
    rig.create("a", &[]);
    rig.restores("a");
}

#[test]
fn the_environment_names_repository_and_key() {
    with_driver(|driver| {
        let mut rig = Rig::new(driver, "v", MIB);
        rig.snapshot("a", 5);
        let place = rig.repository[1].clone();
        rig.repository.clear();
        let mut with = |settings: &[(&str, &str)]| {
            rig.environment =
                settings.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
            rig.run(&["backup", "create", "a", "--output", "json"])
        };
        let error = |output: std::process::Output| {
            assert!(!output.status.success());
            String::from_utf8(output.stderr).unwrap()
        };
        let none = error(with(&[]));
        assert!(none.contains("--repository") && none.contains(REPOSITORY), "{none}");
        let unknown = error(with(&[(REPOSITORY, "sftp:host/backups")]));
        assert!(unknown.contains("CSI_LOOPBACK_REPOSITORY=sftp:"), "{unknown}");
        let file = key(driver, 7);
        let both = [(REPOSITORY, &*place), (KEY_FILE, &*file), (KEY_COMMAND, "true")];
        let twice = error(with(&both));
        assert!(twice.contains(KEY_FILE) && twice.contains(KEY_COMMAND), "{twice}");
        let missing = error(with(&[(REPOSITORY, &*place), (KEY_FILE, "/no/such/key")]));
        assert!(missing.contains("CSI_LOOPBACK_KEY_FILE /no/such/key"), "{missing}");
        let made = with(&both[..2]);
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        // The same key, from a command and from a flag, which comes first.
        let printed = format!("cat {file}");
        let again = with(&[(REPOSITORY, &*place), (KEY_COMMAND, &*printed)]);
        assert!(again.status.success(), "{}", String::from_utf8_lossy(&again.stderr));
        rig.environment = vec![(REPOSITORY.to_owned(), "/nowhere".to_owned())];
        rig.repository =
            ["--repository", &*place, "--key-command", &*printed].map(str::to_owned).to_vec();
        rig.verify();
        rig.restores("a");
    });
}

#[test]
fn a_restore_overwrites_no_file_without_a_flag() {
    with_driver(|driver| {
        let rig = two_backups(driver, "v");
        let target = driver.scratch().join("image");
        fs::write(&target, b"precious").unwrap();
        rig.refused(&["restore", "b", "--to", path(&target)], "--overwrite replaces it");
        assert_eq!(fs::read(&target).unwrap(), b"precious");
        fs::remove_file(&target).unwrap();
        rig.json(&["restore", "a", "--to", path(&target)]);
        rig.json(&["restore", "b", "--to", path(&target), "--overwrite"]);
        rig.holds(&target, "b");
        rig.fails(2, &["restore", "b", "--to", path(&target), "--overwrite", "--resume"], "cannot");
        // Also through a symbolic link; an empty file holds nothing.
        let link = driver.scratch().join("link");
        std::os::unix::fs::symlink(&target, &link).unwrap();
        rig.refused(&["restore", "a", "--to", path(&link)], "--overwrite");
        let empty = driver.scratch().join("empty");
        fs::write(&empty, b"").unwrap();
        rig.json(&["restore", "a", "--to", path(&empty)]);
        rig.holds(&empty, "a");
    });
}

#[test]
fn a_restore_to_standard_output_is_the_image() {
    with_driver(|driver| {
        let rig = two_backups(driver, "v");
        let output = rig.run(&["restore", "b", "--to", "-"]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(output.stdout == rig.images["b"]);
        rig.refused(&["restore", "b", "--to", "-", "--resume"], "only one backup");
        // A reader that is gone.
        let mut child = rig.command(&["restore", "a", "--to", "-"]);
        let mut child = child.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        drop(child.stdout.take());
        assert_eq!(child.wait().unwrap().code(), Some(141));
    });
}

#[test]
fn delete_removes_a_backup_that_no_other_needs() {
    with_driver(|driver| {
        let mut rig = two_backups(driver, "v");
        rig.snapshot("c", 10);
        // Incremental without a flag.
        let third = rig.create("c", &[]);
        let [a, b] = [0, 1].map(|number| text(&rig.list()[number]["id"]).to_owned());
        assert_eq!(third["base"], b.as_str());
        rig.refused(&["backup", "delete", &b], "other backups need");
        rig.refused(&["backup", "delete", "nothing"], "no backup");
        rig.refused(&["backup", "delete", "a", "b", "c"], "--remove-last");
        let planned = rig.json(&["backup", "delete", "b", "c", "--dry-run"]);
        assert_eq!((planned["removed"].as_array().unwrap().len(), rig.list().len()), (2, 3));
        rig.json(&["backup", "delete", "b", "c"]);
        assert_eq!((rig.list().len(), text(&rig.list()[0]["id"])), (1, a.as_str()));
        rig.verify();
        rig.restores("a");
        rig.refused(&["backup", "delete", &a[..24]], "--remove-last");
        rig.json(&["backup", "delete", &a[..24], "--remove-last"]);
        assert!(rig.list().is_empty());
        assert_eq!(fs::read_dir(rig.directory().join("backups")).map_or(0, Iterator::count), 0);
    });
}

#[test]
fn a_prune_that_keeps_nothing_needs_a_flag() {
    with_driver(|driver| {
        let mut rig = two_backups(driver, "v");
        rig.refused(&["backup", "prune", "--keep-last", "0"], "--remove-last");
        rig.snapshot("c", 10);
        rig.create("c", &["--full"]);
        // All snapshots are of one day, week, month and year.
        for rule in ["--keep-daily", "--keep-weekly", "--keep-monthly", "--keep-yearly"] {
            let planned = rig.json(&["backup", "prune", rule, "1", "--dry-run"]);
            assert_eq!(planned["removed"].as_array().unwrap().len(), 2, "{rule}");
        }
        rig.json(&["backup", "prune", "--keep-last", "0", "--remove-last"]);
        assert!(rig.list().is_empty());
    });
}

#[test]
fn a_second_key_opens_and_the_first_one_can_go() {
    with_driver(|driver| {
        let [one, two] = [1, 2].map(|byte| key(driver, byte));
        let mut rig = Rig::new(driver, "v", MIB);
        rig.snapshot("a", 5);
        rig.create("a", &["--key-file", &one]);
        let with = |file: &str, rest: &[&str]| -> Vec<String> {
            let words = ["backup", "key"].iter().chain(rest).chain(&["--key-file"]);
            words.map(|word| (*word).to_owned()).chain([file.to_owned()]).collect()
        };
        let run = |file: &str, rest: &[&str]| {
            let words = with(file, rest);
            rig.json(&words.iter().map(String::as_str).collect::<Vec<_>>())
        };
        let only = run(&one, &["list"]);
        let first = text(&only[0]["id"]).to_owned();
        assert_eq!((only.as_array().unwrap().len(), &only[0]["current"]), (1, &json!(true)));
        rig.refused(
            &["backup", "key", "remove", &first, "--key-file", &one],
            "add another one first",
        );
        let added = run(&one, &["add", "--new-key-file", &two]);
        assert_eq!(run(&two, &["list"]).as_array().unwrap().len(), 2);
        run(&two, &["remove", &first]);
        rig.fails(12, &["backup", "list", "--key-file", &one], "not the key");
        assert_eq!(run(&two, &["list"])[0]["id"], added["id"]);
        rig.fails(2, &["backup", "key", "add", "--key-file", &two], "--new-key-file");
        rig.repository.extend(["--key-file".to_owned(), two]);
        rig.restores("a");
    });
}
