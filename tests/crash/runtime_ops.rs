//! Kills crust_ops or injects an error between any two steps of a stage or unstage. The repeated
//! call converges after the next start.

use std::collections::BTreeSet;
use std::path::Path;

use support::have_root;
use support::ops::Ops;
use support::path;
use support::points::Points;

/// Prefix of its fail points.
pub const POINTS: &str = "crust.";

/// Stages and unstages a volume repeatedly, interrupted at each fail point in turn.
fn converges(how: &str, stages: bool, seen: &mut BTreeSet<String>) {
    for at in 1.. {
        let mut ops = Ops::start(&[]);
        let points = Points::new();
        let target = ops.target("mount");
        if !stages {
            ops.stage(ops.staging(&target)).unwrap();
            ops.entry(&target).write_runtime_cli(Path::new("/bin/true")).unwrap();
        }
        assert!(ops.stop().success());
        ops.start_with(&["--fail-points", path(points.path())]);
        points.plan(how, at, POINTS);
        let call = |ops: &Ops| match stages {
            true => ops.stage(ops.staging(&target)),
            false => ops.unstage(&target),
        };
        let first = call(&ops);
        points.clear();
        if points.met().len() < at {
            first.unwrap();
            seen.extend(points.met());
            return;
        }
        // The entry is complete or missing.
        let half = ops.entry(&target).mount_info().unwrap();
        first.unwrap_err();
        if how == "kill" {
            ops.wait();
            ops.start_with(&[]);
        }
        call(&ops).unwrap();
        assert_eq!(
            ops.entry(&target).mount_info().unwrap().is_some(),
            stages,
            "{how} {at}: {half:?}"
        );
        assert_eq!(ops.entry(&target).path().exists(), stages);
        ops.unstage(&target).unwrap();
        assert_eq!(ops.entry(&target).runtime_files().unwrap(), Vec::<String>::new());
        drop(ops);
    }
}

#[test]
fn a_crust_ops_call_converges_after_a_crash_at_any_step() {
    if !have_root() {
        return;
    }
    let mut seen = BTreeSet::new();
    for how in ["kill", "error"] {
        converges(how, true, &mut seen);
        converges(how, false, &mut seen);
    }
    let expected = ["entry.made", "entry.removed", "file.named", "file.removed", "file.written"];
    assert_eq!(seen, expected.map(|name| format!("{POINTS}{name}")).into());
}
