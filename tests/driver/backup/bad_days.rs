//! Repositories that are read-only, full, or have lost an object.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use nix::sys::signal::Signal;
use support::driver::*;
use support::path;

use super::mount::{self, Mount};
use super::{files, two_backups};

/// A mount of a test, removed also after a panic.
pub struct Mounted<'p>(pub &'p Path);

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        support::kernel::unmount(self.0);
    }
}

#[test]
fn a_read_only_repository_is_read_and_restored_from() {
    with_driver(|driver| {
        let mut rig = two_backups(driver, "v");
        let place = driver.scratch().join("read-only");
        fs::create_dir(&place).unwrap();
        support::run("mount", &["--bind", path(&rig.directory()), path(&place)]);
        let mounted = Mounted(&place);
        support::run("mount", &["-o", "remount,bind,ro", path(&place)]);
        rig.repository[1] = path(&place).to_owned();
        assert_eq!(rig.list().len(), 2);
        rig.json(&["backup", "show", "b"]);
        rig.json(&["backup", "prune", "--keep-last", "1", "--dry-run"]);
        rig.verify();
        rig.restores("b");
        let mount = Mount::new(&rig, "b");
        mount::check(&rig, &mount.image(), "b");
        mount.signal(Signal::SIGTERM);
        assert!(mount.ended().0.success());
        let copy = driver.scratch().join("copy");
        rig.json(&["backup", "copy", "--to", path(&copy)]);
        rig.repository[1] = path(&copy).to_owned();
        drop(mounted);
        rig.restores("b");
    });
}

#[test]
fn a_full_repository_can_be_pruned_and_restored_from() {
    with_driver(|driver| {
        let mut rig = two_backups(driver, "v");
        let place = driver.scratch().join("small");
        fs::create_dir(&place).unwrap();
        support::run("mount", &["-t", "tmpfs", "-o", "size=32m", "tmpfs", path(&place)]);
        let _mounted = Mounted(&place);
        rig.repository[1] = path(&place.join("repository")).to_owned();
        for _ in 0..2 {
            rig.create("a", &["--full"]);
        }
        // Until nothing more fits.
        let rest = place.join("rest");
        fs::write(&rest, vec![1; 64 << 20]).unwrap_err();
        rig.refused(&["backup", "create", "b"], "No space left");
        assert_eq!(
            rig.json(&["backup", "prune", "--keep-last", "1"])["removed"].as_array().unwrap().len(),
            1
        );
        rig.restores("a");
        rig.verify();
    });
}

#[test]
fn a_backup_that_lost_an_object_is_no_base() {
    with_driver(|driver| {
        let mut rig = two_backups(driver, "v");
        fs::remove_file(&rig.files_in("packs")[0]).unwrap();
        rig.fails(3, &["backup", "list"], "missing or truncated");
        rig.snapshot("c", 5);
        rig.refused(&["backup", "create", "c", "--base", "b"], "cannot be used");
        let next = rig.create("c", &["--base", "auto"]);
        assert_eq!(next["kind"], "full", "{next}");
        rig.restores("c");
        // It does not exist already, and the sound backup is not removed in favour of damaged ones.
        rig.create("b", &["--base", "auto"]);
        rig.json(&["backup", "prune", "--keep-last", "1"]);
        rig.restores("c");
    });
}

#[test]
fn files_of_a_repository_and_restored_ones_are_private() {
    with_driver(|driver| {
        let rig = two_backups(driver, "v");
        let target = driver.scratch().join("image");
        rig.json(&["restore", "b", "--to", path(&target)]);
        for file in files(&rig.directory()).iter().chain([&target]) {
            let mode = file.metadata().unwrap().permissions().mode() & 0o777;
            assert_eq!(mode, 0o600, "{}", file.display());
            let above = file.parent().unwrap();
            if above.starts_with(rig.directory()) {
                let mode = above.metadata().unwrap().permissions().mode() & 0o777;
                assert_eq!(mode, 0o700, "{}", above.display());
            }
        }
    });
}
