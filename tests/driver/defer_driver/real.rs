//! The driver and the real crust_ops: the files for a runtime, and the output of a runtime's
//! program.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use csi_loopback::backend::PoolKind;
use csi_loopback::crust::{Directory, Target};
use csi_loopback::proto::csi::v1 as csi;
use tempfile::TempDir;
use tonic::Code;

use super::rig::one_pod;
use support::driver::*;
use support::{MIB, have_root, path};

/// A running crust_ops and its directory.
struct Real {
    child: Child,
    directory: TempDir,
}

impl Real {
    fn start() -> Self {
        // A directory that only root can write to.
        let directory = TempDir::with_prefix_in("csi-loopback-crust-", "/run").unwrap();
        let this = |name: &str| directory.path().join(name).display().to_string();
        let child = Command::new(binary())
            .args(["--mode", "runtime-ops", "--endpoint", &this("crust.sock")])
            .args(["--crust-dir", &this("crust"), "--collect-every", "1h"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let socket = directory.path().join("crust.sock");
        wait_for("crust_ops to serve", || std::os::unix::net::UnixStream::connect(&socket).is_ok());
        Self { child, directory }
    }

    fn path(&self, name: &str) -> String {
        self.directory.path().join(name).display().to_string()
    }

    /// The entry of a target.
    fn entry(&self, target: &Path) -> std::path::PathBuf {
        let directory = Directory::new(self.path("crust"));
        directory.entry(&Target::new("target", target).unwrap()).path().to_owned()
    }

    /// Claims the volume with this program, like a runtime.
    fn claim(&self, target: &Path, script: &str) {
        let program = self.path("runtime");
        fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o700)).unwrap();
        let file = self.entry(target).join("runtime-cli");
        fs::write(&file, program).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    }
}

impl Drop for Real {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_real_crust_ops_serves_the_whole_volume_lifecycle() {
    if !have_root() {
        return;
    }
    let real = Real::start();
    let socket = real.path("crust.sock");
    let flags = ["--enable-defer-fs-ops", "--crust-endpoint", &socket];
    let driver = Driver::with(PoolKind::Image, &flags);
    let volume = driver.volume("a", 32 * MIB, one_pod());
    driver.stage(&volume, &one_pod());
    let target = driver.target(&volume);
    driver.ok(csi::NodePublishVolumeRequest {
        defer_fs_ops: true,
        ..driver.publishing(&volume, &target, &one_pod())
    });
    assert_eq!(mounts_at(&target).len(), support::kernel::guards_at(&target));
    assert!(mounts_at(&driver.staging(&volume)).is_empty());
    let info = fs::read_to_string(real.entry(&target).join("mountInfo.json")).unwrap();
    assert!(info.contains("\"/dev/loop") && info.contains("\"ext4\""), "{info}");

    let reported = driver.ok(stats(&volume, path(&target)));
    let condition = reported.volume_condition.unwrap();
    assert!(reported.usage.is_empty() && condition.abnormal, "{condition:?}");
    assert!(condition.message.contains("not claimed by a container runtime"), "{condition:?}");
    let health = || health_on_node(&driver, &volume, &target);
    assert_eq!(health()[0].reason, "RuntimeReportsAbnormal");
    assert_eq!(health()[0].message, condition.message);
    driver.ok(expand(&volume, 64 * MIB));
    let grow = expand_on_node(&volume, &target);
    driver.refused(grow.clone(), Code::Unavailable, "claimed");

    real.claim(&target, "echo no container of the volume runs >&2; exit 3");
    let reported = driver.ok(stats(&volume, path(&target)));
    let condition = reported.volume_condition.unwrap();
    assert!(reported.usage.is_empty() && !condition.abnormal, "{condition:?}");
    driver.refused(grow.clone(), Code::Unavailable, "RuntimeExpandVolume");

    let answer = r#"case "$2" in
stats) echo '{"usage":[{"unit":"BYTES","total":100,"used":40,"available":60}],"volume_condition":{"abnormal":false,"message":"well"}}';;
resize) echo '{"capacity_bytes":67108864}';;
esac"#;
    real.claim(&target, answer);
    let reported = driver.ok(stats(&volume, path(&target)));
    assert_eq!((reported.usage[0].total, reported.usage[0].used), (100, 40));
    assert_eq!(reported.volume_condition.unwrap().message, "well");
    assert!(health().is_empty());
    assert_eq!(driver.ok(grow).capacity_bytes as u64, 64 * MIB);

    real.claim(&target, "echo nonsense");
    driver.refused(stats(&volume, path(&target)), Code::Internal, "DATA_LOSS");
    driver.take_down(&volume);
    assert!(!real.entry(&target).exists() && !target.exists());
}
