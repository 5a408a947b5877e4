//! Fail points: named places between two steps that change disk, catalog or kernel. What ships has
//! none: without the feature `failpoints` they compile to nothing. With it `--fail-points DIR` makes
//! every point look at the file `plan` in that directory:
//!
//! ```text
//! (absent, or empty)   nothing happens, and the count begins anew
//! kill N NAMES         at the N-th such point from now on the process kills itself (SIGKILL)
//! error N NAMES        the N-th such point answers with EIO, as the step before it might have done
//! hang N NAMES         the N-th such point waits until the plan changes, so that a test can do something in between
//! ```
//!
//! NAMES is how the names begin that count, or how those begin that do not (`!page.`). While there is
//! a plan the name of each such point is appended to the file `met`; N = 0 does only that. So a test
//! learns which points an operation meets, in which order, and can then end or fail it at each. (The
//! crate `fail` acts by name; here what counts is the place in the sequence, since one name, such as
//! that of a commit, is met many times within one operation.)

/// Meets a point where errors are the kernel's.
#[cfg(not(any(test, feature = "failpoints")))]
#[inline(always)]
pub fn meet(_name: &'static str) -> std::io::Result<()> {
    Ok(())
}

/// Meets a point where errors are the kernel's.
#[cfg(any(test, feature = "failpoints"))]
pub fn meet(name: &'static str) -> std::io::Result<()> {
    #[cfg(test)]
    in_tests::meet()?;
    #[cfg(feature = "failpoints")]
    on_purpose::meet(name)?;
    let _ = name;
    Ok(())
}

#[cfg(feature = "failpoints")]
pub use on_purpose::watch;

/// Unit tests let the points of their own thread fail, with the feature or without.
#[cfg(test)]
pub mod in_tests {
    use std::cell::Cell;
    use std::io;

    thread_local! {
        static LEFT: Cell<Option<usize>> = const { Cell::new(None) };
    }

    /// After so many points all fail, as after a death; `None`: no more.
    pub fn fail_after(points: Option<usize>) {
        LEFT.set(points);
    }

    pub(super) fn meet() -> io::Result<()> {
        match LEFT.get() {
            None => Ok(()),
            Some(0) => Err(io::Error::from_raw_os_error(libc::EIO)),
            Some(left) => {
                LEFT.set(Some(left - 1));
                Ok(())
            }
        }
    }
}

#[cfg(feature = "failpoints")]
mod on_purpose {
    use std::fs::{self, File};
    use std::io::{self, Write};
    use std::path::PathBuf;
    use std::sync::{Mutex, OnceLock, PoisonError};
    use std::thread::sleep;
    use std::time::Duration;

    use nix::sys::signal::{Signal, raise};

    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    static PROGRESS: Mutex<Progress> = Mutex::new(Progress { plan: String::new(), met: 0 });

    /// How far the present plan has come.
    struct Progress {
        plan: String,
        met: usize,
    }

    /// From now on the plan in `directory` counts.
    pub fn watch(directory: PathBuf) {
        // The first one stays: there is one process, and one flag.
        let _ = DIRECTORY.set(directory);
    }

    /// Meets a point where errors are the kernel's.
    pub fn meet(name: &'static str) -> io::Result<()> {
        let Some(directory) = DIRECTORY.get() else { return Ok(()) };
        let mut progress = PROGRESS.lock().unwrap_or_else(PoisonError::into_inner);
        let plan = fs::read_to_string(directory.join("plan")).unwrap_or_default();
        if plan != progress.plan {
            *progress = Progress { plan, met: 0 };
        }
        let words: Vec<&str> = progress.plan.split_whitespace().collect();
        let &[what, at, names] = words.as_slice() else { return Ok(()) };
        let counts = match names.strip_prefix('!') {
            Some(others) => !name.starts_with(others),
            None => name.starts_with(names),
        };
        if !counts {
            return Ok(());
        }
        let (what, at) = (what.to_owned(), at.parse::<usize>());
        progress.met += 1;
        let met = File::options().create(true).append(true).open(directory.join("met"));
        met.and_then(|mut met| met.write_all(format!("{name}\n").as_bytes()))?;
        if at != Ok(progress.met) {
            return Ok(());
        }
        match what.as_str() {
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
