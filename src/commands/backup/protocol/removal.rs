//! A prune: marks on all that it wants gone, one look at the repository, and the removal of what
//! nothing else needs.

use std::collections::{BTreeMap, BTreeSet};

use super::{Answer, Id, Machine, Name, Operation, Outcome, Part};

/// What a prune wants.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Plan<I> {
    /// What should go.
    pub targets: BTreeSet<I>,
    /// Of these, attempts that have no manifest as far as the prune knows.
    pub unfinished: BTreeSet<I>,
    pub families: Vec<Family<I>>,
    /// Groups of targets of which either all go or none.
    pub sets: Vec<BTreeSet<I>>,
}

impl<I> Default for Plan<I> {
    fn default() -> Self {
        Self {
            targets: BTreeSet::new(),
            unfinished: BTreeSet::new(),
            families: Vec::new(),
            sets: Vec::new(),
        }
    }
}

/// The backups of a volume, or the slots of a master key: the targets go only if a keeper stays.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Family<I> {
    pub targets: BTreeSet<I>,
    pub keepers: BTreeSet<I>,
}

/// A prune in progress.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Removal<I> {
    /// Whose marks these are.
    me: I,
    plan: Plan<I>,
    step: Step<I>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Step<I> {
    /// Targets that are not marked yet.
    Marking(Vec<I>),
    /// All marks: on what, and whose.
    Marks(BTreeSet<(I, I)>),
    Attempts(Seen<I>),
    /// Operations left, the next one last; and what goes.
    Removing(Vec<Operation<I>>, Vec<I>),
}

/// What the list showed.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Seen<I> {
    marks: BTreeSet<(I, I)>,
    /// With their references.
    intents: BTreeMap<I, BTreeSet<I>>,
    manifests: BTreeSet<I>,
}

impl<I: Id> Removal<I> {
    pub fn new(me: I, plan: Plan<I>) -> Self {
        let targets = plan.targets.iter().rev().cloned().collect();
        Self { me, plan, step: Step::Marking(targets) }
    }
}

impl<I: Id> Machine<I> for Removal<I> {
    fn next(&mut self, answer: Answer<I>) -> Operation<I> {
        match (&mut self.step, answer) {
            (Step::Marking(left), _) => match left.pop() {
                Some(target) => Operation::PutMark(target, self.me.clone()),
                None => {
                    self.step = Step::Marks(BTreeSet::new());
                    Operation::ListMarks(Vec::new())
                }
            },
            (Step::Marks(marks), Answer::Listed(Name::Mark(on, by))) => {
                marks.insert((on, by));
                Operation::More
            }
            // In this order: a mark that has gone took its keeper with it.
            (Step::Marks(marks), Answer::Done) => {
                let marks = std::mem::take(marks);
                let (intents, manifests) = (BTreeMap::new(), BTreeSet::new());
                self.step = Step::Attempts(Seen { marks, intents, manifests });
                Operation::ListAttempts(Vec::new())
            }
            (Step::Attempts(seen), Answer::Listed(name)) => {
                seen.add(&self.plan, name);
                Operation::More
            }
            (Step::Attempts(seen), Answer::Done) => {
                let gone = self.plan.decide(seen, &self.me);
                let generations = referrers_first(gone, &seen.intents);
                let mut operations = deletions(&generations, &self.me);
                operations.extend(seen.stray_marks());
                operations.reverse();
                self.step = Step::Removing(operations, generations.concat());
                self.next(Answer::Done)
            }
            (Step::Removing(left, gone), _) => {
                left.pop().unwrap_or_else(|| Operation::End(Outcome::Removed(gone.clone())))
            }
            (Step::Marks(_), Answer::Listed(_)) => Operation::More,
        }
    }
}

impl<I: Id> Seen<I> {
    fn add(&mut self, plan: &Plan<I>, name: Name<I>) {
        match name {
            Name::Intent(id, references) => {
                self.intents.entry(id).or_default().extend(references);
            }
            Name::Manifest(id)
                if plan.unfinished.contains(&id) || plan.keepers().any(|one| *one == id) =>
            {
                self.manifests.insert(id);
            }
            Name::Manifest(_) | Name::Data(_) | Name::Mark(..) => {}
        }
    }

    /// Marks on what is gone: no attempt refers to that any more, or can.
    fn stray_marks(&self) -> impl Iterator<Item = Operation<I>> {
        let stray = self.marks.iter().filter(|(on, _)| !self.intents.contains_key(on));
        stray.map(|(on, by)| Operation::DeleteMark(on.clone(), by.clone()))
    }

    fn is_marked(&self, id: &I, me: &I) -> bool {
        self.marks.iter().any(|(on, by)| on == id && by != me)
    }

    /// Whether it is a backup: a manifest alone is what a removal left.
    fn exists(&self, id: &I) -> bool {
        self.manifests.contains(id) && self.intents.contains_key(id)
    }
}

impl<I: Id> Plan<I> {
    fn keepers(&self) -> impl Iterator<Item = &I> {
        self.families.iter().flat_map(|family| &family.keepers)
    }

    /// The targets that go. Marks of the others stay: they cost only that no new backup counts from
    /// those.
    fn decide(&self, seen: &Seen<I>, me: &I) -> BTreeSet<I> {
        let mut gone = self.targets.clone();
        gone.retain(|id| !(self.unfinished.contains(id) && seen.exists(id)));
        for family in &self.families {
            let stays = |id: &&I| seen.exists(id) && !seen.is_marked(id, me);
            if !family.keepers.is_empty() && !family.keepers.iter().any(|id| stays(&id)) {
                gone.retain(|id| !family.targets.contains(id));
            }
        }
        loop {
            let before = gone.len();
            for (id, references) in &seen.intents {
                if !gone.contains(id) {
                    gone.retain(|target| !references.contains(target));
                }
            }
            for set in &self.sets {
                if !set.is_subset(&gone) {
                    gone.retain(|id| !set.contains(id));
                }
            }
            if gone.len() == before {
                return gone;
            }
        }
    }
}

/// Generations that do not refer to later ones, so that a prune that is killed leaves no backup
/// without its base. Newer ones go first.
fn referrers_first<I: Id>(
    mut rest: BTreeSet<I>,
    intents: &BTreeMap<I, BTreeSet<I>>,
) -> Vec<Vec<I>> {
    let mut ordered = Vec::new();
    while !rest.is_empty() {
        let referred: BTreeSet<&I> =
            rest.iter().filter_map(|id| intents.get(id)).flatten().collect();
        let mut next: Vec<I> =
            rest.iter().rev().filter(|id| !referred.contains(id)).cloned().collect();
        if next.is_empty() {
            // A circle, which no writer writes.
            next.extend(rest.iter().cloned());
        }
        let begun: BTreeSet<&I> = next.iter().collect();
        rest.retain(|id| !begun.contains(id));
        ordered.push(next);
    }
    ordered
}

fn deletions<I: Id>(generations: &[Vec<I>], me: &I) -> Vec<Operation<I>> {
    let parts = [Part::Manifest, Part::Data, Part::Intent];
    let each = |ids: &Vec<I>, part: Part| {
        ids.iter().map(|id| Operation::Delete(part, id.clone())).collect::<Vec<_>>()
    };
    let deleted = generations.iter().flat_map(|ids| parts.iter().flat_map(|part| each(ids, *part)));
    let all = generations.iter().flatten();
    deleted.chain(all.map(|id| Operation::DeleteMark(id.clone(), me.clone()))).collect()
}
