//! Rules about requests that a driver must refuse, and how.

use tonic::Code;

use super::super::door::{End, Failure, Query, Snapshot, Window};
use super::super::situations::DELETED;
use super::super::world::{Shot, World};
use super::bytes::Need;
use super::{Outcome, Rule, Severity, Verdict, WHOLE, allocated, at_driver, delta, fail, named};
use grpc::code_name;

pub const RULES: &[Rule] = &[
    Rule {
        id: "offset-negative",
        severity: Severity::Must,
        sentence: "A negative starting_offset is OUT_OF_RANGE.",
        source: "spec.md:521, 3737, 3832",
        consequence: "A client with a wrong offset gets a listing that is not what it requested.",
        check: |world| offsets_are_refused(world, |_| vec![-1, i64::MIN]),
    },
    Rule {
        id: "offset-beyond",
        severity: Severity::Must,
        sentence: "A starting_offset that exceeds the size of the volume is OUT_OF_RANGE.",
        source: "spec.md:521, 3737, 3832",
        consequence: "A backup of a wrong volume ends early and reports success.",
        check: |world| offsets_are_refused(world, |size| vec![size.saturating_add(1), i64::MAX]),
    },
    Rule {
        id: "id-missing",
        severity: Severity::Must,
        sentence: "A request without a snapshot id is INVALID_ARGUMENT.",
        source: "spec.md:521, 525, 3735, 3829",
        consequence: "A client that lost an id gets an error that it may retry forever.",
        check: id_missing,
    },
    Rule {
        id: "snapshot-deleted",
        severity: Severity::Must,
        sentence: "A deleted snapshot, as the target of a call, is NOT_FOUND.",
        source: "spec.md:521, 3736, 3830",
        consequence: "A client does not learn that its snapshot is gone.",
        check: snapshot_deleted,
    },
    Rule {
        id: "snapshot-unknown",
        severity: Severity::Must,
        sentence: "A call for a snapshot that never existed fails.",
        source: "spec.md:521, 3736, 3830",
        consequence: "A client believes that nothing changed.",
        check: snapshot_unknown,
    },
    Rule {
        id: "status-message",
        severity: Severity::Must,
        sentence: "An error has a message.",
        source: "spec.md:532",
        consequence: "An operator cannot find out why a backup failed.",
        check: |world| each_failure(world, "a message", |failure| !failure.message.is_empty()),
    },
    Rule {
        id: "status-details",
        severity: Severity::Must,
        sentence: "An error has no details.",
        source: "spec.md:535",
        consequence: "None today: the field is reserved.",
        check: |world| {
            at_driver(world)?;
            each_failure(world, "no details", |failure| !failure.has_details)
        },
    },
    Rule {
        id: "max-results-negative",
        severity: Severity::Must,
        sentence: "A call with a negative max_results ends, with an error or a complete stream.",
        source: "spec.md:3637",
        consequence: "A client with a fault of its own keeps the driver busy forever.",
        check: max_results_negative,
    },
];

/// A request, and how a finding names it.
struct Wrong {
    query: Query,
    names: String,
    window: Window,
}

impl Wrong {
    fn of(query: Query, names: &str) -> Self {
        Self { query, names: names.to_owned(), window: WHOLE }
    }

    fn call(&self) -> String {
        named(&self.query, &self.names, self.window)
    }

    /// How the driver refuses it; nothing if it does not.
    fn refusal(&self, world: &World<'_>) -> Result<Option<Failure>, Outcome> {
        match &world.stream(&self.query, self.window).end {
            End::Complete | End::Endless(_) => Ok(None),
            End::Failed(failure) if failure.code == Code::Unimplemented => {
                Err(Outcome::Skip(format!("{} is not implemented", self.query.method())))
            }
            End::Failed(failure) => Ok(Some(failure.clone())),
            End::Stopped => Err(Outcome::Stopped),
        }
    }

    /// Fails unless the driver refuses it with this code.
    fn must_be(&self, world: &World<'_>, code: Code) -> Verdict {
        let seen = match self.refusal(world)? {
            Some(failure) if failure.code == code => return Ok(()),
            // The driver has no deltas for this volume.
            Some(failure) if failure.code == Code::FailedPrecondition => {
                return Err(Outcome::Skip(failure.to_string()));
            }
            Some(failure) => failure.to_string(),
            None => "OK".to_owned(),
        };
        Err(fail(self.call(), code_name(code), seen))
    }
}

/// Both calls for a snapshot that exists.
fn both(world: &World<'_>) -> Result<Vec<(Query, String)>, Outcome> {
    let fresh = world.shot("fresh")?;
    let mut calls = vec![(allocated(&fresh.snapshot), fresh.name.clone())];
    if let Ok(sparse) = world.shot("sparse")
        && has_deltas(world)
    {
        let names = format!("{} to {}", fresh.name, sparse.name);
        calls.push((delta(&fresh.snapshot, &sparse.snapshot), names));
    }
    Ok(calls)
}

/// Whether the driver has deltas between snapshot ids: otherwise it may refuse any request for one.
fn has_deltas(world: &World<'_>) -> bool {
    let (Ok(fresh), Ok(sparse)) = (world.shot("fresh"), world.shot("sparse")) else { return false };
    world.complete(&delta(&fresh.snapshot, &sparse.snapshot), WHOLE).is_ok()
}

/// The largest number that a driver can regard as the size of the volume.
fn size(world: &World<'_>) -> Result<i64, Outcome> {
    let shot = world.shot("fresh")?;
    let stream = world.stream(&allocated(&shot.snapshot), WHOLE);
    let reported = stream.messages.iter().map(|message| message.capacity).max();
    let known = shot.volume_size.max(shot.size).max(shot.snapshot.size);
    Ok(i64::try_from(known).unwrap_or(i64::MAX).max(reported.unwrap_or_default()))
}

fn wrong_offsets(world: &World<'_>, offsets: fn(i64) -> Vec<i64>) -> Result<Vec<Wrong>, Outcome> {
    let size = size(world)?;
    let mut all = Vec::new();
    for (query, names) in both(world)? {
        for starting_offset in offsets(size) {
            let window = Window { starting_offset, max_results: 0 };
            all.push(Wrong { query: query.clone(), names: names.clone(), window });
        }
    }
    Ok(all)
}

fn offsets_are_refused(world: &World<'_>, offsets: fn(i64) -> Vec<i64>) -> Verdict {
    wrong_offsets(world, offsets)?
        .into_iter()
        .try_for_each(|wrong| wrong.must_be(world, Code::OutOfRange))
}

fn without_ids(world: &World<'_>) -> Result<Vec<Wrong>, Outcome> {
    let fresh = world.shot("fresh")?;
    let Snapshot { id, base, .. } = fresh.snapshot.clone();
    let none = String::new;
    Ok(vec![
        Wrong::of(Query::Allocated { snapshot: none() }, "an empty snapshot_id"),
        Wrong::of(Query::Delta { base: none(), target: id }, "an empty base_snapshot_id"),
        Wrong::of(Query::Delta { base, target: none() }, "an empty target_snapshot_id"),
    ])
}

fn id_missing(world: &World<'_>) -> Verdict {
    without_ids(world)?
        .into_iter()
        .try_for_each(|wrong| wrong.must_be(world, Code::InvalidArgument))
}

fn of_deleted(world: &World<'_>) -> Result<Vec<Wrong>, Outcome> {
    let (base, deleted) = (world.shot("fresh")?, world.shot(DELETED)?);
    let mut wrong = vec![Wrong::of(allocated(&deleted.snapshot), "a deleted snapshot")];
    if has_deltas(world) {
        let query = delta(&base.snapshot, &deleted.snapshot);
        wrong.push(Wrong::of(query, "fresh to a deleted snapshot"));
    }
    Ok(wrong)
}

fn snapshot_deleted(world: &World<'_>) -> Verdict {
    at_driver(world)?;
    of_deleted(world)?.into_iter().try_for_each(|wrong| wrong.must_be(world, Code::NotFound))
}

/// An id that the driver did not return: the last letter or digit of an id is another one.
fn unknown_id(known: &str) -> String {
    let mut letters: Vec<char> = known.chars().collect();
    let last = letters.iter_mut().rev().find(|letter| letter.is_ascii_alphanumeric());
    match last {
        Some(letter) => *letter = if *letter == '0' { '1' } else { '0' },
        None => letters.push('0'),
    }
    letters.into_iter().collect()
}

fn of_unknown(world: &World<'_>) -> Result<Vec<Wrong>, Outcome> {
    let fresh = world.shot("fresh")?;
    let shots = world.shots()?;
    let unknown = |known: &str| {
        let id = unknown_id(known);
        let exists = |shot: &&Shot| shot.snapshot.id == id || shot.snapshot.base == id;
        if shots.iter().any(exists) { format!("{id}0") } else { id }
    };
    let id = unknown(&fresh.snapshot.id);
    let Snapshot { id: target, base, .. } = fresh.snapshot.clone();
    let no_base = unknown(&base);
    Ok(vec![
        Wrong::of(Query::Allocated { snapshot: id.clone() }, "an unknown snapshot"),
        Wrong::of(Query::Delta { base: no_base, target }, "an unknown snapshot to fresh"),
        Wrong::of(Query::Delta { base, target: id }, "fresh to an unknown snapshot"),
    ])
}

/// The format of ids belongs to the driver, so that the code may be INVALID_ARGUMENT or another one.
fn snapshot_unknown(world: &World<'_>) -> Verdict {
    for wrong in of_unknown(world)? {
        if wrong.refusal(world)?.is_none() {
            return Err(fail(wrong.call(), "NOT_FOUND or another error", "OK"));
        }
    }
    Ok(())
}

/// Judges each error that the driver returns to the wrong requests.
fn each_failure(world: &World<'_>, expected: &str, judge: fn(&Failure) -> bool) -> Verdict {
    let mut wrong = wrong_offsets(world, |size| vec![-1, size.saturating_add(1)])?;
    wrong.extend(without_ids(world)?);
    wrong.extend(of_unknown(world)?);
    wrong.extend(of_deleted(world).or_else(|outcome| match outcome {
        Outcome::Stopped => Err(Outcome::Stopped),
        _ => Ok(Vec::new()),
    })?);
    let mut count = 0;
    for wrong in wrong {
        let Some(failure) = wrong.refusal(world)?.filter(|failure| failure.is_sent) else {
            continue;
        };
        count += 1;
        if !judge(&failure) {
            return Err(fail(wrong.call(), expected, failure.to_string()));
        }
    }
    match count {
        0 => Err(Outcome::Skip("the driver returned no error".to_owned())),
        _ => Ok(()),
    }
}

fn max_results_negative(world: &World<'_>) -> Verdict {
    let (names, queries) = match (world.shot("fresh")?, world.shot("sparse")) {
        (fresh, Ok(sparse)) => {
            ("sparse", vec![Need::allocated(sparse), Need::delta(fresh, sparse)])
        }
        (fresh, _) => ("fresh", vec![Need::allocated(fresh)]),
    };
    let window = Window { starting_offset: 0, max_results: -1 };
    for need in queries {
        let stream = world.stream(&need.query, window);
        match &stream.end {
            End::Complete => need.judge(world, window, &stream)?,
            End::Failed(_) => {}
            End::Stopped => return Err(Outcome::Stopped),
            End::Endless(patience) => {
                let call = named(&need.query, names, window);
                let seen = format!("no end within {} s", patience.as_secs());
                return Err(fail(call, "an error, or a complete stream", seen));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_id_has_the_form_of_a_known_one() {
        assert_eq!(unknown_id("snap-a-12ef"), "snap-a-12e0");
        assert_eq!(unknown_id("vol@120"), "vol@121");
        assert_eq!(unknown_id("--"), "--0");
    }
}
