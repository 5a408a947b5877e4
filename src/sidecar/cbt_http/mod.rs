//! cbt-http (KEP-3314, VolumeSnapshotDelta): pages of changed blocks over HTTPS, for the aggregated API server, in the words of
//! [`crate::kubernetes::cbt_http`]. One of several replicas leads and serves pages; the others refuse them and fail their readiness
//! probe ([`LEADER_PATH`]).
//! Pages are those of the driver's SnapshotMetadata service ([`streamed`]), or of its ListSnapshotDeltas where it lacks that
//! ([`listed`]). No state is kept between pages.

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

use self::routes::{Desk, Known};
use super::call::Calls;
use super::driver_link::{Driver, DriverLink};
use crate::kubernetes::leader::{Election, own_name};
use crate::kubernetes::review::Reviewer;
use crate::kubernetes::tls::identity::Identity;
use crate::kubernetes::{client, https, tls};
use crate::telemetry::http::HealthCheck;
use crate::telemetry::shutdown::Shutdown;

pub use args::Args;
pub use metrics::Metrics;

/// Path of the readiness probe at the HTTP endpoint: whether this replica leads and has a driver.
pub const LEADER_PATH: &str = "/cbt-http/leader";
/// Requests that are being checked or answered, at most.
const REQUESTS: usize = 1024;

/// What it stands on.
pub struct Start<'a> {
    pub args: &'a super::Args,
    pub kubernetes: &'a Client,
    /// The sidecar's own, in which the lease is.
    pub namespace: &'a str,
    pub driver: &'a DriverLink,
    pub identity: &'a Identity,
    pub metrics: &'a Metrics,
    pub shutdown: &'a Shutdown,
}

/// What is being served.
pub struct Served {
    /// Whether this replica leads and has a driver.
    pub leads: HealthCheck,
    /// Ends when draining is over and the lease is given back.
    pub task: JoinHandle<()>,
}

/// Begins to listen, to look for the driver's name and, from then on, to take part in the election.
///
/// # Errors
/// The port is taken, or what the flags name cannot be used.
pub async fn start(start: Start<'_>) -> anyhow::Result<Served> {
    let Start { args, driver, identity, metrics, shutdown, .. } = start;
    // A rate of its own: a flood of bad tokens does not keep the others from the API server.
    let asking = client::connect(args.kubeconfig.as_deref(), args.rate()).await?;
    let desk = Arc::new(Desk {
        driver: driver.clone(),
        reviewer: Reviewer::new(asking, args.review_cache_ttl),
        known: OnceLock::new(),
        requests: Calls::new(REQUESTS),
        pages: Calls::new(args.max_streams as usize),
        metrics: metrics.clone(),
        timeout: args.timeout,
        shutdown: shutdown.clone(),
    });
    let listener = tls::listen(args.cbt_http.port).await;
    let listener = listener.with_context(|| format!("--cbt-http-port {}", args.cbt_http.port))?;
    let address = listener.local_addr()?;
    let config = tls::server_config(&args.tls, identity.certificates.clone(), tls::HTTPS)?;
    let incoming = tls::incoming(listener, config, shutdown.clone());
    let election = tokio::spawn(elect(desk.clone(), candidate(&start)?, shutdown.clone()));
    let routes = routes::routes(desk.clone());
    let limits = routes::limits(args.timeout);
    tracing::info!(%address, "serving cbt-http");
    let leads: HealthCheck = Arc::new(move || desk.is_ready());
    let served = https::serve(incoming, routes, limits, shutdown.clone());
    let task = tokio::spawn(async move {
        served.await;
        // A panic is in the log already.
        let _ = election.await;
    });
    Ok(Served { leads, task })
}

/// What an election needs for a driver of this name.
type Candidate = Box<dyn FnOnce(&str) -> Election + Send>;

fn candidate(start: &Start<'_>) -> anyhow::Result<Candidate> {
    let args = start.args.cbt_http.clone();
    let identity = own_name("sidecar")?;
    let leases: Api<Lease> = Api::namespaced(start.kubernetes.clone(), start.namespace);
    Ok(Box::new(move |driver| Election {
        leases,
        name: args.lease(driver),
        identity,
        duration: args.lease_duration,
    }))
}

/// Takes part in the election as soon as the driver's name is known.
async fn elect(desk: Arc<Desk>, candidate: Candidate, shutdown: Shutdown) {
    let mut state = desk.driver.state();
    let known = state.wait_for(|state| matches!(state, Driver::Ready { .. }));
    let name = tokio::select! {
        known = known => match known.as_deref() {
            Ok(Driver::Ready { name, .. }) => name.clone(),
            _ => return,
        },
        () = shutdown.draining() => return,
    };
    let mut leads: watch::Receiver<bool> = candidate(&name).start(shutdown);
    let _ = desk.known.set(Known { driver: name, leads: leads.clone() });
    loop {
        desk.metrics.leading(*leads.borrow_and_update());
        if leads.changed().await.is_err() {
            return;
        }
    }
}
