//! Kills the driver, or injects an error, between any two steps. Volumes in use must continue to
//! work, and the call must converge when it is repeated after the next start.
//!
//! Fail points are in the source between steps that change disk, catalog or kernel
//! (src/common/fail_point.rs). A scenario is a call with its preconditions and postconditions. It runs
//! once to find the fail points that it meets, and then once for each of them.
//!
//!     CRASH_POOLS=all      test every point of every scenario on every kind of pool, including
//!                          points within commits of the catalog. By default half of the points of
//!                          image pools and fewer of others are tested, depending on the seed.
//!     CRASH_SAMPLE=N       test one in N of the default points (1).
//!     CRASH_SEED=N         seed of the sample; the default is the date.
//!     CRASH_ONLY=NAME      run only scenarios whose name contains NAME.
//!     CRASH_WORKERS=N      number of parallel scenarios (3).

mod bases;
mod catalog;
mod deferred;
mod freeze_guard;
mod harness;
mod inline;
mod inline_content;
mod node;
mod node_proxy;
mod oci_runtime;
mod pool;
mod runtime_ops;
mod snapshots;
mod source;
mod volumes;

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use csi_loopback::backend::PoolKind;
use deferred::{Call as DeferredCall, Deferred};
use harness::{ALL, PAGES, Play, STEPS, Scenario, Scene};
use inline::OnPod;
use inline_content::{Call as ContentCall, InlineContent};
use node::{Call, OnNode};
use support::driver::{Freeze, block};
use support::{ALL_KINDS, MIB, have_root};

/// A scenario with its name and the flags of its driver.
struct Entry {
    name: &'static str,
    flags: &'static [&'static str],
    make: fn() -> Box<dyn Scenario>,
}

macro_rules! entries {
    ($($name:literal $([$flags:expr])? => $make:expr,)*) => {
        &[$(Entry { name: $name, flags: entries!(@ $($flags)?), make: || Box::new($make) },)*]
    };
    (@) => { &[] };
    (@ $flags:expr) => { &$flags };
}

/// The longest first, so that none of them runs alone at the end.
const ENTRIES: &[Entry] = entries! {
    "snapshot group" => snapshots::TakeGroup::default(),
    "forget an id" [snapshots::Forget::FLAGS] => snapshots::Forget::new(snapshots::Dropped::Id),
    "forget a record" [snapshots::Forget::FLAGS] => snapshots::Forget::new(snapshots::Dropped::Record),
    "forget a released base" => snapshots::Forget::new(snapshots::Dropped::Released),
    "stage larger" => OnNode::new(Call::StageLarger("ext4")),
    "stage a larger xfs" => OnNode::new(Call::StageLarger("xfs")),
    "stage a larger btrfs" => OnNode::new(Call::StageLarger("btrfs")),
    "stage new" => OnNode::new(Call::StageNew),
    "pressure" [snapshots::Pressure::FLAGS] => snapshots::Pressure::default(),
    "grow the pool" [pool::Grow::FLAGS] => pool::Grow::default(),
    "stage damaged" => OnNode::new(Call::StageDamaged),
    "snapshot mounted" => snapshots::TakeMounted::default(),
    "snapshot raw" => snapshots::TakeRaw::default(),
    "clone mounted" => volumes::CloneMounted::default(),
    "delete a group" => snapshots::DeleteGroup::default(),
    "delete a volume" => volumes::Delete::default(),
    "create from a snapshot" => volumes::CreateFromSnapshot::default(),
    "create" => volumes::CreateEmpty::default(),
    "delete a snapshot" => snapshots::DeleteSnapshot::default(),
    "keep a base" => bases::Keep::default(),
    "delete the last snapshot" => snapshots::DeleteLastSnapshot::default(),
    "expand" => volumes::Expand::default(),
    "expand on the node" => OnNode::new(Call::Expand),
    "tracking off" => volumes::TrackingOff::default(),
    "tracking on" => volumes::TrackingOn::default(),
    "stage raw" => OnNode::new(Call::StageRaw),
    "stage a busy device" => OnNode::new(Call::StageBusy),
    "publish to a group" => OnNode::new(Call::PublishToGroup),
    "publish read-only" => OnNode::new(Call::PublishReadOnly),
    "publish raw read-only" => OnNode::new(Call::PublishRawReadOnly),
    "unpublish" => OnNode::new(Call::Unpublish),
    "unpublish raw read-only" => OnNode::new(Call::UnpublishRawReadOnly),
    "unstage" => OnNode::new(Call::Unstage),
    "unstage read-only" => OnNode::new(Call::UnstageReadOnly),
    "reboot" => OnNode::new(Call::Reboot),
    "inline: publish with xfs" => OnPod::new(inline::Call::Publish("xfs")),
    "inline: publish with btrfs" => OnPod::new(inline::Call::Publish("btrfs")),
    "inline: publish read-only" => OnPod::new(inline::Call::ReadOnly),
    "inline: publish to a group" => OnPod::new(inline::Call::ToGroup),
    "inline: publish" => OnPod::new(inline::Call::Publish("")),
    "inline: publish again after a reboot" => OnPod::new(inline::Call::RepeatAfterReboot),
    "inline: publish again" => OnPod::new(inline::Call::Repeat),
    "inline: content refreshed" => InlineContent::new(ContentCall::Refresh),
    "inline: content" => InlineContent::new(ContentCall::Publish),
    "inline: first files" => InlineContent::new(ContentCall::Seed),
    "inline: content unpublished" => InlineContent::new(ContentCall::Unpublish),
    "inline: unpublish" => OnPod::new(inline::Call::Unpublish),
    "inline: unpublish after a reboot" => OnPod::new(inline::Call::UnpublishAfterReboot),
    "deferred: stage larger" [deferred::FLAGS] => Deferred::new(DeferredCall::StageLarger),
    "deferred: snapshot" [deferred::FLAGS] => Deferred::new(DeferredCall::Snapshot),
    "deferred: inline" [deferred::FLAGS] => Deferred::new(DeferredCall::PublishInline),
    "deferred: inline unpublish" [deferred::FLAGS] => Deferred::new(DeferredCall::UnpublishInline),
    "deferred: start with leftovers" [deferred::FLAGS] => Deferred::new(DeferredCall::Leftovers),
    "deferred: expand" [deferred::FLAGS] => Deferred::new(DeferredCall::Expand),
    "deferred: publish" [deferred::FLAGS] => Deferred::new(DeferredCall::Publish),
    "deferred: publish on the host" [deferred::FLAGS] => Deferred::new(DeferredCall::PublishOnHost),
    "deferred: reboot" [deferred::FLAGS] => Deferred::new(DeferredCall::Reboot),
    "deferred: unpublish" [deferred::FLAGS] => Deferred::new(DeferredCall::Unpublish),
    "inline: start with leftovers" => OnPod::new(inline::Call::Leftovers),
};

/// Scenarios whose call is a start of the driver.
const STARTS: [&str; 4] = [
    "reboot",
    "inline: start with leftovers",
    "deferred: start with leftovers",
    "deferred: reboot",
];

fn everything() -> bool {
    std::env::var("CRASH_POOLS").is_ok_and(|pools| pools == "all")
}

fn number(variable: &str) -> Option<usize> {
    std::env::var(variable).ok()?.parse().ok()
}

fn seed() -> usize {
    let today = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() / 86_400;
    number("CRASH_SEED").unwrap_or_else(|| today() as usize)
}

/// Whether an index is in a sample of one in `every`. Always true if all are requested.
fn sampled(index: usize, every: usize) -> bool {
    let thinned = every * number("CRASH_SAMPLE").unwrap_or(1);
    everything() || (index + seed()).is_multiple_of(thinned)
}

/// Runs `run` for each kind and scenario, some in parallel. Fails with all failures.
fn for_each_scenario(
    wanted: impl Fn(PoolKind, &Entry) -> bool,
    run: impl Fn(PoolKind, &Entry) -> usize + Sync,
) {
    if !have_root() {
        return;
    }
    let only = std::env::var("CRASH_ONLY").unwrap_or_default();
    let mut tasks = Vec::new();
    for kind in [PoolKind::Image, PoolKind::Reflink, PoolKind::Copy] {
        let entries =
            ENTRIES.iter().filter(|entry| entry.name.contains(&only) && wanted(kind, entry));
        tasks.extend(entries.map(|entry| (kind, entry)));
    }
    let (next, rounds, failures) =
        (AtomicUsize::new(0), AtomicUsize::new(0), Mutex::new(Vec::new()));
    let begun = Instant::now();
    let work = || {
        while let Some((kind, entry)) = tasks.get(next.fetch_add(1, Ordering::Relaxed)) {
            let started = Instant::now();
            match catch_unwind(AssertUnwindSafe(|| run(*kind, entry))) {
                Ok(count) => {
                    rounds.fetch_add(count, Ordering::Relaxed);
                    println!("{kind}: {}: {count} rounds in {:.1?}", entry.name, started.elapsed());
                }
                Err(panic) => {
                    let why = support::panic_text(&*panic);
                    failures.lock().unwrap().push(format!("{kind}: {}: {why}", entry.name));
                }
            }
        }
    };
    thread::scope(|scope| {
        let workers = number("CRASH_WORKERS").unwrap_or(3);
        let threads: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "failed, see above: {failures:?}");
    support::report(&format!(
        "{} rounds in {:.0?}, seed {}",
        rounds.into_inner(),
        begun.elapsed(),
        seed()
    ));
}

/// The fail points of the call itself.
fn own(met: &[String], scenario: &dyn Scenario) -> usize {
    let last = |name: &str| met.iter().rposition(|point| point == name).expect(name);
    scenario.begins_after().map_or(0, |name| last(name) + 1)
}

/// Only an image pool has its own space, and only its image can grow.
fn fits(kind: PoolKind, entry: &Entry) -> bool {
    kind == PoolKind::Image || !["pressure", "grow the pool"].contains(&entry.name)
}

/// Whether a call meets the same fail points each time. On a copy pool, the points of copying a
/// mounted volume depend on what the filesystem has written.
fn is_exact(kind: PoolKind) -> bool {
    kind != PoolKind::Copy
}

/// Interrupts a scenario at one in `every` of its fail points with these names. `interrupt` plays
/// the index of a point, given all of them, and returns the number of its rounds.
fn at_each_point(
    (kind, entry): (PoolKind, &Entry),
    names: &str,
    every: usize,
    mut interrupt: impl FnMut(&mut Play<'_>, usize, &[String]) -> usize,
) -> usize {
    let mut scenario = (entry.make)();
    let mut play = Play::new(Scene::start(kind, entry.flags), scenario.as_mut());
    let met = play.learn(names);
    let first = if names == STEPS { own(&met, play.scenario) } else { 0 };
    let mut rounds = 0;
    for at in (first..met.len()).filter(|at| sampled(*at, every)) {
        println!("{kind}: {}: interrupted at {} of {}, {}", entry.name, at + 1, met.len(), met[at]);
        rounds += interrupt(&mut play, at, &met);
    }
    play.end();
    rounds
}

#[test]
fn a_call_converges_after_a_kill_at_any_point() {
    for_each_scenario(fits, |kind, entry| {
        // Another day has the others; `hack/soak.sh` runs all.
        let every = if kind == PoolKind::Image { 2 } else { 8 };
        at_each_point((kind, entry), STEPS, every, |play, at, met| {
            if !play.die_at(at + 1, STEPS, is_exact(kind).then_some(met)) {
                return 0;
            }
            play.converge(sampled(at, 3));
            1
        })
    });
}

#[test]
fn a_kill_within_a_commit_leaves_the_old_or_new_catalog() {
    let wanted =
        |kind, entry: &Entry| fits(kind, entry) && (everything() || kind == PoolKind::Image);
    for_each_scenario(wanted, |kind, entry| {
        at_each_point((kind, entry), PAGES, 4, |play, at, _| {
            // Their number depends on redb and on the contents of the catalog.
            if !play.die_at(at + 1, PAGES, None) {
                return 0;
            }
            play.converge(everything());
            1
        })
    });
}

#[test]
#[ignore = "full tier"]
fn a_driver_killed_during_each_start_recovers() {
    let wanted = |kind, entry: &Entry| {
        fits(kind, entry)
            && (everything() || kind == PoolKind::Image)
            && !STARTS.contains(&entry.name)
    };
    for_each_scenario(wanted, |kind, entry| {
        let (mut settles_from, mut deaths) = (None, 0);
        at_each_point((kind, entry), STEPS, 5, |play, at, met| {
            let settles_from = *settles_from.get_or_insert_with(|| {
                // A start without recovery meets the points before and after it.
                play.scene.driver.kill();
                let idle = play.watch_start(STEPS);
                play.scene.driver.start_again();
                idle.iter().position(|point| point == "socket.bound").unwrap() + 1
            });
            if !play.die_at(at + 1, STEPS, is_exact(kind).then_some(met)) {
                return 0;
            }
            let from = if everything() && deaths == 0 { 1 } else { settles_from };
            let more = play.die_while_starting(from);
            deaths += more;
            play.converge(true);
            more
        })
    });
}

#[test]
fn an_error_at_any_point_is_returned_and_the_call_converges() {
    let wanted = |kind, entry: &Entry| {
        // No caller waits there, and a failed start is repeated.
        let is_unasked = entry.name == "pressure" || entry.name.starts_with("forget ");
        let calls = !is_unasked && !STARTS.contains(&entry.name);
        calls && (everything() || kind == PoolKind::Image)
    };
    for_each_scenario(wanted, |kind, entry| {
        at_each_point((kind, entry), STEPS, 1, |play, at, met| {
            play.fail_at(at + 1, is_exact(kind).then_some(met));
            1
        })
    });
}

#[test]
fn an_interrupted_pool_creation_is_repeated_at_the_next_start() {
    if !have_root() {
        return;
    }
    let begun = Instant::now();
    let rounds: usize = thread::scope(|scope| {
        let allocated: &[&str] = &["--pool-size", "320Mi"];
        let pools = ALL_KINDS.map(|kind| (kind, &[][..])).into_iter();
        let pools = pools.chain([(PoolKind::Image, allocated)]);
        let threads: Vec<_> = pools
            .map(|(kind, flags)| scope.spawn(move || created_after_kills(kind, flags)))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    support::report(&format!("{rounds} rounds in {:.0?}, seed {}", begun.elapsed(), seed()));
}

/// Creates a new pool for each fail point of the creation. Returns their number.
fn created_after_kills(kind: PoolKind, flags: &[&str]) -> usize {
    let mut rounds = 0;
    for names in [STEPS, PAGES] {
        let every = if kind == PoolKind::Image { 1 } else { 4 };
        let mut scene = Scene::start(kind, flags);
        let met = scene.make_pool(0, names);
        for at in (0..met.len()).filter(|at| sampled(*at, every)) {
            println!("{kind}: killed at {} of {}, {}", at + 1, met.len(), met[at]);
            assert_eq!(scene.make_pool(at + 1, names), met[..=at]);
            scene.driver.start_again();
            let volume = scene.driver.volume(&scene.name("v", at), MIB, block());
            scene.driver.snapshot(&scene.name("snapshot", at), &volume);
            scene.check_pool();
            rounds += 1;
        }
        scene.end();
    }
    rounds
}

#[test]
fn every_fail_point_is_met_by_a_scenario() {
    let met = Mutex::new(BTreeSet::new());
    let note = |points: Vec<String>| met.lock().unwrap().extend(points);
    let wanted = |kind, entry: &Entry| kind == PoolKind::Image || entry.name == "snapshot raw";
    for_each_scenario(wanted, |kind, entry| {
        let mut scenario = (entry.make)();
        let mut play = Play::new(Scene::start(kind, entry.flags), scenario.as_mut());
        note(play.learn(ALL));
        // A start with a filesystem to thaw, as if the guard had been killed too.
        if entry.name == "snapshot mounted" {
            let steps = play.learn(STEPS);
            let frozen = steps.iter().position(|point| point == "freeze.frozen").unwrap() + 1;
            assert!(play.die_at(frozen, STEPS, Some(&steps)));
            let left_over = Freeze::new(&play.scenario.in_use(&play.scene)[0]);
            note(play.watch_start(ALL));
            drop(left_over);
            play.converge(false);
        }
        play.end();
        1
    });
    if !have_root() || std::env::var("CRASH_ONLY").is_ok_and(|only| !only.is_empty()) {
        return;
    }
    let mut scene = Scene::start(PoolKind::Image, &[]);
    note(scene.make_pool(0, ALL));
    scene.end();
    note(catalog::rewrite(None));
    let (met, mut known) = (met.into_inner().unwrap(), source::points());
    // Points of other programs, which have their own scenarios (tests/driver/backup: killed.rs and
    // in_place.rs; tests/api_server/movers/rebinding.rs), and of a copied image
    // (tests/storage/image_room.rs).
    let elsewhere = [oci_runtime::OWN, "backup.", "mover.", "restore.", "image.unshared"];
    known.retain(|point| !elsewhere.iter().any(|own| point.starts_with(own)));
    let unmet: Vec<_> = known.difference(&met).collect();
    assert!(unmet.is_empty(), "no scenario meets {unmet:?}: add one to tests/crash");
    let unknown: Vec<_> = met.difference(&known).collect();
    assert!(unknown.is_empty(), "not found in the source: {unknown:?}");
    support::report(&format!("{} points", known.len()));
}

#[test]
fn every_function_that_changes_state_has_a_fail_point() {
    let without = source::functions_without_points();
    assert!(without.is_empty(), "a step and no fail point after it: {without:?}");
}
