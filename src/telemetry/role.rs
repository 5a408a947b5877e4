//! What every role that serves until a signal has: its logs, its HTTP endpoint, an orderly end, and the flags of these.

use std::future::Future;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;

use super::http::{self, Pages};
use super::logs;
use super::shutdown::{BLOCKING_THREADS, Shutdown, run_to_end};
#[cfg(feature = "failpoints")]
use crate::fail_point;

/// The flags. A role flattens them last: clap files what follows a heading under it.
#[derive(Debug, Clone, clap::Args)]
// Its group would have the name `RoleArgs` in each of them.
#[group(skip)]
#[command(next_help_heading = HEADING)]
pub struct RoleArgs {
    /// Serve /healthz, /health and /metrics on host:port or :port.
    #[arg(long, value_name = "ADDRESS")]
    pub http_endpoint: Option<http::Endpoint>,

    /// How long running calls may take after the first signal to stop.
    #[arg(long, default_value = "20s", value_parser = humantime::parse_duration, value_name = "TIME")]
    pub drain_timeout: Duration,

    /// Directory with a plan of where to be killed or to fail (fail_point).
    #[cfg(feature = "failpoints")]
    #[arg(long, value_name = "DIR")]
    pub fail_points: Option<std::path::PathBuf>,

    #[command(flatten)]
    pub log: logs::Args,
}

/// What the flags stand under in `--help`.
pub const HEADING: &str = "Process";

/// Where a role of a cluster has its HTTP endpoint by default; on a node it has none.
pub fn http_by_default(flag: clap::Arg) -> clap::Arg {
    flag.default_value(":8080")
}

impl RoleArgs {
    /// Runs `serve` in an asynchronous runtime until it ends, as it does some time after a signal.
    ///
    /// # Errors
    /// Those of `serve`; logs or threads cannot be had.
    pub fn run<F: Future<Output = anyhow::Result<()>>>(
        &self,
        serve: impl FnOnce(Shutdown) -> F,
    ) -> anyhow::Result<ExitCode> {
        self.run_blocking(BLOCKING_THREADS, serve)
    }

    /// The same for a role whose calls block threads: so many at most.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_blocking<F: Future<Output = anyhow::Result<()>>>(
        &self,
        threads: usize,
        serve: impl FnOnce(Shutdown) -> F,
    ) -> anyhow::Result<ExitCode> {
        logs::init(self.log.clone())?;
        #[cfg(feature = "failpoints")]
        self.fail_points.iter().cloned().for_each(fail_point::watch);
        let drain = self.drain_timeout;
        run_to_end(threads, async move {
            // First, so that a signal during a long start ends the process in order, too.
            serve(Shutdown::on_signal(drain).context("watching for signals")?).await
        })
    }

    /// Begins to serve the pages, where `--http-endpoint` asks for it. Health fails as soon as the process drains.
    ///
    /// # Errors
    /// The endpoint cannot be had.
    pub async fn serve_http(&self, mut pages: Pages, shutdown: &Shutdown) -> anyhow::Result<()> {
        let Some(endpoint) = &self.http_endpoint else { return Ok(()) };
        let (health, ending) = (pages.health, shutdown.clone());
        pages.health = Arc::new(move || match ending.is_draining() {
            true => Err("the process is exiting".into()),
            false => health(),
        });
        let address = http::start(endpoint, pages, shutdown.clone()).await;
        let address = address.context("--http-endpoint")?;
        tracing::info!(%address, "serving /healthz and metrics");
        Ok(())
    }
}
