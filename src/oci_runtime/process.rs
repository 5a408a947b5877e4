//! Processes by what cannot be another's: a number is used again, a number with its time of start is not.

use std::fs;
use std::os::unix::fs::MetadataExt;

use serde::{Deserialize, Serialize};

/// One process of this boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    pub pid: u32,
    /// In ticks since boot (proc(5), starttime).
    start: u64,
    /// Inode of its PID namespace's, as whoever wrote this saw it: the numbers are those of that namespace.
    namespace: u64,
}

impl Process {
    /// None: it does not live.
    pub fn of(pid: u32) -> Option<Self> {
        Some(Self { pid, start: start(pid)?, namespace: own_namespace() })
    }

    /// Its number here, where it may be another. None: it does not live, or is not to be seen from here.
    pub fn living(&self) -> Option<u32> {
        if self.namespace == own_namespace() {
            return (start(self.pid) == Some(self.start)).then_some(self.pid);
        }
        // Seen from a namespace above, under which a process has one number in each namespace on the way.
        let listed = fs::read_dir("/proc").ok()?;
        let numbers = listed.filter_map(|found| found.ok()?.file_name().to_str()?.parse().ok());
        numbers.into_iter().find(|pid: &u32| {
            start(*pid) == Some(self.start) && numbers_of(*pid).contains(&self.pid)
        })
    }
}

fn own_namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |found| found.ino())
}

/// None of one that has ended and is only waited for.
fn start(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may have anything in it.
    let mut fields = stat.get(stat.rfind(')')? + 1..)?.split_whitespace();
    match fields.next()? {
        "Z" | "X" => None,
        _ => fields.nth(18)?.parse().ok(),
    }
}

/// Its numbers in the namespaces below this one.
fn numbers_of(pid: u32) -> Vec<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
    line.split_whitespace().skip(1).filter_map(|number| number.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_not_taken_for_another_with_its_number() {
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
