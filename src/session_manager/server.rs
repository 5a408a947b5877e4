//! The manager from start to end: flags, API server, certificate, webhook, election, controller.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use kube::runtime::events::{Recorder, Reporter};
use kube::runtime::watcher;
use kube::{Api, Client};
use tokio::runtime;
use tokio::sync::watch;

use super::args::Args;
use super::controller::{self, Context};
use super::lifetime::Lifetimes;
use super::metrics::Metrics;
use super::resolve::{self, Resolver};
use super::{clean_up, token};
use crate::kubernetes::leader::Election;
use crate::kubernetes::session::SnapshotSessionData;
use crate::kubernetes::{cache, client};
use crate::telemetry::http::{self, Pages};
use crate::telemetry::logs;
use crate::telemetry::shutdown::Shutdown;

/// Threads for requests and webhook.
const ASYNC_THREADS: usize = 2;
/// As whom events are written.
const REPORTER: &str = "csi-loopback-session-manager";

/// Serves until a signal has come.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    logs::init(args.log.clone())?;
    let runtime = runtime::Builder::new_multi_thread()
        .worker_threads(ASYNC_THREADS)
        .enable_all()
        .build()
        .context("starting the threads")?;
    let result = runtime.block_on(async {
        match args.clean_up {
            true => {
                let client =
                    client::connect_as_user(args.kubeconfig.as_deref(), args.rate()).await?;
                clean_up::run(&client).await
            }
            false => serve(args).await,
        }
    });
    runtime.shutdown_background();
    result.map(|()| ExitCode::SUCCESS)
}

async fn serve(args: Args) -> anyhow::Result<()> {
    let shutdown = Shutdown::on_signal(args.drain_timeout).context("watching for signals")?;
    let kubernetes = client::connect(args.kubeconfig.as_deref(), args.rate()).await?;
    let namespace = args.authority.namespace()?;
    let metrics = Metrics::new(|_| {});
    let context = Arc::new(context(&args, &kubernetes, &namespace, &metrics, &shutdown)?);
    serve_http(&args, &context, &shutdown).await?;
    let election = Election {
        leases: Api::namespaced(kubernetes.clone(), &namespace),
        name: args.lease.clone(),
        identity: identity(&args)?,
        duration: args.lease_duration,
    };
    tracing::info!(version = env!("CARGO_PKG_VERSION"), namespace, "managing snapshot sessions");
    lead(election.start(shutdown.clone()), context, &shutdown).await;
    tracing::info!("stopped");
    Ok(())
}

/// The name of the pod, which no other has, and what a restarted container does not have.
fn identity(args: &Args) -> anyhow::Result<String> {
    let random = token::new()?;
    let own = args.identity.as_deref().unwrap_or("manager");
    Ok(format!("{own}_{}", random.get(..8).unwrap_or_default()))
}

fn context(
    args: &Args,
    kubernetes: &Client,
    namespace: &str,
    metrics: &Metrics,
    shutdown: &Shutdown,
) -> anyhow::Result<Context> {
    let all = watcher::Config::default;
    let resolver = Resolver {
        snapshots: cache::of_all_namespaces(kubernetes, |_| None, shutdown.clone()),
        contents: cache::of_cluster(kubernetes, all(), |_| None, shutdown.clone()),
        configurations: cache::of_cluster(
            kubernetes,
            all(),
            resolve::driver_label,
            shutdown.clone(),
        ),
        all_configurations: Api::all(kubernetes.clone()),
    };
    let reporter = Reporter { controller: REPORTER.to_owned(), instance: args.identity.clone() };
    Ok(Context {
        requests: Api::all(kubernetes.clone()),
        resolver,
        data: cache::of_all_namespaces(
            kubernetes,
            |data: &SnapshotSessionData| Some((&data.spec.request.uid).into()),
            shutdown.clone(),
        ),
        lifetimes: Lifetimes::start(kubernetes, namespace, &args.config_map, shutdown.clone()),
        recorder: Recorder::new(kubernetes.clone(), reporter),
        metrics: metrics.clone(),
        ready_timeout: args.ready_timeout,
        resync: args.resync,
        client: kubernetes.clone(),
    })
}

/// Looks after requests while this process leads, until draining begins.
async fn lead(mut leads: watch::Receiver<bool>, context: Arc<Context>, shutdown: &Shutdown) {
    loop {
        let leading = *leads.borrow_and_update();
        context.metrics.leading(leading);
        let work = async {
            match leading {
                true => controller::run(context.clone()).await,
                false => std::future::pending().await,
            }
        };
        // What is under way when the lease is lost is dropped: each write names the version that it is for, and the next
        // leader goes on from what was written.
        tokio::select! {
            changed = leads.changed() => if changed.is_err() { return },
            () = work => tracing::error!("the watch of requests has ended; beginning anew"),
            () = shutdown.draining() => break,
        }
    }
    // Until the lease is given back.
    while leads.changed().await.is_ok() {}
}

async fn serve_http(
    args: &Args,
    context: &Arc<Context>,
    shutdown: &Shutdown,
) -> anyhow::Result<()> {
    let (metrics, ending, watched) = (context.metrics.clone(), shutdown.clone(), context.clone());
    let pages = Pages {
        health_path: "/health",
        health: Arc::new(move || match watched.lifetimes.is_known() {
            _ if ending.is_draining() => Err("the manager is exiting".into()),
            true => Ok(()),
            false => Err("the API server has not told the ConfigMap yet".into()),
        }),
        metrics: Some(("/metrics".into(), Arc::new(move || metrics.scrape()) as http::Scrape)),
    };
    let address = http::start(&args.http_endpoint, pages, shutdown.clone()).await;
    let address = address.context("--http-endpoint")?;
    tracing::info!(%address, "serving /health and /metrics");
    Ok(())
}
