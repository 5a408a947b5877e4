//! Times of snapshots. They ascend within a volume, also after the clock was set back, so that
//! clients that know only times see the order of the chain.

use super::model::Volume;

/// Seconds and nanoseconds since the epoch.
pub type Time = (u64, u32);

/// The time of snapshots that are taken of these volumes at `clock`: one time for all, later than
/// every earlier snapshot of each.
pub fn ascending<'v>(volumes: impl IntoIterator<Item = &'v Volume>, clock: Time) -> Time {
    let newest = volumes.into_iter().filter_map(|volume| volume.newest_snapshot_at);
    newest.map(next).fold(clock, Time::max)
}

/// The time of the last snapshot of a volume, or the clock's if that is later: no event of the
/// volume is earlier than its last snapshot.
pub fn not_before_newest(volume: &Volume, clock: u64) -> u64 {
    volume.newest_snapshot_at.map_or(clock, |(seconds, _)| seconds.max(clock))
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
