//! Times of snapshots. They ascend within a volume, also after the clock was set back, so that
//! clients that know only times see the order of the chain.

use super::catalog::ReadTx;
use super::error::Result;
use super::model::{SnapshotPhase, Volume};

/// Seconds and nanoseconds since the epoch.
pub type Time = (u64, u32);

/// The time of snapshots that are taken of these volumes at `clock`: one time for all, later than
/// every earlier snapshot of each.
pub fn ascending<'v>(
    reading: &ReadTx,
    volumes: impl IntoIterator<Item = &'v Volume>,
    clock: Time,
) -> Result<Time> {
    let mut time = clock;
    for volume in volumes {
        time = time.max(newest(reading, volume)?.map_or(time, next));
    }
    Ok(time)
}

/// The time of the last snapshot of a volume, or the clock's if that is later: no event of the
/// volume is earlier than its last snapshot.
pub fn not_before_newest(reading: &ReadTx, volume: &Volume, clock: u64) -> Result<u64> {
    Ok(newest(reading, volume)?.map_or(clock, |(seconds, _)| seconds.max(clock)))
}

fn newest(reading: &ReadTx, volume: &Volume) -> Result<Option<Time>> {
    if volume.newest_snapshot_at.is_some() {
        return Ok(volume.newest_snapshot_at);
    }
    // An earlier version did not store the time, and its times may not ascend.
    let mut newest = None;
    reading.visit_newest_first(&volume.id, u64::MAX, |row| {
        if row.phase != SnapshotPhase::Taking {
            newest = newest.max(Some(row.created_at));
        }
        true
    })?;
    Ok(newest)
}

fn next((seconds, nanoseconds): Time) -> Time {
    match nanoseconds {
        0..999_999_999 => (seconds, nanoseconds + 1),
        _ => (seconds.saturating_add(1), 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_time_is_a_nanosecond_later() {
        assert_eq!(next((7, 0)), (7, 1));
        assert_eq!(next((7, 999_999_998)), (7, 999_999_999));
        assert_eq!(next((7, 999_999_999)), (8, 0));
        assert_eq!(next((u64::MAX, u32::MAX)), (u64::MAX, 0));
    }
}
