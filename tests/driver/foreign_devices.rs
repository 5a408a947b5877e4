//! Foreign loop devices on the files of a pool: never used, never detached, and refused if they
//! could destroy data.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;

use csi_loopback::backend::PoolKind;
use tonic::Code;

use support::driver::*;
use support::{
    BLOCK, MIB, REPOSITORY, directory, have_root, path, pattern, read_all, run, write_direct,
};

/// A loop device of an administrator, detached at the end.
struct Foreign {
    device: String,
    options: String,
}

impl Foreign {
    fn attach(options: &[&str], file: &Path) -> Self {
        let mut command = Command::new("losetup");
        let output = command.args(["-f", "--show"]).args(options).arg(file).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let device = String::from_utf8(output.stdout).unwrap().trim().to_owned();
        Self { options: Self::options(&device), device }
    }

    fn options(device: &str) -> String {
        let columns = "OFFSET,SIZELIMIT,RO,LOG-SEC,AUTOCLEAR,BACK-FILE";
        let mut command = Command::new("losetup");
        let output = command.args(["-l", "-n", "-O", columns, device]).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    #[track_caller]
    fn is_untouched(&self) {
        assert_eq!(Self::options(&self.device), self.options);
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        if thread::panicking() {
            let _ = Command::new("losetup").args(["-d", &self.device]).status();
        } else {
            detach_loop(&self.device);
        }
    }
}

/// Writable devices that the driver cannot have created.
const WRITABLE: [&[&str]; 4] = [
    &["-b", "4096", "-o", "4096"],
    &["-b", "4096", "--sizelimit", "1048576"],
    &["-b", "512"],
    &["-b", "512", "-o", "512"],
];

#[test]
fn a_foreign_writable_device_is_refused_by_name_and_kept() {
    let Some(driver) = driver_with(PoolKind::Copy, &[]) else { return };
    let volume = driver.volume("v", 4 * MIB, block());
    let file = driver.backing_file(&volume);
    for options in WRITABLE {
        let foreign = Foreign::attach(options, &file);
        let stage = driver.staging_of(&volume, &block());
        driver.refused(stage.clone(), Code::FailedPrecondition, &foreign.device);
        driver.refused(stage, Code::FailedPrecondition, "losetup -d");
        foreign.is_untouched();
        drop(foreign);
        // One at a time is allowed.
        let content = pattern(1, BLOCK as usize);
        driver.with_device(&volume, |device| write_direct(device, 3 * MIB, &content));
        let all = fs::read(&file).unwrap();
        assert!(all[3 * MIB as usize..].starts_with(&content), "{options:?}");
    }
}

#[test]
fn a_foreign_device_attached_later_is_an_abnormal_condition() {
    let Some(driver) = driver_with(PoolKind::Copy, &[]) else { return };
    let volume = driver.volume("v", 4 * MIB, block());
    let target = driver.publish(&volume, &block());
    let condition = || driver.ok(stats(&volume, path(&target))).volume_condition.unwrap();
    assert!(!condition().abnormal);
    for options in WRITABLE {
        let foreign = Foreign::attach(options, &driver.backing_file(&volume));
        let found = condition();
        assert!(found.abnormal && found.message.contains(&foreign.device), "{found:?}");
        // An existing publication continues, and can be ended.
        write_direct(&target, 0, &pattern(2, BLOCK as usize));
        foreign.is_untouched();
        drop(foreign);
        assert!(!condition().abnormal);
    }
    let foreign = Foreign::attach(WRITABLE[2], &driver.backing_file(&volume));
    driver.take_down(&volume);
    foreign.is_untouched();
    driver.ok(delete_volume(&volume));
    assert!(Foreign::options(&foreign.device).contains("(deleted)"));
}

#[test]
fn a_foreign_read_only_device_is_ignored() {
    let Some(mut driver) = driver_with(PoolKind::Copy, &[]) else { return };
    let volume = driver.volume("v", 4 * MIB, block());
    let file = driver.backing_file(&volume);
    for options in [&["-r", "-b", "4096"][..], &["-r"], &["-r", "-o", "4096"]] {
        let foreign = Foreign::attach(options, &file);
        let target = driver.publish(&volume, &block());
        let content = pattern(3, BLOCK as usize);
        write_direct(&target, 0, &content);
        driver.restart();
        driver.publish(&volume, &block());
        assert!(read_all(&target).starts_with(&content), "{options:?}");
        driver.take_down(&volume);
        foreign.is_untouched();
        assert_eq!(loops_named(&volume), std::slice::from_ref(&foreign.device));
    }
}

#[test]
fn a_read_only_publication_keeps_its_device_over_a_restart() {
    with_driver(|driver| {
        let volume = driver.volume("v", 4 * MIB, block());
        driver.stage(&volume, &block());
        let target = driver.target(&volume);
        let mut publish = driver.publishing(&volume, &target, &block());
        publish.readonly = true;
        driver.ok(publish.clone());
        let devices = loops_named(&volume);
        driver.restart();
        driver.stage(&volume, &block());
        driver.ok(publish);
        assert_eq!((loops_named(&volume), devices.len()), (devices, 1));
        driver.take_down(&volume);
        assert!(loops_named(&volume).is_empty());
    });
}

#[test]
fn a_pool_image_with_a_foreign_writable_device_is_not_opened() {
    with_driver(|driver| {
        driver.volume("v", MIB, block());
        assert!(driver.stop().success());
        let image = driver.data_dir().join("pool.img");
        wait_for("the device of the pool is detached", || {
            loops_named("pool.img")
                .iter()
                .all(|device| !Foreign::options(device).contains(path(&image)))
        });
        for options in WRITABLE {
            let foreign = Foreign::attach(options, &image);
            let output = driver.run_another(&[]);
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success() && said.contains(&foreign.device), "{said}");
            foreign.is_untouched();
        }
        let foreign = Foreign::attach(&["-r"], &image);
        driver.start_again();
        driver.volume("w", MIB, block());
        foreign.is_untouched();
        drop(foreign);
    });
}

/// Lanes of tests run in parallel: one cleans up while another attaches.
#[test]
fn a_clean_up_detaches_no_device_that_has_another_file_by_then() {
    if !have_root() {
        return;
    }
    let directory = directory();
    let [listed, other] = ["listed", "other"].map(|name| directory.path().join(name));
    for file in [&listed, &other] {
        fs::write(file, [1; 4096]).unwrap();
    }
    let foreign = Foreign::attach(&["-r"], &listed);
    let device = foreign.device.as_str();
    let clean_up = |list: &str| {
        let script = format!("source {REPOSITORY}/hack/lib.sh; {list}; detach_loops list \"$@\"");
        run("bash", &["-euc", &script, "_", device, path(&other)]);
    };
    // While it lists, the device gets another file (LOOP_CHANGE_FD), as by a detach and an attach.
    clean_up(
        "list() { perl -e 'open D, shift; open F, shift; ioctl(D, 0x4c06, fileno F) or die' \"$@\"; echo \"$1\"; }",
    );
    assert!(Foreign::options(device).contains(path(&other)));
    clean_up("list() { echo \"$1\"; }");
    wait_for("the listed device is detached", || !Foreign::options(device).contains(path(&other)));
    std::mem::forget(foreign);
}
