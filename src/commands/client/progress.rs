//! Progress on stderr: one line that appears when an operation takes longer than two seconds, with
//! rate and remaining time where the size is known. It appears only on a terminal and never with
//! `--quiet`.
//!
//! A mover pod has no terminal: it reports its progress in lines of its log ([`report_lines`]), and
//! the command that waits for it shows them ([`show`]).
//!
//! The line belongs to the terminal, so it is a global of the process. Output goes through
//! [`suspend`], which keeps it off the line.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use common::quantity;

/// An operation that is shorter shows nothing.
const DELAY: Duration = Duration::from_secs(2);
const REDRAW: Duration = Duration::from_millis(200);

const WAITING: &str = "{msg} {elapsed}";
/// The bytes are in the prefix: the position is that in a volume, which may be sparse.
const COUNTED: &str = "{msg} {percent} %, {prefix}, {eta} left";

/// Beginning of a line with bytes of data, position and total.
const REPORT: &str = "csi-loopback-progress ";
/// Time between two of them.
const REPORTED: Duration = Duration::from_secs(5);

static LINE: Mutex<Option<Line>> = Mutex::new(None);
static QUIET: AtomicBool = AtomicBool::new(false);
/// When the last line was written by a process that reports in lines.
static LAST_REPORT: Mutex<Option<Instant>> = Mutex::new(None);

struct Line {
    bar: ProgressBar,
    begun: Instant,
    /// Ends the thread that waits for the delay.
    _shown: Sender<()>,
}

/// Shows progress until it is dropped.
#[derive(Debug)]
pub struct Shown {
    /// Not of an operation that is a part of another, whose line is shown.
    owns_line: bool,
}

/// Starts to show progress of `what`, such as "comparing", unless it is a part of an operation that
/// shows its progress already.
pub fn start(what: &'static str, quiet: bool) -> Shown {
    QUIET.store(quiet, Ordering::Relaxed);
    if quiet || !std::io::stderr().is_terminal() || line().is_some() {
        return Shown { owns_line: false };
    }
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
    bar.set_message(what);
    bar.set_style(style(WAITING));
    let (sender, receiver) = channel();
    thread::spawn({
        let bar = bar.clone();
        move || {
            if receiver.recv_timeout(DELAY) == Err(RecvTimeoutError::Timeout) {
                bar.set_draw_target(ProgressDrawTarget::stderr());
                bar.enable_steady_tick(REDRAW);
            }
        }
    });
    *line() = Some(Line { bar, begun: Instant::now(), _shown: sender });
    Shown { owns_line: true }
}

impl Drop for Shown {
    fn drop(&mut self) {
        if let Some(Line { bar, .. }) = self.owns_line.then(|| line().take()).flatten() {
            bar.finish_and_clear();
        }
    }
}

/// Reports how much is done, in bytes of a total.
pub fn report(done: u64, total: u64) {
    count(done, total, done, || {
        format!("{} of {}", quantity::format(done), quantity::format(total))
    });
}

/// Reports how many bytes of data are done, and where in a volume of `total` bytes the work is.
pub fn report_data(data: u64, at: u64, total: u64) {
    count(at, total, data, || format!("{} of data", quantity::format(data)));
}

/// Reports progress in lines on stderr from now on.
pub fn report_lines() {
    *last_report() = Some(Instant::now());
}

/// Whether a line is shown, or will be.
pub fn is_shown() -> bool {
    line().is_some()
}

/// Shows the progress that the last line of a log reports, if it does.
pub fn show(log: &str) {
    let last = log.lines().next_back().and_then(|last| last.strip_prefix(REPORT));
    let numbers: Option<Vec<u64>> =
        last.and_then(|last| last.split(' ').map(|number| number.parse().ok()).collect());
    if let Some(&[data, at, total]) = numbers.as_deref() {
        report_data(data, at, total);
    }
}

/// A log without the lines that report progress.
pub fn without_reports(log: &str) -> String {
    let others = log.lines().filter(|line| !line.starts_with(REPORT));
    others.collect::<Vec<_>>().join("\n")
}

fn last_report() -> MutexGuard<'static, Option<Instant>> {
    LAST_REPORT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets the position, and a text of it, before the rate of `bytes`.
fn count(at: u64, total: u64, bytes: u64, text: impl FnOnce() -> String) {
    if let Some(last) = last_report().as_mut().filter(|last| last.elapsed() >= REPORTED) {
        *last = Instant::now();
        eprintln!("{REPORT}{bytes} {at} {total}");
    }
    if let Some(Line { bar, begun, .. }) = &*line() {
        if bar.length() != Some(total) {
            bar.set_length(total);
            bar.set_style(style(COUNTED));
        }
        let per_second = u128::from(bytes) * 1000 / begun.elapsed().as_millis().max(1);
        let per_second = u64::try_from(per_second).unwrap_or(u64::MAX);
        bar.set_prefix(format!("{}, {}/s", text(), quantity::format(per_second)));
        bar.set_position(at);
    }
}

/// Writes a note to stderr, unless `--quiet` is set.
pub fn note(text: &str) {
    if !QUIET.load(Ordering::Relaxed) {
        suspend(|| eprintln!("csi-loopback: {text}"));
    }
}

/// Runs `write`, which writes to the terminal, without the line.
pub fn suspend<T>(write: impl FnOnce() -> T) -> T {
    let bar = line().as_ref().map(|line| line.bar.clone());
    match bar {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}

fn line() -> MutexGuard<'static, Option<Line>> {
    LINE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_templates_are_valid() {
        for template in [WAITING, COUNTED] {
            ProgressStyle::with_template(template).unwrap();
        }
    }

    #[test]
    fn without_a_terminal_progress_shows_nothing() {
        let shown = start("testing", true);
        report(1, 2);
        report_data(1, 2, 3);
        assert!(line().is_none());
        assert_eq!(suspend(|| 7), 7);
        drop(shown);
    }

    #[test]
    fn lines_that_report_progress_are_no_result() {
        let log = format!("note\n{REPORT}1 2 3\n{{\n  \"a\": 1\n}}\n{REPORT}4 5 6\n");
        assert_eq!(without_reports(&log), "note\n{\n  \"a\": 1\n}");
        // Without a line nothing is shown.
        for log in ["", "x", &log, &format!("{REPORT}1 2"), &format!("{REPORT}a b c")] {
            show(log);
        }
    }
}
