//! Named faults for the tests of backup clients, and what a client must do. Each is a rule of
//! `--fault`, which accepts the name in its place.

use std::fmt::Write as _;

/// Begins the names.
pub const PREFIX: &str = "scenario-";

/// A fault that a backup client must survive.
#[derive(Debug)]
pub struct Scenario {
    /// The rest of the name.
    pub name: &'static str,
    pub rule: &'static str,
    /// What the client sees.
    pub sees: &'static str,
    /// What it must do, so that no backup is wrong.
    pub must: &'static str,
}

pub const SCENARIOS: [Scenario; 8] = [
    Scenario {
        name: "tracking-lost",
        rule: "tracking-lost",
        sees: "a delta is FAILED_PRECONDITION",
        must: "Take a full backup, or fail. Never retry forever.",
    },
    Scenario {
        name: "deleted-base",
        rule: "tracking-lost,code=NOT_FOUND",
        sees: "a delta is NOT_FOUND, because the base is gone",
        must: "Take a full backup, or fail. An empty delta is not the answer.",
    },
    Scenario {
        name: "stream-aborted",
        rule: "stream-abort,after=3,times=1",
        sees: "UNAVAILABLE after some extents, once",
        must: "Request the rest from the end of the last extent, or start again, or fail. What arrived is no whole listing.",
    },
    Scenario {
        name: "expired-token",
        rule: "stream-abort,after=3,code=UNAUTHENTICATED,times=1",
        sees: "UNAUTHENTICATED after some extents, once",
        must: "Get a new token and continue, or fail.",
    },
    Scenario {
        name: "slow-answers",
        rule: "stream-stall,after=3,for=3s",
        sees: "a stream that pauses for seconds",
        must: "Wait, within the client's own time limit.",
    },
    Scenario {
        name: "failed-stream",
        rule: "io-error,after=3",
        sees: "INTERNAL after some extents, always",
        must: "Fail. The backup does not count as complete.",
    },
    Scenario {
        name: "unsorted",
        rule: "wrong-metadata,how=swapped-tuples",
        sees: "extents that do not ascend",
        must: "Refuse the listing, or copy all of it. Never resume from the last extent.",
    },
    Scenario {
        name: "duplicates",
        rule: "wrong-metadata,how=repeated-tuple",
        sees: "the last extent twice",
        must: "Refuse the listing, or copy the extent again. Sizes and progress count it once.",
    },
];

/// The rule that a name stands for.
pub fn rule(name: &str) -> Option<&'static str> {
    let name = name.strip_prefix(PREFIX)?;
    SCENARIOS.iter().find(|scenario| scenario.name == name).map(|scenario| scenario.rule)
}

/// The checklist, as a table in Markdown.
pub fn checklist() -> String {
    let mut text = String::from("| `--fault` | same as | the client sees | it must |\n");
    text += "|---|---|---|---|\n";
    for Scenario { name, rule, sees, must } in &SCENARIOS {
        let _ = writeln!(text, "| `{PREFIX}{name}` | `{rule}` | {sees} | {must} |");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::Rule;
    use super::*;

    #[test]
    fn each_scenario_is_its_rule_and_accepts_its_keys() {
        for Scenario { name, rule, .. } in &SCENARIOS {
            let parsed = |text: &str| text.parse::<Rule>().unwrap();
            let name = format!("{PREFIX}{name}");
            assert_eq!(parsed(&name), parsed(rule), "{name}");
            let matching = parsed(&format!("{name},match=snap-a"));
            assert_eq!(matching.about.as_deref(), Some("snap-a"), "{name}");
        }
        let error = "scenario-none".parse::<Rule>().unwrap_err();
        assert!(error.contains("scenario-unsorted"), "{error}");
    }
}
