//! Inline volumes in trouble: volumes in use, removed files, reboots, and pods that vanished
//! unnoticed. A volume in use is kept, an unused one is removed.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use csi_loopback::backend::PoolKind;
use csi_loopback::backend::check::{self, FindingKind};
use support::container::UNMOUNT_OTHERS;
use support::driver::*;
use support::inline::{PodVolume, is_mounted, pod_volume};
use support::{MIB, path, run};
use tonic::Code;

use super::inline::device_at;

const SMALL: [(&str, &str); 1] = [("size", "16Mi")];

/// A published volume of a new pod, with a file in it.
fn published(driver: &Driver, pod: &str) -> PodVolume {
    let volume = pod_volume(driver, pod, "v");
    driver.ok(volume.publishing(&SMALL));
    fs::write(volume.file("file"), pod).unwrap();
    volume
}

fn unpublish(driver: &Driver, volume: &PodVolume) {
    driver.unpublish(&volume.handle, &volume.target);
    assert!(!volume.target.exists() && !is_mounted(&volume.target));
}

/// The name of the file on whose device the volume is. The device may soon have another file.
fn file_of(volume: &PodVolume) -> String {
    let backing = format!("/sys/block/{}/loop/backing_file", device_at(&volume.target));
    let file = fs::read_to_string(backing).unwrap();
    file.trim_end().rsplit_once('/').unwrap().1.to_owned()
}

fn is_attached(file: &str) -> bool {
    !loops_named(file).is_empty()
}

/// Removes what a reboot removes of a volume.
fn reboot(volume: &PodVolume) {
    let device = device_at(&volume.target);
    run("umount", &[path(&volume.target)]);
    detach_loop(&format!("/dev/{device}"));
}

fn pods(driver: &Driver) -> PathBuf {
    driver.scratch().join("pods")
}

/// Removes the pod and its directory without a call to the driver.
fn vanish(volume: &PodVolume) {
    while is_mounted(&volume.target) {
        run("umount", &[path(&volume.target)]);
    }
    fs::remove_dir_all(volume.target.ancestors().nth(4).unwrap()).unwrap();
}

/// Number of inline volumes in the pool, with a row or without; stops and starts the driver.
fn in_pool(driver: &mut Driver) -> u64 {
    if driver.is_running() {
        driver.kill();
    }
    let report = check::check(&driver.data_dir()).unwrap();
    assert_eq!(report.findings, []);
    report.inline_volumes
}

/// Waits until the pool has this number, and stops the driver: a collection waits half a second for
/// a device to release its blocks, and then leaves it to the next one, which a start runs first.
fn settled(driver: &mut Driver, count: u64) {
    wait_for("removed volumes are gone from the pool", || {
        if driver.is_running() {
            driver.kill();
        }
        let report = check::check(&driver.data_dir()).unwrap();
        let is_settled = report.findings.is_empty() && report.inline_volumes == count;
        if !is_settled {
            driver.start_again();
        }
        is_settled
    });
}

#[test]
fn inline_volumes_in_the_pool_survive_a_reboot() {
    with_driver(|driver| {
        let volume = published(driver, "uid");
        driver.kill();
        reboot(&volume);
        driver.start_again();
        // A file at the target in the meantime prevents the mount, and does not damage the volume.
        run("mount", &["-t", "tmpfs", "tmpfs", path(&volume.target)]);
        let words = "another mount or file exists at";
        driver.refused(volume.publishing(&SMALL), Code::FailedPrecondition, words);
        run("umount", &[path(&volume.target)]);
        driver.ok(volume.publishing(&SMALL));
        assert_eq!(fs::read_to_string(volume.file("file")).unwrap(), "uid");
        unpublish(driver, &volume);
        // Unpublish without another publish, after another process used the bare directory.
        let volume = published(driver, "uid-2");
        driver.kill();
        reboot(&volume);
        fs::write(volume.file("stray"), "").unwrap();
        driver.start_again();
        driver.unpublish(&volume.handle, &volume.target);
        assert!(volume.file("stray").exists(), "what is not the volume's is not removed");
        assert_eq!(in_pool(driver), 0);
    });
}

#[test]
fn an_inline_volume_in_use_is_removed_after_its_user() {
    with_driver(|driver| {
        let volume = published(driver, "uid");
        let user = File::open(volume.file("file")).unwrap();
        let unpublishing = unpublishing(&volume.handle, path(&volume.target));
        driver.refused(unpublishing.clone(), Code::Aborted, "is in use");
        assert_eq!(fs::read_to_string(volume.file("file")).unwrap(), "uid");
        drop(user);
        // A collection may be in progress.
        driver.call_patiently(unpublishing).unwrap();
        assert!(!volume.target.exists());
        assert_eq!(in_pool(driver), 0);
    });
}

#[test]
fn a_pod_keeps_an_inline_volume_whose_file_was_removed() {
    let Some(mut driver) = driver_with(PoolKind::Reflink, &[]) else { return };
    let volume = published(&driver, "uid");
    let file = file_of(&volume);
    for entry in fs::read_dir(driver.data_dir().join("volumes")).unwrap() {
        fs::remove_file(entry.unwrap().path()).unwrap();
    }
    driver.refused(volume.publishing(&SMALL), Code::DataLoss, "delete the pod");
    fs::write(volume.file("more"), "written").unwrap();
    assert_eq!(fs::read_to_string(volume.file("file")).unwrap(), "uid");
    let stats = driver.ok(stats(&volume.handle, path(&volume.target)));
    let condition = stats.volume_condition.unwrap();
    assert!(condition.abnormal && condition.message.contains("delete the pod"), "{condition:?}");
    unpublish(&driver, &volume);
    assert!(!is_attached(&file));
    assert_eq!(in_pool(&mut driver), 0);
}

/// A process in its own mount namespace, which has the volume mounted at another path.
struct Elsewhere(Child);

impl Elsewhere {
    fn new(volume: &PodVolume, at: &Path) -> Self {
        fs::create_dir_all(at).unwrap();
        let script = format!(
            "{UNMOUNT_OTHERS}mount --bind \"$0\" \"$1\" && unmount_others \"$1\" && echo there && exec cat"
        );
        let mut child = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-c", &script])
            .args([&volume.target, at])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "there\n");
        Self(child)
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "full tier"]
fn only_unused_volumes_of_vanished_pods_are_collected() {
    with_driver(|driver| {
        let (gone, used, here) =
            (published(driver, "gone"), published(driver, "used"), published(driver, "here"));
        let files = [&gone, &used, &here].map(file_of);
        let user = Elsewhere::new(&used, &driver.scratch().join("elsewhere"));
        driver.kill();
        vanish(&gone);
        vanish(&used);
        driver.start_again();
        // The other mount namespace had a copy of each mount and releases them later.
        wait_for("an unused volume is removed", || !is_attached(&files[0]));
        assert!(is_attached(&files[1]) && is_attached(&files[2]));
        // It is complete: a pod that returns finds its content.
        driver.ok(used.publishing(&SMALL));
        assert_eq!(fs::read_to_string(used.file("file")).unwrap(), "used");
        vanish(&used);
        assert_eq!(fs::read_to_string(here.file("file")).unwrap(), "here");
        drop(user);
        // By a periodic collection, without a restart.
        wait_for("a volume that is no longer used is removed", || !is_attached(&files[1]));
        driver.unpublish(&used.handle, &used.target);
        driver.ok(here.publishing(&SMALL));
        settled(driver, 1);
        driver.start_again();
        unpublish(driver, &here);
        assert_eq!(in_pool(driver), 0);
    });
}

#[test]
#[ignore = "full tier"]
fn an_unremovable_inline_volume_blocks_nothing_else() {
    with_driver(|driver| {
        // The stuck one may be first or last in the order of the collection.
        let (before, stuck, after) =
            (published(driver, "a"), published(driver, "b"), published(driver, "c"));
        let files = [&before, &stuck, &after].map(file_of);
        let user = Elsewhere::new(&stuck, &driver.scratch().join("elsewhere"));
        let leaving = unpublishing(&stuck.handle, path(&stuck.target));
        driver.refused(leaving.clone(), Code::Aborted, "still in use");
        driver.kill();
        vanish(&before);
        vanish(&after);
        driver.start_again();
        let others = [&files[0], &files[2]];
        wait_for("the others are gone", || !others.iter().any(|file| is_attached(file)));
        assert!(is_attached(&files[1]));
        let log = driver.log();
        assert!(log.contains("mounted at another path or in another mount namespace"), "{log}");
        drop(user);
        wait_for("it is removed when possible", || !is_attached(&files[1]));
        // The collection that released it may still process the rest.
        driver.call_patiently(leaving).unwrap();
        settled(driver, 0);
    });
}

#[test]
fn a_missing_pods_directory_removes_no_volume() {
    with_driver(|driver| {
        let volume = published(driver, "uid");
        driver.kill();
        reboot(&volume);
        let (pods, away) = (pods(driver), driver.scratch().join("away"));
        fs::rename(&pods, &away).unwrap();
        driver.start_again();
        assert_eq!(in_pool(driver), 1, "there is no directory of pods");
        fs::create_dir(&pods).unwrap();
        driver.start_again();
        assert_eq!(in_pool(driver), 1, "it is empty: a mount point");
        fs::remove_dir(&pods).unwrap();
        fs::rename(&away, &pods).unwrap();
        driver.start_again();
        driver.ok(volume.publishing(&SMALL));
        assert_eq!(fs::read_to_string(volume.file("file")).unwrap(), "uid");
        // Other pods in the directory prove that this one is gone.
        driver.kill();
        reboot(&volume);
        vanish(&volume);
        fs::create_dir(pods.join("other")).unwrap();
        driver.start_again();
        assert_eq!(in_pool(driver), 0);
    });
}

#[test]
fn pool_check_reports_problems_of_inline_volumes() {
    let Some(mut driver) = driver_with(PoolKind::Reflink, &[]) else { return };
    let volumes = ["missing", "truncated", "whole"].map(|pod| published(&driver, pod));
    driver.kill();
    volumes.iter().for_each(reboot);
    let directory = driver.data_dir().join("volumes");
    let file_of = |volume: &PodVolume| {
        let begins = format!("inline-{}", csi_loopback::backend::ids::slug(&volume.handle));
        let mut files = fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path());
        let named =
            |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with(&begins);
        files.find(named).unwrap()
    };
    let files = volumes.each_ref().map(file_of);
    let names = files.each_ref().map(|file| file.file_name().unwrap().to_str().unwrap().to_owned());
    fs::remove_file(&files[0]).unwrap();
    File::options().write(true).open(&files[1]).unwrap().set_len(8 * MIB).unwrap();
    fs::write(directory.join("inline-x-0123456789abcdef"), "").unwrap();
    let report = check::check(&driver.data_dir()).unwrap();
    assert_eq!(report.inline_volumes, 3);
    let mut found: Vec<_> =
        report.findings.iter().map(|one| (one.kind.to_string(), one.object.clone())).collect();
    found.sort();
    let mut expected = vec![
        (FindingKind::MissingFile.to_string(), names[0].clone()),
        (FindingKind::TruncatedFile.to_string(), names[1].clone()),
        (FindingKind::Orphan.to_string(), "volumes/inline-x-0123456789abcdef".to_owned()),
    ];
    expected.sort();
    assert_eq!(found, expected);
    fs::remove_file(directory.join("inline-x-0123456789abcdef")).unwrap();
    // Neither is mounted, and both can be removed.
    driver.start_again();
    driver.refused(volumes[0].publishing(&SMALL), Code::DataLoss, "backing file is missing");
    driver.refused(volumes[1].publishing(&SMALL), Code::DataLoss, "expected 16777216");
    driver.ok(volumes[2].publishing(&SMALL));
    volumes.iter().for_each(|volume| unpublish(&driver, volume));
    assert_eq!(in_pool(&mut driver), 0);
}
