//! A test binary whose tests share a cluster, which takes seconds to start: it is started when the first
//! test needs it and ended behind the last one, whatever became of them; a static would never end. Hence
//! `harness = false` in Cargo.toml, and what the binary takes and prints is libtest's.

use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use libtest_mimic::{Arguments, Failed, Trial};

use super::{Cluster, NoCluster};
use crate::support::why_no_root;

/// A promise, and what shows that it is kept.
pub type Test = (&'static str, fn(&Cluster));

/// The table of tests that are spread over modules: `MODULE: TEST TEST …;` and so on.
#[allow(unused_macros)] // Each test binary uses its own part.
macro_rules! of_modules {
    ($($module:ident: $($test:ident)*;)*) => { &[$($((stringify!($test), $module::$test),)*)*] };
}
#[allow(unused_imports)]
pub(crate) use of_modules;

/// Lines for hack/test.sh, told behind all tests: among them they could come to stand behind half of another.
static NOTES: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Says that the machine lacks what a test needs.
pub fn skip(test: &str, why: &str) {
    note(format!("SKIPPED: {test}: {why}"));
}

fn note(line: String) {
    NOTES.lock().unwrap_or_else(PoisonError::into_inner).push(line);
}

/// The `main` of such a binary.
pub fn run(tests: &[Test]) -> ExitCode {
    // The time of each test is told in any case; libtest_mimic does not know the flag that asks for it.
    let arguments = std::env::args_os().filter(|argument| argument != "--report-time");
    let mut arguments = Arguments::from_iter(arguments);
    // They share the machine's loop devices and load, and run one at a time. For that there is the lock;
    // on a thread other than the main one the line with a test's name is printed whole.
    arguments.test_threads = Some(2);
    let shared = Arc::new(Mutex::new(None));
    let trials = tests.iter().map(|(name, test)| {
        let (name, test, shared) = (*name, *test, Arc::clone(&shared));
        Trial::test(name, move || run_one(name, test, &shared))
    });
    let conclusion = libtest_mimic::run(&arguments, trials.collect());
    let cluster = shared.lock().unwrap_or_else(PoisonError::into_inner).take();
    drop(cluster);
    for line in NOTES.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        println!("{line}");
    }
    conclusion.exit_code()
}

type Shared = Mutex<Option<Result<Cluster, NoCluster>>>;

fn run_one(name: &str, test: fn(&Cluster), shared: &Shared) -> Result<(), Failed> {
    // A test that panicked has left the cluster as it is.
    let mut shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(why) = why_no_root() {
        skip(name, why);
        return Ok(());
    }
    match shared.get_or_insert_with(Cluster::start) {
        Ok(cluster) => {
            let started = Instant::now();
            test(cluster);
            note(format!("took {:.3} s: {name}", started.elapsed().as_secs_f64()));
            Ok(())
        }
        Err(NoCluster::Lacking(why)) => {
            skip(name, why);
            Ok(())
        }
        Err(NoCluster::Failed(why)) => Err(why.clone().into()),
    }
}
