//! `delete`: the runtime behind deletes, and then the container's claims go.

use std::process::ExitCode;

use anyhow::Result;

use super::behind::{self, Behind};
use super::claim::{self, Claims, Container};
use super::config::Config;
use crate::crust::{Directory, Entry};

/// The volumes that a container has claimed.
pub fn claimed(config: &Config, container: &Container) -> Vec<Entry> {
    // Where there is no directory there is no claim; one that cannot be read is no reason to keep a container.
    let entries = Directory::new(&config.crust_dir).entries().unwrap_or_default();
    entries.into_iter().filter(|entry| claim::has(entry, container)).collect()
}

pub fn delete(behind: &Behind<'_>, container: &Container, claimed: &[Entry]) -> Result<ExitCode> {
    let status = behind.run()?;
    for entry in claimed {
        // A container that could not be deleted, since it runs, has its volumes still.
        if !status.success() && claim::lives(entry, container, behind.program) {
            continue;
        }
        if let Some(claims) = Claims::lock(entry, behind.program)? {
            claims.remove(container)?;
        }
    }
    Ok(behind::exit_code(status))
}
