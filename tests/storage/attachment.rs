//! Staging and publishing near mounts and files of other programs: these are not touched, and a
//! failed call changes nothing.

use std::fs;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use csi_loopback::backend::{
    Access, Backend, Capability, Error, FsType, PoolKind, Publication, VolumeRequest,
};
use support::*;

/// Publishes a volume on this host for writing.
fn publish(
    backend: &Backend,
    volume_id: &str,
    staging: &Path,
    target: &Path,
    wanted: &Capability,
) -> Result<(), Error> {
    backend.publish(volume_id, staging, target, &Publication::on_host(wanted.clone(), false))
}

fn image_pool(run: impl FnOnce(&mut Pool)) {
    with_pool(PoolKind::Image, run);
}

fn filesystem(pool: &Pool, name: &str) -> csi_loopback::backend::Volume {
    let fs_type = Some(FsType::Ext4);
    pool.create(name, VolumeRequest { required_bytes: 64 * MIB, fs_type, ..request() })
}

fn is_mounted(path: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    mounts.lines().any(|line| line.split(' ').nth(4) == path.to_str())
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
        let _ = std::process::Command::new("umount").arg(&self.0).status();
    }
}

#[test]
fn a_failed_stage_keeps_the_mount_of_another_program() {
    image_pool(|pool| {
        let volume = filesystem(pool, "v");
        let foreign = Tmpfs::at(pool.scratch().join("stage"));
        let refused = pool.backend().stage(&volume.id, &foreign.0, &mounted(FsType::Ext4));
        assert!(matches!(refused, Err(Error::Precondition(_))), "{refused:?}");
        assert!(is_mounted(&foreign.0));
        pool.backend().delete_volume(&volume.id).unwrap();
    });
}

#[test]
fn a_failed_publish_leaves_its_target_unchanged() {
    image_pool(|pool| {
        let volume = filesystem(pool, "v");
        let backend = pool.backend().clone();
        let staging = pool.scratch().join("stage");
        let capability = mounted(FsType::Ext4);
        backend.stage(&volume.id, &staging, &capability).unwrap();
        let precious = pool.scratch().join("precious");
        fs::write(&precious, "data").unwrap();
        for wanted in [raw(), capability.clone()] {
            let refused = publish(&backend, &volume.id, &staging, &precious, &wanted);
            assert!(matches!(refused, Err(Error::Precondition(_))), "{refused:?}");
            assert_eq!(fs::read_to_string(&precious).unwrap(), "data");
        }
        // A non-empty directory is covered by the mount, and reappears unchanged.
        let full = pool.scratch().join("full");
        fs::create_dir(&full).unwrap();
        fs::write(full.join("kept"), "data").unwrap();
        publish(&backend, &volume.id, &staging, &full, &capability).unwrap();
        assert!(!full.join("kept").exists());
        backend.unpublish(&volume.id, &full).unwrap();
        assert_eq!(fs::read_to_string(full.join("kept")).unwrap(), "data");
        backend.unstage(&volume.id, &staging).unwrap();
    });
}

#[test]
fn a_target_of_another_volume_is_refused() {
    image_pool(|pool| {
        let (one, two) = (filesystem(pool, "one"), filesystem(pool, "two"));
        let backend = pool.backend().clone();
        let capability = mounted(FsType::Ext4);
        let target = pool.scratch().join("target");
        let stage = |volume: &str| pool.scratch().join(format!("stage-{volume}"));
        for volume in [&one, &two] {
            backend.stage(&volume.id, &stage(&volume.name), &capability).unwrap();
        }
        publish(&backend, &one.id, &stage("one"), &target, &capability).unwrap();
        fs::write(target.join("of-one"), "").unwrap();
        let refused = publish(&backend, &two.id, &stage("two"), &target, &capability);
        assert!(matches!(refused, Err(Error::Precondition(_))), "{refused:?}");
        assert!(target.join("of-one").exists());
        backend.unpublish(&two.id, &target).unwrap();
        assert!(target.join("of-one").exists());
        backend.unpublish(&one.id, &target).unwrap();
        for volume in [&one, &two] {
            backend.unstage(&volume.id, &stage(&volume.name)).unwrap();
        }
    });
}

#[test]
fn paths_with_symbolic_links_work() {
    image_pool(|pool| {
        let volume = filesystem(pool, "v");
        let backend = pool.backend().clone();
        let capability = mounted(FsType::Ext4);
        fs::create_dir(pool.scratch().join("real")).unwrap();
        symlink(pool.scratch().join("real"), pool.scratch().join("link")).unwrap();
        let staging = pool.scratch().join("link/stage");
        let target = pool.scratch().join("link/target");
        for _ in 0..2 {
            backend.stage(&volume.id, &staging, &capability).unwrap();
            publish(&backend, &volume.id, &staging, &target, &capability).unwrap();
        }
        fs::write(target.join("file"), "data").unwrap();
        pool.snapshot("s", &volume);
        assert!(matches!(backend.unstage(&volume.id, &staging), Err(Error::Precondition(_))));
        for _ in 0..2 {
            backend.unpublish(&volume.id, &target).unwrap();
            backend.unstage(&volume.id, &staging).unwrap();
        }
        assert!(!is_mounted(&pool.scratch().join("real/stage")));
        assert!(!target.exists());
    });
}

#[test]
fn a_snapshot_freezes_only_its_own_filesystem() {
    image_pool(|pool| {
        let volume = filesystem(pool, "v");
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
        let volume = filesystem(pool, "v");
        let backend = pool.backend().clone();
        let staging = pool.scratch().join("stage");
        let access =
            Access::Mount { fs_type: Some(FsType::Ext4), flags: Vec::new(), group: Some(4242) };
        let capability = Capability { access, ..mounted(FsType::Ext4) };
        backend.stage(&volume.id, &staging, &capability).unwrap();
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
        publish(&backend, &volume.id, &staging, &target, &capability).unwrap();
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
        let volume = filesystem(pool, "v");
        let backend = pool.backend().clone();
        let in_group = |group| {
            let fs_type = Some(FsType::Ext4);
            let access = Access::Mount { fs_type, flags: Vec::new(), group: Some(group) };
            Capability { access, ..mounted(FsType::Ext4) }
        };
        let staging = pool.scratch().join("stage");
        backend.stage(&volume.id, &staging, &mounted(FsType::Ext4)).unwrap();
        let target = |group| pool.scratch().join(format!("pod-{group}"));
        let publish = |group| {
            let capability = in_group(group);
            publish(&backend, &volume.id, &staging, &target(group), &capability).unwrap();
        };
        fs::write(staging.join("file"), "").unwrap();
        // The group of the last pod remains, even if kubelet repeats the call for the first.
        for group in [4242, 4243, 4243, 4242] {
            publish(group);
        }
        assert_eq!(fs::metadata(staging.join("file")).unwrap().gid(), 4243);
        for group in [4242, 4243] {
            backend.unpublish(&volume.id, &target(group)).unwrap();
        }
        backend.unstage(&volume.id, &staging).unwrap();
    });
}

#[test]
fn raw_data_is_never_overwritten_by_mkfs() {
    image_pool(|pool| {
        let volume = filesystem(pool, "v");
        let attached = pool.attach(&volume.id);
        write_direct(&attached.target, MIB, &pattern(1, BLOCK as usize));
        let before = read_all(&attached.target);
        pool.detach(&attached);
        let staging = pool.scratch().join("stage");
        let refused = pool.backend().stage(&volume.id, &staging, &mounted(FsType::Ext4));
        assert!(matches!(refused, Err(Error::Precondition(_))), "{refused:?}");
        let attached = pool.attach(&volume.id);
        assert!(read_all(&attached.target) == before);
        // A filesystem that was created through the raw device is used unchanged.
        run("mkfs.xfs", &["-q", "-f", "-d", "size=60m", "--unsupported", path(&attached.target)]);
        pool.detach(&attached);
        pool.backend().stage(&volume.id, &staging, &mounted(FsType::Xfs)).unwrap();
        assert!(is_mounted(&staging));
        pool.backend().unstage(&volume.id, &staging).unwrap();
    });
}

/// The tool of a driver that was killed while it created a filesystem keeps running when the next
/// driver gets the call.
#[test]
fn a_stage_waits_for_the_tool_of_a_killed_driver() {
    with_pool(PoolKind::Copy, |pool| {
        let volume = filesystem(pool, "v");
        let backing = pool.data_dir().join("volumes").join(&volume.id);
        run(
            "losetup",
            &["--find", "--direct-io=on", "--sector-size=4096", support::path(&backing)],
        );
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
        for device in kernel::loops_named(&volume.id) {
            run("losetup", &["--detach", &device]);
        }
        staged.unwrap();
        unstaged.unwrap();
    });
}

#[test]
fn unstage_detaches_the_device_and_delete_removes_the_file() {
    for_each_pool(|pool| {
        let capabilities = [raw(), mounted(FsType::Ext4)];
        for (number, capability) in capabilities.iter().enumerate() {
            let volume = filesystem(pool, &format!("v{number}"));
            let backend = pool.backend();
            let staging = pool.scratch().join(format!("stage-{number}"));
            for _ in 0..2 {
                backend.stage(&volume.id, &staging, capability).unwrap();
                assert_eq!(kernel::loops_named(&volume.id).len(), 1);
                backend.unstage(&volume.id, &staging).unwrap();
                assert!(kernel::loops_named(&volume.id).is_empty());
                assert!(!is_mounted(&staging));
            }
            backend.delete_volume(&volume.id).unwrap();
        }
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
        assert!(!is_mounted(&attached.target) && !attached.target.exists());
        // Staging and publishing work again.
        let attached = pool.attach(&volume.id);
        write_direct(&attached.target, 0, &pattern(1, BLOCK as usize));
        pool.detach(&attached);
    });
}

#[test]
fn the_page_cache_of_a_device_is_in_the_snapshot() {
    for_each_pool(|pool| {
        use std::os::unix::fs::FileExt;
        let volume = pool.volume("v", 64 * MIB);
        let device = pool.attach(&volume.id).target;
        let a = pool.snapshot("a", &volume);
        // As long as it is open, the kernel does not write the cache back.
        let open = fs::File::options().write(true).open(&device).unwrap();
        open.write_all_at(&pattern(1, 3 * BLOCK as usize), 5 * BLOCK).unwrap();
        let b = pool.snapshot("b", &volume);
        drop(open);
        assert_eq!(blocks(pool.backend().delta(&a.id, &b.id).unwrap()), [5, 6, 7]);
    });
}

#[test]
fn a_larger_copy_of_a_filesystem_grows_at_staging() {
    image_pool(|pool| {
        for fs_type in FsType::ALL {
            let request =
                VolumeRequest { required_bytes: 400 * MIB, fs_type: Some(fs_type), ..request() };
            let volume = pool.create(&format!("small-{fs_type}"), request.clone());
            let staging = pool.scratch().join(format!("small-{fs_type}"));
            let backend = pool.backend().clone();
            backend.stage(&volume.id, &staging, &mounted(fs_type)).unwrap();
            fs::write(staging.join("file"), "data").unwrap();
            let snapshot = pool.snapshot(&format!("s-{fs_type}"), &volume);
            let larger = pool.create(
                &format!("large-{fs_type}"),
                VolumeRequest {
                    required_bytes: 800 * MIB,
                    source: Some(csi_loopback::backend::Source::Snapshot(snapshot.id)),
                    ..request
                },
            );
            // Both at the same time: their filesystems have the same UUID.
            let grown = pool.scratch().join(format!("large-{fs_type}"));
            backend.stage(&larger.id, &grown, &mounted(fs_type)).unwrap();
            assert_eq!(fs::read_to_string(grown.join("file")).unwrap(), "data");
            let stat = nix::sys::statvfs::statvfs(&grown).unwrap();
            let bytes = stat.blocks() * stat.fragment_size();
            assert!(bytes > 650 * MIB, "{fs_type}: {bytes}");
            backend.unstage(&larger.id, &grown).unwrap();
            backend.unstage(&volume.id, &staging).unwrap();
        }
    });
}
