//! The rules, as data. A rule is a *MUST* only where the text of CSI v1.13 says so; its source is the
//! line of `spec.md` of that version, or of the released protocol of sidecars: `schema.proto` and
//! `types.go` of external-snapshot-metadata v1.1.0, and KEP-3314. A rule of the severity *data* is what a backup relies on. The
//! rules know the situations and the door to the driver, but not which door it is.

mod bytes;
mod errors;
mod habits;
mod offsets;
mod shape;
mod sidecar;

use super::content::Ranges;
use super::door::{Query, Stream, Window};
use super::world::World;

/// What the violation of a rule means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The text of the specification requires it.
    Must,
    /// A backup would be wrong.
    Data,
    /// Clients are better off with it.
    Advice,
}

impl Severity {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Must => "MUST",
            Self::Data => "data",
            Self::Advice => "advice",
        }
    }
}

/// A rule and its check.
#[derive(Clone, Copy)]
pub struct Rule {
    pub id: &'static str,
    pub severity: Severity,
    /// What a driver does.
    pub sentence: &'static str,
    /// Lines of the specification.
    pub source: &'static str,
    /// What the violation does to a backup.
    pub consequence: &'static str,
    pub check: fn(&World<'_>) -> Verdict,
}

/// The result of a check; nothing if the driver follows the rule.
pub type Verdict = Result<(), Outcome>;

/// Why a rule is not passed.
#[derive(Debug, Clone)]
pub enum Outcome {
    /// The rule cannot be judged, for this reason.
    Skip(String),
    Fail(Box<Finding>),
    /// The user or the time limit stopped the run.
    Stopped,
}

impl Outcome {
    /// Changes the finding, if it is one.
    fn with(mut self, change: impl FnOnce(&mut Finding)) -> Self {
        if let Self::Fail(finding) = &mut self {
            change(finding);
        }
        self
    }

    pub fn reason(self) -> String {
        match self {
            Self::Skip(reason) => reason,
            Self::Fail(finding) => finding.seen,
            Self::Stopped => "stopped".to_owned(),
        }
    }
}

/// A violation.
#[derive(Debug, Clone, Default)]
pub struct Finding {
    /// The call that shows it.
    pub call: String,
    pub expected: String,
    pub seen: String,
    pub map: Option<Map>,
}

/// What a stream lacks.
#[derive(Debug, Clone)]
pub struct Map {
    /// Of the volume, in bytes.
    pub size: u64,
    pub needed: Ranges,
    pub missing: Ranges,
}

const WHOLE: Window = Window { starting_offset: 0, max_results: 0 };

/// All rules, in the order in which they run.
pub fn all() -> Vec<Rule> {
    let parts =
        [shape::RULES, bytes::RULES, offsets::RULES, habits::RULES, errors::RULES, sidecar::RULES];
    parts.concat()
}

fn fail(call: String, expected: impl Into<String>, seen: impl Into<String>) -> Outcome {
    let (expected, seen) = (expected.into(), seen.into());
    Outcome::Fail(Box::new(Finding { call, expected, seen, map: None }))
}

/// Skips a rule about errors for which a sidecar has its own.
fn at_driver(world: &World<'_>) -> Verdict {
    match world.door.sidecar() {
        None => Ok(()),
        Some(_) => Err(Outcome::Skip("the sidecar answers in place of the driver".to_owned())),
    }
}

/// The call, as a finding names it. `name` is that of the situation.
fn named(query: &Query, names: &str, window: Window) -> String {
    let Window { starting_offset, max_results } = window;
    let mut text = format!("{} of {names}", query.method());
    if starting_offset != 0 {
        text += &format!(", starting_offset {starting_offset}");
    }
    if max_results != 0 {
        text += &format!(", max_results {max_results}");
    }
    text
}

/// The ranges that the tuples of a stream name.
fn covered(stream: &Stream) -> Ranges {
    let ranges = stream.tuples().filter_map(|tuple| {
        let start = u64::try_from(tuple.offset.max(0)).ok()?;
        let end = u64::try_from(tuple.end()).ok()?;
        (start < end).then_some(start..end)
    });
    Ranges::of(ranges.collect())
}

fn allocated(snapshot: &super::door::Snapshot) -> Query {
    Query::Allocated { snapshot: snapshot.id.clone() }
}

fn delta(base: &super::door::Snapshot, target: &super::door::Snapshot) -> Query {
    Query::Delta { base: base.base.clone(), target: target.id.clone() }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_rule_has_an_id_a_source_and_a_consequence() {
        let rules = all();
        let ids: BTreeSet<&str> = rules.iter().map(|rule| rule.id).collect();
        assert_eq!(ids.len(), rules.len(), "ids differ");
        for rule in &rules {
            let is_id = |letter: char| letter.is_ascii_lowercase() || letter == '-';
            assert!(rule.id.chars().all(is_id), "{}", rule.id);
            assert!(rule.sentence.ends_with('.') && rule.consequence.ends_with('.'), "{}", rule.id);
            let texts = ["spec.md:", "schema.proto:", "types.go:", "KEP-3314"];
            let has_lines = texts.iter().any(|text| rule.source.starts_with(text));
            assert!(has_lines || rule.severity == Severity::Advice, "{}", rule.id);
        }
    }
}
