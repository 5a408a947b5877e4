//! Which volumes were left to a runtime, on disk: what the proposal has kubelet keep in its `vol_data.json`. An entry is written
//! before the call that leaves the volume, so that whatever ends in between, the volume is taken back as what it is; it goes
//! when the volume was taken back, or its target is gone.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::opt_in::Group;
use crate::crust::{Directory, Entry, Problem, Result, Target};

/// The file of an entry; `target` is beside it.
const FILE: &str = "vol_data.json";

/// A volume at a target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Left {
    pub volume_handle: String,
    /// What the pod said of its group when it was published first.
    #[serde(default)]
    pub group: Option<Group>,
    /// The pod, for events.
    pub namespace: String,
    pub pod: String,
    pub pod_uid: String,
}

/// Cheap to clone.
#[derive(Debug, Clone)]
pub struct Memory {
    directory: Directory,
    known: Arc<Mutex<BTreeMap<PathBuf, Left>>>,
}

impl Memory {
    /// Reads what is there. What cannot be read is told and left: nobody knows what it was.
    pub fn open(directory: Directory) -> Result<Self> {
        let mut known = BTreeMap::new();
        for entry in directory.entries()? {
            match read(&entry) {
                Ok(Some((target, left))) if directory.entry(&target) == entry => {
                    known.insert(target.as_path().to_owned(), left);
                }
                // Half of one, or another's.
                Ok(_) => {}
                Err(problem) => {
                    tracing::error!(entry = %entry.path().display(), %problem, "what was left to a runtime cannot be read");
                }
            }
        }
        Ok(Self { directory, known: Arc::new(Mutex::new(known)) })
    }

    /// Writes down that a volume is left to a runtime at a target. Nothing where that is known.
    pub fn remember(&self, target: &str, left: &Left) -> Result<()> {
        let target = Target::new("target_path", target)?;
        if self.known().get(target.as_path()) == Some(left) {
            return Ok(());
        }
        let entry = self.directory.entry(&target);
        entry.make(&target)?;
        let json = serde_json::to_vec(left)
            .map_err(|error| Problem::invalid("volume_id", error.to_string()))?;
        entry.write(FILE, &json)?;
        self.known().insert(target.as_path().to_owned(), left.clone());
        Ok(())
    }

    /// Whether this volume was left to a runtime at this target.
    pub fn at(&self, volume: &str, target: &str) -> Option<Left> {
        let known = self.known();
        known.get(Path::new(target)).filter(|left| left.volume_handle == volume).cloned()
    }

    /// Whether this volume was left to a runtime: `path` is a target, or else where it is staged, which leads to any target.
    pub fn of(&self, volume: &str, path: &str) -> Option<Left> {
        self.at(volume, path).or_else(|| {
            let known = self.known();
            let is_a_target = known.contains_key(Path::new(path));
            let mut found = known.values().filter(|left| left.volume_handle == volume);
            found.next().filter(|_| !is_a_target).cloned()
        })
    }

    /// Forgets a volume that was taken back.
    pub fn forget(&self, target: &str) -> Result<()> {
        let target = Target::new("target_path", target)?;
        self.directory.entry(&target).unstage()?;
        self.known().remove(target.as_path());
        Ok(())
    }

    /// Forgets those whose target is gone: nobody will take them back.
    pub fn collect(&self) -> Result<usize> {
        let gone: Vec<PathBuf> = {
            let known = self.known();
            let is_gone = |path: &&PathBuf| {
                let found = path.symlink_metadata();
                found.is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound)
            };
            known.keys().filter(is_gone).cloned().collect()
        };
        for target in &gone {
            self.forget(&target.to_string_lossy())?;
        }
        Ok(gone.len())
    }

    pub fn len(&self) -> usize {
        self.known().len()
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<PathBuf, Left>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn read(entry: &Entry) -> Result<Option<(Target, Left)>> {
    let (Some(target), Some(bytes)) = (entry.target()?, entry.read(FILE)?) else { return Ok(None) };
    let left = serde_json::from_slice(&bytes)
        .map_err(|error| Problem::invalid("vol_data.json", error.to_string()))?;
    Ok(Some((target, left)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(volume: &str) -> Left {
        Left {
            volume_handle: volume.to_owned(),
            group: Some(Group { id: "7".into(), policy: None }),
            namespace: "n".into(),
            pod: "p".into(),
            pod_uid: "u".into(),
        }
    }

    #[test]
    fn what_was_left_is_known_after_a_restart_until_it_is_taken_back() {
        let scratch = tempfile::tempdir().unwrap();
        let open = || Memory::open(Directory::new(scratch.path().join("memory"))).unwrap();
        let target = scratch.path().join("target");
        let target = target.to_str().unwrap();
        let memory = open();
        memory.remember(target, &left("v")).unwrap();
        memory.remember(target, &left("v")).unwrap();
        let memory = open();
        assert_eq!(memory.at("v", target), Some(left("v")));
        assert_eq!((memory.at("w", target), memory.of("w", target)), (None, None));
        // By the path where it is staged, which is no target.
        assert_eq!(memory.of("v", "/staging"), Some(left("v")));
        memory.forget(target).unwrap();
        memory.forget(target).unwrap();
        assert_eq!((memory.of("v", target), open().len()), (None, 0));
    }

    #[test]
    fn what_nobody_takes_back_goes_with_its_target() {
        let scratch = tempfile::tempdir().unwrap();
        let memory = Memory::open(Directory::new(scratch.path().join("memory"))).unwrap();
        let there = scratch.path().join("there");
        std::fs::create_dir(&there).unwrap();
        memory.remember(there.to_str().unwrap(), &left("v")).unwrap();
        let gone = scratch.path().join("gone");
        memory.remember(gone.to_str().unwrap(), &left("w")).unwrap();
        assert_eq!((memory.collect().unwrap(), memory.len()), (1, 1));
        assert!(memory.at("v", there.to_str().unwrap()).is_some());
    }

    #[test]
    fn half_of_an_entry_and_one_that_is_damaged_are_no_memory() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = Directory::new(scratch.path().join("memory"));
        let of = |path: &str| Target::new("t", path).unwrap();
        directory.entry(&of("/half")).make(&of("/half")).unwrap();
        let damaged = directory.entry(&of("/damaged"));
        damaged.make(&of("/damaged")).unwrap();
        damaged.write(FILE, b"{").unwrap();
        assert_eq!(Memory::open(directory).unwrap().len(), 0);
    }
}
