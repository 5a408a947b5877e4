//! Read-only publications as a pod gets them: the driver runs in its own mount namespace, and its
//! mounts propagate to the host, as those of a DaemonSet with bidirectional propagation.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use csi_loopback::backend::PoolKind;
use csi_loopback::proto::csi::v1 as csi;
use tempfile::TempDir;

use super::write;
use support::driver::*;
use support::inline::pod_volume;
use support::{MIB, have_root, path, run};

use csi::volume_capability::access_mode::Mode;

/// A directory whose mounts propagate between mount namespaces, as kubelet's.
struct Shared(TempDir);

impl Shared {
    fn new() -> Self {
        let shared = Self(TempDir::with_prefix("csi-loopback-").unwrap());
        let place = path(shared.0.path());
        run("mount", &["--bind", place, place]);
        run("mount", &["--make-private", place]);
        run("mount", &["--make-shared", place]);
        shared
    }

    fn join(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-R", "-l", path(self.0.path())]).status();
    }
}

/// A driver in its own mount namespace.
fn driver() -> Driver {
    let wrapper = ["unshare", "--mount", "--propagation", "unchanged", "--"];
    Driver::run_by(&wrapper, PoolKind::Image, &[])
}

/// Publishes a volume in the shared directory.
struct Publish<'a> {
    driver: &'a Driver,
    volume: String,
    staging: PathBuf,
    wanted: csi::VolumeCapability,
}

impl<'a> Publish<'a> {
    fn new(
        driver: &'a Driver,
        shared: &Shared,
        name: &str,
        staged: &csi::VolumeCapability,
        wanted: csi::VolumeCapability,
    ) -> Self {
        let volume = driver.volume(name, 320 * MIB, staged.clone());
        let staging = shared.join(&format!("{name}-staging"));
        driver.ok(csi::NodeStageVolumeRequest {
            staging_target_path: path(&staging).to_owned(),
            ..driver.staging_of(&volume, staged)
        });
        Self { driver, volume, staging, wanted }
    }

    fn at(&self, target: &Path, readonly: bool) {
        self.driver.ok(csi::NodePublishVolumeRequest {
            staging_target_path: path(&self.staging).to_owned(),
            readonly,
            ..self.driver.publishing(&self.volume, target, &self.wanted)
        });
    }

    fn end(&self, targets: &[&Path]) {
        for target in targets {
            self.driver.unpublish(&self.volume, target);
            assert!(mounts_at(target).is_empty(), "{}", target.display());
        }
        self.driver.call_patiently(unstaging(&self.volume, path(&self.staging))).unwrap();
    }
}

#[test]
fn a_read_only_publication_is_read_only_on_the_host() {
    if !have_root() {
        return;
    }
    let shared = Shared::new();
    let driver = driver();
    for fs_type in ["ext4", "xfs", "btrfs"] {
        let flags = ["noatime", "nosuid,nodev", "noexec"];
        let wanted = with_flags(fs_type, Mode::SingleNodeMultiWriter, &flags);
        let volume = Publish::new(&driver, &shared, fs_type, &wanted, wanted.clone());
        let (writable, readonly) = (shared.join("w"), shared.join("r"));
        volume.at(&writable, false);
        for _ in 0..2 {
            volume.at(&readonly, true);
            for (place, mode) in [(&volume.staging, "rw"), (&writable, "rw"), (&readonly, "ro")] {
                let mounts = mounts_at(place);
                assert_eq!(mounts.len(), 1, "{fs_type}");
                for option in [mode, "noatime", "nosuid", "nodev", "noexec"] {
                    assert!(mounts[0].has(option), "{fs_type}: {option} is not in {mounts:?}");
                }
            }
            write(&readonly).unwrap_err();
            write(&writable).unwrap();
            assert!(readonly.join("new").exists(), "{fs_type}");
        }
        volume.end(&[&writable, &readonly]);
    }
    for (name, staged) in [("files", mounted("")), ("device", block())] {
        let many = match name {
            "files" => mounted_as("", Mode::MultiNodeReaderOnly),
            _ => block_as(Mode::MultiNodeReaderOnly),
        };
        for (kind, staged, wanted, readonly) in
            [("one", staged.clone(), staged, true), ("many", many.clone(), many, false)]
        {
            let name = format!("{name}-{kind}");
            let volume = Publish::new(&driver, &shared, &name, &staged, wanted);
            let target = shared.join("t");
            volume.at(&target, readonly);
            assert_eq!(mounts_at(&target).len(), 1, "{name}");
            write(&target).unwrap_err();
            volume.end(&[&target]);
        }
    }
}

/// As after a kill while the mount was replaced.
#[test]
fn a_repeated_publish_makes_a_writable_mount_read_only() {
    if !have_root() {
        return;
    }
    let shared = Shared::new();
    let mut driver = driver();
    let volume = Publish::new(&driver, &shared, "v", &mounted(""), mounted(""));
    let target = shared.join("t");
    volume.at(&target, true);
    run("mount", &["-o", "remount,bind,rw", path(&target)]);
    write(&target).unwrap();
    let open = File::open(target.join("new")).unwrap();
    let (id, staging) = (volume.volume.clone(), volume.staging.clone());
    // A new container of the driver gets the mounts of the host.
    driver.restart();
    let volume = Publish { driver: &driver, volume: id, staging, wanted: mounted("") };
    volume.at(&target, true);
    write(&target).unwrap_err();
    drop(open);
    volume.end(&[&target]);
}

#[test]
fn a_read_only_inline_volume_is_read_only_on_the_host() {
    if !have_root() {
        return;
    }
    let shared = Shared::new();
    let driver = driver();
    let secret = [("key", "value")];
    type Pairs<'a> = &'a [(&'a str, &'a str)];
    let content: [(&str, Pairs<'_>, Pairs<'_>); 4] = [
        ("memory", &[], &secret),
        ("attributes", &[("content/file", "text")], &[]),
        ("empty", &[], &[]),
        ("pool", &[("size", "64Mi")], &[]),
    ];
    for (name, attributes, secret) in content {
        let mut volume = pod_volume(&driver, name, name);
        volume.target = shared.join(name).join("mount");
        let publish = |secret| match name {
            "pool" => csi::NodePublishVolumeRequest {
                volume_capability: Some(with_flags("", Mode::SingleNodeMultiWriter, &["ro"])),
                ..volume.publishing(attributes)
            },
            _ => volume.publishing_content(attributes, secret),
        };
        driver.ok(publish(secret));
        driver.ok(publish(secret));
        assert_eq!(mounts_at(&volume.target).len(), 1, "{name}");
        write(&volume.target).unwrap_err();
        if name == "memory" {
            driver.ok(publish(&[("key", "other")]));
            assert_eq!(fs::read_to_string(volume.file("key")).unwrap(), "other");
            write(&volume.target).unwrap_err();
        }
        driver.ok(unpublishing(&volume.handle, path(&volume.target)));
        assert!(mounts_at(&volume.target).is_empty(), "{name}");
    }
}
