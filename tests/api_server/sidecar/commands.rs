//! The commands for users, as a backup application's ServiceAccount, with discovery of the service.

use std::process::{Command, Output, Stdio};
use support::cluster::shared;
use support::driver::binary;

use nix::sys::signal::Signal;
use serde_json::Value;

use super::relay::{extent, with_long_delta};
use support::cluster::access::backup_rules;
use support::cluster::programs::stdout_of;
use support::cluster::sidecar::spawn_at;
use support::cluster::sidecar_rig::{AUDIENCE, Rig};
use support::driver::{Source, block, wait_for};
use support::{BLOCK, path, read_all};

fn command(rig: &Rig<'_>, arguments: &[&str]) -> Command {
    let mut command = Command::new(binary());
    let kubeconfig = rig.cluster.kubeconfig_of(&rig.backup);
    command
        .arg("snapshot")
        .args(arguments)
        .args([
            "--namespace",
            &rig.namespace,
            "--kubeconfig",
            path(&kubeconfig),
            "--output",
            "json",
        ])
        .stdin(Stdio::null());
    command
}

fn found(output: Output) -> Vec<(u64, u64)> {
    let json: Value = serde_json::from_str(&stdout_of(output)).unwrap();
    let extents = json["extents"].as_array().unwrap().iter();
    extents.map(|one| (one["offset"].as_u64().unwrap(), one["length"].as_u64().unwrap())).collect()
}

#[test]
fn commands_find_the_service_by_snapshot_name() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    cluster.grant(&rig.backup, &backup_rules());
    rig.write(1, [3]);
    let first = rig.snapshot("first");
    rig.write(2, [3, 9]);
    rig.snapshot("second");
    let all = found(command(&rig, &["allocated", "second"]).output().unwrap());
    assert_eq!(all, [(3 * BLOCK, BLOCK), (9 * BLOCK, BLOCK)]);
    let by_handle = ["delta", "--base-id", &first.handle, "second"];
    for arguments in [&["delta", "first", "second"][..], &by_handle] {
        let changed = found(command(&rig, arguments).output().unwrap());
        assert_eq!(changed, [(3 * BLOCK, BLOCK), (9 * BLOCK, BLOCK)], "{arguments:?}");
    }
    // A projected token works, too.
    let token = cluster.write("token", &cluster.token(&rig.backup, Some(AUDIENCE)));
    let all =
        command(&rig, &["allocated", "first", "--token-file", path(&token)]).output().unwrap();
    assert_eq!(found(all), [(3 * BLOCK, BLOCK)]);
    let refused = command(&rig, &["allocated", "none"]).output().unwrap();
    let words = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && words.contains("none"), "{refused:?}");
}

#[test]
fn commands_survive_a_killed_sidecar_and_driver() {
    let Some(cluster) = shared() else { return };
    let count = 1_000_000;
    let mut rig = with_long_delta(cluster, count, &[]);
    cluster.grant(&rig.backup, &backup_rules());
    // Its output is not read at first, so that it is in progress when the others are killed.
    let mut child = command(&rig, &["delta", "first", "second"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    wait_for("the answer is under way", || rig.metric("csi_loopback_sidecar_streams_open ") == 1.0);
    rig.sidecar.process.signal(Signal::SIGKILL);
    rig.driver.kill();
    let mut reader = child.stdout.take().unwrap();
    let reading = std::thread::spawn(move || {
        let mut text = Vec::new();
        std::io::Read::read_to_end(&mut reader, &mut text).unwrap();
        text
    });
    rig.driver.start_again();
    // The same address: the published object names it.
    restart_at_its_place(&mut rig);
    let output = child.wait_with_output().unwrap();
    let stdout = reading.join().unwrap();
    let whole = found(Output { stdout, ..output.clone() });
    assert!(whole.into_iter().eq((0..count).map(extent)));
    let notes = String::from_utf8_lossy(&output.stderr);
    assert!(notes.contains("resuming from byte"), "{notes}");
}

#[test]
fn verify_and_map_work_through_kubernetes() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    cluster.grant(&rig.backup, &backup_rules());
    rig.write(1, [3]);
    let first = rig.snapshot("first");
    rig.write(2, [3, 9]);
    let second = rig.snapshot("second");
    // In the place of devices: a foreign driver's are restored claims.
    let image = |snapshot: &str, name: &str| {
        let copy = rig.driver.copy(name, Source::Snapshot(snapshot), block());
        let file = rig.driver.scratch().join(name);
        std::fs::write(&file, rig.driver.with_device(&copy, read_all)).unwrap();
        file
    };
    let (source, target) = (image(&first.handle, "source"), image(&second.handle, "target"));
    let devices = ["--source", path(&source), "--target", path(&target)];
    let verified = |arguments: &[&str]| -> Value {
        let output = command(&rig, &[&["verify"], arguments].concat()).output().unwrap();
        serde_json::from_str(&stdout_of(output)).unwrap()
    };
    let delta = verified(&[&["first", "second"], &devices[..]].concat());
    assert_eq!((&delta["proven"], &delta["differing_blocks"]), (&true.into(), &2.into()));
    let allocated = verified(&[&["second"], &devices[2..]].concat());
    assert_eq!((&allocated["proven"], &allocated["reported_blocks"]), (&true.into(), &2.into()));
    let refused = command(&rig, &["verify", "first", "second"]).output().unwrap();
    let words = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && words.contains("--target DEV"), "{words}");

    let output = command(&rig, &["map", "first", "second", "--width", "8"]).output().unwrap();
    let rows: Value = serde_json::from_str(&stdout_of(output)).unwrap();
    assert_eq!((&rows[0]["bytes"], &rows[1]["bytes"]), (&BLOCK.into(), &(2 * BLOCK).into()));
    assert_eq!((&rows[0]["snapshot"], &rows[1]["kind"]), (&"first".into(), &"changed".into()));
}

fn restart_at_its_place(rig: &mut Rig<'_>) {
    rig.sidecar.process.stop();
    let (ports, kubeconfig) =
        ((rig.sidecar.port, rig.sidecar.http_port), rig.cluster.kubeconfig_of(&rig.own));
    let socket = rig.driver.socket();
    rig.sidecar = spawn_at(ports, rig.cluster, &socket, &kubeconfig, &rig.certificate, &[]);
}
