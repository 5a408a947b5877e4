//! Sub-paths: below the target, as the proposal's kubelet passes them, and as bind mounts, as a
//! released kubelet does.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::sync::atomic::{AtomicBool, Ordering};

use support::MIB;
use support::runtime::{bind, info, on_node};

#[test]
fn sub_paths_are_directories_files_or_created() {
    on_node(|node| {
        let device = node.device("sub", "ext4", 32 * MIB);
        node.with_mount(&device, |at| {
            fs::create_dir_all(at.join("here/deep")).unwrap();
            fs::write(at.join("here/file"), "in the file").unwrap();
            symlink("here", at.join("within")).unwrap();
        });
        let target = node.stage("sub", &info(&device, "ext4", &[]).with_group(4059, None));
        let at = |sub: &str| target.as_path().join(sub);
        let container = node.container(&[
            bind(&at("here/deep"), "/deep"),
            bind(&at("here/file"), "/file"),
            bind(&at("within/file"), "/linked"),
            bind(&at("new/newer"), "/new"),
            bind(target.as_path(), "/all"),
        ]);
        container.start();
        assert_eq!(container.exec(&["cat", "/file"]), "in the file");
        assert_eq!(container.exec(&["cat", "/linked"]), "in the file");
        container.sh("echo x >/deep/x; echo y >/new/y; echo z >>/file");
        assert_eq!(container.sh("cat /all/here/deep/x /all/new/newer/y"), "x\ny");
        assert_eq!(container.exec(&["stat", "-c", "%g %a", "/new"]), "4059 2775");
        assert_eq!(container.exec(&["stat", "-c", "%g %a", "/all/new"]), "4059 2775");
        container.delete();
        node.assert_gone(&device, &target);
    });
}

#[test]
fn bind_mounts_of_sub_paths_map_to_the_volume() {
    on_node(|node| {
        let device = node.device("sub", "ext4", 32 * MIB);
        node.with_mount(&device, |at| {
            fs::create_dir(at.join("dir")).unwrap();
            fs::write(at.join("file"), "of the volume").unwrap();
        });
        let target = node.stage("sub", &info(&device, "ext4", &[]));
        // kubelet creates and opens these in the empty directory on the host.
        fs::create_dir_all(target.as_path().join("dir/new")).unwrap();
        fs::write(target.as_path().join("file"), "of the host").unwrap();
        let subpaths = node.path("kubelet/pods/sub/volume-subpaths/pv/container");
        node.bind(&target.as_path().join("dir/new"), &subpaths.join("0"));
        node.bind(&target.as_path().join("file"), &subpaths.join("1"));
        // The same filesystem at another path, and a bind mount of a bind mount.
        node.bind(&node.path("kubelet"), &node.path("elsewhere"));
        node.bind(
            &node.path("elsewhere/pods/sub/volumes/kubernetes.io~csi/pv/mount/dir"),
            &subpaths.join("2"),
        );
        let plain = node.path("kubelet/pods/sub/plain");
        fs::create_dir(&plain).unwrap();
        fs::write(plain.join("file"), "no volume").unwrap();
        let container = node.container(&[
            bind(&subpaths.join("0"), "/new"),
            bind(&subpaths.join("1"), "/file"),
            bind(&subpaths.join("2"), "/dir"),
            bind(&subpaths.join("2/below"), "/below"),
            bind(&plain, "/plain"),
        ]);
        container.start();
        assert_eq!(container.exec(&["cat", "/file"]), "of the volume");
        container.sh("echo x >/new/x; echo y >/below/y");
        assert_eq!(container.sh("cat /dir/new/x /dir/below/y /plain/file"), "x\ny\nno volume");
        container.delete();
        assert_eq!(fs::read_to_string(target.as_path().join("file")).unwrap(), "of the host");
        assert_eq!(fs::read_dir(target.as_path().join("dir/new")).unwrap().count(), 0);
        // A bind mount whose directory was removed is an error.
        fs::remove_dir(target.as_path().join("dir/new")).unwrap();
        node.container(&[bind(&subpaths.join("0"), "/new")]).refused("was removed");
        fs::remove_dir_all(target.as_path().join("dir")).unwrap();
        fs::remove_file(target.as_path().join("file")).unwrap();
        node.assert_gone(&device, &target);
    });
}

#[test]
fn links_replaced_during_create_stay_within_the_volume() {
    on_node(|node| {
        let device = node.device("swap", "ext4", 32 * MIB);
        node.with_mount(&device, |at| {
            fs::create_dir_all(at.join("real")).unwrap();
            fs::write(at.join("real/mark"), "of the volume").unwrap();
            fs::set_permissions(at.join("real"), fs::Permissions::from_mode(0o777)).unwrap();
        });
        let outside = node.path("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("mark"), "of the host").unwrap();
        let target = node.stage("swap", &info(&device, "ext4", &[]));
        // The link's target exists on the host, where it must not be reached, but not in the
        // container.
        // `ln` removes a link before it creates the next: a container that is created between them
        // gets a new directory, which replaces the links until it is removed.
        let script = format!(
            "while true; do ln -sfn real /v/x; ln -sfn {} /v/x; [ -L /v/x ] || rm -rf /v/x; done",
            outside.display()
        );
        let hostile = node.container(&[bind(target.as_path(), "/v")]).in_pod("pod");
        let hostile = hostile.running(&["sh", "-c", &script]);
        hostile.start();
        let (within, without) = (AtomicBool::new(false), AtomicBool::new(false));
        for _ in 0..200 {
            let victim = node.container(&[bind(&target.as_path().join("x"), "/x")]).in_pod("pod");
            let output = victim.create();
            if output.status.success() {
                node.ok(&["start", &victim.id]);
                let mark = victim.exec(&["sh", "-c", "cat /x/mark || true"]);
                assert!(["of the volume", ""].contains(&mark.as_str()), "{mark}");
                within.fetch_or(!mark.is_empty(), Ordering::Relaxed);
            } else {
                let message = String::from_utf8(output.stderr).unwrap();
                // The last: the new directory was removed after it was opened.
                let expected = [
                    "a link leads out of the volume",
                    "dangling link",
                    "its sub-path of the volume was removed meanwhile",
                ];
                assert!(expected.iter().any(|words| message.contains(words)), "{message}");
                without.store(true, Ordering::Relaxed);
            }
            victim.delete();
            if within.load(Ordering::Relaxed) && without.load(Ordering::Relaxed) {
                break;
            }
        }
        assert!(without.load(Ordering::Relaxed), "the link was never met");
        hostile.delete();
        node.assert_gone(&device, &target);
    });
}
