//! Starts and serves the mode.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::sync::watch;
use tokio::time::sleep;
use tonic::body::Body;
use tonic::codegen::http::Request;

use super::args::Args;
use super::events::Events;
use super::forward::Driver;
use super::host_mounts::HostMounts;
use super::message::BufferLimit;
use super::pods::Pods;
use super::proxy::Proxy;
use super::reports::{Conditions, Reports};
use super::state_dir::StateDir;
use super::store::StateStore;
use crate::crust::Directory;
use grpc::call::Calls;
use grpc::{serve, socket};
use telemetry::http::{HealthCheck, Pages};
use telemetry::metrics::Metrics;
use telemetry::periodic;
use telemetry::shutdown::Shutdown;
use telemetry::task;

/// Minimum interval between two checks of the watched pods.
const MIN_INTERVAL: Duration = Duration::from_millis(100);
/// Interval of checks without a change, which retry failed lookups.
const MAX_INTERVAL: Duration = Duration::from_secs(5);

/// Serves until a termination signal, then finishes running calls.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    args.role.clone().run(|shutdown| start(args, shutdown))
}

async fn start(args: Args, shutdown: Shutdown) -> anyhow::Result<()> {
    let Args {
        cluster,
        endpoint,
        socket_mode,
        driver_endpoint,
        node_name,
        state_dir,
        pod_timeout,
        collect_every,
        role,
    } = args;
    let state_dir = StateDir::open(Directory::new(state_dir)).context("--state-dir")?;
    let store = StateStore::open(state_dir);
    let reports = Reports::new(store.clone());
    let collectors = (Box::new(reports.clone()), Box::new(Conditions(store.clone())));
    let metrics = Metrics::with_names(vec![collectors.0], vec![collectors.1]);
    let client = cluster.connect().await?;
    let proxy = Proxy {
        driver: Driver::new(&driver_endpoint),
        store: store.clone(),
        pods: Pods::start(client.clone(), &node_name, pod_timeout, shutdown.clone()),
        host_mounts: HostMounts::default(),
        events: Events::new(client, &node_name),
        reports,
        calls: Calls::new(metrics.clone()),
        metrics: metrics.clone(),
        request_limit: BufferLimit::default(),
        response_limit: BufferLimit::default(),
    };
    role.serve_http(pages(&proxy.pods, metrics), &shutdown).await?;
    let path = endpoint.as_ref();
    let (listener, _guard) = socket::listen(path, socket_mode, None)?;
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        socket = %path.display(),
        driver = %driver_endpoint,
        node = node_name,
        "forwarding CSI calls"
    );
    task::spawn(periodic::run(collect_every, move || store.collect(), shutdown.clone()));
    check_opt_ins(&proxy, &shutdown);
    let calls = proxy.calls.clone();
    let handle = move |request: Request<Body>| proxy.clone().handle(request);
    serve::raw_until_shutdown(handle, listener, &calls, &shutdown).await
}

fn pages(pods: &Pods, metrics: Metrics) -> Pages {
    let pods = pods.clone();
    let ready: HealthCheck = Arc::new(move || match pods.is_live() {
        true => Ok(()),
        false => Err("the watch of pods is not running".into()),
    });
    // An unusable state directory and an unavailable API server are no reasons to restart the
    // process.
    let health: HealthCheck = Arc::new(|| Ok(()));
    let checks = vec![("/readyz", ready)];
    Pages { checks, ..Pages::new(health, Arc::new(move || metrics.scrape())) }
}

/// Starts to check for new opt-ins after each change of the watched pods.
fn check_opt_ins(proxy: &Proxy, shutdown: &Shutdown) {
    let Proxy { pods, host_mounts, events, reports, .. } = proxy.clone();
    let mut known = BTreeSet::new();
    task::spawn(run_at_changes(pods.changes(), shutdown.clone(), async move || {
        if let Some(uids) = pods.opted_in() {
            for pod_uid in uids.difference(&known) {
                tracing::debug!(pod_uid, "a pod has opted in");
            }
            known = uids;
        }
        host_mounts.check_opt_ins(&pods, &events, &reports).await;
    }));
}

async fn run_at_changes(
    mut changes: watch::Receiver<u64>,
    shutdown: Shutdown,
    mut check: impl AsyncFnMut(),
) {
    loop {
        check().await;
        sleep(MIN_INTERVAL).await;
        tokio::select! {
            _ = changes.changed() => {}
            () = sleep(MAX_INTERVAL) => {}
            () = shutdown.ending() => return,
        }
    }
}
