//! What nobody takes back.

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
fn an_entry_whose_target_is_gone_is_collected_but_not_while_a_container_runs() {
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
        wait_for("the end of what was left", || !is_there(ops, &left));
        // By now it has looked at all of them.
        assert!([&live, &unsure, &stays].iter().all(|target| is_there(ops, target)));
        fs::remove_file(&running).unwrap();
        wait_for("the end of what has no container", || !is_there(ops, &live));
        assert!(is_there(ops, &unsure) && is_there(ops, &stays));
    });
}

#[test]
fn what_a_downgraded_driver_left_goes_with_the_next_start() {
    with_ops(&["--collect-every", "1h"], |ops| {
        let left = ops.target("left");
        ops.stage(ops.staging(&left)).unwrap();
        fs::remove_dir(&left).unwrap();
        assert!(ops.stop().success());
        assert!(is_there(ops, &left));
        // Nothing was written in it since, for as long as the time between two rounds is.
        ops.start_with(&["--collect-every", "10ms"]);
        wait_for("the end of what was left", || !is_there(ops, &left));
    });
}

#[test]
fn halves_of_entries_are_collected_and_what_is_no_entry_is_left_alone() {
    with_ops(&SOON, |ops| {
        let half = ops.target("half");
        ops.stage(ops.staging(&half)).unwrap();
        fs::remove_file(ops.entry(&half).path().join("mountInfo.json")).unwrap();
        let empty = ops.crust_dir().join("0".repeat(64));
        fs::create_dir(&empty).unwrap();
        let partial = ops.crust_dir().join(".partial.1.1");
        fs::write(&partial, "half written").unwrap();
        // Of another name than its target has; of no name of ours; a file; with a target that is no path.
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
        wait_for("the end of the halves", || {
            !is_there(ops, &half) && !empty.exists() && !partial.exists()
        });
        assert!(others.iter().chain([&alien, &named]).all(|path| path.exists()));
        wait_for("word of what is left alone", || {
            ops.log().contains("is not the target of this name")
        });
        assert!(alien.join("mountInfo.json").exists());
    });
}
