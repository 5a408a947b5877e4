//! How far a backup or restore is: one line on stderr, for an operation of more than two seconds, on a terminal.

use std::io::{IsTerminal, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::client::format;
use crate::quantity;

const DELAY: Duration = Duration::from_secs(2);
const REDRAW: Duration = Duration::from_millis(200);

static LINE: Mutex<Option<Line>> = Mutex::new(None);

struct Line {
    what: &'static str,
    start: Instant,
    /// What was done before the first report: an operation that continues another.
    from: Option<u64>,
    drawn: Option<Instant>,
}

/// Shows progress until it is dropped.
pub struct Shown(());

pub fn start(what: &'static str) -> Shown {
    if std::io::stderr().is_terminal() {
        *line() = Some(Line { what, start: Instant::now(), from: None, drawn: None });
    }
    Shown(())
}

impl Drop for Shown {
    fn drop(&mut self) {
        if line().take().is_some_and(|line| line.drawn.is_some()) {
            eprint!("\r\x1b[K");
        }
    }
}

/// Reports how much is done, in bytes of the volume.
pub fn report(done: u64, total: u64) {
    let mut guard = line();
    let Some(line) = guard.as_mut() else { return };
    let from = *line.from.get_or_insert(done);
    let elapsed = line.start.elapsed();
    let is_due = line.drawn.is_none_or(|drawn| drawn.elapsed() >= REDRAW);
    if elapsed < DELAY || !is_due {
        return;
    }
    line.drawn = Some(Instant::now());
    let rate = u128::from(done - from.min(done)) * 1000 / elapsed.as_millis().max(1);
    let left = u128::from(total - done.min(total)).checked_div(rate).unwrap_or_default();
    let left = Duration::from_secs(u64::try_from(left).unwrap_or(u64::MAX));
    let mut err = std::io::stderr().lock();
    // A terminal that is gone is no reason to stop.
    let _ = write!(
        err,
        "\r{} {}, {}/s of the volume, {} left\x1b[K",
        line.what,
        format::percent(done, total),
        quantity::format(u64::try_from(rate).unwrap_or(u64::MAX)),
        humantime::format_duration(left)
    );
    let _ = err.flush();
}

fn line() -> MutexGuard<'static, Option<Line>> {
    LINE.lock().unwrap_or_else(PoisonError::into_inner)
}
