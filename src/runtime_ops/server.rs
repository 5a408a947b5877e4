//! The role from start to end.

use std::process::ExitCode;

use super::args::Args;

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let _ = args;
    anyhow::bail!("not there yet")
}
