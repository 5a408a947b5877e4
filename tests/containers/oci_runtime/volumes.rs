//! Volumes in containers: shared, with sub-paths, groups, and read-only.

use std::fs;
use std::os::unix::fs::MetadataExt;

use csi_loopback::crust::GroupChangePolicy;

use support::MIB;
use support::kernel::wait_for;
use support::runtime::{bind, bind_with, info, is_live, on_node};

#[test]
fn container_writes_reach_the_volume_unseen_by_the_host() {
    on_node(|node| {
        for (fs_type, size) in [("ext4", 32 * MIB), ("xfs", 300 * MIB), ("btrfs", 128 * MIB)] {
            let device = node.device(fs_type, fs_type, size);
            let target = node.stage(fs_type, &info(&device, fs_type, &["noatime"]));
            let watch = node.watch(&device, &[]);
            let container = node.container(&[bind(target.as_path(), "/v")]);
            container.start();
            container.sh("echo written >/v/file");
            let mounts = container.exec(&["cat", "/proc/self/mountinfo"]);
            let volume = mounts.lines().find(|line| line.contains(" /v ")).unwrap();
            assert!(volume.contains("noatime") && volume.contains(fs_type), "{volume}");
            let work = node.path("work");
            assert!(
                !mounts.contains(work.to_str().unwrap()),
                "a mount of this program is visible: {mounts}"
            );
            assert!(is_live(&device));
            assert_eq!(node.entry(&target).runtime_cli().unwrap(), Some(node.program.clone()));
            container.delete();
            watch.assert_no_mounts();
            node.assert_gone(&device, &target);
            let written =
                node.with_mount(&device, |at| fs::read_to_string(at.join("file")).unwrap());
            assert_eq!(written, "written\n");
        }
    });
}

#[test]
fn containers_of_a_pod_share_the_volume_until_the_last_ends() {
    on_node(|node| {
        let (device, target) = node.volume("shared", &[]);
        let mounts = [bind(target.as_path(), "/v")];
        let init = node.container(&mounts).in_pod("pod");
        let init = init.running(&["sh", "-c", "echo init >/v/file"]);
        init.start();
        wait_for("the init container ends", || node.ok(&["state", &init.id]).contains("stopped"));
        let (code, _) = node.crust(&["stats", target.as_path().to_str().unwrap()]).unwrap_err();
        assert_eq!(code, 3, "no container runs");
        let one = node.container(&mounts).in_pod("pod");
        let two = node.container(&mounts).in_pod("pod");
        one.start();
        two.start();
        init.delete();
        assert_eq!(one.exec(&["cat", "/v/file"]), "init");
        assert_eq!(node.stats(&target)["volume_condition"]["message"], "mounted by 2 container(s)");
        two.sh("echo two >>/v/file");
        assert_eq!(one.exec(&["cat", "/v/file"]), "init\ntwo");
        one.delete();
        assert_eq!(two.exec(&["cat", "/v/file"]), "init\ntwo");
        assert!(node.entry(&target).runtime_cli().unwrap().is_some());
        assert_eq!(node.stats(&target)["volume_condition"]["message"], "mounted by 1 container(s)");
        two.delete();
        node.assert_gone(&device, &target);
    });
}

#[test]
fn only_one_pod_uses_a_volume_with_one_set_of_options() {
    on_node(|node| {
        let (device, target) = node.volume("one", &[]);
        let mounts = [bind(target.as_path(), "/v")];
        let one = node.container(&mounts).in_pod("pod");
        one.start();
        node.container(&mounts).in_pod("another").refused("another pod (sandbox \"pod\"");
        // Staged again while it is mounted.
        node.stage("one", &info(&device, "ext4", &["ro"]));
        node.container(&mounts).in_pod("pod").refused("with other options");
        one.sh("echo still >/v/file");
        one.delete();
        let other = node.container(&mounts).in_pod("another");
        other.start();
        assert_eq!(other.exec(&["cat", "/v/file"]), "still");
        other.delete();
        node.assert_gone(&device, &target);
    });
}

#[test]
fn a_killed_container_releases_its_volume() {
    on_node(|node| {
        let (device, target) = node.volume("killed", &[]);
        let mounts = [bind(target.as_path(), "/v")];
        let killed = node.container(&mounts).in_pod("pod");
        killed.start();
        node.ok(&["kill", &killed.id, "KILL"]);
        wait_for("it is dead", || !is_live(&device));
        let next = node.container(&mounts).in_pod("another");
        next.start();
        killed.delete();
        assert!(node.entry(&target).runtime_cli().unwrap().is_some());
        next.delete();
        node.assert_gone(&device, &target);
    });
}

#[test]
fn files_change_group_by_fs_group_change_policy() {
    on_node(|node| {
        for policy in
            [None, Some(GroupChangePolicy::Always), Some(GroupChangePolicy::OnRootMismatch)]
        {
            let name = policy.map_or("none".to_owned(), |policy| policy.to_string());
            let device = node.device(&name, "ext4", 32 * MIB);
            node.with_mount(&device, |at| {
                fs::create_dir(at.join("directory")).unwrap();
                fs::write(at.join("directory/file"), "").unwrap();
                std::os::unix::fs::symlink("/etc/passwd", at.join("link")).unwrap();
            });
            let outside = fs::metadata("/etc/passwd").unwrap();
            let info = info(&device, "ext4", &[]).with_group(4059, policy);
            let target = node.stage(&name, &info);
            let mounts = [bind(target.as_path(), "/v")];
            let first = node.container(&mounts).in_pod("pod");
            let first = first.with_capabilities(&["CAP_CHOWN"]);
            first.start();
            let stat = |path: &str| first.exec(&["stat", "-c", "%g %a", path]);
            assert_eq!(stat("/v"), "4059 2775");
            assert_eq!(stat("/v/directory"), "4059 2775");
            assert_eq!(stat("/v/directory/file"), "4059 664");
            // While a container runs, changes of the group are kept.
            first.sh("/bin/busybox chown 0:7 /v/directory/file");
            let second = node.container(&mounts).in_pod("pod");
            second.start();
            assert_eq!(stat("/v/directory/file"), "7 664");
            second.delete();
            first.delete();
            let third = node.container(&mounts).in_pod("pod");
            third.start();
            let group = third.exec(&["stat", "-c", "%g", "/v/directory/file"]);
            let all = policy != Some(GroupChangePolicy::OnRootMismatch);
            assert_eq!(group, if all { "4059" } else { "7" }, "{name}");
            third.delete();
            node.assert_gone(&device, &target);
            let now = fs::metadata("/etc/passwd").unwrap();
            assert_eq!((outside.gid(), outside.mode()), (now.gid(), now.mode()));
        }
    });
}

#[test]
fn a_read_only_volume_is_never_written() {
    on_node(|node| {
        let device = node.device("ro", "ext4", 32 * MIB);
        node.with_mount(&device, |at| fs::write(at.join("file"), "there").unwrap());
        let before = fs::read(node.path("ro.img")).unwrap();
        let info = info(&device, "ext4", &["ro"]).with_group(4059, None);
        let target = node.stage("ro", &info);
        let container = node.container(&[bind(target.as_path(), "/v")]);
        container.start();
        assert_eq!(container.exec(&["cat", "/v/file"]), "there");
        assert_eq!(container.sh("echo x >/v/file 2>/dev/null || echo refused"), "refused");
        assert_eq!(container.exec(&["stat", "-c", "%g", "/v/file"]), "0");
        let missing = node.container(&[bind(&target.as_path().join("missing"), "/v")]);
        node.ok(&["delete", "--force", &container.id]);
        missing.refused("does not exist and cannot be created, because the volume is read-only");
        node.assert_gone(&device, &target);
        assert!(before == fs::read(node.path("ro.img")).unwrap(), "the volume was written to");
        let (device, target) = node.volume("rw", &[]);
        // A read-only mount applies to its container only.
        let reader = node.container(&[bind_with(target.as_path(), "/v", &["rbind", "ro"])]);
        let writer = node.container(&[bind(target.as_path(), "/v")]).in_pod(&reader.id);
        reader.start();
        writer.start();
        writer.sh("echo x >/v/file");
        assert_eq!(reader.sh("echo y >/v/file 2>/dev/null || cat /v/file"), "x");
        writer.delete();
        reader.delete();
        node.assert_gone(&device, &target);
    });
}

#[test]
fn shared_host_mounts_do_not_show_the_volume() {
    on_node(|node| {
        let (device, target) = node.volume("v", &[]);
        let container = node.container(&[bind(target.as_path(), "/v")]);
        container.write();
        // All mounts of this host are shared, as with systemd. Its mount table is read while the
        // container exists.
        let command = node.command(&node.program);
        let mut host = std::process::Command::new("unshare");
        host.args(["--mount", "--propagation", "shared", "sh", "-c"]);
        host.arg("\"$0\" \"$@\" >/dev/null 2>&1 || echo failed; cat /proc/self/mountinfo");
        host.arg(command.get_program()).args(command.get_args()).args(container.creation());
        for (name, value) in command.get_envs() {
            host.env(name, value.unwrap());
        }
        let output = String::from_utf8(host.output().unwrap().stdout).unwrap();
        assert!(output.contains(" shared:") && !output.contains("failed"), "{output}");
        assert!(is_live(&device), "the container has it");
        let (device_name, work) = (device.to_str().unwrap(), node.path("work"));
        let seen = |line: &&str| {
            line.split(' ').any(|field| field == device_name)
                || line.contains(work.to_str().unwrap())
        };
        assert_eq!(output.lines().find(seen), None);
        container.delete();
        node.assert_gone(&device, &target);
    });
}
