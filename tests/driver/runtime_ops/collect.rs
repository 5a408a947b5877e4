//! Entries that no driver removes.

use std::fs;

use super::with_ops;
use support::kernel::wait_for;
use support::ops::Ops;
use support::path;

const SOON: [&str; 2] = ["--collect-every", "100ms"];

fn is_there(ops: &Ops, target: &str) -> bool {
    ops.entry(target).path().exists()
}

#[test]
fn an_entry_is_collected_after_its_target_and_container() {
    with_ops(&SOON, |ops| {
        let running = ops.scratch().join("running");
        fs::write(&running, "").unwrap();
        let live =
            ops.claimed("live", &format!("[ -e {} ] || exit 3; echo '{{}}'", path(&running)));
        let unsure = ops.claimed("unsure", "exit 1");
        let left = ops.target("left");
        let stays = ops.target("stays");
        for target in [&left, &stays] {
            ops.stage(ops.staging(target)).unwrap();
        }
        for target in [&live, &unsure, &left] {
            fs::remove_dir(target).unwrap();
        }
        wait_for("the leftover entry is removed", || !is_there(ops, &left));
        // Until then it has checked all of them.
        assert!([&live, &unsure, &stays].iter().all(|target| is_there(ops, target)));
        fs::remove_file(&running).unwrap();
        wait_for("the entry without a container is removed", || !is_there(ops, &live));
        assert!(is_there(ops, &unsure) && is_there(ops, &stays));
    });
}

#[test]
fn entries_of_a_downgraded_driver_are_removed_at_start() {
    with_ops(&["--collect-every", "1h"], |ops| {
        let left = ops.target("left");
        ops.stage(ops.staging(&left)).unwrap();
        fs::remove_dir(&left).unwrap();
        assert!(ops.stop().success());
        assert!(is_there(ops, &left));
        // The entry has not changed for longer than the interval between two checks.
        ops.start_with(&["--collect-every", "10ms"]);
        wait_for("the leftover entry is removed", || !is_there(ops, &left));
    });
}

#[test]
fn only_incomplete_entries_are_collected() {
    with_ops(&SOON, |ops| {
        let half = ops.target("half");
        ops.stage(ops.staging(&half)).unwrap();
        fs::remove_file(ops.entry(&half).path().join("mountInfo.json")).unwrap();
        let empty = ops.crust_dir().join("0".repeat(64));
        fs::create_dir(&empty).unwrap();
        let partial = ops.crust_dir().join(".partial.1.1");
        fs::write(&partial, "half written").unwrap();
        // A name that does not match the target; a foreign name; a file; a target that is not a
        // path.
        // path.
        let moved = ops.target("moved");
        ops.stage(ops.staging(&moved)).unwrap();
        let alien = ops.crust_dir().join("f".repeat(64));
        fs::rename(ops.entry(&moved).path(), &alien).unwrap();
        fs::remove_dir(&moved).unwrap();
        let others = [ops.crust_dir().join("README"), ops.crust_dir().join("1".repeat(64))];
        for file in &others {
            fs::write(file, "not an entry").unwrap();
        }
        let named = ops.crust_dir().join("lost+found");
        fs::create_dir(&named).unwrap();
        wait_for("the incomplete entries are removed", || {
            !is_there(ops, &half) && !empty.exists() && !partial.exists()
        });
        assert!(others.iter().chain([&alien, &named]).all(|path| path.exists()));
        wait_for("the log names the kept entries", || {
            ops.log().contains("belongs to an entry of another name")
        });
        assert!(alien.join("mountInfo.json").exists());
    });
}
