//! Runs many sequences of operations. A failing one is shrunk: halves, quarters and finally single
//! operations are removed as long as it still fails, then its operations are simplified.

use std::cell::{Cell, RefCell};
use std::io::{self, Write};
use std::ops::AddAssign;
use std::sync::Once;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};
use std::{fmt, panic, thread};

use proptest::strategy::{BoxedStrategy, NewTree, Strategy, ValueTree};
use proptest::test_runner::{Config, RngSeed, TestError, TestRunner};

use support::setting;

use super::operation::{Mix, Operation, operation};

/// Time limit for shrinking, in milliseconds. The shortest sequence found by then is reported.
const SHRINK_MILLISECONDS: u32 = 60_000;

/// A sequence takes seconds, or a minute under load.
const LONGEST: Duration = Duration::from_secs(600);

/// Statistics of the runs.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counts {
    pub operations: u64,
    pub snapshots: u64,
    pub groups: u64,
    pub deleted: u64,
    pub deltas: u64,
    pub windows: u64,
    pub refused: u64,
    pub clones: u64,
    pub restores: u64,
    pub restarts: u64,
    /// Deltas of adjacent snapshots in which no block was rewritten with the same content.
    pub exact: Precision,
    /// All other deltas of adjacent snapshots.
    pub other: Precision,
}

/// Blocks.
#[derive(Debug, Clone, Copy, Default)]
pub struct Precision {
    pub reported: u64,
    pub differing: u64,
}

impl AddAssign for Precision {
    fn add_assign(&mut self, more: Self) {
        self.reported += more.reported;
        self.differing += more.differing;
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, more: Self) {
        self.operations += more.operations;
        self.snapshots += more.snapshots;
        self.groups += more.groups;
        self.deleted += more.deleted;
        self.deltas += more.deltas;
        self.windows += more.windows;
        self.refused += more.refused;
        self.clones += more.clones;
        self.restores += more.restores;
        self.restarts += more.restarts;
        self.exact += more.exact;
        self.other += more.other;
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { reported, differing } = self;
        let ratio = *reported as f64 / (*differing).max(1) as f64;
        write!(f, "{ratio:.4} ({reported} reported / {differing} differing)")
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} operations, {} snapshots ({} in groups, {} deleted), {} deltas, {} rightly refused, \
             {} interrupted and resumed, {} clones, {} restores, {} restarts; 0 blocks missed; ",
            self.operations,
            self.snapshots,
            self.groups,
            self.deleted,
            self.deltas,
            self.refused,
            self.windows,
            self.clones,
            self.restores,
            self.restarts,
        )?;
        if self.exact.differing > 0 {
            write!(f, "precision {} where nothing was rewritten, else ", self.exact)?;
        } else {
            write!(f, "precision ")?;
        }
        write!(f, "{}", self.other)
    }
}

/// A run configuration.
pub struct Plan<'a> {
    /// The subject, for the report.
    pub on: &'a str,
    pub cases: u64,
    /// Operations in a sequence.
    pub length: usize,
    pub mix: Mix,
}

/// Runs sequences one after the other with `run`, which panics when an invariant is violated.
pub fn explore(plan: &Plan<'_>, run: impl Fn(u64, &[Operation]) -> Counts) -> Counts {
    explore_with(plan.on, plan.cases, plan.length, operation(plan.mix), run)
}

/// Like [`explore`], for any kind of operation. A sequence has `length` of them.
pub fn explore_with<O, C>(
    on: &str,
    cases: u64,
    length: usize,
    operation: BoxedStrategy<O>,
    run: impl Fn(u64, &[O]) -> C,
) -> C
where
    O: fmt::Debug + 'static,
    C: AddAssign + Default + fmt::Display,
{
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    let first = setting("ORACLE_SEED").unwrap_or(now % 1_000_000_000);
    let cases = setting("ORACLE_CASES").unwrap_or(cases);
    let total = RefCell::new(C::default());
    let started = Instant::now();
    let sequences = Sequences { operation, length };
    for seed in first..first + cases {
        println!("{on}: seed {seed}");
        explore_one(on, &sequences, seed, |operations| {
            let counts = watched(&format!("{on}: seed {seed}"), || run(seed, operations));
            *total.borrow_mut() += counts;
        });
    }
    let (total, seconds) = (total.into_inner(), started.elapsed().as_secs());
    println!("report: {on}: {cases} cases from seed {first}, {seconds} s: {total}");
    total
}

/// Runs a sequence, and reports if it hangs. The process continues, because it could not end with
/// its own disk hanging.
fn watched<T>(what: &str, run: impl FnOnce() -> T) -> T {
    let (ended, watch) = mpsc::channel::<()>();
    let hangs = format!("{what}: a sequence has run for {} s: it hangs", LONGEST.as_secs());
    thread::spawn(move || {
        if watch.recv_timeout(LONGEST) == Err(RecvTimeoutError::Timeout) {
            // The output of the macros is buffered until the test ends.
            let _ = writeln!(io::stderr(), "{hangs}");
        }
    });
    let result = run();
    drop(ended);
    result
}

thread_local! {
    /// Whether panics of this thread are not printed: those after the first failure.
    static SILENT: Cell<bool> = const { Cell::new(false) };
}

/// Implements [`SILENT`].
fn silence_panics_on_demand() {
    static DONE: Once = Once::new();
    DONE.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !SILENT.get() {
                before(info);
            }
        }));
    });
}

fn explore_one<O: fmt::Debug + 'static>(
    on: &str,
    sequences: &Sequences<O>,
    seed: u64,
    run: impl Fn(&[O]),
) {
    let mut runner = TestRunner::new(Config {
        cases: 1,
        failure_persistence: None,
        max_shrink_iters: 10_000,
        max_shrink_time: SHRINK_MILLISECONDS,
        rng_seed: RngSeed::Fixed(seed),
        ..Config::default()
    });
    silence_panics_on_demand();
    let attempts = Cell::new(0);
    let result = runner.run(sequences, |operations| {
        attempts.set(attempts.get() + 1);
        let failed = panic::catch_unwind(panic::AssertUnwindSafe(|| run(&operations)));
        SILENT.set(SILENT.get() || failed.is_err());
        failed.unwrap_or_else(|why| panic::resume_unwind(why));
        Ok(())
    });
    SILENT.set(false);
    match result {
        Ok(()) => {}
        Err(TestError::Abort(why)) => panic!("{why}"),
        Err(TestError::Fail(why, operations)) => {
            println!(
                "report: {on}: a law is broken; {} operations do it, of {}, found in {} runs:",
                operations.len(),
                sequences.length,
                attempts.get(),
            );
            operations.iter().for_each(|operation| println!("    {operation:?}"));
            println!("replay with: ORACLE_SEED={seed} ORACLE_CASES=1 and the name of the test");
            panic!("{on}: {why}");
        }
    }
}

#[derive(Debug)]
struct Sequences<O> {
    operation: BoxedStrategy<O>,
    length: usize,
}

impl<O: fmt::Debug + 'static> Strategy for Sequences<O> {
    type Tree = Sequence<O>;
    type Value = Vec<O>;

    fn new_tree(&self, runner: &mut TestRunner) -> NewTree<Self> {
        let trees = (0..self.length).map(|_| self.operation.new_tree(runner));
        let trees = trees.collect::<Result<Vec<_>, _>>()?;
        let kept = (0..self.length).collect();
        let (size, end) = (self.length / 2, self.length);
        Ok(Sequence { trees, kept, removed: None, size, end, at_first: end, next: 0 })
    }
}

type Tree<O> = <BoxedStrategy<O> as Strategy>::Tree;

/// A sequence that is being shrunk. Proptest's own vectors remove one element after the other,
/// which takes hours if every attempt takes seconds.
struct Sequence<O: fmt::Debug + 'static> {
    trees: Vec<Tree<O>>,
    /// The remaining operations, by index.
    kept: Vec<usize>,
    /// What the last attempt removed, and from where; `None` for another kind of attempt.
    removed: Option<(usize, Vec<usize>)>,
    /// The number of operations to remove at once. 0: simplify each operation.
    size: usize,
    /// The end of the next range to remove: the last ones first, because no operation depends on
    /// them.
    end: usize,
    /// The number of operations when this removal size began.
    at_first: usize,
    /// The operation that is being simplified, as an index of the remaining ones.
    next: usize,
}

impl<O: fmt::Debug + 'static> Sequence<O> {
    /// The next attempt, if any.
    fn attempt(&mut self) -> bool {
        while self.size > 0 {
            self.end = self.end.min(self.kept.len());
            if self.end > 0 {
                let start = self.end.saturating_sub(self.size);
                self.removed = Some((start, self.kept.drain(start..self.end).collect()));
                self.end = start;
                return true;
            }
            // After a removal, others may not be needed either.
            let again = self.size == 1 && self.kept.len() < self.at_first;
            if !again {
                self.size = (self.size / 2).min(self.kept.len() / 2);
            }
            self.end = self.kept.len();
            self.at_first = self.end;
        }
        while self.next < self.kept.len() {
            if self.trees[self.kept[self.next]].simplify() {
                return true;
            }
            self.next += 1;
        }
        false
    }
}

impl<O: fmt::Debug + 'static> ValueTree for Sequence<O> {
    type Value = Vec<O>;

    fn current(&self) -> Vec<O> {
        self.kept.iter().map(|index| self.trees[*index].current()).collect()
    }

    fn simplify(&mut self) -> bool {
        // It still fails, so the removal is kept.
        self.removed = None;
        self.attempt()
    }

    fn complicate(&mut self) -> bool {
        match self.removed.take() {
            Some((start, operations)) => {
                self.kept.splice(start..start, operations);
                // The restored sequence is known to fail. Continue from there.
                self.attempt();
                true
            }
            None if self.next < self.kept.len() => {
                if !self.trees[self.kept[self.next]].complicate() {
                    self.next += 1;
                    return self.attempt();
                }
                true
            }
            None => false,
        }
    }
}
