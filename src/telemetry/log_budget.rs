//! Limits log lines that any client can cause. Lines over the limit are counted, and the next line
//! reports their number.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Maximum lines per interval.
const LINES: u32 = 10;
const INTERVAL: Duration = Duration::from_secs(1);

/// The lines of one kind.
#[derive(Debug, Default)]
pub struct LogBudget(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    began: Option<Instant>,
    lines: u32,
    omitted: u64,
}

impl LogBudget {
    /// Whether a line may be logged, and then how many lines were omitted before it.
    pub fn line(&self) -> Option<u64> {
        self.line_at(Instant::now())
    }

    fn line_at(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.began.is_none_or(|began| now.duration_since(began) >= INTERVAL) {
            (state.began, state.lines) = (Some(now), 0);
        }
        if state.lines == LINES {
            state.omitted += 1;
            return None;
        }
        state.lines += 1;
        Some(std::mem::take(&mut state.omitted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_over_the_limit_are_counted() {
        let (budget, start) = (LogBudget::default(), Instant::now());
        let lines = |at, count| (0..count).filter_map(|_| budget.line_at(at)).collect::<Vec<_>>();
        assert_eq!(lines(start, 25), [0; 10]);
        let later = start + INTERVAL;
        assert_eq!(lines(later, 2), [15, 0]);
        assert_eq!(lines(later, 100).len(), 8);
    }
}
