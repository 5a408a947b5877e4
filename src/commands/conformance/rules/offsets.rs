//! Rules about a stream that starts in the middle, and one that is interrupted.

use std::time::Duration;

use super::super::content::mixed;
use super::super::door::{End, Stream, Tuple, Window};
use super::super::situations::MANY;
use super::super::world::World;
use super::bytes::Need;
use super::shape::SIZES;
use super::{Outcome, Rule, Severity, Verdict, WHOLE, fail, named};

const MIB: u64 = 1 << 20;
/// Interruptions of a stream.
const RESUMES: usize = 12;
/// The deadline of a call that only the driver limits.
const DEADLINE: Duration = Duration::from_millis(150);

pub const RULES: &[Rule] = &[
    Rule {
        id: "first-tuple",
        severity: Severity::Must,
        sentence: "The first tuple ends after starting_offset, wherever that is.",
        source: "spec.md:3671-3675, 3764-3768",
        consequence: "A resumed backup copies blocks twice, or does not progress.",
        check: first_tuple,
    },
    Rule {
        id: "offset-complete",
        severity: Severity::Must,
        sentence: "A stream has all data after starting_offset, wherever that is.",
        source: "spec.md:3648, 3715, 3809",
        consequence: "A resumed backup lacks data.",
        check: offset_complete,
    },
    Rule {
        id: "resume",
        severity: Severity::Data,
        sentence: "Streams that are resumed after the last tuple are together complete.",
        source: "spec.md:3647-3648",
        consequence: "An interrupted backup lacks data.",
        check: resume,
    },
    Rule {
        id: "small-messages",
        severity: Severity::Data,
        sentence: "A stream is complete with any max_results.",
        source: "spec.md:3637, 3679-3683",
        consequence: "A backup of a client with limited memory lacks data.",
        check: small_messages,
    },
    Rule {
        id: "deadline",
        severity: Severity::Must,
        sentence: "A stream whose deadline passes ends with OK only after all metadata.",
        source: "spec.md:3637",
        consequence: "A backup lacks data and reports success.",
        check: deadline,
    },
];

/// Allocated and changed blocks of a snapshot with single blocks, and of one with many.
fn needs<'w>(world: &'w World<'_>) -> Result<Vec<Need<'w>>, Outcome> {
    let (fresh, sparse) = (world.shot("fresh")?, world.shot("sparse")?);
    let mut needs = vec![Need::allocated(sparse), Need::delta(fresh, sparse)];
    if let (Ok(base), Ok(many)) = (world.shot("changed"), world.shot("many")) {
        needs.extend([Need::allocated(many), Need::delta(base, many)]);
    }
    Ok(needs)
}

/// Aligned and not, before, inside and after extents, and the last byte; more from the seed.
fn offsets(seed: u64, size: u64) -> Vec<u64> {
    let mut all = vec![
        1,
        511,
        512,
        2048,
        4096,
        MIB,
        MIB + 1,
        2 * MIB + 6144,
        3 * MIB + 100,
        5 * MIB + 1000,
        MANY.start + 3 * 4096 + 17,
        MANY.start + 7 * 4096,
        size / 2 + 3,
        size - 512,
        size - 1,
    ];
    all.extend((0..6).map(|number| mixed(seed ^ (number << 32)) % size));
    all
}

/// Judges the stream of each offset that the driver accepts.
fn at_each_offset(
    world: &World<'_>,
    judge: fn(&World<'_>, &Need<'_>, Window, &Stream) -> Verdict,
) -> Verdict {
    let mut last = None;
    let mut accepted = false;
    for need in needs(world)? {
        let size = need.shots.iter().map(|shot| shot.size).min().unwrap_or_default();
        for offset in offsets(world.settings.seed, size) {
            let starting_offset = i64::try_from(offset).unwrap_or(i64::MAX);
            let window = Window { starting_offset, max_results: 0 };
            match world.complete(&need.query, window) {
                Ok(stream) => judge(world, &need, window, &stream)?,
                Err(Outcome::Skip(reason)) => {
                    last = Some(reason);
                    continue;
                }
                Err(other) => return Err(other),
            }
            accepted = true;
        }
    }
    match (accepted, last) {
        (false, Some(reason)) => Err(Outcome::Skip(reason)),
        _ => Ok(()),
    }
}

fn first_tuple(world: &World<'_>) -> Verdict {
    at_each_offset(world, |_, need, window, stream| {
        match stream.tuples().next().filter(|tuple| tuple.end() <= window.starting_offset) {
            Some(Tuple { offset, size }) => {
                let expected = format!("a tuple that ends after {}", window.starting_offset);
                let call = named(&need.query, &need.names, window);
                Err(fail(call, expected, format!("the first tuple is {offset}+{size}")))
            }
            None => Ok(()),
        }
    })
}

fn offset_complete(world: &World<'_>) -> Verdict {
    at_each_offset(world, |world, need, window, stream| need.judge(world, window, stream))
}

/// Reads a stream a few tuples at a time: each call starts after the last tuple of the previous one.
fn resume(world: &World<'_>) -> Verdict {
    for need in needs(world)? {
        let size = need.shots.iter().map(|shot| shot.size).min().unwrap_or_default();
        let mut seen: Vec<Tuple> = Vec::new();
        let mut start = 0;
        for interruption in 1..=RESUMES {
            let window = Window { starting_offset: start, max_results: 5 };
            let stream = world.complete(&need.query, window)?;
            let taken = if interruption == RESUMES { usize::MAX } else { 3 * interruption };
            let before = seen.len();
            seen.extend(stream.tuples().take(taken));
            let next = seen.last().map_or(start, |tuple| tuple.end());
            let is_whole = stream.tuples().count() <= taken || next.unsigned_abs() >= size;
            if seen.len() == before || next <= start || is_whole {
                break;
            }
            start = next;
        }
        let whole = joined(seen);
        let note = ", resumed after the last tuple again and again";
        need.judge(world, WHOLE, &whole)
            .map_err(|outcome| outcome.with(|finding| finding.call += note))?;
    }
    Ok(())
}

/// The tuples of several streams as one.
fn joined(tuples: Vec<Tuple>) -> Stream {
    use super::super::door::Message;
    let message = Message { block_metadata_type: 0, capacity: 0, tuples };
    Stream {
        messages: vec![message],
        end: End::Complete,
        first_message: Duration::ZERO,
        whole: Duration::ZERO,
    }
}

fn small_messages(world: &World<'_>) -> Verdict {
    let (base, many) = (world.shot("changed")?, world.shot("many")?);
    for need in [Need::allocated(many), Need::delta(base, many)] {
        for max_results in SIZES {
            need.check(world, Window { starting_offset: 0, max_results })?;
        }
    }
    Ok(())
}

fn deadline(world: &World<'_>) -> Verdict {
    let (base, many) = (world.shot("changed")?, world.shot("many")?);
    let window = Window { starting_offset: 0, max_results: 3 };
    for need in [Need::allocated(many), Need::delta(base, many)] {
        let stream = world.door.stream_past_deadline(&need.query, window, DEADLINE);
        let Some(stream) = stream else {
            let reason = "this door cannot make a call without a time limit of its own";
            return Err(Outcome::Skip(reason.to_owned()));
        };
        match &stream.end {
            End::Stopped => return Err(Outcome::Stopped),
            // An error, or a reset of the stream.
            End::Failed(_) | End::Endless(_) => {}
            End::Complete => need.judge(world, window, &stream).map_err(|outcome| {
                outcome.with(|finding| {
                    finding.call += &format!(", grpc-timeout {} ms", DEADLINE.as_millis());
                    finding.seen = format!("OK, but {}", finding.seen);
                })
            })?,
        }
    }
    Ok(())
}
