//! A state directory with foreign content, or one that is not writable.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::cluster::shared;

use csi_loopback::proto::csi::v1 as csi;
use tonic::Code;

use support::cluster::node_proxy::{BoundPod, Rig, Volume, node_proxy_rules};
use support::cluster::recorder::{DEFERRING, Recorder};
use support::driver::wait_for;
use support::{path, run};

/// Replaces a file of an entry.
fn spoil(file: &Path, how: &str) {
    let _ = fs::remove_file(file);
    match how {
        "a link" => symlink("/etc/shadow", file).unwrap(),
        "a pipe" => run("mkfifo", &[path(file)]),
        "a directory" => fs::create_dir(file).unwrap(),
        "no end" => File::create(file).unwrap().set_len(1 << 40).unwrap(),
        "deep" => fs::write(file, "[".repeat(60_000)).unwrap(),
        "half" => fs::write(file, r#"{"deferFSMount": "true", "volumeHandle": "#).unwrap(),
        "another type" => fs::write(file, r#"{"deferFSMount": 7, "volumeHandle": []}"#).unwrap(),
        "no text" => fs::write(file, [0xff; 100]).unwrap(),
        _ => {}
    }
}

const SPOILT: [&str; 9] = [
    "a link",
    "a pipe",
    "a directory",
    "no end",
    "deep",
    "half",
    "another type",
    "no text",
    "nothing at all",
];

#[test]
fn unreadable_entries_are_reported_and_kept() {
    let Some(cluster) = shared() else { return };
    let mut rig = Rig::recording(cluster, &DEFERRING);
    let volumes: Vec<Volume> =
        (0..=SPOILT.len()).map(|number| rig.claim(&format!("data-{number}"))).collect();
    let pods: Vec<BoundPod> = volumes
        .iter()
        .map(|volume| rig.pod(&format!("of-{}", volume.name), &[volume], Some(&volume.name)))
        .collect();
    for (pod, volume) in pods.iter().zip(&volumes) {
        rig.mount(pod, volume).unwrap();
    }
    rig.stop_proxy();
    let mut files = Vec::new();
    for (how, (pod, volume)) in SPOILT.iter().zip(pods.iter().zip(&volumes)) {
        let entry = rig.entry(&rig.target(pod, volume)).path().to_owned();
        // Each of an entry's two files in turn.
        let file = entry.join(if files.len() % 2 == 0 { "vol_data.json" } else { "target" });
        spoil(&file, how);
        files.push(file);
    }
    // A file that was never an entry.
    fs::write(rig.state_dir().join("notes"), "of the administrator").unwrap();
    fs::create_dir(rig.state_dir().join("not a hash")).unwrap();
    rig.start_proxy();
    assert_eq!(rig.metric("csi_loopback_deferred_volumes"), 1.0);
    // The valid entry is unchanged, and a new one is accepted.
    let (pod, volume) = (pods.last().unwrap(), volumes.last().unwrap());
    rig.stats(pod, volume).unwrap();
    assert!(rig.driver.last::<csi::NodeGetVolumeStatsRequest>().defer_fs_ops);
    let new = rig.claim("new");
    let of_new = rig.pod("of-new", &[&new], Some("new"));
    rig.mount(&of_new, &new).unwrap();
    assert!(rig.driver.last::<csi::NodePublishVolumeRequest>().defer_fs_ops);
    rig.unmount(&of_new, &new);
    // The other pods end normally, and unknown files are kept.
    for (how, (pod, volume)) in SPOILT.iter().zip(pods.iter().zip(&volumes)) {
        rig.unpublish(pod, volume).unwrap_or_else(|status| panic!("{how}: {status:?}"));
    }
    rig.unmount(pod, volume);
    assert!(
        files
            .iter()
            .filter(|file| !file.ends_with("target"))
            .any(|file| file.symlink_metadata().is_ok())
    );
    assert_eq!(fs::read_to_string(rig.state_dir().join("notes")).unwrap(), "of the administrator");
    assert!(rig.log().contains("failed to read an entry"), "{}", rig.log());
    assert!(!rig.log().contains("panicked"), "{}", rig.log());
    assert!(Path::new("/etc/shadow").is_file());
    rig.stop_proxy();
}

/// A small separate filesystem.
struct Small(PathBuf);

impl Small {
    fn mount(at: PathBuf) -> Self {
        fs::create_dir(&at).unwrap();
        run("mount", &["-t", "tmpfs", "-o", "size=64k,mode=0700", "none", path(&at)]);
        Self(at)
    }

    fn remount(&self, how: &str) {
        // Not while the proxy writes a file, which it does after events of the watch.
        let options = format!("remount,{how}");
        wait_for(&options, || {
            let mut mount = Command::new("mount");
            mount.args(["-o", &options]).arg(&self.0).status().unwrap().success()
        });
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // After a failed test the proxy still has it open.
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

#[test]
fn a_full_state_directory_fails_only_opted_in_pods() {
    let Some(cluster) = shared() else { return };
    let recorder = Recorder::start(cluster, &DEFERRING);
    let mut rig = Rig::prepare(cluster, recorder, &node_proxy_rules());
    let small = Small::mount(rig.state_dir());
    let volumes = [rig.claim("left"), rig.claim("mounted")];
    let opted = rig.pod("opted", &[&volumes[0]], Some("left"));
    let other = rig.pod("other", &[&volumes[1]], None);
    for how in ["read-only from the start", "read-only later", "full"] {
        match how {
            "read-only from the start" => {
                small.remount("ro");
                rig.start_proxy();
            }
            "read-only later" => small.remount("ro"),
            _ => run("sh", &["-c", &format!("yes > {}/filler || true", path(&small.0))]),
        }
        rig.driver.forget();
        rig.stage(&opted, &volumes[0]).unwrap();
        let status = rig.publish(&opted, &volumes[0]).unwrap_err();
        assert_eq!(status.code(), Code::Unavailable, "{how}: {status:?}");
        assert!(status.message().contains("--state-dir"), "{how}: {status:?}");
        assert!(
            rig.driver.seen_raw("NodePublishVolume").is_empty(),
            "{how}: it never reached the driver"
        );
        assert!(rig.failures("publish", "not_remembered") > 0.0, "{how}");
        rig.mount(&other, &volumes[1]).unwrap();
        assert!(!rig.driver.last::<csi::NodePublishVolumeRequest>().defer_fs_ops, "{how}");
        rig.stats(&other, &volumes[1]).unwrap();
        rig.unmount(&other, &volumes[1]);
        match how {
            "full" => fs::remove_file(small.0.join("filler")).unwrap(),
            _ => small.remount("rw"),
        }
        // Once writable again, it works without a restart.
        cluster.wait_for("it can be written down", || rig.publish(&opted, &volumes[0]).ok());
        assert!(rig.driver.last::<csi::NodePublishVolumeRequest>().defer_fs_ops, "{how}");
        assert!(rig.vol_data(&rig.target(&opted, &volumes[0])).is_some(), "{how}");
        rig.unmount(&opted, &volumes[0]);
    }
    rig.stop_proxy();
    drop(small);
}
