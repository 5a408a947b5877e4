//! Shared by all roles that serve until a signal: flags, logs, HTTP endpoint, graceful shutdown.

use std::future::Future;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::http::{self, Pages};
use super::logs;
use super::shutdown::{BLOCKING_THREADS, Shutdown, run_to_end};
#[cfg(feature = "failpoints")]
use common::fail_point;

/// Flags of every role. A role must flatten them last, because clap lists the flags that follow a
/// heading under it.
#[derive(Debug, Clone, clap::Args)]
// The group would be named `RoleArgs` in each role.
#[group(skip)]
#[command(next_help_heading = HEADING)]
pub struct RoleArgs {
    /// Serve /healthz, /health and /metrics over HTTP on host:port or :port
    #[arg(long, value_name = "ADDRESS")]
    pub http_endpoint: Option<http::Endpoint>,

    /// How long running calls may take after the first termination signal
    #[arg(long, default_value = "20s", value_parser = humantime::parse_duration, value_name = "TIME")]
    pub drain_timeout: Duration,

    /// Directory with the plan of the fail points
    #[cfg(feature = "failpoints")]
    #[arg(long, value_name = "DIR")]
    pub fail_points: Option<std::path::PathBuf>,

    #[command(flatten)]
    pub log: logs::Args,
}

/// Heading of the flags in `--help`.
pub const HEADING: &str = "Process";

/// Sets the default HTTP endpoint of a cluster role; node roles have none.
pub fn http_by_default(flag: clap::Arg) -> clap::Arg {
    flag.default_value(":8080")
}

impl RoleArgs {
    /// Runs `serve` in a tokio runtime until it ends, which it does after a signal.
    ///
    /// # Errors
    /// Errors of `serve`; logging or threads cannot be started.
    pub fn run<F: Future<Output = anyhow::Result<()>>>(
        &self,
        serve: impl FnOnce(Shutdown) -> F,
    ) -> anyhow::Result<ExitCode> {
        self.run_blocking(BLOCKING_THREADS, serve)
    }

    /// The same for a role whose calls block threads, at most `threads`.
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
        raise_file_limit();
        let drain = self.drain_timeout;
        run_to_end(threads, async move {
            // First, so that a signal during a long start also ends the process gracefully.
            serve(Shutdown::on_signal(drain).context("failed to watch for signals")?).await
        })
    }

    /// Starts to serve the pages if `--http-endpoint` is set. Health fails as soon as the process
    /// drains.
    ///
    /// # Errors
    /// The process cannot listen on the endpoint.
    pub async fn serve_http(&self, mut pages: Pages, shutdown: &Shutdown) -> anyhow::Result<()> {
        let Some(endpoint) = &self.http_endpoint else { return Ok(()) };
        let (health, ending) = (pages.health, shutdown.clone());
        pages.health = Arc::new(move || match ending.is_draining() {
            true => Err("the process is shutting down".into()),
            false => health(),
        });
        let address = http::start(endpoint, pages, shutdown.clone()).await;
        let address = address.context("--http-endpoint")?;
        tracing::info!(%address, "serving /healthz and metrics");
        Ok(())
    }
}

/// Raises the limit of open files as far as permitted: a server has a file per connection, and a
/// delta over a long chain of snapshots keeps one file open per snapshot.
fn raise_file_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!(%error, "failed to raise the open file limit");
    }
}
