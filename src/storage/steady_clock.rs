//! Steps of the clock. A retention is measured by the clock, because it outlasts processes, but a
//! clock that was just set may be wrong: a machine may start with a clock of another year and
//! correct it later. Records that were dropped meanwhile would be lost.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The difference between the clock and a monotonic one, between two observations, that is a step.
const TOLERANCE_SECONDS: u64 = 10;

/// How long the clock must run without a step before a retention ends. Retentions that are shorter
/// wait for their own duration.
pub const SETTLING: Duration = Duration::from_secs(900);

#[derive(Debug)]
pub struct SteadyClock(Mutex<Observed>);

#[derive(Debug, Clone, Copy)]
struct Observed {
    /// Seconds since the epoch.
    clock: u64,
    at: Instant,
    /// The start, or the last step.
    steady_since: Instant,
}

impl SteadyClock {
    pub fn start(clock: u64, at: Instant) -> Self {
        Self(Mutex::new(Observed { clock, at, steady_since: at }))
    }

    /// How long the clock has run without a step. `clock` is its value at `at`.
    pub fn steady_for(&self, clock: u64, at: Instant) -> Duration {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let expected = last.clock.saturating_add((at - last.at).as_secs());
        let is_step = clock.abs_diff(expected) > TOLERANCE_SECONDS;
        let steady_since = if is_step { at } else { last.steady_since };
        *last = Observed { clock, at, steady_since };
        at - steady_since
    }

    /// For tests: as if the clock had run without a step for long.
    #[cfg(test)]
    pub fn settle(&self) {
        let mut last = self.0.lock().unwrap();
        last.steady_since = last.steady_since.checked_sub(SETTLING).unwrap();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_in_either_direction_is_noticed() {
        let start = Instant::now();
        let clock = SteadyClock::start(1000, start);
        let steady_for = |value: u64, seconds: u64| {
            clock.steady_for(value, start + Duration::from_secs(seconds)).as_secs()
        };
        assert_eq!(steady_for(1060, 60), 60);
        assert_eq!(steady_for(1125, 120), 120, "adjusted slowly");
        assert_eq!(steady_for(4785, 180), 0, "an hour forward");
        assert_eq!(steady_for(4845, 240), 60);
        assert_eq!(steady_for(1305, 300), 0, "and back");
        assert_eq!(steady_for(1365, 360), 60);
        assert_eq!(steady_for(0, 420), 0, "before the epoch");
    }
}
