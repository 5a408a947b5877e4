//! The server from start to end: flags, API server, certificate, whom to believe, routes, election.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use k8s_openapi::api::authentication::v1::UserInfo;
use kube::{Api, Client};
use tokio::task::JoinHandle;

use super::args::Args;
use super::delta::{self, Deltas};
use super::discovery;
use super::endpoint::Endpoints;
use super::failure::Failure;
use super::front_proxy::FrontProxy;
use super::metrics::Metrics;
use super::routes::{self, Creates, routes};
use crate::kubernetes::api_service::CaBundle;
use crate::kubernetes::leader::{Election, own_name};
use crate::kubernetes::publish::keep;
use crate::kubernetes::snapshot_delta::VolumeSnapshotDelta;
use crate::kubernetes::tls::identity::Identity;
use crate::kubernetes::{https, tls};
use crate::telemetry::http::Pages;
use crate::telemetry::shutdown::Shutdown;

/// As whom fields of others' objects are written.
const MANAGER: &str = "csi-loopback-aggregated-api";

/// Serves until a signal has come.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    args.role.clone().run(|shutdown| serve(args, shutdown))
}

async fn serve(args: Args, shutdown: Shutdown) -> anyhow::Result<()> {
    let kubernetes = args.kubernetes.connect().await?;
    let namespace = args.tls.authority.namespace()?;
    let identity = args.tls.start("aggregated-api", &kubernetes, &shutdown).await?;
    let (metrics, (of_deltas, of_discovery)) = Metrics::new(|registry| {
        identity.register(registry);
        (delta::metrics::Metrics::new(registry), discovery::Metrics::new(registry))
    });
    let endpoints = Endpoints::new(kubernetes.clone(), &namespace, &args.service_account);
    let deltas = deltas(&args, &kubernetes, endpoints.clone(), of_deltas, &shutdown).await?;
    let front_proxy = FrontProxy::start(&kubernetes, shutdown.clone());
    let served = Served { front_proxy: front_proxy.clone(), metrics: metrics.clone(), deltas };
    let api = serve_api(&args, &kubernetes, identity, served, &shutdown).await?;
    args.role.serve_http(pages(front_proxy, metrics), &shutdown).await?;
    let election = Election {
        leases: Api::namespaced(kubernetes.clone(), &namespace),
        name: args.lease.clone(),
        identity: own_name(args.identity.as_deref().unwrap_or("server"))?,
        duration: args.lease_duration,
    };
    tracing::info!(version = env!("CARGO_PKG_VERSION"), namespace, "serving VolumeSnapshotDelta");
    let leads = election.start(shutdown.clone());
    let context = discovery::Context::new(kubernetes, endpoints, discovery::EVERY, of_discovery);
    discovery::run(leads, Arc::new(context), &shutdown).await;
    // Requests that run may end.
    api.await.context("the API")?;
    tracing::info!("stopped");
    Ok(())
}

/// Who answers.
async fn deltas(
    args: &Args,
    kubernetes: &Client,
    endpoints: Endpoints,
    metrics: delta::metrics::Metrics,
    shutdown: &Shutdown,
) -> anyhow::Result<Deltas> {
    // A rate of its own: a flood of requests does not keep the rest from the API server.
    let reviews = args.kubernetes.connect().await?;
    Ok(Deltas::new(delta::Settings {
        client: kubernetes.clone(),
        reviews,
        review_ttl: args.review_cache_ttl,
        endpoints,
        max_limit: args.max_limit,
        user_rate: args.user_rate(),
        rate: args.total_rate(),
        timeout: delta::TIMEOUT,
        metrics,
        shutdown: shutdown.clone(),
    }))
}

impl Creates for Deltas {
    async fn create(
        &self,
        user: &UserInfo,
        namespace: &str,
        asked: VolumeSnapshotDelta,
    ) -> Result<VolumeSnapshotDelta, Failure> {
        Deltas::create(self, user, namespace, asked).await
    }
}

/// What requests meet.
struct Served<C> {
    front_proxy: FrontProxy,
    metrics: Metrics,
    deltas: C,
}

/// Begins to serve the API and, with an authority of its own, to keep it known to the API server.
async fn serve_api<C: Creates>(
    args: &Args,
    kubernetes: &Client,
    identity: Identity,
    served: Served<C>,
    shutdown: &Shutdown,
) -> anyhow::Result<JoinHandle<()>> {
    let listener = tls::listen(args.port).await.with_context(|| format!("--port {}", args.port))?;
    let address = listener.local_addr()?;
    let config = tls::server_config_that_asks(&args.tls.files, identity.certificates, tls::HTTPS)?;
    let incoming = tls::incoming(listener, config, shutdown.clone());
    if let Some(trusted) = identity.trusted {
        let publication = CaBundle::new(&args.api_service, MANAGER);
        tokio::spawn(keep(kubernetes.clone(), publication, trusted, shutdown.clone()));
    }
    tracing::info!(%address, "serving the API");
    let Served { front_proxy, metrics, deltas } = served;
    let routes = routes(deltas, front_proxy, metrics, shutdown.clone());
    let (limits, refuse) = (routes::LIMITS, routes::refuse);
    Ok(tokio::spawn(https::serve_as(incoming, routes, limits, refuse, shutdown.clone())))
}

/// Health and metrics.
fn pages(front_proxy: FrontProxy, metrics: Metrics) -> Pages {
    let health = move || match front_proxy.is_known() {
        true => Ok(()),
        false => Err("it is not known yet whom to believe".into()),
    };
    Pages::new(Arc::new(health), Arc::new(move || metrics.scrape()))
}
