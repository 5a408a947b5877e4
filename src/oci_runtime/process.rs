//! Identifies processes by id and start time: an id can be reused, the pair cannot.

use std::fs;
use std::os::unix::fs::MetadataExt;

use serde::{Deserialize, Serialize};

/// A process of this boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    pub pid: u32,
    /// Start time in ticks since boot (proc(5), starttime).
    start: u64,
    /// Inode of the PID namespace of the process that wrote this; the id belongs to that namespace.
    namespace: u64,
}

impl Process {
    /// `None`: the process does not run.
    pub fn of(pid: u32) -> Option<Self> {
        Some(Self { pid, start: start(pid)?, namespace: own_namespace() })
    }

    /// The process's id in this PID namespace, which may differ. `None`: the process does not run
    /// or is not visible here.
    pub fn living(&self) -> Option<u32> {
        if self.namespace == own_namespace() {
            return (start(self.pid) == Some(self.start)).then_some(self.pid);
        }
        // In a parent namespace, the process has one id for each namespace down to its own.
        let processes = fs::read_dir("/proc").ok()?;
        let ids = processes.filter_map(|found| found.ok()?.file_name().to_str()?.parse().ok());
        ids.into_iter().find(|pid: &u32| {
            start(*pid) == Some(self.start) && ids_in_child_namespaces(*pid).contains(&self.pid)
        })
    }
}

fn own_namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |found| found.ino())
}

/// `None` for a zombie.
fn start(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may contain any character.
    let mut fields = stat.get(stat.rfind(')')? + 1..)?.split_whitespace();
    match fields.next()? {
        "Z" | "X" => None,
        _ => fields.nth(18)?.parse().ok(),
    }
}

/// The process's ids in the child namespaces.
fn ids_in_child_namespaces(pid: u32) -> Vec<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
    line.split_whitespace().skip(1).filter_map(|number| number.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reused_process_id_is_detected() {
        let own = Process::of(std::process::id()).unwrap();
        assert_eq!(own.living(), Some(own.pid));
        assert_eq!(Process { start: own.start + 1, ..own }.living(), None);
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process::of(child.id()).unwrap();
        assert_eq!(process.living(), Some(child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!((process.living(), Process::of(process.pid)), (None, None));
    }
}
