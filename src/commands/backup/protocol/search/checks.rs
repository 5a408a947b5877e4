//! What must hold in every state.

use std::collections::{BTreeSet, HashSet};

use super::super::{Answer, Machine, Operation, Plan, Removal};
use super::{Object, Search, State, Who};

impl Search<'_> {
    /// All that a backup needs, with itself; `None` if it cannot be restored.
    fn needs(&self, store: u64, id: Who) -> Option<Vec<Who>> {
        let (mut all, mut at) = (vec![id], 0);
        while let Some(id) = all.get(at).copied() {
            at += 1;
            let mut references = None;
            for (number, object) in self.objects.iter().enumerate() {
                match object {
                    Object::Intent(one, refs) if *one == id && store >> number & 1 == 1 => {
                        references.get_or_insert_with(Vec::new).extend(refs.clone());
                    }
                    Object::Data(one) if *one == id && store >> number & 1 == 0 => return None,
                    Object::Manifest(one) if *one == id && at == 1 && store >> number & 1 == 0 => {
                        return None;
                    }
                    _ => {}
                }
            }
            for reference in references? {
                if !all.contains(&reference) {
                    all.push(reference);
                }
            }
        }
        Some(all)
    }

    pub(super) fn wrong(&mut self, state: &State) -> Option<String> {
        let (store, acknowledged) = (state.store, state.acknowledged);
        if self.freed.contains(&(store, acknowledged)) {
            return None;
        }
        let mut kept = HashSet::new();
        for id in (0..16).filter(|id| acknowledged >> id & 1 == 1) {
            let Some(needed) = self.needs(store, id) else {
                return Some(format!("{id} is acknowledged and cannot be restored"));
            };
            kept.extend(needed);
        }
        for (id, _) in &self.scene.backups {
            let is_shown = store & self.bits(|object| *object == Object::Manifest(*id)) != 0;
            if is_shown && self.needs(store, *id).is_none() {
                return Some(format!("a killed prune leaves {id}, which cannot be restored"));
            }
        }
        for volume in &self.scene.volumes {
            if !volume.iter().any(|id| self.needs(store, *id).is_some()) {
                return Some(format!("no backup of the volume of {volume:?} is left"));
            }
        }
        let left = self.after_lone_prunes(store, &kept);
        if left != 0 {
            let all = self.objects.iter().enumerate();
            let left: Vec<_> = all.filter(|(number, _)| left >> number & 1 == 1).collect();
            return Some(format!("never freed: {left:?}"));
        }
        self.freed.insert((store, acknowledged));
        None
    }

    /// What prunes leave that run alone, one after the other, of what no acknowledged backup needs.
    fn after_lone_prunes(&self, mut store: u64, kept: &HashSet<Who>) -> u64 {
        let free = self.bits(|object| match object {
            Object::Intent(id, _)
            | Object::Data(id)
            | Object::Manifest(id)
            | Object::Mark(id, _) => !kept.contains(id),
        });
        for _ in 0..2 {
            let mut targets = BTreeSet::new();
            for (number, object) in self.objects.iter().enumerate() {
                if let Object::Intent(id, _) | Object::Data(id) | Object::Manifest(id) = object
                    && (store & free) >> number & 1 == 1
                {
                    targets.insert(*id);
                }
            }
            let mut machine = Removal::new(98, Plan { targets, ..Plan::default() });
            let mut wants = machine.next(Answer::Done);
            while !matches!(wants, Operation::End(_)) {
                self.feed(store & self.mask(&wants), |name| {
                    machine.next(Answer::Listed(name));
                });
                let (put, deleted) = self.changes(98, (None, None), &wants);
                store = (store | put) & !deleted;
                wants = machine.next(Answer::Done);
            }
        }
        store & free
    }
}
