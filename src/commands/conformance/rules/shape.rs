//! Rules about the form of a stream, for all situations and both calls.

use std::collections::BTreeSet;

use tonic::Code;

use super::super::door::{End, Message, Query, Stream, Window};
use super::super::world::World;
use super::{Outcome, Rule, Severity, Verdict, WHOLE, allocated, delta, fail, named};
use grpc::proto::csi::v1::BlockMetadataType as Style;

pub const RULES: &[Rule] = &[
    Rule {
        id: "both-calls",
        severity: Severity::Must,
        sentence: "A driver with the SnapshotMetadata service implements both calls.",
        source: "spec.md:3652, 3741",
        consequence: "Full or incremental backups are impossible.",
        check: both_calls,
    },
    Rule {
        id: "completes",
        severity: Severity::Must,
        sentence: "A call for existing snapshots of one volume ends with OK, or FAILED_PRECONDITION without change tracking.",
        source: "spec.md:3637, 3831",
        consequence: "The backup fails.",
        check: completes,
    },
    Rule {
        id: "tuple-size",
        severity: Severity::Must,
        sentence: "A tuple starts at zero or later and has more than zero bytes.",
        source: "spec.md:3597, 3603",
        consequence: "A client reads the wrong range, or never ends.",
        check: |world| each(world, tuple_size),
    },
    Rule {
        id: "ascending",
        severity: Severity::Must,
        sentence: "Tuples ascend without overlap, also across messages.",
        source: "spec.md:3592, 3716-3722",
        consequence: "A resumed backup loses the blocks before the last tuple.",
        check: |world| each(world, ascending),
    },
    Rule {
        id: "type-specified",
        severity: Severity::Must,
        sentence: "Each message has a block_metadata_type other than UNKNOWN.",
        source: "spec.md:499, 3702",
        consequence: "A client cannot interpret the tuples.",
        check: |world| each(world, type_specified),
    },
    Rule {
        id: "type-constant",
        severity: Severity::Must,
        sentence: "All messages of a stream have the same block_metadata_type.",
        source: "spec.md:3615, 3698",
        consequence: "A client misinterprets the tuples.",
        check: |world| each(world, type_constant),
    },
    Rule {
        id: "fixed-size",
        severity: Severity::Must,
        sentence: "With FIXED_LENGTH, all tuples of a stream have the same size.",
        source: "spec.md:3612, 3700",
        consequence: "A client that computes the ends of blocks reads the wrong ranges.",
        check: |world| each(world, fixed_size),
    },
    Rule {
        id: "capacity-specified",
        severity: Severity::Must,
        sentence: "Each message has a volume_capacity_bytes of more than zero.",
        source: "spec.md:499, 3705-3708",
        consequence: "A client creates a restored volume of the wrong size.",
        check: |world| each(world, capacity_specified),
    },
    Rule {
        id: "capacity-constant",
        severity: Severity::Must,
        sentence: "All messages of a stream have the same volume_capacity_bytes.",
        source: "spec.md:3706",
        consequence: "A client creates a restored volume of the wrong size.",
        check: |world| each(world, capacity_constant),
    },
    Rule {
        id: "max-results",
        severity: Severity::Must,
        sentence: "No message has more tuples than a max_results above zero.",
        source: "spec.md:3711-3714",
        consequence: "A client with limited memory fails.",
        check: max_results,
    },
];

/// Sizes of messages, for a snapshot with many extents.
pub const SIZES: [i32; 4] = [1, 2, 7, 100_000];

/// A call of the survey, and how a finding names it.
type Called = (Query, String, Window);

/// The calls that rules about the form of streams judge.
fn survey(world: &World<'_>) -> Result<Vec<Called>, Outcome> {
    let mut calls: Vec<Called> = Vec::new();
    for shot in world.shots()?.into_iter().filter(|shot| !shot.is_orphan) {
        calls.push((allocated(&shot.snapshot), shot.name.clone(), WHOLE));
    }
    for (base, target) in world.pairs()?.into_iter().filter(|(base, _)| !base.is_orphan) {
        let names = format!("{} to {}", base.name, target.name);
        calls.push((delta(&base.snapshot, &target.snapshot), names, WHOLE));
    }
    calls.extend(sized(world)?);
    Ok(calls)
}

/// Calls with a max_results.
fn sized(world: &World<'_>) -> Result<Vec<Called>, Outcome> {
    let (base, many) = match (world.shot("changed"), world.shot("many")) {
        (Ok(base), Ok(many)) => (base, many),
        (Err(Outcome::Stopped), _) | (_, Err(Outcome::Stopped)) => return Err(Outcome::Stopped),
        _ => return Ok(Vec::new()),
    };
    let mut calls = Vec::new();
    for max_results in SIZES {
        let window = Window { max_results, ..WHOLE };
        calls.push((allocated(&many.snapshot), many.name.clone(), window));
        let names = format!("{} to {}", base.name, many.name);
        calls.push((delta(&base.snapshot, &many.snapshot), names, window));
    }
    Ok(calls)
}

/// Judges what arrived of each stream of the survey.
fn each(world: &World<'_>, judge: fn(&Stream) -> Result<(), (String, String)>) -> Verdict {
    let mut has_messages = false;
    for (query, names, window) in survey(world)? {
        let stream = world.stream(&query, window);
        if matches!(stream.end, End::Stopped) {
            return Err(Outcome::Stopped);
        }
        has_messages |= !stream.messages.is_empty();
        judge(&stream)
            .map_err(|(expected, seen)| fail(named(&query, &names, window), expected, seen))?;
    }
    match has_messages {
        true => Ok(()),
        false => Err(Outcome::Skip("the driver sent no message".to_owned())),
    }
}

fn both_calls(world: &World<'_>) -> Verdict {
    if !world.door.has_metadata() {
        let reason = "the driver does not advertise SNAPSHOT_METADATA_SERVICE";
        return Err(Outcome::Skip(reason.to_owned()));
    }
    let fresh = world.shot("fresh")?;
    let both = [allocated(&fresh.snapshot), delta(&fresh.snapshot, &fresh.snapshot)];
    for query in both {
        let stream = world.stream(&query, WHOLE);
        match &stream.end {
            End::Stopped => return Err(Outcome::Stopped),
            End::Failed(failure) if failure.code == Code::Unimplemented => {
                let call = named(&query, &fresh.name, WHOLE);
                return Err(fail(call, "any other status", failure.to_string()));
            }
            _ => {}
        }
    }
    Ok(())
}

fn completes(world: &World<'_>) -> Verdict {
    let (mut refused, mut has_delta, mut no_base) = (None, false, None);
    for (query, names, window) in survey(world)? {
        let stream = world.stream(&query, window);
        let call = named(&query, &names, window);
        let is_delta = matches!(query, Query::Delta { .. });
        match &stream.end {
            End::Complete => has_delta |= is_delta,
            End::Stopped => return Err(Outcome::Stopped),
            End::Failed(failure) if failure.code == Code::Unimplemented => {}
            // A driver may identify bases by something else than snapshot ids.
            End::Failed(failure) if failure.code == Code::InvalidArgument && is_delta => {
                no_base.get_or_insert((call, failure.to_string()));
            }
            End::Failed(failure) if failure.code == Code::FailedPrecondition && is_delta => {
                refused = Some(format!("{call}: {failure}"));
            }
            End::Failed(failure) => return Err(fail(call, "OK", failure.to_string())),
            End::Endless(patience) => {
                let seen = format!("no end within {} s", patience.as_secs());
                return Err(fail(call, "OK or an error", seen));
            }
        }
    }
    match (no_base, refused) {
        (Some((call, seen)), _) if has_delta => Err(fail(call, "OK", seen)),
        (Some((call, seen)), _) => Err(Outcome::Skip(format!("{call}: {seen}"))),
        (None, Some(reason)) => Err(Outcome::Skip(reason)),
        (None, None) => Ok(()),
    }
}

fn tuple_size(stream: &Stream) -> Result<(), (String, String)> {
    match stream.tuples().find(|tuple| tuple.size <= 0 || tuple.offset < 0) {
        Some(bad) => Err((
            "byte_offset of at least 0, size_bytes above 0".to_owned(),
            format!("byte_offset {}, size_bytes {}", bad.offset, bad.size),
        )),
        None => Ok(()),
    }
}

fn ascending(stream: &Stream) -> Result<(), (String, String)> {
    let mut before = None;
    for tuple in stream.tuples() {
        if let Some(before) = before.replace(tuple)
            && (tuple.offset < before.end() || tuple.offset <= before.offset)
        {
            return Err((
                format!("a tuple at {} or later", before.end()),
                format!("byte_offset {} after {}+{}", tuple.offset, before.offset, before.size),
            ));
        }
    }
    Ok(())
}

fn type_specified(stream: &Stream) -> Result<(), (String, String)> {
    let is_known = |message: &&Message| {
        Style::try_from(message.block_metadata_type).is_ok_and(|style| style != Style::Unknown)
    };
    match stream.messages.iter().find(|message| !is_known(message)) {
        Some(bad) => Err((
            "FIXED_LENGTH or VARIABLE_LENGTH".to_owned(),
            format!("block_metadata_type {}", bad.block_metadata_type),
        )),
        None => Ok(()),
    }
}

/// Fails if `value` differs between messages.
fn constant<T: Ord + ToString>(
    stream: &Stream,
    field: &str,
    value: fn(&Message) -> T,
) -> Result<(), (String, String)> {
    let values: BTreeSet<T> = stream.messages.iter().map(value).collect();
    match values.len() {
        0 | 1 => Ok(()),
        _ => {
            let values: Vec<String> = values.iter().map(T::to_string).collect();
            Err((format!("one {field}"), values.join(" and ")))
        }
    }
}

fn type_constant(stream: &Stream) -> Result<(), (String, String)> {
    constant(stream, "block_metadata_type", |message| message.block_metadata_type)
}

fn capacity_constant(stream: &Stream) -> Result<(), (String, String)> {
    constant(stream, "volume_capacity_bytes", |message| message.capacity)
}

fn fixed_size(stream: &Stream) -> Result<(), (String, String)> {
    let is_fixed = |message: &Message| message.block_metadata_type == i32::from(Style::FixedLength);
    if stream.messages.is_empty() || !stream.messages.iter().all(is_fixed) {
        return Ok(());
    }
    let sizes: BTreeSet<i64> = stream.tuples().map(|tuple| tuple.size).collect();
    match sizes.len() {
        0 | 1 => Ok(()),
        _ => Err(("one size_bytes".to_owned(), format!("{sizes:?}"))),
    }
}

fn capacity_specified(stream: &Stream) -> Result<(), (String, String)> {
    match stream.messages.iter().find(|message| message.capacity <= 0) {
        Some(bad) => {
            Err(("more than 0".to_owned(), format!("volume_capacity_bytes {}", bad.capacity)))
        }
        None => Ok(()),
    }
}

fn max_results(world: &World<'_>) -> Verdict {
    world.shot("many")?;
    for (query, names, window) in sized(world)? {
        let stream = world.complete(&query, window)?;
        let longest = stream.messages.iter().map(|message| message.tuples.len()).max();
        let longest = longest.unwrap_or_default();
        if longest > usize::try_from(window.max_results).unwrap_or_default() {
            let expected = format!("at most {} tuples in a message", window.max_results);
            let seen = format!("{longest} tuples");
            return Err(fail(named(&query, &names, window), expected, seen));
        }
    }
    Ok(())
}
