//! Identifies processes by id and start time: an id can be reused, the pair cannot.

use std::fs;
use std::io;
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

/// Inode of the initial PID namespace (PROC_PID_INIT_INO), which shows every process.
const INITIAL_NAMESPACE: u64 = 0xefff_fffc;

impl Process {
    /// `None`: the process does not run.
    pub fn of(pid: u32) -> io::Result<Option<Self>> {
        let namespace = own_namespace()?;
        Ok(start(pid)?.map(|start| Self { pid, start, namespace }))
    }

    /// Text that no other process of this boot has.
    pub fn unique(&self) -> String {
        format!("{}-{}", self.pid, self.start)
    }

    /// The process with such a text.
    pub fn of_unique(text: &str) -> Option<Self> {
        let (pid, start) = text.split_once('-')?;
        let namespace = own_namespace().ok()?;
        Some(Self { pid: pid.parse().ok()?, start: start.parse().ok()?, namespace })
    }

    /// The process's id in this PID namespace, which may differ. `None`: the process does not run.
    ///
    /// # Errors
    /// It is unknown whether the process runs.
    pub fn living(&self) -> io::Result<Option<u32>> {
        let own = own_namespace()?;
        if self.namespace == own {
            return Ok((start(self.pid)? == Some(self.start)).then_some(self.pid));
        }
        // In a parent namespace, the process has one id for each namespace down to its own.
        for found in fs::read_dir("/proc")? {
            let Some(pid) = found?.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            if start(pid)? == Some(self.start) && ids_in_child_namespaces(pid)?.contains(&self.pid)
            {
                return Ok(Some(pid));
            }
        }
        match own == INITIAL_NAMESPACE {
            true => Ok(None),
            false => Err(io::Error::other(format!(
                "process {} belongs to a PID namespace that is not visible here",
                self.pid
            ))),
        }
    }
}

fn own_namespace() -> io::Result<u64> {
    Ok(fs::metadata("/proc/self/ns/pid")?.ino())
}

/// Reads a file of a process. `None`: the process does not run.
fn read(pid: u32, name: &str) -> io::Result<Option<String>> {
    match fs::read_to_string(format!("/proc/{pid}/{name}")) {
        // ESRCH: it ended after the file was opened.
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => {
            // Without procfs nothing is known.
            fs::metadata("/proc/self/stat").map(|_| None)
        }
        read => read.map(Some),
    }
}

/// `None` for a missing process and for a zombie.
fn start(pid: u32) -> io::Result<Option<u64>> {
    let Some(stat) = read(pid, "stat")? else { return Ok(None) };
    // The name in parentheses may contain any character.
    let after_name = stat.rfind(')').and_then(|end| stat.get(end + 1..)).unwrap_or_default();
    let mut fields = after_name.split_whitespace();
    match fields.next() {
        Some("Z" | "X") => Ok(None),
        _ => match fields.nth(18).and_then(|field| field.parse().ok()) {
            Some(start) => Ok(Some(start)),
            None => Err(io::Error::other(format!("/proc/{pid}/stat: has an unknown format"))),
        },
    }
}

/// The process's ids in the child namespaces.
fn ids_in_child_namespaces(pid: u32) -> io::Result<Vec<u32>> {
    let status = read(pid, "status")?.unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
    Ok(line.split_whitespace().skip(1).filter_map(|number| number.parse().ok()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reused_process_id_is_detected() {
        let own = Process::of(std::process::id()).unwrap().unwrap();
        assert_eq!(own.living().unwrap(), Some(own.pid));
        assert_eq!(Process { start: own.start + 1, ..own }.living().unwrap(), None);
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process::of(child.id()).unwrap().unwrap();
        assert_eq!(process.living().unwrap(), Some(child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!((process.living().unwrap(), Process::of(process.pid).unwrap()), (None, None));
    }

    #[test]
    fn a_process_of_an_invisible_namespace_is_not_dead() {
        let own = Process::of(std::process::id()).unwrap().unwrap();
        let elsewhere = Process { namespace: own.namespace + 1, start: u64::MAX, ..own };
        let found = elsewhere.living();
        assert_eq!(found.is_ok(), own.namespace == INITIAL_NAMESPACE, "{found:?}");
    }
}
