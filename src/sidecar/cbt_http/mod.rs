//! cbt-http (KEP-3314, VolumeSnapshotDelta): pages of changed blocks over HTTPS, for the aggregated API server, in the words of
//! [`crate::kubernetes::cbt_http`]. One of several replicas leads and asks the driver; the others pass requests on to it.
//! Pages are those of the driver's SnapshotMetadata service ([`streamed`]), or of its ListSnapshotDeltas where it lacks that
//! ([`listed`]). No state is kept between pages.

mod args;
mod blocks;
mod forward;
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
use rustls_pki_types::ServerName;
use tokio::task::JoinHandle;

use self::forward::{Leadership, Trust};
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

/// Where the HTTP endpoint says whether this replica leads.
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
    /// Whether this replica leads.
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
    let standing = standing(&start, address.port())?;
    let standing = tokio::spawn(stand(desk.clone(), standing, shutdown.clone()));
    let routes = routes::routes(desk.clone());
    let limits = routes::limits(args.timeout);
    tracing::info!(%address, "serving cbt-http");
    let leads: HealthCheck = Arc::new(move || match desk.known.get() {
        Some(known) if known.leadership.leads() => Ok(()),
        Some(_) => Err("another replica leads".into()),
        None => Err("the CSI driver's name is not known yet".into()),
    });
    let served = https::serve(incoming, routes, limits, shutdown.clone());
    let task = tokio::spawn(async move {
        served.await;
        // A panic is in the log already.
        let _ = standing.await;
    });
    Ok(Served { leads, task })
}

/// Makes a replica's part in the election of a driver with this name.
type Stand = Box<dyn FnOnce(&str) -> Leadership + Send>;

fn standing(start: &Start<'_>, port: u16) -> anyhow::Result<Stand> {
    let args = start.args.cbt_http.clone();
    let advertised = args.advertise_address.as_ref().map(|advertised| advertised.at(port));
    let identity = own_name(advertised.as_deref().unwrap_or("sidecar"))?;
    let host = args.service_address.as_ref().or(start.args.publish.service_address.as_ref());
    let host = host.map(|address| ServerName::try_from(address.host().to_owned())).transpose();
    let host = host.context("--cbt-http-service-address")?;
    let trust = start.identity.trust.clone().zip(host);
    let trust = trust.map(|(authorities, host)| Trust { authorities, host });
    if trust.is_none() || advertised.is_none() {
        tracing::warn!(
            "replicas cannot pass requests on to each other: that needs --cbt-http-advertise-address, \
             --cbt-http-service-address, and --self-signed or --service-ca (ca.crt beside --tls-cert)"
        );
    }
    let leases: Api<Lease> = Api::namespaced(start.kubernetes.clone(), start.namespace);
    let shutdown = start.shutdown.clone();
    Ok(Box::new(move |driver| {
        let election = Election {
            leases,
            name: args.lease(driver),
            identity: identity.clone(),
            duration: args.lease_duration,
        };
        Leadership::new(election.follow(shutdown), &identity, trust)
    }))
}

/// Takes part in the election as soon as the driver has said its name.
async fn stand(desk: Arc<Desk>, stand: Stand, shutdown: Shutdown) {
    let mut state = desk.driver.state();
    let known = state.wait_for(|state| matches!(state, Driver::Ready { .. }));
    let name = tokio::select! {
        known = known => match known.as_deref() {
            Ok(Driver::Ready { name, .. }) => name.clone(),
            _ => return,
        },
        () = shutdown.draining() => return,
    };
    let leadership = stand(&name);
    let mut leads = leadership.watch();
    let _ = desk.known.set(Known { driver: name, leadership });
    loop {
        desk.metrics.leading(*leads.borrow_and_update());
        if leads.changed().await.is_err() {
            return;
        }
    }
}
