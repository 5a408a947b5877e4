//! The process: its socket, its directory, its HTTP endpoint, its shutdown.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::{PermissionsExt, symlink};

use nix::sys::signal::Signal;

use super::{mode, with_ops};
use support::http::{HTTP, fetch};
use support::kernel::wait_for;
use support::path;

#[test]
fn a_directory_writable_by_others_fails_the_start() {
    with_ops(&[], |ops| {
        let refused = |flags: &[&str], words: &str| {
            let ended = ops.run_another(flags);
            let said = String::from_utf8_lossy(&ended.stderr).into_owned();
            assert!(!ended.status.success() && said.contains(words), "{said}");
        };
        let open = ops.scratch().join("open");
        fs::create_dir(&open).unwrap();
        let within = open.join("crust");
        for mode in [0o770, 0o1777] {
            fs::set_permissions(&open, fs::Permissions::from_mode(mode)).unwrap();
            refused(&["--crust-dir", path(&open)], "--crust-dir");
        }
        fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
        refused(&["--crust-dir", path(&within)], "is writable by its group or by others");
        refused(&["--layout", "kata", "--kata-dir", path(&within)], "--kata-dir");
        // A directory that another process serves, also by another name.
        let link = ops.scratch().join("link");
        symlink(ops.crust_dir(), &link).unwrap();
        refused(&["--crust-dir", path(&link)], "another process uses this directory");
        fs::write(ops.scratch().join("file"), "").unwrap();
        refused(&["--crust-dir", path(&ops.scratch().join("file"))], "is not a directory");
    });
}

#[test]
fn a_shutdown_waits_for_running_calls() {
    with_ops(&["--socket-mode", "0660"], |ops| {
        assert_eq!(mode(&ops.socket()), 0o660);
        let (begun, go) = (ops.scratch().join("begun"), ops.scratch().join("go"));
        let script = format!(
            "touch {}; until [ -e {} ]; do sleep 0.01; done; echo '{{}}'",
            path(&begun),
            path(&go)
        );
        let target = ops.claimed("slow", &script);
        std::thread::scope(|scope| {
            let ops = &*ops;
            let call = scope.spawn(|| ops.stats(&target));
            wait_for("the program", || begun.exists());
            ops.signal(Signal::SIGTERM);
            wait_for("draining", || ops.log().contains("draining"));
            fs::write(&go, "").unwrap();
            call.join().unwrap().unwrap();
        });
        assert!(ops.wait().success() && !ops.socket().exists());
    });
}

#[test]
fn health_and_metrics_are_served_over_http() {
    with_ops(&HTTP, |ops| {
        let log = ops.log();
        let (_, address) = log.split_once("address=").unwrap();
        let address: SocketAddr = address.split_whitespace().next().unwrap().parse().unwrap();
        let target = ops.target("mount");
        ops.stage(ops.staging(&target)).unwrap();
        ops.stats(&target).unwrap_err();
        let (_, metrics) = fetch(address, "/metrics");
        for line in [
            "csi_loopback_crust_entries 1",
            "csi_loopback_crust_collected_total 0",
            r#"csi_loopback_rpc_duration_seconds_count{method="RuntimeStageVolume",code="OK"} 1"#,
            r#"csi_loopback_rpc_duration_seconds_count{method="RuntimeGetVolumeStats",code="FAILED_PRECONDITION"} 1"#,
        ] {
            assert!(metrics.contains(line), "{line} not in\n{metrics}");
        }
        assert!(fetch(address, "/healthz").0.contains("200"));
        fs::set_permissions(ops.crust_dir(), fs::Permissions::from_mode(0o777)).unwrap();
        let (status, why) = fetch(address, "/healthz");
        assert!(
            status.contains("503") && why.contains("is writable by its group or by others"),
            "{why}"
        );
    });
}
