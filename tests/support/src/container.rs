//! Containers as far as volumes go: processes with a mount namespace of their own, in which a device is mounted.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Where a container has the volume, in its own namespace.
pub const INSIDE: &str = "/mnt/v";

/// The volume of the container that this process keeps, as others reach it.
pub fn seen_from_here(pid: u32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/root{INSIDE}"))
}

/// A function of the shell, `without_others [KEPT]`: unmounts what others have mounted from loop devices, but for one mount
/// point. A new mount namespace begins with copies of all mounts, and keeps their devices in use for as long as it
/// lives; a container runtime changes the root for that.
pub const WITHOUT_OTHERS: &str = r#"
without_others() {
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

/// It ends with the value.
pub struct Container {
    child: Child,
}

impl Container {
    /// Mounts `device` in it.
    pub fn start(device: &Path, fs_type: &str, options: &[String]) -> Self {
        let script = format!(
            "{WITHOUT_OTHERS}without_others; mount -t tmpfs none /mnt; mkdir {INSIDE}; mount -t {fs_type} -o \"$1\" \"$2\" {INSIDE}; echo up; exec cat"
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
        let mut said = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut said).unwrap();
        let container = Self { child };
        assert_eq!(said, "up\n", "the container has not mounted {}", device.display());
        container
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// A file of the volume, as this process reaches it.
    pub fn file(&self, name: &str) -> PathBuf {
        seen_from_here(self.child.id()).join(name)
    }

    /// Runs a script in it.
    pub fn run(&self, script: &str) {
        inside(self.child.id(), script);
    }

    /// Writes on and on, in it, until it ends: `one` is always the first of the two to be written.
    pub fn write_on(&self) -> Writer {
        let script = format!(
            "cd {INSIDE}; n=0; while :; do n=$((n+1)); for f in one two; do \
             echo $n > .$f; sync .$f; mv .$f $f; done; echo $n > $n; rm -f $((n-50)); done"
        );
        let pid = self.child.id().to_string();
        let child = Command::new("nsenter").args(["-m", "-t", &pid, "sh", "-c", &script]).spawn();
        Writer(child.unwrap())
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub struct Writer(Child);

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
