//! `delete`: runs the next runtime, then removes the container's claims if the container has ended.

use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::claim::{self, Claims, Container};
use super::config::Config;
use super::handover;
use super::next_runtime::{self, NextRuntime};
use crate::crust::{Directory, Entry};

/// How long to wait for the end of the processes of a deleted container.
const END_TIMEOUT: Duration = Duration::from_secs(2);
const END_INTERVAL: Duration = Duration::from_millis(10);

/// The entries of the volumes that a container has claimed.
pub fn claimed(config: &Config, container: &Container) -> Vec<Entry> {
    // An unreadable directory or claim must not prevent the deletion of a container. A claim that
    // remains is ignored as soon as its process has ended.
    let entries = Directory::new(&config.crust_dir).entries().unwrap_or_default();
    entries.into_iter().filter(|entry| claim::has(entry, container).unwrap_or(false)).collect()
}

/// A claim remains as long as its container may live: it runs, or another process is still creating
/// it. A runtime's success proves nothing: with `--force` it also reports success for a container
/// that does not exist yet.
pub fn delete(
    config: &Config,
    next: &NextRuntime<'_>,
    container: &Container,
    claimed: &[Entry],
) -> Result<ExitCode> {
    let status = next.run()?;
    handover::remove_abandoned(&config.work_dir);
    let until = Instant::now() + END_TIMEOUT;
    for entry in claimed {
        let mut has_ended = claim::has_ended(entry, container, next.program);
        while !has_ended && status.success() && Instant::now() < until {
            sleep(END_INTERVAL);
            has_ended = claim::has_ended(entry, container, next.program);
        }
        if has_ended && let Some(claims) = Claims::lock(entry, next.program)? {
            // It may have been created again while this process waited for the lock.
            if claim::has_ended(entry, container, next.program) {
                claims.remove(container)?;
            }
        }
    }
    Ok(next_runtime::exit_code(status))
}
