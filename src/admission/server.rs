//! The webhooks from start to end: flags, API server, certificate, policy.

use std::process::ExitCode;

use super::args::Args;
use crate::telemetry::logs;

/// Serves until a signal has come.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    logs::init(args.log.clone())?;
    anyhow::bail!("not built yet")
}
