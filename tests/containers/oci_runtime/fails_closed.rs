//! What the program does not know is an error while the node has deferred volumes: no container
//! starts on the host's directory, and no second pod gets the volume.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::json;
use support::kernel::wait_for;
use support::runtime::{Node, bind, bind_with, on_node};
use support::{path, run};

/// Writes a program that the node calls as its next runtime.
fn runtime(node: &Node, script: &str) {
    let program = node.path("next");
    fs::write(&program, format!("#!/bin/bash\n{script}\n")).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    node.configure(path(&program));
}

/// Sets the next runtime, if it is installed.
fn configure(node: &Node, program: &str) -> bool {
    // crun rejects the hybrid cgroups of some test machines.
    let hide = "umount -l /sys/fs/cgroup/unified 2>/dev/null";
    match program {
        "crun" => {
            runtime(node, &format!(r#"exec unshare -m sh -c '{hide}; exec crun "$@"' crun "$@""#))
        }
        _ => node.configure(program),
    }
    Command::new(program).arg("--version").output().is_ok()
}

#[test]
fn unknown_options_are_refused_while_volumes_exist() {
    on_node(|node| {
        // A newer runtime, which knows another option.
        runtime(
            node,
            r#"a=(); while (($#)); do case $1 in --newer) shift 2;; *) a+=("$1"); shift;; esac; done; exec runc "${a[@]}""#,
        );
        let hidden = |container: &support::runtime::Container<'_>| {
            container.write();
            let mut words = vec!["--newer".to_owned(), "create".to_owned()];
            words.extend(container.creation());
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            node.call(&words)
        };
        let plain = node.container(&[]);
        assert!(hidden(&plain).status.success(), "this node has no deferred volume");
        plain.delete();
        let (device, target) = node.volume("v", &[]);
        let container = node.container(&[bind(target.as_path(), "/v")]);
        let output = hidden(&container);
        assert_eq!(output.status.code(), Some(1));
        assert!(node.logged().contains("\"--newer\" is unknown"), "{}", node.logged());
        for words in [&["mounts", "add", "c", "{}"][..], &["clone", "c"]] {
            assert_eq!(node.call(words).status.code(), Some(1), "{words:?}");
            assert!(node.logged().contains("is unknown"), "{}", node.logged());
        }
        // Options that runc lacks are parsed, and rejected by runc itself.
        let output = node.call(&["--log-level", "debug", "state", "c"]);
        assert!(String::from_utf8_lossy(&output.stderr).contains("log-level"), "{output:?}");
        node.assert_gone(&device, &target);
    });
}

#[test]
fn an_invalid_entry_refuses_a_sub_path_container() {
    on_node(|node| {
        let (device, target) = node.volume("v", &[]);
        fs::create_dir(target.as_path().join("sub")).unwrap();
        let sub_path = node.path("kubelet/pods/v/volume-subpaths/pv/c/0");
        node.bind(&target.as_path().join("sub"), &sub_path);
        // A bind mount outside kubelet's directory, too.
        let elsewhere = node.path("elsewhere");
        node.bind(target.as_path(), &elsewhere);
        let file = node.entry(&target).path().join("target");
        let text = fs::read(&file).unwrap();
        for source in [&sub_path, &elsewhere] {
            let container = node.container(&[bind(source, "/v")]);
            std::os::unix::fs::chown(&file, Some(1000), None).unwrap();
            container.refused("is invalid");
            fs::remove_file(&file).unwrap();
            container.refused("the file target is missing");
            node.entry(&target).write("target", &text).unwrap();
            container.start();
            container.sh("echo x >/v/file");
            container.delete();
        }
        for at in [&sub_path, &elsewhere] {
            support::kernel::unmount(at);
        }
        fs::remove_dir(target.as_path().join("sub")).unwrap();
        node.assert_gone(&device, &target);
    });
}

#[test]
fn a_lost_entry_gives_the_volume_to_no_other_pod() {
    on_node(|node| {
        let (device, target) = node.volume("v", &[]);
        // As the driver mounts it.
        let guard = ["-t", "tmpfs", "-o", "nr_blocks=1", "csi-loopback-deferred-volume"];
        run("mount", &[&guard[..], &[path(target.as_path())]].concat());
        let mounts = [bind(target.as_path(), "/v")];
        let one = node.container(&mounts).in_pod("pod");
        one.start();
        let crust = node.path("crust");
        fs::rename(&crust, node.path("lost")).unwrap();
        // Without an entry, the guard shows that the container has a deferred volume.
        node.container(&mounts).in_pod("pod").refused("has no entry");
        // Without its claim, the kernel shows that a container uses the volume.
        let info = support::runtime::info(&device, "ext4", &[]);
        node.stage("v", &info);
        node.container(&mounts).in_pod("another").refused("has not claimed the volume");
        one.sh("echo x >/v/file");
        one.delete();
        let next = node.container(&mounts).in_pod("another");
        next.start();
        assert_eq!(next.exec(&["cat", "/v/file"]), "x");
        next.delete();
        support::kernel::unmount(target.as_path());
        node.assert_gone(&device, &target);
    });
}

#[test]
fn a_failing_state_command_refuses_the_second_pod() {
    on_node(|node| {
        let (device, target) = node.volume("v", &[]);
        let mounts = [bind(target.as_path(), "/v")];
        let broken = node.path("broken");
        runtime(
            node,
            &format!(
                r#"[[ " $* " == *" state "* && -e {} ]] && {{ echo "too many open files in system" >&2; exit 1; }}; exec runc "$@""#,
                broken.display()
            ),
        );
        // The creating process is killed after the container runs.
        let one = node.container(&mounts).in_pod("pod");
        one.write();
        let mut command = node.command(&node.program);
        command.args(["run", "--bundle", path(&one.bundle), &one.id]);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        wait_for("the container runs", || one.exists() && support::runtime::is_live(&device));
        wait_for("its process", || node.ok(&["state", &one.id]).contains("running"));
        child.kill().unwrap();
        child.wait().unwrap();
        node.container(&mounts).in_pod("another").refused("another pod");
        fs::write(&broken, "").unwrap();
        node.container(&mounts).in_pod("another").refused("it is unknown whether");
        fs::remove_file(&broken).unwrap();
        one.delete();
        node.assert_gone(&device, &target);
    });
}

#[test]
fn a_deletion_during_creation_keeps_the_claim() {
    on_node(|node| {
        let (device, target) = node.volume("v", &[]);
        let mounts = [bind(target.as_path(), "/v")];
        let (waits, goes) = (node.path("waits"), node.path("goes"));
        runtime(
            node,
            &format!(
                r#"[[ " $* " == *" create "* && ! -e {1} ]] && {{ touch {0}; while [[ ! -e {1} ]]; do sleep 0.05; done; }}; exec runc "$@""#,
                waits.display(),
                goes.display()
            ),
        );
        let one = node.container(&mounts).in_pod("pod");
        one.write();
        let mut command = node.command(&node.program);
        command.args(one.creation()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        wait_for("the creation waits", || waits.exists());
        node.ok(&["delete", "--force", &one.id]);
        node.container(&mounts).in_pod("another").refused("another pod");
        fs::write(&goes, "").unwrap();
        assert!(child.wait().unwrap().success());
        node.container(&mounts).in_pod("another").refused("another pod");
        one.delete();
        node.assert_gone(&device, &target);
    });
}

#[test]
fn stats_do_not_wait_for_a_containers_filesystem() {
    on_node(|node| {
        let Ok(fuse) = fs::File::options().read(true).write(true).open("/dev/fuse") else {
            println!("SKIPPED: stats and FUSE: needs /dev/fuse");
            return;
        };
        let (device, target) = node.volume("v", &[]);
        let container = node.container(&[bind(target.as_path(), "/f/v")]);
        container.start();
        // A filesystem that never answers hides the volume.
        use std::os::fd::AsRawFd;
        let inherited = nix::unistd::dup(&fuse).unwrap();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", inherited.as_raw_fd());
        let pid = container.pid().to_string();
        let mount = ["-t", &pid, "-m", "/bin/busybox", "mount", "-i", "-t", "fuse", "-o", &options];
        run("nsenter", &[&mount[..], &["none", "/f"]].concat());
        let stats = Command::new("timeout")
            .args(["20", path(&node.program), "crust", "stats", path(target.as_path())])
            .env("CSI_LOOPBACK_RUNC_CONFIG", node.path("oci-runtime.yaml"))
            .output()
            .unwrap();
        assert!(stats.status.success(), "{stats:?}");
        drop((fuse, inherited));
        container.delete();
        node.assert_gone(&device, &target);
    });
}

#[test]
fn hooks_that_mount_on_the_host_behave_as_with_runc() {
    on_node(|node| {
        let (device, target) = node.volume("v", &[]);
        let mut container = node.container(&[bind(target.as_path(), "/v")]);
        let (hook, at) = (node.path("hook"), node.path("mounted-by-a-hook"));
        fs::create_dir(&at).unwrap();
        fs::write(&hook, format!("#!/bin/sh\nmount -t tmpfs hook {}\n", at.display())).unwrap();
        fs::set_permissions(&hook, fs::Permissions::from_mode(0o755)).unwrap();
        container.spec["hooks"] = json!({"createRuntime": [{"path": path(&hook)}]});
        container.start();
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(mounts.contains(path(&at)), "the hook's mount is not on the host");
        support::kernel::unmount(&at);
        container.sh("echo x >/v/file");
        container.delete();
        node.assert_gone(&device, &target);
    });
}

#[test]
fn host_paths_show_no_volume() {
    on_node(|node| {
        for program in ["runc", "crun"] {
            if !configure(node, program) {
                println!("SKIPPED: host paths with {program}: not installed");
                continue;
            }
            let (device, target) = node.volume(program, &[]);
            let above = node.path("");
            let mut container = node.container(&[
                bind_with(&target.as_path().join("sub"), "/v", &["rbind", "ro"]),
                bind_with(&above, "/host", &["rbind", "rprivate"]),
                bind_with(Path::new("/"), "/all", &["rbind", "rprivate"]),
            ]);
            container.spec["linux"]["rootfsPropagation"] = json!("rprivate");
            container.start();
            let mounts = container.exec(&["cat", "/proc/self/mountinfo"]);
            let of_volume = |line: &&str| line.contains(path(&device));
            let shown: Vec<_> = mounts.lines().filter(of_volume).collect();
            assert_eq!(shown.len(), 1, "{program}: {shown:?}");
            assert!(shown[0].contains(" /v ro"), "{program}: {shown:?}");
            assert_eq!(container.sh("echo x >/v/file 2>/dev/null || echo refused"), "refused");
            container.delete();
            node.assert_gone(&device, &target);
        }
    });
}

#[test]
fn mounts_within_a_volume_are_kept() {
    on_node(|node| {
        for program in ["runc", "crun"] {
            if !configure(node, program) {
                println!("SKIPPED: nested mounts with {program}: not installed");
                continue;
            }
            let (outer, target) = node.volume(&format!("{program}-outer"), &[]);
            node.with_mount(&outer, |at| {
                fs::create_dir_all(at.join("real/config")).unwrap();
                std::os::unix::fs::symlink("real", at.join("link")).unwrap();
            });
            let (inner, within) = node.volume(&format!("{program}-inner"), &[]);
            let other = node.path(&format!("{program}-other"));
            fs::create_dir(&other).unwrap();
            fs::write(other.join("file"), "of the host").unwrap();
            let container = node.container(&[
                bind(target.as_path(), "/v"),
                bind(&other, "/v/new/deep"),
                bind(&other.join("file"), "/v/file"),
                bind_with(&other, "/v/link/config", &["rbind", "ro"]),
                bind(within.as_path(), "/v/inner"),
                bind(&other, "/v/inner/other"),
            ]);
            container.start();
            let files = "cat /v/new/deep/file /v/file /v/real/config/file /v/inner/other/file";
            assert_eq!(container.sh(files), "of the hostof the hostof the hostof the host");
            container.sh("echo x >/v/outer; echo y >/v/inner/inner");
            let read_only = "echo x >/v/real/config/x 2>/dev/null || echo refused";
            assert_eq!(container.sh(read_only), "refused", "{program}");
            container.delete();
            node.with_mount(&outer, |at| {
                assert_eq!(fs::read_to_string(at.join("outer")).unwrap(), "x\n");
                assert!(at.join("new/deep").is_dir() && at.join("file").is_file());
            });
            node.with_mount(&inner, |at| {
                assert_eq!(fs::read_to_string(at.join("inner")).unwrap(), "y\n");
            });
            // A read-only mount has the mount points that the volume has.
            let container = node.container(&[
                bind_with(target.as_path(), "/v", &["rbind", "ro"]),
                bind(&other, "/v/new/deep"),
            ]);
            container.start();
            assert_eq!(container.sh("cat /v/new/deep/file"), "of the host");
            container.delete();
            node.assert_gone(&outer, &target);
            node.assert_gone(&inner, &within);
        }
    });
}

#[test]
fn a_runtime_that_ignores_the_hook_creates_no_container() {
    on_node(|node| {
        let (device, target) = node.volume("v", &[]);
        // A runtime that removes unknown hooks.
        runtime(
            node,
            r#"b=; for ((i=1;i<=$#;i++)); do [[ ${!i} == --bundle ]] && { i=$((i+1)); b=${!i}; }; done
            [[ -n $b ]] && sed -i 's/"createRuntime"/"unknown"/' "$b/config.json"; exec runc "$@""#,
        );
        node.container(&[bind(target.as_path(), "/v")]).refused("without running its hooks");
        node.configure("runc");
        node.assert_gone(&device, &target);
    });
}
