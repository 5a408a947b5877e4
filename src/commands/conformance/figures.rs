//! Figures of a driver: no rule, but what its users want to know.

use std::time::Duration;

use super::content::Ranges;
use super::door::{End, Query, Stream, Window};
use super::world::{Group, World};

/// Measured on a snapshot with thousands of extents.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Figures {
    /// Tuples a second.
    pub rate: f64,
    pub first_message: Duration,
    /// The part of the bytes in a delta that differ.
    pub precision: f64,
    /// The largest number of bytes that divides all offsets.
    pub granularity: u64,
}

/// Those of csi-loopback 0.1.0 with an image pool, through its socket: a release build on two cores,
/// 2026-11-27.
pub const REFERENCE: Figures = Figures {
    rate: 2_000_000.0,
    first_message: Duration::from_micros(900),
    precision: 1.0,
    granularity: 8192,
};

/// The figures of the streams that the rules have read; nothing if they have not.
pub fn of(world: &World<'_>) -> Option<Figures> {
    if !world.is_prepared(Group::Main) {
        return None;
    }
    let (base, many) = (world.shot("changed").ok()?, world.shot("many").ok()?);
    let query = Query::Delta { base: base.snapshot.base.clone(), target: many.snapshot.id.clone() };
    let stream = world.known_stream(&query, Window::default())?;
    measured(&stream, &many.image.differences(&base.image))
}

fn measured(stream: &Stream, needed: &Ranges) -> Option<Figures> {
    if !matches!(stream.end, End::Complete) {
        return None;
    }
    let tuples = stream.tuples().count();
    let (mut named, mut granularity) = (0, 0);
    for tuple in stream.tuples() {
        named += u64::try_from(tuple.size).unwrap_or(0);
        granularity = common(granularity, tuple.offset.unsigned_abs());
    }
    let seconds = stream.whole.as_secs_f64();
    let is_measured = tuples > 0 && named > 0 && seconds > 0.0;
    is_measured.then(|| Figures {
        rate: tuples as f64 / seconds,
        first_message: stream.first_message,
        precision: (needed.bytes() as f64 / named as f64).min(1.0),
        granularity,
    })
}

/// The greatest common divisor.
fn common(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { common(b, a % b) }
}
