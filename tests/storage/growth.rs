//! A growth never costs the volume: whatever fails, the volume is staged with its data, at its old
//! or its new size, and a failed growth is reported and tried again. Kills at every step are in
//! tests/crash, power losses in `power_loss/growth.rs`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use csi_loopback::backend::PoolKind;
use csi_loopback::proto::csi::v1 as csi;
use nix::sys::statvfs::statvfs;
use support::driver::*;
use support::full::fill;
use support::{ALL_KINDS, GIB, MIB, fsck, have_root, path, pattern, setting};
use tempfile::TempDir;
use tonic::Code;

const FS_TYPES: [(&str, u64); 3] = [("ext4", 16 * MIB), ("xfs", 300 * MIB), ("btrfs", 256 * MIB)];
const CONTENT_BYTES: usize = 300_000;

/// A volume with a file.
struct Filled<'a> {
    driver: &'a Driver,
    fs_type: &'a str,
    id: String,
    bytes: u64,
}

impl<'a> Filled<'a> {
    fn new(driver: &'a Driver, name: &str, fs_type: &'a str, bytes: u64) -> Self {
        let id = driver.volume(name, bytes, mounted(fs_type));
        let staging = driver.stage(&id, &mounted(fs_type));
        fs::write(staging.join("file"), pattern(1, CONTENT_BYTES)).unwrap();
        driver.unstage(&id);
        Self { driver, fs_type, id, bytes }
    }

    fn expand(&mut self, bytes: u64) {
        self.driver.ok(expand(&self.id, bytes));
        self.bytes = bytes;
    }

    /// Stages it and checks the content. Returns the size of the filesystem.
    fn stage(&self) -> u64 {
        let staging = self.driver.stage(&self.id, &mounted(self.fs_type));
        let what = format!("{} of {} bytes", self.fs_type, self.bytes);
        assert!(fs::read(staging.join("file")).unwrap() == pattern(1, CONTENT_BYTES), "{what}");
        let stat = statvfs(&staging).unwrap();
        stat.blocks() * stat.fragment_size()
    }

    fn condition(&self) -> csi::VolumeCondition {
        let staging = self.driver.staging(&self.id);
        let on_node = self.driver.ok(stats(&self.id, path(&staging))).volume_condition.unwrap();
        let status = self.driver.ok(get_volume(&self.id)).status.unwrap();
        assert_eq!(status.volume_condition.as_ref(), Some(&on_node));
        on_node
    }

    /// Stages it at its old size, with the reason in its condition and from NodeExpandVolume.
    fn stages_at_its_old_size(&self, old: u64) {
        let size = self.stage();
        assert!(size <= old, "{}: {size}", self.fs_type);
        let found = self.condition();
        assert!(found.abnormal && found.message.contains("could not grow"), "{found:?}");
        let request = expand_on_node(&self.id, &self.driver.staging(&self.id));
        self.driver.refused(request, Code::FailedPrecondition, "could not grow");
        self.driver.unstage(&self.id);
        self.driver.with_device(&self.id, |device| fsck::check(self.fs_type, device));
    }

    fn stages_at_its_new_size(&self) {
        let size = self.stage();
        assert!(size > self.bytes / 10 * 7, "{}: {size} of {}", self.fs_type, self.bytes);
        let found = self.condition();
        assert!(!found.abnormal, "{found:?}");
        let request = expand_on_node(&self.id, &self.driver.staging(&self.id));
        assert_eq!(self.driver.ok(request).capacity_bytes as u64, self.bytes);
        self.driver.unstage(&self.id);
        self.driver.with_device(&self.id, |device| fsck::check(self.fs_type, device));
    }
}

/// A growth on a full pool is refused before it starts.
fn on_a_full_pool(kind: PoolKind, fs_types: &[(&str, u64)]) {
    let directory = TempDir::with_prefix("csi-loopback-").unwrap();
    let image = ["--pool-size", "1200Mi", "--overcommit", "1000"];
    // On a machine with much space, only an image can be filled.
    assert_eq!(kind, PoolKind::Image);
    let driver = Driver::in_place(kind, directory.path(), &image);
    let volumes = fs_types.iter().map(|(fs_type, bytes)| {
        let mut volume = Filled::new(&driver, fs_type, fs_type, *bytes);
        volume.expand(100 * GIB);
        (volume, *bytes)
    });
    let volumes: Vec<(Filled<'_>, u64)> = volumes.collect();
    let filler = driver.volume("filler", 2 * GIB, block());
    fill(&driver.publish(&filler, &block()), 0);
    for (volume, old) in &volumes {
        volume.stages_at_its_old_size(*old);
    }
    driver.take_down(&filler);
    driver.ok(delete_volume(&filler));
    for (volume, _) in &volumes {
        volume.stages_at_its_new_size();
    }
}

#[test]
fn a_volume_mounts_if_its_growth_does_not_fit_the_pool() {
    if have_root() {
        on_a_full_pool(PoolKind::Image, &FS_TYPES);
    }
}

/// resize2fs 1.47 destroys an ext4 of one block group that grows by more than a factor of 1,024.
fn grows_by_any_factor(kind: PoolKind, sizes: &[(u64, u64)]) {
    let driver = Driver::with(kind, &["--overcommit", "100000"]);
    for (from, to) in sizes {
        let mut volume = Filled::new(&driver, &format!("v{from}-{to}"), "ext4", *from);
        let snapshot = driver.snapshot(&format!("s{from}-{to}"), &volume.id);
        volume.expand(*to);
        volume.stages_at_its_new_size();
        let request = csi::CreateVolumeRequest {
            volume_content_source: Some(Source::Snapshot(&snapshot).into()),
            ..create(&format!("r{from}-{to}"), *to, mounted("ext4"))
        };
        let id = driver.ok(request).volume.unwrap().volume_id;
        let restored = Filled { driver: &driver, fs_type: "ext4", id, bytes: *to };
        restored.stages_at_its_new_size();
        driver.ok(delete_volume(&restored.id));
        driver.ok(delete_volume(&volume.id));
    }
}

#[test]
fn an_ext4_grows_by_any_factor() {
    if have_root() {
        grows_by_any_factor(PoolKind::Image, &[(4 * MIB, 8 * GIB), (64 * MIB, 65 * GIB)]);
    }
}

#[test]
#[ignore = "full tier"]
fn an_ext4_of_any_size_grows_by_any_factor() {
    if have_root() {
        let mib = [1, 2, 8, 16, 63, 100, 127, 128, 129, 1000];
        let sizes = |factor: u64| mib.map(|mib| (mib * MIB, (mib * MIB * factor).min(4096 * GIB)));
        let sizes = [3, 1023, 1025, 5000].into_iter().flat_map(sizes);
        // All of them in hack/soak.sh.
        let every = setting("GROWTH_EVERY").unwrap_or(7) as usize;
        let sizes: Vec<(u64, u64)> = sizes.step_by(every).collect();
        ALL_KINDS.into_iter().for_each(|kind| grows_by_any_factor(kind, &sizes));
    }
}

#[test]
fn an_xfs_that_would_have_too_many_groups_is_not_expanded() {
    if !have_root() {
        return;
    }
    let driver = Driver::with(PoolKind::Image, &["--overcommit", "100000"]);
    let volume = Filled::new(&driver, "v", "xfs", 300 * MIB);
    let snapshot = driver.snapshot("s", &volume.id);
    driver.refused(expand(&volume.id, 8192 * GIB), Code::OutOfRange, "request at most");
    for source in [Source::Snapshot(&snapshot), Source::Volume(&volume.id)] {
        let request = csi::CreateVolumeRequest {
            volume_content_source: Some(source.into()),
            ..create("restored", 8192 * GIB, mounted("xfs"))
        };
        driver.refused(request, Code::OutOfRange, "request at most");
        // A raw block volume does not grow a filesystem.
        let raw = csi::CreateVolumeRequest {
            volume_content_source: Some(source.into()),
            ..create("raw", 8192 * GIB, block())
        };
        let raw = driver.ok(raw).volume.unwrap();
        driver.ok(delete_volume(&raw.volume_id));
    }
    volume.stages_at_its_new_size();
}

/// A directory with a program named resize2fs that destroys the filesystem and exits with a code.
fn destructive_tool(code: i32) -> TempDir {
    let directory = TempDir::with_prefix("csi-loopback-").unwrap();
    let tool = directory.path().join("resize2fs");
    let script = format!(
        "#!/bin/sh\nhead -c 8388608 /dev/urandom | dd of=\"$1\" conv=notrunc status=none\nexit {code}\n"
    );
    fs::write(&tool, script).unwrap();
    fs::set_permissions(&tool, fs::Permissions::from_mode(0o755)).unwrap();
    directory
}

fn search_path(first: &Path) -> String {
    format!("PATH={}:{}", first.display(), std::env::var("PATH").unwrap())
}

#[test]
fn a_resize_that_destroys_the_filesystem_is_undone() {
    if !have_root() {
        return;
    }
    for kind in ALL_KINDS {
        for code in [0, 1] {
            println!("with a pool of kind {kind} and exit code {code}");
            let directory = destructive_tool(code);
            let program = search_path(directory.path());
            let driver = Driver::run_by(&["env", &program], kind, &["--overcommit", "100000"]);
            let mut volume = Filled::new(&driver, "v", "ext4", 16 * MIB);
            // The kernel is not used for this factor, even if it may be.
            volume.expand(32 * GIB);
            volume.stages_at_its_old_size(16 * MIB);
            if kind != PoolKind::Image {
                let files = fs::read_dir(driver.data_dir().join("volumes")).unwrap();
                let files: Vec<PathBuf> = files.map(|entry| entry.unwrap().path()).collect();
                assert_eq!(files, [driver.backing_file(&volume.id)]);
            }
            fs::remove_file(directory.path().join("resize2fs")).unwrap();
            volume.stages_at_its_new_size();
        }
    }
}

#[test]
fn a_failed_growth_survives_a_restart_of_the_driver() {
    if !have_root() {
        return;
    }
    let directory = destructive_tool(1);
    let program = search_path(directory.path());
    let kind = PoolKind::Reflink;
    let mut driver = Driver::run_by(&["env", &program], kind, &["--overcommit", "100000"]);
    let mut volume = Filled::new(&driver, "v", "ext4", 16 * MIB);
    volume.expand(32 * GIB);
    volume.stage();
    let (id, found) = (volume.id.clone(), volume.condition());
    assert!(found.abnormal);
    let leftover = driver.data_dir().join(format!("volumes/{id}.growing"));
    fs::write(&leftover, "of an earlier growth").unwrap();
    driver.restart();
    let volume = Filled { driver: &driver, fs_type: "ext4", id, bytes: 32 * GIB };
    assert_eq!(volume.condition(), found);
    assert!(!leftover.exists());
    driver.unstage(&volume.id);
    fs::remove_file(directory.path().join("resize2fs")).unwrap();
    volume.stages_at_its_new_size();
}

/// A delta across a growth is the same as without: the copy shares all other blocks.
#[test]
fn a_delta_across_a_growth_at_stage_is_exact() {
    if !have_root() {
        return;
    }
    for kind in ALL_KINDS {
        println!("with a pool of kind {kind}");
        let driver = Driver::with(kind, &["--overcommit", "100000"]);
        let mut volume = Filled::new(&driver, "v", "ext4", 64 * MIB);
        let staging = driver.stage(&volume.id, &mounted("ext4"));
        fs::write(staging.join("large"), pattern(2, 20 << 20)).unwrap();
        driver.unstage(&volume.id);
        let before = driver.snapshot("before", &volume.id);
        volume.expand(128 * MIB);
        volume.stages_at_its_new_size();
        let after = driver.snapshot("after", &volume.id);
        let extents = driver.ok(delta(&before, &after)).extents();
        let [old, new] = [&before, &after].map(|snapshot| {
            let request =
                from_source(&format!("r-{snapshot}"), Source::Snapshot(snapshot), 128 * MIB);
            let id = driver.ok(request).volume.unwrap().volume_id;
            (driver.publish(&id, &block()), id)
        });
        let open = |device: &Path| fs::File::open(device).unwrap();
        let (old_file, new_file) = (open(&old.0), open(&new.0));
        let size = 128 * MIB;
        support::delta::apply_and_compare("growth", Some(&old_file), &new_file, &extents, size);
        let changed: u64 = extents.iter().map(|(_, length)| length).sum();
        assert!(changed < 10 * MIB, "{changed} bytes changed by a growth");
        drop((old_file, new_file));
        driver.take_down(&old.1);
        driver.take_down(&new.1);
    }
}
