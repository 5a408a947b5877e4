//! Rules about bytes: what holds data is allocated, and what differs is in the delta.

use std::sync::Mutex;
use std::thread;

use super::super::content::Ranges;
use super::super::door::{Done, End, Query, Refusal, Stream, Window};
use super::super::situations::{CHAIN, DELETED};
use super::super::world::{Shot, World, complete, lock};
use super::{
    Finding, Map, Outcome, Rule, Severity, Verdict, WHOLE, allocated, covered, delta, named,
};

/// Streams at the same time.
const STREAMS: usize = 8;

const ALLOCATED: &str = "spec.md:3648, 3656-3658";
const DELTA: &str = "spec.md:3648, 3744-3745";
const LOST: &str = "A full backup lacks data.";
const STALE: &str = "An incremental backup restores old data.";

type Check = fn(&World<'_>) -> Verdict;

const fn data(
    id: &'static str,
    sentence: &'static str,
    source: &'static str,
    consequence: &'static str,
    check: Check,
) -> Rule {
    Rule { id, severity: Severity::Data, sentence, source, consequence, check }
}

const fn full(id: &'static str, sentence: &'static str, check: Check) -> Rule {
    data(id, sentence, ALLOCATED, LOST, check)
}

const fn incremental(id: &'static str, sentence: &'static str, check: Check) -> Rule {
    data(id, sentence, DELTA, STALE, check)
}

pub const RULES: &[Rule] = &[
    full(
        "allocated-sparse",
        "Single blocks, parts of blocks, and the first and the last block are allocated.",
        |world| holds(world, &["sparse"]),
    ),
    full(
        "allocated-changed",
        "Data that remains among discarded and zeroed blocks is allocated.",
        |world| holds(world, &["changed"]),
    ),
    full("allocated-many", "Each of thousands of extents is allocated.", |world| {
        holds(world, &["many"])
    }),
    full("allocated-full", "All of a full volume is allocated.", |world| holds(world, &["full"])),
    full("allocated-chain", "Data of earlier snapshots of a chain is allocated.", |world| {
        holds(world, &["chain-1", "chain-10"])
    }),
    full("allocated-grown", "Data of a volume that has grown is allocated.", |world| {
        holds(world, &["grown-1", "grown-2"])
    }),
    full(
        "allocated-restored",
        "Data that a restored volume has from its snapshot is allocated.",
        |world| holds(world, &["restored-1", "restored-2"]),
    ),
    full("allocated-cloned", "Data that a clone has from its source is allocated.", |world| {
        holds(world, &["cloned-1", "cloned-2"])
    }),
    full(
        "allocated-orphan",
        "Data of a snapshot whose volume was deleted is allocated.",
        |world| holds(world, &["orphan-1", "orphan-2"]),
    ),
    incremental("delta-sparse", "The first blocks of a volume are in the delta.", |world| {
        differs(world, &[("fresh", "sparse")])
    }),
    incremental(
        "delta-changed",
        "Blocks that were overwritten, discarded or zeroed are in the delta.",
        |world| differs(world, &[("sparse", "changed")]),
    ),
    incremental("delta-many", "Each of thousands of changed extents is in the delta.", |world| {
        differs(world, &[("changed", "many")])
    }),
    incremental("delta-full", "All of an overwritten volume is in the delta.", |world| {
        differs(world, &[("many", "full")])
    }),
    incremental(
        "delta-chain",
        "Deltas between any two snapshots of a chain are complete, also across a deleted one.",
        delta_chain,
    ),
    incremental("delta-grown", "Changes of a volume that has grown are in the delta.", |world| {
        differs(world, &[("grown-1", "grown-2")])
    }),
    incremental("delta-restored", "Changes of a restored volume are in the delta.", |world| {
        differs(world, &[("restored-1", "restored-2")])
    }),
    incremental("delta-cloned", "Changes of a clone are in the delta.", |world| {
        differs(world, &[("cloned-1", "cloned-2")])
    }),
    incremental("delta-orphan", "Changes of a deleted volume are in the delta.", |world| {
        differs(world, &[("orphan-1", "orphan-2")])
    }),
    incremental(
        "delta-other-base",
        "A delta from a deleted, newer or other volume's base fails or is complete.",
        other_bases,
    ),
    data(
        "concurrent",
        "Streams that are read at the same time are complete.",
        "spec.md:3637",
        LOST,
        concurrent,
    ),
    data(
        "while-used",
        "Metadata of a snapshot is complete while a volume that was made of it is in use.",
        "spec.md:3637",
        LOST,
        while_used,
    ),
];

/// What a stream must cover, and the snapshots whose content this depends on.
pub struct Need<'a> {
    pub query: Query,
    /// Names of the situations.
    pub names: String,
    pub ranges: Ranges,
    pub shots: Vec<&'a Shot>,
}

impl<'a> Need<'a> {
    /// The data of a snapshot.
    pub fn allocated(shot: &'a Shot) -> Self {
        Self {
            query: allocated(&shot.snapshot),
            names: shot.name.clone(),
            ranges: shot.image.data(),
            shots: vec![shot],
        }
    }

    /// What differs between two snapshots.
    pub fn delta(base: &'a Shot, target: &'a Shot) -> Self {
        Self {
            query: delta(&base.snapshot, &target.snapshot),
            names: format!("{} to {}", base.name, target.name),
            ranges: target.image.differences(&base.image),
            shots: vec![base, target],
        }
    }

    /// Judges a complete stream by bytes. Before a driver is accused, the snapshots are read, and
    /// what they do not hold as it was written is disregarded.
    pub fn judge(&self, world: &World<'_>, window: Window, stream: &Stream) -> Verdict {
        let from = u64::try_from(window.starting_offset).unwrap_or(0);
        let needed = self.ranges.within(from..u64::MAX);
        let mut missing = needed.without(&covered(stream));
        for shot in &self.shots {
            if missing.is_empty() {
                return Ok(());
            }
            let surprises = world.surprises(shot)?;
            missing = missing.without(&surprises);
        }
        if missing.is_empty() {
            return Ok(());
        }
        let size = self.shots.iter().map(|shot| shot.size).max().unwrap_or_default();
        let first = missing.0.first().cloned().unwrap_or_default();
        let count = missing.0.len();
        Err(Outcome::Fail(Box::new(Finding {
            call: named(&self.query, &self.names, window),
            expected: format!("{} bytes in {} ranges", needed.bytes(), needed.0.len()),
            seen: format!(
                "{} bytes in {count} ranges are missing, first {}+{}",
                missing.bytes(),
                first.start,
                first.end - first.start
            ),
            map: Some(Map { size, needed, missing }),
        })))
    }

    /// The same for the response to a call, which is made if it is not known.
    pub fn check(&self, world: &World<'_>, window: Window) -> Verdict {
        let stream = world.complete(&self.query, window)?;
        self.judge(world, window, &stream)
    }
}

fn holds(world: &World<'_>, names: &[&str]) -> Verdict {
    for name in names {
        Need::allocated(world.shot(name)?).check(world, WHOLE)?;
    }
    Ok(())
}

fn differs(world: &World<'_>, pairs: &[(&str, &str)]) -> Verdict {
    for (base, target) in pairs {
        Need::delta(world.shot(base)?, world.shot(target)?).check(world, WHOLE)?;
    }
    Ok(())
}

fn delta_chain(world: &World<'_>) -> Verdict {
    let mut chain = Vec::new();
    for number in 1..=CHAIN {
        let shot = world.shot(&format!("chain-{number}"))?;
        chain.extend((!shot.is_deleted).then_some(shot));
    }
    for (number, base) in chain.iter().enumerate() {
        for target in &chain[number + 1..] {
            Need::delta(base, target).check(world, WHOLE)?;
        }
    }
    Ok(())
}

/// No code is defined for these, so every error is accepted.
fn other_bases(world: &World<'_>) -> Verdict {
    let mut pairs = Vec::new();
    let names = [
        (DELETED, "chain-6"),
        (DELETED, "chain-10"),
        ("chain-10", "sparse"),
        ("chain-10", "chain-10"),
        ("changed", "restored-2"),
        ("orphan-1", "chain-1"),
    ];
    for (base, target) in names {
        match (world.shot(base), world.shot(target)) {
            (Ok(base), Ok(target)) => pairs.push((base, target)),
            (Err(Outcome::Stopped), _) | (_, Err(Outcome::Stopped)) => {
                return Err(Outcome::Stopped);
            }
            _ => {}
        }
    }
    let mut answered = false;
    for (base, target) in &pairs {
        let need = Need::delta(base, target);
        let stream = world.stream(&need.query, WHOLE);
        match &stream.end {
            End::Complete => {
                need.judge(world, WHOLE, &stream)?;
                answered = true;
            }
            End::Stopped => return Err(Outcome::Stopped),
            End::Failed(_) | End::Endless(_) => {}
        }
    }
    match (pairs.is_empty(), answered) {
        (true, _) => Err(Outcome::Skip("the snapshots are missing".to_owned())),
        (_, true) => Ok(()),
        (_, false) => Err(Outcome::Skip("the driver refuses all of these bases".to_owned())),
    }
}

fn concurrent(world: &World<'_>) -> Verdict {
    let (base, many) = (world.shot("changed")?, world.shot("many")?);
    let needs = [Need::allocated(many), Need::delta(base, many)];
    let window = Window { starting_offset: 0, max_results: 16 };
    let streams: Vec<Stream> = thread::scope(|scope| {
        let calls: Vec<_> = (0..STREAMS)
            .map(|number| {
                let query = &needs[number % needs.len()].query;
                scope.spawn(move || world.fresh_stream(query, window))
            })
            .collect();
        calls.into_iter().filter_map(|call| call.join().ok()).collect()
    });
    for (number, stream) in streams.iter().enumerate() {
        let need = &needs[number % needs.len()];
        complete(&need.query, stream)?;
        need.judge(world, window, stream)?;
    }
    Ok(())
}

fn while_used(world: &World<'_>) -> Verdict {
    use super::super::door::Source;
    let shot = world.shot("changed")?;
    let need = Need::allocated(shot);
    let name = format!("{}-used", world.settings.prefix);
    let seen = Mutex::new(None);
    let used: Done<()> = (|| {
        let size = shot.size.max(shot.snapshot.size);
        let source = Some(Source::Snapshot(&shot.snapshot));
        let volume = world.door.make_volume(&name, size, source)?;
        let read = || *lock(&seen) = Some(world.fresh_stream(&need.query, WHOLE));
        let used = world.door.while_used(&volume, &mut { read });
        world.door.delete_volume(&volume)?;
        used
    })();
    match used {
        Ok(()) => {}
        Err(Refusal::Stopped) => return Err(Outcome::Stopped),
        Err(refusal) => return Err(Outcome::Skip(refusal.to_string())),
    }
    let stream = lock(&seen).take();
    let Some(stream) = stream else {
        return Err(Outcome::Skip("the volume was not used".to_owned()));
    };
    complete(&need.query, &stream)?;
    need.judge(world, WHOLE, &stream)
}
