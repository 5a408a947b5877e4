//! The released clients, unchanged, and the released sidecar's command line.

use std::os::unix::fs::symlink;
use std::process::Command;
use support::cluster::shared;
use support::driver::binary;

use support::cluster::access::backup_rules;
use support::cluster::programs::{Process, Served, free_port, stdout_of};
use support::cluster::sidecar::http_at;
use support::cluster::sidecar_rig::{Options, Rig, http};
use support::path;

const STYLES: [&[&str]; 2] = [
    &["--block-metadata-type", "variable"],
    &["--block-metadata-type", "fixed", "--block-size", "16Ki"],
];

#[test]
fn the_released_verifier_accepts_full_and_delta() {
    let Some(cluster) = shared() else { return };
    for style in STYLES {
        let rig = Rig::with(cluster, Options { driver: style, ..Options::default() });
        cluster.grant(&rig.backup, &backup_rules());
        let kubeconfig = cluster.kubeconfig_of(&rig.backup);
        let blocks = [0, 7, 8, 9, 500];
        rig.write(1, blocks);
        let first = rig.snapshot("first");
        rig.write(2, [8, 100, 101]);
        let second = rig.snapshot("second");
        for base in [&[][..], &["-p", "first"], &["-P", &first.handle]] {
            rig.verify(&kubeconfig, base, &blocks, &second.handle);
        }
    }
}

#[test]
fn the_released_lister_prints_all_extents() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    cluster.grant(&rig.backup, &backup_rules());
    let kubeconfig = cluster.kubeconfig_of(&rig.backup);
    rig.write(1, [0, 7]);
    rig.snapshot("first");
    rig.write(2, [7, 9]);
    rig.snapshot("second");
    let table = stdout_of(cluster.lister(&kubeconfig, &["-n", &rig.namespace, "-s", "first"]));
    assert_eq!(table.lines().skip(2).count(), 2, "{table}");
    let request =
        ["-n", &rig.namespace, "-s", "second", "-p", "first", "-o", "json", "-max-results", "1"];
    let json: serde_json::Value =
        serde_json::from_str(&stdout_of(cluster.lister(&kubeconfig, &request))).unwrap();
    assert_eq!(json.as_array().unwrap().len(), 2, "a message for each: {json}");
    let refused = cluster.lister(&kubeconfig, &["-n", "default", "-s", "first"]);
    assert!(!refused.status.success());
}

#[test]
fn the_released_command_line_starts_this_sidecar() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::new(cluster);
    cluster.grant(&rig.backup, &backup_rules());
    rig.snapshot("first");
    rig.sidecar.process.stop();
    // As in the released example: the program's name and its arguments, including klog's flags.
    let program = cluster.scratch().join("csi-snapshot-metadata");
    symlink(binary(), &program).unwrap();
    let port = rig.sidecar.port;
    let http_port = free_port();
    let mut command = Command::new(&program);
    command
        .arg(format!("--csi-address={}", path(&rig.driver.socket())))
        .arg(format!("-kubeconfig={}", path(&cluster.kubeconfig_of(&rig.own))))
        .args(["-port", &port.to_string(), "-v=5", "-logtostderr", "-timeout", "30s"])
        .args(["-kube-api-qps", "20", "-kube-api-burst=40", "-max-streaming-duration-min=1"])
        .arg(format!("-http-endpoint=127.0.0.1:{http_port}"))
        .args(["-metrics-path=/numbers", "-stderrthreshold=INFO"])
        .env("TLS_CERT_PATH", &rig.certificate.file)
        .env("TLS_KEY_PATH", &rig.certificate.key);
    let process = Process::spawn("by-name", command, cluster.scratch());
    rig.sidecar = Served { process, port, http_port };
    cluster.wait_for("it is ready", || {
        http_at(http_port, "/health")?.starts_with("HTTP/1.1 200").then_some(())
    });
    assert!(http(&rig.sidecar, "/numbers").contains("driver_ready 1"));
    assert!(http(&rig.sidecar, "/metrics").starts_with("HTTP/1.1 404"));
    let kubeconfig = cluster.kubeconfig_of(&rig.backup);
    stdout_of(cluster.lister(&kubeconfig, &["-n", &rig.namespace, "-s", "first"]));
    assert!(rig.sidecar.process.log().contains("DEBUG"), "-v=5 is debug");
    for version in ["-version", "--version"] {
        let output = Command::new(&program).arg(version).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains(env!("CARGO_PKG_VERSION")), "{output:?}");
    }
}
