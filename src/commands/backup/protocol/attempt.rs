//! An attempt to write a backup, and the look at others on which every acknowledgement rests.

use std::collections::BTreeSet;

use super::{Answer, Id, Machine, Name, Operation, Outcome, Part};

/// Whether backups and attempts exist without a mark: their marks are listed, then they themselves.
///
/// "Exists already" and the completeness of a set are acknowledgements as well.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Confirm<I> {
    /// With an intent.
    intents: BTreeSet<I>,
    /// And with a manifest and all data.
    backups: BTreeSet<I>,
    step: Look<I>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Look<I> {
    Begin,
    /// The first mark that was met.
    Marks(Option<I>),
    /// What is not seen yet.
    Attempts(BTreeSet<(Part, I)>),
}

impl<I: Id> Confirm<I> {
    /// `backups` must have manifests, which the caller has seen before, unless its own intent refers
    /// to them; `attempts` need none.
    pub fn new(
        backups: impl IntoIterator<Item = I>,
        attempts: impl IntoIterator<Item = I>,
    ) -> Self {
        let backups: BTreeSet<I> = backups.into_iter().collect();
        let intents = backups.iter().cloned().chain(attempts).collect();
        Self { intents, backups, step: Look::Begin }
    }

    fn all(&self) -> BTreeSet<(Part, I)> {
        let intents = self.intents.iter().map(|id| (Part::Intent, id.clone()));
        let parts = [Part::Manifest, Part::Data];
        let backups = self.backups.iter().flat_map(|id| parts.map(|part| (part, id.clone())));
        intents.chain(backups).collect()
    }

    fn ids(&self) -> Vec<I> {
        self.intents.iter().cloned().collect()
    }
}

impl<I: Id> Machine<I> for Confirm<I> {
    fn next(&mut self, answer: Answer<I>) -> Operation<I> {
        match (&mut self.step, answer) {
            (Look::Begin, _) if self.intents.is_empty() => Operation::End(Outcome::Acknowledged),
            (Look::Begin, _) => {
                self.step = Look::Marks(None);
                Operation::ListMarks(self.ids())
            }
            (Look::Marks(met), Answer::Listed(Name::Mark(on, _))) => {
                if self.intents.contains(&on) && met.as_ref().is_none_or(|met| on < *met) {
                    *met = Some(on);
                }
                Operation::More
            }
            (Look::Marks(Some(on)), Answer::Done) => Operation::End(Outcome::Marked(on.clone())),
            // A mark may have gone together with what it marked: that is looked for afterwards.
            (Look::Marks(None), Answer::Done) => {
                self.step = Look::Attempts(self.all());
                Operation::ListAttempts(self.ids())
            }
            (Look::Attempts(unseen), Answer::Listed(name)) => {
                match name {
                    Name::Intent(id, _) => unseen.remove(&(Part::Intent, id)),
                    Name::Manifest(id) => unseen.remove(&(Part::Manifest, id)),
                    Name::Data(id) => unseen.remove(&(Part::Data, id)),
                    Name::Mark(..) => false,
                };
                Operation::More
            }
            (Look::Attempts(unseen), Answer::Done) => {
                let missing = unseen.first().map(|(_, id)| Outcome::Missing(id.clone()));
                Operation::End(missing.unwrap_or(Outcome::Acknowledged))
            }
            (Look::Marks(_), Answer::Listed(_)) => Operation::More,
        }
    }
}

/// An attempt to write a backup. One that ends without an acknowledgement leaves what it has put: a
/// copy of it, or one that continues it, may need that. A prune frees it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Attempt<I> {
    id: I,
    step: Step<I>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Step<I> {
    Begin(Confirm<I>),
    Intent(Confirm<I>),
    Refer(Confirm<I>),
    Writing,
    Manifest,
    Publish(Confirm<I>),
}

impl<I: Id> Attempt<I> {
    /// `base`: the backup that it counts from. `continues`: an attempt whose pages it uses.
    pub fn new(id: I, base: Option<I>, continues: Option<I>) -> Self {
        Self { id, step: Step::Begin(Confirm::new(base, continues)) }
    }
}

impl<I: Id> Machine<I> for Attempt<I> {
    fn next(&mut self, answer: Answer<I>) -> Operation<I> {
        match &mut self.step {
            Step::Begin(references) => {
                self.step = Step::Intent(references.clone());
                Operation::PutIntent(self.id.clone())
            }
            Step::Intent(references) => {
                self.step = Step::Refer(references.clone());
                self.next(Answer::Done)
            }
            Step::Refer(references) => match references.next(answer) {
                Operation::End(Outcome::Acknowledged) => {
                    self.step = Step::Writing;
                    Operation::Write
                }
                operation => operation,
            },
            Step::Writing => {
                self.step = Step::Manifest;
                Operation::PutManifest(self.id.clone())
            }
            Step::Manifest => {
                self.step = Step::Publish(Confirm::new([self.id.clone()], None));
                self.next(Answer::Done)
            }
            Step::Publish(own) => own.next(answer),
        }
    }
}
