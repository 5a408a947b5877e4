//! Files that refuse a change of their group (volume_mount_group): as with kubelet, the pod starts.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};

use csi_loopback::proto::csi::v1 as csi;

use support::driver::*;
use support::{MIB, path, run};

use csi::volume_capability::AccessType;

const GROUP: u32 = 4000;

#[test]
fn a_file_that_refuses_its_group_does_not_stop_the_pod() {
    with_driver(|driver| {
        for fs_type in ["ext4", "xfs", "btrfs"] {
            let mut wanted = mounted(fs_type);
            let volume = driver.volume(fs_type, 320 * MIB, wanted.clone());
            let root = driver.stage(&volume, &wanted);
            let directory = root.join("directory");
            fs::create_dir_all(directory.join("below")).unwrap();
            let fixed = [directory.join("immutable"), directory.join("append")];
            for (file, flag) in fixed.iter().zip(["+i", "+a"]) {
                fs::write(file, "x").unwrap();
                run("chattr", &[flag, path(file)]);
            }
            run("chattr", &["+i", path(&directory.join("below"))]);
            symlink("/etc/hostname", directory.join("link")).unwrap();
            run("mkfifo", &[path(&directory.join("fifo"))]);
            fs::write(root.join("z"), "y").unwrap();
            if let Some(AccessType::Mount(mount)) = &mut wanted.access_type {
                mount.volume_mount_group = GROUP.to_string();
            }
            let target = driver.target(&volume);
            driver.ok(driver.publishing(&volume, &target, &wanted));
            let group = |name: &str| fs::symlink_metadata(target.join(name)).unwrap().gid();
            let given = ["", "z", "directory", "directory/link", "directory/fifo"];
            assert_eq!(given.map(group), [GROUP; 5], "{fs_type}");
            let kept = ["directory/immutable", "directory/append", "directory/below"];
            assert_eq!(kept.map(group), [0; 3], "{fs_type}");
            assert!(driver.log().contains("files of a volume keep their group"), "{fs_type}");
            for name in kept {
                run("chattr", &["-i", "-a", path(&target.join(name))]);
            }
            driver.take_down(&volume);
        }
    });
}
