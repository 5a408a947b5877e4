//! Advice: habits of a driver that make its clients simpler. The text of the specification does not
//! require them.

use tonic::Code;

use super::super::door::End;
use super::super::situations::DELETED;
use super::super::world::World;
use super::bytes::Need;
use super::{Map, Outcome, Rule, Severity, Verdict, WHOLE, allocated, covered, delta, fail, named};
use grpc::proto::csi::v1::BlockMetadataType as Style;

pub const RULES: &[Rule] = &[
    Rule {
        id: "empty-message",
        severity: Severity::Advice,
        sentence: "A stream without tuples has one message, with type and capacity.",
        source: "spec.md:3705-3708",
        consequence: "A client needs another source for the size of an empty volume.",
        check: empty_message,
    },
    Rule {
        id: "within-capacity",
        severity: Severity::Advice,
        sentence: "With VARIABLE_LENGTH, no tuple ends after volume_capacity_bytes.",
        source: "spec.md:3705",
        consequence: "A client reads past the end of the device.",
        check: within_capacity,
    },
    Rule {
        id: "snapshot-capacity",
        severity: Severity::Advice,
        sentence: "volume_capacity_bytes is the size of the snapshot, also after the volume has grown.",
        source: "spec.md:3705",
        consequence: "A client that restores to this size creates a larger volume.",
        check: snapshot_capacity,
    },
    Rule {
        id: "written-zeros",
        severity: Severity::Advice,
        sentence: "Zeros that were written are allocated.",
        source: "spec.md:3655-3657",
        consequence: "A client must restore to a volume of zeros.",
        check: written_zeros,
    },
    Rule {
        id: "deleted-base",
        severity: Severity::Advice,
        sentence: "A deleted snapshot can be the base of a delta.",
        source: "KEP-3314",
        consequence: "A client must keep the snapshot of the last backup.",
        check: deleted_base,
    },
    Rule {
        id: "orphan",
        severity: Severity::Advice,
        sentence: "Snapshots whose volume was deleted have metadata.",
        source: "spec.md:3736",
        consequence: "The last snapshot of a deleted volume can be backed up only in full, by reading it.",
        check: orphan,
    },
];

fn empty_message(world: &World<'_>) -> Verdict {
    let shot = world.shot("sparse")?;
    let query = delta(&shot.snapshot, &shot.snapshot);
    let stream = world.complete(&query, WHOLE)?;
    match stream.messages.is_empty() {
        true => Err(fail(named(&query, "sparse to sparse", WHOLE), "one message", "no message")),
        false => Ok(()),
    }
}

fn within_capacity(world: &World<'_>) -> Verdict {
    for shot in world.shots()?.into_iter().filter(|shot| !shot.is_orphan) {
        let query = allocated(&shot.snapshot);
        let stream = match world.complete(&query, WHOLE) {
            Ok(stream) => stream,
            Err(Outcome::Skip(_)) => continue,
            Err(other) => return Err(other),
        };
        for message in &stream.messages {
            let is_fixed = message.block_metadata_type == i32::from(Style::FixedLength);
            let past = message.tuples.iter().find(|tuple| tuple.end() > message.capacity);
            if let Some(tuple) = past.filter(|_| !is_fixed && message.capacity > 0) {
                let call = named(&query, &shot.name, WHOLE);
                let expected = format!("no tuple past {}", message.capacity);
                return Err(fail(call, expected, format!("{}+{}", tuple.offset, tuple.size)));
            }
        }
    }
    Ok(())
}

fn snapshot_capacity(world: &World<'_>) -> Verdict {
    let shot = world.shot("grown-1")?;
    let query = allocated(&shot.snapshot);
    let stream = world.complete(&query, WHOLE)?;
    let capacity = stream.messages.first().map(|message| message.capacity);
    let capacity = capacity.and_then(|capacity| u64::try_from(capacity).ok());
    let Some(capacity) = capacity.filter(|capacity| *capacity > 0) else {
        return Err(Outcome::Skip("the driver reports no capacity".to_owned()));
    };
    match capacity == shot.size || capacity == shot.snapshot.size {
        true => Ok(()),
        false => {
            let call = named(&query, &shot.name, WHOLE);
            Err(fail(call, shot.size.to_string(), capacity.to_string()))
        }
    }
}

fn written_zeros(world: &World<'_>) -> Verdict {
    let shot = world.shot("changed")?;
    let query = allocated(&shot.snapshot);
    let stream = world.complete(&query, WHOLE)?;
    let missing = shot.written_zeros.without(&covered(&stream));
    if missing.is_empty() {
        return Ok(());
    }
    let call = named(&query, &shot.name, WHOLE);
    let seen = format!("{} bytes of zeros that were written are missing", missing.bytes());
    let outcome = fail(call, format!("{} bytes", shot.written_zeros.bytes()), seen);
    let map = Map { size: shot.size, needed: shot.written_zeros.clone(), missing };
    Err(outcome.with(|finding| finding.map = Some(map)))
}

fn deleted_base(world: &World<'_>) -> Verdict {
    let (base, target) = (world.shot(DELETED)?, world.shot("chain-6")?);
    // Without deltas at all, another rule skips.
    let usual = Need::delta(target, world.shot("chain-7")?);
    world.complete(&usual.query, WHOLE)?;
    let query = delta(&base.snapshot, &target.snapshot);
    answered(world, &query, &format!("{} (deleted) to {}", base.name, target.name))
}

fn orphan(world: &World<'_>) -> Verdict {
    let (base, target) = (world.shot("orphan-1")?, world.shot("orphan-2")?);
    answered(world, &allocated(&base.snapshot), &base.name)?;
    let query = delta(&base.snapshot, &target.snapshot);
    answered(world, &query, &format!("{} to {}", base.name, target.name))
}

fn answered(world: &World<'_>, query: &super::super::door::Query, names: &str) -> Verdict {
    match &world.stream(query, WHOLE).end {
        End::Complete => Ok(()),
        End::Stopped => Err(Outcome::Stopped),
        End::Failed(failure) if failure.code == Code::Unimplemented => {
            Err(Outcome::Skip(failure.to_string()))
        }
        End::Failed(failure) => Err(fail(named(query, names, WHOLE), "OK", failure.to_string())),
        End::Endless(_) => Err(Outcome::Skip("the call did not end".to_owned())),
    }
}
