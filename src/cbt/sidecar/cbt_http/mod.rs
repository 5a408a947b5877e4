//! cbt-http (KEP-3314, VolumeSnapshotDelta): serves pages of changed blocks over HTTPS to the
//! aggregated API server, with the protocol of [`kubernetes::cbt_http`]. One of several
//! replicas leads and serves pages; the others refuse them and fail their readiness probe
//! ([`LEADER_PATH`]). In front of many nodes all replicas serve pages: each driver is called by one
//! sidecar at most, that of its node.
//!
//! Pages come from the driver's SnapshotMetadata service ([`streamed`]), or from ListSnapshotDeltas
//! if the driver lacks that service ([`listed`]). No state is kept between pages.

mod args;
mod blocks;
mod listed;
mod metrics;
mod pages;
mod problem;
mod routes;
mod streamed;

use std::sync::{Arc, OnceLock};

use anyhow::Context;
use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use self::routes::{KnownDriver, PageServer};
use super::call::ConcurrencyLimit;
use super::driver_link::{Driver, DriverLink};
use super::nodes::Remote;
use kubernetes::https::{self, Bounds};
use kubernetes::leader::{Election, candidate_name};
use kubernetes::review::Reviewer;
use kubernetes::tls::identity::Identity;
use kubernetes::{client, tls};
use telemetry::http::HealthCheck;
use telemetry::log_budget::LogBudget;
use telemetry::shutdown::Shutdown;
use telemetry::task;

pub use args::Args;
pub use metrics::Metrics;

/// HTTP path of the readiness probe: whether this replica leads and the driver is ready.
pub const LEADER_PATH: &str = "/cbt-http/leader";
/// Maximum number of requests in progress.
const REQUESTS: usize = 1024;
/// The name of the port in metrics.
const LISTENER: &str = "cbt_http";

/// What the server needs to start.
pub struct Start<'a> {
    pub args: &'a super::Args,
    pub kubernetes: &'a Client,
    /// Namespace of the sidecar and of the lease.
    pub namespace: &'a str,
    pub driver: &'a DriverLink,
    /// The drivers of many nodes, instead.
    pub remote: Option<Remote>,
    pub identity: &'a Identity,
    pub metrics: &'a Metrics,
    pub shutdown: &'a Shutdown,
}

/// The running server.
pub struct Served {
    /// Whether this replica leads and the driver is ready.
    pub leads: HealthCheck,
    /// Completes after draining, when the lease is released.
    pub task: JoinHandle<()>,
}

/// Starts to listen, waits for the driver's name, and then takes part in the election.
///
/// # Errors
/// The port is in use, or a value of a flag cannot be used.
pub async fn start(start: Start<'_>) -> anyhow::Result<Served> {
    let candidate = candidate(&start)?;
    let Start { args, driver, remote, identity, metrics, shutdown, .. } = start;
    // A separate rate limit: many invalid tokens do not delay other calls to the API server.
    let review_client = client::connect(args.kubeconfig.as_deref(), args.rate()).await?;
    let server = Arc::new(PageServer {
        driver: driver.clone(),
        remote,
        reviewer: Reviewer::new(review_client, args.review_cache_ttl),
        known: OnceLock::new(),
        requests: ConcurrencyLimit::new(REQUESTS),
        pages: ConcurrencyLimit::new(args.max_streams as usize),
        metrics: metrics.clone(),
        invalid_tokens: LogBudget::default(),
        timeout: args.timeout,
        bounds: Bounds::new(routes::limits(args.timeout), LISTENER),
        shutdown: shutdown.clone(),
    });
    let listener = tls::listen(args.cbt_http.port).await;
    let listener = listener.with_context(|| format!("--cbt-http-port {}", args.cbt_http.port))?;
    let address = listener.local_addr()?;
    let config = tls::server_config(&args.tls, identity.certificates.clone(), tls::HTTPS)?;
    let incoming = tls::incoming(listener, LISTENER, config, shutdown.clone());
    let election = task::spawn(elect(server.clone(), candidate, shutdown.clone()));
    let routes = routes::routes(server.clone());
    tracing::info!(%address, "serving cbt-http");
    let leads: HealthCheck = Arc::new(move || server.is_ready());
    let longest = routes::limits(args.timeout).request;
    let served = https::serve(incoming, routes, longest, shutdown.clone());
    let task = task::spawn(async move {
        served.await;
        // A panic is already in the log.
        let _ = election.await;
    });
    Ok(Served { leads, task })
}

/// Creates the election for a driver of this name; none in front of many nodes.
type Candidate = Box<dyn FnOnce(&str) -> Election + Send>;

fn candidate(start: &Start<'_>) -> anyhow::Result<Option<Candidate>> {
    if start.remote.is_some() {
        return Ok(None);
    }
    let args = start.args.cbt_http.clone();
    let identity = candidate_name("sidecar")?;
    let leases: Api<Lease> = Api::namespaced(start.kubernetes.clone(), start.namespace);
    Ok(Some(Box::new(move |driver| Election {
        leases,
        name: args.lease(driver),
        identity,
        duration: args.lease_duration,
    })))
}

/// Takes part in the election as soon as the driver's name is known.
async fn elect(server: Arc<PageServer>, candidate: Option<Candidate>, shutdown: Shutdown) {
    let mut state = server.driver.state();
    let known = state.wait_for(|state| matches!(state, Driver::Ready { .. }));
    let name = tokio::select! {
        known = known => match known.as_deref() {
            Ok(Driver::Ready { name, .. }) => name.clone(),
            _ => return,
        },
        () = shutdown.draining() => return,
    };
    let mut leads: watch::Receiver<bool> = match candidate {
        Some(candidate) => candidate(&name).start(shutdown),
        None => watch::channel(true).1,
    };
    let _ = server.known.set(KnownDriver { driver: name, leads: leads.clone() });
    loop {
        server.metrics.leading(*leads.borrow_and_update());
        if leads.changed().await.is_err() {
            return;
        }
    }
}
