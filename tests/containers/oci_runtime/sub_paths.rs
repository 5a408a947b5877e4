//! Sub-paths: as the proposal's kubelet hands them over, below the target, and as today's does, as bind mounts.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::sync::atomic::{AtomicBool, Ordering};

use support::MIB;
use support::runtime::{bind, info, on_node};

#[test]
fn a_sub_path_is_a_directory_a_file_or_what_is_made_for_it() {
    on_node(|node| {
        let device = node.device("sub", "ext4", 32 * MIB);
        node.look(&device, |at| {
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
fn kubelets_bind_mounts_of_sub_paths_are_mapped_back() {
    on_node(|node| {
        let device = node.device("sub", "ext4", 32 * MIB);
        node.look(&device, |at| {
            fs::create_dir(at.join("dir")).unwrap();
            fs::write(at.join("file"), "of the volume").unwrap();
        });
        let target = node.stage("sub", &info(&device, "ext4", &[]));
        // What kubelet makes, and opens, in the empty directory on the host.
        fs::create_dir_all(target.as_path().join("dir/new")).unwrap();
        fs::write(target.as_path().join("file"), "of the host").unwrap();
        let places = node.path("kubelet/pods/sub/volume-subpaths/pv/container");
        node.bind(&target.as_path().join("dir/new"), &places.join("0"));
        node.bind(&target.as_path().join("file"), &places.join("1"));
        // The same filesystem, seen at another place, and a bind mount of a bind mount.
        node.bind(&node.path("kubelet"), &node.path("elsewhere"));
        node.bind(
            &node.path("elsewhere/pods/sub/volumes/kubernetes.io~csi/pv/mount/dir"),
            &places.join("2"),
        );
        let plain = node.path("kubelet/pods/sub/plain");
        fs::create_dir(&plain).unwrap();
        fs::write(plain.join("file"), "no volume").unwrap();
        let container = node.container(&[
            bind(&places.join("0"), "/new"),
            bind(&places.join("1"), "/file"),
            bind(&places.join("2"), "/dir"),
            bind(&places.join("2/below"), "/below"),
            bind(&plain, "/plain"),
        ]);
        container.start();
        assert_eq!(container.exec(&["cat", "/file"]), "of the volume");
        container.sh("echo x >/new/x; echo y >/below/y");
        assert_eq!(container.sh("cat /dir/new/x /dir/below/y /plain/file"), "x\ny\nno volume");
        container.delete();
        assert_eq!(fs::read_to_string(target.as_path().join("file")).unwrap(), "of the host");
        assert_eq!(fs::read_dir(target.as_path().join("dir/new")).unwrap().count(), 0);
        // One whose directory is gone leads nowhere.
        fs::remove_dir(target.as_path().join("dir/new")).unwrap();
        node.container(&[bind(&places.join("0"), "/new")]).refused("has been removed");
        fs::remove_dir_all(target.as_path().join("dir")).unwrap();
        fs::remove_file(target.as_path().join("file")).unwrap();
        node.assert_gone(&device, &target);
    });
}

#[test]
fn no_link_leads_out_of_the_volume() {
    on_node(|node| {
        let device = node.device("links", "ext4", 32 * MIB);
        node.look(&device, |at| {
            for (link, to) in [
                ("root", "/"),
                ("up", ".."),
                ("etc", "/etc/passwd"),
                ("proc", "/proc/self/root"),
                ("lost", "gone"),
            ] {
                symlink(to, at.join(link)).unwrap();
            }
        });
        let target = node.stage("links", &info(&device, "ext4", &[]));
        for (sub, words) in [
            ("root", "leads out of the volume"),
            ("root/etc", "leads out of the volume"),
            ("up", "leads out of the volume"),
            ("etc", "leads out of the volume"),
            ("proc", "leads out of the volume"),
            ("lost", "link to nothing"),
            ("a/../../b", ".. in it"),
        ] {
            let told = node.container(&[bind(&target.as_path().join(sub), "/v")]).refused(words);
            assert!(!told.contains("root:"), "{told}");
        }
        node.assert_gone(&device, &target);
    });
}

#[test]
fn links_swapped_in_while_a_container_is_made_lead_nowhere_else() {
    on_node(|node| {
        let device = node.device("swap", "ext4", 32 * MIB);
        node.look(&device, |at| {
            fs::create_dir_all(at.join("real")).unwrap();
            fs::write(at.join("real/mark"), "of the volume").unwrap();
            fs::set_permissions(at.join("real"), fs::Permissions::from_mode(0o777)).unwrap();
        });
        let outside = node.path("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("mark"), "of the host").unwrap();
        let target = node.stage("swap", &info(&device, "ext4", &[]));
        // In the container the path means something else: on the host it is what must not be reached.
        let script =
            format!("while true; do ln -sfn real /v/x; ln -sfn {} /v/x; done", outside.display());
        let hostile = node.container(&[bind(target.as_path(), "/v")]).in_pod("pod");
        let hostile = hostile.running(&["sh", "-c", &script]);
        hostile.start();
        let (within, without) = (AtomicBool::new(false), AtomicBool::new(false));
        for _ in 0..200 {
            let victim = node.container(&[bind(&target.as_path().join("x"), "/x")]).in_pod("pod");
            let output = victim.create();
            if output.status.success() {
                node.ok(&["start", &victim.id]);
                assert_eq!(victim.exec(&["cat", "/x/mark"]), "of the volume");
                within.store(true, Ordering::Relaxed);
            } else {
                let told = String::from_utf8(output.stderr).unwrap();
                assert!(
                    told.contains("leads out of the volume") || told.contains("link to nothing"),
                    "{told}"
                );
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
