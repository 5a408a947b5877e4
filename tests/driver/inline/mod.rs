//! Inline ephemeral volumes (KEP-596) through the driver's socket, with kubelet's requests: their
//! life, valid requests, and secrecy. Content and memory: tests/driver/inline_content.rs;
//! concurrency, limits and leftovers: tests/driver/inline_limits.rs; kills at every step:
//! tests/crash.

mod client;
mod life;
mod requests;
mod secrecy;
mod strangers;

use std::fs;
use std::path::Path;

use csi_loopback::proto::csi::v1 as csi;
use support::driver::*;
use support::inline::{PodVolume, is_mounted};

/// The loop device that is mounted at `target`, as `loop7`.
pub fn device_at(target: &Path) -> String {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = mounts.lines().rfind(|line| line.split(' ').nth(4) == target.to_str());
    let line = line.unwrap_or_else(|| panic!("nothing is mounted at {}", target.display()));
    let source = line.split(" - ").nth(1).unwrap().split(' ').nth(1).unwrap();
    source.strip_prefix("/dev/").unwrap_or_else(|| panic!("{source}")).to_owned()
}

/// The name of the backing file of the volume at `target`, which is its internal id.
pub fn internal_id(target: &Path) -> String {
    let device = device_at(target);
    let file = fs::read_to_string(format!("/sys/block/{device}/loop/backing_file")).unwrap();
    file.trim().rsplit('/').next().unwrap().to_owned()
}

/// The size of the volume at `target`, in bytes.
pub fn device_bytes(target: &Path) -> u64 {
    let sectors = fs::read_to_string(format!("/sys/block/{}/size", device_at(target))).unwrap();
    sectors.trim().parse::<u64>().unwrap() * 512
}

/// Asserts that the volume with this internal id and everything of it is gone.
pub fn assert_gone(volume: &PodVolume, internal_id: &str) {
    assert!(!volume.target.exists() && !is_mounted(&volume.target), "{volume:?}");
    assert_eq!(loops_named(internal_id), [""; 0], "{volume:?}");
}

/// Asserts that the pool of a stopped driver has no file that its catalog does not name.
pub fn assert_pool_is_clean(driver: &Driver) {
    let report = driver.cli(&["pool", "check", "--data-dir", driver.data_dir().to_str().unwrap()]);
    let said = String::from_utf8_lossy(&report.stdout);
    assert!(report.status.success(), "{said}");
}

pub fn condition(driver: &Driver, volume: &PodVolume) -> csi::VolumeCondition {
    let req = stats(&volume.handle, volume.target.to_str().unwrap());
    driver.ok(req).volume_condition.unwrap()
}
