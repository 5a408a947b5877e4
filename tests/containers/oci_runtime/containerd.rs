//! Containers that containerd creates through its shim.

use std::fs;
use std::process::{Child, Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use support::kernel::wait_for;
use support::path;
use support::runtime::{Node, on_node};

struct Containerd<'a> {
    node: &'a Node,
    child: Child,
}

impl<'a> Containerd<'a> {
    fn start(node: &'a Node) -> Option<Self> {
        for tool in ["containerd", "ctr"] {
            if Command::new(tool).arg("--version").output().is_err() {
                println!("SKIPPED: containerd: {tool} is missing");
                return None;
            }
        }
        let at = node.path("containerd");
        fs::create_dir(&at).unwrap();
        let text = format!(
            "version = 2\nroot = {:?}\nstate = {:?}\ndisabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n[grpc]\n  address = {:?}\n",
            at.join("root"),
            at.join("state"),
            at.join("sock")
        );
        fs::write(at.join("config.toml"), text).unwrap();
        let log = fs::File::create(at.join("log")).unwrap();
        let child = Command::new("containerd")
            .args(["--config", path(&at.join("config.toml"))])
            .env("CSI_LOOPBACK_RUNC_CONFIG", node.path("oci-runtime.yaml"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let containerd = Self { node, child };
        wait_for("containerd answers", || containerd.ctr(&["version"]).status.success());
        Some(containerd)
    }

    fn ctr(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new("ctr");
        command.env("CSI_LOOPBACK_RUNC_CONFIG", self.node.path("oci-runtime.yaml"));
        command.args(["--address", path(&self.node.path("containerd/sock"))]);
        command.args(arguments).stdin(Stdio::null()).output().unwrap()
    }

    /// Runs a container in the background with a bind mount.
    fn run(&self, id: &str, source: &std::path::Path, script: &str) -> Output {
        let mount = format!("type=bind,src={},dst=/v,options=rbind:rw", source.display());
        let program = path(&self.node.program);
        self.ctr(&[
            "run",
            "--detach",
            "--rootfs",
            "--runc-binary",
            program,
            "--env",
            "PATH=/bin",
            "--mount",
            &mount,
            path(&self.node.path("rootfs")),
            id,
            "sh",
            "-c",
            script,
        ])
    }
}

impl Drop for Containerd<'_> {
    fn drop(&mut self) {
        for id in ["one", "two", "killed"] {
            let _ = self.ctr(&["task", "kill", "--signal", "KILL", id]);
            let _ = self.ctr(&["task", "delete", "--force", id]);
            let _ = self.ctr(&["container", "delete", id]);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The process of a container's shim.
fn shim(node: &Node, id: &str) -> Option<i32> {
    let socket = node.path("containerd/sock");
    let numbers = fs::read_dir("/proc").unwrap();
    let mut numbers = numbers.filter_map(|found| found.ok()?.file_name().to_str()?.parse().ok());
    numbers.find(|pid: &i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words: Vec<_> = line.split(|byte| *byte == 0).collect();
        let program = String::from_utf8_lossy(words[0]);
        program.contains("containerd-shim")
            && words.contains(&path(&socket).as_bytes())
            && words.contains(&id.as_bytes())
    })
}

#[test]
fn containerd_runs_containers_with_private_volumes() {
    on_node(|node| {
        let Some(containerd) = Containerd::start(node) else { return };
        let (device, target) = node.volume("v", &[]);
        let watch = node.watch(&device, &[containerd.child.id()]);
        let output = containerd.run("one", target.as_path(), "echo one >/v/file; sleep 1000");
        assert!(output.status.success(), "{output:?}");
        let mut attempts = (0..).map(|number| format!("exec-{number}"));
        wait_for("the file of the container", || {
            let exec = ["task", "exec", "--exec-id", &attempts.next().unwrap()];
            let read = containerd.ctr(&[&exec[..], &["one", "cat", "/v/file"]].concat());
            read.stdout == b"one\n"
        });
        node.crust(&["stats", path(target.as_path())]).unwrap();
        // To containerd, another container is another pod; its client receives the error.
        let refused = containerd.run("two", target.as_path(), "sleep 1000");
        let message = String::from_utf8(refused.stderr).unwrap();
        assert!(!refused.status.success() && message.contains("another pod"), "{message}");
        let _ = containerd.ctr(&["container", "delete", "two"]);
        containerd.ctr(&["task", "kill", "--signal", "KILL", "one"]);
        wait_for("the deletion of the task", || {
            containerd.ctr(&["task", "delete", "one"]).status.success()
        });
        containerd.ctr(&["container", "delete", "one"]);
        watch.assert_no_mounts();
        node.assert_gone(&device, &target);
        let written = node.with_mount(&device, |at| fs::read_to_string(at.join("file")).unwrap());
        assert_eq!(written, "one\n");
    });
}

#[test]
fn a_killed_shim_leaves_no_mount_or_claim() {
    on_node(|node| {
        let Some(containerd) = Containerd::start(node) else { return };
        let (device, target) = node.volume("v", &[]);
        let output = containerd.run("killed", target.as_path(), "sleep 1000");
        assert!(output.status.success(), "{output:?}");
        let Some(pid) = shim(node, "killed") else { panic!("no shim") };
        kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
        // containerd calls the runtime's `delete` after the shim was killed.
        wait_for("the removal of the claim", || {
            node.entry(&target).runtime_files().unwrap().is_empty()
        });
        node.assert_gone(&device, &target);
        drop(containerd);
    });
}
