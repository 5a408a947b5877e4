//! The runtime's program: how it is called, and each way in which it can fail.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::Path;

use csi_loopback::proto::crust as api;
use tonic::Code;

use super::with_ops;
use api::volume_usage::Unit;
use support::kernel::wait_for;
use support::ops::{Ops, assert_code};
use support::path;

const FINE: &str = r#"echo '{"usage":[{"unit":"BYTES","total":10,"used":4,"available":6},{"unit":2,"total":5}],"volume_condition":{"abnormal":false,"message":"fine"},"news":1}'"#;

#[test]
fn the_runtime_program_reports_usage_and_expands() {
    with_ops(&["--cli-env", "CONFIG=/some/where"], |ops| {
        let seen = ops.scratch().join("seen");
        let note = format!("{{ printf '%s|' \"$@\"; pwd; env; }} >> {}", path(&seen));
        let grow = "[ \"$2\" = stats ] || { echo '{\"capacity_bytes\":8192}'; exit; }";
        // A path with characters that a shell would interpret.
        let target = ops.claimed("a b;$(id)", &format!("{note}\n{grow}\n{FINE}"));
        let stats = ops.stats(&target).unwrap();
        let bytes = &stats.usage[0];
        assert_eq!(
            (bytes.unit(), bytes.total, bytes.used, bytes.available),
            (Unit::Bytes, 10, 4, 6)
        );
        assert_eq!((stats.usage[1].unit(), stats.usage[1].total), (Unit::Inodes, 5));
        assert_eq!(stats.volume_condition.unwrap().message, "fine");
        assert_eq!(ops.expand(&target, 4096, 1 << 40).unwrap(), 8192);
        let seen = fs::read_to_string(seen).unwrap();
        assert!(seen.contains(&format!("crust|stats|{target}|/\n")), "{seen}");
        assert!(seen.contains(&format!("crust|resize|{target}|4096|1099511627776|/\n")), "{seen}");
        assert!(seen.contains("CONFIG=/some/where\n"), "{seen}");
        // No variable of this process: only those that a shell sets itself.
        let names: Vec<&str> =
            seen.lines().filter_map(|line| line.split_once('=')).map(|(name, _)| name).collect();
        assert!(
            names
                .iter()
                .all(|name| ["PATH", "CONFIG", "PWD", "OLDPWD", "SHLVL", "_"].contains(name)),
            "{names:?}"
        );
    });
}

#[test]
#[ignore = "full tier"]
fn each_failure_of_a_program_maps_to_a_code() {
    with_ops(&["--cli-timeout", "2s"], |ops| {
        assert_code(ops.stats("/not/staged"), Code::NotFound, "/not/staged");
        assert_code(ops.expand("/not/staged", 0, 0), Code::NotFound, "has no entry");
        let unclaimed = ops.target("unclaimed");
        ops.stage(ops.staging(&unclaimed)).unwrap();
        assert_code(
            ops.stats(&unclaimed),
            Code::FailedPrecondition,
            "no container runtime has claimed",
        );
        let cases = [
            ("fails", "echo 'no such\nvolume' >&2; exit 1", Code::Aborted, "no such volume"),
            (
                "idle",
                "echo 'its container is gone' >&2; exit 3",
                Code::Unavailable,
                "its container is gone",
            ),
            ("killed", "kill -9 $$", Code::Aborted, "signal: 9"),
            ("mute", "exit 7", Code::Aborted, "no message on standard error"),
            ("hangs", "sleep 1000", Code::DeadlineExceeded, "exceeded its timeout of 2s"),
            ("floods", "yes", Code::ResourceExhausted, "65536 bytes"),
            ("no-json", "echo nothing", Code::DataLoss, "not a JSON object"),
            ("says-nothing", "true", Code::DataLoss, "not a JSON object"),
            (
                "negative",
                r#"echo '{"usage":[{"unit":1,"total":-1}],"capacity_bytes":-1}'"#,
                Code::DataLoss,
                "2^63",
            ),
            ("complains", "head -c 1000000 /dev/zero >&2; exit 1", Code::Aborted, "exit status: 1"),
        ];
        for (name, script, code, words) in cases {
            let target = ops.claimed(name, script);
            assert_code(ops.stats(&target), code, words);
            assert_code(ops.expand(&target, 1, 0), code, words);
        }
    });
}

#[test]
fn a_hanging_program_is_killed_with_its_children() {
    with_ops(&["--cli-timeout", "1s"], |ops| {
        let started = ops.scratch().join("started");
        let target =
            ops.claimed("family", &format!("sleep 1000 & echo $! > {}; wait", path(&started)));
        assert_code(ops.stats(&target), Code::DeadlineExceeded, "was killed");
        gone(&started);
        // Also if the program itself has ended and its child keeps the pipe open.
        let target =
            ops.claimed("orphan", &format!("sleep 1000 & echo $! > {}; {FINE}", path(&started)));
        ops.stats(&target).unwrap();
        gone(&started);
    });
}

/// Waits until the process ends whose id is in a file.
fn gone(file: &Path) {
    let process = fs::read_to_string(file).unwrap();
    let stat = format!("/proc/{}/stat", process.trim());
    // A zombie counts as ended.
    wait_for("the child processes end", || {
        fs::read_to_string(&stat).map_or(true, |stat| stat.contains(") Z "))
    });
}

#[test]
fn only_a_program_writable_by_root_alone_is_run() {
    with_ops(&[], |ops| {
        let target = ops.claimed("trusted", FINE);
        let program = ops.scratch().join("runtime-of-trusted");
        ops.stats(&target).unwrap();
        let claim = |program: &Path| ops.entry(&target).write_runtime_cli(program).unwrap();
        let refused = |ops: &Ops, words: &str| {
            assert_code(ops.stats(&target), Code::PermissionDenied, words);
            assert_code(ops.expand(&target, 0, 0), Code::PermissionDenied, words);
        };
        // A link keeps its name, which may select the program's mode.
        let link = ops.scratch().join("link");
        symlink(&program, &link).unwrap();
        claim(&link);
        ops.stats(&target).unwrap();
        for named in ["runtime-of-trusted", "", "./x", "/bin/sh -c id", "/bin/true\n/bin/false"] {
            claim(Path::new(named));
            let code =
                if named == "/bin/sh -c id" { Code::Unimplemented } else { Code::PermissionDenied };
            assert_code(ops.stats(&target), code, "");
        }
        claim(ops.scratch());
        refused(ops, "not an executable file");
        claim(&ops.scratch().join("none"));
        assert_code(ops.stats(&target), Code::Unimplemented, "starting ");
        let broken = ops.program("broken", "");
        fs::write(&broken, "#!/no/such/interpreter\n").unwrap();
        claim(&broken);
        assert_code(ops.stats(&target), Code::Unimplemented, "starting ");
        claim(&program);
        for mode in [0o775, 0o757] {
            fs::set_permissions(&program, fs::Permissions::from_mode(mode)).unwrap();
            refused(ops, "is writable by its group or by others");
        }
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        chown(&program, Some(65534), None).unwrap();
        refused(ops, "is not owned by root");
        chown(&program, Some(0), None).unwrap();
        fs::set_permissions(ops.scratch(), fs::Permissions::from_mode(0o777)).unwrap();
        refused(ops, "is writable by its group or by others");
        fs::set_permissions(ops.scratch(), fs::Permissions::from_mode(0o700)).unwrap();
        ops.stats(&target).unwrap();
        // The file with its path must be as protected as the program.
        let cli = ops.entry(&target).path().join("runtime-cli");
        fs::set_permissions(&cli, fs::Permissions::from_mode(0o622)).unwrap();
        refused(ops, "runtime-cli");
        fs::remove_file(&cli).unwrap();
        symlink(ops.scratch().join("elsewhere"), &cli).unwrap();
        refused(ops, "runtime-cli");
    });
}

#[test]
fn calls_are_serialized_per_target_only() {
    with_ops(&[], |ops| {
        let scratch = path(ops.scratch()).to_owned();
        // It fails if another one runs, and waits until the other target's program has run.
        let script = format!(
            "mkdir {scratch}/inside || exit 9\nuntil [ -e {scratch}/other ]; do sleep 0.01; done\nrmdir {scratch}/inside\n{FINE}"
        );
        let slow = ops.claimed("slow", &script);
        let other = ops.claimed("other-target", &format!("touch {scratch}/other; {FINE}"));
        std::thread::scope(|scope| {
            let ops = &*ops;
            let calls: Vec<_> = (0..4).map(|_| scope.spawn(|| ops.stats(&slow))).collect();
            wait_for("the first program", || Path::new(&scratch).join("inside").exists());
            let unstaged = scope.spawn(|| ops.unstage(&slow));
            ops.stats(&other).unwrap();
            let answers: Vec<_> = calls.into_iter().map(|call| call.join().unwrap()).collect();
            unstaged.join().unwrap().unwrap();
            // Calls after the removal of the entry found none; no call found a partial one.
            for answer in &answers {
                assert!(
                    answer.as_ref().map_or_else(|status| status.code() == Code::NotFound, |_| true),
                    "{answer:?}"
                );
            }
            assert!(answers.iter().any(Result::is_ok));
        });
    });
}
