//! The released sidecar and clients with our driver, and the end of the shared cluster. The behavior
//! of the released sidecar and clients defines what "existing clients work unchanged" means.

use support::cluster::shared;

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::getpid;
use serde_json::Value;
use support::cluster::access::{backup_rules, sidecar_rules};
use support::cluster::processes_of;
use support::cluster::programs::{Process, Served, json_extents, stdout_of, table_extents};
use support::cluster::rig::Rig;
use support::cluster::tls::Authority;
use support::driver::{PATIENCE, wait_for};
use support::{BLOCK, test_name};
use tempfile::TempDir;

const AUDIENCE: &str = "backup";

/// Starts the released sidecar with only the permissions that it needs.
fn released(rig: &Rig<'_>) -> Served {
    let authority = Authority::new("backup authority");
    let certificate = authority.certify(rig.driver.scratch(), "sidecar");
    let (_, kubeconfig) = rig.account("sidecar", &sidecar_rules());
    let cluster = rig.cluster;
    let served = cluster.released_sidecar(&rig.driver.socket(), &kubeconfig, &certificate, &[]);
    cluster.metadata_service(&rig.driver_name, &served.address(), AUDIENCE, &authority.pem());
    served
}

#[test]
fn the_released_sidecar_serves_the_released_clients() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    rig.write(1, [0, 7, 8]);
    let first = rig.snapshot("first");
    rig.write(2, [8, 100]);
    let second = rig.snapshot("second");
    let _served = released(&rig);
    let (backup, kubeconfig) = rig.account("backup", &backup_rules());
    let namespace = rig.namespace.as_str();

    let table = stdout_of(cluster.lister(&kubeconfig, &["-n", namespace, "-s", "first"]));
    assert_eq!(table_extents(&table), [(0, BLOCK), (7 * BLOCK, 2 * BLOCK)], "{table}");
    let changed = [(8 * BLOCK, BLOCK), (100 * BLOCK, BLOCK)];
    for base in [["-p", "first"], ["-P", &first.handle]] {
        let arguments = [&["-n", namespace, "-s", "second", "-o", "json"], &base[..]].concat();
        let json: Value =
            serde_json::from_str(&stdout_of(cluster.lister(&kubeconfig, &arguments))).unwrap();
        assert_eq!(json_extents(&json), changed, "{json}");
    }
    let limited =
        ["-n", namespace, "-s", "second", "-max-results", "1", "-starting-offset", "28672"];
    let table = stdout_of(cluster.lister(&kubeconfig, &limited));
    assert_eq!(table_extents(&table), [(7 * BLOCK, 2 * BLOCK), (100 * BLOCK, BLOCK)], "{table}");

    // A named account and the kubeconfig's account are equivalent.
    let named = ["-service-account", "backup", "-service-account-namespace", namespace];
    let named = [&["-n", namespace, "-s", "first"], &named[..]].concat();
    stdout_of(cluster.lister(&cluster.kubeconfig(), &named));
    let output = cluster.lister(&cluster.kubeconfig(), &["-n", namespace, "-s", "first"]);
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("ServiceAccount"), "{output:?}");

    for base in [&[][..], &["-p", "first"]] {
        rig.verify(&kubeconfig, base, &[0, 7, 8], &second.handle);
    }
    let output = cluster.lister(&kubeconfig, &["-n", "default", "-s", "first"]);
    assert!(!output.status.success(), "{} reads another's", backup.user());
}

/// Runs its own binary with only this test. That process kills itself when its cluster runs.
#[test]
#[ignore = "full tier"]
fn a_killed_test_process_leaves_no_cluster() {
    const IS_TO_DIE: &str = "CSI_LOOPBACK_TEST_IS_TO_DIE";
    if shared().is_none() {
        return;
    }
    if std::env::var_os(IS_TO_DIE).is_some() {
        kill(getpid(), Signal::SIGKILL).unwrap();
    }
    let directory = TempDir::with_prefix("csi-loopback-").unwrap();
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--include-ignored", &test_name()])
        .env(IS_TO_DIE, "yes")
        .env("TMPDIR", directory.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.signal(), Some(Signal::SIGKILL as i32), "{status}");
    wait_for("the cluster of the killed process ends", || {
        let is_empty = directory.path().read_dir().unwrap().next().is_none();
        is_empty && processes_of(directory.path()).is_empty()
    });
}

#[test]
fn a_missing_tool_is_named() {
    let Some(cluster) = shared() else { return };
    let directory = cluster.scratch().join("without");
    let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/hack/cluster.sh"));
    command
        .arg(&directory)
        .env_remove("CSI_LOOPBACK_KUBERNETES")
        .env("XDG_CACHE_HOME", cluster.scratch().join("empty"))
        .env("PATH", "/usr/bin:/bin")
        .env("GOPROXY", "off")
        .env("GOMODCACHE", cluster.scratch().join("no-modules"));
    let mut process = Process::spawn("without", command, cluster.scratch());
    let status = process.wait(PATIENCE).expect("it ends");
    assert_eq!(status.code(), Some(77), "{}", process.log());
    let log = process.log();
    let why = log.lines().last().unwrap();
    assert!(why.contains("Go is not installed") || why.contains("build failed"), "{log}");
}
