//! Mutants of drivers and sidecars, which conformance must find.

use std::time::UNIX_EPOCH;

use csi_loopback::conformance::Found;

/// Asserts that a mutant fails `rule` and the others, and no more. Skipped rules do not count.
pub fn assert_fails_only(found: &[Found], rule: &str, others: &[&str]) {
    let seen = |(_, result): &&Found| matches!(result, Err(seen) if !seen.starts_with("skipped: "));
    let mut failed: Vec<&str> = found.iter().filter(seen).map(|(rule, _)| *rule).collect();
    let mut expected = [&[rule], others].concat();
    failed.sort_unstable();
    expected.sort_unstable();
    assert_eq!(failed, expected, "the mutant of {rule}: {found:#?}");
}

/// Whether it is the turn of `number`, of a cycle of days. `MUTANTS=all` makes every day its turn.
pub fn is_due(number: usize, days: u64) -> bool {
    let today = UNIX_EPOCH.elapsed().unwrap().as_secs() / 86_400;
    std::env::var("MUTANTS").is_ok_and(|which| which == "all")
        || (number as u64 + today).is_multiple_of(days)
}
