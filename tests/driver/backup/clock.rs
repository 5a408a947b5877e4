//! Backups after the clock was set back, of the driver or of the machine that runs the command.

use csi_loopback::backend::PoolKind;
use support::clock::Clock;
use support::driver::*;
use support::{MIB, have_root, skip};
use tempfile::TempDir;

use super::{Rig, text};

const HOUR: i64 = 3600;

fn names(list: &serde_json::Value) -> Vec<&str> {
    list.as_array().unwrap().iter().map(|row| text(&row["name"])).collect()
}

#[test]
fn the_base_of_a_backup_is_earlier_in_the_chain() {
    if !have_root() {
        return;
    }
    let directory = TempDir::new().unwrap();
    let Some(clock) = Clock::new(directory.path()) else {
        skip("no libfaketime");
        return;
    };
    let environment = clock.environment();
    let mut program = vec!["env".to_owned()];
    program.extend(environment.iter().map(|(name, value)| format!("{name}={value}")));
    let program: Vec<&str> = program.iter().map(String::as_str).collect();
    clock.set(HOUR);
    let driver = Driver::run_by(&program, PoolKind::Image, &[]);
    let mut rig = Rig::new(&driver, "v", 8 * MIB);
    rig.environment = environment;
    rig.snapshot("a", 20);
    rig.create("a", &["--base", "auto"]);
    // The clocks of driver and command are set back by an hour, and the next ones ahead again.
    for (snapshot, base, seconds) in [("b", "a", 0), ("c", "b", 0), ("d", "c", 2 * HOUR)] {
        clock.set(seconds);
        rig.snapshot(snapshot, 20);
        let made = rig.create(snapshot, &["--base", "auto"]);
        let listed = rig.list();
        let expected = listed.iter().find(|one| one["snapshot"] == base).unwrap();
        assert_eq!(made["base"], expected["id"], "{made}");
    }
    clock.set(0);
    assert_eq!(names(&driver.cli_json(&["snapshot", "list"])), ["a", "b", "c", "d"]);
    rig.verify();
    for snapshot in ["a", "b", "c", "d"] {
        rig.restores(snapshot);
    }
    // A backup of an earlier snapshot does not count from one of a later snapshot.
    rig.repository[1].push_str("-2");
    rig.create("b", &[]);
    let earlier = rig.create("a", &["--base", "auto"]);
    assert!(text(&earlier["full_because"]).contains("newer than the target"), "{earlier}");
    rig.restores("a");
}
