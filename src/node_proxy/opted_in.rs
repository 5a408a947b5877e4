//! The pods that are known to have opted in, on disk: what a proxy that starts while the API server is away knows of them. It does
//! not say which of their volumes, only that a call for one is not to be passed on as that of any other pod.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::disk::Disk;
use crate::crust::{Entry, Problem, Result};
use crate::fail_point::meet;
use crate::telemetry::complaint::Complaint;

/// Its directory, beside the entries of volumes, and the file in it: a list of uids.
const DIRECTORY: &str = "opted-in";
const FILE: &str = "pods.json";
/// More than a node has; so many fit into a file that is read back.
const MAX_PODS: usize = 1500;
/// Bytes of a uid, at most; the API server's have 36.
const MAX_UID: usize = 40;

/// Cheap to clone.
#[derive(Debug, Clone)]
pub struct OptedIn {
    disk: Disk,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    known: BTreeSet<String>,
    /// Whether the file says the same.
    written: bool,
    complaint: Complaint,
}

impl OptedIn {
    /// Reads what is there.
    pub fn open(disk: Disk) -> Self {
        let read = match read(&entry(&disk)) {
            Ok(known) => Some(known),
            Err(problem) => {
                tracing::error!(%problem, "which pods have opted in cannot be read; it is written anew when the API server tells");
                None
            }
        };
        let written = read.is_some();
        let state = State { known: read.unwrap_or_default(), written, ..State::default() };
        Self { disk, state: Arc::new(Mutex::new(state)) }
    }

    pub fn has(&self, uid: &str) -> bool {
        self.state().known.contains(uid)
    }

    /// Whether all that is known is written down.
    #[cfg(test)]
    pub fn is_written(&self) -> bool {
        self.state().written
    }

    /// Takes in what a watch that runs tells: all of those that there are.
    pub async fn told(&self, pods: BTreeSet<String>) {
        let known: BTreeSet<String> = pods.into_iter().filter(|uid| uid.len() <= MAX_UID).collect();
        {
            let mut state = self.state();
            if state.written && state.known == known {
                return;
            }
            state.known = known.clone();
            state.written = false;
        }
        let entry = entry(&self.disk);
        let disk = self.disk.clone();
        let written =
            self.disk.run(move || disk.serve().and_then(|()| write(&entry, &known))).await;
        let mut state = self.state();
        state.written = written.is_ok();
        match written {
            Ok(()) => {
                state.complaint.is_over();
                tracing::debug!(
                    pods = state.known.len(),
                    "which pods have opted in is written down"
                );
            }
            Err(refusal) => {
                let why = refusal.to_string();
                if state.complaint.is_new(&why) {
                    tracing::error!(
                        why,
                        "which pods have opted in is not written down; it is tried again"
                    );
                }
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn entry(disk: &Disk) -> Entry {
    Entry::at(disk.directory().root().join(DIRECTORY))
}

fn read(entry: &Entry) -> Result<BTreeSet<String>> {
    let Some(bytes) = entry.read(FILE)? else { return Ok(BTreeSet::new()) };
    serde_json::from_slice(&bytes).map_err(|error| Problem::invalid(FILE, error.to_string()))
}

fn write(entry: &Entry, pods: &BTreeSet<String>) -> Result<()> {
    if pods.len() > MAX_PODS {
        tracing::error!(
            pods = pods.len(),
            limit = MAX_PODS,
            "more pods have opted in than can be written down"
        );
    }
    let some: BTreeSet<&String> = pods.iter().take(MAX_PODS).collect();
    let json =
        serde_json::to_vec(&some).map_err(|error| Problem::invalid(FILE, error.to_string()))?;
    entry.make_directory()?;
    entry.write(FILE, &json)?;
    meet("node_proxy.opted_in").map_err(|e| Problem::io("writing which pods have opted in", e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crust::Directory;

    fn open(root: &std::path::Path) -> OptedIn {
        OptedIn::open(Disk::open(Directory::new(root)).unwrap())
    }

    fn set(uids: &[&str]) -> BTreeSet<String> {
        uids.iter().map(|uid| (*uid).to_owned()).collect()
    }

    #[tokio::test]
    async fn who_has_opted_in_is_known_after_a_restart_for_as_long_as_the_pod_is_there() {
        let scratch = tempfile::tempdir().unwrap();
        let pods = open(scratch.path());
        pods.told(set(&["a", "b"])).await;
        drop(pods);
        let pods = open(scratch.path());
        assert!(pods.has("a") && pods.has("b") && !pods.has("c"));
        pods.told(set(&["b"])).await;
        assert!(pods.is_written());
        drop(pods);
        let pods = open(scratch.path());
        assert!(!pods.has("a") && pods.has("b"));
    }

    #[tokio::test]
    async fn a_damaged_file_is_told_and_written_anew() {
        let scratch = tempfile::tempdir().unwrap();
        let entry = Entry::at(scratch.path().join(DIRECTORY));
        entry.make_directory().unwrap();
        entry.write(FILE, b"[\"a\",").unwrap();
        let pods = open(scratch.path());
        assert!(!pods.has("a") && !pods.is_written());
        pods.told(BTreeSet::new()).await;
        assert_eq!(read(&entry).unwrap(), BTreeSet::new());
    }

    #[tokio::test]
    async fn what_cannot_be_written_is_known_all_the_same_and_written_later() {
        let scratch = tempfile::tempdir().unwrap();
        // What stands in the way is no directory.
        let in_the_way = scratch.path().join(DIRECTORY);
        std::fs::write(&in_the_way, "").unwrap();
        let pods = open(scratch.path());
        pods.told(set(&["a"])).await;
        assert!(pods.has("a") && !pods.is_written());
        std::fs::remove_file(in_the_way).unwrap();
        pods.told(set(&["a"])).await;
        assert!(pods.is_written());
    }

    #[tokio::test]
    async fn a_file_of_more_pods_than_a_node_has_can_be_read_back() {
        let scratch = tempfile::tempdir().unwrap();
        let many = (0..2 * MAX_PODS).map(|n| format!("{n:036}")).collect();
        let pods = open(scratch.path());
        pods.told(many).await;
        assert!(pods.is_written());
        drop(pods);
        assert_eq!(open(scratch.path()).state().known.len(), MAX_PODS);
    }
}
