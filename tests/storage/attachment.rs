//! Staging and publishing near mounts, files and processes of other programs. More of these tests,
//! over the socket, are in tests/driver/node.

use std::fs;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use csi_loopback::backend::{
    Access, AccessMode, Capability, Error, FsType, PoolKind, Publication, Volume, VolumeRequest,
};
use support::*;

fn image_pool(run: impl FnOnce(&mut Pool)) {
    with_pool(PoolKind::Image, run);
}

fn filesystem(pool: &Pool) -> Volume {
    let fs_type = Some(FsType::Ext4);
    pool.create("v", VolumeRequest { required_bytes: 64 * MIB, fs_type, ..request() })
}

/// Publishes a volume to a group on this host for writing.
fn publish(pool: &Pool, volume: &Volume, staging: &Path, target: &Path, group: u32) {
    let fs_type = Some(FsType::Ext4);
    let access = Access::Mount { fs_type, flags: Vec::new(), group: Some(group) };
    let capability = Capability { access, ..mounted(FsType::Ext4) };
    let wanted = Publication::on_host(capability, false);
    pool.backend().publish(&volume.id, staging, target, &wanted).unwrap();
}

/// A tmpfs of another program, unmounted at the end.
struct Tmpfs(PathBuf);

impl Tmpfs {
    fn at(path: PathBuf) -> Self {
        fs::create_dir_all(&path).unwrap();
        run("mount", &["-t", "tmpfs", "foreign", support::path(&path)]);
        Self(path)
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

#[test]
fn a_snapshot_freezes_only_its_own_filesystem() {
    image_pool(|pool| {
        let volume = filesystem(pool);
        let backend = pool.backend().clone();
        let staging = pool.scratch().join("parent/stage");
        backend.stage(&volume.id, &staging, &mounted(FsType::Ext4)).unwrap();
        // From now on the path is in another filesystem.
        let foreign = Tmpfs::at(pool.scratch().join("parent"));
        fs::create_dir(&staging).unwrap();
        let refused = backend.create_snapshot("s", &volume.id);
        assert!(matches!(refused, Err(Error::Precondition(_))), "{refused:?}");
        drop(foreign);
        pool.snapshot("s", &volume);
        backend.unstage(&volume.id, &staging).unwrap();
    });
}

#[test]
fn a_group_change_does_not_follow_links() {
    image_pool(|pool| {
        let volume = filesystem(pool);
        let backend = pool.backend().clone();
        let staging = pool.scratch().join("stage");
        backend.stage(&volume.id, &staging, &mounted(FsType::Ext4)).unwrap();
        let outside = pool.scratch().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("secret"), "").unwrap();
        fs::set_permissions(outside.join("secret"), fs::Permissions::from_mode(0o600)).unwrap();
        fs::create_dir_all(staging.join("a/b")).unwrap();
        fs::write(staging.join("a/b/file"), "").unwrap();
        fs::set_permissions(staging.join("a/b/file"), fs::Permissions::from_mode(0o600)).unwrap();
        symlink(&outside, staging.join("a/link")).unwrap();
        symlink(outside.join("secret"), staging.join("a/file-link")).unwrap();

        let target = pool.scratch().join("target");
        publish(pool, &volume, &staging, &target, 4242);
        let owned = |path: &Path| {
            let metadata = fs::symlink_metadata(path).unwrap();
            (metadata.gid(), metadata.mode() & 0o7777)
        };
        assert_eq!(owned(&target.join("a/b/file")), (4242, 0o660));
        assert_eq!(owned(&target.join("a")).0, 4242);
        assert_eq!(owned(&target.join("a")).1 & 0o2770, 0o2770);
        assert_eq!(owned(&target.join("a/link")).0, 4242);
        assert_eq!(owned(&outside.join("secret")), (0, 0o600));
        assert_eq!(owned(&outside).0, 0);
        backend.unpublish(&volume.id, &target).unwrap();
        backend.unstage(&volume.id, &staging).unwrap();
    });
}

#[test]
fn a_repeated_publish_keeps_the_group_of_another_pod() {
    image_pool(|pool| {
        let volume = filesystem(pool);
        let backend = pool.backend().clone();
        let staging = pool.scratch().join("stage");
        backend.stage(&volume.id, &staging, &mounted(FsType::Ext4)).unwrap();
        let target = |group| pool.scratch().join(format!("pod-{group}"));
        fs::write(staging.join("file"), "").unwrap();
        // The group of the last pod remains, even if kubelet repeats the call for the first.
        for group in [4242, 4243, 4243, 4242] {
            publish(pool, &volume, &staging, &target(group), group);
        }
        assert_eq!(fs::metadata(staging.join("file")).unwrap().gid(), 4243);
        for group in [4242, 4243] {
            backend.unpublish(&volume.id, &target(group)).unwrap();
        }
        backend.unstage(&volume.id, &staging).unwrap();
    });
}

/// The tool of a driver that was killed while it created a filesystem keeps running when the next
/// driver gets the call.
#[test]
fn a_stage_waits_for_the_tool_of_a_killed_driver() {
    with_pool(PoolKind::Copy, |pool| {
        let volume = filesystem(pool);
        let backing = pool.data_dir().join("volumes").join(&volume.id);
        run("losetup", &["--find", "--direct-io=on", "--sector-size=4096", path(&backing)]);
        let device = kernel::loops_named(&volume.id).remove(0);
        // Open exclusively, like mkfs.
        let alone =
            fs::File::options().read(true).custom_flags(libc::O_EXCL).open(&device).unwrap();
        let tool = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(300));
            drop(alone);
        });
        let staging = pool.scratch().join("stage");
        let staged = pool.backend().stage(&volume.id, &staging, &mounted(FsType::Ext4));
        tool.join().unwrap();
        let unstaged = pool.backend().unstage(&volume.id, &staging);
        kernel::detach_loops_named(&volume.id);
        staged.unwrap();
        unstaged.unwrap();
    });
}

/// Runs the test with an ext4 that has a file, and its backing file.
fn with_unstaged_ext4(run: impl FnOnce(&mut Pool, &Volume, &Path)) {
    with_pool(PoolKind::Copy, |pool| {
        let volume = filesystem(pool);
        let staging = pool.scratch().join("stage");
        pool.backend().stage(&volume.id, &staging, &mounted(FsType::Ext4)).unwrap();
        fs::write(staging.join("file"), "kept").unwrap();
        pool.backend().unstage(&volume.id, &staging).unwrap();
        let backing = pool.data_dir().join("volumes").join(&volume.id);
        run(pool, &volume, &backing);
    });
}

fn change_ext4(backing: &Path, requests: &[&str]) {
    requests.iter().for_each(|request| run("debugfs", &["-w", "-R", request, path(backing)]));
}

/// Whether a check of the whole ext4 finds nothing.
fn is_clean(backing: &Path) -> bool {
    Command::new("e2fsck").args(["-fn", path(backing)]).output().unwrap().status.success()
}

/// As kubelet's mount utility does for other drivers. The kernel would mount the filesystem.
#[test]
fn an_ext4_with_recorded_errors_is_repaired_before_its_mount() {
    with_unstaged_ext4(|pool, volume, backing| {
        let staging = pool.scratch().join("stage");
        let stage = |capability| pool.backend().stage(&volume.id, &staging, capability).unwrap();
        let unstage = || pool.backend().unstage(&volume.id, &staging).unwrap();
        let wanted = mounted(FsType::Ext4);
        let reading = Capability { mode: AccessMode::SingleNodeReaderOnly, ..wanted.clone() };
        change_ext4(backing, &["set_inode_field /file links_count 3"]);
        stage(&wanted);
        unstage();
        assert!(!is_clean(backing), "without recorded errors, nothing is checked");

        change_ext4(backing, &["set_super_value state 2"]);
        stage(&reading);
        unstage();
        assert!(!is_clean(backing), "a read-only stage changes nothing");

        stage(&wanted);
        stage(&wanted);
        assert_eq!(fs::read_to_string(staging.join("file")).unwrap(), "kept");
        unstage();
        assert!(is_clean(backing));
    });
}

#[test]
fn an_ext4_that_e2fsck_leaves_to_a_person_is_not_mounted() {
    with_unstaged_ext4(|pool, volume, backing| {
        let staging = pool.scratch().join("stage");
        let backend = pool.backend().clone();
        let stage = || backend.stage(&volume.id, &staging, &mounted(FsType::Ext4));
        // The root directory.
        change_ext4(backing, &["clri <2>", "set_super_value state 2"]);
        for _ in 0..2 {
            let message = stage().unwrap_err().to_string();
            assert!(message.contains("staged as a raw block volume"), "{message}");
            assert!(kernel::mounts_at(&staging).is_empty());
            assert!(kernel::loops_named(&volume.id).is_empty());
        }
        let raw = pool.attach(&volume.id);
        let repair = Command::new("e2fsck").args(["-y", path(&raw.target)]).output().unwrap();
        assert_eq!(repair.status.code(), Some(1), "{repair:?}");
        pool.detach(&raw);
        stage().unwrap();
        let found = fs::read_dir(staging.join("lost+found")).unwrap();
        let files = found.map(|entry| entry.unwrap().path()).filter(|entry| entry.is_file());
        let texts: Vec<_> = files.map(|file| fs::read_to_string(file).unwrap()).collect();
        assert_eq!(texts, ["kept"]);
        backend.unstage(&volume.id, &staging).unwrap();
    });
}

#[test]
fn a_detached_device_does_not_keep_its_target() {
    image_pool(|pool| {
        let volume = pool.volume("v", MIB);
        let attached = pool.attach(&volume.id);
        let rdev = fs::metadata(&attached.target).unwrap().rdev();
        run("losetup", &["-d", &format!("/dev/loop{}", nix::sys::stat::minor(rdev))]);
        pool.detach(&attached);
        assert!(kernel::mounts_at(&attached.target).is_empty() && !attached.target.exists());
        // Staging and publishing work again.
        let attached = pool.attach(&volume.id);
        write_direct(&attached.target, 0, &pattern(1, BLOCK as usize));
        pool.detach(&attached);
    });
}
