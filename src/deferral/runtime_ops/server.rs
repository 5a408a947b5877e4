//! Starts and serves the mode.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use anyhow::Context as _;
use tonic::transport::Server;

use super::args::{Args, Layout as Choice};
use super::collect::{EntryCollector, Gauges};
use super::layout::{Crust, Kata, Layout};
use super::locks::TargetLocks;
use super::program::Runner;
use super::service::{MAX_CALLS, Ops};
use crate::crust::Directory;
use grpc::call::Calls;
use grpc::proto::crust::runtime_server::RuntimeServer;
use grpc::{reflection, serve, socket};
use telemetry::http::Pages;
use telemetry::metrics::Metrics;
use telemetry::notify;
use telemetry::periodic;
use telemetry::shutdown::Shutdown;
use telemetry::task;

/// Threads for blocking work: one for each call, and for collector, health and metrics.
const BLOCKING_THREADS: usize = MAX_CALLS + 4;
/// Factor of --cli-timeout: how long a call waits for another call for the same target.
const LOCK_TIMEOUT_FACTOR: u32 = 2;

/// Serves until a termination signal, then finishes running calls. Entries remain.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    args.role.clone().run_blocking(BLOCKING_THREADS, |shutdown| serve(args, shutdown))
}

async fn serve(args: Args, shutdown: Shutdown) -> anyhow::Result<()> {
    let Args {
        endpoint,
        socket_mode,
        socket_group,
        layout,
        crust_dir,
        kata_dir,
        kata_runtime,
        kata_sandbox_dir,
        cli_timeout,
        cli_env,
        collect_every,
        role,
    } = args;
    let runner = Runner { timeout: cli_timeout, environment: cli_env };
    let (layout, flag): (Arc<dyn Layout>, _) = match layout {
        Choice::Crust => {
            (Arc::new(Crust { directory: Directory::new(crust_dir), runner }), "--crust-dir")
        }
        Choice::Kata => {
            let directory = Directory::new(kata_dir);
            let sandboxes = kata_sandbox_dir;
            let kata = Kata { directory, runner, program: kata_runtime, sandboxes };
            (Arc::new(kata), "--kata-dir")
        }
    };
    // Held until the process ends: no other crust_ops may use the directory.
    let _lock = layout.directory().lock().context(flag)?;
    let collector = EntryCollector {
        layout: layout.clone(),
        locks: TargetLocks::default(),
        age: collect_every,
        collected: Arc::new(AtomicU64::new(0)),
    };
    let metrics = Metrics::new(vec![Box::new(Gauges(collector.clone()))]);
    let calls = Calls::new(metrics.clone());
    let served = layout.clone();
    let health = move || served.directory().check().map_err(|problem| problem.to_string());
    let pages = Pages::new(Arc::new(health), Arc::new(move || metrics.scrape()));
    role.serve_http(pages, &shutdown).await?;
    let path = endpoint.as_ref();
    let (listener, _guard) = socket::listen(path, socket_mode, socket_group.as_deref())?;
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        directory = %layout.directory().root().display(),
        socket = %path.display(),
        "serving the Runtime API"
    );
    notify::ready();
    let ops =
        Ops::new(layout, collector.locks.clone(), calls.clone(), cli_timeout * LOCK_TIMEOUT_FACTOR);
    let round = move || collector.round();
    task::spawn(periodic::run(collect_every, round, shutdown.clone()));
    let router = Server::builder().add_service(RuntimeServer::new(ops));
    let router = reflection::add(router, &["crust.Runtime"])?;
    serve::until_shutdown(router, listener, &calls, &shutdown).await
}
