//! Which volumes were left to a runtime, on disk: what the proposal has kubelet keep in its `vol_data.json`. An entry is written
//! before the call that leaves the volume, so that whatever ends in between, the volume is taken back as what it is; it goes
//! when the volume was taken back, or its target is gone.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::disk::Disk;
use super::place::Place;
use super::refusal;
use super::wish::Group;
use crate::crust::{Entry, Problem, Result, Target};
use crate::fail_point::meet;

/// The file of an entry; `target` is beside it.
const FILE: &str = "vol_data.json";
/// Bytes of it, as many as are read back.
const MAX_FILE: usize = 64 << 10;
/// What a writer that is gone has left half written is removed when it is so old.
const PARTIAL_AGE: Duration = Duration::from_secs(600);

/// A volume at a target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Left {
    /// The proposal's key, with the value that kubelet's file has for such things: text.
    #[serde(rename = "deferFSMount")]
    defer_fs_mount: String,
    pub volume_handle: String,
    #[serde(default)]
    pub staging_target_path: String,
    /// What the pod said of its group when it was published first.
    #[serde(default)]
    pub group: Option<Group>,
    /// The claim that it is of, in the pod's namespace, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<String>,
    #[serde(flatten)]
    pub pod: PodRef,
}

/// A pod, for events.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodRef {
    pub namespace: String,
    #[serde(rename = "pod")]
    pub name: String,
    #[serde(rename = "podUid")]
    pub uid: String,
}

impl Left {
    pub fn new(volume: &str, staging: &str, group: Option<Group>, pod: PodRef) -> Self {
        Self {
            defer_fs_mount: DEFERRED.to_owned(),
            volume_handle: volume.to_owned(),
            staging_target_path: staging.to_owned(),
            group,
            claim: None,
            pod,
        }
    }

    pub fn with_claim(self, claim: Option<String>) -> Self {
        Self { claim, ..self }
    }
}

const DEFERRED: &str = "true";

/// What is known of a target.
#[derive(Debug)]
struct Known {
    left: Left,
    /// Calls under way that publish it: the target need not be there yet.
    publishing: usize,
    /// Whether the last round found the target gone.
    gone: bool,
    /// What the driver said when it was measured last.
    abnormal: Option<bool>,
}

/// Cheap to clone.
#[derive(Debug, Clone)]
pub struct Memory {
    disk: Disk,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    loaded: bool,
    known: BTreeMap<PathBuf, Known>,
}

/// A publish that is under way.
#[derive(Debug)]
pub struct Publishing {
    memory: Memory,
    target: PathBuf,
}

impl Drop for Publishing {
    fn drop(&mut self) {
        if let Some(known) = self.memory.state().known.get_mut(&self.target) {
            known.publishing = known.publishing.saturating_sub(1);
            known.gone = false;
        }
    }
}

impl Memory {
    /// Reads what is there, if that can be read now.
    pub fn open(disk: Disk) -> Self {
        let memory = Self { disk, state: Arc::default() };
        if memory.disk.is_served()
            && let Err(problem) = memory.load()
        {
            tracing::error!(%problem, "what was left to runtimes cannot be read; it will be tried again");
        }
        memory
    }

    /// Reads what is there, once. What cannot be read is told and left: nobody knows what it was.
    fn load(&self) -> Result<()> {
        if self.state().loaded {
            return Ok(());
        }
        self.disk.serve()?;
        let mut known = BTreeMap::new();
        for entry in self.disk.directory().entries()? {
            match read(&entry) {
                Ok(Some((target, left))) if self.disk.directory().entry(&target) == entry => {
                    known.insert(target.into_path(), Known::new(left));
                }
                Ok(Some((target, _))) => {
                    tracing::error!(entry = %entry.path().display(), %target, "an entry is not the one of its target; it is left alone");
                }
                // Half of one.
                Ok(None) => {}
                Err(problem) => {
                    tracing::error!(entry = %entry.path().display(), %problem, "what was left to a runtime cannot be read; it is left alone");
                }
            }
        }
        let mut state = self.state();
        // What was written in the meantime is newer.
        known.append(&mut state.known);
        state.known = known;
        state.loaded = true;
        Ok(())
    }

    /// Writes down that a volume is left to a runtime at a target, durably, and keeps that for as long as the publish is under way.
    pub async fn publishing(&self, target: &str, left: &Left) -> refusal::Result<Publishing> {
        if let Some(publishing) = self.again(target, left) {
            return Ok(publishing);
        }
        let (memory, target, left) = (self.clone(), target.to_owned(), left.clone());
        self.disk.run(move || memory.write(&target, left)).await
    }

    /// A publish of what is written down already.
    fn again(&self, target: &str, left: &Left) -> Option<Publishing> {
        let mut state = self.state();
        let known = state.known.get_mut(Path::new(target)).filter(|known| known.left == *left)?;
        known.publishing += 1;
        Some(Publishing { memory: self.clone(), target: PathBuf::from(target) })
    }

    fn write(&self, target: &str, left: Left) -> Result<Publishing> {
        self.load()?;
        let target = Target::new("target_path", target)?;
        let json = serde_json::to_vec(&left)
            .map_err(|error| Problem::invalid("volume_id", error.to_string()))?;
        if json.len() > MAX_FILE {
            return Err(Problem::invalid("volume_id", format!("makes more than {MAX_FILE} bytes")));
        }
        let entry = self.disk.directory().entry(&target);
        entry.make(&target)?;
        entry.write(FILE, &json)?;
        meet("node_proxy.remembered").map_err(|e| Problem::io("writing it down", e))?;
        let target = target.into_path();
        let mut state = self.state();
        let known = state.known.entry(target.clone()).or_insert_with(|| Known::new(left.clone()));
        known.left = left;
        known.publishing += 1;
        Ok(Publishing { memory: self.clone(), target })
    }

    /// What is known of this volume at this target.
    pub fn at(&self, volume: &str, target: &str) -> Option<Left> {
        let state = self.state();
        let known = state.known.get(Path::new(target))?;
        (known.left.volume_handle == volume).then(|| known.left.clone())
    }

    /// The same, where `path` is a target or else the path where the volume is staged.
    pub fn of(&self, volume: &str, path: &str) -> Option<Left> {
        self.at(volume, path).or_else(|| {
            let is_staged = |left: &&Left| {
                left.volume_handle == volume
                    && !left.staging_target_path.is_empty()
                    && Path::new(&left.staging_target_path) == Path::new(path)
            };
            let state = self.state();
            state.known.values().map(|known| &known.left).find(is_staged).cloned()
        })
    }

    /// Forgets a volume that was taken back.
    pub async fn forget(&self, target: &str) -> refusal::Result<()> {
        let (memory, target) = (self.clone(), PathBuf::from(target));
        self.disk.run(move || memory.remove(&target)).await
    }

    /// Not while it is published: whoever is at that goes by what is written down. One that begins now finds nothing and writes anew,
    /// when it is its turn.
    fn remove(&self, target: &Path) -> Result<()> {
        let taken = {
            let mut state = self.state();
            match state.known.get(target) {
                // As it is called here, for the path that was given may be written otherwise.
                Some(known) if known.publishing == 0 => state.known.remove_entry(target),
                _ => None,
            }
        };
        let Some((path, known)) = taken else { return Ok(()) };
        let erased = self.erase(&path);
        if erased.is_err() {
            self.state().known.entry(path).or_insert(known);
        }
        erased
    }

    fn erase(&self, target: &Path) -> Result<()> {
        let entry = self.disk.directory().entry(&Target::new("target_path", target)?);
        // What says that there is an entry goes first: half of one is none.
        entry.remove(FILE)?;
        meet("node_proxy.forgetting").map_err(|e| Problem::io("removing it", e))?;
        entry.unstage()?;
        meet("node_proxy.forgotten").map_err(|e| Problem::io("removing it", e))
    }

    /// One round: forgets those whose target is gone, since nobody will take them back. It has to be gone in two rounds, with no
    /// publish between them: a driver may be at it whose caller has given up.
    pub fn collect(&self) -> Result<()> {
        let Some(_turn) = self.disk.turn() else { return Ok(()) };
        self.load()?;
        let targets: Vec<PathBuf> = self.state().known.keys().cloned().collect();
        for target in targets {
            let gone = is_gone(&target);
            let goes = {
                let mut state = self.state();
                let Some(known) = state.known.get_mut(&target) else { continue };
                let goes = gone && known.gone && known.publishing == 0;
                known.gone = gone;
                goes
            };
            if goes {
                tracing::info!(target = %target.display(), "forgetting a volume whose target is gone");
                self.remove(&target)?;
            }
        }
        for entry in self.disk.directory().entries()? {
            if matches!(read(&entry), Ok(None)) {
                entry.unstage()?;
            }
        }
        self.disk.directory().remove_partial(PARTIAL_AGE)
    }

    /// What the driver said of the volume when it was measured.
    pub fn measured(&self, target: &str, abnormal: bool) {
        if let Some(known) = self.state().known.get_mut(Path::new(target)) {
            known.abnormal = Some(abnormal);
        }
    }

    /// The volumes that were measured, with what the driver said.
    pub fn conditions(&self) -> Vec<(PathBuf, Left, bool)> {
        let state = self.state();
        let measured = state.known.iter().filter_map(|(target, known)| {
            Some((target.clone(), known.left.clone(), known.abnormal?))
        });
        measured.collect()
    }

    pub fn len(&self) -> usize {
        self.state().known.len()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn new(left: Left) -> Self {
        Self { left, publishing: 0, gone: false, abnormal: None }
    }
}

/// Whether there is certainly nothing: where kubelet's directory is not to be seen either, nobody can tell.
fn is_gone(target: &Path) -> bool {
    let looked = target.symlink_metadata();
    if !looked.is_err_and(|error| error.kind() == ErrorKind::NotFound) {
        return false;
    }
    let up = match target.to_str().and_then(Place::of_path) {
        Some(Place::Mount { .. }) => PODS_ABOVE,
        _ => 2,
    };
    target.ancestors().nth(up).is_some_and(Path::is_dir)
}

/// From a target up to the directory of all pods: `pods/UID/volumes/kubernetes.io~csi/NAME/mount`.
const PODS_ABOVE: usize = 5;

fn read(entry: &Entry) -> Result<Option<(Target, Left)>> {
    let (Some(target), Some(bytes)) = (entry.target()?, entry.read(FILE)?) else { return Ok(None) };
    let left: Left = serde_json::from_slice(&bytes)
        .map_err(|error| Problem::invalid(FILE, error.to_string()))?;
    if left.defer_fs_mount != DEFERRED {
        return Err(Problem::invalid(FILE, "deferFSMount is not \"true\""));
    }
    Ok(Some((target, left)))
}

#[cfg(test)]
mod tests;
