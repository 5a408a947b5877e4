//! What a process does next: one operation, or several that go together.

use super::super::{Answer, Operation, Part};
use super::{Effect, Object, Point, References, Rule, Running, Search, Who};

impl Search<'_> {
    /// The point of a machine after an operation was done.
    pub(super) fn done(&mut self, me: Who, references: References, mut machine: Running) -> u16 {
        let wants = machine.next(Answer::Done);
        let mut others = Vec::new();
        if !matches!(wants, Operation::End(_)) {
            let mut ahead = machine.clone();
            let mut next = ahead.next(Answer::Done);
            while self.go_together(&wants, &next) {
                others.push(next);
                machine = ahead.clone();
                next = ahead.next(Answer::Done);
            }
        }
        self.number(Point::Running { me, references, machine, wants, others })
    }

    fn go_together(&self, first: &Operation<Who>, next: &Operation<Who>) -> bool {
        let is_broken = self.broken == Some(Rule::Together)
            && matches!((first, next), (Operation::Delete(..), Operation::Delete(..)));
        is_broken || first.goes_with(next)
    }

    pub(super) fn effects(&mut self, point: u16) -> Vec<Effect> {
        if let Some(known) = self.effects.get(&point) {
            return known.clone();
        }
        let Point::Running { me, references, machine, wants, others } =
            self.points[usize::from(point)].clone()
        else {
            unreachable!()
        };
        let all = [vec![wants], others].concat();
        let mut effects = Vec::new();
        for (number, operation) in all.iter().enumerate() {
            let (put, deleted) = self.changes(me, references, operation);
            let mut others = all.clone();
            others.remove(number);
            let machine = machine.clone();
            let next = if others.is_empty() {
                self.done(me, references, machine)
            } else {
                let wants = others.remove(0);
                self.number(Point::Running { me, references, machine, wants, others })
            };
            effects.push(Effect { put, deleted, next });
        }
        self.effects.insert(point, effects.clone());
        effects
    }

    /// The objects that an operation puts and deletes.
    pub(super) fn changes(
        &self,
        me: Who,
        (base, continued): References,
        wants: &Operation<Who>,
    ) -> (u64, u64) {
        match wants {
            Operation::PutIntent(id) => {
                let all = base.into_iter().chain(continued).collect();
                (self.bit(&Object::Intent(*id, all)), 0)
            }
            Operation::Write => (self.bit(&Object::Data(me)), 0),
            Operation::PutManifest(id) => (self.bit(&Object::Manifest(*id)), 0),
            Operation::PutMark(on, by) => (self.bits(|one| *one == Object::Mark(*on, *by)), 0),
            Operation::DeleteMark(on, by) => (0, self.bits(|one| *one == Object::Mark(*on, *by))),
            Operation::Delete(part, id) => {
                let is_early = self.broken == Some(Rule::Last) && *part == Part::Manifest;
                let deleted = self.bits(|object| match object {
                    Object::Intent(one, _) => *part == Part::Intent && one == id,
                    Object::Data(one) => *part == Part::Data && one == id,
                    Object::Manifest(one) => *part == Part::Manifest && one == id,
                    Object::Mark(one, _) => is_early && one == id,
                });
                (0, deleted)
            }
            _ => (0, 0),
        }
    }
}
