//! The durable store of deferred volumes, which the proposal's kubelet keeps in `vol_data.json`. An
//! entry is written before the publish is forwarded, so that after a crash at any time the volume
//! is unpublished as deferred. It is removed after the volume is unpublished or when its target is
//! gone.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::deferral_request::Group;
use super::publish_target::PublishTarget;
use super::refusal;
use super::state_dir::StateDir;
use crate::crust::{Entry, Problem, Result, Target};
use common::fail_point::hit;

/// The file of an entry, next to `target`.
const FILE: &str = "vol_data.json";
/// Maximum bytes of the file.
const MAX_FILE: usize = 64 << 10;
/// Minimum age at which an incomplete file of a killed writer is removed.
const PARTIAL_AGE: Duration = Duration::from_secs(600);

/// A deferred volume at a target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeferredVolume {
    /// The proposal's key. kubelet's file has strings as values.
    #[serde(rename = "deferFSMount")]
    defer_fs_mount: String,
    pub volume_handle: String,
    #[serde(default)]
    pub staging_target_path: String,
    /// The pod's group when the volume was first published.
    #[serde(default)]
    pub group: Option<Group>,
    /// The volume's claim in the pod's namespace, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<String>,
    #[serde(flatten)]
    pub pod: PodRef,
}

/// Identifies a pod, for events and metrics.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodRef {
    pub namespace: String,
    #[serde(rename = "pod")]
    pub name: String,
    #[serde(rename = "podUid")]
    pub uid: String,
}

impl DeferredVolume {
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

/// The state of a target.
#[derive(Debug)]
struct Record {
    volume: DeferredVolume,
    /// Number of publishes in progress: the target may not exist yet.
    publishing: usize,
    /// Whether the target was gone in the last round.
    gone: bool,
    /// The condition that the driver last reported.
    abnormal: Option<bool>,
}

/// The store of deferred volumes; clones share it.
#[derive(Debug, Clone)]
pub struct StateStore {
    state_dir: StateDir,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    loaded: bool,
    records: BTreeMap<PathBuf, Record>,
}

/// A publish in progress, until it is dropped.
#[derive(Debug)]
pub struct PublishGuard {
    store: StateStore,
    target: PathBuf,
}

impl Drop for PublishGuard {
    fn drop(&mut self) {
        if let Some(record) = self.store.state().records.get_mut(&self.target) {
            record.publishing = record.publishing.saturating_sub(1);
            record.gone = false;
        }
    }
}

impl StateStore {
    /// Opens the store and loads the entries. If the directory is unusable, loading is repeated
    /// later.
    pub fn open(state_dir: StateDir) -> Self {
        let store = Self { state_dir, state: Arc::default() };
        if store.state_dir.is_locked()
            && let Err(problem) = store.load()
        {
            tracing::error!(%problem, "failed to read the deferred volumes; retrying later");
        }
        store
    }

    /// Loads the entries once. Unreadable entries are logged and kept, because their volumes are
    /// unknown.
    fn load(&self) -> Result<()> {
        if self.state().loaded {
            return Ok(());
        }
        self.state_dir.lock_directory()?;
        let mut records = BTreeMap::new();
        for entry in self.state_dir.directory().entries()? {
            match read(&entry) {
                Ok(Some((target, volume)))
                    if self.state_dir.directory().entry(&target) == entry =>
                {
                    records.insert(target.into_path(), Record::new(volume));
                }
                Ok(Some((target, _))) => {
                    tracing::error!(entry = %entry.path().display(), %target, "the name of an entry does not match its target; keeping the entry");
                }
                // Incomplete.
                Ok(None) => {}
                Err(problem) => {
                    tracing::error!(entry = %entry.path().display(), %problem, "failed to read an entry; keeping it");
                }
            }
        }
        let mut state = self.state();
        // Records that were written before loading are newer.
        records.append(&mut state.records);
        state.records = records;
        state.loaded = true;
        Ok(())
    }

    /// Stores a deferred volume durably, and keeps the entry for as long as the publish is in
    /// progress.
    pub async fn begin_publish(
        &self,
        target: &str,
        volume: &DeferredVolume,
    ) -> refusal::Result<PublishGuard> {
        if let Some(guard) = self.repeat_publish(target, volume) {
            return Ok(guard);
        }
        let (store, target, volume) = (self.clone(), target.to_owned(), volume.clone());
        self.state_dir.run(move || store.write(&target, volume)).await
    }

    /// Begins a publish of a volume that is already stored.
    fn repeat_publish(&self, target: &str, volume: &DeferredVolume) -> Option<PublishGuard> {
        let mut state = self.state();
        let record = state.records.get_mut(Path::new(target));
        let record = record.filter(|record| record.volume == *volume)?;
        record.publishing += 1;
        Some(PublishGuard { store: self.clone(), target: PathBuf::from(target) })
    }

    fn write(&self, target: &str, volume: DeferredVolume) -> Result<PublishGuard> {
        self.load()?;
        let target = Target::new("target_path", target)?;
        let json = serde_json::to_vec(&volume)
            .map_err(|error| Problem::invalid("volume_id", error.to_string()))?;
        if json.len() > MAX_FILE {
            return Err(Problem::invalid(
                "volume_id",
                format!("the entry would exceed {MAX_FILE} bytes"),
            ));
        }
        let entry = self.state_dir.directory().entry(&target);
        entry.make(&target)?;
        entry.write(FILE, &json)?;
        hit("node_proxy.remembered").map_err(|e| Problem::io("writing the entry", e))?;
        let target = target.into_path();
        let mut state = self.state();
        let record = state.records.entry(target.clone());
        let record = record.or_insert_with(|| Record::new(volume.clone()));
        record.volume = volume;
        record.publishing += 1;
        Ok(PublishGuard { store: self.clone(), target })
    }

    /// The stored volume at this target.
    pub fn at_target(&self, volume: &str, target: &str) -> Option<DeferredVolume> {
        let state = self.state();
        let record = state.records.get(Path::new(target))?;
        (record.volume.volume_handle == volume).then(|| record.volume.clone())
    }

    /// The stored volume at a target or staging path.
    pub fn at_path(&self, volume: &str, path: &str) -> Option<DeferredVolume> {
        self.at_target(volume, path).or_else(|| {
            let is_staged = |stored: &&DeferredVolume| {
                stored.volume_handle == volume
                    && !stored.staging_target_path.is_empty()
                    && Path::new(&stored.staging_target_path) == Path::new(path)
            };
            let state = self.state();
            state.records.values().map(|record| &record.volume).find(is_staged).cloned()
        })
    }

    /// Removes a volume that was unpublished.
    pub async fn remove(&self, target: &str) -> refusal::Result<()> {
        let (store, target) = (self.clone(), PathBuf::from(target));
        self.state_dir.run(move || store.remove_blocking(&target)).await
    }

    /// Does nothing while a publish is in progress, because it relies on the entry. A publish that
    /// begins during the removal finds no record, and writes the entry when it gets the writer
    /// permit.
    fn remove_blocking(&self, target: &Path) -> Result<()> {
        let removed = {
            let mut state = self.state();
            match state.records.get(target) {
                // Returns the stored path: the given one may be spelled differently.
                Some(record) if record.publishing == 0 => state.records.remove_entry(target),
                _ => None,
            }
        };
        let Some((path, record)) = removed else { return Ok(()) };
        let deleted = self.delete_entry(&path);
        if deleted.is_err() {
            self.state().records.entry(path).or_insert(record);
        }
        deleted
    }

    fn delete_entry(&self, target: &Path) -> Result<()> {
        let entry = self.state_dir.directory().entry(&Target::new("target_path", target)?);
        // Without this file an entry is incomplete, so it is removed first.
        entry.remove(FILE)?;
        hit("node_proxy.forgetting").map_err(|e| Problem::io("removing the entry", e))?;
        entry.unstage()?;
        hit("node_proxy.forgotten").map_err(|e| Problem::io("removing the entry", e))
    }

    /// Runs one round: removes volumes whose target is gone, because kubelet will not unpublish
    /// them. The target must be gone in two consecutive rounds without a publish between them:
    /// after kubelet's timeout, the driver may still be publishing.
    pub fn collect(&self) -> Result<()> {
        let Some(_permit) = self.state_dir.acquire_writer() else { return Ok(()) };
        self.load()?;
        let targets: Vec<PathBuf> = self.state().records.keys().cloned().collect();
        for target in targets {
            let gone = is_gone(&target);
            let is_abandoned = {
                let mut state = self.state();
                let Some(record) = state.records.get_mut(&target) else { continue };
                let is_abandoned = gone && record.gone && record.publishing == 0;
                record.gone = gone;
                is_abandoned
            };
            if is_abandoned {
                tracing::info!(target = %target.display(), "removing a deferred volume whose target is gone");
                self.remove_blocking(&target)?;
            }
        }
        for entry in self.state_dir.directory().entries()? {
            if matches!(read(&entry), Ok(None)) {
                entry.unstage()?;
            }
        }
        self.state_dir.directory().remove_partial(PARTIAL_AGE)
    }

    /// Stores the condition that the driver reported.
    pub fn set_condition(&self, target: &str, abnormal: bool) {
        if let Some(record) = self.state().records.get_mut(Path::new(target)) {
            record.abnormal = Some(abnormal);
        }
    }

    /// The volumes with a reported condition, and whether it is abnormal.
    pub fn conditions(&self) -> Vec<(PathBuf, DeferredVolume, bool)> {
        let state = self.state();
        let reported = state.records.iter().filter_map(|(target, record)| {
            Some((target.clone(), record.volume.clone(), record.abnormal?))
        });
        reported.collect()
    }

    pub fn len(&self) -> usize {
        self.state().records.len()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Record {
    fn new(volume: DeferredVolume) -> Self {
        Self { volume, publishing: 0, gone: false, abnormal: None }
    }
}

/// Whether the target is certainly gone. If kubelet's directory is not visible either, this is
/// unknown.
fn is_gone(target: &Path) -> bool {
    let metadata = target.symlink_metadata();
    if !metadata.is_err_and(|error| error.kind() == ErrorKind::NotFound) {
        return false;
    }
    let up = match target.to_str().and_then(PublishTarget::of_path) {
        Some(PublishTarget::Mount { .. }) => LEVELS_BELOW_PODS,
        _ => 2,
    };
    target.ancestors().nth(up).is_some_and(Path::is_dir)
}

/// Levels from a target up to the directory of all pods:
/// `pods/UID/volumes/kubernetes.io~csi/NAME/mount`.
const LEVELS_BELOW_PODS: usize = 5;

fn read(entry: &Entry) -> Result<Option<(Target, DeferredVolume)>> {
    let (Some(target), Some(bytes)) = (entry.target()?, entry.read(FILE)?) else { return Ok(None) };
    let volume: DeferredVolume = serde_json::from_slice(&bytes)
        .map_err(|error| Problem::invalid(FILE, error.to_string()))?;
    if volume.defer_fs_mount != DEFERRED {
        return Err(Problem::invalid(FILE, "deferFSMount is not \"true\""));
    }
    Ok(Some((target, volume)))
}

#[cfg(test)]
mod tests;
