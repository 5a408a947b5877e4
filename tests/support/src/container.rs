//! Stand-ins for containers: processes in a mount namespace with a mounted device.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The mount point of the volume in the container's namespace.
pub const INSIDE: &str = "/mnt/v";

/// The volume of a container, as a path for processes on the host.
pub fn path_from_host(pid: u32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/root{INSIDE}"))
}

/// A shell function, `unmount_others [KEPT]`: unmounts all loop devices except at one mount point.
/// A new mount namespace has copies of all mounts, which keep their devices in use. Container
/// runtimes avoid this by changing the root.
pub const UNMOUNT_OTHERS: &str = r#"
unmount_others() {
    awk '{ for (i = 7; $i != "-"; i++); if ($(i + 2) ~ "^/dev/loop") print $5 }' /proc/self/mountinfo |
        while read -r at; do
            [ "$at" = "${1:-}" ] || umount --lazy "$at" 2>/dev/null || true
        done
}
"#;

/// Runs a script in a container.
pub fn inside(pid: u32, script: &str) {
    let pid = pid.to_string();
    let output = Command::new("nsenter").args(["-m", "-t", &pid, "sh", "-ec", script]).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A process that ends when this is dropped.
pub struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A running container. Dropping it ends the container.
pub struct Container(Running);

impl Container {
    /// Starts a container and mounts `device` in it.
    pub fn start(device: &Path, fs_type: &str, options: &[String]) -> Self {
        let script = format!(
            "{UNMOUNT_OTHERS}unmount_others; mount -t tmpfs none /mnt; mkdir {INSIDE}; mount -t {fs_type} -o \"$1\" \"$2\" {INSIDE}; echo up; exec cat"
        );
        let mut options = options.join(",");
        if options.is_empty() {
            options.push_str("rw");
        }
        let mut child = Command::new("unshare")
            .args(["-m", "--propagation", "private", "sh", "-ec", &script, "sh", &options])
            .arg(device)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let container = Self(Running(child));
        assert_eq!(line, "up\n", "the container has not mounted {}", device.display());
        container
    }

    pub fn pid(&self) -> u32 {
        self.0.0.id()
    }

    /// A file of the volume, as a path on the host.
    pub fn file(&self, name: &str) -> PathBuf {
        path_from_host(self.pid()).join(name)
    }

    /// Runs a script in it.
    pub fn run(&self, script: &str) {
        inside(self.pid(), script);
    }

    /// Starts a continuous writer in the container, which writes `one` and then `two` in each
    /// round.
    pub fn start_writer(&self) -> Running {
        let script = format!(
            "cd {INSIDE}; n=0; while :; do n=$((n+1)); for f in one two; do \
             echo $n > .$f; sync .$f; mv .$f $f; done; echo $n > $n; rm -f $((n-50)); done"
        );
        let pid = self.pid().to_string();
        let child = Command::new("nsenter").args(["-m", "-t", &pid, "sh", "-c", &script]).spawn();
        Running(child.unwrap())
    }
}
