//! Limits the log of a recurring problem to one line per change.

/// The problem that was logged last, until it ends.
#[derive(Debug, Default)]
pub struct RateLimitedLog(Option<String>);

impl RateLimitedLog {
    /// Records the current problem. Returns whether it must be logged: it differs from the last
    /// one.
    pub fn is_new(&mut self, problem: &str) -> bool {
        let known = self.0.as_deref() == Some(problem);
        if !known {
            self.0 = Some(problem.to_owned());
        }
        !known
    }

    /// Records that there is no problem. Returns whether there was one.
    pub fn clear(&mut self) -> bool {
        self.0.take().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_is_logged_once_until_it_changes_or_ends() {
        let mut log = RateLimitedLog::default();
        assert!(!log.clear());
        assert_eq!(["a", "a", "b", "a"].map(|text| log.is_new(text)), [true, false, true, true]);
        assert!(log.clear() && !log.clear());
        assert!(log.is_new("a"));
    }
}
