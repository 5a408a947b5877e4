//! The role from start to end.

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
use super::disk::Disk;
use super::events::Events;
use super::forward::Driver;
use super::host::Host;
use super::memory::Memory;
use super::message::Room;
use super::node::Proxy;
use super::pods::Pods;
use super::reports::{Conditions, Reports};
use crate::crust::Directory;
use crate::grpc::call::Calls;
use crate::grpc::{serve, socket};
use crate::telemetry::http::{HealthCheck, Pages};
use crate::telemetry::metrics::Metrics;
use crate::telemetry::rounds;
use crate::telemetry::shutdown::Shutdown;

/// Time between two looks at what the watch has told, at least.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// Time until what could not be asked is tried again.
const TRY_AGAIN: Duration = Duration::from_secs(5);

/// Serves until a signal has come and the running calls are done.
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
    let disk = Disk::open(Directory::new(state_dir)).context("--state-dir")?;
    let memory = Memory::open(disk);
    let reports = Reports::new(memory.clone());
    let collectors = (Box::new(reports.clone()), Box::new(Conditions(memory.clone())));
    let metrics = Metrics::with_names(vec![collectors.0], vec![collectors.1]);
    let client = cluster.connect().await?;
    let proxy = Proxy {
        driver: Driver::new(&driver_endpoint),
        memory: memory.clone(),
        pods: Pods::start(client.clone(), &node_name, pod_timeout, shutdown.clone()),
        host: Host::default(),
        events: Events::new(client, &node_name),
        reports,
        calls: Calls::new(metrics.clone()),
        metrics: metrics.clone(),
        room: Room::default(),
        room_for_answers: Room::default(),
    };
    role.serve_http(pages(&proxy.pods, metrics), &shutdown).await?;
    let path = endpoint.as_ref();
    let (listener, _guard) = socket::listen(path, socket_mode, None)?;
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        socket = %path.display(),
        driver = %driver_endpoint,
        node = node_name,
        "passing CSI calls on"
    );
    tokio::spawn(rounds::keep(collect_every, move || memory.collect(), shutdown.clone()));
    follow(&proxy, &shutdown);
    let calls = proxy.calls.clone();
    let every = move |request: Request<Body>| proxy.clone().handle(request);
    serve::each_until_told(every, listener, &calls, &shutdown).await
}

fn pages(pods: &Pods, metrics: Metrics) -> Pages {
    let pods = pods.clone();
    let ready: HealthCheck = Arc::new(move || match pods.is_live() {
        true => Ok(()),
        false => Err("the watch of pods does not run".into()),
    });
    // A state directory that cannot be used, or an API server that is away, is no reason to be ended.
    let health: HealthCheck = Arc::new(|| Ok(()));
    let checks = vec![("/readyz", ready)];
    Pages { checks, ..Pages::new(health, Arc::new(move || metrics.scrape())) }
}

/// Draws the consequences of what the watch tells, for as long as the process runs.
fn follow(proxy: &Proxy, shutdown: &Shutdown) {
    let Proxy { pods, host, events, reports, .. } = proxy.clone();
    let mut known = BTreeSet::new();
    tokio::spawn(at_each_change(pods.changes(), shutdown.clone(), async move || {
        if let Some(uids) = pods.opted_in() {
            for pod_uid in uids.difference(&known) {
                tracing::debug!(pod_uid, "a pod has opted in");
            }
            known = uids;
        }
        host.look(&pods, &events, &reports).await;
    }));
}

async fn at_each_change(
    mut changes: watch::Receiver<u64>,
    shutdown: Shutdown,
    mut look: impl AsyncFnMut(),
) {
    loop {
        look().await;
        sleep(LOOK_AGAIN).await;
        tokio::select! {
            _ = changes.changed() => {}
            () = sleep(TRY_AGAIN) => {}
            () = shutdown.ending() => return,
        }
    }
}
