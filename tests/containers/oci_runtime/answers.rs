//! `crust stats` and `crust resize`, which crust_ops calls.

use std::fs;

use support::driver::ext4_grows_online;
use support::runtime::{bind, info, on_node};
use support::{MIB, path, run};

#[test]
fn stats_and_resize_work_while_containers_run() {
    on_node(|node| {
        for (fs_type, size) in [("xfs", 300 * MIB), ("btrfs", 256 * MIB), ("ext4", 64 * MIB)] {
            let device = node.device(fs_type, fs_type, size);
            let target = node.stage(fs_type, &info(&device, fs_type, &["noatime"]));
            // One container has only a sub-path, a file: the only mount of the volume later.
            let mounts = [bind(target.as_path(), "/v")];
            let all = node.container(&mounts).in_pod("pod");
            all.start();
            all.sh("echo x >/v/file");
            let part = node.container(&[bind(&target.as_path().join("file"), "/f")]).in_pod("pod");
            part.start();
            all.delete();
            let watch = node.watch(&device, &[]);
            let before = node.stats(&target);
            assert_eq!(before["volume_condition"]["abnormal"], false);
            let of = |stats: &serde_json::Value, unit: usize, what: &str| {
                stats["usage"][unit][what].as_u64().unwrap()
            };
            assert_eq!(before["usage"][0]["unit"], "BYTES");
            assert_eq!(before["usage"][1]["unit"], "INODES");
            assert!((size / 2..=size).contains(&of(&before, 0, "total")), "{before}");
            assert!(
                of(&before, 0, "used") + of(&before, 0, "available") <= of(&before, 0, "total")
            );
            let larger = size + 200 * MIB;
            let resize = |least: u64, most: u64| {
                node.crust(&[
                    "resize",
                    path(target.as_path()),
                    &least.to_string(),
                    &most.to_string(),
                ])
            };
            let (code, message) = resize(larger, 0).unwrap_err();
            assert_eq!((code, message.contains("expand the device first")), (1, true), "{message}");
            node.grow(fs_type, &device, larger);
            assert_eq!(resize(0, size).unwrap_err().0, 1, "more than MAX");
            if fs_type == "ext4" && !ext4_grows_online() {
                let (code, message) = resize(larger, 0).unwrap_err();
                assert_eq!((code, message.contains("CAP_SYS_RESOURCE")), (1, true), "{message}");
            } else {
                for _ in 0..2 {
                    let answer: serde_json::Value =
                        serde_json::from_str(&resize(larger, larger).unwrap()).unwrap();
                    assert_eq!(answer["capacity_bytes"], larger);
                }
                assert!(of(&node.stats(&target), 0, "total") > of(&before, 0, "total") + 150 * MIB);
            }
            assert_eq!(part.exec(&["cat", "/f"]), "x");
            watch.assert_no_mounts();
            part.delete();
            node.assert_gone(&device, &target);
        }
    });
}

#[test]
fn crust_commands_without_a_container_fail_with_exit_codes() {
    on_node(|node| {
        let (device, target) = node.volume("v", &[]);
        let stats = || node.crust(&["stats", path(target.as_path())]);
        assert_eq!(stats().unwrap_err().0, 3);
        for words in [
            &["stats"][..],
            &["stats", "/not/there"],
            &["stats", "relative"],
            &["stats", "/a", "/b"],
            &["resize", "/a", "1"],
            &["resize", path(target.as_path()), "-1", "0"],
            &["resize", path(target.as_path()), "2", "1"],
            &["explode", "/a"],
            &[],
        ] {
            let (code, message) = node.crust(words).unwrap_err();
            assert_eq!((code, message.lines().count()), (1, 1), "{words:?}: {message}");
        }
        // A mount that belongs to no container does not count.
        let elsewhere = node.path("elsewhere");
        fs::create_dir(&elsewhere).unwrap();
        run("mount", &[path(&device), path(&elsewhere)]);
        assert_eq!(stats().unwrap_err().0, 3);
        support::kernel::unmount(&elsewhere);
        // A created container uses the volume before it is started.
        let container = node.container(&[bind(target.as_path(), "/v")]);
        assert!(container.create().status.success());
        assert!(stats().is_ok());
        container.delete();
        assert_eq!(stats().unwrap_err().0, 3);
        node.assert_gone(&device, &target);
    });
}

#[test]
fn a_mount_over_the_volume_does_not_falsify_stats() {
    on_node(|node| {
        let device = node.device("xfs", "xfs", 300 * MIB);
        let target = node.stage("xfs", &info(&device, "xfs", &[]));
        let container = node.container(&[bind(target.as_path(), "/v")]);
        let container = container.with_capabilities(&["CAP_SYS_ADMIN", "CAP_DAC_OVERRIDE"]);
        container.start();
        container.sh("/bin/busybox mount -t tmpfs -o size=1m tmpfs /v");
        assert!(
            container.exec(&["cat", "/proc/self/mountinfo"]).contains(" /v rw,relatime - tmpfs")
        );
        // The filesystem is not reachable through the container now, and no other filesystem is
        // measured instead.
        match node.crust(&["stats", path(target.as_path())]) {
            Ok(stats) => {
                let stats: serde_json::Value = serde_json::from_str(&stats).unwrap();
                assert!(stats["usage"][0]["total"].as_u64().unwrap() > 100 * MIB, "{stats}");
            }
            Err((code, _)) => assert_eq!(code, 3),
        }
        container.delete();
        node.assert_gone(&device, &target);
    });
}
