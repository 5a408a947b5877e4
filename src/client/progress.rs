//! Progress on stderr: one line that appears when an operation takes longer than two seconds, with
//! rate and remaining time where the size is known. It appears only on a terminal and never with
//! `--quiet`.
//!
//! The line belongs to the terminal, so it is a global of the process. Output goes through
//! [`suspend`], which keeps it off the line.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use indicatif::{BinaryBytes, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// An operation that is shorter shows nothing.
const DELAY: Duration = Duration::from_secs(2);
const REDRAW: Duration = Duration::from_millis(200);

const WAITING: &str = "{msg} {elapsed}";
const COUNTED: &str =
    "{msg} {percent} %, {bytes} of {total_bytes}, {binary_bytes_per_sec}, {eta} left";
/// The bytes of data are in the prefix: the position is that in a volume, which may be sparse.
const DATA: &str = "{msg} {percent} %, {prefix}, {eta} left";

static LINE: Mutex<Option<Line>> = Mutex::new(None);
static QUIET: AtomicBool = AtomicBool::new(false);

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
    if let Some(Line { bar, .. }) = &*line() {
        if bar.length() != Some(total) {
            bar.set_length(total);
            bar.set_style(style(COUNTED));
        }
        bar.set_position(done);
    }
}

/// Reports how many bytes of data are done, and where in a volume of `total` bytes the work is.
pub fn report_data(data: u64, at: u64, total: u64) {
    if let Some(Line { bar, begun, .. }) = &*line() {
        if bar.length() != Some(total) {
            bar.set_length(total);
            bar.set_style(style(DATA));
        }
        let per_second = u128::from(data) * 1000 / begun.elapsed().as_millis().max(1);
        let per_second = BinaryBytes(u64::try_from(per_second).unwrap_or(u64::MAX));
        bar.set_prefix(format!("{} of data, {per_second}/s", BinaryBytes(data)));
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
        for template in [WAITING, COUNTED, DATA] {
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
}
