//! Records requests to the driver and its responses with their order, to determine for any time
//! which objects must exist, must not exist, or may exist.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A checksum of a block's content.
pub type Print = u32;

/// A logical time.
pub type Stamp = u64;

/// The times of a call: before the request, and after the response.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    begun: Stamp,
    /// Also whether it succeeded.
    done: Option<(Stamp, bool)>,
}

/// A time within this interval.
#[derive(Debug, Clone, Copy)]
pub struct Moment {
    pub after: Stamp,
    pub before: Stamp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Certainty {
    Yes,
    No,
    /// The call was in progress.
    Maybe,
}

impl Span {
    /// Whether the call had taken effect.
    pub fn at(self, moment: Moment) -> Certainty {
        match self.done {
            Some((done, succeeded)) if done < moment.after => {
                if succeeded {
                    Certainty::Yes
                } else {
                    Certainty::No
                }
            }
            _ if self.begun > moment.before => Certainty::No,
            _ => Certainty::Maybe,
        }
    }

    /// Whether the call was in progress during the whole interval.
    pub fn encloses(self, moment: Moment) -> bool {
        self.begun < moment.after && self.done.is_none_or(|(done, _)| done > moment.before)
    }
}

/// The creation and deletion of an object.
#[derive(Debug, Clone, Copy)]
pub struct Life {
    pub made: Span,
    gone: Option<Span>,
}

impl Life {
    pub fn exists(self, moment: Moment) -> Certainty {
        let gone = self.gone.map_or(Certainty::No, |gone| gone.at(moment));
        match (self.made.at(moment), gone) {
            (Certainty::No, _) | (_, Certainty::Yes) => Certainty::No,
            (Certainty::Yes, Certainty::No) => Certainty::Yes,
            _ => Certainty::Maybe,
        }
    }

    /// Whether it exists and no deletion is in progress.
    pub fn is_usable(self) -> bool {
        matches!(self.made.done, Some((_, true))) && self.gone.is_none()
    }
}

#[derive(Debug, Clone)]
pub struct Volume {
    pub name: String,
    /// Known when it is made.
    pub id: String,
    pub life: Life,
    /// The requested sizes, in bytes.
    pub sizes: Vec<(Span, u64)>,
    /// Its content, if it has no writer.
    pub content: Option<Vec<Print>>,
}

#[derive(Debug, Clone)]
pub struct Snapshot {
    pub name: String,
    /// Known when it is made.
    pub id: String,
    /// The name of its volume.
    pub volume: String,
    pub group: Option<Group>,
    pub life: Life,
    /// Read back after the response.
    pub content: Option<Vec<Print>>,
}

#[derive(Debug, Clone)]
pub struct Group {
    pub name: String,
    /// Known when it is made.
    pub id: String,
    pub members: usize,
}

/// The ledger. Volumes and snapshots are in the order of the requests.
#[derive(Debug, Default)]
pub struct Records {
    clock: Stamp,
    pub volumes: Vec<Volume>,
    pub snapshots: Vec<Snapshot>,
}

impl Records {
    fn tick(&mut self) -> Stamp {
        self.clock += 1;
        self.clock
    }

    fn begin(&mut self) -> Span {
        Span { begun: self.tick(), done: None }
    }

    fn end(&mut self, span: Span, succeeded: bool) -> Span {
        Span { done: Some((self.tick(), succeeded)), ..span }
    }

    pub fn volume(&self, name: &str) -> Option<&Volume> {
        self.volumes.iter().find(|volume| volume.name == name)
    }

    pub fn snapshot(&self, name: &str) -> Option<&Snapshot> {
        self.snapshots.iter().find(|snapshot| snapshot.name == name)
    }

    fn volume_mut(&mut self, name: &str) -> &mut Volume {
        self.volumes.iter_mut().find(|volume| volume.name == name).unwrap()
    }

    fn snapshots_mut(&mut self, names: &[String]) -> impl Iterator<Item = &mut Snapshot> {
        self.snapshots.iter_mut().filter(|snapshot| names.contains(&snapshot.name))
    }
}

#[derive(Debug, Default)]
pub struct Ledger(Mutex<Records>);

impl Ledger {
    pub fn records(&self) -> MutexGuard<'_, Records> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn close(self) -> Records {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// The current time, for a [`Moment`].
    pub fn now(&self) -> Stamp {
        self.records().tick()
    }

    /// Creates a volume with `call`, which returns its id and size in bytes.
    pub fn make_volume(&self, name: &str, call: impl FnOnce() -> Option<(String, u64)>) -> bool {
        let mut records = self.records();
        let life = Life { made: records.begin(), gone: None };
        let (name, id) = (name.to_owned(), String::new());
        records.volumes.push(Volume {
            name: name.clone(),
            id,
            life,
            sizes: Vec::new(),
            content: None,
        });
        drop(records);
        let answer = call();
        let mut records = self.records();
        let made = records.end(life.made, answer.is_some());
        let volume = records.volume_mut(&name);
        volume.life.made = made;
        if let Some((id, size)) = answer {
            volume.id = id;
            volume.sizes.push((made, size));
            return true;
        }
        false
    }

    pub fn expand_volume(&self, name: &str, size: u64, call: impl FnOnce()) {
        let mut records = self.records();
        let span = records.begin();
        records.volume_mut(name).sizes.push((span, size));
        drop(records);
        call();
        let mut records = self.records();
        let done = records.end(span, true);
        records.volume_mut(name).sizes.last_mut().unwrap().0 = done;
    }

    pub fn delete_volume(&self, name: &str, call: impl FnOnce()) {
        let mut records = self.records();
        let span = records.begin();
        records.volume_mut(name).life.gone = Some(span);
        drop(records);
        call();
        let mut records = self.records();
        let done = records.end(span, true);
        records.volume_mut(name).life.gone = Some(done);
    }

    /// Takes snapshots of these volumes with `call`, as a group if it has a name. `call` returns
    /// the snapshot ids in the same order, and the group id. Returns the names of the snapshots.
    pub fn take_snapshots(
        &self,
        name: &str,
        volumes: &[&str],
        group: bool,
        call: impl FnOnce() -> Option<(Vec<String>, String)>,
    ) -> Option<Vec<String>> {
        let mut records = self.records();
        let life = Life { made: records.begin(), gone: None };
        let mut names = Vec::new();
        for (number, volume) in volumes.iter().enumerate() {
            let group = group.then(|| Group {
                name: name.to_owned(),
                id: String::new(),
                members: volumes.len(),
            });
            let name = if group.is_some() { format!("{name}-{number}") } else { name.to_owned() };
            names.push(name.clone());
            let (id, volume) = (String::new(), (*volume).to_owned());
            records.snapshots.push(Snapshot { name, id, volume, group, life, content: None });
        }
        drop(records);
        let answer = call();
        let mut records = self.records();
        let made = records.end(life.made, answer.is_some());
        records.snapshots_mut(&names).for_each(|snapshot| snapshot.life.made = made);
        let (ids, group_id) = answer?;
        for (snapshot, id) in records.snapshots_mut(&names).zip(ids) {
            snapshot.id = id;
            if let Some(group) = &mut snapshot.group {
                group.id.clone_from(&group_id);
            }
        }
        Some(names)
    }

    /// Deletes these snapshots with one call.
    pub fn delete_snapshots(&self, names: &[String], call: impl FnOnce()) {
        let mut records = self.records();
        let span = records.begin();
        records.snapshots_mut(names).for_each(|snapshot| snapshot.life.gone = Some(span));
        drop(records);
        call();
        let mut records = self.records();
        let done = records.end(span, true);
        records.snapshots_mut(names).for_each(|snapshot| snapshot.life.gone = Some(done));
    }

    pub fn hold(&self, snapshot: &str, content: Vec<Print>) {
        let mut records = self.records();
        records
            .snapshots_mut(&[snapshot.to_owned()])
            .for_each(|s| s.content = Some(content.clone()));
    }

    pub fn hold_volume(&self, volume: &str, content: Vec<Print>) {
        self.records().volume_mut(volume).content = Some(content);
    }
}
