//! The prepared situations of a run: volumes, and snapshots whose content is known. Many rules judge
//! the same snapshots, and each metadata call is made once. A branch of situations is prepared when
//! the first rule uses it, so that a selected rule runs quickly.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tonic::Code;

use super::content::{Image, Ranges};
use super::door::{Done, Door, End, Query, Refusal, Snapshot, Stream, Volume, Window};
use super::rules::Outcome;
use super::situations;

/// The smallest volume that holds all situations, in bytes.
pub const SMALLEST: u64 = 32 << 20;
/// How often a call is repeated while another call for the volume runs.
const ATTEMPTS: u32 = 6;

/// What a run is made of.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Of volumes, in bytes.
    pub size: u64,
    /// Of volumes that have grown, in bytes.
    pub grown_size: u64,
    pub seed: u64,
    /// Begins the names of volumes and snapshots.
    pub prefix: String,
    /// Volumes cannot be written or read.
    pub no_node: bool,
    /// Time limit of a metadata call.
    pub patience: Duration,
}

/// A snapshot whose content is known.
#[derive(Debug, Clone)]
pub struct Shot {
    pub name: String,
    pub snapshot: Snapshot,
    /// Of the volume when the snapshot was taken, in bytes.
    pub size: u64,
    /// The largest size of the volume, in bytes.
    pub volume_size: u64,
    pub image: Arc<Image>,
    /// The zeros that were written over zeros.
    pub written_zeros: Ranges,
    pub is_deleted: bool,
    /// Its volume was deleted.
    pub is_orphan: bool,
}

/// Snapshots of one volume by name, in the order of their creation. A missing one has its reason.
pub type Branch = Vec<(String, Result<Shot, String>)>;

/// Groups of situations that are prepared together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Group {
    /// Fresh, sparse, changed, many extents, full, and a chain.
    Main,
    Grown,
    Restored,
    Cloned,
    /// The volume is deleted.
    Orphan,
}

impl Group {
    pub const ALL: [Self; 5] =
        [Self::Main, Self::Grown, Self::Restored, Self::Cloned, Self::Orphan];

    fn of(name: &str) -> Self {
        match name.split('-').next().unwrap_or_default() {
            "grown" => Self::Grown,
            "restored" => Self::Restored,
            "cloned" => Self::Cloned,
            "orphan" => Self::Orphan,
            _ => Self::Main,
        }
    }
}

pub struct World<'d> {
    pub door: &'d dyn Door,
    pub settings: Settings,
    branches: [OnceLock<Branch>; 5],
    /// The restored volume, of which another one is cloned.
    pub restored: OnceLock<(Volume, Image)>,
    streams: Mutex<HashMap<(Query, Window), Arc<Stream>>>,
    /// What a restored snapshot holds that was not written, by id.
    surprises: Mutex<HashMap<String, Arc<Ranges>>>,
    is_stopped: Mutex<bool>,
}

impl<'d> World<'d> {
    pub fn new(door: &'d dyn Door, settings: Settings) -> Self {
        Self {
            door,
            settings,
            branches: Default::default(),
            restored: OnceLock::new(),
            streams: Mutex::default(),
            surprises: Mutex::default(),
            is_stopped: Mutex::new(false),
        }
    }

    /// Forgets what the driver returned, but not the situations.
    pub fn forget_streams(&self) {
        lock(&self.streams).clear();
    }

    /// The snapshots of a group, prepared at the first use.
    ///
    /// # Errors
    /// The run was stopped.
    pub fn branch(&self, group: Group) -> Result<&Branch, Outcome> {
        let branch = self.branches[group as usize].get_or_init(|| situations::prepare(self, group));
        if *lock(&self.is_stopped) { Err(Outcome::Stopped) } else { Ok(branch) }
    }

    /// A snapshot.
    ///
    /// # Errors
    /// It is missing, or the run was stopped.
    pub fn shot(&self, name: &str) -> Result<&Shot, Outcome> {
        let found = self.branch(Group::of(name))?.iter().find(|(other, _)| other == name);
        match found {
            Some((_, Ok(shot))) => Ok(shot),
            Some((_, Err(reason))) => Err(Outcome::Skip(reason.clone())),
            None => Err(Outcome::Skip(format!("the situation {name} is missing"))),
        }
    }

    /// All snapshots that exist, of all groups.
    pub fn shots(&self) -> Result<Vec<&Shot>, Outcome> {
        let mut all = Vec::new();
        for group in Group::ALL {
            let shots = self.branch(group)?.iter().filter_map(|(_, shot)| shot.as_ref().ok());
            all.extend(shots.filter(|shot| !shot.is_deleted));
        }
        match all.is_empty() {
            true => self.shot("fresh").map(|shot| vec![shot]),
            false => Ok(all),
        }
    }

    /// All pairs of neighbors in a volume.
    pub fn pairs(&self) -> Result<Vec<(&Shot, &Shot)>, Outcome> {
        let mut all = Vec::new();
        for group in Group::ALL {
            let shots = self.branch(group)?.iter().filter_map(|(_, shot)| shot.as_ref().ok());
            let shots: Vec<&Shot> = shots.filter(|shot| !shot.is_deleted).collect();
            all.extend(shots.windows(2).map(|pair| (pair[0], pair[1])));
        }
        Ok(all)
    }

    /// The response to a metadata call, which is made once. Calls that the driver postpones are
    /// repeated.
    pub fn stream(&self, query: &Query, window: Window) -> Arc<Stream> {
        let key = (query.clone(), window);
        if let Some(stream) = lock(&self.streams).get(&key) {
            return stream.clone();
        }
        let stream = Arc::new(self.fresh_stream(query, window));
        lock(&self.streams).insert(key, stream.clone());
        stream
    }

    /// The response to a call that was made.
    pub fn known_stream(&self, query: &Query, window: Window) -> Option<Arc<Stream>> {
        lock(&self.streams).get(&(query.clone(), window)).cloned()
    }

    /// Whether a group of situations exists.
    pub fn is_prepared(&self, group: Group) -> bool {
        self.branches[group as usize].get().is_some()
    }

    /// The same for a call that is made now.
    pub fn fresh_stream(&self, query: &Query, window: Window) -> Stream {
        let mut wait = Duration::from_millis(100);
        for _ in 1..ATTEMPTS {
            let stream = self.door.stream(query, window, self.settings.patience);
            let End::Failed(failure) = &stream.end else { return stream };
            // Of other codes, a repeated call fails again.
            let passing = [Code::Aborted, Code::Unavailable, Code::ResourceExhausted];
            if !passing.contains(&failure.code) {
                return stream;
            }
            std::thread::sleep(wait);
            wait *= 2;
        }
        self.door.stream(query, window, self.settings.patience)
    }

    /// The complete response to a metadata call.
    ///
    /// # Errors
    /// The call failed, which another rule judges, or the run was stopped.
    pub fn complete(&self, query: &Query, window: Window) -> Result<Arc<Stream>, Outcome> {
        let stream = self.stream(query, window);
        complete(query, &stream).map(|()| stream)
    }

    /// The content of a snapshot that is not what was written: reads a volume that is made of it.
    /// Nothing if that is impossible.
    pub fn surprises(&self, shot: &Shot) -> Result<Arc<Ranges>, Outcome> {
        if let Some(known) = lock(&self.surprises).get(&shot.snapshot.id) {
            return Ok(known.clone());
        }
        let found = match self.read_back(shot) {
            Ok(found) => found,
            Err(Refusal::Stopped) => return Err(Outcome::Stopped),
            Err(_) => Ranges::default(),
        };
        let found = Arc::new(found);
        lock(&self.surprises).insert(shot.snapshot.id.clone(), found.clone());
        Ok(found)
    }

    fn read_back(&self, shot: &Shot) -> Done<Ranges> {
        if shot.is_deleted || self.settings.no_node {
            return Ok(Ranges::default());
        }
        let name = format!("{}-read-{}", self.settings.prefix, shot.name);
        let size = shot.size.max(shot.snapshot.size);
        let source = super::door::Source::Snapshot(&shot.snapshot);
        let copy = self.door.make_volume(&name, size, Some(source))?;
        let found = self.door.compare(&copy, &shot.image);
        self.door.delete_volume(&copy)?;
        found
    }

    /// Runs a step of the preparation; notes a stop.
    pub fn step<T>(&self, what: &str, step: Done<T>) -> Result<T, String> {
        step.map_err(|refusal| {
            if matches!(refusal, Refusal::Stopped) {
                *lock(&self.is_stopped) = true;
            }
            format!("{what}: {refusal}")
        })
    }
}

/// Whether the response is complete.
///
/// # Errors
/// It is not; another rule judges that.
pub fn complete(query: &Query, stream: &Stream) -> Result<(), Outcome> {
    match &stream.end {
        End::Complete => Ok(()),
        End::Stopped => Err(Outcome::Stopped),
        End::Failed(failure) => {
            Err(Outcome::Skip(format!("{} returned {failure}", query.method())))
        }
        End::Endless(patience) => {
            let seconds = patience.as_secs();
            Err(Outcome::Skip(format!("{} did not end within {seconds} s", query.method())))
        }
    }
}

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
