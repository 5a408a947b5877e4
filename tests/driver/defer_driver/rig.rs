//! A driver with deferral to a crust_ops, and checks that no mount is visible on the host.

use std::path::Path;

use csi::volume_capability::access_mode::Mode;
use csi::volume_capability::{AccessType, MountVolume};
use csi_loopback::backend::PoolKind;
use csi_loopback::proto::csi::v1 as csi;

use super::crust_ops::CrustOps;
use support::driver::*;
use support::http::{fetch, http_address};
use support::{MIB, have_root, path};

/// A driver with the feature enabled, and the flags that enable it.
pub struct Rig {
    // Dropped first: its cleanup unpublishes.
    pub driver: Driver,
    pub crust: CrustOps,
    flags: Vec<String>,
}

/// Runs a test with a driver on an image pool and `timeout` for crust_ops calls.
pub fn with_rig(timeout: &str, run: impl FnOnce(&mut Rig)) {
    if !have_root() {
        return;
    }
    let crust = CrustOps::start();
    let socket = crust.socket().display().to_string();
    let flags: Vec<String> = ["--crust-endpoint", &socket, "--crust-timeout", timeout]
        .into_iter()
        .chain(["--http-endpoint", "127.0.0.1:0", "--enable-defer-fs-ops"])
        .map(str::to_owned)
        .collect();
    let given: Vec<&str> = flags.iter().map(String::as_str).collect();
    let driver = Driver::with(PoolKind::Image, &given);
    run(&mut Rig { driver, crust, flags });
}

impl Rig {
    /// Restarts the driver with the feature enabled or disabled.
    pub fn restart(&mut self, on: bool) {
        let kept = self.flags.len() - usize::from(!on);
        let flags: Vec<&str> = self.flags[..kept].iter().map(String::as_str).collect();
        self.driver.restart_with(&flags);
    }

    /// A volume that is staged for one pod.
    pub fn staged(&self, name: &str) -> String {
        let volume = self.driver.volume(name, 32 * MIB, one_pod());
        self.driver.stage(&volume, &one_pod());
        volume
    }

    /// The deferred publish request for its usual target.
    pub fn deferring(&self, volume: &str) -> csi::NodePublishVolumeRequest {
        let target = self.driver.target(volume);
        let publish = self.driver.publishing(volume, &target, &one_pod());
        csi::NodePublishVolumeRequest { defer_fs_ops: true, ..publish }
    }

    /// A deferred volume.
    pub fn deferred(&self, name: &str) -> String {
        let volume = self.staged(name);
        self.driver.ok(self.deferring(&volume));
        volume
    }

    pub fn stats(&self, volume: &str) -> csi::NodeGetVolumeStatsRequest {
        stats(volume, path(&self.driver.target(volume)))
    }

    /// The proposal's counter.
    pub fn counted(&self) -> u64 {
        let (_, page) = fetch(http_address(&self.driver), "/metrics");
        let name = "volumes_published_with_deferred_ops_total ";
        let line = page.lines().find_map(|line| line.strip_prefix(name));
        line.expect(&page).parse().unwrap()
    }

    /// Asserts that the volume is not mounted on the host.
    #[track_caller]
    pub fn assert_not_mounted(&self, volume: &str) {
        assert_nothing_mounted(volume);
        for at in [self.driver.target(volume), self.driver.staging(volume)] {
            let guards = support::kernel::guards_at(&at);
            assert_eq!(mounts_at(&at).len(), guards, "{} is a mount", at.display());
            let entries = at.read_dir().map(Iterator::count).unwrap_or_default();
            assert_eq!(entries, guards, "{} is not empty", at.display());
        }
    }
}

#[track_caller]
fn assert_nothing_mounted(volume: &str) {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    // The backing file is named after its id.
    let devices = loops_named(volume);
    assert!(!devices.is_empty(), "{volume} is not attached");
    for device in devices {
        let of_it = mounts.lines().find(|line| line.contains(&format!(" {device} ")));
        assert_eq!(of_it, None, "{device} is mounted");
    }
}

/// A filesystem for one pod, ReadWriteOncePod.
pub fn one_pod() -> csi::VolumeCapability {
    mounted_as("", Mode::SingleNodeSingleWriter)
}

/// The same with a group.
pub fn grouped(supplemental: &str, policy: &str, of_kubelet: &str) -> csi::VolumeCapability {
    let mut wanted = one_pod();
    let mount = MountVolume {
        volume_supplemental_group: supplemental.to_owned(),
        volume_supplemental_group_change_policy: policy.to_owned(),
        volume_mount_group: of_kubelet.to_owned(),
        ..Default::default()
    };
    wanted.access_type = Some(AccessType::Mount(mount));
    wanted
}

pub fn is_gone(at: &Path) -> bool {
    !at.exists()
}
