//! Fail points: named positions between two steps that change disk, catalog or kernel. Release
//! builds have none: without the feature `failpoints` they compile to nothing. With it,
//! `--fail-points DIR` makes every point read the file `plan` in that directory:
//!
//! ```text
//! (absent or empty)    nothing happens, and the count is reset
//! kill N NAMES         at the N-th matching point the process kills itself (SIGKILL)
//! error N NAMES        the N-th matching point fails with EIO, like the step before it might
//! hang N NAMES         the N-th matching point waits until the plan changes
//! ```
//!
//! NAMES is a prefix of the names that match, or, with `!`, of the names that do not (`!page.`).
//! While there is a plan, the name of each matching point is appended to the file `met`; N = 0 only
//! records. So a test learns the points of an operation and their order, and can then fail it at
//! each of them. (The crate `fail` selects by name. Here the position in the sequence counts,
//! because one name, such as that of a commit, occurs many times within an operation.)

/// Reaches a fail point whose errors are `io::Error`.
#[cfg(not(any(feature = "testing", feature = "failpoints")))]
#[inline(always)]
pub fn hit(_name: &'static str) -> std::io::Result<()> {
    Ok(())
}

/// Reaches a fail point whose errors are `io::Error`.
#[cfg(any(feature = "testing", feature = "failpoints"))]
pub fn hit(name: &'static str) -> std::io::Result<()> {
    #[cfg(feature = "testing")]
    in_tests::hit()?;
    #[cfg(feature = "failpoints")]
    injected::hit(name)?;
    let _ = name;
    Ok(())
}

#[cfg(feature = "failpoints")]
pub use injected::watch;

/// Disables all points on the current thread: what it does in the background is no step of an
/// operation.
pub fn skip_on_this_thread() {
    #[cfg(feature = "failpoints")]
    injected::skip_on_this_thread();
}

/// Lets unit tests fail the points of the current thread, with or without the feature.
#[cfg(feature = "testing")]
pub mod in_tests {
    use std::cell::Cell;
    use std::io;

    thread_local! {
        static REMAINING: Cell<Option<usize>> = const { Cell::new(None) };
    }

    /// All points fail after this number of points, as after a crash; `None` disables this.
    pub fn fail_after(points: Option<usize>) {
        REMAINING.set(points);
    }

    pub(super) fn hit() -> io::Result<()> {
        match REMAINING.get() {
            None => Ok(()),
            Some(0) => Err(io::Error::from_raw_os_error(libc::EIO)),
            Some(remaining) => {
                REMAINING.set(Some(remaining - 1));
                Ok(())
            }
        }
    }
}

#[cfg(feature = "failpoints")]
mod injected {
    use std::cell::Cell;
    use std::fs::{self, File};
    use std::io::{self, Write};
    use std::path::PathBuf;
    use std::sync::{Mutex, OnceLock, PoisonError};
    use std::thread::sleep;
    use std::time::Duration;

    use nix::sys::signal::{Signal, raise};

    thread_local! {
        static SKIPPED: Cell<bool> = const { Cell::new(false) };
    }

    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    static PROGRESS: Mutex<Progress> = Mutex::new(Progress { plan: String::new(), met: 0 });

    /// Progress of the current plan.
    struct Progress {
        plan: String,
        met: usize,
    }

    /// Starts to follow the plan in `directory`.
    pub fn watch(directory: PathBuf) {
        // The first directory stays: a process has one flag.
        let _ = DIRECTORY.set(directory);
    }

    pub fn skip_on_this_thread() {
        SKIPPED.set(true);
    }

    /// Reaches a fail point whose errors are `io::Error`.
    pub fn hit(name: &'static str) -> io::Result<()> {
        let Some(directory) = DIRECTORY.get().filter(|_| !SKIPPED.get()) else { return Ok(()) };
        let mut progress = PROGRESS.lock().unwrap_or_else(PoisonError::into_inner);
        let plan = fs::read_to_string(directory.join("plan")).unwrap_or_default();
        if plan != progress.plan {
            *progress = Progress { plan, met: 0 };
        }
        let words: Vec<&str> = progress.plan.split_whitespace().collect();
        let &[action, at, names] = words.as_slice() else { return Ok(()) };
        let matches = match names.strip_prefix('!') {
            Some(excluded) => !name.starts_with(excluded),
            None => name.starts_with(names),
        };
        if !matches {
            return Ok(());
        }
        let (action, at) = (action.to_owned(), at.parse::<usize>());
        progress.met += 1;
        let met = File::options().create(true).append(true).open(directory.join("met"));
        met.and_then(|mut met| met.write_all(format!("{name}\n").as_bytes()))?;
        if at != Ok(progress.met) {
            return Ok(());
        }
        match action.as_str() {
            "hang" => {
                let plan = progress.plan.clone();
                drop(progress);
                while fs::read_to_string(directory.join("plan")).is_ok_and(|now| now == plan) {
                    sleep(Duration::from_millis(5));
                }
                return Ok(());
            }
            "kill" => raise(Signal::SIGKILL).map_err(io::Error::from)?,
            _ => {}
        }
        Err(io::Error::from_raw_os_error(libc::EIO))
    }
}
