//! What was asked of the driver and what it answered, each with its place in time, so that for any
//! moment it can be told what has to be there, what must not be, and what may be either.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// What a block holds, as far as telling blocks apart goes.
pub type Print = u32;

/// A moment, ascending.
pub type Stamp = u64;

/// A call: begun before it was sent, done after its answer was received.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    begun: Stamp,
    /// With whether it succeeded.
    done: Option<(Stamp, bool)>,
}

/// A moment that lies somewhere within this time.
#[derive(Debug, Clone, Copy)]
pub struct Moment {
    pub after: Stamp,
    pub before: Stamp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Certainty {
    Yes,
    No,
    /// It was under way.
    Maybe,
}

impl Span {
    /// Whether it had taken effect.
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

    /// Whether it was under way all of the time.
    pub fn encloses(self, moment: Moment) -> bool {
        self.begun < moment.after && self.done.is_none_or(|(done, _)| done > moment.before)
    }
}

/// When something was made and deleted.
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

    /// It exists, and nobody is about to delete it.
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
    /// The sizes that were asked for, in bytes.
    pub sizes: Vec<(Span, u64)>,
    /// What it holds, if nobody writes to it.
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
    /// Read back after the driver had answered.
    pub content: Option<Vec<Print>>,
}

#[derive(Debug, Clone)]
pub struct Group {
    pub name: String,
    /// Known when it is made.
    pub id: String,
    pub members: usize,
}

/// The books. Volumes and snapshots are in the order in which they were asked for.
#[derive(Debug, Default)]
pub struct Books {
    clock: Stamp,
    pub volumes: Vec<Volume>,
    pub snapshots: Vec<Snapshot>,
}

impl Books {
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
pub struct Ledger(Mutex<Books>);

impl Ledger {
    pub fn books(&self) -> MutexGuard<'_, Books> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn close(self) -> Books {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// Now, as the start or end of a [`Moment`].
    pub fn now(&self) -> Stamp {
        self.books().tick()
    }

    /// Makes a volume with `call`, which returns its id and size in bytes.
    pub fn make_volume(&self, name: &str, call: impl FnOnce() -> Option<(String, u64)>) -> bool {
        let mut books = self.books();
        let life = Life { made: books.begin(), gone: None };
        let (name, id) = (name.to_owned(), String::new());
        books.volumes.push(Volume {
            name: name.clone(),
            id,
            life,
            sizes: Vec::new(),
            content: None,
        });
        drop(books);
        let answer = call();
        let mut books = self.books();
        let made = books.end(life.made, answer.is_some());
        let volume = books.volume_mut(&name);
        volume.life.made = made;
        if let Some((id, size)) = answer {
            volume.id = id;
            volume.sizes.push((made, size));
            return true;
        }
        false
    }

    pub fn expand_volume(&self, name: &str, size: u64, call: impl FnOnce()) {
        let mut books = self.books();
        let span = books.begin();
        books.volume_mut(name).sizes.push((span, size));
        drop(books);
        call();
        let mut books = self.books();
        let done = books.end(span, true);
        books.volume_mut(name).sizes.last_mut().unwrap().0 = done;
    }

    pub fn delete_volume(&self, name: &str, call: impl FnOnce()) {
        let mut books = self.books();
        let span = books.begin();
        books.volume_mut(name).life.gone = Some(span);
        drop(books);
        call();
        let mut books = self.books();
        let done = books.end(span, true);
        books.volume_mut(name).life.gone = Some(done);
    }

    /// Cuts these volumes, as a group where it has a name, with `call`, which returns the ids of the
    /// snapshots in the same order and that of the group. Returns the names of the snapshots.
    pub fn cut(
        &self,
        name: &str,
        volumes: &[&str],
        group: bool,
        call: impl FnOnce() -> Option<(Vec<String>, String)>,
    ) -> Option<Vec<String>> {
        let mut books = self.books();
        let life = Life { made: books.begin(), gone: None };
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
            books.snapshots.push(Snapshot { name, id, volume, group, life, content: None });
        }
        drop(books);
        let answer = call();
        let mut books = self.books();
        let made = books.end(life.made, answer.is_some());
        books.snapshots_mut(&names).for_each(|snapshot| snapshot.life.made = made);
        let (ids, group_id) = answer?;
        for (snapshot, id) in books.snapshots_mut(&names).zip(ids) {
            snapshot.id = id;
            if let Some(group) = &mut snapshot.group {
                group.id.clone_from(&group_id);
            }
        }
        Some(names)
    }

    /// Deletes these snapshots with one call.
    pub fn delete_snapshots(&self, names: &[String], call: impl FnOnce()) {
        let mut books = self.books();
        let span = books.begin();
        books.snapshots_mut(names).for_each(|snapshot| snapshot.life.gone = Some(span));
        drop(books);
        call();
        let mut books = self.books();
        let done = books.end(span, true);
        books.snapshots_mut(names).for_each(|snapshot| snapshot.life.gone = Some(done));
    }

    pub fn hold(&self, snapshot: &str, content: Vec<Print>) {
        let mut books = self.books();
        books.snapshots_mut(&[snapshot.to_owned()]).for_each(|s| s.content = Some(content.clone()));
    }

    pub fn hold_volume(&self, volume: &str, content: Vec<Print>) {
        self.books().volume_mut(volume).content = Some(content);
    }
}
