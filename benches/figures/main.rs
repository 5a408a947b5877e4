//! The benchmarks of hack/bench.sh: the figures of docs/design/performance.md, for the driver and
//! its peers in one run. The driver is the shipped binary. The benchmarks call its socket and read
//! its resource use from /proc.
//!
//! `figures [--quick] [--output DIR] [ROW…]`; the default is all rows. Needs root. The exit code is
//! 0 if every row ran; targets are reported and do not change it.

mod calls;
mod harness;
mod host_path;
mod kernel;
mod load;
mod peers;
mod raw;
mod records;
mod report;
mod rows;
mod stats;
mod subject;
mod writer;

use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::Instant;

use anyhow::{Result, anyhow};
use report::Report;

/// Settings of all rows.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Tiny sizes, to check that every row runs.
    pub quick: bool,
}

impl Options {
    /// The full size, or the size of the quick version.
    pub fn pick<T>(self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }
}

/// Measures one row, or several rows with a common setup.
type Measure = fn(Options, &mut Report) -> Result<()>;

const ROWS: [(&str, Measure); 22] = [
    ("idle", rows::memory::idle),
    ("delta", rows::ten::delta),
    ("snapshot", rows::ten::snapshot),
    ("large", rows::large::measure),
    ("sizes", rows::sizes::measure),
    ("stream", rows::stream::measure),
    ("memory", rows::memory::streaming),
    ("sidecar", rows::sidecar::measure),
    ("abuse", rows::sidecar::abuse),
    ("scale", rows::sidecar::scale),
    ("pods", rows::pods::measure),
    ("proxy", rows::proxy::measure),
    ("extents", rows::extents::measure),
    ("catalog", rows::catalog::measure),
    ("fio", rows::fio::measure),
    ("writers", rows::writers::measure),
    ("volumes", rows::writers::volumes),
    ("databases", rows::databases::measure),
    ("month", rows::month::measure),
    ("changes", rows::changes::measure),
    ("backup", rows::backup::measure),
    ("repository", rows::repository::measure),
];

struct Arguments {
    options: Options,
    output: PathBuf,
    rows: Vec<String>,
}

fn arguments() -> Result<Arguments, String> {
    let mut parsed = Arguments {
        options: Options { quick: false },
        output: PathBuf::from("target/bench"),
        rows: Vec::new(),
    };
    let mut given = std::env::args().skip(1);
    while let Some(argument) = given.next() {
        match argument.as_str() {
            // Cargo passes this flag to every benchmark.
            "--bench" => {}
            "--quick" => parsed.options.quick = true,
            "--output" => parsed.output = given.next().ok_or("--output: which directory?")?.into(),
            row if ROWS.iter().any(|(name, _)| *name == row) => parsed.rows.push(argument),
            other => {
                let names = ROWS.map(|(name, _)| name).join(", ");
                return Err(format!("unknown row {other:?}; rows: {names}"));
            }
        }
    }
    Ok(parsed)
}

fn main() -> ExitCode {
    let Arguments { options, output, rows } = match arguments() {
        Ok(arguments) => arguments,
        Err(error) => {
            eprintln!("figures: {error}");
            return ExitCode::from(2);
        }
    };
    let begun = Instant::now();
    let mut report =
        Report { machine: report::machine(), quick: options.quick, ..Report::default() };
    let mut failed = Vec::new();
    for (name, measure) in ROWS {
        if !rows.is_empty() && !rows.iter().any(|row| row == name) {
            continue;
        }
        let begun = Instant::now();
        println!("{name}");
        // The test harness panics on errors. The thread keeps a panic from ending the other rows.
        let run = || measure(options, &mut report);
        let measured = thread::scope(|scope| scope.spawn(run).join());
        if let Err(error) = measured.unwrap_or_else(|_| Err(anyhow!("the test harness panicked"))) {
            eprintln!("{name}: {error:#}");
            failed.push(name);
        }
        println!("  ({:.1} s)", begun.elapsed().as_secs_f64());
    }
    report.note(format!("the run took {:.0} s", begun.elapsed().as_secs_f64()));
    println!("\n{}", report.table());
    if let Err(error) = report.write(&output) {
        eprintln!("figures: writing to {}: {error:#}", output.display());
        return ExitCode::FAILURE;
    }
    println!("table.md and figures.json are in {}", output.display());
    match failed.as_slice() {
        [] => ExitCode::SUCCESS,
        failed => {
            eprintln!("figures: failed rows: {}", failed.join(", "));
            ExitCode::FAILURE
        }
    }
}
