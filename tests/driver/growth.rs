//! Volumes that grow while they are in use.

use std::fs::{self, File};
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

use csi_loopback::proto::csi::v1 as csi;
use nix::sys::statvfs::statvfs;
use support::driver::*;
use support::{MIB, path, pattern, read_all, write_direct};
use tonic::Code;

/// Grows a volume from `from` to `to` MiB during writes, and checks every reported size.
fn grows_online(driver: &Driver, fs_type: &str, from: u64, to: u64) {
    let wanted = mounted(fs_type);
    let volume = driver.volume(&format!("v-{fs_type}"), from * MIB, wanted.clone());
    let target = driver.publish(&volume, &wanted);
    fs::write(target.join("before"), pattern(1, 4 << 20)).unwrap();
    let size = || {
        let stat = statvfs(&target).unwrap();
        stat.blocks() * stat.fragment_size()
    };
    let before = size();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut written = File::create(target.join("during")).unwrap();
            let mut chunks = 0;
            while !stop.load(Ordering::Relaxed) || chunks < 10 {
                written.write_all(&pattern(7, 10_000)).unwrap();
                written.sync_data().unwrap();
                chunks += 1;
            }
            chunks
        });
        let grown = driver.call(expand(&volume, to * MIB));
        let on_node = driver.call(expand_on_node(&volume, &target));
        let again = driver.call(expand_on_node(&volume, &driver.staging(&volume)));
        stop.store(true, Ordering::Relaxed);
        let chunks = writer.join().unwrap();
        let grown = grown.unwrap();
        assert_eq!(grown.capacity_bytes as u64, to * MIB);
        assert!(grown.node_expansion_required);
        assert_eq!(on_node.unwrap().capacity_bytes as u64, to * MIB, "{fs_type}");
        assert_eq!(again.unwrap().capacity_bytes as u64, to * MIB, "{fs_type}");
        assert!(fs::read(target.join("during")).unwrap() == pattern(7, 10_000).repeat(chunks));
    });
    assert!(size() >= before + (to - from) * MIB * 9 / 10, "{fs_type}: {before} {}", size());
    assert!(fs::read(target.join("before")).unwrap() == pattern(1, 4 << 20));
    let total = driver.ok(stats(&volume, path(&target))).usage[0].total as u64;
    assert_eq!(total, size());
    driver.take_down(&volume);
    let target = driver.publish(&volume, &wanted);
    assert!(fs::read(target.join("before")).unwrap() == pattern(1, 4 << 20));
    driver.take_down(&volume);
}

#[test]
fn a_mounted_xfs_or_btrfs_grows_under_its_pod() {
    with_driver(|driver| {
        grows_online(driver, "xfs", 300, 600);
        grows_online(driver, "btrfs", 128, 300);
    });
}

#[test]
fn a_mounted_ext4_grows_under_its_pod() {
    if !ext4_grows_online() {
        // The next test covers the case without the capability.
        return println!("report: ext4 does not grow online here: no CAP_SYS_RESOURCE");
    }
    with_driver(|driver| grows_online(driver, "ext4", 32, 200));
}

#[test]
fn a_missed_node_expansion_is_done_at_stage() {
    with_driver(|driver| {
        for (fs_type, mib) in [("ext4", 32), ("xfs", 300), ("btrfs", 128)] {
            let wanted = mounted(fs_type);
            let volume = driver.volume(fs_type, mib * MIB, wanted.clone());
            let target = driver.publish(&volume, &wanted);
            fs::write(target.join("file"), pattern(1, 1 << 20)).unwrap();
            let before = statvfs(&target).unwrap().blocks();
            driver.ok(expand(&volume, 2 * mib * MIB));
            if fs_type == "ext4" && !ext4_grows_online() {
                let request = expand_on_node(&volume, &target);
                driver.refused(request, Code::FailedPrecondition, "CAP_SYS_RESOURCE");
            }
            driver.take_down(&volume);
            let target = driver.publish(&volume, &wanted);
            let after = statvfs(&target).unwrap().blocks();
            assert!(after >= before * 19 / 10, "{fs_type}: {before} {after}");
            assert!(fs::read(target.join("file")).unwrap() == pattern(1, 1 << 20));
            driver.take_down(&volume);
        }
    });
}

#[test]
fn a_raw_device_grows_under_its_pod() {
    for_each_driver(|driver| {
        let volume = driver.volume("v", MIB, block());
        let device = driver.publish(&volume, &block());
        let content = pattern(1, MIB as usize);
        write_direct(&device, 0, &content);
        assert_eq!(driver.ok(expand(&volume, 3 * MIB)).capacity_bytes as u64, 3 * MIB);
        let on_node = driver.ok(expand_on_node(&volume, &device));
        assert_eq!(on_node.capacity_bytes as u64, 3 * MIB);
        let grown = read_all(&device);
        assert_eq!(grown.len() as u64, 3 * MIB);
        assert!(grown.starts_with(&content) && grown[MIB as usize..].iter().all(|byte| *byte == 0));
        write_direct(&device, 2 * MIB, &content);
        driver.take_down(&volume);
        let kept = driver.with_device(&volume, read_all);
        assert!(kept[..MIB as usize] == content && kept[2 * MIB as usize..] == content);
    });
}

#[test]
fn node_expansion_requires_controller_expansion() {
    with_driver(|driver| {
        let volume = driver.volume("v", MIB, block());
        let device = driver.publish(&volume, &block());
        let request = |required| csi::NodeExpandVolumeRequest {
            capacity_range: Some(range(required, 0)),
            ..expand_on_node(&volume, &device)
        };
        driver.refused(request(2 << 20), Code::OutOfRange, "capacity_range");
        driver.refused(request(-1), Code::InvalidArgument, "capacity_range");
        assert_eq!(driver.ok(request(1)).capacity_bytes as u64, MIB);
        assert_eq!(read_all(&device).len() as u64, MIB);
    });
}
