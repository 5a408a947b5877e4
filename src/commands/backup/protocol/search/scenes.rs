//! What is tried. Backups are B, C (which counts from B), K and L; attempts X and Y; prunes p, q, r.

use std::collections::BTreeSet;

use super::super::{Family, Plan};
use super::{Process, References, Rule, Scene, Search, Who};

const B: Who = 0;
const C: Who = 1;
const K: Who = 2;
const L: Who = 3;
const X: Who = 4;
const Y: Who = 5;
const P: Who = 20;
const Q: Who = 21;
const R: Who = 22;

const FULL: References = (None, None);

const fn from(base: Who) -> References {
    (Some(base), None)
}

const fn after(continued: Who) -> References {
    (None, Some(continued))
}

fn writer(me: Who, choices: &[References]) -> Process {
    Process::Writer { me, choices: choices.to_vec() }
}

fn set(ids: &[Who]) -> BTreeSet<Who> {
    ids.iter().copied().collect()
}

/// A prune that removes backups, and relies on others of their volume.
fn prune(me: Who, targets: &[Who], keepers: &[Who]) -> Process {
    let family = Family { targets: set(targets), keepers: set(keepers) };
    let families = if keepers.is_empty() { Vec::new() } else { vec![family] };
    Process::Prune { me, plan: Plan { targets: set(targets), families, ..Plan::default() } }
}

/// A prune of attempts that look abandoned.
fn collect(me: Who, targets: &[Who]) -> Process {
    let (targets, unfinished) = (set(targets), set(targets));
    Process::Prune { me, plan: Plan { targets, unfinished, ..Plan::default() } }
}

fn scene(
    name: &'static str,
    processes: Vec<Process>,
    backups: &[(Who, Option<Who>)],
    volumes: &[&[Who]],
) -> Scene {
    let volumes = volumes.iter().map(|volume| volume.to_vec()).collect();
    Scene { name, processes, backups: backups.to_vec(), volumes }
}

fn scenes() -> Vec<Scene> {
    let base = [(B, None), (K, None)];
    let set_of_two = |me: Who| Process::Prune {
        me,
        plan: Plan {
            targets: set(&[B, L]),
            families: vec![
                Family { targets: set(&[B]), keepers: set(&[K]) },
                Family { targets: set(&[L]), keepers: set(&[]) },
            ],
            sets: vec![set(&[B, L])],
            ..Plan::default()
        },
    };
    // Small ones first: a broken rule is found there.
    vec![
        scene(
            "a writer and a prune of its base",
            vec![writer(X, &[from(B)]), prune(P, &[B], &[K])],
            &base,
            &[&[B, K]],
        ),
        scene(
            "a copied prune and a writer that counts from its target",
            vec![prune(P, &[B], &[K]), prune(P, &[B], &[K]), writer(X, &[from(B)])],
            &base,
            &[&[B, K]],
        ),
        scene(
            "a set is removed as a whole while a writer counts from a member",
            vec![writer(X, &[from(B), from(L)]), set_of_two(P), prune(Q, &[K], &[B])],
            &[(B, None), (K, None), (L, None)],
            &[&[B, K]],
        ),
        scene(
            "two prunes that each keep what the other removes, and a writer",
            vec![writer(X, &[FULL, from(B), from(K)]), prune(P, &[B], &[K]), prune(Q, &[K], &[B])],
            &base,
            &[&[B, K]],
        ),
        scene(
            "three prunes in a ring",
            vec![prune(P, &[B], &[K]), prune(Q, &[K], &[L]), prune(R, &[L], &[B])],
            &[(B, None), (K, None), (L, None)],
            &[&[B, K, L]],
        ),
        scene(
            "a copied writer, a prune of its attempt, and a reader that finds it",
            vec![
                writer(X, &[from(B)]),
                writer(X, &[from(B)]),
                collect(P, &[X]),
                Process::Reader { of: X },
            ],
            &[(B, None)],
            &[&[B]],
        ),
        scene(
            "two bases are pruned together while a writer adds to each",
            vec![writer(X, &[from(B)]), writer(Y, &[from(C)]), prune(P, &[B, C], &[K])],
            &[(B, None), (C, None), (K, None)],
            &[&[B, C, K, X, Y]],
        ),
        scene(
            "a chain is pruned while a writer adds to it",
            vec![
                writer(X, &[from(B), from(C), from(K)]),
                prune(P, &[B, C], &[K]),
                prune(Q, &[C], &[K]),
            ],
            &[(B, None), (C, Some(B)), (K, None)],
            &[&[B, C, K, X]],
        ),
        scene(
            "a prune of an attempt, a prune of its base, and a writer that counts from it",
            vec![
                writer(X, &[from(B)]),
                writer(Y, &[from(X), from(B)]),
                collect(P, &[X]),
                prune(Q, &[B], &[K]),
            ],
            &base,
            &[&[B, K, X, Y]],
        ),
        scene(
            "a prune relies on an attempt that looks abandoned to another",
            vec![
                writer(X, &[FULL, from(K)]),
                prune(P, &[B], &[X]),
                collect(Q, &[X]),
                prune(R, &[K], &[B]),
            ],
            &base,
            &[&[B, K, X]],
        ),
        scene(
            "two writers and two prunes of their base",
            vec![
                writer(X, &[FULL, from(B)]),
                writer(Y, &[from(B), from(X)]),
                prune(P, &[B], &[K]),
                prune(Q, &[B], &[K]),
            ],
            &base,
            &[&[B, K, X, Y]],
        ),
        scene(
            "an attempt is continued and pruned, and continues",
            vec![
                writer(X, &[FULL, from(B)]),
                writer(Y, &[after(X), (Some(B), Some(X))]),
                collect(P, &[X]),
                prune(Q, &[B], &[K]),
            ],
            &base,
            &[&[B, K, X, Y]],
        ),
        scene(
            "two attempts, of which one continues the other, look abandoned",
            vec![
                writer(X, &[from(B)]),
                writer(Y, &[(Some(B), Some(X))]),
                collect(P, &[X]),
                collect(Q, &[X, Y]),
            ],
            &[(B, None)],
            &[&[B]],
        ),
    ]
}

#[test]
fn no_order_of_steps_loses_a_backup_or_leaks() {
    let mut all = 0;
    for scene in scenes() {
        let begun = std::time::Instant::now();
        let (states, wrong) = Search::new(&scene, None).explore();
        eprintln!("{}: {states} states, {:.1} s", scene.name, begun.elapsed().as_secs_f64());
        assert_eq!(wrong, None, "{}", scene.name);
        all += states;
    }
    eprintln!("{all} states");
    assert!(all > 250_000, "{all} states");
}

#[test]
fn each_broken_rule_of_the_protocol_is_found() {
    use Rule::*;
    let rules =
        [Refer, Exist, Order, Publish, List, Owners, Keepers, Spare, Stay, Last, Sets, Together];
    for rule in rules {
        let found = scenes().iter().find_map(|scene| {
            let (states, wrong) = Search::new(scene, Some(rule)).explore();
            wrong.map(|wrong| (scene.name, states, wrong))
        });
        eprintln!("{rule:?}: {found:?}");
        assert!(found.is_some(), "{rule:?} broken is not found");
    }
}
