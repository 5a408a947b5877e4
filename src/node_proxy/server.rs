//! The role from start to end.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use tokio::runtime;
use tonic::body::Body;
use tonic::codegen::http::Request;
use tonic::service::Routes;
use tonic::transport::Server;

use super::args::Args;
use super::forward::Driver;
use super::memory::Memory;
use super::node::Proxy;
use super::pods::Pods;
use super::reports::Reports;
use crate::crust::Directory;
use crate::grpc::call::Calls;
use crate::grpc::{serve, socket};
use crate::telemetry::http::{self, Pages};
use crate::telemetry::metrics::Metrics;
use crate::telemetry::shutdown::Shutdown;
use crate::telemetry::{logs, rounds};

/// Threads that serve connections.
const THREADS: usize = 2;

/// Serves until a signal has come and the running calls are done.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    logs::init(args.log.clone())?;
    let runtime = runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .enable_all()
        .build()
        .context("starting the threads")?;
    let result = runtime.block_on(start(args));
    runtime.shutdown_background();
    result.map(|()| ExitCode::SUCCESS)
}

async fn start(args: Args) -> anyhow::Result<()> {
    let Args {
        cluster,
        endpoint,
        socket_mode,
        driver_endpoint,
        node_name,
        state_dir,
        pod_timeout,
        collect_every,
        http_endpoint,
        drain_timeout,
        log: _,
    } = args;
    let shutdown = Shutdown::on_signal(drain_timeout).context("watching for signals")?;
    let directory = Directory::new(state_dir);
    // Kept to the end: nobody else may remember there.
    let _served = directory.serve().context("--state-dir")?;
    let memory = Memory::open(directory.clone()).context("--state-dir")?;
    let client = cluster.connect().await?;
    let reports = Reports::new(memory.clone());
    let proxy = Proxy {
        driver: Driver::new(&driver_endpoint),
        memory: memory.clone(),
        pods: Pods::start(&client, &node_name, pod_timeout, shutdown.clone()),
        reports: reports.clone(),
    };
    if let Some(endpoint) = http_endpoint {
        serve_http(&endpoint, directory.clone(), reports, &shutdown).await?;
    }
    let path = endpoint.as_ref();
    let (listener, _guard) = socket::listen(path, socket_mode, None)?;
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        socket = %path.display(),
        driver = %driver_endpoint,
        node = node_name,
        "passing CSI calls on"
    );
    let round = move || memory.collect().map(drop);
    tokio::spawn(rounds::keep(collect_every, round, shutdown.clone()));
    let every =
        move |request: Request<axum::body::Body>| proxy.clone().handle(request.map(Body::new));
    let routes = Routes::from(axum::Router::new().fallback(every));
    let router = Server::builder().add_routes(routes);
    let calls = Calls::new(Metrics::new(Vec::new()));
    serve::until_told(router, listener, &calls, &shutdown).await
}

async fn serve_http(
    endpoint: &http::Endpoint,
    directory: Directory,
    reports: Reports,
    shutdown: &Shutdown,
) -> anyhow::Result<()> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(reports));
    let scrape: http::Scrape = Arc::new(move || {
        let mut text = String::new();
        encode(&mut text, &registry)?;
        Ok(text)
    });
    let pages = Pages {
        health_path: "/healthz",
        health: Arc::new(move || directory.check().map_err(|problem| problem.to_string())),
        metrics: Some(("/metrics".into(), scrape)),
    };
    let address = http::start(endpoint, pages, shutdown.clone()).await;
    let address = address.context("--http-endpoint")?;
    tracing::info!(%address, "serving /healthz and /metrics");
    Ok(())
}
