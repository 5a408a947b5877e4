//! Every interleaving of writers and prunes, tried with the machines of production. A state is the
//! store and how far each process is; every process may stop for good in every state, continue at
//! any later time, or be a copy of another one.
//!
//! A list returns names one at a time, each looked up at some time between its begin and its end:
//! what existed all the time is returned, what came or went meanwhile may be or may not be. A list
//! begins right after the operation before it, which allows all that a later begin allows.
//! Operations that go together are done in every order.

mod checks;
mod operations;
mod scenes;

use std::collections::{HashMap, HashSet, VecDeque};

use super::{Answer, Attempt, Confirm, Machine, Name, Operation, Outcome, Plan, Removal};

/// An attempt or a prune.
type Who = u8;

type Object = Name<Who>;

/// What an attempt may refer to: a base, and an attempt that it continues.
type References = (Option<Who>, Option<Who>);

/// A rule to break.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// An attempt looks for marks on its references.
    Refer,
    /// After that, for the references themselves.
    Exist,
    /// And not the other way round.
    Order,
    /// A writer looks for marks on itself before it acknowledges.
    Publish,
    /// A prune lists intents after its marks.
    List,
    /// Marks have owners.
    Owners,
    /// A prune relies on keepers that no other prune wants gone.
    Keepers,
    /// An unfinished attempt that has a manifest is spared.
    Spare,
    /// Marks are not taken back.
    Stay,
    /// Marks go after the intents.
    Last,
    /// A set goes as a whole.
    Sets,
    /// Parts of an attempt are not removed together.
    Together,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Running {
    Attempt(Attempt<Who>),
    Removal(Removal<Who>),
    Confirm(Confirm<Who>),
}

impl Running {
    fn next(&mut self, answer: Answer<Who>) -> Operation<Who> {
        match self {
            Self::Attempt(machine) => machine.next(answer),
            Self::Removal(machine) => machine.next(answer),
            Self::Confirm(machine) => machine.next(answer),
        }
    }
}

/// A process at one point: its machine and what that wants.
// Most points run, so a box would only add an allocation to each state.
#[expect(clippy::large_enum_variant)]
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Point {
    Choose(usize),
    Running {
        me: Who,
        references: References,
        /// After it wanted all of these.
        machine: Running,
        wants: Operation<Who>,
        /// What goes together with that, and is not done yet.
        others: Vec<Operation<Who>>,
    },
}

/// What an operation does: the objects that it puts and deletes, and the next point.
#[derive(Debug, Clone, Copy)]
struct Effect {
    put: u64,
    deleted: u64,
    next: u16,
}

#[derive(Debug, Clone)]
enum Process {
    Writer {
        me: Who,
        choices: Vec<References>,
    },
    Prune {
        me: Who,
        plan: Plan<Who>,
    },
    /// "Exists already".
    Reader {
        of: Who,
    },
}

struct Scene {
    name: &'static str,
    processes: Vec<Process>,
    /// Backups that were acknowledged, with their bases.
    backups: Vec<(Who, Option<Who>)>,
    /// Of each of these, one must be left.
    volumes: Vec<Vec<Who>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
struct At {
    point: u16,
    /// Of a list: what existed all the time, and what existed at some time.
    must: u64,
    may: u64,
    /// Of the first of two lists, if [`Rule::Order`] is broken: what existed then.
    early: u64,
    /// A prune has decided to remove what this process is about to acknowledge.
    is_overtaken: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    store: u64,
    acknowledged: u16,
    processes: [At; 4],
}

struct Search<'s> {
    scene: &'s Scene,
    broken: Option<Rule>,
    objects: Vec<Object>,
    points: Vec<Point>,
    /// Of each point: what its list may return.
    masks: Vec<u64>,
    /// Of each point: one for each operation that may be done first.
    effects: HashMap<u16, Vec<Effect>>,
    numbers: HashMap<Point, u16>,
    /// The point after a list with this result.
    listed: HashMap<(u16, u64), u16>,
    /// Stores without a leak.
    freed: HashSet<(u64, u16)>,
}

impl<'s> Search<'s> {
    fn new(scene: &'s Scene, broken: Option<Rule>) -> Self {
        let mut search = Self {
            scene,
            broken,
            objects: Vec::new(),
            points: Vec::new(),
            masks: Vec::new(),
            effects: HashMap::new(),
            numbers: HashMap::new(),
            listed: HashMap::new(),
            freed: HashSet::new(),
        };
        for (id, base) in &scene.backups {
            search.objects.push(Object::Intent(*id, base.iter().copied().collect()));
            search.objects.extend([Object::Data(*id), Object::Manifest(*id)]);
        }
        for process in &scene.processes {
            match process {
                Process::Writer { me, choices } => {
                    for (base, continued) in choices {
                        let all = base.iter().chain(continued).copied().collect();
                        search.objects.push(Object::Intent(*me, all));
                    }
                    search.objects.extend([Object::Data(*me), Object::Manifest(*me)]);
                }
                Process::Prune { me, plan } => {
                    let owner = search.owner(*me);
                    search.objects.extend(plan.targets.iter().map(|on| Object::Mark(*on, owner)));
                }
                Process::Reader { .. } => {}
            }
        }
        let mut seen = HashSet::new();
        search.objects.retain(|object| seen.insert(object.clone()));
        assert!(search.objects.len() <= 64, "{}", scene.name);
        search
    }

    fn owner(&self, me: Who) -> Who {
        if self.broken == Some(Rule::Owners) { 99 } else { me }
    }

    fn bits(&self, which: impl Fn(&Object) -> bool) -> u64 {
        let bit = |(number, object): (usize, &Object)| u64::from(which(object)) << number;
        self.objects.iter().enumerate().map(bit).fold(0, |all, one| all | one)
    }

    fn bit(&self, object: &Object) -> u64 {
        let bit = self.bits(|other| other == object);
        assert!(bit != 0, "{object:?}");
        bit
    }

    fn number(&mut self, point: Point) -> u16 {
        if let Some(number) = self.numbers.get(&point) {
            return *number;
        }
        let number = u16::try_from(self.points.len()).unwrap();
        let wants = match &point {
            Point::Running { wants, .. } => wants,
            Point::Choose(_) => &Operation::More,
        };
        self.masks.push(self.mask(wants));
        self.points.push(point.clone());
        self.numbers.insert(point, number);
        number
    }

    fn start(&mut self) -> State {
        let known: HashSet<Who> = self.scene.backups.iter().map(|(id, _)| *id).collect();
        let mut processes = [At::default(); 4];
        for (number, _) in self.scene.processes.iter().enumerate() {
            processes[number].point = self.number(Point::Choose(number));
        }
        State {
            store: self.bits(|object| match object {
                Object::Intent(id, _) | Object::Data(id) | Object::Manifest(id) => {
                    known.contains(id)
                }
                Object::Mark(..) => false,
            }),
            acknowledged: known.iter().fold(0, |all, id| all | 1 << id),
            processes,
        }
    }

    /// What a list of this operation may return.
    fn mask(&self, wants: &Operation<Who>) -> u64 {
        let named = |ids: &[Who], id: &Who| ids.is_empty() || ids.contains(id);
        match wants {
            Operation::ListMarks(ids) => {
                self.bits(|object| matches!(object, Object::Mark(on, _) if named(ids, on)))
            }
            Operation::ListAttempts(ids) => self.bits(|object| match object {
                Object::Intent(id, _) | Object::Manifest(id) => named(ids, id),
                // A prune does not need to know.
                Object::Data(id) => !ids.is_empty() && named(ids, id),
                Object::Mark(..) => false,
            }),
            _ => 0,
        }
    }

    /// A process that arrives at a point. A list begins there.
    fn at(&self, point: u16, store: u64, early: u64) -> At {
        let Point::Running { wants, .. } = &self.points[usize::from(point)] else {
            return At { point, ..At::default() };
        };
        let must = store & self.masks[usize::from(point)];
        let early = match (self.broken, wants) {
            (Some(Rule::Order), Operation::ListMarks(_)) => store,
            (_, Operation::ListAttempts(_)) => early,
            _ => 0,
        };
        At { point, must, may: 0, early, is_overtaken: false }
    }

    fn explore(&mut self) -> (usize, Option<String>) {
        let first = self.start();
        let mut seen = HashSet::from([first.clone()]);
        let mut queue = VecDeque::from([first]);
        while let Some(state) = queue.pop_front() {
            if let Some(wrong) = self.wrong(&state) {
                return (seen.len(), Some(wrong));
            }
            for process in 0..self.scene.processes.len() {
                let next = match self.step(&state, process) {
                    Ok(next) => next,
                    Err(wrong) => return (seen.len(), Some(wrong)),
                };
                for state in next {
                    if !seen.contains(&state) {
                        seen.insert(state.clone());
                        queue.push_back(state);
                    }
                }
            }
        }
        (seen.len(), None)
    }

    fn step(&mut self, state: &State, process: usize) -> Result<Vec<State>, String> {
        let at = state.processes[process];
        let with = |new: At, store: u64| {
            let mut next = state.clone();
            next.store = store;
            next.processes[process] = new;
            next
        };
        match &self.points[usize::from(at.point)] {
            Point::Choose(_) => {
                let starts = self.starts(process, state.store);
                let start = |point| with(self.at(point, state.store, 0), state.store);
                return Ok(starts.into_iter().map(start).collect());
            }
            Point::Running {
                wants: Operation::ListMarks(_) | Operation::ListAttempts(_), ..
            } => return self.end_of_list(state, process),
            Point::Running { wants: Operation::End(_), .. } => return Ok(Vec::new()),
            Point::Running { .. } => {}
        }
        let mut all = Vec::new();
        for Effect { put, deleted, next } in self.effects(at.point) {
            let store = (state.store | put) & !deleted;
            let mut next = with(self.at(next, store, at.early), store);
            self.show(process, state.store ^ store, &mut next);
            all.push(next);
        }
        Ok(all)
    }

    /// What a change is to the lists of other processes.
    fn show(&self, process: usize, changed: u64, state: &mut State) {
        for (number, other) in state.processes.iter_mut().enumerate() {
            if number != process {
                let changed = changed & self.masks[usize::from(other.point)];
                other.must &= !changed;
                other.may |= changed;
            }
        }
    }

    fn starts(&mut self, process: usize, store: u64) -> Vec<u16> {
        let none = (None, None);
        match self.scene.processes[process].clone() {
            Process::Writer { me, choices } => {
                let mut starts = Vec::new();
                for (base, continued) in choices {
                    // Only an attempt that has pages is continued.
                    if continued.is_none_or(|one| store & self.bit(&Object::Data(one)) != 0) {
                        let machine = Running::Attempt(Attempt::new(me, base, continued));
                        starts.push(self.done(me, (base, continued), machine));
                    }
                }
                starts
            }
            Process::Prune { me, mut plan } => {
                // A prune marks only what it has seen, and relies on backups.
                let is_seen = |id: &Who| {
                    let own =
                        |object: &Object| matches!(object, Object::Intent(one, _) if one == id);
                    store & self.bits(own) != 0
                };
                let mut keepers = plan.families.iter().flat_map(|family| &family.keepers);
                let is_planned = plan.targets.iter().all(is_seen)
                    && keepers.all(|id| store & self.bit(&Object::Manifest(*id)) != 0);
                if !is_planned {
                    return Vec::new();
                }
                match self.broken {
                    Some(Rule::Keepers) => plan.families.clear(),
                    Some(Rule::Spare) => plan.unfinished.clear(),
                    Some(Rule::Sets) => plan.sets.clear(),
                    _ => {}
                }
                let me = self.owner(me);
                vec![self.done(me, none, Running::Removal(Removal::new(me, plan)))]
            }
            // A reader has seen the manifest.
            Process::Reader { of } if store & self.bit(&Object::Manifest(of)) == 0 => Vec::new(),
            Process::Reader { of } => {
                vec![self.done(of, none, Running::Confirm(Confirm::new([of], None)))]
            }
        }
    }

    /// All states after the end of a list: one for each result that makes a difference.
    fn end_of_list(&mut self, state: &State, process: usize) -> Result<Vec<State>, String> {
        let at = state.processes[process];
        let mask = self.masks[usize::from(at.point)];
        let is_early = self.broken == Some(Rule::Order)
            && matches!(
                &self.points[usize::from(at.point)],
                Point::Running { wants: Operation::ListAttempts(_), .. }
            );
        let mut points = HashSet::new();
        let mut may = at.may;
        loop {
            // What existed early stands for what exists now.
            let result = if is_early { at.early & mask } else { at.must | may };
            points.insert(self.after_list(at.point, result));
            if may == 0 {
                break;
            }
            may = (may - 1) & at.may;
        }
        let mut next = Vec::new();
        for point in points {
            let mut new = state.clone();
            self.decided(state, process, point, &mut new)?;
            let Point::Running { wants: wanted, .. } = &self.points[usize::from(point)] else {
                continue;
            };
            let is_overtaken = new.processes[process].is_overtaken;
            if *wanted == Operation::End(Outcome::Acknowledged)
                && let Some(id) = self.acknowledges(process)
                && !is_overtaken
            {
                new.acknowledged |= 1 << id;
            }
            new.processes[process] = self.at(point, new.store, at.early);
            self.show(process, state.store ^ new.store, &mut new);
            next.push(new);
        }
        Ok(next)
    }

    fn acknowledges(&self, process: usize) -> Option<Who> {
        match self.scene.processes[process] {
            Process::Writer { me, .. } => Some(me),
            Process::Reader { of } => Some(of),
            Process::Prune { .. } => None,
        }
    }

    /// The point of a process after a list with this result.
    fn after_list(&mut self, point: u16, result: u64) -> u16 {
        if let Some(known) = self.listed.get(&(point, result)) {
            return *known;
        }
        let Point::Running { me, references, mut machine, wants, .. } =
            self.points[usize::from(point)].clone()
        else {
            unreachable!()
        };
        let result = self.as_broken(me, &machine, &wants, result);
        self.feed(result, |name| {
            assert_eq!(machine.next(Answer::Listed(name)), Operation::More);
        });
        let next = self.done(me, references, machine);
        self.listed.insert((point, result), next);
        next
    }

    /// The result of a list for a process that breaks a rule.
    fn as_broken(&self, me: Who, machine: &Running, wants: &Operation<Who>, result: u64) -> u64 {
        let is_prune = matches!(machine, Running::Removal(_));
        let is_own = |ids: &[Who]| ids == [me];
        match (self.broken, wants) {
            (Some(Rule::Refer), Operation::ListMarks(ids)) if !is_prune && !is_own(ids) => 0,
            (Some(Rule::Publish), Operation::ListMarks(ids)) if !is_prune && is_own(ids) => 0,
            (Some(Rule::Exist), Operation::ListAttempts(_)) if !is_prune => self.mask(wants),
            (Some(Rule::List), Operation::ListAttempts(_)) if is_prune => 0,
            _ => result,
        }
    }

    /// Names of a list, one at a time.
    fn feed(&self, result: u64, mut each: impl FnMut(Name<Who>)) {
        for (number, object) in self.objects.iter().enumerate() {
            if result >> number & 1 == 1 {
                each(object.clone());
            }
        }
    }

    /// Notes what a prune has decided to remove.
    fn decided(
        &self,
        state: &State,
        process: usize,
        point: u16,
        new: &mut State,
    ) -> Result<(), String> {
        let Process::Prune { me, plan } = &self.scene.processes[process] else { return Ok(()) };
        let before = &self.points[usize::from(state.processes[process].point)];
        let Point::Running { wants: Operation::ListAttempts(_), .. } = before else {
            return Ok(());
        };
        let Point::Running { machine, wants, .. } = &self.points[usize::from(point)] else {
            return Ok(());
        };
        let (mut machine, mut wants) = (machine.clone(), wants.clone());
        let gone = loop {
            match wants {
                Operation::End(Outcome::Removed(gone)) => break gone,
                _ => wants = machine.next(Answer::Done),
            }
        };
        for set in &plan.sets {
            let count = set.iter().filter(|id| gone.contains(id)).count();
            if count != 0 && count != set.len() {
                return Err(format!("{me} removes a part of the set {set:?}"));
            }
        }
        for id in &gone {
            if plan.unfinished.contains(id) && state.acknowledged >> id & 1 == 1 {
                return Err(format!("{id} is acknowledged, and removed as unfinished"));
            }
            new.acknowledged &= !(1 << id);
            for (number, other) in new.processes.iter_mut().enumerate() {
                let Point::Running { wants, .. } = &self.points[usize::from(other.point)] else {
                    continue;
                };
                if number < self.scene.processes.len()
                    && self.acknowledges(number) == Some(*id)
                    && *wants == Operation::ListAttempts(vec![*id])
                    && !plan.unfinished.contains(id)
                {
                    other.is_overtaken = true;
                }
            }
        }
        // The rule is broken by taking marks back.
        if self.broken == Some(Rule::Stay) {
            let owner = self.owner(*me);
            for id in plan.targets.iter().filter(|id| !gone.contains(id)) {
                new.store &= !self.bit(&Object::Mark(*id, owner));
            }
        }
        Ok(())
    }
}
