//! The role from start to end.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use anyhow::Context as _;
use tonic::transport::Server;

use super::args::{Args, Layout as Choice};
use super::collect::{Collection, Gauges};
use super::layout::{Crust, Kata, Layout};
use super::program::Runner;
use super::service::{MAX_CALLS, Ops};
use super::turns::Turns;
use crate::crust::Directory;
use crate::grpc::call::Calls;
use crate::grpc::{reflection, serve, socket};
use crate::proto::crust::runtime_server::RuntimeServer;
use crate::telemetry::http::Pages;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::rounds;
use crate::telemetry::shutdown::Shutdown;

/// Threads that may block: a call each, and housekeeping, health and metrics.
const BLOCKING_THREADS: usize = MAX_CALLS + 4;
/// How often the time that a program may take a call waits for another one for the same target.
const PATIENCE: u32 = 2;

/// Serves until a signal has come and the running calls are done. What is handed over stays so.
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
    // Kept to the end: nobody else may serve the directory.
    let _served = layout.directory().serve().context(flag)?;
    let collection = Collection {
        layout: layout.clone(),
        turns: Turns::default(),
        age: collect_every,
        collected: Arc::new(AtomicU64::new(0)),
    };
    let metrics = Metrics::new(vec![Box::new(Gauges(collection.clone()))]);
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
    let ops = Ops::new(layout, collection.turns.clone(), calls.clone(), cli_timeout * PATIENCE);
    let round = move || collection.round();
    tokio::spawn(rounds::keep(collect_every, round, shutdown.clone()));
    let router = Server::builder().add_service(RuntimeServer::new(ops));
    let router = reflection::add(router, &["crust.Runtime"])?;
    serve::until_told(router, listener, &calls, &shutdown).await
}
