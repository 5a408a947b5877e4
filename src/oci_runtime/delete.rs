//! `delete`: runs the next runtime, then removes the container's claims.

use std::process::ExitCode;

use anyhow::Result;

use super::claim::{self, Claims, Container};
use super::config::Config;
use super::next_runtime::{self, NextRuntime};
use crate::crust::{Directory, Entry};

/// The entries of the volumes that a container has claimed.
pub fn claimed(config: &Config, container: &Container) -> Vec<Entry> {
    // Without a directory there are no claims, and an unreadable one must not prevent the deletion
    // of a container.
    let entries = Directory::new(&config.crust_dir).entries().unwrap_or_default();
    entries.into_iter().filter(|entry| claim::has(entry, container)).collect()
}

pub fn delete(
    next: &NextRuntime<'_>,
    container: &Container,
    claimed: &[Entry],
) -> Result<ExitCode> {
    let status = next.run()?;
    for entry in claimed {
        // A container that could not be deleted because it runs keeps its volumes.
        if !status.success() && claim::is_running(entry, container, next.program) {
            continue;
        }
        if let Some(claims) = Claims::lock(entry, next.program)? {
            claims.remove(container)?;
        }
    }
    Ok(next_runtime::exit_code(status))
}
