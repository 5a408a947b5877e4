//! One run: each rule in its order, and what it found.

use std::time::{Duration, Instant};

use super::door::About;
use super::figures::{self, Figures};
use super::rules::{Finding, Outcome, Rule, Severity};
use super::world::World;

/// A rule and its result.
pub struct Judged<'r> {
    pub rule: &'r Rule,
    pub result: Judgment,
    pub time: Duration,
}

#[derive(Debug, Clone)]
pub enum Judgment {
    Passed,
    Failed(Box<Finding>),
    Skipped(String),
}

impl Judged<'_> {
    pub fn fails(&self) -> bool {
        matches!(self.result, Judgment::Failed(_))
    }
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    Done,
    /// By a signal or by the time limit, before all rules were judged.
    Stopped,
}

pub struct Run<'r> {
    pub driver: About,
    pub seed: u64,
    pub judged: Vec<Judged<'r>>,
    pub ended: Ended,
    pub time: Duration,
    pub figures: Option<Figures>,
    /// What could not be removed.
    pub remaining: Vec<String>,
}

impl<'r> Run<'r> {
    /// Judges the rules. `note` is called before each.
    pub fn of(world: &World<'_>, rules: &'r [Rule], note: &mut dyn FnMut(&Rule)) -> Self {
        let start = Instant::now();
        let mut run = Self {
            driver: world.door.about().clone(),
            seed: world.settings.seed,
            judged: Vec::new(),
            ended: Ended::Done,
            time: Duration::ZERO,
            figures: None,
            remaining: Vec::new(),
        };
        for rule in rules {
            note(rule);
            let begin = Instant::now();
            let result = match (rule.check)(world) {
                Ok(()) => Judgment::Passed,
                Err(Outcome::Skip(reason)) => Judgment::Skipped(reason),
                Err(Outcome::Fail(finding)) => Judgment::Failed(finding),
                Err(Outcome::Stopped) => {
                    run.ended = Ended::Stopped;
                    break;
                }
            };
            run.judged.push(Judged { rule, result, time: begin.elapsed() });
        }
        run.figures = figures::of(world);
        run.time = start.elapsed();
        run
    }

    pub fn passed(&self) -> usize {
        self.judged.iter().filter(|judged| matches!(judged.result, Judgment::Passed)).count()
    }

    pub fn skipped(&self) -> usize {
        self.judged.iter().filter(|judged| matches!(judged.result, Judgment::Skipped(_))).count()
    }

    /// The number of failed rules of a severity.
    pub fn failed(&self, severity: Severity) -> usize {
        let is_one = |judged: &&Judged<'_>| judged.fails() && judged.rule.severity == severity;
        self.judged.iter().filter(is_one).count()
    }
}
